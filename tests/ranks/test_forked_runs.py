"""Runs of a model whose rows take several forward passes: two processes, and one that offloads, make the run of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_rank import job, run_jobs
from small_runs import TWO_STEPS, assert_close_runs, assert_same_run, make_place
from tinyfamilies import build
from tinyprocessors import PROCESSORS
from transformers import AutoProcessor

from vlmrl.store import layout
from vlmrl.store.runs import open_run

RECOMPUTED = "model.gradient_checkpointing=true"
CASES = {
    "full kl": ["algo.kl_coef=0.1", "algo.kl=full", RECOMPUTED],
    "teacher": ["algo.name=opd", "algo.divergence=forward", "teacher.path=teacher"],
    "critic": ["algo.name=ppo", "train.updates_per_step=2"],
    "adapter": ["lora.rank=4", "algo.kl_coef=0.1"],
    "one prompt for two": ["rollout.prompts_per_step=1", "train.steps=4"],
}
"""Name -> overrides. All of them generate with the built-in engine."""
LONG = ["train.steps=3", RECOMPUTED]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """`<processes>/<case>`, `offloaded`, and `whole`, `stopped` and `wandering` of `LONG`."""
    model = tmp_path_factory.mktemp("forked") / "model"
    policy, processor = build("qwen3_5").model, PROCESSORS["qwen3_5"]()
    policy.resize_token_embeddings(len(processor.tokenizer) + 4)  # reading the tokenizer back adds Qwen's end of text
    policy.save_pretrained(model)
    processor.save_pretrained(model)
    place = make_place(tmp_path_factory.mktemp("forked-runs"), model, TWO_STEPS)
    # A teacher of another family, whose packed rows need one pass each, with a larger embedding.
    teacher, reader = build("qwen3_vl").model, PROCESSORS["qwen3_vl"]()
    teacher.resize_token_embeddings(len(processor.tokenizer) + 11)
    teacher.save_pretrained(place / "teacher")
    reader.tokenizer = AutoProcessor.from_pretrained(model).tokenizer
    reader.save_pretrained(place / "teacher")
    cases = {
        size: [job(place, f"{size}/{name}", *placed(place, more)) for name, more in CASES.items()] for size in (1, 2)
    }
    stopped = [job(place, name, *LONG, stop_at=2) for name in ("stopped", "wandering")]
    run_jobs(2, [*cases[2], job(place, "whole", *LONG), *stopped, job(place, "stopped", resume=True)], place)
    offloaded = job(place, "offloaded", *CASES["full kl"], "parallel.offload=true")
    run_jobs(1, [*cases[1], offloaded, job(place, "1/whole", *LONG), job(place, "wandering", resume=True)], place)
    return place


def placed(place: Path, overrides: list[str]) -> list[str]:
    return [f"teacher.path={place}/teacher" if o == "teacher.path=teacher" else o for o in overrides]


def assert_close_pair(runs: Path, one: str, other: str) -> None:
    a, b = (open_run(runs / name, "last") for name in (one, other))
    assert_close_runs(a, b, rel=5e-4, absolute=5e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_run_of_one(runs: Path, case: str) -> None:
    assert_close_pair(runs, f"1/{case}", f"2/{case}")
    assert any(m.get("optim/updates", 0) > 0 for m in open_run(runs / "1" / case, "last").metrics("train"))


def test_one_process_that_offloads_makes_the_run_of_one(runs: Path) -> None:
    run = open_run(runs / "offloaded", "last")
    assert "in main memory between" in layout.log_path(run.dir, 1).read_text()
    assert_close_pair(runs, "1/full kl", "offloaded")


def test_stopped_and_resumed_by_as_many_it_is_the_run_that_was_not_stopped_to_the_bit(runs: Path) -> None:
    whole, stopped = (open_run(runs / name, "last") for name in ("whole", "stopped"))
    assert [a.from_step for a in stopped.manifest.attempts] == [0, 2]
    assert_same_run(stopped, whole)


def test_saved_by_two_processes_one_goes_on(runs: Path) -> None:
    run = open_run(runs / "wandering", "last")
    assert [(a.from_step, a.processes) for a in run.manifest.attempts] == [(0, 2), (2, 1)]
    assert_close_pair(runs, "1/whole", "wandering")
