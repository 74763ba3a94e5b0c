"""Settings of a judge: the table `[judge]` of a recipe, with what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.errors import RecipeError
from vlmrl.recipe.tables import Judge
from vlmrl.services.client import base_url
from vlmrl.services.protocol import EndpointError
from vlmrl.services.rubric import read_table

ENDPOINTS: Mapping[str, str] = {
    "gemini": "https://generativelanguage.googleapis.com",
    "openai": "https://api.openai.com/v1",
    "vllm": "http://localhost:8000/v1",
}
"""Provider -> its usual address."""
KEYS: Mapping[str, str | None] = {"gemini": "GEMINI_API_KEY", "openai": "OPENAI_API_KEY", "vllm": None}
"""Provider -> environment variable of the key; None = no key is sent."""


class JudgeSettings(Judge):
    """Settings of a judge."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model or ""

    @property
    def address(self) -> str:
        """Address of the server."""
        return base_url(self.endpoint or ENDPOINTS[self.provider])

    @property
    def key_variable(self) -> str | None:
        """Environment variable of the key; None = no key is sent."""
        return self.key_env or KEYS[self.provider]

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that a judgement depends on, besides provider, model, rubric and content."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}


def read_settings(values: Mapping[str, Any], where: str = "[judge]") -> JudgeSettings:
    """Return the checked settings of a table `[judge]`.

    Raises: RecipeError with all that is wrong, such as unknown keys, no model, or an address with a password.
    """
    settings = read_table(JudgeSettings, values, where)
    if settings.model is None:
        raise RecipeError("`model` is missing", where=where, hint='add a line: model = "..."')
    try:
        _ = settings.address
    except EndpointError as error:
        hint = (
            "put the key into an environment variable and name it: key_env = ..."
            if "password" in error.message
            else None
        )
        raise RecipeError(error.message, where=f"{where} endpoint", hint=hint or error.hint) from None
    return settings
