"""The names a recipe may use, gathered from the packages that own them. No torch."""

from __future__ import annotations

from vlmrl.recipe.checks import Catalogs


def catalogs() -> Catalogs:
    """Tasks, algorithms and rewards that exist in this installation, each with one line about it."""
    from vlmrl.algo.advantages import ESTIMATORS
    from vlmrl.algo.family import AGGREGATIONS, ALGORITHMS
    from vlmrl.rewards import REWARDS
    from vlmrl.tasks import TASKS

    return Catalogs(
        tasks={name: _first_line(make) for name, make in TASKS.items()},
        algos={name: row.summary for name, row in ALGORITHMS.items()},
        rewards={name: _first_line(make) for name, make in REWARDS.items()},
        advantages=tuple(ESTIMATORS),
        aggregations=AGGREGATIONS,
    )


def _first_line(thing: object) -> str:
    """What a registered thing says of itself: its `summary`, else the first sentence of its documentation."""
    text = getattr(thing, "summary", None) or getattr(thing, "__doc__", None) or ""
    return str(text).strip().partition("\n")[0].strip()
