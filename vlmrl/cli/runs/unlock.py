"""`vlmrl runs unlock`: remove the lock of a process on another machine that has ended."""

from __future__ import annotations

from vlmrl.cli import options
from vlmrl.cli.output import emit, tell


def unlock(run: options.RunRef, runs: options.Runs = None, as_json: options.Json = False) -> None:
    """Remove the lock of a process that ended on another machine.

    Use it only if it is certain that the process has ended. Locks of processes that ended on this machine need no
    command.

    Example: vlmrl runs unlock last
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.lock import force_release

    run_dir = find(runs_root(runs), run)
    owner = force_release(run_dir)
    emit({"run": run_dir.name, "owner": f"{owner.pid} on {owner.host}" if owner else None}, as_json)
    if not as_json:
        was = f"it was locked by process {owner.pid} on {owner.host}" if owner else "it was not locked"
        tell(f"{run_dir.name} is unlocked: {was}")
