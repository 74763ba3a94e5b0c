"""Command that installs optional packages, declared once for all hints."""

from __future__ import annotations

NEEDS_TORCH = {"flash-attn", "causal-conv1d"}
"""Extras whose packages are compiled against the installed torch. By default pip hides torch from such a build."""


def install_line(*extras: str) -> str:
    """Return the command that installs optional dependencies. It runs in a checkout: vlmrl is on no package index.

    Example: pip install '.[vllm]' (in vlmrl's checkout)
    """
    built = " --no-build-isolation" if NEEDS_TORCH & set(extras) else ""
    return f"pip install '.[{','.join(extras)}]'{built} (in vlmrl's checkout)"
