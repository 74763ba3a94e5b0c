"""Exact attention for rows whose responses share one prompt, through transformers' AttentionInterface.

Model code is neither patched nor copied: the row's plan is passed as a keyword argument of `forward`; packing.py
defines which token sees which. Without a plan, the attention is transformers' own SDPA attention.

Two backends are for GPUs. FlexAttention makes one compiled kernel call per layer, which skips masked blocks; rows are
padded to a few fixed lengths, so that few shapes are compiled. The variable-length backend (half precision, also for
vision towers) makes one flash-attention call per layer, in which every span is one sequence: a response attends to a
copy of its prompt's keys, followed by its own. Their masks and indices are tested on the CPU.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, vision_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils.generic import get_max_seqlen

from vlmrl.errors import CheckpointError
from vlmrl.model.caches import HAS_FLASH_BACKWARD, DecodeCache, can_split, scale_of, split_row_attention
from vlmrl.model.compiled import compiled_split, copy_keys, numbered, opaque, split_rows
from vlmrl.model.device_memory import upload
from vlmrl.model.packing import RowPlan, RowTokens
from vlmrl.redaction.redact import first_line

COMPILATIONS = 128
"""Maximum number of shapes that the kernel is compiled for. In a model with one window size, rows of up to 65,536
tokens have 64 different padded lengths."""
BUCKET_TOKENS = 512
"""Rows are padded to a multiple of this number; long rows to a larger multiple, which is at most an eighth of the
row."""

compiled_shapes: set[tuple[Any, ...]] = set()
"""Shapes that the compiled kernel was called with: each is one compilation (`policy/attention_compilations`)."""


def bucket(tokens: int) -> int:
    """Return the padded length of a row."""
    step = max(BUCKET_TOKENS, 2 ** max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


@opaque  # it compiles itself
def flex_row_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention of a packed row, [1, H, N, D].

    Args:
        query: [1, H, N, D].
        key, value: [1, heads, N, D], with H or fewer heads.
    """
    tokens = query.shape[2]
    padded = bucket(tokens)
    mask = _block_mask(plan, window, padded)
    # [1, H, N, D] -> [1, H, padded, D]
    grow = (0, 0, 0, padded - tokens)
    attend: Any = flex_attention
    if query.is_cuda:
        attend = _compiled_attention()
        compiled_shapes.add((tuple(query.shape[:2]), key.shape[1], padded, query.shape[3], query.dtype, window))
    out = attend(
        F.pad(query, grow),
        F.pad(key, grow),
        F.pad(value, grow),
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[:, :, :tokens]


def _block_mask(plan: RowPlan, window: int | None, padded: int) -> BlockMask:
    """Return the row's mask for layers of this window, computed once per row."""
    name = ("flex", window, padded)
    if name not in plan.prepared:
        tokens, blocks = _padded_tokens(plan.tokens, padded), plan.has_blocks(window)
        device = tokens.index.device

        # The variables that this function captures are part of the compiled kernel. It may capture tensors of the
        # padded length and values that all layers share, but not the row's own length: otherwise each row would be
        # compiled again.
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return tokens.sees(q, k, window, blocks)

        make: Any = _compiled_block_mask() if device.type == "cuda" else create_block_mask
        plan.prepared[name] = make(mask_mod, None, None, padded, padded, device=str(device))
    mask = plan.prepared[name]
    assert isinstance(mask, BlockMask)
    return mask


def _padded_tokens(tokens: RowTokens, padded: int) -> RowTokens:
    """Return the row's tokens, followed by padding tokens, each in a group of its own. [N] -> [padded]."""
    more = torch.arange(padded - len(tokens.group), device=tokens.group.device)
    return RowTokens(
        torch.cat([tokens.group, -1 - more]),
        *(
            torch.cat([x, torch.full_like(more, fill)])
            for x, fill in ((tokens.response, -1), (tokens.index, 0), (tokens.block, -1))
        ),
    )


@cache
def _compiled_attention() -> Any:
    _allow_compilations()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@cache
def _compiled_block_mask() -> Any:
    _allow_compilations()
    return torch.compile(create_block_mask, dynamic=False)


def _allow_compilations() -> None:
    """Allow one compilation per bucket.

    torch's default limit is 8. Beyond the limit, torch runs the code uncompiled, with all scores in memory at once.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)


@dataclass(frozen=True)
class VarlenIndex:
    """Sequences of a varlen call over a row of N tokens.

    Args:
        key_at: int64 [keys of the call], the row index of the token that each key is copied from. The queries are the
            row's own, not copied.
        own_at: int64 [N], for each token of the row, the index of its key in its own span's sequence.
        copies: for each prompt with responses: its start and end in the row, and int64 [1 + responses, P], the indices
            of its own keys and of their copies among the keys of the call.
        query_starts, key_starts: int32 [sequences + 1], cumulative lengths of the sequences.
        longest_query, longest_key: number of queries and of keys of the longest sequence.
    """

    key_at: Tensor
    own_at: Tensor
    copies: tuple[tuple[int, int, Tensor], ...]
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int

    def sum_copies(self, gradient: Tensor) -> Tensor:
        """Return the gradient [N, heads, D] of keys or values from that of the call's, [keys of the call, heads, D].

        The gradients of a prompt token's copies are summed in float32, in a fixed order, and rounded once. Plain
        indexing would sort all indices in every layer and add the copies one by one in the tensor's own precision (8
        bits in bfloat16).
        """
        total = gradient.index_select(0, self.own_at)
        for start, end, places in self.copies:
            copies = gradient.index_select(0, places.flatten()).unflatten(0, places.shape)
            total[start:end] = copies.sum(0, dtype=torch.float32)
        return total


def varlen_index(plan: RowPlan) -> VarlenIndex:
    """Return the positions of the keys of every span, without empty spans.

    They are computed on the CPU and copied to the row's device, without a wait.
    """
    device = plan.tokens.index.device
    prompt = torch.empty(0, dtype=torch.int64)
    keys: list[Tensor] = []
    own_at: list[Tensor] = []
    places: list[tuple[int, int, list[Tensor]]] = []
    queries: list[int] = []
    copied = 0
    for span in plan.spans:
        own = torch.arange(span.start, span.end)
        if span.response == -1:
            prompt = own
            places.append((span.start, span.end, []))
        if span.end == span.start:
            continue
        keys.append(own if span.response == -1 else torch.cat([prompt, own]))
        places[-1][2].append(copied + torch.arange(len(prompt)))
        copied += len(keys[-1])
        own_at.append(torch.arange(copied - len(own), copied))
        queries.append(len(own))
    key_lengths = [len(k) for k in keys]
    return VarlenIndex(
        upload(torch.cat(keys), device),
        upload(torch.cat(own_at), device),
        tuple((s, e, upload(torch.stack(p), device)) for s, e, p in places if e > s and len(p) > 1),
        upload(_starts(queries), device),
        upload(_starts(key_lengths), device),
        max(queries),
        max(key_lengths),
    )


def index_of(plan: RowPlan) -> VarlenIndex:
    """Return the positions of the keys of a row, computed once."""
    if "varlen" not in plan.prepared:
        plan.prepared["varlen"] = varlen_index(plan)
    index = plan.prepared["varlen"]
    assert isinstance(index, VarlenIndex)
    return index


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class _Copied(torch.autograd.Function):
    """Copy keys or values [N, heads, D] of the row to the sequences of the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: VarlenIndex) -> Tensor:
        ctx.index = index
        return x.index_select(0, index.key_at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.index.sum_copies(gradient), None


def varlen_row_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention of a packed row, [1, H, N, D].

    Args:
        query: [1, H, N, D].
        key, value: [1, heads, N, D], with H or fewer heads.
    Raises: ValueError for rows whose image tokens see each other in both directions, which this kernel does not
        support.
    """
    if plan.has_blocks(window):
        raise ValueError("the varlen backend does not support bidirectional images: use flex or sdpa")
    index = index_of(plan)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    if torch.compiler.is_compiling():
        assert plan.number is not None
        k, v = (copy_keys(x, index.key_at, index.own_at, plan.number) for x in (k, v))
    else:
        k, v = (_Copied.apply(x, index) for x in (k, v))
    out = _kernel_now()(
        q.contiguous(),
        k,
        v,
        index.query_starts,
        index.key_starts,
        index.longest_query,
        index.longest_key,
        scale=scaling,
        window_size=_window(window),
    )
    return out.transpose(0, 1)[None]


def vision_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a vision tower whose images, or windows of images, form one sequence of N patches.

    On a GPU in half precision it is one kernel call. Elsewhere it is one call per window, as transformers does under
    SDPA; on a GPU those would be thousands of small launches, and each layer would copy the lengths from the GPU to the
    CPU.

    Args:
        query, key, value: [1, H, N, D].
        cu_seq_lens_q: int32 [windows + 1], the start of each window, and N at the end.
        max_length_q: length of the longest window.
    Returns: ([1, N, H, D], None), as transformers expects.
    """
    if _takes_kernel(query):
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        longest = int(max_length_q)
        kernel, starts = _kernel_now(), cu_seq_lens_q
        out = kernel(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(-1, -1))
        return out[None], None
    if torch.compiler.is_compiling() and HAS_FLASH_BACKWARD and query.device.type == "cpu":
        out = split_rows(query, key, value, cu_seq_lens_q, scale_of(query, scaling))[0]
        return out.transpose(1, 2), None
    return _by_windows(query, key, value, cu_seq_lens_q, scaling).transpose(1, 2), None


@opaque  # it runs window by window
def _by_windows(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: float | None) -> Tensor:
    lengths = starts.diff().tolist()
    windows = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in windows], 2)


def vision_layout(visual: Any, grids: Tensor) -> dict[str, Tensor | int | None]:
    """Return what the forward of a vision tower of a family with axes computes from the grids, on their device.

    Args:
        grids: `image_grid_thw`.
    Returns: arguments that the tower accepts in place of its own computation.
    """
    merge, config = visual.spatial_merge_size, visual.config
    starts, longest = vision_utils.get_vision_attention_seqlens(grids, config)
    layout = {"cu_seqlens": starts, "max_seqlen": longest}
    layout["position_ids"] = vision_utils.get_vision_position_ids(grids, merge)
    if hasattr(visual, "window_size"):
        windows = vision_utils.get_vision_window_index(grids, merge, visual.window_size, visual.patch_size)
        layout["window_index"], layout["cu_window_seqlens"] = windows
        layout["max_window_seqlen"] = get_max_seqlen(windows[1], config)
    if hasattr(visual, "num_grid_per_side"):
        mode, corners = visual.interpolation_mode, visual.interpolation_align_corners
        weights_of = vision_utils.get_vision_interpolation_indices_and_weights
        taps = weights_of(grids, visual.num_grid_per_side, mode, corners, merge)
        layout["interp_indices"], layout["interp_weights"] = taps
    return layout


WIDEST_HEAD = 256
"""Widest head that flash attention has kernels for; Gemma 4's global layers have heads of 512, which go to SDPA."""


def _takes_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= WIDEST_HEAD


KERNELS = {"fa3": ("FA3", "flash_attn_interface"), "fa4": ("FA4", "flash_attn.cute.interface")}
"""Value of `model.attention` -> torch's name of the kernels, and the module that has them."""
WITHOUT_KERNELS = 'install it, or set model.attention = "auto": torch has kernels of its own'


def has_kernels(name: str) -> bool:
    """Return whether the module with the kernels of a value of `model.attention` is installed."""
    try:
        return importlib.util.find_spec(KERNELS[name][1]) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def use_kernels(name: str) -> None:
    """Let torch's flash attention use other kernels in this process (`model.attention`); "auto" = its own.

    Raises: CheckpointError when they are not installed, or cannot be used here.
    """
    _kernel.cache_clear()
    _held.clear()
    if name not in KERNELS:
        if torch_attention.current_flash_attention_impl() is not None:
            torch_attention.restore_flash_attention_impl()
        return
    require_kernels(name)
    try:
        torch_attention.activate_flash_attention_impl(KERNELS[name][0])
    except (ImportError, RuntimeError) as error:
        message = f'model.attention = "{name}" cannot be used here: {first_line(error)}'
        raise CheckpointError(message, hint=WITHOUT_KERNELS) from error


def require_kernels(name: str) -> None:
    """Raise a CheckpointError if the kernels of a value of `model.attention` are not installed."""
    if name in KERNELS and not has_kernels(name):
        message = f'model.attention = "{name}" needs the module {KERNELS[name][1]}, which is not installed'
        raise CheckpointError(message, hint=WITHOUT_KERNELS)


_held: list[Callable[..., Any]] = []
"""The kernel of compiled layers; empty = no layer is compiled."""


def hold_kernel(device: torch.device) -> None:
    """Look for flash attention before layers are compiled: compiled code cannot. Raises: as `flash_attn`."""
    _held[:] = [_kernel()] if device.type == "cuda" else []


def _kernel_now() -> Callable[..., Any]:
    return _held[0] if _held else _kernel()


@cache
def _kernel() -> Callable[..., Any]:
    """Return flash attention over sequences of different length.

    It is torch's own if `model.attention` names its kernels, else flash-attn's if that is installed, else torch's own.
    """
    if torch_attention.current_flash_attention_impl() is None and (function := flash_attn()) is not None:
        return _with_torch_signature(function)
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 accepts fewer key heads than query heads and has no `enable_gqa`; later versions need the argument.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if has_flag else varlen_attn


def flash_attn() -> Callable[..., Any] | None:
    """Return the function of the package flash-attn; None if it is not installed.

    The package flash-attn-4 installs only `flash_attn.cute`, without this function: flash-attn then counts as absent.

    Raises: CheckpointError when it is installed but cannot be imported.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return getattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func", None)
    except ImportError as error:
        hint = "install it anew for this torch, or remove it (pip uninstall flash-attn): torch has a kernel of its own"
        raise CheckpointError(f"flash-attn is installed and cannot be imported: {error}", hint=hint) from error


def _with_torch_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return flash-attn's function, called as torch's own kernel is."""

    def kernel(*arguments: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        window = window_size if window_size[0] >= 0 else (-1, -1)
        return function(*arguments, softmax_scale=scale, causal=window_size[1] == 0, window_size=window)

    return kernel


def _window(window: int | None) -> tuple[int, int]:
    """Return the window as (tokens to the left, tokens to the right); 0 to the right = causal.

    With a window of W, a token sees itself and the W - 1 tokens before it.
    """
    return (-1 if window is None else window - 1, 0)


NAME = "vlmrl_shared_prefix"
VISION_NAME = "vlmrl_flash_vision"
"""Name of the attention of vision towers. Because the name contains "flash", transformers passes all windows in one
sequence to it."""


@dataclass(frozen=True)
class ForkPlan:
    """Responses that continue one cached prompt, one per batch row, padded on the right.

    Args:
        mask: bool [R, P + R], True = the response token (row) sees the token (column).
    """

    mask: Tensor


def fork_plan(prompt_tokens: int, response_tokens: int, device: torch.device) -> ForkPlan:
    """Return the plan of forked responses: a response token sees the whole prompt and its own past.

    Padding needs no mask: it comes after all trained tokens, which see only earlier tokens.
    """
    causal = torch.ones(response_tokens, prompt_tokens + response_tokens, dtype=torch.bool, device=device)
    return ForkPlan(causal.tril(prompt_tokens))  # [R, P + R]


def no_mask(device: torch.device) -> Tensor:
    """Return the placeholder mask for a forward with a plan: transformers builds no mask if it gets a 4-D one."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def choose_backend(device: torch.device, dtype: torch.dtype, bidirectional: str) -> str:
    """Return the attention backend of packed rows on this device.

    On the CPU: split (SDPA in layers that split does not support). On a GPU: varlen where flash attention works (half
    precision, no bidirectional images), else FlexAttention.
    """
    if device.type == "cpu":
        return "split"
    if device.type != "cuda":
        return "sdpa"
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if half and bidirectional == "never" else "flex"


def prepared_plan(plan: RowPlan) -> RowPlan:
    """Return the plan of a row for compiled layers: with a number, and with all that their code reads of it."""
    if plan.backend == "varlen":
        index_of(plan)
    return numbered(plan)


def prefix_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_plan: RowPlan | ForkPlan | None = None,
    sliding_window: int | None = None,
    decode_cache: DecodeCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention of one packed row, of forked responses, or of one decoding step over a `DecodeCache`.

    In all other cases it is transformers' SDPA attention. Letters: B batch (1 for a packed row), H heads, N tokens, D
    head width.

    Args:
        query: [B, H, N, D].
        key, value: [B, heads, N, D], with H or fewer heads (grouped queries).
    Returns: ([B, N, H, D], None), as transformers expects.
    """
    if decode_cache is not None:
        return decode_cache.attend(module.layer_idx, query, key, value, scaling), None
    if row_plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    if isinstance(row_plan, ForkPlan):
        key, value = _all_heads(query, key, value)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=row_plan.mask, scale=scaling)
    elif row_plan.backend == "flex":
        out = flex_row_attention(query, key, value, row_plan, scaling, sliding_window)
    elif row_plan.backend == "varlen" and query.shape[-1] <= WIDEST_HEAD:
        out = varlen_row_attention(query, key, value, row_plan, scaling, sliding_window)
    elif row_plan.backend == "split" and can_split(row_plan, sliding_window, query):
        attend = compiled_split if torch.compiler.is_compiling() else split_row_attention
        out = attend(query, key, value, row_plan, scaling)
    else:
        out = _sdpa_row_attention(query, *_all_heads(query, key, value), row_plan, scaling, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def _all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    repeat = query.shape[1] // key.shape[1]
    return (key, value) if repeat == 1 else (key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))


@opaque  # it runs span by span
def _sdpa_row_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention of a packed row, with one SDPA call per piece of it. [1, H, N, D]."""
    pieces = []
    for piece in plan.pieces:
        own = slice(piece.start, piece.end)
        keys, values = key[:, :, own], value[:, :, own]
        if piece.prompt is not None:
            prompt = slice(*piece.prompt)
            keys, values = torch.cat([key[:, :, prompt], keys], 2), torch.cat([value[:, :, prompt], values], 2)
        mask = plan.mask(piece, window)
        pieces.append(
            F.scaled_dot_product_attention(
                query[:, :, own], keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(pieces, 2)


AttentionInterface.register(NAME, prefix_attention)
AttentionInterface.register(VISION_NAME, vision_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
