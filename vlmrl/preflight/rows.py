"""Checks of the rows that a recipe names: every truth, images of a sample, prompts, rewards, overlap of splits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vlmrl.data.dataset import content_hash
from vlmrl.errors import Problem, ProblemsError, RewardError, RewardUnavailable, VlmrlError
from vlmrl.preflight.catalogs import catalogs
from vlmrl.preflight.prompts import PromptScan, examples, named
from vlmrl.preflight.right_answer import TruthScan, differing_parts, paid, prompt_text, trial_of, unpaid
from vlmrl.recipe.checks import check_recipe
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.files import blames_reward, is_file_reward
from vlmrl.recipe.schema import Data, Recipe, Reward
from vlmrl.recipe.tables import is_test_split
from vlmrl.rewards.base import NO_REWARD
from vlmrl.rewards.scoring_call import earned_on_timeout
from vlmrl.rewards.several import weights_of_parts
from vlmrl.rewards.several_scorer import open_scorer
from vlmrl.rewards.worker_code import NO_PLACE, ServicePlace
from vlmrl.tasks.attack import responding
from vlmrl.types import RewardInput, Row, Score

if TYPE_CHECKING:
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
    """

    rows: int
    seen: int = 0
    contents: dict[bytes, str] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    repeated: int = 0
    problems: list[Problem] = field(default_factory=list)


def problems_in(error: VlmrlError, where: str | None = None) -> list[Problem]:
    """Convert an error to problems. `where` is used as their place if the error names no place."""
    if isinstance(error, ProblemsError):
        return list(error.problems)
    return [Problem(error.message, error.where or where, error.hint)]


def first_errors(loaded: LoadedRecipe) -> list[Problem]:
    """Return the errors of a recipe, and of opening its data and rewards. No large library is needed for them."""
    problems = [p for p in check_recipe(loaded, catalogs()) if p.level == "error"]
    known = {p.where for p in problems} | {p.message for p in problems}
    return problems + [p for p in open_sources(loaded, problems).problems if not known & {p.where, p.message}]


def open_sources(loaded: LoadedRecipe, reported: Sequence[Problem] = ()) -> Opened:
    """Open every `[[data]]` entry and its validation rows; each one that cannot be opened becomes a problem.

    Args:
        reported: problems of the recipe itself; what they say of a reward or a task is not said again.
    """
    opened = Opened()
    seen: dict[str, int] = {}
    bad_reward, wrong = blames_reward(loaded, reported), {p.where for p in reported if p.level == "error"}
    for i, data in enumerate(loaded.recipe.data):
        if is_file_reward(data.task) and loaded.where(("data", i, "task")) in wrong:
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
        truths.look(row)
        bad += [(row.place, words) for words in source.task.validate(row.truth)]
        if scan.seen == 1 and source.task.unit is not None:
            source.task.unit(row)  # so that an error is raised now, not after a whole evaluation
        if prompts is not None:
            prompts.look(row)
    if bad:
        rows = len({name for name, _ in bad})
        message = f"{rows:,} of {scan.seen:,} rows of `{source.name}` ({source.split}) are not valid"
        scan.problems.append(Problem(message, where, examples(bad)))
    scan.problems += truths.problems(source, where) if source.reward is not NO_REWARD else []
    scan.problems += prompts.problems(where) if prompts is not None else []
    if scan.repeated:
        message = f"{scan.repeated:,} rows of `{source.name}` ({source.split}) repeat an earlier row exactly"
        scan.problems.append(Problem(message, where, "they count twice in every epoch", "warning"))
    return scan


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
    bad: list[tuple[str, str]] = []
    for row in sample_rows(source, rows):
        try:
            for media in row.media:
                source.dataset.image(media)
        except VlmrlError as error:
            bad.append(named(row, error))
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
    bad: list[tuple[str, str]] = []
    for row in sample_rows(source, rows):
        try:
            source.task.correct_response(row, random.Random(0))
        except VlmrlError as error:
            bad.append(named(row, error))
    if not bad:
        return []
    message = (
        f"{len(bad)} of {min(rows, len(source.rows))} sampled rows of `{source.name}` have no response to learn from"
    )
    return [Problem(message, where, examples(bad))]


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

    Args:
        place: where a service that the reward asks keeps its files.
    """
    facts = RewardFacts()
    rows = sample_rows(source, REWARD_ROWS)
    try:
        if source.task.trace is not None:
            traces = [source.task.correct_response(row, random.Random(i)) for i, row in enumerate(rows)]
            scores = _scored(loaded, source, rows, traces, "correct", place)
            facts.take(scores)
            facts.correct = fmean(score.value for score in scores)
            facts.problems += _missing_parts(source, scores, where)
        scores = _scored(loaded, source, rows, [""] * len(rows), "empty", place)
        facts.take(scores)
        facts.empty = fmean(score.value for score in scores)
        facts.problems += differing_parts(source.name, list(zip(rows, scores, strict=False)), where)
        if source.task.trace is None and (texts := trial_of(source, rows[0])):
            tried = _scored(loaded, source, [rows[0]] * len(texts), texts, "right", place)
            facts.take(tried)
            if (best := paid(texts, tried, prompt_text(source, rows[0]))) is not None:
                facts.correct, facts.response = best
            else:
                facts.problems.append(unpaid(source.name, rows[0], where))
    except VlmrlError as error:
        named = [("reward", "weights", name) for name in source.weights if f"part `{name}`" in error.message]
        problems = problems_in(error, loaded.where(*named) if named else where)
        waits = isinstance(error, RewardUnavailable) and loaded.recipe.reward.outage == "wait"
        facts.problems += [replace(problem, level="warning" if waits else problem.level) for problem in problems]
        return facts
    if facts.correct is not None and facts.empty is not None and facts.correct <= facts.empty:
        message = (
            f"on `{source.name}` a correct response scores {facts.correct:.3g}, an empty response earns "
            f"{facts.empty:.3g}: with this reward the right answer earns no more than silence"
        )
        facts.problems.append(Problem(message, where, "see the parts: `vlmrl try RECIPE`", "warning"))
    return facts


def spread(total: int, most: int) -> list[int]:
    """Return up to `most` of the indices 0 .. total - 1, evenly spread, the first included."""
    count = min(total, most)
    return [i * total // count for i in range(count)]


def sample_rows(source: Source, most: int) -> list[Row]:
    """Return rows spread evenly over a source, without those that cannot be read (the scan reports them)."""
    return list(_readable(source, spread(len(source.rows), most)))


def _readable(source: Source, indices: Sequence[int]) -> Iterator[Row]:
    for index in indices:
        try:
            yield source.rows[index]
        except VlmrlError:
            continue


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


def _scored(
    loaded: LoadedRecipe, source: Source, rows: Sequence[Row], texts: Sequence[str], kind: str, place: ServicePlace
) -> list[Score]:
    """Return the scores of one response per row.

    Args:
        kind: kind of the responses, for error messages.
    Raises: RewardError if the reward fails, hangs, or scores none of the responses.
    """
    inputs: list[RewardInput] = []
    for row, text in zip(rows, texts, strict=True):
        x = responding(source.reward_input(row, text, "stop", 0, ""), text)
        inputs.append(replace(x, media=row.media, seen_sizes=tuple((m.width, m.height) for m in row.media)))
    with open_scorer(source.reward, source.weights, **scorer_limits(loaded), place=place) as scorer:
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
