"""The names a recipe may use, gathered from the packages that own them. No torch."""

from __future__ import annotations

from vlmrl.recipe.checks import Catalogs


def catalogs() -> Catalogs:
    """Tasks, algorithms and rewards that exist in this installation, each with one line about it."""
    from dataclasses import asdict

    from vlmrl.algo.advantages import ESTIMATORS
    from vlmrl.algo.family import AGGREGATIONS, ALGORITHMS, CHOICES
    from vlmrl.rewards import REWARDS
    from vlmrl.tasks import TASKS

    return Catalogs(
        tasks={name: entry.summary for name, entry in TASKS.items()},
        algos={name: row.summary for name, row in ALGORITHMS.items()},
        rewards={name: builtin.summary for name, builtin in REWARDS.items()},
        advantages=tuple(ESTIMATORS),
        aggregations=AGGREGATIONS,
        cells={cell: CHOICES[cell] for cell in ("scale", "ratio", "surrogate", "kl")},
        rows={name: asdict(row) for name, row in ALGORITHMS.items()},
        no_baseline=tuple(name for name, estimator in ESTIMATORS.items() if not estimator.needs_group),
        no_baseline_algos=tuple(name for name, row in ALGORITHMS.items() if not row.needs_group),
        variants={name: entry.variant_names for name, entry in TASKS.items()},
        profiles={name: entry.profiles for name, entry in TASKS.items()},
    )
