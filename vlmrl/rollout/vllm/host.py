"""Process that runs one vLLM engine for some trainers.

    python -m vlmrl.rollout.vllm.host SOCKET TRAINERS PARENT

It listens at SOCKET (a Unix socket) for TRAINERS connections and ends when PARENT ends. PARENT is the trainer that
started it and leads: it sends the engine's settings and the weights. Every trainer sends requests when it likes; the
samples of a request go back as soon as it is complete.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from PIL import Image

from vlmrl.errors import EngineError, VlmrlError
from vlmrl.model.load import load_processor
from vlmrl.process import die_with_parent
from vlmrl.recipe.schema import Model
from vlmrl.rollout.vllm import wire
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.vllm.weight_loading import SentWeights
from vlmrl.types import SamplingParams

END_SECONDS = 10.0
"""Longest wait at the end for a trainer to read what is left for it, in seconds."""


class Outbox:
    """Messages to a trainer, sent by a thread: the engine goes on while the trainer does not read."""

    def __init__(self, trainer: socket.socket) -> None:
        self._trainer = trainer
        self._messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, message: dict[str, Any]) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Send what is left, at most for END_SECONDS."""
        self._messages.put(None)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        with suppress(EngineError):  # the trainer has ended: the main thread sees that too, when it next reads
            while (message := self._messages.get()) is not None:
                wire.send(self._trainer, message)


class EngineHost:
    """Engine and the connections to its trainers, by rank."""

    def __init__(self, trainers: dict[int, socket.socket], leader: int) -> None:
        self.trainers, self.leader = trainers, leader
        self.engine: VllmEngine | None = None
        self.pictures: dict[int, dict[str, Image.Image]] = {rank: {} for rank in trainers}
        self._out = {rank: Outbox(trainer) for rank, trainer in trainers.items()}
        # Answers wait in the same queue as samples: a thread may be sending some.
        self.weights = SentWeights(trainers[leader], self._out[leader].put)
        self._open: dict[int, tuple[int, int]] = {}  # the engine's number of a request -> (rank, the trainer's number)

    def serve(self) -> None:
        """Answer requests, and run the leader's commands until it sends "close"."""
        try:
            while self._turn():
                pass
            if self.engine is not None:
                self.engine.close()
        except _CommandError as error:
            for out in self._out.values():
                out.put({"error": error.answer})
        finally:
            for out in self._out.values():
                out.close()

    def _turn(self) -> bool:
        """Take the messages that are there, and generate one token. Return False when the leader sends "close"."""
        for rank in self._ready(self.trainers, wait=not self._open):
            header, blobs = wire.receive(self.trainers[rank])
            if header["do"] == "close":
                return False
            with _answering_errors():
                if header["do"] == "generate":
                    self._take(rank, header, blobs)
                else:
                    self._finish_requests()
                    getattr(self, f"_{header['do']}")(header)
                    self._out[self.leader].put({"done": header["do"]})
        with _answering_errors():
            self._generate()
        return True

    def _ready(self, ranks: Iterable[int], *, wait: bool) -> list[int]:
        """Return the trainers of whom a message has arrived. `wait`: until there is one."""
        links: dict[Any, int] = {self.trainers[rank]: rank for rank in ranks}
        return [links[link] for link in connection.wait(list(links), None if wait else 0)]

    def _take(self, rank: int, command: dict[str, Any], blobs: list[bytearray]) -> None:
        """Submit a trainer's requests."""
        assert self.engine is not None
        if command["forget"]:
            self.pictures[rank].clear()
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in command["params"].items()}
        requests = wire.unpack_requests(command["requests"], blobs, self.pictures[rank])
        for number, request in zip(command["numbers"], requests, strict=True):
            self._open[self.engine.submit(request, SamplingParams(**values))] = (rank, number)

    def _generate(self) -> None:
        """Generate one token of every open request, and send the complete ones back."""
        if self._open and self.engine is not None:
            for own_number, samples in self.engine.poll(0.0):
                rank, number = self._open.pop(own_number)
                self._out[rank].put({"numbers": [number], "samples": wire.pack_samples([samples])})

    def _finish_requests(self) -> None:
        """Complete all requests that were sent before the leader's command, which may change the weights.

        Another trainer may still wait for requests that it sent before an update: all ranks sent theirs before it.
        """
        others = [rank for rank in self.trainers if rank != self.leader]
        while (ready := self._ready(others, wait=False) if others else []) or self._open:
            for rank in ready:
                header, blobs = wire.receive(self.trainers[rank])
                self._take(rank, header, blobs)
            self._generate()

    def _build(self, command: dict[str, Any]) -> None:
        settings = EngineSettings(**command["settings"])
        model = Model(
            path=settings.folder, revision=settings.revision, trust_remote_code=settings.trust_remote_code, device="cpu"
        )
        tokenizer = load_processor(model).tokenizer
        self.weights.model_type, self.weights.two_way_images = command["model_type"], command["two_way_images"]
        self.weights.adapted = settings.lora_rank > 0
        self.engine = VllmEngine(self.weights, tokenizer, settings, say=lambda text: print(text, file=sys.stderr))

    def _load(self, command: dict[str, Any]) -> None:
        assert self.engine is not None
        self.weights.written = command["adapter"]
        self.engine.load_weights(command["version"], changed=command["changed"])

    def _sleep(self, command: dict[str, Any]) -> None:
        assert self.engine is not None
        self.engine.sleep()

    def _wake(self, command: dict[str, Any]) -> None:
        assert self.engine is not None
        self.engine.wake()


class _CommandError(Exception):
    """Error of a command or a request, as the trainers get it."""

    def __init__(self, error: VlmrlError) -> None:
        super().__init__(error.message)
        self.answer = [error.message, error.where, error.hint]


@contextmanager
def _answering_errors() -> Iterator[None]:
    try:
        yield
    except VlmrlError as error:
        raise _CommandError(error) from error


def main(path: str, count: str, parent: str) -> None:
    die_with_parent(int(parent))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(int(count))
        trainers: dict[int, socket.socket] = {}
        leader = -1
        for _ in range(int(count)):
            trainer, _ = listener.accept()
            header, _ = wire.receive(trainer)
            trainers[header["rank"]] = trainer
            leader = header["rank"] if header["leads"] else leader
    try:
        EngineHost(dict(sorted(trainers.items())), leader).serve()
    finally:
        for trainer in trainers.values():
            trainer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would wait for vLLM's threads


if __name__ == "__main__":
    main(*sys.argv[1:])
