"""From a checked recipe to a run that trains: makes or reopens the run folder, runs the loop, says how it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.dist import worker
from vlmrl.errors import StoreError
from vlmrl.recipe.load import LoadedRecipe, recipe_from_resolved
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards import reward_record
from vlmrl.store import layout
from vlmrl.store.provenance import usable_cores
from vlmrl.store.runs import Run, create_run, open_run, resume_run

if TYPE_CHECKING:
    from vlmrl.train.state import Watcher


LOOP_IS_SHARED = False
"""Whether `run_session` may run as one of several processes of a run."""


@dataclass(frozen=True)
class Labels:
    """How a person tells runs apart."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    note: str = ""


def start_run(loaded: LoadedRecipe, root: Path, argv: Sequence[str], labels: Labels, *, kind: str | None = None) -> Run:
    """A new run folder for this recipe, taken by this process. Its parent is the run that the model comes from.

    Args: kind: what the run is, when it is not what the recipe is for (a trial).
    """
    from vlmrl.tasks.source import open_source
    from vlmrl.train.state import find_model

    recipe = loaded.recipe
    sources = [open_source(d, recipe.reward) for d in recipe.data]
    origin = find_model(recipe.model.path, root)
    return create_run(
        root, kind=kind or recipe.kind, recipe_name=loaded.path.stem, recipe_text=loaded.text, resolved=loaded.resolved,
        argv=argv, seeds={"run": recipe.train.seed}, name=labels.name, tags=labels.tags, note=labels.note,
        parent=origin.parent, threads=usable_cores(),
        datasets=[{"name": s.name, "path": s.dataset.path, "split": s.split, "task": s.task.name,
                   "rows": len(s.rows), "fingerprint": s.dataset.fingerprint} for s in sources],
        rewards=[{"source": s.name, **reward_record(s.reward, s.weights)} for s in sources],
        prompts=[{"source": s.name, "sha256": s.prompt_sha256} for s in sources],
    )  # fmt: skip


def reopen_run(root: Path, ref: str, argv: Sequence[str], kind: str) -> tuple[Run, Recipe, Path | None]:
    """An existing run taken for a new attempt, its recipe as it was resolved, and the checkpoint to go on from.

    Raises: StoreError when it is of another kind, finished, or written by a live process.
    """
    found = open_run(root, ref)
    if found.manifest.kind != kind:
        raise StoreError(f"run {found.id} was made by `{found.manifest.kind}`, not `{kind}`", where=str(found.dir))
    recipe = read_recipe(found)
    checkpoints = found.checkpoint_dirs()
    if found.status == "done":
        raise StoreError(
            f"run {found.id} is done: there is nothing to resume", where=str(found.dir),
            hint=f"start a new run from its weights: --set model.path={found.id}",
        )  # fmt: skip
    run = resume_run(root, found.id, argv=argv, threads=usable_cores())
    return run, recipe, checkpoints[-1] if checkpoints else None


def read_recipe(run: Run) -> Recipe:
    """The recipe of a run as it was resolved. Raises: StoreError or RecipeError when resolved.json is damaged."""
    path = run.dir / layout.RESOLVED
    try:
        resolved: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"the run's recipe cannot be read: {error}", where=str(path)) from error
    return recipe_from_resolved(resolved, where=str(path))


def run_session(run: Run, recipe: Recipe, root: Path, watcher: Watcher, resume: Path | None) -> str:
    """Train a run to its end. Returns how it ended: "done" or "interrupted". Errors end it as failed and go on."""
    from vlmrl.train.memory import explaining
    from vlmrl.train.rl import train_rl
    from vlmrl.train.sft import train_sft
    from vlmrl.train.state import open_session

    with run, explaining(recipe):
        worker.join_run(run.dir, run.attempt)
        worker.phase("load")
        session = open_session(recipe, run, root, watcher, resume=resume)
        session.progress.halved |= worker.halved()
        try:
            status = (train_rl if recipe.kind == "rl" else train_sft)(session)
        finally:
            session.close()
        run.finish("interrupted" if status == "interrupted" else "done")
        return status
