"""Built-in rewards of a judge, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards import Builtin
from vlmrl.tasks.judged.reward import judge, vfig

REWARDS: Mapping[str, Builtin] = {
    "judge": Builtin(judge, "a model as a judge: compares the drawn response with the picture, by a rubric", version=1),
    "vfig": Builtin(vfig, "VFig's published reward for SVG code: a judge on four axes; needs [judge]", version=2),
}
