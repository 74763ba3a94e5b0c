"""Which checkpoint of a run is meant, and why it is that one."""

from __future__ import annotations

from pathlib import Path

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.manifest import Manifest

AS_ASKED = "as asked for"
"""Why it is that checkpoint, where a person named the step or the folder."""


def choose_checkpoint(run_dir: Path, manifest: Manifest, which: str | int = "best") -> tuple[Path, str]:
    """Return (checkpoint, why it is that one, in words).

    Args: which: a step, "last", or "best" (the last where no validation has named a best).
    Raises: StoreError when there is none, or none of the best step: another one is never passed off as the best.
    """
    found, best = layout.complete_checkpoints(run_dir), manifest.best
    have = ", ".join(p.name for p in found) or "none"
    wanted = best.step if which == "best" and best else which
    exact = layout.checkpoint_dir(run_dir, wanted) if isinstance(wanted, int) else None
    if exact in found:
        why = f"the best by {best.metric} ({best.value:.4g})" if which == "best" and best else AS_ASKED
        return exact, why
    if which == "best" and best and found:
        raise StoreError(
            f"run {manifest.id} has no checkpoint of its best step, {best.step} ({best.metric} {best.value:.4g})"
            + (": that is the model it started from; no later step was better" if best.step == 0 else ""),
            where=str(run_dir),
            hint=f"give --checkpoint last, or in a recipe the folder of a checkpoint; complete ones: {have}",
        )  # fmt: skip
    if found and not isinstance(which, int):
        return found[-1], "the last; no validation has named a best" if which == "best" else "the last"
    older = isinstance(which, int) and bool(found) and found[-1].name > layout.step_name(which)
    why = "; `checkpoint.keep_last` says how many of the newest a run keeps, besides the best" if older else ""
    raise StoreError(
        f"run {manifest.id} has no checkpoint {which}", where=str(run_dir), hint=f"complete ones: {have}{why}"
    )
