"""Runs that were validated at epochs, written by the store itself, with numbers that a test states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.store.runs import Run, create_run

STEPS_PER_EPOCH = 2
PAPER = {
    "source": "arXiv:2504.02587, Table 3",
    "numbers": {
        "test/pass8/pass@8": {"base": 0.29, "sft": 0.252, "rl": 0.352, "sft_max": 0.32, "rl_max": 0.427},
        "validation/pass8/pass@8": {"base": 0.36, "rl": 0.485, "rl_max": 0.557},
    },
}


def epoch_run(
    root: Path,
    name: str,
    values: Mapping[str, Sequence[float]],
    *,
    kind: str = "rl",
    seed: int = 0,
    lr: float = 1e-6,
    best: int | None = None,
    train: Mapping[str, Sequence[float | None]] | None = None,
    paper: Mapping[str, Any] = PAPER,
) -> Run:
    """A finished run, validated before training and after each epoch of STEPS_PER_EPOCH steps.

    Args:
        values: metric of a validation, without `eval/` -> its value at each epoch, from 0.
        best: epoch that validation selected.
        train: training metric -> its value at each step.
    """
    recipe = {
        "kind": kind, "model": {"path": "m"}, "data": [{"path": "d"}], "optim": {"lr": lr}, "train": {"seed": seed},
        "eval": {"every_epochs": 1, "every_steps": 0, "sets": ["validation", "test"], "allow_test_split": True},
        "paper": dict(paper),
    }  # fmt: skip
    run = create_run(
        root, kind=kind, recipe_name=name, name=name, argv=["vlmrl", "train", "r.toml"],
        resolved={"schema": 1, "recipe": recipe, "origins": {}},
    )  # fmt: skip
    epochs = len(next(iter(values.values())))
    with run:
        for epoch in range(epochs):
            line = {f"eval/{metric}": of_metric[epoch] for metric, of_metric in values.items()}
            run.log(epoch * STEPS_PER_EPOCH, "validation", {"eval/epoch": float(epoch), **line})
            for step in range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH):
                if epoch + 1 < epochs:
                    numbers = {metric: steps[step] for metric, steps in (train or {}).items()}
                    run.log(step, "train", {"rollout/samples": 8, **numbers})
        if best is not None:
            run.set_best(best * STEPS_PER_EPOCH, "accuracy", 0.5)
        run.finish("done")
    return run
