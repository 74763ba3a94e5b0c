"""Built-in rewards of the task counting, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards import Builtin
from vlmrl.tasks.counting.published import rllava_count
from vlmrl.tasks.counting.reward import count

REWARDS: Mapping[str, Builtin] = {
    "count": Builtin(count, "counting: the right whole number in the only answer, and the form", version=3),
    "rllava_count": Builtin(
        rllava_count, "counting: the reward that RLLaVA published, to the digit, to reproduce its runs", version=2
    ),
}
