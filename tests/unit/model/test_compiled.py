"""Compiled layers: the numbers of layers that are not, few graphs, and what is compiled at all."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import TOLERANCE, differences, packed, reference, world
from tinyfamilies import build
from torch._dynamo.utils import counters

from vlmrl.errors import CheckpointError
from vlmrl.model import compiled
from vlmrl.model.attention import index_of, varlen_index
from vlmrl.model.compiled import compile_layers, copy_keys, numbered, plan_of
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.model_facts import ModelFacts
from vlmrl.model.packing import Span, make_row, pack, plan_row
from vlmrl.model.policy import Policy
from vlmrl.setup.auto_choice import choose_compilation

NAME, WHOLE = "qwen2_5_vl", 10_000
LAYOUT = [Span(0, -1, 0, 5), Span(0, 0, 5, 8), Span(0, 1, 8, 12), Span(1, -1, 12, 14), Span(1, 2, 14, 15)]


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced and split into passes as always, but run by torch's own kernels: that takes less time."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()  # pyright: ignore[reportAttributeAccessIssue]
    counters.clear()


@functools.cache
def expected() -> Any:
    family = build(NAME)
    items = world(family)
    return items, reference(family.model, family, items)


def policy_of(recompute: bool = False) -> Policy:
    model = build(NAME).model
    share_prefix(model)
    if recompute:
        checkpoint_gradients(model)
    policy = Policy(model)
    compile_layers(policy)
    return policy


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_compiled_layers_have_the_numbers_of_the_stock_forward(recompute: bool) -> None:
    items, stock = expected()
    assert max(differences(packed(policy_of(recompute), items, WHOLE), stock)) <= TOLERANCE
    assert counters["stats"]["unique_graphs"] > 1


@pytest.mark.slow
def test_rows_of_other_lengths_compile_little_and_text_layers_have_no_breaks() -> None:
    policy, (items, _) = policy_of(), expected()
    texts = [m for m in policy.model.modules() if type(m).__name__ == "Qwen2_5_VLDecoderLayer"]
    assert len(texts) > 1
    packed(policy, items, WHOLE)
    before = counters["stats"]["unique_graphs"]
    for count in range(1, len(items)):
        for some in (items[:count], items[count:]):
            for row in pack(some, WHOLE):
                policy(make_row(row, torch.device("cpu"))).logp.sum().backward()
    assert counters["stats"]["unique_graphs"] <= before + 2
    assert all("_by_windows" in reason for reason in counters["graph_break"]), list(counters["graph_break"])


def test_without_a_numbered_plan_a_text_layer_runs_as_it_is() -> None:
    policy = policy_of()
    ids = torch.arange(20, 26)[None]
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits
        assert torch.equal(logits, build(NAME).model(input_ids=ids).logits) and not counters["stats"]


def test_a_plan_lives_as_long_as_the_graph_of_its_row() -> None:
    plan = numbered(plan_row(LAYOUT, torch.device("cpu"), backend="split"))
    assert plan.number is not None
    number, hidden = plan.number, torch.ones(2, requires_grad=True) * 2
    assert plan_of(number) is plan
    compiled.keep_for_backward(plan, hidden)
    del plan
    assert plan_of(number).spans == tuple(LAYOUT)
    del hidden
    with pytest.raises(RuntimeError, match="has gone"):
        plan_of(number)


def test_copied_keys_and_their_gradients_are_those_of_plain_indexing() -> None:
    plan = plan_row(LAYOUT, torch.device("cpu"), backend="varlen")
    index = index_of(plan)
    plan = numbered(plan)
    assert plan.number is not None and torch.equal(index.key_at, varlen_index(plan).key_at)
    x = torch.randn(15, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pull = torch.randn(len(index.key_at), 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, two = (x.clone().requires_grad_() for _ in range(2))
    a, b = copy_keys(one, index.key_at, index.own_at, plan.number), two[index.key_at]
    assert torch.equal(a, b)
    (a * pull).sum().backward()
    (b * pull).sum().backward()
    assert one.grad is not None and two.grad is not None
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=1e-6)  # the copies are summed in float32


def test_a_layer_that_cannot_be_compiled_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*inputs: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    with pytest.raises(CheckpointError, match="cannot be compiled") as caught:
        packed(policy_of(), expected()[0], WHOLE)
    assert "model.compile=false" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("model", "facts", "value", "reason"),
    [
        ({}, {}, True, "packed rows on a GPU"),
        ({"dtype": "float32"}, {}, False, "float32"),
        ({"quantize": "4bit"}, {}, False, "4-bit"),
        ({}, {"sharing": "forked"}, False, "packed rows"),
        ({}, {"two_way_images": True}, False, "FlexAttention"),
    ],
)
def test_what_is_compiled_on_a_gpu(model: dict[str, Any], facts: dict[str, Any], value: bool, reason: str) -> None:
    settings = SimpleNamespace(**{"quantize": None, "dtype": "bfloat16", **model})
    recipe: Any = SimpleNamespace(model=settings)
    known: Any = SimpleNamespace(**{"sharing": "packed", "two_way_images": False, **facts})
    known.by_flash = functools.partial(ModelFacts.by_flash, known)
    choice = choose_compilation(recipe, lambda: known)
    assert choice.value is value and reason in choice.reason
