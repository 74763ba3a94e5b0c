"""Table of GPUs with the size and the bandwidth of their memory, for plans of runs on another machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlmrl.errors import RecipeError

GIB = 1 << 30
MAX_GIB = 1024
TYPICAL_BANDWIDTH = 2.0e12
"""Bandwidth that is assumed for a GPU that is not in the table, in bytes per second."""

_ONE_NAME = re.compile(r"(?!.*\dg\.)[A-Za-z0-9 ()_.-]+", re.IGNORECASE)
"""Pattern of the name of a single GPU. It does not match a list of names or a MIG slice."""


@dataclass(frozen=True)
class Gpu:
    """GPU that a plan is made for.

    Args:
        name: name for messages.
        memory_bytes: memory that CUDA makes available.
        bandwidth: bandwidth of the memory, in bytes per second.
    """

    name: str
    memory_bytes: int
    bandwidth: float = TYPICAL_BANDWIDTH


KNOWN: tuple[tuple[str, float, float], ...] = (
    ("B300", 268.0, 8.0e12), ("GB300", 268.0, 8.0e12), ("B200", 178.0, 8.0e12), ("GB200", 184.0, 8.0e12),
    ("H200", 139.8, 4.8e12), ("H20", 95.0, 4.0e12), ("GH200", 94.5, 4.0e12), ("H100-NVL", 93.1, 3.9e12),
    ("H100-PCIE", 79.1, 2.0e12), ("H100", 79.1, 3.35e12), ("H800", 79.1, 3.35e12), ("A100-40", 39.4, 1.55e12),
    ("A100", 79.1, 2.0e12), ("A800", 79.1, 2.0e12), ("RTX-PRO-6000", 94.9, 1.8e12), ("RTX-6000-ADA", 47.4, 0.96e12),
    ("L40S", 44.4, 0.86e12), ("L40", 44.4, 0.86e12), ("A6000", 47.4, 0.77e12), ("A40", 44.4, 0.7e12),
    ("L4", 22.0, 0.3e12), ("A10", 22.0, 0.6e12), ("A30", 23.5, 0.93e12), ("V100-32", 31.7, 0.9e12),
    ("V100", 15.8, 0.9e12), ("T4", 14.6, 0.32e12), ("5090", 31.4, 1.8e12), ("4090", 23.5, 1.0e12),
    ("3090", 23.6, 0.94e12), ("4080", 15.6, 0.72e12), ("3080", 9.6, 0.76e12),
)  # fmt: skip
"""(Name, GiB that CUDA makes available, bytes per second), from data sheets and `nvidia-smi`. The GiB are less than the
advertised size.
"""
MIG = re.compile(r"([1-7])G\.(\d+)GB(?:\+[A-Z0-9.]+)?", re.IGNORECASE | re.ASCII)
"""Pattern of NVIDIA's name of a MIG slice: 3g.40gb is three of the seven parts of a GPU, with 40 GB of memory."""


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that `--gpu-memory` names: GiB (`80`, `24GB`), a name (`H100`), or a MIG slice (`3g.40gb`).

    Raises: RecipeError when the text is none of these.
    """
    word = text.strip()
    if any(word.upper() == name for name, _, _ in KNOWN):  # names first: some of them are numbers
        gpu = known_gpu(word)
        assert gpu is not None
        return gpu
    if number := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", word, re.IGNORECASE | re.ASCII):
        size = float(number[1])
        if 0 < size <= MAX_GIB:
            return Gpu(f"{size:g} GiB GPU", int(size * GIB))
    if slice_ := MIG.fullmatch(word.rpartition("-")[2].removeprefix("MIG ")):
        size = int(slice_[2])
        if 0 < size <= MAX_GIB:
            return Gpu(f"MIG slice {word}", int(size * GIB * 0.98))
    if gpu := _ONE_NAME.fullmatch(word) and known_gpu(word):
        return gpu
    names = ", ".join(name for name, _, _ in KNOWN)
    raise RecipeError(f"--gpu-memory cannot be `{text}`", hint=f"GiB (80), a MIG slice (3g.40gb), or one of {names}")


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU of the table whose name occurs in `name`, such as `NVIDIA H100 80GB HBM3`; None if none does."""
    plain = re.sub(r"[^A-Z0-9]+", "-", name.upper())
    fitting = [(len(known), known, gib, speed) for known, gib, speed in KNOWN if re.search(_pattern(known), plain)]
    if not fitting:
        return None
    _, known, gib, speed = max(fitting)
    return Gpu(known, int(gib * GIB), speed)


def _pattern(known: str) -> str:
    """Return a pattern for a name in the table: all its words, in this order, possibly with other words in between.

    Example: `A100-40` matches A100-SXM4-40GB, A10 does not.
    """
    words = r"(?:-[A-Z0-9]+)*?-?".join(map(re.escape, known.split("-")))
    return rf"(?:^|[^A-Z0-9]){words}(?:GB)?(?:$|[^A-Z0-9])"
