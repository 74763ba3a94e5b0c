"""Generic code names no task: outside vlmrl/tasks/ nothing knows a task, its rewards, a rank of a taxonomy or a pair.

Read from the source: identifiers, imports and texts, `Example:` lines of help texts aside. What may stay is listed with
its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmrl.tasks import DEFAULT, TASKS
from vlmrl.tasks.pairs.rewards import REWARDS as PAIR_REWARDS
from vlmrl.tasks.taxonrl.rewards import REWARDS as TAXONRL_REWARDS

PACKAGE = Path(__file__).parent.parent / "vlmrl"
TASK_NAMES = {name for name in TASKS if name not in (DEFAULT, "figures", "page")}
"""`table` is what an entry is that names no task: generic by nature, and an ordinary word. Reports have `figures`, and
are pages."""
PLAIN_WORDS = {"pairs", "digits", "human", "counting", "grounding", "detection", "crop"}
"""Names of tasks that are ordinary words: refused as a whole text, not within one."""
RANKS = {"kingdom", "phylum", "genus", "species"}
"""Ranks of a taxonomy; order, family and class are ordinary words."""
NAMES = (TASK_NAMES | {*PAIR_REWARDS, *TAXONRL_REWARDS} | RANKS | {"taxonomic"}) - PLAIN_WORDS
WORDS = re.compile(rf"(?<![a-z])({'|'.join(sorted(NAMES))})(?![a-z])", re.IGNORECASE)
FIELDS = {"same", "distance"}
"""Truth fields of a pair: refused where a mapping is asked for them."""
ROOM = re.compile(r"vlmrl\.tasks\.(taxonrl|pairs|digits)(\.|$)")

ALLOWED = {
    ("algo/algorithms.py", "TaxonRL"): "the summary of a row of published settings says whose they are",
    ("recipe/imports/easyr1.py", "TaxonRL"): "it says which published launch scripts were tried",
    ("demo.py", "digits"): "the demo is of that task",
    ("demo.py", "geometry3k"): "the other demo is of that task",
    ("demo.py", "grounding"): "the demo of boxes is of that task",
    ("demo.py", "counting"): "the demo of counts is of that task",
    ("demo.py", "crop"): "the demo of a tool is of that task",
    ("demo.py", "distance"): "the demo is of that task",
    ("data/table_values.py", "human"): "who speaks in a conversation, as LLaVA's tables write it",
    ("diagnose/signs.py", "digits"): "a class of characters, no task",
}
"""(file, what it names) -> why it may."""


def named_in(source: str) -> Iterator[str]:
    """Yield every name of a task, a reward of one, a rank, or a field of a pair that a module's source uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "\n".join(line for line in node.value.splitlines() if "Example:" not in line)
            yield from (found.group(1) for found in WORDS.finditer(text))
            yield from (text for _ in [0] if text in PLAIN_WORDS)
        elif isinstance(node, ast.ImportFrom) and ROOM.match(node.module or ""):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if ROOM.match(alias.name))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in FIELDS:
            yield str(node.slice.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            keys = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (str(key) for key in keys if key in FIELDS)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and node.left.value in FIELDS:
            yield str(node.left.value)
        name = next((getattr(node, key) for key in ("id", "attr", "name", "arg") if hasattr(node, key)), None)
        if isinstance(name, str):
            yield from (found.group(1) for found in WORDS.finditer(name.replace("_", " ")) if name not in NAMES)
            yield from (name for _ in [0] if name in NAMES)


def generic_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != "tasks"]


@pytest.mark.slow
def test_nothing_generic_names_a_task():
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in generic_files()
        for name in named_in(path.read_text("utf-8"))
    }
    assert found - ALLOWED.keys() == set(), "ask the task (vlmrl/tasks/base.py, vlmrl/tasks/truth_kinds.py) instead"
    assert ALLOWED.keys() - found == set(), "a reason that is not needed any more"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from vlmrl.tasks.taxonrl.domains import DOMAINS", "vlmrl.tasks.taxonrl.domains"),
        ("import vlmrl.tasks.pairs.reward", "vlmrl.tasks.pairs.reward"),
        ("task = 'fungi'", "fungi"),
        ("def of_species(row): ...", "species"),
        ("x = truth['same']", "same"),
        ("x = truth.get('distance')", "distance"),
        ("x = 'same' in truth", "same"),
        ("hint = 'name it: --task sea_star'", "sea_star"),
        ("name = 'pairs'", "pairs"),
        ("reward = f'the reward taxonomy of {x}'", "taxonomy"),
        ("taxonrl = 1", "taxonrl"),
        ("'''Text.\\n\\nThe task whale.'''", "whale"),
    ],
)
def test_the_scan_sees(source: str, name: str):
    assert name in set(named_in(source))


def test_the_scan_leaves_ordinary_words_and_examples_alone():
    fine = "def pairs(x): ...\ndistance = 3\nx = 'two pairs of digits'\n'''Do.\\n\\nExample: vlmrl prep fungi'''"
    assert set(named_in(fine)) == set()
