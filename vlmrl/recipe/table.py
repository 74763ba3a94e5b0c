"""Base class of all recipe tables, and the types of the keys' values.

Every number has a smallest and a largest value. The limits are far wider than any sensible run needs. They exclude
values that would only cause an overflow: 4e12 prompts per step, a temperature of 1e-300, a weight of 1e308. Rules about
several numbers together are in `rules/numbers.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from vlmrl import key_facts
from vlmrl.key_facts import Range
from vlmrl.recipe.key_rules import CADENCE, DISPLAY, FILE_OR_NAME

MAX_PIXELS = 100_000_000
"""Maximum area of an image that is decoded, in pixels (data/images.py)."""


def bounds(limits: Range) -> Any:
    """Return the pydantic constraint for a number in this range."""
    return Field(ge=limits.ge, gt=limits.gt, le=limits.le, lt=limits.lt)


PositiveInt = Annotated[int, bounds(key_facts.POSITIVE_INT)]
Count = Annotated[int, bounds(key_facts.COUNT)]
Tokens = Annotated[int, Field(gt=0, le=2**31 - 1)]
Pixels = Annotated[int, Field(gt=0, le=MAX_PIXELS)]
Number = Annotated[float, bounds(key_facts.NUMBER)]
NotNegative = Annotated[float, bounds(key_facts.NOT_NEGATIVE)]
Positive = Annotated[float, bounds(key_facts.POSITIVE)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e9)]
Share = Annotated[float, Field(ge=1e-6, le=1e6)]
Fraction = Annotated[float, bounds(key_facts.FRACTION)]
PositiveFraction = Annotated[float, bounds(key_facts.POSITIVE_FRACTION)]
Text = Annotated[str, Field(min_length=1)]


class RecipeTable(BaseModel):
    """Base class of all recipe tables: unknown keys are errors, and types are never converted silently."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class Log(RecipeTable):
    """Output of a run: what is shown, and the loggers that receive it."""

    sample_every_steps: Annotated[Count, CADENCE] = 10
    """Steps between two prints of a sampled rollout. Some rollouts then go to the loggers too, with their images. 0 =
    never."""
    keep_rollouts: Annotated[PositiveInt | None, CADENCE] = None
    """Number of newest steps whose rollouts are kept on disk; those of older steps are deleted during the run. Left out
    = all steps."""
    keep_rollouts_every: Annotated[Count, CADENCE] = 0
    """With `keep_rollouts`: rollouts of older steps are kept too if the step is a multiple of this number; 0 = none."""
    sinks: Annotated[list[str], DISPLAY, FILE_OR_NAME] = []
    """Loggers besides metrics.jsonl, which is always written: "tensorboard", "wandb", "trackio", or a class of your own
    as `path/to/file.py:Class`; `vlmrl check` names the methods that it lacks. Keys and tokens come from the environment
    alone."""
    project: Annotated[Text | None, DISPLAY] = None
    """Project of wandb and trackio. Left out = WANDB_PROJECT for wandb, else "vlmrl"."""
    entity: Annotated[Text | None, DISPLAY] = None
    """Team or user that owns the wandb project. Left out = WANDB_ENTITY, else your default there. trackio's Space is
    named by TRACKIO_SPACE_ID."""
    group: Annotated[Text | None, DISPLAY] = None
    """Group of runs in wandb and trackio. Left out = none."""
    name: Annotated[Text | None, DISPLAY] = None
    """Name of the run in wandb and trackio. Left out = the run's `--name`, else its id."""
