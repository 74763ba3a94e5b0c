"""Steps of `vlmrl eval`: load the model of a run or a folder, evaluate it on rows of every source, keep all results.

Several processes (`--gpus`) have a whole model each and share the rows. The numbers are the same as with one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.dist import world as rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.evaluate.graded_pieces import GradedPieces
from vlmrl.evaluate.records import Evaluation, stored_rows, write_evaluation
from vlmrl.evaluate.run import evaluate_responses
from vlmrl.inference.blinded import ShownRows
from vlmrl.inference.engine_responses import EngineResponder, engine_identity
from vlmrl.inference.eval_plan import EvalSettings, PlannedEvaluation, chosen_settings, params_of, plan
from vlmrl.inference.eval_rows import EvalRows
from vlmrl.recipe.auto_values import require_settled
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards import reward_record
from vlmrl.rewards.open_services import summary_of
from vlmrl.rewards.worker_code import ServicePlace
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.scoring import Outages
from vlmrl.setup.engine import make_generator
from vlmrl.setup.measures import open_measurer
from vlmrl.setup.model import load_origin, make_encoder, make_policy, setting_params
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
        recipe: without open values (setup/open_values.py).
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
                outages=Outages.of(recipe.reward, ALONE, say),
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
