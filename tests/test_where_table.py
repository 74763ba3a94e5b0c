"""README holds: its "I want -> file" table, its commands and their options, its recipes, its scripts."""

from __future__ import annotations

import re

import pytest
from readme_commands import ROOT, all_commands, options_of, typed_commands

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = all_commands()


def where_table() -> list[tuple[str, str]]:
    """(what one wants, path) of each path in the table."""
    table = README.split("| I want | file |")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|") and "---" not in line]
    return [(want.strip(), path) for want, files in rows for path in re.findall(r"`([^`]+)`", files)]


@pytest.mark.parametrize(("want", "path"), where_table())
def test_every_file_of_the_table_is_there(want: str, path: str) -> None:
    found = sorted(ROOT.glob(re.sub(r"<\w+>", "*", path)))
    assert found, f"README sends those who want {want} to {path}, which is not there"


def test_the_table_is_read_whole() -> None:
    assert len(where_table()) >= 20


@pytest.mark.parametrize("words", typed_commands(README), ids=" ".join)
def test_every_command_of_the_readme_exists_and_takes_its_options(words: list[str]) -> None:
    names = [w for w in words if not w.startswith("-")]
    if not names:
        assert words == ["--help"]
        return
    if names[0] == "prep" and any(
        ".py:" in name for name in names
    ):  # the file of a reader, whose own options are in no README
        assert {w for w in words if w.startswith("-")} <= {"--out", "--help"}
        return
    known = [n for n in (2, 1) if tuple(names[:n]) in COMMANDS]
    groups = {command[0] for command in COMMANDS if len(command) > 1}
    if names[:1] == names and names[0] in groups:
        return  # the group as a whole
    assert known, f"there is no command `vlmrl {' '.join(names[:2])}`"
    accepted = options_of(COMMANDS[tuple(names[: known[0]])])
    used = [w.split("=")[0] for w in words if w.startswith("-")]
    assert not set(used) - accepted, f"`vlmrl {' '.join(words)}`: {sorted(set(used) - accepted)} is no option of it"


def test_the_readme_shows_the_commands_of_a_projects_life() -> None:
    shown = {words[0] for words in typed_commands(README)}
    assert {"prep", "check", "try", "sft", "train", "eval", "merge", "reward-check", "report", "runs"} <= shown


def test_every_recipe_and_script_and_test_it_names_exists() -> None:
    named = set(re.findall(r"\b(?:recipes|scripts|tests|vlmrl)/[\w./-]*\w", README))
    assert {"recipes/digits_im.toml", "scripts/demo", "scripts/test"} <= named
    templates = {"vlmrl/cli", "vlmrl/tasks"}
    missing = sorted(n for n in named if not (ROOT / n).exists() and n not in templates)
    assert missing == []


def test_every_shipped_recipe_says_how_it_is_used_by_a_command_that_exists() -> None:
    texts = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "recipes").glob("*.toml"))]
    commands = [words for text in texts for words in typed_commands(text.replace("# ", ""))]
    assert texts and all(any(tuple(w[:n]) in COMMANDS for n in (1, 2)) or w[0] == "prep" for w in commands)
