"""Checkpoints of a training run: collecting their content, writing them, and restoring a run from one.

The training writes a checkpoint itself, or a thread writes it from copies while training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from vlmrl.checkpoint import io
from vlmrl.checkpoint.proof import make_proof
from vlmrl.data.dataset import SavedStream
from vlmrl.dist import world
from vlmrl.dist.world import World
from vlmrl.errors import VlmrlError
from vlmrl.model.packing import TrainItem
from vlmrl.store.checkpoints import DATA, read_meta
from vlmrl.store.manifest import check_record, model_of
from vlmrl.store.runs import Run
from vlmrl.train.journal import Progress
from vlmrl.train.learner import Learner
from vlmrl.train.session import Saver, Session, Written
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import fill_logps

PROOF_ROLLOUTS = 8
"""Number of rollouts whose log-probs each checkpoint holds as its proof."""


def save(session: Session, *, wait: bool = False) -> None:
    """Save a checkpoint of the session. Wait first for an earlier one that is still being written.

    Args:
        wait: return only when the checkpoint is complete, even if a thread writes it.
    Raises: CheckpointError when this one or the one before could not be written.
    """
    recipe, learner, journal, saver = session.recipe, session.learner, session.journal, session.saver
    policy, progress = learner.policy, journal.progress
    world.phase("saving", progress.step)
    journal.rollouts.finish()  # a complete checkpoint has the rollouts and metrics of its steps beside it
    finish_save(saver)
    meta = {
        "kind": recipe.kind,
        "dtype": recipe.model.dtype,
        "model_type": policy.model.config.model_type,
        "base": dict(session.base),
        "policy": {"temperature": policy.temperature, "banned_ids": list(policy.banned_ids)},
        "encoder": {k: getattr(recipe.model, k) for k in ("min_pixels", "max_pixels", "thinking")},
        "optimizer_updates": learner.optimizer.updates,
    }
    if recipe.lora is not None:
        meta |= {
            "lora": recipe.lora.model_dump(mode="json"),
            "freeze": list(recipe.model.freeze),
            "quantize": recipe.model.quantize,
        }
    data = {
        "progress": asdict(replace(progress, seconds=journal.seconds)),
        "stream": session.feed.position,
    }
    value_head = {} if policy.value_head is None else policy.value_head.state_dict()
    content = io.CheckpointContent(progress.step, meta, data, _proof(learner, saver.proof_items), value_head)
    # Tensors are copied here, if there are copies: training may change them while the thread writes.
    staged = io.stage(
        journal.run.dir,
        content,
        policy.model,
        session.feed.encoder.processor,
        learner.optimizer.state_tensors(),
        learner.world,
        policy.saved_dtypes,
        saver.copies,
    )
    keep = [progress.best_step] if recipe.checkpoint.keep_best and progress.best_step is not None else []
    saver.begin(lambda: Written(content.step, io.write_staged(staged, saver.world), keep))
    saver.saved_step = progress.step
    if wait or saver.copies is None:
        finish_save(saver)


def finish_save(saver: Saver) -> None:
    """Wait for the checkpoint that is being written, if there is one, and call `on_complete` with it.

    Raises: CheckpointError when it could not be written.
    """
    if saver.under_way is not None:
        saver.on_complete(saver.result())


def look_after_save(saver: Saver, world: World) -> None:
    """Call `finish_save` between two steps, if no rank would have to wait in it.

    Args:
        world: the ranks, in the process group that the training uses.
    """
    if saver.under_way is not None and all(world.gather(saver.written)):
        finish_save(saver)


def finish_failed(saver: Saver, run: Run) -> None:
    """Call `finish_save` in a run that has already failed. A further error is only a line in the run's log."""
    try:
        finish_save(saver)
    except VlmrlError as error:
        run.write_log(f"the checkpoint that was being written failed too: {error.message}")


def _proof(learner: Learner, trajectories: Sequence[TrainItem]) -> dict[str, torch.Tensor]:
    """Return log-probs of some of rank 0's last rollouts under the current weights; {} on other ranks."""
    # One rollout per prompt: more prompts prove more. The other ranks have no items, but run the forward passes too.
    items = list({item.group: item for item in trajectories}.values())[:PROOF_ROLLOUTS] if learner.world.is_main else []
    batch, logps = StepBatch(items, [], [], world=learner.world, filler=learner.filler), {}
    fill_logps(learner.policy, batch, logps, tokens_per_row=1)  # each in a packed row of its own
    return make_proof(items, [logps[item.trajectory] for item in items]) if items else {}


def load_progress(folder: Path, run: Run, goal: Literal["max", "min"]) -> Progress:
    """Return the counters with which a run continues from a checkpoint.

    The last validation of a run may come after the checkpoint of its step was saved: then it is counted here.

    Args:
        goal: the recipe's `eval.goal`.
    """
    progress = _state(folder).progress.begun_anew(run.manifest)
    if 0 <= progress.validated < progress.step:
        line = next((n for n in run.metrics("validation") if n["step"] == progress.step), None)
        if line is not None:
            progress.count_validation(line["eval/metric"], goal)
    return progress


@dataclass(frozen=True)
class SavedState:
    """Content of a checkpoint's data.json."""

    progress: Progress
    stream: SavedStream


def _state(folder: Path) -> SavedState:
    return check_record(model_of(SavedState), io.load_data(folder), DATA, folder, strict=False)


def restore(session: Session, folder: Path) -> None:
    """Load a checkpoint's optimizer state, data position and random state into a session.

    The session already has the checkpoint's weights and counters.
    """
    optimizer = session.learner.optimizer
    tensors = io.load_optimizer_tensors(folder, optimizer.masters)
    optimizer.load_state_tensors(tensors, read_meta(folder).get("optimizer_updates", 0))
    session.saver.saved_step = session.journal.progress.step
    for note in session.feed.stream.adopt(asdict(_state(folder).stream)):
        session.journal.watcher.message(note)
    io.load_rng(folder, session.learner.world)
