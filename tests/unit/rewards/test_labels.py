"""`pair_labels`: two labels of a closed vocabulary; `taxonomy_relations`: Same, Different or Uncertain per level."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import RewardError
from vlmrl.rewards.base import combine, split_result
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

AGES = ["Infant", "Juvenile", "SubAdult", "Adult", "Elderly"]
CHIMP = {"tag": "age-group", "labels": AGES}
SEA_STAR = {
    "tag": "species",
    "labels": ["Asterias rubens", "Anthenea australiae"],
    "aliases": {"Asru": "Asterias rubens", "Anau": "Anthenea australiae"},
    "levels_decide": "different",
}
AGED = {"same": False, "age_group": ["SubAdult", "Adult"]}
LEVELS = ["order", "family", "genus"]
FAMILIES_DIFFER = {"same": False, "order": ["O", "O"], "family": ["F", "G"], "genus": ["A", "B"]}


def score(name, response, truth, **args):
    """(parts, note, value)"""
    spec = load_reward(name, args=args)
    parts, note, *_ = split_result(spec.fn(RewardInput(response, truth)))
    return parts, note, combine(parts, spec.weights)[0]


def labels(written, truth=AGED, answer="0.1", args=CHIMP, **more):
    tag = args["tag"]
    response = f"<think>so <{tag}>{written}</{tag}></think><answer>{answer}</answer>"
    return score("pair_labels", response, truth, **{**args, **more})


def relations(words, truth=FAMILIES_DIFFER, answer="0.1", **args):
    tags = "".join(f"<{level}>{word}</{level}>" for level, word in zip(LEVELS, words, strict=False) if word)
    response = f"<think>so {tags}</think><answer>{answer}</answer>"
    return score("taxonomy_relations", response, truth, levels=LEVELS, **args)


def test_a_hand_worked_score_of_labels():
    parts, note, value = labels("SubAdult; Elderly")
    assert parts == {"format": 1.0, "answer": 1 - 0.1**2, "age_group": 0.5} and note == ""
    # 0.2 * 1 + 0.4 * 0.99 + 0.4 * 0.5 = 0.2 + 0.396 + 0.2
    assert value == pytest.approx(0.796, abs=1e-12)
    assert labels("SubAdult; Elderly", partial=False)[0]["age_group"] == 0.0
    assert labels("Adult; SubAdult")[0]["age_group"] == 0.0


@pytest.mark.parametrize(
    "written",
    [
        "sub-adult;adult",
        "Sub Adult ; ADULT",
        "SUB_ADULT; Adult.",
        "Age-group SubAdult; adult",
        "Age group: SubAdult; adult",
    ],
)
def test_spelling_does_not_matter_in_a_label(written):
    assert labels(written)[0]["age_group"] == 1.0


@pytest.mark.parametrize(
    ("written", "note"),
    [
        ("Adult", "<age-group> does not hold two labels separated by `;`"),
        ("Adult; Adult; Adult", "<age-group> does not hold two labels separated by `;`"),
        ("Adult; ", "<age-group> holds an empty label"),
        ("Adult; Teen", "<age-group> holds 'Teen', which is none of Infant, Juvenile, SubAdult, Adult, Elderly"),
        ("Adult or Juvenile; Adult", "<age-group> holds 'Adult or Juvenile', which is none of"),
        ("Image1=SubAdult; Image2=Adult", "<age-group> holds 'Image1=SubAdult', which is none of"),
    ],
)
def test_a_label_outside_the_vocabulary_breaks_the_format(written, note):
    parts, told, value = labels(written)
    assert note in told and value == 0 and set(parts.values()) == {0.0}


def test_the_labels_must_be_stated():
    parts, note, value = score("pair_labels", "<think>hm</think><answer>0.1</answer>", AGED, **CHIMP)
    assert value == 0 and "<age-group> is missing" in note and parts["age_group"] == 0.0


@pytest.mark.parametrize(
    ("written", "part"),
    [
        ("Image1=SubAdult; Image2=Adult", 1.0),
        ("Image1 = sub-adult;Image2 =\tadult", 1.0),
        ("image 1=SubAdult; IMAGE2=Adult", 1.0),
        ("Image1=Adult; Image2=Adult", 0.5),
        ("Image2=SubAdult; Image1=Adult", None),
        ("SubAdult; Adult", None),
        ("Image1=; Image2=Adult", None),
    ],
)
def test_the_form_with_the_images_named(written, part):
    parts, note, value = labels(written, named=True)
    assert parts["age_group"] == (part or 0.0)
    assert (value > 0) == (part is not None) == (not note)


def test_a_label_that_is_not_known_is_left_out_and_one_that_is_no_label_is_an_error():
    parts, _, value = labels("Adult; Adult", {"same": False, "age_group": [None, "Adult"]}, answer="0")
    assert parts["age_group"] is None and value == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(RewardError, match="one of which is not a label"):
        labels("Adult; Adult", {"same": False, "age_group": ["Teen", "Adult"]})


def test_ages_say_nothing_of_the_answer_and_species_say_no_when_they_differ():
    apart = "Asterias rubens; Anthenea australiae"
    truth = {"same": False, "species": ["Asterias rubens", "Anthenea australiae"]}
    assert labels(apart, truth, "0.9", SEA_STAR)[1] == "the answer 0.9 contradicts the labels"
    assert labels(apart, truth, "0.2", SEA_STAR)[2] > 0.9
    alike = {"same": False, "species": ["Asterias rubens", "Asterias rubens"]}
    assert labels("Asru; asru", alike, "0.2", SEA_STAR)[0]["species"] == 1.0
    assert labels("SubAdult; Adult", {"same": True, "age_group": ["SubAdult", "Adult"]}, "0.9")[2] > 0.9
    with pytest.raises(RewardError, match="its levels say the opposite"):
        labels(apart, {**truth, "same": True}, args=SEA_STAR)


def test_a_hand_worked_score_of_relations():
    # order Same is right; family Different is right; genus is left out below it: right. 0.2 + 0.4 * 0.99 + 0.4
    parts, _, value = relations(["Same", "different"])
    assert parts == {"format": 1.0, "answer": 1 - 0.1**2, "order": 1.0, "family": 1.0, "genus": 1.0}
    assert value == pytest.approx(0.996, abs=1e-12)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["Same", "Same", "Different"], [1, 0, 1]),
        (["Same", "Same", "Same"], [1, 0, 0]),
        (["Different"], [0, 1, 1]),  # order is the same; that family and genus differ is said with it, and right
        (["Uncertain", "Different"], [0, 1, 1]),
        (["Same", "Uncertain", "Different"], [1, 0, 1]),
        (["Uncertain", "Uncertain", "Uncertain"], [0, 0, 0]),
    ],
)
def test_relations_earn_what_they_say(words, wanted):
    parts, note, _ = relations(words, levels_decide="different")
    assert [parts[level] for level in LEVELS] == wanted and not note


CHAINS = [["Same"] * n + ["Different"] * (n < 3) for n in range(4)]
"""Everything that may be said without Uncertain; also, as truths, a pair that differs from its level n on."""


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4).filter(any))
def test_no_belief_is_paid_best_for_another_word_than_the_likelier_one(belief):
    """The belief: how likely the pair differs from order on, from family on, from genus on, not at all."""
    truths = [
        {"same": n == 3, **{level: ["A", "B" if i >= n else "A"] for i, level in enumerate(LEVELS)}} for n in range(4)
    ]

    def expected(chain):
        return sum(
            p * relations(chain, t, "0.5", levels_decide="different")[2] for p, t in zip(belief, truths, strict=True)
        )

    # at level i the pair differs with what was believed of the truths 0 to i; "Same" down to where that is over half
    likelier = next((n for n in range(3) if 2 * sum(belief[: n + 1]) > sum(belief)), 3)
    assert expected(CHAINS[likelier]) >= max(map(expected, CHAINS)) - 1e-9 * sum(belief)


@pytest.mark.parametrize("word", ["same", "SAME", "Same.", "**Same**", "'Same'", " \nSame\n", "Same!", "Order: Same"])
def test_spelling_does_not_matter_in_a_verdict(word):
    assert relations([word, "Different"])[0]["order"] == 1.0


@pytest.mark.parametrize(
    "word", ["Same/Different", "not Different", "Same? No: Different", "SameDifferent", "S", "\u200b"]
)
def test_a_hedged_verdict_breaks_the_format(word):
    assert relations([word, "Different"])[1:] == ("<order> holds none of Same, Different and Uncertain", 0.0)


@pytest.mark.parametrize(
    ("words", "answer", "note"),
    [
        ([], "0.1", "<order> is missing although no level above it differs"),
        (["Same"], "0.1", "<family> is missing although no level above it differs"),
        (["Uncertain"], "0.1", "<family> is missing although no level above it differs"),
        (["Different", "Different"], "0.1", "<family> is stated below <order>, which differs"),
        (["Same", "", "Different"], "0.1", "<family> is missing although no level above it differs"),
        (["Maybe"], "0.1", "<order> holds none of Same, Different and Uncertain"),
        (["Same; Same"], "0.1", "<order> holds none of Same, Different and Uncertain"),
        (["Different"], "0.9", "the answer 0.9 contradicts the relations"),
        (["Same", "Same", "Same"], "0.1", "the answer 0.1 contradicts the relations"),
    ],
)
def test_relations_that_break_the_rules_earn_nothing(words, answer, note):
    assert relations(words, answer=answer)[1:] == (note, 0.0)


def test_relations_above_the_class_and_uncertain_ones_leave_the_answer_free():
    assert relations(["Same", "Same", "Same"], levels_decide="different")[2] > 0.6
    assert relations(["Uncertain", "Same", "Same"])[2] > 0.5


@pytest.mark.parametrize("distance", range(5))
def test_where_names_are_not_known_the_distance_says_what_differs(distance):
    truth = {"same": distance == 0, "distance": distance, "order": [None, None]}
    spec = load_reward("taxonomy_relations", args={"levels": LEVELS, "levels_decide": "different"})
    said = spec.fn.read_truth(truth)[1]  # type: ignore[attr-defined]
    # order, family, genus; the species, distance 1, is not among them
    wanted = ["SSS", "SSS", "SSD", "SDD", "DDD"][distance]
    assert "".join(said[level][0].upper() for level in LEVELS) == wanted


def test_where_the_levels_end_at_the_class_distance_1_is_the_finest_of_them():
    spec = load_reward("taxonomy_relations", args={"levels": LEVELS})
    said = spec.fn.read_truth({"same": False, "distance": 1})[1]  # type: ignore[attr-defined]
    assert said == {"order": "same", "family": "same", "genus": "different"}


def test_a_level_without_any_truth_is_left_out():
    truth = {"same": False, "order": ["O", "O"], "family": ["F", None], "genus": ["A", "B"]}
    assert relations(["Same", "Same", "Different"], truth)[0]["family"] is None
    with pytest.raises(RewardError, match="`distance` is 0, and `same` is False"):
        relations(["Same"], {**truth, "distance": 0})


words = st.sampled_from(["Same", "Different", "Uncertain", ""])


@given(st.tuples(words, words, words), st.sampled_from(["0", "0.5", "1"]), st.booleans())
def test_no_relations_earn_more_than_the_right_ones(said, answer, same):
    truth = {"same": True, **{level: ["A", "A"] for level in LEVELS}} if same else FAMILIES_DIFFER
    right = ["Same", "Same", "Same"] if same else ["Same", "Different"]
    best = relations(right, truth, str(int(same)))[2]
    assert best == pytest.approx(1.0, abs=1e-12)
    assert relations(said, truth, answer)[2] <= best + 1e-12


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"labels": AGES}, "needs the argument `tag`"),
        ({**CHIMP, "labels": []}, "is not a list of labels"),
        ({**CHIMP, "labels": "Adult"}, "is not a list of labels"),
        ({**CHIMP, "aliases": {"Teen": "Youth"}}, "aliases name 'Youth', which is not a label"),
        ({**CHIMP, "tag": "answer"}, "'answer' is not a usable name"),
        ({**CHIMP, "levels_decide": "always"}, "unknown levels_decide 'always'"),
        ({**CHIMP, "levels_weight": 0.9}, "add up to more than 1"),
        ({**CHIMP, "format_weight": "much"}, "format_weight = 'much' is not a number from 0 to 1"),
        ({**CHIMP, "levels_weight": -0.1}, "levels_weight = -0.1 is not a number from 0 to 1"),
    ],
)
def test_wrong_arguments_are_named(args, words):
    with pytest.raises(RewardError, match=words):
        load_reward("pair_labels", args=args)
