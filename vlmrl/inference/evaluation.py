"""Steps of `vlmrl eval`: load the model of a run or a folder, evaluate it on rows of every source, keep all results.

Several processes (`--gpus`) have a whole model each and share the rows. The numbers are the same as with one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl import __version__
from vlmrl.data.encode import Encoder
from vlmrl.dist import rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import StoreError
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.evaluate.run import evaluate_responses
from vlmrl.evaluate.scoring_rewards import scored_alike, scored_by
from vlmrl.inference.engine_responses import EngineResponder, engine_identity
from vlmrl.inference.eval_rows import EvalRows
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.settle import require_settled
from vlmrl.rewards import reward_record
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.outages import Outages
from vlmrl.setup.engine import make_generator
from vlmrl.setup.model import greedy_params, load_origin, make_encoder, make_policy
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.run_records import dataset_record
from vlmrl.setup.sources import make_scorer
from vlmrl.store import layout
from vlmrl.store.clock import now
from vlmrl.store.evaluated_rows import names_a_step, read_summary
from vlmrl.store.metrics import encode
from vlmrl.store.open_run import create_run
from vlmrl.store.provenance import usable_threads
from vlmrl.store.response_journal import ResponseJournal
from vlmrl.store.runs import Run
from vlmrl.tasks.prompt_identity import same_prompt
from vlmrl.types import SamplingParams

IDENTITY = (
    "model",
    "endpoint",
    "checkpoint",
    "split",
    "source",
    "dataset",
    "reward",
    "prompt_sha256",
    "sampling",
    "max_rows",
    "seed",
)
"""Keys of `meta` that are equal in two evaluations of the same thing."""
EVALUATED_BY = ("name", "weights", "sha256", "version", "rewards")
"""Keys of a reward's record that `meta` keeps, besides its arguments."""


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation.

    Args:
        temperature: of sampling; None = greedy.
        samples: responses per prompt.
        name: of the evaluation; None = composed of rows, checkpoint and sampling.
        seed: of sampling.
        force: replace an evaluation of that name even if it was of something else.
    """

    temperature: float | None = None
    samples: int = 1
    name: str | None = None
    seed: int = 0
    force: bool = False


@dataclass(frozen=True)
class PlannedEvaluation:
    """Evaluation that is still to be made.

    Args:
        name: of its folder.
        meta: record of its model, rows, reward and sampling.
    """

    rows: EvalRows
    name: str
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """Evaluation of one source, and the folder that it was written to."""

    folder: Path
    evaluation: Evaluation


@dataclass(frozen=True)
class Answerer:
    """Model that is ready to respond to prompts."""

    engine: Generator
    encoder: Encoder
    params: SamplingParams
    device: str


def plan(
    recipe: Recipe,
    origin: ModelOrigin,
    rows: Sequence[EvalRows],
    run_dir: Path | None,
    settings: EvalSettings,
    argv: Sequence[str] = (),
) -> list[PlannedEvaluation]:
    """Return the evaluations that will be made, one for the rows of every source.

    Args:
        run_dir: the run whose folder they go to; None = a new run.
    Raises: StoreError, before any work, when a name belongs to an evaluation of something else or to one of training.
    """
    if settings.name is not None and names_a_step(settings.name):
        raise StoreError(
            f"training uses names like `{settings.name}` for its own evaluations", hint="choose another --name"
        )
    planned = []
    for one in rows:
        name = _name(settings, origin, one, len(rows))
        planned_one = PlannedEvaluation(one, name, _meta(recipe, origin, one, settings, argv))
        if run_dir is not None:
            _check_free(layout.eval_dir(run_dir, name), planned_one.meta, settings.force)
        planned.append(planned_one)
    return planned


def create_eval_run(
    root: Path, recipe: Recipe, origin: ModelOrigin, rows: Sequence[EvalRows], argv: Sequence[str]
) -> Run:
    """Create a run of kind eval: the folder that keeps the evaluation of a model that is no run."""
    name, sources = Path(origin.path).name or "model", [r.source for r in rows]
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
    params = _params(recipe, greedy_params(recipe, policy, processor.tokenizer), settings)
    return Answerer(engine, encoder, params, str(policy.device))


def run_evaluation(
    recipe: Recipe,
    origin: ModelOrigin,
    answerer: Answerer,
    planned: Sequence[PlannedEvaluation],
    run_dir: Path,
    settings: EvalSettings,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    world: World = ALONE,
) -> list[Evaluated]:
    """Evaluate a model and write each result to `run_dir`/eval/<name>. All processes of `world` get all results.

    Responses are kept as they come: the same evaluation goes on after a kill, in whichever run it then is.

    Args:
        progress: called with (finished responses, all responses). With several processes, the first number is an
            estimate from this process.
        say: called with messages for the user.
    Raises: the errors of data and reward.
    """
    total = sum(p.rows.count for p in planned) * settings.samples
    done, results = 0, []

    def tell(newly: int) -> None:
        nonlocal done
        done += newly * world.size
        rank_process.phase("evaluation")  # shows that this process is alive
        progress(min(done, total), total)

    for one in planned:
        source, folder = one.rows.source, layout.eval_dir(run_dir, one.name)
        rank_process.phase("evaluation")
        begin = time.perf_counter()
        identity = engine_identity(one.meta, recipe, origin, settings.samples, world)
        with (
            ResponseJournal(
                run_dir.parent, source.name, identity, rows=one.rows.count, samples=settings.samples
            ) as journal,
            make_scorer(source, recipe) as scorer,
        ):
            respond = EngineResponder(
                answerer.engine,
                answerer.encoder,
                journal,
                source,
                answerer.params,
                settings.seed,
                settings.samples,
                tell,
            )
            evaluation = evaluate_responses(
                respond,
                source,
                scorer,
                params=answerer.params,
                max_rows=one.rows.max_rows,
                world=world,
                outages=Outages.of(recipe.reward, world, say),
            )
            seconds = round(time.perf_counter() - begin, 3)
            meta = {**one.meta, "seconds": seconds, "time": now(), "device": answerer.device, "processes": world.size}
            if world.is_main:
                evaluation = Evaluation(evaluation.rows, write_evaluation(folder, evaluation, meta))
            world.gather(None)  # no rank removes its responses before the results are on disk
            journal.remove()
        results.append(Evaluated(folder, evaluation))
    return results


def _params(recipe: Recipe, greedy: SamplingParams, settings: EvalSettings) -> SamplingParams:
    if settings.temperature is None:
        return greedy
    return replace(greedy, temperature=settings.temperature, top_p=recipe.rollout.top_p, top_k=recipe.rollout.top_k)


def _name(settings: EvalSettings, origin: ModelOrigin, rows: EvalRows, num_sources: int) -> str:
    source = rows.source
    if settings.name is not None:
        return settings.name if num_sources == 1 else layout.eval_name(settings.name, source.name)
    # Training names its own evaluations by split, source and step: `eval` in front keeps others on the same rows apart.
    words = [*(["eval"] if rows.role == "validation" or source.split == "validation" else []), source.split]
    words.append(source.name)
    if origin.checkpoint is not None:
        words.append(origin.checkpoint.name)
    if settings.temperature is not None:
        words.append(f"T{settings.temperature:g}-n{settings.samples}")
    if rows.count < len(source.rows):
        words.append(f"first-{rows.count}")
    return layout.eval_name(*words)


def _meta(
    recipe: Recipe, origin: ModelOrigin, rows: EvalRows, settings: EvalSettings, argv: Sequence[str]
) -> dict[str, Any]:
    parent: Mapping[str, Any] = origin.parent or {}
    source = rows.source
    return {
        "model": parent.get("run", origin.path),
        "checkpoint": origin.checkpoint.name if origin.checkpoint else None,
        "step": origin.step,
        **({"endpoint": origin.endpoint} if origin.endpoint else {}),
        "split": source.split,
        "role": rows.role,
        "source": source.name,
        "task": source.task.name,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
        "reward": {k: v for k, v in reward_record(source.reward, source.weights).items() if k in EVALUATED_BY},
        "reward_args": encode(dict(source.reward.args)),
        "prompt_sha256": source.prompt_sha256,
        "prompt_earlier": list(source.prompt_earlier),
        "sampling": {
            "greedy": settings.temperature is None,
            "temperature": settings.temperature,
            "samples": settings.samples,
            "max_new_tokens": recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens,
        },
        "greedy": settings.temperature is None,
        "max_rows": rows.max_rows,
        "seed": settings.seed,
        "dtype": recipe.model.dtype,
        "paper": encode(dict(recipe.paper)),
        "vlmrl": __version__,
        "argv": list(argv),
    }


def _same(key: str, before: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
    """Return whether a fact of two evaluations is the same; rewards and prompts are compared by their identity."""
    if key == "reward":
        return scored_alike(before, meta) is True
    return same_prompt(_prompt(before), _prompt(meta)) if key == "prompt_sha256" else before.get(key) == meta.get(key)


def _prompt(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {"sha256": meta.get("prompt_sha256"), "earlier": meta.get("prompt_earlier")}


def _words(key: str, meta: Mapping[str, Any]) -> str:
    """Return a fact of `meta` for a message.

    A reward is shown by name, version and arguments, a dataset by its path, another table as a line of `name value`.
    """
    value = meta.get(key)
    if key == "reward" and isinstance(value, Mapping):
        return f"{scored_by(meta):.400}"
    if isinstance(value, Mapping):
        shown = value.get("path") or ", ".join(f"{name} {inner}" for name, inner in value.items())
        return f"{shown:.200}"
    return f"{value!s:.80}"


def _check_free(folder: Path, meta: Mapping[str, Any], force: bool) -> None:
    """Raise StoreError if the name belongs to an evaluation of training, or, without `force`, of something else.

    An evaluation of the same thing may be made again.
    """
    if not (folder / layout.EVAL_SUMMARY).is_file():
        return
    before = read_summary(folder).get("meta", {})
    if before.get("during"):
        raise StoreError(
            f"the evaluation `{folder.name}` was made by training", where=str(folder), hint="choose another --name"
        )
    other = [key for key in IDENTITY if not _same(key, before, meta)]
    if other and not force:
        earlier = _words(other[0], before)
        raise StoreError(
            f"the evaluation `{folder.name}` exists and was made with another {other[0]}: {earlier}",
            where=str(folder),
            hint="choose another --name, or replace it with --force",
        )
