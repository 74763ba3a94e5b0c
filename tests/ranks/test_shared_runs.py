"""A run of two processes is the run of one: the same rollouts, metrics and weights; saved and resumed by any number.

So is the run of one that has its weights, gradients and moments in main memory between their uses; even to the bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import contents_of
from run_rank import job, run_jobs
from small_runs import (
    TWO_STEPS,
    answers,
    assert_close_history,
    assert_same_run,
    history,
    make_place,
    rollouts,
    weights,
)

from vlmrl.checkpoint import io
from vlmrl.model.safetensors_blocks import read_tensors
from vlmrl.store import layout
from vlmrl.store.runs import Run, open_run

LORA = ["lora.rank=4"]
CASES = {
    "grpo": [],
    "one prompt for two": ["rollout.prompts_per_step=1", "train.steps=4"],
    "two updates": ["train.updates_per_step=2", "algo.name=dapo", "algo.filter=none"],
    "filter": ["algo.name=dapo", "algo.min_spread=0.04", "algo.filter_tries=3"],
    "greedy": ["algo.name=remax"],
    "critic": ["algo.name=ppo", "train.updates_per_step=2"],
    "kl": ["algo.kl_coef=0.1"],
    "kl in the reward": ["algo.kl_coef=0.1", "algo.kl_in=reward"],
    "full kl": ["algo.kl_coef=0.1", "algo.kl=full"],
    "adapter": [*LORA, "algo.kl_coef=0.1"],
    "adapter, full kl": [*LORA, "algo.kl_coef=0.1", "algo.kl=full"],
    "recomputed": ["model.gradient_checkpointing=true"],
    "copies": ["parallel.shard_size=1"],
    "offload": ["parallel.offload=true"],
    "sft": [],
}
"""Name -> overrides."""
OFFLOAD = "parallel.offload=true"
NARROW = "model.dtype=bfloat16"
OFFLOADED = {
    **{name: CASES[name] for name in ("grpo", "critic", "full kl", "adapter", "recomputed", "sft")},
    "narrow": [NARROW, "algo.kl_coef=0.1"],
    "narrow adapter": [NARROW, *LORA, "lora.dropout=0.2"],
    "frozen": ['model.freeze=["vision"]'],
}
"""Name -> overrides of the runs that one process does twice, once with `OFFLOAD`."""
ONWARD = "adapter of a run"
"""Trained on, with the adapter that it began with as the reference."""
POOLED = "pooled counts"
"""A task of one's own with metrics from counts, and rows of which both processes sample some."""
OWN_TASK = """
import vlmrl

def task(info):
    return vlmrl.Task(
        "own", "counts letters", "Say something. <image> <image>",
        set_metrics=vlmrl.PooledMetrics(
            lambda graded: {
                "letters": len(graded[0].response), "vowels": sum(map(graded[0].response.count, "aeiou")),
            },
            lambda sums: {"vowel_share": sums["vowels"] / sums["letters"] if sums["letters"] else None},
        ),
    )
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    folder = make_place(tmp_path_factory.mktemp("shared-runs"), tiny_folder, TWO_STEPS, kinds=("rl", "sft"))
    (folder / "own.py").write_text(OWN_TASK)
    return folder


LONG = ["train.steps=5", "eval.every_steps=0", "optim.schedule=cosine"]
BESIDE = [*LONG, "checkpoint.every_steps=1", "checkpoint.asynchronous=true", "checkpoint.keep_last=2"]


@pytest.fixture(scope="module")
def runs(place: Path) -> Path:
    """All runs: `<processes>/<case>`; stopped ones; and what went on from them with another number of processes."""

    def cases(size: int) -> list[dict]:
        return [
            *(
                job(place, f"{size}/{name}", *more, kind="sft" if name == "sft" else "rl")
                for name, more in CASES.items()
            ),
            job(place, f"{size}/{ONWARD}", *LORA),
            job(place, f"{size}/{ONWARD}", *LORA, "algo.kl_coef=0.1", "model.path=last"),
            job(place, f"{size}/whole", *LONG),
            job(place, f"{size}/{POOLED}", f"data.0.task={place}/own.py:task"),
        ]

    alone = [
        job(place, f"{root}/{name}", *more, *extra, kind="sft" if name == "sft" else "rl")
        for name, more in OFFLOADED.items()
        for root, extra in (("1", ()), ("offloaded", (OFFLOAD,)))
        if root != "1" or name not in CASES
    ]
    wandering = [
        job(place, "to and fro", f"parallel.offload={str(step % 2 == 0).lower()}", resume=True, stop_at=step)
        for step in (2, 3, 4)
    ]
    beside = [job(place, "offloaded beside", *BESIDE, OFFLOAD, stop_at=2), job(place, "offloaded beside", resume=True)]
    narrow = [*LONG, NARROW, *LORA]
    begun = [
        job(place, "stopped", *LONG, stop_at=2),
        job(place, "wandering", *LONG, stop_at=2),
        job(place, "narrow", *narrow, stop_at=2),
        job(place, "beside", *BESIDE, stop_at=2),
        job(place, "to and fro", *LONG, stop_at=1),
    ]
    run_jobs(2, [*cases(2), *begun], place, new=True)
    carried = [job(place, name, resume=True, stop_at=4) for name in ("wandering", "narrow")]
    run_jobs(1, [*cases(1), *carried, *alone, *wandering, *beside], place)
    begun_names = ("stopped", "wandering", "narrow", "beside", "to and fro")
    run_jobs(2, [job(place, name, resume=True) for name in begun_names], place)
    return place


def assert_close_weights(a: Run, b: Run) -> None:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("case", [*CASES, ONWARD])
def test_two_processes_make_the_run_of_one(runs: Path, case: str) -> None:
    one, two = (open_run(runs / size / case, "last") for size in "12")
    assert one.status == two.status == "done"
    assert answers(one) == answers(two)
    assert_close_history(one, two, rel=2e-4, absolute=2e-5)
    assert_close_weights(one, two)
    assert any(m.get("optim/updates", 0) > 0 for m in one.metrics("train"))


def offloads(run: Run, attempt: int) -> bool:
    return "in main memory between" in layout.log_path(run.dir, attempt).read_text()


@pytest.mark.parametrize("case", OFFLOADED)
def test_one_process_that_offloads_makes_the_run_of_one_to_the_bit(runs: Path, case: str) -> None:
    plain, offloaded = (open_run(runs / root / case, "last") for root in ("1", "offloaded"))
    assert offloads(offloaded, 1) and not offloads(plain, 1)
    assert_same_run(offloaded, plain)
    assert any(m.get("optim/updates", 0) > 0 for m in plain.metrics("train"))


def test_a_run_goes_between_two_processes_one_that_offloads_and_a_plain_one(runs: Path) -> None:
    whole, run = open_run(runs / "1" / "whole", "last"), open_run(runs / "to and fro", "last")
    assert [(a.from_step, a.processes) for a in run.manifest.attempts] == [(0, 2), (1, 1), (2, 1), (3, 1), (4, 2)]
    assert [offloads(run, attempt) for attempt in range(1, 6)] == [False, True, False, True, True]
    assert answers(whole) == answers(run)
    assert_close_history(whole, run, rel=2e-4, absolute=2e-5)
    assert_close_weights(whole, run)


def test_counts_of_two_processes_are_those_of_one(runs: Path) -> None:
    one, two = (open_run(runs / size / POOLED, "last") for size in "12")
    assert answers(one) == answers(two)
    for ours, theirs, step in zip(one.metrics("train"), two.metrics("train"), (0, 1), strict=True):
        texts = [s.text for group in one.read_rollouts(step) for s in group.samples]
        letters, vowels = sum(map(len, texts)), sum(text.count(c) for text in texts for c in "aeiou")
        assert letters > vowels > 0
        for line in (ours, theirs):
            assert (line["letters"], line["vowels"], line["vowel_share"]) == (letters, vowels, vowels / letters)
    ours, theirs = (run.metrics("validation")[-1] for run in (one, two))
    assert ours["eval/vowel_share"] == theirs["eval/vowel_share"]


def test_both_wrote_their_shards_and_a_log_and_one_the_rest(runs: Path) -> None:
    run = open_run(runs / "2" / "grpo", "last")
    checkpoint = run.checkpoint_dirs()[-1]
    for part in ("model", "optimizer"):
        assert {f.name[:11] for f in (checkpoint / part).glob("*.safetensors")} == {"shard-00001", "shard-00002"}
    io.check_files(checkpoint)
    assert [a.processes for a in run.manifest.attempts] == [2] and run.manifest.threads == 1
    assert run.log_path(1).is_file()
    assert "rows are run by" in run.log_path(1).read_text()


def test_stopped_and_resumed_by_as_many_is_the_run_that_was_not_stopped_to_the_bit(runs: Path) -> None:
    """The last process alone was interrupted: all stopped after the same step, and saved."""
    whole, stopped = open_run(runs / "2" / "whole", "last"), open_run(runs / "stopped", "last")
    assert [a.from_step for a in stopped.manifest.attempts] == [0, 2]
    assert_same_run(stopped, whole)


@pytest.mark.parametrize(("straight", "written_beside"), [("2", "beside"), ("1", "offloaded beside")])
def test_checkpoints_written_beside_the_training_are_those_written_at_once_to_the_bit(
    runs: Path, straight: str, written_beside: str
) -> None:
    """Each process writes its shards in a thread, while all go on with the next step; stopped and resumed, too."""
    whole, beside = open_run(runs / straight / "whole", "last"), open_run(runs / written_beside, "last")
    assert [a.from_step for a in beside.manifest.attempts] == [0, 2]
    assert rollouts(whole) == rollouts(beside) and repr(history(whole)) == repr(history(beside))
    first, second = (contents_of(run.checkpoint_dirs()[-1]) for run in (whole, beside))
    assert [n for n in first.keys() | second.keys() if first.get(n) != second.get(n)] == ["data.json"]  # its seconds
    assert [f.name for f in beside.checkpoint_dirs()] == ["step-000004", "step-000005"]
    assert beside.log_path().read_text().count("checkpoint saved") == 3  # of the second attempt


def test_a_run_wanders_from_two_processes_to_one_and_back(runs: Path) -> None:
    whole, wandering = open_run(runs / "1" / "whole", "last"), open_run(runs / "wandering", "last")
    assert [(a.from_step, a.processes) for a in wandering.manifest.attempts] == [(0, 2), (2, 1), (4, 2)]
    assert answers(whole) == answers(wandering)
    assert_close_history(whole, wandering, rel=2e-4, absolute=2e-5)
    assert_close_weights(whole, wandering)


def test_masters_of_narrow_weights_wander_too(runs: Path) -> None:
    """bfloat16: weights are saved in it, and trained in float32 by one process and by two."""
    run = open_run(runs / "narrow", "last")
    assert run.status == "done" and [a.from_step for a in run.manifest.attempts] == [0, 2, 4]
    folders = run.checkpoint_dirs()
    assert len(folders) == 3
    for folder in folders:
        found = read_tensors(sorted((folder / "adapter").glob("*.safetensors")))
        moments = io.load_optimizer_tensors(folder)
        masters = {n: t for n, t in moments.items() if n.startswith("master.")}
        assert {t.dtype for t in found.values()} == {torch.bfloat16} and len(masters) == len(found)
        assert {t.dtype for t in masters.values()} == {torch.float32}
        saved = sorted(float(t.whole().double().sum()) for t in found.values())
        assert saved == sorted(float(t.bfloat16().double().sum()) for t in masters.values())
        assert any(bool((t != t.bfloat16()).any()) for t in masters.values())
