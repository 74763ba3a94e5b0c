"""Supervised runs with tools: on traces that an environment answers, and on a table of chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import this_process
from small_runs import assert_same_run, recipe_text
from tinyworld import image

from vlmrl.store.runs import open_run

TOOLS = '''
from vlmrl.environments.base import Start

def zoom(start: Start, box: list[int]):
    """Show a part."""
    return ["here", start.images[0].crop(tuple(box))]
'''
TASK = """
import vlmrl
from vlmrl import Call

def task(info):
    def trace(row, rng):
        box = [0, 0, 28, 28 * rng.randrange(1, 3)]
        if row.columns["question"] == "q0":
            return "It is 0."
        return [["I look.", Call("zoom", {"box": box})], f"It is {rng.randrange(9)}."]

    return vlmrl.Task("looks", "look", "<image>What?", trace=trace)
"""
SETTINGS = """
rollout = {max_new_tokens = 200}
train = {steps = 2, rows_per_step = 4, tokens_per_row = 900}
optim.lr = 1e-3
eval = {every_steps = 1}
checkpoint = {every_steps = 1, keep_last = 9}
"""
ENVIRONMENT = 'environment = {name = "tools.py:zoom", tokens = 700}'
TABLE = '[[data]]\npath = "chats.jsonl"\nvalidation = 0.25\n'
OWN = '[[data]]\npath = "rows.jsonl"\ntask = "task.py:task"\nvalidation = 0.25\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "task.py").write_text(TASK)
    rows, chats = [], []
    for i in range(12):
        for name in ("a", "b"):
            image(i + 20 * (name == "b"), 56, 56).save(tmp_path / f"{name}{i}.png")
        rows.append({"question": f"q{i}", "image": f"a{i}.png"})
        call = {"function": {"name": "zoom", "arguments": {"box": [0, 0, i, 28]}}}
        chat = [
            {"role": "user", "content": f"<image>What is {i}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "here <image>"},
            {"role": "assistant", "content": f"It is {i}."},
        ]
        tools = [{"name": "zoom", "parameters": {"type": "object", "properties": {"box": {"type": "array"}}}}]
        chats.append({"messages": chat, "tools": tools, "images": [f"a{i}.png", f"b{i}.png"]})
    for name, lines in (("rows", rows), ("chats", chats)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def write(place: Path, model: Path, settings: str, data: str) -> None:
    (place / "recipe.toml").write_text(recipe_text(model, settings + SETTINGS, "sft") + data)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "data"), [(ENVIRONMENT, OWN), ("", TABLE)], ids=["environment", "table"])
def test_two_steps(place, tiny_folder, settings, data):
    write(place, tiny_folder, settings, data)
    checked = this_process("check", "recipe.toml", "--json", cwd=place)
    assert checked.code == 0, checked.err
    plan = checked.json["plan"]
    assert plan["memory"]["measured_prompts"]
    if data == TABLE:
        (facts,) = plan["prompts"].values()
        assert facts["correct_response_tokens_max"] > 60 and facts["image_tokens_mean"] == 4
    done = this_process("sft", "recipe.toml", "--name", "whole", cwd=place)
    assert done.code == 0, done.err
    run = open_run(place / "runs", "whole")
    lines = run.metrics("train")
    assert len(lines) == 2 and run.metrics("validation")[-1]["eval/loss"] > 0
    # Of an episode of two turns, about 70 tokens of the call and 15 of the answer are trained, and no observation.
    assert all(4 * 60 < line["data/trained_tokens"] < 4 * 140 for line in lines)
    assert "of images) in" in done.err, "the rehearsal counts the images of the tools"
    half = this_process("sft", "recipe.toml", "--name", "half", "--set", "train.steps=1", cwd=place)
    assert half.code == 0, half.err
    again = this_process("sft", "--resume", "half", "--set", "train.steps=2", cwd=place)
    assert again.code == 0, again.err
    assert_same_run(open_run(place / "runs", "half"), run)
    assert this_process("merge", "whole", "--checkpoint", "last", "--out", "merged", cwd=place).code == 0


@pytest.mark.slow
def test_what_is_wrong_with_a_row_is_told_in_words(place, tiny_folder):
    write(place, tiny_folder, "", TABLE)
    lines = (place / "chats.jsonl").read_text().splitlines()
    chat = json.loads(lines[3])
    del chat["messages"][2]
    (place / "chats.jsonl").write_text("\n".join([*lines[:3], json.dumps(chat), *lines[4:]]))
    for command in ("check", "sft"):
        done = this_process(command, "recipe.toml", cwd=place)
        assert done.code == 2 and "Traceback" not in done.err, done.err
        assert "a call without a result: a message of role `tool` must follow it" in done.err + done.out
    write(place, tiny_folder, ENVIRONMENT, OWN)
    (place / "task.py").write_text(TASK.replace('Call("zoom"', 'Call("look"'))
    done = this_process("sft", "recipe.toml", cwd=place)
    assert done.code == 2 and "a call in turn 1 of the trace fails: there is no tool 'look'" in done.err
    assert "rows.jsonl:" in done.err and "Traceback" not in done.err
