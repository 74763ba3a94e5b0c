"""vLLM in separate processes: the trainer's side of the engines that `rollout/vllm/host.py` runs, and their places.

Engines are on engine GPUs, or in parts (tensor parallel) on the GPUs of some trainers. Each engine has one trainer that
leads it: it starts the engine and sends it the weights. A trainer's requests go to the engines that it is connected to:
all engines on engine GPUs, or the one on its own GPU. Several engines take whole groups from one queue: an engine that
is done early gets what would have waited for the others.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from vlmrl.dist.engine_isolation import environment_without_world
from vlmrl.dist.world import ENGINES_VARIABLE, World
from vlmrl.errors import EngineError, LaunchError
from vlmrl.model.memory import MAX_SEQUENCES
from vlmrl.rollout.engine import Generator, SamplingRequest, SyncSpeed
from vlmrl.rollout.vllm import wire
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.vllm.transports import (
    WORDS,
    ByBroadcast,
    ByHandle,
    BySocket,
    Sender,
    SharedFolder,
    Transport,
    choose_transport,
)
from vlmrl.rollout.weight_sync import WeightSource, folder_bytes
from vlmrl.store.log_pump import LogPump
from vlmrl.types import Sample, SamplingParams
from vlmrl.untrusted import number_of


@dataclass(frozen=True)
class EnginePlace:
    """GPUs of an engine, and the trainers that it serves.

    Args:
        gpus: CUDA's name of the GPU of each of its parts; on a CPU any word.
        trainers: ranks that send requests to it.
        leader: rank that starts it and sends it the weights.
    """

    gpus: tuple[str, ...]
    trainers: tuple[int, ...]
    leader: int


def places_apart(gpus: Sequence[str], world: World, parts: int) -> list[EnginePlace]:
    """Return the places of engines on engine GPUs, with `parts` GPUs each; every engine serves all trainers.

    Raises: LaunchError when a GPU would be left over.
    """
    if len(gpus) % parts:
        raise LaunchError(
            f"{number_of(len(gpus), 'GPU')} to generate with, but rollout.tensor_parallel = {parts} takes {parts} each",
            hint="set rollout.engine_gpus to a multiple of rollout.tensor_parallel",
        )
    everybody = tuple(range(world.size))
    return [
        EnginePlace(tuple(gpus[i * parts : (i + 1) * parts]), everybody, i % world.size)
        for i in range(len(gpus) // parts)
    ]


def places_shared(world: World, parts: int, visible: Sequence[str]) -> list[EnginePlace]:
    """Return the places of engines in `parts` parts, each for as many trainers and on their own GPUs.

    Args:
        visible: GPUs that each process sees, in order of local rank; on a CPU as many words.
    Raises: LaunchError when processes would be left over.
    """
    if world.local_size % parts:
        raise LaunchError(
            f"{world.local_size} process(es) train on this machine, but rollout.tensor_parallel = {parts} needs groups"
            f" of {parts}",
            hint=f"give --gpus a multiple of {parts}, or change rollout.tensor_parallel",
        )
    groups = [tuple(range(first, first + parts)) for first in range(0, world.size, parts)]
    return [EnginePlace(tuple(visible[rank % world.local_size] for rank in ranks), ranks, ranks[0]) for ranks in groups]


def place_alone(parts: int, visible: Sequence[str]) -> EnginePlace:
    """Return the place of an engine in `parts` parts for a single process, on the first GPUs that it sees.

    Raises: LaunchError when it sees too few.
    """
    if len(visible) < parts:
        raise LaunchError(
            f"rollout.tensor_parallel = {parts}, but this process sees {number_of(len(visible), 'GPU')}",
            hint="--set rollout.tensor_parallel=1, or give it more GPUs (CUDA_VISIBLE_DEVICES)",
        )
    return EnginePlace(tuple(visible[:parts]), (0,), 0)


def visible_gpus(device: str, count: int) -> list[str]:
    """Return CUDA's names of the GPUs that this process sees; on a CPU `count` words."""
    if device == "cpu":
        return ["cpu"] * count
    listed = [c for c in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if c]
    return listed or [str(i) for i in range(torch.cuda.device_count())]


def reserved_gpus() -> list[str]:
    """Return the GPUs that the launcher reserved for engines; empty when it reserved none."""
    return [c for c in os.environ.get(ENGINES_VARIABLE, "").split(",") if c]


START_SECONDS = 120.0
"""Time limit in seconds until an engine's process listens. Python starts and imports in this time."""


@dataclass(frozen=True)
class _Request:
    number: int
    request: SamplingRequest
    params: SamplingParams


class HostedEngine(Generator):
    """Engines in separate processes, used as one `Generator`. All ranks of the trainer create it together.

    Args:
        shared: whether the engines are on the trainers' own GPUs; they then sleep during updates.
        log: name of a process -> its log; None = it writes to this process's stderr.
    Raises: EngineError when one does not start.
    """

    copies_weights = admits = True

    def __init__(
        self,
        weights: WeightSource,
        settings: EngineSettings,
        world: World,
        places: Sequence[EnginePlace],
        *,
        shared: bool = False,
        log: Callable[[str], Path] | None = None,
    ) -> None:
        self.weights, self.settings, self.world, self.shared = weights, settings, world, shared
        self.version, self._loaded = 0, False
        self._folder, self._logs = SharedFolder(), None if log is None else LogPump()
        led = [i for i, place in enumerate(places) if place.leader == world.rank]
        self._hosts = {i: self._start(i, places[i], log) for i in led}
        folders = world.gather(str(self._folder.path))
        self._links = {
            i: _connect(_socket_path(Path(folders[place.leader]), i), self._hosts.get(i))
            for i, place in enumerate(places)
            if world.rank in place.trainers
        }
        self._known = {i: wire.Known() for i in self._links}
        self.works_alone = not shared
        self._ids, self._progress = count(), _ignore
        self._waiting: deque[_Request] = deque()
        self._open: dict[int, dict[int, _Request]] = {i: {} for i in self._links}
        # Of several engines, each gets at once only what it can generate at the same time, in responses.
        share = MAX_SEQUENCES // max((len(place.trainers) for place in places), default=1)
        self._most = max(1, share) if len(self._links) > 1 else sys.maxsize
        self._in_round = False
        for i in self._links:
            self._send(i, {"rank": world.rank, "leads": i in led})
        model_facts = {"model_type": weights.model_type, "two_way_images": weights.two_way_images}
        for i in self._hosts:
            self._send(i, {"do": "build", "settings": asdict(settings), **model_facts})
        self.transport, self._sender = self._choose(places)
        self._stream()
        for i in self._hosts:
            self._answer(i)

    def _choose(self, places: Sequence[EnginePlace]) -> tuple[Transport, Sender]:
        """Return the transport to this rank's engines, and its sender. All places of a run are alike."""
        device, place = self.settings.device, places[0]
        if self.shared:
            place = next(p for p in places if self.world.rank in p.trainers)
            own_gpu = place.gpus[place.trainers.index(self.world.rank)]
        else:
            own_gpu = (
                visible_gpus(device, self.world.local_size)[torch.cuda.current_device()] if device == "cuda" else None
            )
        transport = choose_transport(
            device, own_gpu, place.gpus, own_process=False, setting=self.settings.weight_transport
        )
        if transport == "ipc":
            return transport, ByHandle(wire.export, device)
        if transport == "nccl":
            return transport, ByBroadcast(self._folder.path / "broadcast", device)
        return transport, BySocket()

    def _start(self, engine: int, place: EnginePlace, log: Callable[[str], Path] | None) -> subprocess.Popen[bytes]:
        """Start an engine's process in a process group of its own: no terminal's Ctrl-C reaches it or its parts."""
        env = environment_without_world()
        if self.settings.device == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
        command = [
            sys.executable,
            "-m",
            "vlmrl.rollout.vllm.host",
            str(_socket_path(self._folder.path, engine)),
            str(len(place.trainers)),
            str(os.getpid()),
        ]
        if log is None or self._logs is None:
            return subprocess.Popen(command, env=env, stdout=sys.stderr.fileno(), start_new_session=True)
        reads, writes = os.pipe()
        self._logs.add(f"engine-{engine}", reads, log(f"engine-{engine}"))
        with open(writes, "wb") as pipe:
            return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, start_new_session=True)

    def sleep(self) -> None:
        """Free memory for the trainers whose GPUs the engines share; do nothing for engine GPUs."""
        if self.shared:
            self._tell_all("sleep")
            self._loaded = self._loaded and not self.settings.discards

    def wake(self) -> None:
        """Undo `sleep`. `load_weights` does it too."""
        if self.shared:
            self._give_back()
            self._tell_all("wake")

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        """Send the trainer's weights to every engine.

        Raises: EngineError when an engine did not load them.
        """
        send = changed or not self._loaded
        if self.shared:
            self._give_back()
        folder = None
        if send and self.weights.adapted:
            folder = self._folder.path / f"adapter-{version}"
            self.weights.write_adapter(folder)
        command = {
            "do": "load",
            "version": version,
            "changed": send,
            "adapter": None if folder is None else str(folder),
        }
        start = time.perf_counter()
        for i in self._hosts:
            self._send(i, command)
        size = self._stream() if send and not self.weights.adapted else 0
        for i in self._hosts:
            self._answer(i)
        if send:
            size = size if folder is None else folder_bytes(folder)
            words = WORDS[self.transport if folder is None else "memory"]
            self.last_sync = SyncSpeed(size, time.perf_counter() - start, words)
        if folder is not None:
            shutil.rmtree(folder)
        self.world.wait()  # no rank's requests may reach an engine before its new weights
        self.version, self._loaded = version, True

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        """Context manager: see `Generator.round`. Nothing is collective."""
        self._progress, self._in_round = progress or _ignore, True
        try:
            yield
        finally:
            self._waiting.clear()
            self._open = {i: {} for i in self._links}
            self._progress, self._in_round = _ignore, False

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        """Queue a request: see `Generator.submit`."""
        self._waiting.append(_Request(next(self._ids), request, params))
        return self._waiting[-1].number

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        """Give waiting requests to the engines, and wait until one is complete: see `Generator.poll`.

        Raises: EngineError when an engine fails.
        """
        self._hand_out()
        links: dict[Any, int] = {self._links[i]: i for i, requests in self._open.items() if requests}
        complete: list[tuple[int, list[Sample]]] = []
        for link in connection.wait(list(links), timeout) if links else ():
            answer = self._receive(links[link])
            for number, samples in zip(answer["numbers"], wire.unpack_samples(answer["samples"]), strict=True):
                if self._open[links[link]].pop(number, None) is not None:  # else it is of a round that was left early
                    complete.append((number, samples))
                    self._progress(len(samples))
        if complete:
            self._hand_out()
        return complete

    def _hand_out(self) -> None:
        """Give waiting requests to engines with room, each to the one with the fewest open responses.

        Each rank begins at another engine, so that few prompts are spread over all engines.
        """
        if not self._waiting:
            return
        engines = list(self._links)
        order = engines[self.world.rank % len(engines) :] + engines[: self.world.rank % len(engines)]
        given: dict[tuple[int, SamplingParams], list[_Request]] = {}
        while self._waiting:
            loads = {i: sum(r.request.num_samples for r in self._open[i].values()) for i in order}
            engine = min(order, key=lambda i: loads[i])
            # Outside a round the trainer is busy with an update: it could not hand out the rest in time.
            most = self._most if self._in_round else sys.maxsize
            if loads[engine] and loads[engine] + self._waiting[0].request.num_samples > most:
                break
            request = self._waiting.popleft()
            self._open[engine][request.number] = request
            given.setdefault((engine, request.params), []).append(request)
        for (engine, params), requests in given.items():
            forget = self._known[engine].forget()
            packed, blobs = wire.pack_requests([r.request for r in requests], self._known[engine])
            command = {"do": "generate", "params": asdict(params), "requests": packed, "forget": forget}
            self._send(engine, command | {"numbers": [r.number for r in requests]}, blobs)

    def close(self) -> None:
        """End the engines that this process started."""
        for i, host in self._hosts.items():
            try:
                wire.send(self._links[i], {"do": "close"})
                host.wait(10.0)
            except (EngineError, subprocess.TimeoutExpired):
                with suppress(ProcessLookupError):
                    os.killpg(host.pid, signal.SIGKILL)
                host.wait()
        for link in self._links.values():
            link.close()
        if self._logs is not None:
            self._logs.close()
        self._folder.close()

    def _tell_all(self, do: str) -> None:
        """Send a command to every engine; all ranks wait until all engines have done it."""
        for i in self._hosts:
            self._send(i, {"do": do})
        for i in self._hosts:
            self._answer(i)
        self.world.wait()

    def _give_back(self) -> None:
        """Return memory that this process has freed to the GPU, where the engine needs it."""
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()
        self.world.wait()

    def _stream(self) -> int:
        """Send all weights to the engines that this rank leads, and return their bytes."""
        peers = [_Peer(self, i, self.settings.tensor_parallel) for i in self._hosts]
        return self._sender.send(self.weights.tensors(), peers)

    def _send(self, engine: int, header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        try:
            wire.send(self._links[engine], header, blobs)
        except EngineError:
            self._answer(engine)  # an engine that fails sends the reason before it ends
            raise

    def _answer(self, engine: int) -> Mapping[str, Any]:
        """Return an engine's answer to a command."""
        while "samples" in (answer := self._receive(engine)):  # of a round that was left early
            pass
        return answer

    def _receive(self, engine: int) -> Mapping[str, Any]:
        try:
            header, _ = wire.receive(self._links[engine])
        except EngineError as error:
            hint = f"its log is with the run's other logs: engine-{engine}.log" if self._logs is not None else None
            raise EngineError(f"engine {engine} has died", hint=hint) from error
        if "error" in header:
            message, where, hint = header["error"]
            raise EngineError(message, where=where, hint=hint)
        return header


@dataclass(frozen=True)
class _Peer:
    """Engine of this rank as a sender of weights sees it: see `Peer`."""

    owner: HostedEngine
    engine: int
    parts: int

    def send(self, header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        self.owner._send(self.engine, header, blobs)

    def receive(self) -> Mapping[str, Any]:
        return self.owner._answer(self.engine)


def _ignore(newly: int) -> None:
    """Show no progress."""


def _socket_path(folder: Path, engine: int) -> Path:
    return folder / f"engine-{engine}"


def _connect(path: Path, host: subprocess.Popen[bytes] | None) -> socket.socket:
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
                    hint="its log is with the run's other logs: engine-<n>.log",
                ) from error
            time.sleep(0.1)
    return link
