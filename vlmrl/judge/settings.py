"""The table `[judge]`: which model judges, how many calls and how much money it may use, and what an outage does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vlmrl.endpoint.client import base_url
from vlmrl.endpoint.failures import EndpointError
from vlmrl.errors import RecipeError
from vlmrl.judge.tables import JudgeTable, read_table

Provider = Literal["gemini", "openai", "vllm"]
ENDPOINTS: Mapping[str, str] = {
    "gemini": "https://generativelanguage.googleapis.com",
    "openai": "https://api.openai.com/v1",
    "vllm": "http://localhost:8000/v1",
}
"""Provider -> its usual address."""
KEYS: Mapping[str, str | None] = {"gemini": "GEMINI_API_KEY", "openai": "OPENAI_API_KEY", "vllm": None}
"""Provider -> environment variable of the key; None = no key is sent."""
PER_TOKENS = 1_000_000
"""Number of tokens that a price is for."""
Money = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Prices(JudgeTable):
    """Prices of a model, per million tokens."""

    input: Money
    """Price of a million tokens of prompts, pictures included."""
    output: Money
    """Price of a million tokens of answers, thoughts included."""

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of a call, in the currency of the prices."""
        return (input_tokens * self.input + output_tokens * self.output) / PER_TOKENS


class JudgeSettings(JudgeTable):
    """Settings of a judge."""

    provider: Provider = "gemini"
    """gemini = Google's API, by its SDK; openai = OpenAI's API, or another one of its protocol; vllm = a server of your
    own with OpenAI's protocol, which needs no key."""
    model: Annotated[str, Field(min_length=1, max_length=200)]
    """Name of the model, as the provider writes it."""
    rubric: Annotated[str, Field(min_length=1)] = "vfig"
    """Name of a built-in rubric, or the path of a TOML file of your own."""
    endpoint: Annotated[str, Field(min_length=1)] | None = None
    """Address of the server, without a key or password. Left out = the provider's usual one; for vllm
    http://localhost:8000/v1."""
    key_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None = None
    """Environment variable that has the key. Left out = GEMINI_API_KEY or OPENAI_API_KEY, by the provider; none for
    vllm."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Maximum number of calls in flight in one process."""
    max_calls: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Maximum number of calls of all processes together. The call after it is not sent. Calls that were refused with an
    error status do not count. Left out = any number."""
    max_cost: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Maximum cost of all processes together, in the currency of `prices`. A call that could exceed it is not sent.
    Left out = any cost."""
    prices: Prices | None = None
    """Prices per million tokens, such as { input = 0.30, output = 2.50 }. Needed for `max_cost`."""
    outage: Literal["mask", "wait", "zero"] = "mask"
    """Action when the judge does not answer after all attempts. mask = the sample has no score and is left out. wait =
    the request is asked again until the judge answers, at most `outage_minutes`. zero = the sample scores 0: this
    trains the model for an outage, so choose it for evaluations alone."""
    outage_minutes: Annotated[float, Field(gt=0, le=10_080)] = 30.0
    """With outage = "wait": longest wait of a request, in minutes. Then the sample has no score."""
    cache: Annotated[str, Field(min_length=1)] | Literal[False] = "judge.sqlite"
    """File of the verdicts and of the budget, shared by all processes of a machine; false = nothing is kept, and the
    budget cannot be limited."""
    timeout_seconds: Annotated[float, Field(ge=0.01, le=3600)] = 120.0
    """Time limit of one call, from connecting to the last byte, in seconds."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 6
    """Number of times that a request is sent before it counts as an outage, and number of invalid answers after which
    it has no verdict."""
    max_tokens: Annotated[int, Field(ge=64, le=2**20)] = 4096
    """Token limit of an answer. Thoughts of a model that thinks count too."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 0.0
    """Sampling temperature. 0 = the most likely answer. Some models accept 1 alone."""

    @model_validator(mode="after")
    def _check_budget(self) -> JudgeSettings:
        if self.max_cost is not None and self.prices is None:
            raise ValueError(
                "`max_cost` needs `prices`; add: prices = { input = ..., output = ... } (per million tokens)"
            )
        if self.cache is False and (self.max_calls is not None or self.max_cost is not None):
            raise ValueError(
                "`max_calls` and `max_cost` are counted in the file of the cache, and `cache` is false; name a file"
            )
        return self

    @property
    def address(self) -> str:
        """Address of the server."""
        return base_url(self.endpoint or ENDPOINTS[self.provider])

    @property
    def key_variable(self) -> str | None:
        """Environment variable of the key; None = no key is sent."""
        return self.key_env or KEYS[self.provider]

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that a verdict depends on, besides provider, model, rubric and content."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}


def read_settings(values: Mapping[str, Any], where: str = "[judge]") -> JudgeSettings:
    """Return the checked settings of a table `[judge]`.

    Raises: RecipeError with all that is wrong, such as unknown keys or an address with a password.
    """
    settings = read_table(JudgeSettings, values, where)
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
