"""What `vlmrl eval` does: load the model of a run or a folder, evaluate it on a split of every source, keep it all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl import __version__
from vlmrl.data.dataset import INFO_FILE, open_dataset
from vlmrl.data.encode import Encoder
from vlmrl.errors import DataError, Problem, ProblemsError, RecipeError, StoreError, format_error
from vlmrl.evaluate.records import Evaluation, read_summary, write_evaluation
from vlmrl.evaluate.run import evaluate
from vlmrl.recipe.load import AUTO_ORIGIN, load_recipe, recipe_from_resolved
from vlmrl.recipe.overrides import apply_override, parse_override
from vlmrl.recipe.schema import Data, Recipe
from vlmrl.rewards import reward_record
from vlmrl.rollout.engine import Generator
from vlmrl.store.clock import now
from vlmrl.store.kept import newest_resolved, read_resolved, refuse_hidden
from vlmrl.store.layout import EVAL_SUMMARY, MANIFEST, eval_dir, eval_dirs
from vlmrl.store.metrics import encode
from vlmrl.store.provenance import usable_cores
from vlmrl.store.runs import Run, create_run, open_run
from vlmrl.tasks.source import Source, open_source
from vlmrl.train.choices import settle_for_answers
from vlmrl.train.generator import make_generator
from vlmrl.train.origin import ModelOrigin
from vlmrl.train.records import dataset_record
from vlmrl.train.state import greedy_params, load_origin, make_encoder, make_policy, make_scorer
from vlmrl.types import SamplingParams

DATA_FILES = ("path", "prompt", "images_root", "reward")
PREFERRED_SPLITS = ("test", "validation")
IDENTITY = (
    "model",
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
"""Keys of `meta` that say whether two evaluations are of the same thing."""


@dataclass(frozen=True)
class EvalSettings:
    """How to evaluate.

    Args:
        split: of every source; None = test, else validation, else the only one there is.
        temperature: None = greedy.      samples: responses a prompt.
        max_rows: the first so many rows of each source.
        name: of the evaluation; None = made from split, checkpoint and sampling.
        force: replace an evaluation of that name even when it was of something else.
    """

    split: str | None = None
    temperature: float | None = None
    samples: int = 1
    max_rows: int | None = None
    name: str | None = None
    seed: int = 0
    force: bool = False


@dataclass(frozen=True)
class Evaluated:
    """One source's evaluation and where it was written."""

    folder: Path
    evaluation: Evaluation


@dataclass(frozen=True)
class Answerer:
    """A model ready to answer."""

    engine: Generator
    encoder: Encoder
    params: SamplingParams
    device: str


def choose_recipe(
    origin: ModelOrigin, *, recipe: str | None = None, data: str | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """What to evaluate with: the named recipe, else the run's own, else defaults on `data`; `overrides` on top.

    The table `model` is always the run's own when a run is evaluated: its pixels and dtype belong to its weights.
    Raises: RecipeError when nothing says what data to use; the errors of the recipe.
    """
    own = _run_recipe(origin)
    values: dict[str, Any] = {"model": {"path": origin.path}}
    if recipe is not None:
        values = load_recipe(recipe, overrides=[f"model.path={json.dumps(origin.path)}"]).recipe.model_dump(mode="json")
        if own is not None:
            values["model"] = own["model"]
    elif own is not None:
        values = own
    elif data is None:
        raise RecipeError(
            f"nothing says on what data to evaluate `{origin.path}`",
            hint="add --recipe recipes/digits_im.toml, or --data data/digits",
        )
    if data is not None:
        values["data"] = [_data_entry(data, values.get("data") or [{}])]
    problems = []
    for text in overrides:
        parsed = parse_override(text)
        applied = parsed if isinstance(parsed, Problem) else apply_override(values, parsed)
        if isinstance(applied, Problem):
            problems.append(applied)
    if problems:
        raise ProblemsError(problems)
    values["model"] = {**values["model"], "path": origin.path}
    refuse_hidden(values, recipe or origin.path)
    return recipe_from_resolved({"schema": 1, "recipe": values}, where=recipe or data or origin.path)


def create_eval_run(
    root: Path, recipe: Recipe, origin: ModelOrigin, sources: Sequence[Source], argv: Sequence[str]
) -> Run:
    """A run of kind eval, for a model that is no run: the folder its evaluation is kept in."""
    name = Path(origin.path).name or "model"
    return create_run(
        root, kind="eval", recipe_name=f"eval-{name}", argv=argv, threads=usable_cores(),
        resolved={"schema": 1, "recipe": recipe.model_dump(mode="json"), "origins": {}},
        datasets=[dataset_record(s) for s in sources],
        rewards=[{"source": s.name, **reward_record(s.reward, s.weights)} for s in sources],
        prompts=[{"source": s.name, "sha256": s.prompt_sha256} for s in sources],
    )  # fmt: skip


def find_evaluation(ref: str, root: Path, split: str) -> Path:
    """The evaluation folder that `ref` names: a path, RUN/NAME, or RUN alone (then the one on the same split).

    Raises: StoreError when there is none, or several to choose from.
    """
    if (Path(ref) / EVAL_SUMMARY).is_file():
        return Path(ref)
    head, _, tail = ref.rpartition("/")
    if head and not (Path(ref) / MANIFEST).is_file():
        folder = eval_dir(open_run(root, head).dir, tail)
        if (folder / EVAL_SUMMARY).is_file():
            return folder
        raise StoreError(f"run `{head}` has no evaluation `{tail}`", where=str(folder))
    run = open_run(root, ref)
    found = [f for f in eval_dirs(run.dir) if _meta_of(f).get("split") == split and not _meta_of(f).get("during")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f.name for f in found) or "none"
    raise StoreError(
        f"run {run.id} has {len(found) or 'no'} evaluation(s) on split `{split}` to compare with: {names}",
        hint=f"name it: --compare {ref}/NAME" if found else f"make it: vlmrl eval {ref} --split {split}",
    )


def open_splits(recipe: Recipe, split: str | None) -> list[Source]:
    """The sources of a recipe on the split to evaluate. Raises: DataError when a source has no such split."""
    return [open_source(data, recipe.reward, split=split or _default_split(data, recipe)) for data in recipe.data]


def load_answerer(
    recipe: Recipe, origin: ModelOrigin, settings: EvalSettings, say: Callable[[str], None] = lambda text: None
) -> Answerer:
    """Load the model into the engine that the recipe names; close that after use.

    Raises: CheckpointError when nothing loadable is there; EngineError when the engine does not start.
    """
    recipe, warnings = settle_for_answers(recipe, origin.files)
    for problem in warnings:
        say(format_error(problem.message, problem.where, problem.hint, problem.level))
    model, processor = load_origin(recipe.model, origin)
    policy = make_policy(recipe.model, model, processor, settings.temperature or 1.0)
    encoder = make_encoder(recipe.model, processor)
    engine = make_generator(recipe, policy, encoder, origin.files, say)
    engine.load_weights(0)
    params = _params(recipe, greedy_params(recipe, policy, processor.tokenizer), settings)
    return Answerer(engine, encoder, params, str(policy.device))


def run_evaluation(
    recipe: Recipe, origin: ModelOrigin, answerer: Answerer, sources: Sequence[Source], run_dir: Path,
    settings: EvalSettings, *, argv: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Evaluated]:  # fmt: skip
    """Evaluate a model on sources and write each result to `run_dir`/eval/<name>.

    Args: progress: called with (responses finished, all responses).
    Raises: the errors of data and reward.
    """
    total = sum(min(len(s.rows), settings.max_rows or len(s.rows)) for s in sources) * settings.samples
    done, found = 0, []

    def tell(newly: int) -> None:
        nonlocal done
        done += newly
        progress(done, total)

    for source in sources:
        folder = eval_dir(run_dir, _name(settings, origin, source, len(sources)))
        meta = _meta(recipe, origin, source, settings, argv)
        begin = time.perf_counter()
        with make_scorer(source, recipe) as scorer:
            evaluation = evaluate(
                answerer.engine, answerer.encoder, source, scorer, params=answerer.params, seed=settings.seed,
                max_rows=settings.max_rows, samples=settings.samples, progress=tell,
            )  # fmt: skip
        seconds = round(time.perf_counter() - begin, 3)
        meta |= {"seconds": seconds, "time": now(), "device": answerer.device}
        found.append(Evaluated(folder, Evaluation(evaluation.rows, write_evaluation(folder, evaluation, meta))))
    return found


def check_names(
    recipe: Recipe, origin: ModelOrigin, sources: Sequence[Source], run_dir: Path, settings: EvalSettings
) -> None:
    """Raise a StoreError when a name is taken by an evaluation of something else, before any work is done."""
    for source in sources:
        folder = eval_dir(run_dir, _name(settings, origin, source, len(sources)))
        _check_free(folder, _meta(recipe, origin, source, settings, ()), settings.force)


def _run_recipe(origin: ModelOrigin) -> dict[str, Any] | None:
    """The resolved recipe of the run that a checkpoint belongs to; None when it belongs to none.

    Files it names are looked for where the run was started, when they are not below the current directory.
    """
    run_dir = origin.run_dir
    if run_dir is None:
        return None
    path = newest_resolved(run_dir)
    if not path.exists():
        return None
    resolved = read_resolved(run_dir)
    values = recipe_from_resolved(resolved, where=str(path)).model_dump(mode="json")
    if str((resolved.get("origins") or {}).get("rollout.engine", "")).startswith(AUTO_ORIGIN):
        values["rollout"]["engine"] = "auto"  # chosen for the machine that trained: chosen anew for this one
    cwd = Path(open_run(run_dir.parent, run_dir.name).manifest.cwd)
    for table, keys in [(values["reward"], ("name",)), *((d, DATA_FILES) for d in values["data"])]:
        for key in keys:
            if isinstance(value := table.get(key), str):
                table[key] = _found_from(value, cwd)
    return values


def _found_from(value: str, cwd: Path) -> str:
    """`value` when that file exists here, else the one below `cwd` when that exists, else `value`."""
    file = Path(value.partition(":")[0] if ".py:" in value else value)
    moved = not file.is_absolute() and not file.exists() and (cwd / file).exists()
    return str(cwd / value) if moved else value


def _data_entry(path: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `[[data]]` entry for another dataset: a prepared one brings its task, a table is read as the recipe's was."""
    if (Path(path) / INFO_FILE).is_file():
        return {"path": path}
    kept = ("prompt", "system", "reward", "columns", "task")
    return {"path": path, **{key: entries[0][key] for key in kept if key in entries[0]}}


def _meta_of(folder: Path) -> Mapping[str, Any]:
    return read_summary(folder).get("meta", {})


def _default_split(data: Data, recipe: Recipe) -> str:
    splits = list(open_dataset(data).splits)
    chosen = next((s for s in PREFERRED_SPLITS if s in splits), splits[0] if len(splits) == 1 else None)
    if chosen is None:
        hint = f"say which: --split {splits[0] if splits else 'test'}  (there: {', '.join(splits) or 'none'})"
        raise DataError(f"{data.path} has neither a test nor a validation split", hint=hint)
    return chosen


def _params(recipe: Recipe, greedy: SamplingParams, settings: EvalSettings) -> SamplingParams:
    if settings.temperature is None:
        return greedy
    return replace(greedy, temperature=settings.temperature, top_p=recipe.rollout.top_p, top_k=recipe.rollout.top_k)


def _name(settings: EvalSettings, origin: ModelOrigin, source: Source, num_sources: int) -> str:
    if settings.name is not None:
        return settings.name if num_sources == 1 else f"{settings.name}-{source.name}"
    words = [source.split, source.name]
    if origin.checkpoint is not None:
        words.append(origin.checkpoint.name)
    if settings.temperature is not None:
        words.append(f"T{settings.temperature:g}-n{settings.samples}")
    if settings.max_rows is not None and settings.max_rows < len(source.rows):
        words.append(f"first-{settings.max_rows}")
    return "-".join("".join(c if c.isalnum() or c in "._-" else "-" for c in word) for word in words)


def _meta(
    recipe: Recipe, origin: ModelOrigin, source: Source, settings: EvalSettings, argv: Sequence[str]
) -> dict[str, Any]:
    parent: Mapping[str, Any] = origin.parent or {}
    return {
        "model": parent.get("run", origin.path),
        "checkpoint": origin.checkpoint.name if origin.checkpoint else None,
        "step": origin.step,
        "split": source.split,
        "source": source.name,
        "task": source.task.name,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
        "reward": {
            "name": source.reward.name,
            "weights": dict(source.weights),
            "sha256": source.reward.source_sha256,
        },
        "prompt_sha256": source.prompt_sha256,
        "sampling": {
            "greedy": settings.temperature is None,
            "temperature": settings.temperature,
            "samples": settings.samples,
            "max_new_tokens": recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens,
        },
        "greedy": settings.temperature is None,
        "max_rows": settings.max_rows,
        "seed": settings.seed,
        "dtype": recipe.model.dtype,
        "paper": encode(dict(recipe.paper)),
        "vlmrl": __version__,
        "argv": list(argv),
    }


def _check_free(folder: Path, meta: Mapping[str, Any], force: bool) -> None:
    """An evaluation of the same thing may be made again; another one is not lost for a name."""
    if force or not (folder / EVAL_SUMMARY).is_file():
        return
    before = read_summary(folder).get("meta", {})
    other = [key for key in IDENTITY if before.get(key) != meta.get(key)]
    if other:
        raise StoreError(
            f"the evaluation `{folder.name}` exists and was made with another {other[0]}: {before.get(other[0])!r:.80}",
            where=str(folder), hint="choose another --name, or replace it with --force",
        )  # fmt: skip
