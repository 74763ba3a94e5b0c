"""What must work on any device, tried on one that is not the CPU. Run by tests/ranks/test_other_device.py, in a process
of its own: `pytest tests/other_device_cases.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from other_device import CPU, OTHER, OtherTensor, other_device
from parity import TOLERANCE, adapted, differences, packed, world
from small_runs import TWO_STEPS, answers, assert_close_history, finite, make_place, train
from tinyfamilies import build

from vlmrl.evaluate.deep_check import deep_check
from vlmrl.model import load
from vlmrl.model.load import share_prefix
from vlmrl.model.policy import Policy
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.schema import Lora
from vlmrl.store.runs import Run

RUNS = {
    "several updates, the full KL, checkpoints beside": (
        "train.updates_per_step=2",
        "algo.kl_coef=0.1",
        "algo.kl=full",
        "checkpoint.asynchronous=true",
    ),
    "adapter, KL in the reward": ("lora.rank=4", "algo.kl_coef=0.1", "algo.kl_in=reward", "optim.lr=1e-3"),
    "critic, sampling that cuts": (
        "algo.name=ppo",
        "rollout.top_p=0.9",
        "rollout.top_k=50",
        "rollout.allow_filtered_sampling=true",
    ),
    "greedy baseline": ("algo.name=remax",),
    "tokens that are chosen": ("algo.name=clip_cov", "train.updates_per_step=2", "algo.cov_share=0.2"),
}
VISION_LORA = Lora(rank=4, vision=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, TWO_STEPS, kinds=("rl", "sft"))


@pytest.fixture
def moved() -> Callable[[], AbstractContextManager[None]]:
    """A context in which recipes run on the device."""

    @contextmanager
    def context() -> Iterator[None]:
        chosen, made = load.pick_device, OtherTensor.made
        with pytest.MonkeyPatch.context() as patch, other_device():
            for module in [m for name, m in sys.modules.items() if name.startswith("vlmrl.")]:
                if getattr(module, "pick_device", None) is chosen:
                    patch.setattr(module, "pick_device", lambda wanted: OTHER)
            yield
        assert OtherTensor.made - made > 10_000, "the run was elsewhere"

    return context


def test_the_device_is_as_strict_as_a_gpu() -> None:
    with other_device():
        x, mask = torch.ones(3, device=OTHER), torch.ones(3, dtype=torch.bool)
        assert (x + torch.tensor(1.0)).sum().item() == 6 and x[mask].device == OTHER and x.cpu().device == CPU
        for wrong in (
            lambda: x + torch.ones(3),
            lambda: torch.cat([x, torch.ones(3)]),
            lambda: torch.ones(3)[x.long()],
            lambda: torch.rand(3, device=OTHER, generator=torch.Generator()),
            lambda: x.where(mask, x),
            lambda: x.index_put((mask,), torch.ones(3)),
        ):
            with pytest.raises(RuntimeError, match=r"device|CPU|generator"):
                wrong()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *(
            (name, None)
            for name in ("gemma3", "gemma4", "glm4v", "idefics3", "minicpmv4_6", "qwen3_vl", "qwen3_vl_moe")
        ),
        *((name, lora) for name in ("internvl", "llava", "qwen2_5_vl", "qwen3_5") for lora in (None, VISION_LORA)),
    ],
)
def test_an_update_of_a_family(name: str, lora: Lora | None) -> None:
    outcomes = []
    for device in (CPU, OTHER):
        family = build(name)
        model = family.model if lora is None else adapted(family.model, lora)
        share_prefix(model)
        with other_device():
            outcomes.append(packed(Policy(model.to(device), backend="sdpa"), world(family), 120))
    gap, gradient = differences(outcomes[1], outcomes[0])
    assert gap <= 2 * TOLERANCE and gradient <= 2 * TOLERANCE  # each of the two may be that far from the reference


def test_tensors_without_an_address_are_not_taken_for_each_other(monkeypatch) -> None:
    monkeypatch.delattr(OtherTensor, "data_ptr")  # all have address 0 then
    test_an_update_of_a_family("qwen2_5_vl", None)


@pytest.mark.parametrize("case", RUNS)
def test_a_run(place, tmp_path, moved, case: str) -> None:
    near = train(place, tmp_path / "near", *RUNS[case])
    with moved():
        far = train(place, tmp_path / "far", *RUNS[case])
    assert_same_but_for_rounding(far, near)


def test_a_supervised_run(place, tmp_path, moved) -> None:
    near = train(place, tmp_path / "near", kind="sft")
    with moved():
        far = train(place, tmp_path / "far", kind="sft")
    assert_same_but_for_rounding(far, near)


def assert_same_but_for_rounding(far: Run, near: Run) -> None:
    """What was sampled is the same; what was measured too, but that the attention of the CPU rounds otherwise."""
    assert answers(far) == answers(near)
    assert_close_history(far, near, rel=1e-3, absolute=1e-5)


def test_half_precision(place, tmp_path, moved) -> None:
    with moved():
        run = train(place, tmp_path, "model.dtype=bfloat16", "optim.name=adamw_bf16_kahan")
    assert all(finite(m) and m["optim/grad_norm"] > 0 for m in run.metrics("train"))


def test_the_deep_check(place, tmp_path, moved) -> None:
    recipe = load_recipe(place / "rl.toml", kind="rl").recipe
    with moved():
        found = deep_check(recipe, tmp_path, prompts=3)
    assert found.agrees and found.gradient is not None and found.logp_max <= 2 * TOLERANCE
