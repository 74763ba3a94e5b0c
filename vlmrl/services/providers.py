"""Providers of a judge: one chat to one answer, by OpenAI's protocol or by Google's Gemini API.

Providers do not try again: the service does. The SDK of Gemini (google-genai) is loaded when the provider is opened. It
gets an HTTP client of ours: it follows no redirect, limits the size of an answer, and its address and key come from the
settings alone, whatever variables of the environment the SDK would read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import warnings
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Protocol

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.services.client import (
    HIDDEN,
    HTTP_ERRORS,
    EndpointClient,
    EndpointOptions,
    bounded_client,
    failure_of_http,
    no_answer,
    read_key,
)
from vlmrl.services.judge_settings import JudgeSettings
from vlmrl.services.protocol import (
    BrokenAnswer,
    ChatAnswer,
    ChatRequest,
    EndpointError,
    ImageFile,
    failure_of,
    retry_seconds,
    tokens_of,
    what_to_check,
)

MOST_ANSWER_BYTES = 4 * 1024 * 1024
"""Maximum size of an answer."""


class Provider(Protocol):
    """Sender of chats to one model. All calls come from one event loop."""

    async def ask(self, chat: ChatRequest) -> ChatAnswer:
        """Send a chat once. Raises: EndpointError."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight. A second call does nothing."""
        ...


class ChatProvider:
    """Provider of a server that speaks OpenAI's protocol.

    Raises: EndpointError for an address or a key that cannot be used.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self._client = EndpointClient(
            EndpointOptions(
                settings.address,
                settings.name,
                key_env=settings.key_variable,
                concurrency=settings.concurrency,
                timeout_seconds=settings.timeout_seconds,
                attempts=1,
                most_answer_bytes=MOST_ANSWER_BYTES,
            )
        )

    async def ask(self, chat: ChatRequest) -> ChatAnswer:
        """Send a chat once. Raises: EndpointError."""
        return (await asyncio.wrap_future(self._client.submit(chat)))[0]

    async def close(self) -> None:
        """Cancel what is in flight, and end the client's thread."""
        await asyncio.to_thread(self._client.close)


def open_provider(settings: JudgeSettings) -> Provider:
    """Return the provider of the settings. Raises: EndpointError for an address or a key that cannot be used."""
    if settings.provider not in ("vllm", "openai"):
        return GeminiProvider(settings)
    try:
        return ChatProvider(settings)
    except EndpointError as error:
        if settings.provider == "vllm" or settings.endpoint is None or settings.key_env is not None:
            raise
        hint = f'{error.hint}; a server of your own needs no key with provider = "vllm"'
        raise EndpointError(error.message, where=error.where, hint=hint) from None


WITHHELD = frozenset(
    {"SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY", "LANGUAGE", "MODEL_ARMOR"}
)
"""Reasons with which a filter of the API ends or withholds an answer."""
CUT = "MAX_TOKENS"
ELSEWHERE = "the content"
"""Content that the SDK is given: the real one, as JSON, takes its place. The SDK needs a millisecond for each part."""
KEY_REASONS = ("API_KEY_INVALID", "API key not valid", "API key expired", "API_KEY_")
"""Words of an answer with HTTP status 400 that refuses the key."""
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)s")


class GeminiProvider:
    """Provider of one model of the Gemini API.

    Raises: EndpointError for an address or a key that cannot be used; RewardError if the SDK is not installed.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        try:
            from google import genai
            from google.genai import errors, types
        except ImportError as error:
            raise RewardError(
                f"the judge's provider gemini needs the SDK of Google: {error}", hint="pip install google-genai"
            ) from None
        if "httpx_async_client" not in types.HttpOptions.model_fields:
            raise RewardError("the SDK google-genai is too old", hint="pip install --upgrade google-genai")
        self._settings, self._types, self._api_error = settings, types, errors.APIError
        self._config_class = _quick(types.GenerateContentConfig)
        self._address, self._key = settings.address, read_key(settings.key_variable)
        logger = logging.getLogger("google_genai")
        if logger.level == logging.NOTSET:
            # It warns that it takes another key, by the environment; it does not, as the key is given.
            logger.setLevel(logging.ERROR)
        # It prints a value that it does not know, as the endpoint wrote it: control characters, or the key.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"google\.genai")
        self._http = bounded_client(most_bytes=MOST_ANSWER_BYTES, concurrency=settings.concurrency)
        options = types.HttpOptions(base_url=self._address, httpx_async_client=self._http)
        self._client = genai.Client(vertexai=False, api_key=self._key, http_options=options)

    async def ask(self, chat: ChatRequest) -> ChatAnswer:
        """Send a chat once. Raises: EndpointError."""
        seconds = self._settings.timeout_seconds
        try:
            return await asyncio.wait_for(self._call(chat), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise no_answer(seconds, self._address) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, chat: ChatRequest) -> ChatAnswer:
        try:
            reply = await self._client.aio.models.generate_content(
                model=self._settings.name, contents=ELSEWHERE, config=self._config(chat)
            )
            return self._answer(reply)
        except self._api_error as error:
            raise self._failure_of(error) from None
        except HTTP_ERRORS as error:
            raise failure_of_http(error, self._clean, self._address) from None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            # The SDK's own errors about an answer have all of its text: only their kind is told.
            kind = type(error).__name__
            raise BrokenAnswer(f"the endpoint's answer cannot be read: {kind}", where=self._address) from None

    def _config(self, chat: ChatRequest) -> Any:
        fields = self._config_class.model_fields
        # A continuation would be a further call, which nobody has reserved. Older SDKs do not know it.
        more = {"automatic_continuation": False} if "automatic_continuation" in fields else {}
        return self._config_class(
            **more,
            temperature=chat.temperature,
            max_output_tokens=chat.max_tokens,
            candidate_count=1,
            response_mime_type="application/json" if chat.schema is not None else None,
            response_json_schema=dict(chat.schema) if chat.schema is not None else None,
            automatic_function_calling=self._types.AutomaticFunctionCallingConfig(disable=True),
            http_options=self._types.HttpOptions(extra_body=_content_of(chat)),
        )

    def _answer(self, reply: Any) -> ChatAnswer:
        usage = reply.usage_metadata
        counts = [getattr(usage, f"{name}_token_count", None) or 0 for name in ("candidates", "thoughts")]
        output = tokens_of(sum(counts)) if min(counts) >= 0 else None
        prompt = tokens_of(getattr(usage, "prompt_token_count", None))
        if not reply.candidates:
            reason = self._name(getattr(reply.prompt_feedback, "block_reason", None))
            if not reason:
                raise BrokenAnswer("the endpoint's answer cannot be read: it has no candidates", where=self._address)
            return ChatAnswer("", "stop", output, f"the endpoint's filter blocked the prompt ({reason})", prompt)
        candidate = reply.candidates[0]
        parts = (candidate.content.parts if candidate.content else None) or []
        text = "".join(part.text for part in parts if part.text and not part.thought)
        reason = self._name(candidate.finish_reason)
        refusal = f"the endpoint's filter withheld the response ({reason})" if reason in WITHHELD else ""
        return ChatAnswer(self._clean(text), "length" if reason == CUT else "stop", output, refusal, prompt)

    def _failure_of(self, error: Any) -> EndpointError:
        """Return the endpoint's error for one of the SDK about an HTTP status."""
        status, details = int(error.code or 0), error.details
        words = excerpt(self._clean(" ".join(str(error.message or error.status or "no message").split())), 300)
        headers = getattr(error.response, "headers", None) or {}
        if status == 400 and any(reason in str(details)[:10_000] for reason in KEY_REASONS):
            status = 401  # the API refuses a wrong key with 400
        header = retry_seconds(headers.get("retry-after"), datetime.now(timezone.utc))
        return failure_of(
            status,
            words,
            where=self._address,
            hint=what_to_check(self._settings.key_variable, self._settings.name),
            location=self._clean(headers.get("location", "")),
            retry_after=max(header, retry_delay(details)),
        )

    def _name(self, reason: Any) -> str:
        """Return the name of a value of one of the SDK's enumerations; "" for None."""
        return "" if reason is None else excerpt(self._clean(str(getattr(reason, "value", reason))).upper(), 60)

    def _clean(self, text: str) -> str:
        return text.replace(self._key, HIDDEN) if self._key else text


def _quick(config: Any) -> Any:
    """Return a subclass of the SDK's class of a configuration. Its calls take a quarter less time of the processor.

    The SDK looks a hundred times whether `name in config`. Without this method, each look walks through all fields, and
    finds nothing.
    """

    class Config(config):
        def __contains__(self, name: object) -> bool:
            return False

    return Config


def _content_of(chat: ChatRequest) -> dict[str, Any]:
    """Return the turns of a chat as the API's JSON."""
    turns = [{"role": "user", "parts": [_part(p) for p in turn.parts]} for turn in chat.turns if turn.role != "system"]
    system = [_part(part) for turn in chat.turns if turn.role == "system" for part in turn.parts]
    return {"contents": turns} | ({"systemInstruction": {"role": "user", "parts": system}} if system else {})


def _part(item: str | ImageFile) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    return {"inlineData": {"mimeType": item.media_type, "data": b64encode(item.data).decode("ascii")}}


def retry_delay(details: Any) -> float:
    """Return the pause in seconds that the body of an error wishes (its `RetryInfo`); 0 if it wishes none."""
    error = details.get("error", details) if isinstance(details, Mapping) else {}
    infos = error.get("details") if isinstance(error, Mapping) else None
    for info in infos if isinstance(infos, list) else ():
        delay = info.get("retryDelay") if isinstance(info, Mapping) else None
        match = _SECONDS.fullmatch(delay) if isinstance(delay, str) else None
        if match:
            return float(match[1])
    return 0.0
