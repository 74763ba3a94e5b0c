"""`vlmrl prep`: make a dataset folder from raw data. The tasks declare the commands and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from vlmrl.cli import options
from vlmrl.cli.data import show_doctor
from vlmrl.cli.output import console, emit, say, tell
from vlmrl.errors import Interruption
from vlmrl.untrusted import visible

if TYPE_CHECKING:
    from vlmrl.tasks.dataset_assembly import Limits, Prepared
    from vlmrl.tasks.prep_options import Parameter, PrepCommand

FORCE_HELP = "Replace another dataset in the same place."
TOKENS_HELP = "Maximum number of tokens of a prompt with its images. For longer rows see --on-overlong."
OVERLONG_HELP = "For rows over --max-prompt-tokens: fail, resize (make large images smaller), or drop."
WORKERS_HELP = "Number of processes; default: one per core."
LIMITS = {
    "max_prompt_tokens": (int | None, typer.Option(None, min=1, help=TOKENS_HELP)),
    "on_overlong": (str, typer.Option("fail", help=OVERLONG_HELP)),
    "workers": (int | None, typer.Option(None, min=1, help=WORKERS_HELP)),
}
"""Name -> (type, typer's option), for the commands whose function has an argument `limits`."""


PASSAGES = "passages"
PASSAGES_HELP = (
    "Index of passages for the tool `search`.\n\nSOURCE: a table in JSON lines, JSON, CSV, TSV or Parquet. A row is a "
    "passage with a `text` and, if there is one, a `title`, or a question with its paragraphs, as in HotpotQA. The "
    "index lies beside the table. A run makes it itself where the table is small.\n\n"
    "Example: vlmrl prep passages wiki.jsonl"
)
PASSAGES_OPTIONS = {
    "source": (str, typer.Argument(..., help="Table of passages.")),
    "kind": (str, typer.Option("fts5", help="fts5, or tantivy: faster for millions of passages (the extra `search`).")),
    "as_json": (options.Json, False),
}


class PrepGroup(TyperGroup):
    """Group with one command per task, including users' own tasks. A task is imported when its command is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        from vlmrl.tasks import TASKS

        return [*(name for name, entry in TASKS.items() if entry.prep is not None), PASSAGES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from vlmrl.tasks import TASKS
        from vlmrl.tasks.own_prep import own_command
        from vlmrl.tasks.user_task import is_own

        if cmd_name == PASSAGES:
            return _command(PASSAGES, _index_passages, PASSAGES_OPTIONS, PASSAGES_HELP)
        if is_own(cmd_name):
            return _task_command(cmd_name, own_command(cmd_name))
        entry = TASKS.get(cmd_name)
        return _task_command(cmd_name, entry.prep) if entry is not None and entry.prep is not None else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from vlmrl.errors import unknown

        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            own = ", or a file of your own: path/to/file.py:function"
            raise unknown("task with data to prepare", args[0], self.list_commands(ctx), more=own)
        return super().resolve_command(ctx, args)


prep = typer.Typer(
    cls=PrepGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make a dataset folder from raw data. Run `vlmrl prep TASK`, or `vlmrl prep path/to/file.py:function` for a "
    "task of your own.",
)


def register(app: typer.Typer) -> None:
    app.add_typer(prep, name="prep")


def _index_passages(source: str, kind: str, as_json: bool) -> None:
    """Make the index of a table of passages, unless it is there already."""
    from vlmrl.errors import unknown
    from vlmrl.search.index import KINDS, open_index
    from vlmrl.untrusted import number_of

    if kind not in KINDS:
        raise unknown("kind of index", kind, KINDS)
    say(f"{source}: reading the passages")
    with _tells_what_is_kept(keeps=False):
        index = open_index(source, kind, reads=True)
    facts = {"path": f"{source}.{kind}", "passages": index.count, "left_out": index.left_out, "sha256": index.sha256}
    index.close()
    if not emit(facts, as_json):
        rest = f"; {number_of(index.left_out, 'row')} without a text left out" if index.left_out else ""
        tell(f"{facts['path']}: {number_of(index.count, 'passage')}{rest}")


def _task_command(name: str, command: PrepCommand) -> Any:
    """Return the click command of a task's preparation."""
    from vlmrl.tasks.prep_options import parameters_of

    has_limits = "limits" in inspect.signature(command.run).parameters

    def callback(**given: Any) -> None:
        force, as_json = given.pop("force"), given.pop("as_json")
        limits = _limits(*(given.pop(key) for key in LIMITS), force=force) if has_limits else None
        with _tells_what_is_kept(keeps=command.keeps(given)):
            dataset = command.run(**given, **({"force": force} if limits is None else {"limits": limits}))
        _show(dataset, as_json)

    parameters = {p.name: (p.kind, _option(p)) for p in parameters_of(command.run, name)}
    parameters |= LIMITS if has_limits else {}
    parameters["force"] = (bool, typer.Option(False, "--force", help=FORCE_HELP))
    parameters["as_json"] = (options.Json, False)
    return _command(name, callback, parameters, command.help)


def _command(name: str, callback: Callable[..., None], parameters: Mapping[str, tuple[Any, Any]], words: str) -> Any:
    """Return a click command for a function with keyword arguments (`**kwargs`).

    Args:
        parameters: name -> (type, default or typer's option).
        words: help text of the command.
    """
    from typer.main import get_command

    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [inspect.Parameter(key, kind, default=o, annotation=t) for key, (t, o) in parameters.items()]
    callback.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    callback.__annotations__ = {key: t for key, (t, _) in parameters.items()}
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=words)(callback)
    return get_command(single)


def _option(parameter: Parameter) -> Any:
    option = parameter.option
    default = ... if parameter.default is inspect.Parameter.empty else parameter.default
    if option.positional:
        return typer.Argument(default, help=option.help)
    flags = (option.flag,) if option.flag else ()
    return typer.Option(default, *flags, min=option.min, max=option.max, help=option.help)


@contextmanager
def _tells_what_is_kept(*, keeps: bool = True) -> Iterator[None]:
    """Replace KeyboardInterrupt by an Interruption with the kept results. `keeps`: whether finished parts are kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "the parts that are done are kept" if keeps else "nothing was written"
        raise Interruption("prep", kept) from None


def _limits(max_prompt_tokens: int | None, on_overlong: str, workers: int | None, *, force: bool) -> Limits:
    from vlmrl.cli.progress import PartCounter
    from vlmrl.tasks.dataset_assembly import parse_limits

    return parse_limits(max_prompt_tokens, on_overlong, workers, PartCounter(), force)


def _show(dataset: Prepared, as_json: bool) -> None:
    info = dataset.info
    for line in dataset.leftovers:
        say(f"found: {line}")
    if not as_json:
        _show_splits(dataset)
        show_doctor(info["doctor"])
    reports = [(split, report) for split, fields in info["splits"].items() for report in fields.get("reports", ())]
    for split, report in reports[:5]:
        details = ", ".join(f"{key} {value}" for key, value in report.items() if key != "reason")
        say(f"note: {split}: {report['reason']}: {details}")
    if len(reports) > 5:
        say(f"note: {len(reports) - 5} more notes in dataset.json")
    (say if as_json else tell)(f"{dataset.path}  fingerprint {info['fingerprint'][:16]}")
    result = {"path": str(dataset.path), "outcome": dataset.outcome, "found": list(dataset.leftovers)}
    emit({**result, "info": dict(info)}, as_json)


def _show_splits(dataset: Prepared) -> None:
    """Print the number of rows and images of each split."""
    from rich.table import Table
    from rich.text import Text

    info = dataset.info
    table = Table(title=Text(visible(f"{dataset.path.name}: {dataset.outcome}")))
    kinds = (int, Mapping)  # a count, or counts by name: {"1": 20, "2": 30}
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
