"""Course of one attempt of a run: its ranks agree on the run folder, train, and record how the attempt ended.

Importing this module does not import torch: the launching process imports it, too, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.dist import world as rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import VlmrlError
from vlmrl.recipe.schema import Recipe
from vlmrl.store.removal import set_aside
from vlmrl.store.runs import FollowedRun, Run

if TYPE_CHECKING:
    from vlmrl.train.journal import Watcher


def share_run(world: World, make: Callable[[], tuple[Run, Recipe, Path | None]]) -> tuple[Run, Recipe, Path | None]:
    """Let rank 0 make a run, and return it on all ranks.

    Rank 0 writes the run. On the other ranks it is a `FollowedRun`, which only reads.

    Returns: (run, recipe, checkpoint to continue from or None).
    """
    own: list[tuple[Run, Recipe, Path | None]] = []

    def make_and_share() -> tuple[Path, Recipe, Path | None]:
        own.append(make())
        run, recipe, checkpoint = own[0]
        return run.dir, recipe, checkpoint

    run_dir, recipe, checkpoint = world.from_main(make_and_share)
    return own[0] if own else (FollowedRun(run_dir, world.rank), recipe, checkpoint)


def run_session(
    run: Run, recipe: Recipe, root: Path, watcher: Watcher, resume: Path | None, world: World = ALONE
) -> str:
    """Train a run to its end and return how it ended: "done" or "interrupted". An error ends it as failed.

    A run of one process that fails before its first step is set aside. Of several processes, the launcher does this.
    """
    # Imported here, since these modules import torch.
    from vlmrl.checkpoint.io import compared_once
    from vlmrl.train.checkpointing import finish_failed, load_progress, restore
    from vlmrl.train.journal import Progress, loggers_of
    from vlmrl.train.learner import explaining
    from vlmrl.train.rl import train_rl
    from vlmrl.train.session import open_session
    from vlmrl.train.sft import train_sft

    with _setting_aside(run, watcher, world), run, explaining(recipe):
        rank_process.join_run(run.dir, run.attempt)
        rank_process.phase("load")
        with loggers_of(run, recipe, root, watcher.message) as loggers:
            with compared_once(resume, world):
                progress = Progress() if resume is None else load_progress(resume, run, recipe.eval.goal)
                session = open_session(recipe, run, root, watcher, loggers, progress, resume=resume, world=world)
                if resume is not None:
                    restore(session, resume)
            # Budgets that the launcher halved before it started all ranks again.
            progress.halved |= rank_process.halved()
            try:
                status = (train_rl if recipe.kind == "rl" else train_sft)(session)
            except Exception:
                finish_failed(session.saver, run)
                raise
            finally:
                session.close()
            loggers.ending = "interrupted" if status == "interrupted" else "done"
            rank_process.phase("closing the loggers")
        run.finish("interrupted" if status == "interrupted" else "done")
        return status


@contextmanager
def _setting_aside(run: Run, watcher: Watcher, world: World) -> Iterator[None]:
    try:
        yield
    except Exception:
        if world.size == 1 and not rank_process.launched():
            with suppress(VlmrlError, OSError):  # such as a full disk: the first error is raised
                if line := set_aside(run.dir):
                    watcher.message(line)
        raise
