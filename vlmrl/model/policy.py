"""The policy: a transformers model whose `forward` takes a packed row and returns token log-probs.

No code outside `Policy.forward` uses the parameters, except the built-in engine, which only reads them. Log-probs are
computed from hidden states chunk by chunk: the logits `[T, V]` never exist all at once. They are those of
log-softmax(logits / temperature) with banned ids at -inf; all numbers from the logits on are float32.

Activations that are cheap to compute again are not kept for the backward pass. For a gated MLP `down(act(gate) * up)`,
autograd keeps gate, up, act(gate) and the product; for a norm, the normalised states and their product with the weight.
Both products, and act(gate), are elementwise functions of tensors that are kept anyway. The numbers are the same bit
for bit, and memory is a third less (measured 734 MB instead of 1063 MB). Model code is neither patched nor copied:
hooks get the inputs of the linear layers, autograd's graph contains the operations that computed them, and
`saved_tensors_hooks` keep these operations (a recipe) instead of the tensor.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmrl.algo.divergence import Divergence
from vlmrl.model.attention import choose_backend, fork_plan, no_mask, prepared_plan, vision_layout
from vlmrl.model.caches import MIN_TOKENS, ContinuedCache, Pass, RecordedPrompt, passes_of, run_with_cache, with_fillers
from vlmrl.model.compiled import keep_for_backward
from vlmrl.model.device_memory import free_bytes, upload
from vlmrl.model.families import family_of, head_of
from vlmrl.model.memory import HeadChunks, head_chunks
from vlmrl.model.packing import GRIDS, PackedRow, RowReference, Span, TokenStats, plan_row

IMPOSSIBLE = -1e30
"""Logit of banned ids where sums are taken: 0 times -inf would be no number."""


@cache
def chunks_for(device: torch.device) -> HeadChunks:
    """Return the chunk sizes for a device.

    They are fixed at the first call, so that all passes over a row split it in the same way.
    """
    return head_chunks(device.type, free_bytes(device))


def policy_logits(logits: Tensor, temperature: float, banned: Tensor | None, floor: float = float("-inf")) -> Tensor:
    """Return a copy of logits as those of the policy: float32, divided by the temperature, banned ids at `floor`.

    Args:
        logits: [..., V].
        temperature: > 0.
        banned: bool [V], True = never sampled; None = nothing is banned.
    Returns: [..., V].
    """
    x = logits.to(torch.float32, copy=True)
    if temperature != 1.0:
        x.div_(temperature)
    return x if banned is None else x.masked_fill_(banned, floor)


def banned_mask(banned_ids: Sequence[int], vocabulary: int, device: torch.device) -> Tensor | None:
    """Return a mask that is True at `banned_ids`, bool [V]; None if there are no banned ids.

    Ids outside the vocabulary are ignored.
    """
    ids = [i for i in banned_ids if 0 <= i < vocabulary]
    if not ids:
        return None
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[ids] = True
    return upload(mask, device)


def token_logprobs(
    hidden_KD: Tensor,
    target_K: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    banned_ids: Sequence[int] = (),
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log pi(target) and the policy's entropy at each position.

    Letters: K positions, D hidden width, V vocabulary.

    Args:
        hidden_KD: the hidden state that predicts each target.
        target_K: token id of each target, int64.
        head: function from hidden states to logits [.., V]: all operations after the last norm, with soft caps.
        entropy_gradient: whether the entropy carries a gradient (for an entropy bonus).
    Returns: (logp_K with gradient, entropy_K), float32, in nats.
    """

    def chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        return _LogprobAndEntropy.apply(logits, target, temperature, banned, entropy_gradient)

    if len(target_K) == 0:
        return hidden_KD.sum(-1).float(), hidden_KD.detach().sum(-1).float()
    vocabulary = head(hidden_KD[:1].detach()).shape[-1]
    banned = banned_mask(banned_ids, vocabulary, hidden_KD.device)  # built once: each build makes a GPU wait
    size = max(1, chunks_for(hidden_KD.device).chunk // vocabulary)
    logps, entropies = zip(*_in_chunks(chunk, size, hidden_KD, target_K), strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _in_chunks(function: Callable[..., Any], size: int, *tensors: Tensor) -> list[Any]:
    """Return a function's results for chunks of positions; the backward pass computes the logits of several again."""
    several = torch.is_grad_enabled() and len(tensors[0]) > size
    run = partial(checkpoint, function, use_reentrant=False) if several else function
    # [C, D] -> [C, V] -> [C] per chunk
    return [run(*chunk) for chunk in zip(*(x.split(size) for x in tensors), strict=True)]


class _LogprobAndEntropy(torch.autograd.Function):
    """Function from logits [C, V] to log pi(target) [C] and entropy [C]; float32, a few rows at a time.

    It keeps the logits themselves and three numbers per row for the backward pass. The backward pass is written by
    hand, because autograd would keep and read several arrays of [C, V]. The gradient overwrites the logits (autograd
    raises an error if another operation needs them in its backward pass). With pi = softmax(x): d logp / dx_j = [j =
    target] - pi_j, and d entropy / dx_j = -pi_j (log pi_j + entropy).

    Reading and writing arrays of [rows, V] takes the time, so they are changed in place, and the entropy is
    log sum exp(x - max) - E[x - max] instead of the sum of pi log pi.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, banned: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, lse = (torch.empty(len(logits), device=logits.device) for _ in range(3))
        for rows in _blocks(logits):
            x = policy_logits(logits[rows], temperature, banned, IMPOSSIBLE)  # [rows, V], float32
            at_target, highest = x.gather(-1, target[rows, None])[:, 0], x.amax(-1)
            weight = x.sub_(highest[:, None]).exp()
            total = weight.sum(-1)
            log_total = total.log()
            logp[rows] = (at_target - highest) - log_total
            entropy[rows] = log_total - x.mul_(weight).sum(-1) / total
            lse[rows] = highest + log_total
        if banned is not None:
            logp.masked_fill_(banned[target], float("-inf"))
        ctx.save_for_backward(logits, target, lse, entropy)
        ctx.temperature, ctx.banned, ctx.entropy_gradient = temperature, banned, entropy_gradient
        ctx.is_mine = logits.grad_fn is not None  # a leaf tensor belongs to the caller: not overwritten
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, logp_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, entropy = ctx.saved_tensors
        grad = logits if ctx.is_mine else torch.empty_like(logits)
        pull = logp_grad / ctx.temperature
        at_target = pull if ctx.banned is None else pull.masked_fill(ctx.banned[target], 0.0)
        for rows in _blocks(logits):
            x = policy_logits(logits[rows], ctx.temperature, ctx.banned, IMPOSSIBLE).sub_(lse[rows, None])
            if ctx.entropy_gradient:
                p, slope = x.exp(), (entropy_grad[rows] / ctx.temperature)[:, None]
                x = x.add_(entropy[rows, None]).mul_(slope).add_(pull[rows, None]).mul_(p).neg_()
            else:
                x.exp_().mul_(-pull[rows, None])
            grad[rows] = x.scatter_add_(-1, target[rows, None], at_target[rows, None])
        return grad, None, None, None, None


def _blocks(logits: Tensor, parts: int = 1) -> Iterator[slice]:
    size = max(1, chunks_for(logits.device).block // logits.shape[-1] // parts)
    return (slice(start, start + size) for start in range(0, len(logits), size))


@torch.no_grad()
def gradient_energy(
    hidden_KD: Tensor, target_K: Tensor, head: Callable[[Tensor], Tensor], temperature: float, banned_ids: Sequence[int]
) -> Tensor:
    """Return the squared size of d log pi(target) / d logits, for logits divided by the temperature. [K], in 0 to 2.

    With pi = softmax(logits) it is (1 - pi_target)^2 plus the sum of all other pi_j^2. Arguments: see `token_logprobs`.

    Source: the logit-gradient proxy of arXiv:2602.07078.
    Example: pi = (0.5, 0.25, 0.25): 0.25 + 0.0625 + 0.0625 = 0.375 for the first token.
    """

    def chunk(hidden: Tensor, target: Tensor) -> Tensor:
        logits = head(hidden)
        energy = torch.empty(len(logits), device=logits.device)
        for rows in _blocks(logits):
            at = target[rows, None]
            logp = policy_logits(logits[rows], temperature, banned).log_softmax(-1)
            # expm1: near pi = 1, 1 - 2 pi + the sum of squares would lose all digits.
            energy[rows] = logp.exp().scatter_(-1, at, logp.gather(-1, at).expm1()).square_().sum(-1)
        return energy

    if len(target_K) == 0:
        return hidden_KD.sum(-1).float()
    vocabulary = head(hidden_KD[:1]).shape[-1]
    banned = banned_mask(banned_ids, vocabulary, hidden_KD.device)
    size = max(1, chunks_for(hidden_KD.device).chunk // vocabulary)
    return torch.cat(_in_chunks(chunk, size, hidden_KD, target_K))


class _DivergenceOfLogits(torch.autograd.Function):
    """Function from logits [C, V] of two models to their divergence [C], with a gradient for the first alone."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, theirs: Tensor, settings: Divergence, temperature: float, banned: Tensor | None
    ) -> Tensor:
        value, grad = torch.empty(len(logits), device=logits.device), torch.empty_like(logits)
        for rows in _blocks(logits, 6):  # `of` holds several arrays at once
            own = policy_logits(logits[rows], temperature, banned).log_softmax(-1)
            ref = policy_logits(theirs[rows], settings.temperature or temperature, banned).log_softmax(-1)
            value[rows], pull = settings.of(own, ref)
            grad[rows] = pull.div_(temperature)
        ctx.save_for_backward(grad)
        return value

    @staticmethod
    def backward(ctx: Any, value_grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * value_grad[:, None].to(grad.dtype), None, None, None, None


def divergence(
    hidden_KD: Tensor,
    ref_hidden_KD: Tensor,
    head: Callable[[Tensor], Tensor],
    ref_head: Callable[[Tensor], Tensor],
    settings: Divergence,
    *,
    temperature: float,
    banned_ids: Sequence[int] = (),
) -> Tensor:
    """Return the divergence of the policy from another model at each position, chunk by chunk.

    Letters: K positions, D hidden width (the other model may have another), V vocabulary. If the two heads have numbers
    of logits that differ, those that only one of them has do not count: no token belongs to them.

    Args:
        hidden_KD, ref_hidden_KD: last hidden states of the policy and of the other model at the same positions; those
            of the other model get no gradient.
        head, ref_head: functions from hidden states to logits [.., V].
        settings: the divergence, with the other model's temperature.
        temperature, banned_ids: the policy's; the ids are banned in both distributions.
    Returns: [K] with gradient to `hidden_KD` and `head`, float32, in nats, never negative except for rounding.
    """

    def chunk(hidden: Tensor, ref_hidden: Tensor) -> Tensor:
        logits = head(hidden)
        with torch.no_grad():
            theirs = ref_head(ref_hidden)
        own, ref = (x if x.shape[-1] == vocabulary else x[..., :vocabulary] for x in (logits, theirs))
        return _DivergenceOfLogits.apply(own, ref, settings, temperature, banned)

    if len(hidden_KD) == 0:
        return hidden_KD.sum(-1).float()
    with torch.no_grad():
        vocabulary = min(f(x[:1]).shape[-1] for f, x in ((head, hidden_KD), (ref_head, ref_hidden_KD)))
    banned = banned_mask(banned_ids, vocabulary, hidden_KD.device)  # built once: each build makes a GPU wait
    size = max(1, chunks_for(hidden_KD.device).chunk // vocabulary // 2)  # two distributions are held at once
    return torch.cat(_in_chunks(chunk, size, hidden_KD, ref_hidden_KD))


@dataclass(frozen=True)
class _Recipe:
    """Function and inputs from which a tensor is computed again. Autograd keeps the inputs in any case."""

    make: Callable[..., Tensor]
    inputs: Sequence[Tensor | _Recipe]

    def __call__(self) -> Tensor:
        return self.make(*(x() if isinstance(x, _Recipe) else x for x in self.inputs))


@dataclass(frozen=True)
class _Packed:
    """Recipe and shape that autograd keeps instead of a tensor."""

    recipe: _Recipe
    shape: torch.Size

    def unpack(self) -> Tensor:
        with torch.no_grad():
            return self.recipe().contiguous().view(self.shape)


@contextmanager
def recomputing_cheap(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager for a forward pass that keeps recipes instead of cheap tensors.

    Args:
        modules: linear layers and activations whose tensors may be computed again. Layers inside gradient
            checkpointing must not be among them: no tensors are kept there anyway.
    """
    if not modules:
        yield
        return
    known: dict[int, tuple[weakref.ref[Tensor], int, _Recipe]] = {}  # address -> tensor, its version, its recipe

    def note(x: Any) -> None:
        # Address 0: a tensor subclass that stores its numbers elsewhere. All such tensors would be taken for one.
        if isinstance(x, Tensor) and x.grad_fn is not None and x.is_contiguous() and x.data_ptr():
            recipe = _recipe_of(x.grad_fn)
            if recipe is not None:
                known[x.data_ptr()] = weakref.ref(x), x._version, recipe

    def pack(saved: Tensor) -> Tensor | _Packed:
        # Detached: otherwise an operation that keeps its own output would refer to itself and stay in memory until the
        # backward pass, which may never come (out of memory).
        plain = saved.detach()
        entry = known.get(saved.data_ptr())
        if entry is None:
            return plain
        # As long as the tensor exists, no other tensor has its address.
        tensor, version, recipe = entry[0](), entry[1], entry[2]
        if tensor is None or tensor._version != version or tensor.dtype != saved.dtype:
            return plain
        whole = tensor.numel() == saved.numel() and saved.is_contiguous()
        return _Packed(recipe, saved.shape) if whole else plain

    handles = []
    for module in modules:
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda _, inputs: note(inputs[0]) if inputs else None))
        else:
            handles.append(module.register_forward_hook(lambda _, inputs, output: note(output)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.unpack() if isinstance(x, _Packed) else x):
            yield
    finally:
        for handle in handles:
            handle.remove()
        known.clear()  # autograd keeps `pack` with every tensor, which would be a reference cycle too


def cheap_modules(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers and activations of a model, except those inside gradient checkpointing."""
    inside = tuple(f"{name}." for name, m in model.named_modules() if getattr(m, "gradient_checkpointing", False))
    chosen = {}  # an activation may be shared by all layers
    for name, module in model.named_modules(remove_duplicate=False):
        if not name.startswith(inside) and (isinstance(module, nn.Linear) or name.endswith("act_fn")):
            chosen[module] = None
    return list(chosen)


def _recipe_of(node: Any) -> _Recipe | None:
    """Return the recipe of an autograd node's output from the tensors that the node keeps; None if it is not cheap."""
    name = node.name()
    if name == "SiluBackward0":
        return _Recipe(F.silu, (node._saved_self,))
    if name == "GeluBackward0":
        return _Recipe(partial(F.gelu, approximate=node._saved_approximate), (node._saved_self,))
    if name != "MulBackward0" or len(node.next_functions) != 2:
        return None
    factors: list[Tensor | _Recipe] = []
    for (maker, _), kept in zip(node.next_functions, ("_saved_self", "_saved_other"), strict=True):
        recipe = _recipe_of(maker) if maker is not None and maker.name() in ("SiluBackward0", "GeluBackward0") else None
        factor = recipe or getattr(node, kept)
        if factor is None:  # the other factor needs no gradient, so autograd does not keep this one
            return None
        factors.append(factor)
    return _Recipe(torch.mul, factors)


CACHED_POSITIONS = 256
"""Number of prompts whose position ids are cached: the engine computes those of a step, and the update uses them
again."""
KINDS_NAMES = frozenset({"mm_token_type_ids", "token_type_ids"})


class Policy(nn.Module):
    """Policy log-softmax(logits / temperature) with banned ids at -inf, over an unmodified transformers model.

    Args:
        model: an image-text-to-text model; its text attention must be `prefix.NAME` for shared rows.
        temperature: > 0; 1.0 for supervised training.
        banned_ids: ids that are never sampled and have probability zero.
        shared_prefix: False forces the padded path, as a reference in tests. Families that cannot share a prefix use it
            in any case.
        entropy_gradient: whether entropies carry a gradient, for an entropy bonus.
        backend: attention backend of packed rows: "auto", "sdpa", "split", "flex" or "varlen".
        critic: whether the policy has a `value_head`: a linear layer on the hidden states that predict the trained
            tokens, in float32. Its weights start at 0, so all values start at 0. It is not part of the model:
            `model.freeze` does not freeze it, and a merged model does not contain it.

    Attributes:
        device, dtype: device and dtype of the computation. They are those of the model's parameters, except in a
            sharded policy.
        saved_dtypes: parameter name -> dtype in which a checkpoint saves it, where sharding converts it to float32.
        sharded, compiled: whether `dist.fsdp.shard` has sharded the policy, and `compile_layers` compiled its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        banned_ids: Sequence[int] = (),
        shared_prefix: bool = True,
        entropy_gradient: bool = False,
        backend: str = "auto",
        critic: bool = False,
    ) -> None:
        super().__init__()
        self.model: Any = model
        first = next(model.parameters())
        self.device, self.dtype = torch.device("cpu") if first.is_meta else first.device, first.dtype
        self.saved_dtypes: dict[str, torch.dtype] = {}
        self.sharded, self.compiled = False, False
        self.temperature = temperature
        self.banned_ids = tuple(banned_ids)
        self.entropy_gradient = entropy_gradient
        self.family = family_of(model)
        self.sharing = self.family.sharing if shared_prefix else "padded"
        self.recompute = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        self.cheap = cheap_modules(model)
        self.backend = backend
        self.value_head = _value_head(self.hidden_size, self.device) if critic else None
        self._positions: dict[bytes, tuple[Tensor, int]] = {}

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def path(self) -> str:
        """Text for the log about the way in which rows are run."""
        if self.sharing == "packed":
            return f"shared prefix, packed rows, attention by {self._backend()}"
        if self.sharing == "forked":
            return "shared prefix, forked cache"
        return f"padded: `{self.model.config.model_type}` runs each response behind its own copy of the prompt"

    def forward(
        self,
        row: PackedRow,
        reference: RowReference | None = None,
        teacher: RowReference | None = None,
        *,
        states_only: bool = False,
        energy: bool = False,
    ) -> TokenStats | Tensor:
        """Return the token statistics of the row's trained tokens, in the row's order, from one pass over it.

        Args:
            reference, teacher: other models' outputs for the same row. If they are given, the statistics include the
                divergence from them.
            states_only: whether to return only the hidden states; used by `states`.
            energy: whether the statistics include the energy of each token; the head then runs twice.
        """
        hidden_KD = self._states(row)
        if states_only:
            return hidden_KD
        shared: Any = {"temperature": self.temperature, "banned_ids": self.banned_ids}
        logp_K, entropy_K = token_logprobs(
            hidden_KD, row.target_K, self.head, entropy_gradient=self.entropy_gradient, **shared
        )
        value_K = None if self.value_head is None else self.value_head(hidden_KD.float())[:, 0]  # [K, D] -> [K]
        kl_K, teacher_K = (
            None if x is None else divergence(hidden_KD, x.hidden_KD, self.head, x.head, x.divergence, **shared)
            for x in (reference, teacher)
        )
        energy_K = gradient_energy(hidden_KD, row.target_K, self.head, **shared) if energy else None
        return TokenStats(logp_K, entropy_K, value_K, kl_K, teacher_K, energy_K)

    def states(self, row: PackedRow) -> Tensor:
        """Return the last hidden states that predict the row's trained tokens: [K, D], with gradient.

        They have the model's dtype. This method calls `forward`, because a sharded policy has its whole parameters only
        there.
        """
        return self(row, states_only=True)

    def _states(self, row: PackedRow) -> Tensor:
        if self.recompute:  # transformers recomputes only in training mode, but cannot generate in that mode
            self.model.train(torch.is_grad_enabled())
        run = {"packed": self._packed, "forked": self._forked, "padded": self._padded}[self.sharing]
        with recomputing_cheap(self.cheap if torch.is_grad_enabled() else ()):
            hidden_KD = run(row)
        if self.recompute:
            self.model.eval()
        return hidden_KD

    @cached_property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Function from hidden states [.., D] to their logits [.., V]."""
        return head_of(self.model)

    def kinds_argument(self, kinds: Tensor) -> dict[str, Tensor]:
        """Return the token kinds under the argument name of this model's forward; {} if it takes none."""
        return {self.family.kinds_name: kinds} if self.family.kinds_name else {}

    def _backend(self) -> str:
        if self.backend != "auto":
            return self.backend
        return choose_backend(self.device, self.dtype, self.family.bidirectional)

    def _packed(self, row: PackedRow) -> Tensor:
        device = row.target_K.device
        ways = {"bidirectional": self.family.bidirectional, "backend": self._backend()}
        plan = plan_row(row.layout, device, kinds_N=row.kinds_N, **ways)
        plan = prepared_plan(plan) if self.compiled else plan
        numbers = self._numbers_of(row)
        hidden_ND = self.model.model(
            input_ids=numbers[:1],
            position_ids=self._batched(numbers[None, 2:]),
            attention_mask=no_mask(device),
            use_cache=False,
            row_plan=plan,
            **self.with_layout(row.images),
            **(self.kinds_argument(numbers[1:2]) if self.family.rope_index else {}),
        ).last_hidden_state[0]
        if self.compiled:
            keep_for_backward(plan, hidden_ND)
        return hidden_ND[row.predict_at_K]  # [N, D] -> [K, D]: the hidden state that predicts each trained token

    def with_layout(self, images: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of a forward for these images: the processor's tensors, and what the grids determine.

        transformers would compute the latter on the GPU and read it back. Grids are on the CPU; see `images_on`.
        """
        if not self.family.rope_index or GRIDS not in images:
            return dict(images)
        visual, grids, device = self.model.model.visual, images[GRIDS], images["pixel_values"].device
        layout = vision_layout(visual, grids)
        if hasattr(visual, "embeddings"):  # GLM: the tower's own embeddings take the grids too
            grids = upload(grids, device)
        own = {f"image_{name}": upload(x, device) if isinstance(x, Tensor) else x for name, x in layout.items()}
        return {**images, **own, GRIDS: grids}

    def _numbers_of(self, row: PackedRow) -> Tensor:
        """Return the id, the kind and the position ids of each token of a row, on its device: [2 + axes, N]."""
        positions = torch.cat([p for p, _ in self._span_positions(row)], dim=1)
        return upload(torch.cat([row.input_ids_N[None], row.kinds_N[None], positions]), row.target_K.device)

    def _span_positions(self, row: PackedRow) -> list[tuple[Tensor, int]]:
        """Return (position ids [axes, span length], position of the next token) of every span of a row, on the CPU."""
        results: list[tuple[Tensor, int]] = []
        for index, span in enumerate(row.layout):
            cut = slice(span.start, span.end)
            ids, kinds = row.input_ids_N[cut], row.kinds_N[cut]
            if span.response == -1:
                prompt = index
                positions, following = self.positions_and_next(ids, kinds, row.span_images[index].get(GRIDS))
            elif row.span_images[index] and self.family.rope_index:
                start = row.layout[prompt]
                cuts = (slice(start.start, start.end), cut)
                sequence, sequence_kinds = (torch.cat([x[c] for c in cuts]) for x in (row.input_ids_N, row.kinds_N))
                grids = [i[GRIDS] for i in (row.span_images[prompt], row.span_images[index]) if i]
                positions, following = self.positions_and_next(sequence, sequence_kinds, torch.cat(grids))
                positions = positions[:, start.end - start.start :]
            else:
                first = results[prompt][1]
                following = first + len(ids)
                positions = torch.arange(first, following)
                positions = positions.expand(results[prompt][0].shape[0], -1)
            results.append((positions, following))
        return results

    def positions_and_next(self, ids: Tensor, kinds: Tensor, grids: Tensor | None) -> tuple[Tensor, int]:
        """Return a prompt's position ids by the model's own index function, and the position of the next token.

        All is on the CPU: [3, P], or [1, P] if there is one axis.
        """
        if not self.family.rope_index or grids is None:
            return torch.arange(len(ids)).expand(3 if self.family.rope_index else 1, -1), len(ids)
        key = ids.numpy().tobytes() + b"|" + grids.numpy().tobytes()
        if key not in self._positions:
            if len(self._positions) >= CACHED_POSITIONS:
                self._positions.clear()
            positions, _ = self.model.model.get_rope_index(ids[None], kinds[None].int(), image_grid_thw=grids)
            self._positions[key] = positions[:, 0], int(positions.max()) + 1
        return self._positions[key]

    def _forked(self, row: PackedRow) -> Tensor:
        """Run each prompt once with a differentiable cache, then its responses, in batches of similar length."""
        numbers = self._numbers_of(row)
        states: dict[int, Tensor] = {}  # span -> [its length, D]
        fillers: list[Tensor] = []
        for each in self._passes(row):
            if not each.spans:
                fillers.append(self._run_filler(row, each))
            elif row.layout[each.spans[0]].response == -1:
                [prompt] = each.spans
                states[prompt], cache = self._run_prompt(row, prompt, numbers)
            else:
                hidden = self._continue(row, cache, each.spans, numbers)
                states |= {i: h[: _length(row.layout[i])] for i, h in zip(each.spans, hidden, strict=True)}
        # No prediction index points to a filler's state: its gradient is exactly 0, but its backward pass runs.
        return torch.cat([*(states[i] for i in range(len(row.layout))), *fillers])[row.predict_at_K]

    def _passes(self, row: PackedRow) -> Iterable[Pass]:
        """Return the forward passes of a row, with filler passes where all ranks make more of them than it needs."""
        own = passes_of(row.layout, [bool(images) for images in row.span_images], self.sharing)
        return with_fillers(own, row.passes) if row.passes else own

    def _run_filler(self, row: PackedRow, each: Pass) -> Tensor:
        """Return one hidden state [1, D] of a filler pass, which runs the filler's prompt (with images) or response."""
        filler = row.filler
        assert filler is not None
        if self.sharing == "padded":
            return self._alone(filler, (0, 1) if each.has_images else (1,))[:1]
        index = 0 if each.has_images else 1
        return self._run_prompt(filler, index, self._numbers_of(filler))[0][:1]

    def _run_prompt(self, row: PackedRow, index: int, numbers: Tensor) -> tuple[Tensor, RecordedPrompt]:
        """Return (hidden states [P, D], cache) of a prompt of at least one token; `numbers` of the row's tokens."""
        span = row.layout[index]
        own = numbers[:, span.start : span.end]
        cache = RecordedPrompt(self.model.config.get_text_config().num_hidden_layers)
        cache.num_tokens = _length(span)
        out = run_with_cache(
            self.model.model,
            cache,
            input_ids=own[:1],
            position_ids=self._batched(own[None, 2:]),
            attention_mask=no_mask(own.device),
            row_plan=plan_row([Span(0, -1, 0, _length(span))], own.device),
            **self.with_layout(row.span_images[index]),
        )
        return out.last_hidden_state[0], cache

    def _continue(self, row: PackedRow, cache: RecordedPrompt, spans: Sequence[int], numbers: Tensor) -> Tensor:
        """Return the hidden states [len(spans), R, D] of responses after a cached prompt. R: length of the longest."""
        own = [row.layout[i] for i in spans]
        longest = max(MIN_TOKENS, *map(_length, own))
        # [len(spans), 2 + axes, R]
        padded = torch.stack([F.pad(numbers[:, s.start : s.end], (0, longest - _length(s))) for s in own])
        out = run_with_cache(
            self.model.model,
            ContinuedCache(cache, len(spans)),
            input_ids=padded[:, 0],
            position_ids=self._batched(padded[:, 2:]),
            attention_mask=no_mask(padded.device),
            row_plan=fork_plan(cache.num_tokens, longest, padded.device),
            **self.with_layout(_join(row, spans)),
        )
        return out.last_hidden_state

    def _batched(self, positions: Tensor) -> Tensor:
        """Rearrange position ids [B, axes, T] for the model: [3, B, T] if it has three axes, [B, T] if it has one."""
        return positions.transpose(0, 1) if self.family.rope_index else positions[:, 0]

    def _padded(self, row: PackedRow) -> Tensor:
        """Run each response after its own copy of the prompt, in one plain forward per response: the slow reference."""
        hidden: list[Tensor] = []
        fillers: list[Tensor] = []
        before = [0] * len(row.layout)  # per response: number of states in `hidden` before its first
        for each in self._passes(row):
            if not each.spans:
                fillers.append(self._run_filler(row, each))
                continue
            prompt, response = each.spans
            before[response] = sum(map(len, hidden))
            # The response's states, and that of the prompt's last token, which predicts the first response token.
            hidden.append(self._alone(row, each.spans)[_length(row.layout[prompt]) - 1 :])
        # [2, spans] -> [2, K]
        start, first = upload(torch.tensor([[s.start for s in row.layout], before]), row.span_K.device)[:, row.span_K]
        return torch.cat([*hidden, *fillers])[first + (row.predict_at_K - start + 1).clamp(min=0)]

    def _alone(self, row: PackedRow, spans: Sequence[int]) -> Tensor:
        """Return the hidden states [length, D] of spans that follow each other, from the model's plain forward."""
        cuts = [slice(row.layout[i].start, row.layout[i].end) for i in spans]
        numbers = torch.stack([row.input_ids_N, row.kinds_N])[:, None]  # [2, 1, N]
        ids, kinds = upload(torch.cat([numbers[..., c] for c in cuts], 2), row.target_K.device)
        names = KINDS_NAMES & frozenset(inspect.signature(self.model.model.forward).parameters)
        return self.model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            **self.with_layout(_join(row, spans)),
            **dict.fromkeys(names, kinds.int()),
        ).last_hidden_state[0]


def _value_head(hidden_size: int, device: torch.device) -> nn.Linear:
    head = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def _length(span: Span) -> int:
    return span.end - span.start


def _join(row: PackedRow, spans: Sequence[int]) -> dict[str, Tensor]:
    """Return the image tensors of some spans of a row, concatenated in this order."""
    some = [row.span_images[i] for i in spans if row.span_images[i]]
    if len(some) <= 1:
        return dict(some[0]) if some else {}
    return {name: torch.cat([images[name] for images in some], row.image_axes[name]) for name in some[0]}
