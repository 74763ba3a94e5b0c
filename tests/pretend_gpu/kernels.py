"""Kernels of the pretended GPU: each operator with a CUDA kernel runs the CPU's kernel on the same memory.

Code under test sees no difference: tensors are torch's own CUDA tensors, from its own allocator. What CUDA refuses is
refused here: tensors of two devices, CPU generators, flash attention over float32. A non-blocking download into pinned
memory is NaN until the host waits. Every wait of the host is counted under the line of code that caused it (`seen`).

Not covered: numbers of real kernels, CUDA graphs, NCCL (gloo stands in), Triton kernels without torch.compile (they do
nothing), speed, races between streams.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

SUPPORTED = ("2.14.", "2.15.")
"""Beginnings of the versions of torch whose operators are known here."""
aten = torch.ops.aten
CPU = torch.device("cpu")
HERE = str(Path(__file__).parent)


class Seen:
    """Record of the waits and copies that a GPU would have made the host do.

    Attributes:
        counts: number of waits, uploads, downloads (without copies on the GPU), operators and compiled functions.
        waits: (function of vlmrl, innermost function outside torch) -> number of waits. "" in threads of autograd.
        half_sums: operators of vlmrl's own functions that add up, or take logarithms, in half precision.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.half_sums: set[str] = set()

    def note(self, what: str) -> None:
        if what == "wait":
            _finish_downloads()
            self.waits[_caller()] += 1
        self.counts[what] += 1

    def note_half_sum(self, name: str) -> None:
        function, inner = _caller()
        if function and inner.endswith(function):
            self.half_sums.add(f"{function}: {name}")


seen = Seen()


def _caller() -> tuple[str, str]:
    frame, inner = sys._getframe(1), ""
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/" not in path and not path.startswith((HERE, "<")):
            where = f"{'/'.join(path.split('/')[-3:])} {name}"
            inner = inner or where
            if "/vlmrl/" in path and "/tests/" not in path and "site-packages" not in path:
                return f"{path.rpartition('/vlmrl/')[2]} {name}", inner
        frame = frame.f_back
    return "", inner


_downloads: list[tuple[Tensor, Tensor]] = []
"""Copies into pinned memory that have not arrived: (destination, numbers)."""


def _finish_downloads() -> None:
    while _downloads:
        destination, numbers = _downloads.pop(0)
        destination.copy_(numbers)


# ---------------------------------------------------------------- the same memory as a CPU tensor
def near(t: Tensor) -> Tensor:
    """Return a CPU tensor in the memory of a CUDA tensor."""
    storage = t.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CPU)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    view = torch.empty(0, dtype=t.dtype, device=CPU).set_(memory, t.storage_offset(), t.shape, t.stride())
    return view.conj() if t.is_conj() else view


def far(x: Tensor, device: torch.device) -> Tensor:
    """Return a CUDA tensor with the numbers of a CPU tensor."""
    result = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if x.numel():
        near(result).copy_(x)
    return result


def cpu_generator(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return a CPU generator for one operator, from the state of the CUDA generator, which moves on."""
    generator = torch.cuda.default_generators[device.index or 0] if given is None else given
    if generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    state = f"{generator.initial_seed()} {generator.get_offset()}"
    generator.set_offset(generator.get_offset() + 4)
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(state.encode()).digest()[:7], "little"))


# ---------------------------------------------------------------- what CUDA refuses, and where it waits
TWO_DEVICES = {"aten::copy_", "aten::index.Tensor", "aten::_index_put_impl_", "aten::set_.source_Tensor"}
"""Operators that accept tensors of the CPU and of the GPU."""
WAITING = {
    f"aten::{name}"
    for name in (
        "nonzero", "nonzero.out", "masked_select", "masked_select.out", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "bincount", "equal", "is_nonzero",
    )
}  # fmt: skip
"""Operators whose result's shape, or whose answer, the host reads from the GPU."""
SUMS = {"sum", "mean", "cumsum", "prod", "var", "std", "norm", "linalg_vector_norm", "log", "_log_softmax", "_softmax"}
"""Operators whose results in half precision are too coarse for a loss."""
HALF = (torch.bfloat16, torch.float16)
MATRIX = {"mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "addbmm"}


def check(name: str, tensors: list[Tensor], args: Any) -> torch.device:
    """Raise what CUDA would raise. Return the device."""
    base = name.removeprefix("aten::").partition(".")[0]
    on_gpu = [t for t in tensors if t.is_cuda]
    devices = {t.device for t in on_gpu}
    if len(devices) > 1 and base != "copy_":
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} ({name})")
    if on_gpu and name not in TWO_DEVICES and any(t.device.type == "cpu" and t.dim() for t in tensors):
        shapes = [(str(t.device), tuple(t.shape)) for t in tensors]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda and cpu ({name} of {shapes})"
        )
    if name == "aten::index.Tensor" and not args[0].is_cuda:
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if name == "aten::_index_put_impl_" and args[0].is_cuda and args[2].dim() and not args[2].is_cuda:
        raise RuntimeError("Expected all tensors to be on the same device, but values are on the cpu (index_put)")
    if base in MATRIX and on_gpu and not (on_gpu[0].is_floating_point() or on_gpu[0].is_complex()):
        raise RuntimeError(f'"{base}_cuda" not implemented for {on_gpu[0].dtype}')
    return next(iter(devices), torch.device("cuda", torch.cuda.current_device()))


def note_waits(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Count the waits within an operator."""
    if name in WAITING or (name == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None):
        seen.note("wait")
    if name in ("aten::index.Tensor", "aten::_index_put_impl_", "aten::index_put_"):
        writes = name != "aten::index.Tensor"
        fills = writes and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        for index in args[1]:
            if index is not None and index.device != args[0].device:
                seen.note("upload")
                seen.note("wait")
            if index is not None and index.dtype in (torch.bool, torch.uint8) and not fills:
                seen.note("wait")  # for the number of True


# ---------------------------------------------------------------- one operator
def each(f: Callable[[Any], Any], x: Any) -> Any:
    """Return f of each value: arguments and results of operators nest in lists and tuples alone."""
    return type(x)([each(f, value) for value in x]) if type(x) in (list, tuple) else f(x)


def kernel_of(op: Any) -> Callable[..., Any]:
    """Return the kernel that runs an operator's CPU kernel on the memory of its CUDA tensors."""
    arguments = op._schema.arguments
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    outs = [a.name for a in arguments if a.is_out]
    generator_at = next((i for i, a in enumerate(arguments) if a.name == "generator"), None)
    tensors_at = [i for i, a in enumerate(arguments) if str(a.type) == "Tensor" and not a.kwarg_only]
    special, sums = SPECIAL.get(name), op._schema.name.removeprefix("aten::") in SUMS

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for i in tensors_at:  # torch passes some numbers where the schema has a tensor
            if i < len(args) and isinstance(args[i], (bool, int, float, complex)):
                args = (*args[:i], plain_tensor(args[i]), *args[i + 1 :])
        tensors: list[Tensor] = []
        each(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, [*args, *kwargs.values()])
        device = check(name, tensors, args)
        seen.counts["operators"] += 1
        if special is not None:
            return special(device, *args, **kwargs)
        note_waits(name, args, kwargs)
        if generator_at is not None:
            kwargs = {"generator": None} | kwargs if generator_at >= len(args) else kwargs
        views = _Views(device)
        near_args, near_kwargs = each(views.down, args), {k: each(views.down, x) for k, x in kwargs.items()}
        near_kwargs.pop("pin_memory", None)
        if generator_at is not None:
            if generator_at < len(args):
                given = cpu_generator(args[generator_at], device)
                near_args = (*near_args[:generator_at], given, *near_args[generator_at + 1 :])
            else:
                near_kwargs["generator"] = cpu_generator(kwargs["generator"], device)
        if name in ("aten::_softmax", "aten::_log_softmax") and near_args[2]:  # half to float: on CUDA alone
            near_args = (near_args[0].float(), near_args[1], False)
        if outs and not any(isinstance(kwargs[o], (list, tuple)) for o in outs):
            result = _run_out(op, near_args, near_kwargs, [kwargs[o] for o in outs], outs)
        else:
            result = each(views.up, op(*near_args, **near_kwargs))
        if sums and result.dtype in HALF:
            seen.note_half_sum(name)
        return result

    return kernel


class _Views:
    """CPU tensors of one call, and the CUDA tensors whose memory they have."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (CPU tensor, kept alive; CUDA tensor)
        self._storages: dict[int, Tensor] = {}

    def down(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_cuda:
            view = near(x)
            self._originals[id(view)] = view, x
            self._storages[x.untyped_storage().data_ptr()] = x
            return view
        return CPU if isinstance(x, torch.device) else x

    def up(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in self._originals:
            return self._originals[id(x)][1]
        address = x.untyped_storage().data_ptr() if x.numel() else 0
        if address and address in self._storages:
            return torch.as_strided(self._storages[address], x.shape, x.stride(), x.storage_offset())
        return far(x, self._device)


def _run_out(op: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], names: list[str]) -> Any:
    """Run an operator whose results have places of their own, which may have to grow."""
    fresh = [torch.empty(0, dtype=g.dtype) for g in given]
    op(*args, **(kwargs | dict(zip(names, fresh, strict=True))))
    for place, result in zip(given, fresh, strict=True):
        if place.shape != result.shape:
            place.resize_(result.shape)
        near(place).copy_(result)
    return given[0] if len(given) == 1 else tuple(given)


# ---------------------------------------------------------------- copies
def copy_(device: torch.device, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if to.is_cuda and source.is_cuda:
        near(to).copy_(near(source))
        return to
    host = source if to.is_cuda else to
    runs_on = non_blocking and host.is_pinned()
    seen.note("upload" if to.is_cuda else "download")
    if to.is_cuda:
        near(to).copy_(source)
    elif runs_on:
        _downloads.append((to.detach(), near(source).clone()))
        if to.is_floating_point():
            to.fill_(float("nan"))
    else:
        to.copy_(near(source))
    if not runs_on:
        seen.note("wait")
    return to


plain_tensor = torch.tensor


def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """Make a tensor as CUDA does: on the CPU, and then with one blocking copy."""
    if device is None or torch.device(device).type != "cuda":
        return plain_tensor(data, *args, device=device, **kwargs)
    return plain_tensor(data, *args, **kwargs).to(device)


# ---------------------------------------------------------------- attention
def _scores(q: Tensor, k: Tensor, scale: float | None, bias: Tensor | None, sees: Tensor | None) -> Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias.float()
    return scores if sees is None else scores.masked_fill(~sees, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: Any, bias: Any, sees: Any) -> tuple[Tensor, Tensor]:
    """Return (attention, log of the sums) of [.., heads, n, D], with fewer heads in keys and values or as many."""
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scores = _scores(q, k, scale, bias, sees)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def _attend_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: Any, bias: Any, sees: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and the bias."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    heads, repeat, dtypes = k.shape[-3], q.shape[-3] // k.shape[-3], (k.dtype, v.dtype)
    k, v = (x.repeat_interleave(repeat, -3) for x in (k, v))
    p = (_scores(q, k, scale, bias, sees) - lse[..., None]).exp()
    dv = p.transpose(-1, -2) @ g.float()
    ds = p * (g.float() @ v.float().transpose(-1, -2) - (g.float() * out.float()).sum(-1, keepdim=True))
    dk = ds.transpose(-1, -2) @ q.float() * factor
    dk, dv = (x.unflatten(-3, (heads, repeat)).sum(-3).to(d) for x, d in zip((dk, dv), dtypes, strict=True))
    return (ds @ k.float() * factor).to(q.dtype), dk, dv, ds


def _triangle(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() if causal else None


def _require_half(*tensors: Tensor) -> None:
    for t in tensors:
        if t.dtype not in HALF:
            raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {t.dtype}")
        if t.stride(-1) != 1 or t.shape[-1] > 256 or t.shape[-1] % 8:
            raise RuntimeError(f"FlashAttention: head width {t.shape[-1]} or stride {t.stride(-1)} is not supported")


def _seeds(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def _transposed(out: Tensor) -> Tensor:
    """Return [B, H, n, D] in the memory order of CUDA's kernels: [B, n, H, D]."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def flash(device, q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _require_half(q, k, v)
    a, b, c = near(q), near(k), near(v)
    out, lse = _attend(a, b, c, scale, None, _triangle(a, b, is_causal))
    mask = torch.empty(0, dtype=q.dtype, device=device)
    first = far(_transposed(out), device), far(lse, device)
    return *first, None, None, q.shape[2], k.shape[2], _seeds(device), _seeds(device), mask


def flash_back(device, g, q, k, v, out, lse, cq, ck, mq, mk, p, is_causal, seed, offset, *, scale=None):
    g, q, k, v, out, lse = map(near, (g, q, k, v, out, lse))
    return tuple(
        far(x, device) for x in _attend_back(g, q, k, v, out, lse, scale, None, _triangle(q, k, is_causal))[:3]
    )


def efficient(device, q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    a, b, c = near(q), near(k), near(v)
    out, lse = _attend(a, b, c, scale, None if bias is None else near(bias), _triangle(a, b, is_causal))
    return far(_transposed(out), device), far(lse, device), _seeds(device)[0], _seeds(device)[1]


def efficient_back(device, g, q, k, v, bias, out, lse, seed, offset, p, needed, is_causal=False, *, scale=None):
    bias = None if bias is None else near(bias)
    g, q, k, v, out, lse = map(near, (g, q, k, v, out, lse))
    grads = _attend_back(g, q, k, v, out, lse, scale, bias, _triangle(q, k, is_causal))
    return tuple(far(x, device) if x is not grads[3] or needed[3] else None for x in grads)


def cudnn(device, q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse, seed, offset = efficient(device, q, k, v, bias, compute_lse, dropout_p, is_causal, scale=scale)
    mask = torch.empty(0, device=device)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], seed, offset, mask


def cudnn_back(device, g, q, k, v, out, lse, s, o, bias, cq, ck, mq, mk, p, is_causal, *, scale=None):
    needed, lse = (True, True, True, False), lse.squeeze(-1)
    return efficient_back(device, g, q, k, v, bias, out, lse, s, o, p, needed, is_causal, scale=scale)[:3]


def _seen_keys(queries: int, keys: int, causal: bool, left: Any, right: Any) -> Tensor:
    """Return the mask of one sequence, aligned at its last key, as flash attention's is; a side below 0 has no end."""
    left, right = (-1 if x is None else int(x) for x in (left, right))
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    right = 0 if causal else right
    return (distance <= (keys if left < 0 else left)) & (distance >= -(keys if right < 0 else right))


def _sequences(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield (slice of the queries, of the keys; queries, keys, values [heads, n, D]) of each sequence."""
    a, b = starts_q.tolist(), starts_k.tolist()
    for own, keys in zip(map(slice, a, a[1:]), map(slice, b, b[1:]), strict=True):
        yield own, keys, *(x.transpose(0, 1) for x in (q[own], k[keys], v[keys]))


def varlen(
    device, q, k, v, cq, ck, mq, mk, dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None,
    window_size_right=None, **more,
):  # fmt: skip
    _require_half(q, k, v)
    if any(c.dtype != torch.int32 or not c.is_cuda or not c.is_contiguous() for c in (cq, ck)):
        raise RuntimeError("cu_seqlens must be contiguous int32 on the device")
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[1] % k.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    a, b, c, starts_q, starts_k = map(near, (q, k, v, cq, ck))
    longest = int(starts_q.diff().max()), int(starts_k.diff().max())
    # On a GPU these mistakes are silent, or an access outside of the memory.
    if longest[0] > int(mq) or longest[1] > int(mk) or (int(starts_q[-1]), int(starts_k[-1])) != (len(a), len(b)):
        raise RuntimeError(f"varlen: lengths {longest} against {mq}, {mk}; ends against {len(a)}, {len(b)} tokens")
    out, lse = torch.empty_like(a), torch.empty(a.shape[1], len(a))
    for own, _, x, y, z in _sequences(a, b, c, starts_q, starts_k):
        sees = _seen_keys(x.shape[1], y.shape[1], is_causal, window_size_left, window_size_right)
        attended, lse[:, own] = _attend(x, y, z, scale, None, sees)
        out[own] = attended.transpose(0, 1)
    mask = torch.empty(0, dtype=q.dtype, device=device)
    return far(out, device), far(lse, device), _seeds(device), _seeds(device), mask


def varlen_back(
    device, g, q, k, v, out, lse, cq, ck, mq, mk, p, is_causal, seed, offset, *, scale=None, window_size_left=None,
    window_size_right=None, **more,
):  # fmt: skip
    g, q, k, v, out, lse, cq, ck = map(near, (g, q, k, v, out, lse, cq, ck))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for own, keys, x, y, z in _sequences(q, k, v, cq, ck):
        sees = _seen_keys(x.shape[1], y.shape[1], is_causal, window_size_left, window_size_right)
        grads = _attend_back(g[own].transpose(0, 1), x, y, z, out[own].transpose(0, 1), lse[:, own], scale, None, sees)
        dq[own] = grads[0].transpose(0, 1)
        dk[keys] += grads[1].transpose(0, 1)
        dv[keys] += grads[2].transpose(0, 1)
    return far(dq, device), far(dk, device), far(dv, device)


def varlen_cudnn(
    device, q, k, v, bias, cq, ck, mq, mk, compute_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None, **more,
):  # fmt: skip
    out, lse, seed, offset, mask = varlen(device, q, k, v, cq, ck, mq, mk, dropout_p, is_causal, False, scale=scale)
    return out, lse, cq, ck, mq, mk, seed, offset, mask


def varlen_cudnn_back(device, g, q, k, v, out, lse, s, o, bias, cq, ck, mq, mk, p, is_causal, *, scale=None):
    return varlen_back(device, g, q, k, v, out, lse, cq, ck, mq, mk, p, is_causal, s, o, scale=scale)


# ---------------------------------------------------------------- other operators that the CPU has in another form
def rms_norm(device, x, shape, weight=None, eps=None):
    a, axes = near(x).float(), tuple(range(-len(shape), 0))
    r = (a.square().mean(axes, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return far((a * r * (1 if weight is None else near(weight).float())).to(x.dtype), device), far(r, device)


def histc(device, x, *args):
    return far(aten.histc.default(near(x).float(), *args).to(x.dtype), device)  # CUDA accepts integers


def dropout(device, x, p, train):
    if not train:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool, device=device)
    kept = torch.rand(x.shape, generator=cpu_generator(None, device)) >= p
    return far(near(x) * kept * (1 / (1 - p) if p < 1 else 0.0), device), far(kept, device)


def _by_cpu(op: Any) -> Callable[..., Any]:
    """Return a kernel for an operator that torch runs by kernels of cuDNN."""

    def kernel(device: torch.device, *args: Any, **kwargs: Any) -> Any:
        result = op(*tree_map(lambda x: near(x) if isinstance(x, Tensor) else x, args))
        return tree_map(lambda x: far(x, device) if isinstance(x, Tensor) else x, result)

    return kernel


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::copy_": copy_,
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_back,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_back,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_back,
    "aten::_flash_attention_forward": varlen,
    "aten::_flash_attention_backward": varlen_back,
    "aten::_cudnn_attention_forward": varlen_cudnn,
    "aten::_cudnn_attention_backward": varlen_cudnn_back,
    "aten::_fused_rms_norm": rms_norm,
    "aten::histc": histc,
    "aten::native_dropout": dropout,
    "aten::convolution": _by_cpu(aten.convolution.default),
    "aten::convolution_backward": _by_cpu(aten.convolution_backward.default),
}
KEPT = {
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "resize_", "resize_as_",
    "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to", "alias",
    "_local_scalar_dense", "_fused_sdp_choice", "record_stream", "is_pinned", "_pin_memory", "view_as_real", "detach",
    "view_as_complex", "_efficientzerotensor", "_has_compatible_shallow_copy_type", "_cudnn_init_dropout_state",
}  # fmt: skip
"""Operators that need no kernel, or whose only kernel is a copy: torch's own code runs."""


# ---------------------------------------------------------------- torch as a whole
def _compile(model: Any = None, **options: Any) -> Any:
    """Compile a function as torch.compile does (Inductor, Triton, ptxas), and return it uncompiled.

    It is compiled and launched once for each kind of arguments, forward and backward. The numbers come from the
    uncompiled function, because a launch computes nothing here. With PRETEND_COMPILE=no nothing is compiled; with
    PRETEND_COMPILE=real the compiled code runs at every call, to count compilations.
    """
    if model is None:
        return lambda function: _compile(function, **options)
    if os.environ.get("PRETEND_COMPILE") == "no":
        return model
    compiled, known = plain_compile(model, **options), set()

    def kind(x: Any) -> Any:
        return (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x).__name__

    def fresh(x: Any) -> Any:
        floats = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().clone().requires_grad_(x.requires_grad) if floats else x

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        key = str(tree_map(kind, (args, kwargs)))
        if key not in known and (any(x.is_cuda for x in leaves) or "cuda" in str(kwargs.get("device"))):
            known.add(key)
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # the caller's see nothing of it
                out = compiled(*tree_map(fresh, args), **kwargs)
            with_gradient = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
            if with_gradient:
                torch.autograd.backward(with_gradient, [torch.zeros_like(x) for x in with_gradient])
            seen.counts["compiled"] += 1
        return model(*args, **kwargs)

    return call


plain_compile = torch.compile


def _use_gloo() -> None:
    import torch.distributed.distributed_c10d as dist

    start = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return start(backend.replace("nccl", "gloo") if isinstance(backend, str) else backend, *args, **kwargs)

    torch.distributed.init_process_group = dist.init_process_group = init_process_group


_alive: list[Any] = []


def install() -> None:
    """Put these kernels in the place of torch's. Raises: RuntimeError for a torch whose operators are not known."""
    if not torch.__version__.startswith(SUPPORTED) or torch.version.cuda is None:
        raise RuntimeError(
            f"the pretended GPU supports CUDA builds of torch {SUPPORTED}, not {torch.__version__}: "
            f"run its tests, then change SUPPORTED in {__file__}"
        )
    driver = ctypes.CDLL("libcuda.so.1")
    report = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda what: seen.note(what.decode()))
    driver.pretend_report_to(report)
    library = torch.library.Library("aten", "IMPL")
    _alive.extend((driver, report, library))
    names = [*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), *SPECIAL]
    with _quiet():  # torch warns of every kernel that is replaced
        for name in dict.fromkeys(n.removeprefix("aten::") for n in names if n.startswith("aten::")):
            head, _, overload = name.partition(".")
            op = getattr(getattr(aten, head, None), overload or "default", None)
            if op is not None and name not in KEPT:
                library.impl(name, kernel_of(op), "CUDA")
    from torch.utils._device import _device_constructors

    _device_constructors()  # it remembers the functions that `with torch.device(...)` changes: the real ones
    torch.tensor = tensor
    if os.environ.get("PRETEND_COMPILE") != "real":
        torch.compile = _compile
    _use_gloo()
    if path := os.environ.get("PRETEND_REPORT"):
        atexit.register(write_report, path)


class _quiet(warnings.catch_warnings):
    """Context manager without warnings: Python's, and those that torch writes to stderr itself."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        self._stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)

    def __exit__(self, *error: Any) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        super().__exit__(*error)


def write_report(path: str) -> None:
    """Write what this process did as JSON; %p in the path is its id."""
    waits = [[*functions, n] for functions, n in seen.waits.most_common()]
    text = json.dumps({"counts": dict(seen.counts), "waits": waits}, indent=1)
    Path(path.replace("%p", str(os.getpid()))).write_text(text)
