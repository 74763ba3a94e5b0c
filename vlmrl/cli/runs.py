"""`vlmrl runs`: commands for the folders of runs."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit, say, show_table, tell, warn_of_namesakes
from vlmrl.cli.run_screens import (
    about_cell,
    columns,
    print_facts,
    run_line,
    show_diagnosis,
    show_pruned,
    show_rollout,
    size_text,
    step_of,
    step_table,
    waiting_text,
)
from vlmrl.errors import ProblemsError, StoreError, VlmrlError
from vlmrl.untrusted import number_of, visible

if TYPE_CHECKING:
    from vlmrl.store.summary import Followed


def diagnose(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The run: a unique prefix of its id, its name, its folder, or `last`: the last run that trained.",
        ),
    ] = "last",
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Find out why a run does not learn.

    It prints ranked causes, each with figures, responses that show it, and the next command.

    Example: vlmrl runs diagnose last

    It reads only the run's folder, also while the run trains. A note is not a fault. The exit code is 0, whatever it
    finds.
    """
    from vlmrl.diagnose.run import diagnose as look
    from vlmrl.store.layout import runs_root
    from vlmrl.store.runs import open_run

    diagnosis = look(open_run(runs_root(runs), run, trained=True))
    if not emit(diagnosis.as_dict(), as_json):
        show_diagnosis(diagnosis)


def du(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run; default: all of them.")] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Show how much disk space runs take, largest first.

    Example: vlmrl runs du
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find, run_ids
    from vlmrl.store.summary import disk_usage

    root = runs_root(runs)
    folders = [find(root, run)] if run else [root / run_id for run_id in run_ids(root)]
    sizes = sorted(({"run": f.name, **disk_usage(f)} for f in folders), key=lambda r: -r["total"])
    total = sum(r["total"] for r in sizes)
    if not emit({"root": str(root), "total": total, "runs": sizes}, as_json):
        parts = ("checkpoints", "rollouts", "media", "eval", "logs", "merged", "other", "total")
        rows = [(r["run"], *(size_text(r[p]) for p in parts)) for r in sizes]
        show_table("", ("run", *parts), rows, spare=("merged", "logs", "media", "other", "eval"))
        say(f"\n{size_text(total)} in {number_of(len(sizes), 'run')}")


def list_(
    kind: Annotated[str | None, typer.Option(help="Only this kind: rl, sft, eval, try.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    status: Annotated[
        str | None, typer.Option(help="Only this status: running, done, failed, interrupted, killed, damaged.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of runs, newest first; 0 = all.")] = 30,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """List runs, newest first.

    Example: vlmrl runs list --kind rl --tag paper --limit 10
    """
    from vlmrl.errors import unknown
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import RUN_KINDS, list_runs, run_ids
    from vlmrl.store.manifest import STATUSES

    root = runs_root(runs)
    for what, word, known in (("status", status, (*STATUSES, "damaged")), ("kind", kind, RUN_KINDS)):
        if word is not None and word not in known:
            raise unknown(what, word, known, error=StoreError)
    total = len(run_ids(root))
    lines = [run_line(run) for run in list_runs(root, kind=kind, tag=tag, status=status, limit=limit)]
    if emit({"root": str(root), "total": total, "runs": lines}, as_json):
        return
    if not lines:
        filters = any(x is not None for x in (kind, tag, status))
        say(f"no runs in {root}" if not total or not filters else f"none of {total} runs in {root} matches")
        return
    rows = []
    for r in lines:
        step, best = "" if r["step"] is None else str(r["step"]), r["best"]
        best_cell = f"{best['metric']} {best['value']:.4g} @{best['step']}" if best else ""
        if not best and r["evaluated"]:
            best_cell = "{metric} {value:.4g}".format_map(r["evaluated"][0])
        rows.append((r["id"], r["name"] or "", r["kind"], r["status"], step, best_cell, r["age"], about_cell(r)))
    heads = ("run", "name", "kind", "status", "step", "best", "age", "about")
    show_table("", heads, rows, spare=("kind", "about", "name", "age", "best", "step"))
    if limit and len(lines) == limit and total > limit:
        say(f"\nthe newest {limit} of {total} runs; --limit 0 lists all")


def note(
    run: options.RunRef,
    text: Annotated[
        str | None, typer.Argument(help="New note; an empty text removes the note. Default: print the note.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="New name of the run; an empty name removes it.")] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Print or change a run's note, or rename the run. This also works while it trains.

    Example: vlmrl runs note last "lr 1e-4 diverges after step 80"
    """
    from vlmrl.store.manifest import edit, read_manifest

    run_dir = options.run_folder(run, runs)
    change = text is not None or name is not None
    manifest = edit(run_dir, note=text, name=name) if change else read_manifest(run_dir)
    if not emit({"run": manifest.id, "name": manifest.name, "note": manifest.note}, as_json):
        named = f" ({manifest.name})" if manifest.name else ""
        tell(f"{manifest.id}{named}: {manifest.note or 'no note'}")
    if name:
        warn_of_namesakes(run_dir, name)


def pack(
    run: options.RunRef,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; default: <run id>.tar.gz in this folder.")
    ] = None,
    checkpoints: Annotated[str, typer.Option(help="Checkpoints to include: none, last, all.")] = "none",
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Pack a run into one self-contained file.

    The file has the run's record and every image that its rollouts name.

    Example: vlmrl runs pack last -o digits.tar.gz

    To read it on another machine: tar xf digits.tar.gz; vlmrl runs show ./<run id>
    """
    from vlmrl.data.run_images import run_images
    from vlmrl.store.pack import pack_run

    if checkpoints not in ("none", "last", "all"):
        raise StoreError(f"--checkpoints cannot be `{checkpoints}`", hint="one of: none, last, all")
    run_dir = options.run_folder(run, runs)
    images = run_images(run_dir)
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
    if emit(result, as_json):
        return
    tell(f"{packed.path}: {packed.num_files} files, {packed.num_images} images, {size_text(packed.bytes)}")
    if packed.left_out:
        say(f"left out: {', '.join(packed.left_out)} (--checkpoints last or all includes checkpoints)")
    if packed.missing:
        why = f": {'; '.join(images.notes)}" if images.notes else ""
        say(f"warning: {number_of(len(packed.missing), 'image')} that the rollouts name could not be found{why}")


def prune(
    run: options.RunRef,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Number of newest checkpoints to keep; the best one is also kept.")
    ] = None,
    keep_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Number of newest steps whose rollouts to keep.")
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
    from vlmrl.store.manifest import read_manifest
    from vlmrl.store.prune import RolloutRule, Rules, children, plan_prune, prune_run
    from vlmrl.store.summary import tree_bytes

    if keep_last is None and keep_rollouts is None and not media:
        hint = "--keep-last N (checkpoints), --keep-rollouts N, --media"
        raise StoreError("no option says what to delete", hint=hint)
    run_dir = options.run_folder(run, runs)
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
    if not emit({"run": manifest.id, "deleted" if really else "would_delete": names, "bytes": freed}, as_json):
        show_pruned(run_dir, names, freed, really)


def show(
    run: options.RunRef,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="STEP[/PROMPT[/SAMPLE]]", help="Show responses instead: of a step, of one of its prompts, or one."
        ),
    ] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Show the facts of a run, or some of its responses.

    The facts are how it ended, the last numbers, the checkpoints, how to continue, and more.

    Example: vlmrl runs show last --rollout 12
    """
    from vlmrl.services.calls import spent_in
    from vlmrl.store.layout import JUDGE_FILE, runs_root
    from vlmrl.store.runs import open_run
    from vlmrl.store.summary import describe

    opened = open_run(runs_root(runs), run)
    if rollout is not None:
        return show_rollout(opened, rollout, as_json)
    about: dict[str, Any] = {**describe(opened), "judge": {}}
    try:
        about["judge"] = {account: asdict(spent) for account, spent in spent_in(opened.dir / JUDGE_FILE).items()}
    except VlmrlError as error:
        about["problems"].append(error.message)
    if not emit(about, as_json):
        print_facts(about)


def tag(
    run: options.RunRef,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Tag to remove. May be repeated.")] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Add or remove a run's tags; without any, print them. This also works while it trains.

    Example: vlmrl runs tag last paper seed1 --remove draft
    """
    from vlmrl.store.manifest import edit, read_manifest

    run_dir = options.run_folder(run, runs)
    change = bool(tags or remove)
    manifest = edit(run_dir, add=tags or (), drop=remove or ()) if change else read_manifest(run_dir)
    if not emit({"run": manifest.id, "tags": list(manifest.tags)}, as_json):
        tell(f"{manifest.id}: {', '.join(manifest.tags) or 'no tags'}")


def unlock(run: options.RunRef, runs: options.Runs = None, as_json: options.Json = False) -> None:
    """Remove the lock of a process that ended on another machine.

    Use it only if it is certain that the process has ended. Locks of processes that ended on this machine need no
    command.

    Example: vlmrl runs unlock last
    """
    from vlmrl.store.lock import force_release

    run_dir = options.run_folder(run, runs)
    owner = force_release(run_dir)
    if not emit({"run": run_dir.name, "owner": f"{owner.pid} on {owner.host}" if owner else None}, as_json):
        was = f"it was locked by process {owner.pid} on {owner.host}" if owner else "it was not locked"
        tell(f"{run_dir.name} is unlocked: {was}")


def verify(run: options.RunRef, runs: options.Runs = None, as_json: options.Json = False) -> None:
    """Read and check every file of a run.

    It checks schemas, hashes, rollouts against metrics, and images. The exit code is 2 if it finds an error.

    Example: vlmrl runs verify last
    """
    from vlmrl.data.run_images import run_images
    from vlmrl.errors import format_error
    from vlmrl.store.verify import verify_run

    run_dir = options.run_folder(run, runs)
    verified = verify_run(run_dir, run_images(run_dir))
    result = {
        "run": run_dir.name,
        "ok": not verified.errors,
        "counts": verified.counts,
        "problems": [asdict(p) for p in verified.problems],
    }
    if not emit(result, as_json):
        for problem in verified.warnings:
            tell(format_error(problem.message, problem.where, problem.hint, "warning"))
        checked = ", ".join(f"{what} {n}" for what, n in verified.counts.items())
        state = "has no errors" if not verified.errors else f"has {number_of(len(verified.errors), 'error')}"
        tell(f"{run_dir.name} {state} (read: {checked})")
    if verified.errors:
        if as_json:
            raise typer.Exit(2)
        raise ProblemsError(verified.errors)


def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run: a unique prefix of its id, its name, or its folder.")
    ] = "last",
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two updates.")] = 2.0,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Watch a run from another terminal.

    It draws a live table, or prints a line per step if stdout is no terminal. It ends when the run ends.

    Example: vlmrl runs watch last
    """
    from vlmrl.store.summary import Followed, resume_command

    followed = Followed(options.run_folder(run, runs))
    if as_json:
        while followed.look():
            time.sleep(every)
    elif sys.stdout.isatty():
        _live(followed, every)
    else:
        _plain(followed, every)
    train = followed.lines()
    ended = followed.run.status
    fields = {"run": followed.run.id, "status": ended, "steps": len(train), "of": followed.steps}
    if not emit({**fields, "last": train[-1] if train else None}, as_json):
        resume = resume_command(followed.run, ended)
        again = f"; continue with: {resume}" if resume else ""
        say(f"{followed.run.id}: {ended} after {number_of(len(train), 'step')}{again}")


def _plain(followed: Followed, every: float) -> None:
    """Print the lines of all earlier steps, then one line per new step as soon as it exists."""
    from vlmrl.store.metrics import counted

    shown: set[tuple[int, int]] = set()
    going, waiting = True, ""
    while going:
        going = followed.look()
        for line in followed.lines():
            if (key := (line["attempt"], line["step"])) not in shown:
                shown.add(key)
                cells = [f"{name} {text}" for name, text in columns(line).items() if text]
                text = "  ".join([f"step {step_of(counted(line['step']), followed.steps)}", *cells])
                print(visible(text), flush=True)
        before, waiting = waiting, waiting_text(followed)
        if waiting not in ("", before):
            print(visible(waiting), flush=True)
        if going:
            time.sleep(every)


def _live(followed: Followed, every: float) -> None:
    """Draw a table of the last steps every `every` seconds until the run ends."""
    from rich.live import Live

    out = console(stderr=False)
    with Live(console=out, auto_refresh=False, screen=False) as live:
        going = True
        while going:
            going = followed.look()
            live.update(step_table(followed, out.width, out.height), refresh=True)
            if going:
                time.sleep(every)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs: ids, unique prefixes of ids, or names.")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove without a question.")] = False,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Remove whole runs, with their checkpoints, rollouts and evaluations.

    A run that is being written is not removed, and neither is one with a checkpoint that another run began with. Links
    in a run are removed, and what they lead to stays.

    Example: vlmrl runs rm first-try 20260718-101500-digits-3f2a --yes
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.removal import removable, remove_runs
    from vlmrl.store.summary import tree_bytes

    folders = removable(runs_root(runs), names)
    sizes = {folder.name: tree_bytes(folder) for folder in folders}
    lines = [f"{name} ({size_text(size)})" for name, size in sizes.items()]
    if not yes and sys.stdin.isatty() and not as_json:
        yes = typer.confirm(f"remove {', '.join(lines)}?", err=True)
    if yes:
        remove_runs(folders)
    if not emit({"removed" if yes else "would_remove": list(sizes), "bytes": sum(sizes.values())}, as_json):
        tell(f"{'removed' if yes else 'would remove'} {', '.join(lines)}: {size_text(sum(sizes.values()))} in all")
        if not yes:
            say("add --yes to remove them")


group = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, show, watch, diagnose, verify, pack and tidy up runs."
)


def register(app: typer.Typer) -> None:
    for command in (list_, show, verify, pack, note, tag, du, prune, rm, unlock, watch, diagnose):
        group.command(command.__name__.rstrip("_"))(command)
    app.add_typer(group, name="runs")
