"""Engine of whole episodes: a generator around another one. A request is a group of episodes, an answer whole samples.

A turn of the policy is a request to the inner engine. Its calls go to the episode's environment, what they return
becomes tokens behind the turn, and the next turn begins. An engine that admits requests at any time gets each next turn
as soon as its tool is back, so that no group waits for another. The built-in engine gets the next turns of all episodes
together, in rounds, when no tool is running any more: so its batches, and with them its bits, do not depend on time.
"""

from __future__ import annotations

import io
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from statistics import fmean
from typing import Any, Protocol, get_args

from vlmrl.data.encode import EncodedPrompt
from vlmrl.data.images import image_hash
from vlmrl.data.turns import Shown
from vlmrl.environments.base import CUT_MARK, ends_of
from vlmrl.environments.calls import BadCall, end_of_thought, read_calls, served_calls, served_text
from vlmrl.environments.processes import Answer, Beginning, EnvironmentPool, Stopped
from vlmrl.environments.row_fields import Repeats
from vlmrl.rollout.engine import Generator, SamplingRequest, SyncSpeed
from vlmrl.store.metrics import ended_by
from vlmrl.types import (
    EPISODE_LIMITS,
    Call,
    EpisodeEnd,
    Media,
    Row,
    Sample,
    SamplingParams,
    ScoredSample,
    Segment,
    Turn,
    hash64,
)

HALF = "\ufffd"
"""Character that stands for a part of one, where a text is cut between its tokens."""
POLL_SECONDS = 0.02
"""Longest wait for an engine while tools run, and the other way round."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode.

    Args:
        tokens: tokens behind the prompt, observations included. A turn begins only if a whole one still fits.
        images: number of images behind the prompt.
        observation_tokens: text tokens of one observation; a longer one is cut in the middle.
        seconds: time for which its environment works, in all.
    """

    turns: int
    tokens: int
    images: int
    observation_tokens: int
    seconds: float


class TurnWriter(Protocol):
    """Writer of the prompts of an episode's turns: as tokens (data/turns.py), or as messages (rollout/chat.py)."""

    @property
    def is_open(self) -> bool: ...
    def text_ids(self, text: str) -> Sequence[Any]:
        """Return the tokens of an observation's text, in which control tokens are letters."""
        ...

    def follow(self, prompt: EncodedPrompt, last: Sample | None, shown: Shown) -> tuple[Segment, EncodedPrompt, bool]:
        """Return the segment of an observation, the prompt of the next turn, and whether that begins a thought."""
        ...


@dataclass(frozen=True)
class EpisodeKind:
    """Episodes of a source: their environment, their limits, and what writes the observations of a row's.

    Args:
        repeats: columns of its rows that repeat the truth.
    """

    pool: EnvironmentPool
    limits: EpisodeLimits
    turns: Callable[[Row], TurnWriter]
    repeats: Repeats = field(default_factory=dict)


MOST_OPEN = 256
"""Largest number of episodes that an engine has open. Each has a process and a socket; the others wait for room."""
Key = tuple[int, int]
"""(number of the group's request, sample)."""


@dataclass(eq=False)
class _Episode:
    """State of an episode.

    Args:
        prompt: with all turns so far.
        last: the last turn of the policy.
        ending: set while its environment is asked for its own reward.
        in_thought: the prompt has opened a thought for the turn.
        written: the last turn as its environment got it: text, and the calls that a server has read out of it.
    """

    key: Key
    kind: EpisodeKind
    writer: TurnWriter
    seed: int
    prompt: EncodedPrompt
    params: SamplingParams
    script: Sequence[tuple[int, ...]] = ()
    last: Sample | None = None
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    has_begun: bool = False
    ending: EpisodeEnd | None = None
    fault: str = ""
    is_outage: bool = False
    error: Exception | None = None
    version: int = 0
    in_thought: bool = False
    written: tuple[str, Sequence[tuple[str, str]]] = ("", ())

    @property
    def num_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.segments)


class EpisodeEngine(Generator):
    """Generator of episodes.

    Args:
        inner: the engine of the turns. It closes with this one.
        kinds: source of rows -> its episodes; requests of other sources are passed on as they are.
        tokenizer: of the model, or what stands for it (rollout/chat.py).
    """

    def __init__(self, inner: Generator, kinds: Mapping[str, EpisodeKind], tokenizer: Any) -> None:
        self.inner, self.kinds, self._tokenizer = inner, kinds, tokenizer
        self._pools = list(dict.fromkeys(kind.pool for kind in kinds.values()))
        self._numbers = count()
        self._forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # attributes of one engine alone, such as `settings`

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.version

    @property
    def copies_weights(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.copies_weights

    @property
    def works_alone(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.works_alone

    @property
    def admits(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.admits

    @property
    def max_open(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Twice the inner engine's: the episodes that wait for a tool use none of its places."""
        return None if self.inner.max_open is None else 2 * self.inner.max_open

    @property
    def last_sync(self) -> SyncSpeed | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.last_sync

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        self._progress = progress or (lambda newly: None)
        try:
            with self.inner.round():
                yield
        finally:
            self._stop()

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        number, kind = next(self._numbers), self.kinds.get(request.prompt.row.source)
        if kind is None:
            self._turns[self.inner.submit(request, params)] = number
            return number
        self._groups[number] = [None] * request.num_samples
        self._held.append((number, kind, request, params))
        self._admit()
        return number

    def _admit(self) -> None:
        """Begin the groups that wait, in their order, as long as there is room for their episodes."""
        while self._held:
            if self._episodes and len(self._episodes) + self._held[0][2].num_samples > MOST_OPEN:
                return
            self._open(*self._held.popleft())

    def _open(self, number: int, kind: EpisodeKind, request: SamplingRequest, params: SamplingParams) -> None:
        """Begin the episodes of a group."""
        prompt, row = request.prompt, request.prompt.row
        writer = kind.turns(row)
        episodes = [
            _Episode((number, k), kind, writer, request.seed + k, prompt, params, request.script)
            for k in range(request.num_samples)
        ]
        in_thought = bool(end_of_thought(prompt.text))
        for e in episodes:
            self._episodes[e.key], e.in_thought = e, in_thought
            start = Beginning(
                row.columns, row.truth, prompt.pictures, prompt.seen_sizes, e.seed, prompt.text, kind.repeats
            )
            kind.pool.begin(e.key, start)
        if not writer.is_open:  # the first turn need not wait for what reset shows
            self._ask(episodes)

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        until = None if timeout is None else time.monotonic() + timeout
        complete: list[tuple[int, list[Sample]]] = []
        while not complete and (self._turns or self._episodes or self._held):
            self._hear(0.0 if self._turns else POLL_SECONDS)
            self._go_on()
            if self._turns:
                left = None if until is None else max(0.0, until - time.monotonic())
                if self._tools_run:
                    left = POLL_SECONDS if left is None else min(left, POLL_SECONDS)
                for number, samples in self.inner.poll(left):
                    owner = self._turns.pop(number)
                    if isinstance(owner, int):
                        complete.append((owner, samples))
                        self._progress(len(samples))
                        continue
                    for episode, sample in zip(owner, samples, strict=True):
                        self._take_turn(episode, sample)
            for number in [n for n, samples in self._groups.items() if all(samples)]:
                complete.append((number, [s for s in self._groups.pop(number) if s is not None]))
            if until is not None and time.monotonic() >= until:
                break
        return complete

    def follow(self, requests: Sequence[SamplingRequest], params: SamplingParams) -> list[Sample]:
        """Return the episode of each request in which the policy writes its script. Nothing is generated.

        An episode that has not ended when no turn is left gets an empty one.
        """
        samples: dict[int, list[Sample]] = {}
        self._progress = lambda newly: None
        try:
            ids = [self.submit(request, params) for request in requests]
            while len(samples) < len(ids):
                samples |= dict(self.poll())
        finally:
            self._stop()
        return [samples[number][0] for number in ids]

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self) -> None:
        self.inner.wake()

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        self.inner.load_weights(version, changed=changed)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self.inner.close()

    def _stop(self) -> None:
        """Drop the episodes that are open."""
        for episode in self._episodes.values():
            episode.kind.pool.drop(episode.key)
        self._forget()

    def _forget(self) -> None:
        self._groups: dict[int, list[Sample | None]] = {}
        self._episodes: dict[Key, _Episode] = {}
        self._turns: dict[int, list[_Episode] | int] = {}  # inner request -> its episodes, or the request it passes on
        self._next: list[_Episode] = []  # whose next turn waits to be submitted
        self._held: deque[tuple[int, EpisodeKind, SamplingRequest, SamplingParams]] = deque()  # groups without room

    @property
    def _tools_run(self) -> bool:
        return any(pool.pending for pool in self._pools)

    def _hear(self, seconds: float) -> None:
        """Take what the environments have answered."""
        for pool in self._pools:
            if pool.pending:
                for key, outcome in pool.advance(seconds):
                    if (episode := self._episodes.get(key)) is not None:
                        self._take_answer(episode, outcome)

    def _go_on(self) -> None:
        """Submit the next turns: at once, or when all turns and tools of the round are complete. Begin more groups."""
        if not self.inner.admits and (self._turns or self._tools_run):
            return
        for _, group in groupby(sorted(self._next, key=lambda e: e.key), key=lambda e: (e.key[0], e.num_turns)):
            self._ask(list(group))
        self._next = []
        self._admit()

    def _ask(self, episodes: Sequence[_Episode]) -> None:
        """Submit turns of the same number of a group: one request for the first turns of all, if they begin alike."""
        if (e := episodes[0]).script:
            ids = (*e.script, ())[e.num_turns]
            finish = "stop" if 0 < len(ids) <= e.params.max_new_tokens else "length"
            self._take_turn(e, Sample(ids, "", (math.nan,) * len(ids), finish, self.version, e.seed))
            return
        whole = len(episodes) == len(self._groups[e.key[0]])
        alike = whole and not e.num_turns and all(one.segments == e.segments for one in episodes)
        for batch in [list(episodes)] if alike and not self.inner.admits else [[one] for one in episodes]:
            first = batch[0]
            seed = hash64(first.seed, first.num_turns) >> 1 if first.num_turns else first.seed
            request = SamplingRequest(first.prompt, len(batch), seed)
            self._turns[self.inner.submit(request, first.params)] = batch

    def _take_turn(self, e: _Episode, sample: Sample) -> None:
        """Add a turn of the policy, and give it to the environment."""
        if e.key not in self._episodes:  # its environment failed meanwhile
            return
        e.version, e.last, e.error = sample.version, sample, sample.error
        served = [] if sample.error else [(call.name, call.arguments) for call in sample.calls]
        e.segments += [replace(part, version=sample.version) for part in sample.parts]
        e.turns.append(Turn("assistant", served_text(sample.text, served, e.kind.pool.form) if served else sample.text))
        if e.fault:  # it failed before its first turn was there
            self._complete(e, "environment")
            return
        if sample.finish == "length":
            self._end(e, "turn cut")
            return
        text = "" if sample.error else sample.text
        if sample.token_ids:
            ids = [i for i in sample.token_ids if i not in e.params.stop_ids]
            # Some families write calls with special tokens, which the text for people lacks.
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
        seen = [size for segment in e.segments for size in segment.seen_sizes]
        e.written, pool = (text, served), e.kind.pool
        pool.turn(e.key, text, in_thought=e.in_thought, seen_sizes=seen, served=served)

    def _take_answer(self, e: _Episode, answer: Answer | Stopped) -> None:
        """Take the answer of an episode's environment: to its reset, to a turn, or to its end."""
        if isinstance(answer, Stopped):
            if answer.over_time and e.has_begun and e.num_turns and e.ending is None:
                e.turns[-1] = replace(e.turns[-1], calls=_calls_of(e))
                self._end(e, "time limit", is_gone=True)
            else:
                e.is_outage = answer.is_outage
                self._fail(e, answer.why)
            return
        e.seconds += answer.seconds
        e.measured |= answer.measured
        if not e.has_begun:
            self._begin(e, answer)
        elif e.ending is not None:  # this was its last answer
            self._complete(e, e.ending)
        else:
            self._observe(e, answer)

    def _observe(self, e: _Episode, answer: Answer) -> None:
        """Put what the tools returned behind the turn, or end the episode."""
        last = e.turns[-1]
        calls = tuple(Call(str(c["name"]), dict(c["arguments"])) for c in answer.calls)
        e.turns[-1] = Turn(last.role, last.text, last.media, calls)
        if answer.done is not None:
            self._end(e, answer.done)
        elif e.num_turns >= e.kind.limits.turns:
            self._end(e, "turn limit")
        elif limit := self._show(e, answer):
            self._end(e, limit)

    def _begin(self, e: _Episode, answer: Answer) -> None:
        """Go on with an open prompt by what reset shows, which may be nothing."""
        e.has_begun = True
        if not e.writer.is_open:
            if answer.parts:
                self._fail(e, "reset is annotated to return None, and it returned something to show")
        elif limit := self._show(e, answer):
            self._fail(e, f"what reset shows is beyond a limit of [environment] ({limit})")
            self._next.append(e)

    def _show(self, e: _Episode, answer: Answer) -> EpisodeEnd | None:
        """Put what an environment shows behind all that was before, for the next turn; or return the limit it meets."""
        limits, is_first = e.kind.limits, not e.num_turns
        images = [_picture(part) for part in answer.parts if isinstance(part, bytes)]
        files = [part for part in answer.parts if isinstance(part, bytes)]
        media = tuple(Media(image_hash(f), *i.size) for f, i in zip(files, images, strict=True))
        held = sum(len(s.media) for s in e.segments)
        if held + len(images) > limits.images:
            return "image limit"
        if e.seconds > limits.seconds:
            return "time limit"
        pictures = iter(images)
        content = [part if isinstance(part, str) else next(pictures) for part in self._cut(answer.parts, e)]
        shown = Shown(content, media, files, answer.spans, f"an episode of {e.prompt.row.prompt_id}")
        segment, prompt, in_thought = e.writer.follow(e.prompt, e.last, shown)
        if e.num_tokens + segment.num_tokens + e.params.max_new_tokens > limits.tokens:
            e.turns[-1:] = [replace(turn, unfit=segment.num_tokens) for turn in e.turns[-1:]]
            return "token limit"
        e.files |= {m.sha256: file for m, file in zip(media, files, strict=True)}
        text = "".join(part for part in content if isinstance(part, str))
        if answer.parts or not is_first:
            turn = Turn(segment.role, text, media, (), answer.errors, answer.seconds, segment.seen_sizes)
            e.turns.append(turn)
        e.segments.append(segment)
        e.prompt, e.in_thought = prompt, in_thought
        self._next.append(e)
        return None

    def _cut(self, parts: Sequence[str | bytes], e: _Episode) -> Iterator[str | bytes]:
        """Yield the parts of an observation, each text with at most its share of the tokens."""
        texts = [part for part in parts if isinstance(part, str)]
        most = e.kind.limits.observation_tokens // max(1, len(texts))
        for part in parts:
            # A token has a byte or more, a character at most four.
            if isinstance(part, str) and 4 * len(part) > most and len(ids := e.writer.text_ids(part)) > most:
                head, tail = map(self._tokenizer.decode, ends_of(ids, most))
                part = head.rstrip(HALF) + CUT_MARK + tail.lstrip(HALF)
            yield part

    def _end(self, e: _Episode, ending: EpisodeEnd, *, is_gone: bool = False) -> None:
        """End an episode; its environment is asked for its own reward, if it has one."""
        if e.kind.pool.own_reward and not is_gone:
            e.ending = ending
            e.kind.pool.finish(e.key)
        else:
            self._complete(e, ending)

    def _fail(self, e: _Episode, why: str) -> None:
        """End an episode without a score: now, or when its first turn is there, as a sample has tokens."""
        e.fault = why
        if e.num_turns:
            self._complete(e, "environment")
        elif e.writer.is_open and not e.has_begun:
            self._next.append(e)

    def _complete(self, e: _Episode, ending: EpisodeEnd) -> None:
        e.kind.pool.drop(e.key)
        del self._episodes[e.key]
        if e in self._next:
            self._next.remove(e)
        number, k = e.key
        self._groups[number][k] = Sample(
            tuple(i for s in e.segments for i in s.ids),
            "\n".join(turn.text for turn in e.turns if turn.role == "assistant"),
            tuple(x for s in e.segments for x in s.sampler_logp or (math.nan,) * len(s.ids)),
            "length" if ending in EPISODE_LIMITS else "stop",
            e.version if e.segments else self.inner.version,
            e.seed,
            tuple(e.segments),
            tuple(e.turns),
            e.files,
            ending,
            e.measured,
            e.fault,
            e.is_outage,
            error=e.error,
        )
        self._progress(1)


def episode_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """Return the metrics of the episodes among samples, per episode; {} without one.

    They are the means of turns, calls, images, seconds of tools and measured numbers, the share of calls that failed,
    and the shares of the endings.
    """
    return metrics_of_episodes([x for x in samples if x.ending is not None])


def metrics_of_episodes(episodes: Sequence[Any]) -> dict[str, float]:
    """Return the metrics of what has the turns, ending and measured numbers of episodes; see `episode_metrics`."""
    if not episodes:
        return {}
    num_calls = sum(len(turn.calls) for x in episodes for turn in x.turns)
    failed = sum(turn.errors for x in episodes for turn in x.turns)
    metrics = {
        "episode/turns": fmean(sum(turn.role == "assistant" for turn in x.turns) for x in episodes),
        "episode/calls": num_calls / len(episodes),
        "episode/images": fmean(sum(len(turn.media) for turn in x.turns) for x in episodes),
        "time/tool_seconds": fmean(sum(turn.seconds for turn in x.turns) for x in episodes),
    }
    if num_calls:
        metrics["episode/tool_errors"] = failed / num_calls
    for ending in get_args(EpisodeEnd):
        if share := fmean(x.ending == ending for x in episodes):
            metrics[ended_by(ending)] = share
    for name in sorted({name for x in episodes for name in x.measured}):
        metrics[f"episode/measured/{name}"] = fmean(x.measured[name] for x in episodes if name in x.measured)
    return metrics


def _calls_of(e: _Episode) -> tuple[Call, ...]:
    """Return the calls of the last turn, which its environment cannot tell any more."""
    (text, served), pool = e.written, e.kind.pool
    most = pool.limits.calls
    calls = served_calls(served, most) if served else read_calls(text, pool.form, most, in_thought=e.in_thought)
    return tuple(Call("", {"text": call.text}) if isinstance(call, BadCall) else call for call in calls)


def _picture(file: bytes) -> Any:
    """Return a PNG file that an environment sent as PIL RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(file), formats=["PNG"]) as image:
        return image.convert("RGB")
