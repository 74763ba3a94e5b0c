"""Provider for servers that speak OpenAI's protocol: OpenAI's own, and vLLM."""

from __future__ import annotations

import asyncio

from vlmrl.endpoint.chat import ChatAnswer, ChatRequest
from vlmrl.endpoint.client import EndpointClient, EndpointOptions
from vlmrl.judge.provider import MOST_ANSWER_BYTES
from vlmrl.judge.settings import JudgeSettings


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
