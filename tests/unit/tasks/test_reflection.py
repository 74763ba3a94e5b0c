"""Reflection words and ratios: a batch by hand, both profiles, and sums over ranks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.errors import RecipeError
from vlmrl.evaluate.set_metrics import summarise_sets
from vlmrl.rewards.base import UNSCORED
from vlmrl.tasks import TASKS, make_task
from vlmrl.tasks.reflection import (
    MAYE_WORDS,
    PREFIXES,
    PROFILES,
    RATIOS,
    REFLECTION,
    STEMS,
    ReflectionCounts,
    count_words,
)
from vlmrl.types import RewardInput

BATCH = [
    # text, accuracy, tokens; the words of `maye` in it
    ("Wait, let me re-check. WAIT.", 1.0, 10),  # re-check 1, wait 2
    ("The waiter brought yet another plate.", 0.0, 10),  # wait 1, yet 1
    ("I verify it, then check again and verify.", 1.0, 20),  # check again 1, verify 2
    ("The area is 12.", 1.0, 5),
    ("The area is 13.", 0.0, 5),
    ("Let me rethink; a reevaluation, to reevaluate.", 0.0, 20),  # rethink 1, reevaluation 1, reevaluate 1
    ("Nothing to see.", 0.0, 10),
    ("Done.", 1.0, 20),
]
"""N = 8, of which 4 are correct; under `maye` 4 reflect (0, 1, 2, 5), of which 2 are correct; 100 tokens."""


def counts(profile: str, rows=None) -> ReflectionCounts:
    rows = BATCH if rows is None else rows
    return ReflectionCounts.from_flat(REFLECTION.sums(responses_of(rows)), profile)


def responses_of(rows):
    return [(RewardInput(text, {}, num_tokens=n), UNSCORED, {"accuracy": a}) for text, a, n in rows]


def test_the_profile_maye_by_hand():
    found = counts("maye")
    assert list(found.words) == list(MAYE_WORDS) and len(MAYE_WORDS) == 15
    assert {w: n for w, n in found.words.items() if n} == {
        "re-check": 1, "reevaluate": 1, "reevaluation": 1, "rethink": 1, "check again": 1, "verify": 2, "wait": 3,
        "yet": 1,
    }  # fmt: skip
    assert found.ratios() == {
        "reflection_ratio": 4 / 8,  # N_ref / N
        "reflection_ratio_in_correct_answers": 2 / 4,  # N_ref+ / N_+
        "reflection_ratio_in_incorrect_answers": 2 / 4,  # (N_ref - N_ref+) / (N - N_+)
        "correct_ratio_in_reflection_texts": 2 / 4,  # N_ref+ / N_ref
        "correct_ratio_in_no_reflection_texts": 2 / 4,  # (N_+ - N_ref+) / (N - N_ref)
    }
    assert found.per_1k_tokens() == 1000 * 11 / 100


def test_the_default_profile_by_hand():
    # The waiter no longer reflects: N_ref = 3, N_ref+ = 2, N = 8, N_+ = 4. Five ratios that all differ.
    found = counts("default")
    assert {w: n for w, n in found.words.items() if n} == {
        "re-check": 1, "re-evaluate": 2, "re-think": 1, "check again": 1, "verify": 2, "wait": 2,
    }  # fmt: skip
    assert tuple(found.ratios().values()) == (3 / 8, 2 / 4, 1 / 4, 2 / 3, 2 / 5)
    assert tuple(found.ratios()) == RATIOS and found.per_1k_tokens() == 90.0


def test_an_empty_denominator_is_none_and_not_zero():
    empty = counts("maye", [])
    assert set(empty.ratios().values()) == {None} and empty.per_1k_tokens() is None
    assert list(empty.words) == list(MAYE_WORDS) and not any(empty.words.values())
    all_wrong = counts("maye", [("wait", 0.0, 3), ("wait", 0.0, 3)])
    assert tuple(all_wrong.ratios().values()) == (1.0, None, 1.0, 0.0, None)
    assert all_wrong.shares()["reflection/reflection_ratio_in_correct_answers"] is None


def test_a_response_that_was_not_graded_is_in_no_ratio_of_correctness():
    rows = [("wait", 1.0, 1), ("wait", None, 1), ("wait", float("nan"), 1), ("so", 0.5, 1), ("wait", 0.0, 1)]
    found = counts("default", rows)
    assert (found.responses, found.graded, found.correct) == (5, 3, 1)
    # All: 4 of 5 reflect. Graded: wait is right, so is wrong, wait is wrong.
    assert tuple(found.ratios().values()) == (4 / 5, 1 / 1, 1 / 2, 1 / 2, 0 / 1)


@pytest.mark.parametrize(
    ("text", "maye", "default"),
    [
        # Cases in which substrings go wrong: the first four count under `maye` only, the others by default only.
        ("waiter", True, False), ("await", True, False), ("Tibet yeti", True, False), ("not yet", True, False),
        ("re-evaluating", False, True), ("re-evaluation", False, True), ("verified", False, True),
        ("double-check", False, True), ("Double checking", False, True), ("I check it once again", False, True),
        ("rechecked", True, True), ("RE\u2011EXAMINED", False, True), ("re-verification", False, True),
        ("re-thought", False, True), ("rethinking", True, True), ("tried that again", False, True),
        ("try again", True, True), ("waiting", True, False), ("Wait!", True, True), ("checkers again", False, False),
        ("check the sum of all of it again", False, False), ("verifiable", False, False), ("research", False, False),
    ],
)  # fmt: skip
def test_words_of_both_profiles(text: str, maye: bool, default: bool):
    assert [any(count_words(text, profile).values()) for profile in ("maye", "default")] == [maye, default]


def test_an_unknown_profile_is_refused_with_those_there_are():
    with pytest.raises(RecipeError, match="unknown reflection profile `mayo`") as error:
        count_words("a", "mayo")
    assert "maye" in str(error.value.hint)


TEXTS = ("wait", "I verify, wait", "yet", "so", "re-evaluated it")


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from([0.0, 1.0, None]), st.integers(0, 9)), max_size=20),
    st.integers(1, 4), st.sampled_from(sorted(PROFILES)),
)  # fmt: skip
def test_the_ratios_do_not_depend_on_the_number_of_ranks(rows, ranks: int, profile: str):
    parts = [Counter(REFLECTION.sums(responses_of(rows[rank::ranks]))) for rank in range(ranks)]
    assert ReflectionCounts.from_flat(sum(parts, Counter()), profile) == counts(profile, rows)


def test_pooled_ratios_are_not_the_mean_of_ranks_ratios():
    # Rank 0: one of one reflecting responses is correct. Rank 1: none reflects. MAYE logs (1 + 0) / 2.
    ranks = [("wait", 1.0, 1), ("so", 0.0, 1)], [("so", 0.0, 1)] * 2
    sums = sum((Counter(REFLECTION.sums(responses_of(rows))) for rows in ranks), Counter())
    assert ReflectionCounts.from_flat(sums, "maye").ratios()["correct_ratio_in_reflection_texts"] == 1.0


GRADED = responses_of(BATCH)
RECORDS = [{"prompt_id": f"p{i}", "sample": 0, "truth": {}, "images": []} for i in range(len(BATCH))]


def test_both_profiles_at_once_by_hand_with_the_counts_that_they_come_from():
    found = summarise_sets(REFLECTION, GRADED, RECORDS, num_resamples=0)
    values = {name: metric["value"] for name, metric in found["metrics"].items()}
    # The numbers of the two tests by hand above.
    assert [values[f"reflection/{name}"] for name in RATIOS] == [3 / 8, 2 / 4, 1 / 4, 2 / 3, 2 / 5]
    assert [values[f"reflection/maye/{name}"] for name in RATIOS] == [4 / 8, 2 / 4, 2 / 4, 2 / 4, 2 / 4]
    assert values["reflection/words_per_1k_tokens"] == 90.0 and values["reflection/maye/words_per_1k_tokens"] == 110.0
    sums = found["set_metrics"]["counts"]
    assert sums["reflection/maye/word/wait"] == 3 and sums["reflection/word/wait"] == 2
    named = ("responses", "tokens", "reflecting", "graded", "graded_reflecting", "correct", "correct_reflecting")
    assert [sums[f"reflection/count/{name}"] for name in named] == [8, 100, 3, 8, 3, 4, 2]
    assert [sums[f"reflection/maye/count/{name}"] for name in named] == [8, 100, 4, 8, 4, 4, 2]
    for profile in PROFILES:  # whoever has the sums can compute every metric again
        assert ReflectionCounts.from_flat(sums, profile) == counts(profile)


def test_a_ratio_without_a_denominator_is_null_and_named_as_not_defined():
    found = summarise_sets(REFLECTION, GRADED[3:4], RECORDS[3:4], num_resamples=0)  # right, without a word
    left_out = ("reflection_ratio_in_incorrect_answers", "correct_ratio_in_reflection_texts")
    assert found["set_metrics"]["undefined"] == [prefix + name for prefix in PREFIXES.values() for name in left_out]
    assert not {f"reflection/{name}" for name in left_out} & found["metrics"].keys()


@pytest.mark.parametrize("name", ["geometry3k", "mm_math"])
def test_the_geometry_tasks_have_them(name: str):
    assert name in TASKS
    assert make_task(name, {}).set_metrics == REFLECTION
    assert {*make_task(name, {}).measured_of_sets({})} == {
        f"{prefix}{metric}" for prefix in PREFIXES.values() for metric in (*RATIOS, "words_per_1k_tokens")
    }


WORDS_OF_TEXTS = (
    "re-check", "Rechecking", "reevaluations", "re-examined", "rethought", "thinking", "again", "it", "tried", "double",
    "checks", "verifies", "wait", "Waiter", "\n", "checked", "evaluation", "examine", "certificate",
    "\u2011", "K", "12.",
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS_OF_TEXTS), max_size=12), st.sampled_from([" ", "-", "  ", ""]))
def test_the_quick_search_finds_what_the_patterns_find(words: list[str], between: str):
    text = between.join(words)
    assert count_words(text) == {word: len(pattern.findall(text)) for word, pattern in STEMS.items()}


def test_long_texts_take_linear_time():
    """A quadratic pattern would need minutes for these."""
    for text in ("check " + " " * 200_000, "check " * 50_000, "re" * 100_000, "think " + "a" * 200_000,
                 "try \n\t" * 50_000):  # fmt: skip
        count_words(text)
    rng = random.Random(0)
    text = " ".join(rng.choice(["wait", "x", "verify"]) for _ in range(1000))
    assert count_words(text)["wait"] == text.split().count("wait")
