"""Tests of rows known by their truth alone, of how tables hold truths, and of where a reward is found by its name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from vlmrl.data.doctor import RowLabels
from vlmrl.errors import RewardError
from vlmrl.reward_check.response_tables import TruthRule
from vlmrl.rewards import GENERAL
from vlmrl.rewards import load_reward as load_general
from vlmrl.tasks import TASKS, find_task, kind_of, make_task
from vlmrl.tasks.builtin_rewards import REWARDS, load_reward, takes_any_truth
from vlmrl.tasks.pairs.task import PAIRS, side_of
from vlmrl.tasks.taxonrl.task import SPECIES_PAIRS
from vlmrl.tasks.truth_kinds import TEXTS
from vlmrl.types import Row

PAIR = {"same": False, "distance": 2, "genus": ["Corvus", "Pica"]}
BIRD = {**PAIR, "species": ["Corvus corax", "Pica pica"]}


@pytest.mark.parametrize(
    ("truth", "kind"),
    [({"answer": 3}, TEXTS), ({}, TEXTS), (PAIR, PAIRS), (BIRD, SPECIES_PAIRS), ({"same": 1, "species": None}, PAIRS)],
)
def test_rows_are_known_by_their_truth(truth: dict[str, Any], kind: Any) -> None:
    assert kind_of(truth) is kind


@pytest.mark.parametrize(
    ("answer", "same", "side"),
    [
        ("0.9", True, True),
        ("0.9", False, False),
        ("0.1", False, True),
        ("0.5", True, None),
        ("1.2", True, None),
        ("nan", True, None),
        ("-0.2", False, None),
        ("yes", True, None),
        ("0.9", "yes", None),
    ],
)
def test_a_probability_is_on_one_side_of_one_half_or_says_nothing(answer: str, same: Any, side: bool | None) -> None:
    assert side_of({"same": same}, answer) is side


def test_the_doctor_counts_what_the_rows_ask_for() -> None:
    def labels(truth: dict[str, Any], **columns: Any) -> RowLabels:
        return kind_of(truth).labels(Row("p", "", "", truth, (), columns))

    assert labels({"answer": 3}) == RowLabels("3") and labels({"answer": [3]}) == RowLabels(None)
    assert labels(PAIR) == RowLabels("different", 2)
    assert labels(BIRD) == RowLabels("different", 2, "species", ("Corvus corax", "Pica pica"))
    assert labels(BIRD, individuals=["a", "b"]) == RowLabels("different", 2, "individual", ("a", "b"))
    assert labels({"same": True}, individuals=["a", None]) == RowLabels("same", None, "individual", ("a",))


def test_arguments_of_rewards_come_from_the_truth() -> None:
    assert kind_of(BIRD).arguments(BIRD) == {"levels": ["genus", "species"]}
    assert kind_of({"answer": 3}).arguments({"answer": 3}) == {}


def test_every_task_says_how_a_table_holds_its_truths_and_can_be_sent_to_a_process() -> None:
    for name in TASKS:
        form = find_task(name).truth_form(PAIR, ["genus", "response"])
        sent = pickle.loads(pickle.dumps(TruthRule(name, form)))
        assert sent.read(BIRD, {}) == TruthRule(name, form).read(BIRD, {})
    assert find_task("pairs").truth_form(PAIR, ["genus", "x"]).fields == ("same", "distance", "genus")
    bird = find_task("bird").truth_form({}, [])
    assert bird.fields[:2] == ("same", "distance") and bird.read is not None and bird.write is not None
    line = bird.write({"same": False, "distance": 2, "genus": ["Corvus", "Pica"], "family": None, "order": None})
    assert bird.read(line)["genus"] == ["Corvus", "Pica"]


def test_a_plain_value_is_the_answer_of_a_task_without_fields_of_its_own() -> None:
    assert TruthRule("table").read(4, {}) == ({"answer": 4}, "", "")
    assert TruthRule().read(4, {}) == ({"answer": 4, "ground_truth": 4}, "", "")
    assert TruthRule("table").read(None, {})[1] == "the ground truth is None, not a mapping of truth fields"


def test_rewards_of_tasks_are_found_by_name_above_the_rewards_themselves() -> None:
    assert "taxonomy" in REWARDS and "taxonomy" not in GENERAL and REWARDS.keys() > GENERAL.keys()
    assert load_reward("taxonomy", args={"levels": ["a"]}).name == "taxonomy"
    with pytest.raises(RewardError, match="unknown reward `taxonomy`"):
        load_general("taxonomy", args={"levels": ["a"]})
    assert [load_reward(name).version for name in ("pair_answer", "exact_match")] == [1, 2]


@pytest.mark.parametrize(
    ("name", "lenient"),
    [
        ("taxonrl", True),
        ("profile:taxonrl", True),
        ("taxonomy", False),
        ("profile:default", False),
        (None, False),
        ("mine.py:score", False),
    ],
)
def test_a_reward_says_whether_it_takes_any_truth(name: str | None, lenient: bool) -> None:
    assert takes_any_truth(name) is lenient


def test_tasks_bring_their_own_kind() -> None:
    assert make_task("fungi", {}).kind is not None and make_task("table", {}).kind is None
    assert make_task("digits", {"name": "d", "levels": ["loop", "digit"]}).template_file == "tasks/digits/prompt.jinja"
    assert make_task("bird", {}, "im_basic").template_file == "tasks/taxonrl/bird/im_basic.jinja"
