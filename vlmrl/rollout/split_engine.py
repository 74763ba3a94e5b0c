"""vLLM on cards of its own: the trainer's side of the engines that `rollout/host.py` runs.

Every process of the trainer is connected to every engine. Each engine has one trainer that leads it, which started it
and sends it the weights. A call of `generate` deals the prompts over the engines.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlmrl.dist.guest import environment_without_world
from vlmrl.dist.worker import ENGINES_VARIABLE
from vlmrl.dist.world import World
from vlmrl.errors import EngineError
from vlmrl.rollout import wire
from vlmrl.rollout.engine import Request
from vlmrl.rollout.owned_folder import OwnedFolder
from vlmrl.rollout.vllm_engine import EngineSettings
from vlmrl.rollout.weight_sync import WeightSource
from vlmrl.types import Sample, SamplingParams

START_SECONDS = 120.0
"""How long an engine's process may take until it listens: Python and its imports."""


class SplitEngine:
    """The engines on cards of their own as one `Generator`. Made by all processes of the trainer together.

    Raises: EngineError when one does not start.
    """

    copies_weights = True

    def __init__(
        self, weights: WeightSource, settings: EngineSettings, world: World, cards: Sequence[str],
        log: Callable[[str], Path],
    ) -> None:  # fmt: skip
        self.weights, self.settings, self.world = weights, settings, world
        self.version, self._loaded = 0, False
        self._folder = OwnedFolder()
        mine = [i for i in range(len(cards)) if i % world.size == world.rank]
        self._hosts = {i: _start(i, cards[i], self._folder.path, world.size, settings, log) for i in mine}
        folders = world.gather(str(self._folder.path))
        self._links = [
            _connect(_socket_path(Path(folders[i % world.size]), i), world.rank, i in self._hosts, self._hosts.get(i))
            for i in range(len(cards))
        ]
        self._known = [wire.Known() for _ in cards]
        self._asked: list[list[int]] | None = None
        for i in self._hosts:
            wire.send(self._links[i], {"do": "build", "settings": asdict(settings), "model_type": weights.model_type})
        self._stream()
        for i in self._hosts:
            self._answer(i)

    @property
    def _led(self) -> list[socket.socket]:
        return [self._links[i] for i in self._hosts]

    def sleep(self) -> None:
        """Its cards are its own: nothing is given back."""

    def wake(self) -> None:
        """It is never asleep."""

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        """Send the trainer's weights to every engine. Raises: EngineError when one did not take them."""
        send = changed or not self._loaded
        folder = None
        if send and self.weights.adapted:
            folder = self._folder.path / f"adapter-{version}"
            self.weights.write_adapter(folder)
        for link in self._led:
            told = {"do": "load", "version": version, "changed": changed}
            wire.send(link, told | {"adapter": None if folder is None else str(folder)})
        if send and not self.weights.adapted:
            self._stream()
        for i in self._hosts:
            self._answer(i)
        if folder is not None:
            shutil.rmtree(folder)
        self.version, self._loaded = version, True

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, progress: Callable[[int], Any] | None = None
    ) -> list[list[Sample]]:
        """See `Generator.generate`. All processes of the trainer call it, each with its own requests."""
        self.ask(requests, params)
        return self.answers(progress)

    def ask(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Begin `generate`; the engines answer while the trainer does something else."""
        if self._asked is not None:
            raise EngineError("the engines have been asked and their answers were not fetched")
        count = len(self._links)
        self._asked = [[i for i in range(len(requests)) if (i + self.world.rank) % count == k] for k in range(count)]
        for k, indices in enumerate(self._asked):
            forget = self._known[k].forget()
            packed, blobs = wire.pack_requests([requests[i] for i in indices], self._known[k])
            told = {"do": "generate", "params": asdict(params), "requests": packed, "forget": forget}
            wire.send(self._links[k], told, blobs)

    def answers(self, progress: Callable[[int], Any] | None = None) -> list[list[Sample]]:
        """End `generate`: wait for what was asked."""
        if self._asked is None:
            raise EngineError("the engines have not been asked")
        found: dict[int, list[Sample]] = {}
        for k, indices in enumerate(self._asked):
            samples = wire.unpack_samples(self._answer(k)["samples"])
            found |= dict(zip(indices, samples, strict=True))
            if progress is not None:
                progress(sum(map(len, samples)))
        self._asked = None
        return [found[i] for i in range(len(found))]

    def close(self) -> None:
        """End the engines that this process started."""
        for i, host in self._hosts.items():
            try:
                wire.send(self._links[i], {"do": "close"})
                host.wait(10.0)
            except (EngineError, subprocess.TimeoutExpired):
                host.kill()
                host.wait()
        for link in self._links:
            link.close()
        self._folder.close()

    def _stream(self) -> None:
        try:
            for name, tensor in self.weights.tensors():
                wire.send_tensor(self._led, name, tensor)
            for link in self._led:
                wire.send(link, {"tensor": None})
        except EngineError:
            for i in self._hosts:  # an engine that gives up says why before it goes
                self._answer(i)
            raise

    def _answer(self, engine: int) -> Mapping[str, Any]:
        try:
            header, _ = wire.receive(self._links[engine])
        except EngineError as error:
            hint = f"its log is beside the run's others: engine-{engine}.log"
            raise EngineError(f"engine {engine} has died", hint=hint) from error
        if "error" in header:
            message, where, hint = header["error"]
            raise EngineError(message, where=where, hint=hint)
        return header


def engine_cards() -> list[str]:
    """Cards that the launcher set aside for engines; none when it did not."""
    return [c for c in os.environ.get(ENGINES_VARIABLE, "").split(",") if c]


def _socket_path(folder: Path, engine: int) -> Path:
    return folder / f"engine-{engine}"


def _start(
    engine: int, card: str, folder: Path, trainers: int, settings: EngineSettings, log: Callable[[str], Path]
) -> subprocess.Popen[bytes]:
    env = environment_without_world()
    if settings.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = card
    command = [sys.executable, "-m", "vlmrl.rollout.host", str(_socket_path(folder, engine)), str(trainers)]
    with open(log(f"engine-{engine}"), "ab") as file:
        return subprocess.Popen([*command, str(os.getpid())], env=env, stdout=file, stderr=file)


def _connect(path: Path, rank: int, leads: bool, host: subprocess.Popen[bytes] | None) -> socket.socket:
    link, end = socket.socket(socket.AF_UNIX), time.monotonic() + START_SECONDS
    while True:
        try:
            link.connect(str(path))
            break
        except OSError as error:
            if (host is not None and host.poll() is not None) or time.monotonic() > end:
                raise EngineError(
                    f"an engine's process does not answer: {error}",
                    where=str(path),
                    hint="its log is beside the run's others, engine-<n>.log",
                ) from error
            time.sleep(0.1)
    wire.send(link, {"rank": rank, "leads": leads})
    return link
