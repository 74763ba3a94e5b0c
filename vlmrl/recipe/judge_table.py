"""The table `[judge]`: which model judges, how many calls and how much money it may use, and what an outage does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vlmrl.recipe.key_rules import FILE_OR_NAME, LIMIT, MOVED, REWARD, SPEED
from vlmrl.recipe.table import RecipeTable, Text

Money = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Prices(RecipeTable):
    """Prices of the judge's model, per million tokens. vlmrl knows no prices: copy them from your provider's list."""

    input: Annotated[Money, LIMIT]
    """Price of a million tokens of prompts, pictures included."""
    output: Annotated[Money, LIMIT]
    """Price of a million tokens of answers, thoughts included."""


class Judge(RecipeTable):
    """Model that the rewards `judge` and `vfig` ask. The key itself is never in a recipe."""

    provider: Annotated[Literal["gemini", "openai", "vllm"], REWARD] = "gemini"
    """gemini = Google's API, by its SDK; openai = OpenAI's API, or another one of its protocol; vllm = a server of your
    own with OpenAI's protocol, which needs no key."""
    model: Annotated[Annotated[str, Field(min_length=1, max_length=200)] | None, REWARD] = None
    """Name of the model, as the provider writes it. Left out = there is no judge."""
    rubric: Annotated[Text, REWARD, FILE_OR_NAME] = "vfig"
    """Name of a built-in rubric, or the path of a TOML file of your own. The reward `vfig` always uses its own."""
    endpoint: Annotated[Text | None, MOVED] = None
    """Address of the server, without a key or password. Left out = the provider's usual one; for vllm
    http://localhost:8000/v1."""
    key_env: Annotated[Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None, SPEED] = None
    """Environment variable that has the key. Left out = GEMINI_API_KEY or OPENAI_API_KEY, by the provider; none for
    vllm."""
    concurrency: Annotated[int, Field(ge=1, le=1024), SPEED] = 16
    """Maximum number of calls in flight in one process."""
    max_calls: Annotated[Annotated[int, Field(ge=1, le=2**53)] | None, LIMIT] = None
    """Maximum number of calls of a run: of all its processes and resumes together. The call after it is not sent: a
    checkpoint is saved and the run ends (exit code 75). Calls that were refused with an error status do not count.
    Left out = any number."""
    max_cost: Annotated[Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None, LIMIT] = None
    """Maximum cost of a run, in the currency of `prices`; see `max_calls`. A call that could exceed it is not sent.
    Left out = any cost."""
    prices: Prices | None = None
    outage: Annotated[Literal["mask", "wait", "zero"], REWARD] = "mask"
    """Outcome of a response that the judge does not answer. mask and wait = it has no score, and `reward.outage` says
    whether the run waits or leaves it out. zero = it scores 0 after `attempts`, as in VFig's published code: this
    trains the model for an outage, so choose it for evaluations alone."""
    outage_minutes: Annotated[float, Field(gt=0, le=10_080), LIMIT] = 30.0
    """With outage = "wait": longest wait of a request outside of runs, in minutes; runs: `reward.outage_minutes`."""
    cache: Annotated[Text | Literal[False] | None, SPEED] = None
    """File of the verdicts and of the budget, on a local disk; relative to the current folder. Left out = judge.sqlite
    in the run's folder, where resumes, evaluations and `reward-check` find it. false = nothing is kept, and the
    budget cannot be limited."""
    timeout_seconds: Annotated[float, Field(ge=0.01, le=3600), SPEED] = 120.0
    """Time limit of one call, from connecting to the last byte, in seconds."""
    attempts: Annotated[int, Field(ge=1, le=20), SPEED] = 6
    """Number of times that a request is sent before it counts as an outage, and number of invalid answers after which
    it has no verdict."""
    max_tokens: Annotated[int, Field(ge=64, le=2**20), REWARD] = 4096
    """Token limit of an answer. Thoughts of a model that thinks count too."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), REWARD] = 0.0
    """Sampling temperature. 0 = the most likely answer. Some models accept 1 alone."""

    @model_validator(mode="after")
    def _check_budget(self) -> Judge:
        if self.max_cost is not None and self.prices is None:
            raise ValueError(
                "`max_cost` needs `prices`; add: prices = { input = ..., output = ... } (per million tokens)"
            )
        if self.cache is False and (self.max_calls is not None or self.max_cost is not None):
            raise ValueError(
                "`max_calls` and `max_cost` are counted in the file of the cache, and `cache` is false; name a file"
            )
        return self

    def changed_by(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that differ from the defaults, for one reward with some values of its own.

        Address, key and prices belong to a provider, prices to a model: another one does not take them over.
        """
        values = self.model_dump(exclude_defaults=True)
        left_out = {"endpoint", "key_env", "prices"} if own.get("provider", self.provider) != self.provider else set()
        left_out |= {"prices"} if own.get("model", self.model) != self.model else set()
        return {key: value for key, value in values.items() if key not in left_out} | dict(own)


OF_SCORE = tuple(name for name, field in Judge.model_fields.items() if REWARD in field.metadata)
"""Keys on which scores depend. All others may change during a run."""
