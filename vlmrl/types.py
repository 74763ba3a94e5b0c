"""The data types everything is made of. Frozen, picklable, no torch.

Life of a prompt: a dataset gives a `Row`; its task renders `Message`s; the encoder makes an `EncodedPrompt`
(data/encode.py, it holds tensors); the engine returns `Sample`s; a reward turns each into a `Score`; a `Trajectory` is
what is trained on, a `Group` all trajectories of one prompt in one step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["stop", "length"]
"""Why a response ended: its end token (or a stop string), or the token limit."""


@dataclass(frozen=True, slots=True)
class Media:
    """A reference to one image: its content and its size in pixels as stored. Whoever owns the bytes finds them."""

    sha256: str
    width: int
    height: int
    kind: Literal["image"] = "image"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. `content` is text in which each `<image>` stands for the next of the row's images."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset, whatever it came from.

    Args:
        prompt_id: stable name of the row: the same row has the same id in every run (from its content and source).
        source: name of the `[[data]]` entry it came from.
        task: name of its task.
        truth: what the task's truth schema made of the row; a plain mapping of JSON values.
        media: images in the order of the `<image>` slots.
        columns: every other column of the dataset, as JSON values; given to rewards and templates.
        origin: where a person finds it (`rows.jsonl:17`), for messages; "" = not known. No part of what a row is.
    """

    prompt_id: str
    source: str
    task: str
    truth: Mapping[str, Any]
    media: tuple[Media, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False, repr=False)

    @property
    def place(self) -> str:
        """Where the row is, as an error says it."""
        return f"{self.origin} ({self.prompt_id})" if self.origin else name_row(self.source, self.prompt_id)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. The policy is log-softmax(logits / temperature) with `banned_ids` at -inf.

    Args:
        temperature: > 0, or 0 for greedy (the arg-max; log-probs are then those at temperature 1).
        top_p: in (0, 1]; 1 = off.    top_k: 0 = off.
        max_new_tokens: the end token counts.
        stop_ids: token ids that end a response; the one sampled is kept as the last token.
        stop: strings that end a response as soon as its text contains one; kept in the text.
        banned_ids: never sampled (image, video and padding tokens).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as an engine made it. `sampler_logp` in nats, one per token of `token_ids`."""

    token_ids: tuple[int, ...]
    text: str
    sampler_logp: tuple[float, ...]
    finish: Finish
    version: int
    seed: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens after the prompt by one speaker. `sampler_logp` is None where nobody sampled (tool output)."""

    role: str
    ids: tuple[int, ...]
    trained: bool
    sampler_logp: tuple[float, ...] | None = None


INAPPLICABLE = "the reward does not apply to this response"
"""`Score.error` of a response to which a reward in TRL's form gave None: left out like a failure, but no bug."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward said of one response.

    Args:
        value: the number the advantage sees: the weighted sum of the parts.
        parts: every part by name; None = not applicable to this row (its weight went to the others).
        note: one line for people, such as "no <answer> tag".
        error: what went wrong when the reward failed; such a sample is masked out, it is never a 0.
    """

    value: float
    parts: Mapping[str, float | None]
    note: str = ""
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the reward failed on this response, which is a bug in the reward."""
        return self.error is not None and self.error != INAPPLICABLE


@dataclass(frozen=True, slots=True)
class RewardInput:
    """All a reward may look at.

    Args:
        response: the text the model wrote, special tokens removed.
        truth: the row's truth fields.
        columns: every other dataset column.
        images: PIL images (RGB, as stored), in prompt order; empty unless the reward asks for them (`needs_images`).
        finish: "stop" or "length".
        num_tokens: length of the response in tokens, end token included.
        prompt: the rendered prompt as text.
        token_ids: the response's tokens, end token included; None where they are not known (a table of texts), or the
            reward does not ask for them (`needs_token_ids`).
        step: version of the policy that wrote the response, from 0.
    """

    response: str
    truth: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()
    finish: Finish = "stop"
    num_tokens: int = 0
    prompt: str = ""
    token_ids: Sequence[int] | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response to one prompt, with all that is needed to train on it and to replay it.

    Args:
        occurrence: how often the prompt had been drawn before in this run (0 the first time).
        sample: index within its group.      version: policy version that sampled it (= training step).
        seed: the seed it was sampled with: `sample_seed(run seed, step, prompt id, occurrence) + sample`.
        prompt_ids: token ids of the prompt with image tokens expanded.
        segments: what follows the prompt; one trained segment for a plain response.
        media: images of the prompt, then those that tools added.
    """

    task: str
    prompt_id: str
    occurrence: int
    sample: int
    version: int
    seed: int
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    media: tuple[Media, ...]
    finish: Finish

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(i for s in self.segments for i in s.ids)

    @property
    def num_trained_tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments if s.trained)


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A trajectory with its text, score and advantage. `masked` = not trained on (failed reward, truncated).

    `token_advantages`: one a trained token where they differ (KL in the reward, gamma < 1), else None; `advantage` is
    then their mean. Rollout files keep the mean only. `value_targets`: what a critic should have said before each
    trained token; None without a critic, and where the sample is not trained on.
    """

    trajectory: Trajectory
    text: str
    score: Score
    advantage: float = 0.0
    masked: bool = False
    generate_seconds: float = 0.0
    reward_seconds: float = 0.0
    token_advantages: tuple[float, ...] | None = None
    value_targets: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt in one step. `prompt_text` is the prompt as rendered, special tokens included."""

    row: Row
    prompt_text: str
    samples: tuple[ScoredSample, ...]

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(s.trajectory for s in self.samples)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a packed row. `response` is -1 for a group's prompt, else 0, 1, ... within the group."""

    group: int
    response: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of a microbatch: whole groups `[prompt][response 1]...[response n]`, one after another.

    Letters: N tokens of the row, K trained tokens.
    Args:
        input_ids_N: token ids, int64.      kinds_N: 0 text, 1 image, as the processor says, int64.
        layout: the spans that make up the row, in order and without gaps.
        num_images: images of each group's prompt, in order.
        images: what the processor made of the row's images (`pixel_values`, `image_grid_thw`, ...), in token order.
        span_images: the part of `images` that belongs to each span (views of the same memory); empty without images.
        image_axes: for each of `images`, the axis along which images follow each other.
        predict_at_K: index of the token whose hidden state predicts each trained token.   target_K: trained tokens.
        span_K: index into `layout` of the response each trained token belongs to.
        trajectories: for each span, which trajectory of the step it is; -1 for prompts.
    """

    input_ids_N: Tensor
    kinds_N: Tensor
    layout: tuple[Span, ...]
    num_images: tuple[int, ...]
    images: Mapping[str, Tensor]
    span_images: tuple[Mapping[str, Tensor], ...]
    image_axes: Mapping[str, int]
    predict_at_K: Tensor
    target_K: Tensor
    span_K: Tensor
    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What a policy says of a row's trained tokens. [K] float32; all in nats but `value`.

    Args:
        logp: with gradient.      entropy: without, unless the policy was asked for it.
        value: the score that the value head expects from here on, with gradient; None without a value head.
        kl: KL(policy || reference) over the whole vocabulary, with gradient; None where no reference was given.
    """

    logp: Tensor
    entropy: Tensor
    value: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowReference:
    """What the full KL needs of the reference for a row: `hidden_KD`, the hidden states that predict its trained tokens
    (no gradient), and `head`, hidden states -> logits [.., V]."""

    hidden_KD: Tensor
    head: Callable[[Tensor], Tensor]


def name_row(source: str, prompt_id: str) -> str:
    """Return a row's name for people: `shapes row 12`. An id that begins with the source's name says it already."""
    return f"row {prompt_id}" if prompt_id.startswith(f"{source}-") else f"{source} row {prompt_id}"


def hash64(*parts: object) -> int:
    """A stable 63-bit hash of the parts' text: the same on every machine, Python and run. Range [0, 2**63)."""
    text = "\x1f".join(str(p) for p in parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def sample_seed(run_seed: int, step: int, prompt_id: str, occurrence: int) -> int:
    """Seed of sample 0 of a prompt; sample k uses this + k. Room is left so that + k never overflows 63 bits."""
    return hash64(run_seed, step, prompt_id, occurrence) >> 1
