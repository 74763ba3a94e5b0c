"""Form of a judge's provider: one chat to one answer. Providers do not try again: the service does."""

from __future__ import annotations

from typing import Protocol

from vlmrl.endpoint.chat import ChatAnswer, ChatRequest

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
