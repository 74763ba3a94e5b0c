"""LoRA on the shared-prefix path against the padded one: log-probs and gradients, with an adapter that matters."""

from __future__ import annotations

import pytest
import torch
from tinyworld import encoded, items_of

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.model.load import load_model
from vlmrl.model.lora import attach_adapter
from vlmrl.model.packing import make_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Model
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import PolicyGradient, _token_data

LIMIT_NATS = 1e-5
LIMIT_GRADIENT = 1e-5


@pytest.fixture(scope="module")
def items(tiny_encoder):
    """Three groups in a row, ragged: text alone, two images of different sizes, one image."""
    prompts = [
        encoded(tiny_encoder, "Are these two images the same digit?", name="text"),
        encoded(tiny_encoder, "yes no", [(112, 56), (84, 112)], name="sizes"),
        encoded(tiny_encoder, "3; 8", [(56, 84)], name="one"),
    ]
    return items_of([(prompts[0], [5, 1, 9]), (prompts[1], [7, 2, 4]), (prompts[2], [3, 6])])


def adapted(folder, lora: Lora, *, recompute: bool = False):
    """The tiny model with an adapter whose second factor is not zero."""
    model = load_model(
        Model(path=str(folder), dtype="float32", device="cpu", gradient_checkpointing=recompute)  # type: ignore[arg-type]
    )
    torch.manual_seed(3)
    attach_adapter(model, lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.normal_(0, 0.1)
    return model


def measured(policy: Policy, items):
    """(log-probs, trainable parameter -> gradient or None) of one row with all the groups."""
    policy.model.zero_grad(set_to_none=True)
    advantages = [1.0, -0.5, 0.25, -1.0, 2.0, 0.5, -0.75, 1.5]
    row = make_row(items)
    stats = policy(row)
    data = _token_data(items, StepBatch(items, advantages, [""] * len(items)), {}, torch.device("cpu"))
    loss, _ = PolicyGradient(ALGORITHMS["grpo"]).loss(stats, data)
    (loss + 0.1 * stats.logp).mean().backward()
    trained = {n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad}
    return stats.logp.detach().clone(), {n: None if g is None else g.clone() for n, g in trained.items()}


def without_gradient(gradients) -> list[str]:
    return sorted(n for n, g in gradients.items() if g is None or not bool(g.any()))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    "lora",
    [Lora(rank=4), Lora(rank=4, vision=True), Lora(rank=4, rslora=True, dora=True)],
    ids=["language", "vision", "dora"],
)
def test_shared_prefix_equals_the_padded_path(small_folder, items, tiny_banned, lora, recompute):
    model = adapted(small_folder, lora, recompute=recompute)
    shared, padded = (
        measured(Policy(model, temperature=0.7, banned_ids=tiny_banned, shared_prefix=on), items)
        for on in (True, False)
    )
    gap = float((shared[0] - padded[0]).abs().max())
    assert gap <= LIMIT_NATS
    ours, theirs = (torch.cat([g.flatten().double() for g in found[1].values()]) for found in (shared, padded))
    difference = float((ours - theirs).norm() / theirs.norm())
    assert difference <= LIMIT_GRADIENT
    assert without_gradient(shared[1]) == without_gradient(padded[1]) == []
    print(f"\nlog-prob gap {gap:.1e} nats, relative gradient difference {difference:.1e}")


def test_the_adapter_of_these_tests_matters(small_folder, items, tiny_banned):
    policy = Policy(adapted(small_folder, Lora(rank=4)), temperature=0.7, banned_ids=tiny_banned)
    base = Policy(
        load_model(Model(path=str(small_folder), dtype="float32", device="cpu")),
        temperature=0.7,
        banned_ids=tiny_banned,
    )
    row = make_row(items)
    with torch.no_grad():
        assert float((policy(row).logp - base(row).logp).abs().max()) > 0.05


def test_a_fresh_adapter_is_listed_as_it_is_half_of_it_has_no_gradient_yet(small_folder, items):
    """With B = 0 the gradient of every A is 0, and that of every B is not."""
    model = load_model(Model(path=str(small_folder), dtype="float32", device="cpu"))
    names = without_gradient(measured(Policy(attach_adapter(model, Lora(rank=4))), items)[1])
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names == sorted(n for n in trained if ".lora_A." in n) and 2 * len(names) == len(trained)
