"""Compiled layers: the numbers of layers that are not, few graphs, and what is compiled at all."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import TOLERANCE, adapted, differences, packed, reference, world
from tinyfamilies import BUILDERS, build
from torch import Tensor
from torch._dynamo.utils import counters

from vlmrl.errors import CheckpointError
from vlmrl.model import attention, compiled
from vlmrl.model.attention import hold_kernel, index_of, varlen_index
from vlmrl.model.compiled import compile_layers, copy_keys, numbered, plan_of, split_rows
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.lora import adapter_off
from vlmrl.model.memory import text_layers
from vlmrl.model.model_facts import ModelFacts
from vlmrl.model.packing import Span, TrainItem, make_row, pack, plan_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.rollout import torch_engine
from vlmrl.setup import model as setup_model
from vlmrl.setup.auto_choice import choose_compilation

NAME, WHOLE = "qwen2_5_vl", 10_000
GRAPHS = {
    "qwen2_vl": 3, "qwen3_vl": 3, "qwen3_vl_moe": 3, "qwen3_5": 2, "qwen3_5_moe": 2, "gemma3": 1, "gemma4": 3,
    "gemma4_shared_kv": 5, "glm4v": 2, "glm46v": 2, "internvl": 3, "idefics3": 2, "smolvlm": 2, "minicpmv4_6": 0,
    "llava": 2,
}  # fmt: skip
"""Graphs of each family beside `NAME`. A text layer has one; a vision block has a second one where the first block gets
a view. Layers of Gemma 4 fill a dictionary, which is full when they are computed again; InternVL's vision blocks are
collected in the forward pass alone."""
AS_THEY_ARE = {
    "gemma3": "Gemma3DecoderLayer",
    "gemma4": "Gemma4TextDecoderLayer",
    "gemma4_shared_kv": "Gemma4TextDecoderLayer",
    "minicpmv4_6": "MiniCPMV4_6VisionEncoderLayer",
}
"""Layers that cannot be one graph on the CPU: those with a sliding window or bidirectional images, and a vision tower
that reads lengths out of tensors."""
LAYOUT = [Span(0, -1, 0, 5), Span(0, 0, 5, 8), Span(0, 1, 8, 12), Span(1, -1, 12, 14), Span(1, 2, 14, 15)]


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced and split into passes as always, but run by torch's own kernels: that takes less time."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()  # pyright: ignore[reportAttributeAccessIssue]
    counters.clear()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of layers that are not compiled."""
    said: list[str] = []
    monkeypatch.setattr(compiled, "_warn", functools.cache(said.append))
    return said


@functools.cache
def expected() -> Any:
    family = build(NAME)
    items = world(family)
    return items, reference(family.model, family, items)


def policy_of(
    recompute: bool = False, name: str = NAME, lora: Lora | None = None, compiles: bool = True, **options: Any
) -> Policy:
    model = build(name).model
    share_prefix(model)
    if recompute:
        checkpoint_gradients(model)
    policy = Policy(model if lora is None else adapted(model, lora), **options)
    if compiles:
        compile_layers(policy)
    return policy


def texts_alone() -> list[TrainItem]:
    return [i for i in expected()[0] if i.group in (1, 3)]


def kept_numbers(hidden: Tensor, policy: Policy) -> Iterator[int]:
    """Numbers that each compiled layer before these hidden states keeps for its backward pass, from the last one on."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    left: list[Any] = [hidden.grad_fn]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [next_node for next_node, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            saved = {t.untyped_storage().data_ptr(): t for t in node.saved_tensors if t.is_floating_point()}
            yield sum(t.untyped_storage().nbytes() // 4 for at, t in saved.items() if at not in weights)


@pytest.mark.slow
def test_one_row_compiles_all_graphs_with_the_numbers_of_the_stock_forward_and_the_memory_of_the_plan() -> None:
    policy, (items, stock) = policy_of(), expected()
    assert max(differences(packed(policy, items, WHOLE), stock)) <= TOLERANCE
    before = counters["stats"]["unique_graphs"]
    for count in range(1, len(items)):
        for some in (items[:count], items[count:]):
            for row in pack(some, WHOLE):
                policy(make_row(row, torch.device("cpu"))).logp.sum().backward()
    assert counters["stats"]["unique_graphs"] == before == 3  # a text layer, and the first and other vision blocks
    assert not counters["graph_break"]
    row = make_row(texts_alone())
    text = policy.model.config.get_text_config().to_dict()
    kept = list(kept_numbers(policy.states(row), policy))
    assert len(kept) == len(text_layers(text, 4)) == 3
    plan = text_layers(text, 4)[0].kept * len(row.input_ids_N)
    assert all(0.5 * plan < numbers <= plan for numbers in kept), (kept, plan)
    # The same graphs compute layers again, in eval mode.
    assert max(differences(packed(policy_of(recompute=True), items, WHOLE), stock)) <= TOLERANCE
    assert counters["stats"]["unique_graphs"] == 3


def test_what_the_engine_runs_first_is_not_compiled_and_hinders_nothing(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """It has replaced the linear layers meanwhile by operations that cannot be traced."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    policy, (items, stock) = policy_of(), expected()
    monkeypatch.setattr(torch_engine, "MAX_ROWS", 10_000)
    with torch.inference_mode(), torch_engine.fast_linears(policy.model):
        for row in pack(items, WHOLE):
            policy(make_row(row, torch.device("cpu")))
    assert counters["stats"]["unique_graphs"] == 0
    assert max(differences(packed(policy, items, WHOLE), stock)) <= TOLERANCE
    assert counters["stats"]["unique_graphs"] == 3 and warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_each_family_is_whole_graphs_or_runs_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """All layers are computed again in the backward pass; not those of gemma4, whose variant is tested in that way.
    What differs between families is what can be traced, and not what becomes of a graph."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    items = [i for i in world(build(name)) if i.group < 2]
    policy = policy_of(name != "gemma4", name, compiles=False)
    plain = packed(policy, items, WHOLE)
    compile_layers(policy)
    assert max(differences(packed(policy, items, WHOLE), plain)) <= TOLERANCE
    assert counters["stats"]["unique_graphs"] == GRAPHS[name] and not counters["graph_break"]
    left = [warning.partition(" is not compiled: ")[0] for warning in warnings]
    assert left == [layer for family, layer in AS_THEY_ARE.items() if family == name]


def test_every_family_is_listed() -> None:
    assert {NAME, *GRAPHS} == set(BUILDERS)


@pytest.mark.slow
def test_a_layer_that_cannot_be_one_graph_keeps_recipes_as_without_compilation(
    warnings: list[str],
) -> None:
    policy, plain = (policy_of(backend="sdpa", compiles=compiles) for compiles in (True, False))
    language = [m for n, m in policy.model.named_modules() if "language_model.layers" in n]
    assert not set(language) & set(policy.cheap)
    items = texts_alone()
    assert max(differences(packed(policy, items, WHOLE), packed(plain, items, WHOLE))) == 0
    assert len(warnings) == 1 and warnings[0].startswith("Qwen2_5_VLDecoderLayer is not compiled: ")
    blocks = {m for n, m in policy.model.named_modules() if "visual.blocks" in n}
    cheap = Policy(policy.model).cheap
    assert policy.cheap == [m for m in cheap if m not in blocks] and set(language) & set(policy.cheap)
    packed(policy, items, WHOLE)
    assert len(warnings) == 1 and not counters["stats"]["unique_graphs"]


def test_text_layers_without_packed_rows_keep_recipes() -> None:
    policy = policy_of(name="qwen3_5")
    cheap, parts = set(policy.cheap), dict(policy.model.named_modules())
    assert parts["model.language_model.layers.0.mlp.up_proj"] in cheap
    assert parts["model.visual.blocks.0.mlp.linear_fc1"] not in cheap


@pytest.mark.slow
def test_an_adapter_in_compiled_layers_is_exact_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    lora, items = Lora(rank=4, dora=True, rslora=True, targets=["q_proj", "down_proj"]), texts_alone()
    policy, row = policy_of(True, lora=lora, compiles=False), make_row(items)
    plain = packed(policy, items, WHOLE)
    with torch.no_grad():
        on = policy(row).logp
        with adapter_off(policy.model):
            base = policy(row).logp
    compile_layers(policy)
    assert max(differences(packed(policy, items, WHOLE), plain)) <= TOLERANCE
    assert counters["stats"]["unique_graphs"] == 2  # the first layer's input has no gradient
    with torch.no_grad(), adapter_off(policy.model):
        off = policy(row).logp
    assert torch.equal(off, base) and float((on - off).abs().max()) > 0.1


def by_mask(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, *_: int, scale: Any, window_size: Any
) -> Tensor:
    """Flash attention over sequences, by one mask over all of them."""
    ends, at, to = k_starts[1:], torch.arange(len(q)), torch.arange(len(k))
    q_of, k_of = torch.bucketize(at, q_starts[1:], right=True), torch.bucketize(to, ends, right=True)
    back = (ends[q_of] - q_starts[1:][q_of] + at)[:, None] - to
    sees = (q_of[:, None] == k_of) & ((back >= 0) | (window_size[1] < 0))
    heads = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=sees, scale=scale).transpose(0, 1)


@pytest.mark.slow
def test_layers_are_whole_graphs_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel that must be imported, as flash-attn: Dynamo cannot trace an import."""
    items = [i for i in expected()[0] if i.group < 2]
    stock = packed(policy_of(compiles=False), items, WHOLE)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(attention, "_held", [])
    monkeypatch.setattr(attention, "_kernel", lambda: importlib.import_module("test_compiled").by_mask)
    monkeypatch.setattr(attention, "_takes_kernel", lambda query: True)
    hold_kernel(torch.device("cuda"))
    policy = policy_of(backend="varlen")
    assert max(differences(packed(policy, items, WHOLE), stock)) <= TOLERANCE
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]


def test_a_run_looks_for_the_kernel_before_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(setup_model, "refuse_unknown_ids", lambda *_: None)
    monkeypatch.setattr(setup_model, "banned_ids_of", lambda *_: ())
    monkeypatch.setattr(setup_model, "hold_kernel", calls.append)
    monkeypatch.setattr(setup_model, "compile_layers", calls.append)
    processor = SimpleNamespace(tokenizer=None)
    for compiles in (False, "auto", True):
        settings: Any = SimpleNamespace(path="", shared_prefix=True, compile=compiles)
        policy = setup_model.make_policy(settings, build(NAME).model, processor, 1.0)
        assert calls == ([policy.device, policy] if compiles is True else [])


def test_windows_of_a_vision_tower_and_their_gradients_are_those_of_one_call_each() -> None:
    lengths = [4, 1, 0, 9]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    g = torch.Generator().manual_seed(0)
    pull, *values = (torch.randn(1, 2, 14, 8, generator=g, dtype=torch.float64) for _ in range(4))
    one, two = ([x.clone().requires_grad_() for x in values] for _ in range(2))
    out, _ = split_rows(*one, starts, 0.2)
    pieces = zip(*(x.split(lengths, 2) for x in two), strict=True)
    exact = torch.cat([(a @ b.mT * 0.2).softmax(-1) @ c for a, b, c in pieces], 2)
    torch.testing.assert_close(out, exact)
    for result in (out, exact):
        (result * pull).sum().backward()
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


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
