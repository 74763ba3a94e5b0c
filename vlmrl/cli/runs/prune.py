"""`vlmrl runs prune`: delete old checkpoints, rollouts and images."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.cli.show.runs_tables import show_pruned
from vlmrl.errors import StoreError


def prune(
    run: options.RunRef,
    keep_last: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of newest checkpoints to keep; the best one is also kept.", show_default=False
        ),
    ] = None,
    keep_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Number of newest steps whose rollouts to keep.", show_default=False)
    ] = None,
    keep_rollouts_every: Annotated[
        int, typer.Option(min=0, help="Of the older steps, keep the rollouts of every Nth; 0 = of none.")
    ] = 0,
    media: Annotated[bool, typer.Option("--media", help="Delete images that no remaining rollout names.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only say what would be deleted.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted, even with --yes.")
    ] = False,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Delete old checkpoints, rollouts and images of a run.

    Nothing is deleted without --yes, or while the run is being written.

    Example: vlmrl runs prune last --keep-last 1 --keep-rollouts 20 --yes

    The newest complete checkpoint, the best one, and those that other runs began with always stay.
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.manifest import read_manifest
    from vlmrl.store.prune import RolloutRule, Rules, children, plan_prune, prune_run
    from vlmrl.store.summary import tree_bytes

    if keep_last is None and keep_rollouts is None and not media:
        hint = "--keep-last N (checkpoints), --keep-rollouts N, --media"
        raise StoreError("no option says what to delete", hint=hint)
    run_dir = find(runs_root(runs), run)
    manifest = read_manifest(run_dir)
    keep = set(children(run_dir))
    keep |= {manifest.best.step} if manifest.best else set()
    rules = Rules(keep_last, RolloutRule(keep_rollouts, keep_rollouts_every) if keep_rollouts else None, media)
    doomed = plan_prune(run_dir, rules, keep)
    sizes = {path: tree_bytes(path) if path.is_dir() else path.stat().st_size for path in doomed}
    really = yes and not dry_run
    if really:
        doomed = prune_run(run_dir, rules, keep)
    names = [p.name if p.is_dir() or p.parent.name == "checkpoints" else f"{p.parent.name}/{p.name}" for p in doomed]
    freed = sum(sizes.get(path, 0) for path in doomed)
    emit({"run": manifest.id, "deleted" if really else "would_delete": names, "bytes": freed}, as_json)
    if not as_json:
        show_pruned(run_dir, names, freed, really)
