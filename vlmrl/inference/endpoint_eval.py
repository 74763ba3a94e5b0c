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

from vlmrl.dist.world import ALONE
from vlmrl.errors import Interruption, RewardError
from vlmrl.evaluate.graded_pieces import GradedPieces
from vlmrl.evaluate.records import Evaluation, stored_rows, write_evaluation
from vlmrl.evaluate.run import NO_RESPONSE, evaluate_responses
from vlmrl.inference.blinded import ShownRows
from vlmrl.inference.endpoint_responses import EndpointResponder
from vlmrl.inference.engine_responses import journal_identity
from vlmrl.inference.eval_plan import PlannedEvaluation, params_of
from vlmrl.inference.evaluation import Evaluated, create_eval_run, grading_identity
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.open_services import summary_of
from vlmrl.rewards.worker_code import ServicePlace
from vlmrl.rollout.scoring import Outages
from vlmrl.services.client import EndpointClient
from vlmrl.setup.measures import open_measurer
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.sources import make_scorer
from vlmrl.store import layout
from vlmrl.store.layout import now
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
    client: EndpointClient,
    argv: Sequence[str],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Evaluated]:
    """Evaluate the model of an endpoint, and write the results to a new run of kind eval.

    Args:
        progress: called with (finished responses, all responses).
        say: called with messages for the user.
    Raises: the errors of data, reward and endpoint; RewardError, before any request, for a reward that reads token ids.
        Interruption: the responses so far are kept.
    """
    for one in planned:
        if one.rows.source.reward.needs_token_ids:
            raise RewardError(
                f"the reward `{one.rows.source.reward.name}` reads token ids, and an endpoint gives texts alone",
                hint="evaluate with another reward: --set reward.name=...",
            )
    total = sum(p.responses for p in planned)
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
            journals.append(ResponseJournal(root, name, identity, rows=one.rows.count, samples=one.settings.samples))
        for one, journal in zip(planned, journals, strict=True):
            results.append(_evaluate_one(recipe, one, client, journal, count, say))
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
    client: EndpointClient,
    journal: ResponseJournal,
    count: Callable[[int], None],
    say: Callable[[str], None],
) -> tuple[Evaluation, dict[str, Any]]:
    """Return the evaluation of one source, and its `meta`."""
    source, settings = one.rows.source, one.settings
    params = params_of(recipe, endpoint_params(recipe, None), settings)
    shown = ShownRows(source, one.change, settings.seed, one.rows.count)
    respond = EndpointResponder(
        client, journal, shown.source, params, seed=settings.seed, samples=settings.samples, progress=count
    )
    begin = time.perf_counter()
    # A run for the results is made at the end: until then, verdicts belong to the folder of the runs.
    place = ServicePlace(str(journal.path.parents[1]), f"eval {journal.path.stem}")
    with make_scorer(source, recipe, place) as scorer, open_measurer(recipe, source) as measurer:
        evaluation = evaluate_responses(
            shown.answered(respond),
            source,
            scorer,
            params=params,
            max_rows=one.rows.max_rows,
            pieces=GradedPieces(journal.side_folder(grading_identity(one, recipe))),
            skipped=lambda rows: count(rows * settings.samples),
            refusals=respond.refusals,
            outages=Outages.of(recipe.reward, ALONE, say),
            measurer=measurer,
        )
        if line := summary_of(scorer.services):
            say(line)
    seconds = round(time.perf_counter() - begin, 3)
    meta = {**one.meta, "dtype": None, "seconds": seconds, "time": now(), "device": "endpoint", "processes": 1}
    return _with_refusals(evaluation), meta


def _with_refusals(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation with the number of the endpoint's refusals, and the first of them, in the summary."""
    count, first = 0, ""
    for row in evaluation.rows:
        if row["note"].startswith(NO_RESPONSE):
            count, first = count + 1, first or row["note"].removeprefix(NO_RESPONSE).partition(";")[0]
    if not count:
        return evaluation
    return replace(evaluation, summary=evaluation.summary | {"refused": {"rows": count, "first": first}})


def _write(folder: Path, evaluation: Evaluation, meta: dict[str, Any]) -> Evaluated:
    summary = write_evaluation(folder, evaluation, meta)
    return Evaluated(folder, Evaluation(stored_rows(folder), summary))
