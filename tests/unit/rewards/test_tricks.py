"""The tricks that earned something in published rewards (R1-R25): each must earn nothing here, or is repaired.

That they earned it is pinned in test_taxonrl.py, under the same numbers.
"""

from __future__ import annotations

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.base import combine
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

LEVELS = ["order", "family", "genus"]
SAME = {"same": True, "order": ["P", "P"], "family": ["F", "F"], "genus": ["Corvus", "Corvus"]}
ORDERS_DIFFER = {
    "same": False,
    "order": ["Passeriformes", "Piciformes"],
    "family": ["F", "G"],
    "genus": ["Corvus", "Picus"],
}
TAGS = "<order>P; P</order><family>F; F</family><genus>Corvus; Corvus</genus>"
TASK = load_reward("taxonomy", args={"levels": LEVELS})
BASELINE = load_reward("pair_answer", args={})


def earned(response, truth=SAME, reward=TASK, finish="stop"):
    value, _ = combine(reward(RewardInput(response=response, truth=truth, finish=finish)), reward.weights)
    return value


def test_the_honest_right_response_earns_everything():
    assert earned(f"<think>{TAGS}</think><answer>1.0000</answer>") == pytest.approx(1.0, abs=1e-12)
    assert earned("<think>alike</think><answer>1.0000</answer>", {"same": True}, BASELINE) == 1.0


def both(response, truth=SAME):
    return earned(response, truth) == 0.0 and earned(response, truth, BASELINE) == 0.0


def test_r1_two_answers_earn_nothing():
    assert both("<think><answer>1.0000</answer></think><answer>0.0000</answer>")
    assert both(f"<think>{TAGS}<answer>1.0000</answer></think><answer>1.0000</answer>")


def test_r2_two_think_blocks_earn_nothing():
    assert both("<think>a</think>junk<think>b</think><answer>1.0000</answer>")


def test_r3_an_empty_think_earns_nothing():
    assert both("<think></think><answer>1.0000</answer>")
    assert both("<think> \n\t</think><answer>1.0000</answer>")


UNSEEN = [
    "\u00a0",
    "\u200b",
    "\ufeff",
    "\x00",
    "\u202e\u202c",
    "\u3164",
    "\u2800",
    "\ue000\ufe0f"[1:],
    "\ud800",
    "\u00ad",
]


@pytest.mark.parametrize("unseen", UNSEEN)
def test_what_cannot_be_seen_is_neither_a_thought_nor_a_name(unseen):
    assert both(f"<think> {unseen}\n</think><answer>1.0000</answer>")
    assert earned(f"<think>{TAGS.replace('P; P', f'{unseen}; {unseen}')}</think><answer>1</answer>") == 0.0
    form = load_reward("format_tags")
    assert form(RewardInput(f"<think>{unseen}</think><answer>1</answer>"))["format"] == 0.0
    assert form(RewardInput(f"<think>{unseen}x</think><answer>1</answer>"))["format"] == 1.0


def test_a_character_that_cannot_be_seen_makes_no_two_names_of_one():
    twins = TAGS.replace("Corvus; Corvus", "Corvus; Cor\u200bvus\ufeff")
    assert earned(f"<think>{twins}</think><answer>1.0000</answer>") == pytest.approx(1.0, abs=1e-12)
    assert (
        earned("<think><order>P; P\u200b</order></think><answer>0.1</answer>") == 0.0
    )  # it must go on: no level differs


def test_r4_an_answer_out_of_range_or_in_other_digits_earns_nothing():
    assert both(f"<think>{TAGS}</think><answer>7.0000</answer>")
    assert both(f"<think>{TAGS}</think><answer>\u0661.\u0660\u0660\u0660\u0660</answer>")


@pytest.mark.parametrize("same", ["1;sameSpecies;Corvus", None, "1", 2, 0.5, float("nan"), [True]])
def test_r5_a_wrong_truth_is_an_error_and_not_a_zero(same):
    for reward in (TASK, BASELINE):
        with pytest.raises(RewardError, match="same"):
            earned("<think>x</think><answer>1</answer>", {**SAME, "same": same}, reward)


@pytest.mark.parametrize("response", ["1", "1.0000", "<answer>0_1</answer>", "<answer>1e0</answer>"])
def test_r6_an_answer_without_its_tags_or_grammar_earns_nothing(response):
    assert both(response)
    if response.startswith("<"):
        assert both(f"<think>x</think>{response}")


def test_r7_the_default_score_is_proper_so_the_honest_belief_is_the_best_answer():
    grid = [i / 100 for i in range(101)]
    for belief in (0.5, 0.6, 0.9):

        def expected(p, q=belief, rule="brier"):
            from vlmrl.tasks.pairs.reward import answer_score

            return q * answer_score(p, True, rule) + (1 - q) * answer_score(p, False, rule)

        assert max(grid, key=expected) == belief
    assert expected(1.0, 0.6, "truncated_bce") == pytest.approx(0.6, abs=1e-12)  # TaxonRL's pays more for shouting
    assert expected(0.6, 0.6, "truncated_bce") == pytest.approx(0.3270, abs=5e-5)


def test_r8_a_truth_of_true_is_not_matched_as_text():
    assert both("<think>x</think><answer>True</answer>")


def test_r9_garbage_counts_as_zero_and_stays_in_the_mean():
    values = [earned("garbage")] * 9 + [earned(f"<think>{TAGS}</think><answer>1</answer>")]
    assert sum(values) / len(values) == pytest.approx(0.1, abs=1e-12)


def test_r10_no_part_is_a_per_sample_f1():
    assert set(TASK.ranges) == {"format", "answer", *LEVELS}


def test_r11_silence_earns_no_credit_for_absent_levels():
    assert earned("", ORDERS_DIFFER) == 0.0
    assert earned("<think></think><answer>0.0000</answer>", ORDERS_DIFFER) == 0.0
    assert earned("<think>they differ</think><answer>0.0000</answer>", ORDERS_DIFFER) == 0.0
    as_published = load_reward("taxonomy", args={"levels": LEVELS, "complete": False})
    parts = as_published(RewardInput("<think>they differ</think><answer>0.0000</answer>", ORDERS_DIFFER))
    assert [parts[level] for level in LEVELS] == [0.0, 0.0, 0.0]
    wrong_names = "<think><order>A; B</order></think><answer>0.0000</answer>"
    assert [TASK(RewardInput(wrong_names, ORDERS_DIFFER))[level] for level in LEVELS] == [0.0, 0.0, 0.0]
    half_right = "<think><order>Passeriformes; B</order></think><answer>0.0000</answer>"
    assert [TASK(RewardInput(half_right, ORDERS_DIFFER))[level] for level in LEVELS] == [0.5, 0.0, 0.0]
    right = "<think><order>Passeriformes; Piciformes</order></think><answer>0.0000</answer>"
    assert [TASK(RewardInput(right, ORDERS_DIFFER))[level] for level in LEVELS] == [1.0, 1.0, 1.0]


def test_r12_an_echoed_example_earns_nothing():
    echo = f"<think>e.g. <order>Passeriformes; Piciformes</order> {TAGS}</think><answer>1.0000</answer>"
    assert earned(echo) == 0.0


def test_r13_names_are_normalised_but_a_comma_is_not_a_semicolon():
    written = "<order>Order p.; P</order><family>f;F</family><genus>CORVUS.; corvus</genus>"
    assert earned(f"<think>{written}</think><answer>1</answer>") == pytest.approx(1.0, abs=1e-12)
    assert earned("<think><order>P, P</order></think><answer>1</answer>") == 0.0


def test_r14_surplus_names_earn_nothing_and_one_right_name_half():
    assert earned("<think><genus>Corvus; Corvus; Parus; Pica</genus></think><answer>1</answer>") == 0.0
    written = "<order>P; P</order><family>F; F</family><genus>Corvus; Parus</genus>"
    one = RewardInput(f"<think>{written}</think><answer>0.2</answer>", SAME)
    assert TASK(one)["genus"] == 0.5
    assert load_reward("taxonomy", args={"levels": LEVELS, "partial": False})(one)["genus"] == 0.0


@pytest.mark.parametrize("missing", [None, ["", ""], ["nan", "P"], [None, "P"], [float("nan"), "P"]])
def test_r15_a_level_without_truth_is_left_out_and_its_weight_is_spread(missing):
    truth = {**SAME, "order": missing}
    assert TASK(RewardInput(f"<think>{TAGS}</think><answer>1</answer>", truth))["order"] is None
    assert earned(f"<think>{TAGS}</think><answer>1</answer>", truth) == pytest.approx(1.0, abs=1e-12)
    assert earned("<think><order>nan; nan</order></think><answer>1</answer>", truth) < 0.8


def test_r16_tags_that_contradict_the_answer_earn_nothing():
    contradiction = f"<think>{TAGS}</think><answer>0.0000</answer>"
    assert earned(contradiction) == 0.0
    assert earned("<think><order>P; Q</order></think><answer>0.9</answer>") == 0.0
    sweep = load_reward("taxonomy", args={"levels": LEVELS, "consistency": "off"})
    assert earned(contradiction, reward=sweep) == pytest.approx(0.6, abs=1e-12)  # what it would be paid: format, levels
    asked = load_reward("taxonomy", args={"levels": LEVELS, "consistency": "part"})
    assert asked(RewardInput(contradiction, SAME))["consistency"] == 0.0


def test_r17_tags_outside_think_and_truncated_output_earn_nothing():
    assert earned(f"<think>x</think>{TAGS}<answer>1.0000</answer>") == 0.0
    assert earned(f"<think>x</think><answer>1.0000</answer>{TAGS}") == 0.0
    assert earned(f"<think>{TAGS}", finish="length") == 0.0
    assert earned(f"<think>{TAGS}") == 0.0
    assert earned(f"<think>{TAGS}</think><answer>1.0000</answer>", finish="length") == 0.0
    assert earned("<think>x</think><answer>1</answer>", reward=BASELINE, finish="length") == 0.0


AGES = load_reward("pair_labels", args={"tag": "age-group", "labels": ["Infant", "Juvenile", "SubAdult", "Adult"]})
TYPES = load_reward(
    "pair_labels",
    args={"tag": "type", "labels": ["Silverback", "Juvenile", "Infant"], "aliases": {"Juvenil": "Juvenile"}},
)
SPECIES = load_reward(
    "pair_labels",
    args={"tag": "species", "labels": ["Asterias rubens", "Anthenea australiae"], "levels_decide": "different"},
)
RELATIONS = load_reward("taxonomy_relations", args={"levels": LEVELS, "levels_decide": "different"})
FUNGI = load_reward("taxonomy", args={"levels": LEVELS, "levels_decide": "different"})


def tagged(tag, body, answer="1.0000"):
    return f"<think>so <{tag}>{body}</{tag}></think><answer>{answer}</answer>"


def test_r18_a_hyphen_is_no_mistake():
    truth = {"same": True, "age_group": ["Adult", "SubAdult"]}
    for written in ("Adult; SubAdult", "Adult; Sub-Adult", "adult; sub adult"):
        assert earned(tagged("age-group", written), truth, AGES) == pytest.approx(1.0, abs=1e-12)


def test_r19_a_hedge_is_no_species():
    truth = {"same": True, "species": ["Asterias rubens", "Asterias rubens"]}
    hedge = "not Asterias but Anthenea; unlike Asterias, Anthenea australiae"
    assert earned(tagged("species", hedge), truth, SPECIES) == 0.0
    assert earned(tagged("species", "Asterias; Asterias"), truth, SPECIES) == 0.0
    assert earned(tagged("species", "Asterias rubens; asterias_rubens"), truth, SPECIES) == pytest.approx(1, abs=1e-12)


def test_r20_tags_must_match_and_a_misspelt_label_has_an_alias():
    truth = {"same": True, "type": ["Juvenil", "Infant"]}
    assert earned("<think><type>Juvenile; Infant</age-group></think><answer>1</answer>", truth, TYPES) == 0.0
    assert earned(tagged("age-group", "Juvenile; Infant"), truth, TYPES) == 0.0
    assert earned(tagged("type", "juvenile; Infant"), truth, TYPES) == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(RewardError, match="not a label"):
        earned("", {"same": True, "type": ["Juvenile", "M"]}, TYPES)


def test_r21_escaped_tags_earn_nothing():
    escaped = f"<think>{TAGS}</think><answer>1.0000</answer>".replace("<", "\\<").replace(">", "\\>")
    assert both(escaped) and earned(escaped, {"same": True}, BASELINE) == 0.0


@pytest.mark.parametrize("format_weight", [0.0, 0.2, 0.5, 0.6])
def test_r22_the_weights_always_add_up_to_one(format_weight):
    for reward, args in (("taxonomy", {"levels": LEVELS}), ("pair_labels", {"tag": "type", "labels": ["a"]})):
        weights = load_reward(reward, args={**args, "format_weight": format_weight}).weights
        assert sum(weights.values()) == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(RewardError, match="more than 1"):
        load_reward("taxonomy", args={"levels": LEVELS, "format_weight": 0.7})


def test_r23_a_missing_slash_earns_nothing_unless_it_is_asked_for():
    assert both("<think>x<think><answer>1.0000<answer>")
    relaxed = load_reward("pair_answer", args={"relaxed": True})
    assert earned("<think>x<think><answer>1.0000<answer>", {"same": True}, relaxed) == 1.0
    assert earned("<think>x</think><answer><answer>1.0000</answer>", {"same": True}, relaxed) == 0.0


def test_r11_and_r24_relations_do_not_pay_silence_nor_an_unknown_distance():
    truth = {"same": False, "distance": 4}
    assert earned("", truth, RELATIONS) == earned("<think></think><answer>0.0000</answer>", truth, RELATIONS) == 0.0
    assert earned("<think>they differ</think><answer>0.0000</answer>", truth, RELATIONS) == 0.0
    assert earned(tagged("order", "Different", "0.0000"), truth, RELATIONS) == pytest.approx(1.0, abs=1e-12)
    unknown = RELATIONS(RewardInput(tagged("order", "Different", "0.0000"), {"same": False, "distance": None}))
    assert [unknown[level] for level in LEVELS] == [None, None, None]
    with pytest.raises(RewardError, match="distance"):
        earned("", {"same": False, "distance": "samegenera"}, RELATIONS)


def test_r25_the_answer_is_called_answer_and_accuracy_is_not_a_part():
    for reward in (TASK, BASELINE, AGES, RELATIONS):
        assert "answer" in reward.ranges and not any("accura" in part for part in reward.ranges)


def test_uncertain_everywhere_earns_less_than_any_honest_word():
    truth = {"same": False, "distance": 4}
    unsure = "".join(f"<{level}>Uncertain</{level}>" for level in LEVELS)
    said = f"<think>{unsure}</think><answer>0.0000</answer>"
    assert earned(said, truth, RELATIONS) == pytest.approx(0.6, abs=1e-12)  # format and answer, no level


@pytest.mark.parametrize("reward", [TASK, FUNGI])
@pytest.mark.parametrize(
    "response",
    [
        "<think><order>; </order><family>; </family><genus>; </genus></think><answer>1</answer>",
        "<think>&lt;order&gt;P; P&lt;/order&gt;</think><answer>1</answer>",
        "<THINK>x</THINK><ANSWER>1</ANSWER>",
        f"<think>{TAGS}</think><answer>1</answer><answer>",
        f"<think>{TAGS}</think>\u200b<answer>1</answer>",
        f"\ufeff<think>{TAGS}</think><answer>1</answer>",
        f"<think>{TAGS}</think><answer>1\u202e</answer>",
        f"<think>{TAGS}</think><answer>0.99999</answer>",
        f"<think><think>{TAGS}</think></think><answer>1</answer>",
        f"<think>{TAGS.replace('P; P', 'P; P; P')}</think><answer>1</answer>",
        f"<think>{TAGS.replace('P; P', 'P|Q; P|Q')}</think><answer>0.5</answer>".replace("<genus>", "<Genus>"),
        f"<think>{TAGS * 2}</think><answer>1</answer>",
        "<think>" + "x" * 1_000_000,
        "<answer>1</answer>",
        "1",
        "\x00",
    ],
)
def test_further_probes_earn_nothing(response, reward):
    assert earned(response, SAME, reward) == 0.0


def test_every_name_at_once_is_not_paid_for_the_one_that_is_right():
    hedged = TAGS.replace("Corvus; Corvus", "Corvus Pica Parus; Corvus/Pica/Parus")
    parts = FUNGI(RewardInput(f"<think>{hedged}</think><answer>0.5</answer>", SAME))
    assert parts["genus"] == 0.0
