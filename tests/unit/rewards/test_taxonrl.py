"""The profile `taxonrl`: the published rewards, each known flaw (R1 to R25) of theirs kept and pinned by its own test.

The figures were observed on the published functions (max-vkl/TaxonRL at f4b80ac), never on this code.
"""

from __future__ import annotations

import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_batches import score_batch

from vlmrl.errors import RewardError
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.taxonrl.rewards import FUNCTIONS, squeeze
from vlmrl.types import RewardInput

RIGHT = "<think>x</think><answer>1.0000</answer>"
BIRD_SAME = "1;sameSpecies;Corvus;Corvidae;Passeriformes;Corvus;Corvidae;Passeriformes"
BIRD_ORDERS_DIFFER = "0;sameClass;Corvus;Corvidae;Passeriformes;Picus;Picidae;Piciformes"
TAGS = "<order>Passeriformes; Passeriformes</order><family>Corvidae; Corvidae</family><genus>Corvus; Corvus</genus>"
LFW, RELAXED = "lfw:compute_score", "lfw_relax_format:compute_score"
BASIC = "lfw_bird_im_basic:compute_score_gemini"
CONCRETE = "lfw_bird_im_concrete:compute_score_gemini"
FUNGI = "lfw_fungi_im:compute_score_gemini"
CHIMP, GORILLA = "lfw_intermediate:compute_score_gemini", "lfw_intermediate_gorilla:compute_score_gemini"
SEA_STAR = "lfw_sea_star_im:compute_score_gemini"


def one(function, response, ground_truth, format_weight=None):
    return score_batch(function, [(response, ground_truth)], format_weight)[0]


def overall(function, response, ground_truth, format_weight=None):
    """The value in the words of the original, and that the reward gives the same through the scorer."""
    value = one(function, response, ground_truth, format_weight)["overall"]
    spec = load_reward("taxonrl", args={"function": function, "format_weight": format_weight})
    score = Scorer(spec).score([RewardInput(response, {"ground_truth": ground_truth})], strict=True)[0]
    assert score.value == pytest.approx(value, abs=1e-12)
    return value


def near(value):
    return pytest.approx(value, abs=1e-9)


def test_a_hand_worked_score_of_each_weighting():
    # A = 1 + ln 0.9 = 0.8946394843; T = 1; F = 1
    response = f"<think>{TAGS}</think><answer>0.9000</answer>"
    a = 1 + math.log(0.9)
    file = "lfw_bird_im_concrete"
    assert overall(CONCRETE, response, BIRD_SAME) == near(0.4 * a + 0.4 + 0.2)
    assert overall(f"{file}_20p:compute_score_gemini", response, BIRD_SAME) == near(0.6 * a + 0.2 + 0.2)
    assert overall(f"{file}_60p:compute_score_gemini", response, BIRD_SAME) == near(0.2 * a + 0.6 + 0.2)
    assert overall(f"{file}_80p:compute_score_gemini", response, BIRD_SAME) == near(0.1 * a + 0.8 + 0.1)
    assert overall(LFW, response, "1") == near(0.5 * a + 0.5)
    assert overall(LFW, response, "1", 0.2) == near(0.8 * a + 0.2)


def test_r1_the_format_looks_at_the_last_answer_and_the_score_at_the_first():
    assert overall(LFW, "<think><answer>1.0000</answer></think><answer>0.0000</answer>", "1") == near(1.0)


def test_r2_one_format_spans_several_blocks():
    assert one(LFW, "<think>a</think>junk<think>b</think><answer>1.0000</answer>", "1")["format"] == 1.0


def test_r3_empty_thinking_has_the_format():
    assert overall(LFW, "<think></think><answer>1.0000</answer>", "1") == near(1.0)


def test_r4_the_format_takes_any_number_in_any_digits():
    seven = one(LFW, "<think>x</think><answer>7.0000</answer>", "1")
    assert (seven["format"], seven["accuracy"], seven["overall"]) == (1.0, 0.0, near(0.5))
    digits = "<think>x</think><answer>\u0661.\u0660\u0660\u0660\u0660</answer>"
    assert overall(LFW, digits, "1") == near(1.0)


@pytest.mark.parametrize("truth", [BIRD_SAME, None, "", "x", 10**400, float("nan")])
def test_r5_a_ground_truth_that_cannot_be_read_is_a_silent_zero(truth):
    assert one(LFW, RIGHT, truth)["accuracy"] == 0.0


def test_r6_without_a_tag_the_whole_response_is_the_answer():
    assert one(LFW, "1", "1")["accuracy"] == near(1.0)
    assert overall(LFW, "1", "1") == near(0.5)
    assert one(LFW, "<answer>0_1</answer>", "1")["accuracy"] == near(1.0)
    assert one(LFW, "<answer>1e0</answer>", "1")["accuracy"] == near(1.0)


def test_r7_the_truncated_score_pays_extremes_and_is_flat_below_1_over_e():
    def accuracy(p, truth):
        return one(LFW, f"<think>x</think><answer>{p:.4f}</answer>", truth)["accuracy"]

    assert 0.6 * accuracy(1, "1") + 0.4 * accuracy(1, "0") == near(0.6)
    assert 0.6 * accuracy(0.6, "1") + 0.4 * accuracy(0.6, "0") == pytest.approx(0.3270, abs=5e-5)
    assert accuracy(0, "1") == accuracy(0.3678, "1") == 0.0 < accuracy(0.3679, "1")


def test_r8_the_exact_match_fires_only_for_a_bool():
    assert one(LFW, "<think>x</think><answer>True</answer>", True)["accuracy"] == 1.0
    assert one(LFW, "<think>x</think><answer>True</answer>", "True")["accuracy"] == 0.0


def test_r9_answers_that_cannot_be_read_leave_the_denominator():
    scored = score_batch(LFW, [("garbage", "1")] * 9 + [(RIGHT, "1")])
    assert {s["macro_accuracy"] for s in scored} == {s["f1"] for s in scored} == {1.0}


def test_r10_precision_and_f1_are_those_of_a_sample_in_one_kind_of_function_and_of_the_batch_in_the_other():
    perfect = [(f"<think>x</think><answer>{label}.0000</answer>", f"{label}") for label in (0, 1)] * 5
    per_sample = score_batch(FUNGI, perfect)
    assert sum(s["f1"] for s in per_sample) / 10 == sum(s["precision"] for s in per_sample) / 10 == 0.5
    assert "macro_accuracy" not in per_sample[0]
    assert {s["f1"] for s in score_batch("lfw_fungi_im:compute_score", perfect)} == {1.0}


def test_r11_silence_is_paid():
    assert one(CONCRETE, "", BIRD_ORDERS_DIFFER)["taxonomy"] == near(2 / 3)
    assert overall(CONCRETE, "", BIRD_ORDERS_DIFFER) == near(0.4 * 2 / 3)
    zero = "<think></think><answer>0.0000</answer>"
    assert overall(CONCRETE, zero, BIRD_ORDERS_DIFFER) == near(0.4 + 0.4 * 2 / 3 + 0.2)
    assert overall(BASIC, "", BIRD_ORDERS_DIFFER) == near(0.4)
    assert overall(BASIC, zero, BIRD_ORDERS_DIFFER) == near(1.0)


def test_r12_the_first_tag_wins():
    echo = f"<think>e.g. <order>Passeriformes; Piciformes</order>{TAGS}</think><answer>1.0000</answer>"
    assert overall(CONCRETE, echo, BIRD_SAME) == near(0.4 + 0.4 * 2 / 3 + 0.2)


@pytest.mark.parametrize(
    ("right", "written"),
    [("<order>Pass", "<order>Order Pass"), ("Corvus</g", "Corvus.</g"), ("Corvidae; Corvidae", "Corvidae, Corvidae")],
)
def test_r13_names_are_not_normalised(right, written):
    response = f"<think>{TAGS}</think><answer>1.0000</answer>".replace(right, written)
    assert overall(CONCRETE, response, BIRD_SAME) == near(0.4 + 0.4 * 2 / 3 + 0.2)


def test_r14_one_right_name_is_worth_nothing_and_surplus_names_are_ignored():
    assert one(CONCRETE, TAGS.replace("Corvus; Corvus", "Corvus; Pica"), BIRD_SAME)["taxonomy"] == near(2 / 3)
    assert one(CONCRETE, TAGS.replace("Corvus; Corvus", "Corvus; Corvus; Parus; Pica"), BIRD_SAME)["taxonomy"] == 1.0


def test_r15_missing_truth_caps_the_reward_and_nan_is_a_name():
    no_orders = "1;sameSpecies;Corvus;Corvidae;;Corvus;Corvidae;"
    assert overall(CONCRETE, f"<think>{TAGS}</think><answer>1.0000</answer>", no_orders) == near(0.6)
    assert one(CONCRETE, "<order>nan; nan</order>", "1;sameSpecies;;;nan;;;nan")["taxonomy"] == 1.0


@pytest.mark.parametrize(("suffix", "paid"), [("", 0.6), ("_20p", 0.4), ("_60p", 0.8), ("_80p", 0.9)])
def test_r16_right_tags_are_paid_beside_the_wrong_answer(suffix, paid):
    response = f"<think>{TAGS}</think><answer>0.0000</answer>"
    assert overall(f"lfw_bird_im_concrete{suffix}:compute_score_gemini", response, BIRD_SAME) == near(paid)


def test_r17_tags_are_paid_anywhere_and_in_truncated_output():
    assert one(CONCRETE, f"{TAGS}<think>x</think><answer>1.0000</answer>", BIRD_SAME)["overall"] == near(0.8)
    assert overall(CONCRETE, f"<think>{TAGS}", BIRD_SAME) == near(0.4)


def test_r18_a_hyphen_makes_both_ages_unreadable():
    truth = "1;Adult;M;SubAdult;M"
    for written, paid in (("Adult; SubAdult", 1.0), ("Adult; Sub-Adult", 0.0), ("Adult; Sub Adult", 0.5)):
        assert one(CHIMP, f"<age-group>{written}</age-group>", truth)["age_group"] == paid


def test_r19_species_are_found_by_what_they_contain():
    hedge = "<species>not Asterias but Anthenea; unlike Asterias, Anthenea australiae</species>"
    assert one(SEA_STAR, hedge, "1;Asru;Asru")["species"] == 1.0
    assert one(SEA_STAR, "<species>A.\trubens; arubens</species>", "1;Asru;Asru")["species"] == 0.5


def test_r20_gorilla_tags_may_differ_and_four_fields_are_misread():
    assert one(GORILLA, "<type>Adult; Infant</age-group>", "1;Adult;Infant")["age_group"] == 1.0
    assert one(GORILLA, "<type>Adult; M</type>", "1;Adult;M;Infant")["age_group"] == 1.0
    assert one(GORILLA, "<type>Adult; Infant</type>", "1;Adult;M;Infant;F")["age_group"] == 1.0
    assert one(GORILLA, "<type>Juvenile; Juvenile</type>", "1;Juvenil;Juvenil")["age_group"] == 0.0


def test_r21_escaped_tags_earn_nothing():
    response = r"\<think\>\<order\>O; O\</order\>\</think\>\<answer\>1.0000\</answer\>"
    assert overall(FUNGI, response, "1;F;G;O;S;F;G;O;S") == 0.0


def test_r22_hard_weights_add_up_to_more_than_one():
    response = "<think><species>Image1=Asru; Image2=Asru</species></think><answer>1.0000</answer>"
    assert overall("lfw_sea_star_im:compute_score_chatgpt", response, "1;Asru;Asru", 0.5) == near(1.3)


def test_r23_the_relaxed_format_is_arbitrary():
    assert overall(RELAXED, "<think>x<think><answer>1.0000<answer>", "1") == near(1.0)
    assert overall(RELAXED, "<think>x</think><answer><answer>1.0000</answer>", "1") == 0.0
    assert one(RELAXED, "<think><answer>1.0000</answer>", "1")["format"] == 0.0


def test_r24_an_unknown_distance_counts_as_same_class():
    truth = "0;samegenera;" + BIRD_ORDERS_DIFFER.split(";", 2)[2]
    assert overall(BASIC, "<think></think><answer>0.0000</answer>", truth) == near(1.0)


def test_r25_the_parts_keep_their_published_names():
    assert set(one(LFW, "", "1")) == {
        "overall",
        "format",
        "accuracy",
        "precision",
        "f1",
        "acutal_accuracy",
        "macro_accuracy",
    }
    assert set(one(GORILLA, "", "1")) == {
        "overall",
        "format",
        "accuracy",
        "age_group",
        "precision",
        "f1",
        "acutal_accuracy",
    }


def test_tags_are_read_in_any_case_and_white_space_around_them_is_gone():
    assert one(CONCRETE, "< ORDER > Passeriformes ; Passeriformes\n</ order >", BIRD_SAME)["taxonomy"] == near(1 / 3)
    assert one(LFW, "\n<think>x</think>\n\n< answer > 1.0000 </ answer >\n", "1")["overall"] == near(1.0)


@given(st.text(st.sampled_from("<>/ab \t\n\u00a0\u2028\x1c"), max_size=40))
def test_white_space_goes_as_by_the_plain_rule(text):
    assert squeeze(text) == re.sub(r"\s*([<>/])\s*", r"\1", text).strip()


def test_the_typed_truth_is_written_in_the_layout_of_the_function():
    truth = {
        "same": True,
        "order": ["O", "O"],
        "family": ["F", "F"],
        "genus": ["G", "G"],
        "species": ["S", "S"],
    }
    response = "<think><order>O; O</order><family>F; F</family><genus>G; G</genus></think><answer>1.0000</answer>"
    for function, layout in ((FUNGI, None), (CONCRETE, None), (LFW, None), (FUNGI, "fungi")):
        spec = load_reward("taxonrl", args={"function": function, "layout": layout})
        assert Scorer(spec).score([RewardInput(response, truth)], strict=True)[0].value == near(1.0)
    wrong = load_reward("taxonrl", args={"function": FUNGI, "layout": "bird"})
    assert wrong(RewardInput(response, truth))["taxonomy"] == 0.0


def test_the_text_of_the_row_goes_before_its_typed_truth():
    spec = load_reward("taxonrl", args={"function": LFW})
    assert spec(RewardInput(RIGHT, {"same": False, "ground_truth": "1"}))["accuracy"] == near(1.0)
    assert spec(RewardInput(RIGHT, {"same": True, "ground_truth": None}))["accuracy"] == near(1.0)
    assert spec(RewardInput(RIGHT, {"ground_truth": "0.7"}))["accuracy"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "piece",
    ["<answer>", "<think>", "<species>Image1=a;", "<species>", "<order>", " ", "\n", ";", "<type>a", "1", "</think>"],
)
def test_time_is_linear_in_the_length_of_the_response(function, piece):
    start = time.process_time()
    score_batch(function, [(piece * (200_000 // len(piece)), BIRD_SAME)])
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"function": "lfw_fungi:compute_score"}, "TaxonRL has published no reward `lfw_fungi:compute_score`"),
        ({"function": LFW, "layout": "fungus"}, "unknown layout `fungus`"),
        ({"function": LFW, "format_weight": "half"}, "format_weight is 'half', not a number"),
        ({}, "needs the argument `function`"),
    ],
)
def test_wrong_arguments_are_named(args, words):
    with pytest.raises(RewardError, match=words):
        load_reward("taxonrl", args=args)
