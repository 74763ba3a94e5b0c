"""Comparison of packed rows, as training runs them, with the model's own forward (`vlmrl check --deep`).

The reference is transformers' forward of each response alone, with its own attention and its own head, one unpadded row
at a time. It uses none of the packing, position or mask code. Log-probs are compared and, where memory allows, the
gradient of all trained parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmrl.data.turns import encode_tail
from vlmrl.evaluate.trial import choose_rows
from vlmrl.model.load import share_prefix
from vlmrl.model.model_facts import usable_memory
from vlmrl.model.packing import PromptTokens, TrainItem, join_images, make_row, pack
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.sample import encode_prompt, require_environment, sample_rollouts
from vlmrl.setup.model import load_origin, make_encoder, make_generator, make_policy, sampling_params
from vlmrl.setup.model_origin import find_model
from vlmrl.setup.sources import open_sources
from vlmrl.types import Segment, name_row

SAMPLES = 3
MAX_RESPONSE_TOKENS = 48
GRADIENT_COPIES = 3
"""Memory for comparing gradients, in units of the trained weights: two gradients and a difference."""


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that are allowed, and the reason.

    Args:
        logp_max, logp_mean: maximum and mean over tokens, in nats.
        gradient: norm of the difference divided by the norm.
    """

    logp_max: float
    logp_mean: float
    gradient: float
    why: str


TOLERANCES = {
    torch.float32: Tolerance(
        1e-4,
        1e-5,
        1e-4,
        "float32 keeps 24 bits: the same sums in another order differ by about 1e-6 per layer; a wrong position or"
        " mask makes a difference of 0.01 or more",
    ),
    torch.bfloat16: Tolerance(
        0.5,
        0.03,
        0.1,
        "bfloat16 keeps 8 bits: transformers' own forward changes by a few hundredths with the shape of its batch; for"
        " a decisive comparison add --set model.dtype=float32",
    ),
}


@dataclass(frozen=True)
class RowParity:
    """Comparison of one prompt of the user and its responses.

    Args:
        logp_max, logp_mean: maximum and mean difference over the trained tokens, in nats.
    """

    row: str
    prompt_tokens: int
    image_tokens: int
    response_tokens: tuple[int, ...]
    logp_max: float
    logp_mean: float
    agrees: bool


@dataclass
class Parity:
    """Result of the comparison.

    Args:
        path: how rows are run, in words.
        gradient: relative difference; None if it was not compared, and `gradient_note` says why.
        sampler_gap: largest difference |trainer - built-in engine| of the sampled tokens' log-probs, in nats; None if
            no token was sampled.
        stream: (author, text) of each part of the longest episode, its prompt first, special tokens included; [] if the
            responses are no episodes.
    """

    path: str
    dtype: str
    tolerance: Tolerance
    rows: list[RowParity] = field(default_factory=list)
    gradient: float | None = None
    gradient_note: str = ""
    sampler_gap: float | None = None
    stream: list[tuple[str, str]] = field(default_factory=list)

    @property
    def logp_max(self) -> float:
        return max((r.logp_max for r in self.rows), default=0.0)

    @property
    def logp_mean(self) -> float:
        return max((r.logp_mean for r in self.rows), default=0.0)

    @property
    def agrees(self) -> bool:
        gradient = self.gradient is None or self.gradient <= self.tolerance.gradient
        return gradient and all(r.agrees for r in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "logp_max": self.logp_max, "logp_mean": self.logp_mean, "agrees": self.agrees}


def deep_check(recipe: Recipe, runs_root: Path, *, prompts: int) -> Parity:
    """Compare packed rows with the reference: the first prompts that training would draw, and sampled responses.

    Raises: the errors of data and model; RewardError when the user's environment fails.
    """
    torch.manual_seed(recipe.train.seed)
    sources, _ = open_sources(recipe)
    model, processor = load_origin(recipe.model, find_model(recipe.model.path, runs_root))
    policy = make_policy(recipe.model, model, processor, recipe.rollout.temperature)
    encoder = make_encoder(recipe.model, processor)
    drawn = [
        encode_prompt(source, source.rows[row], 0, encoder, recipe.rollout.max_prompt_tokens)
        for source, row in choose_rows(sources, recipe.train.seed, prompts)
    ]
    params = sampling_params(recipe, policy, processor.tokenizer)
    engine = make_generator(recipe, policy, encoder, sources=sources, engine="torch")
    # A call of a tool must not be cut.
    limit = params.max_new_tokens if recipe.has_episodes else min(MAX_RESPONSE_TOKENS, params.max_new_tokens)
    try:
        rollouts = sample_rollouts(
            engine, drawn, replace(params, max_new_tokens=limit), num_samples=SAMPLES, run_seed=recipe.train.seed,
            version=0,
        )  # fmt: skip
    finally:
        engine.close()
    items: list[TrainItem] = []
    for group, rollout in enumerate(rollouts):
        for k, sample in enumerate(rollout.samples):
            require_environment(sample, rollout.prompt.row.place)
            parts, tail = sample.segments, encode_tail(encoder, sample.segments, sample.files, "an episode")
            if not parts:
                # Different lengths on purpose: an untrained model writes every response up to the limit.
                keep = max(1, len(sample.token_ids) * (SAMPLES - k) // SAMPLES)
                parts = (Segment("assistant", sample.token_ids[:keep], True, sample.sampler_logp[:keep]),)
            items.append(TrainItem(PromptTokens.of(rollout.prompt.encoded), group, parts, len(items), *tail))
    names = [name_row(p.source.name, p.row.prompt_id) for p in drawn]
    parity = compare(policy, items, names, tokens_per_row=recipe.train.tokens_per_row)
    most = max(items, key=lambda item: len(item.segments))
    if recipe.has_episodes:
        parts = [("prompt", drawn[most.group].encoded.prompt_ids), *((s.author, s.ids) for s in most.segments)]
        parity.stream = [(author, _short(processor, ids)) for author, ids in parts]
    return parity


def _short(processor: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones included, with the tokens of an image as `<image token> x N`."""
    text = processor.tokenizer.decode(ids, skip_special_tokens=False)
    if not (token := getattr(processor, "image_token", None)):
        return text
    return re.sub(f"(?:{re.escape(token)}){{2,}}", lambda m: f"{token} x {len(m[0]) // len(token)}", text)


def compare(policy: Policy, items: Sequence[TrainItem], names: Sequence[str], *, tokens_per_row: int) -> Parity:
    """Compare packed rows of these trajectories with the reference.

    Args:
        items: trajectories 0, 1, ...; `item.group` indexes `names`.
    """
    dtype = next(policy.model.parameters()).dtype
    parity = Parity(policy.path, str(dtype).removeprefix("torch."), TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]))
    parity.gradient_note = _no_room(policy)
    with_gradient = not parity.gradient_note
    policy.model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(with_gradient):
        shared_logp = shared_logps(policy, items, tokens_per_row)
        shared_gradients = take_gradients(policy)
        stock_logp = stock_logps(policy, items)
        stock_gradients = take_gradients(policy)
    if with_gradient:
        parity.gradient = relative_difference(shared_gradients, stock_gradients)
    for group, name in enumerate(names):
        parity.rows.append(
            _row(name, [i for i in items if i.group == group], shared_logp, stock_logp, parity.tolerance)
        )
    gaps = []
    for item in items:
        sampler_logp = [x for s in item.segments if s.trained for x in s.sampler_logp or ()]
        if sampler_logp:
            trainer_logp = shared_logp[item.trajectory]
            gaps.append(float((trainer_logp - torch.tensor(sampler_logp, device=trainer_logp.device)).abs().max()))
    parity.sampler_gap = max(gaps, default=None)
    return parity


def _no_room(policy: Policy) -> str:
    """Return why gradients cannot be compared; "" if they can."""
    need = GRADIENT_COPIES * sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
    have = torch.cuda.mem_get_info(policy.device)[0] if policy.device.type == "cuda" else usable_memory()
    if need == 0:
        return "no parameter is trained"
    if 2 * need > have:  # the same amount again is left for activations
        return f"comparing gradients takes about {2 * need / 2**30:.1f} GiB, {have / 2**30:.1f} GiB are free"
    return ""


def _weight(item: TrainItem, count: int, device: torch.device) -> Tensor:
    """Return the weight of each token's log-prob in the loss: [count], float32.

    The weights differ and have both signs, so that equal log-probs do not cancel.
    """
    at = torch.arange(count, device=device, dtype=torch.float32)
    return torch.cos(1.7 * at + item.trajectory) / count


def shared_logps(policy: Policy, items: Sequence[TrainItem], tokens_per_row: int) -> dict[int, Tensor]:
    """Return the log-probs of each trajectory, packed as `update` packs it: trajectory -> [trained tokens].

    With gradients on, the backward pass of a loss of them is run, too.
    """
    logps: dict[int, Tensor] = {}
    for chosen in pack(items, tokens_per_row):
        row = make_row(chosen, policy.device)
        logp = policy(row).logp
        # [K]: trajectory of each trained token.
        owner = torch.tensor(row.trajectories, device=logp.device)[row.span_K]
        if torch.is_grad_enabled():
            weights = [_weight(i, int((owner == i.trajectory).sum()), logp.device) for i in chosen]
            (logp * torch.cat(weights)).sum().backward()
        logps |= {i.trajectory: logp.detach()[owner == i.trajectory] for i in chosen}
    return logps


def stock_logps(policy: Policy, items: Sequence[TrainItem]) -> dict[int, Tensor]:
    """Return the same log-probs from the model's own forward: each response alone behind its own copy of the prompt.

    P: length of the prompt, R: of the response, K: number of its trained tokens, V: size of the vocabulary.
    """
    model, device = policy.model, policy.device
    model.set_attn_implementation("sdpa")
    parameters = inspect.signature(model.forward).parameters
    logps: dict[int, Tensor] = {}
    try:
        for item in items:
            tail = [t for s in item.segments for t in s.ids]
            # [1, P + R]
            ids = torch.tensor([[*item.prompt.ids, *tail]], device=device)
            kinds = torch.tensor([[*item.prompt.kinds, *(item.kinds or [0] * len(tail))]], device=device)
            images = {k: v.to(device) for k, v in join_images([item.prompt.images, item.images]).items()}
            inputs: dict[str, Any] = images | {
                n: kinds for n in ("mm_token_type_ids", "token_type_ids") if n in parameters
            }
            if "logits_to_keep" in parameters:
                inputs["logits_to_keep"] = len(tail) + 1
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits
            trained = [t for s in item.segments for t in [s.trained] * len(s.ids)]
            places = torch.tensor([k for k, use in enumerate(trained) if use], device=device)
            # [1, P + R, V] -> [R + 1, V] -> [K, V]: the logits at one position predict the next token.
            chosen = logits[0, -len(tail) - 1 :][places].float() / policy.temperature
            chosen[:, [i for i in policy.banned_ids if i < chosen.shape[-1]]] = float("-inf")
            # [K, V] -> [K]
            logp = chosen.log_softmax(-1).gather(-1, torch.tensor(tail, device=device)[places][:, None])[:, 0]
            if torch.is_grad_enabled():
                (logp * _weight(item, len(places), device)).sum().backward()
            logps[item.trajectory] = logp.detach()
    finally:
        share_prefix(model)
    return logps


def take_gradients(policy: Policy) -> list[Tensor | None]:
    """Return the gradients of all parameters, and remove them from the parameters."""
    gradients = [p.grad for p in policy.model.parameters()]
    policy.model.zero_grad(set_to_none=True)
    return gradients


def relative_difference(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Return the norm of the difference divided by the norm of `expected`, over all parameters; None counts as 0."""
    gap = norm = 0.0
    for a, b in zip(actual, expected, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None and b is not None
        gap += float((a.float() - b.float()).square().sum(dtype=torch.float64))
        norm += float(b.float().square().sum(dtype=torch.float64))
    return (gap / norm) ** 0.5 if norm else float(gap > 0)


def _row(
    name: str, items: Sequence[TrainItem], shared: dict[int, Tensor], stock: dict[int, Tensor], allowed: Tolerance
) -> RowParity:
    gaps = torch.cat([(shared[i.trajectory] - stock[i.trajectory]).abs() for i in items])
    worst, mean = (float(gaps.max()), float(gaps.mean())) if len(gaps) else (0.0, 0.0)
    prompt = items[0].prompt
    # With `<=`, a NaN disagrees.
    agrees = worst <= allowed.logp_max and mean <= allowed.logp_mean
    lengths = tuple(i.num_tokens for i in items)
    return RowParity(name, len(prompt.ids), sum(map(bool, prompt.kinds)), lengths, worst, mean, agrees)
