"""Choice of the provider that the settings name."""

from __future__ import annotations

from vlmrl.endpoint.failures import EndpointError
from vlmrl.judge.chat_provider import ChatProvider
from vlmrl.judge.provider import Provider
from vlmrl.judge.settings import JudgeSettings


def open_provider(settings: JudgeSettings) -> Provider:
    """Return the provider of the settings. Raises: EndpointError for an address or a key that cannot be used."""
    if settings.provider == "vllm":
        return ChatProvider(settings)
    if settings.provider == "openai":
        try:
            return ChatProvider(settings)
        except EndpointError as error:
            if settings.endpoint is None or settings.key_env is not None:
                raise
            hint = f'{error.hint}; a server of your own needs no key with provider = "vllm"'
            raise EndpointError(error.message, where=error.where, hint=hint) from None
    from vlmrl.judge.gemini import GeminiProvider  # loads an SDK that the other providers do not need

    return GeminiProvider(settings)
