"""Evaluation on a fixed set of rows, with the prompts, sampling, parsing and reward of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import DataError, VlmrlError
from vlmrl.evaluate.interval import Range
from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.outcomes import outcome_of, response_input
from vlmrl.evaluate.records import (
    COLUMNS,
    KEPT_BYTES,
    ArtifactLimit,
    Evaluation,
    kept_files,
    read_evaluation,
    write_evaluation,
)
from vlmrl.evaluate.repeated import BEGINNINGS
from vlmrl.evaluate.set_metrics import no_clash, summarise_sets
from vlmrl.metric import metric_facts
from vlmrl.rewards.accuracy_part import accuracy_part, accuracy_words
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.several import possible_values
from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.outages import Outages
from vlmrl.rollout.sample import Rollout, encode_prompt, sample_rollouts
from vlmrl.rollout.scoring import score_rollouts
from vlmrl.tasks.base import Task, Verdict
from vlmrl.tasks.figure import figures_to_json
from vlmrl.tasks.source import Source
from vlmrl.types import Group, Row, SamplingParams, Score

CHUNK_PROMPTS = 512
"""Number of prompts encoded at once: it bounds memory and does not change results."""
NO_PROMPT_LIMIT = 2**31

TAKEN = {*COLUMNS, "outcome", "reward", "response_tokens", "truncated"}
TAKEN_BEGINNINGS = ("part/", *BEGINNINGS)
"""Beginnings of names that no outcome may have, as every evaluation has such metrics.

`TAKEN` has whole names and fields.
"""

Respond = Callable[[Sequence[int], Sequence[Row]], list[Rollout]]
"""(numbers of rows in their source, the rows) -> their responses, in order."""

__all__ = ["Evaluation", "evaluate", "evaluate_responses", "read_evaluation", "write_evaluation"]


def evaluate(
    generator: Generator,
    encoder: Encoder,
    source: Source,
    scorer: RewardScorer,
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
    outages: Outages | None = None,
) -> Evaluation:
    """Answer, parse and score the rows of a source.

    Args:
        params: temperature 0 = greedy.
        seed: seed of the sampling.
        samples: responses per prompt.
        progress: called with the number of newly finished responses.
        max_rows, strict, world, artifact_bytes, patient, outages: as of `evaluate_responses`. Each process has an
            engine of its own.
    Raises: as `evaluate_responses`.
    """

    def respond(numbers: Sequence[int], rows: Sequence[Row]) -> list[Rollout]:
        prompts = [encode_prompt(source, row, 0, encoder, NO_PROMPT_LIMIT) for row in rows]
        return sample_rollouts(
            generator, prompts, params, num_samples=samples, run_seed=seed, version=generator.version, progress=progress
        )

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
        outages=outages,
    )


def evaluate_responses(
    respond: Respond,
    source: Source,
    scorer: RewardScorer,
    *,
    params: SamplingParams,
    max_rows: int | None = None,
    strict: bool = False,
    world: World = ALONE,
    artifact_bytes: int = KEPT_BYTES,
    patient: bool = False,
    outages: Outages | None = None,
) -> Evaluation:
    """Parse and score the responses that `respond` gives to the rows of a source.

    Args:
        respond: (numbers of rows, the rows) -> their responses, in order. It gets some rows at a time.
        params: sampling parameters of the responses.
        max_rows: evaluate only this number of rows, from the first; None = all.
        strict: a bug in the reward stops with its row; else the row's score is None and it is counted.
        world: processes that share the work; all get the whole evaluation.
        artifact_bytes: limit of the images that the reward makes, in bytes; those of later responses are left out.
        patient: a service that is unavailable for every row is no error: there are no scores then.
        outages: what happens when a service is down; None = the row has no score, or with `strict` it is an error.
    Raises: DataError when the source has no rows; RewardError when strict, or when the reward failed for every row.
    """
    count = len(source.rows) if max_rows is None else min(max_rows, len(source.rows))
    if count == 0:
        raise DataError(f"split `{source.split}` of `{source.name}` has no rows to evaluate")
    _check_names(source.task.measured(source.rows[0].truth), source.task.name)
    groups: list[Group] = []
    limit = ArtifactLimit(artifact_bytes // world.size)
    for start in range(0, count, CHUNK_PROMPTS):
        numbers = [start + i for i in world.mine(min(CHUNK_PROMPTS, count - start))]
        rollouts = respond(numbers, [source.rows[i] for i in numbers])
        # A reward that fails on every row of the first chunk has a bug: strict scoring shows the first row.
        score = score_rollouts if outages is None else outages.score
        scored = score(rollouts, {source.name: scorer}, strict=strict)
        limit.left_out += scorer.images_left_out
        if start == 0 and _is_broken([s.score for g in scored for s in g.samples], world, patient):
            score_rollouts(rollouts[:1], {source.name: scorer}, strict=True)
        groups += world.interleave(limit.keep(scored))
    records, problems = make_records(groups, source, scorer.spec)
    left_out = sum(world.gather(limit.left_out))
    # The task's functions may not be deterministic: all processes use the summary of one of them.
    summary = world.from_main(lambda: _summary(records, groups, source, scorer, params))
    if left_out:
        summary["artifacts_left_out"] = left_out
    if problems:
        summary["outcome_problems"] = {"rows": len(problems), "first": problems[0]}
    return Evaluation(records, summary, kept_files(groups))


def _is_broken(scores: Sequence[Score], world: World, patient: bool) -> bool:
    """Return whether a reward gives no score at all, on any process; see `evaluate`."""
    facts = [
        fact for facts_of_rank in world.gather({(s.error is None, s.status) for s in scores}) for fact in facts_of_rank
    ]
    is_down = patient and all(status == "unavailable" for _, status in facts)
    return not is_down and not any(scored for scored, _ in facts)


def _summary(
    records: Sequence[Mapping[str, Any]],
    groups: Sequence[Group],
    source: Source,
    scorer: RewardScorer,
    params: SamplingParams,
) -> dict[str, Any]:
    """Return the metrics of an evaluation, of its rows and of the whole split, and the figures of its task."""
    ranges = _ranges(records, source, scorer, params)
    summary = summarise(records, ranges, source.task.by) | _accuracy_of(records, source, scorer.spec)
    summary = _of_the_whole(summary, records, groups, source)
    for name, metric in summary["metrics"].items():
        metric["better"] = metric_facts(name, source.task.metrics).better
    return summary


def _of_the_whole(
    summary: dict[str, Any], records: Sequence[Mapping[str, Any]], groups: Sequence[Group], source: Source
) -> dict[str, Any]:
    """Return the summary with the task's results for the whole split: its set metrics and its figures.

    The answers exist, and may have taken an hour. So a failure of the task is recorded, not raised.
    """
    task = source.task
    places = [(group, sample) for group in groups for sample in group.samples]
    verdicts = [
        (response_input(group, sample), sample.score, record["outcome"])
        for (group, sample), record in zip(places, records, strict=True)
    ]
    summary = summary | _figures(task, verdicts)
    if task.set_metrics is None:
        return summary
    try:
        units = None if task.unit is None else [task.unit(group.row) for group, _ in places]
        set_summary = summarise_sets(task.set_metrics, verdicts, records, units, task.replicates)
        no_clash(list(set_summary["metrics"]), summary["metrics"], task.name)
    except VlmrlError as error:
        return summary | {"set_metrics_problem": str(error)}
    return summary | {"metrics": summary["metrics"] | set_summary["metrics"], "set_metrics": set_summary["set_metrics"]}


def _figures(task: Task, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return `figures` of a summary, and `figures_problem` if they cannot be made."""
    try:
        return {"figures": figures_to_json(task.figures(list(verdicts)))}
    except VlmrlError as error:
        return {"figures": [], "figures_problem": str(error)}


def _ranges(
    rows: Sequence[Mapping[str, Any]], source: Source, scorer: RewardScorer, params: SamplingParams
) -> dict[str, Range]:
    """Return metric -> declared range: of the reward, its parts, an accuracy that is one of them, and the length."""
    spec = scorer.spec
    finite = {f"part/{n}": ends for n, ends in spec.ranges.items() if all(map(math.isfinite, ends))}
    ranges: dict[str, Range] = finite | {"response_tokens": (0.0, float(params.max_new_tokens))}
    scored = [r["parts"] for r in rows if r["error"] is None]
    whole = possible_values(scored, spec, scorer.weights)
    if whole is not None:
        ranges["reward"] = whole
    own = source.task.metrics
    names = dict.fromkeys(name for r in rows for name in r["outcome"])
    ranges |= {name: ends for name in names if own and (ends := metric_facts(name, own).range) is not None}
    measured = "accuracy" in source.task.measured(rows[0]["truth"]) and not spec.accuracy_named
    part = None if measured else accuracy_part(dict.fromkeys(name for parts in scored for name in parts), spec)
    if part is not None and f"part/{part}" in finite:
        ranges["accuracy"] = finite[f"part/{part}"]
    return ranges


def _accuracy_of(records: Sequence[Mapping[str, Any]], source: Source, spec: RewardSpec) -> dict[str, str]:
    """Return `accuracy_of`: the source of the accuracy in words, if it comes from the reward."""
    parts = dict.fromkeys(name for r in records for name in r["parts"])
    values = [a for r in records if (a := r["outcome"].get("accuracy")) is not None]
    words = accuracy_words(source.task.measured(records[0]["truth"]), parts, values, spec)
    return {"accuracy_of": words} if words and values else {}


def make_records(groups: Sequence[Group], source: Source, spec: RewardSpec) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one mapping per response, and a problem for each response without an outcome.

    A mapping has prompt_id, sample, seed, source, task, truth, text, finish, num_tokens, score, parts, note, error,
    status, images, detail, artifacts, outcome, and each outcome under its own name.

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
                "source": group.row.source,
                "task": group.row.task,
                "truth": dict(group.row.truth),
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
            }
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
