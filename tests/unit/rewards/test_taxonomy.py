from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.base import combine, split_result
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.pairs.reward import answer_score, level_parts
from vlmrl.types import RewardInput

TWO = ("loop", "digit")
SAME_LOOP = {"same": False, "distance": 1, "loop": ["yes", "yes"], "digit": ["6", "8"]}


def score(response, truth, **args):
    spec = load_reward("taxonomy", args={"levels": list(TWO), **args})
    parts = spec(RewardInput(response, truth))
    return parts, combine(parts, spec.weights)[0]


def truth_of(truth, level):
    return load_reward("taxonomy", args={"levels": [level]}).fn.read_truth(truth)  # type: ignore[attr-defined]


def test_a_hand_worked_score():
    response = "<think><loop>yes; yes</loop><digit>6; 9</digit></think><answer>0.2</answer>"
    parts, value = score(response, SAME_LOOP)
    assert parts == {"format": 1.0, "answer": 1 - 0.2**2, "loop": 1.0, "digit": 0.5}
    # 0.2 * 1 + 0.4 * 0.96 + 0.2 * 1 + 0.2 * 0.5 = 0.2 + 0.384 + 0.2 + 0.1
    assert value == pytest.approx(0.884, abs=1e-12)


def test_a_hand_worked_truncated_cross_entropy():
    # 1 + ln 0.9 = 1 - 0.1053605 = 0.8946395;  p = 0.3678 < 1/e: the cross-entropy is above 1, so nothing
    assert answer_score(0.9, True, "truncated_bce") == pytest.approx(0.8946394843421738, abs=1e-15)
    assert answer_score(0.1, False, "truncated_bce") == pytest.approx(0.8946394843421738, abs=1e-15)
    assert answer_score(0.3678, True, "truncated_bce") == 0.0
    assert answer_score(0.0, True, "truncated_bce") == 0.0
    assert answer_score(1.0, True, "truncated_bce") == 1.0


@pytest.mark.parametrize(
    ("stated", "truth", "wanted"),
    [
        # all the same: every level must be named
        ({"a": ("x", "x"), "b": ("y", "y")}, {"a": ("x", "x"), "b": ("y", "y")}, {"a": 1.0, "b": 1.0}),
        ({"a": ("x", "x"), "b": None}, {"a": ("x", "x"), "b": ("y", "y")}, {"a": 1.0, "b": 0.0}),
        # the pair parts at a: b must be absent, and a must be right
        ({"a": ("x", "z"), "b": None}, {"a": ("x", "z"), "b": ("y", "w")}, {"a": 1.0, "b": 1.0}),
        ({"a": ("x", "z"), "b": ("y", "w")}, {"a": ("x", "z"), "b": ("y", "w")}, {"a": 1.0, "b": 0.0}),
        ({"a": ("z", "x"), "b": None}, {"a": ("x", "z"), "b": ("y", "w")}, {"a": 0.0, "b": 0.0}),
        ({"a": ("x", "q"), "b": None}, {"a": ("x", "z"), "b": ("y", "w")}, {"a": 0.5, "b": 0.0}),
        ({"a": ("x", "x"), "b": None}, {"a": ("x", "z"), "b": ("y", "w")}, {"a": 0.5, "b": 0.0}),
        # unknown levels do not apply, wherever they stand
        ({"a": None, "b": ("y", "w")}, {"a": None, "b": ("y", "w")}, {"a": None, "b": 1.0}),
        ({"a": ("x", "z"), "b": None}, {"a": ("x", "z"), "b": None}, {"a": 1.0, "b": None}),
    ],
)
def test_level_rules(stated, truth, wanted):
    assert level_parts(stated, truth, ("a", "b"), partial=True) == wanted


def test_credit_for_absence_goes_all_the_way_down():
    truth = {"a": ("x", "x"), "b": ("y", "z"), "c": ("p", "q"), "d": ("r", "s")}
    stated = {"a": ("x", "x"), "b": ("y", "z"), "c": None, "d": None}
    assert level_parts(stated, truth, "abcd", partial=True) == {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    stated["c"] = ("p", "q")
    assert level_parts(stated, truth, "abcd", partial=True) == {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0}


def test_a_bet_on_two_ends_earns_what_the_first_of_them_earns_at_most():
    """Whatever the truth is, stating more below names that differ never pays: with all chains over a small taxonomy."""
    leaves = [("A", "a1", "x"), ("A", "a1", "y"), ("A", "a2", "z"), ("B", "b", "w")]
    truths = [dict(zip("ofg", zip(*pair, strict=True), strict=True)) for pair in product(leaves, leaves)]
    pairs = [[None, *product(sorted({leaf[i] for leaf in leaves}), repeat=2)] for i in range(3)]
    bets = 0
    for chain in product(*pairs):
        end = next((i for i, pair in enumerate(chain) if pair is not None and pair[0] != pair[1]), 2)
        if chain[end + 1 :] == (None,) * (2 - end):
            continue
        bets += 1
        said = dict(zip("ofg", chain, strict=True))
        honest = {level: pair if i <= end else None for i, (level, pair) in enumerate(said.items())}
        for truth in truths:
            both, one = (level_parts(stated, truth, "ofg", partial=True) for stated in (said, honest))
            assert all(both[level] <= one[level] for level in "ofg"), (said, truth)
    # 2 of the 4 order pairs differ, and then any of 10 * 17 - 1 may follow; else (3) 6 of 9 family pairs and 16 genera
    assert bets == 2 * 169 + 3 * 6 * 16


def test_weights_add_up_to_one_for_any_number_of_levels():
    for n in range(1, 7):
        levels = [f"level{i}" for i in range(n)]
        for consistency in ("gate", "part", "off"):
            weights = load_reward("taxonomy", args={"levels": levels, "consistency": consistency}).weights
            assert sum(weights.values()) == pytest.approx(1.0, abs=1e-12)
            assert weights["format"] == 0.2 and weights["answer"] == 0.4


@pytest.mark.parametrize(("levels_weight", "answer"), [(0.2, 0.6), (0.4, 0.4), (0.6, 0.2), (0.8, 0.0), (0, 0.8)])
def test_the_share_of_the_levels_is_one_parameter_and_the_answer_gets_the_rest(levels_weight, answer):
    weights = load_reward("taxonomy", args={"levels": TWO, "levels_weight": levels_weight}).weights
    assert weights == pytest.approx(
        {"format": 0.2, "answer": answer, "loop": levels_weight / 2, "digit": levels_weight / 2}, abs=1e-12
    )
    assert load_reward("pair_answer", args={"format_weight": 0.5}).weights == {"format": 0.5, "answer": 0.5}


def test_levels_above_the_class_decide_in_one_direction_only():
    genus = {"same": False, "loop": ["yes", "yes"], "digit": ["6", "6"]}
    names = "<think><loop>yes; yes</loop><digit>{}</digit></think><answer>{}</answer>"
    for said, p, paid in (("6; 6", 0.1, True), ("6; 6", 0.9, True), ("6; 8", 0.1, True), ("6; 8", 0.9, False)):
        value = score(names.format(said, p), genus, levels_decide="different")[1]
        assert (value > 0) is paid
    with pytest.raises(RewardError, match="levels say the opposite"):
        score("x", {**SAME_LOOP, "same": True}, levels_decide="different")


REPAIRABLE = "<think><loop>yes; yes</loop><digit>6; 8</digit><think><answer>0.1<answer>"


def test_the_relaxed_format_repairs_what_it_lists_and_says_so():
    assert score(REPAIRABLE, SAME_LOOP)[1] == 0
    spec = load_reward("taxonomy", args={"levels": TWO, "relaxed": True})
    parts, note, *_ = split_result(spec.fn(RewardInput(REPAIRABLE, SAME_LOOP)))
    assert parts["format"] == parts["repaired"] == parts["digit"] == 1.0
    assert note == "the second <think> is read as </think>; the second <answer> is read as </answer>"
    assert "repaired" not in spec.weights and spec.ranges["repaired"] == (0.0, 1.0)
    strict = REPAIRABLE.replace("<think><ans", "</think><ans").removesuffix("<answer>") + "</answer>"
    parts, note, *_ = split_result(spec.fn(RewardInput(strict, SAME_LOOP)))
    assert (parts["format"], parts["repaired"], note) == (1.0, 0.0, "")


@pytest.mark.parametrize(
    "broken",
    [
        "<think>x<think><answer><answer>0.1<answer>",
        "<think>x<think>y</think><answer>0.1</answer>",
        "<think><think>x<answer>0.1</answer>",
        "<think>x<think><answer>0.1",
        "<think>x<answer>0.1<answer>",
        "think>x<think><answer>0.1<answer>",
        "<think>x</think><answer>0.1<answer>.",
    ],
)
def test_the_relaxed_format_repairs_nothing_else(broken):
    spec = load_reward("pair_answer", args={"relaxed": True})
    parts = spec(RewardInput(broken, {"same": False}))
    assert set(parts.values()) == {0.0}


def test_a_part_consistency_takes_a_quarter_of_the_share_of_the_levels():
    weights = load_reward("taxonomy", args={"levels": TWO, "consistency": "part"}).weights
    expected = {"format": 0.2, "answer": 0.4, "loop": 0.15, "digit": 0.15, "consistency": 0.1}
    assert weights == pytest.approx(expected, abs=1e-12)


def test_long_tags_are_not_remembered():
    reward = load_reward("taxonomy", args={"levels": TWO}).fn
    for body in ("yes; yes", "x" * 10_000 + "; y"):
        reward(RewardInput(f"<think><loop>{body}</loop></think><answer>0.5</answer>", SAME_LOOP))
    assert reward._readers["loop"].cache_info().currsize == 1  # type: ignore[attr-defined]


def test_consistency_as_a_part():
    names = "<think><loop>yes; yes</loop><digit>6; 8</digit></think>"
    agreeing, _ = score(f"{names}<answer>0.1</answer>", SAME_LOOP, consistency="part")
    opposite, _ = score(f"{names}<answer>0.8</answer>", SAME_LOOP, consistency="part")
    early = "<think><loop>yes; yes</loop></think><answer>0.8</answer>"
    undecided, _ = score(early, SAME_LOOP, consistency="part", complete=False)
    broken, _ = score("hm", SAME_LOOP, consistency="part")
    assert [p["consistency"] for p in (agreeing, opposite, undecided, broken)] == [1.0, 0.0, None, 0.0]
    assert opposite["format"] == 1.0 and opposite["digit"] == 1.0


@pytest.mark.parametrize(
    ("tags", "problem"),
    [
        ("", "<loop> is missing although no level above it differs"),
        ("<loop>yes; yes</loop>", "<digit> is missing although no level above it differs"),
        ("<digit>6; 8</digit>", "<loop> is missing although no level above it differs"),
        ("<loop>yes; no</loop>", ""),
        ("<loop>yes; yes</loop><digit>6; 8</digit>", ""),
        ("<loop>yes; no</loop><digit>6; 8</digit>", ""),
    ],
)
def test_a_response_must_go_down_until_two_names_differ(tags, problem):
    response = f"<think>so {tags}</think><answer>0.5</answer>"
    parts, value = score(response, SAME_LOOP)
    assert (parts["format"], value == 0) == (float(not problem), bool(problem))
    spec = load_reward("taxonomy", args={"levels": list(TWO)})
    assert spec.fn(RewardInput(response, SAME_LOOP))["note"] == problem  # type: ignore[call-overload, index]
    assert score(response, SAME_LOOP, complete=False)[0]["format"] == 1.0


def test_an_answer_of_one_half_contradicts_nothing():
    names = "<think><loop>yes; yes</loop><digit>6; 8</digit></think>"
    assert score(f"{names}<answer>0.5</answer>", SAME_LOOP)[0]["format"] == 1.0
    assert score(f"{names}<answer>0.5001</answer>", SAME_LOOP)[0]["format"] == 0.0


def test_levels_that_do_not_decide_cannot_contradict():
    truth = {"same": False, "age": ["adult", "adult"]}
    response = RewardInput("<think><age>adult; adult</age></think><answer>0</answer>", truth)
    spec = load_reward("taxonomy", args={"levels": ["age"], "levels_decide": False})
    assert spec(response) == {"format": 1.0, "answer": 1.0, "age": 1.0}
    with pytest.raises(RewardError, match="levels say the opposite"):
        load_reward("taxonomy", args={"levels": ["age"]})(response)


def test_a_truth_of_the_wrong_shape_is_an_error():
    for value in ("a; b", ["a"], ["a", "b", "c"], 5, [["a"], "b"]):
        with pytest.raises(RewardError, match="two names"):
            truth_of({"same": True, "loop": value}, "loop")
    with pytest.raises(RewardError, match="levels say the opposite"):
        truth_of({"same": True, "loop": ["yes", "no"]}, "loop")


def test_numbers_are_accepted_as_names():
    assert truth_of({"same": True, "digit": [7, 7]}, "digit") == (True, {"digit": ("7", "7")})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "needs the argument `levels`"),
        ({"levels": []}, "cannot be used"),
        ({"levels": ["answer"]}, "'answer' is not a usable name"),
        ({"levels": ["a", "a"]}, "cannot be used"),
        ({"levels": ["a b"]}, "'a b' is not a usable name"),
        ({"levels": ["a"], "answer": "log"}, "unknown answer rule 'log'"),
        ({"levels": ["a"], "consistency": "maybe"}, "unknown consistency rule"),
        ({"levels": ["a"], "partal": True}, "takes no argument `partal`"),
    ],
)
def test_wrong_arguments_are_named(args, words):
    with pytest.raises(RewardError, match=words):
        load_reward("taxonomy", args=args)
    with pytest.raises(RewardError, match="did you mean `taxonomy`"):
        load_reward("taxonmy", args={})


def test_what_a_response_says_is_read_without_a_truth():
    reward: Any = load_reward("taxonomy", args={"levels": ["order", "genus"], "relaxed": True}).fn
    equal, differ = "<order>a; a</order><genus>b; b</genus>", "<order>a; c</order>"
    said = reward.read(f"<think>{equal}</think><answer>0.9</answer>")
    assert said == ("", 0.9, {"order": ("a", "a"), "genus": ("b", "b")}, True, "")
    said = reward.read(f"<think>{differ}<think><answer>0.5</answer>")
    assert (said.problem, said.stated, said.agrees) == ("", {"order": ("a", "c")}, True)
    assert said.repair == "the second <think> is read as </think>"
    said = reward.read(f"<think>{differ}</think><answer>0.9</answer>")  # readable, and contradicts itself
    assert "contradicts" in said.problem and (said.confidence, said.agrees) == (0.9, False)
    for text in ("", f"<think>{differ}</think>", "<think><order>a</order></think><answer>0.9</answer>"):
        said = reward.read(text)
        assert said.problem and (said.confidence, said.stated, said.agrees) == (None, {}, None)


@pytest.mark.parametrize("key", ["levels_weight", "levels", "partial", "consistency", "aliases"])
def test_the_baseline_says_that_it_has_no_levels(key):
    with pytest.raises(RewardError, match=f"takes no argument `{key}`: .* has no levels") as found:
        load_reward("pair_answer", args={key: 0.4})
    assert found.value.hint is not None and "taxonomy" in found.value.hint
    with pytest.raises(RewardError, match="takes no argument `format_wieght`") as found:
        load_reward("pair_answer", args={"format_wieght": 0.4})
    assert found.value.hint is not None and "did you mean `format_weight`?" in found.value.hint


@pytest.mark.parametrize("written", ["Image1=6; Image2=8", "image 1: 6; image 2: 8", "IMAGE1 = 6 ;Image 2=8."])
def test_the_images_may_be_named_before_the_names(written):
    parts, value = score(f"<think><loop>yes; yes</loop><digit>{written}</digit></think><answer>0</answer>", SAME_LOOP)
    assert value == pytest.approx(1.0) and set(parts.values()) == {1.0}
    # both names are equal, so that the answer agrees with them
    same = {"same": True, "loop": ["yes", "yes"], "digit": ["6", "6"]}
    text = "<think><loop>Image1=yes; Image2=yes</loop><digit>Image1=6; Image2=6</digit></think><answer>1</answer>"
    assert score(text, same)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("written", ["Image2=6; Image1=8", "6; Image2=8", "Image1=6; 8", "Image1=; Image2=8"])
def test_images_that_are_named_in_another_way_break_the_format_and_the_note_says_so(written):
    response = f"<think><loop>yes; yes</loop><digit>{written}</digit></think><answer>0</answer>"
    assert score(response, SAME_LOOP)[1] == 0
    _, note, *_ = split_result(load_reward("taxonomy", args={"levels": list(TWO)}).fn(RewardInput(response, SAME_LOOP)))
    assert "<digit> does not read" in note or "<digit> holds an empty name" in note
