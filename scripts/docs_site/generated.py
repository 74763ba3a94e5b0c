"""The generated parts of the documentation, as Markdown: commands, recipe keys, algorithms, tasks and recipes.

A page holds each between two lines such as `<!-- generated: commands -->` and `<!-- end: commands -->`, so that it can
be read without the site. `scripts/docs write` writes them anew from the code, and a test compares them with it.
Drawings (`<!-- drawing: levels -->`) are put in when the site is built.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drawings import draw_levels, draw_life, draw_way

DOCS = Path(__file__).resolve().parents[2] / "docs"
GENERATED = re.compile(r"^<!-- generated: (\w+) -->\n.*?^<!-- end: \1 -->$", flags=re.M | re.S)
"""Generated part of a page, with the lines around it."""
DRAWING = re.compile(r"^<!-- drawing: (\w+) -->$", flags=re.M)
"""Line of a page that stands for a drawing."""


def written(markdown: str) -> str:
    """Return a page with its generated parts made anew. Raises: KeyError for an unknown name."""
    return GENERATED.sub(lambda match: _marked(match[1], PARTS[match[1]]()), markdown)


def drawn(markdown: str) -> str:
    """Return a page with its drawings. Raises: KeyError for an unknown name."""
    return DRAWING.sub(lambda match: DRAWINGS[match[1]](), markdown)


def write_pages(docs: Path = DOCS) -> list[Path]:
    """Write the generated parts of all pages anew. Return the pages that changed."""
    changed = []
    for page in sorted(docs.rglob("*.md")):
        before = page.read_text("utf-8")
        if (after := written(before)) != before:
            page.write_text(after, "utf-8")
            changed.append(page)
    return changed


def commands() -> str:
    """Return every command with its help, its arguments and its options."""
    from typer import Context
    from typer.main import get_command

    from vlmrl.cli.app import app

    lines: list[str] = []

    def walk(words: tuple[str, ...], command: Any, parent: Any) -> None:
        context = Context(command, info_name=words[-1], parent=parent)
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                walk((*words, name), command.get_command(context, name), context)
            return
        usage = re.sub(r"^Usage: ", "", command.get_usage(context))
        lines.extend([f"## `{' '.join(words)}`", "", *_help_paragraphs(command.help or ""), ""])
        lines.extend(["```text", " ".join(usage.split()), "```", ""])
        arguments, options = [], []
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None and "--help" not in parameter.opts:
                named = options if any(name.startswith("-") for name in parameter.opts) else arguments
                named.append((f"`{_one_line(record[0])}`", _cell(record[1])))
        for title, rows in (("argument", arguments), ("option", options)):
            if rows:
                lines.extend([*_table((title, "meaning"), rows), ""])

    walk(("vlmrl",), get_command(app), None)
    return "\n".join(lines)


def recipe() -> str:
    """Return every key of a recipe: type, default, range, rule on resume, help, uses in shipped recipes."""
    from vlmrl.recipe.changes import rule_of
    from vlmrl.recipe.explain import all_keys, explain, toml_value

    lines: list[str] = []
    table = None
    for key in all_keys():
        above = key.rpartition(".")[0]
        if above != table:
            table = above
            shown = "[[data]]" if above == "data" else f"[{above}]"
            lines.extend([f"## `{shown}`" if above else "## At the top of the file", ""])
            lines.extend([_cell(explain(above).help), ""] if above else [])
        known = explain(key)
        lines.extend([f"### `{key}`", "", _cell(known.help), ""])
        default = "must be given" if known.required else _default(known.default, toml_value)
        choices = ", ".join(f"`{toml_value(value)}`" for value in known.choices)
        of_type = f"{_cell(known.type)}: {choices}" if choices else _cell(known.type)
        bounds = f"; {_cell(known.range)}" if known.range else ""
        rule = rule_of(tuple(key.split(".")))
        facts = [("type", of_type + bounds), ("default", default), ("on resume", f"{rule.kind}: {_cell(rule.reason)}")]
        uses = [
            f"`{use.where.partition('/')[2].rpartition('.toml')[0]}` ({_code(toml_value(use.value))})"
            for use in known.uses[:3]
        ]
        facts.extend([("used in", ", ".join(uses))] if uses else [])
        lines.extend([f"- *{name}*: {fact}" for name, fact in facts])
        lines.append("")
    return "\n".join(lines)


def algorithms() -> str:
    """Return the table of algorithms: each row, its source, and the cells that differ from the table's defaults."""
    from dataclasses import fields

    from vlmrl.algo.algorithms import ALGORITHMS, CELLS, Algorithm
    from vlmrl.recipe.explain import toml_value

    defaults = {field.name: field.default for field in fields(Algorithm)}
    rows = []
    for name, row in ALGORITHMS.items():
        cells = [(cell, getattr(row, cell)) for cell in CELLS if getattr(row, cell) != defaults[cell]]
        shown = "<br>".join(f"`{cell} = {toml_value(value)}`" for cell, value in cells)
        rows.append((f"`{name}`", _papers(_cell(row.summary)), shown or "the defaults"))
    return "\n".join(_table(("`algo.name`", "what it is", "cells that differ from the defaults"), rows))


def differences() -> str:
    """Return where the rows of the table differ from the code of others."""
    from vlmrl.algo.algorithms import EVERYWHERE, OF_ROWS

    everywhere = [f"- {_cell(text)}" for text in EVERYWHERE]
    rows = [(f"`{name}`", _cell(text)) for name, text in OF_ROWS.items()]
    return "\n".join(["In all rows:", "", *everywhere, "", *_table(("row", "what differs"), rows)])


def tasks() -> str:
    """Return the table of tasks with their variants and reward profiles."""
    from vlmrl.tasks import TASKS

    rows = [
        (f"`{name}`", _cell(entry.summary), _names(entry.variant_names), _names(entry.profiles))
        for name, entry in TASKS.items()
    ]
    return "\n".join(_table(("`data.task`", "what it is", "`data.variant`", "`reward.profile`"), rows))


def recipes() -> str:
    """Return the list of shipped recipes with the first sentence of each."""
    from vlmrl.recipe.explain import first_sentence, list_recipes

    rows = [(f"`{r.name}`", r.kind, _cell(first_sentence(r.comment))) for r in list_recipes()]
    return "\n".join(_table(("recipe", "kind", "what it trains"), rows))


def columns() -> str:
    """Return the columns of other trainers' tables."""
    from vlmrl.data.table_values import STYLES

    return "\n".join(_table(("library", "columns"), [(name, _cell(text)) for name, text in STYLES.items()]))


def new_row() -> str:
    """Return the fields of a row that a task's `prep` makes."""
    from vlmrl import NewRow

    return "\n".join(_table(("field of `NewRow`", "meaning", "default"), _fields(NewRow)))


def attack() -> str:
    """Return the fields of an attack, and the kinds of attacks."""
    from vlmrl import Attack
    from vlmrl.tasks.attack import KINDS

    kinds = _table(("kind", "what it is"), [(f'`"{name}"`', _cell(text)) for name, text in KINDS.items()])
    return "\n".join([*_table(("field of `Attack`", "meaning", "default"), _fields(Attack)), "", *kinds])


def _fields(of: type[Any]) -> list[tuple[str, str, str]]:
    """Return (name, text of the docstring, default) of each field of a dataclass. Raises: KeyError without a text."""
    from dataclasses import MISSING, fields
    from inspect import cleandoc

    section = cleandoc(of.__doc__ or "").partition("Args:\n")[2]
    texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.M))
    rows = []
    for field in fields(of):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        rows.append((f"`{field.name}`", _cell(texts[field.name]), "" if default is MISSING else f"`{default!r}`"))
    return rows


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "recipe": recipe,
    "algorithms": algorithms,
    "differences": differences,
    "tasks": tasks,
    "recipes": recipes,
    "columns": columns,
    "new_row": new_row,
    "attack": attack,
}
"""Name in a marker -> the function that makes the part."""
DRAWINGS: dict[str, Callable[[], str]] = {"levels": draw_levels, "life": draw_life, "way": draw_way}
"""The same of drawings, as inline SVG."""


def _marked(name: str, part: str) -> str:
    """Return a part between its two markers: its texts in lines of 120 characters, no two empty lines in a row."""
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"^(?=[^|#`\n]).{121,}$", _wrapped, part.strip(), flags=re.M))
    return f"<!-- generated: {name} -->\n\n{text}\n\n<!-- end: {name} -->"


def _wrapped(match: re.Match[str]) -> str:
    indent = "  " if match[0].startswith("- ") else ""
    return textwrap.fill(match[0], 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _help_paragraphs(text: str) -> list[str]:
    """Return a command's help as Markdown: its example as a code block, its other paragraphs as text."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        words = " ".join(paragraph.split())
        example = re.match(r"Example: (.*)", words)
        lines.extend(["```console", f"$ {example[1]}", "```"] if example else [_cell(words)])
        lines.append("")
    return lines


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _cell(text: str) -> str:
    """Return text of the code as Markdown of one line: code spans stay, all else is shown as it is."""
    parts = re.split(r"(`[^`]*`)", _one_line(text))
    return "".join(part if part.startswith("`") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[*#]|(?<!\w)_|_(?!\w)", r"\\\g<0>", escaped)


def _code(text: str) -> str:
    return f"`{_one_line(text)}`" if "`" not in text else _cell(text)


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _default(value: Any, toml_value: Callable[[Any], str]) -> str:
    return "not set" if value is None else _code(toml_value(value))


def _papers(text: str) -> str:
    """Return text with its arXiv numbers as links."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    for page in write_pages():
        print(f"written: {page.relative_to(DOCS.parent)}")
