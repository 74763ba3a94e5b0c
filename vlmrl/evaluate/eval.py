"""Steps of `vlmrl eval`: a model of a run, a folder or an endpoint, on rows of every source; all results are kept.

Several processes (`--gpus`) have a whole model each and share the rows. The numbers are the same as with one process.
Responses of an endpoint are kept as they come. The run that holds the results is created when all are there, so a
killed evaluation leaves no run, and the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.dist import world as rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import Interruption, RewardError, StoreError
from vlmrl.evaluate.eval_plan import EvalSettings, PlannedEvaluation, ShownRows, chosen_settings, params_of, plan
from vlmrl.evaluate.measures import open_measurer
from vlmrl.evaluate.records import Evaluation, GradedPieces, stored_rows, write_evaluation
from vlmrl.evaluate.responses import AHEAD, EndpointResponder, EngineResponder, Responder, work_identity
from vlmrl.evaluate.run import NO_RESPONSE, counted, evaluate_responses
from vlmrl.recipe.auto_values import require_filled
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards import reward_record
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import ServicePlace
from vlmrl.rewards.service_pool import summary_of
from vlmrl.rollout.chat import ChatEngine, FourCharacters
from vlmrl.rollout.episodes import EpisodeEngine
from vlmrl.rollout.sample import ranks_of
from vlmrl.services.client import EndpointClient
from vlmrl.setup.model import episode_kinds, load_origin, make_encoder, make_generator, make_policy, setting_params
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.run_records import dataset_record
from vlmrl.setup.sources import make_scorer
from vlmrl.store import layout
from vlmrl.store.layout import now
from vlmrl.store.listing import named_ids, run_ids
from vlmrl.store.manifest import check_name
from vlmrl.store.metrics import encode
from vlmrl.store.provenance import usable_threads
from vlmrl.store.response_journal import ResponseJournal
from vlmrl.store.runs import Run, create_run
from vlmrl.tasks.source import Source
from vlmrl.types import SamplingParams

__all__ = ["EvalSettings", "PlannedEvaluation", "chosen_settings", "plan", "run_evaluation"]


@dataclass(frozen=True)
class Evaluated:
    """Evaluation of one source, and the folder that it was written to."""

    folder: Path
    evaluation: Evaluation


@dataclass(frozen=True)
class Answerer:
    """Model that is ready to respond to prompts: loaded here, or behind an endpoint.

    Args:
        make: makes a `Responder` of its other fields.
        device: "endpoint" for one.
    """

    make: Callable[..., Responder]
    greedy: SamplingParams
    device: str
    close: Callable[[], None] = lambda: None

    def responder(
        self,
        recipe: Recipe,
        settings: EvalSettings,
        journal: ResponseJournal,
        source: Source,
        progress: Callable[[int], None],
        drops: bool = False,
    ) -> Responder:
        """Return what responds to the rows of a source under some settings. `drops`: as of `Responder`."""
        return self.make(
            journal=journal,
            source=source,
            params=params_of(recipe, self.greedy, settings),
            seed=settings.seed,
            samples=settings.samples,
            progress=progress,
            drops=drops,
        )


def create_eval_run(
    root: Path,
    recipe: Recipe,
    origin: ModelOrigin,
    planned: Sequence[PlannedEvaluation],
    argv: Sequence[str],
    start: str | None = None,
) -> Run:
    """Create a run of kind eval: the folder that keeps the evaluation of a model that is no run.

    Args:
        start: as of `create_run`.
    """
    sources = list({id(p.rows): p.rows.source for p in planned}.values())  # rows may be evaluated several times
    return create_run(
        root,
        kind="eval",
        recipe_name=f"eval-{Path(origin.path).name or 'model'}",
        name=_run_name(root, planned[0].settings.name),
        start=start,
        argv=argv,
        threads=usable_threads(),
        resolved={"schema": 1, "recipe": recipe.model_dump(mode="json"), "origins": {}},
        datasets=[dataset_record(s) for s in sources],
        rewards=[{"source": s.name, **reward_record(s.reward, s.weights)} for s in sources],
        prompts=[s.prompt_record for s in sources],
    )


def _run_name(root: Path, name: str | None) -> str | None:
    """Return the name of an evaluation as that of its run; None if no run may have it, or another run has it."""
    with suppress(StoreError):
        check_name(name or "")
        return None if named_ids(root, run_ids(root), str(name)) else name
    return None


def load_answerer(
    recipe: Recipe,
    origin: ModelOrigin,
    settings: EvalSettings,
    say: Callable[[str], None] = lambda text: None,
    *,
    sources: Sequence[Source],
    world: World = ALONE,
    log: Callable[[str], Path] | None = None,
) -> Answerer:
    """Load the model into the engine that the recipe names. The caller closes it.

    Args:
        recipe: without open values (setup/auto_choice.py).
        sources: those whose rows it answers.
        world: processes that do the same, each with a whole model.
        log: name of an engine's process -> path of its log.
    Raises: CheckpointError when there is nothing to load; EngineError when the engine does not start.
    """
    rank_process.phase("load", origin.step or 0)
    require_filled(recipe)
    model, processor = load_origin(recipe.model, origin)
    policy = make_policy(recipe.model, model, processor, settings.temperature or 1.0)
    encoder = make_encoder(recipe.model, processor)
    # No GPU is reserved for engines: each process generates on its own GPU.
    alone = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine_gpus": 0})})
    engine = make_generator(alone, policy, encoder, origin.files, say, sources=sources, world=world, log=log)
    engine.load_weights(0)
    greedy = setting_params(recipe, policy, processor.tokenizer)
    return Answerer(partial(EngineResponder, engine=engine, encoder=encoder), greedy, str(policy.device), engine.close)


def endpoint_answerer(recipe: Recipe, client: EndpointClient, sources: Sequence[Source]) -> Answerer:
    """Return the model of an endpoint. It takes a part of the sampling parameters alone. The caller closes it.

    Raises: RewardError when an environment cannot be loaded.
    """
    limit = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
    greedy = SamplingParams(0.0, max_new_tokens=limit, stop=tuple(recipe.rollout.stop))
    kinds = episode_kinds(sources, None)
    engine = EpisodeEngine(ChatEngine(client), kinds, FourCharacters()) if kinds else ChatEngine(client)
    make = partial(EndpointResponder, engine=engine, most_open=AHEAD * client.options.concurrency)
    return Answerer(make, greedy, "endpoint", engine.close)


def run_evaluation(
    recipe: Recipe,
    origin: ModelOrigin,
    answerer: Answerer,
    planned: Sequence[PlannedEvaluation],
    run_dir: Path | None,
    root: Path,
    argv: Sequence[str] = (),
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    world: World = ALONE,
    own_run: bool = False,
) -> list[Evaluated]:
    """Evaluate a model and write each result to `eval/<name>` of a run. All processes of `world` get all results.

    Responses are kept as they come: the same evaluation goes on after a kill, in whichever run it then is.

    Args:
        run_dir: the run; None = one of kind eval is made in `root` when all results are there.
        progress: called with (finished responses, all responses); see `counted`.
        own_run: the run was created for these evaluations.
    Raises: the errors of data, reward and endpoint; RewardError, before any request, for a reward that reads token ids
        of an endpoint. Interruption: the responses of an endpoint so far are kept.
    """
    if origin.endpoint:
        _require_texts(planned)
    start, total = now(), sum(p.responses for p in planned)
    count, journals, results = counted(progress, total, world), list[ResponseJournal](), list[Evaluated]()
    with ExitStack() as stack:
        try:
            for one in planned:
                source, samples = one.rows.source, one.settings.samples
                identity = work_identity(one.meta, recipe, origin, samples, world)
                journal = ResponseJournal(root, source.name, identity, rows=one.rows.count, samples=samples)
                journals.append(stack.enter_context(journal))
            if kept := sum(world.gather(sum(journal.count for journal in journals))):
                say(f"{kept:,} of {total:,} responses are there from before: they are not generated again")
            evaluated: list[tuple[Evaluation, dict[str, Any]]] = []
            for one, journal in zip(planned, journals, strict=True):
                result = _evaluate_one(recipe, origin, answerer, one, journal, run_dir, count, say, world)
                if run_dir is None:
                    evaluated.append(result)
                    continue
                results.append(_write(layout.eval_dir(run_dir, one.name), *result, world))
                if not own_run:  # else the same command makes all evaluations again: it goes on with their responses
                    journal.remove()
            if run_dir is None:
                with create_eval_run(root, recipe, origin, planned, argv, start) as run:
                    folders = [layout.eval_dir(run.dir, one.name) for one in planned]
                    results = [_write(folder, *each, world) for folder, each in zip(folders, evaluated, strict=True)]
        except KeyboardInterrupt:
            if not origin.endpoint:
                raise
            kept = sum(journal.count for journal in journals)
            raise Interruption("eval", f"{kept:,} of {total:,} responses are kept") from None
        for journal in journals:
            journal.remove()
    return results


def _require_texts(planned: Sequence[PlannedEvaluation]) -> None:
    for reward in (one.rows.source.reward for one in planned):
        if reward.needs_token_ids:
            raise RewardError(
                f"the reward `{reward.name}` reads token ids, and an endpoint gives texts alone",
                hint="evaluate with another reward: --set reward.name=...",
            )


def _evaluate_one(
    recipe: Recipe,
    origin: ModelOrigin,
    answerer: Answerer,
    one: PlannedEvaluation,
    journal: ResponseJournal,
    run_dir: Path | None,
    count: Callable[[int], None],
    say: Callable[[str], None],
    world: World,
) -> tuple[Evaluation, dict[str, Any]]:
    """Return the evaluation of one source, and its `meta`."""
    source, settings, begin = one.rows.source, one.settings, time.perf_counter()
    rank_process.phase("evaluation")
    shown = ShownRows(source, one.change, settings.seed, one.rows.count)
    respond = answerer.responder(recipe, settings, journal, shown.source, count)
    # Where the run is made at the end, judgements belong to the folder of the runs.
    label = journal.path.stem if run_dir is None else one.name
    place = ServicePlace(str(run_dir or journal.path.parents[1]), f"eval {label}")
    with make_scorer(source, recipe, place) as scorer, open_measurer(recipe, source) as measurer:
        evaluation = evaluate_responses(
            shown.answered(respond),
            source,
            scorer,
            params=respond.params,
            max_rows=one.rows.max_rows,
            world=world,
            pieces=GradedPieces(journal.side_folder(grading_identity(one, recipe))),
            skipped=lambda rows: count(rows * settings.samples),
            refusals=respond.refusals,
            # Each process waits alone: after a kill they may have graded different chunks.
            rule=AttemptRule(recipe.reward.outage, recipe.reward.outage_minutes),
            ranks=ranks_of(ALONE, say),
            measurer=measurer,
        )
        line = summary_of(scorer.services, world.gather)
        say(line) if line and world.is_main else None
    seconds = round(time.perf_counter() - begin, 3)
    meta = {**one.meta, "seconds": seconds, "time": now(), "device": answerer.device, "processes": world.size}
    return (_with_refusals(evaluation), {**meta, "dtype": None}) if origin.endpoint else (evaluation, meta)


def _write(folder: Path, evaluation: Evaluation, meta: dict[str, Any], world: World) -> Evaluated:
    """Write an evaluation. All processes go on when the results are on disk, and may then remove their responses."""
    if world.is_main:
        summary = write_evaluation(folder, evaluation, meta)
        evaluation = Evaluation(stored_rows(folder), summary)
    world.wait()
    return Evaluated(folder, evaluation)


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


def _with_refusals(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation with the number of the endpoint's refusals, and the first of them, in the summary."""
    count, first = 0, ""
    for row in evaluation.rows:
        if row["note"].startswith(NO_RESPONSE):
            count, first = count + 1, first or row["note"].removeprefix(NO_RESPONSE).partition(";")[0]
    if not count:
        return evaluation
    return replace(evaluation, summary=evaluation.summary | {"refused": {"rows": count, "first": first}})
