"""Checkpoints of a run that trains: what goes into one, who writes it, and what is done when it is complete.

The training itself writes it, or a thread of it writes it from copies while training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import torch

from vlmrl.checkpoint import io
from vlmrl.checkpoint.proof import make_proof
from vlmrl.dist import rank_process
from vlmrl.dist.fsdp import HostCopies
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import VlmrlError
from vlmrl.train.forward_passes import fill_logps
from vlmrl.train.step_batch import StepBatch

if TYPE_CHECKING:
    from vlmrl.train.state import Session

PROOF_ROLLOUTS = 8
"""Rollouts whose log-probs go into each checkpoint."""


@dataclass(frozen=True)
class Written:
    """A whole checkpoint. Args: keep: steps of others that were not to be removed when it was begun."""

    step: int
    folder: Path
    keep: Sequence[int]


@dataclass
class Saver:
    """Writes one checkpoint at a time.

    Args:
        world: the processes, as those who write them talk to each other.
        copies: what is written beside the training is copied there first; None = nothing is.
    """

    world: World = ALONE
    copies: HostCopies | None = None
    _under_way: Future[Written] | None = None

    @classmethod
    def of(cls, asynchronous: bool | None, device: torch.device, world: World) -> Saver:
        """The saver of a recipe's `checkpoint.asynchronous`. All processes make it together."""
        on_a_card = device.type == "cuda"
        if not (on_a_card if asynchronous is None else asynchronous):
            return cls(world)
        return cls(world.apart(), HostCopies(pinned=on_a_card))

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was begun, and `result` not asked for. The same on all processes."""
        return self._under_way is not None

    @property
    def written(self) -> bool:
        """Whether `result` would give an answer at once."""
        return self._under_way is None or self._under_way.done()

    def begin(self, write: Callable[[], Written]) -> None:
        """Let `write` run: to its end before this returns, or, with copies, beside what comes next."""
        assert self._under_way is None, "one checkpoint at a time"
        done = self._under_way = Future[Written]()

        def work() -> None:
            try:
                done.set_result(write())
            except BaseException as error:
                done.set_exception(error)

        if self.copies is None:
            work()
        else:  # a daemon: who leaves in a hurry leaves a checkpoint that is not complete, as a kill does
            Thread(target=work, name="checkpoint", daemon=True).start()

    def result(self) -> Written:
        """The checkpoint that was begun, whole on the disk: waits for it. Raises: what `write` raised."""
        assert self._under_way is not None
        done, self._under_way = self._under_way, None
        return done.result()


def save(session: Session, *, wait: bool = False) -> None:
    """Save a checkpoint of the session as it is; one that is on its way to the disk is waited for first.

    Args: wait: return when it is whole, although the run's checkpoints are written while training goes on.
    Raises: CheckpointError when this one or the one before could not be written.
    """
    s, recipe = session, session.recipe
    rank_process.phase("saving", s.progress.step)
    s.rollouts.finish()
    finish_save(s)
    meta = {
        "kind": recipe.kind, "dtype": recipe.model.dtype, "model_type": s.policy.model.config.model_type,
        "base": dict(s.base),
        "policy": {"temperature": s.policy.temperature, "banned_ids": list(s.policy.banned_ids)},
        "encoder": {k: getattr(recipe.model, k) for k in ("min_pixels", "max_pixels", "thinking")},
        "optimizer_updates": s.optimizer.updates,
    }  # fmt: skip
    if recipe.lora is not None:
        meta |= {"lora": recipe.lora.model_dump(mode="json"), "freeze": list(recipe.model.freeze),
                 "quantize": recipe.model.quantize}  # fmt: skip
    data = {
        "progress": asdict(replace(s.progress, seconds=s.seconds)),
        "stream": dict(s.cursor or s.stream.state_dict()),
    }
    value_head = {} if s.policy.value_head is None else s.policy.value_head.state_dict()
    saved = io.CheckpointContent(s.progress.step, meta, data, _proof(s), value_head)
    staged = io.stage(
        s.run.dir, saved, s.policy.model, s.processor, s.optimizer.state_tensors(), s.world, s.policy.saved_dtypes,
        s.saver.copies,
    )  # fmt: skip
    keep = [s.progress.best_step] if recipe.checkpoint.keep_best and s.progress.best_step is not None else []
    s.saver.begin(lambda: Written(saved.step, io.write_staged(staged, s.saver.world), keep))
    s.saved_step = s.progress.step
    if wait or s.saver.copies is None:
        finish_save(s)


def finish_save(session: Session) -> None:
    """Wait for the checkpoint that is on its way to the disk, if there is one; then remove the old ones that the recipe
    does not keep. Raises: CheckpointError when it could not be written.
    """
    s = session
    if s.saver.under_way:
        made = s.saver.result()
        s.run.prune_checkpoints(s.recipe.checkpoint.keep_last, made.keep)
        s.run.event(made.step, "checkpoint saved", folder=made.folder.name)


def look_after_save(session: Session) -> None:
    """Between two steps: as `finish_save`, when no process would have to wait."""
    s = session
    if s.saver.under_way and all(s.world.gather(s.saver.written)):
        finish_save(s)


def finish_failed(session: Session) -> None:
    """As `finish_save`, in a run that ends with an error already: another is a line of its log."""
    try:
        finish_save(session)
    except VlmrlError as error:
        session.run.write_log(f"the checkpoint that was being written failed too: {error.message}")


def _proof(session: Session) -> dict[str, torch.Tensor]:
    """Log-probs of some of the last rollouts of rank 0 under the weights as they are."""
    s = session
    # One rollout a prompt: more prompts prove more.
    items = list({item.group: item for item in s.proof_items}.values())[:PROOF_ROLLOUTS] if s.world.is_main else []
    batch, logps = StepBatch(items, [], [], world=s.world, filler=s.filler), {}
    fill_logps(s.policy, batch, logps, tokens_per_row=1)  # each in a row of its own
    return make_proof(items, [logps[item.trajectory] for item in items]) if items else {}
