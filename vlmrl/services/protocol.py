"""OpenAI's chat completions: the body of a request, the answer, HTTP statuses, and errors of endpoints and judges.

Each kind of error says who can repair it, and whether to try again. None of a judge's errors is a score: a request
without a judgement is left out, or asked again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from vlmrl.errors import RewardError, RewardUnavailable, VlmrlError
from vlmrl.redaction.redact import excerpt
from vlmrl.types import Finish, ServedCall
from vlmrl.untrusted import parse_json

TOO_MANY = 429


class EndpointError(VlmrlError):
    """Request to an endpoint that gave no answer."""

    status: int = 0
    """HTTP status of the answer; 0 = there was none, or it is not the reason."""
    retry_after: float = 0.0
    """Pause in seconds that the endpoint wishes before the next request; 0 = it says nothing."""
    may_be_charged: bool = False
    """true = the endpoint may have worked on the request: it was sent, and no error status came back."""

    @property
    def is_busy(self) -> bool:
        """Return whether the endpoint works and has too much to do at the moment."""
        return self.status == TOO_MANY


class EndpointDown(EndpointError):
    """Outage: the endpoint does not answer, is overloaded or fails, after all attempts. It is nobody's mistake."""


class EndpointRejects(EndpointError):
    """Rejection that every request would meet: a wrong key, model or address."""


class RequestRefused(EndpointError):
    """Refusal of one request: the endpoint works, but does not answer this prompt."""


class Withheld(RequestRefused):
    """Refusal of a filter that has read the response: the endpoint did answer."""


class BrokenAnswer(EndpointError):
    """Answer that is not whole or cannot be read, in all attempts. A response at its token limit is not broken."""

    may_be_charged = True


CUT_BY_LIMIT = ("length", "max_tokens")
"""Values of `finish_reason` for a response that ended at the token limit."""
FILTERED = "content_filter"
MOST_TOKENS_NAMES = ("max_tokens", "max_completion_tokens")
"""Names of the token limit: of most servers, and of OpenAI's newer models."""
SCHEMA_NAME = "answer"
"""Name of the schema of a response: the protocol wants one, and models may see it."""


@dataclass(frozen=True)
class ImageFile:
    """Image of a chat turn: the bytes of its file, and its media type such as `image/png`."""

    data: bytes
    media_type: str

    @property
    def uri(self) -> str:
        """Data URI of the image."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"


@dataclass(frozen=True)
class ChatTurn:
    """One turn of a chat: texts and images in order.

    Args:
        calls: calls of tools in a turn of the assistant.
        answers: id of the call that a turn of a tool answers.
    """

    role: str
    parts: tuple[str | ImageFile, ...]
    calls: tuple[ServedCall, ...] = ()
    answers: str = ""

    def message(self) -> dict[str, Any]:
        """Return the turn as JSON."""
        message: dict[str, Any] = {"role": self.role, "content": self.content()}
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        return message | ({"tool_call_id": self.answers} if self.answers else {})

    def content(self) -> str | list[dict[str, Any]]:
        """Return the turn's content as JSON: plain text if it has no image, as every server reads that."""
        texts = [part for part in self.parts if isinstance(part, str)]
        if len(texts) == len(self.parts):
            return "".join(texts)
        forms = (
            {"type": "image_url", "image_url": {"url": p.uri}} if isinstance(p, ImageFile) else p for p in self.parts
        )
        return [{"type": "text", "text": form} if isinstance(form, str) else form for form in forms]


@dataclass(frozen=True)
class ChatRequest:
    """Request for responses to one chat.

    Args:
        temperature: 0 = greedy, as far as the server supports it.
        top_p: in (0, 1]; 1 = off, and not sent.
        top_k: 0 = off, and not sent; OpenAI's own models do not know it.
        seed: seed of response 0, below 2**31; response k has `seed` + k where each has a request of its own. None = not
            sent.
        schema: JSON schema that a response must follow, for servers that can enforce one; None = any text.
        tools: schemas of the tools that the model may call; () = none, and not sent.
    """

    turns: tuple[ChatTurn, ...]
    max_tokens: int
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    schema: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()

    def body(self, model: str, *, count: int, first: int, limit_name: str) -> bytes:
        """Return the JSON body of a request for `count` of the responses, from number `first`."""
        fields: dict[str, Any] = {
            "model": model,
            "messages": [turn.message() for turn in self.turns],
            limit_name: self.max_tokens,
            "temperature": self.temperature,
        }
        fields |= {"tools": list(self.tools)} if self.tools else {}
        fields |= {"n": count} if count > 1 else {}
        fields |= {"top_p": self.top_p} if self.top_p < 1 else {}
        fields |= {"top_k": self.top_k} if self.top_k else {}
        fields |= {"seed": self.seed + first} if self.seed is not None else {}
        if self.schema is not None:
            form = {"name": SCHEMA_NAME, "strict": True, "schema": dict(self.schema)}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        return json.dumps(fields).encode("ascii")


@dataclass(frozen=True)
class ChatAnswer:
    """One response of an endpoint.

    Args:
        finish: "length" = cut by the token limit.
        num_tokens: tokens of the response as the endpoint counts them; None = it does not say.
        refusal: why a filter of the endpoint withheld the response, or ""; `text` is then what it let through.
        prompt_tokens: tokens of the prompt as the endpoint counts them, images included; None = it does not say.
        calls: calls of tools that the endpoint has read out of the text.
    """

    text: str
    finish: Finish
    num_tokens: int | None = None
    refusal: str = ""
    prompt_tokens: int | None = None
    calls: tuple[ServedCall, ...] = ()


def read_answers(body: bytes) -> list[ChatAnswer]:
    """Return the responses in the body of an answer. Raises: BrokenAnswer when it is not one of chat completions."""
    try:
        value = parse_json(body)
        choices = value["choices"]
        if not isinstance(choices, list) or not choices:
            raise ValueError("it has no choices")
        usage = (value.get("usage") or {}) if len(choices) == 1 else {}
        tokens, prompt_tokens = (tokens_of(usage.get(name)) for name in ("completion_tokens", "prompt_tokens"))
        return [_answer(choice, tokens, prompt_tokens) for choice in choices]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise BrokenAnswer(f"the endpoint's answer cannot be read: {reason}") from error


def _answer(choice: Mapping[str, Any], tokens: int | None, prompt_tokens: int | None) -> ChatAnswer:
    message, reason = choice["message"], choice.get("finish_reason")
    content, refusal = message.get("content"), message.get("refusal")
    if isinstance(content, list):  # some servers split the text into parts
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    if content is None:
        content = refusal or ""
    if not isinstance(content, str):
        raise ValueError(f"the content is a {type(content).__name__}")
    # Some servers split the thought off. Rewards expect the response as the model wrote it.
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and "<think>" not in content:
        content = f"<think>{thought}</think>{content}"
    withheld = "the endpoint's content filter withheld the response" if reason == FILTERED else ""
    finish: Finish = "length" if reason in CUT_BY_LIMIT else "stop"
    return ChatAnswer(content, finish, tokens, withheld, prompt_tokens, tuple(_calls(message)))


def _calls(message: Mapping[str, Any]) -> Iterator[ServedCall]:
    """Yield the calls of tools in a message; one without an id gets one. Raises: as `read_answers` catches."""
    for number, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        # Some servers send the arguments as an object.
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        yield ServedCall(str(call.get("id") or f"call_{number}"), str(name), text)


def tokens_of(count: object) -> int | None:
    """Return a number of tokens in an answer; None for what can be none. A budget must not believe every number."""
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 < count < 2**31 else None


def error_words(body: bytes, clean: Callable[[str], str]) -> str:
    """Return the error message in the body of an answer: of its JSON, else its first characters.

    Args:
        clean: hides the key. It gets the whole message: of a key that was cut, the rest would not be recognised.
    """
    try:
        value = parse_json(body)
        error = value.get("error", value)
        text = error.get("message") if isinstance(error, dict) else error
        text = text or value.get("message") or value.get("detail")
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    return excerpt(clean(" ".join(str(text or "no message").split())), 300)


TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP statuses after which the same request may succeed: overload, and failures of a server or a gateway."""
REJECTS_ALL = frozenset({401, 402, 403, 404, 405, 407})
"""HTTP statuses that every request would get: key, payment, permission, address or model."""
MOST_PLACE_CHARS = 300


def failure_of(
    status: int, words: str, *, where: str, hint: str, location: str = "", retry_after: float = 0.0
) -> EndpointError:
    """Return the error for an answer whose HTTP status is not a success.

    Args:
        words: the endpoint's message, without the key.
        where: address of the endpoint.
        hint: what to check if every request would get this status.
        location: address to which it redirects.
        retry_after: pause in seconds that the answer wishes.
    """
    words = f"HTTP {status}: {words}"
    if status in TRY_AGAIN or status >= 500:
        failure: EndpointError = EndpointDown(f"the endpoint fails: {words}", where=where)
        failure.retry_after = retry_after
    elif 300 <= status < 400:
        place = excerpt(location, MOST_PLACE_CHARS) or "nowhere"
        failure = EndpointRejects(
            f"the endpoint redirects to {place}, which is not followed: it would get the key and the data",
            where=where,
            hint="give the final address, if you trust it",
        )
    elif status in REJECTS_ALL:
        failure = EndpointRejects(f"the endpoint rejects the request: {words}", where=where, hint=hint)
    else:
        failure = RequestRefused(f"the endpoint refuses this request: {words}", where=where)
    failure.status = status
    return failure


def what_to_check(key_env: str | None, model: str) -> str:
    """Return the hint for a rejection. `key_env`: the environment variable of the key; None = no key was sent."""
    key = f"the key in ${key_env}" if key_env else "whether it needs a key"
    return f"check {key}, the model's name `{model}` and the address"


def retry_seconds(header: str | None, now: datetime) -> float:
    """Return the pause that a Retry-After header wishes, in seconds; 0 if there is none or it cannot be read."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = parsedate_to_datetime(header)
        except (ValueError, TypeError, IndexError, OverflowError):
            return 0.0
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        seconds = (moment - now).total_seconds()
    return seconds if 0 < seconds < 1e9 else 0.0


class InvalidJudgement(VlmrlError):
    """Answer of a judge that is not exactly one judgement of the rubric's schema."""


class JudgeDown(RewardUnavailable):
    """Outage: the judge does not answer, is overloaded or fails. The same request may get a judgement later."""


class NoJudgement(RewardUnavailable):
    """Request that gets no judgement although the judge works: it refuses the request, or its answers are invalid.

    Asking again is no use.
    """

    is_final = True


class NotInCache(RewardUnavailable):
    """Request that a judge without a network cannot answer, because its judgement is not in the cache."""

    is_final = True


class BudgetSpent(RewardUnavailable):
    """End of the budget: the next call could exceed `max_calls` or `max_cost`, so it was not sent."""

    is_final = True
    ends_run = True


class JudgeRejected(RewardError):
    """Mistake in the settings that every request meets: a wrong key, model or address, or a model without schemas."""
