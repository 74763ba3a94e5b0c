"""`vlmrl eval` with the sets and settings of a recipe: rows, names, options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import this_process

RECIPE = """
[model]
path = "model"
dtype = "float32"
device = "cpu"
max_pixels = 3136
[[data]]
path = "rows.jsonl"
[reward]
name = "length"
args = { soft_tokens = 2, max_tokens = 6 }
[rollout]
engine = "torch"
max_new_tokens = 4
[eval]
sets = ["more.jsonl"]
[eval.settings.warm]
temperature = 1.0
samples = 2
max_new_tokens = 3
[eval.settings.greedy]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, count in (("rows", 3), ("more", 2)):
        lines = [json.dumps({"prompt": f"say {i}", "answer": "1"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "mine.toml").write_text(RECIPE)
    return tmp_path


@pytest.mark.slow
def test_every_set_is_evaluated_under_every_setting(place: Path, tiny_folder: Path) -> None:
    done = this_process("eval", str(tiny_folder), "--recipe", "mine.toml", "--runs", "runs", "--json", cwd=place)
    warm, greedy = done.json["evaluations"]
    assert [Path(one["folder"]).name for one in (warm, greedy)] == ["eval-more-rows-warm", "eval-more-rows-greedy"]
    assert (warm["rows"], warm["prompts"], greedy["rows"]) == (4, 2, 2)
    assert warm["meta"]["setting"] == "warm" and warm["meta"]["sampling"]["max_new_tokens"] == 3
    assert not list((place / "runs" / "unfinished").iterdir())


@pytest.mark.slow
def test_one_setting_is_picked_and_a_wrong_name_is_told(place: Path, tiny_folder: Path) -> None:
    words = ["eval", str(tiny_folder), "--recipe", "mine.toml", "--runs", "runs"]
    (only,) = this_process(*words, "--settings", "greedy", "--json", cwd=place).json["evaluations"]
    assert only["meta"]["greedy"] and only["meta"]["split"] == "more"
    wrong = this_process(*words, "--settings", "gready", cwd=place)
    assert wrong.code == 2 and "no setting `gready`" in wrong.err and "greedy" in wrong.err
    both = this_process(*words, "--settings", "greedy", "--sample", "1", cwd=place)
    assert both.code == 2 and "--sample makes another" in both.err
