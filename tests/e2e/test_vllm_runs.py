"""`vlmrl train` and `vlmrl eval` with the real vLLM: its log-probs reach the loss, and every sync is checked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from command_line import own_process, settings
from small_runs import rollouts, same_tensors, weights
from vllm_place import train, vllm_place

from vlmrl.store.rollouts import read_rollouts
from vlmrl.store.runs import open_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    return vllm_place(tmp_path_factory.mktemp("vllm"), small_folder)


@pytest.fixture(scope="module")
def run(place):
    done = train(place)
    assert done.code == 0, done.err
    return open_run(place / "runs", done.json["run"]), done


def test_a_run_learns_from_what_vllm_sampled(run):
    found, done = run
    assert found.status == "done" and "cannot sleep" in done.err
    lines = found.metrics("train")
    assert len(lines) == 3 and sum(line["optim/updates"] for line in lines) > 0
    [start] = [e for e in found.metrics("event") if e["event"] == "weight sync"]
    weights = start["bytes"]
    assert weights > 1e5 and start["transport"] == "within the process" and "weight sync: " in done.err
    for line in lines:
        # float32 on both sides: what vLLM said is what the trainer computes, so the correction is on and does nothing.
        assert line["policy/importance_weight"] == pytest.approx(1.0, abs=1e-4)
        assert 0 < line["policy/sampler_gap_mean"] <= line["policy/sampler_gap_max"] < 1e-4
        assert 0 <= line["policy/sampler_k3"] < 1e-8 and line["policy/sampler_ess"] == pytest.approx(1.0, abs=1e-6)
        assert 0 < line["policy/sync_gap_mean"] <= line["policy/sync_gap_max"] < 1e-4
        assert line["time/sync_seconds"] > 0
        assert line["sync/bytes"] == weights
        speed = line["sync/bytes"] / 1e9 / line["sync/gb_per_second"]  # seconds: a part of the sync, without its check
        assert 0 < speed < line["time/sync_seconds"]


def test_rollouts_carry_the_engines_log_probs_and_the_version(run):
    for step, path in enumerate(sorted((run[0].dir / "rollouts").glob("*.parquet"))):
        samples = [s.trajectory for g in read_rollouts(path) for s in g.samples]
        assert len(samples) == 12 and {t.version for t in samples} == {step}
        for t in samples:
            [segment] = t.segments
            assert segment.sampler_logp is not None and all(math.isfinite(x) and x < 0 for x in segment.sampler_logp)


def test_evaluation_uses_the_runs_engine_and_agrees_with_the_built_in_one(place, run):
    values = []
    for engine in ("vllm", "torch"):
        done = own_process(
            "eval",
            run[0].id,
            "--checkpoint",
            "last",
            "--runs",
            "runs",
            "--split",
            "validation",
            "--max-rows",
            "6",
            "--name",
            engine,
            "--set",
            f"rollout.engine={engine}",
            "--json",
            cwd=place,
        )
        [evaluation] = done.json["evaluations"]
        values.append({name: m["value"] for name, m in evaluation["metrics"].items()})
    assert values[0] == pytest.approx(values[1], nan_ok=True)


def test_a_run_with_an_adapter_goes_on_from_its_checkpoint(place):
    """The adapter alone is synced; a run from another's checkpoint, whose folder holds no base weights, starts too."""
    lora = settings("lora.rank=4", "train.steps=1", "eval.every_steps=0")
    parent = train(place, *lora)
    assert parent.code == 0, parent.err
    child = train(place, *lora, *settings(f"model.path={parent.json['run']}"))
    assert child.code == 0, child.err
    for done in (parent, child):
        line = done.json["last"]
        assert line["policy/sampler_gap_max"] < 1e-4 and line["policy/sync_gap_max"] < 1e-4


def test_a_process_that_offloads_syncs_what_a_plain_one_syncs(place, run):
    """Its weights are in shards that are whole; vLLM shares the process, and its process group."""
    done = train(place, *settings("parallel.offload=true"))
    found = open_run(place / "runs", done.json["run"])
    assert "main memory between their uses" in done.err
    assert rollouts(found) == rollouts(run[0])
    assert same_tensors(weights(found), weights(run[0]))
    assert all(0 < line["policy/sync_gap_max"] < 1e-4 for line in found.metrics("train"))
