"""The policy: a transformers model whose `forward` takes a packed row and returns token log-probs.

No code outside `Policy.forward` uses the parameters, except the built-in engine, which only reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmrl.model.attention.prefix import choose_backend, fork_plan, no_mask
from vlmrl.model.attention.row_plan import plan_row
from vlmrl.model.families import family_of, head_of
from vlmrl.model.forked_cache import MIN_TOKENS, ContinuedCache, RecordedPrompt, run_with_cache
from vlmrl.model.logprobs import full_kl, token_logprobs
from vlmrl.model.passes import Pass, passes_of, with_fillers
from vlmrl.model.selective_recompute import cheap_modules, recomputing_cheap
from vlmrl.packed import PackedRow, RowReference, Span, TokenStats

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
        saved_dtypes: parameter name -> dtype in which a checkpoint saves it. For parameters that sharding converts to
            float32; {} if the policy is not sharded.
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
        self, row: PackedRow, reference: RowReference | None = None, *, states_only: bool = False
    ) -> TokenStats | Tensor:
        """Return the token statistics of the row's trained tokens, in the row's order, from one pass over it.

        Args:
            reference: the reference model's data for the same row. If it is given, the statistics include the full KL
                to the reference.
            states_only: whether to return only the hidden states; used by `states`.
        """
        hidden_KD = self._states(row)
        if states_only:
            return hidden_KD
        logp_K, entropy_K = token_logprobs(
            hidden_KD,
            row.target_K,
            self.head,
            temperature=self.temperature,
            banned_ids=self.banned_ids,
            entropy_gradient=self.entropy_gradient,
        )
        value_K = (
            None if self.value_head is None else self.value_head(hidden_KD.float())[:, 0]
        )  # [K, D] -> [K, 1] -> [K]
        kl_K = None
        if reference is not None:
            kl_K = full_kl(
                hidden_KD,
                reference.hidden_KD,
                self.head,
                reference.head,
                temperature=self.temperature,
                banned_ids=self.banned_ids,
            )
        return TokenStats(logp_K, entropy_K, value_K, kl_K)

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

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [.., V] of hidden states [.., D]."""
        return head_of(self.model)(hidden)

    def kinds_argument(self, kinds: Tensor) -> dict[str, Tensor]:
        """Return the token kinds under the argument name of this model's forward; {} if it takes none."""
        return {self.family.kinds_name: kinds} if self.family.kinds_name else {}

    def _backend(self) -> str:
        if self.backend != "auto":
            return self.backend
        return choose_backend(self.device, self.dtype, self.family.bidirectional)

    def _packed(self, row: PackedRow) -> Tensor:
        device = row.input_ids_N.device
        plan = plan_row(
            row.layout, device, kinds_N=row.kinds_N, bidirectional=self.family.bidirectional, backend=self._backend()
        )
        # [axes, N]
        positions = torch.cat([p for p, _ in self._span_positions(row)], dim=1)
        hidden_ND = self.model.model(
            input_ids=row.input_ids_N[None],
            position_ids=positions[:, None] if self.family.rope_index else positions,
            attention_mask=no_mask(device),
            use_cache=False,
            row_plan=plan,
            **row.images,
            **(self.kinds_argument(row.kinds_N[None]) if self.family.rope_index else {}),
        ).last_hidden_state[0]
        return hidden_ND[row.predict_at_K]  # [N, D] -> [K, D]: the hidden state that predicts each trained token

    def _span_positions(self, row: PackedRow) -> list[tuple[Tensor, int]]:
        """Return (position ids [axes, span length], position of the next token) of every span of a row."""
        results: list[tuple[Tensor, int]] = []
        for index, span in enumerate(row.layout):
            cut = slice(span.start, span.end)
            ids, kinds = row.input_ids_N[cut], row.kinds_N[cut]
            if span.response == -1:
                prompt = index
                positions, following = self._positions_and_next(
                    ids, kinds, row.span_images[index].get("image_grid_thw")
                )
            elif row.span_images[index] and self.family.rope_index:
                start = row.layout[prompt]
                cuts = (slice(start.start, start.end), cut)
                sequence, sequence_kinds = (torch.cat([x[c] for c in cuts]) for x in (row.input_ids_N, row.kinds_N))
                grids = [i["image_grid_thw"] for i in (row.span_images[prompt], row.span_images[index]) if i]
                positions, following = self._positions_and_next(sequence, sequence_kinds, torch.cat(grids))
                positions = positions[:, start.end - start.start :]
            else:
                first = results[prompt][1]
                following = first + len(ids)
                positions = torch.arange(first, following, device=ids.device)
                positions = positions.expand(results[prompt][0].shape[0], -1)
            results.append((positions, following))
        return results

    def prompt_positions(self, ids: Tensor, kinds: Tensor, grids: Tensor | None) -> Tensor:
        """Return a prompt's position ids, by the model's own index function: [3, P], or [1, P] if there is one axis."""
        return self._positions_and_next(ids, kinds, grids)[0]

    def _positions_and_next(self, ids: Tensor, kinds: Tensor, grids: Tensor | None) -> tuple[Tensor, int]:
        """Return `prompt_positions`, and the position of the next token."""
        if not self.family.rope_index or grids is None:
            return torch.arange(len(ids), device=ids.device).expand(3 if self.family.rope_index else 1, -1), len(ids)
        key = ids.cpu().numpy().tobytes() + b"|" + grids.cpu().numpy().tobytes()
        if key not in self._positions:
            if len(self._positions) >= CACHED_POSITIONS:
                self._positions.clear()
            positions, _ = self.model.model.get_rope_index(ids[None], kinds[None].int(), image_grid_thw=grids)
            self._positions[key] = positions[:, 0], int(positions.max()) + 1
        return self._positions[key]

    def _forked(self, row: PackedRow) -> Tensor:
        """Run each prompt once with a differentiable cache, then its responses, in batches of similar length."""
        positions = [p for p, _ in self._span_positions(row)]
        states: dict[int, Tensor] = {}  # span -> [its length, D]
        fillers: list[Tensor] = []
        for each in self._passes(row):
            if not each.spans:
                fillers.append(self._run_filler(row, each))
            elif row.layout[each.spans[0]].response == -1:
                [prompt] = each.spans
                states[prompt], cache = self._run_prompt(row, prompt, positions[prompt])
            else:
                hidden = self._continue(row, cache, each.spans, positions)
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
        return self._run_prompt(filler, index, self._span_positions(filler)[index][0])[0][:1]

    def _run_prompt(self, row: PackedRow, index: int, positions: Tensor) -> tuple[Tensor, RecordedPrompt]:
        """Return (hidden states [P, D], cache) of a prompt of at least one token."""
        span = row.layout[index]
        cut = slice(span.start, span.end)
        cache = RecordedPrompt(self.model.config.get_text_config().num_hidden_layers)
        cache.num_tokens = _length(span)
        out = run_with_cache(
            self.model.model,
            cache,
            input_ids=row.input_ids_N[None, cut],
            position_ids=self._batched(positions[None]),
            attention_mask=no_mask(row.input_ids_N.device),
            row_plan=plan_row([Span(0, -1, 0, _length(span))], row.input_ids_N.device),
            **row.span_images[index],
        )
        return out.last_hidden_state[0], cache

    def _continue(
        self, row: PackedRow, cache: RecordedPrompt, spans: Sequence[int], positions: Sequence[Tensor]
    ) -> Tensor:
        """Return the hidden states [len(spans), R, D] of responses after a cached prompt. R: length of the longest."""
        device = row.input_ids_N.device
        longest = max(MIN_TOKENS, *(_length(row.layout[i]) for i in spans))
        ids = torch.zeros(len(spans), longest, dtype=torch.long, device=device)
        padded_positions = torch.zeros(
            len(spans), positions[spans[0]].shape[0], longest, dtype=torch.long, device=device
        )
        for k, i in enumerate(spans):
            span = row.layout[i]
            ids[k, : _length(span)] = row.input_ids_N[span.start : span.end]
            padded_positions[k, :, : _length(span)] = positions[i]
        out = run_with_cache(
            self.model.model,
            ContinuedCache(cache, len(spans)),
            input_ids=ids,
            position_ids=self._batched(padded_positions),
            attention_mask=no_mask(device),
            row_plan=fork_plan(cache.num_tokens, longest, device),
            **_join(row, spans),
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
        span = row.span_K
        start = torch.tensor([s.start for s in row.layout], device=span.device)[span]
        return torch.cat([*hidden, *fillers])[
            torch.tensor(before, device=span.device)[span] + (row.predict_at_K - start + 1).clamp(min=0)
        ]

    def _alone(self, row: PackedRow, spans: Sequence[int]) -> Tensor:
        """Return the hidden states [length, D] of spans that follow each other, from the model's plain forward."""
        cuts = [slice(row.layout[i].start, row.layout[i].end) for i in spans]
        ids, kinds = (torch.cat([x[c] for c in cuts])[None] for x in (row.input_ids_N, row.kinds_N))
        names = KINDS_NAMES & frozenset(inspect.signature(self.model.model.forward).parameters)
        return self.model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            **_join(row, spans),
            **dict.fromkeys(names, kinds.int()),
        ).last_hidden_state[0]


def _value_head(hidden_size: int, device: torch.device) -> nn.Linear:
    head = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head


def _length(span: Span) -> int:
    return span.end - span.start


def _join(row: PackedRow, spans: Sequence[int]) -> dict[str, Tensor]:
    """Return the image tensors of some spans of a row, concatenated in this order."""
    some = [row.span_images[i] for i in spans if row.span_images[i]]
    if len(some) <= 1:
        return dict(some[0]) if some else {}
    return {name: torch.cat([images[name] for images in some], row.image_axes[name]) for name in some[0]}
