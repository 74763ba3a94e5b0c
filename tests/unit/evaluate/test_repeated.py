"""pass@k, maj@k and mean@k: by hand, against an enumeration of all draws, and their intervals over prompts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from evaluation_builders import row
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.evaluate.estimates import RowKeys, mean_interval
from vlmrl.evaluate.metrics import answer_of, summarise
from vlmrl.evaluate.paired import paired_columns, paired_differences
from vlmrl.evaluate.repeated import NO_ANSWER, SampleTable, maj_at_k, mean_at_k, pass_at_k


def table_of(*prompts: tuple) -> SampleTable:
    """Prompts, each (accuracies, answers or None, ids of its cluster)."""
    numbers = {None: NO_ANSWER}
    answers = [numbers.setdefault(a, len(numbers)) for _, known, _ in prompts for a in known or ()]
    return SampleTable(
        np.array([i for i, (accuracies, *_) in enumerate(prompts) for _ in accuracies], dtype=np.int64),
        np.array([a for accuracies, *_ in prompts for a in accuracies], dtype=np.float64),
        np.array(answers) if answers else None,
        RowKeys.of([cluster for accuracies, _, cluster in prompts for _ in accuracies]),
    )


def test_pass_at_k_by_hand():
    # 4 samples, 1 right, 2 drawn: 3 of the 6 pairs hold the right one.
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(5, 0, 3) == 0.0
    assert pass_at_k(5, 3, 3) == 1.0
    # 10 samples, 3 right, 4 drawn: 1 - C(7, 4) / C(10, 4) = 1 - 35 / 210.
    assert pass_at_k(10, 3, 4) == pytest.approx(5 / 6, abs=1e-15)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_all_draws(n: int, data: st.DataObject):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws), abs=1e-12)


def test_fewer_samples_than_k_give_no_number():
    assert math.isnan(pass_at_k(4, 1, 5)) and math.isnan(mean_at_k([1.0], 2)) and math.isnan(maj_at_k(["a"], [1.0], 2))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_makes_no_sense(n: int, c: int, k: int):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_the_others_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="mean@0"):
        mean_at_k([1.0], 0)
    for answers, accuracies, k in ((["a"], [1.0], 0), (["a"], [1.0, 0.0], 1)):
        with pytest.raises(ValueError, match="maj@"):
            maj_at_k(answers, accuracies, k)
    with pytest.raises(ValueError, match="best@2"):
        table_of(((1.0, 0.0), None, ())).values("best", 2)
    with pytest.raises(ValueError, match="answers"):
        table_of(((1.0, 0.0), None, ())).values("maj", 2)


def test_maj_at_k_by_hand():
    # Draws of 2 from A A B: AA, AB, AB. A is right: 1, then a tie with a half each.
    assert maj_at_k(["A", "A", "B"], [1, 1, 0], 2) == pytest.approx(2 / 3, abs=1e-15)
    assert maj_at_k(["A", "A", "B"], [1, 1, 0], 3) == 1.0
    # Draws of 3 from A A B B C: AAB AAB AAC wins 3 for A, as many for B; four draws ABC, of which a third each. Of 10.
    assert maj_at_k(list("AABBC"), [1, 1, 0, 0, 0], 3) == pytest.approx((3 + 4 / 3) / 10, abs=1e-15)
    # Nobody votes: 0. A single vote decides over those who have none.
    assert maj_at_k([None, None], [0, 0], 2) == 0.0
    assert maj_at_k([None, "A", None], [0, 1, 0], 3) == 1.0
    # 2 of 3 draws of 2 hold the only vote.
    assert maj_at_k([None, "A", None], [0, 1, 0], 2) == pytest.approx(2 / 3, abs=1e-15)
    # Equal answers that were graded differently: their mean.
    assert maj_at_k(["A", "A", "A"], [1, 1, 0], 3) == pytest.approx(2 / 3, abs=1e-15)


def slow_majority(answers, accuracies, k) -> Fraction:
    """The mean over all draws; of tied answers each in turn; of an answer the mean accuracy of all its samples."""
    mean = {a: Fraction(0) for a in answers}
    for a in mean:
        own = [Fraction(x) for b, x in zip(answers, accuracies, strict=True) if b == a]
        mean[a] = sum(own, Fraction(0)) / len(own)
    draws = list(itertools.combinations(answers, k))
    total = Fraction(0)
    for draw in draws:
        votes = Counter(a for a in draw if a is not None)
        best = [a for a, n in votes.items() if n == max(votes.values())]
        total += sum((mean[a] for a in best), Fraction(0)) / len(best) if best else 0
    return total / len(draws)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0, 1])), min_size=1, max_size=8),
       st.data())  # fmt: skip
def test_maj_at_k_counts_all_draws(samples, data: st.DataObject):
    answers, accuracies = [a for a, _ in samples], [x for _, x in samples]
    k = data.draw(st.integers(1, len(samples)))
    assert maj_at_k(answers, accuracies, k) == pytest.approx(float(slow_majority(answers, accuracies, k)), abs=1e-12)


def test_a_majority_of_many_samples_neither_overflows_nor_takes_long():
    answers = ["right"] * 900 + ["wrong"] * 700 + [None] * 400
    assert maj_at_k(answers, [1.0] * 900 + [0.0] * 1100, 2000) == 1.0
    assert 0.5 < maj_at_k(answers, [1.0] * 900 + [0.0] * 1100, 11) < 0.9
    assert maj_at_k([str(i) for i in range(64)], [1.0] * 16 + [0.0] * 48, 64) == pytest.approx(0.25, abs=1e-12)


PROMPTS = [
    ((1.0, 0.0, 0.0, 0.0), ("x", "y", "y", None), ("i",)),
    ((1.0, 1.0, 1.0, 1.0), ("z",) * 4, ("i",)),
    ((0.0, 1.0), ("u", "v"), ("j",)),
]


def test_a_prompt_without_k_samples_is_left_out_and_counted():
    # pass@4 of the first two: 1 and 1.
    found = table_of(*PROMPTS).interval("pass", 4)
    assert (found.mean, found.n, found.clusters) == (1.0, 2, 1)
    assert math.isnan(found.low), "both show the same image: one cluster has no interval"
    # pass@2: 1 - C(3,2)/C(4,2) = 1/2; 1; 1.
    assert table_of(*PROMPTS).interval("pass", 2).mean == pytest.approx(2.5 / 3, abs=1e-15)
    none = table_of(*PROMPTS).interval("pass", 5)
    assert math.isnan(none.mean) and none.n == 0


def test_the_interval_is_that_of_one_number_per_prompt():
    # 40 prompts whose 8 samples all agree say as much as 40 rows, not as 320.
    table = table_of(*(((float(i % 4 > 0),) * 8, ("a",) * 8, ()) for i in range(40)))
    rows = mean_interval([float(i % 4 > 0) for i in range(40)], None)
    for metric in ("pass", "maj", "mean"):
        found = table.interval(metric, 8)
        assert (found.mean, found.low, found.high) == pytest.approx((0.75, rows.low, rows.high), abs=1e-12)


def test_a_summary_shows_powers_of_two_and_n_of_the_smallest_prompt():
    shown = [("pass", 1), ("pass", 2), ("pass", 4), ("maj", 4), ("mean", 4)]
    assert table_of(*PROMPTS).shown_estimates() == [("pass", 1), ("pass", 2), ("mean", 2)]
    assert table_of(*PROMPTS[:2]).shown_estimates() == shown
    assert table_of(((0.5, 1.0, 0.0), None, ())).shown_estimates() == [("mean", 3)]
    assert table_of(((1.0,), None, ())).shown_estimates() == table_of().shown_estimates() == []


def test_the_answer_of_a_response_is_what_the_reward_has_read():
    assert answer_of({"detail": {"math": {"answer": " 1/2 ", "answer_value": "0.5"}}}) == "0.5"
    assert answer_of({"detail": {"math": {"answer": " Yes ", "answer_value": None}}}) == "yes"
    assert answer_of({"detail": {"first": {"boxes": 1}, "second": {"answer": 3}}}) == answer_of(
        {"detail": {"r": {"answer": 3.0}}}
    )
    assert answer_of({"detail": {"r": {"answer": [1, 2]}}}) == "[1, 2]"
    for nothing in (None, {}, {"r": 5}, {"r": {"answer": None}}, {"r": {"answer": "  "}},
                    {"r": {"answer": math.nan}}):  # fmt: skip
        assert answer_of({"detail": nothing}) is None


def answered(prompt: str, sample: int, answer: str | None, confidence: float) -> dict:
    return row(prompt, sample=sample, confidence=confidence, detail={"r": {"answer": answer}})


def test_several_samples_of_rewards_that_read_answers_have_a_majority():
    # p0: right x, right x, wrong y, no answer: x wins. p1: wrong y twice, right x, right w: y wins.
    rows = [answered("p0", i, a, c) for i, (a, c) in enumerate([("x", 0.9), ("x", 0.9), ("y", 0.1), (None, 0.1)])]
    rows += [answered("p1", i, a, c) for i, (a, c) in enumerate([("y", 0.1), ("y", 0.1), ("x", 0.9), ("w", 0.9)])]
    metrics = summarise(rows)["metrics"]
    assert metrics["maj@4"]["value"] == 0.5 and metrics["mean@4"]["value"] == 0.5 and "maj@2" not in metrics
    assert (metrics["maj@4"]["n"], metrics["maj@4"]["range"]) == (2, [0.0, 1.0])
    without = [{**r, "detail": None} for r in rows]
    assert not any(name.startswith("maj@") for name in summarise(without)["metrics"])


def test_equal_rows_are_rows_of_their_own_and_no_further_samples():
    # Three rows of two samples: p0 right and wrong, p1 right twice, and p0 again, wrong twice; the images are shared.
    rows = [row("p0", sample=i, confidence=c) for i, c in enumerate([0.9, 0.1])]
    rows += [row("p1", sample=i, confidence=0.9) for i in range(2)]
    rows += [row("p0", sample=i, confidence=0.1) for i in range(2)]
    metrics = summarise(rows)["metrics"]
    assert {k: (m["value"], m["n"]) for k, m in metrics.items() if "@" in k} == {
        "pass@1": (0.5, 3), "pass@2": (2 / 3, 3), "mean@2": (0.5, 3),
    }  # fmt: skip
    assert metrics["pass@2"]["clusters"] == 1 and summarise(rows)["prompts"] == 2
    assert not any("@" in name for name in summarise([row("p0"), row("p0")])["metrics"]), "greedy, with one row twice"


def test_the_differences_of_two_evaluations_are_over_prompts_at_the_k_that_both_have():
    after = [row("p0", sample=i, confidence=c) for i, c in enumerate([0.9, 0.1, 0.1, 0.1])]
    after += [row("p1", sample=i, confidence=c, images=("c",)) for i, c in enumerate([0.9, 0.9, 0.9, 0.1])]
    before = [row("p0", sample=i, confidence=0.1) for i in range(2)]
    before += [row("p1", sample=i, confidence=c, images=("c",)) for i, c in enumerate([0.9, 0.1])]
    before += [row("gone", sample=i, confidence=0.9) for i in range(2)]
    found = paired_differences(paired_columns(after, before))
    # pass@1: 1/4 and 3/4 against 0 and 1/2. pass@2: 1/2 and 1 against 0 and 1. n differs: no mean@n, no pass@4.
    assert {k: (m["a"], m["b"], m["n"]) for k, m in found.items() if "@" in k} == {
        "pass@1": (0.25, 0.5, 2), "pass@2": (0.5, 0.75, 2),
    }  # fmt: skip
    assert found["pass@2"]["value"] == 0.25 and found["accuracy"]["n"] == 4


def test_prompts_with_another_truth_are_no_pair():
    after = [row("p0", sample=i, distance=1) for i in range(2)] + [row("p1", sample=i) for i in range(2)]
    before = [row(p, sample=i) for p in ("p0", "p1") for i in range(2)]
    assert paired_differences(paired_columns(after, before))["pass@2"]["n"] == 1
