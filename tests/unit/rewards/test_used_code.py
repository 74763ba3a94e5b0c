"""The code of a user's file that a function depends on."""

import pytest

from vlmrl.rewards.identity import same_code

TASK = """
from vlmrl import Attack, Task
LIMIT = 3
def task(info): return Task(name="t", attacks=tricks, profiles={"default": (":reward", {})})
def reward(x): return value(x)
def value(x): return min(1.0, LIMIT)
def tricks(rows): return []
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("def tricks(rows): return []", "def tricks(rows): return [1]", True),
        ("attacks=tricks", "attacks=lambda rows: [2]", True),
        ("def value(x)", "# a comment\ndef value(x)", True),
        ("def value(x): return min", "def value(x): return max", False),
        ("LIMIT = 3", "LIMIT = 4", False),
        ("return value(x)", "return globals()['value'](x)", False),
        ("return value(x)", "return dict.__getitem__(look(), 'value')(x)", False),
        ("return value(x)", "return made(prep=lambda: 3)", False),
        ("from vlmrl import Attack, Task", "from vlmrl import Attack, Task\nimport sys", False),
    ],
)
def test_only_what_the_function_reaches_counts(before: str, after: str, same: bool) -> None:
    for name in ("reward", "task"):
        assert same_code(TASK, TASK.replace(before, after), name) is same


REGISTERED = """
RULES = {}
def rule(f):
    RULES[f.__name__] = f
    return f
@rule
def exact(x): return 1.0
def score(x): return sum(r(x) for r in RULES.values())
"""


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        (REGISTERED, "return 1.0", "return 0.25"),
        (REGISTERED.replace("f.__name__", "len(RULES)"), "return 1.0", "return 0.25"),
        (
            "def score(x): return inner(x)\ndef inner(x): return 1\nplain = score\ndef score(x): return plain(x)",
            "1",
            "2",
        ),
        ("W = {}\nclass Unused: W['a'] = 1\ndef score(x): return W['a']", "1", "2"),
        ("W = {}\ndef unused(a=W.update(a=1)): return a\ndef score(x): return W['a']", "a=1", "a=2"),
        ("import sys\nme = sys.modules['__main__']\ndef score(x): return me.rule(x)\ndef rule(x): return 1", "1", "2"),
        ("def score(x): return graded(x, attacks=near)\ndef near(x): return 1", "1", "2"),
        ("def score(x): return graded(x, attacks=1)", "1", "2"),
        ("def score(x): return x.fields['rule']\ndef rule(x): return 1", "1", "2"),
        ("# -*- coding: latin-1 -*-\ndef score(x): return 1", "latin-1", "utf-8"),
    ],
)
def test_whatever_may_change_a_score_counts(text: str, before: str, after: str) -> None:
    assert before in text and not same_code(text, text.replace(before, after), "score")


def test_texts_that_cannot_be_read_count_whole() -> None:
    assert same_code("def broken(", "def broken(", "broken") and not same_code("def broken(", "def broken((", "broken")
