"""Built-in rewards of the task figures, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards import Builtin
from vlmrl.tasks.vfig.reward import MODELS, NAME, svg_figure, svg_models, vfig_rules

REWARDS: Mapping[str, Builtin] = {
    NAME: Builtin(
        svg_figure,
        "SVG code: visible elements and picture beside the true ones; no model; runs in workers",
        version=4,
        shown=("pictures",),
    ),
    MODELS: Builtin(
        svg_models,
        "SVG code: its picture beside the true one, as LPIPS, CLIP, DINO or SigLIP see it; runs in workers",
        version=3,
        shown=("pictures", "device"),
    ),
    "vfig_rules": Builtin(
        vfig_rules, "SVG code: VFig's published score of shapes and arrows, to the digit, to repeat numbers", version=2
    ),
}
