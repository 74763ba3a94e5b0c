"""vLLM in two parts, the real one: each weight cut in two, each half in a process of its own."""

from __future__ import annotations

import copy
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_shared_runs import RECIPE, REWARD
from test_split_engine import children, command_of
from tinyworld import encoded, prompt_tokens

from vlmrl.data.batch import TrainItem, make_row
from vlmrl.data.encode import Encoder
from vlmrl.dist.world import ALONE
from vlmrl.errors import EngineError
from vlmrl.model.lora import adapter_rank, attach_adapter
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.rollout.engine import Request
from vlmrl.rollout.hosted_engine import HostedEngine, Place
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.rollout.vllm_engine import EngineSettings
from vlmrl.rollout.weight_sync import PolicyWeights
from vlmrl.store.runs import open_run
from vlmrl.tasks.digits.task import prepare_digits
from vlmrl.types import SamplingParams, Segment

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]  # fmt: skip
PROMISED_SECONDS = 30.0
SHARED = ["rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.kv_cache_gib=0.2", "eval.every_steps=0",
          "rollout.max_prompt_tokens=400", "eval.max_rows=2", "train.steps=500"]  # fmt: skip


class Trainer:
    """A policy with an engine in two parts, and the built-in engine on the same weights."""

    def __init__(self, model, processor, folder: Path, banned: tuple[int, ...], lora: Lora | None) -> None:
        if lora is not None:
            attach_adapter(model, lora, dtype=torch.float32)
        encoder = Encoder(processor, min_pixels=56 * 56, max_pixels=112 * 112)
        self.prompts = [
            encoded(encoder, "same or different?", [(56, 56), (112, 84)], "two"), encoded(encoder, "yes?", name="text"),
        ]  # fmt: skip
        self.params = SamplingParams(temperature=0.9, max_new_tokens=16, banned_ids=banned)
        self.policy = Policy(model, temperature=0.9, banned_ids=banned)
        settings = EngineSettings(
            str(folder), "float32", "cpu", 400, 2**26, encoder.image_arguments, lora_rank=adapter_rank(model),
            tensor_parallel=2,
        )  # fmt: skip
        place = Place(("cpu", "cpu"), (0,), 0)
        weights = PolicyWeights(model, torch.float32, str(folder))
        self.engine = HostedEngine(weights, settings, ALONE, [place], shared=True)
        self.other = TorchEngine(Policy(model, banned_ids=banned), processor.tokenizer)

    def requests(self, samples: int) -> list[Request]:
        return [Request(p, samples, 100 * i) for i, p in enumerate(self.prompts)]

    def gap(self) -> float:
        """Largest |trainer - engine| log-prob of samples, nats."""
        largest = 0.0
        for request, samples in zip(self.requests(3), self.engine.generate(self.requests(3), self.params), strict=True):
            items = [
                TrainItem(prompt_tokens(request.prompt), 0, (Segment("a", s.token_ids, True),), k)
                for k, s in enumerate(samples)
            ]
            with torch.no_grad():
                logp = self.policy(make_row(items)).logp
            said = torch.tensor([x for s in samples for x in s.sampler_logp])
            largest = max(largest, float((logp - said).abs().max()))
        return largest

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
    [host] = [p for p in children(os.getpid()) if b"rollout.host" in command_of(p)]
    parts = workers(host)
    assert len(parts) == 2
    os.kill(parts[1] if killed == "part" else host, signal.SIGKILL)
    with pytest.raises(EngineError, match="engine 0 has died"):
        trainer.gap()
    trainer.engine.close()
    assert gone({host, *parts})


def workers(host: int) -> list[int]:
    """The processes of an engine's parts, which take names of their own."""
    return [p for p in children(host) if b"Worker_TP" in command_of(p)]


def gone(pids: set[int]) -> bool:
    """Whether these processes are no more, within the promised time."""
    end = time.monotonic() + PROMISED_SECONDS
    while left := [p for p in pids if alive(p)]:
        if time.monotonic() > end:
            print([(p, command_of(p)) for p in left])
            return False
        time.sleep(0.1)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def going(tmp_path, small_folder) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of two trainers that share an engine in two parts, after two steps."""
    (tmp_path / "reward.py").write_text(REWARD)
    data = prepare_digits(tmp_path / "digits", num_pairs=24).path
    text = RECIPE.format(model=small_folder, data=data, folder=tmp_path)
    (tmp_path / "rl.toml").write_text('kind = "rl"\n[algo]\nname = "grpo"\n' + text)
    settings = [word for o in SHARED for word in ("--set", o)]
    command = [sys.executable, "-m", "vlmrl", "train", str(tmp_path / "rl.toml"), "--runs", str(tmp_path / "runs"),
               "--gpus", "2", *settings]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    end = time.monotonic() + 200
    while not (steps := list((tmp_path / "runs").glob("*/rollouts/step-000002.parquet"))):
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=30)[1][-3000:]
        time.sleep(0.2)
    yield process, steps[0].parent.parent
    process.kill()
    process.communicate()


def test_two_trainers_share_an_engine_in_two_parts_and_none_outlives_them(going) -> None:
    process, folder = going
    everybody = set(children(process.pid))
    ranks = [p for p in everybody if b"vlmrl\0train" in command_of(p)]
    [host] = [p for p in everybody if b"rollout.host" in command_of(p)]
    assert len(ranks) == 2 and len(workers(host)) == 2
    os.kill(ranks[0], signal.SIGKILL)
    told = process.communicate(timeout=PROMISED_SECONDS)[1]
    assert process.returncode == 2 and "was killed by SIGKILL" in told, told[-2000:]
    assert gone(everybody)
    steps = open_run(folder.parent, folder.name).metrics("train")
    assert len(steps) >= 2 and steps[-1]["optim/updates"] > 0
    for m in steps:
        assert m["policy/sampler_gap_max"] < 1e-4 and m["policy/sync_gap_max"] < 1e-4 and m["rollout/samples"] == 15
