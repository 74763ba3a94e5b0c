"""A judge of one's own for tests: on loopback, in the protocols of OpenAI and of Gemini, with scripted answers."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, urlsafe_b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from endpoint_server import Endpoint, Reply, failure, serve_endpoint

from vlmrl.services.judge_prompt import JudgeRequest, tiny_png
from vlmrl.services.judge_settings import JudgeSettings

PATHS = r"/chat/completions$|:generateContent$"
AXES = ("presence", "layout", "connectivity", "details")
PROVIDERS = ("openai", "gemini")
KEY = "AQ.secret-of-the-judge-4711"


@dataclass(frozen=True)
class Asked:
    """A request to the judge, whatever its protocol.

    Args:
        parts: texts and pictures of the user's turn, in order.
    """

    protocol: str
    model_body: dict[str, Any]
    system: str
    parts: tuple[str | bytes, ...]

    @property
    def pictures(self) -> list[bytes]:
        return [part for part in self.parts if isinstance(part, bytes)]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


Script = Callable[[int, Asked], "str | Reply"]
"""(number of the request from 0, the request) -> the text of the answer, or a whole reply."""


def asked_of(body: dict[str, Any]) -> Asked:
    """Read a request of either protocol."""
    if "contents" in body:
        system = "".join(part["text"] for part in body["systemInstruction"]["parts"])
        parts = [p["text"] if "text" in p else _bytes(p["inlineData"]["data"]) for p in body["contents"][-1]["parts"]]
        return Asked("gemini", body, system, tuple(parts))
    turns = body["messages"]
    content = turns[-1]["content"]  # a plain text where there is no picture
    parts = [
        p["text"] if p["type"] == "text" else b64decode(p["image_url"]["url"].partition("base64,")[2])
        for p in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
    return Asked("openai", body, turns[0]["content"], tuple(parts))


def _bytes(text: str) -> bytes:
    return urlsafe_b64decode(text.replace("+", "-").replace("/", "_"))


def judgement_text(number: float | str = 0.5, reason: str = "as drawn", **others: Any) -> str:
    """Return a judgement with this number on each axis; a text is put in as it is, such as `NaN`."""
    fields = dict.fromkeys(AXES, "@@") | others
    text = json.dumps({"reason": reason, **fields})
    return text.replace('"@@"', str(number))


def score_of(candidate: bytes) -> float:
    """The number that the honest judge gives a picture: it depends on its bytes alone."""
    return int(hashlib.sha256(candidate).hexdigest()[:4], 16) % 1001 / 1000


def honest(number: int, asked: Asked) -> str:
    """A judge that scores each candidate by its bytes."""
    return judgement_text(score_of(asked.pictures[1]))


def say(protocol: str, text: str, *, finish: str = "stop", tokens: tuple[int, int] | None = (900, 40)) -> Reply:
    """Return the whole answer with this text, in a protocol."""
    if protocol == "openai":
        usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        return Reply(body=json.dumps({"choices": [choice], **usage}).encode())
    ends = {"stop": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": ends[finish], "index": 0}
    names = ("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount")
    usage = {}
    if tokens is not None:
        usage = {"usageMetadata": dict(zip(names, (tokens[0], tokens[1] - 10, 10), strict=True))}
    body = json.dumps({"candidates": [candidate], **usage}).encode()
    return Reply(body=body, headers={"content-type": "application/json"})


def refuse(protocol: str, status: int, message: str = "no", **headers: str) -> Reply:
    """Return an answer with an error status, as the protocol has it."""
    if protocol == "openai":
        return failure(status, message, **headers)
    named = {name.replace("_", "-"): value for name, value in headers.items()} | {"content-type": "application/json"}
    error = {"error": {"code": status, "message": message, "status": "FAILED"}}
    return Reply(status, json.dumps(error).encode(), named)


@contextmanager
def serve_judge(script: Script = honest, *, port: int = 0) -> Iterator[Endpoint]:
    """Serve a judge of both protocols on loopback. `port`: 0 = any that is free."""

    def behaviour(number: int, body: dict[str, Any]) -> Reply:
        asked = asked_of(body)
        answer = script(number, asked)
        return say(asked.protocol, answer) if isinstance(answer, str) else answer

    with serve_endpoint(behaviour, path=PATHS, port=port) as endpoint:
        yield endpoint


def address_of(endpoint: Endpoint, provider: str) -> str:
    """Return the address for the settings: Gemini's SDK adds the version itself."""
    return endpoint.address.removesuffix("/v1") if provider == "gemini" else endpoint.address


def settings_for(endpoint: Endpoint | str, provider: str = "vllm", **more: Any) -> JudgeSettings:
    """Return settings for a served judge; the key is expected in JUDGE_KEY unless the provider is vllm."""
    address = endpoint if isinstance(endpoint, str) else address_of(endpoint, provider)
    key = {} if provider == "vllm" else {"key_env": "JUDGE_KEY"}
    values = {"provider": provider, "model": "judge-1", "endpoint": address, "cache": False, **key, **more}
    return JudgeSettings.model_validate(values)


def picture(number: int) -> bytes:
    """Return a small PNG file that no other number has (a text chunk makes it so)."""
    return tiny_png(8) + f"number {number}".encode()


def pair(number: int, reference: int = 0) -> JudgeRequest:
    return JudgeRequest(picture(-1 - reference), picture(number))
