"""Runs with one planted fault each, written by the store's own writers and scored by the real reward."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from one_group import group_advantages
from reward_runs import LEVELS, pair_truth

from vlmrl.diagnose.run import Diagnosis, diagnose
from vlmrl.recipe.load import load_recipe
from vlmrl.rewards import reward_record
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.scoring import Scorer
from vlmrl.store.runs import Run, create_run, open_run
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.pairs.task import write_trace
from vlmrl.types import Group, Media, RewardInput, Row, Score, ScoredSample, Segment, Trajectory

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Same?<|im_end|>\n<|im_start|>assistant\n"
RECIPE = """
[model]
path = "m"
dtype = "float32"
[[data]]
path = "d"
task = "digits"
[rollout]
max_new_tokens = 40
"""


@dataclass(frozen=True)
class Plan:
    """How a run is written; every test changes what its fault changes.

    Args:
        respond: (truth, rng) -> text, cut?      truth: rng -> truth of a row.
        metrics: step -> what to write over the usual metrics of a step.
        validation: metrics of the validations, by step.      score: response -> score, in place of the reward's.
        settings: `--set` of the recipe.      parts, frozen: as the run notes them at its start.
        pixels: width and height of every image; None = rows without images.
    """

    respond: Callable[[Mapping[str, Any], random.Random], str]
    truth: Callable[[random.Random], dict[str, Any]] = pair_truth
    cut: Callable[[str], bool] = lambda text: False
    tokens: Callable[[str], int] = lambda text: len(text) // 3
    prompt: str = PROMPT
    spec: RewardSpec = field(default_factory=lambda: load_reward("taxonomy", args={"levels": LEVELS}))
    metrics: Callable[[int], Mapping[str, Any]] = lambda step: {}
    validations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    settings: Sequence[str] = ()
    trained: Mapping[str, int] = field(default_factory=lambda: {"vision": 300_000, "language": 1_000_000})
    frozen: Mapping[str, int] = field(default_factory=dict)
    steps: int = 6
    datasets: Sequence[Mapping[str, Any]] = ()
    validated_rows: Sequence[str] = ()
    error: str | None = None
    pixels: tuple[int, int] | None = (8, 8)


def look(run: Run) -> Diagnosis:
    """The diagnosis of a run, read anew; it can be written as JSON."""
    found = diagnose(open_run(run.dir.parent, run.id))
    json.dumps(found.as_dict(), allow_nan=False)
    return found


def changed(run: Run, **fields: Any) -> Diagnosis:
    """The diagnosis of a run whose manifest says otherwise."""
    file = run.dir / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return look(run)


def mixed(truth: Mapping[str, Any], rng: random.Random) -> str:
    """What a model writes that is learning: right, wrong and hedged answers, of different lengths for no reason."""
    wrong = {**truth, "loop": truth["loop"][::-1], "digit": ["8", "1"], "same": False}
    kind = rng.random()
    said = truth if kind < 0.5 else wrong
    text = write_trace(said, LEVELS, rng) if kind < 0.85 else "<think>x</think><answer>0.5</answer>"
    return text.replace("</think>", " " * rng.randrange(0, 30) + "</think>")


def make_run(root: Path, plan: Plan, *, prompts: int = 6, samples: int = 6) -> Run:
    """Write a run by plan, as training writes it."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "r.toml").write_text(RECIPE)
    loaded = load_recipe(root / "r.toml", overrides=["optim.lr=1e-4", *plan.settings])
    record = {"source": "digits", **reward_record(plan.spec, plan.spec.weights)}
    run = create_run(
        root / "runs",
        kind="rl",
        recipe_name="r",
        recipe_text=loaded.text,
        resolved=loaded.resolved,
        argv=["vlmrl", "train", "r.toml", "--name", "ill"],
        rewards=[record],
        name="ill",
        datasets=plan.datasets,
    )
    run.event(0, "parts", trained=dict(plan.trained), frozen=dict(plan.frozen))
    rng = random.Random(0)
    with Scorer(plan.spec) as scorer:
        for step in range(plan.steps):
            groups = [_group(plan, scorer, f"{step}-{i:016x}", step, samples, rng) for i in range(prompts)]
            run.write_rollouts(step, groups)
            run.log(step, "train", _metrics(groups, step) | dict(plan.metrics(step)))
    for step, metrics in plan.validations.items():
        run.log(step, "validation", metrics)
    if plan.validated_rows:
        _write_validation(run.dir, plan.validated_rows)
    run.finish("failed" if plan.error else "done", plan.error)
    return run


def _group(plan: Plan, scorer: Scorer, prompt_id: str, step: int, samples: int, rng: random.Random) -> Group:
    truth = plan.truth(rng)
    media = (Media(f"{prompt_id:0>64}", *plan.pixels),) if plan.pixels else ()
    row = Row(f"digits-{prompt_id}", "digits", "digits", truth, media)
    texts = [plan.respond(truth, rng) for _ in range(samples)]
    cut = [plan.cut(text) for text in texts]
    inputs = [
        RewardInput(text, truth, {}, (), "length" if c else "stop", plan.tokens(text), plan.prompt)
        for text, c in zip(texts, cut, strict=True)
    ]
    scores = scorer.score(inputs, strict=False)
    ok = [s.error is None for s in scores]
    advantages = group_advantages([s.value for s in scores], ok, "group_mean_std")
    scored = []
    for k, (text, score) in enumerate(zip(texts, scores, strict=True)):
        count = max(1, plan.tokens(text))
        segment = Segment("assistant", tuple(range(count)), True, (-0.5,) * count)
        finish = "length" if cut[k] else "stop"
        t = Trajectory("digits", row.prompt_id, 0, k, step, 7 + k, (1, 2), (segment,), media, finish)
        scored.append(ScoredSample(t, text, score, advantages[k], not ok[k]))
    return Group(row, plan.prompt, tuple(scored))


def _metrics(groups: Sequence[Group], step: int) -> dict[str, Any]:
    """The metrics of a step that the rules read, as train/rl.py computes them."""
    samples = [s for g in groups for s in g.samples]
    values: list[Score] = [s.score for s in samples if s.score.error is None]
    dead = [len({s.score.value for s in g.samples}) == 1 for g in groups]
    learned = not all(dead)
    norms = {"": 1.0, "/vision": 0.3, "/language": 0.9} if learned else {}
    return {
        "reward/errors": sum(s.score.failed for s in samples),
        "rollout/samples": len(samples),
        "reward/unavailable": sum(s.score.status == "unavailable" for s in samples),
        "reward/mean": fmean(s.value for s in values) if values else 0.0,
        "rollout/dead_group_share": fmean(dead),
        "rollout/truncated_share": fmean(s.trajectory.finish == "length" for s in samples),
        "rollout/response_tokens_mean": fmean(len(s.trajectory.response_ids) for s in samples),
        "policy/entropy": 0.8,
        "policy/sampler_gap_mean": 1e-6,
        "policy/sampler_gap_max": 5e-6,
        "policy/sampler_ess": 1.0,
        **{f"optim/grad_norm{part}": norm for part, norm in norms.items()},
        "optim/lr": 1e-4,
        "optim/updates": (step + 1) * learned,
    }


def _write_validation(run_dir: Path, prompt_ids: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from vlmrl.store import layout

    folder = layout.eval_dir(run_dir, "validation-digits-step-000000")
    folder.mkdir(parents=True)
    images = [[{"sha256": f"{i:0>64}", "width": 8, "height": 8, "kind": "image"}] for i in prompt_ids]
    pq.write_table(
        pa.table({"prompt_id": [f"held-{i}" for i in prompt_ids], "images": images}), folder / layout.EVAL_ROWS
    )
    (folder / layout.EVAL_SUMMARY).write_text('{"meta": {"during": "training"}, "metrics": {}, "schema": 1}')


def plan(**changes: Any) -> Plan:
    """A healthy plan with these changes."""
    return replace(Plan(mixed), **changes)
