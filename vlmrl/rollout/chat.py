"""Engine of a model behind an endpoint: prompts are messages, samples are texts and calls without tokens.

`EpisodeEngine` around it runs episodes as for a local model. The model's tokenizer is not here: `FourCharacters` stands
for it, and what tools return is counted by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from vlmrl.data.encode import EncodedPrompt
from vlmrl.data.turns import Shown
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.services.client import EndpointClient
from vlmrl.services.protocol import ChatAnswer, ChatRequest, ChatTurn, ImageFile, Withheld
from vlmrl.types import Finish, Sample, SamplingParams, Segment, ServedCall

MOST_SEED = 2**31
"""Seeds that are sent are below this number: not every server takes larger ones."""
TOKEN_CHARS, TOKEN_PIXELS = 4, 28 * 28
"""Characters and pixels of what tools show that count as a token."""


@dataclass(frozen=True)
class ChatPrompt(EncodedPrompt):
    """Prompt for an endpoint. `chat`: its turns; `tools`: schemas of the tools that the model may call."""

    chat: tuple[ChatTurn, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()


class FourCharacters:
    """Stand-in for the tokenizer of a model that is not here: four characters are a token."""

    def decode(self, ids: Sequence[str]) -> str:
        """Return the text of tokens."""
        return "".join(ids)


@dataclass(frozen=True)
class ChatWriter:
    """Writer of observations as messages. `is_open`: the first one goes on with the prompt's last message."""

    is_open: bool

    def text_ids(self, text: str) -> list[str]:
        """Return what stands for the tokens of a text."""
        return [text[i : i + TOKEN_CHARS] for i in range(0, len(text), TOKEN_CHARS)]

    def follow(self, prompt: EncodedPrompt, last: Sample | None, shown: Shown) -> tuple[Segment, EncodedPrompt, bool]:
        """Return the segment of an observation, whose length is estimated, and the prompt of the next turn."""
        assert isinstance(prompt, ChatPrompt)
        files = iter(shown.files)
        parts = tuple(p if isinstance(p, str) else ImageFile(next(files), "image/png") for p in shown.parts)
        if last is None:
            chat = (*prompt.chat[:-1], replace(prompt.chat[-1], parts=prompt.chat[-1].parts + parts))
        else:
            said = ChatTurn("assistant", (last.text,), last.calls)
            chat = (*prompt.chat, said, *_answers(last.calls, parts, shown.spans))
        sizes = tuple((m.width, m.height) for m in shown.media)
        letters = sum(len(part) for part in parts if isinstance(part, str))
        tokens = -(-letters // TOKEN_CHARS) + sum(-(-width * height // TOKEN_PIXELS) for width, height in sizes)
        how: dict[str, Any] = {"author": "environment", "media": shown.media, "seen_sizes": sizes, "unlisted": tokens}
        return Segment("user" if last is None else "tool", (), False, **how), replace(prompt, chat=chat), False


def _answers(
    calls: Sequence[ServedCall], parts: Sequence[str | ImageFile], spans: Sequence[Sequence[int]]
) -> Iterator[ChatTurn]:
    """Yield what tools returned as turns: a turn for each call, then one of the user with all pictures.

    The protocol knows no pictures in the turn of a tool: a mark stands in their places. For calls that were written as
    text, there is one turn of the user.
    """
    if not calls:
        yield ChatTurn("user", tuple(parts))
    pictures: list[str | ImageFile] = []
    for number, call in enumerate(calls):
        begin, end = spans[min(number, len(spans) - 1)]  # calls beyond the limit share the last answer, an error
        texts: list[str] = []
        for part in parts[begin:end]:
            texts.append(part if isinstance(part, str) else f"[image {len(pictures) // 2 + 1} of {call.id}]")
            pictures += [] if isinstance(part, str) else [texts[-1], part]
        yield ChatTurn("tool", ("".join(texts),), answers=call.id)
    if pictures:
        yield ChatTurn("user", tuple(pictures))


class ChatEngine(Generator):
    """Engine of an endpoint. A request of it is for one sample. A sample with an `error` is for the caller to judge."""

    version, copies_weights, works_alone, admits = 0, False, True, True

    def __init__(self, client: EndpointClient) -> None:
        self._client, self._numbers = client, count()
        self._open: dict[Future[list[ChatAnswer]], tuple[int, int, tuple[str, ...]]] = {}

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        """Context manager: requests that are left at its end are cancelled."""
        try:
            yield
        finally:
            for future in self._open:
                future.cancel()
            self._open.clear()

    def close(self) -> None:
        """Do nothing: the client belongs to the caller, and the weights are elsewhere."""

    sleep = wake = close

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        """Do nothing."""

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        assert isinstance(request.prompt, ChatPrompt) and request.num_samples == 1
        chat = ChatRequest(
            request.prompt.chat,
            params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=request.seed % MOST_SEED if params.temperature else None,
            tools=request.prompt.tools,
        )
        number = next(self._numbers)
        self._open[self._client.submit(chat)] = number, request.seed, params.stop
        return number

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        complete = []
        for future in wait(self._open, timeout, FIRST_COMPLETED).done:
            number, seed, stops = self._open.pop(future)
            error = future.exception()
            answer = ChatAnswer("", "stop") if error else future.result()[0]
            text, finish = _ended(answer.text, answer.finish, stops)
            sample = Sample(
                (),
                text,
                (),
                finish,
                self.version,
                seed,
                (Segment("assistant", (), False, unlisted=answer.num_tokens or 0),),
                calls=answer.calls if text == answer.text else (),
                error=Withheld(answer.refusal) if answer.refusal else error,  # pyright: ignore[reportArgumentType]
            )
            complete.append((number, [sample]))
        return complete


def _ended(text: str, finish: Finish, stops: Sequence[str]) -> tuple[str, Finish]:
    """Return (text up to the end of the first stop string, reason of its end); without a stop string both as given.

    A stop string has priority over the token limit, as with an engine. Only an engine's last token can hold more text.
    """
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(ends)], "stop") if ends else (text, finish)
