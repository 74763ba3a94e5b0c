"""`vlmrl try` on a task whose answers are boxes: a wrong coordinate space is said in words and seen in pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_runs import recipe_text

from vlmrl.cli.try_ import show_trial, trial_fields
from vlmrl.evaluate import trial as module
from vlmrl.evaluate.trial import Trial, run_trial, trial_run
from vlmrl.recipe.load import load_recipe
from vlmrl.rewards.boxes.planes import Plane, Space, check_space, convert, plane_of
from vlmrl.rewards.boxes.reading import Coordinates
from vlmrl.rewards.boxes.writing import ANSWER_COLOUR, TRUTH_COLOUR, write_box
from vlmrl.rollout.sample import Prompt, Rollout
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.perception.entries import prep_grounding
from vlmrl.tasks.perception.truth import BOX, size_of, true_boxes
from vlmrl.types import Sample

RECIPE = """
rollout = {{prompts_per_step = 4, samples_per_prompt = 2, max_new_tokens = 8}}
[[data]]
path = "data"
variant = "{variant}"
"""


def answers(space: Space, generator: Any, prompts: Sequence[Prompt], *rest: Any, **options: Any) -> list[Rollout]:
    """Stand-in for a model: it knows the true box, and states it in a space of its own."""
    rollouts = []
    for prompt in prompts:
        plane, (box,) = true_boxes(prompt.row.truth, BOX)
        target: Plane = plane_of(space, size_of(prompt.row.truth), prompt.encoded.image_sizes[0])
        text = f"<answer>{write_box(convert(box, plane, target), target)}</answer>"
        sample = Sample((1, 2), text, (0.0, 0.0), "stop", 0, 0)
        rollouts.append(Rollout(prompt, (sample, sample), 0.1))
    return rollouts


@pytest.fixture
def tried(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Space], tuple[Any, Trial]]:
    """Return a function: (variant, space of the answers) -> the run and the trial. Images of 84 are seen as 56."""
    monkeypatch.chdir(tmp_path)
    prep_grounding(synthetic=20, side=84, others=0, out=tmp_path / "data", limits=Limits(workers=1))

    def run(variant: str, space: Space) -> tuple[Any, Trial]:
        (tmp_path / "recipe.toml").write_text(recipe_text(tiny_folder, RECIPE.format(variant=variant)))
        monkeypatch.setattr(module, "sample_rollouts", partial(answers, space))
        loaded, _ = fill_for_run(load_recipe("recipe.toml"), Path("runs"))
        with trial_run(loaded, Path("runs"), ["vlmrl", "try"]) as trial_run_:
            return trial_run_, run_trial(loaded.recipe, trial_run_, Path("runs"), prompts=6, samples=2)

    return run


def image_of(path: Path) -> np.ndarray:
    """Return the pixels of a picture without the expression below them. Images of 84 pixels are enlarged 4 times."""
    picture = np.asarray(Image.open(path))
    assert picture.shape[1] == 4 * 84 and picture.shape[0] > 4 * 84
    return picture[: 4 * 84]


def edges(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Return [x1, y1, x2, y2] of the pixels of a colour, in pixels of the image; pixel k reaches from k to k + 1."""
    ys, xs = np.nonzero((picture == np.array(colour)).all(axis=-1))
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) / 4


@pytest.mark.parametrize(
    ("variant", "space"), [("thousand_direct", "seen"), ("pixels_direct", "thousand"), ("seen_direct", "unit")]
)
def test_answers_in_another_space_are_named_with_it(
    tried: Any, capsys: pytest.CaptureFixture[str], variant: str, space: Space
) -> None:
    run, trial = tried(variant, space)
    declared = variant.removesuffix("_direct")
    fit = trial.fits["grounding"]
    better, own = Coordinates(space), Coordinates(check_space(declared))
    assert (fit.declared, fit.better, fit.responses, fit.answers) == (own, better, 12, 12)
    assert fit.overlaps[better] > 0.75 and fit.overlaps[own] < 0.35
    fields = trial_fields(run, trial)
    show_trial(trial, fields, 1)
    words = " ".join(capsys.readouterr().out.split())
    assert f"these boxes would fit the space `{space}`" in words and f"in the declared space `{declared}`" in words
    assert f"at IoU {fit.overlaps[better]:.2f}" in words
    assert "6 pictures (green: the truth; magenta, dashed: the answer)" in words
    assert fields["boxes"]["grounding"]["better"] == {"space": space, "order": "xyxy"}
    assert f"the variant of [[data]] that asks for `{space}`" in words


def test_pictures_show_truth_and_answers_in_the_declared_space(tried: Any) -> None:
    run, trial = tried("thousand_direct", "thousand")
    fit = trial.fits["grounding"]
    assert (
        fit.better is None
        and fit.overlaps[Coordinates("thousand")] > 0.97
        and fit.words.startswith("in the declared space")
    )
    assert sorted(trial.drawn) == [0, 1, 2, 3, 4, 5]
    assert trial.drawn[0] == [run.dir / "media" / "boxes-0.png"]
    for number, paths in trial.drawn.items():
        picture = image_of(paths[0])
        true = np.array(trial.groups[number].row.truth["box"])
        assert np.abs(edges(picture, ANSWER_COLOUR) - true).max() <= 1.0, "the answer is drawn where the truth is"
    _, other = tried("thousand_direct", "seen")
    for number, paths in other.drawn.items():
        picture = image_of(paths[0])
        # Coordinates up to 56, read in 0 to 1000, are below 56 / 1000 * 84 = 4.7: a corner of the image.
        assert edges(picture, ANSWER_COLOUR)[2:].max() <= 6
        true = np.array(other.groups[number].row.truth["box"])
        assert np.abs(edges(picture, TRUTH_COLOUR) - true).max() <= 1.0


def test_too_few_answers_decide_nothing(tried: Any) -> None:
    _, trial = tried("thousand_direct", "seen")
    fit = trial.fits["grounding"]
    assert replace(fit, different=3).better is None and replace(fit, different=4).better == Coordinates("seen")
    assert "no response has a box" in replace(fit, answers=0).words
