"""Command that installs optional packages, declared once for all hints."""

from __future__ import annotations

NEEDS_TORCH = {"flash-attn", "causal-conv1d"}
"""Extras with packages that must be compiled against the installed torch. pip hides torch from builds by default."""


def install_line(*extras: str) -> str:
    """Return the command that installs extras. It must run in a checkout, because vlmrl is not on a package index.

    Example: pip install '.[vllm]' (in vlmrl's checkout)
    """
    built = " --no-build-isolation" if NEEDS_TORCH & set(extras) else ""
    return f"pip install '.[{','.join(extras)}]'{built} (in vlmrl's checkout)"
