"""Runs that meet the end of their memory: the rehearsal before step 1, one try with half the budget, what is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY_TEXTS
from small_runs import (
    Ears,
    assert_close_history,
    assert_same_run,
    begin,
    events,
    go_on,
    make_place,
    once_a_kind,
    train,
)

from vlmrl.checkpoint import io
from vlmrl.dist import world
from vlmrl.errors import EngineError, OutOfMemoryError, exit_of
from vlmrl.model.policy import Policy
from vlmrl.model.tiny import build_tiny
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.store.listing import list_runs
from vlmrl.store.runs import Run, open_run
from vlmrl.train import collect, rl, session

RECIPE = """
rollout = {prompts_per_step = 4, samples_per_prompt = 4, max_new_tokens = 12, temperature = 0.9}
train = {steps = 4, rows_per_step = 4, tokens_per_row = 300}
optim.lr = 1e-3
eval = {every_steps = 2, max_rows = 4}
checkpoint = {every_steps = 1, keep_last = 9}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, RECIPE, kinds=("rl", "sft"))


@pytest.fixture(scope="module")
def calm(place, tmp_path_factory):
    """kind -> the run whose memory sufficed."""
    return once_a_kind(place, tmp_path_factory)


def ask_for_too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def limit_rows(monkeypatch, tokens: int, doing: str = "") -> list[int]:
    """Passes with gradient over rows of more tokens than these ask for too much while the run does that."""
    run, rows = Policy._states, []

    def states(self, row):
        if torch.is_grad_enabled() and doing in world.doing():
            rows.append(row.input_ids_N.numel())
            if rows[-1] > tokens:
                ask_for_too_much()
        return run(self, row)

    monkeypatch.setattr(Policy, "_states", states)
    return rows


def assert_learned_the_same(run: Run, calm: Run) -> None:
    """But for rounding, what measures rounding, and the budget itself."""
    assert_close_history(run, calm, rel=1e-4, absolute=1e-6, without=("train/tokens_per_row", "policy/sampler_"))


MORE = ("train.updates_per_step=2", "algo.kl_coef=0.1", "algo.entropy_coef=0.01", "train.steps=1", "eval.every_steps=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("rl", ()),
        ("sft", ()),
        ("rl", MORE),
        ("rl", (*MORE, 'algo.kl="full"', 'algo.kl_in="reward"')),
        ("rl", (*MORE[:1], *MORE[3:], 'algo.name="ppo"')),
        ("rl", (*MORE[3:], "lora.rank=4", 'model.dtype="bfloat16"', "model.gradient_checkpointing=true")),
        (
            "sft",
            (*MORE[3:], "lora.rank=4", "lora.dropout=0.2", 'optim.name="adamw_bf16_kahan"', 'model.dtype="bfloat16"'),
        ),
    ],
)
def test_a_rehearsal_changes_nothing_to_the_bit(place, calm, tmp_path, kind, overrides):
    """Weights, moments, random states, data positions, metrics, rollouts: all as without it."""
    run = train(place, tmp_path / "with", *overrides, kind=kind) if overrides else calm(kind)
    other = train(place, tmp_path / "without", "train.rehearsal=false", *overrides, kind=kind)
    [said] = events(run, "rehearsed")
    assert not events(other, "rehearsed") and said["complete"] and 0 < said["rows_looked_at"] <= 24
    assert_same_run(run, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_the_rehearsed_row_is_as_large_as_any_of_the_run(place, calm, monkeypatch, tmp_path, kind):
    rows = limit_rows(monkeypatch, 10_000)
    ears = Ears()
    run, _ = begin(place, tmp_path, kind=kind, ears=ears)
    [event] = events(run, "rehearsed")
    assert rows[0] == event["tokens"] >= max(rows[1:]) and len(rows) > 4
    assert event["tokens"] > 250 and event["limit_bytes"] > event["peak_bytes"] > 1 << 20
    [line] = [text for text in ears.heard if "largest packed row" in text]
    assert f"{event['tokens']} tokens (" in line and "peak " in line and " rows to come were scanned" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_run_that_failed_once_is_the_run_that_never_failed_and_keeps_the_half(
    place, calm, monkeypatch, tmp_path, kind
):
    with monkeypatch.context() as patch:
        rows = limit_rows(patch, 150, "phase `update` of step 3")
        ears = Ears(stop_at=3)
        run, status = begin(place, tmp_path, kind=kind, ears=ears)
    assert status == "interrupted" and max(rows) > 150 >= rows[-1]
    [event] = events(run, "budget halved")
    now = event["now"]
    assert (event["step"], event["was"], event["key"]) == (2, 300, "train.tokens_per_row") and now <= 150
    assert [line for line in ears.heard if f"train.tokens_per_row = {now}" in line]
    run, status = go_on(run)
    assert status == "done" and len(events(run, "budget halved")) == 1
    assert [m["train/tokens_per_row"] for m in run.metrics("train")] == [300, 300, now, now]
    assert [e["tokens"] <= 150 for e in events(run, "rehearsed")] == [False, True]
    assert_learned_the_same(run, calm(kind))


@pytest.mark.slow
def test_what_does_not_fit_twice_ends_with_the_report(place, monkeypatch, tmp_path):
    limit_rows(monkeypatch, 84, "phase `update` of step 2")
    with pytest.raises(OutOfMemoryError) as caught:
        begin(place, tmp_path, "train.tokens_per_row=600", "rollout.samples_per_prompt=12")
    error = caught.value
    assert error.message.startswith("out of memory in phase `update` of step 2 on rank 0 with ")
    assert "row digits-" in error.where and "; images 56 x 56, 56 x 56)" in error.where
    assert error.hint.startswith("set train.tokens_per_row = ") and exit_of(error)[0] == 2
    run = open_run(tmp_path, "last")
    assert run.status == "failed" and "out of memory in phase" in run.manifest.error
    assert [c.name for c in run.checkpoint_dirs()] == ["step-000001"]


@pytest.mark.slow
def test_a_rehearsal_that_does_not_fit_halves_the_budget_before_the_first_step(place, calm, monkeypatch, tmp_path):
    limit_rows(monkeypatch, 200)
    run = train(place, tmp_path)
    assert [m["train/tokens_per_row"] for m in run.metrics("train")] == [132] * 4
    [event] = events(run, "budget halved")
    assert (event["step"], event["now"]) == (0, 132)
    assert_learned_the_same(run, calm("rl"))


@pytest.mark.slow
def test_a_rehearsal_that_fits_nowhere_near_ends_the_run_with_a_value_that_was_tried(place, monkeypatch, tmp_path):
    rows = limit_rows(monkeypatch, 100)
    with pytest.raises(OutOfMemoryError) as caught:
        begin(place, tmp_path)
    # a prompt of 84 tokens, responses of 12: two groups of four, one, one response
    assert rows == [264, 132, 96]
    assert caught.value.hint == "set train.tokens_per_row = 66: this value was tried and fits"
    assert caught.value.message.startswith("out of memory in phase `rehearsal` of step 0 on rank 0 with ")
    assert not open_run(tmp_path / "unfinished", "last").metrics("train")
    train(place, tmp_path, "train.tokens_per_row=66")


@pytest.mark.slow
def test_a_single_response_that_does_not_fit_names_another_key(place, monkeypatch, tmp_path):
    limit_rows(monkeypatch, 10)
    for overrides, key in (
        ((), "model.gradient_checkpointing = true"),
        (("model.gradient_checkpointing=true",), "rollout.max_new_tokens = 6"),
    ):
        with pytest.raises(OutOfMemoryError, match="in 1 response at once") as caught:
            begin(place, tmp_path, *overrides)
        assert caught.value.hint.startswith(f"set {key}; a smaller train.tokens_per_row would not help")


def fail_in(monkeypatch, owner, name: str, *, after: int = 0) -> None:
    """A call of that name, after so many, asks for too much."""
    run, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) > after:
            ask_for_too_much()
        return run(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def failing_vllm(*args, **more):
    try:
        ask_for_too_much()
    except RuntimeError as error:
        raise EngineError(f"vLLM does not start: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "owner", "name", "after", "key"),
    [
        ("load", session, "load_for_training", 0, "lora.rank = 16"),
        ("validation", TorchEngine, "_prefill", 0, "rollout.batch_tokens = "),
        ("encode", collect, "encode_prompt", 0, "model.max_pixels = 1568"),
        ("rollout", TorchEngine, "_prefill", 1, "rollout.batch_tokens = "),  # the first is the validation's
        ("sync", rl, "check_sync", 0, "lora.rank = 16"),
        ("saving", io, "write_shards", 0, "lora.rank = 16"),
    ],
)
def test_memory_that_runs_out_elsewhere_names_the_phase_and_a_key(
    place, monkeypatch, tmp_path, phase, owner, name, after, key
):
    fail_in(monkeypatch, owner, name, after=after)
    # The rehearsal encodes prompts, too.
    overrides = ["train.rehearsal=false"] if phase == "encode" else []
    with pytest.raises(OutOfMemoryError) as caught:
        begin(place, tmp_path, *overrides)
    assert caught.value.message.startswith(f"out of memory in phase `{phase}` of step ")
    assert f"set {key}" in caught.value.hint
    [run] = [*list_runs(tmp_path), *list_runs(tmp_path / "unfinished")]
    kept = open_run(tmp_path, str(run.dir))
    assert run.status == "failed"
    assert (run.dir.parent == tmp_path) == bool(kept.metrics() or kept.metrics("validation"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "told"), [(["rollout.kv_cache_gib=4"], "2"), ([], "1, instead of the automatic size")]
)
def test_an_engine_that_does_not_start_for_want_of_memory_names_its_cache(place, monkeypatch, tmp_path, sets, told):
    monkeypatch.setattr(rl, "make_generator", failing_vllm)
    with pytest.raises(OutOfMemoryError) as caught:
        begin(place, tmp_path, 'rollout.engine="vllm"', *sets)
    assert "phase `engine start`" in caught.value.message and caught.value.hint == f"set rollout.kv_cache_gib = {told}"


@pytest.mark.slow
def test_the_engine_halves_its_batches_once_and_the_run_keeps_that(place, calm, monkeypatch, tmp_path):
    prefill, sizes = TorchEngine._prefill, []

    def limited(self, requests, copies, longest_response):
        sizes.append(sum(copies))
        if sizes[-1] > 8:
            ask_for_too_much()
        return prefill(self, requests, copies, longest_response)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "_prefill", limited)
        run, status = begin(place, tmp_path, stop_at=2)
    assert max(sizes) == 16 and sizes.count(16) == 1
    [event] = events(run, "budget halved")
    assert event["key"] == "rollout.batch_tokens" and event["was"] == 65_536 and event["now"] < 1000
    run, status = go_on(run)
    assert status == "done" and run.checkpoint_dirs()
    assert io.load_data(run.checkpoint_dirs()[-1])["progress"]["halved"] == {
        "rollout.batch_tokens": [65_536, event["now"]]
    }
    assert_learned_the_same(run, calm("rl"))


@pytest.mark.slow
def test_a_start_again_with_half_the_budget_keeps_it(place, calm, monkeypatch, tmp_path):
    monkeypatch.setenv("VLMRL_HALVED", '{"train.tokens_per_row": [300, 140]}')
    run, status = begin(place, tmp_path, stop_at=2)
    monkeypatch.delenv("VLMRL_HALVED")
    run, status = go_on(run)
    assert status == "done" and [m["train/tokens_per_row"] for m in run.metrics("train")] == [140] * 4
    assert_learned_the_same(run, calm("rl"))


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory) -> Path:
    """A model whose rows of 6,000 tokens take some 380 MiB."""
    return build_tiny(tmp_path_factory.mktemp("wide") / "model", TINY_TEXTS, vocabulary=300, hidden=192, layers=4)


def limited_run(place: Path, model: Path, root: Path, where: str, mib: int, *overrides: str):
    """(exit code, stderr) of a run that the system really refuses memory."""
    script = Path(__file__).parent.parent / "limited_run.py"
    settings = (
        f'model.path="{model}"',
        "train.steps=1",
        "eval.every_steps=0",
        "eval.max_rows=1",
        "train.tokens_per_row=6000",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=32",
        "rollout.max_new_tokens=90",
        "rollout.batch_tokens=2000",
        *overrides,
    )
    done = subprocess.run(
        [sys.executable, str(script), str(place / "rl.toml"), str(root), where, str(mib), *settings],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


ENDS_AT_ONCE = "train.max_seconds=1"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_memory_that_the_system_refuses_halves_the_budget_in_the_rehearsal(place, wide_folder, tmp_path):
    code, said = limited_run(place, wide_folder, tmp_path, "rehearsal", 300, ENDS_AT_ONCE)
    assert code == 0, said
    assert "out of memory in phase `rehearsal` of step 0 on rank 0 with 5,928 tokens (16 of images) in 64 resp" in said
    assert "again with train.tokens_per_row = 2964" in said and "the largest packed row fits: 2,964 tokens" in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_memory_that_the_system_refuses_ends_the_run_with_a_value_that_fits(place, wide_folder, tmp_path):
    for mib in (80, 100, 120):  # what a process can reuse varies, see the next test
        code, said = limited_run(place, wide_folder, tmp_path / str(mib), "rehearsal", mib, ENDS_AT_ONCE)
        assert "Traceback" not in said, said
        if "this value was tried and fits" in said:
            break
    assert code == 2, said
    assert "error: out of memory in phase `rehearsal` of step 0 on rank 0 with 5,928 tokens (16 of images)" in said
    assert "this value was tried and fits" in said and "images 56 x 56, 56 x 56" in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_memory_that_the_system_refuses_halves_the_budget_in_an_update(place, wide_folder, tmp_path):
    """How much a process can reuse of what it has freed varies by some 100 MiB: several limits are tried."""
    told = "out of memory in phase `update` of step 1 on rank 0 with "
    for attempt, mib in enumerate((230, 200, 260, 170, 290)):
        root = tmp_path / str(attempt)
        code, said = limited_run(place, wide_folder, root, "update 0", mib, "train.rehearsal=false")
        assert code == 0 or (code == 2 and told in said and "Traceback" not in said), said
        if code == 0 and told in said:
            break
    assert code == 0 and told in said and "again with train.tokens_per_row" in said
    [line] = open_run(root, "last").metrics("train")
    assert line["train/tokens_per_row"] < 3000 and line["optim/updates"] == 1
