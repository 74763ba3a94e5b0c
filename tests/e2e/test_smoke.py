"""`recipes/smoke.toml` on a fresh machine: what is missing is named with the command that makes it, then it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import own_process, this_process

from vlmrl.store.runs import open_run

HINTS = ("vlmrl prep digits", "vlmrl demo --model-only demo/model --data data/digits")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder where the commands that a missing model and missing data ask for were typed."""
    folder = tmp_path_factory.mktemp("smoke")
    asked = this_process("train", "smoke", cwd=folder)
    assert asked.code == 2 and [h for h in HINTS if f"make it first: `{h}`" in asked.err] == list(HINTS), asked.err
    for hint in HINTS:
        done = this_process(*hint.split()[1:], cwd=folder)
        assert done.code == 0, done.err
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_smoke_recipe_runs_in_two_processes(place: Path, engine: str) -> None:
    runs = f"runs-{engine}"
    words = ("--gpus", "2", "--set", f"rollout.engine={engine}", "--runs", runs)
    done = own_process("train", "smoke", *words, "--json", cwd=place)
    assert done.json["status"] == "done" and done.json["steps"] == 3, done.err
    assert done.json["checkpoints"] == ["step-000002", "step-000003"]
    run = open_run(place / runs, "last")
    assert all(m["optim/updates"] > 0 for m in run.metrics("train")), "nothing was trained"
    assert len(run.metrics("validation")) == 2
