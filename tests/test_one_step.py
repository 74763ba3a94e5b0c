"""scripts/one_step.py does what the first step of `vlmrl train` does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.way_of_a_row import COMMANDS, REWARD
from vlmrl.cli.app import main
from vlmrl.store.runs import open_run

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """The folder `count` of `vlmrl init`, a tiny model for it, and a reward that tells random responses apart."""
    monkeypatch.chdir(tmp_path)
    for arguments in COMMANDS:
        run(monkeypatch, *arguments)
    Path("count/reward.py").write_text(REWARD)
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vlmrl", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


def test_one_step_has_the_loss_and_the_gradient_of_the_first_step_of_train(own_table, monkeypatch):
    settings = ["--set=model.path=tiny", "--set=rollout.max_new_tokens=24", "--set=train.tokens_per_row=300"]
    run(monkeypatch, "train", "count/recipe.toml", *settings, "--set=train.steps=1", "--quiet")
    (trained,) = open_run(Path("runs"), "last").metrics("train")
    script = [sys.executable, SCRIPTS / "one_step.py", "count/recipe.toml", *settings, "--json", "--image=seen.png"]
    printed = subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()
    step = json.loads(printed[-1])
    for name in ("loss/total", "optim/grad_norm", "policy/entropy", "policy/sampler_k3"):
        assert step[name] == trained[name], name
    assert step["optim/grad_norm"] > 0
    assert Path("seen.png").stat().st_size
    assert [line.split()[0] for line in printed[:3]] == ["recipe", "policy", "row"]
