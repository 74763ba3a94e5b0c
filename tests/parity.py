"""The parity matrix's world and its reference: transformers' own forward of each row alone, and nothing of ours.

`reference(model, ...)` and `packed(policy, ...)` take any model, so that one with an adapter can be put in. The world's
prompts and images come from an encoder over the family's real processor, or, quicker, from tests/tinyfamilies.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinyfamilies import IMAGE, TinyFamily
from tinyworld import encoded, prompt_tokens
from torch import Tensor

from vlmrl.data.encode import Encoder
from vlmrl.model.lora import attach_adapter
from vlmrl.model.packing import PromptTokens, TrainItem, make_row, pack
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.types import Segment

TOLERANCE = 1e-5
"""Largest log-prob difference in nats, and largest gradient difference relative to the whole gradient's norm."""


@dataclass(frozen=True)
class Outcome:
    """Log-probs of all trained tokens, item by item, and the gradient of every trained parameter, or None."""

    logp: Tensor
    gradients: Mapping[str, Tensor | None]

    @property
    def without_gradient(self) -> list[str]:
        return sorted(n for n, g in self.gradients.items() if g is None or not bool(g.any()))


def differences(actual: Outcome, expected: Outcome) -> tuple[float, float]:
    """(largest log-prob difference, relative gradient difference over all parameters)."""
    assert actual.gradients.keys() == expected.gradients.keys()
    zero = torch.zeros(1)
    pairs = [
        (a if a is not None else zero, e if e is not None else zero)
        for a, e in ((actual.gradients[n], expected.gradients[n]) for n in expected.gradients)
    ]
    gap = sum(float((a.double() - e.double()).square().sum()) for a, e in pairs) ** 0.5
    norm = sum(float(e.double().square().sum()) for _, e in pairs) ** 0.5
    return float((actual.logp - expected.logp).abs().max()), gap / norm


def join(family: TinyFamily, images: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = images[0] if images else {}
    return {name: torch.cat([i[name] for i in images], family.axes.get(name, 0)) for name in names}


SIZES = {False: (40, 40), True: (320, 256)}
"""Of images for a real processor, in pixels: small, and large enough for about 20 times as many tokens."""
Picture = tuple[Mapping[str, Tensor], Sequence[int]]


def world(family: TinyFamily, seed: int = 0, encoder: Encoder | None = None) -> list[TrainItem]:
    """Four groups: two images of very different size; text alone; one small image; and, among its siblings, a response
    of three segments that begins with a tool's answer and holds two images of its own. The last is of one sample. The
    second has a demonstration beside its samples."""
    g = torch.Generator().manual_seed(seed)
    text = lambda n: torch.randint(20, 190, (n,), generator=g).tolist()  # noqa: E731
    picture = (lambda large: family.picture(large, g)) if encoder is None else (lambda large: _real(encoder, large))

    def prompt(*sizes: bool) -> PromptTokens:
        if encoder is not None:
            return prompt_tokens(encoded(encoder, "7 or 8?", [SIZES[large] for large in sizes], name=f"{sizes}"))
        pictures = [picture(large) for large in sizes]
        ids = text(3)
        for _, tokens in pictures:
            ids += [*tokens, *text(2)]
        ids += text(4)
        images = join(family, [images for images, _ in pictures])
        return PromptTokens(tuple(ids), tuple(int(i == IMAGE) for i in ids), images, len(sizes))

    items: list[TrainItem] = []
    plan: list[tuple[PromptTokens, list[int]]] = [
        (prompt(False, True), [5, 1, 9]), (prompt(), [4, 7]), (prompt(False), [6, 2]), (prompt(), [3])
    ]  # fmt: skip
    for group, (tokens, lengths) in enumerate(plan):
        for length in lengths:
            items.append(TrainItem(tokens, group, (Segment("assistant", tuple(text(length)), True),), len(items)))
    items.append(_agent(family, plan[2][0], 2, len(items), picture, text))
    shown = Segment("assistant", tuple(text(6)), True, author="demonstration")
    items.append(TrainItem(plan[1][0], 1, (shown,), len(items)))
    return sorted(items, key=lambda item: item.group)


def _real(encoder: Encoder, large: bool) -> Picture:
    """An image as the processor makes it, within the tokens of a turn of its own."""
    found = encoded(encoder, "", [SIZES[large]], name=f"tool {large}")
    return found.images, found.prompt_ids


def _agent(
    family: TinyFamily, prompt: PromptTokens, group: int, index: int, picture: Callable[[bool], Picture], text: Any
) -> TrainItem:
    (first, first_ids), (second, second_ids) = (picture(large) for large in (False, True))
    tool = Segment("tool", (*first_ids, *text(1), *second_ids), False)
    parts = (
        Segment("tool", tuple(text(2)), False),
        Segment("assistant", tuple(text(3)), True),
        tool,
        Segment("assistant", tuple(text(5)), True),
        Segment("tool", tuple(text(2)), False),
    )
    kinds = tuple(int(i == IMAGE) for s in parts for i in s.ids)
    return TrainItem(prompt, group, parts, index, kinds, join(family, [first, second]))


def adapted(model: Any, lora: Lora) -> Any:
    """The model with an adapter that matters: its second factor is not 0. It is smaller in linear attention, where the
    stock forward itself would round too much (see `wake`)."""
    g = torch.Generator().manual_seed(2)
    attach_adapter(model, lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name:
                noise = torch.randn(p.shape, generator=g)
                size = 0.05 * (0.5 if "linear_attn" in name else 1) if ".lora_B." in name else p.shape[-1] ** -0.5
                p.copy_(size * noise)
    return model


def weights(items: Sequence[TrainItem]) -> dict[int, Tensor]:
    """For each trajectory, a number for each trained token: what the loss multiplies log-probs with."""
    g = torch.Generator().manual_seed(5)
    found = {}
    for item in sorted(items, key=lambda i: i.trajectory):
        found[item.trajectory] = torch.randn(sum(len(s.ids) for s in item.segments if s.trained), generator=g)
    return found


def reference(model: Any, family: TinyFamily, items: Sequence[TrainItem]) -> Outcome:
    """One unpadded row at a time through the model's own forward, head included."""
    model.zero_grad(set_to_none=True)
    scale = weights(items)
    names = {"mm_token_type_ids", "token_type_ids"} & inspect.signature(model.forward).parameters.keys()
    found = {}
    for item in items:
        ids = torch.tensor([[*item.prompt.ids, *(t for s in item.segments for t in s.ids)]])
        images = join(family, [i for i in (item.prompt.images, item.images) if i])
        kinds = (ids == IMAGE).int()
        logits = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **images, **dict.fromkeys(names, kinds)
        ).logits[0]
        trained = [t for s in item.segments for t in [s.trained] * len(s.ids)]
        at = [len(item.prompt.ids) + k for k, use in enumerate(trained) if use]
        logp = torch.log_softmax(logits[[k - 1 for k in at]].float(), -1)
        logp = logp[torch.arange(len(at)), ids[0, at]]
        (logp * scale[item.trajectory]).sum().backward()
        found[item.trajectory] = logp.detach()
    return _outcome(model, found)


def packed(policy: Policy, items: Sequence[TrainItem], tokens_per_row: int) -> Outcome:
    """The same by the policy: rows as `update` packs them."""
    policy.model.zero_grad(set_to_none=True)
    scale = weights(items)
    found = {}
    for chosen in pack(items, tokens_per_row):
        row = make_row(chosen, policy.device)
        logp = policy(row).logp
        owner = torch.tensor(row.trajectories)[row.span_K.cpu()]
        (logp * torch.cat([scale[i.trajectory] for i in chosen]).to(policy.device)).sum().backward()
        found |= {i.trajectory: logp.detach().cpu()[owner == i.trajectory] for i in chosen}
    return _outcome(policy.model, found)


def _outcome(model: Any, found: dict[int, Tensor]) -> Outcome:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = {n: None if p.grad is None else p.grad.cpu().clone() for n, p in trained.items()}
    model.zero_grad(set_to_none=True)
    return Outcome(torch.cat([found[k] for k in sorted(found)]), gradients)
