"""The probe of rewards for SVG code: its honest answers are figures, of a dataset and of a table of responses."""

from __future__ import annotations

import pytest

from vlmrl.reward_check.probe import probe_reward
from vlmrl.tasks import kind_of
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.vfig.truth import make_truth
from vlmrl.types import RewardInput

PAGE = '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64">'
RED = f'{PAGE}<rect x="4" y="8" width="24" height="20" fill="red"/></svg>'
BLUE = f'{PAGE}<circle cx="44" cy="44" r="12" fill="blue"/></svg>'


@pytest.mark.slow
@pytest.mark.parametrize("is_prepared", [True, False], ids=["dataset", "table"])
def test_the_right_answer_of_the_probe_is_the_code_of_the_figure(is_prepared):
    truths = [make_truth(code, 64, 64, "own") if is_prepared else {"svg": code} for code in (RED, BLUE)]
    rows = [RewardInput("", truth) for truth in truths]
    spec = load_reward("svg", args={"key": "svg"})
    kind = kind_of(rows[0].truth)
    assert kind is not None
    report = probe_reward(spec, spec.weights, rows, probe=kind.probe)
    honest = report["honest"]
    assert honest["informed"] == 1.0 and honest["wrong"] < 0.1  # another place, form and colour
    assert honest["uninformed"] == pytest.approx((1.0 + honest["wrong"]) / 2, abs=0.01)  # right for one row of two
    probes = {probe["name"]: probe for probe in report["probes"]}
    assert not probes["the right answer"]["flagged"]
    assert {"denied", "in a list", "two boxes"}.isdisjoint(probes)  # tricks against answers in words
    assert "silent" not in {probe["verdict"] for probe in probes.values()}
    assert all(probes[name]["errors"] == 2 for name in ("no code", "no end", "no text"))  # such a truth is an error
