"""The path from a response to its score: a slow reward, a service that dies, images on their way to a reward.

    python scripts/bench/path.py [--only reward|service|images] [--seconds 1.0] [--workers 16] [--generation 40]
                                 [--down 60] [--json] [--smoke]

Slow reward: how much it adds to a step, because groups are scored while others are still generated. The step is the
one of training (`sample_scored`, with real workers of a user's reward). The engine is a stand-in that takes no
processor time: it completes one group after the other, as an engine on GPUs does. So the figures do not depend on the
machine's speed. Printed: seconds of the generation alone, of the step, and of the step if the rewards began after the
generation. `holds`: a reward of that many seconds per response adds at most 10% to the step.

Dead service (path_service.py): a run of `vlmrl train` whose reward calls a service on loopback. The service is killed
during the run, and starts again after `--down` seconds. `holds`: the run goes on, no sample is without a score or at 0,
and its tokens, scores and updates are those of a run without the outage.

Images (path_images.py): images of a megapixel and 8 responses to each prompt. Bytes and seconds per response when the
siblings share their image, and when each has another one: as if an image were sent with each response. `holds`: shared
images need at most half of the bytes and of the seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from path_images import measure_images
from path_service import measure_service

from vlmrl.data.encode import EncodedPrompt
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.sample import Prompt, sample_rollouts, sample_scored, score_rollouts, scored_groups
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput, Row, Sample, SamplingParams

PARTS = ("reward", "service", "images")
MOST_ADDED = 0.10
"""Largest share of the generation that the reward may add to a step."""
REWARD = """
import time


def score(x):
    time.sleep({seconds})
    return float(len(x.response) % 7)
"""


class Rows:
    """Source of rows without images."""

    name = task_name = "rows"
    dataset: Any = None

    def encoder(self, encoder: Any, row: Row) -> Any:
        return encoder

    def messages(self, row: Row) -> tuple[()]:
        return ()

    def reward_input(self, row: Row, text: str, finish: Any, num_tokens: int, prompt: str) -> RewardInput:
        return RewardInput(text, row.truth, row.columns, (), finish, num_tokens, prompt)


class PacedEngine(Generator):
    """Stand-in that completes a group every `pace` seconds and computes nothing."""

    version, copies_weights, works_alone = 0, False, False

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self._open: deque[tuple[int, SamplingRequest]] = deque()
        self._number, self._next = 0, 0.0

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        self._next = time.monotonic() + self.pace
        yield
        self._open.clear()

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        self._number += 1
        self._open.append((self._number, request))
        return self._number

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        left = self._next - time.monotonic()
        if timeout is not None and left > timeout:
            time.sleep(timeout)
            return []
        time.sleep(max(0.0, left))
        self._next += self.pace
        number, request = self._open.popleft()
        samples = [Sample((1,), "a" * k, (-1.0,), "stop", 0, request.seed + k) for k in range(request.num_samples)]
        return [(number, samples)]

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def load_weights(self, version: int, *, changed: bool = True) -> None: ...
    def close(self) -> None: ...


def measure(*, seconds: float, workers: int, generation: float, prompts: int, samples: int) -> Mapping[str, Any]:
    """Return the seconds of the generation, of the step, and of the step with the rewards after the generation.

    Args:
        seconds: what the reward takes for each response.
        workers: processes of the reward.
        generation: seconds of the generation.
        prompts, samples: prompts of the step, and responses to each.
    """
    rows = [Row(f"row-{i}", "rows", "rows", {"answer": "a"}) for i in range(prompts)]
    drawn = [Prompt(Rows(), row, 0, EncodedPrompt(row, "?", (1,), (0,), {}, 0, 0, ())) for row in rows]
    engine = PacedEngine(generation / prompts)
    options: dict[str, Any] = {"num_samples": samples, "run_seed": 0, "version": 0}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "slow.py").write_text(REWARD.format(seconds=seconds))
        with Scorer(load_reward("slow.py:score", base_dir=name), workers=workers, timeout_seconds=60.0) as scorer:
            scorer.score([RewardInput("a", {})] * workers)  # starts the workers
            start = time.perf_counter()
            with ScoringSession({"rows": scorer}, strict=True) as session:
                rollouts = sample_scored(engine, drawn, SamplingParams(), session, **options)
                groups = scored_groups(session, rollouts)
            generated = rollouts[0].seconds
            step = time.perf_counter() - start
            start = time.perf_counter()
            after = score_rollouts(
                sample_rollouts(engine, drawn, SamplingParams(), **options), {"rows": scorer}, strict=True
            )
            apart = time.perf_counter() - start
    values = [[s.score.value for s in group.samples] for group in groups]
    assert values == [[s.score.value for s in group.samples] for group in after] and len(values) == prompts
    return {
        "reward_seconds": seconds,
        "workers": workers,
        "responses": prompts * samples,
        "generation_seconds": round(generated, 2),
        "step_seconds": round(step, 2),
        "one_after_the_other_seconds": round(apart, 2),
        "added": round(step / generated - 1, 4),
        "holds": step <= (1 + MOST_ADDED) * generated,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the reward, for each response")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--generation", type=float, default=40.0, help="seconds of the generation")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--down", type=float, default=60.0, help="seconds for which the service is down")
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    args = parser.parse_args()
    steps, prompts, side = 8, 16, 1000
    if args.smoke:
        args.seconds, args.workers, args.generation, args.prompts, args.samples = 0.01, 2, 0.5, 4, 2
        args.down, steps, prompts, side = 1.0, 6, 2, 100
    measured = {
        "reward": lambda: measure(
            seconds=args.seconds,
            workers=args.workers,
            generation=args.generation,
            prompts=args.prompts,
            samples=args.samples,
        ),
        "service": lambda: measure_service(down=args.down, steps=steps),
        "images": lambda: measure_images(prompts=prompts, samples=8, side=side),
    }
    figures: dict[str, Any] = {part: measured[part]() for part in PARTS if args.only in (None, part)}
    holds = all(part["holds"] for part in figures.values())
    if args.json:
        print(json.dumps(figures | {"holds": holds}))
    else:
        for part, facts in figures.items():
            print(part)
            for name, value in facts.items():
                print(f"  {name:28} {value}")
    return 0 if holds or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
