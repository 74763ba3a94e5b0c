"""The code of a user's file that a function depends on."""

import pytest

from vlmrl.rewards.reached_code import same_code

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


def test_texts_that_cannot_be_read_count_whole() -> None:
    assert same_code("def broken(", "def broken(", "broken") and not same_code("def broken(", "def broken((", "broken")
    assert not same_code("a = 1", "a = 1 ", "no_such_function")


def test_arguments_of_other_calls_count_whatever_their_names() -> None:
    before = "def reward(x): return graded(x, attacks=near)\ndef near(x): return 0.5\n"
    assert not same_code(before, before.replace("0.5", "1.0"), "reward")
    assert not same_code(before, before.replace("attacks=near", "attacks=None"), "reward")
