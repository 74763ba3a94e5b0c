"""A run that looks at the picture is the same on one process and on two, whichever of them sampled a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_rank import job, run_jobs
from small_runs import TWO_STEPS, assert_close_runs, assert_same_run, make_place

from vlmrl.store.runs import Run, open_run

CASES = {
    "papo": ["algo.name=papo", "train.updates_per_step=2"],
    "published": ["algo.name=papo_published", "train.updates_per_step=2"],
    "vppo": ["algo.name=vppo", "algo.filter=none"],
    "filter": ["algo.name=vppo", "algo.min_spread=0.04", "algo.filter_tries=3"],
    "one prompt for two": ["algo.name=papo", "rollout.prompts_per_step=1", "train.steps=3"],
}
"""Name -> overrides."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_folder) -> Path:
    place = make_place(tmp_path_factory.mktemp("perception-ranks"), tiny_folder, TWO_STEPS)
    whole = ["algo.name=papo", "train.steps=3", "checkpoint.every_steps=1"]

    def cases(size: int) -> list[dict]:
        return [job(place, f"{size}/{name}", *more) for name, more in CASES.items()]

    run_jobs(2, [*cases(2), job(place, "whole", *whole), job(place, "stopped", *whole, stop_at=2)], place, new=True)
    run_jobs(1, cases(1), place)
    run_jobs(2, [job(place, "stopped", resume=True)], place)
    return place


def dependencies(run: Run) -> list[torch.Tensor | None]:
    samples = [s for step in run.rollout_files() for g in run.read_rollouts(step) for s in g.samples]
    return [None if s.dependency is None else torch.tensor(s.dependency) for s in samples]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_run_of_one(runs: Path, case: str) -> None:
    one, two = (open_run(runs / size / case, "last") for size in "12")
    assert_close_runs(one, two, rel=2e-4, absolute=2e-5)
    pairs = list(zip(dependencies(one), dependencies(two), strict=True))
    assert any(a is not None for a, _ in pairs)
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_stopped_and_resumed_by_two_is_the_run_that_was_not_stopped_to_the_bit(runs: Path) -> None:
    assert_same_run(open_run(runs / "stopped", "last"), open_run(runs / "whole", "last"))
