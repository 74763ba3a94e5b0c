"""The commands of the command line by their words, and what README says of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


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
    lines = [m for block in blocks for m in re.findall(r"^\$ (?:.*&& )?vlmrl\b(.*)$", block, flags=re.M)]
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    lines += re.findall(r"`vlmrl ([^`]+)`", prose.replace("\n", " "))
    return [shlex.split(line, comments=True) for line in lines]
