"""Every family against transformers' own forward of each row alone: log-probs and gradients of all parameters."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from parity import TOLERANCE, Outcome, adapted, differences, packed, reference, world
from tinyfamilies import BUILDERS, IMAGE, TinyFamily, build
from tinyprocessors import encoder_of

from vlmrl.model import caches, packing
from vlmrl.model import caches as split_attention
from vlmrl.model import policy as policy_module
from vlmrl.model.attention import ForkPlan
from vlmrl.model.families import part_of
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.packing import TrainItem, make_row, pack
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Optim
from vlmrl.train.learner import Optimizer
from vlmrl.types import Segment

PATHS = (
    dict.fromkeys(BUILDERS, "packed")
    | dict.fromkeys(("qwen3_5", "qwen3_5_moe", "minicpmv4_6"), "forked")
    | {"llava": "padded"}
)
"""How each family shares a prompt."""
POOLING = [
    f"model.vision_tower.head.{name}"
    for name in (
        "attention.in_proj_bias",
        "attention.in_proj_weight",
        "attention.out_proj.bias",
        "attention.out_proj.weight",
        "layernorm.bias",
        "layernorm.weight",
        "mlp.fc1.bias",
        "mlp.fc1.weight",
        "mlp.fc2.bias",
        "mlp.fc2.weight",
        "probe",
    )
]
WHOLE = 10_000
"""Tokens of a row that holds everything."""
FIXED_TOKENS = ("gemma3", "gemma4", "gemma4_shared_kv", "idefics3", "smolvlm", "llava")
"""Families whose processors resize: small and large images get about as many tokens."""
NO_GRADIENT = {
    ("gemma3", "full"): POOLING,
    ("gemma3", "lora on vision"): [
        f"model.vision_tower.head.{layer}.lora_{factor}.default.weight"
        for layer in ("attention.out_proj", "mlp.fc1", "mlp.fc2")
        for factor in "AB"
    ],
    ("llava", "full"): [*POOLING, "model.vision_tower.post_layernorm.bias", "model.vision_tower.post_layernorm.weight"],
}
"""Parameters without a gradient in the stock forward: SigLIP's pooling head, whose output these families do not use."""


def split(items: list[TrainItem]) -> int:
    """Tokens of a row that holds the first group's prompt with two of its three responses."""
    return len(items[0].prompt.ids) + 8


LORAS: dict[str, Lora | None] = {"full": None, "lora": Lora(rank=4), "lora on vision": Lora(rank=4, vision=True)}
CELLS = [
    *((name, trained) for name in BUILDERS for trained in ("full", "lora")),
    *((name, "lora on vision") for name in ("qwen2_5_vl", "gemma3", "smolvlm", "qwen3_5")),  # each way of sharing
]


@functools.cache
def prepared(name: str, trained: str = "full") -> tuple[TinyFamily, list[TrainItem], Outcome]:
    """The family's stock model, its world out of its real processor, and the reference. Made once for all tests."""
    family = build(name)
    items = world(family, encoder=encoder_of(name)) if trained == "full" else prepared(name)[1]
    lora = LORAS[trained]
    model = family.model if lora is None else adapted(family.model, lora)
    return family, items, reference(model, family, items)


def policy_of(name: str, recompute: bool = False, trained: str = "full", **kwargs) -> Policy:
    model, lora = build(name).model, LORAS[trained]
    share_prefix(model)
    if recompute:
        checkpoint_gradients(model)
    return Policy(model if lora is None else adapted(model, lora), **kwargs)


def ratio(items: list[TrainItem]) -> float:
    """Tokens of the first prompt's large image for one of its small one, of which the third prompt has one alone."""
    small, both = (next(sum(i.prompt.kinds) for i in items if i.group == group) for group in (2, 0))
    return (both - small) / small


def norm_of(part: str, outcome: Outcome) -> float:
    found = [g for n, g in outcome.gradients.items() if part_of(n) == part and g is not None]
    return sum(float(g.square().sum()) for g in found) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("name", "trained"), CELLS)
def test_a_family_equals_its_stock_forward(name, trained, recompute):
    _, items, expected = prepared(name, trained)
    policy = policy_of(name, recompute, trained)
    assert policy.sharing == PATHS[name]
    for budget in (WHOLE,) if recompute else (WHOLE, split(items)):
        actual = packed(policy, items, budget)
        logp, gradient = differences(actual, expected)
        print(f"{name} {policy.sharing} {trained} recompute={recompute} budget={budget}: {logp:.1e} {gradient:.1e}")
        assert logp <= TOLERANCE and gradient <= TOLERANCE, f"log-prob {logp:.1e}, gradient {gradient:.1e}"
        assert actual.without_gradient == expected.without_gradient == sorted(NO_GRADIENT.get((name, trained), ()))
    assert None not in {part_of(n) for n in expected.gradients}
    for part in {"full": ("vision", "language", "embeddings"), "lora": ("language",)}.get(
        trained, ("vision", "language")
    ):
        assert norm_of(part, actual) > 1e-3, part


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_the_padded_path_equals_the_stock_forward(name):
    _, items, expected = prepared(name)
    policy = policy_of(name, shared_prefix=False)
    assert policy.sharing == "padded"
    assert max(differences(packed(policy, items, WHOLE), expected)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED_TOKENS)
def test_an_image_twenty_times_larger_where_processors_resize(name):
    """Their models take it all the same: tiles, crops and patches from tests/tinyfamilies.py."""
    family = build(name)
    items = world(family)
    assert ratio(items) >= 18, ratio(items)
    expected = reference(family.model, family, items)
    assert max(differences(packed(policy_of(name), items, split(items)), expected)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_the_adapter_of_the_matrix_matters(name):
    full, lora = (prepared(name, trained)[2].logp for trained in ("full", "lora"))
    assert float((full - lora).abs().max()) > 0.1


@pytest.mark.parametrize("name", BUILDERS)
def test_the_world_of_the_matrix_holds_what_breaks_packing(name):
    _, items, _ = prepared(name)
    prompts = {item.group: item.prompt for item in items}
    assert [prompts[g].num_images for g in range(4)] == [2, 0, 1, 0]  # text alone between and after images
    if name not in FIXED_TOKENS:
        assert ratio(items) >= 10, ratio(items)
    lengths = [[i.num_tokens for i in items if i.group == g] for g in range(4)]
    assert lengths[0] == [5, 1, 9] and len(lengths[3]) == 1  # ragged, a single token; a group of one sample
    agent = next(i for i in items if i.images)
    assert [(s.trained, IMAGE in s.ids) for s in agent.segments] == [
        (False, False),
        (True, False),
        (False, True),
        (True, False),
        (False, False),
    ]
    assert len(pack(items, WHOLE)) == 1
    rows = pack(items, split(items))
    assert sum(any(i.group == 0 for i in row) for row in rows) == 2  # its prompt is repeated


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

    right = split_attention.row_groups
    together = lambda plan: [replace(g, each=(g.responses,)) if g.each else g for g in right(plan)]  # noqa: E731
    patch.setattr(packing.RowTokens, "sees", wrong)
    patch.setattr(split_attention, "row_groups", together)


def unseen_prompt(patch: pytest.MonkeyPatch) -> None:
    """A response sees its own tokens alone."""
    patch.setattr(split_attention, "join_parts", lambda seen, own: own)


def seen_future(patch: pytest.MonkeyPatch) -> None:
    """A forked response sees one token of its own future."""
    patch.setattr(
        policy_module,
        "fork_plan",
        lambda p, r, device: ForkPlan(torch.ones(r, p + r, dtype=torch.bool, device=device).tril(p + 1)),
    )


def moved_boundary(patch: pytest.MonkeyPatch) -> None:
    """The first token of a response is predicted from the last prompt token but one."""
    right = Policy.forward

    def wrong(self, row):
        ends = torch.tensor([s.end - 1 for s in row.layout if s.response == -1])
        at = torch.where(torch.isin(row.predict_at_K, ends), row.predict_at_K - 1, row.predict_at_K)
        return right(self, replace(row, predict_at_K=at))

    patch.setattr(Policy, "forward", wrong)


def other_image_order(patch: pytest.MonkeyPatch) -> None:
    """The pixels of a row, or of a forked prompt, come in the opposite order."""
    right = Policy.forward

    def turned(images, axes):
        return {k: v.flip(axes[k]) if k == "pixel_values" else v for k, v in images.items()}

    def wrong(self, row):
        axes = row.image_axes
        spans = tuple(turned(images, axes) for images in row.span_images)
        return right(self, replace(row, images=turned(row.images, axes), span_images=spans))

    patch.setattr(Policy, "forward", wrong)


def no_window(patch: pytest.MonkeyPatch) -> None:
    right = packing.RowTokens.sees
    patch.setattr(packing.RowTokens, "sees", lambda self, q, k, window, blocks: right(self, q, k, None, blocks))


def one_way_images(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packing.RowPlan, "has_blocks", lambda self, window: False)


def no_tail(patch: pytest.MonkeyPatch) -> None:
    """Forked responses begin their convolution from nothing."""
    right = caches.RecordedPrompt.update_conv_state

    def wrong(self, conv_states, layer_idx, *args, **kwargs):
        out = right(self, conv_states, layer_idx, *args, **kwargs)
        self.tails[layer_idx] = torch.zeros_like(self.tails[layer_idx])
        return out

    patch.setattr(caches.RecordedPrompt, "update_conv_state", wrong)


def detached_state(patch: pytest.MonkeyPatch) -> None:
    """No gradient flows from the responses into the prompt's recurrent state."""
    right = caches.RecordedPrompt.update_recurrent_state
    patch.setattr(
        caches.RecordedPrompt,
        "update_recurrent_state",
        lambda self, states, layer_idx, *a, **k: right(self, states.detach(), layer_idx, *a, **k),
    )


MUTATIONS = [
    ("qwen2_5_vl", moved_positions),
    ("qwen2_5_vl", seen_siblings),
    ("qwen2_5_vl", unseen_prompt),
    ("qwen2_5_vl", moved_boundary),
    ("qwen3_vl", moved_positions),
    ("qwen3_vl", seen_siblings),
    ("qwen3_vl", moved_boundary),
    ("internvl", moved_positions),
    ("smolvlm", seen_siblings),
    ("glm4v", moved_positions),
    ("qwen3_5", moved_positions),
    ("qwen3_5", seen_future),
    ("qwen3_5", moved_boundary),
    ("qwen3_5", no_tail),
    ("qwen3_5", detached_state),
    ("minicpmv4_6", moved_positions),
    *((name, other_image_order) for name in ("qwen2_5_vl", "gemma3", "smolvlm", "qwen3_5", "minicpmv4_6")),
    ("gemma3", no_window),
    ("gemma3", one_way_images),
    ("gemma4", no_window),
    ("gemma4", one_way_images),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mutation"), MUTATIONS, ids=lambda x: getattr(x, "__name__", x))
def test_the_comparison_sees_what_it_must_see(name, mutation, monkeypatch):
    """Each mistake moves log-probs or gradients at least 100 times beyond the tolerance."""
    _, items, expected = prepared(name)
    policy = policy_of(name)
    mutation(monkeypatch)
    assert max(differences(packed(policy, items, WHOLE), expected)) > 100 * TOLERANCE


def test_responses_of_one_token_and_responses_trained_nowhere_can_be_forked():
    family, items, _ = prepared("qwen3_5")
    prompt = items[0].prompt
    short = [TrainItem(prompt, 0, (Segment("assistant", (30 + k,), True),), k) for k in range(2)]
    silent = TrainItem(prompt, 0, (Segment("tool", (31, 32), False), Segment("assistant", (33,), True)), 2)
    empty = TrainItem(prompt, 1, (Segment("assistant", (), True),), 3)
    chosen = [*short, silent, empty]
    expected = reference(family.model, family, chosen[:3])
    assert max(differences(packed(policy_of("qwen3_5"), chosen, WHOLE), expected)) <= TOLERANCE


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
    assert len(whole) == 3 and all(len(w["target_sizes"]) > 0 for w in whole)
    for name, axis in (("pixel_values", 3), ("target_sizes", 0)):
        assert torch.equal(torch.cat([w[name] for w in whole], axis), row.images[name])
    assert family.axes == {k: a for k, a in row.image_axes.items() if a}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_bfloat16_over_float32_masters_is_as_near_float32_as_the_stock_forward_in_bfloat16(name):
    """Weights and arithmetic in bfloat16, gradients summed over rows into the optimizer's float32 masters. Rounding of
    the same size as the stock forward's is allowed; a path that rounds more, mixes types or loses terms is not."""
    _, items, truth = prepared(name)
    family = build(name)
    stock = reference(family.model.to(torch.bfloat16), family, items)
    policy = policy_of(name)
    policy.model.to(torch.bfloat16)
    optimizer = Optimizer(policy, Optim())
    ours = packed(policy, items, split(items))
    assert ours.logp.dtype == torch.float32 and bool(torch.isfinite(ours.logp).all())
    ours = replace(ours, gradients={n.removeprefix("model."): m.grad for n, m in optimizer.masters.items()})
    gradients = [g for g in ours.gradients.values() if g is not None]
    assert all(g.dtype == torch.float32 and bool(torch.isfinite(g).all()) for g in gradients)
    found, allowed = ((float((o.logp - truth.logp).abs().mean()), differences(o, truth)[1]) for o in (ours, stock))
    print(f"{name} bfloat16: log-prob {found[0]:.3f} of {allowed[0]:.3f}, gradient {found[1]:.3f} of {allowed[1]:.3f}")
    assert found[0] <= 1.5 * allowed[0] and found[1] <= 1.5 * allowed[1]
    assert ours.without_gradient == truth.without_gradient
