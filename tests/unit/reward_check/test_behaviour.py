from __future__ import annotations

import textwrap

import pytest

from vlmrl.reward_check.probe import probe_reward
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

ROWS = [RewardInput("", truth={"answer": str(n)}, prompt="How many?") for n in (3, 5, 7, 7)]


def probed(tmp_path, source, **limits):
    (tmp_path / "r.py").write_text(textwrap.dedent(source))
    spec = load_reward("r.py:reward", base_dir=tmp_path)
    return probe_reward(spec, spec.weights, ROWS, limits=limits)


@pytest.mark.slow
def test_a_steady_reward_has_a_clean_bill(tmp_path):
    found = probed(tmp_path, "def reward(x): return float(x.response == x.truth['answer'])\n")
    behaviour = found["behaviour"]
    assert found["unsteady"] == 0 and not behaviour["leaks"]
    assert [behaviour[k] for k in ("deterministic", "order_free", "alone")] == [True, True, True]
    ms = behaviour["milliseconds"]
    assert 0 < ms["p50"] <= ms["p95"] <= ms["p99"] <= ms["max"] and behaviour["calls"] > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("import random\ndef reward(x): return random.random()\n", "deterministic"),
        ("calls = []\ndef reward(x):\n    calls.append(1)\n    return float(len(calls))\n", "deterministic"),
        ("def reward(completions, **kw): return [float(i) for i, _ in enumerate(completions)]\n", "order_free"),
        ("def reward(completions, **kw): return [float(len(completions)) for _ in completions]\n", "alone"),
    ],
)
def test_chance_memory_and_neighbours_are_noticed(source, key, tmp_path):
    found = probed(tmp_path, source)
    assert found["unsteady"] == 1 and found["flagged"] >= 1
    told = found["behaviour"][key]
    assert told is not True and told["first"] != told["then"]


@pytest.mark.slow
def test_a_hang_is_told_as_one(tmp_path):
    source = """
    import time
    def reward(x):
        if len(x.response) > 10_000 and "<" in x.response: time.sleep(30)
        return float(x.response == x.truth["answer"])
    """
    found = probed(tmp_path, source, timeout_seconds=1.5)
    verdicts = {p["name"]: p["verdict"] for p in found["probes"]}
    assert verdicts["many tags"] == verdicts["many blanks"] == "hangs" and verdicts["nothing"] == ""


@pytest.mark.slow
def test_growing_memory_is_noticed(tmp_path):
    source = """
    kept = []
    def reward(x):
        kept.append(bytearray(b"x" * 400_000))
        return float(x.response == x.truth["answer"])
    """
    behaviour = probed(tmp_path, source)["behaviour"]
    assert behaviour["leaks"] and behaviour["memory_mib"] > 32
