"""Checkpoints of a run that trains: what goes into one and comes back, who writes it, what follows when it is complete.

The training itself writes it, or a thread of it writes it from copies while training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal

import torch

from vlmrl.checkpoint import io
from vlmrl.checkpoint.proof import make_proof
from vlmrl.data.packing import TrainItem
from vlmrl.dist import rank_process
from vlmrl.dist.fsdp import HostCopies
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import VlmrlError
from vlmrl.store.checkpoints import read_meta
from vlmrl.store.runs import Run
from vlmrl.train.forward_passes import fill_logps
from vlmrl.train.learner import Learner
from vlmrl.train.progress import Progress
from vlmrl.train.step_batch import StepBatch

if TYPE_CHECKING:
    from vlmrl.train.session import Session

PROOF_ROLLOUTS = 8
"""Rollouts whose log-probs go into each checkpoint."""


@dataclass(frozen=True)
class Written:
    """Complete checkpoint on the disk.

    Args:
        step: its step.
        folder: its folder.
        keep: steps of other checkpoints that were not to be removed when it was begun.
    """

    step: int
    folder: Path
    keep: Sequence[int]


@dataclass
class Saver:
    """Writer of a run's checkpoints, one at a time.

    Args:
        world: the processes, in the group that their writers use.
        copies: where tensors are copied before a thread writes them; None = no thread, nothing is copied.
        on_complete: called with each checkpoint when it is complete and `finish_save` has waited for it.
        saved_step: step of the newest checkpoint, which may still be on its way to the disk; None = there is none.
        proof_items: trajectories of the newest step, whose log-probs the next checkpoint holds as a proof.
    """

    world: World = ALONE
    copies: HostCopies | None = None
    on_complete: Callable[[Written], None] = lambda written: None
    saved_step: int | None = None
    proof_items: Sequence[TrainItem] = ()
    _under_way: Future[Written] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, asynchronous: bool | None, device: torch.device, world: World,
        on_complete: Callable[[Written], None] = lambda written: None,
    ) -> Saver:  # fmt: skip
        """Return the saver of a recipe's `checkpoint.asynchronous`. All processes call it together."""
        on_gpu = device.type == "cuda"
        if not (on_gpu if asynchronous is None else asynchronous):
            return cls(world, None, on_complete)
        return cls(world.apart(), HostCopies(pinned=on_gpu), on_complete)

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was begun and `result` not called since. The same on all processes."""
        return self._under_way is not None

    @property
    def written(self) -> bool:
        """Whether `result` would return at once."""
        return self._under_way is None or self._under_way.done()

    def begin(self, write: Callable[[], Written]) -> None:
        """Run `write`: to its end before this returns or, with copies, in a thread beside the training."""
        assert self._under_way is None, "one checkpoint at a time"
        done = self._under_way = Future[Written]()

        def work() -> None:
            try:
                done.set_result(write())
            except BaseException as error:
                done.set_exception(error)

        if self.copies is None:
            work()
        else:  # daemon thread: an abrupt exit leaves the checkpoint incomplete, as a kill does
            Thread(target=work, name="checkpoint", daemon=True).start()

    def result(self) -> Written:
        """Wait for the checkpoint that was begun and return it, complete on the disk. Raises: what `write` raised."""
        assert self._under_way is not None
        done, self._under_way = self._under_way, None
        return done.result()


def keep_newest(run: Run, keep_last: int, written: Written) -> None:
    """Remove the old checkpoints that the recipe does not keep, and write the event of the new one."""
    run.prune_checkpoints(keep_last, written.keep)
    run.event(written.step, "checkpoint saved", folder=written.folder.name)


def save(session: Session, *, wait: bool = False) -> None:
    """Save a checkpoint of the session as it is; one that is on its way to the disk is waited for first.

    Args:
        session: what is saved.
        wait: return when it is complete, although the run's checkpoints are written while training goes on.

    Raises: CheckpointError when this one or the one before could not be written.
    """
    recipe, learner, journal, saver = session.recipe, session.learner, session.journal, session.saver
    policy, progress = learner.policy, journal.progress
    rank_process.phase("saving", progress.step)
    journal.rollouts.finish()
    finish_save(saver)
    meta = {
        "kind": recipe.kind, "dtype": recipe.model.dtype, "model_type": policy.model.config.model_type,
        "base": dict(session.base),
        "policy": {"temperature": policy.temperature, "banned_ids": list(policy.banned_ids)},
        "encoder": {k: getattr(recipe.model, k) for k in ("min_pixels", "max_pixels", "thinking")},
        "optimizer_updates": learner.optimizer.updates,
    }  # fmt: skip
    if recipe.lora is not None:
        meta |= {"lora": recipe.lora.model_dump(mode="json"), "freeze": list(recipe.model.freeze),
                 "quantize": recipe.model.quantize}  # fmt: skip
    data = {
        "progress": asdict(replace(progress, seconds=journal.seconds)),
        "stream": session.feed.position,
    }
    value_head = {} if policy.value_head is None else policy.value_head.state_dict()
    saved = io.CheckpointContent(progress.step, meta, data, _proof(learner, saver.proof_items), value_head)
    staged = io.stage(
        journal.run.dir, saved, policy.model, session.feed.encoder.processor, learner.optimizer.state_tensors(),
        learner.world, policy.saved_dtypes, saver.copies,
    )  # fmt: skip
    keep = [progress.best_step] if recipe.checkpoint.keep_best and progress.best_step is not None else []
    saver.begin(lambda: Written(saved.step, io.write_staged(staged, saver.world), keep))
    saver.saved_step = progress.step
    if wait or saver.copies is None:
        finish_save(saver)


def finish_save(saver: Saver) -> None:
    """Wait for the checkpoint that is on its way to the disk, if there is one, and do what follows it.

    Raises: CheckpointError when it could not be written.
    """
    if saver.under_way:
        saver.on_complete(saver.result())


def look_after_save(saver: Saver, world: World) -> None:
    """Do what `finish_save` does, between two steps, when no process would have to wait.

    Args:
        saver: the saver of this process.
        world: the processes, in the group that the training uses.
    """
    if saver.under_way and all(world.gather(saver.written)):
        finish_save(saver)


def finish_failed(saver: Saver, run: Run) -> None:
    """Do what `finish_save` does in a run that ends with an error already: another error is a line of its log."""
    try:
        finish_save(saver)
    except VlmrlError as error:
        run.write_log(f"the checkpoint that was being written failed too: {error.message}")


def _proof(learner: Learner, trajectories: Sequence[TrainItem]) -> dict[str, torch.Tensor]:
    """Return log-probs of some of the last rollouts of rank 0 under the weights as they are."""
    # One rollout of each prompt: more prompts prove more.
    items = list({item.group: item for item in trajectories}.values())[:PROOF_ROLLOUTS] if learner.world.is_main else []
    batch, logps = StepBatch(items, [], [], world=learner.world, filler=learner.filler), {}
    fill_logps(learner.policy, batch, logps, tokens_per_row=1)  # each in a packed row of its own
    return make_proof(items, [logps[item.trajectory] for item in items]) if items else {}


def load_progress(folder: Path, run: Run, goal: Literal["max", "min"]) -> Progress:
    """Return the counters with which a run goes on from a checkpoint.

    The validation that ends a run comes after the checkpoint of its step was saved: it is counted here.

    Args:
        folder: the checkpoint.
        run: the run that goes on.
        goal: the recipe's `eval.goal`.
    """
    progress = Progress(**io.load_data(folder)["progress"]).begun_anew(run.manifest)
    if 0 <= progress.validated < progress.step:
        line = next((n for n in run.metrics("validation") if n["step"] == progress.step), None)
        if line is not None:
            progress.count_validation(line["eval/metric"], goal)
    return progress


def restore(session: Session, folder: Path) -> None:
    """Load a checkpoint's optimizer, data position and random state into a session that has the checkpoint's weights
    and counters already.
    """
    optimizer = session.learner.optimizer
    tensors = io.load_optimizer_tensors(folder, optimizer.masters)
    optimizer.load_state_tensors(tensors, read_meta(folder)["optimizer_updates"])
    session.saver.saved_step = session.journal.progress.step
    for note in session.feed.stream.adopt(io.load_data(folder)["stream"]):
        session.journal.watcher.message(note)
    io.load_rng(folder, session.learner.world)
