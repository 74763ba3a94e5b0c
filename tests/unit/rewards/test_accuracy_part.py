"""Which part is the accuracy: names, what the recipe says, what the task measures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards import name_accuracy, reward_record
from vlmrl.rewards.base import FUNCTION, RewardSpec, UserReward, accuracy_part, accuracy_words, is_binary, with_accuracy
from vlmrl.tasks.builtin_rewards import load_recorded, load_reward
from vlmrl.types import RewardInput

MINE = RewardSpec("mine.py:f", lambda x: 0.0, {}, {}, user=UserReward("mine.py", "f", "", "vlmrl", {}))
VERL = replace(MINE, user=UserReward("mine.py", "f", "", "verl", {}))


@pytest.mark.parametrize(
    ("parts", "spec", "found"),
    [
        (("score", "acc"), VERL, "acc"),
        (("overall", "format", "accuracy"), MINE, "accuracy"),
        (("acc", "accuracy", "correct"), MINE, "accuracy"),
        (("correct", "acc"), MINE, "acc"),
        (("correct",), MINE, "correct"),
        (("answer", "accuracy_normalized", "Accuracy"), MINE, None),
        (("reward",), MINE, None),
        (("score",), VERL, "score"),
        (("score",), replace(VERL, ranges={"score": (-1.0, 1.0)}), "score"),
        (("score",), replace(VERL, ranges={"score": (0.0, 10.0)}), None),
        (("score",), MINE, None),
        (("score", "format"), VERL, None),
        (("acc", "iou"), replace(MINE, accuracy="iou"), "iou"),
        (("acc",), replace(MINE, accuracy="iou"), None),
        ((), MINE, None),
    ],
)
def test_the_part_that_is_the_accuracy(parts, spec, found):
    assert accuracy_part(parts, spec) == found


NAMED = ("accuracy", "acc", "correct", "accuracy_reward", "reasoning_accuracy_reward", "acc_score", "acc_reward_func")


@pytest.mark.parametrize("name", NAMED)
def test_a_function_by_such_a_name_gives_an_accuracy(name):
    assert FUNCTION.fullmatch(name)


@pytest.mark.parametrize("name", ["correctness_reward", "format_reward", "accuracy_and_format", "inaccuracy", "reward"])
def test_a_function_by_another_name_does_not(name):
    assert not FUNCTION.fullmatch(name)


def test_the_only_number_of_a_trl_function_is_its_accuracy_where_its_name_says_so(scorer):
    source = "def {}(completions, **kw): return [1.0 for _ in completions]"
    assert scorer(source.format("accuracy_reward"), function="accuracy_reward").spec.accuracy == "reward"
    assert scorer(source.format("format_reward"), function="format_reward").spec.accuracy is None


def test_what_the_recipe_names_goes_first_then_the_task_then_the_reward():
    parts, own = {"acc": 0.0, "iou": 0.25}, {"accuracy": 1.0, "brier": 0.1}
    assert with_accuracy(own, parts, MINE) == own
    assert with_accuracy({"brier": 0.1}, parts, MINE) == {"brier": 0.1, "accuracy": 0.0}
    assert with_accuracy(own, parts, replace(MINE, accuracy="iou")) == own, "declared, not named by the recipe"
    assert with_accuracy(own, parts, name_accuracy(MINE, "iou")) == {"accuracy": 0.25, "brier": 0.1}
    assert with_accuracy({}, {"iou": None}, name_accuracy(MINE, "iou")) == {"accuracy": None}
    assert with_accuracy({}, {}, MINE) == {}, "a failed reward has no accuracy"


def test_built_in_rewards_of_an_answer_know_their_part():
    spec = load_reward("exact_match")
    parts = spec(RewardInput("<answer>a</answer>", {"answer": "a"}))
    assert with_accuracy({}, parts, spec) == {"accuracy": 1.0}
    assert name_accuracy(spec, "format").accuracy == "format"
    with pytest.raises(RewardError, match=r"names the part `anser`, which reward `exact_match` does not have") as error:
        name_accuracy(spec, "anser")
    assert error.value.hint == "did you mean `answer`?  its parts: answer, format"


def test_a_part_that_never_comes_is_an_error_of_the_first_call(scorer):
    with scorer("def reward(x): return {'score': 1.0, 'acc': 0.0}") as s:
        s.rewards[0].spec = name_accuracy(s.spec, "corect")
        with pytest.raises(RewardError, match=r"\[reward\] accuracy names the part `corect`, which reward") as error:
            s.score([RewardInput("a")], strict=True)
        assert error.value.hint == "its parts: acc, score"


def test_a_run_remembers_what_its_recipe_named():
    spec = name_accuracy(load_reward("exact_match"), "format")
    record = reward_record(spec, spec.weights)
    assert record["accuracy"] == "format" and load_recorded(record).accuracy == "format"
    assert "accuracy" not in reward_record(load_reward("exact_match"), {})
    assert load_recorded(reward_record(load_reward("exact_match"), {})).accuracy_named is False


def test_accuracies_that_say_nothing_in_between():
    assert is_binary([0.0, 1.0]) and is_binary([-1.0, 1.0, 0.0]) and is_binary([])
    assert not is_binary([0.0, 0.5]) and not is_binary([2.0])


def test_the_words_say_which_part_and_whether_it_is_a_mean():
    assert accuracy_words({}, ["acc"], [0.0, 1.0], MINE) == "the part `acc` of mine.py:f"
    told = accuracy_words({}, ["acc"], [0.5], MINE)
    assert told == "the part `acc` of mine.py:f, which is not only right or wrong: the mean is shown"
    assert accuracy_words({"accuracy": 1.0}, ["acc"], [0.5], MINE) == "" == accuracy_words({}, ["x"], [], MINE)
