"""`vlmrl check` on a task whose answers are boxes: pictures, the space that prompt and reward state, the family's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import this_process
from PIL import Image
from small_runs import recipe_text

from vlmrl.model.families import FAMILIES
from vlmrl.setup.rows import NATIVE_BOX_SPACES
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.perception.entries import prep_grounding

RECIPE = """
rollout.max_new_tokens = 64
train.steps = 1
{reward}
[[data]]
path = "data"
variant = "{variant}"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with drawn rows of 84 x 84 pixels, which the tiny model sees as 56 x 56."""
    folder = tmp_path_factory.mktemp("boxes")
    prep_grounding(synthetic=20, side=84, others=0, out=folder / "data", limits=Limits(workers=1))
    return folder


def checked(place: Path, model: Path, variant: str, reward: str = "", kind: str = "rl") -> Any:
    text = recipe_text(model, RECIPE.format(variant=variant, reward=reward), kind)
    (place / "recipe.toml").write_text(text)
    return json.loads(this_process("check", "recipe.toml", "--json", cwd=place).out)


def warnings(result: Any, words: str) -> list[str]:
    return [p["message"] for p in result["problems"] if words in p["message"]]


def test_check_draws_rows_and_reads_a_correct_response_at_the_size_that_the_model_sees(
    place: Path, tiny_folder: Path
) -> None:
    result = checked(place, tiny_folder, "seen_direct")
    assert result["ok"] and not warnings(result, "space")  # the tiny model is a Qwen2.5-VL, which speaks `seen`
    boxes = result["plan"]["boxes"]["grounding"]
    assert (boxes["space"], boxes["rows"], len(boxes["pictures"])) == ("seen", 8, 8)
    assert boxes["overlap"] > 0.85  # rounded to 1 / 56 of the image
    numbers = [int(n) for n in boxes["correct_response"].strip("<answer>[]/").split(",")]
    assert max(numbers) <= 56
    for path in boxes["pictures"]:
        width, height = Image.open(place / path).size
        assert width == 4 * 84 and height > 4 * 84  # enlarged, with the expression in a line below
    assert {Path(path).parent.as_posix() for path in boxes["pictures"]} == {"runs/checked/grounding"}
    assert this_process("runs", "list", cwd=place).code == 0
    shown = this_process("check", "recipe.toml", cwd=place)
    assert "look whether the boxes surround the objects" in " ".join(shown.out.split())
    assert "8 pictures (green: the truth; magenta, dashed: the answer)" in " ".join(shown.out.split())


def test_a_space_that_the_family_does_not_speak_is_a_warning_before_reinforcement_learning(
    place: Path, tiny_folder: Path
) -> None:
    result = checked(place, tiny_folder, "thousand_direct")
    (message,) = warnings(result, "published weights")
    assert "`thousand`" in message and "`qwen2_5_vl`" in message and "`seen`" in message and result["ok"]
    assert not warnings(checked(place, tiny_folder, "thousand_direct", kind="sft"), "published weights")


def test_a_prompt_and_a_reward_that_disagree_are_an_error(place: Path, tiny_folder: Path) -> None:
    result = checked(place, tiny_folder, "thousand_direct", 'reward.args.space = "seen"')
    (message,) = warnings(result, "asks for boxes in the space")
    assert "`thousand`, but the reward reads them in `seen`" in message and not result["ok"]


def test_another_order_than_the_prompts_is_a_warning_because_a_prompt_of_ones_own_may_ask_for_it(
    place: Path, tiny_folder: Path
) -> None:
    result = checked(place, tiny_folder, "seen_direct", 'reward.args.order = "yxyx"')
    (message,) = warnings(result, "asks for boxes in the order")
    assert "`xyxy`, but the reward reads them in `yxyx`" in message and result["ok"]


def test_the_spaces_of_families_are_those_of_families_that_exist() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert NATIVE_BOX_SPACES.keys() <= set(CONFIG_MAPPING.keys())
    assert len(NATIVE_BOX_SPACES.keys() & FAMILIES.keys()) >= 10
