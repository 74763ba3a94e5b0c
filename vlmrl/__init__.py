"""vlmrl: reinforcement learning of vision-language models, from a dataset to a model you can trust.

This module exports what a user's own task and reward need. Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmrl.errors import RewardUnavailable
    from vlmrl.metric import Metric
    from vlmrl.tasks.attack import Attack
    from vlmrl.tasks.base import NewRow, NoFile, PooledMetrics, ResponseFile, Task
    from vlmrl.tasks.figure import Histogram, Lines, Table
    from vlmrl.types import Call, RewardInput, RewardResult

__version__ = "0.1.0"
__all__ = [
    "Attack",
    "Call",
    "Histogram",
    "Lines",
    "Metric",
    "NewRow",
    "NoFile",
    "PooledMetrics",
    "ResponseFile",
    "RewardInput",
    "RewardResult",
    "RewardUnavailable",
    "Table",
    "Task",
    "__version__",
]
_HOMES = {
    "Attack": "vlmrl.tasks.attack",
    "Call": "vlmrl.types",
    "Histogram": "vlmrl.tasks.figure",
    "Lines": "vlmrl.tasks.figure",
    "Metric": "vlmrl.metric",
    "NewRow": "vlmrl.tasks.base",
    "NoFile": "vlmrl.tasks.base",
    "PooledMetrics": "vlmrl.tasks.base",
    "ResponseFile": "vlmrl.tasks.base",
    "RewardInput": "vlmrl.types",
    "RewardResult": "vlmrl.types",
    "RewardUnavailable": "vlmrl.errors",
    "Table": "vlmrl.tasks.figure",
    "Task": "vlmrl.tasks.base",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `vlmrl` has no attribute `{name}`")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
