"""`vlmrl runs`: commands for the folders of runs, one file per command."""

from __future__ import annotations

import typer

from vlmrl.cli.runs import diagnose, du, list_, note, pack, prune, rm, show, tag, unlock, verify, watch

group = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, show, watch, diagnose, verify, pack and tidy up runs."
)


def register(app: typer.Typer) -> None:
    group.command("list")(list_.list_)
    group.command("show")(show.show)
    group.command("verify")(verify.verify)
    group.command("pack")(pack.pack)
    group.command("note")(note.note)
    group.command("tag")(tag.tag)
    group.command("du")(du.du)
    group.command("prune")(prune.prune)
    group.command("rm")(rm.rm)
    group.command("unlock")(unlock.unlock)
    group.command("watch")(watch.watch)
    group.command("diagnose")(diagnose.diagnose)
    app.add_typer(group, name="runs")
