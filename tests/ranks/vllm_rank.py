"""One process with a vLLM engine of its own over a shared policy: `python vllm_rank.py MODEL OUT [forever]`, with
torchrun's environment.

All processes make the same prompts; each answers its own, and one update on all of them follows. What comes out is
written by the first: ids, gaps and errors of every case, to be compared with those of one process that does everything.
With `forever`, for a launcher, it answers again and again, and writes OUT/building-RANK and OUT/generating-RANK (its
process id) when it gets there.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parity import adapted
from tinyworld import encoded, four_prompts, in_float64, prompt_tokens, response

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.data.encode import Encoder
from vlmrl.dist import world
from vlmrl.dist.fsdp import shard
from vlmrl.dist.world import World, join_world
from vlmrl.errors import EngineError
from vlmrl.model.families import units_of
from vlmrl.model.load import banned_ids_of, load_model, load_processor
from vlmrl.model.lora import adapter_rank
from vlmrl.model.packing import TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Model, Optim
from vlmrl.rollout import weight_sync
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.sample import Prompt, PromptQueue, sample_scored
from vlmrl.rollout.vllm import engine as vllm_engine
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.weight_sync import PolicyWeights
from vlmrl.train.learner import Optimizer
from vlmrl.train.step_batch import FILLER, StepBatch
from vlmrl.train.update import Mismatch, PolicyGradient, Tally, fill_logps, tally_mismatch, update
from vlmrl.types import RewardInput, Sample, SamplingParams, Segment

CASES = {"full": None, "adapter": Lora(rank=4, alpha=8)}
SAMPLES = 3
PARAMS = SamplingParams(temperature=1.5, max_new_tokens=12)
DROPPED = "model.layers.1.self_attn.k_proj.weight"
SMALL_BUCKET = 1 << 16


class Place:
    """A policy, sharded where there are several processes, with prompts and an engine of this process."""

    def __init__(self, folder: str, lora: Lora | None, world: World) -> None:
        settings = Model(path=folder, dtype="float32", device="cpu")
        processor = load_processor(settings)
        encoder = Encoder(processor, min_pixels=56 * 56, max_pixels=112 * 112)
        model = load_model(settings)
        banned = banned_ids_of(model, processor.tokenizer)
        model = model if lora is None else adapted(model, lora)
        self.world, self.prompts = world, four_prompts(encoder)
        self.params = replace(PARAMS, banned_ids=banned)
        self.policy = Policy(model, temperature=PARAMS.temperature, banned_ids=banned)
        self.filler = TrainItem(prompt_tokens(encoded(encoder, "", [(56, 56)], "x")), -1, (response(9, 2),), FILLER)
        if world.size > 1:
            shard(self.policy, units_of(model), world, torch.device("cpu"))
        engine = EngineSettings(
            folder, "float32", "cpu", 400, 2**26, encoder.image_arguments, lora_rank=adapter_rank(model)
        )
        weights = PolicyWeights(model, torch.float32, folder)
        self.engine = VllmEngine(weights, processor.tokenizer, engine, say=str)

    @property
    def own(self) -> list[int]:
        return [i for i in range(len(self.prompts)) if i % self.world.size == self.world.rank]

    def answer(self) -> tuple[list[list[list[int]]], StepBatch]:
        """(ids of all prompts' samples, this process's part of a step made of them)."""
        made = self.engine.generate([SamplingRequest(self.prompts[i], SAMPLES, 70 + i) for i in self.own], self.params)
        mine: dict[int, list[Sample]] = dict(zip(self.own, made, strict=True))
        ids = {i: [list(s.token_ids) for s in samples] for i, samples in mine.items()}
        everybody = dict(pair for theirs in self.world.gather(list(ids.items())) for pair in theirs)
        items = [
            TrainItem(
                prompt_tokens(self.prompts[i]),
                i,
                (Segment("assistant", s.token_ids, True, s.sampler_logp),),
                i * SAMPLES + k,
            )
            for i, samples in mine.items()
            for k, s in enumerate(samples)
        ]
        count = len(self.prompts) * SAMPLES
        advantages = [(-1.0) ** k * (1 + 0.3 * k) for k in range(count)]
        names = [str(k) for k in range(count)]
        batch = StepBatch(items, advantages, names, world=self.world, filler=self.filler)
        return [everybody[i] for i in range(len(self.prompts))], batch

    def gap(self, batch: StepBatch) -> float:
        """Largest difference of trainer and engine over all processes, in nats."""
        logps: dict[int, torch.Tensor] = {}
        fill_logps(self.policy, batch, logps, 400)
        tally = Tally()
        for item in batch.items:
            tally_mismatch(tally, logps[item.trajectory], torch.tensor(item.segments[0].sampler_logp))
        return Mismatch.joined(self.world.gather(Mismatch.of(tally.read()))).gap_max

    def rounding(self, batch: StepBatch) -> float:
        """Largest error of the trainer of one process, in nats: what float32 costs on this machine."""
        logps: list[dict[int, torch.Tensor]] = [{}, {}]
        for policy, into in zip((self.policy, in_float64(self.policy)), logps, strict=True):
            fill_logps(policy, batch, into, 400)
        return max(float((logps[0][k] - logps[1][k]).abs().max()) for k in logps[0])


def shared(place: Place) -> dict[str, Any]:
    """The engines take prompts from each other: ids of all prompts' samples, and what each rank took.

    An engine generates one group at a time. That of rank 0 does not go on until the others have nothing left to take.
    """
    world, engine = place.world, place.engine
    queue = PromptQueue(len(place.prompts), world, f"shared-{engine.version}", 1 if world.size > 1 else None)
    poll = engine.poll

    def late_poll(timeout: float | None = None) -> Any:
        world.store.wait([f"done-{engine.version}-{rank}" for rank in range(1, world.size)])
        return poll(timeout)

    if world.size > 1 and world.is_main:
        engine.poll = late_poll
    source: Any = SimpleNamespace(name="rows", reward_input=lambda *facts: RewardInput(""))
    session: Any = SimpleNamespace(submit=lambda *group: None, listen=lambda: None)  # scores nothing
    prompts = (Prompt(source, place.prompts[i].row, i, place.prompts[i]) for i in queue)
    options = {"num_samples": SAMPLES, "run_seed": 5, "version": engine.version, "room": 1 if world.size > 1 else None}
    rollouts = sample_scored(engine, prompts, place.params, session, **options)
    if world.size > 1:
        world.store.set(f"done-{engine.version}-{world.rank}", "")
    engine.poll = poll
    ids = queue.join([[list(sample.token_ids) for sample in rollout.samples] for rollout in rollouts])
    return {"ids": ids, "taken": world.gather(queue.taken)}


class Watched:
    """Bytes of gathered tensors that are alive, and the most there were at once."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}  # address -> bytes
        self.most = self.total = self.buckets = 0
        self._gather, self._whole = weight_sync._gather, weight_sync.whole_tensors

    def __enter__(self) -> Watched:
        def gather(shards: Sequence[Any]) -> Sequence[torch.Tensor]:
            parts = self._gather(shards)
            if shards:
                self.buckets += 1
                self.count(parts[0])
            return parts

        def whole(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._whole(*arguments):
                self.total += tensor.nbytes
                self.count(tensor)
                yield name, tensor
                del tensor

        weight_sync._gather, weight_sync.whole_tensors = gather, whole
        return self

    def __exit__(self, *_: object) -> None:
        weight_sync._gather, weight_sync.whole_tensors = self._gather, self._whole

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.live:
            self.live[storage.data_ptr()] = storage.nbytes()
            self.most = max(self.most, sum(self.live.values()))
            weakref.finalize(storage, self.live.pop, storage.data_ptr())


def watched_sync(place: Place, version: int) -> dict[str, int]:
    """A sync with small buckets: what was in memory for it at once."""
    weight_sync.BUCKET_BYTES, bucket = SMALL_BUCKET, weight_sync.BUCKET_BYTES
    with Watched() as seen:
        place.engine.load_weights(version)
    weight_sync.BUCKET_BYTES = bucket
    largest = max(p.numel() * p.element_size() for p in place.policy.parameters())
    return {"most": seen.most, "total": seen.total, "buckets": seen.buckets, "largest": largest}


def dropped(place: Place, version: int) -> str:
    """What is said when a tensor is left out."""
    real = weight_sync.base_tensors
    weight_sync.base_tensors = lambda *a: (x for x in real(*a) if x[0] != DROPPED)
    try:
        place.engine.load_weights(version)
    except EngineError as error:
        return error.message
    finally:
        weight_sync.base_tensors = real
    return "nothing"


def case(place: Place) -> dict[str, Any]:
    told: dict[str, Any] = {"ids": [], "gaps": [], "rounding": []}
    optimizer = Optimizer(place.policy.model, Optim(lr=1e-2, max_grad_norm=1.0))
    for version in range(2):
        place.engine.load_weights(version)
        ids, batch = place.answer()
        told["ids"].append(ids)
        told["gaps"].append(place.gap(batch))
        if place.world.size == 1:
            told["rounding"].append(place.rounding(batch))
        told["shared"] = shared(place)
        objective = PolicyGradient(ALGORITHMS["grpo"], importance="truncate")
        update(place.policy, optimizer, batch, objective, lr=1e-2, tokens_per_row=400, max_tokens=12)
    told["stale"] = place.gap(place.answer()[1])
    told["memory"] = watched_sync(place, 2)
    ids, batch = place.answer()
    told["gaps"].append(place.gap(batch))
    return told


def launchers() -> dict[str, str]:
    """The launcher's variables."""
    return {n: v for n, v in os.environ.items() if any(x in n for x in ("RANK", "WORLD", "MASTER", "ELASTIC"))}


def main(folder: str, out: str, forever: str = "") -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
    before = launchers()
    os.environ.update(vllm_engine.SETTINGS)
    import vllm

    seen: list[str] = []
    real = vllm.LLM

    def spy(*arguments: Any, **options: Any) -> Any:
        (Path(out) / f"building-{rank}").write_text(str(os.getpid()))
        seen.extend(launchers())
        return real(*arguments, **options)

    vllm.LLM = spy
    told: dict[str, Any] = {}
    with join_world("cpu", timeout_seconds=60) as world:
        for name, lora in CASES.items():
            place = Place(folder, lora, world)
            while forever:
                place.engine.load_weights(0)
                place.answer()
                (Path(out) / f"generating-{rank}").write_text(str(os.getpid()))
            told[name] = case(place)
            if name == "full":
                told["dropped"] = dropped(place, 3)
            place.engine.close()
        told |= {"seen": seen, "unchanged": launchers() == before}
        everybody = world.gather({name: told[name] for name in ("dropped", "seen", "unchanged")})
        assert all(x == everybody[0] for x in everybody), everybody
        if world.is_main:
            (Path(out) / f"{world.size}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    if "forever" in sys.argv:
        world.run(lambda: main(*sys.argv[1:]))
    main(*sys.argv[1:])
