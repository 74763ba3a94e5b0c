"""Plan of `vlmrl eval`: which evaluations are made, under which names, with which images.

Two evaluations of the same thing agree on the facts of their identity.

With changed images (`--images`), only the model sees them. The reward, the task's metrics and the intervals get the row
as it is: they compare a response with the truth about the true images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl import __version__
from vlmrl.data.blinded_images import Blinding, ImageChange, ImagePlace, leaves_as_it_is, swap_images
from vlmrl.data.dataset import canonical_json
from vlmrl.errors import DataError, RecipeError, StoreError, listed
from vlmrl.evaluate.eval_rows import EvalRows
from vlmrl.evaluate.measures import chosen_measures
from vlmrl.evaluate.paired import scored_alike, scored_by
from vlmrl.evaluate.run import NumberedRow, Respond, Responses
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import EvalSetting
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards import reward_record
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.run_records import environment_record
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import condition_words, image_condition, names_a_step, read_summary
from vlmrl.store.metrics import encode
from vlmrl.tasks.prompt import same_prompt
from vlmrl.tasks.source import Source
from vlmrl.types import Row, SamplingParams

IDENTITY = (
    *("model", "endpoint", "checkpoint", "split", "source", "dataset", "reward", "prompt_sha256", "sampling"),
    *("max_rows", "seed", "images", "tools"),
)
"""Keys of `meta` that are equal in two evaluations of the same thing."""


def agrees_on(key: str, before: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
    """Return whether a fact of two evaluations is the same; rewards and prompts are compared by their identity."""
    if key == "reward":
        return scored_alike(before, meta) is True
    return same_prompt(_prompt(before), _prompt(meta)) if key == "prompt_sha256" else before.get(key) == meta.get(key)


def _prompt(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {"sha256": meta.get("prompt_sha256"), "earlier": meta.get("prompt_earlier")}


def _words(key: str, meta: Mapping[str, Any]) -> str:
    """Return a fact of `meta` for a message.

    A reward is shown by name, version and arguments, a dataset by its path, another table as a line of `name value`.
    """
    value = meta.get(key)
    if key == "reward" and isinstance(value, Mapping):
        return f"{scored_by(meta):.400}"
    if isinstance(value, Mapping):
        shown = value.get("path") or ", ".join(f"{name} {inner}" for name, inner in value.items())
        return f"{shown:.200}"
    return excerpt(str(value), 80)


def require_name(folder: Path, meta: Mapping[str, Any], force: bool) -> None:
    """Raise StoreError if the name belongs to an evaluation of training, or, without `force`, of something else.

    An evaluation of the same thing may be made again.
    """
    if not (folder / layout.EVAL_SUMMARY).is_file():
        return
    before = read_summary(folder).get("meta", {})
    if before.get("during"):
        raise StoreError(
            f"the evaluation `{folder.name}` was made by training", where=str(folder), hint="choose another --name"
        )
    other = [key for key in IDENTITY if not agrees_on(key, before, meta)]
    if other and not force:
        earlier = _words(other[0], before)
        raise StoreError(
            f"the evaluation `{folder.name}` exists and was made with another {other[0]}: {earlier}",
            where=str(folder),
            hint="choose another --name, or replace it with --force",
        )


GENERATION_KEY = "generation_sha256"
"""Key of `meta`: hash of the settings of model and engine that responses depend on and that have no key of their own.
"""
Meta = Mapping[str, Any]


def find_normal(run_dir: Path | None, name: str, meta: Meta, named: Path | None = None) -> Path | None:
    """Return the finished normal evaluation to compare with; None if there is none, so that it must be made.

    Args:
        run_dir: run in which an evaluation of the same thing is looked for, the one called `name` first.
        named: the evaluation that the user names.
    Raises: StoreError when the named one is missing, or is of something else.
    """
    if named is not None:
        _require_same(named, meta)
        return named
    folders = [] if run_dir is None else layout.eval_dirs(run_dir)
    for folder in sorted(folders, key=lambda folder: folder.name != name):
        try:
            before = read_summary(folder).get("meta") or {}
        except StoreError:
            continue
        if not before.get("during") and _difference_of(before, meta) is None:
            return folder
    return None


def _difference_of(before: Meta, meta: Meta) -> str | None:
    """Return the first key on which two evaluations differ; None if there is none.

    Args:
        before: of a finished evaluation; that of an endpoint has no dtype.
    """
    keys = (*IDENTITY, GENERATION_KEY, *(["dtype"] if before.get("dtype") else []))
    return next((key for key in keys if not agrees_on(key, before, meta)), None)


def _require_same(folder: Path, meta: Meta) -> None:
    before = read_summary(folder).get("meta") or {}
    if (change := image_condition(before)) is not None:
        raise StoreError(f"--normal {folder} was itself made {condition_words(change)}", where=str(folder))
    if key := _difference_of(before, meta):
        words = "setting of [model], or of rollout.engine, top_p, top_k or stop" if key == GENERATION_KEY else key
        raise StoreError(
            f"--normal {folder} was made with another {words}",
            where=str(folder),
            hint="leave out --normal: the normal evaluation is then made, too",
        )


class ShownRows:
    """Rows of a source as the model sees them.

    Args:
        change: of the images; None = the model sees the images as they are.
        seed: seed of random pixels, and of the choice of other rows.
        count: number of rows that are evaluated, from the first: images are shuffled among them.

    Attributes:
        source: the source for the model.
    """

    def __init__(self, original: Source, change: ImageChange | None, seed: int, count: int) -> None:
        self.original = self.source = original
        self._blinding = None
        if change is not None:
            rows: Sequence[Row] = original.rows
            swaps: Sequence[Sequence[ImagePlace]] = ()
            if change.kind == "shuffled":
                swaps = swap_images([rows[i].media for i in range(count)], seed)
            self._blinding = Blinding(original.dataset, rows, change, seed, swaps)
            self.source = replace(original, dataset=self._blinding.dataset)

    def answered(self, respond: Respond) -> Respond:
        """Return a function that takes and returns true rows, with the responses of `respond` to what the model sees.

        Args:
            respond: made for `self.source`.
        """
        blinding = self._blinding
        if blinding is None:
            return respond

        def responses(chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
            true_rows: dict[int, Row] = {}

            def shown() -> Iterator[Sequence[NumberedRow]]:
                for chunk in chunks:
                    true_rows.update(chunk)
                    yield [(number, blinding.row(number, row)) for number, row in chunk]

            for response in respond(shown()):
                if response is None:
                    yield None
                    continue
                number, rollout = response
                prompt = replace(rollout.prompt, source=self.original, row=true_rows.pop(number))
                yield number, replace(rollout, prompt=prompt)

        return responses


def require_images(source: Source, change: ImageChange, count: int) -> None:
    """Raise a DataError if the images of the first `count` rows cannot be changed, or would all stay as they are."""
    if change.kind == "shuffled":
        swap_images([source.rows[i].media for i in range(count)], 0)
    num_images = 0
    for i in range(count):
        for media in source.rows[i].media:
            if not leaves_as_it_is(change, media):
                return
            num_images += 1
    if not num_images:
        raise DataError(f"no row of `{source.name}` has an image: there is nothing for --images to change")
    raise DataError(
        f"no image of `{source.name}` is larger than {change.side} pixels, so --images {change} changes none",
        hint=f"give fewer pixels: --images low:{max(1, change.side // 4)}",
    )


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation.

    Args:
        temperature: of sampling; None = greedy.
        samples: responses per prompt.
        name: of the evaluation; None = composed of rows, checkpoint and sampling.
        force: replace an evaluation of that name even if it was of something else.
        changes: of the images; for each, there is an evaluation besides the normal one.
        normal: folder of the normal evaluation; None = that of the run if it exists, else it is made.
        tools: change of the tools; "off" or "blank" (see `with_changed_tools`), "" = they are as they are.
        setting, sampling: the one of `[eval.settings]` that is used, and its name; None = none of them.
    """

    temperature: float | None = None
    samples: int = 1
    name: str | None = None
    seed: int = 0
    force: bool = False
    changes: tuple[ImageChange, ...] = ()
    normal: Path | None = None
    tools: str = ""
    setting: str = ""
    sampling: EvalSetting | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature is None

    def under(self, name: str, setting: EvalSetting) -> EvalSettings:
        """Return the same settings under one of `[eval.settings]`."""
        temperature = setting.temperature or None
        return replace(self, temperature=temperature, samples=setting.samples, setting=name, sampling=setting)


@dataclass(frozen=True)
class PlannedEvaluation:
    """Evaluation that is still to be made.

    Args:
        meta: record of its model, rows, reward and sampling.
    """

    rows: EvalRows
    name: str
    meta: Mapping[str, Any]
    settings: EvalSettings
    change: ImageChange | None = None

    @property
    def responses(self) -> int:
        """Number of responses that it needs."""
        return self.rows.count * self.settings.samples


def chosen_settings(recipe: Recipe, settings: EvalSettings, names: Sequence[str] = ()) -> list[EvalSettings]:
    """Return the settings under which a recipe's rows are evaluated: one for each of `[eval.settings]`.

    It is `settings` alone if the recipe has none, or if the user gave a temperature.

    Args:
        names: the recipe's settings to use; () = all.
    Raises: RecipeError for a name that the recipe does not have, and for names together with a temperature.
    """
    known = recipe.eval.settings
    if names and settings.temperature is not None:
        raise RecipeError("--settings names settings of the recipe, and --sample makes another", hint="leave one out")
    for name in names:
        if name not in known:
            hint = listed(name, known, "its settings") if known else "add a table [eval.settings.NAME] to it"
            raise RecipeError(f"the recipe has no setting `{name}`", where="--settings", hint=hint)
    if settings.temperature is not None or not known:
        return [settings]
    return [settings.under(name, setting) for name, setting in known.items() if not names or name in names]


def plan(
    recipe: Recipe,
    origin: ModelOrigin,
    rows: Sequence[EvalRows],
    run_dir: Path | None,
    settings: EvalSettings | Sequence[EvalSettings],
    argv: Sequence[str] = (),
) -> list[PlannedEvaluation]:
    """Return the evaluations that will be made, for the rows of every source: the normal one, then changed images.

    Several settings are all used for the rows of a source, before those of the next one.

    Args:
        run_dir: the run whose folder they go to; None = a new run.
    Raises: before any work, StoreError when a name belongs to an evaluation of something else or to one of training,
        and RecipeError for measures that a task does not have.
    """
    every = [settings] if isinstance(settings, EvalSettings) else list(settings)
    given = every[0].name
    if given is not None and names_a_step(given):
        raise StoreError(f"training uses names like `{given}` for its own evaluations", hint="choose another --name")
    planned = []
    for one in rows:
        chosen_measures(recipe, one.source)
        for own in every:
            name = _name(recipe, own, origin, one, rows, len(every))
            planned_one = PlannedEvaluation(one, name, _meta(recipe, origin, one, own, argv), own)
            planned += _with_changes(planned_one, run_dir, own)
    if run_dir is not None:
        for one in planned:
            require_name(layout.eval_dir(run_dir, one.name), one.meta, one.settings.force)
    return planned


def _with_changes(normal: PlannedEvaluation, run_dir: Path | None, settings: EvalSettings) -> list[PlannedEvaluation]:
    """Return a normal evaluation, unless it exists, and those of the same rows with changed images.

    With changed tools, it is that evaluation alone: an engine knows one kind of episodes for a source.
    """
    if settings.tools:
        partner = find_normal(run_dir, normal.name, normal.meta, settings.normal)
        other = {} if partner is None else {"normal": partner.name if settings.normal is None else str(partner)}
        name = layout.eval_name(normal.name, f"tools-{settings.tools}")
        return [replace(normal, name=name, meta={**normal.meta, "tools": settings.tools, **other})]
    if not settings.changes:
        return [normal]
    for change in settings.changes:
        require_images(normal.rows.source, change, normal.rows.count)
    partner = find_normal(run_dir, normal.name, normal.meta, settings.normal)
    # The normal evaluation: its name in the same run, else its folder.
    label = normal.name if partner is None else partner.name if settings.normal is None else str(partner)
    changed = [
        replace(
            normal,
            name=layout.eval_name(normal.name, str(change)),
            meta={**normal.meta, "images": str(change), "normal": label},
            change=change,
        )
        for change in settings.changes
    ]
    return changed if partner is not None else [normal, *changed]


def with_changed_tools(rows: EvalRows, tools: str) -> EvalRows:
    """Return rows whose responses are one turn without tools (off), or whose tools return grey images (blank).

    Raises: RecipeError for a source without tools.
    """
    source = rows.source
    if source.environment is None:
        raise RecipeError(f"--tools {tools}: the responses to `{source.name}` have no tools", hint="leave --tools out")
    if tools == "off":
        return replace(rows, source=replace(source, environment=None))
    grey = source.environment_settings.model_copy(update={"grey_images": True})
    return replace(rows, source=replace(source, environment_settings=grey))


def params_of(recipe: Recipe, greedy: SamplingParams, settings: EvalSettings) -> SamplingParams:
    """Return the sampling parameters of an evaluation. `greedy`: those of a greedy one, with the recipe's limits."""
    if settings.sampling is not None:
        setting = settings.sampling
        limit = recipe.eval.token_limit(setting, recipe.rollout.max_new_tokens)
        greedy = replace(greedy, max_new_tokens=limit)
        if setting.temperature:
            greedy = replace(greedy, temperature=setting.temperature, top_p=setting.top_p, top_k=setting.top_k)
        return greedy
    if settings.temperature is None:
        return greedy
    return replace(greedy, temperature=settings.temperature, top_p=recipe.rollout.top_p, top_k=recipe.rollout.top_k)


def _name(
    recipe: Recipe,
    settings: EvalSettings,
    origin: ModelOrigin,
    rows: EvalRows,
    all_rows: Sequence[EvalRows],
    num_settings: int,
) -> str:
    source = rows.source
    if settings.name is not None:
        words = [settings.name]
        words += [source.name] if len({r.source.name for r in all_rows}) > 1 else []
        words += [source.split] if len({r.source.split for r in all_rows}) > 1 else []
        words += [settings.setting] if num_settings > 1 else []
        return settings.name if len(words) == 1 else layout.eval_name(*words)
    # Training names its own evaluations by split, source and step: `eval` in front keeps others on the same rows apart.
    is_trainings = rows.role == "validation" or source.split == "validation" or recipe.eval.sets
    words = [*(["eval"] if is_trainings else []), source.split, source.name]
    if origin.checkpoint is not None:
        words.append(origin.checkpoint.name)
    if settings.setting:
        words.append(settings.setting)
    elif settings.temperature is not None:
        words.append(f"T{settings.temperature:g}-n{settings.samples}")
    if rows.count < len(source.rows):
        words.append(f"first-{rows.count}")
    return layout.eval_name(*words)


def _meta(
    recipe: Recipe, origin: ModelOrigin, rows: EvalRows, settings: EvalSettings, argv: Sequence[str]
) -> dict[str, Any]:
    parent: Mapping[str, Any] = origin.parent or {}
    source, rollout = rows.source, recipe.rollout
    stops = list(rollout.stop)
    generation = [recipe.model.model_dump(mode="json"), rollout.engine, rollout.top_p, rollout.top_k, stops]
    return {
        "model": parent.get("run", origin.path),
        "checkpoint": origin.checkpoint.name if origin.checkpoint else None,
        "step": origin.step,
        **({"endpoint": origin.endpoint} if origin.endpoint else {}),
        "split": source.split,
        "role": rows.role,
        **({"shared": rows.shared} if rows.shared else {}),
        **({"file": rows.file} if rows.file else {}),
        "source": source.name,
        "task": source.task.name,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
        "entry": source.entry,
        "reward": {k: v for k, v in reward_record(source.reward, source.weights).items() if k != "args"},
        "reward_args": encode(dict(source.reward.args)),
        "prompt_sha256": source.prompt_sha256,
        "prompt_earlier": list(source.prompt_earlier),
        **({"environment": environment_record(source)} if source.environment else {}),
        **({"setting": settings.setting} if settings.setting else {}),
        "sampling": _sampling(recipe, settings),
        "greedy": settings.is_greedy,
        "max_rows": rows.max_rows,
        "seed": settings.seed,
        "dtype": recipe.model.dtype,
        GENERATION_KEY: hashlib.sha256(canonical_json(generation)).hexdigest()[:16],
        "paper": encode(dict(recipe.paper)),
        "vlmrl": __version__,
        "argv": list(argv),
    }


def _sampling(recipe: Recipe, settings: EvalSettings) -> dict[str, Any]:
    if settings.sampling is not None:
        return settings.sampling.record(recipe.eval.token_limit(settings.sampling, recipe.rollout.max_new_tokens))
    return {
        "greedy": settings.is_greedy,
        "temperature": settings.temperature,
        "samples": settings.samples,
        "max_new_tokens": recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens,
    }
