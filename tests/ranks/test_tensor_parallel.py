"""vLLM in two parts, the real one: each weight cut in two, each half in a process of its own."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import warm
from command_line import COMMAND, own_process, settings
from processes import END_SECONDS, assert_all_gone, below, command_of
from small_runs import TWO_STEPS, make_place
from tinyworld import encoded, sampler_gap

from vlmrl.data.encode import Encoder
from vlmrl.dist.world import ALONE
from vlmrl.errors import EngineError
from vlmrl.model.lora import adapter_rank, attach_adapter
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.rollout.vllm.hosted_engine import EnginePlace, HostedEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.weight_sync import PolicyWeights
from vlmrl.store.runs import open_run
from vlmrl.types import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SHARED = [
    "rollout.engine=vllm",
    "rollout.tensor_parallel=2",
    "rollout.kv_cache_gib=0.2",
    "eval.every_steps=0",
    "rollout.max_prompt_tokens=400",
    "eval.max_rows=2",
    "train.steps=500",
]


@pytest.fixture(autouse=True)
def forks(monkeypatch) -> None:
    warm.all_in_forks(monkeypatch)


class Trainer:
    """A policy with an engine in two parts, and the built-in engine on the same weights."""

    def __init__(self, model, processor, folder: Path, banned: tuple[int, ...], lora: Lora | None) -> None:
        if lora is not None:
            attach_adapter(model, lora, dtype=torch.float32)
        encoder = Encoder(processor, min_pixels=56 * 56, max_pixels=112 * 112)
        self.prompts = [
            encoded(encoder, "same or different?", [(56, 56), (112, 84)], "two"),
            encoded(encoder, "yes?", name="text"),
        ]
        self.params = SamplingParams(temperature=0.9, max_new_tokens=16, banned_ids=banned)
        self.policy = Policy(model, temperature=0.9, banned_ids=banned)
        settings = EngineSettings(
            str(folder),
            "float32",
            "cpu",
            400,
            2**26,
            encoder.image_arguments,
            lora_rank=adapter_rank(model),
            tensor_parallel=2,
        )
        place = EnginePlace(("cpu", "cpu"), (0,), 0)
        weights = PolicyWeights(model, torch.float32, str(folder))
        self.engine = HostedEngine(weights, settings, ALONE, [place], shared=True)
        self.other = TorchEngine(Policy(model, banned_ids=banned), processor.tokenizer)

    def requests(self, samples: int) -> list[SamplingRequest]:
        return [SamplingRequest(p, samples, 100 * i) for i, p in enumerate(self.prompts)]

    def gap(self) -> float:
        """Largest |trainer - engine| log-prob of samples, nats."""
        requests = self.requests(3)
        return sampler_gap(self.policy, requests, self.engine.generate(requests, self.params))

    def change(self) -> None:
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.policy.model.parameters():
                if p.requires_grad and p.ndim >= 2:
                    p.add_((0.1 * p.std() + 0.05) * torch.randn(p.shape, generator=rng))


@pytest.mark.parametrize(("lora", "killed"), [(None, "part"), (Lora(rank=4, alpha=8), "host")], ids=["full", "adapter"])
def test_in_two_parts_it_answers_as_in_one_with_fresh_weights_and_dies_as_a_whole(
    lora, killed, _tiny_model, tiny_processor, tiny_folder, tiny_banned
) -> None:
    trainer = Trainer(copy.deepcopy(_tiny_model), tiny_processor, tiny_folder, tiny_banned, lora)
    greedy = replace(trainer.params, temperature=0.0)
    for version in range(2):
        if version:
            trainer.change()
            assert trainer.gap() > 1e-2  # the weights of before
            trainer.engine.sleep()
        trainer.engine.load_weights(version)
        assert trainer.gap() < 1e-4
        expected = trainer.other.generate(trainer.requests(1), greedy)
        for [a], [b] in zip(expected, trainer.engine.generate(trainer.requests(1), greedy), strict=True):
            assert a.token_ids == b.token_ids and b.version == version
            assert b.sampler_logp == pytest.approx(a.sampler_logp, rel=1e-4, abs=1e-5)
    [host] = [p for p in below(os.getpid()) if "rollout.vllm.host" in command_of(p)]
    parts = workers(host)
    assert len(parts) == 2
    os.kill(parts[1] if killed == "part" else host, signal.SIGKILL)
    with pytest.raises(EngineError, match="engine 0 has died"):
        trainer.gap()
    trainer.engine.close()
    assert_all_gone({host, *parts})


def workers(host: int) -> list[int]:
    """The processes of an engine's parts, which take names of their own."""
    return [p for p in below(host) if "Worker_TP" in command_of(p)]


@pytest.fixture
def going(tmp_path, small_folder) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of two trainers that share an engine in two parts, after two steps."""
    make_place(tmp_path, small_folder, TWO_STEPS)
    words = (*COMMAND, "train", "rl.toml", "--runs", "runs", "--gpus", "2", *settings(*SHARED))
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=tmp_path, text=True, **pipes)  # no forks: found by their words
    end = time.monotonic() + 200
    while not (steps := list((tmp_path / "runs").glob("*/rollouts/000003.parquet"))):
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=30)[1][-3000:]
        time.sleep(0.2)
    yield process, steps[0].parent.parent
    process.kill()
    process.communicate()


def test_two_processes_that_answer_rows_share_an_engine_in_two_parts(tmp_path, small_folder) -> None:
    """`eval` and `generate`, greedy: one process of the built-in engine gives the same answers."""
    make_place(tmp_path, small_folder, TWO_STEPS)
    common = [str(small_folder), "--recipe", "rl.toml", "--max-rows", "5"]
    parts = ("rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.kv_cache_gib=0.2")
    several = ("--gpus", "2", *settings(*parts, "rollout.max_prompt_tokens=400", "model.dtype=float32"))
    alone = settings("rollout.engine=torch", "model.dtype=float32")
    for out, more in (("two.jsonl", several), ("one.jsonl", alone)):
        done = own_process("generate", *common, "--out", out, *more, cwd=tmp_path)
        assert done.code == 0, done.err
    two, one = (
        [json.loads(line)["response"] for line in (tmp_path / out).read_text().splitlines()]
        for out in ("two.jsonl", "one.jsonl")
    )
    assert two == one and len(one) == 5
    refused = own_process("generate", *common, "--out", "3.jsonl", *settings(*parts), "--gpus", "3", cwd=tmp_path)
    assert refused.code == 2 and "3 is not a multiple of rollout.tensor_parallel = 2" in refused.err
    done = own_process("eval", *common, "--runs", "evals", "--json", *several, cwd=tmp_path)
    assert done.json["evaluations"][0]["meta"]["processes"] == 2
    rows = pq.read_table(tmp_path / done.json["evaluations"][0]["folder"] / "rows.parquet").to_pylist()
    assert [r["text"] for r in rows] == one


def test_two_trainers_share_an_engine_in_two_parts_and_none_outlives_them(going) -> None:
    process, folder = going
    everybody = below(process.pid)
    ranks = [p for p in everybody if "vlmrl train" in command_of(p)]
    [host] = [p for p in everybody if "rollout.vllm.host" in command_of(p)]
    assert len(ranks) == 2 and len(workers(host)) == 2
    os.kill(ranks[0], signal.SIGKILL)
    told = process.communicate(timeout=END_SECONDS)[1]
    assert process.returncode == 2 and "was killed by SIGKILL" in told, told[-2000:]
    assert_all_gone(everybody)
    steps = open_run(folder.parent, folder.name).metrics("train")
    assert len(steps) >= 2 and steps[-1]["optim/updates"] > 0
    for m in steps:
        assert m["policy/sampler_gap_max"] < 1e-4 and m["policy/sync_gap_max"] < 1e-4 and m["rollout/samples"] == 15
