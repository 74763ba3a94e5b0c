"""`vlmrl prep`: raw data -> a dataset folder. The tasks say which commands there are, and what their options are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from vlmrl.cli.output import JSON_HELP, console, emit, say, tell
from vlmrl.errors import Interruption
from vlmrl.visible import visible

if TYPE_CHECKING:
    from vlmrl.tasks.dataset_assembly import Limits, Prepared
    from vlmrl.tasks.options import Parameter, PrepCommand

FORCE_HELP = "Replace another dataset at the same place."
TOKENS_HELP = "Limit of a prompt with its images, in tokens; the longest rows are seen to as --on-overlong says."
OVERLONG_HELP = "Rows over --max-prompt-tokens: fail, resize (large images are made smaller), or drop."
WORKERS_HELP = "Processes; default: one a core."
LIMITS = {
    "max_prompt_tokens": (int | None, typer.Option(None, min=1, help=TOKENS_HELP)),
    "on_overlong": (str, typer.Option("fail", help=OVERLONG_HELP)),
    "workers": (int | None, typer.Option(None, min=1, help=WORKERS_HELP)),
}
"""Options of every command that works within limits."""


class PrepGroup(TyperGroup):
    """The commands of the tasks, which are imported when one of them is asked for; and those of tasks of one's own."""

    def list_commands(self, ctx: Any) -> list[str]:
        from vlmrl.tasks import TASKS

        return [name for name, entry in TASKS.items() if entry.prep is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from vlmrl.tasks import TASKS
        from vlmrl.tasks.own_prep import own_command
        from vlmrl.tasks.own_task import is_own

        if is_own(cmd_name):
            return _made(cmd_name, own_command(cmd_name))
        entry = TASKS.get(cmd_name)
        return _made(cmd_name, entry.prep) if entry is not None and entry.prep is not None else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from vlmrl.errors import unknown

        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            own = ", or a file of your own: path/to/file.py:function"
            raise unknown("task with data to prepare", args[0], self.list_commands(ctx), more=own)
        return super().resolve_command(ctx, args)


prep = typer.Typer(
    cls=PrepGroup, no_args_is_help=True, rich_markup_mode=None,
    help="Make a dataset folder from raw data: `vlmrl prep TASK`, or `vlmrl prep path/to/file.py:function` for a task "
    "of your own.",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    app.add_typer(prep, name="prep")


def _made(name: str, command: PrepCommand) -> Any:
    """Return the command of a task: a function with its options, as the command line reads them."""
    from vlmrl.tasks.options import parameters_of

    limited = "limits" in inspect.signature(command.run).parameters

    def callback(**given: Any) -> None:
        force, as_json = given.pop("force"), given.pop("as_json")
        limits = {"limits": _limits(*(given.pop(key) for key in LIMITS))} if limited else {}
        with _tells_what_is_kept(keeps=command.keeps(given)):
            made = command.run(**given, **limits, force=force)
        _show(made, as_json)

    options = {p.name: (p.kind, _option(p)) for p in parameters_of(command.run, name)}
    options |= LIMITS if limited else {}
    options["force"] = (bool, typer.Option(False, "--force", help=FORCE_HELP))
    options["as_json"] = (bool, typer.Option(False, "--json", help=JSON_HELP))
    return _command(name, callback, options, command.help)


def _command(name: str, callback: Callable[..., None], options: Mapping[str, tuple[Any, Any]], words: str) -> Any:
    """Return a command for a function that takes any keywords, with these options: name -> (type, typer's option)."""
    from typer.main import get_command

    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [inspect.Parameter(key, kind, default=o, annotation=t) for key, (t, o) in options.items()]
    callback.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    callback.__annotations__ = {key: t for key, (t, _) in options.items()}
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=words)(callback)
    return get_command(single)


def _option(parameter: Parameter) -> Any:
    said = parameter.option
    default = ... if parameter.default is inspect.Parameter.empty else parameter.default
    if said.positional:
        return typer.Argument(default, help=said.help)
    flags = (said.flag,) if said.flag else ()
    return typer.Option(default, *flags, min=said.min, max=said.max, help=said.help)


@contextmanager
def _tells_what_is_kept(*, keeps: bool = True) -> Iterator[None]:
    """Say in an interruption what is left of the work. `keeps`: the parts that are done."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "the parts that are done are kept" if keeps else "nothing was written"
        raise Interruption("prep", kept) from None


def _limits(max_prompt_tokens: int | None, on_overlong: str, workers: int | None) -> Limits:
    from vlmrl.cli.progress import PartCounter
    from vlmrl.tasks.dataset_assembly import parse_limits

    return parse_limits(max_prompt_tokens, on_overlong, workers, PartCounter())


def _show(made: Prepared, as_json: bool) -> None:
    info = made.info
    for line in made.found:
        say(f"found: {line}")
    if not as_json:
        _show_splits(made)
        show_doctor(info["doctor"])
    reports = [(split, report) for split, fields in info["splits"].items() for report in fields.get("reports", ())]
    for split, report in reports[:5]:
        details = ", ".join(f"{key} {value}" for key, value in report.items() if key != "reason")
        say(f"note: {split}: {report['reason']}: {details}")
    if len(reports) > 5:
        say(f"note: {len(reports) - 5} more notes in dataset.json")
    (say if as_json else tell)(f"{made.path}  fingerprint {info['fingerprint'][:16]}")
    emit({"path": str(made.path), "outcome": made.outcome, "found": list(made.found), "info": dict(info)}, as_json)


def _show_splits(made: Prepared) -> None:
    """Print how many rows and images each split has."""
    from rich.table import Table
    from rich.text import Text

    info = made.info
    table = Table(title=Text(visible(f"{made.path.name}: {made.outcome}")))
    kinds = (int, Mapping)  # counts, and counts of several things: {"1": 20, "2": 30}
    keys = {k: 0 for fields in info["splits"].values() for k, v in fields.items() if isinstance(v, kinds) and v != {}}
    table.add_column("split")
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right")
    for split, fields in info["splits"].items():
        table.add_row(*(Text(visible(cell)) for cell in (split, *(_counts(fields.get(key)) for key in keys))))
    console(stderr=False).print(table)


def _counts(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key}: {count:,}" for key, count in value.items())
    return "" if value is None else f"{value:,}"


def show_doctor(report: Mapping[str, Any]) -> None:
    """The data doctor's checks as a table: what was looked at, the verdict, what was found."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="data doctor")
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for check in report["checks"]:
        table.add_row(*(Text(visible(check[column])) for column in ("check", "verdict", "finding")))
    console(stderr=False).print(table)
    if note := report.get("note"):
        tell(note)
