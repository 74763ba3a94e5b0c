from __future__ import annotations

import random

import numpy as np
import pytest

from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Coded, Scores
from vlmrl.reward_check.texts import WordSequence, paid_ngrams

STEPS = 30
PHRASE = ("truly", "and", "deeply")
WORDS = [f"w{k}" for k in range(60)]


def made(
    groups,
    size,
    *,
    plant,
    pay,
    rise=True,
    phrase=("truly", "and", "deeply"),
    words=tuple(f"w{k}" for k in range(60)),
    join=" ",
):
    """Texts of 40 words; a name that belongs to the prompt and its score, a score that rises with training, and a
    phrase that spreads over the run (`rise`) and adds `pay` to the score of the texts it is in (`plant`). A text that
    is alone has no name: nothing could tell what the name pays from what the prompt is worth.
    """
    rng = random.Random(0)
    n = groups * size
    group = np.repeat(np.arange(groups), size)
    step = (group * STEPS // groups).astype(np.int32)
    texts, values = {}, []
    for i in range(n):
        said = rng.choices(words, k=40)
        said += [f"name{group[i] % 10}" if size > 1 else "name", f"epoch{step[i] // 10}"]
        value = 0.02 * step[i] + 0.05 * (group[i] % 10) + rng.random() * 0.3
        if plant and rng.random() < (step[i] / STEPS if rise else 0.4):
            said[20:20] = phrase
            value += pay
        texts[i] = join.join(said)
        values.append(value)
    zeros, names = np.zeros(n, np.int32), Coded(np.zeros(n, np.int32), ["s"])
    facts = ResponseColumns(
        np.arange(n),
        np.arange(n),
        zeros,
        step,
        group.astype(np.int64),
        zeros,
        names,
        names,
        zeros > 0,
        zeros,
        zeros,
        np.zeros(n),
    )
    return facts, Scores(np.asarray(values), {}, Coded(zeros, [""]), Coded(zeros - 1, [])), texts


@pytest.mark.parametrize(("groups", "size"), [(150, 8), (1200, 1)])
def test_a_phrase_that_came_to_be_paid_is_found_with_its_price(groups, size):
    found = paid_ngrams(*made(groups, size, plant=True, pay=0.2))["found"]
    assert [f["ngram"] for f in found] == ["truly and deeply"]
    assert found[0]["pays"] == pytest.approx(0.2, abs=0.04) and found[0]["first"] < 0.3 < 0.7 < found[0]["last"]


@pytest.mark.parametrize(
    ("phrase", "words"),
    [
        ("\u6211\u5f88\u786e\u5b9a", "\u7684\u4e00\u662f\u5728\u4e0d\u4e86\u6709\u548c\u4eba\u8fd9\u4e2d\u5927"),
        ("3134133", "0256789"),
        ("\u0e2a\u0e27\u0e22", "\u0e01\u0e02\u0e04\u0e07\u0e08\u0e09\u0e0a\u0e0b"),
    ],
    ids=["chinese", "digits", "thai"],
)
def test_characters_that_came_to_be_paid_are_found_where_text_has_no_spaces(phrase, words):
    found = paid_ngrams(*made(150, 8, plant=True, pay=0.2, phrase=phrase, words=words, join=""))["found"]
    assert phrase in [f["ngram"] for f in found], found
    whole = next(f for f in found if f["ngram"] == phrase)
    assert whole["unit"] == "characters" and whole["pays"] == pytest.approx(0.2, abs=0.04)
    nothing = paid_ngrams(*made(150, 8, plant=True, pay=0.0, phrase=phrase, words=words, join=""))
    assert nothing["found"] == []


def test_words_stay_words_beside_text_without_spaces():
    units = WordSequence.of(["A naïve <loop> 東京 is big", "3" * 30 + " x", "<" + "t" * 30 + ">"])
    rows = [[units.names[w] for w in units.word_T[units.text_T == t]] for t in range(3)]
    assert rows == [["a", "naïve", "<loop>", "東", "京", "is", "big"], [*"3" * 30, "x"], ["<" + "t" * 30 + ">"]]
    words = [units.names.index(w) for w in ("naïve", "big")] + units.word_T[3:5].tolist()
    assert units.spelled(words) == {"ngram": "naïve big 東京", "unit": "words"}
    assert units.spelled(words[2:]) == {"ngram": "東京", "unit": "characters"}


@pytest.mark.parametrize(
    "what",
    [
        {"plant": False, "pay": 0.0},
        {"plant": True, "pay": 0.0},
        {"plant": True, "pay": -0.2},
        {"plant": True, "pay": 0.2, "rise": False},
    ],
)
@pytest.mark.parametrize(("groups", "size"), [(150, 8), (1200, 1)])
def test_names_of_prompts_a_rising_score_and_words_without_rise_or_pay_are_not(groups, size, what):
    told = paid_ngrams(*made(groups, size, **what))
    assert told["found"] == [] and told["texts"] == groups * size and told["thirds"]


def test_one_step_or_no_text_has_nothing_to_compare():
    facts, scores, texts = made(20, 2, plant=True, pay=1.0)
    facts.steps_N[:] = 3
    assert paid_ngrams(facts, scores, texts) == {"texts": 40, "thirds": False, "found": []}
    assert paid_ngrams(facts, scores, {}) == {"texts": 0, "thirds": False, "found": []}
