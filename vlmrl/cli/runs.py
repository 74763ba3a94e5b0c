"""`vlmrl runs`: list, show, verify, pack, note, tag, du, prune, unlock; `watch` and `diagnose` have own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli.output import JSON_HELP, emit, say, show_table, tell, warn_of_namesakes
from vlmrl.errors import ProblemsError, StoreError

if TYPE_CHECKING:
    from vlmrl.store.listing import ListedRun

Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
Root = Annotated[Path | None, typer.Option("--runs", help="Where runs are. Default: $VLMRL_RUNS, else ./runs.")]
Ref = Annotated[str, typer.Argument(metavar="RUN", help="A unique prefix of its id, its name, `last`, or its folder.")]

group = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The record of runs: list, show, verify, pack, tidy up."
)


def register(app: typer.Typer) -> None:
    from vlmrl.cli.diagnose import diagnose
    from vlmrl.cli.watch import watch

    group.command("watch")(watch)
    group.command("diagnose")(diagnose)
    app.add_typer(group, name="runs")


@group.command("list")
def list_(
    kind: Annotated[str | None, typer.Option(help="Only this kind: rl, sft, eval ...")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    status: Annotated[
        str | None, typer.Option(help="Only this status: running, done, failed, interrupted, killed, damaged.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many, newest first; 0 = all.")] = 30,
    runs: Root = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first.

    Example: vlmrl runs list --kind rl --tag paper --limit 10
    """
    from vlmrl.errors import unknown
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import list_runs, run_ids
    from vlmrl.store.manifest import STATUSES

    root = runs_root(runs)
    known = (*STATUSES, "damaged")
    if status is not None and status not in known:
        raise unknown("status", status, known, error=StoreError)
    total = len(run_ids(root))
    found = [_line(run) for run in list_runs(root, kind=kind, tag=tag, status=status, limit=limit)]
    emit({"root": str(root), "total": total, "runs": found}, as_json)
    if as_json:
        return
    if not found:
        filters = any(x is not None for x in (kind, tag, status))
        say(f"no runs in {root}" if not total or not filters else f"none of {total} runs in {root} fits")
        return
    rows = [
        (r["id"], r["name"] or "", r["kind"], r["status"], _or_empty(r["step"]), _best(r["best"]), r["age"], _about(r))
        for r in found
    ]
    show_table("", ("run", "name", "kind", "status", "step", "best", "age", "about"), rows)
    if limit and len(found) == limit and total > limit:
        say(f"\nthe newest {limit} of {total} runs; --limit 0 lists all")


@group.command()
def show(
    run: Ref,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="STEP[/PROMPT[/SAMPLE]]", help="Show responses instead: of a step, of a prompt of it, or one.",
            show_default=False,
        ),
    ] = None,
    runs: Root = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what happened in a run: how it ended, last numbers, checkpoints, how to go on.

    Example: vlmrl runs show last --rollout 12
    """
    from vlmrl.cli.run_facts import print_facts
    from vlmrl.store.layout import runs_root
    from vlmrl.store.runs import open_run
    from vlmrl.store.summary import describe

    opened = open_run(runs_root(runs), run)
    if rollout is not None:
        from vlmrl.cli.rollout_facts import show_rollout

        return show_rollout(opened, rollout, as_json)
    about = describe(opened)
    emit(about, as_json)
    if not as_json:
        print_facts(about)


@group.command()
def verify(run: Ref, runs: Root = None, as_json: Json = False) -> None:
    """Read every file of a run and check it: schemas, hashes, rollouts against metrics, images. Exit code 2 if broken.

    Example: vlmrl runs verify last
    """
    from dataclasses import asdict

    from vlmrl.errors import format_error
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.verify import verify_run

    run_dir = find(runs_root(runs), run)
    verdict = verify_run(run_dir, _images(run_dir))
    result = {
        "run": run_dir.name,
        "ok": not verdict.errors,
        "counts": verdict.counts,
        "problems": [asdict(p) for p in verdict.problems],
    }
    emit(result, as_json)
    if not as_json:
        for problem in verdict.warnings:
            tell(format_error(problem.message, problem.where, problem.hint, "warning"))
        checked = ", ".join(f"{what} {n}" for what, n in verdict.counts.items())
        state = "is whole" if not verdict.errors else f"has {len(verdict.errors)} problem(s)"
        tell(f"{run_dir.name} {state} (read: {checked})")
    if verdict.errors:
        if as_json:
            raise typer.Exit(2)
        raise ProblemsError(verdict.errors)


@group.command()
def pack(
    run: Ref,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: <run id>.tar.gz here.")] = None,
    checkpoints: Annotated[str, typer.Option(help="Which checkpoints go along: none, last, all.")] = "none",
    runs: Root = None,
    as_json: Json = False,
) -> None:
    """Make one self-contained file of a run: the record and every image its rollouts name.

    Example: vlmrl runs pack last -o digits.tar.gz    (elsewhere: tar xf digits.tar.gz; vlmrl runs show ./<run id>)
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.pack import pack_run

    if checkpoints not in ("none", "last", "all"):
        raise StoreError(f"--checkpoints cannot be `{checkpoints}`", hint="one of: none, last, all")
    run_dir = find(runs_root(runs), run)
    images = _images(run_dir)
    target = output or Path(f"{run_dir.resolve().name}.tar.gz")
    if target.is_dir():
        target = target / f"{run_dir.resolve().name}.tar.gz"
    packed = pack_run(run_dir, target, images, checkpoints=checkpoints)  # type: ignore[arg-type]
    result = {
        "archive": str(packed.path),
        "bytes": packed.bytes,
        "files": packed.num_files,
        "images": packed.num_images,
        "missing_images": list(packed.missing),
        "left_out": list(packed.left_out),
    }
    emit(result, as_json)
    if as_json:
        return
    tell(f"{packed.path}: {packed.num_files} files, {packed.num_images} images, {_size(packed.bytes)}")
    if packed.left_out:
        say(f"left out: {', '.join(packed.left_out)} (--checkpoints last or all takes checkpoints along)")
    if packed.missing:
        why = f": {'; '.join(images.notes)}" if images.notes else ""
        say(f"warning: {len(packed.missing)} image(s) that the rollouts name could not be found{why}")


@group.command()
def note(
    run: Ref,
    text: Annotated[str | None, typer.Argument(help="The note; left out: print it; empty: remove it.")] = None,
    name: Annotated[str | None, typer.Option(help="Give the run this name instead; empty removes it.")] = None,
    runs: Root = None,
    as_json: Json = False,
) -> None:
    """Read or write a run's note, or rename it. Works while it trains.

    Example: vlmrl runs note last "lr 1e-4 diverges after step 80"
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.manifest import edit, read_manifest

    run_dir = find(runs_root(runs), run)
    change = text is not None or name is not None
    manifest = edit(run_dir, note=text, name=name) if change else read_manifest(run_dir)
    emit({"run": manifest.id, "name": manifest.name, "note": manifest.note}, as_json)
    if not as_json:
        named = f" ({manifest.name})" if manifest.name else ""
        tell(f"{manifest.id}{named}: {manifest.note or 'no note'}")
    if name:
        warn_of_namesakes(run_dir, name)


@group.command()
def tag(
    run: Ref,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Tag to take away (repeatable).")] = None,
    runs: Root = None,
    as_json: Json = False,
) -> None:
    """Add or remove tags; without any, print them. Works while it trains.

    Example: vlmrl runs tag last paper seed1 --remove draft
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.manifest import edit, read_manifest

    run_dir = find(runs_root(runs), run)
    change = bool(tags or remove)
    manifest = edit(run_dir, add=tags or (), drop=remove or ()) if change else read_manifest(run_dir)
    emit({"run": manifest.id, "tags": list(manifest.tags)}, as_json)
    if not as_json:
        tell(f"{manifest.id}: {', '.join(manifest.tags) or 'no tags'}")


@group.command()
def du(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run; left out: all of them.")] = None,
    runs: Root = None,
    as_json: Json = False,
) -> None:
    """Show how much disk runs take, largest first.

    Example: vlmrl runs du
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find, run_ids
    from vlmrl.store.summary import disk_usage

    root = runs_root(runs)
    folders = [find(root, run)] if run else [root / run_id for run_id in run_ids(root)]
    found = sorted(({"run": f.name, **disk_usage(f)} for f in folders), key=lambda r: -r["total"])
    total = sum(r["total"] for r in found)
    emit({"root": str(root), "total": total, "runs": found}, as_json)
    if not as_json:
        parts = ("checkpoints", "rollouts", "media", "eval", "logs", "merged", "other", "total")
        show_table("", ("run", *parts), [(r["run"], *(_size(r[p]) for p in parts)) for r in found])
        say(f"\n{_size(total)} in {len(found)} run(s)")


@group.command()
def prune(
    run: Ref,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="Newest checkpoints to keep; the best is kept besides.", show_default=False),
    ] = None,
    keep_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Newest steps whose rollouts to keep.", show_default=False)
    ] = None,
    keep_rollouts_every: Annotated[int, typer.Option(min=0, help="Of older steps, keep every so many-th.")] = 0,
    media: Annotated[bool, typer.Option("--media", help="Delete images that no rollout left names.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would go.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go, whatever else is given.")] = False,
    runs: Root = None,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints, rollouts and images of a run that is not being written.

    Example: vlmrl runs prune last --keep-last 1 --keep-rollouts 20 --keep-rollouts-every 50 --yes

    The newest complete checkpoint stays, the best, and any that another run began with.
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.manifest import read_manifest
    from vlmrl.store.prune import RolloutRule, Rules, children, plan_prune, prune_run
    from vlmrl.store.summary import tree_bytes

    if keep_last is None and keep_rollouts is None and not media:
        hint = "--keep-last N (checkpoints), --keep-rollouts N, --media"
        raise StoreError("nothing says what may go", hint=hint)
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
        _say_pruned(run_dir, names, freed, really)


def _say_pruned(run_dir: Path, names: list[str], freed: int, really: bool) -> None:
    from vlmrl.store.layout import complete_checkpoints

    kept = ", ".join(p.name for p in complete_checkpoints(run_dir) if p.name not in names) or "none"
    checkpoints = [name for name in names if "/" not in name]
    counts = {"rollout file": "rollouts/", "image shard": "media/"}
    found = {what: sum(n.startswith(prefix) for n in names) for what, prefix in counts.items()}
    told = checkpoints + [f"{n} {what}{'s' if n > 1 else ''}" for what, n in found.items() if n]
    verb = "deleted" if really else "would delete"
    tell(f"{verb} {', '.join(told)} ({_size(freed)}); kept: {kept}" if told else f"nothing to delete; kept: {kept}")
    if told and not really:
        say("run it with --yes to do it")


@group.command()
def unlock(run: Ref, runs: Root = None, as_json: Json = False) -> None:
    """Remove the lock of a process on another machine that is gone for certain. Dead processes here need no help.

    Example: vlmrl runs unlock last
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.lock import force_release

    run_dir = find(runs_root(runs), run)
    owner = force_release(run_dir)
    emit({"run": run_dir.name, "owner": f"{owner.pid} on {owner.host}" if owner else None}, as_json)
    if not as_json:
        was = f"it was held by process {owner.pid} on {owner.host}" if owner else "it was not locked"
        tell(f"{run_dir.name} is free: {was}")


def _images(run_dir: Path) -> Any:
    from vlmrl.data.run_images import run_images

    return run_images(run_dir)


def _line(run: ListedRun) -> dict[str, Any]:
    from vlmrl.store.clock import ago
    from vlmrl.store.metrics import counted, read_tail

    raw = run.raw
    tail = read_tail(run.dir) if raw else None
    best = raw.get("best")
    return {
        "id": run.id,
        "name": raw.get("name"),
        "kind": raw.get("kind", ""),
        "status": run.status,
        "step": counted(tail["step"]) if tail else None,
        "best": best if isinstance(best, dict) else None,
        "start": raw.get("start"),
        "end": raw.get("end"),
        "age": ago(raw.get("start")),
        "tags": list(raw.get("tags", ())),
        "labels": list(raw.get("labels", ())),
        "note": raw.get("note", ""),
        "parent": raw.get("parent"),
        "problem": run.problem,
        "error": raw.get("error"),
        "path": str(run.dir),
    }


def _about(line: dict[str, Any]) -> str:
    """Tags, labels, note and what it is a fork of in one cell; a damaged run says what is wrong."""
    parts = [line["problem"], line["error"], *(f"#{t}" for t in line["tags"]), *line["labels"], line["note"]]
    parent = line["parent"] or {}
    parts += [f"fork of {parent['run']}@{parent['step']}"] if "step" in parent else []
    return " ".join(part for part in parts if part)


def _best(best: dict[str, Any] | None) -> str:
    return f"{best['metric']} {best['value']:.4g} @{best['step']}" if best else ""


def _or_empty(value: Any) -> str:
    return "" if value is None else str(value)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
