"""Process that runs one vLLM engine for some trainers.

    python -m vlmrl.rollout.vllm.host SOCKET TRAINERS PARENT

It listens at SOCKET (a Unix socket) for TRAINERS connections and ends when PARENT ends. PARENT is the trainer that
started it and leads: it sends the engine's settings and the weights. All trainers send their requests together, and one
call of the engine answers all of them.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from PIL import Image

from vlmrl.errors import VlmrlError
from vlmrl.model.load import load_processor
from vlmrl.process import die_with_parent
from vlmrl.recipe.schema import Model
from vlmrl.rollout.vllm import wire
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.vllm.weight_transport import SentWeights
from vlmrl.types import SamplingParams


class EngineHost:
    """Engine and the connections to its trainers, by rank."""

    def __init__(self, trainers: dict[int, socket.socket], leader: int) -> None:
        self.trainers, self.leader = trainers, trainers[leader]
        self.engine: VllmEngine | None = None
        self.weights = SentWeights(self.leader)
        self.pictures: dict[int, dict[str, Image.Image]] = {rank: {} for rank in trainers}

    def serve(self) -> None:
        """Run the leader's commands until it sends "close"."""
        while (header := wire.receive(self.leader))[0]["do"] != "close":
            command, blobs = header
            try:
                getattr(self, f"_{command['do']}")(command, blobs)
            except VlmrlError as error:
                answer = {"error": [error.message, error.where, error.hint]}
                for trainer in self.trainers.values():
                    wire.send(trainer, answer)
                return
        if self.engine is not None:
            self.engine.close()

    def _build(self, command: dict[str, Any], blobs: list[bytearray]) -> None:
        settings = EngineSettings(**command["settings"])
        model = Model(
            path=settings.folder, revision=settings.revision, trust_remote_code=settings.trust_remote_code, device="cpu"
        )
        tokenizer = load_processor(model).tokenizer
        self.weights.model_type, self.weights.two_way_images = command["model_type"], command["two_way_images"]
        self.weights.adapted = settings.lora_rank > 0
        self.engine = VllmEngine(self.weights, tokenizer, settings, say=lambda text: print(text, file=sys.stderr))
        wire.send(self.leader, {"done": "build"})

    def _load(self, command: dict[str, Any], blobs: list[bytearray]) -> None:
        assert self.engine is not None
        self.weights.written = command["adapter"]
        self.engine.load_weights(command["version"], changed=command["changed"])
        wire.send(self.leader, {"done": "load"})

    def _sleep(self, command: dict[str, Any], blobs: list[bytearray]) -> None:
        assert self.engine is not None
        self.engine.sleep()
        wire.send(self.leader, {"done": "sleep"})

    def _wake(self, command: dict[str, Any], blobs: list[bytearray]) -> None:
        assert self.engine is not None
        self.engine.wake()
        wire.send(self.leader, {"done": "wake"})

    def _generate(self, command: dict[str, Any], blobs: list[bytearray]) -> None:
        assert self.engine is not None
        requests_by_rank = {}
        for rank, trainer in self.trainers.items():
            header, pixels = (command, blobs) if trainer is self.leader else wire.receive(trainer)
            if header["forget"]:
                self.pictures[rank].clear()
            requests_by_rank[rank] = wire.unpack_requests(header["requests"], pixels, self.pictures[rank])
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in command["params"].items()}
        params = SamplingParams(**values)
        answers = iter(self.engine.generate([r for theirs in requests_by_rank.values() for r in theirs], params))
        for rank, requests in requests_by_rank.items():
            samples = [next(answers) for _ in requests]
            wire.send(self.trainers[rank], {"samples": wire.pack_samples(samples)})


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
