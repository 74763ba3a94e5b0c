"""GPUs of this machine as the driver lists them, and why torch sees none where some are assigned. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from vlmrl.errors import LaunchError, first_line

SLURM_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Variables with the GPUs that Slurm gave this job, where it does not set CUDA_VISIBLE_DEVICES itself."""
NO_DEVICES = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that mean no device."""
OLDEST_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""Major version of CUDA -> the oldest Linux driver that runs it. Source: NVIDIA's CUDA toolkit release notes, table of
minor version compatibility."""


@dataclass(frozen=True)
class Card:
    """NVIDIA GPU, or a slice of one (MIG).

    Args:
        index: its number on the machine; -1 = a slice.
        used_mib: memory in use, in MiB; None = unknown.
    """

    index: int
    uuid: str
    used_mib: int | None

    @property
    def name(self) -> str:
        """Entry for CUDA_VISIBLE_DEVICES. A number where there is one: some libraries read only numbers there."""
        return self.uuid if self.index < 0 else str(self.index)


def machine_cards() -> list[Card]:
    """Return all NVIDIA GPUs of this machine, as `nvidia-smi` lists them; empty if that program does not exist.

    Raises: LaunchError when the driver hangs, or its version is not that of its library.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        raise LaunchError("nvidia-smi does not answer", hint="the driver may hang: see `dmesg`") from None
    if "mismatch" in (output := result.stdout + result.stderr):
        raise LaunchError(
            f"nvidia-smi: {output.strip().splitlines()[0]}", hint="the driver was updated while it was loaded: reboot"
        )
    if result.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.count(",") == 2]
    return [Card(int(index), uuid, int(used) if used.isdigit() else None) for index, uuid, used in rows]


def visible_cards(cards: Sequence[Card], environ: Mapping[str, str]) -> list[Card]:
    """Return the GPUs this process may use, in its order: by CUDA_VISIBLE_DEVICES, else by Slurm's variables, else all.

    As in CUDA, the list ends at the first entry that is no GPU.
    """
    slurm = next((environ[name] for name in SLURM_VARIABLES if environ.get(name)), None)
    listed = environ.get("CUDA_VISIBLE_DEVICES", slurm)
    if listed is None:
        return list(cards)
    chosen: list[Card] = []
    for word in (w.strip() for w in listed.split(",")):
        match = [c for c in cards if word and (word == str(c.index) or c.uuid.startswith(word))]
        if word.startswith("MIG-"):
            match = [Card(-1, word, None)]  # a slice of a GPU is not in the list of GPUs
        if len(match) != 1:
            break
        chosen += match
    return chosen


def assigned_gpus(environ: Mapping[str, str]) -> str:
    """Return what assigns GPUs to this process, as text; "" when nothing does, or when it was told to use none.

    Example: `CUDA_VISIBLE_DEVICES=0,1`.
    """
    for name in ("CUDA_VISIBLE_DEVICES", *SLURM_VARIABLES):
        listed = environ.get(name)
        if listed is not None and listed.partition(",")[0].strip() not in NO_DEVICES:
            return f"{name}={listed}"
        if listed is not None and name == "CUDA_VISIBLE_DEVICES":
            return ""
    count = len(machine_cards())
    return f"nvidia-smi lists {count}" if count else ""


@cache
def missing_gpus() -> tuple[str, str] | None:
    """Return why this process cannot use its GPUs: (what is wrong, what to do); None if it can, or has none."""
    import torch

    if torch.cuda.is_available():
        return None
    assigned = assigned_gpus(os.environ)
    if not assigned:
        return None
    what = f"this process has GPUs ({assigned}), and torch {torch.__version__} sees none: {_reason()}"
    return what, f"{_remedy(torch.version.cuda)}; --set model.device=cpu runs on the CPU instead"


def require_gpus() -> None:
    """Raise a LaunchError if `missing_gpus` returns a reason: a run for GPUs never falls back to the CPU silently."""
    if missing := missing_gpus():
        raise LaunchError(missing[0], hint=missing[1])


def _reason() -> str:
    """Return torch's own message for why it cannot use a GPU."""
    import torch

    if torch.version.cuda is None:
        return "it is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "it finds no device that it can use"


def _remedy(cuda: str | None) -> str:
    if cuda is None:
        return f"install a torch with CUDA into {sys.prefix}"
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    driver = f"driver {oldest} or newer" if oldest else "a driver that runs it"
    return (
        f"torch for CUDA {cuda} needs {driver} (`nvidia-smi` shows yours): update the driver, or install another torch"
    )
