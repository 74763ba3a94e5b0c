"""Choice of GPUs for a run (`--gpus 4` or `--gpus 0,2,5`): visible to this process, and not used by another one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from vlmrl.dist.world import ENGINES_VARIABLE
from vlmrl.errors import LaunchError
from vlmrl.model.gpus import MachineGpu, machine_gpus, parse_gpus, visible_gpus
from vlmrl.store.provenance import usable_threads
from vlmrl.untrusted import number_of

BUSY_MIB = 1024
"""Memory in use, in MiB, above which a GPU counts as busy. On an idle GPU the driver uses at most a few hundred MiB."""


@dataclass(frozen=True)
class Placement:
    """Processes of this machine, and the GPUs they use.

    Args:
        ranks: number of processes that train or evaluate.
        devices: value of CUDA_VISIBLE_DEVICES; None = the ranks run on the CPU.
        threads: CPU threads of each rank.
        engines: GPUs of the engines that have their own processes; on the CPU, one placeholder per engine.
    """

    ranks: int
    devices: str | None
    threads: int
    engines: tuple[str, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        """Environment of the ranks."""
        variables = {"OMP_NUM_THREADS": str(self.threads)}
        if self.engines:
            variables[ENGINES_VARIABLE] = ",".join(self.engines)
        if self.devices is None:
            return variables
        # nvidia-smi numbers GPUs by bus; CUDA does so only with this variable.
        return variables | {"CUDA_VISIBLE_DEVICES": self.devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def place(option: str, engines: int = 0, parts: int = 1) -> Placement:
    """Return the processes and GPUs for a value of `--gpus`.

    Args:
        option: the count of GPUs (of processes, on a machine without a GPU), or GPU numbers: `0,2,5`; `3,` is GPU 3
            alone. With CUDA_VISIBLE_DEVICES, the numbers refer to the GPUs that it lists, as everywhere in CUDA.
        engines: number of engine GPUs: the last ones of the list, with their own processes.
        parts: number of processes that share an engine, if `engines` is 0.
    Raises: LaunchError if `option` is neither a count nor a list of numbers, there are too few GPUs, they are in use,
        or the number of ranks is not a multiple of `parts`.
    """
    count, chosen = parse_gpus(option)
    gpus = visible_gpus(machine_gpus(), os.environ)
    processes = len(chosen) if chosen else count
    ranks = processes - engines
    if ranks < 1:
        raise LaunchError(
            f"--gpus {option}: rollout.engine_gpus = {engines} leaves no GPU for training",
            hint=f"give at least {engines + 1} GPUs, or lower rollout.engine_gpus",
        )
    if not engines and ranks % parts:
        raise LaunchError(
            f"--gpus {option}: {ranks} is not a multiple of rollout.tensor_parallel = {parts}",
            hint=f"give --gpus {parts * -(-ranks // parts)}, or change rollout.tensor_parallel",
        )
    threads = max(1, usable_threads() // processes)
    if not gpus:
        if chosen:
            raise LaunchError(
                f"--gpus {option}: this machine has no GPU",
                hint=f"`--gpus {processes}` starts {processes} CPU processes",
            )
        return Placement(ranks, None, threads, ("cpu",) * engines)
    picked = [gpu.name for gpu in (_by_number(gpus, chosen, option) if chosen else _free_ones(gpus, count))]
    return Placement(ranks, ",".join(picked[:ranks]), threads, tuple(picked[ranks:]))


def _by_number(gpus: Sequence[MachineGpu], chosen: Sequence[int], option: str) -> list[MachineGpu]:
    missing = [number for number in chosen if number >= len(gpus)]
    if missing:
        raise LaunchError(f"--gpus {option}: there is no GPU {missing[0]}", hint=_have(gpus))
    picked = [gpus[number] for number in chosen]
    busy = [number for number, gpu in zip(chosen, picked, strict=True) if _busy(gpu)]
    if busy:
        used = ", ".join(f"GPU {n} ({gpus[n].used_mib} MiB)" for n in busy)
        raise LaunchError(f"in use by other processes: {used}", hint=_have(gpus))
    return picked


def _free_ones(gpus: Sequence[MachineGpu], count: int) -> list[MachineGpu]:
    if count > len(gpus):
        raise LaunchError(f"--gpus {count}: this process sees {number_of(len(gpus), 'GPU')}", hint=_have(gpus))
    free = [gpu for gpu in gpus if not _busy(gpu)]
    if count > len(free):
        raise LaunchError(f"--gpus {count}: {len(free)} of {number_of(len(gpus), 'GPU')} free", hint=_have(gpus))
    return free[:count]


def _busy(gpu: MachineGpu) -> bool:
    return gpu.used_mib is not None and gpu.used_mib > BUSY_MIB


def _have(gpus: Sequence[MachineGpu]) -> str:
    states = [f"{n} {f'in use ({gpu.used_mib} MiB)' if _busy(gpu) else 'free'}" for n, gpu in enumerate(gpus)]
    return f"GPUs: {', '.join(states)}; `nvidia-smi` shows which processes use them"
