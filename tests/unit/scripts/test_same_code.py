"""scripts/same_code.py: what counts as the same code, and that each kind of change is seen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import mutate_algo  # noqa: E402
import same_code  # noqa: E402
from same_code import compare  # noqa: E402

SOURCE = '''"""Module."""
LIMIT = 2
"""A limit."""


class Box:
    """A box."""

    size: int = 0
    """Its size."""

    def grow(self, by, *, limit=LIMIT):
        """Old words."""
        total = self.size + by  # a comment
        found = [x for x in range(total) if x > limit]
        def inner(y):
            nonlocal total
            total += y
            return found, total
        if total < 0:
            raise ValueError(f"{by} of {limit} is too small")
        return inner(1)
'''


def changed(old: str, new: str, source: str = SOURCE) -> str:
    assert source.count(old) >= 1
    return source.replace(old, new)


@pytest.mark.parametrize(
    "new",
    [
        changed("Old words.", "New words,\n        over two lines."),
        changed('        """Old words."""\n', ""),
        changed('"""Its size."""', '"""How large."""'),
        changed("  # a comment", ""),
        changed("LIMIT = 2\n", "\n\n# more\n\nLIMIT = (\n    2\n)\n"),
        changed("[x for x in range(total) if x > limit]", "[\n  x for x in range(total)\n  if x > limit\n  ]"),
    ],
)
def test_words_comments_and_layout_are_no_code(new: str):
    assert new != SOURCE
    assert compare(SOURCE, new).differences == []


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("self.size + by", "self.size - by", "Box.grow"),
        ("LIMIT = 2", "LIMIT = 3", "module"),
        ("LIMIT = 2", "LIMIT = 2.0", "module"),
        ("inner(1)", "inner(True)", "Box.grow"),
        ("return found, total", "return total, found", "Box.grow.<locals>.inner"),
        ("if x > limit]", "if x > total]", "Box.grow"),
        ("by, *, limit=LIMIT", "by, limit=LIMIT", "Box.grow"),
        ("size: int = 0", "size: int = 1", "Box"),
        ("too small", "too little", "Box.grow"),
        ("total < 0", "total <= 0", "Box.grow"),
        ("def grow", "def grown", "Box"),
    ],
)
@pytest.mark.parametrize("rename_locals", [False, True])
def test_every_change_of_code_is_seen_and_placed(old: str, new: str, where: str, rename_locals: bool):
    differences = compare(SOURCE, changed(old, new), rename_locals=rename_locals).differences
    assert any(line.startswith(where) for line in differences), differences


def test_an_assertion_is_code():
    assert compare("def f(x):\n    assert x\n", "def f(x):\n    pass\n").differences


def test_a_renamed_local_is_a_difference_until_it_is_allowed():
    new = changed("found", "numbers").replace("x for x in", "n for n in").replace("if x >", "if n >")
    new = new.replace("total", "zero")  # a captured variable: in another place of the alphabet
    assert compare(SOURCE, new).differences
    assert compare(SOURCE, new, rename_locals=True).differences == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def f(found):\n    return found\n", "def f(text):\n    return text\n"),  # callers may pass it by keyword
        ("def f(*, found):\n    return found\n", "def f(*, text):\n    return text\n"),
        ("g = lambda found: found\n", "g = lambda text: text\n"),
        ("def f():\n    a, b = 1, 2\n    return a\n", "def f():\n    a, b = 1, 2\n    return b\n"),
        ("def f():\n    a = b = 1\n    a = 2\n    return b\n", "def f():\n    a = b = 1\n    b = 2\n    return b\n"),
        ("def f():\n    a = 1\n    b = 2\n    return a, b\n", "def f():\n    a = 1\n    a = 2\n    return a, a\n"),
        ("found = 1\n", "text = 1\n"),  # a module's names are seen from outside
        ("class A:\n    found = 1\n", "class A:\n    text = 1\n"),
        ("def f():\n    global x\n    x = 1\n", "def f():\n    global y\n    y = 1\n"),
        ("def f():\n    a = 1\n    return locals()\n", "def f():\n    b = 1\n    return locals()\n"),
        ("def f():\n    a = 1\n    return f'{a=}'\n", "def f():\n    b = 1\n    return f'{b=}'\n"),
        ("def f():\n    import os\n    return os\n", "def f():\n    import re\n    return re\n"),
        ("def f():\n    def a(): ...\n    return a\n", "def f():\n    def b(): ...\n    return b\n"),
        ("def f(a):\n    return [a for b in a]\n", "def f(a):\n    return [b for b in a]\n"),
    ],
)
def test_names_that_can_be_seen_or_swapped_are_code(old: str, new: str):
    assert compare(old, old, rename_locals=True).differences == []
    assert compare(old, new, rename_locals=True).differences


NOBODY_SEES = [
    "def f(a, /):\n    return a\n",
    "def f(*a, **b):\n    return a, b\n",
    "def f():\n    try:\n        g()\n    except KeyError as a:\n        h(a)\n",
    "def f(v):\n    if any((a := b) > 1 for b in v):\n        return a\n",
    "def f(v):\n    match v:\n        case {'k': a, **b}:\n            g(a, b)\n",
    "def f(v):\n    match v:\n        case [c, *d] | (c, 1, d) as a:\n            g(a, c, d)\n",
    "def f():\n    a = 1\n    class A:\n        def g(self):\n            return a\n    return A\n",
    "def f():\n    with open('x') as a, g() as b:\n        for c in a:\n            yield b, c\n",
    "def f():\n    a: int = 1\n    del a\n    return {b: c for b, c in g() for d in b if d}\n",
    "async def f(v):\n    async for a in v:\n        await g(lambda b: a + b)\n",
]


@pytest.mark.parametrize("old", NOBODY_SEES)
def test_names_that_nobody_sees_may_change(old: str):
    # From the end of the alphabet, so that captured variables, which are sorted by name, change their order.
    new = re.sub(r"\b[a-d]\b", lambda found: {"a": "z", "b": "y", "c": "x", "d": "w"}[found[0]], old)
    new = new.replace("lambda y: z + y", "lambda b: z + b")
    assert new != old and compare(old, new).differences
    assert compare(old, new, rename_locals=True).differences == []


def test_texts_are_listed_and_nothing_else_may_change():
    new = changed('f"{by} of {limit} is too small"', 'f"the limit {limit} is above {by}"')
    result = compare(SOURCE, new, texts=True)
    assert result.differences == []
    assert result.texts == [("f'{by} of {limit} is too small'", "f'the limit {limit} is above {by}'")]
    assert compare(SOURCE, changed("total += y", "total -= y", new), texts=True).differences


@pytest.mark.parametrize(
    "new", ['f"{by} is too small"', 'f"{by} of {by}"', 'f"{by:.2f} of {limit}"', 'f"{by!r} of {limit}"', '"too small"']
)
def test_a_text_keeps_its_values_and_their_formats(new: str):
    assert compare(SOURCE, changed('f"{by} of {limit} is too small"', new), texts=True).differences


def test_mutants_of_the_algorithms_are_other_code():
    small = (mutate_algo.KL, mutate_algo.RETURNS, mutate_algo.SHAPING, mutate_algo.AGGREGATE)
    mutants = [m for m in mutate_algo.MUTANTS if m[0] in small]
    unseen = []
    for file, old, new, _ in mutants:
        source = (SCRIPTS.parent / file).read_text("utf-8")
        if not compare(source, source.replace(old, new), rename_locals=True).differences:
            unseen.append(f"{file}: {old!r} -> {new!r}")
    assert len(mutants) > 20 and not unseen, unseen


def test_help_texts_are_reported_where_they_are_shown():
    comparison = compare(SOURCE, changed("Its size.", "How large."))
    assert comparison.shown == ["Box.size"]
    assert "help texts changed: Box.size" in "\n".join(same_code.report("vlmrl/recipe/schema.py", comparison))
    assert "help texts" not in "\n".join(same_code.report("vlmrl/train/rl.py", comparison))


def test_the_command_compares_commits_and_exits_with_1(tmp_path: Path):
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("same_code", "changes", "local_names", "lost_facts"):
        (folder / f"{name}.py").write_text((SCRIPTS / f"{name}.py").read_text("utf-8"), "utf-8")
    (tmp_path / "vlmrl").mkdir()
    module = tmp_path / "vlmrl/box.py"

    def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, f"scripts/{script}.py", *words], cwd=tmp_path, capture_output=True, text=True
        )

    git("init", "-b", "main")
    for text in (SOURCE, changed("Old words.", "Old words, at most 7 times.")):
        module.write_text(text, "utf-8")
        git("add", ".")
        git("commit", "-m", "x")
    done = run("same_code")
    assert (done.returncode, done.stdout) == (0, "same     vlmrl/box.py\n"), done.stderr
    module.write_text(changed("size + by", "size * by"), "utf-8")
    done = run("same_code", "--locals")
    assert done.returncode == 1 and "Box.grow (line 12): BINARY_OP" in done.stdout, done.stdout + done.stderr
    assert run("same_code", "--base", "HEAD~1", "--head", "HEAD").returncode == 0
    assert run("same_code", "tests").stdout == ""
    done = run("lost_facts")
    assert done.returncode == 0 and "gone   7 (number), at most (word)" in done.stdout, done.stdout + done.stderr
    module.unlink()
    done = run("same_code")
    assert done.returncode == 1 and "removed" in done.stdout
    assert run("same_code", "--base", "nothing").returncode == 2
