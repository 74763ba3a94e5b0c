"""From a checked recipe to a run that trains: makes or reopens the run folder, runs the loop, says how it ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.dist import rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.recipe.schema import Recipe
from vlmrl.store.read_only_run import FollowedRun
from vlmrl.store.runs import Run

if TYPE_CHECKING:
    from vlmrl.train.state import Watcher


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
    from vlmrl.train.checkpointing import finish_failed
    from vlmrl.train.loggers import loggers_of
    from vlmrl.train.out_of_memory import explaining
    from vlmrl.train.rl import train_rl
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
