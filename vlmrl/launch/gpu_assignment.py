"""Which cards a run gets: `--gpus 4` or `--gpus 0,2,5`, of those this process may see, and none that others use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from vlmrl.dist.rank_process import ENGINES_VARIABLE
from vlmrl.errors import LaunchError
from vlmrl.model.gpus import Card, machine_cards, parse_gpus, visible_cards
from vlmrl.store.provenance import usable_cores

BUSY_MIB = 1024
"""A card with more memory in use belongs to somebody: an idle one holds a few hundred MiB of its driver at most."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks of this node run: on these cards, or, where there are none, on the CPU.

    Args:
        ranks: processes; devices: value of CUDA_VISIBLE_DEVICES, None on the CPU; threads: CPU threads of each rank.
        engines: cards (on the CPU: anything) of engines that have processes of their own.
    """

    ranks: int
    devices: str | None
    threads: int
    engines: tuple[str, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        """What the ranks are told."""
        told = {"OMP_NUM_THREADS": str(self.threads)}
        if self.engines:
            told[ENGINES_VARIABLE] = ",".join(self.engines)
        if self.devices is None:
            return told
        # nvidia-smi counts by bus; CUDA does only when told so.
        return told | {"CUDA_VISIBLE_DEVICES": self.devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def place(asked: str, engines: int = 0, parts: int = 1) -> Placement:
    """The placement that `--gpus` asks for.

    Args:
        asked: a number of cards (of processes, on a machine without a card), or their numbers: `0,2,5`; `3,` is
            card 3 alone. With CUDA_VISIBLE_DEVICES, numbers count the cards that it lists, as everywhere in CUDA.
        engines: how many of them, the last ones, generate for the others in processes of their own.
        parts: processes that share an engine, where there are none of those.
    Raises: LaunchError when it is neither, there are too few cards, they are in use, or no whole groups of `parts`.
    """
    count, chosen = parse_gpus(asked)
    cards = visible_cards(machine_cards(), os.environ)
    processes = len(chosen) if chosen else count
    ranks = processes - engines
    if ranks < 1:
        raise LaunchError(
            f"--gpus {asked}: with rollout.engine_gpus = {engines} none is left to train",
            hint=f"give at least {engines + 1}, or lower rollout.engine_gpus",
        )
    if not engines and ranks % parts:
        raise LaunchError(
            f"--gpus {asked}: rollout.tensor_parallel = {parts} takes whole groups of {parts}, and these are {ranks}",
            hint=f"give --gpus {parts * -(-ranks // parts)}, or change rollout.tensor_parallel",
        )
    threads = max(1, usable_cores() // processes)
    if not cards:
        if chosen:
            raise LaunchError(
                f"--gpus {asked}: this machine has no card",
                hint=f"`--gpus {processes}` starts {processes} CPU processes",
            )
        return Placement(ranks, None, threads, ("cpu",) * engines)
    picked = [card.name for card in (_by_number(cards, chosen, asked) if chosen else _free_ones(cards, count))]
    return Placement(ranks, ",".join(picked[:ranks]), threads, tuple(picked[ranks:]))


def _by_number(cards: Sequence[Card], chosen: Sequence[int], asked: str) -> list[Card]:
    missing = [number for number in chosen if number >= len(cards)]
    if missing:
        raise LaunchError(f"--gpus {asked}: there is no card {missing[0]}", hint=_have(cards))
    picked = [cards[number] for number in chosen]
    busy = [number for number, card in zip(chosen, picked, strict=True) if _busy(card)]
    if busy:
        used = ", ".join(f"card {n} ({cards[n].used_mib} MiB)" for n in busy)
        raise LaunchError(f"in use by other processes: {used}", hint=_have(cards))
    return picked


def _free_ones(cards: Sequence[Card], count: int) -> list[Card]:
    if count > len(cards):
        raise LaunchError(f"--gpus {count}: this process sees {len(cards)} card(s)", hint=_have(cards))
    free = [card for card in cards if not _busy(card)]
    if count > len(free):
        raise LaunchError(f"--gpus {count}: {len(free)} of {len(cards)} card(s) are free", hint=_have(cards))
    return free[:count]


def _busy(card: Card) -> bool:
    return card.used_mib is not None and card.used_mib > BUSY_MIB


def _have(cards: Sequence[Card]) -> str:
    states = [f"{n} {f'in use ({c.used_mib} MiB)' if _busy(c) else 'free'}" for n, c in enumerate(cards)]
    return f"cards: {', '.join(states)}; `nvidia-smi` says who uses them"
