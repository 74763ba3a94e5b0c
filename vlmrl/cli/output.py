"""Output of the commands on stdout and stderr, and the last line after Ctrl-C or SIGTERM.

The result of a command (an answer, facts, findings, tables) goes to stdout, so that it can be piped, searched and
saved. Progress, warnings, hints and errors go to stderr. With `--json`, stdout has one JSON object.

Printed texts may contain names, notes, responses and errors from untrusted sources. So their control characters are
made visible (`vlmrl.untrusted`), and secrets in them are replaced (`redaction/redact.py`). After an interruption, the
results that are kept are named, and the command that continues.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from vlmrl.errors import Interruption
from vlmrl.untrusted import one_line, plural, visible, visible_json

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from vlmrl.errors import Problem


SHORT_NAME = 32
"""A table whose names have at most so many characters does not break them."""


SHORTEST_CUT = 16
"""Minimum number of characters to which a cell of a table is cut."""


def console(*, stderr: bool = True) -> Console:
    """Return a Rich console on stderr, or on stdout; it prints plain text if that is no terminal.

    Secrets are hidden before a text is wrapped, because a secret on two lines would not be recognised. Rich's markup
    and emoji names are off, so that `[red]` and `:x:` in a model's response are printed unchanged. Rich is imported in
    this function, because its import is slow.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    from vlmrl.redaction.redact import redact_said

    class SafeConsole(Console):
        """Console that makes control characters in texts visible, except the codes of its own styles."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            if isinstance(renderable, str):
                renderable = redact_said(renderable)
            elif isinstance(renderable, Text) and (shown := redact_said(renderable.plain)) != renderable.plain:
                renderable = Text(shown, renderable.style, justify=renderable.justify, overflow=renderable.overflow)
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else visible(text), style, control)

    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty())


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], titled: bool = False, spare: Sequence[str] = ()
) -> None:
    """Print a table on stdout: aligned on a terminal, as tab-separated lines into a pipe or a file.

    It does not use Rich, whose import takes longer than most commands that print a table.

    Args:
        titled: whether the title is printed on stdout even if stdout is a pipe, for a command with several tables. If
            False, the title then goes to stderr.
        spare: columns that a terminal that is too narrow does not show, the first ones first.
    """
    from vlmrl.redaction.redact import redact_said

    cells = [[one_line(redact_said(str(cell))) for cell in row] for row in (columns, *rows)]
    if not sys.stdout.isatty():
        if title and titled:
            print(one_line(redact_said(title)))
        elif title:
            say(title)
        for row in cells:
            print("\t".join(row))
        return
    if title:
        tell(title)
    lines, left_out = table_lines(cells, shutil.get_terminal_size((120, 24)).columns, spare)
    for number, line in enumerate(lines):
        tell(line, bold=number == 0)
    if left_out:
        say(f"the terminal is too narrow for the column{plural(len(left_out))} {', '.join(left_out)}")


def table_lines(cells: Sequence[Sequence[str]], columns: int, spare: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (lines of a table for a terminal, names of the columns that are left out).

    If it is too wide, the space between columns becomes narrower, then columns are left out, then long cells are cut.

    Args:
        cells: rows; the first one has the names of the columns.
        columns: width of the terminal in characters.
        spare: names of the columns that can be left out, the first ones first.
    """
    left_out: list[str] = []
    while True:
        widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
        needed = sum(widths[:-1]) + min(widths[-1], SHORTEST_CUT)
        gaps = len(widths) - 1
        gap = 2 if needed + 2 * gaps <= columns else 1
        name = next((name for name in spare if name in cells[0]), None)
        if needed + gap * gaps <= columns or name is None:
            break
        left_out.append(name)
        index = list(cells[0]).index(name)
        cells = [[*row[:index], *row[index + 1 :]] for row in cells]
    widest = max(range(gaps), key=widths.__getitem__, default=0)
    excess = max(0, needed + gap * gaps - columns)
    widths[widest] = max(min(widths[widest], SHORTEST_CUT), widths[widest] - excess)
    widths[-1] = max(SHORTEST_CUT, columns - sum(widths[:-1]) - gap * gaps)
    return [(" " * gap).join(map(_fit, row, widths)).rstrip() for row in cells], left_out


def _fit(text: str, width: int) -> str:
    if _width(text) > width:
        while _width(text) > width - 3:
            text = text[:-1]
        text += "..."
    return text + " " * (width - _width(text))


def tell(text: str, *, bold: bool = False) -> None:
    """Print a line of the command's result on stdout. Do not call it with `--json`, where stdout is one JSON object."""
    from vlmrl.dist.world import stdout

    _print(text, stdout(), bold and sys.stdout.isatty())


def say(text: str) -> None:
    """Print a line that is not part of the result on stderr: progress, a warning, a hint."""
    from vlmrl.dist.world import stderr

    _print(text, stderr(), bold=False)


def _print(text: str, stream: TextIO, bold: bool) -> None:
    from vlmrl.dist.world import print_line
    from vlmrl.redaction.redact import redact_said

    print_line(visible(redact_said(text)), stream, *(("\033[1m", "\033[0m") if bold else ()))


def shorten(text: str, most: int, mark: str = "") -> str:
    """Return the beginning of a text for the terminal: what `mark` stands for is cut after secrets are hidden."""
    from vlmrl.redaction.redact import excerpt, redact_said

    return excerpt(text, most, mark=mark, hide=redact_said)


def line_of_code(text: str) -> str:
    """Return a text from a user's code (note, error, output) on one line and without secrets."""
    from vlmrl.redaction.redact import redact_text

    return one_line(redact_text(text))


def print_error(text: str) -> None:
    """Print the error of a command on stderr. Secrets are hidden: it may quote errors or output of a user's code."""
    from vlmrl.dist.world import print_line
    from vlmrl.redaction.redact import redact_text

    print_line(visible(redact_text(text)), sys.stderr)


def say_origin(path: str, parent: Mapping[str, Any] | None) -> None:
    """Print which checkpoint is used, if `path` is a run. `parent`: see `ModelOrigin.parent`."""
    from vlmrl.setup.model_origin import describe_origin

    if text := describe_origin(path, parent):
        say(text)


def warn_of_namesakes(run_dir: Path, name: str) -> None:
    """Print a warning if another run has the same name."""
    from vlmrl.store.listing import namesake_warning

    if warning := namesake_warning(run_dir, name):
        say(warning)


def show_warnings(problems: Sequence[Problem]) -> None:
    """Print problems that do not stop the command."""
    from vlmrl.errors import format_error

    for p in problems:
        say(format_error(p.message, p.where, p.hint, "warning"))


def _width(text: str) -> int:
    """Return the number of terminal columns of a text: two for East Asian wide characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def emit(result: Any, as_json: bool) -> bool:
    """Print the result as one JSON object on stdout if `as_json`, else nothing: the command prints its tables.

    Returns: `as_json`.
    """
    from vlmrl.dist.world import stdout
    from vlmrl.redaction.redact import redact_result

    if as_json:
        text = json.dumps(redact_result(result), ensure_ascii=False, default=str, allow_nan=False)
        print(visible_json(text), file=stdout(), flush=True)
    return as_json


def draw_plain_table(rows: Iterable[Sequence[str | Text]], heads: Sequence[str] = (), title: str | None = None) -> None:
    """Print a table without lines on stdout. Without heads, the first column has the bold names of facts; "" = none."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        *heads,
        title=title,
        title_justify="left",
        show_header=bool(heads),
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for first, *cells in rows:
        name = Text(first, style="" if heads else "bold") if isinstance(first, str) else first
        table.add_row(name, *(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    if table.row_count or title:
        console(stderr=False).print(table)


def draw_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], out: Console, right: int = 99) -> None:
    """Draw a Rich table.

    Args:
        right: number of right-aligned columns, counted from the first; 99 = all columns except the first.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE_HEAD, title=Text(f"\n{title}"), title_style="bold", title_justify="left", show_header=any(heads)
    )
    is_short = max((len(one_line(row[0])) for row in rows), default=0) <= SHORT_NAME
    numbers = range(1, len(heads)) if right == 99 else range(right)
    for index, head in enumerate(heads):
        align, words = ("right", "\n".join(head.split())) if index in numbers else ("left", head)
        whole = index in numbers or (index == 0 and is_short)  # numbers are never broken, names last
        table.add_column(head if out.soft_wrap else words, justify=align, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    if table.columns and out.measure(table, options=out.options.update(max_width=10**6)).minimum > out.width:
        table.padding, table.columns[0].no_wrap = (0, 1, 0, 0), 0 in numbers
    out.print(table)


def draw_quote(text: str, out: Console, indent: int) -> None:
    """Print a text in faint letters, indented. On a terminal, wrapped lines are indented too."""
    from rich.padding import Padding
    from rich.text import Text

    if out.soft_wrap:
        out.print(" " * indent + text, style="dim")
    else:
        out.print(Padding(Text(visible(text)), (0, 0, 0, indent), expand=False), style="dim")


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits; a dash for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """Return a share (0 to 1) as a percentage; a dash for None."""
    return "-" if value is None else f"{100 * value:.1f}%"


KEPT = {
    "fetch": "what was downloaded is kept",
    "eval": "finished evaluations and responses are kept",
    "demo": "the files of finished commands are kept",
    "runs": "changes already made are kept",
}
"""Command -> text about the results that an interruption keeps. Other commands keep none: they write only complete
files."""
READERS = {
    ("compare",): "",
    ("runs", "list"): "",
    ("runs", "show"): "",
    ("runs", "diagnose"): "",
    ("runs", "watch"): "stopped watching",
}
"""First words of a command that only reads -> line that is printed if it is interrupted; "" = no line."""


def describe_interruption(error: KeyboardInterrupt, command: str, typed: Sequence[str]) -> str:
    """Return the line with the interrupted command, kept results, and how to continue; "" = print nothing.

    Args:
        command: subcommand that ran; used if `error` is not an Interruption, which has its own command and results.
        typed: words that the user typed after `vlmrl`.
    """
    from vlmrl.redaction.redact import redact_argv

    for words, line in READERS.items():
        if command == words[0] and tuple(typed[: len(words)]) == words:
            return line
    if not isinstance(error, Interruption):
        error = Interruption(command, KEPT.get(command, "no incomplete files are left"))
    if error.again is None:
        error = Interruption(error.what, error.kept, shlex.join(["vlmrl", *redact_argv(typed)]))
    return str(error)
