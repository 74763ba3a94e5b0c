"""Rules of writing that a test can check: first words, sections, the word for a GPU, names of variables.

CONTRIBUTING says why. Ruff's `D` checks the rest. Packages that pyproject.toml exempts from `D` are exempt here, too;
`python tests/test_docstrings.py vlmrl/data` lists the findings of one, exempt or not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
CLAUSES = {"what", "how", "where", "which", "why", "who", "whose", "when", "that", "whether", "as", "of", "if", "for"}
"""A sentence that begins with one of these is a clause, or has lost its noun."""
NO_VERB_TEXT = """
    a an the this these those every each all one two both any some no nothing everything something whatever so inside
    memory token tokens number numbers bytes row rows name's names image images part parts index indices key keys tensor
    tensors advantages responses log-probs settings second seconds true false none its in on at from by with without
    several only not old new raises returns yields example args source text texts group groups samples step steps word
    words line lines half most more less few many
"""
NO_VERBS = CLAUSES | set(NO_VERB_TEXT.split())
"""First words of function docstrings that are no verb in the imperative."""
VERBS_IN_S = {
    "access",
    "address",
    "compress",
    "cross",
    "discuss",
    "express",
    "focus",
    "guess",
    "pass",
    "press",
    "process",
}
"""Verbs whose imperative ends in s: any other word in s is a third person or a plural."""
SECTION = re.compile(r"^\s*(Args|Returns|Yields|Raises|Source|Example):(.*)")
TWO_ARGUMENTS = re.compile(r"^\s+\w[\w, ]*: .*\S\s{3,}\w[\w, ]*: ")
CARD = re.compile(r"(?<!model )(?<!model_)\bcards?\b", re.IGNORECASE)
EMPTY_NAMES = {"told", "found", "made", "asked", "wanted"}
"""Names that say that there is a value, and not which."""


def is_property(node: ast.AST) -> bool:
    names = [ast.unparse(d).split(".")[-1] for d in getattr(node, "decorator_list", [])]
    return any(name.endswith("property") for name in names)


def first_word_problem(node: ast.AST, text: str) -> str | None:
    """Return what is wrong with the first word of a docstring, or None."""
    word = text.split()[0].strip("`.,:;()\"'") if text.split() else ""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_property(node):
        clause = word.lower() in CLAUSES - ({"whether"} if is_property(node) else set())
        return f"begins with `{word}`: a clause, not a noun" if clause else None
    third_person = word.endswith("s") and word.lower() not in VERBS_IN_S
    if not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)*", word) or word.lower() in NO_VERBS or third_person:
        return f"begins with `{word}`: no verb in the imperative"
    return None


def section_problems(text: str) -> Iterator[str]:
    """Yield what is wrong with the sections of a docstring."""
    lines = text.splitlines()
    in_args, first = False, True
    for index, line in enumerate(lines):
        section = SECTION.match(line) if index else None
        if section:
            if first and lines[index - 1].strip():
                yield f"no blank line before `{section[1]}:`"
            first, in_args = False, section[1] == "Args"
            if in_args == bool(section[2].strip()):
                yield "`Args:` stands on a line of its own" if in_args else f"no text behind `{section[1]}:`"
        elif in_args and TWO_ARGUMENTS.match(line):
            yield f"two arguments on one line: {line.strip()[:50]}"
        if "Args: " in line and not (section and section[1] == "Args"):
            yield "`Args:` stands on a line of its own"


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, int, str]]:
    """Yield (node, line, text) of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not body:
            continue
        for index, statement in enumerate(body):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield (node if index == 0 else statement), statement.lineno, value.value


def problems(source: str) -> list[str]:
    """Return every problem of a module's texts and names as `line: problem`."""
    tree = ast.parse(source)
    result: list[tuple[int, str]] = []
    for node, line, text in docstrings(tree):
        word = first_word_problem(node, text)
        result += [(line, word)] if word else []
        result += [(line, problem) for problem in section_problems(text)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CARD.search(node.value):
            result.append((node.lineno, "`card` in a text: GPU, or model card"))
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        if name in EMPTY_NAMES and not isinstance(getattr(node, "ctx", None), ast.Load):
            result.append((node.lineno, f"a variable called `{name}`"))  # type: ignore[attr-defined]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and CARD.search(token.string):
            result.append((token.start[0], "`card` in a comment: GPU, or model card"))
    return [f"{line}: {problem}" for line, problem in sorted(result)]


def exempt_patterns() -> list[str]:
    """Return the patterns of the files that pyproject.toml exempts from all of `D`, braces expanded."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]["per-file-ignores"]
    patterns = []
    for pattern, rules in table.items():
        if "D" in rules:
            before, _, rest = pattern.partition("{")
            choices, _, after = rest.partition("}")
            patterns += [f"{before}{c}{after}" for c in choices.split(",")] if rest else [pattern]
    return patterns


def checked_files() -> list[Path]:
    exempt = exempt_patterns()
    paths = sorted((ROOT / "vlmrl").rglob("*.py"))
    return [p for p in paths if not any(fnmatch(p.relative_to(ROOT).as_posix(), pattern) for pattern in exempt)]


def test_texts_and_names_follow_the_rules():
    wrong = [f"{path.relative_to(ROOT)}:{p}" for path in checked_files() for p in problems(path.read_text("utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_some_files_are_checked():
    assert ROOT / "vlmrl/algo/losses.py" in checked_files()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('def f(x):\n    """The mean of x."""', "no verb"),
        ('def f(x):\n    """What x holds."""', "no verb"),
        ('def f(x):\n    """Whether x is odd."""', "no verb"),
        ('def f(x):\n    """Returns x."""', "no verb"),
        ('def f(x):\n    """[N] numbers."""', "no verb"),
        ('class A:\n    """What a model says."""', "a clause"),
        ('"""How rows are packed."""', "a clause"),
        ('LIMIT = 1\n"""How long it may take."""', "a clause"),
        ('class A:\n    x: int\n    """Whether it is on."""', "a clause"),
        ('def f(x):\n    """Return x.\n\n    Args: x: a number.\n    """', "line of its own"),
        ('def f(x):\n    """Return x. Args: x: a number."""', "line of its own"),
        ('def f(x):\n    """Return x.\n\n    Args:\n        x: a number.     y: another.\n    """', "two arguments"),
        ('def f(x):\n    """Return x.\n\n    More.\n    Returns: x.\n    """', "no blank line"),
        ('def f(x):\n    """Return x.\n\n    Returns:\n        x.\n    """', "no text behind"),
        ("def f(x):\n    found = x\n", "a variable called `found`"),
        ("def f(told): ...", "a variable called `told`"),
        ("for made in x: ...", "a variable called `made`"),
        ("hint = f'no card for {x}'", "`card` in a text"),
        ("x = 1  # of two cards", "`card` in a comment"),
    ],
)
def test_the_rules_see(source: str, problem: str):
    assert any(problem in p for p in problems(source)), problems(source)


def test_the_rules_pass_what_follows_them():
    good = '''"""Model card of a run."""

LIMIT = 2
"""Largest number of tries."""


class Row:
    """Packed row of tokens.

    Args:
        ids: token ids.
        low, high: the bounds.
    """

    @property
    def is_empty(self):
        """Whether it holds no token."""

    def score(self, x):
        """Return the score. Raises: ValueError when x is negative."""

    def process(self, x):
        """Process x.

        It goes on.

        Args:
            x: a number.
        Returns: another.
        Raises: ValueError when x
            is negative.
        """
'''
    assert problems(good) == []


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for file in sorted([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py")):
            for finding in problems(file.read_text("utf-8")):
                print(f"{file.relative_to(ROOT)}:{finding}")
