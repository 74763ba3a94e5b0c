"""Providers of a judge: one request of a chat to one answer. They do not try again: the service does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from vlmrl.endpoint.chat import ChatAnswer, ChatRequest
from vlmrl.endpoint.client import EndpointClient, EndpointOptions
from vlmrl.judge.settings import JudgeSettings

MOST_ANSWER_BYTES = 4 * 1024 * 1024


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
                settings.model,
                key_env=settings.key_variable,
                concurrency=settings.concurrency,
                timeout_seconds=settings.timeout_seconds,
                attempts=1,
                most_answer_bytes=MOST_ANSWER_BYTES,
            )
        )

    async def ask(self, chat: ChatRequest) -> ChatAnswer:
        return (await asyncio.wrap_future(self._client.submit(chat)))[0]

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)


def _gemini(settings: JudgeSettings) -> Provider:
    from vlmrl.judge.gemini import GeminiProvider  # loads an SDK that the other providers do not need

    return GeminiProvider(settings)


PROVIDERS: dict[str, Callable[[JudgeSettings], Any]] = {
    "gemini": _gemini,
    "openai": ChatProvider,
    "vllm": ChatProvider,
}
"""Provider of the settings -> function that makes it."""


def open_provider(settings: JudgeSettings) -> Provider:
    """Return the provider of the settings. Raises: EndpointError for an address or a key that cannot be used."""
    return PROVIDERS[settings.provider](settings)
