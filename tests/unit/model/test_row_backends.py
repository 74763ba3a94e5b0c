"""The GPU backends of packed rows, as far as a CPU can tell: FlexAttention uncompiled, varlen's index arithmetic with a
slow kernel in place of flash attention. Nothing here says that the kernels themselves work on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import TOLERANCE, differences, packed, reference, world
from tinyfamilies import build
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

from vlmrl.model import attention as flex_attention
from vlmrl.model import attention as prefix_attention_module
from vlmrl.model import attention as varlen_attention
from vlmrl.model.attention import choose_backend, prefix_attention, varlen_index, vision_attention
from vlmrl.model.caches import split_row_attention
from vlmrl.model.load import share_prefix
from vlmrl.model.packing import RowPlan, Span, make_row, plan_row
from vlmrl.model.policy import Policy

CPU = torch.device("cpu")
LAYOUT = [
    Span(0, -1, 0, 5),
    Span(0, 0, 5, 8),
    Span(0, 1, 8, 9),
    Span(0, 2, 9, 9),
    Span(1, -1, 9, 11),
    Span(1, 0, 11, 15),
]
"""Two groups, ragged responses, one of them empty."""
MANY = [Span(0, -1, 0, 6), *(Span(0, k, 6 + 2 * k, 8 + 2 * k) for k in range(5)), Span(1, -1, 16, 19)]
"""Five responses of one prompt, and a prompt without any."""
IMAGES = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1])


def slow_varlen(q, k, v, query_starts, key_starts, longest_query, longest_key, *, scale, window_size):
    """What flash attention computes: sequences one by one, masks aligned at the end of the keys."""
    pieces = []
    assert longest_query == query_starts.diff().max() and longest_key == key_starts.diff().max()
    assert query_starts.dtype == key_starts.dtype == torch.int32
    for s in range(len(query_starts) - 1):
        queries = q[query_starts[s] : query_starts[s + 1]].transpose(0, 1)
        keys, values = (x[key_starts[s] : key_starts[s + 1]].transpose(0, 1) for x in (k, v))
        repeat = queries.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        rows, columns = queries.shape[1], keys.shape[1]
        at = torch.arange(rows)[:, None] + columns - rows
        left, right = (columns if n == -1 else n for n in window_size)
        distance = at - torch.arange(columns)[None, :]
        sees = (distance <= left) & (distance >= -right)
        scores = queries @ keys.transpose(1, 2) * (scale or queries.shape[-1] ** -0.5)
        pieces.append((scores.masked_fill(~sees, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(pieces)


@pytest.fixture
def cpu_kernel(monkeypatch):
    monkeypatch.setattr(varlen_attention, "_kernel", lambda: slow_varlen)


def attention(
    plan: RowPlan, window: int | None, heads: int = 4, key_heads: int = 2, backward: bool = True, width: int = 16
):
    """Output, and gradients of query, key and value, of random inputs."""
    g = torch.Generator().manual_seed(3)
    tokens = len(plan.tokens.index)
    q, k, v = (
        torch.randn(1, h, tokens, width, generator=g).requires_grad_(backward) for h in (heads, key_heads, key_heads)
    )
    out, _ = prefix_attention(None, q, k, v, None, scaling=0.3, row_plan=plan, sliding_window=window)
    if not backward:
        return [out]
    (out * torch.randn(out.shape, generator=g)).sum().backward()
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def plan(backend: str, bidirectional: str = "never") -> RowPlan:
    return plan_row(LAYOUT, CPU, kinds_N=IMAGES, bidirectional=bidirectional, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("bidirectional", ["never", "sliding", "always"])
def test_flex_sees_what_sdpa_sees(window, bidirectional):
    """Forward only: FlexAttention has no backward on a CPU."""
    found, expected = (attention(plan(b, bidirectional), window, backward=False)[0] for b in ("flex", "sdpa"))
    assert float((found - expected).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_varlen_equals_sdpa(window, cpu_kernel):
    for a, b in zip(attention(plan("varlen"), window), attention(plan("sdpa"), window), strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("window", [None, 3])
def test_heads_that_are_too_wide_for_flash_attention_go_to_sdpa(window, monkeypatch):
    monkeypatch.setattr(varlen_attention, "_kernel", lambda: pytest.fail("there is no kernel of this width"))
    found, expected = (attention(plan(b), window, width=512) for b in ("varlen", "sdpa"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("heads, key_heads", [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("bidirectional", ["never", "sliding", "always"])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 9])
def test_split_equals_sdpa(window, bidirectional, heads, key_heads):
    """Where it cannot split (a window that cuts, images that look ahead) it leaves the layer to SDPA."""
    found, expected = (attention(plan(b, bidirectional), window, heads, key_heads) for b in ("split", "sdpa"))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE


def test_where_split_is_used(monkeypatch):
    used = []
    monkeypatch.setattr(
        prefix_attention_module, "split_row_attention", lambda *_: used.append(1) or torch.zeros(1, 4, 15, 16)
    )
    longest = 9  # of any sequence: prompt 5 and response 3 are 8 tokens, so 8 is no window
    for window, bidirectional, expected in [
        (None, "never", 1),
        (longest, "never", 1),
        (longest - 1, "never", 1),
        (longest - 2, "never", 0),
        (None, "sliding", 1),
        (longest, "sliding", 0),
        (None, "always", 0),
    ]:
        used.clear()
        attention(plan("split", bidirectional), window, backward=False)
        assert len(used) == expected, (window, bidirectional)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=3),
    st.sampled_from([(4, 2), (3, 3), (4, 1)]), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_split_equals_a_dense_softmax(groups, heads, dtype):
    """Against one softmax over the row with a mask made by hand, in float64; value and gradients."""
    layout, group_of, response_of = [], [], []
    for g, (prompt, responses) in enumerate(groups):
        for response, length in enumerate([prompt, *responses], start=-1):
            layout.append(Span(g, response, len(group_of), len(group_of) + length))
            group_of += [g] * length
            response_of += [response] * length
    g_N, r_N = torch.tensor(group_of), torch.tensor(response_of)
    sees = (g_N[:, None] == g_N) & ((r_N == -1) | (r_N[:, None] == r_N)) & torch.ones(len(g_N), len(g_N)).tril().bool()
    generator = torch.Generator().manual_seed(len(g_N))
    H, K = heads
    made = [torch.randn(1, h, len(g_N), 8, generator=generator).to(dtype) for h in (H, K, K, H)]
    q, k, v = (x.clone().requires_grad_() for x in made[:3])
    out = split_row_attention(q, k, v, plan_row(layout, CPU, backend="split"), 0.4)
    (out * made[3]).sum().backward()
    exact = [x.double().requires_grad_() for x in made[:3]]
    keys, values = (x.repeat_interleave(H // K, 1) for x in exact[1:])
    scores = (exact[0] @ keys.transpose(-1, -2) * 0.4).masked_fill(~sees, float("-inf"))
    expected = scores.softmax(-1) @ values
    (expected * made[3].double()).sum().backward()
    allowed = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.15}[dtype]
    assert float((out - expected).detach().abs().max()) <= allowed
    for x, e in zip((q, k, v), exact, strict=True):
        assert float((x.grad - e.grad).abs().max()) <= allowed


def test_varlen_index_by_hand():
    index = varlen_index(plan("varlen"))
    first, second = [0, 1, 2, 3, 4], [9, 10]
    assert index.key_at.tolist() == [*first, *first, 5, 6, 7, *first, 8, *second, *second, 11, 12, 13, 14]
    assert index.query_starts.tolist() == [0, 5, 8, 9, 11, 15]
    assert index.key_starts.tolist() == [0, 5, 13, 19, 21, 27]
    assert (index.longest_query, index.longest_key) == (5, 8)
    assert index.query_starts.dtype == index.key_starts.dtype == torch.int32


def test_copied_keys_sum_their_gradients_in_float32_without_sorting_indices():
    """Five copies of the first prompt: their own bfloat16 sum, one by one, would be off by up to 2 of its last bits."""
    index = varlen_index(plan_row(MANY, CPU))
    key = torch.randn(MANY[-1].end, 2, 16).bfloat16().requires_grad_()
    gradient = torch.randn(len(index.key_at), 2, 16).bfloat16()
    with profile(activities=[ProfilerActivity.CPU]) as said:
        copied = varlen_attention._Copied.apply(key, index)
        copied.backward(gradient)
    assert torch.equal(copied, key[index.key_at])
    exact = torch.zeros(key.shape).index_add_(0, index.key_at, gradient.float())
    assert torch.equal(key.grad, exact.bfloat16())
    assert not any("index_put" in event.key or "index_add" in event.key for event in said.key_averages())


def test_vision_windows_in_one_call_equal_one_call_a_window(monkeypatch):
    """What a GPU is asked, answered by the slow kernel: bfloat16 tensors that say they are on one."""
    lengths = [4, 9, 1]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = (torch.randn(1, 2, sum(lengths), 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    arguments = (None, q, k, v, None)
    windows, _ = vision_attention(*arguments, cu_seq_lens_q=starts, max_length_q=9, scaling=0.2)
    pieces = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    expected = torch.cat([((a @ b.mT * 0.2).softmax(-1) @ c).transpose(1, 2) for a, b, c in pieces], 1)
    assert windows.shape == (1, 14, 2, 8) and float((windows - expected).detach().abs().max()) <= 1e-6
    monkeypatch.setattr(varlen_attention, "_kernel", lambda: slow_varlen)
    monkeypatch.setattr(varlen_attention, "_takes_kernel", lambda query: True)
    whole, _ = vision_attention(*arguments, cu_seq_lens_q=starts, max_length_q=9, scaling=0.2)
    assert whole.shape == windows.shape and float((whole - windows).detach().abs().max()) <= 1e-6


@pytest.mark.slow
def test_a_vision_tower_of_windows_is_handed_over_whole(monkeypatch):
    """transformers gives the lengths of all windows at once, for the windowed layer and for the full one."""
    family = build("qwen2_5_vl")
    row = make_row(world(family))
    share_prefix(family.model)
    calls = []

    def kernel(q, k, v, query_starts, key_starts, longest_query, longest_key, **how):
        calls.append(query_starts.diff().tolist())
        return slow_varlen(q, k, v, query_starts, key_starts, longest_query, longest_key, **how)

    with torch.no_grad():
        expected = Policy(family.model)(row).logp
        monkeypatch.setattr(varlen_attention, "_kernel", lambda: kernel)
        monkeypatch.setattr(varlen_attention, "_takes_kernel", lambda query: True)
        found = Policy(family.model)(row).logp
    assert float((found - expected).abs().max()) <= TOLERANCE
    assert len(calls) == 2 and len(calls[0]) > len(calls[1]) and sum(calls[0]) == sum(calls[1])


def test_the_kernel_is_told_of_grouped_queries_where_it_asks(monkeypatch):
    """torch 2.11 has no such argument, later versions refuse fewer key heads without it."""

    def silent(q, k): ...

    def asking(q, k, enable_gqa=False): ...

    for kernel, expected in [(silent, {}), (asking, {"enable_gqa": True})]:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
        varlen_attention._kernel.cache_clear()
        assert getattr(varlen_attention._kernel(), "keywords", {}) == expected
    monkeypatch.undo()
    varlen_attention._kernel.cache_clear()
    assert callable(varlen_attention._kernel())


@pytest.mark.slow
def test_rows_of_one_bucket_compile_once():
    """Counted by a backend that compiles nothing: rows of different length and layout, one bucket, one compilation."""
    torch._dynamo.reset()
    counter = CompileCounter()
    attend = torch.compile(flex_attention.flex_attention, backend=counter, dynamic=False, fullgraph=True)
    for prompt, response in [(5, 3), (100, 30), (301, 17)]:
        tokens = prompt + 2 * response
        layout = [Span(0, -1, 0, prompt), Span(0, 0, prompt, prompt + response), Span(0, 1, prompt + response, tokens)]
        plan = plan_row(layout, CPU, backend="flex")
        padded = flex_attention.bucket(tokens)
        q, k, v = (torch.randn(1, heads, padded, 16) for heads in (4, 2, 2))
        with torch.no_grad():
            found = attend(q, k, v, block_mask=flex_attention._block_mask(plan, None, padded), enable_gqa=True)
            expected = flex_attention.flex_row_attention(
                *(x[:, :, :tokens] for x in (q, k, v)), plan, scaling=None, window=None
            )
        assert float((found[:, :, :tokens] - expected).abs().max()) <= TOLERANCE
    assert counter.frame_count == 1


def test_as_many_lengths_may_be_compiled_as_there_are_buckets():
    with torch._dynamo.config.patch(recompile_limit=8):
        flex_attention._allow_compilations()
        assert torch._dynamo.config.recompile_limit >= len({flex_attention.bucket(n) for n in range(1, 65_537)})


def test_varlen_refuses_what_it_cannot_do(cpu_kernel):
    with pytest.raises(ValueError, match="bidirectional"):
        attention(plan("varlen", "always"), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "internvl"])
def test_families_on_flex(name):
    family = build(name)
    row = make_row(world(family))
    share_prefix(family.model)
    with torch.no_grad():
        found, expected = (Policy(family.model, backend=b)(row).logp for b in ("flex", "sdpa"))
    assert float((found - expected).abs().max()) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma4_shared_kv", "smolvlm"])
def test_families_on_varlen(name, cpu_kernel):
    family = build(name)
    items = world(family)
    expected = reference(family.model, family, items)
    share_prefix(family.model)
    assert max(differences(packed(Policy(family.model, backend="varlen"), items, 10_000), expected)) <= TOLERANCE


def test_a_window_counts_the_token_itself():
    assert varlen_attention._window(None) == (-1, 0) and varlen_attention._window(4) == (3, 0)


def test_buckets_hold_the_row_are_few_and_waste_at_most_an_eighth():
    sizes = {flex_attention.bucket(n) for n in range(1, 65_537)}
    assert len(sizes) <= 64 and min(sizes) == flex_attention.BUCKET_TOKENS
    for n in [1, 511, 512, 513, 4095, 4096, 4097, 5000, 20_000, 65_536]:
        padded = flex_attention.bucket(n)
        assert padded >= n and padded % 128 == 0 and padded - n < max(flex_attention.BUCKET_TOKENS, n / 8)


def test_the_backend_follows_device_dtype_and_family():
    cuda = torch.device("cuda")
    assert choose_backend(CPU, torch.bfloat16, "never") == "split"
    assert choose_backend(torch.device("mps"), torch.float32, "never") == "sdpa"
    assert choose_backend(cuda, torch.bfloat16, "never") == "varlen"
    assert choose_backend(cuda, torch.float32, "never") == "flex"
    assert choose_backend(cuda, torch.bfloat16, "sliding") == "flex"
    family = build("internvl")
    assert Policy(family.model).path == "shared prefix, packed rows, attention by split"
    assert "padded" in Policy(family.model, shared_prefix=False).path
