"""The policy: a transformers model whose `forward` takes a packed row and returns token log-probs.

Nothing outside `Policy.forward` (and the built-in engine, which only reads) touches a parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmrl.model.families import family_of, head_of
from vlmrl.model.logprobs import token_logprobs
from vlmrl.model.prefix_attention import plan_row
from vlmrl.types import PackedRow, TokenStats

CACHED_POSITIONS = 256
"""Prompts whose position ids are kept: those of a step are needed by the engine and again by the update."""


class Policy(nn.Module):
    """log-softmax(logits / temperature) with banned ids at -inf, over an unmodified transformers model.

    Args:
        model: an image-text-to-text model; its text attention must be `prefix_attention.NAME` for shared rows.
        temperature: > 0; 1.0 for supervised training.
        banned_ids: ids that are never sampled and have probability zero.
        shared_prefix: False forces the padded path (the reference in tests, and what other families use).
        entropy_gradient: whether entropies carry a gradient, for an entropy bonus.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, banned_ids: Sequence[int] = (), shared_prefix: bool = True,
        entropy_gradient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model: Any = model
        self.temperature = temperature
        self.banned_ids = tuple(banned_ids)
        self.entropy_gradient = entropy_gradient
        self.family = family_of(model)
        self.shared_prefix = shared_prefix and self.family.shared_prefix
        self.recompute = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        self._positions: dict[bytes, Tensor] = {}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, row: PackedRow) -> TokenStats:
        """Log-probs (with gradient) and entropies of the row's trained tokens, in the row's order. Shape [K]."""
        if self.recompute:  # transformers recomputes activations in training mode only, and cannot generate in it
            self.model.train(torch.is_grad_enabled())
        hidden_KD = self._shared(row) if self.shared_prefix else self._padded(row)
        if self.recompute:
            self.model.eval()
        logp_K, entropy_K = token_logprobs(
            hidden_KD, row.target_K, head_of(self.model), temperature=self.temperature, banned_ids=self.banned_ids,
            entropy_gradient=self.entropy_gradient,
        )  # fmt: skip
        return TokenStats(logp_K, entropy_K)

    def _shared(self, row: PackedRow) -> Tensor:
        hidden_ND = self.model.model(
            input_ids=row.input_ids_N[None],
            position_ids=self._row_positions(row),
            use_cache=False,
            row_plan=plan_row(row.layout, row.input_ids_N.device),
            **row.images,
            **({"mm_token_type_ids": row.kinds_N[None]} if self.family.rope_index else {}),
        ).last_hidden_state[0]
        return hidden_ND[row.predict_at_K]

    def _row_positions(self, row: PackedRow) -> Tensor:
        """Position ids of a row: the prompt's own, each response from their largest + 1 on. [3, 1, N] or [1, N]."""
        pieces: list[Tensor] = []
        prompts = iter(_images_by_prompt(row))
        for span in row.layout:
            if span.response == -1:
                cut = slice(span.start, span.end)
                prompt = self.prompt_positions(
                    row.input_ids_N[cut], row.kinds_N[cut], next(prompts).get("image_grid_thw")
                )
                following = prompt.max() + 1
                pieces.append(prompt)
            else:
                steps = following + torch.arange(span.end - span.start, device=row.input_ids_N.device)
                pieces.append(steps.expand(pieces[0].shape[0], -1))
        positions = torch.cat(pieces, dim=1)
        return positions[:, None] if self.family.rope_index else positions

    def prompt_positions(self, ids: Tensor, kinds: Tensor, grids: Tensor | None) -> Tensor:
        """Position ids of a prompt as the model's own index function gives them: [3, P], or [1, P] without axes."""
        if not self.family.rope_index:
            return torch.arange(len(ids), device=ids.device)[None]
        if grids is None:
            return torch.arange(len(ids), device=ids.device).expand(3, -1)
        key = ids.cpu().numpy().tobytes() + b"|" + grids.cpu().numpy().tobytes()
        if key not in self._positions:
            if len(self._positions) >= CACHED_POSITIONS:
                self._positions.clear()
            found, _ = self.model.model.get_rope_index(ids[None], kinds[None].int(), image_grid_thw=grids)
            self._positions[key] = found[:, 0]
        return self._positions[key]

    def _padded(self, row: PackedRow) -> Tensor:
        """The slow reference: each response behind its own copy of the prompt, one forward each, plain attention."""
        inputs = frozenset(inspect.signature(self.model.model.forward).parameters)
        prompts = iter(_images_by_prompt(row))
        hidden: dict[int, Tensor] = {}
        for index, span in enumerate(row.layout):
            if span.response == -1:
                prompt, images = span, next(prompts)
                continue
            cuts = (slice(prompt.start, prompt.end), slice(span.start, span.end))
            ids, kinds = (torch.cat([x[c] for c in cuts])[None] for x in (row.input_ids_N, row.kinds_N))
            kind_names = inputs & {"mm_token_type_ids", "token_type_ids"}
            hidden[index] = self.model.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **images,
                **dict.fromkeys(kind_names, kinds.int()),
            ).last_hidden_state[0, prompt.end - prompt.start - 1 :]  # fmt: skip
        # Row j of hidden[i] predicts token j of response i; the first row is the prompt's last token.
        starts = torch.tensor([s.start for s in row.layout], device=row.span_K.device)
        return torch.stack(
            [
                hidden[i][0 if at < start else at - start + 1]
                for i, at, start in zip(
                    row.span_K.tolist(), row.predict_at_K.tolist(), starts[row.span_K].tolist(), strict=True
                )
            ]
        )


def _images_by_prompt(row: PackedRow) -> list[dict[str, Tensor]]:
    """The row's image tensors cut into one mapping a prompt; empty for prompts without images."""
    cut: list[dict[str, Tensor]] = []
    image = patch = 0
    grids = row.images.get("image_grid_thw")
    for count in row.num_images:
        if count == 0:
            cut.append({})
        elif grids is None:
            cut.append({k: v[image : image + count] for k, v in row.images.items()})
        else:
            patches = int(grids[image : image + count].prod(-1).sum())
            pixels = row.images["pixel_values"][patch : patch + patches]
            cut.append({"pixel_values": pixels, "image_grid_thw": grids[image : image + count]})
            patch += patches
        image += count
    return cut
