"""Outcomes of single answers, by hand; what is made of many is in tests/unit/evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from domain_builders import TRUTHS, write_dataset

from vlmrl.errors import RewardError
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.schema import Data, Reward
from vlmrl.rewards.base import UNSCORED
from vlmrl.tasks import make_task
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.source import Source, open_source
from vlmrl.types import RewardInput


def outcome(task: str, variant: str, text: str, **truth: Any) -> dict[str, float | None]:
    return dict(make_task(task, {}, variant).outcome(RewardInput(text, TRUTHS[task] | truth), UNSCORED))


def answer(p: str, **tags: str) -> str:
    inside = "".join(f"<{tag.replace('_', '-')}>{body}</{tag.replace('_', '-')}>" for tag, body in tags.items())
    return f"<think>I see. {inside}</think>\n<answer>{p}</answer>"


def test_a_baseline_has_the_numbers_of_its_probability_and_no_others() -> None:
    assert outcome("whale", "baseline", answer("0.25")) == {
        "accuracy": 1.0,
        "brier": 0.0625,
        "confidence": 0.25,
        "label": 0.0,
        "parse_failure": 0.0,
    }
    assert outcome("human", "baseline", answer("0.5"))["accuracy"] == 0.0
    assert outcome("human", "baseline", answer("7")) == {
        "accuracy": 0.0,
        "brier": 1.0,
        "confidence": None,
        "label": 1.0,
        "parse_failure": 1.0,
    }


def test_levels_count_down_to_the_first_that_truly_differs() -> None:
    text = answer("0.1", order="boletales; Boletales", family="Boletaceae; Suillaceae", genus="A; B")
    assert outcome("fungi", "im", text) == {
        "accuracy": 1.0,
        "brier": pytest.approx(0.01),
        "confidence": 0.1,
        "label": 0.0,
        "parse_failure": 0.0,
        "accuracy/order": 1.0,
        "accuracy/family": 0.0,
        "accuracy/genus": 0.0,
        "consistent": 1.0,
    }
    text = answer("0.1", order="Passeriformes; Piciformes", family="A; B")
    found = outcome("bird", "im_concrete", text)
    assert (found["accuracy/order"], found["accuracy/family"], found["accuracy/genus"]) == (1.0, None, None)
    found = outcome("bird", "im_concrete", text, order=[None, "Piciformes"])
    assert (found["accuracy/order"], found["accuracy/family"], found["accuracy/genus"]) == (None, 0.0, None)


def test_an_answer_that_stops_early_is_measured_though_it_earns_nothing() -> None:
    found = outcome("fungi", "im", answer("0.1", order="Boletales; Boletales"))
    assert (found["accuracy"], found["accuracy/order"], found["accuracy/family"]) == (1.0, 1.0, 0.0)
    assert found["parse_failure"] == 0.0 and found["consistent"] is None


def test_equal_levels_decide_nothing_and_a_level_that_differs_means_different() -> None:
    equal = {"order": "A; A", "family": "B; B", "genus": "C; C"}
    assert outcome("fungi", "im", answer("0.1", **equal))["consistent"] is None
    assert outcome("fungi", "im", answer("0.9", **equal))["consistent"] is None
    assert outcome("fungi", "im", answer("0.9", **equal | {"genus": "C; D"}))["consistent"] == 0.0
    assert outcome("fungi", "im", answer("0.2", **equal | {"genus": "C; D"}))["consistent"] == 1.0
    assert outcome("fungi", "im", "garbage")["consistent"] is None


def test_verdicts_are_right_or_wrong_and_uncertain_is_wrong() -> None:
    text = answer("0.1", order="same", family="Uncertain", genus="Different")
    found = outcome("bird", "im_basic", text, order=["A", "A"], family=["B", "B"], genus=["C", "D"], distance=2)
    assert [found[f"accuracy/{name}"] for name in ("order", "family", "genus")] == [1.0, 0.0, 1.0]
    assert found["consistent"] == 1.0
    unknown = {"order": None, "family": None, "genus": None, "distance": 3}
    found = outcome("bird", "im_basic", answer("0.9", order="Same", family="Different"), **unknown)
    assert [found[f"accuracy/{name}"] for name in ("order", "family", "genus")] == [1.0, 1.0, None]
    assert (found["consistent"], found["accuracy"]) == (0.0, 0.0)


@pytest.mark.parametrize(("family", "right"), [(["A", "B"], 1.0), (["A", "A"], 0.0)])
def test_a_level_left_out_below_different_is_different_for_the_reward_and_the_metric(family, right) -> None:
    """Order: the same; said to differ. What is said of family, without a word, is right where it truly differs."""
    truth = {"order": ["O", "O"], "family": family, "genus": ["C", "D"], "distance": None}
    text = answer("0.1", order="Different")
    found = outcome("bird", "im_basic", text, **truth)
    task = make_task("bird", {}, "im_basic")
    assert task.reward is not None
    paid = load_reward(task.reward, args=task.profiles["default"][1]).fn(RewardInput(text, TRUTHS["bird"] | truth))
    assert (found["accuracy/order"], paid["order"]) == (0.0, 0.0)
    assert (found["accuracy/family"], paid["family"]) == (right, right)


def test_labels_count_as_a_pair_and_one_by_one() -> None:
    found = outcome("chimp", "im", answer("0.1", age_group="sub-adult; Adult"))
    assert (found["accuracy/age_group"], found["label_accuracy/age_group"]) == (0.0, 0.5)
    assert "consistent" not in found  # one animal grows older: its labels may differ
    swapped = outcome("chimp", "im", answer("0.1", age_group="Infant; SubAdult"))
    assert swapped["label_accuracy/age_group"] == 0.0
    named = outcome("chimp", "im_named", answer("0.1", age_group="Image1=SubAdult; Image2=Infant"))
    assert (named["accuracy/age_group"], named["label_accuracy/age_group"]) == (1.0, 1.0)
    assert outcome("gorilla", "im", answer("0.9"))["label_accuracy/type"] == 0.0
    found = outcome("gorilla", "im", answer("0.9", type="Blackback; Silverbeck"))
    assert (found["parse_failure"], found["label_accuracy/type"], found["accuracy"]) == (1.0, 0.0, 0.0)
    found = outcome("gorilla", "im", answer("0.9", type="Blackback; Silverback"), type=["Blackback", None])
    assert found["label_accuracy/type"] is None


def test_two_species_of_sea_stars_are_two_animals() -> None:
    two = answer("0.9", species="Asterias rubens; Anthenea australiae")
    assert outcome("sea_star", "im", two)["consistent"] == 0.0
    one = answer("0.9", species="Asterias rubens; Asterias rubens")
    assert outcome("sea_star", "im", one)["consistent"] is None


UNCLOSED = "<think>I see. <type>Blackback; Silverback</type><think><answer>0.9<answer>"


def opened(folder: Path, reward: Reward) -> Source:
    if not (folder / "d").exists():
        write_dataset(folder / "d", "gorilla", [TRUTHS["gorilla"]], truth_fields=["type"])
    return open_source(Data(path=str(folder / "d")), reward)


def test_responses_are_read_as_the_reward_that_scores_them_reads_them(tmp_path: Path) -> None:
    truth = TRUTHS["gorilla"]
    strict = opened(tmp_path, Reward()).task.outcome(RewardInput(UNCLOSED, truth), UNSCORED)
    assert strict["parse_failure"] == 1.0 and "repaired" not in strict
    for reward in (
        Reward(args={"relaxed": True}),
        Reward(name="pair_answer", args={"relaxed": True}),
        Reward(profile="taxonrl", args={"function": "lfw_relax_format:compute_score", "layout": "answer"}),
    ):
        task = opened(tmp_path, reward).task
        assert task.outcome(RewardInput(UNCLOSED, truth), UNSCORED) == {
            "accuracy": 1.0,
            "brier": pytest.approx(0.01),
            "confidence": 0.9,
            "label": 1.0,
            "parse_failure": 0.0,
            "accuracy/type": 1.0,
            "label_accuracy/type": 1.0,
            "repaired": 1.0,
        }
        assert task.outcome(RewardInput(answer("0.9"), truth), UNSCORED)["repaired"] == 0.0
    named = Reward(args={"aliases": {"Silverbeck": "Silverback"}})
    misspelt = answer("0.9", type="Blackback; Silverbeck")
    assert opened(tmp_path, named).task.outcome(RewardInput(misspelt, truth), UNSCORED)["accuracy/type"] == 1.0


def test_aliases_of_a_recipe_are_added_to_the_tasks_own(tmp_path: Path) -> None:
    source = opened(tmp_path, Reward(args={"aliases": {"Silverbeck": "Silverback", "juvenil": "Infant"}}))
    assert source.reward.args["aliases"] == {"Juvenil": "Juvenile", "Silverbeck": "Silverback", "juvenil": "Infant"}
    find = source.reward.fn.form.vocabulary.find  # type: ignore[attr-defined]
    assert (find("Silverbeck"), find("Juvenil"), find("Juvenile")) == ("Silverback", "Infant", "Juvenile")
    only = opened(tmp_path, Reward(args={"aliases": {"Silverbeck": "Silverback"}}))
    assert only.reward.fn.form.vocabulary.find("Juvenil") == "Juvenile"  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match="aliases name 'Juvenile', which is not a label"):  # a vocabulary of one's own
        opened(tmp_path, Reward(args={"labels": ["Ape"]}))


def test_a_recipe_may_give_aliases(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[model]\npath = "m"\n[[data]]\npath = "d"\n[reward.args]\naliases = {Silverbeck = "Silverback"}\n'
    )
    assert load_recipe(tmp_path / "r.toml").recipe.reward.args == {"aliases": {"Silverbeck": "Silverback"}}
    loaded = load_recipe(tmp_path / "r.toml", overrides=['reward.args.aliases.Beck="Blackback"'])
    assert loaded.recipe.reward.args["aliases"] == {"Silverbeck": "Silverback", "Beck": "Blackback"}


def test_reward_arguments_of_a_recipe_reach_the_tasks_own_reward(tmp_path: Path) -> None:
    source = opened(tmp_path, Reward(args={"levels_weight": 0.6, "format_weight": 0.1, "answer": "truncated_bce"}))
    assert dict(source.weights) == pytest.approx({"format": 0.1, "answer": 0.3, "type": 0.6})
    assert source.reward.args["tag"] == "type" and source.reward.args["answer"] == "truncated_bce"
