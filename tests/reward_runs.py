"""Small runs with scored rollouts for the tests of reward-check."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from one_group import group_advantages

from vlmrl.rewards import reward_record
from vlmrl.rewards.scoring import Scorer
from vlmrl.store.runs import Run, create_run
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.pairs.task import write_trace
from vlmrl.types import Group, RewardInput, Row, ScoredSample, Segment, Trajectory

LEVELS = ["loop", "digit"]
IDS = (5, 6, 7)
"""Tokens of every response."""
NAMES = {"no": "1", "yes": "8"}


def pair_truth(rng: random.Random) -> dict[str, Any]:
    first, second = rng.choice(["no", "yes"]), rng.choice(["no", "yes"])
    same = first == second
    return {"same": same, "distance": 0 if same else 2, "loop": [first, second], "digit": [NAMES[first], NAMES[second]]}


def pair_texts(truth: Mapping[str, Any], count: int, rng: random.Random) -> list[str]:
    """Right answers, wrong answers and broken ones."""
    wrong = {**truth, "loop": truth["loop"][::-1], "digit": ["8", "1"]}
    makers = (
        lambda: write_trace(truth, LEVELS, rng),
        lambda: write_trace(wrong, LEVELS, rng),
        lambda: "<think>x</think><answer>0.5</answer>",
        lambda: "<think>oops [bold]x[/bold] \x1b[31m",
    )
    return [rng.choice(makers)() for _ in range(count)]


def scored_groups(
    rows: Sequence[tuple[Row, Sequence[str]]], scorer: Scorer, *, version: int = 0, advantage: str = "group_mean_std"
) -> list[Group]:
    """Groups scored as training scores them: all responses of a step in one call."""
    inputs = [
        RewardInput(text, row.truth, row.columns, (), "stop", 3, "What?", IDS, version)
        for row, texts in rows
        for text in texts
    ]
    scores = iter(scorer.score(inputs, strict=False))
    groups = []
    for row, texts in rows:
        found = [next(scores) for _ in texts]
        ok = [s.error is None for s in found]
        advantages = group_advantages([s.value for s in found], ok, advantage)
        samples = []
        for k, (text, score) in enumerate(zip(texts, found, strict=True)):
            segment = Segment("assistant", IDS, True, (-0.5, -0.25, -1.0))
            t = Trajectory(row.task, row.prompt_id, 0, k, version, 100 + k, (1, 2), (segment,), row.media, "stop")
            samples.append(ScoredSample(t, text, score, advantages[k], not ok[k]))
        groups.append(Group(row, "What?", tuple(samples)))
    return groups


def make_pair_run(root: Path, *, steps: int = 2, prompts: int = 6, samples: int = 4, seed: int = 0, **args: Any) -> Run:
    """A run whose rollouts were scored by `taxonomy`."""
    rng = random.Random(seed)
    spec = load_reward("taxonomy", args={"levels": LEVELS, **args})
    record = {"source": "digits", **reward_record(spec, spec.weights)}
    run = create_run(root, kind="rl", recipe_name="digits", rewards=[record], name="im")
    with Scorer(spec) as scorer:
        for step in range(steps):
            rows = []
            for p in range(prompts):
                truth = pair_truth(rng)
                rows.append((Row(f"{step}-{p}", "digits", "digits", truth), pair_texts(truth, samples, rng)))
            run.write_rollouts(step, scored_groups(rows, scorer, version=step))
    run.finish("done")
    return run


def make_table_run(root: Path, reward: Path, function: str = "reward", **options: Any) -> Run:
    """A run on a table of sums whose rollouts were scored by a user's function."""
    spec = load_reward(f"{reward}:{function}", args=options)
    run = create_run(
        root, kind="rl", recipe_name="sums", rewards=[{"source": "sums", **reward_record(spec, spec.weights)}]
    )
    rows = [
        (Row(f"r{n}", "sums", "table", {"answer": str(n)}, (), {"level": n}), [str(n), str(n + 1), "none"])
        for n in range(4)
    ]
    with Scorer(spec, timeout_seconds=5) as scorer:
        run.write_rollouts(0, scored_groups(rows, scorer))
    run.finish("done")
    return run
