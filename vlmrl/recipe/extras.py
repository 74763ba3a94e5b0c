"""How optional packages are installed: one place for the words of every hint."""

from __future__ import annotations

NEEDS_TORCH = {"flash-attn", "causal-conv1d"}
"""Extras whose packages are compiled against the installed torch; pip hides it from them unless told otherwise."""


def install_line(*extras: str) -> str:
    """Return the command that installs optional dependencies of vlmrl, which is on no package index.

    Example: pip install '.[vllm]' (in vlmrl's checkout)
    """
    built = " --no-build-isolation" if NEEDS_TORCH & set(extras) else ""
    return f"pip install '.[{','.join(extras)}]'{built} (in vlmrl's checkout)"
