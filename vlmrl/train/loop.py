"""What the loops of `sft` and `train` share: when to validate, save and stop, and what Ctrl-C does."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from vlmrl.dist import rank_process
from vlmrl.evaluate.metrics import metric_value, task_problems
from vlmrl.evaluate.records import KEPT_BYTES, training_folder, write_evaluation
from vlmrl.evaluate.run import evaluate
from vlmrl.rollout.engine import Generator
from vlmrl.setup.model import greedy_params
from vlmrl.tasks.source import Source
from vlmrl.train.checkpointing import finish_save, look_after_save, save
from vlmrl.train.resume import ALL_DONE
from vlmrl.train.state import Session


@dataclass
class StopRequest:
    """Set by the first Ctrl-C (or SIGTERM): the step is finished, a checkpoint saved, the run ended as interrupted."""

    asked: bool = False


@contextmanager
def catch_interrupt(session: Session) -> Iterator[StopRequest]:
    """While training: the first signal asks for a stop after the step, the second stops at once."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True
        session.watcher.message(
            "stopping after this step, then saving a checkpoint (again: stop at once, without saving)"
        )

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Clock:
    """Seconds spent in each part of a step: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        rank_process.phase(part)
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`time/<part>_seconds` of each part, and `time/step_seconds` of all since the clock was made."""
        parts = {f"time/{part}_seconds": seconds for part, seconds in self.seconds.items()}
        return parts | {"time/step_seconds": time.perf_counter() - self._start}


def validate(session: Session, generator: Generator) -> None:
    """Greedy validation of the current policy on every validation source; notes whether it is the best so far."""
    s, settings, step = session, session.recipe.eval, session.progress.step
    if not s.validation or s.progress.validated == step:
        return
    rank_process.phase("validation", step)
    values, flat = [], {}
    params = greedy_params(s.recipe, s.policy, s.processor.tokenizer)
    for source in s.validation:
        found = evaluate(
            generator, s.encoder, source, s.scorers[source.name], params=params, seed=s.recipe.train.seed,
            max_rows=settings.max_rows, world=s.world, artifact_bytes=KEPT_BYTES // 8,
            patient=step > 0 and s.recipe.reward.on_unavailable == "mask",
        )  # fmt: skip
        for problem in task_problems(found.summary):
            s.watcher.message(f"validation on {source.name}: {problem}")
        values.append(metric_value(found.summary, settings.metric))
        prefix = "eval" if len(s.validation) == 1 else f"eval/{source.name}"
        flat |= {f"{prefix}/{name}": m["value"] for name, m in found.summary["metrics"].items()}
        flat |= {
            f"{prefix}/{name}_{end}": m[end] for name, m in found.summary["metrics"].items() for end in ("low", "high")
        }
        if s.world.is_main:
            folder = training_folder(s.run.dir, source.split, source.name, step)
            write_evaluation(folder, found, _validation_meta(source, step, settings.max_rows))
    if all(math.isnan(v) for v in values):
        s.watcher.message(f"validation has no metric `{settings.metric}` (eval.metric): no step can be the best")
    value = sum(values) / len(values)
    best = s.progress.count_validation(value, settings.goal)
    if best:
        s.run.set_best(step, settings.metric, value)
    s.log(step, "validation", flat | {"eval/metric": value, "eval/is_best": best})
    s.watcher.validation(step, flat, best)


def validate_at_start(session: Session, generator: Generator) -> None:
    """Validate the model that a run begins with, unless it has been, or the recipe leaves that out."""
    if session.progress.validated < 0 and session.recipe.eval.at_start:
        validate(session, generator)


def _validation_meta(source: Source, step: int, max_rows: int | None) -> dict[str, Any]:
    return {
        "step": step, "greedy": True, "checkpoint": None, "during": "training", "split": source.split,
        "source": source.name, "role": "validation", "max_rows": max_rows,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
    }  # fmt: skip


def after_step(session: Session, generator: Generator) -> None:
    """Validation and checkpoint where the recipe wants them after this step. A new best is always saved."""
    settings, step = session.recipe, session.progress.step
    rank_process.phase("after the update", step)
    look_after_save(session)
    if settings.eval.every_steps and step % settings.eval.every_steps == 0:
        validate(session, generator)
    every = settings.checkpoint.every_steps
    new_best = settings.checkpoint.keep_best and session.progress.best_step == step
    if (every and step % every == 0) or new_best:
        save(session)


def stop_reason(session: Session, request: StopRequest) -> str | None:
    """Why the loop ends now; None = it goes on. The same on all processes: one that is asked to stop asks all, and the
    clock is that of rank 0.
    """
    s, settings = session, session.recipe
    told = s.world.gather((request.asked, s.seconds))
    asked, seconds = any(a for a, _ in told), told[0][1]
    if s.progress.step >= settings.train.steps:
        return ALL_DONE
    if asked:
        return "interrupted"
    if settings.train.max_seconds and seconds >= settings.train.max_seconds:
        return f"train.max_seconds = {settings.train.max_seconds} is over"
    above, best = settings.train.stop_above, s.progress.best_value
    if above is not None and best is not None and s.progress.best_step == s.progress.step and _reached(s, best, above):
        return f"{settings.eval.metric} reached {best:.4g} (train.stop_above = {above})"
    if settings.eval.patience and s.progress.stale >= settings.eval.patience:
        return f"{settings.eval.metric} has not improved for {s.progress.stale} validations (eval.patience)"
    return None


def _reached(session: Session, best: float, target: float) -> bool:
    return best >= target if session.recipe.eval.goal == "max" else best <= target


def end(session: Session, generator: Generator, reason: str) -> str:
    """Last validation and last checkpoint. Returns the run's status."""
    session.rollouts.finish()
    interrupted = reason == "interrupted"
    if not interrupted:
        validate(session, generator)
    if session.saved_step != session.progress.step:
        save(session)
    rank_process.phase("saving")
    finish_save(session)
    session.run.event(session.progress.step, "ended", reason=reason)
    return "interrupted" if interrupted else "done"


def memory_metrics(session: Session) -> dict[str, float]:
    """`memory/peak_bytes`: of the device on CUDA (allocated), else of the process (resident); of the process with the
    most. There also how many shapes FlexAttention was compiled for, where it is used."""
    if session.policy.device.type == "cuda":
        import torch

        from vlmrl.model.attention.flex import compiled_shapes

        peak = float(torch.cuda.max_memory_allocated())
        more = {"policy/attention_compilations": float(len(compiled_shapes))} if compiled_shapes else {}
    else:
        import resource
        import sys

        peak, more = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), {}
        peak *= 1 if sys.platform == "darwin" else 1024
    return {"memory/peak_bytes": max(session.world.gather(peak))} | more
