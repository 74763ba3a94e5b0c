"""Every family against transformers' own forward of each row alone: log-probs and gradients of all parameters."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from parity import TOLERANCE, Outcome, differences, packed, reference, world
from tinyfamilies import BUILDERS, TinyFamily, build

from vlmrl.data.batch import TrainItem, make_row, pack
from vlmrl.model import fork, row_plan
from vlmrl.model import policy as policy_module
from vlmrl.model.families import part_of
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.policy import Policy
from vlmrl.model.prefix_attention import ForkPlan
from vlmrl.types import Segment

PATHS = dict.fromkeys(BUILDERS, "packed") | dict.fromkeys(("qwen3_5", "qwen3_5_moe", "minicpmv4_6"), "forked") | {
    "llava": "padded"
}  # fmt: skip
"""How each family shares a prompt."""
BUDGETS = {"everything in one row": 10_000, "a group split": 130}
POOLING = [
    f"model.vision_tower.head.{name}"
    for name in ("attention.in_proj_bias", "attention.in_proj_weight", "attention.out_proj.bias",
                 "attention.out_proj.weight", "layernorm.bias", "layernorm.weight", "mlp.fc1.bias", "mlp.fc1.weight",
                 "mlp.fc2.bias", "mlp.fc2.weight", "probe")
]  # fmt: skip
NO_GRADIENT = {
    "gemma3": POOLING,
    "llava": [*POOLING, "model.vision_tower.post_layernorm.bias", "model.vision_tower.post_layernorm.weight"],
}
"""Parameters without a gradient in the stock forward: SigLIP's pooling head, whose output these families do not use."""


@functools.cache
def prepared(name: str) -> tuple[TinyFamily, list[TrainItem], Outcome]:
    """The family's model (to be copied), its world, and the reference. Made once for all tests of the family."""
    family = build(name)
    items = world(family)
    return family, items, reference(family.model, family, items)


def policy_of(name: str, recompute: bool = False, **kwargs) -> Policy:
    model = build(name).model
    share_prefix(model)
    if recompute:
        checkpoint_gradients(model)
    return Policy(model, **kwargs)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_family_equals_its_stock_forward(name, recompute):
    _, items, expected = prepared(name)
    policy = policy_of(name, recompute)
    assert policy.sharing == PATHS[name]
    for budget in BUDGETS.values():
        assert (len(pack(items, budget)) > 1) == (budget < 1000)
        actual = packed(policy, items, budget)
        logp, gradient = differences(actual, expected)
        print(f"{name} {policy.sharing} recompute={recompute} budget={budget}: {logp:.1e} {gradient:.1e}")
        assert logp <= TOLERANCE and gradient <= TOLERANCE, f"log-prob {logp:.1e}, gradient {gradient:.1e}"
        assert actual.without_gradient == expected.without_gradient == sorted(NO_GRADIENT.get(name, ()))
    parts = {n: part_of(n) for n in expected.gradients}
    assert None not in parts.values(), [n for n, part in parts.items() if part is None]
    for part in ("vision", "language", "embeddings"):
        norm = sum(float(actual.gradients[n].square().sum()) for n in parts
                   if parts[n] == part and actual.gradients[n] is not None) ** 0.5  # fmt: skip
        assert norm > 1e-3, f"{part}: gradient {norm}"


@pytest.mark.parametrize("name", BUILDERS)
def test_the_padded_path_equals_the_stock_forward(name):
    _, items, expected = prepared(name)
    policy = policy_of(name, shared_prefix=False)
    assert policy.sharing == "padded"
    assert max(differences(packed(policy, items, 10_000), expected)) <= TOLERANCE


def moved_positions(patch: pytest.MonkeyPatch) -> None:
    """Responses begin one position late."""
    right = Policy._span_positions

    def wrong(self, row):
        return [
            (p if span.response == -1 else p + 1, n) for span, (p, n) in zip(row.layout, right(self, row), strict=True)
        ]

    patch.setattr(Policy, "_span_positions", wrong)


def seen_siblings(patch: pytest.MonkeyPatch) -> None:
    """A response sees the ones before it in its group."""

    def wrong(self, query, key, window, blocks):
        return (self.group[query] == self.group[key]) & (query >= key)

    patch.setattr(row_plan.RowTokens, "sees", wrong)


def seen_future(patch: pytest.MonkeyPatch) -> None:
    """A forked response sees one token of its own future."""
    patch.setattr(
        policy_module, "fork_plan",
        lambda p, r, device: ForkPlan(torch.ones(r, p + r, dtype=torch.bool, device=device).tril(p + 1)),
    )  # fmt: skip


def moved_boundary(patch: pytest.MonkeyPatch) -> None:
    """The first token of a response is predicted from the last prompt token but one."""
    right = Policy.forward

    def wrong(self, row):
        ends = torch.tensor([s.end - 1 for s in row.layout if s.response == -1])
        at = torch.where(torch.isin(row.predict_at_K, ends), row.predict_at_K - 1, row.predict_at_K)
        return right(self, replace(row, predict_at_K=at))

    patch.setattr(Policy, "forward", wrong)


def no_window(patch: pytest.MonkeyPatch) -> None:
    right = row_plan.RowTokens.sees
    patch.setattr(row_plan.RowTokens, "sees", lambda self, q, k, window, blocks: right(self, q, k, None, blocks))


def one_way_images(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(row_plan.RowPlan, "has_blocks", lambda self, window: False)


def no_tail(patch: pytest.MonkeyPatch) -> None:
    """Forked responses begin their convolution from nothing."""
    right = fork.RecordedPrompt.update_conv_state

    def wrong(self, conv_states, layer_idx, *args, **kwargs):
        out = right(self, conv_states, layer_idx, *args, **kwargs)
        self.tails[layer_idx] = torch.zeros_like(self.tails[layer_idx])
        return out

    patch.setattr(fork.RecordedPrompt, "update_conv_state", wrong)


def detached_state(patch: pytest.MonkeyPatch) -> None:
    """No gradient flows from the responses into the prompt's recurrent state."""
    right = fork.RecordedPrompt.update_recurrent_state
    patch.setattr(
        fork.RecordedPrompt, "update_recurrent_state",
        lambda self, states, layer_idx, *a, **k: right(self, states.detach(), layer_idx, *a, **k),
    )  # fmt: skip


MUTATIONS = [
    ("qwen2_5_vl", moved_positions), ("qwen2_5_vl", seen_siblings), ("qwen2_5_vl", moved_boundary),
    ("qwen3_vl", moved_positions), ("qwen3_vl", seen_siblings), ("qwen3_vl", moved_boundary),
    ("internvl", moved_positions), ("smolvlm", seen_siblings), ("glm4v", moved_positions),
    ("qwen3_5", moved_positions), ("qwen3_5", seen_future), ("qwen3_5", moved_boundary), ("qwen3_5", no_tail),
    ("qwen3_5", detached_state), ("minicpmv4_6", moved_positions),
    ("gemma3", no_window), ("gemma3", one_way_images), ("gemma4", no_window), ("gemma4", one_way_images),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mutation"), MUTATIONS, ids=lambda x: getattr(x, "__name__", x))
def test_the_comparison_sees_what_it_must_see(name, mutation, monkeypatch):
    """Each mistake moves log-probs or gradients at least 100 times beyond the tolerance."""
    _, items, expected = prepared(name)
    policy = policy_of(name)
    mutation(monkeypatch)
    assert max(differences(packed(policy, items, 10_000), expected)) > 100 * TOLERANCE


def test_responses_of_one_token_and_responses_trained_nowhere_can_be_forked():
    family, items, _ = prepared("qwen3_5")
    prompt = items[0].prompt
    short = [TrainItem(prompt, 0, (Segment("assistant", (30 + k,), True),), k) for k in range(2)]
    silent = TrainItem(prompt, 0, (Segment("tool", (31, 32), False), Segment("assistant", (33,), True)), 2)
    empty = TrainItem(prompt, 1, (Segment("assistant", (), True),), 3)
    chosen = [*short, silent, empty]
    expected = reference(family.model, family, chosen[:3])
    assert max(differences(packed(policy_of("qwen3_5"), chosen, 10_000), expected)) <= TOLERANCE


def test_images_in_a_response_need_their_kinds_and_kinds_their_images():
    _, items, _ = prepared("qwen3_vl")
    agent = next(i for i in items if i.images)
    with pytest.raises(ValueError, match="must come together"):
        replace(agent, images={})
    with pytest.raises(ValueError, match="kinds for"):
        replace(agent, kinds=agent.kinds[1:])


def test_an_agents_images_are_its_own_part_of_the_row():
    family, items, _ = prepared("minicpmv4_6")
    row = make_row(items)
    whole = [row.span_images[i] for i, _ in enumerate(row.layout) if row.span_images[i]]
    assert len(whole) == 3 and sum(len(w["target_sizes"]) for w in whole) == 5
    for name, axis in (("pixel_values", 3), ("target_sizes", 0)):
        assert torch.equal(torch.cat([w[name] for w in whole], axis), row.images[name])
    assert family.axes == {k: a for k, a in row.image_axes.items() if a}


@pytest.mark.parametrize("name", BUILDERS)
def test_bfloat16_runs_and_stays_near_the_stock_forward_in_bfloat16(name):
    """A path that mixes types or computes in the wrong one fails here. The bound is bfloat16's rounding."""
    family = build(name)
    family.model.to(torch.bfloat16)
    _, items, _ = prepared(name)
    expected = reference(family.model, family, items)
    policy = policy_of(name)
    policy.model.to(torch.bfloat16)
    actual = packed(policy, items, 10_000)
    assert actual.logp.dtype == torch.float32
    assert float((actual.logp - expected.logp).abs().mean()) < 0.1
    assert differences(actual, expected)[1] < 0.2
