"""Checks of the rows that a recipe names: every truth, images of a sample, rewards, overlap of splits, declared boxes.

What a recipe evaluates during training is checked, too: its sets, and the metric that selects the best checkpoint. The
declared coordinate space of boxes is compared with their numbers, and with that of the model family's published
weights.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vlmrl.data.dataset import content_hash
from vlmrl.environments.calls import turn_text
from vlmrl.errors import DataError, Problem, RewardError, RewardUnavailable, VlmrlError, listed, problems_in
from vlmrl.metric import metric_facts
from vlmrl.recipe.checks import check_recipe
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.eval import wrong_goal
from vlmrl.recipe.rules.files import blames_reward, is_file_reward
from vlmrl.recipe.rules.training import overridden_row
from vlmrl.recipe.schema import Data, Recipe, Reward
from vlmrl.recipe.tables import AUTO, is_test_split
from vlmrl.rewards.base import NO_PLACE, NO_REWARD, ServicePlace, accuracy_part, earned_on_timeout, with_accuracy
from vlmrl.rewards.boxes.planes import MEANINGS
from vlmrl.rewards.boxes.reading import Coordinates
from vlmrl.rewards.scoring import Scorer
from vlmrl.rewards.several import declared_parts, weights_of_parts
from vlmrl.setup.catalogs import catalogs
from vlmrl.setup.prompts import (
    PromptScan,
    TruthScan,
    differing_parts,
    examples,
    examples_and_export,
    named,
    paid,
    prompt_text,
    searched,
    trial_of,
    unpaid,
)
from vlmrl.store.layout import CHECKED
from vlmrl.tasks.attack import responding
from vlmrl.tasks.base import Task
from vlmrl.tasks.positions import Fit, caption_of, save_overlays
from vlmrl.types import Message, RewardInput, Row, Score, Turn

if TYPE_CHECKING:
    from vlmrl.data.encode import Encoder
    from vlmrl.rewards.boxes.planes import Space
    from vlmrl.tasks.source import Source


QUICK_ROWS = 256
SCAN_SECONDS = 120.0
SAMPLE_ROWS = 48
REWARD_ROWS = 16
STAND_IN_REWARD = "exact_match"


@dataclass
class Entry:
    """One opened `[[data]]` entry.

    Args:
        where: place of the entry in the recipe.
        validation: source of its validation rows; None = it has none. With `eval.sets`: of the set that selects.
        others: sources of the other sets that it has.
        reward_ok: False if its reward could not be loaded. A placeholder then scores, and its scores have no meaning.
    """

    where: str
    train: Source
    validation: Source | None
    reward_ok: bool
    others: tuple[Source, ...] = ()


@dataclass
class Opened:
    """Entries that could be opened, and the problems of the others."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass
class RowScan:
    """Result of reading a source's rows.

    Args:
        rows: number of rows in the split.
        seen: number of rows that were read.
        contents: `row_content` of each row that was read -> id of the first row with this content.
        images: content hashes of the images of these rows.
        repeated: number of rows whose content equals that of an earlier row.
        bare: places of the rows without images.
    """

    rows: int
    seen: int = 0
    contents: dict[bytes, str] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    repeated: int = 0
    bare: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def first_errors(loaded: LoadedRecipe) -> list[Problem]:
    """Return the errors of a recipe, and of opening its data and rewards. No large library is needed for them."""
    problems = [p for p in check_recipe(loaded, catalogs()) if p.level == "error"]
    known = {p.where for p in problems} | {p.message for p in problems}
    return problems + [p for p in open_sources(loaded, problems).problems if not known & {p.where, p.message}]


def open_sources(loaded: LoadedRecipe, reported: Sequence[Problem] = ()) -> Opened:
    """Open every `[[data]]` entry and its validation rows; each one that cannot be opened becomes a problem.

    Args:
        reported: problems of the recipe itself; what they say of a reward, task, environment, prompt or columns is not
            said again.
    """
    opened = Opened()
    seen: dict[str, int] = {}
    bad_reward, wrong = blames_reward(loaded, reported), {p.where for p in reported if p.level == "error"}
    for i, data in enumerate(loaded.recipe.data):
        needed = [("task",)] * is_file_reward(data.task) + [("prompt",)] * (data.prompt is not None)
        needed += [("columns", *role) for role in [(), *((name,) for name in data.columns)] if data.columns]
        places = {loaded.where(("data", i, *key)) for key in needed}
        if data.own_environment is not None:
            own = ("data", i, "environment") if data.environment is not None else ("environment", "name")
            places.add(loaded.where(own))
        if places & wrong:
            continue
        entry = _open(data, loaded.recipe, loaded.where(("data", i, "path")), opened.problems, bad_reward)
        if entry is None:
            continue
        opened.entries.append(entry)
        name = entry.train.name
        if name in seen:
            hint = "metrics and rollouts are kept apart by name: give each [[data]] a `name` of its own"
            message = f"data sources {seen[name]} and {i} are both called `{name}`"
            opened.problems.append(Problem(message, loaded.where(("data", i, "name"), ("data", i, "path")), hint))
        seen.setdefault(name, i)
    return opened


def _open(data: Data, recipe: Recipe, where: str, problems: list[Problem], bad_reward: bool) -> Entry | None:
    """Open one entry, and its validation rows if the recipe validates, even if its reward cannot be loaded.

    Args:
        bad_reward: whether the error of a reward that cannot be loaded is already reported.
    """
    from vlmrl.tasks.source import VALIDATION, open_set, open_source, open_validation, scores_responses

    train = None
    reward = recipe.reward
    reward_ok, scored = True, scores_responses(recipe)
    try:
        train = open_source(data, reward, scored=scored)
        reward_ok = train.reward is not NO_REWARD
    except VlmrlError as error:
        reward_ok = False
        with suppress(VlmrlError):
            data, reward = data.model_copy(update={"reward": STAND_IN_REWARD, "rewards": []}), Reward()
            train = open_source(data, reward)
        if train is None or not bad_reward:
            problems += problems_in(error, where)
    if train is None:
        return None
    opened: dict[str, Source] = {}
    for name in (recipe.eval.sets or [VALIDATION]) if recipe.eval.enabled else ():
        try:
            opens = partial(open_set, name=name) if recipe.eval.sets else open_validation
            source = opens(data, reward, scored=scored)
        except VlmrlError as error:
            problems += problems_in(error, where)
            continue
        opened |= {name: source} if source else {}
    selecting = next((n for n, s in opened.items() if not (recipe.eval.sets and is_test_split(s.split))), None)
    others = tuple(source for name, source in opened.items() if name != selecting)
    return Entry(where, train, opened[selecting] if selecting else None, reward_ok, others)


def scan_rows(source: Source, where: str, *, limit: int | None = None, prompts: PromptScan | None = None) -> RowScan:
    """Validate the truth of every row (or of `limit` rows spread evenly), and collect contents and image hashes.

    Reading stops after SCAN_SECONDS; `RowScan.seen` is the number of rows read.

    Args:
        prompts: if given, it also checks the prompt of each row.
    """
    scan = RowScan(len(source.rows))
    bad: list[tuple[str, str]] = []
    truths = TruthScan()
    start = time.monotonic()
    for index in spread(scan.rows, limit or scan.rows):
        if time.monotonic() - start > SCAN_SECONDS:
            break
        scan.seen += 1
        try:
            row = source.rows[index]
        except VlmrlError as error:
            bad.append((error.where or f"row {index}", error.message))
            continue
        content = row_content(row)
        scan.repeated += content in scan.contents
        scan.contents.setdefault(content, row.prompt_id)
        scan.images.update(media.sha256 for media in row.media)
        scan.bare += [] if row.media else [row.place]
        truths.look(row)
        bad += [(row.place, words) for words in source.task.validate(row.truth)]
        if source.environment is not None:
            try:
                source.environment.of(row)
            except VlmrlError as error:
                bad.append(named(row, error))
        if scan.seen == 1 and source.task.unit is not None:
            source.task.unit(row)  # so that an error is raised now, not after a whole evaluation
        if prompts is not None:
            prompts.look(row)
    if bad:
        rows = len({name for name, _ in bad})
        message = f"{rows:,} of {scan.seen:,} rows of `{source.name}` ({source.split}) are not valid"
        scan.problems.append(Problem(message, where, examples_and_export(source, bad)))
    scan.problems += truths.problems(source, where) if source.reward is not NO_REWARD else []
    scan.problems += prompts.problems(where) if prompts is not None else []
    if scan.repeated:
        message = f"{scan.repeated:,} rows of `{source.name}` ({source.split}) repeat an earlier row exactly"
        scan.problems.append(Problem(message, where, "they count twice in every epoch", "warning"))
    return scan


def check_pictured(loaded: LoadedRecipe, source: Source, scan: RowScan, where: str) -> list[Problem]:
    """Return an error if the recipe's algorithm masks images and training rows of a scan have none."""
    algorithm = overridden_row(loaded)
    if algorithm is None or not algorithm.masks or not scan.bare:
        return []
    what = "no row" if len(scan.bare) == scan.seen else f"{len(scan.bare):,} of {scan.seen:,} rows"
    have = "has an image" if what == "no row" else "have no image"
    message = f"{what} of `{source.name}` ({source.split}) {have}, and {algorithm.name} masks images"
    hint = f"leave them out, or use another algo.name; {examples([(place, 'no image') for place in scan.bare])}"
    return [Problem(message, where, hint)]


def row_content(row: Row) -> bytes:
    """Return a hash of the content of a row, without its id and source."""
    return content_hash(row.media, row.columns, row.truth)


def check_overlap(name: str, split: str, train: RowScan, other: RowScan, where: str) -> list[Problem]:
    """Return warnings about rows or images of the training split that are also in a split for evaluation."""
    problems = []
    rows, images = train.contents.keys() & other.contents.keys(), train.images & other.images
    if rows:
        message = f"{len(rows):,} of {other.seen:,} {split} rows of `{name}` are training rows too"
        hint = f"the {split} metrics will be too high; first: {min(other.contents[content] for content in rows)}"
        problems.append(Problem(message, where, hint, "warning"))
    elif images:
        message = f"{len(images):,} of {len(other.images):,} {split} images of `{name}` are training images too"
        hint = f"the model may have memorized them; first: sha256 {min(images)[:12]}"
        problems.append(Problem(message, where, hint, "warning"))
    return problems


def check_images(source: Source, where: str, *, rows: int = SAMPLE_ROWS) -> list[Problem]:
    """Decode the images of a sample of rows, and return the problems and the notes from rendering their prompts."""
    bad = _failing(source, rows, lambda row: [source.dataset.image(media) for media in row.media])
    notes = [Problem(note, where, None, "warning") for note in source.notes]
    if not bad:
        return notes
    looked_at = min(rows, len(source.rows))
    message = f"{len(bad)} of {looked_at} sampled rows of `{source.name}` have an image that cannot be read"
    hint = f"{examples(bad)}\n`vlmrl data doctor {quote(source.dataset.path)}` decodes every image"
    return [Problem(message, where, hint), *notes]


def check_traces(source: Source, where: str, *, rows: int = SAMPLE_ROWS) -> list[Problem]:
    """Return problems for `vlmrl sft`: sampled rows without a correct response to train on."""
    if source.task.trace is None:
        hint = "give the table a response column ([[data]] columns = {response = ...}), or use a task with traces"
        return [Problem(f"task `{source.task.name}` of `{source.name}` has no responses to learn from", where, hint)]
    bad = _failing(source, rows, lambda row: source.task.correct_response(row, random.Random(0)))
    if not bad:
        return []
    looked_at = min(rows, len(source.rows))
    message = f"{len(bad)} of {looked_at} sampled rows of `{source.name}` have no response to learn from"
    return [Problem(message, where, examples(bad))]


def _failing(source: Source, rows: int, work: Callable[[Row], Any]) -> list[tuple[str, str]]:
    """Return the sampled rows on which `work` raises an error, each with its message."""
    bad: list[tuple[str, str]] = []
    for row in sample_rows(source, rows):
        try:
            work(row)
        except VlmrlError as error:
            bad.append(named(row, error))
    return bad


@dataclass
class RewardFacts:
    """Mean scores of correct and of empty responses over the sampled rows.

    Args:
        parts: names of the parts that the reward returned.
        correct: mean score of correct responses; None if the task cannot write a correct response.
        empty: mean score of empty responses; None if it was not measured.
        response: shortest right answer that earns the most, of those that were tried on the first row; "" = none.
    """

    parts: list[str] = field(default_factory=list)
    correct: float | None = None
    empty: float | None = None
    response: str = ""
    problems: list[Problem] = field(default_factory=list)

    def take(self, scores: Sequence[Score]) -> None:
        """Add the names of the parts of `scores` to `parts`."""
        self.parts = sorted({*self.parts, *(part for score in scores for part in score.parts)})


def check_reward(loaded: LoadedRecipe, source: Source, where: str, place: ServicePlace = NO_PLACE) -> RewardFacts:
    """Score a correct response (if the task can write one) and an empty response to each sampled row.

    A bug in the reward is a problem that names the row, and so is a weight for a part that the reward does not return.
    """
    facts = RewardFacts()
    rows = sample_rows(source, REWARD_ROWS)
    try:
        if source.task.trace is not None:
            traces = [_correct(source.task, row, i) for i, row in enumerate(rows)]
            scores = _scored(loaded, source, rows, traces, "correct", place)
            facts.take(scores)
            facts.correct = fmean(score.value for score in scores)
            facts.problems += _missing_parts(source, scores, where)
        scores = _scored(loaded, source, rows, [""] * len(rows), "empty", place)
        facts.take(scores)
        facts.empty = fmean(score.value for score in scores)
        if source.reward.is_cheap:
            facts.problems += _unread(loaded, source, where, place)
        facts.problems += differing_parts(source.name, list(zip(rows, scores, strict=False)), where)
        if source.task.trace is None and (texts := trial_of(source, rows)):
            shown, as_text = prompt_text(source, rows[0]), {name: str(value) for name, value in rows[0].truth.items()}
            tried = _scored(loaded, source, [rows[0]] * len(texts), texts, "right", place)
            facts.take(tried)
            pairs = 2 * len(texts) // 3
            if (best := paid(texts, tried[:pairs], shown)) is not None:
                facts.correct, facts.response = best
                facts.problems += searched(source.name, texts, tried, where)
            else:
                same_rows, is_text = [replace(rows[0], truth=as_text)] * pairs, as_text == rows[0].truth
                scores = [] if is_text else _scored(loaded, source, same_rows, texts[:pairs], "right", place)
                reads_text = paid(texts, scores, shown) is not None
                facts.problems.append(unpaid(source.name, rows[0], where, reads_text=reads_text))
    except VlmrlError as error:
        named = [("reward", "weights", name) for name in source.weights if f"part `{name}`" in error.message]
        problems = problems_in(error, loaded.where(*named) if named else where)
        waits = isinstance(error, RewardUnavailable) and loaded.recipe.reward.outage == "wait"
        facts.problems += [replace(problem, level="warning" if waits else problem.level) for problem in problems]
        return facts
    # A reward of the environment's own is measured in an episode, and none is played here.
    measures = source.environment is not None and source.environment.of(rows[0]).own_reward
    if facts.correct is not None and facts.empty is not None and facts.correct <= facts.empty and not measures:
        message = (
            f"on `{source.name}` a correct response scores {facts.correct:.3g}, an empty response earns "
            f"{facts.empty:.3g}: with this reward the right answer earns no more than an empty one"
        )
        facts.problems.append(Problem(message, where, "see the parts: `vlmrl try RECIPE`", "warning"))
    return facts


def _unread(loaded: LoadedRecipe, source: Source, where: str, at: ServicePlace) -> list[Problem]:
    """Return a warning if sampled rows have an answer that only the same text can match: `unread` in the detail."""
    rows = sample_rows(source, SAMPLE_ROWS)
    scores = _scored(loaded, source, rows, [""] * len(rows), "empty", at)
    details = [(row, d) for row, score in zip(rows, scores, strict=True) for d in (score.detail or {}).values()]
    unread = [(row.place, d) for row, d in details if isinstance(d, Mapping) and "unread" in d]
    bad = [(place, f"`{d['gold']}`, {d['unread']}") for place, d in unread]
    if not bad:
        return []
    message = f"{len(bad)} of {len(rows)} sampled rows of `{source.name}` have an answer that the reward cannot read"
    return [Problem(message, where, f"only the same text is right there; {examples(bad)}", "warning")]


def spread(total: int, most: int) -> list[int]:
    """Return up to `most` of the indices 0 .. total - 1, evenly spread, the first included."""
    count = min(total, most)
    return [i * total // count for i in range(count)]


def sample_rows(source: Source, most: int) -> list[Row]:
    """Return rows spread evenly over a source, without those that cannot be read (the scan reports them)."""
    rows: list[Row] = []
    for index in spread(len(source.rows), most):
        with suppress(VlmrlError):
            rows.append(source.rows[index])
    return rows


def _missing_parts(source: Source, scores: Sequence[Score], where: str) -> list[Problem]:
    """Return a warning if no correct response has a part that has a weight.

    This happens if the part was renamed in the reward, but not in the weights.
    """
    returned = {part for score in scores for part in score.parts}
    weights = weights_of_parts(source.reward, source.weights)
    if not (missing := [part for part, weight in weights.items() if weight and part not in returned]):
        return []
    spare = sorted(returned - weights.keys())
    hint = "return None for a part that does not apply" + (f"; without a weight: {', '.join(spare)}" if spare else "")
    message = (
        f"the reward of `{source.name}` returns no part {', '.join(f'`{part}`' for part in missing)} for a correct "
        "response: its weight goes to the other parts"
    )
    return [Problem(message, where, hint, "warning")]


def _correct(task: Task, row: Row, seed: int) -> str | list[Turn]:
    """Return a correct response: a text, or the turns of an episode."""
    turns = [
        Turn(turn.role, turn.content) if isinstance(turn, Message) else Turn("assistant", turn_text(turn, "hermes"))
        for turn in task.correct_turns(row, random.Random(seed))
    ]
    return turns[0].text if len(turns) == 1 else turns


def _scored(
    loaded: LoadedRecipe,
    source: Source,
    rows: Sequence[Row],
    given: Sequence[str | list[Turn]],
    kind: str,
    place: ServicePlace,
) -> list[Score]:
    """Return the scores of one response per row.

    Args:
        kind: kind of the responses, for error messages.
    Raises: RewardError if the reward fails, hangs, or scores none of the responses.
    """
    inputs: list[RewardInput] = []
    for row, response in zip(rows, given, strict=True):
        x = responding(source.reward_input(row, "", "stop", 0, ""), response)
        inputs.append(replace(x, media=row.media, seen_sizes=tuple((m.width, m.height) for m in row.media)))
    with Scorer(source.reward, source.weights, **scorer_limits(loaded), place=place) as scorer:
        scores = scorer.score(inputs, strict=True, rows=[row.place for row in rows])
    if not scores:
        raise RewardError(f"the reward of `{source.name}` could score none of the sampled rows")
    if hung := sum(map(earned_on_timeout, scores)):
        seconds = loaded.recipe.reward.timeout_seconds
        raise RewardError(
            f"reward `{source.reward.name}` does not return within {seconds:g} s for {hung} of {len(scores)} {kind} "
            "responses",
            hint="correct it, or raise the limit: [reward] timeout_seconds",
        )
    return scores


def scorer_limits(loaded: LoadedRecipe) -> dict[str, Any]:
    settings = loaded.recipe.reward
    return {"timeout_seconds": settings.timeout_seconds, "memory_mb": settings.memory_mb}


SOME = "hold out a share: `validation = 0.1` below [[data]] (or a file, or a split), or --set data.0.validation=0.1"
"""Advice to name validation rows."""


def check_validation(loaded: LoadedRecipe, opened: Opened) -> list[Problem]:
    """Return a problem if validation is not possible: there are no rows for it, or no metric `eval.metric`."""
    sources = [e.validation for e in opened.entries if e.validation and e.reward_ok]
    settings = loaded.recipe.eval
    if settings.enabled and (missing := _missing_sets(loaded, opened)):
        return missing
    if opened.entries and settings.enabled and not any(e.validation for e in opened.entries):
        waiting = [("train", "stop_above"), ("eval", "patience")]
        waiting = [key for key in waiting if getattr(getattr(loaded.recipe, key[0]), key[1]) is not None]
        if waiting:
            key = ".".join(waiting[0])
            message = f"`{key}` waits for a validation, and no source has validation rows"
            return [Problem(message, loaded.where(waiting[0]), f"{SOME}, or remove {key}")]
        hint = f"{SOME}; training runs without validation"
        where = loaded.where(("eval", "sets"), ("eval", "metric"), ("data", 0))
        lacks = "`eval.sets` has test splits alone" if settings.sets else "no source has validation rows"
        return [Problem(f"{lacks}: no best checkpoint, no early stop", where, hint, "warning")]
    if loaded.recipe.kind == "sft" and (settings.by_loss or not all(e.reward_ok for e in opened.entries)):
        measured = [(e.where, e.validation) for e in opened.entries if e.validation and e.train.task.trace]
        return [problem for where, source in measured for problem in check_traces(source, where)]
    setting_name, metric = settings.selecting
    if metric == AUTO:
        return []
    for source in sources:
        wrong = list(wrong_goal(loaded, metric_facts(metric, source.task.metrics)))
        if wrong and metric_facts(metric).better is None:  # otherwise the check of the recipe reports it
            return wrong
        try:
            known = metric_names(source)
        except DataError:  # the first row cannot be read: `scan_rows` names all such rows
            continue
        needs_accuracy = metric == "accuracy" or "@" in metric  # such as pass@8
        has_accuracy = "accuracy" in known or (needs_accuracy and _may_have_accuracy(loaded, source))
        if has_accuracy:
            known += repeated_names(settings.named_settings[setting_name].samples)
        open_ended = metric.startswith("part/") and not source.reward.is_builtin
        open_ended |= any(metric.startswith(f"accuracy/{field}-") for field in source.task.by)
        open_ended |= metric == "accuracy" and has_accuracy
        if metric not in known and not open_ended:
            hint = listed(metric, known, "there are")
            hint += '; [reward] accuracy = "PART" names the part' if needs_accuracy and not has_accuracy else ""
            message = f"validation of `{source.name}` has no metric `{metric}`"
            return [Problem(message, loaded.where(("eval", "metric")), hint)]
    return []


def _missing_sets(loaded: LoadedRecipe, opened: Opened) -> list[Problem]:
    """Return a problem for each of `eval.sets` that no source has. Entries that could not be opened have problems."""
    from vlmrl.tasks.source import VALIDATION, set_label

    there = {one.split for e in opened.entries for one in (e.validation, *e.others) if one is not None}
    has_validation = any(e.validation for e in opened.entries)
    names = [
        n for n in loaded.recipe.eval.sets if set_label(n) not in there and not (n == VALIDATION and has_validation)
    ]
    if opened.problems or not names:
        return []
    splits = ", ".join(dict.fromkeys(split for e in opened.entries for split in e.train.dataset.splits))
    where, hint = loaded.where(("eval", "sets")), f"splits there: {splits}; a table file works, too"
    return [Problem(f"`eval.sets` names `{name}`, and no source has such a split", where, hint) for name in names]


def repeated_names(samples: int) -> list[str]:
    """Return the names of the metrics of several samples per prompt, as far as they are known before an evaluation."""
    if samples == 1:
        return []
    ks = [k for k in range(1, samples + 1) if k == samples or k & (k - 1) == 0]
    return [*(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks if k > 2), f"mean@{samples}"]


def _may_have_accuracy(loaded: LoadedRecipe, source: Source) -> bool:
    """Return whether a user's reward returns a part that is the accuracy, or cannot be asked which parts it returns."""
    if source.reward.is_builtin:
        return False
    row = source.rows[0]  # asked with an empty response, and with the truth as text
    texts = ["", *(str(value) for value in row.truth.values())][:2]
    inputs = [responding(source.reward_input(row, text, "stop", 0, ""), text) for text in texts]
    with Scorer(source.reward, source.weights, **scorer_limits(loaded)) as scorer:
        parts = list(dict.fromkeys(name for score in scorer.score(inputs) for name in score.parts))
    return not parts or accuracy_part(parts, source.reward) is not None


def metric_names(source: Source) -> list[str]:
    """Return the names of the metrics of an evaluation of this source: of the task, the reward's parts and lengths.

    See evaluate/metrics.py. The parts of a user's reward are known only after it has run. So only its parts with a
    weight are returned.
    """
    known = dict.fromkeys(declared_parts(source.reward, source.weights))
    outcome = with_accuracy(dict.fromkeys(source.task.measured(source.rows[0].truth)), known, source.reward)
    names = ["reward", *(name for name in outcome if name not in ("label", "confidence"))]
    names += ("auc", "ece", "precision", "recall", "f1") if {"label", "confidence"} <= set(outcome) else ()
    names += source.task.measured_of_sets(source.rows[0].truth)
    return [*names, *(f"part/{part}" for part in known), "response_tokens", "truncated"]


DRAWN_ROWS = 8


def check_boxes(
    source: Source, encoder: Encoder | None, where: str, root: Path
) -> tuple[list[Problem], dict[str, Any]]:
    """Draw the truth and a correct response of some rows, and compare how prompt and reward state boxes.

    The correct response has the form that the prompt asks for, and the reward's settings read it. If a truth was
    declared in a wrong space, the picture shows it.

    Args:
        encoder: encoder of the model, for the size at which it sees an image; None = an image counts as not resized.
        root: folder of the runs. The pictures go to `checked/<source>/`; those of an earlier check are replaced.
    Returns: problems, and facts for the plan (empty if the answers of the task are no boxes).
    """
    if source.task.positions is None:
        return [], {}
    positions = source.task.positions(None if source.reward is NO_REWARD else source.reward)
    folder = root / CHECKED / re.sub(r"[^A-Za-z0-9._-]+", "-", source.name)
    inputs: list[RewardInput] = []
    pictures: list[Path] = []
    try:
        for number, row in enumerate(sample_rows(source, DRAWN_ROWS)):
            images = [source.dataset.image(media) for media in row.media]
            seen = encoder.encode(row, source.messages(row), images).seen_sizes if encoder is not None else ()
            text = source.task.correct_response(row, random.Random(0), seen) if source.task.trace is not None else ""
            inputs.append(RewardInput(text, row.truth, row.columns, media=row.media, seen_sizes=seen))
            marks = positions.marks(inputs[-1], positions.declared)
            caption, image_of = caption_of(row.columns), source.dataset.image
            pictures += save_overlays(folder, f"boxes-{number}", row.media, marks, image_of, caption)
    except VlmrlError as error:
        return problems_in(error, where), {}
    if not inputs:
        return [], {}
    fit = positions.fit(inputs)
    problems = []
    if (better := fit.better) is not None:
        problems.append(_asked_otherwise(source.name, fit, better, where))
    return problems, {
        "space": fit.declared.space,
        "order": fit.declared.order,
        "meaning": MEANINGS[fit.declared.space],
        "rows": len(inputs),
        "correct_response": inputs[0].response,
        "overlap": fit.overlaps[fit.declared] if fit.answers else None,
        "pictures": [str(path) for path in pictures],
    }


def _asked_otherwise(source: str, fit: Fit, of_prompt: Coordinates, where: str) -> Problem:
    """Return the problem of a prompt that asks for other coordinates than the reward reads.

    Another order is a warning: a prompt of one's own can ask for it, and what it asks for is not known.
    """
    read, is_order = fit.declared, of_prompt.space == fit.declared.space
    kind = "order" if is_order else "space"
    message = (
        f"the prompt of `{source}` asks for boxes in the {kind} `{getattr(of_prompt, kind)}`, but the reward reads "
        f"them in `{getattr(read, kind)}`: a correct response has an IoU of {fit.overlaps[read]:.2f} instead of "
        f"{fit.overlaps[of_prompt]:.2f}"
    )
    if is_order:
        return Problem(message, where, "leave out `order` of reward.args, unless your prompt asks for it", "warning")
    return Problem(message, where, "set `variant` of [[data]] and `space` of reward.args to the same space")


def check_native_box_space(loaded: LoadedRecipe, source: Source, model_type: str, where: str) -> list[Problem]:
    """Return a warning if boxes are declared in another space than the model family was trained on.

    Supervised training teaches any space, so it gets no warning; neither does the model of a run.

    Args:
        model_type: as in the model's configuration.
    """
    native = NATIVE_BOX_SPACES.get(model_type)
    if source.task.positions is None or native is None or loaded.recipe.kind != "rl":
        return []
    declared = source.task.positions(None if source.reward is NO_REWARD else source.reward).declared.space
    if declared == native:
        return []
    message = (
        f"`{source.name}` declares boxes in the space `{declared}` ({MEANINGS[declared]}); the published weights of "
        f"`{model_type}` state them in `{native}` ({MEANINGS[native]})"
    )
    hint = f"set a `variant` of [[data]] for `{native}`, or look at `vlmrl try` before training"
    return [Problem(message, where, hint, "warning")]


NATIVE_BOX_SPACES: Mapping[str, Space] = {
    "qwen2_vl": "thousand",
    "qwen2_5_vl": "seen",
    "qwen3_vl": "thousand",
    "qwen3_vl_moe": "thousand",
    "qwen3_5": "thousand",
    "qwen3_5_moe": "thousand",
    "glm4v": "thousand",
    "glm46v": "thousand",
    "internvl": "thousand",
    "minicpmv4_6": "thousand",
    "paligemma": "loc",
}
"""Model type -> space. A family that is not here was not trained on boxes, or its makers do not say how it states them.

Sources: the model cards and cookbooks of the families (Qwen-VL, GLM-V, InternVL, PaliGemma); for MiniCPM-V its makers'
answer in issue 982 of their repository.
"""
