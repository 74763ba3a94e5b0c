"""`vlmrl check` of environments without a model: what fails in every episode or trace is told once, with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tinyworld import image

from vlmrl.recipe.load import load_recipe
from vlmrl.setup.environment_check import check_environment, environment_plan
from vlmrl.setup.rows import first_errors, scan_rows
from vlmrl.tasks.source import Source, open_source

TOOLS = '''
from vlmrl.environments.base import EnvironmentUnavailable, Start, Started

def price(start: Start, colour: str):
    """Say what it costs."""
    return start.columns["prices"][colour]

class Sound:
    def reset(self, prices, **row):
        self.prices = prices

    def price(self, colour: str):
        """Say what it costs."""
        return self.prices[colour]

class NeedsMore(Sound):
    def __init__(self, size): ...

class Misspelt(Sound):
    def reset(self, price): ...

class Raises(Sound):
    def reset(self, **row):
        raise ValueError("no map")

class Down(Sound):
    def reset(self, **row):
        raise EnvironmentUnavailable("the shop is closed")

class Closed(Sound):
    @classmethod
    def __vlmrl_start__(cls, args, *, forks):
        if forks:
            raise EnvironmentUnavailable("the shop is closed")
        return Started("a shop", warning="it smells")

class Dies(Sound):
    def price(self, colour: str):
        """Say what it costs."""
        __import__("os")._exit(3)

EMPTY, LAMBDA = [], lambda colour: "x"
CLASSES = {"sound": Sound, "raises": Raises}
'''
TASK = """
import vlmrl
def task(info):
    template = "<image>What is it?"
    return vlmrl.Task("shop", "s", template, trace=trace, profiles={"default": ("exact_match", {})})
def trace(row, rng):
    return [vlmrl.Call("price", {"colour": "red"}), str(row.truth["answer"])]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    image(1).save("a.png")
    Path("tools.py").write_text(TOOLS)
    Path("task.py").write_text(TASK)
    Path("prompt.jinja").write_text("<image>What is it?")
    rows = [{"image": "a.png", "answer": i, "prices": {"red": i, "blue": 7}, "environment": "sound"} for i in range(9)]
    rows[4]["environment"] = "raises"
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("recipe.toml").write_text(
        'model.path = "none"\nenvironment.name = "tools.py:Sound"\n'
        '[[data]]\npath = "rows.jsonl"\ntask = "task.py:task"\nprompt = "prompt.jinja"\n'
    )
    return tmp_path


def opened(name: str, *more: str) -> Source:
    recipe = load_recipe("recipe.toml", overrides=[f"environment.name=tools.py:{name}", *more]).recipe
    return open_source(recipe.data[0], recipe.reward)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Misspelt", "reset takes price, which the row does not have under this name; it has: prompt,"),
        ("Raises", "ValueError: no map (tools.py:"),
        ("CLASSES", "ValueError: no map (tools.py:"),
    ],
)
def test_an_environment_that_cannot_begin_is_an_error(place: Path, name: str, words: str) -> None:
    source = opened(name)
    (problem,) = check_environment(source, "here", source.rows[:], learns=False)
    assert problem.level == "error" and words in problem.message
    assert problem.where == source.rows[4 if name == "CLASSES" else 0].place


def test_a_service_that_is_down_is_a_warning(place: Path) -> None:
    source = opened("Down")
    (problem,) = check_environment(source, "here", source.rows[:], learns=False)
    assert problem.level == "warning" and "the shop is closed" in problem.message


def test_what_fails_at_the_start_of_its_process_is_a_problem_too(place: Path) -> None:
    source = opened("Closed")
    assert source.notes[-1] == "it smells"  # which `check` and `train` tell as a warning
    (problem,) = check_environment(source, "here", source.rows[:], learns=False)
    assert "the environment cannot be loaded: the shop is closed" in problem.message and problem.where


def test_traces_are_followed_where_they_are_learned(place: Path) -> None:
    function = opened("price")
    assert check_environment(function, "here", function.rows[:], learns=False) == []
    (problem,) = check_environment(function, "here", function.rows[:], learns=True)
    assert problem.message.startswith("a call in turn 1 of the trace fails: KeyError: 'prices'; `prices` is kept back")
    dies = opened("Dies")
    (problem,) = check_environment(dies, "here", dies.rows[:], learns=True)
    assert 'in the tool `price`, called with {"colour": "red"}: its process ended (exit 3)' in problem.message
    sound = opened("Sound")
    assert check_environment(sound, "here", sound.rows[:], learns=True) == []


def test_the_plan_says_why_a_column_is_kept_back(place: Path) -> None:
    plain = ("data.0.task=table", "reward.name=exact_match")  # its truth is the answer alone
    facts = environment_plan(opened("price", *plain))["environment"]
    assert facts["given"] == ["environment"] and facts["kept_back"] == ["answer", "prices"]
    assert facts["repeated"] == {"prices": "repeats `answer` in 9 of 9 rows"}
    facts = environment_plan(opened("Sound", *plain))["environment"]
    assert set(facts["given"]) == {"prices", "environment"} and facts["repeated"] == {}


def test_a_wrong_value_in_the_column_of_classes_is_found_in_all_rows(place: Path) -> None:
    text = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(text.replace('"raises"', '"rises"'))
    (problem,) = scan_rows(opened("CLASSES"), "here").problems
    assert problem.message.startswith("1 of 9 rows") and "`environment` is 'rises'" in str(problem.hint)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tools.py:Sond", "tools.py has no `Sond`"),
        ("toolz.py:Sound", "names an environment file that does not exist: toolz.py"),
        ("Sound", "which names no file"),
        ("tools.py:NeedsMore", "environment.args of NeedsMore: missing a required argument: 'size'"),
        ("tools.py:EMPTY", "has no tool"),
        ("tools.py:LAMBDA", "'<lambda>' cannot be a tool"),
    ],
)
def test_one_cause_is_one_error(place: Path, name: str, words: str) -> None:
    (problem,) = first_errors(load_recipe("recipe.toml", overrides=[f"environment.name={name}", "model.path=a/b"]))
    assert words in problem.message and " at 0x" not in problem.message
    if name == "Sound":
        assert ":NAME" in str(problem.hint) and "built-in" not in str(problem.hint)
    if name == "tools.py:EMPTY":
        assert problem.hint == "name a function in the list"
