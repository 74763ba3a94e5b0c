"""Attention kernels of packed rows and vision towers beside a float32 oracle, and how fast they are. Needs torch and
transformers.

The oracle is one softmax over all keys of a row under a boolean mask that is made here, token by token, from the layout
alone: none of vlmrl's masks, indices or plans is in it.
"""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmrl.model import attention as flex_attention
from vlmrl.model import attention as varlen_attention
from vlmrl.model.attention import choose_backend, prefix_attention, vision_attention
from vlmrl.model.packing import Span, plan_row

ALLOWED_ERROR = 1.2
"""How much larger than the largest of SDPA's errors in bfloat16 an error may be."""
Row = dict[str, Any]


def device_of(smoke: bool) -> torch.device:
    """The GPU, or the CPU for toy sizes."""
    return torch.device("cpu" if smoke else "cuda")


def slow_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Variable-length attention, a sequence at a time: it stands for the GPU's kernel on a CPU. [N, heads, D]."""
    pieces = []
    bounds = zip(
        query_starts.tolist(), query_starts[1:].tolist(), key_starts.tolist(), key_starts[1:].tolist(), strict=False
    )
    for first_query, last_query, first_key, last_key in bounds:
        queries = q[first_query:last_query].transpose(0, 1)
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x[first_key:last_key].transpose(0, 1).repeat_interleave(repeat, 0) for x in (k, v))
        rows, columns = queries.shape[1], keys.shape[1]
        distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        left, right = (columns if n == -1 else n for n in window_size)
        sees = (distance <= left) & (distance >= -right)
        out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=sees, scale=scale)
        pieces.append(out.transpose(0, 1))
    return torch.cat(pieces)


def layout_of(groups: Sequence[tuple[int, Sequence[int]]]) -> list[Span]:
    """The spans of a row of groups (prompt tokens, tokens of each response)."""
    spans: list[Span] = []
    at = 0
    for group, (prompt, responses) in enumerate(groups):
        for response, length in enumerate([prompt, *responses], start=-1):
            spans.append(Span(group, response, at, at + length))
            at += length
    return spans


def visible(layout: Sequence[Span], window: int | None, device: torch.device) -> Tensor:
    """The oracle's mask. bool [N, N], True = the token (row) sees the token (column)."""
    tokens = layout[-1].end
    sees = torch.zeros(tokens, tokens, dtype=torch.bool, device=device)
    prompt = layout[0]
    for span in layout:
        prompt = span if span.response == -1 else prompt
        keys = [*range(prompt.start, prompt.end)] if span is not prompt else []
        keys += range(span.start, span.end)
        own = torch.arange(len(keys) - (span.end - span.start), len(keys), device=device)  # places in the own sequence
        distance = own[:, None] - torch.arange(len(keys), device=device)
        near = (distance >= 0) & (distance < (window or len(keys) + 1))
        sees[span.start : span.end, torch.tensor(keys, device=device)] = near
    return sees


def oracle(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float) -> Tensor:
    """One softmax over all keys, in float32. query [1, H, N, D]; key and value may have fewer heads. [1, N, H, D]."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def results(attend: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor, backward: bool) -> list[Tensor]:
    """Output and, with `backward`, gradients of query, key and value of the output's weighted sum."""
    leaves = [x.detach().clone().requires_grad_(backward) for x in inputs]
    out = attend(*leaves)
    if not backward:
        return [out.detach()]
    (out.float() * weight).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def compare(
    attend: Callable[..., Tensor],
    stock: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    shape: Sequence[int],
    key_heads: int,
    smoke: bool,
    backward: bool = True,
) -> Row:
    """Errors of two ways of attention against the exact one, of the same inputs.

    Args: attend, stock: take bfloat16 (float32 in a toy run). exact: takes float32. shape: [1, H, N, D] of the query.
    Returns: `error_out`, `error_dq`, `error_dk`, `error_dv` of `attend`; `error_stock`, the largest of `stock`'s; `ok`.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    device = device_of(smoke)
    g = torch.Generator(device).manual_seed(1)
    random_like = lambda heads: torch.randn(1, heads, *shape[2:], generator=g, device=device)  # noqa: E731
    dtype = torch.float32 if smoke else torch.bfloat16
    inputs = [random_like(heads).to(dtype) for heads in (shape[1], key_heads, key_heads)]
    weight = torch.randn(1, shape[2], shape[1], shape[3], generator=g, device=device)
    expected = results(exact, [x.float() for x in inputs], weight, backward)
    errors = [
        [_error(a, b) for a, b in zip(results(way, inputs, weight, backward), expected, strict=True)]
        for way in (attend, stock)
    ]
    ours, theirs = errors[0], max(errors[1])
    floor = 1e-5 if smoke else 0.0  # in float32 both are rounding
    names = ("error_out", "error_dq", "error_dk", "error_dv")
    return dict(zip(names, ours, strict=False)) | {
        "error_stock": theirs,
        "ok": all(e <= max(floor, ALLOWED_ERROR * theirs) for e in ours),
    }


def or_failure(measure: Callable[[], Row]) -> Row:
    """Return the row of a case, or a row that says how it failed, so that the other cases are not lost."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return {
            "outcome": f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200],
            "ok": False,
        }


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def row_attention(backend: str, layout: Sequence[Span], window: int | None, device: torch.device) -> Callable[..., Any]:
    """vlmrl's attention of a packed row by this backend: (query, key, value) -> [1, N, H, D]."""
    plan = plan_row(layout, device, backend=backend)
    return lambda q, k, v: prefix_attention(None, q, k, v, None, row_plan=plan, sliding_window=window)[0]


def _rows(backend: str, smoke: bool, shapes: Sequence[tuple[int, int, int, int | None]]) -> Iterator[Row]:
    """Errors of a backend by (heads, key heads, head width, window) over two ragged groups."""
    groups = [(11, (5, 7, 1)), (3, (4,))] if smoke else [(700, (200, 333, 64, 1)), (150, (100, 77)), (90, ())]
    layout = layout_of(groups)
    for heads, key_heads, width, window in shapes:
        window = min(window, 6) if smoke and window else window
        name = f"{backend} {heads}/{key_heads} heads, D {width}" + (f", window {window}" if window else "")
        started = time.perf_counter()
        row = or_failure(partial(_one_row, backend, layout, (heads, key_heads, width), window, smoke))
        more = {"compile_seconds": time.perf_counter() - started} if backend == "flex" and not smoke else {}
        yield {"case": name, **row, **more}


def _one_row(backend: str, layout: Sequence[Span], shape: tuple[int, int, int], window: int | None, smoke: bool) -> Row:
    """Errors of a backend over a row. Args: shape: (heads, key heads, head width)."""
    (heads, key_heads, width), device = shape, device_of(smoke)
    sees = visible(layout, window, device)
    return compare(
        row_attention(backend, layout, window, device),
        row_attention("sdpa", layout, window, device),
        lambda q, k, v: oracle(q, k, v, sees, q.shape[-1] ** -0.5),
        (1, heads, layout[-1].end, width),
        key_heads,
        smoke,
        backward=backend != "flex" or not smoke,  # FlexAttention has no backward pass on a CPU
    )


def varlen_rows(smoke: bool) -> Iterator[Row]:
    """The variable-length kernel over packed rows: responses have fewer queries than keys."""
    if smoke:
        varlen_attention._kernel = lambda: slow_kernel  # pyright: ignore[reportAttributeAccessIssue]
    widths = (72, 80, 128, 256)
    yield from _rows(
        "varlen",
        smoke,
        [
            (heads, key_heads, width, window)
            for heads, key_heads in ((28, 4), (16, 2))
            for width in widths
            for window in (None, 256)
        ],
    )


def flex_rows(smoke: bool) -> Iterator[Row]:
    """FlexAttention over packed rows; each case is one compilation."""
    yield from _rows("flex", smoke, [(28, 4, 128, None), (16, 2, 128, None), (16, 4, 256, None), (8, 4, 256, 256)])


def vision_towers(smoke: bool) -> Iterator[Row]:
    """The vision towers' attention: images, or windows of images, one after another, each seeing itself alone."""
    if smoke:
        varlen_attention._kernel = lambda: slow_kernel  # pyright: ignore[reportAttributeAccessIssue]
        varlen_attention._takes_kernel = lambda query: True  # pyright: ignore[reportAttributeAccessIssue]
    device = device_of(smoke)
    for width in (72, 80):
        for name, lengths in (("windows of 64", [64] * 20 + [32, 7]), ("whole images", [1024, 700])):
            lengths = [n // 8 for n in lengths if n >= 8] if smoke else lengths
            starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
            owner = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
            sees = owner[:, None] == owner

            def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor = starts, longest: int = max(lengths)) -> Tensor:
                return vision_attention(None, q, k, v, None, cu_seq_lens_q=starts, max_length_q=longest)[0]

            def stock(q: Tensor, k: Tensor, v: Tensor, sees: Tensor = sees) -> Tensor:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
                return out.transpose(1, 2)

            def exact(q: Tensor, k: Tensor, v: Tensor, sees: Tensor = sees) -> Tensor:
                return oracle(q, k, v, sees, q.shape[-1] ** -0.5)

            shape = (1, 16, sum(lengths), width)
            row = or_failure(partial(compare, attend, stock, exact, shape, 16, smoke))
            yield {"case": f"vision tower, 16 heads, D {width}, {name}", **row}


def layer_speed(smoke: bool) -> Iterator[Row]:
    """One layer's attention over a row of the TaxonRL shape, by backend: forward and backward."""
    device = device_of(smoke)
    layout = layout_of([(20, (6,) * 4)] if smoke else [(1986, (300,) * 16)])
    heads, key_heads, width, tokens = 28, 4, 128, layout[-1].end
    dtype = torch.float32 if smoke else torch.bfloat16
    prompt = layout[0].end
    pairs = sum((s.end - s.start) * (prompt if s.response >= 0 else 0) for s in layout)
    pairs += sum((s.end - s.start) * (s.end - s.start + 1) // 2 for s in layout)
    flops = 4 * heads * width * pairs * 3.5  # forward, and two and a half times that backward (scores made again)
    best = choose_backend(torch.device("cuda"), torch.bfloat16, "never")
    for backend in ("sdpa",) if smoke else dict.fromkeys((best, "varlen", "flex", "sdpa")):
        attend = row_attention(backend, layout, None, device)
        leaves = [
            torch.randn(1, h, tokens, width, device=device, dtype=dtype, requires_grad=True)
            for h in (heads, key_heads, key_heads)
        ]
        weight = torch.randn(1, tokens, heads, width, device=device, dtype=dtype)

        def once(attend: Any = attend, leaves: list[Tensor] = leaves, weight: Tensor = weight) -> None:
            (attend(*leaves) * weight).sum().backward()
            for leaf in leaves:
                leaf.grad = None

        def speed(once: Callable[[], None] = once) -> Row:
            seconds = median_seconds(once, 2 if smoke else 20, device)
            return {"milliseconds": 1e3 * seconds, "tflops": flops / seconds / 1e12}

        yield {"case": f"{backend}, {tokens} tokens, {heads}/{key_heads} heads, D {width}", **or_failure(speed)}


def median_seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    """Median time of a run, after two that warm up."""
    found = []
    for k in range(times + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if k >= 2:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def flex_graphs(smoke: bool) -> Iterator[Row]:
    """Count the graphs that ten different rows compile: one per padded length, and one more for its mask."""
    from torch._dynamo.utils import counters

    device, rng = device_of(smoke), random.Random(0)
    counters.clear()
    flex_attention.compiled_shapes.clear()
    buckets, times = set(), []
    for _ in range(10):
        groups = [
            (rng.randrange(600, 1200), [rng.randrange(20, 300) for _ in range(rng.randrange(3, 8))])
            for _ in range(rng.randrange(1, 4))
        ]
        if smoke:
            groups = [(prompt // 20, [n // 20 + 1 for n in responses]) for prompt, responses in groups]
        layout = layout_of(groups)
        buckets.add(flex_attention.bucket(layout[-1].end))
        attend = row_attention("flex", layout, None, device)
        dtype = torch.float32 if smoke else torch.bfloat16
        leaves = [
            torch.randn(1, h, layout[-1].end, 64, device=device, dtype=dtype, requires_grad=not smoke)
            for h in (4, 2, 2)
        ]
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        out = attend(*leaves)
        if not smoke:
            out.sum().backward()
            torch.cuda.synchronize()
        new = counters["stats"]["unique_graphs"] - before
        times += [(time.perf_counter() - start) / new] if new else []
    graphs = counters["stats"]["unique_graphs"]
    yield {
        "case": "FlexAttention, ten ragged rows",
        "rows": 10,
        "buckets": len(buckets),
        "graphs": graphs,
        "seconds_a_graph": statistics.fmean(times) if times else None,
        "ok": None if smoke else graphs <= 2 * len(buckets),
        "note": "uncompiled on a CPU" if smoke else "a graph for the attention and one for the mask of each length",
    }
