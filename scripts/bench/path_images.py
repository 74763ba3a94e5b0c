"""Part of path.py: bytes and seconds with which images reach the workers of a reward."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

LEAST_RATIO = 2.0
"""An image that siblings share must be so many times as fast, and as small, as one that each has for itself."""
REWARD = """
NEEDS_IMAGES = True
def score(x):
    return float(x.images[0].getpixel((0, 0))[0])
"""


def measure_images(*, prompts: int, samples: int, side: int) -> dict[str, Any]:
    """Score groups whose siblings share an image, and groups in which each has another one, as if nothing were shared.

    Args:
        prompts, samples: groups, and responses of each.
        side: width and height of the images, in pixels.
    """
    shared = [[_noise(side, i)] * samples for i in range(prompts)]
    apart = [[_noise(side, prompts + i * samples + k) for k in range(samples)] for i in range(prompts)]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "look.py").write_text(REWARD)
        with Scorer(load_reward("look.py:score", base_dir=name), timeout_seconds=60.0) as scorer:
            _score(scorer, [[_noise(8, 0)]])  # starts the worker
            facts = {}
            for word, images in (("once", shared), ("each", apart)):
                seconds, sent = _score(scorer, images)
                facts[f"{word}_ms_per_sample"] = round(1000 * seconds / (prompts * samples), 3)
                facts[f"{word}_kib_per_sample"] = round(sent / (prompts * samples) / 1024, 1)
    times = facts["each_ms_per_sample"] / facts["once_ms_per_sample"]
    sizes = facts["each_kib_per_sample"] / facts["once_kib_per_sample"]
    facts |= {"times_faster": round(times, 2), "times_smaller": round(sizes, 2)}
    return facts | {"megapixels": side * side / 1e6, "holds": min(times, sizes) >= LEAST_RATIO}


def _noise(side: int, seed: int) -> Image.Image:
    """Return an image whose pixels differ from those of every other seed."""
    image = Image.effect_noise((side, side), 40).convert("RGB")
    image.putpixel((0, 0), (seed % 256, seed // 256, 0))
    return image


def _score(scorer: Scorer, images: list[list[Image.Image]]) -> tuple[float, int]:
    """Return the seconds of a call with one group per list of images, and the bytes that the worker got."""
    pool: Any = scorer.rewards[0].backend
    before = sum(worker.sent_bytes for worker in pool._workers)
    start = time.perf_counter()
    with ScoringSession({"": scorer}, strict=False) as session:
        for key, of_group in enumerate(images):
            session.submit(key, "", [RewardInput("a", images=[image]) for image in of_group])
        scores = [score for group in session.collect() for score in group.scores]
    seconds = time.perf_counter() - start
    assert len(scores) == sum(map(len, images)) and all(score.error is None for score in scores)
    return seconds, sum(worker.sent_bytes for worker in pool._workers) - before
