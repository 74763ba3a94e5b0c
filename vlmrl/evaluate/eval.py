"""Steps of `vlmrl eval`: a model of a run, a folder or an endpoint, on rows of every source; all results are kept.

Several processes (`--gpus`) have a whole model each and share the rows. The numbers are the same as with one process.
Responses of an endpoint are kept as they come. The run that holds the results is created when all are there, so a
killed evaluation leaves no run, and the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.dist import world as rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import Interruption, RewardError
from vlmrl.evaluate.eval_plan import EvalSettings, PlannedEvaluation, ShownRows, chosen_settings, params_of, plan
from vlmrl.evaluate.eval_rows import EvalRows
from vlmrl.evaluate.measures import open_measurer
from vlmrl.evaluate.records import Evaluation, GradedPieces, stored_rows, write_evaluation
from vlmrl.evaluate.responses import EndpointResponder, EngineResponder, engine_identity, journal_identity
from vlmrl.evaluate.run import NO_RESPONSE, evaluate_responses
from vlmrl.recipe.auto_values import require_settled
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards import reward_record
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import ServicePlace
from vlmrl.rewards.service_pool import summary_of
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import ranks_of
from vlmrl.services.client import EndpointClient
from vlmrl.setup.model import load_origin, make_encoder, make_generator, make_policy, setting_params
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.run_records import dataset_record
from vlmrl.setup.sources import make_scorer
from vlmrl.store import layout
from vlmrl.store.layout import now
from vlmrl.store.metrics import encode
from vlmrl.store.provenance import usable_threads
from vlmrl.store.response_journal import ResponseJournal
from vlmrl.store.runs import Run, create_run
from vlmrl.types import SamplingParams

__all__ = ["EvalSettings", "PlannedEvaluation", "chosen_settings", "plan", "run_evaluation"]


@dataclass(frozen=True)
class Evaluated:
    """Evaluation of one source, and the folder that it was written to."""

    folder: Path
    evaluation: Evaluation


@dataclass(frozen=True)
class Answerer:
    """Model that is ready to respond to prompts.

    Args:
        params: sampling parameters of the settings that it was loaded with.
        greedy: those of greedy responses.
    """

    engine: Generator
    encoder: Encoder
    params: SamplingParams
    device: str
    greedy: SamplingParams


def create_eval_run(
    root: Path, recipe: Recipe, origin: ModelOrigin, rows: Sequence[EvalRows], argv: Sequence[str]
) -> Run:
    """Create a run of kind eval: the folder that keeps the evaluation of a model that is no run."""
    name = Path(origin.path).name or "model"
    sources = list({id(r): r.source for r in rows}.values())  # the same rows may be evaluated several times
    return create_run(
        root,
        kind="eval",
        recipe_name=f"eval-{name}",
        argv=argv,
        threads=usable_threads(),
        resolved={"schema": 1, "recipe": recipe.model_dump(mode="json"), "origins": {}},
        datasets=[dataset_record(s) for s in sources],
        rewards=[{"source": s.name, **reward_record(s.reward, s.weights)} for s in sources],
        prompts=[s.prompt_record for s in sources],
    )


def load_answerer(
    recipe: Recipe,
    origin: ModelOrigin,
    settings: EvalSettings,
    say: Callable[[str], None] = lambda text: None,
    *,
    world: World = ALONE,
    log: Callable[[str], Path] | None = None,
) -> Answerer:
    """Load the model into the engine that the recipe names. The caller closes the engine.

    Args:
        recipe: without open values (setup/auto_choice.py).
        say: called with messages for the user.
        world: processes that do the same, each with a whole model.
        log: name of an engine's process -> path of its log.
    Raises: CheckpointError when there is nothing to load; EngineError when the engine does not start.
    """
    rank_process.phase("load", origin.step or 0)
    require_settled(recipe)
    model, processor = load_origin(recipe.model, origin)
    policy = make_policy(recipe.model, model, processor, settings.temperature or 1.0)
    encoder = make_encoder(recipe.model, processor)
    # No GPU is reserved for engines: each process generates on its own GPU.
    alone = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine_gpus": 0})})
    engine = make_generator(alone, policy, encoder, origin.files, say, world=world, log=log)
    engine.load_weights(0)
    greedy = setting_params(recipe, policy, processor.tokenizer)
    return Answerer(engine, encoder, params_of(recipe, greedy, settings), str(policy.device), greedy)


def run_evaluation(
    recipe: Recipe,
    origin: ModelOrigin,
    answerer: Answerer,
    planned: Sequence[PlannedEvaluation],
    run_dir: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    world: World = ALONE,
    own_run: bool = False,
) -> list[Evaluated]:
    """Evaluate a model and write each result to `run_dir`/eval/<name>. All processes of `world` get all results.

    Responses are kept as they come: the same evaluation goes on after a kill, in whichever run it then is.

    Args:
        progress: called with (finished responses, all responses). With several processes, the first number is an
            estimate from this process.
        say: called with messages for the user.
        own_run: the run was created for these evaluations.
    Raises: the errors of data and reward.
    """
    total = sum(p.responses for p in planned)
    done, results, finished = 0, [], []

    def tell(newly: int) -> None:
        nonlocal done
        done += newly * world.size
        rank_process.phase("evaluation")  # shows that this process is alive
        progress(min(done, total), total)

    for one in planned:
        source, folder = one.rows.source, layout.eval_dir(run_dir, one.name)
        rank_process.phase("evaluation")
        begin = time.perf_counter()
        settings, params = one.settings, params_of(recipe, answerer.greedy, one.settings)
        identity = engine_identity(one.meta, recipe, origin, settings.samples, world)
        with (
            ResponseJournal(
                run_dir.parent, source.name, identity, rows=one.rows.count, samples=settings.samples
            ) as journal,
            make_scorer(source, recipe, ServicePlace(str(run_dir), f"eval {one.name}")) as scorer,
            open_measurer(recipe, source) as measurer,
        ):
            shown = ShownRows(source, one.change, settings.seed, one.rows.count)
            respond = EngineResponder(
                answerer.engine,
                answerer.encoder,
                journal,
                shown.source,
                params,
                settings.seed,
                settings.samples,
                tell,
            )
            evaluation = evaluate_responses(
                shown.answered(respond),
                source,
                scorer,
                params=params,
                max_rows=one.rows.max_rows,
                world=world,
                pieces=GradedPieces(journal.side_folder(grading_identity(one, recipe))),
                skipped=lambda rows, samples=settings.samples: tell(rows * samples),
                # Each process waits alone: after a kill they may have graded different chunks.
                rule=AttemptRule(recipe.reward.outage, recipe.reward.outage_minutes),
                ranks=ranks_of(ALONE, say),
                measurer=measurer,
            )
            line = summary_of(scorer.services, world.gather)
            say(line) if line and world.is_main else None
            seconds = round(time.perf_counter() - begin, 3)
            meta = {**one.meta, "seconds": seconds, "time": now(), "device": answerer.device, "processes": world.size}
            if world.is_main:
                summary = write_evaluation(folder, evaluation, meta)
                evaluation = Evaluation(stored_rows(folder), summary)
            world.gather(None)  # no rank removes its responses before the results are on disk
        finished.append(journal)
        # In a run of its own, the same command would make all evaluations again: it goes on with their responses.
        if not own_run or one is planned[-1]:
            for each in finished:
                each.remove()
        results.append(Evaluated(folder, evaluation))
    return results


def grading_identity(one: PlannedEvaluation, recipe: Recipe) -> dict[str, Any]:
    """Return what the grades of an evaluation depend on, besides what its responses depend on."""
    source = one.rows.source
    return {
        "rows": one.rows.count,
        "samples": one.settings.samples,
        "reward": encode({k: v for k, v in reward_record(source.reward, source.weights).items() if k != "free_args"}),
        "reward_table": recipe.reward.model_dump(mode="json"),
        "measures": [recipe.eval.measures, recipe.eval.weights],
        "task": [source.task.name, source.task.variant, source.task.own.sha256 if source.task.own else None],
    }


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
            rule=AttemptRule(recipe.reward.outage, recipe.reward.outage_minutes),
            ranks=ranks_of(ALONE, say),
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
