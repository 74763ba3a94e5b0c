"""A small run with everything a report shows, written by the store itself."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.store import layout
from vlmrl.store.media import write_shard
from vlmrl.store.runs import Run, create_run
from vlmrl.types import Group, Media, Row, Score, ScoredSample, Segment, Trajectory

HOSTILE = "</style></title><script>alert('x')</script>\" onload=\"y' --> <img src=http://evil.example/a.png> {{ 7*7 }}"


def png(shade: int, size: tuple[int, int] = (40, 30)) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", size, (shade, 255 - shade, 90)).save(sink, "PNG")
    return sink.getvalue()


IMAGES = [png(s) for s in (10, 120, 240)]
MEDIA = tuple(Media(hashlib.sha256(content).hexdigest(), 40, 30) for content in IMAGES)


def group(
    prompt_id: str, scores: list[float], *, step: int = 0, text: str = "answer", media: tuple[Media, ...] = MEDIA[:2]
) -> Group:
    row = Row(prompt_id, "digits", "digits", {"same": True, "digit": ["3", "3"]}, media)
    samples = []
    for k, score in enumerate(scores):
        segments = (Segment("assistant", (5, 6), True, (-0.5, -0.25)),)
        t = Trajectory("digits", prompt_id, 0, k, step, k, (1, 2), segments, media, "stop" if k else "length")
        scored = Score(score, {"format": 1.0, "level": None}, note="a note" if k == 0 else "")
        if score != score:
            scored = Score(score, {}, error="ZeroDivisionError: row 3")
        samples.append(ScoredSample(t, f"{text} {prompt_id}.{k}", scored, advantage=score - 0.5))
    return Group(row, f"<|im_start|>user {prompt_id}", tuple(samples))


def evaluation_row(prompt_id: str, score: float, **changes: Any) -> dict[str, Any]:
    outcome = {"accuracy": float(score > 0.5), "label": 1.0, "confidence": score, "brier": (1 - score) ** 2}
    row = {
        "prompt_id": prompt_id,
        "sample": 0,
        "seed": 0,
        "source": "digits",
        "task": "digits",
        "truth": {"same": True, "distance": 0},
        "text": f"said {prompt_id}",
        "finish": "stop",
        "num_tokens": 4,
        "score": score,
        "parts": {"format": 1.0},
        "note": "",
        "error": None,
        "status": "ok",
        "images": [{"sha256": m.sha256, "width": 40, "height": 30, "kind": "image"} for m in MEDIA[:2]],
        "outcome": outcome,
    }
    return {**row, **changes}


def evaluate_run(run_dir: Path, name: str, scores: list[float], **meta: Any) -> None:
    rows = [evaluation_row(f"p{i}", s) for i, s in enumerate(scores)]
    meta = {"split": "test", "source": "digits", "greedy": True, **meta}
    write_evaluation(layout.eval_dir(run_dir, name), Evaluation(rows, summarise(rows)), meta)


def make_run(
    root: Path, *, steps: int = 6, text: str = "answer", kind: str = "rl", updates: bool = True, **changes: Any
) -> Run:
    """A finished run with metrics, rollouts, images, a validation every other step and a test evaluation."""
    resolved = {
        "schema": 1,
        "recipe": {"kind": kind, "model": {"path": "demo/model"}, "optim": {"lr": 0.001}, "data": [{"path": "d"}]},
        "origins": {"kind": "default", "model.path": "digits.toml:3", "optim.lr": "--set", "data.0.path": "default"},
    }
    settings: dict[str, Any] = {
        "kind": kind,
        "recipe_name": "digits",
        "argv": ["vlmrl", "train", "digits.toml"],
        "resolved": resolved,
        "recipe_text": '[model]\npath = "demo/model"\n',
        "datasets": [{"name": "digits", "path": "gone", "rows": 9}],
    }
    run = create_run(root, **{**settings, **changes})
    with run:
        write_shard(run.dir / layout.MEDIA / "media-00000.arrow", zip([m.sha256 for m in MEDIA], IMAGES, strict=True))
        for step in range(steps):
            mean = 0.4 + 0.05 * step
            groups = [
                group("high", [0.9, 1.0], step=step, text=text),
                group("low", [0.0, 0.1], step=step, text=text),
                group("split", [0.0, 1.0], step=step, text=text),
                group("plain", [0.5, 0.5], step=step, text=text),
            ]
            run.write_rollouts(step, groups)
            run.log(
                step,
                "train",
                {
                    "reward/mean": mean,
                    "reward/low": mean - 0.1,
                    "reward/high": mean + 0.1,
                    "reward/part/format": 1.0,
                    "rollout/dead_group_share": 0.25,
                    "rollout/samples": 8,
                    "rollout/response_tokens_mean": 2.0,
                    **({"optim/grad_norm": 1.5} if updates else {}),
                    "policy/sampler_gap_max": 1e-6,
                    "time/step_seconds": 2.0,
                    "custom/thing": step,
                },
            )
            if step % 2 == 0:
                run.log(
                    step,
                    "validation",
                    {
                        "eval/reward": mean,
                        "eval/reward_low": mean - 0.02,
                        "eval/reward_high": mean + 0.02,
                        "eval/accuracy": mean,
                        "eval/brier": 0.2,
                    },
                )
        run.event(steps, "ended", reason="all steps done")
    evaluate_run(run.dir, "test", [0.9, 0.8, 0.2, 0.7], step=steps)
    return run
