"""Built-in rewards of the task grounding, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards import Builtin
from vlmrl.tasks.grounding.published import rllava_box
from vlmrl.tasks.grounding.reward import box_iou

REWARDS: Mapping[str, Builtin] = {
    "box_iou": Builtin(
        box_iou,
        "grounding: overlap of the only box with the true box, in a declared coordinate space",
        version=4,
        shown=("overlay",),
    ),
    "rllava_box": Builtin(
        rllava_box, "grounding: the reward that RLLaVA published, to the digit, to reproduce its runs", version=1
    ),
}
