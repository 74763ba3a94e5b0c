"""Steps of `vlmrl eval --endpoint`: the rows, prompts and graders of a local model, with the responses of an endpoint.

Responses are kept as they come. The run that holds the results is created when all are there, so a killed evaluation
leaves no run, and the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.endpoint.client import EndpointClient
from vlmrl.errors import Interruption, RewardError
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.evaluate.run import evaluate_responses
from vlmrl.inference.blinded import ShownRows
from vlmrl.inference.endpoint_responses import EndpointResponder
from vlmrl.inference.engine_responses import journal_identity
from vlmrl.inference.evaluation import EvalSettings, Evaluated, PlannedEvaluation, create_eval_run
from vlmrl.recipe.schema import Recipe
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.sources import make_scorer
from vlmrl.store import layout
from vlmrl.store.clock import now
from vlmrl.store.response_journal import ResponseJournal
from vlmrl.types import SamplingParams


def endpoint_params(recipe: Recipe, temperature: float | None) -> SamplingParams:
    """Return the sampling parameters of an evaluation, as far as an endpoint has them. `temperature`: None = greedy."""
    r = recipe.rollout
    limit = recipe.eval.max_new_tokens or r.max_new_tokens
    if temperature is None:
        return SamplingParams(0.0, max_new_tokens=limit, stop=tuple(r.stop))
    return SamplingParams(temperature, r.top_p, r.top_k, limit, stop=tuple(r.stop))


def evaluate_endpoint(
    recipe: Recipe,
    origin: ModelOrigin,
    planned: Sequence[PlannedEvaluation],
    root: Path,
    settings: EvalSettings,
    client: EndpointClient,
    argv: Sequence[str],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Evaluated]:
    """Evaluate the model of an endpoint, and write the results to a new run of kind eval.

    Args:
        progress: called with (finished responses, all responses).
    Raises: the errors of data, reward and endpoint; RewardError, before any request, for a reward that reads token ids.
        Interruption: the responses so far are kept.
    """
    for one in planned:
        if one.rows.source.reward.needs_token_ids:
            raise RewardError(
                f"the reward `{one.rows.source.reward.name}` reads token ids, and an endpoint gives texts alone",
                hint="evaluate with another reward: --set reward.name=...",
            )
    total = sum(p.rows.count for p in planned) * settings.samples
    results: list[tuple[Evaluation, dict[str, Any]]] = []
    journals: list[ResponseJournal] = []
    done = 0

    def count(newly: int) -> None:
        nonlocal done
        done += newly
        progress(min(done, total), total)

    try:
        for one in planned:
            name = layout.eval_name(one.rows.source.name)
            identity = journal_identity(one.meta)
            journals.append(ResponseJournal(root, name, identity, rows=one.rows.count, samples=settings.samples))
        for one, journal in zip(planned, journals, strict=True):
            results.append(_evaluate_one(recipe, one, settings, client, journal, count))
        with create_eval_run(root, recipe, origin, [p.rows for p in planned], argv) as run:
            evaluated = [
                _write(layout.eval_dir(run.dir, one.name), *result)
                for one, result in zip(planned, results, strict=True)
            ]
        for journal in journals:
            journal.remove()
        return evaluated
    except KeyboardInterrupt:
        kept = sum(journal.count for journal in journals)
        raise Interruption("eval", f"{kept:,} of {total:,} responses are kept") from None
    finally:
        for journal in journals:
            journal.close()


def _evaluate_one(
    recipe: Recipe,
    one: PlannedEvaluation,
    settings: EvalSettings,
    client: EndpointClient,
    journal: ResponseJournal,
    count: Callable[[int], None],
) -> tuple[Evaluation, dict[str, Any]]:
    """Return the evaluation of one source, and its `meta`."""
    source = one.rows.source
    params = endpoint_params(recipe, settings.temperature)
    shown = ShownRows(source, one.change, settings.seed, one.rows.count)
    respond = EndpointResponder(
        client, journal, shown.source, params, seed=settings.seed, samples=settings.samples, progress=count
    )
    begin = time.perf_counter()
    with make_scorer(source, recipe) as scorer:
        evaluation = evaluate_responses(
            shown.answered(respond), source, scorer, params=params, max_rows=one.rows.max_rows
        )
    seconds = round(time.perf_counter() - begin, 3)
    meta = {**one.meta, "dtype": None, "seconds": seconds, "time": now(), "device": "endpoint", "processes": 1}
    return _with_refusals(evaluation, respond.refusals), meta


def _with_refusals(evaluation: Evaluation, refusals: dict[tuple[str, int], str]) -> Evaluation:
    """Return the evaluation with the endpoint's refusals in the notes of their rows and in the summary."""
    if not refusals:
        return evaluation
    for row in evaluation.rows:
        if refusal := refusals.get((row["prompt_id"], row["sample"])):
            row["note"] = "; ".join(filter(None, (f"no response: {refusal}", row["note"])))
    first = next(iter(refusals.values()))
    return replace(evaluation, summary=evaluation.summary | {"refused": {"rows": len(refusals), "first": first}})


def _write(folder: Path, evaluation: Evaluation, meta: dict[str, Any]) -> Evaluated:
    summary = write_evaluation(folder, evaluation, meta)
    return Evaluated(folder, Evaluation(evaluation.rows, summary))
