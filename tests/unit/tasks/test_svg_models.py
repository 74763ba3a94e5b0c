"""Reward `svg_models`: tiny models in the format of the released ones, and models whose likeness is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_model_folders import tiny_models

from vlmrl.errors import RewardError
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.vfig import grader as models_grader
from vlmrl.tasks.vfig.measures import PictureModel
from vlmrl.types import RewardInput, RewardResult

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64" viewBox="0 0 64 64">'
PAGE = '<rect width="64" height="64" fill="#eee"/>'
LEFT = f'{HEAD}{PAGE}<rect x="8" y="8" width="16" height="48"/></svg>'
RIGHT = f'{HEAD}{PAGE}<rect x="40" y="8" width="16" height="48"/></svg>'
BOTH = f'{HEAD}{PAGE}<rect x="8" y="8" width="16" height="48"/><rect x="40" y="8" width="16" height="48"/></svg>'
EMPTY = f"{HEAD}{PAGE}</svg>"


def halves(pictures: Any) -> list[np.ndarray]:
    """See (1, ink left, ink right) in each picture, a vector of length 1; ink is 1 for a bar of LEFT or RIGHT."""
    bar = 16 * 48 / (32 * 64)
    seen = []
    for picture in pictures:
        ink = (picture[..., 0] < 128).astype(float)
        vector = np.array([1.0, ink[:, :32].mean() / bar, ink[:, 32:].mean() / bar])
        seen.append(vector / np.linalg.norm(vector))
    return seen


def dot(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other)


Grade = Callable[..., RewardResult]


@pytest.fixture
def grade(monkeypatch) -> Grade:
    """Return a function that scores a response beside LEFT, as models see it that the test gives by name."""

    def run(response: str, truth: Any = LEFT, pictures: bool = False, **models: PictureModel) -> RewardResult:
        monkeypatch.setattr(models_grader, "open_picture_model", lambda name, source, device: models[name])
        names = dict.fromkeys(models, "")
        grader = models_grader.make_models_grader(
            key=None, images="refuse", models=names, device="cpu", pictures=pictures
        )
        return grader(RewardInput(response=response, truth={"svg": truth}))

    return run


def test_the_score_is_how_far_the_likeness_is_above_that_of_the_bare_page(grade):
    model = PictureModel(halves, dot)
    # The truth is (1, 1, 0) / sqrt 2, the page (1, 0, 0): cosine 0.7071. Both bars are (1, 1, 1) / sqrt 3: 2 / sqrt 6 =
    # 0.8165, so (0.8165 - 0.7071) / (1 - 0.7071) = 0.3735. The wrong bar is (1, 0, 1) / sqrt 2: 0.5, below the page.
    assert grade(BOTH, dino=model).parts == {"render": 1.0, "dino": 0.3735}
    assert grade(RIGHT, dino=model).parts == {"render": 1.0, "dino": 0.0}
    assert grade(EMPTY, dino=model).parts == {"render": 1.0, "dino": 0.0}
    assert grade(f"Here it is:\n```\n{LEFT}\n```", dino=model).parts == {"render": 1.0, "dino": 1.0}
    assert grade(BOTH, dino=model).detail == {"likeness": {"dino": 0.8165}, "page": {"dino": 0.7071}}


def test_lpips_is_a_distance(grade):
    def distance(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.abs(one - other).sum())

    seen = PictureModel(lambda pictures: [(p[:, :, 0] < 128).mean(axis=0).round() for p in pictures], distance)
    # Columns that are mostly ink: 16 of the truth, none of the page: distance 16, likeness -15. Both bars: 32 columns,
    # distance 16 again, so no better than the page.
    assert grade(BOTH, lpips=seen).parts["lpips"] == 0.0
    half = LEFT.replace('width="16" height="48"', 'width="8" height="48"')
    assert grade(half, lpips=seen).parts["lpips"] == pytest.approx((-7 + 15) / (1 + 15))


def test_a_model_that_cannot_tell_the_figure_from_its_page_pays_for_nothing_else(grade):
    blind = PictureModel(lambda pictures: [np.ones(1) for _ in pictures], dot)
    assert models_grader.BLIND < 1.0
    assert grade(BOTH, clip=blind).parts["clip"] == 0.0 and grade(LEFT, clip=blind).parts["clip"] == 1.0


def test_a_model_that_returns_no_number_is_an_error_and_no_score(grade):
    broken = PictureModel(lambda pictures: [np.full(1, np.nan) for _ in pictures], dot)
    with pytest.raises(RewardError, match="`clip` compares two pictures with nan"):
        grade(BOTH, clip=broken)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("I cannot draw this.", "no "),
        (f'{HEAD}<image href="file:///etc/passwd" width="9" height="9"/></svg>', "image"),
        (f"{HEAD}<script>1</script></svg>", "script"),
    ],
)
def test_what_cannot_be_drawn_earns_nothing(grade, response: str, reason: str):
    score = grade(response, dino=PictureModel(halves, dot))
    assert score.parts == {"render": 0.0, "dino": 0.0} and reason in score.note.lower()


@pytest.mark.parametrize("truth", ["a figure", "", 7, f"{HEAD}<rect/>"])
def test_a_truth_that_cannot_be_drawn_is_an_error(grade, truth: Any):
    with pytest.raises(RewardError, match="true SVG cannot be drawn"):
        grade(LEFT, truth, dino=PictureModel(halves, dot))


def test_what_a_model_sees_in_a_truth_is_worked_out_once(monkeypatch):
    count = []
    model = PictureModel(lambda pictures: count.append(len(pictures)) or halves(pictures), dot)
    monkeypatch.setattr(models_grader, "open_picture_model", lambda *_: model)
    grader = models_grader.make_models_grader(
        key=None, images="refuse", models={"dino": ""}, device="cpu", pictures=False
    )
    for response in (BOTH, RIGHT, EMPTY, LEFT):
        grader(RewardInput(response=response, truth={"svg": LEFT}))
    assert count == [2, 1, 1, 1]  # truth and page, then each response; equal pictures need no look


def test_pictures_are_artifacts_if_asked_for(grade):
    score = grade(BOTH, pictures=True, dino=PictureModel(halves, dot))
    assert sorted(score.artifacts) == ["overlay", "render"]
    assert not grade(BOTH, dino=PictureModel(halves, dot)).artifacts


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "asks no model"),
        ({"clip": False}, "asks no model"),
        ({"clip": 1}, "`clip` of `svg_models` is 1"),
        ({"clip": True, "images": "maybe"}, "policy for images"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], words: str):
    with pytest.raises(RewardError, match=words):
        load_reward("svg_models", args=args)


def test_the_device_is_no_part_of_the_reward():
    specs = [load_reward("svg_models", args={"dino": True, "device": device}) for device in ("cpu", "cuda")]
    assert specs[0].args == specs[1].args == {"dino": True}
    both = load_reward("svg_models", args={"dino": True, "clip": True})
    assert (specs[0].weights, both.weights) == ({"dino": 1.0}, {"dino": 0.5, "clip": 0.5})


@pytest.mark.slow
def test_tiny_models_score_in_workers(tmp_path: Path):
    folders = tiny_models(tmp_path)
    scorer = Scorer(load_reward("svg_models", args=dict(folders)), timeout_seconds=60.0)
    try:
        inputs = [RewardInput(response=text, truth={"svg": LEFT}) for text in (LEFT, EMPTY, "none", BOTH)]
        itself, empty, none, both = scorer.score(inputs)
    finally:
        scorer.close()
    assert [score.error for score in (itself, empty, none, both)] == [None] * 4
    assert itself.value == 1.0 and empty.value == none.value == 0.0 and 0.0 <= both.value < 1.0
    assert set(itself.parts) == {"render", *folders}


@pytest.mark.slow
def test_weights_that_are_not_there_are_named_with_the_model(tmp_path: Path):
    scorer = Scorer(load_reward("svg_models", args={"dino": str(tmp_path / "gone")}), timeout_seconds=60.0)
    try:
        with pytest.raises(RewardError, match="gone") as caught:
            scorer.score([RewardInput(response=LEFT, truth={"svg": LEFT})])
    finally:
        scorer.close()
    assert "Traceback" not in str(caught.value)
