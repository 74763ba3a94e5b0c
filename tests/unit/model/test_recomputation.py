"""Which layers are recomputed; that a run's numbers do not depend on it, to the bit; and that less is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Outcome, packed, world
from tinyfamilies import build
from tinyworld import saved_bytes

from vlmrl.errors import CheckpointError
from vlmrl.model.families import part_of
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.memory import STEPS, Recomputed, recomputed_layers, stricter
from vlmrl.model.packing import make_row
from vlmrl.model.policy import Policy

ANY = st.one_of(st.sampled_from(STEPS), st.floats(0, 1, exclude_min=True, exclude_max=True))


def policy_of(name: str, setting: object) -> Policy:
    family = build(name)
    share_prefix(family.model)
    checkpoint_gradients(family.model, setting)  # pyright: ignore[reportArgumentType]
    return Policy(family.model)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (False, (False, 0)),
        ("auto", (False, 0)),
        ("vision", (True, 0)),
        (1e-9, (True, 1)),
        (0.25, (True, 7)),  # of 28
        (0.26, (True, 8)),  # 7.28
        (0.999, (True, 28)),
        (True, (True, 28)),
    ],
)
def test_layers_of_a_setting(setting, expected):
    assert recomputed_layers(setting, 28) == Recomputed(*expected)


def test_each_step_recomputes_more_than_the_one_before():
    assert stricter(False) == ("vision", 0.25, 0.5, 0.75, True)
    assert stricter("vision") == (0.25, 0.5, 0.75, True)
    assert stricter(0.3) == (0.5, 0.75, True)
    assert stricter(True) == () and stricter("auto") == stricter(False)


def test_the_first_layers_of_the_text_model_are_recomputed():
    policy = policy_of("qwen2_5_vl", 0.5)  # 2 of 3 layers
    on = {n for n, m in policy.model.named_modules() if getattr(m, "gradient_checkpointing", False)}
    text = {name for name in on if part_of(f"{name}.") == "language"}
    assert {name.rpartition("layers.")[2] for name in text} == {"0", "1"}
    assert len({name for name in on if ".blocks." in name}) == 2 and policy.recompute
    assert not any(name.endswith("layers.2") for name in on)


def test_a_model_without_layers_of_its_own_takes_no_share(monkeypatch):
    monkeypatch.setattr("vlmrl.model.load._is_layer", lambda module: False)
    with pytest.raises(CheckpointError, match="no text layers"):
        policy_of("qwen2_5_vl", 0.5)
    assert policy_of("qwen2_5_vl", True).recompute


EXPECTED: dict[str, Outcome] = {}
"""Family -> what nothing recomputed gives, made once."""


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(setting=ANY)
def test_gradients_are_the_same_to_the_bit_for_every_setting(name, setting):
    """Packed rows, a forked cache, and experts."""
    items = world(build(name))
    if name not in EXPECTED:
        EXPECTED[name] = packed(policy_of(name, False), items, 10_000)
    expected, found = EXPECTED[name], packed(policy_of(name, setting), items, 10_000)
    assert torch.equal(found.logp, expected.logp)
    for parameter, gradient in expected.gradients.items():
        mine = found.gradients[parameter]
        same = torch.equal(mine, gradient) if mine is not None and gradient is not None else mine is gradient
        assert same, parameter


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4", "qwen3_vl"])
def test_each_setting_keeps_less_than_the_one_before(name):
    kept = [saved_bytes(policy_of(name, s), make_row(world(build(name)))) for s in (False, "vision", 0.3, 0.6, True)]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept), kept
