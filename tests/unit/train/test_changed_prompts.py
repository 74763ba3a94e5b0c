"""Prompts with changed images: the same tokens and other pixels, on every rank, never mixed up with the originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TWO_STEPS, make_place

from vlmrl.data.blinded_images import ImageChange
from vlmrl.data.encode import Encoder
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.sources import open_training
from vlmrl.train.collect import Collected, PromptFeed
from vlmrl.types import Group, Row, SamplingParams, Score, ScoredSample, Segment, Trajectory

MASKED = ImageChange("masked", 14, 0.6)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, TWO_STEPS)


def feed_of(place: Path, processor: Any, *overrides: str) -> PromptFeed:
    """A feed of its own for each rank: nothing is shared but the recipe."""
    recipe = load_recipe(place / "rl.toml", overrides=overrides, kind="rl").recipe
    encoder = Encoder(processor, min_pixels=784, max_pixels=3136)
    return PromptFeed(recipe, open_training(recipe), [], None, encoder, {}, SamplingParams(8), {})  # type: ignore[arg-type]


def collected_of(feed: PromptFeed, rows: list[Row], occurrence: int = 0) -> Collected:
    groups = []
    for row in rows:
        trajectory = Trajectory(
            "t", row.prompt_id, occurrence, 0, 0, 0, (1,), (Segment("assistant", (5,), True),), (), "stop"
        )
        groups.append(Group(row, "", (ScoredSample(trajectory, "", Score(0.0, {})),)))
    return Collected(feed.encode_again, feed.encode_tail, feed.encode_changed, groups, [None] * len(rows))


def pixels(prompt: Any) -> torch.Tensor:
    return prompt.images["pixel_values"]


def test_a_prompt_with_changed_images_has_the_same_tokens_and_other_pixels(place, tiny_processor):
    feed = feed_of(place, tiny_processor)
    rows = list(feed.sources[0].rows[:2])
    collected = collected_of(feed, rows)
    own, masked = collected.prompt_of(1), collected.prompt_behind(1, MASKED)
    assert masked.ids == own.ids and masked.kinds == own.kinds and pixels(masked).shape == pixels(own).shape
    assert not torch.equal(pixels(masked), pixels(own))
    assert collected.prompt_behind(1, MASKED) is masked
    # The caches know the pictures apart: encoded again, the row has its own pixels.
    assert torch.equal(pixels(collected_of(feed, rows).prompt_of(1)), pixels(own))
    low = collected.prompt_behind(1, ImageChange("low", 4))
    assert low.ids == own.ids and not torch.equal(pixels(low), pixels(masked))
    assert not torch.equal(pixels(low), pixels(own))


def test_another_rank_masks_alike_and_another_occurrence_or_seed_otherwise(place, tiny_processor):
    one, two = feed_of(place, tiny_processor), feed_of(place, tiny_processor)
    first = collected_of(one, list(one.sources[0].rows[:1])).prompt_behind(0, MASKED)
    rows = list(two.sources[0].rows[:1])
    assert torch.equal(pixels(collected_of(two, rows).prompt_behind(0, MASKED)), pixels(first))
    assert not torch.equal(pixels(collected_of(two, rows, 1).prompt_behind(0, MASKED)), pixels(first))
    other = feed_of(place, tiny_processor, "train.seed=5")
    assert not torch.equal(pixels(collected_of(other, rows).prompt_behind(0, MASKED)), pixels(first))


def test_without_a_share_nothing_changes(place, tiny_processor):
    collected = collected_of(feed := feed_of(place, tiny_processor), list(feed.sources[0].rows[:1]))
    unmasked = collected.prompt_behind(0, ImageChange("masked", 14, 0.0))
    assert torch.equal(pixels(unmasked), pixels(collected.prompt_of(0))) and unmasked.ids == collected.prompt_of(0).ids
