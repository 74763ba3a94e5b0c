"""Boxes in other coordinates than the declared ones: each is found, and chance alone does not find any."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vlmrl.rewards.boxes.planes import Box, convert, plane_of
from vlmrl.rewards.boxes.reading import COORDINATES, Coordinates
from vlmrl.tasks.perception.task import grounding_task
from vlmrl.tasks.perception.truth import BoxSettings
from vlmrl.tasks.positions import SHARES, Fit
from vlmrl.types import Media, RewardInput

STORED, SEEN = (640, 480), (504, 364)
Answer = Callable[[random.Random, Box], Box]
"""(Random numbers, true box in shares of the image) -> the answer in shares of the image."""


def fit_of(speaks: Coordinates, answer: Answer, count: int, seed: int = 0, declared: str = "thousand") -> Fit:
    """Fit of answers that a model states in coordinates of its own."""
    rng, plane, inputs = random.Random(seed), plane_of(speaks.space, STORED, SEEN), []
    for _ in range(count):
        true = random_box(rng)
        pixels = [true.x1 * 640, true.y1 * 480, true.x2 * 640, true.y2 * 480]
        truth = {"box": pixels, "space": "pixels", "width": 640, "height": 480, "asks": None}
        stated = BoxSettings(speaks.space, speaks.order).ordered(convert(answer(rng, true), SHARES, plane))
        numbers = ", ".join(f"{n:.4f}" for n in stated)
        if speaks.space == "loc":
            x1, y1, x2, y2 = (min(1023, max(0, round(n))) for n in stated)
            numbers = "".join(f"<loc{n:04d}>" for n in (y1, x1, y2, x2))
        text = f"<think>a</think><answer>{numbers if speaks.space == 'loc' else f'[{numbers}]'}</answer>"
        inputs.append(RewardInput(text, truth, media=(Media("a", *STORED),), seen_sizes=(SEEN,)))
    task = grounding_task({}, declared)
    assert task.positions is not None
    return task.positions(None).fit(inputs)


def random_box(rng: random.Random, least: float = 0.1) -> Box:
    width, height = rng.uniform(least, 0.6), rng.uniform(least, 0.6)
    x, y = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
    return Box(x, y, x + width, y + height)


def exact(rng: random.Random, true: Box) -> Box:
    return true


def near(rng: random.Random, true: Box) -> Box:
    """About the right box: the IoU is 0.5 on average."""
    shift = [rng.gauss(0, 0.06) for _ in range(4)]
    x1, y1, x2, y2 = (min(1.0, max(0.0, n + d)) for n, d in zip(true, shift, strict=True))
    return Box(min(x1, x2 - 0.02), min(y1, y2 - 0.02), x2, y2)


@pytest.mark.parametrize("declared", ["thousand", "pixels"])
@pytest.mark.parametrize("speaks", COORDINATES, ids=lambda one: one.name)
def test_the_coordinates_of_the_answers_are_found(speaks: Coordinates, declared: str) -> None:
    fit = fit_of(speaks, exact, 12, declared=declared)
    if speaks == Coordinates(declared):  # type: ignore[arg-type]
        assert fit.better is None and not fit.advice and fit.overlaps[speaks] > 0.99
        return
    assert fit.better == speaks and fit.overlaps[speaks] > 0.98
    assert f"these boxes would fit the space `{speaks.space}`" in fit.words
    assert (f"in the order {speaks.order}" in fit.words) == (speaks.order != "xyxy")
    assert (f'reward.args.order = "{speaks.order}"' in fit.advice) == (speaks.order != "xyxy")
    assert ("variant" in fit.advice) == (speaks.space != declared)
    assert fit.fields()["better"] == {"space": speaks.space, "order": speaks.order}


def test_mediocre_boxes_in_other_coordinates_are_found_too() -> None:
    for seed in range(20):
        assert fit_of(Coordinates("pixels", "yxyx"), near, 40, seed).better == Coordinates("pixels", "yxyx")


def random_answer(rng: random.Random, true: Box) -> Box:
    return random_box(rng)


def middle(rng: random.Random, true: Box) -> Box:
    return Box(0.25, 0.25, 0.75, 0.75)


def nearly_middle(rng: random.Random, true: Box) -> Box:
    return Box(*(n + rng.uniform(-0.02, 0.02) for n in middle(rng, true)))


def corner(rng: random.Random, true: Box) -> Box:
    """A model that learned to point at the upper left corner."""
    return Box(0.0, 0.0, rng.uniform(0.2, 0.6), rng.uniform(0.2, 0.6))


@pytest.mark.parametrize("answer", [random_answer, middle, nearly_middle, corner, near, exact])
@pytest.mark.parametrize("count", [4, 8, 40])
def test_answers_in_the_declared_coordinates_raise_no_alarm(answer: Answer, count: int) -> None:
    alarms = sum(fit_of(Coordinates("thousand"), answer, count, seed).better is not None for seed in range(60))
    assert alarms == 0


def test_one_box_for_all_images_says_nothing_whatever_it_fits() -> None:
    fit = fit_of(Coordinates("pixels"), middle, 40)
    assert fit.different == 1 and fit.better is None
