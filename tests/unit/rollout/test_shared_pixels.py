"""Images are decoded and resized once a process, whoever wants their pixels: counted."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tinyworld import encoded

from vlmrl.data import images
from vlmrl.data.encode import Encoder
from vlmrl.data.images import decode_image, encode_png, store_decoded
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.scoring import Scorer
from vlmrl.rollout.sample import Rollout, encode_prompt, score_rollouts
from vlmrl.rollout.vllm.engine import SharedPixels, split_images
from vlmrl.types import Message, RewardInput, Row, Sample


@pytest.fixture
def processor(tiny_processor):
    """The engine's copy of the image processor."""
    return copy.deepcopy(tiny_processor.image_processor)


@pytest.fixture
def prompt(tiny_encoder):
    return encoded(tiny_encoder, "same?", [(56, 84), (112, 56)], name="shared")


def plain(processor: Any, tiny_encoder: Encoder, prompt: Any) -> Any:
    return processor(images=list(prompt.pictures), return_tensors="pt", **tiny_encoder.image_arguments)


def test_the_engine_gets_the_trainers_pixels_and_processes_nothing(processor, tiny_encoder, prompt):
    expected = plain(processor, tiny_encoder, prompt)
    shared = SharedPixels()
    shared.serve(processor)
    with shared.of(prompt):
        found = plain(processor, tiny_encoder, prompt)
        # As an engine that knows the first asks, and with a copy, as engines and processors make them.
        second = processor([prompt.pictures[1].copy()], return_tensors="pt")
    assert shared.made == 0 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert second["image_grid_thw"].tolist() == expected["image_grid_thw"][1:].tolist()
    assert (
        processor.merge_size == 2 and type(processor).__name__ == type(tiny_encoder.processor.image_processor).__name__
    )


def test_an_image_of_the_same_size_and_other_content_is_not_taken_for_a_trainers(processor, tiny_encoder, prompt):
    other = encoded(tiny_encoder, "same?", [(56, 84), (112, 56)], name="other")
    expected = plain(processor, tiny_encoder, other)
    shared = SharedPixels()
    shared.serve(processor)
    with shared.of(prompt):
        found = plain(processor, tiny_encoder, other)
    assert shared.made == 2 and torch.equal(found["pixel_values"], expected["pixel_values"])
    assert not torch.equal(found["pixel_values"], prompt.images["pixel_values"])


def test_pixels_that_are_not_normalized_are_never_the_trainers(processor, tiny_encoder, prompt):
    """As an engine asks that normalizes on its device."""
    raw = {"do_rescale": False, "do_normalize": False, **tiny_encoder.image_arguments}
    expected = processor(list(prompt.pictures), return_tensors="pt", **raw)
    shared = SharedPixels()
    shared.serve(processor)
    with shared.of(prompt):
        found = processor(list(prompt.pictures), return_tensors="pt", **raw)
    assert shared.made == 2 and torch.equal(found["pixel_values"], expected["pixel_values"])
    assert not torch.equal(found["pixel_values"], prompt.images["pixel_values"])


def test_without_the_trainers_pixels_an_image_is_processed_once_and_kept_within_bounds(processor, tiny_encoder, prompt):
    """An engine in another process: it gets the images, and is asked again by the sync check."""
    expected = plain(processor, tiny_encoder, prompt)
    shared = SharedPixels()
    shared.serve(processor)
    for _ in range(3):
        found = plain(processor, tiny_encoder, prompt)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert shared.made == 2
    shared._kept.limit_bytes = 1
    plain(processor, tiny_encoder, prompt)
    assert len(shared._kept) <= 2 and shared.made >= 2
    newer = SharedPixels()
    newer.serve(processor)
    with newer.of(prompt):
        plain(processor, tiny_encoder, prompt)
    assert newer.made == 0 and len([c for c in type(processor).__mro__ if c.__name__ == "_Asking"]) == 1


def test_the_tensors_of_each_image_are_views_of_the_prompts(prompt):
    first, second = split_images(prompt.images)
    counts = prompt.images["image_grid_thw"].prod(-1).tolist()
    assert [len(first["pixel_values"]), len(second["pixel_values"])] == counts
    assert first["pixel_values"].data_ptr() == prompt.images["pixel_values"].data_ptr()
    assert torch.equal(torch.cat([first["pixel_values"], second["pixel_values"]]), prompt.images["pixel_values"])
    assert split_images({}) == [] and split_images({"pixel_values": torch.zeros(1, 3, 4, 4)}) == []


class Files:
    """A dataset of one image file, used twice by its row; it counts how often it is decoded."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch, picture: Any) -> None:
        self.path = path
        self.bytes, self.media = store_decoded(encode_png(picture))[:2]
        self.decoded: Counter[str] = Counter()

        def count(data: bytes) -> Any:
            self.decoded[path] += 1
            return decode_image(data)

        monkeypatch.setattr(images, "decode_image", count)

    def image_bytes(self, media: Any) -> bytes:
        return self.bytes

    def image(self, media: Any) -> Any:
        return images.decode_cached(self, media)


class Source:
    name = task_name = "digits"

    def __init__(self, files: Files) -> None:
        self.dataset = files

    def encoder(self, encoder: Encoder, row: Row) -> Encoder:
        return encoder

    def messages(self, row: Row) -> tuple[Message, ...]:
        return (Message("user", "<image><image>same?"),)

    def reward_input(self, row: Row, text: str, finish: Any, num_tokens: int, prompt: str) -> RewardInput:
        return RewardInput(text, images=[self.dataset.image(m) for m in row.media])


def test_an_image_is_decoded_and_resized_once_for_prompt_reward_and_engine(tiny_processor, monkeypatch, tmp_path):
    """Two prompts with one image twice each, drawn in two steps; a reward that looks at the images of 4 samples."""
    processed: list[int] = []
    (picture,) = encoded(Encoder(tiny_processor), "?", [(56, 56)], name="one").pictures
    files = Files(str(tmp_path), monkeypatch, picture)
    own = copy.deepcopy(tiny_processor)
    make = type(own.image_processor).__call__
    counting = lambda self, images, **more: processed.append(len(images)) or make(self, images, **more)  # noqa: E731
    own.image_processor.__class__ = type("Counting", (type(own.image_processor),), {"__call__": counting})
    encoder, source = Encoder(own), Source(files)
    seen = []
    for step in range(2):
        rows = [Row(f"r{k}", "digits", "digits", {}, (files.media,) * 2) for k in range(2)]
        prompts = [encode_prompt(source, row, step, encoder, 500) for row in rows]
        samples = tuple(Sample((5,), "a", (-0.1,), "stop", step, k) for k in range(4))
        reward = RewardSpec("half", lambda x: seen.append(x) or {"reward": 0.5}, {}, {}, pure=True, needs_images=True)
        score_rollouts([Rollout(p, samples, 0.0) for p in prompts], {"digits": Scorer(reward)}, strict=True)
    assert len(seen) == 16 and all(len(i.images) == 2 for i in seen)
    assert files.decoded == {str(tmp_path): 1} and processed == [1]
