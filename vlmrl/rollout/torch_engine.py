"""Built-in engine: plain PyTorch generation with the trainer's own weights, exact and reproducible.

Every prompt is prefilled once and its keys and values are stored once for all its samples (families on the padded path:
copied per sample). Finished rows are removed from the batch.

Each sample has its own stream of uniform random numbers, which depends only on its seed. They become tokens by
inverting the cumulative distribution. So a sample does not depend on the other rows of the batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from vlmrl.dist.fsdp import gathered
from vlmrl.errors import Load, OutOfMemoryError
from vlmrl.model.attention import NAME as SHARED_ATTENTION
from vlmrl.model.attention import no_mask
from vlmrl.model.caches import DecodeCache, cache_name, key_layers, rows_of
from vlmrl.model.device_memory import asking_for, give_back, upload
from vlmrl.model.memory import PACKED_BYTES
from vlmrl.model.packing import GRIDS, images_on, join_images, load_name
from vlmrl.model.policy import Policy, banned_mask, policy_logits
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.response_end import ResponseEnd, ResponseTexts
from vlmrl.types import Sample, SamplingParams, name_row

RETIRE_SHARE = 0.75
"""The batch is compacted when fewer than this share of its rows are still running."""
MAX_ROWS = 64
"""Maximum number of rows for which oneDNN's matrix product is used. For more rows (a prompt), torch's own is used."""
HAS_FAST_LINEAR = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""True if this torch has oneDNN's matrix product, which is not part of torch's public interface for float32."""
PACKED_ROWS = 16
"""Number of rows that oneDNN's order of the weights is chosen for. It serves other small numbers as well."""


def can_store_once(policy: Policy) -> bool:
    """Return whether a prompt's keys and values can be stored once: the text model must use vlmrl's attention."""
    return policy.model.config.get_text_config()._attn_implementation == SHARED_ATTENTION


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[None]:
    """Context manager: the model's plain float32 linear layers on the CPU use oneDNN for few rows. Without gradient.

    torch itself uses MKL, which reorders the weights at every call. oneDNN gets a copy of the weights in its own order,
    made when a layer first runs and kept until the end: at most `PACKED_BYTES`, the other layers are called with their
    weights as they are. Measured on 16 rows, beside MKL: 0.59 of the time, 0.86 without a copy. The weights must not
    change meanwhile.
    """
    layers = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m) and _fits(m)]
    left = PACKED_BYTES

    def packed(weight: Tensor) -> Tensor:
        nonlocal left
        if weight.nbytes > left:
            return weight
        left -= weight.nbytes
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)

    for layer in layers:
        layer.forward = _FewRows(layer, packed)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _fits(layer: nn.Linear) -> bool:
    return HAS_FAST_LINEAR and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


class _FewRows:
    """Forward of a linear layer; see `fast_linears`. `packed`: called once, with its weights, at its first few rows."""

    def __init__(self, layer: nn.Linear, packed: Callable[[Tensor], Tensor]) -> None:
        self.layer, self.packed = layer, packed
        self.weight: Tensor | None = None

    def __call__(self, input: Tensor) -> Tensor:
        layer, rows = self.layer, input.reshape(-1, input.shape[-1])
        if len(rows) > MAX_ROWS or input.dtype != torch.float32:
            return F.linear(input, layer.weight, layer.bias)
        if self.weight is None:
            self.weight = self.packed(layer.weight.detach())
        out = torch.ops.mkldnn._linear_pointwise(rows, self.weight, layer.bias, "none", [], "")
        return out.view(*input.shape[:-1], layer.out_features)


@dataclass
class _Running:
    """Response that is being generated.

    Args:
        uniform: its random numbers, one per token.
    """

    request: int
    sample: int
    seed: int
    uniform: np.ndarray
    end: ResponseEnd
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


class TorchEngine(Generator):
    """Engine that generates with a `Policy` in this process.

    Args:
        policy: shared with the trainer; `load_weights` therefore only sets the version.
        batch_tokens: maximum number of tokens (prompts and responses) in the key-value cache. When a batch runs out of
            memory, this budget is halved, once, and the missing responses are generated in smaller batches.
        on_halved: called then with the load that did not fit.

    Attributes:
        may_halve: whether the budget has not been halved yet.
        shares_prompts: whether a prompt's keys and values are stored once for all of its samples.
    """

    copies_weights = works_alone = False

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        *,
        batch_tokens: int = 65_536,
        on_halved: Callable[[Load], Any] = lambda load: None,
    ) -> None:
        self.policy, self.tokenizer, self.batch_tokens, self.on_halved = policy, tokenizer, batch_tokens, on_halved
        self._texts = ResponseTexts(tokenizer)
        self.may_halve = True
        self.version = 0
        self.shares_prompts = can_store_once(policy)
        self._ids = count()
        self._waiting: list[tuple[int, SamplingRequest, SamplingParams]] = []
        self._work: Iterator[list[tuple[int, list[Sample]]]] | None = None
        self._progress: Callable[[int], Any] = lambda n: None

    def sleep(self) -> None:
        """Do nothing: no memory is kept between calls."""

    def wake(self) -> None:
        """Do nothing: `sleep` freed no memory."""

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        """Set the version. The weights are the trainer's own."""
        self.version = version

    def close(self) -> None:
        """Do nothing: there is no memory to free."""

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        """Context manager: the policy's weights are gathered. See `Generator.round`."""
        self._progress = progress or (lambda n: None)
        try:
            # Gather first: the update must not compute with tensors that were created in inference mode.
            whole = gathered(self.policy) if self.policy.sharded else nullcontext()
            with whole, fast_linears(self.policy.model):
                yield
        finally:
            self._waiting, self._work = [], None

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        """Queue a request: see `Generator.submit`."""
        self._waiting.append((next(self._ids), request, params))
        return self._waiting[-1][0]

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        """Generate until a request is complete: see `Generator.poll`.

        All requests that wait when no other is open are batched together, by the token budget, longest prompts first.
        So the batches, and with them the last bits of all numbers, depend on the requests alone, not on the time.
        """
        end = None if timeout is None else time.monotonic() + timeout
        complete: list[tuple[int, list[Sample]]] = []
        with torch.inference_mode():
            while self._work is not None or self._waiting:
                if self._work is None:
                    self._work = self._answer_waiting()
                answers = next(self._work, None)
                if answers is None:
                    self._work = None
                complete += answers or []
                if complete or (end is not None and time.monotonic() >= end):
                    break
        return complete

    def _answer_waiting(self) -> Iterator[list[tuple[int, list[Sample]]]]:
        """Generate the waiting requests that have the parameters of the first. Yield complete ones after each token."""
        params = self._waiting[0][2]
        chosen = [(i, request) for i, request, its_params in self._waiting if its_params == params]
        self._waiting = [waiting for waiting in self._waiting if waiting[2] != params]
        requests = [request for _, request in chosen]
        results: list[list[Sample | None]] = [[None] * r.num_samples for r in requests]
        for finished in self._answer(requests, params, results):
            yield [
                (chosen[index][0], samples)
                for index in finished
                if len(samples := [s for s in results[index] if s is not None]) == requests[index].num_samples
            ]

    def _answer(
        self, requests: Sequence[SamplingRequest], params: SamplingParams, results: list[list[Sample | None]]
    ) -> Iterator[list[int]]:
        """Fill the empty entries of `results`. Yield after each token the requests of which a sample is finished.

        Raises: OutOfMemoryError when a batch does not fit and its budget was halved before, or it is one sample.
        """
        open_places = [[k for k, sample in enumerate(samples) if sample is None] for samples in results]
        try:
            for batch in self._batches(requests, params.max_new_tokens, open_places):
                with asking_for(partial(self._load, requests, batch, params.max_new_tokens), self.policy.device):
                    yield from self._generate_batch(requests, batch, params, results)
            return
        except OutOfMemoryError as error:
            load = error.load
            if load is None or load.responses == 1 or not self.may_halve:
                raise
        # After the handler, because the error's frames keep the batch's cache in memory.
        give_back(self.policy.device)
        self.on_halved(load)
        self.batch_tokens, self.may_halve = load.half(self.batch_tokens), False
        yield from self._answer(requests, params, results)

    def _load(self, requests: Sequence[SamplingRequest], batch: Sequence[tuple[int, int]], max_new_tokens: int) -> Load:
        """Return the size of a batch, for the out-of-memory error."""
        samples = Counter(index for index, _ in batch)
        prompts = [requests[index].prompt for index in samples]
        stored = len(samples) if self.shares_prompts else len(batch)
        return Load(
            "rollout.batch_tokens",
            stored * max(len(p.prompt_ids) for p in prompts) + len(batch) * max_new_tokens,
            sum(p.num_image_tokens for p in prompts),
            len(batch),
            tuple(
                load_name(name_row(p.row.source, p.row.prompt_id), n, p.image_sizes)
                for p, n in zip(prompts, samples.values(), strict=True)
            ),
        )

    def _batches(
        self, requests: Sequence[SamplingRequest], max_new_tokens: int, places: Sequence[Sequence[int]] | None = None
    ) -> list[list[tuple[int, int]]]:
        """Return (request, sample) pairs in batches whose cache fits the budget; samples of a prompt stay together.

        Args:
            places: the samples of each request to generate; None = all.
        """
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt.prompt_ids))
        batches: list[list[tuple[int, int]]] = []
        longest = copies = 0  # newest batch: length that its prompts are padded to; number of stored prompt copies
        for index in order:
            for sample in range(requests[index].num_samples) if places is None else places[index]:
                rows = len(batches[-1]) + 1 if batches else 1
                stored = copies + (not self.shares_prompts or not batches or batches[-1][-1][0] != index)
                if not batches or stored * longest + rows * max_new_tokens > self.batch_tokens:
                    batches.append([])
                    longest, stored = len(requests[index].prompt.prompt_ids), 1
                batches[-1].append((index, sample))
                copies = stored
        return batches

    def _generate_batch(
        self,
        requests: Sequence[SamplingRequest],
        batch: list[tuple[int, int]],
        params: SamplingParams,
        results: list[list[Sample | None]],
    ) -> Iterator[list[int]]:
        prompts = list(dict.fromkeys(index for index, _ in batch))
        copies = [sum(1 for index, _ in batch if index == p) for p in prompts]
        running = [self._begin(requests[i], i, s, params) for i, s in batch]
        hidden, cache, positions = self._prefill([requests[p] for p in prompts], copies, params.max_new_tokens)
        alive = list(range(len(running)))  # cache row -> index into `running`
        while True:
            tokens = self._sample([running[i] for i in alive], hidden, params)
            keep, finished = [], set()
            for row, i in enumerate(alive):
                if results[running[i].request][running[i].sample] is not None:
                    continue  # finished earlier; it stays in the cache until the next compaction
                reason = running[i].end.add(running[i].ids[-1])
                if reason is None:
                    keep.append(row)
                else:
                    results[running[i].request][running[i].sample] = self._finished(running[i], reason)
                    finished.add(running[i].request)
                    self._progress(1)
            yield sorted(finished)
            if not keep:
                return
            # Finished rows stay until there are enough of them, because compacting copies the whole cache.
            if len(keep) < RETIRE_SHARE * len(alive):
                rows = torch.tensor(keep, device=hidden.device)
                cache.select(rows)
                positions, tokens = positions[rows], tokens[rows]
                alive = [alive[row] for row in keep]
            hidden = self._step(tokens, positions, cache)
            positions = positions + 1

    def _prefill(
        self, requests: Sequence[SamplingRequest], copies: Sequence[int], longest_response: int
    ) -> tuple[Tensor, DecodeCache | _Copies, Tensor]:
        """Run each prompt once, left padded, and repeat its results for each of its samples.

        Args:
            copies: number of samples per request.
        Returns: last hidden state [B, D], cache, next position [B] of each sample.
        """
        policy, device = self.policy, self.policy.device
        longest = max(len(r.prompt.prompt_ids) for r in requests)
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(requests), longest), pad, dtype=torch.long)
        kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        axes = 3 if policy.family.rope_index else 1
        positions = torch.zeros(axes, len(requests), longest, dtype=torch.long)
        for i, r in enumerate(requests):
            n = len(r.prompt.prompt_ids)
            ids[i, -n:] = torch.tensor(r.prompt.prompt_ids)
            kinds[i, -n:] = torch.tensor(r.prompt.kinds)
            mask[i, -n:] = 1
            grids = r.prompt.images.get(GRIDS)
            positions[:, i, -n:] = policy.positions_and_next(ids[i, -n:], kinds[i, -n:], grids)[0]
        ids, kinds, mask, positions = (upload(x, device) for x in (ids, kinds, mask, positions))
        pixels = policy.with_layout(images_on(device, join_images([r.prompt.images for r in requests])))
        text = policy.model.config.get_text_config()
        prefilled = DynamicCache(config=text)
        out = policy.model.model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            position_ids=positions if axes == 3 else positions[0],
            **{cache_name(policy.model.model): prefilled},
            **pixels,
            **policy.kinds_argument(kinds),
        )
        prompt_of = rows_of(copies, device)
        if self.shares_prompts:
            cache = DecodeCache(prefilled, mask, prompt_of, longest_response, key_layers(text))
        else:
            cache = _Copies(prefilled, mask, prompt_of)
        # [P, T, D] -> [B, D]; [axes, P, T] -> [P] -> [B]
        return out.last_hidden_state[prompt_of, -1], cache, (positions.amax(dim=(0, 2)) + 1)[prompt_of]

    def _step(self, tokens: Tensor, positions: Tensor, cache: DecodeCache | _Copies) -> Tensor:
        """Run one more token for every row in the cache. Return its hidden state [B, D]."""
        at = positions[:, None]
        model = self.policy.model.model
        if isinstance(cache, DecodeCache):
            mine = {cache_name(model): cache, "decode_cache": cache, "attention_mask": no_mask(tokens.device)}
        else:
            mine = {cache_name(model): cache.stored, "attention_mask": cache.grown_mask()}
        out = model(
            input_ids=tokens[:, None],
            use_cache=True,
            **mine,
            position_ids=at.expand(3, -1, -1) if self.policy.family.rope_index else at,
        )
        return out.last_hidden_state[:, -1]

    def _sample(self, running: list[_Running], hidden: Tensor, params: SamplingParams) -> Tensor:
        """Draw the next token of every row and record it with its log-prob. Return the tokens [B]."""
        logits = policy_logits(self.policy.head(hidden), params.temperature or 1.0, None)
        banned = banned_mask(params.banned_ids, logits.shape[-1], logits.device)
        if banned is not None:
            logits.masked_fill_(banned, float("-inf"))  # in place: no other code uses these logits
        logp_BV = torch.log_softmax(logits, -1)
        if params.temperature == 0:
            tokens = logp_BV.argmax(-1)
        else:
            logp_BV = _filtered(logp_BV, params.top_p, params.top_k)
            cumulative = logp_BV.exp().cumsum(-1, dtype=torch.float64)
            drawn = [r.uniform[len(r.ids)] if len(r.ids) < len(r.uniform) else 0.0 for r in running]
            # [B, 1]: scaled by the total mass, which rounding leaves slightly off 1
            point = torch.tensor(drawn, dtype=torch.float64, device=hidden.device)[:, None] * cumulative[:, -1:]
            tokens = (cumulative <= point).sum(-1).clamp(max=logits.shape[-1] - 1)
        chosen = logp_BV.gather(-1, tokens[:, None])[:, 0].tolist()
        for r, token, logp in zip(running, tokens.tolist(), chosen, strict=True):
            if len(r.ids) < params.max_new_tokens:
                r.ids.append(token)
                r.logp.append(logp)
        return tokens

    def _begin(self, request: SamplingRequest, index: int, sample: int, params: SamplingParams) -> _Running:
        seed = request.seed + sample
        uniform = np.random.Generator(np.random.Philox(key=seed)).random(params.max_new_tokens)
        return _Running(index, sample, seed, uniform, ResponseEnd(params, self._texts))

    def _finished(self, r: _Running, reason: Any) -> Sample:
        return Sample(tuple(r.ids), self._texts.response(r.ids), tuple(r.logp), reason, self.version, r.seed)


class _Copies:
    """Cache in which every row has its own copy of the prompt, for families whose attention cannot share it."""

    def __init__(self, prefilled: Any, mask_PT: Tensor, prompt_of_B: Tensor) -> None:
        self.stored, self._mask = prefilled, mask_PT
        self.select(prompt_of_B)

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows, in this order."""
        self.stored.reorder_cache(rows)
        self._mask = self._mask[rows]

    def grown_mask(self) -> Tensor:
        """Return the attention mask [B, T + 1] of one more token, and keep it."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        return self._mask


def _filtered(logp_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return log-probs [B, V] renormalised over the top-k, then over the smallest set of mass top_p.

    They are unchanged when both are off.
    """
    if top_k > 0 and top_k < logp_BV.shape[-1]:
        floor = logp_BV.topk(top_k, -1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < floor, float("-inf")).log_softmax(-1)
    if top_p < 1.0:
        ordered, index = logp_BV.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # mass of all more likely tokens
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logp_BV = logp_BV.masked_fill(drop, float("-inf"))
        logp_BV = logp_BV.log_softmax(-1)
    return logp_BV
