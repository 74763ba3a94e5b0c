"""One pass over saved responses: read them, score them with one or two rewards, measure. It may use several processes.

Built-in pure rewards run in the process that decodes the texts; with many rows, several processes are spawned. A user's
reward runs in the workers of its `Scorer` and is called as in training: with one list per step and source.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.errors import RecipeError, RewardError, RewardUnavailable, StoreError, VlmrlError
from vlmrl.process import die_with_parent
from vlmrl.reward_check.responses import (
    Broken,
    Chunk,
    Decoded,
    Head,
    Reader,
    ResponseColumns,
    RolloutReader,
    evaluation_of,
    run_dir_of,
)
from vlmrl.reward_check.scores import Floats, Scores
from vlmrl.rewards import reward_record
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import UNSCORED, RewardSpec, ServicePlace, accuracy_part
from vlmrl.rewards.identity import identity_of, same_code, single_records
from vlmrl.rewards.scoring import Scorer
from vlmrl.rewards.service_pool import summary_of
from vlmrl.rewards.several import score_for_task
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import read_summary
from vlmrl.store.kept_recipe import kept_text, newest_resolved, read_resolved
from vlmrl.store.metrics import counted, newest
from vlmrl.store.runs import Run, open_run
from vlmrl.store.verify import damage_of, shortened
from vlmrl.tasks.builtin_rewards import load_recorded
from vlmrl.tasks.truth_kinds import CONTRADICTS
from vlmrl.tasks.user_task import is_own, read_own
from vlmrl.types import Media, RewardInput, Score

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Recipe


@dataclass
class ScoredResponses:
    """Result of one pass: columns over the rows that could be read.

    Args:
        stored: scores that were saved with the responses; None = no scores were saved.
        sides: new scores, one entry per requested reward.
        seconds: time for each row in seconds, one entry per requested reward.
        right_N: accuracy of each response, 1 = right; NaN if it is not known.
        texts: row of the input -> response, for about MAX_TEXTS rows spread over the input, with whole groups.
        broken: rows that could not be read; only the first ones.
        doubts: doubtful truths, see `Decoded`; only the first ones.
        num_broken, num_doubts: number of all broken rows and of all doubtful truths.
        num_contradictions: number of doubtful truths that contradict themselves.
    """

    facts: ResponseColumns
    stored: Scores | None
    sides: list[Scores]
    seconds: list[Floats]
    right_N: Floats
    texts: dict[int, str]
    broken: list[Broken] = field(default_factory=list)
    doubts: list[Broken] = field(default_factory=list)
    num_broken: int = 0
    num_doubts: int = 0
    num_contradictions: int = 0


MAX_TEXTS = 8_000
"""Approximate maximum number of responses whose texts are kept for word statistics: whole groups, chosen by a hash."""
POOL_ROWS = 40_000
"""Number of rows from which several processes are used. Smaller inputs are done before a second process has started."""
HASH_RANGE = 1 << 32
TRY_LATER = "start the service that the reward needs, then run the same command again"


@dataclass(frozen=True)
class ChosenReward:
    """Reward of one source. `changed`: its difference from the reward that scored the rollouts, in words; "" = none."""

    spec: RewardSpec
    weights: Mapping[str, float]
    changed: str = ""


@dataclass(frozen=True)
class TaskRef:
    """Name and settings of a task, from which a worker creates it. `variant`: see `make_task`; None = the default."""

    name: str
    info: Mapping[str, Any]
    variant: str | None = None

    def make(self) -> Any:
        """Create the task; return None if this dataset does not fit it."""
        from vlmrl.tasks import make_task

        try:
            return make_task(self.name, self.info, *((self.variant,) if self.variant else ()))
        except VlmrlError:
            return None


@dataclass(frozen=True)
class ScoringPlan:
    """Settings of the work that is done on every chunk.

    Args:
        sides: one mapping source -> reward per requested scoring.
        tasks: source -> task that measures the accuracy.
        keep_going: count failures of a reward. If False, the first failure on a row that did not fail in training stops
            the scan.
        limits: limits of a user's reward, see `SavedResponses.limits`.
        image_of: (references of a row's images, name of the row) -> PIL images; None = no reward needs images.
    """

    reader: Reader
    sides: Sequence[Mapping[str, ChosenReward]]
    tasks: Mapping[str, TaskRef]
    keep_going: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    image_of: Callable[[Sequence[Media], str], list[Any]] | None = None

    @property
    def pure(self) -> bool:
        return all(c.spec.pure and not c.spec.needs_images for side in self.sides for c in side.values())


def scan(
    reader: Reader,
    plan: ScoringPlan,
    *,
    jobs: int = 1,
    note: Callable[[str], Any] = lambda line: None,
) -> ScoredResponses:
    """Score the whole input in one pass. The result does not depend on `jobs`.

    Args:
        jobs: number of processes; several are used only if every reward is pure and there are many rows.
        note: called with a line for the user about services that rewards asked.
    Raises: RewardError for a failing reward (see `ScoringPlan.keep_going`); StoreError or DataError for an unreadable
        file.
    """
    several = jobs > 1 and plan.pure
    pieces = list(_spread(reader, plan, jobs) if several else _here(reader, plan, note))
    return _joined([piece for piece, _ in pieces], pieces[-1][1] if pieces else HASH_RANGE)


def _here(reader: Reader, plan: ScoringPlan, note: Callable[[str], Any]) -> Iterator[tuple[ScoredResponses, int]]:
    with ScoringWork(plan) as work:
        for chunk, limit in _with_limits(reader):
            yield work.on(chunk, limit), limit
        if line := work.asked():
            note(line)


def _spread(reader: Reader, plan: ScoringPlan, jobs: int) -> Iterator[tuple[ScoredResponses, int]]:
    """Yield the scored chunks in order; `jobs` processes score them. Small inputs are scored in this process."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    pieces = _with_limits(reader)
    first: list[tuple[Chunk, int]] = []
    while sum(chunk.rows for chunk, _ in first) < POOL_ROWS:
        if (got := next(pieces, None)) is None:
            with ScoringWork(plan) as work:
                yield from ((work.on(chunk, limit), limit) for chunk, limit in first)
            return
        first.append(got)
    sides = [{s: reward_record(c.spec, c.weights) for s, c in side.items()} for side in plan.sides]
    setup = (replace(plan, sides=(), image_of=None), sides, os.getpid())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=setup)
    try:
        waiting: deque[tuple[Any, int]] = deque()
        for chunk, limit in itertools.chain(first, pieces):
            waiting.append((pool.submit(_on, chunk, limit), limit))
            if len(waiting) > 2 * jobs + 1:
                future, of = waiting.popleft()
                yield future.result(), of
        for future, of in waiting:
            yield future.result(), of
    except BrokenProcessPool as error:
        raise RewardError(
            "a process that scored rows was ended from outside", hint="out of memory? --jobs 1 needs the least memory"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _with_limits(reader: Reader) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, limit): the texts of groups whose hash is below the limit are kept.

    The limit is halved as more rows are read, so that about MAX_TEXTS texts are kept.
    """
    limit, rows = HASH_RANGE, 0
    for chunk in reader.chunks():
        rows += chunk.rows
        while rows * limit > MAX_TEXTS * HASH_RANGE:
            limit //= 2
        yield chunk, limit


_work: ScoringWork | None = None


def _begin(plan: ScoringPlan, sides: Sequence[Mapping[str, Mapping[str, Any]]], parent: int) -> None:
    """Prepare a spawned process: it ignores Ctrl-C, which its parent handles, and ends when the parent ends."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    loaded = [
        {source: ChosenReward(load_recorded(record), record["weights"]) for source, record in side.items()}
        for side in sides
    ]
    _work = ScoringWork(replace(plan, sides=loaded))


def _on(chunk: Chunk, limit: int) -> ScoredResponses:
    assert _work is not None
    return _work.on(chunk, limit)


class ScoringWork:
    """Scoring of one chunk after another. It is a context manager, because it starts workers for users' rewards."""

    def __init__(self, plan: ScoringPlan) -> None:
        self.plan = plan
        self._stack = ExitStack()
        self._scorers = [
            {s: self._stack.enter_context(Scorer(c.spec, c.weights, **plan.limits)) for s, c in side.items()}
            for side in plan.sides
        ]
        self._outcomes = {s: task.outcome for s, ref in plan.tasks.items() if (task := ref.make()) is not None}
        specs = [c.spec for side in plan.sides for c in side.values()]
        self._images, self._ids = any(s.needs_images for s in specs), any(s.needs_token_ids for s in specs)

    def __enter__(self) -> ScoringWork:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def asked(self) -> str:
        """Return what services were asked, in one line; "" if none was."""
        return summary_of(service for side in self._scorers for scorer in side.values() for service in scorer.services)

    def on(self, chunk: Chunk, limit: int) -> ScoredResponses:
        """Decode and score one chunk; keep the texts of groups whose hash is below `limit`."""
        decoded = self.plan.reader.decode(chunk, media=self._images, ids=self._ids)
        results = [self._score(decoded, side) for side in self._scorers]
        scored, sides = [scores for scores, _ in results], [Scores.of(scores) for scores, _ in results]
        chosen = np.flatnonzero(hashes(decoded.facts.groups_N) < limit)
        texts = {int(decoded.facts.rows_N[i]): decoded.inputs[i].response for i in chosen.tolist()}
        return ScoredResponses(
            decoded.facts,
            decoded.stored,
            sides,
            [seconds for _, seconds in results],
            self._right(decoded, sides, scored),
            texts,
            list(decoded.broken[:100]),
            list(decoded.doubts[:100]),
            len(decoded.broken),
            len(decoded.doubts),
            sum(CONTRADICTS in doubt.why for doubt in decoded.doubts),
        )

    def _score(self, decoded: Decoded, side: Mapping[str, Scorer]) -> tuple[list[Score], Floats]:
        size = len(decoded.inputs)
        names = _Names(self.plan.reader, decoded.facts)
        scores_of_row, seconds = [UNSCORED] * size, np.zeros(size)
        for source, rows in _calls(decoded.facts):
            scorer = side[source]
            inputs = decoded.inputs if len(rows) == size else [decoded.inputs[i] for i in rows]
            if scorer.spec.needs_images and self.plan.image_of is not None:
                inputs = [
                    replace(x, images=self.plan.image_of([*decoded.media[i], *x.tool_media], names[i]))
                    for x, i in zip(inputs, rows, strict=True)
                ]
            called = names if len(rows) == size else [names[i] for i in rows]
            failed_then = decoded.stored.failed_N[rows] if decoded.stored is not None else np.zeros(len(rows), bool)
            scores = self._called(scorer, inputs, called, failed_then)
            seconds[rows] = scorer.seconds
            for place, score in zip(rows.tolist(), scores, strict=True):
                scores_of_row[place] = score
        return scores_of_row, seconds

    def _called(self, scorer: Scorer, inputs: Sequence[RewardInput], names: Any, failed_then: Any) -> list[Score]:
        """Call a reward once.

        If it fails on a row on which it did not fail in training, an error with the row and the traceback stops the
        scan, unless `keep_going` is set. Rows for which a service was down have no score; if its first call gives no
        score at all, that stops the scan, too.
        """
        if self.plan.keep_going or np.any(failed_then):
            scores = scorer.score(inputs, rows=names)
            failed = [score.error is not None and score.status != "unavailable" for score in scores]
            new = np.flatnonzero(np.asarray(failed) & ~failed_then)
            if self.plan.keep_going or not len(new):
                return scores
            first = int(new[0])
            batched = any(single.user is not None and single.user.batched for single in scorer.spec.singles)
            alone = list(range(len(inputs))) if batched else [first]
            scorer.score([inputs[i] for i in alone], strict=True, rows=[names[i] for i in alone])  # raises
            raise RewardError(
                f"reward `{scorer.spec.name}` failed once and then did not: {scores[first].error}", where=names[first]
            )
        is_first = not scorer.seconds
        scores = scorer.score(inputs, strict=True, rows=names, rule=AttemptRule("mask"))
        if is_first and all(score.status == "unavailable" for score in scores):
            message = f"reward `{scorer.spec.name}` is unavailable, and no row has a score: {scores[0].error}"
            raise RewardUnavailable(message, where=names[0], hint=TRY_LATER)
        return scores

    def _right(self, decoded: Decoded, sides: Sequence[Scores], scored: Sequence[Sequence[Score]]) -> Floats:
        """Return the accuracy of every row.

        It is the first of these that exists: the part that the recipe names as accuracy, the task's own accuracy, the
        accuracy part of the first reward that has one (rewards/base.py).
        """
        right = np.full(len(decoded.inputs), math.nan)
        for source in decoded.facts.sources.words:
            rows = np.flatnonzero(decoded.facts.sources.is_word(source))
            accuracies: list[Floats] = []
            for scores, each, side in zip(sides, scored, self.plan.sides, strict=True):
                parts = {name for i in rows.tolist() for name in each[i].parts}  # scores.parts has all sources'
                if source in side and (part := accuracy_part(parts, side[source].spec)) is not None:
                    accuracies.append(scores.parts[part][rows])
            named = any(side[source].spec.accuracy_named for side in self.plan.sides if source in side)
            pairs = zip(scored, self.plan.sides, strict=True)
            by = next(((scores, side[source].spec) for scores, side in pairs if source in side), None)
            own = None if named and accuracies else self._own_right(decoded, source, rows, by)
            right[rows] = own if own is not None else accuracies[0] if accuracies else math.nan
        return right

    def _own_right(
        self, decoded: Decoded, source: str, rows: Any, scored: tuple[Sequence[Score], RewardSpec] | None
    ) -> Floats | None:
        """Return the accuracy of these rows as the task measures it; None if the task measures none.

        Args:
            scored: scores of all rows of the chunk, and their reward; None = the rows were not scored.
        """
        outcome = self._outcomes.get(source)
        if outcome is None:
            return None
        right, has_one = np.full(len(rows), math.nan), False
        for place, i in enumerate(rows.tolist()):
            x = decoded.inputs[i]
            try:
                measured = outcome(x, UNSCORED if scored is None else score_for_task(scored[0][i], scored[1]))
            except RewardError:  # doubtful truth, see `Decoded.doubts`: the accuracy stays NaN
                has_one = True
                continue
            accuracy = measured.get("accuracy")
            has_one |= "accuracy" in measured
            right[place] = math.nan if accuracy is None else accuracy
        return right if has_one else None


def hashes(numbers_N: Any) -> Any:
    """Return a pseudo-random number in [0, 2**32) for each number, the same in every process."""
    mixed = numbers_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)


class _Names(Sequence[str]):
    """Names of rows, created when they are read."""

    def __init__(self, reader: Reader, facts: ResponseColumns) -> None:
        self._reader, self._facts = reader, facts

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, index: Any) -> Any:
        return self._reader.where(self._facts, index)


def _calls(facts: ResponseColumns) -> Iterator[tuple[str, Any]]:
    """Yield (source, indices of its rows) of every call of a reward: one call per step and source, in input order."""
    codes = facts.sources.codes_N.astype(np.int64)
    key = facts.steps_N.astype(np.int64) * (len(facts.sources.words) + 1) + codes
    for one in dict.fromkeys(key.tolist()) if len(key) and np.ptp(key) else key[:1].tolist():
        rows = np.flatnonzero(key == one)
        yield facts.sources.words[codes[rows[0]]], rows


def _joined(pieces: Sequence[ScoredResponses], limit: int) -> ScoredResponses:
    facts = ResponseColumns.concat([p.facts for p in pieces])
    stored = [p.stored for p in pieces]
    texts = {row: text for p in pieces for row, text in p.texts.items()}
    kept = set(facts.rows_N[hashes(facts.groups_N) < limit].tolist())
    return ScoredResponses(
        facts,
        Scores.concat([s for s in stored if s is not None]) if all(s is not None for s in stored) else None,
        [Scores.concat([p.sides[k] for p in pieces]) for k in range(len(pieces[0].sides))],
        [np.concatenate([p.seconds[k] for p in pieces]) for k in range(len(pieces[0].sides))],
        np.concatenate([p.right_N for p in pieces]),
        {row: text for row, text in texts.items() if row in kept},
        [b for p in pieces for b in p.broken][:100],
        [d for p in pieces for d in p.doubts][:100],
        sum(p.num_broken for p in pieces),
        sum(p.num_doubts for p in pieces),
        sum(p.num_contradictions for p in pieces),
    )


@dataclass(frozen=True, slots=True)
class SavedSample:
    """Saved response with its score (None = no score). `media` refers to its images; `input` has none."""

    where: str
    source: str
    prompt_id: str
    step: int
    input: RewardInput
    media: tuple[Media, ...]
    score: Score | None


@dataclass
class SavedResponses:
    """Saved responses and facts about their run. Texts are read when they are needed.

    Args:
        path: file or folder of the responses.
        heads: source -> its task and facts from its first row.
        run: the run that made the responses; None for files outside a run.
        recipe: the run's recipe; None if it cannot be read.
        records: source -> record of its reward in the manifest.
        task: the task that the user named for a table; for other inputs see `task_ref`.
        grouped: whether it is known which rows belong to one prompt.
        has_scores: whether scores were saved with the responses.
        first_step: number that is shown for step 0; a table's steps are shown as they are.
        notes: messages for the user.
    """

    path: Path
    reader: Reader
    heads: Mapping[str, Head]
    run: Run | None = None
    recipe: Recipe | None = None
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task: TaskRef | None = None
    grouped: bool = True
    has_scores: bool = True
    first_step: int = counted(0)
    notes: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        return list(self.heads)

    @property
    def evaluations(self) -> list[str]:
        """Names of the evaluations that the responses are of; [] for rollouts and tables."""
        paths = self.reader.paths if isinstance(self.reader, RolloutReader) else ()
        return [name for path in paths if (name := evaluation_of(Path(path).absolute()))]

    def environment(self, source: str) -> Mapping[str, Any]:
        """Return the run's record of a source's environment; {} if its responses are one turn."""
        prompts = self.run.manifest.prompts if self.run is not None else ()
        return next((p["environment"] for p in prompts if p.get("source") == source and p.get("environment")), {})

    def arguments(self, source: str) -> dict[str, Any]:
        """Return arguments for a built-in reward that follow from a source's rows, such as the names of levels.

        They come from the truth of the first row. Arguments of the run's own reward replace them.
        """
        from vlmrl.tasks import kind_of

        singles = single_records(self.records.get(source, {}))
        recorded = {name: value for single in reversed(singles) for name, value in (single.get("args") or {}).items()}
        arguments = kind_of(self.heads[source].truth).arguments(self.heads[source].truth)
        return {name: list(recorded.get(name) or value) for name, value in arguments.items()}

    def task_ref(self, source: str) -> TaskRef | None:
        """Return the task of a source; None for a table for which the user named no task."""
        if self.task is not None:
            return self.task
        name = self.heads[source].task
        datasets = self.run.manifest.datasets if self.run is not None else ()
        record = next((one for one in datasets if one.get("name") == source), {})
        if is_own(name):
            return self._own_task(source, name, record)
        variant = record.get("variant")
        return TaskRef(name, {"name": source, **self.arguments(source)}, variant) if name else None

    def _own_task(self, source: str, name: str, record: Mapping[str, Any]) -> TaskRef | None:
        """Return a user's task if its code is the same as in the run; changed code is never run."""
        file, _, function = name.rpartition(":")
        path = str(Path(self.run.manifest.cwd or "") / file) if self.run is not None else file
        try:
            before = kept_text(self.run.dir, "task", str(record.get("task_sha256"))) if self.run is not None else None
            same = before is not None and same_code(before, read_own(path).text, function)
        except RecipeError:
            same = False
        if same:
            return TaskRef(f"{path}:{function}", {"name": source}, None)
        note = f"the task {name} is not the code that these rollouts were made with; its measures are left out"
        if note not in self.notes:
            self.notes.append(note)
        return None

    def limits(self) -> dict[str, Any]:
        """Return arguments of a scorer: the recipe's limits for a user's reward, and the place of a service's files."""
        if self.recipe is None or self.run is None:
            return {}
        limits = {k: getattr(self.recipe.reward, k) for k in ("timeout_seconds", "memory_mb", "workers")}
        return {**limits, "place": ServicePlace(str(self.run.dir), "reward-check")}

    def pick(self, rows: Iterable[int]) -> dict[int, SavedSample]:
        """Return row -> its response with texts for `rows` of the input; filtered and broken rows are left out."""
        indices = np.unique(np.asarray(list(rows), dtype=np.int64))
        samples: dict[int, SavedSample] = {}
        for chunk in self.reader.chunks(indices) if len(indices) else ():
            here = indices[(indices >= chunk.first) & (indices < chunk.first + chunk.rows)] - chunk.first
            if not len(here):
                continue
            decoded = self.reader.decode(chunk, here.tolist(), media=True)
            facts = decoded.facts
            for i, x in enumerate(decoded.inputs):
                samples[int(facts.rows_N[i])] = SavedSample(
                    self.reader.where(facts, i),
                    facts.sources[i] or "",
                    facts.prompts[i] or "",
                    int(facts.steps_N[i]),
                    x,
                    decoded.media[i],
                    decoded.stored[i] if decoded.stored is not None else None,
                )
        return samples


def open_saved(
    ref: str, root: Path, *, steps: tuple[int, int] | None = None, source: str | None = None
) -> SavedResponses:
    """Open the rollouts that `ref` names: a run (see `open_run`), a run folder, a rollouts folder, or a Parquet file.

    The Parquet file may be `eval/<name>/rows.parquet` of a run: the responses of an evaluation. Of a run without
    rollouts, such as one of `vlmrl eval`, the responses of all its evaluations are read.

    Args:
        steps: (first, last) step to read, both included; None = all steps.
        source: name of a `[[data]]` entry: only its rollouts are read; None = all.
    Raises: StoreError if there are no such rollouts, or a file cannot be read.
    """
    path = Path(ref)
    notes: list[str] = []
    if path.suffix == ".parquet" and not path.is_dir():
        if not path.is_file():
            raise StoreError("no such rollout file", where=ref)
        run, files = _run_of(run_dir_of(path.resolve()), notes), {0: path}
    elif path.is_dir() and not (path / layout.MANIFEST).exists() and (loose := _loose_files(path)):
        run = _run_of(path.resolve().parent, notes)
        files = run.rollout_files() if run is not None else loose
    else:
        run = _run(root, ref)
        path, files = run.dir, run.rollout_files()
        if not files and steps is None:
            files = dict(enumerate(folder / layout.EVAL_ROWS for folder in layout.eval_dirs(run.dir)))
    if steps is not None and not path.is_file():
        files = {step: file for step, file in files.items() if steps[0] <= step <= steps[1]}
    reader = RolloutReader(tuple(str(file) for file in files.values()), source)
    heads = reader.heads()
    if not heads:
        within = f" in steps {counted(steps[0])} to {counted(steps[1])}" if steps else ""
        of = f" of source `{source}`" if source else ""
        hint = "name the rows of an evaluation, <run>/eval/<name>/rows.parquet, or a file of `vlmrl generate`"
        raise StoreError(f"there are no saved rollouts{of}{within}", where=str(path), hint=hint)
    if run is not None:
        notes += _damage(run, path)
    records = _records(run, reader.paths, notes)
    return SavedResponses(path, reader, heads, run, _recipe_of(run, notes), records, notes=notes)


def _records(run: Run | None, paths: Sequence[str], notes: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return source -> record of the reward that scored it: the run's, unless evaluations record another one.

    A source that several rewards scored has none.
    """
    rewards = run.manifest.rewards if run is not None else ()
    records = {str(record.get("source")): record for record in rewards if isinstance(record, Mapping)}
    scored_by: dict[str, list[Mapping[str, Any]]] = {}
    for path in paths if run is not None else ():
        meta = {}
        if evaluation_of(Path(path).absolute()):
            with suppress(StoreError):
                meta = read_summary(Path(path).parent).get("meta") or {}
        if isinstance(meta.get("reward"), Mapping) and isinstance(meta.get("reward_args"), Mapping):
            record, source = {**meta["reward"], "args": meta["reward_args"]}, str(meta.get("source"))
            known = [*scored_by.setdefault(source, []), *filter(None, [records.get(source)])]
            same = (
                k for k in known if identity_of(k) == identity_of(record) and k.get("weights") == record.get("weights")
            )
            scored_by[source].append(next(same, record))
    for source, several in scored_by.items():
        records[source] = several[0]
        if any(one is not several[0] for one in several):
            del records[source]
            notes.append(
                f"{source}: evaluations by several rewards; name the rows of one: <run>/eval/<name>/rows.parquet"
            )
    return records


def _damage(run: Run, path: Path) -> list[str]:
    """Return the damaged files of a run, one line each; if `path` is one rollout file, only the damage of that file."""
    lines = damage_of(run.dir)
    if path.suffix == ".parquet" and path.is_file():
        lines = [line for line in lines if line.startswith(f"{layout.ROLLOUTS}/{path.name}: ")]
    return shortened(lines, run.id)


def _run(root: Path, ref: str) -> Run:
    try:
        return open_run(root, ref)
    except StoreError as error:
        if Path(ref).is_dir() and not (Path(ref) / layout.MANIFEST).exists():
            hint = "name a run, a folder of step-*.parquet, or one table of responses"
            raise StoreError("the folder holds neither a run nor saved rollouts", where=ref, hint=hint) from error
        raise


def _loose_files(folder: Path) -> dict[int, Path]:
    files = [
        (*parsed, p) for p in sorted(folder.iterdir()) if (parsed := layout.parse_rollout_name(p.name)) is not None
    ]
    return newest(files, {})


def _run_of(run_dir: Path, notes: list[str]) -> Run | None:
    """Return the run whose folder contains the files; None if there is none or it cannot be read."""
    if not (run_dir / layout.MANIFEST).exists():
        return None
    try:
        return open_run(run_dir.parent, str(run_dir))
    except StoreError as error:
        notes.append(f"the run around these rollouts cannot be read: {error.message}")
        return None


def _recipe_of(run: Run | None, notes: list[str]) -> Recipe | None:
    from vlmrl.recipe.load import recipe_from_resolved

    if run is None:
        return None
    try:
        return recipe_from_resolved(read_resolved(run.dir), where=str(newest_resolved(run.dir)))
    except VlmrlError as error:
        notes.append(f"the run's resolved.json cannot be used: {error.message}")
    return None
