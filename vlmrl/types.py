"""Data types of the whole package. Frozen, picklable, no torch.

These are the steps for a prompt: a dataset has `Row`s; the task renders each row as `Message`s; the encoder makes an
`EncodedPrompt` (in data/encode.py, because it holds tensors); the engine returns `Sample`s; a reward gives each sample
a `Score`. A `Trajectory` is a sample with all that is needed to train on it; a `Group` holds all samples of one prompt
in one step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, overload

Finish = Literal["stop", "length"]
"""Reason why a response ended: "stop" = its end token or a stop string, "length" = the token limit."""
Author = Literal["policy", "demonstration", "environment"]
"""Author of a segment: the trained model, a demonstration that it learns from, or a tool that answered the model."""
Status = Literal["ok", "failed", "unavailable"]
"""State of a score: it exists, the reward has a bug, or a service that the reward needs is down."""
EpisodeEnd = Literal[
    "answer", "done", "turn cut", "turn limit", "token limit", "image limit", "time limit", "environment"
]
"""Reason why an episode ended.

answer: a turn without a call. done: the environment said so. turn cut: a turn reached `rollout.max_new_tokens`. turn,
token, image and time limit: of `[environment]`. environment: its process ended, or raised, outside a tool.
"""
EPISODE_LIMITS: tuple[EpisodeEnd, ...] = ("turn cut", "turn limit", "token limit", "image limit", "time limit")
"""Endings by a limit: `Sample.finish` is "length", and training treats the response like a cut one."""
TOKEN_LIMITS: tuple[EpisodeEnd, ...] = ("turn cut", "token limit")
"""Endings by a number of tokens: what `is_cut` counts."""


def is_cut(finish: str, ending: str | None = None) -> bool:
    """Return whether a response reached a token limit. An episode may have ended by another limit."""
    return finish == "length" and ending in (None, *TOKEN_LIMITS)


Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, slots=True)
class Media:
    """Reference to an image: the hash of its content, and its size in pixels as stored. The bytes are not included."""

    sha256: str
    width: int
    height: int
    kind: Literal["image"] = "image"

    def fields(self) -> dict[str, Any]:
        """Return the reference as a mapping, as it is stored in the files of a run."""
        return {"sha256": self.sha256, "width": self.width, "height": self.height, "kind": self.kind}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Media:
        """Return the reference for the result of `fields`. Raises: KeyError when a field is missing."""
        return cls(fields["sha256"], fields["width"], fields["height"], fields["kind"])


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a tool by the model: the tool's name and its arguments, a mapping of JSON values."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedCall:
    """Call of a tool as a server has read it: its id, the tool's name, and the arguments as the model's JSON text."""

    id: str
    name: str
    arguments: str


TracePart = str | Call
"""Part of an assistant's turn in a trace: a text, or a call, which is written in the form of the model's family."""


GREY = (128, 128, 128)
"""Colour of a blank image in the place of a true one, RGB."""
LONG_SIDES = 200
"""Largest ratio of an image's longer side to its shorter side that the image processors of Qwen-VL and GLM-V take
(`smart_resize` of transformers); they refuse longer images."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode for rewards and people: special tokens are removed, tool calls are parsed.

    Args:
        role: "assistant", "tool", ...
        media: images that came with the turn.
        calls: tool calls in the turn; one that cannot be read has the name "".
        errors: number of the calls that failed, in the turn of the tool.
        seconds: time that the environment worked for the turn.
        seen_sizes: (width, height) of each of `media` as the model saw it; () = unknown.
        unfit: number of tokens of what its calls returned, if the token limit left no room for it.
    """

    role: str
    text: str
    media: tuple[Media, ...] = ()
    calls: tuple[Call, ...] = ()
    errors: int = 0
    seconds: float = 0.0
    seen_sizes: tuple[Size, ...] = ()
    unfit: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Turn:
        """Return the turn from the JSON values that `dataclasses.asdict` made of it.

        Raises: KeyError, TypeError or ValueError.
        """
        media = tuple(Media(**reference) for reference in fields["media"])
        calls = tuple(Call(call["name"], call["arguments"]) for call in fields["calls"])
        seen = tuple((width, height) for width, height in fields.get("seen_sizes", ()))
        numbers = {name: fields[name] for name in ("errors", "seconds", "unfit") if name in fields}
        return cls(fields["role"], fields["text"], media, calls, **numbers, seen_sizes=seen)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. `content` is text in which each `<image>` stands for the next of the row's images.

    Args:
        calls: calls of tools behind the text, in a response to learn; a prompt has none.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: tuple[Call, ...] = ()


TraceTurn = tuple[TracePart, ...] | Message
"""Turn of a trace: one of the assistant, or a message that answers it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset, from any source.

    Args:
        prompt_id: stable name of the row, made from its content and source: it is the same in every run.
        source: name of the `[[data]]` entry that the row came from.
        truth: fields of the task's truth schema for this row; a plain mapping of JSON values.
        media: images in the order of the `<image>` slots.
        columns: every other column of the dataset, as JSON values; given to rewards and templates.
        origin: place of the row for messages (`rows.jsonl:17`); "" = unknown. It is no part of the row's identity.
        response_media: images that its own response was shown, in the order of its messages.
        tools: schemas of the tools that its own response calls; its prompt shows them.
    """

    prompt_id: str
    source: str
    task: str
    truth: Mapping[str, Any]
    media: tuple[Media, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False, repr=False)
    response_media: tuple[Media, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def place(self) -> str:
        """Place of the row, as error messages state it."""
        return f"{self.origin} ({self.prompt_id})" if self.origin else name_row(self.source, self.prompt_id)


class LeftOut(NamedTuple):
    """Row or image of a source that does not get into the dataset: its place there, and the reason."""

    origin: str
    reason: str


T = TypeVar("T")


class Rows(Sequence[T]):
    """Sequence of rows, each made on access by `make(index)`; slices are lists."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._length))]
        number = index + self._length if index < 0 else index
        if not 0 <= number < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return self._make(number)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. The policy is log-softmax(logits / temperature) with `banned_ids` at -inf.

    Args:
        temperature: > 0, or 0 for greedy: the most likely token is taken, and log-probs are those at temperature 1.
        top_p: in (0, 1]; 1 = off.
        top_k: 0 = off.
        max_new_tokens: maximum number of tokens of a response, the end token included.
        stop_ids: ids of tokens that end a response; the sampled end token stays in the response as its last token.
        stop: strings that end a response as soon as its text contains one of them; the string stays in the text.
        banned_ids: ids of tokens that are never sampled (image, video and padding tokens).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one speaker after the prompt.

    Args:
        role: role of the chat turn.
        trained: whether the tokens may be trained on.
        sampler_logp: the engine's log-probs in nats, one per token; None = the tokens were not sampled (a tool's
            answer, a demonstration).
        version: policy version that sampled the segment; None = the version of the trajectory.
        media: images within the segment, in the order of their tokens.
        seen_sizes: (width, height) of each of `media` as the model saw it; () = unknown.
        unlisted: number of tokens whose ids are unknown, beside `ids`: an endpoint counts its tokens, and gives texts.
    """

    role: str
    ids: tuple[int, ...]
    trained: bool
    sampler_logp: tuple[float, ...] | None = None
    author: Author = field(default="policy", kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    media: tuple[Media, ...] = field(default=(), kw_only=True)
    seen_sizes: tuple[Size, ...] = field(default=(), kw_only=True)
    unlisted: int = field(default=0, kw_only=True)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with those whose ids are unknown."""
        return len(self.ids) + self.unlisted


def policy_versions(version: int, segments: Sequence[Segment]) -> set[int]:
    """Return a response's policy version, and those of its segments by the policy if they are noted there."""
    return {version, *(s.version for s in segments if s.author == "policy" and s.version is not None)}


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of an engine. `sampler_logp`: the engine's log-probs in nats, one per token of `token_ids`.

    Args:
        segments: parts of `token_ids` with their authors, in order; () = the policy wrote all tokens.
        turns: the turns of the response as people read them; () = one turn of the assistant.
        files: sha256 -> image file, for the images in the segments.
        ending: reason why an episode ended; None = the response is no episode.
        measured: numbers that an environment measured.
        fault: why an environment failed, in words; the sample then has no score. "" = it did not fail.
        is_outage: it failed because a service that it needs is down, which is no bug.
        calls: calls of tools that a server has read out of `text`.
        error: reason why an endpoint gave no text, or no last turn of an episode; it is then empty.
    """

    token_ids: tuple[int, ...]
    text: str
    sampler_logp: tuple[float, ...]
    finish: Finish
    version: int
    seed: int
    segments: tuple[Segment, ...] = ()
    turns: tuple[Turn, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    ending: EpisodeEnd | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""
    is_outage: bool = False
    calls: tuple[ServedCall, ...] = ()
    error: Exception | None = None

    @property
    def parts(self) -> tuple[Segment, ...]:
        """Segments of the response; if `segments` is empty, the whole response is one segment."""
        return self.segments or (Segment("assistant", self.token_ids, True, self.sampler_logp),)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(s.num_tokens for s in self.parts if s.author == "policy")


INAPPLICABLE = "the reward does not apply to this response"
"""`Score.error` if a reward in TRL's form returned None. The response is left out like a failed one; it is no bug."""
NO_SCORE: Mapping[Status, str] = {"failed": "the reward failed", "unavailable": "the reward was unavailable"}
ENVIRONMENT_DOWN = "the environment is unavailable"
"""Begin of `Score.error` where a service that the environment needs is down."""
"""Status of a score without a value -> words for messages."""


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a reward on one response.

    Args:
        value: the weighted sum of the parts; advantages are computed from it.
        parts: part -> number; None = the part does not apply to this row, and its weight went to the other parts.
        note: one line for people, such as "no <answer> tag".
        error: the reason if there is no score; such a sample is masked out, it is never scored 0.
        status: "failed" = a bug in the reward; "unavailable" = a service is down, which never counts as a bug.
        detail: reward -> JSON value with the values that it read from the response (a parsed answer, boxes, a judge's
            axes); None = the reward returned no detail.
        artifacts: name -> image that the reward made (a render, an overlay).
        files: sha256 -> image file, for the artifacts; empty after they are stored.
    """

    value: float
    parts: Mapping[str, float | None]
    note: str = ""
    error: str | None = None
    status: Status = field(default="ok", kw_only=True)
    detail: Mapping[str, Any] | None = field(default=None, kw_only=True)
    artifacts: Mapping[str, Media] = field(default_factory=dict, kw_only=True)
    files: Mapping[str, bytes] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.status == "ok" and self.error is not None and self.error != INAPPLICABLE:
            object.__setattr__(self, "status", "failed")

    @property
    def failed(self) -> bool:
        """Return whether the reward failed on this response, which is a bug in the reward."""
        return self.status == "failed"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Result that a reward may return instead of a number or parts.

    Args:
        parts: part -> number, or None where it does not apply.
        note: one line for people.
        detail: JSON value with the values that the reward read from the response; stored with the rollout.
        artifacts: name -> PIL image; stored with the rollout by content, and shown in reports.
    """

    parts: Mapping[str, float | None]
    note: str = ""
    detail: Any = None
    artifacts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardInput:
    """Everything that a reward may read.

    Args:
        response: the text that the model wrote, without special tokens, except those that state positions.
        truth: the row's truth fields.
        columns: every other dataset column.
        images: PIL images (RGB, as stored), in prompt order, then those that tools showed; empty unless the reward asks
            for them (`needs_images`).
        finish: "stop" or "length".
        num_tokens: length of the response in tokens, end token included.
        prompt: the rendered prompt as text.
        token_ids: the response's tokens, end token included; None if they are unknown (a table of texts), or if the
            reward does not ask for them (`needs_token_ids`).
        step: version of the policy that wrote the response, from 0.
        prompt_id: stable name of the row; "" = unknown.
        sample: index of the response within its group.
        media: references to the prompt's images.
        seen_sizes: (width, height) of each image as the model saw it; the model's coordinates refer to this size. () =
            unknown.
        turns: all turns of an episode; () = the response is one turn. `response` has all turns of the assistant.
        measured: numbers that the environment of an episode measured.
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
    prompt_id: str = ""
    sample: int = 0
    media: tuple[Media, ...] = ()
    seen_sizes: tuple[Size, ...] = ()
    turns: tuple[Turn, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def tool_media(self) -> tuple[Media, ...]:
        """References to the images that tools showed in an episode."""
        return tuple(media for turn in self.turns for media in turn.media)

    @property
    def answer(self) -> str:
        """Text of the last turn of the assistant; the whole response if it is one turn."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "assistant"), self.response)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response to one prompt, with all that is needed to train on it and to repeat it.

    Args:
        occurrence: number of times that the prompt was drawn before in this run (0 the first time).
        sample: index of the response within its group.
        version: policy version that sampled it (= training step).
        seed: seed for its sampling: `sample_seed(run seed, step, prompt id, occurrence) + sample`.
        prompt_ids: token ids of the prompt with image tokens expanded.
        segments: the tokens after the prompt; a response of one turn is one trained segment.
        media: images of the prompt; images within the response belong to their segment.
        seen_sizes: (width, height) of each of `media` as the model saw it; () = unknown.
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
    seen_sizes: tuple[Size, ...] = ()

    @property
    def response_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt, by any author."""
        return tuple(i for s in self.segments for i in s.ids)

    @property
    def num_trained_tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments if s.trained)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy wrote: the length of a response, and the unit of an engine's speed."""
        return sum(s.num_tokens for s in self.segments if s.author == "policy")


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """Trajectory with its text, score and advantage.

    Args:
        masked: whether the sample is left out of the training (its reward failed, or it was cut).
        token_advantages: one advantage per trained token if they differ (KL in the reward, gamma < 1); `advantage` is
            then their mean, and rollout files store only the mean. None = all are equal to `advantage`.
        value_targets: target of the critic before each trained token; None without a critic, and for a masked sample.
        turns: the turns of the response as people read them; () = a single turn.
        files: sha256 -> image file, for images within the response; empty after they are stored.
        ending, measured: of an episode, as in `Sample`.
        dependency: for each trained token, how much it depends on the images, in nats; None if it is not measured.
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
    turns: tuple[Turn, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)
    ending: EpisodeEnd | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    dependency: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt in one step.

    Args:
        prompt_text: the rendered prompt, special tokens included.
        samples: the responses of the policy.
        demonstrations: responses of others that are trained on, too; they count in no metric of the policy.
    """

    row: Row
    prompt_text: str
    samples: tuple[ScoredSample, ...]
    demonstrations: tuple[ScoredSample, ...] = ()

    @property
    def everything(self) -> tuple[ScoredSample, ...]:
        """The samples, then the demonstrations: the order of a step's trajectories."""
        return self.samples + self.demonstrations

    @property
    def is_shown(self) -> bool:
        """Return whether a demonstration is trained on."""
        return any(not s.masked for s in self.demonstrations)

    @property
    def is_dead(self) -> bool:
        """Return whether the samples teach nothing: all their advantages are exactly zero."""
        return all(s.advantage == 0.0 and not any(s.token_advantages or ()) for s in self.samples)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(s.trajectory for s in self.samples)


def name_row(source: str, prompt_id: str, sample: int | None = None) -> str:
    """Return a row's name: `row 12 of shapes, sample 0`. The source's is left out if the id begins with it."""
    row = f"row {prompt_id}" if prompt_id.startswith(f"{source}-") else f"row {prompt_id} of {source}"
    return row if sample is None else f"{row}, sample {sample}"


def hash64(*parts: object) -> int:
    """Return a stable 63-bit hash of the parts' text: the same on every machine, Python and run. Range [0, 2**63)."""
    text = "\x1f".join(str(p) for p in parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def sample_seed(run_seed: int, step: int, prompt_id: str, occurrence: int) -> int:
    """Return the seed of sample 0 of a prompt, of 62 bits. Sample k uses this number + k: never more than 63 bits."""
    return hash64(run_seed, step, prompt_id, occurrence) >> 1
