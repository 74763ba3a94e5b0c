"""Requests and answers of OpenAI's chat completions: the JSON body of a request, and how an answer is read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmrl.endpoint.failures import BrokenAnswer
from vlmrl.redaction.redact import excerpt
from vlmrl.types import Finish
from vlmrl.untrusted import parse_json

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
    """One turn of a chat: texts and images in order."""

    role: str
    parts: tuple[str | ImageFile, ...]

    def content(self) -> str | list[dict[str, Any]]:
        """Return the turn's content as JSON: plain text if it has no image, as every server reads that."""
        texts = [part for part in self.parts if isinstance(part, str)]
        if len(texts) == len(self.parts):
            return "".join(texts)
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": part.uri}}
            for part in self.parts
        ]


@dataclass(frozen=True)
class ChatRequest:
    """Request for responses to one chat.

    Args:
        max_tokens: token limit of a response.
        samples: number of responses.
        temperature: 0 = greedy, as far as the server supports it.
        top_p: in (0, 1]; 1 = off, and not sent.
        top_k: 0 = off, and not sent; OpenAI's own models do not know it.
        seed: seed of response 0, below 2**31; response k has `seed` + k where each has a request of its own. None = not
            sent.
        schema: JSON schema that a response must follow, for servers that can enforce one; None = any text.
    """

    turns: tuple[ChatTurn, ...]
    max_tokens: int
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    schema: Mapping[str, Any] | None = None

    def body(self, model: str, *, count: int, first: int, limit_name: str) -> bytes:
        """Return the JSON body of a request for `count` of the responses, from number `first`."""
        fields: dict[str, Any] = {
            "model": model,
            "messages": [{"role": turn.role, "content": turn.content()} for turn in self.turns],
            limit_name: self.max_tokens,
            "temperature": self.temperature,
        }
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
    """

    text: str
    finish: Finish
    num_tokens: int | None = None
    refusal: str = ""
    prompt_tokens: int | None = None


def read_answers(body: bytes) -> list[ChatAnswer]:
    """Return the responses in the body of an answer. Raises: BrokenAnswer when it is not one of chat completions."""
    try:
        value = parse_json(body)
        choices = value["choices"]
        if not isinstance(choices, list) or not choices:
            raise ValueError("it has no choices")
        names = ("completion_tokens", "prompt_tokens")
        tokens, prompt_tokens = (_tokens(value, name) if len(choices) == 1 else None for name in names)
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
    return ChatAnswer(content, "length" if reason in CUT_BY_LIMIT else "stop", tokens, withheld, prompt_tokens)


def _tokens(value: Mapping[str, Any], name: str) -> int | None:
    return tokens_of((value.get("usage") or {}).get(name))


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
