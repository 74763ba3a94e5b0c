"""Facts that `runs diagnose` reads: manifest, recipe, the valid metrics lines, and the rollouts of a few steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from vlmrl.algo.algorithms import algorithm_of
from vlmrl.environments.base import ERROR
from vlmrl.errors import StoreError, VlmrlError
from vlmrl.recipe.load import recipe_from_resolved
from vlmrl.recipe.schema import Recipe
from vlmrl.reward_check.responses import sampled_tokens
from vlmrl.rewards.identity import single_records
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import OneText, made_in_training, one_text, read_rows, read_summary
from vlmrl.store.kept_recipe import newest_resolved, read_resolved
from vlmrl.store.listing import reference
from vlmrl.store.manifest import Manifest
from vlmrl.store.metrics import counted
from vlmrl.store.rollouts import read_table, read_turns
from vlmrl.store.runs import Run
from vlmrl.store.verify import damage_of, shortened
from vlmrl.types import INAPPLICABLE, Status, name_row
from vlmrl.untrusted import parse_json

COLUMNS = (
    *("group", "source", "task", "prompt_id", "sample", "truth", "prompt_text", "text", "token_ids", "finish", "parts"),
    *("score", "note", "error", "status", "images", "segments", "turns", "ending"),
)
HASH = re.compile(r"[0-9a-f]{16}")
"""Pattern of the end of a prompt id that is a hash of its row's content."""
GRADIENT = "optim/grad_norm"
ANSWER_PARTS = ("accuracy", "answer", "correct", "correctness")
"""Usual names of the part that measures whether a response is right."""
MOST_STEPS = 8
"""Maximum number of steps whose rollouts are read: the first, the last and some in between.

The metrics of all steps are read, so that the step of a change can be found.
"""
MOST_SAMPLES_A_STEP = 4096

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response with its score.

    Args:
        step: training step, from 0 as in the metrics.
        group: number of the response's group, counted over all steps that were read.
        prompt: rendered prompt, special tokens included.
        tokens: number of tokens that the policy wrote, end tokens included.
        cut: whether the token limit ended the response, or a turn of it.
        images: content hashes of the prompt's images.
        pixels: number of pixels of each image, as stored.
        tool_errors: what an episode's tools answered to calls that failed.
    """

    step: int
    group: int
    source: str
    prompt_id: str
    sample: int
    truth: Mapping[str, Any]
    prompt: str
    text: str
    tokens: int
    cut: bool
    parts: Mapping[str, float | None]
    score: float
    note: str
    error: str | None
    status: Status
    images: tuple[str, ...]
    pixels: tuple[int, ...]
    tool_errors: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether the reward raised an error on the response. This is a bug in the reward."""
        return self.error not in (None, INAPPLICABLE) and self.status != "unavailable"

    @property
    def where(self) -> str:
        return f"step {counted(self.step)}, {name_row(self.source, self.prompt_id, self.sample)}"


def with_update(train: Sequence[Line]) -> list[Line]:
    """Return the train lines of steps that made an update.

    A step with only dead groups makes no update: it has no gradient norm, and its learning rate of 0 has no meaning.
    """
    return [line for line in train if line.get(GRADIENT) is not None]


def unbeaten_start(run: Run) -> Line | None:
    """Return the validation of the start weights (step 0) if there are later ones, and none of them is better.

    A checkpoint that equals the start is the best of the run (train/journal.py), but it shows no progress. A start
    that was validated by something else, before a change of the recipe, is not comparable.
    """
    lines, best = run.metrics("validation"), run.manifest.best
    if best is None or len(lines) < 2 or "best" in run.manifest.restarts_since(1):
        return None
    return next((line for line in lines if line["step"] == 0 and line.get("eval/metric") == best.value), None)


@dataclass
class RunFacts:
    """Facts of a run for the rules of `diagnose/run.py`. They come from its folder alone; no model or reward is loaded.

    Args:
        train, validation, events: the valid metrics lines of each kind, by step.
        responses: responses of the steps whose rollouts were read.
        steps_read, steps_saved: number of steps whose rollouts were read, and of steps that have rollouts.
        validated: `identity` of every row that was validated during training.
        same_answers: newest and best validation -> the text that nearly all of its answers are, where there is one.
        coordinates: evaluation -> `positions` of its summary (`Fit.fields`), where its boxes fit other coordinates.
        notes: messages about files that could not be read.
    """

    run: Run
    recipe: Recipe | None
    train: Sequence[Line]
    validation: Sequence[Line]
    events: Sequence[Line]
    responses: list[Response] = field(default_factory=list)
    steps_read: int = 0
    steps_saved: int = 0
    validated: set[tuple[str, ...]] = field(default_factory=set)
    same_answers: dict[str, OneText] = field(default_factory=dict)
    coordinates: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        return self.run.manifest

    @cached_property
    def updates(self) -> list[Line]:
        """Lines of the steps that made an update."""
        return with_update(self.train)

    def series(self, name: str) -> list[float]:
        """Return the finite values of a metric in step order. For `optim/...`, only steps with an update count."""
        lines = self.updates if name.startswith("optim/") else self.train
        values = (line.get(name) for line in lines)
        return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]

    def ends(self, name: str) -> tuple[float, float] | None:
        """Return the means over the first and the last third of the steps; None if fewer than three have the metric."""
        values = self.series(name)
        third = len(values) // 3
        return (fmean(values[:third]), fmean(values[-third:])) if third else None

    @cached_property
    def groups(self) -> list[list[Response]]:
        """Groups of responses. Responses whose reward failed, and then groups of a single response, are left out."""
        by_group: dict[int, list[Response]] = {}
        for response in self.responses:
            if response.error is None:
                by_group.setdefault(response.group, []).append(response)
        return [group for group in by_group.values() if len(group) > 1]

    @cached_property
    def dead(self) -> list[list[Response]]:
        """Groups whose scores are all equal and therefore teach nothing; none where only a teacher teaches."""
        if self.recipe is not None and self.recipe.kind == "rl" and algorithm_of(self.recipe.algo).advantage == "zero":
            return []
        return [g for g in self.groups if max(r.score for r in g) == min(r.score for r in g)]

    @cached_property
    def score_range(self) -> tuple[float, float]:
        """(Lowest, highest) score of the responses; (0, 0) if there are no scores."""
        scores = [r.score for r in self.responses if r.error is None]
        return min(scores, default=0.0), max(scores, default=0.0)

    @cached_property
    def part_names(self) -> list[str]:
        return list(dict.fromkeys(name for r in self.responses for name in r.parts))

    def part(self, name: str) -> list[float]:
        """Return the values of a part over the responses to which it applies."""
        return [v for r in self.responses if r.error is None and (v := r.parts.get(name)) is not None]

    def weights(self, source: str) -> dict[str, float]:
        """Return the weights of the parts for a source, from the manifest; {} if the manifest has none.

        Of several rewards, these are the weights in the sum; {} if one of them has no weights of its own.
        """
        record = next((one for one in self.manifest.rewards if one.get("source") == source), {})
        singles = single_records(record)
        if singles == [record]:
            return _numbers(record.get("weights"))
        weights: dict[str, float] = {}
        for single in singles:
            label, own = str(single.get("label")), _numbers(single.get("weights"))
            if not own:
                return {}
            names = {part: f"{label}.{part}" for part in own}
            named = {part: name if name in self.part_names else label for part, name in names.items()}
            weights |= {named[part]: float(single.get("weight", 1.0)) * weight for part, weight in own.items()}
        return weights

    def paid(self, source: str, name: str) -> bool:
        """Return whether the score depends on a part, as far as this is known: it has a weight, or it is a gate.

        Other parts are measured beside the reward. A part that the weights do not name has weight 0.
        """
        weights = self.weights(source)
        without = (r for r in self.responses if r.source == source and not (r.parts.get(name) or 0.0) > 0)
        return not weights or weights.get(name, 0.0) != 0 or not any(r.score > 0 for r in without)

    def most_possible(self, source: str) -> float | None:
        """Return the largest possible score of a source; None if the weights are not known.

        Each part is assumed to be at most 1. This holds for all built-in rewards.
        """
        weights = self.weights(source)
        if weights:
            return sum(w for w in weights.values() if w > 0)
        if any(record.get("source") == source and record.get("rewards") for record in self.manifest.rewards):
            return None
        # A user's reward without weights: `reward` is the score if this part exists, else all parts have weight 1.
        parts = [name for name in self.part_names if self.part(name)]
        if not parts or any(max(self.part(name)) > 1 for name in parts):
            return None
        return 1.0 if "reward" in parts else float(len(parts))

    @cached_property
    def parts(self) -> tuple[dict[str, float], dict[str, float]]:
        """(Trained, frozen) numbers of parameters by part of the model, as the run logged them at its start."""
        noted = [e for e in self.events if e.get("event") == "parts"]
        return (_numbers(noted[-1].get("trained")), _numbers(noted[-1].get("frozen"))) if noted else ({}, {})

    @property
    def key(self) -> str:
        """Name of the run in recommended commands; its path if it is not in the usual folder of runs."""
        at_home = layout.runs_root().resolve() == self.run.dir.parent.resolve()
        return reference(self.run.dir, self.manifest.name) if at_home else str(self.run.dir)

    @property
    def own_reward(self) -> bool:
        """Return whether the reward of at least one source is a user's function."""
        return any(".py:" in str(one.get("name")) for record in self.manifest.rewards for one in single_records(record))


def read_facts(run: Run) -> RunFacts:
    """Read all facts that the rules need.

    A file that is missing or damaged is left out, and a message about it is added to `notes`.

    Raises: StoreError if neither metrics nor rollouts of the run can be read.
    """
    notes = shortened(damage_of(run.dir), run.id)
    lines = [run.metrics(kind) for kind in ("train", "validation", "event")]
    facts = RunFacts(run, _recipe(run, notes), lines[0], lines[1], lines[2], notes=notes)
    files = run.rollout_files()
    facts.steps_saved = len(files)
    for step in spread_steps(sorted(files), MOST_STEPS):
        try:
            first = 1 + max((r.group for r in facts.responses), default=-1)
            facts.responses += read_responses(files[step], step, first)
            facts.steps_read += 1
        except VlmrlError as error:
            # The note below is more precise than the general one about the damaged file, which is removed.
            notes[:] = [note for note in notes if files[step].name not in note]
            notes.append(f"{files[step].name} was left out: {error.message}")
    facts.responses = _without_unpaid_formats(facts)
    facts.validated = _validated(run.dir, notes)
    facts.same_answers = _same_answers(run)
    coordinates: dict[str, Mapping[str, Any]] = {}
    for folder in layout.eval_dirs(run.dir):
        try:
            positions = read_summary(folder).get("positions") or {}
        except StoreError:
            continue
        if positions.get("better"):
            coordinates[folder.name] = positions
    facts.coordinates = coordinates
    return facts


def _without_unpaid_formats(facts: RunFacts) -> list[Response]:
    """Return the responses without format parts that are not `paid`: often, the prompt does not ask for the format."""
    sources, names = {r.source for r in facts.responses}, [n for n in facts.part_names if "format" in n.lower()]
    unpaid = {(source, name) for source in sources for name in names if not facts.paid(source, name)}
    vars(facts).pop("part_names", None)  # it is computed again without them
    return [
        replace(r, parts={n: v for n, v in r.parts.items() if (r.source, n) not in unpaid}) for r in facts.responses
    ]


def _numbers(weights: Any) -> dict[str, float]:
    items = weights.items() if isinstance(weights, Mapping) else ()
    return {str(name): float(weight) for name, weight in items if isinstance(weight, (int, float))}


def _recipe(run: Run, notes: list[str]) -> Recipe | None:
    try:
        return recipe_from_resolved(read_resolved(run.dir), where=str(newest_resolved(run.dir)))
    except VlmrlError as error:
        notes.append(error.message)
        return None


def spread_steps(steps: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` of the steps, evenly spread, with the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def read_responses(path: Path, step: int, first_group: int = 0, *, most: int = MOST_SAMPLES_A_STEP) -> list[Response]:
    """Read at most the first `most` responses of a step's rollouts; groups are numbered from `first_group`.

    Raises: StoreError if the file cannot be read.
    """
    table = read_table(path, COLUMNS).slice(0, most)
    lengths = [n for batch in table.to_batches() for n in sampled_tokens(batch).tolist()]
    responses = []
    for row, tokens in zip(table.drop_columns(["token_ids", "segments"]).to_pylist(), lengths, strict=True):
        observed = [turn.text for turn in read_turns(row["turns"]) if turn.errors]
        responses.append(
            Response(
                step,
                first_group + row["group"],
                row["source"],
                row["prompt_id"],
                row["sample"],
                parse_json(row["truth"]),
                row["prompt_text"],
                row["text"],
                tokens,
                row["finish"] == "length" and row["ending"] in (None, "turn cut"),
                parse_json(row["parts"]),
                row["score"],
                row["note"],
                row["error"],
                row["status"],
                tuple(image["sha256"] for image in row["images"]),
                tuple(image["width"] * image["height"] for image in row["images"]),
                tuple(line for text in observed for line in text.splitlines() if line.startswith(ERROR)),
            )
        )
    return responses


def _validated(run_dir: Path, notes: list[str]) -> set[tuple[str, ...]]:
    """Return the `identity` of every row that was validated during training."""
    identities: set[tuple[str, ...]] = set()
    read_names: set[str] = set()
    for folder in layout.eval_dirs(run_dir):
        name = folder.name.rpartition("-step-")[0]  # all steps validate the same rows
        # `vlmrl eval` may use any rows, also those of the training.
        if not name or name in read_names or not made_in_training(folder):
            continue
        read_names.add(name)
        try:
            table = read_rows(folder / layout.EVAL_ROWS, ["prompt_id", "images"])
            identities |= {identity(r["prompt_id"], [i["sha256"] for i in r["images"]]) for r in table.to_pylist()}
        except StoreError as error:
            notes.append(f"the validation {folder.name} cannot be read: {error.message}")
    return identities


def _same_answers(run: Run) -> dict[str, OneText]:
    """Return `RunFacts.same_answers`. A validation that cannot be read is left out."""
    folders = [folder for folder in layout.eval_dirs(run.dir) if made_in_training(folder)]
    newest = {folder.name.rpartition("-step-")[0]: folder for folder in folders}
    best = run.manifest.best and f"-{layout.step_name(run.manifest.best.step)}"
    chosen = dict.fromkeys([*newest.values(), *(f for f in folders if best and f.name.endswith(best))])
    same: dict[str, OneText] = {}
    for folder in chosen:
        try:
            table = read_rows(folder / layout.EVAL_ROWS, ["text", "truth"])
        except StoreError:
            continue
        if one := one_text(*(table[name].to_pylist() for name in ("text", "truth"))):
            same[folder.name] = one
    return same


def identity(prompt_id: str, images: Sequence[str]) -> tuple[str, ...]:
    """Return a key that is equal for two equal rows: the id without the name of the source, and the images.

    An id that does not end with a hash was given by the user. It is used whole.
    """
    last = prompt_id.rpartition("-")[2]
    return (last if HASH.fullmatch(last) else prompt_id, *images)
