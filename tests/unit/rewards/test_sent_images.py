"""Images travel to a worker once for all responses to a prompt, and each response has images of its own."""

from __future__ import annotations

from collections import Counter

import pytest
from PIL import Image

from vlmrl.rewards.scoring import CHUNK, ScoringSession, requests_of
from vlmrl.types import RewardInput
from vlmrl.workers import images as sent_images
from vlmrl.workers.images import HeldImages, ImageKeys, ReceivedImages

PIXELS = 200 * 150 * 3
SUM = """
import os
import pathlib
NEEDS_IMAGES = True
def reward(x):
    once = pathlib.Path(__file__).with_name("once")
    if x.response == "exit" and not once.exists():
        once.touch()
        os._exit(3)
    before = x.images[0].getpixel((0, 0))[0]
    x.images[0].putpixel((0, 0), (before + 1, 0, 0))     # in place: the next response must not see it
    return float(before)
"""


def group(*texts: str, shade: int = 7, shared: bool = True) -> list[RewardInput]:
    """Responses to one prompt; `shared`: with the same image object, otherwise with equal ones."""
    image = Image.new("RGB", (200, 150), (shade, 0, 0))
    return [RewardInput(text, images=[image if shared else image.copy()]) for text in texts]


def sent(scorer) -> list[int]:
    """Bytes that each worker of a scorer has got."""
    return sorted(worker.sent_bytes for worker in scorer.rewards[0].backend._workers)


@pytest.mark.parametrize("shared", [True, False])
def test_an_image_is_sent_once_for_all_siblings_and_none_sees_what_another_did_to_it(scorer, shared):
    with scorer(SUM) as s:
        assert [x.value for x in s.score(group(*"abcdefgh", shared=shared))] == [7.0] * 8
        assert PIXELS <= sent(s)[0] < 2 * PIXELS


def test_no_worker_gets_it_twice_and_a_new_worker_gets_it_again(scorer):
    with scorer(SUM, options={"workers": 2}) as s:
        with ScoringSession({"": s}, strict=False) as session:
            for key in range(2):
                session.submit(key, "", group(*"abcdefgh", shade=key))
            scored = session.collect()
        assert [x.value for key in range(2) for x in scored[key].scores] == [0.0] * 8 + [1.0] * 8
        # A worker that starts late may find nothing left to do.
        assert all(size < 3 * PIXELS for size in sent(s)) and sum(sent(s)) >= 2 * PIXELS
    with scorer(SUM) as s:
        scores = s.score(group("a", "exit", "b"))  # the worker ends; "exit" and "b" go to another
        assert [x.value for x in scores] == [7.0] * 3 and "asked again" in scores[1].note
        assert PIXELS <= sent(s)[0] < 2 * PIXELS, "the new worker has got it once, too"


def test_a_response_that_is_tried_again_alone_has_its_image(scorer):
    with scorer(SUM + "\nON_TIMEOUT = {'reward': -1.0}\n") as s:
        s.score(group("a"))
        scores = s.score(group("b", "exit", "c", shade=9))
        assert [x.value for x in scores] == [9.0] * 3


def test_what_a_worker_has_is_bounded_and_forgotten_when_no_input_needs_it():
    keys, held, received = ImageKeys(), HeldImages(most=3 * PIXELS), ReceivedImages()
    prompts = [group("a", "b", shade=shade) for shade in range(6)]

    def request(inputs: list[RewardInput]) -> int:
        """Send a request of these inputs; the number of images that go along."""
        parcel = held.parcel(inputs, keys)
        received.take({"sent": parcel.sent, "dropped": parcel.dropped}, parcel.blobs)
        (image,) = received.images(parcel.keys[0])
        assert image.tobytes() == inputs[0].images[0].tobytes()
        return len(parcel.sent)

    for prompt in prompts[:5]:
        keys.add(prompt)
    for prompt in prompts[:5]:  # all are still needed: at most 3 older ones stay beside that of the request
        assert request(prompt[:1]) == 1 and len(received._pixels) <= 4
    assert request(prompts[4][1:]) == 0, "it has that one"
    for x in (x for prompt in prompts[:5] for x in prompt):
        keys.done(x)
    keys.add(prompts[5])
    assert request(prompts[5]) == 1 and len(received._pixels) == 1


def test_images_of_the_same_content_and_another_shape_are_different(monkeypatch):
    keys = ImageKeys()
    wide, high = Image.new("RGB", (6, 2)), Image.new("RGB", (2, 6))
    assert len({*keys.of(RewardInput("a", images=[wide, high, wide.copy(), wide.convert("L")]))}) == 2
    calls = Counter()
    monkeypatch.setattr(sent_images, "pixels_of", lambda image: calls.update([1]) or image.tobytes())
    keys.of(RewardInput("a", images=[wide])), keys.of(RewardInput("b", images=[wide]))
    assert not calls, "the pixels of an image object are read once"


def test_a_request_has_few_sets_of_images_however_many_responses():
    siblings = {(0, k): x for k, x in enumerate(group(*"a" * 40))}
    assert [len(batch) for batch in requests_of(list(siblings), siblings, 1)] == [CHUNK, 8]
    different = {(0, k): group("a")[0] for k in range(9)}
    assert [len(batch) for batch in requests_of(list(different), different, 1)] == [4, 4, 1]
    plain = {(0, k): RewardInput("a") for k in range(40)}
    assert [len(batch) for batch in requests_of(list(plain), plain, 4)] == [10] * 4
