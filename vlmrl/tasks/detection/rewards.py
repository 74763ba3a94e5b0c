"""Built-in rewards of the task detection, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards import Builtin
from vlmrl.tasks.detection.published import rllava_boxes
from vlmrl.tasks.detection.reward import NAME, box_list

REWARDS: Mapping[str, Builtin] = {
    NAME: Builtin(
        box_list,
        "detection: all boxes beside the true ones, with a proper score for their confidences",
        version=5,
        shown=("overlay",),
    ),
    "rllava_boxes": Builtin(
        rllava_boxes, "detection: the reward that RLLaVA published, to the digit, to reproduce its runs", version=2
    ),
}
