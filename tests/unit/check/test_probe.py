from __future__ import annotations

import textwrap

import pytest

from vlmrl.check.answer_form import form_of
from vlmrl.check.probe import probe_reward
from vlmrl.errors import RewardError
from vlmrl.rewards import load_reward
from vlmrl.types import RewardInput

LEVELS = ("loop", "digit")
PAIRS = [
    {"same": True, "loop": ["no", "no"], "digit": ["1", "1"]},
    {"same": False, "loop": ["no", "yes"], "digit": ["1", "8"]},
    {"same": False, "loop": ["yes", "yes"], "digit": ["6", "8"]},
    {"same": True, "loop": ["yes", "yes"], "digit": ["8", "8"]},
]
FORM = form_of("", "", LEVELS)
BASELINE = form_of("", "", ())
PAIR_ROWS = [RewardInput("", truth=t, prompt="Same digit?") for t in PAIRS]
TEXT_ROWS = [RewardInput("", truth={"answer": str(n)}, prompt="How many?") for n in (3, 5, 7, 7)]


def flagged(report) -> set[str]:
    return {p["name"] for p in report["probes"] if p["flagged"]}


def load(tmp_path, source):
    (tmp_path / "r.py").write_text(textwrap.dedent(source))
    return load_reward("r.py:reward", base_dir=tmp_path)


@pytest.mark.parametrize("args", [{}, {"partial": False}, {"consistency": "part"}])
def test_no_trick_pays_against_the_builtin_pair_rewards(args):
    spec = load_reward("taxonomy", args={"levels": LEVELS, **args})
    report = probe_reward(spec, spec.weights, PAIR_ROWS, form=FORM)
    assert flagged(report) == set()
    assert report["honest"]["answer"] == "always 0.5000 and the commonest names"
    if not args:
        # the names are loop "no; yes": format 0.2, answer 0.4 * 0.75,
        # loop 0.2 * mean(0.5, 1, 0.5, 0.5), digit 0.2 * mean(0, 1, 0, 0)
        assert report["honest"]["uninformed"] == pytest.approx(0.5 + 0.125 + 0.05, abs=1e-12)


def test_no_trick_pays_against_the_baseline_or_the_text_rewards():
    spec = load_reward("pair_answer")
    assert flagged(probe_reward(spec, spec.weights, PAIR_ROWS)) == set()
    for name in ("exact_match", "number_match"):
        spec = load_reward(name)
        report = probe_reward(spec, spec.weights, TEXT_ROWS)
        assert flagged(report) == set()
        assert report["honest"]["uninformed"] == 0.5  # "7" for every row


def test_without_the_gate_and_with_most_weight_on_names_a_contradiction_pays():
    weights = {"format": 0.1, "answer": 0.1, "loop": 0.4, "digit": 0.4}  # TaxonRL's ablation of 80%
    for rule, found in (("off", {"contradiction"}), ("gate", set())):
        spec = load_reward("taxonomy", args={"levels": LEVELS, "consistency": rule})
        assert flagged(probe_reward(spec, weights, PAIR_ROWS, form=FORM)) == found


def test_a_reward_that_is_paid_by_search_is_caught(tmp_path):
    spec = load(tmp_path, "def reward(x): return float(x.truth['answer'] in x.response)")
    found = flagged(probe_reward(spec, spec.weights, TEXT_ROWS))
    assert {"every answer", "every answer, bare", "all numbers", "or", "denied", "two answers"} <= found
    assert "nothing" not in found


def test_a_reward_for_the_last_number_alone_is_not_caught(tmp_path):
    source = r"""
    import re
    def reward(x):
        numbers = re.findall(r"\d+", x.response)
        return float(bool(numbers) and numbers[-1] == x.truth["answer"])
    """
    spec = load(tmp_path, source)
    assert flagged(probe_reward(spec, spec.weights, TEXT_ROWS)) == {"denied"}


def test_a_reward_that_pays_for_length_is_caught(tmp_path):
    spec = load(tmp_path, "def reward(x): return min(1.0, len(x.response) / 1000)")
    assert {"very long", "all numbers"} <= flagged(probe_reward(spec, spec.weights, TEXT_ROWS))


def test_a_reward_that_a_text_can_break_is_caught_and_the_row_shown(tmp_path):
    source = """
    def reward(x):
        if "<" not in x.response: return 0.0
        return float(x.response.split("<answer>")[1].split("</answer>")[0] == x.truth["answer"])
    """
    report = probe_reward(load(tmp_path, source), {}, TEXT_ROWS)
    noise = next(p for p in report["probes"] if p["name"] == "noise")
    assert noise["flagged"] and noise["errors"] == 4 and noise["mean"] is None and "IndexError" in noise["error"]


def test_taxonrl_as_published_is_full_of_holes(tmp_path):
    source = r"""
    import re
    def reward(x):
        text = x.response
        m = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        try:
            answer = float((m.group(1) if m else text).strip()) == float(x.truth["same"])
        except ValueError:
            answer = False
        form = bool(re.fullmatch(r"<think>.*?</think>\s*<answer>\d+(\.\d+)?</answer>", text, re.DOTALL))
        levels = []
        for level in ("loop", "digit"):
            tag = re.search(rf"<{level}>(.*?)</{level}>", text)
            names = [n.strip() for n in tag.group(1).split(";")][:2] if tag else None
            levels.append(names == x.truth[level])
        return 0.4 * answer + 0.2 * form + 0.4 * sum(levels) / 2
    """
    report = probe_reward(load(tmp_path, source), {}, PAIR_ROWS, form=FORM)
    assert {
        "names outside",
        "wrong, then right",
        "surplus names",
        "two thinks",
        "Python number",
        "empty think",
    } <= flagged(report)


def test_a_reward_that_fails_on_an_honest_answer_stops(tmp_path):
    with pytest.raises(RewardError, match="KeyError"):
        probe_reward(load(tmp_path, "def reward(x): return x.truth['nope']"), {}, TEXT_ROWS)
