"""From a checked recipe to a run that trains: makes or reopens the run folder, runs the loop, says how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.dist import rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.recipe.schema import Recipe
from vlmrl.setup.new_run import Labels
from vlmrl.store.provenance import usable_cores
from vlmrl.store.read_only_run import FollowedRun
from vlmrl.store.runs import Run, create_run, resume_run
from vlmrl.train.resume import ResumePlan

if TYPE_CHECKING:
    from vlmrl.train.state import Watcher


def reopen_run(root: Path, plan: ResumePlan, argv: Sequence[str]) -> tuple[Run, Recipe, Path | None]:
    """A run taken for a new attempt, as planned: (run, recipe, the checkpoint to go on from).

    Raises: StoreError when a live process writes it.
    """
    run = resume_run(root, str(plan.run.dir), argv=argv, threads=usable_cores(), renewal=plan.renewal)
    if plan.changes:
        run.event(
            run.start_step, "resumed with changes", changes=[c["what"] for c in run.manifest.attempts[-1].changes]
        )
    checkpoints = run.checkpoint_dirs()
    return run, plan.loaded.recipe, checkpoints[-1] if checkpoints else None


def fork_run(root: Path, plan: ResumePlan, argv: Sequence[str], labels: Labels) -> tuple[Run, Recipe, Path | None]:
    """A new run that goes on from the whole of a checkpoint of another: (run, recipe, its copy of the checkpoint)."""
    parent, loaded = plan.run, plan.loaded
    assert plan.checkpoint is not None
    run = create_run(
        root, kind=parent.manifest.kind, recipe_name=loaded.path.stem if plan.recipe_given else parent.manifest.recipe,
        recipe_text=loaded.text, resolved=loaded.resolved, argv=argv, seeds={"run": loaded.recipe.train.seed},
        name=labels.name, tags=labels.tags, note=labels.note, threads=usable_cores(), texts=plan.texts, fork=plan.fork,
        parent={"run": parent.id, "checkpoint": plan.checkpoint.name, "step": plan.step}, **plan.records,
    )  # fmt: skip
    run.event(plan.step, "forked", parent=parent.id, checkpoint=plan.checkpoint.name)
    return run, loaded.recipe, run.checkpoint_dirs()[-1]


def share_run(world: World, make: Callable[[], tuple[Run, Recipe, Path | None]]) -> tuple[Run, Recipe, Path | None]:
    """What `make` gives (a run that this process writes, its recipe, the checkpoint to go on from) for all processes:
    rank 0 makes it, the others follow that run.
    """
    made: list[tuple[Run, Recipe, Path | None]] = []

    def told() -> tuple[Path, Recipe, Path | None]:
        made.append(make())
        run, recipe, checkpoint = made[0]
        return run.dir, recipe, checkpoint

    run_dir, recipe, checkpoint = world.from_main(told)
    return made[0] if made else (FollowedRun(run_dir, world.rank), recipe, checkpoint)


def run_session(
    run: Run, recipe: Recipe, root: Path, watcher: Watcher, resume: Path | None, world: World = ALONE
) -> str:
    """Train a run to its end. Returns how it ended: "done" or "interrupted". Errors end it as failed and go on."""
    from vlmrl.checkpoint.checked_files import compared_once
    from vlmrl.train.loggers import loggers_of
    from vlmrl.train.out_of_memory import explaining
    from vlmrl.train.rl import train_rl
    from vlmrl.train.saving import finish_failed
    from vlmrl.train.sft import train_sft
    from vlmrl.train.state import open_session

    with run, explaining(recipe):
        rank_process.join_run(run.dir, run.attempt)
        rank_process.phase("load")
        with loggers_of(run, recipe, root, watcher.message) as loggers:
            with compared_once(resume, world):
                session = open_session(recipe, run, root, watcher, resume=resume, world=world)
            session.loggers = loggers
            session.progress.halved |= rank_process.halved()
            try:
                status = (train_rl if recipe.kind == "rl" else train_sft)(session)
            except Exception:
                finish_failed(session)
                raise
            finally:
                session.close()
            loggers.ending = "interrupted" if status == "interrupted" else "done"
            rank_process.phase("closing the loggers")
        run.finish("interrupted" if status == "interrupted" else "done")
        return status
