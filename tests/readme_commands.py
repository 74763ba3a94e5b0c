"""The commands of the command line by their words, and the pages that show them: README and docs/."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
"""Every page for users, by its path in the repository."""


def all_commands() -> dict[tuple[str, ...], Any]:
    """Words after `vlmrl` -> command, for every command that does something (groups are left out)."""
    from typer import Context
    from typer.main import get_command

    from vlmrl.cli.app import app

    found: dict[tuple[str, ...], Any] = {}

    def walk(words: tuple[str, ...], command: Any) -> None:
        if not hasattr(command, "list_commands"):
            found[words] = command
            return
        context = Context(command)
        for name in command.list_commands(context):
            walk((*words, name), command.get_command(context, name))

    walk((), get_command(app))
    return found


def options_of(command: Any) -> set[str]:
    """Every spelling of its options, --help included."""
    return {"--help", "-h"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}


def typed_commands(text: str) -> list[list[str]]:
    """The words after `vlmrl` of each command in the text: prompts in code blocks, and code spans in the prose."""
    text = text.replace("\\\n", " ")  # a command over two lines
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    start = r"^\$ (?:.*&& )?(?:scripts/vllm-cpu )?vlmrl\b(.*)$"
    lines = [m for block in blocks for m in re.findall(start, block, flags=re.M)]
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    lines += re.findall(r"`vlmrl ([^`]+)`", prose.replace("\n", " "))
    return [shlex.split(line, comments=True) for line in lines]


def read_page(name: str) -> str:
    """Return the text of a page."""
    return PAGES[name].read_text(encoding="utf-8")


def code_spans(text: str) -> list[str]:
    """Return what stands in backticks in the prose of a page, also where a line ends within."""
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", re.sub(r"(?<!\n)\n(?!\n)", " ", prose))


def snippets(text: str, language: str) -> list[str]:
    """Return the code blocks of a language in a page, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)
