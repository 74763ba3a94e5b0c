"""GPUs of this machine as the driver lists them; the reason if torch cannot use assigned GPUs. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from vlmrl.errors import LaunchError
from vlmrl.redaction.redact import excerpt, first_line

SLURM_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Variables with the GPUs that Slurm assigned to this job, for clusters that do not set CUDA_VISIBLE_DEVICES."""
NO_DEVICES = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that mean "no GPU"."""
MOST_GPUS = 65_536
"""Largest GPU index and largest number of GPUs that `--gpus` accepts: more than any machine or plan has."""
OLDEST_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""Major version of CUDA -> the oldest Linux driver that runs it. Source: NVIDIA's CUDA toolkit release notes, table of
minor version compatibility."""


@dataclass(frozen=True)
class MachineGpu:
    """GPU of this machine, or a slice of one (MIG).

    Args:
        index: number on the machine; -1 = a slice.
        uuid: identifier that the driver gives the GPU or slice.
        used_mib: memory in use, in MiB; None = unknown.
    """

    index: int
    uuid: str
    used_mib: int | None

    @property
    def name(self) -> str:
        """Entry for CUDA_VISIBLE_DEVICES: the index if there is one, because some libraries accept only numbers."""
        return self.uuid if self.index < 0 else str(self.index)


def machine_gpus() -> list[MachineGpu]:
    """Return all NVIDIA GPUs of this machine, as `nvidia-smi` lists them; [] if that program is not installed.

    Raises: LaunchError when the driver hangs, or when the versions of the driver and its library differ.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        raise LaunchError("nvidia-smi does not answer", hint="the driver may hang: see `dmesg`") from None
    if "mismatch" in (output := done.stdout + done.stderr):
        raise LaunchError(
            f"nvidia-smi: {output.strip().splitlines()[0]}", hint="the driver was updated while it was loaded: reboot"
        )
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    return [MachineGpu(int(index), uuid, int(used) if used.isdigit() else None) for index, uuid, used in rows]


def visible_gpus(gpus: Sequence[MachineGpu], environ: Mapping[str, str]) -> list[MachineGpu]:
    """Return the GPUs that this process may use, in its order.

    They are the GPUs in CUDA_VISIBLE_DEVICES; if it is not set, those in Slurm's variables; if these are not set
    either, all. As in CUDA, the list ends at the first entry that is no GPU.
    """
    slurm = next((environ[name] for name in SLURM_VARIABLES if environ.get(name)), None)
    listed = environ.get("CUDA_VISIBLE_DEVICES", slurm)
    if listed is None:
        return list(gpus)
    usable: list[MachineGpu] = []
    for word in (w.strip() for w in listed.split(",")):
        match = [gpu for gpu in gpus if word and (word == str(gpu.index) or gpu.uuid.startswith(word))]
        if word.startswith("MIG-"):
            match = [MachineGpu(-1, word, None)]  # a slice of a GPU, which the list of GPUs does not hold
        if len(match) != 1:
            break
        usable += match
    return usable


def parse_gpus(option: str) -> tuple[int, tuple[int, ...]]:
    """Return (number of GPUs, their indices) from the value of `--gpus`; the number is 0 or the indices are empty.

    Raises: LaunchError when it is neither a number nor a list of different numbers.
    """
    words = [w.strip() for w in option.split(",") if w.strip()]
    if not words or not all(w.isascii() and w.isdigit() for w in words):
        raise LaunchError(f"--gpus cannot be `{option}`", hint="a number of GPUs (4), or their numbers (0,2,5)")
    numbers = tuple(int(w[:20]) for w in words)
    if max(numbers) > MOST_GPUS:
        raise LaunchError(
            f"--gpus {excerpt(option, 40)}: at most {MOST_GPUS:,}", hint="a number of GPUs (4), or which (0,2,5)"
        )
    if "," not in option:
        if numbers[0] == 0:
            raise LaunchError("--gpus 0 leaves nothing to run on", hint="GPU 0 alone is `--gpus 0,`")
        return numbers[0], ()
    if len(set(numbers)) < len(numbers):
        raise LaunchError(f"--gpus {option} names a GPU twice", hint="one process per GPU")
    return 0, numbers


def assigned_gpus(environ: Mapping[str, str]) -> str:
    """Return the evidence that GPUs are assigned to this process, as text; "" if none are.

    None are assigned if neither a variable nor `nvidia-smi` lists a GPU, or if CUDA_VISIBLE_DEVICES excludes all.

    Example: `CUDA_VISIBLE_DEVICES=0,1`.
    """
    for name in ("CUDA_VISIBLE_DEVICES", *SLURM_VARIABLES):
        listed = environ.get(name)
        if listed is not None and listed.partition(",")[0].strip() not in NO_DEVICES:
            return f"{name}={listed}"
        if listed is not None and name == "CUDA_VISIBLE_DEVICES":
            return ""
    count = len(machine_gpus())
    return f"nvidia-smi lists {count}" if count else ""


@cache
def missing_gpus() -> tuple[str, str] | None:
    """Return (problem, remedy) if torch cannot use the GPUs of this process; None if it can, or if there are none."""
    import torch

    if torch.cuda.is_available():
        return None
    assigned = assigned_gpus(os.environ)
    if not assigned:
        return None
    what = f"this process has GPUs ({assigned}), and torch {torch.__version__} sees none: {_reason()}"
    return what, f"{_remedy(torch.version.cuda)}; --set model.device=cpu runs on the CPU all the same"


def require_gpus() -> None:
    """Raise a LaunchError if `missing_gpus` returns a problem, so that no run moves from GPUs to the CPU unnoticed."""
    if missing := missing_gpus():
        raise LaunchError(missing[0], hint=missing[1])


def _reason() -> str:
    """Return the message of the error that torch raises when it initialises CUDA."""
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
    return f"torch for CUDA {cuda} needs {driver} (`nvidia-smi` shows yours): update it, or install a torch for it"
