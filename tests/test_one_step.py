"""scripts/one_step.py does what the first step of `vlmrl train` does; a row crosses few files and package borders."""

import json
import sys
from pathlib import Path

import warm

from scripts.docs_site.drawings import read_way
from scripts.way_of_a_row import SETTINGS
from vlmrl.store.runs import open_run

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MOST_FILES, MOST_BORDERS, MOST_WORKER_FILES = 44, 60, 4
"""Limits of the way of a row: lower them when the way becomes shorter; docs/design/index.md shows it."""


def output_of(script: str, *arguments: object, cwd: Path) -> list[str]:
    command = [sys.executable, SCRIPTS / script, "--json", *map(str, arguments)]
    return warm.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout.splitlines()


def test_the_way_of_a_row_is_short_and_one_step_alone_has_the_loss_and_the_gradient_of_its_first_step(tmp_path):
    way = json.loads(output_of("way_of_a_row.py", f"--folder={tmp_path}", cwd=SCRIPTS.parent)[-1])
    assert way["files"] <= MOST_FILES, way["list"]
    assert way["borders"] <= MOST_BORDERS, way["pairs"]
    assert way["worker"]["files"] <= MOST_WORKER_FILES, way["worker"]["list"]
    assert sorted(f"{name}.py" for _, files, _ in read_way() for name in files) == way["list"], "the page differs"
    trained = open_run(tmp_path / "runs", "last").metrics("train")[0]
    settings = [f"--set={setting}" for setting in SETTINGS]
    printed = output_of("one_step.py", "count/recipe.toml", *settings, "--image=seen.png", cwd=tmp_path)
    step = json.loads(printed[-1])
    for name in ("loss/total", "optim/grad_norm", "policy/entropy", "policy/sampler_k3"):
        assert step[name] == trained[name], name
    assert step["optim/grad_norm"] > 0
    assert (tmp_path / "seen.png").stat().st_size
    assert [line.split()[0] for line in printed[:3]] == ["recipe", "policy", "row"]
