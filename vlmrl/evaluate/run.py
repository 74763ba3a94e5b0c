"""Evaluation on a fixed set of rows, with the prompts, sampling, parsing and reward of training.

Responses are graded while others are still generated: chunk by chunk, in order, in bounded memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vlmrl.data.encode import Encoder
from vlmrl.dist import world as rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import DataError
from vlmrl.evaluate.estimates import Range
from vlmrl.evaluate.measures import add_measures, measures_record
from vlmrl.evaluate.metrics import EvalColumns, summarise_columns
from vlmrl.evaluate.record_table import coordinates_of
from vlmrl.evaluate.records import (
    KEPT_BYTES,
    ArtifactLimit,
    Evaluation,
    GradedPieces,
    MergedPieces,
    Piece,
    kept_files,
    merge_pieces,
)
from vlmrl.evaluate.repeated import BEGINNINGS
from vlmrl.evaluate.set_metrics import WholeSplit
from vlmrl.metric import metric_facts
from vlmrl.rewards.attempts import AttemptRule, Ranks
from vlmrl.rewards.base import RewardSpec, accuracy_part, accuracy_words
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Rollout, answer_pieces, encode_prompt, score_rollouts, scored_groups, submit
from vlmrl.store.evaluated_rows import COLUMNS, SHOWN_IMAGES
from vlmrl.store.rollouts import image_fields, turns_text
from vlmrl.tasks.base import Measurer
from vlmrl.tasks.source import Source, outcome_of
from vlmrl.types import Group, Row, SamplingParams, Score

CHUNK_PROMPTS = 512
"""Number of prompts of all processes that are graded and kept together. It bounds memory; a reward that gets lists sees
the responses of a chunk at once."""
MEETING_CHUNKS = 32
"""Number of chunks after which processes wait for each other, so that none is far ahead at the end."""
PAUSE_SECONDS = 0.01
"""Least time between two looks at the workers of the reward: each look goes through all groups of the chunk."""
NumberedRow = tuple[int, Row]
"""(number of a row in its source, the row)."""
Responses = Iterator[tuple[int, Rollout] | None]
"""(number of a row, its responses) as they are complete; None = nothing is complete at the moment."""
Respond = Callable[[Iterator[Sequence[NumberedRow]]], Responses]
"""Chunks of rows -> their responses, in any order. Chunks are taken when there is room for their prompts."""


def counted(
    progress: Callable[[int, int], None], total: int, world: World = ALONE, phase: str = "evaluation"
) -> Callable[[int], None]:
    """Return a function that gets the number of newly finished responses of this process, and tells `progress`.

    Args:
        progress: called with (finished responses, all responses). With several processes, the first number is an
            estimate from this process.
        phase: shows the launcher that this process is alive.
    """
    done = 0

    def tell(newly: int) -> None:
        nonlocal done
        done += newly * world.size
        rank_process.phase(phase)
        progress(min(done, total), total)

    return tell


@dataclass
class _Chunk:
    """Rows of a chunk, and their responses by position in the chunk: those that are being graded, and the others."""

    place_of: dict[int, int]
    waiting: dict[int, Rollout] = field(default_factory=dict)
    submitted: dict[int, Rollout] = field(default_factory=dict)


class Grader:
    """Grader of chunks: it scores the responses of the first open chunk as they come, and keeps those of later ones.

    A reward's workers get the next chunk as soon as they have nothing more to do of the present one. If responses come
    faster than they are graded, generation waits: at most about a chunk of responses is kept.

    Args:
        open_session: opens a session for a chunk.
    """

    def __init__(self, open_session: Callable[[], ScoringSession]) -> None:
        self._open_session = open_session
        self._chunks: dict[int, _Chunk] = {}
        self._chunk_of: dict[int, int] = {}
        self._session: ScoringSession | None = None

    def grade(
        self, respond: Respond, chunks: Iterator[tuple[int, Sequence[NumberedRow]]]
    ) -> Iterator[tuple[int, list[Group]]]:
        """Yield (number of a chunk, its groups), in the order of the chunks.

        Args:
            chunks: (number of a chunk, its rows); they are read when their turn comes.
        Raises: the errors of `respond` and of the reward.
        """
        try:
            listened = 0.0
            for response in respond(self._opened(chunks)):
                if response is not None:
                    self._take(*response)
                if self._session is not None and time.monotonic() - listened > PAUSE_SECONDS:
                    self._session.listen()
                    listened = time.monotonic()
                yield from self._finished(wait=False)
                while sum(len(chunk.waiting) for chunk in self._chunks.values()) > CHUNK_PROMPTS:
                    before = len(self._chunks)
                    yield from self._finished(wait=True)
                    if len(self._chunks) == before:  # the first chunk still lacks responses
                        break
            while self._chunks:
                yield from self._finished(wait=True)
        finally:
            if self._session is not None:
                self._session.cancel()

    def _opened(self, chunks: Iterator[tuple[int, Sequence[NumberedRow]]]) -> Iterator[Sequence[NumberedRow]]:
        for number, rows in chunks:
            self._chunks[number] = _Chunk({row: place for place, (row, _) in enumerate(rows)})
            self._chunk_of |= {row: number for row, _ in rows}
            yield rows

    def _take(self, row: int, rollout: Rollout) -> None:
        number = self._chunk_of.pop(row)
        chunk = self._chunks[number]
        chunk.waiting[chunk.place_of[row]] = rollout
        self._submit()

    def _submit(self) -> None:
        """Let the reward score what is there of the first open chunk."""
        if not self._chunks:
            return
        chunk = self._chunks[min(self._chunks)]
        self._session = self._session or self._open_session()
        for place, rollout in sorted(chunk.waiting.items()):
            submit(self._session, place, rollout)
        chunk.submitted |= chunk.waiting
        chunk.waiting = {}

    def _finished(self, *, wait: bool) -> Iterator[tuple[int, list[Group]]]:
        """Yield the first chunks whose responses are all graded. `wait`: until the first one is, if it is submitted."""
        while self._chunks:
            number = min(self._chunks)
            if self._session is None:
                self._submit()
            chunk, session = self._chunks[number], self._session
            if session is None or len(chunk.submitted) < len(chunk.place_of) or not (wait or session.is_idle):
                return
            groups = scored_groups(session, [chunk.submitted[place] for place in sorted(chunk.submitted)])
            self._session = None
            del self._chunks[number]
            yield number, groups
            wait = False


NO_PROMPT_LIMIT = 2**31
NO_RESPONSE = "no response: "
"""Beginning of the note of a response that an endpoint refused."""
NOTHING: Mapping[tuple[str, int], str] = {}
IN_MEMORY = 20_000
"""Number of responses up to which the records of a validation stay in memory; those of a larger one go to the disk."""

TAKEN = {*COLUMNS, SHOWN_IMAGES, "outcome", "reward", "response_tokens", "truncated"}
TAKEN_BEGINNINGS = ("part/", *BEGINNINGS)
"""Beginnings of names that no outcome may have, as every evaluation has such metrics.

`TAKEN` has whole names and fields.
"""


def evaluate(
    generator: Generator,
    encoder: Encoder,
    source: Source,
    scorer: Scorer,
    *,
    params: SamplingParams,
    seed: int = 0,
    max_rows: int | None = None,
    samples: int = 1,
    strict: bool = False,
    progress: Callable[[int], Any] | None = None,
    world: World = ALONE,
    artifact_bytes: int = KEPT_BYTES,
    patient: bool = False,
    rule: AttemptRule = AttemptRule(),
    ranks: Ranks | None = None,
) -> Evaluation:
    """Answer, parse and score the rows of a source.

    Args:
        params: temperature 0 = greedy.
        progress: called with the number of newly finished responses.
        max_rows, strict, world, artifact_bytes, patient, rule, ranks: as of `evaluate_responses`. Each process has an
            engine of its own.
    Raises: as `evaluate_responses`.
    """

    def respond(chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        pieces = (
            [(number, encode_prompt(source, row, 0, encoder, NO_PROMPT_LIMIT)) for number, row in chunk]
            for chunk in chunks
        )
        return answer_pieces(generator, pieces, params, num_samples=samples, run_seed=seed, progress=progress)

    count = len(source.rows) if max_rows is None else min(max_rows, len(source.rows))
    return evaluate_responses(
        respond,
        source,
        scorer,
        params=params,
        max_rows=max_rows,
        strict=strict,
        world=world,
        artifact_bytes=artifact_bytes,
        patient=patient,
        pieces=GradedPieces() if count * samples <= IN_MEMORY else GradedPieces.temporary(),
        rule=rule,
        ranks=ranks,
    )


def evaluate_responses(
    respond: Respond,
    source: Source,
    scorer: Scorer,
    *,
    params: SamplingParams,
    max_rows: int | None = None,
    strict: bool = False,
    world: World = ALONE,
    artifact_bytes: int = KEPT_BYTES,
    patient: bool = False,
    pieces: GradedPieces | None = None,
    skipped: Callable[[int], Any] = lambda rows: None,
    refusals: Mapping[tuple[str, int], str] = NOTHING,
    rule: AttemptRule = AttemptRule(),
    ranks: Ranks | None = None,
    measurer: Measurer | None = None,
) -> Evaluation:
    """Parse and score the responses that `respond` gives to the rows of a source, while others are still generated.

    Args:
        respond: chunks of rows -> their responses. It gets the rows of this process.
        max_rows: evaluate only this number of rows, from the first; None = all.
        strict: a bug in the reward stops with its row; else the row's score is None and it is counted.
        world: processes that share the work; all get the summary, and the first one all rows.
        artifact_bytes: limit of the images that the reward makes, in bytes; those of later responses are left out.
        patient: a service that is unavailable for every row is no error: there are no scores then.
        pieces: keeps the graded records of this process; those that are there are neither generated nor graded again.
            None = in memory.
        skipped: called with the number of rows that are neither generated nor graded again.
        refusals: (prompt id, sample) -> why an endpoint gave no response, once this is known; for the note.
        rule: what happens when a service is down.
        ranks: the processes that grade every chunk together, in order, if the rule is another one than "raise".
        measurer: the task's measures, taken of each chunk once it is graded; None = none are taken.
    Raises: DataError when the source has no rows; RewardError when strict, or when the reward failed for every row.
    """
    count = len(source.rows) if max_rows is None else min(max_rows, len(source.rows))
    if count == 0:
        raise DataError(f"split `{source.split}` of `{source.name}` has no rows to evaluate")
    _check_names(source.task.measured(source.rows[0].truth), source.task.name)
    whole = WholeSplit(source.task)
    if whole.is_needed or pieces is None:  # records alone are not what the task's functions get: nothing is reused
        pieces = GradedPieces()
    limit = ArtifactLimit(artifact_bytes // world.size)
    num_chunks = -(-count // CHUNK_PROMPTS)

    def keep(chunk: int, groups: Sequence[Group]) -> None:
        if chunk == 0 and _is_broken([s.score for g in groups for s in g.samples], world, patient):
            # A reward that fails on every row of the first chunk has a bug: strict scoring shows the first row.
            score_rollouts(first_rollout, {source.name: scorer}, strict=True)
        left_out, left = limit.left_out, limit.left
        groups = limit.keep(groups)
        records, problems = make_records(groups, source, scorer.spec)
        problems += [] if measurer is None else add_measures(records, groups, measurer)
        for record in records if refusals else ():
            if refusal := refusals.get((record["prompt_id"], record["sample"])):
                record["note"] = "; ".join(filter(None, (f"{NO_RESPONSE}{refusal}", record["note"])))
        whole.add(chunk, groups, records)
        left_out = limit.left_out - left_out + scorer.images_left_out
        first_problem = problems[0] if problems else ""
        image_bytes = left - limit.left
        pieces.write(chunk, Piece(records, len(problems), first_problem, left_out, image_bytes, kept_files(groups)))

    first_rollout: list[Rollout] = []
    # Ranks that grade together meet after every chunk.
    grades_together = rule.on_outage != "raise" and ranks is not None and ranks.size > 1

    def watched(chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        for response in respond(chunks):
            if response is not None and not first_rollout:
                first_rollout.append(response[1])
            yield response

    def chunks() -> Iterator[tuple[int, Sequence[NumberedRow]]]:
        for chunk in range(num_chunks):
            if chunk % MEETING_CHUNKS == MEETING_CHUNKS - 1 and not grades_together:
                world.wait()
            start = chunk * CHUNK_PROMPTS
            numbers = [start + i for i in world.mine(min(CHUNK_PROMPTS, count - start))]
            if chunk in pieces:
                limit.left -= pieces.read(chunk).image_bytes
                skipped(len(numbers))
                continue
            yield chunk, [(number, source.rows[number]) for number in numbers]

    if 0 in pieces:
        _is_broken(None, world, patient)
    open_session = partial(ScoringSession, {source.name: scorer}, rule, strict=strict, ranks=ranks)
    for chunk, groups in Grader(open_session).grade(watched, chunks()):
        keep(chunk, groups)
    merged = merge_pieces(pieces, num_chunks, world)
    # The task's functions may not be deterministic: all processes use the summary of one of them.
    whole.gather(world)
    summary = world.from_main(lambda: _summary(merged, whole, source, scorer, params))
    if measurer is not None:
        summary["measures"] = measures_record(source.task, measurer, summary["metrics"])
    return Evaluation(merged.rows, summary, merged.files)


def _is_broken(scores: Sequence[Score] | None, world: World, patient: bool) -> bool:
    """Return whether a reward gives no score at all, on any process; see `evaluate`.

    Args:
        scores: of this process; None = they were made before a kill, when the reward was found to work.
    """
    own = {(True, "ok")} if scores is None else {(s.error is None, s.status) for s in scores}
    facts = [fact for facts_of_rank in world.gather(own) for fact in facts_of_rank]
    is_down = patient and all(status == "unavailable" for _, status in facts)
    return not is_down and not any(scored for scored, _ in facts)


def _summary(
    merged: MergedPieces, whole: WholeSplit, source: Source, scorer: Scorer, params: SamplingParams
) -> dict[str, Any]:
    """Return the metrics of an evaluation, of its rows and of the whole split, and the figures of its task."""
    columns = merged.columns(source.task.by)
    summary = summarise_columns(columns, _ranges(columns, source, scorer, params))
    summary |= _accuracy_of(columns, source, scorer.spec)
    summary = whole.add_to(summary, merged.rows)
    for name, metric in summary["metrics"].items():
        metric["better"] = metric_facts(name, source.task.metrics).better
    if positions := coordinates_of(source, merged.rows):
        summary["positions"] = positions
    if merged.images_left_out:
        summary["artifacts_left_out"] = merged.images_left_out
    if merged.num_problems:
        summary["outcome_problems"] = {"rows": merged.num_problems, "first": merged.first_problem}
    return summary


def _ranges(columns: EvalColumns, source: Source, scorer: Scorer, params: SamplingParams) -> dict[str, Range]:
    """Return metric -> declared range: of the reward, its parts, an accuracy that is one of them, and the length."""
    spec = scorer.spec
    finite = {f"part/{n}": ends for n, ends in spec.ranges.items() if all(map(math.isfinite, ends))}
    turns = source.environment_settings.turns if source.environment else 1
    ranges: dict[str, Range] = finite | {"response_tokens": (0.0, float(turns * params.max_new_tokens))}
    patterns = [{name: 0.0 if applies else None for name, applies in pattern} for pattern in columns.applying]
    whole = scorer.possible_values(patterns)
    if whole is not None:
        ranges["reward"] = whole
    own = source.task.metrics
    ranges |= {name: e for name in columns.outcomes if own and (e := metric_facts(name, own).range) is not None}
    measured = "accuracy" in source.task.measured(source.rows[0].truth) and not spec.accuracy_named
    part = None if measured else accuracy_part(columns.scored_parts, spec)
    if part is not None and f"part/{part}" in finite:
        ranges["accuracy"] = finite[f"part/{part}"]
    return ranges


def _accuracy_of(columns: EvalColumns, source: Source, spec: RewardSpec) -> dict[str, str]:
    """Return `accuracy_of`: the source of the accuracy in words, if it comes from the reward."""
    accuracy_N = columns.number("outcome", "accuracy")
    values = np.unique(accuracy_N[~np.isnan(accuracy_N)]).tolist()
    words = accuracy_words(source.task.measured(source.rows[0].truth), columns.parts, values, spec)
    return {"accuracy_of": words} if words and values else {}


def make_records(groups: Sequence[Group], source: Source, spec: RewardSpec) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one mapping per response, and a problem for each response without an outcome.

    A mapping has prompt_id, sample, seed, source, task, truth, columns, prompt_text, text, finish, num_tokens, score,
    parts, note, error, status, images, detail, artifacts, turns, ending, measured, outcome, and each outcome under its
    own name; `shown_images` if the model saw other images than those of the row.

    Args:
        spec: the reward that gave the scores; its accuracy is an outcome if the task has none.
    """
    records, problems = [], []
    for group in groups:
        for s in group.samples:
            outcome, problem = outcome_of(source.task, group, s, spec)
            row: dict[str, Any] = {
                "prompt_id": group.row.prompt_id,
                "sample": s.trajectory.sample,
                "seed": s.trajectory.seed,
                "source": source.name,  # a row of a file has the name of the file
                "task": group.row.task,
                "truth": dict(group.row.truth),
                "columns": dict(group.row.columns),
                "prompt_text": group.prompt_text,
                "text": s.text,
                "finish": s.trajectory.finish,
                "num_tokens": s.trajectory.num_sampled_tokens or None,  # an endpoint may not tell it
                "score": s.score.value if math.isfinite(s.score.value) else None,
                "parts": dict(s.score.parts),
                "note": s.score.note,
                "error": s.score.error,
                "status": s.score.status,
                "images": [m.fields() for m in group.row.media],
                "detail": s.score.detail,
                "artifacts": [{"name": name, **m.fields()} for name, m in sorted(s.score.artifacts.items())],
                "turns": turns_text(s.turns) if s.turns else None,
                "ending": s.ending,
                "measured": dict(s.measured) if s.measured else None,
            }
            shown = image_fields(s.trajectory.media, s.trajectory.seen_sizes)
            row[SHOWN_IMAGES if s.trajectory.media != group.row.media else "images"] = shown
            try:
                _check_names(outcome, source.task.name)
            except DataError as error:
                outcome, problem = {}, str(error)
            if problem:
                problems.append(problem)
            records.append({**row, "outcome": outcome, **outcome})
    return records, problems


def _check_names(names: Iterable[str], task: str) -> None:
    """Raise a DataError for an outcome with the name of a field or metric that every evaluation has."""
    for name in names:
        if name in TAKEN or name.startswith(TAKEN_BEGINNINGS):
            raise DataError(
                f"task `{task}` has an outcome `{name}`, but every evaluation has a field or metric of this name",
                hint="give it another name",
            )
