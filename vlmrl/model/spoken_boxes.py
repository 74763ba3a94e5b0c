"""Coordinate space in which the published weights of a model family state boxes. Nothing of torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmrl.rewards.boxes.planes import Space

SPOKEN: Mapping[str, Space] = {
    "qwen2_vl": "thousand",
    "qwen2_5_vl": "seen",
    "qwen3_vl": "thousand",
    "qwen3_vl_moe": "thousand",
    "qwen3_5": "thousand",
    "qwen3_5_moe": "thousand",
    "glm4v": "thousand",
    "glm46v": "thousand",
    "internvl": "thousand",
    "minicpmv4_6": "thousand",
    "paligemma": "loc",
}
"""Model type -> space. A family that is not here was not trained on boxes, or its makers do not say how it states them.

Sources: the model cards and cookbooks of the families (Qwen-VL, GLM-V, InternVL, PaliGemma); for MiniCPM-V its makers'
answer in issue 982 of their repository.
"""
