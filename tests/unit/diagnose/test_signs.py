"""Signs of hacked rewards: seen in every sick run, while it runs, and in no healthy one."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from healthy_and_sick import HEALTHY, SICK
from played_runs import lines_of, live_signs

from vlmrl.diagnose.signs import (
    TITLES,
    History,
    Sampled,
    find_signs,
    is_watched,
    length_score_correlation,
    measure_health,
    since,
    warning_of,
)

LEARNED_ALL = {"lists of numbers, no accuracy", "another language, no accuracy", "one right answer, nothing says which"}
"""Every response earns everything in the end, and nothing says that it is right: no group has a signal."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_never_warned_of(name):
    seen = live_signs(lines_of(HEALTHY[name]))
    assert seen.keys() <= ({"no_signal"} if name in LEARNED_ALL else set()), seen


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_warned_of(name):
    play, wanted = SICK[name]
    signs = find_signs(lines_of(play))
    assert wanted <= {sign.name for sign in signs}, signs
    assert all(sign.words in warning_of(signs) and sign.what for sign in signs)


def test_the_step_of_the_change_is_found_and_the_warning_comes_soon():
    lines = lines_of(SICK["digits"][0])  # begins at 0.3 of 60 steps, and is complete at 0.425
    seen = live_signs(lines)
    number, _ = seen["reward_without_accuracy"]
    first = next(s for s in find_signs(lines) if s.name == "reward_without_accuracy")
    assert first.step is not None and 17 <= first.step <= 25 and number <= 30
    assert since(first) == f", from step {first.step + 1} on"
    assert first.words == "reward up, accuracy flat" and first.before < 0.5 < 0.9 < first.after
    assert seen["characters"][1].words.startswith("digits ")


def flat(rng: random.Random, steps: int, rise: float, noise: float, right: float):
    """Reward that rises in the middle by `rise`, accuracy by `right`, both with noise."""
    late = [float(step >= steps // 2) for step in range(steps)]
    return [
        {
            "step": s,
            "reward/mean": 0.3 + rise * x + rng.gauss(0, noise),
            "reward/accuracy": 0.3 + right * x + rng.gauss(0, noise),
        }
        for s, x in enumerate(late)
    ]


@pytest.mark.parametrize(
    ("rise", "noise", "right", "share"),
    [(0.5, 0.02, 0.0, 1.0), (0.5, 0.02, -0.1, 1.0), (0.5, 0.02, 0.5, 0.0), (0.5, 0.02, 0.2, 0.0),
     (0.02, 0.02, 0.0, 0.0), (0.0, 0.2, 0.0, 0.0), (0.5, 0.3, 0.5, 0.0)],
)  # fmt: skip
def test_the_share_of_runs_that_are_warned_of(rise, noise, right, share):
    rng = random.Random(1)
    found = [bool(find_signs(flat(rng, 40, rise, noise, right))) for _ in range(100)]
    assert np.mean(found) == pytest.approx(share, abs=0.01)


def test_an_accuracy_that_falls_is_said_to_fall():
    assert warning_of(find_signs(flat(random.Random(0), 40, 0.5, 0.01, -0.2))) == "reward up, accuracy down"


def validation(step, reward, right, half=0.05):
    line = {"step": step}
    for name, value in (("reward", reward), ("accuracy", right)):
        line |= {f"eval/{name}": value, f"eval/{name}_low": value - half, f"eval/{name}_high": value + half}
    return line


def test_a_reward_that_was_hacked_in_a_few_steps_shows_in_the_validations():
    (sign,) = find_signs([], [validation(0, 0.2, 0.2), validation(40, 0.99, 0.21)])
    assert sign.name == "reward_without_accuracy" and sign.words == "validation: reward up, accuracy flat"
    assert "0.200 with an accuracy of 0.200 (step 0)" in sign.what
    assert find_signs([], [validation(0, 0.2, 0.5), validation(40, 0.99, 0.2)])[0].words.endswith("accuracy down")
    for ends in [
        [validation(0, 0.2, 0.2)],
        [validation(0, 0.2, 0.2), validation(40, 0.99, 0.99)],
        [validation(0, 0.2, 0.2), validation(40, 0.6, 0.35)],
        [validation(0, 0.2, 0.2, half=0.4), validation(40, 0.99, 0.2, half=0.4)],
        [validation(0, 0.2, 0.2), validation(40, 0.21, 0.2)],
        [validation(0, 0.5, 0.95), validation(40, 0.9, 0.96)],
        [validation(0, 0.2, math.nan), validation(40, 0.99, math.nan)],
        [{"step": 0, "eval/reward": 0.1}, {"step": 9, "eval/reward": 0.9}],
    ]:
        assert find_signs([], ends) == [], ends


def test_too_few_steps_and_lines_without_rewards_say_nothing():
    assert find_signs([]) == [] and find_signs([{"step": 0, "loss/cross_entropy": 1.0}] * 30) == []
    assert find_signs(flat(random.Random(0), 9, 0.5, 0.01, 0.0)) == []
    assert find_signs(flat(random.Random(0), 12, 0.5, 0.01, 0.0)) != []


def test_a_gap_takes_the_value_before_and_many_gaps_say_nothing():
    lines = flat(random.Random(0), 40, 0.5, 0.01, 0.0)
    assert find_signs([{k: v for k, v in n.items() if k != "reward/accuracy" or n["step"] % 8 != 3} for n in lines])
    assert not find_signs([{k: v for k, v in n.items() if k != "reward/accuracy" or n["step"] % 2} for n in lines])


def test_a_change_that_went_away_is_no_sign():
    lines = lines_of(SICK["digits"][0])
    gone = [*lines[:40], *({**n, "step": 40 + n["step"]} for n in lines[:12])]
    assert {s.name for s in find_signs(lines[:40])} > {s.name for s in find_signs(gone)} == {"no_signal"}


def test_a_run_whose_groups_are_all_right_has_learned_and_is_not_dead():
    right = {"reward/mean": 1.0, "reward/accuracy": 1.0, "rollout/dead_group_share": 1.0}
    assert find_signs([{"step": s, **right} for s in range(20)]) == []
    wrong = [{"step": s, **right, "reward/accuracy": 0.0} for s in range(20)]
    assert warning_of(find_signs(wrong)) == "all groups dead for 20 steps"
    assert find_signs(wrong[:9]) == []
    alive = [{**wrong[0], "rollout/dead_group_share": 0.9}, *wrong[1:]]
    assert [(s.words, s.step) for s in find_signs(alive)] == [("all groups dead for 19 steps", 1)]


def sampled(group, text, *, tokens=10, score: float | None = 0.0, truth="t", cut=False, formed=True):
    return Sampled(group, f"p{group}", truth, text, tokens, cut, score, formed)


def test_the_metrics_of_a_step_by_hand():
    samples = [
        sampled(g, f"{'AB' if k else 'ab'} {g}1", tokens=k, score=float(k), truth=str(g % 2))
        for g in range(4)
        for k in range(2)
    ]
    found = measure_health(samples)
    assert found.keys() <= TITLES.keys() and all(is_watched(name) for name in found)
    expected = {"alike_share": 0.25, "alike_in_group_share": 1.0, "same_truth_share": 0.5, "same_prefix_share": 0.125,
                "repeating_share": 0.0, "digit_share": 0.4, "uppercase_share": 0.2, "punctuation_share": 0.0,
                "whitespace_share": 0.2, "non_ascii_share": 0.0, "characters_mean": 5.0,
                "length_score_correlation": 1.0}  # fmt: skip
    assert {n.removeprefix("health/"): pytest.approx(v) for n, v in found.items() if "top" not in n} == expected
    few = measure_health(samples[:4])
    assert "health/alike_share" not in few and "health/same_truth_share" not in few
    assert measure_health([]) == {}


def test_cut_failed_and_malformed_responses_say_nothing_of_what_length_earns():
    good = [sampled(0, "a", tokens=n, score=1.0 - n) for n in range(3)]
    odd = [
        sampled(0, "a", tokens=99, score=9.0, cut=True),
        sampled(0, "a", tokens=99, score=None),
        sampled(0, "a", tokens=99, score=9.0, formed=False),
    ]
    assert measure_health(good + odd)["health/length_score_correlation"] == pytest.approx(-1.0)
    assert "health/length_score_correlation" not in measure_health(odd)


def test_the_correlation_within_groups_is_that_of_the_centred_values():
    rng = random.Random(2)
    rows = [(g, rng.gauss(10 * g, 3), rng.gauss(g, 1)) for g in range(9) for _ in range(7)]
    centred = []
    for k in (1, 2):
        means = {g: np.mean([row[k] for row in rows if row[0] == g]) for g in range(9)}
        centred.append([row[k] - means[row[0]] for row in rows])
    assert length_score_correlation(rows) == pytest.approx(np.corrcoef(*centred)[0, 1])
    assert length_score_correlation([(g, 1.0, s) for g, _, s in rows]) is None
    assert length_score_correlation(rows[:1]) is None


def test_the_contrast_of_a_series_is_the_welch_statistic():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 1, 20), rng.normal(2, 3, 30)])
    history = History([{"step": s, "reward/mean": v} for s, v in enumerate(values.tolist())])
    contrast = history.contrast(history.reward)
    assert contrast is not None
    for place, t in enumerate(history.steps.tolist()):
        before = values[max(0, t - 24) : t]
        after = values[t:]
        noise = before.var(ddof=1) if len(before) >= 6 else max(before.var(ddof=1), after.var(ddof=1))
        error = math.sqrt(noise / len(before) + after.var(ddof=1) / len(after))
        expected = (after.mean() - before.mean()) / error
        assert contrast.certainty[place] == pytest.approx(expected, rel=1e-9)
    assert math.isclose(contrast.last, values[-6:].mean())
