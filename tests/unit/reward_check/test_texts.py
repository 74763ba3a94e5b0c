"""Measures of response texts: by hand, against slow counts, and of any text at all."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.reward_check.texts import CLASSES, answer_of, joins_words, measure_texts, repeats_itself


def test_classes_of_characters_are_averaged_over_texts():
    m = measure_texts(["aB1. ", "\u6211\u6211", "1111", ""], [0, 0, 1, 1])
    expected = {"lowercase": 0.05, "digit": 0.3, "uppercase": 0.05, "punctuation": 0.05, "whitespace": 0.05,
                "non_ascii": 0.25}  # fmt: skip
    assert {name: pytest.approx(share) for name, share in m.class_shares.items()} == expected
    assert m.top_character_share == pytest.approx((0.2 + 0 + 1 + 0) / 4) and m.characters_mean == pytest.approx(11 / 4)


@pytest.mark.parametrize("text", ["the loop is open and " * 20, "3134" * 50, "\u6211\u5f88\u597d" * 60, "ha" * 60])
def test_words_and_characters_in_a_loop_repeat_themselves(text):
    assert repeats_itself(text)


def test_prose_markup_lists_and_short_texts_do_not():
    rng = random.Random(0)
    words = [f"{chr(97 + i % 26)}{chr(97 + i // 26)}o" for i in range(300)]
    rect = [f'<rect x="{rng.randrange(200)}" y="{rng.randrange(200)}" fill="red"/>' for _ in range(60)]
    for text in (" ".join(rng.choices(words, k=400)), "".join(rect), str([rng.random() for _ in range(90)]), "ha" * 30):
        assert not repeats_itself(text), text[:80]


def test_alike_is_the_same_text_but_for_little_with_the_same_end():
    long = "the left shape has one ring and the right one has two, so that they cannot be the same, which is certain "
    texts = [long + "no", long.upper() + "  no", long.replace("two", "two,") + "no", long + "yes", "quite another text"]
    m = measure_texts(texts, [0, 0, 1, 1, 2])
    assert m.alike_share == pytest.approx(3 / 5)
    assert m.alike_in_group_share == pytest.approx((1 + 1 / 2 + 1) / 3) and m.same_prefix_share == pytest.approx(3 / 5)
    answers = [f"{long * 3}<answer>{i}</answer> as the shapes are open at the top" for i in range(5)]
    assert measure_texts(answers, range(5)).alike_share == pytest.approx(1 / 5)


@settings(max_examples=40)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=12), st.randoms())
def test_any_texts_have_shares_between_0_and_1_whatever_their_order(texts, rng):
    groups = [rng.randrange(3) for _ in texts]
    m = measure_texts(texts, groups)
    shares = [m.alike_share, m.alike_in_group_share, m.same_prefix_share, m.repeating_share, m.top_character_share]
    assert all(0 <= share <= 1 for share in [*shares, *m.class_shares.values()])
    assert sum(m.class_shares.values()) == pytest.approx(np.mean([bool(t) for t in texts]))
    assert m.class_shares.keys() == set(CLASSES) and m.alike_share >= 1 / len(texts)
    order = list(range(len(texts)))
    rng.shuffle(order)
    again = measure_texts([texts[i] for i in order], [groups[i] for i in order])
    assert again.alike_share == pytest.approx(m.alike_share)
    assert again.alike_in_group_share == pytest.approx(m.alike_in_group_share)


@given(st.text(alphabet="ab", min_size=100, max_size=300))
def test_repetition_is_the_share_of_ngrams_that_were_there_before(text):
    grams = [text[i : i + 12] for i in range(len(text) - 11)]
    assert repeats_itself(text) == (1 - len(set(grams)) / len(grams) >= 0.9)


def test_only_the_ends_of_a_very_long_text_are_looked_at():
    rng = random.Random(0)
    fresh = "".join(chr(rng.randrange(97, 123)) for _ in range(1999))
    assert not repeats_itself(fresh + "ab" * 900_000 + fresh)
    assert measure_texts(["x" * 3_000_000, "y"], [0, 1]).characters_mean == pytest.approx(1_500_000.5)


def test_scripts_without_spaces():
    assert all(map(joins_words, "\u6211\u3042\u30ab\u0e2a\u0e81\u1780\u1019"))
    assert not any(map(joins_words, "a\u00e91\ud55c\u0416\u0627"))


def test_no_text_and_half_characters():
    with pytest.raises(ValueError, match="no text"):
        measure_texts([], [])
    assert measure_texts(["\ud800 half"], [0]).characters_mean == 6 and answer_of("\ud800") == "\ud800"
