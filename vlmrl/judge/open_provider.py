"""Choice of the provider that the settings name."""

from __future__ import annotations

from vlmrl.judge.chat_provider import ChatProvider
from vlmrl.judge.provider import Provider
from vlmrl.judge.settings import JudgeSettings


def open_provider(settings: JudgeSettings) -> Provider:
    """Return the provider of the settings. Raises: EndpointError for an address or a key that cannot be used."""
    if settings.provider != "gemini":
        return ChatProvider(settings)
    from vlmrl.judge.gemini import GeminiProvider  # loads an SDK that the other providers do not need

    return GeminiProvider(settings)
