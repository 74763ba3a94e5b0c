"""Rubrics: the axes by which a judge scores pictures, as a TOML file or built in, and the schema of a verdict.

A rubric file:

    instructions = "Compare the drawings of circuits."

    [[axes]]
    name = "parts"
    weight = 0.5
    describe = "Each part of the reference is there."

    [[axes]]
    name = "wires"
    weight = 0.5
    describe = "The same parts are connected."

    [[examples]]
    words = "All parts, and half of the wires."
    scores = { parts = 1.0, wires = 0.5 }
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from vlmrl.errors import RecipeError, unknown
from vlmrl.judge.tables import read_table
from vlmrl.recipe.table import RecipeTable
from vlmrl.redaction.redact import excerpt
from vlmrl.untrusted import file_problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

REASON = "reason"
"""Field of a verdict with the judge's words. It comes first, so that the judge reasons before it scores."""
MOST_FILE_BYTES = 256 * 1024
ENDING = ".toml"
Score = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Axis(RecipeTable):
    """One axis of a rubric."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    """Name of the score: lower-case letters, digits and `_`."""
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    """Weight of the axis in the total. Weights count relative to their sum."""
    describe: Annotated[str, Field(min_length=1, max_length=4000)]
    """Words for the judge: when the axis is 1, when it is 0, and what lies between."""


class Example(RecipeTable):
    """Scores of one described pair of pictures."""

    words: Annotated[str, Field(min_length=1, max_length=4000)]
    """Description of the pair, and why it has these scores."""
    scores: dict[str, Score]
    """Axis -> score."""


class Rubric(RecipeTable):
    """Rubric: instructions, axes with weights, and examples."""

    instructions: Annotated[str, Field(min_length=1, max_length=20_000)]
    """Words for the judge: the kind of pictures, and what is compared."""
    axes: Annotated[list[Axis], Field(min_length=1, max_length=16)]
    """Axes in the order of the verdict."""
    examples: Annotated[list[Example], Field(max_length=32)] = []
    """Scored examples in words."""

    @model_validator(mode="after")
    def _check_names(self) -> Rubric:
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(f"two axes have the same name: {', '.join(names)}; give each axis a name of its own")
        if REASON in names:
            raise ValueError(f"an axis is called `{REASON}`, like the judge's words; choose another name")
        for number, example in enumerate(self.examples, start=1):
            if set(example.scores) != set(names):
                scored = ", ".join(example.scores) or "no axis"
                raise ValueError(f"example {number} scores {scored}; it needs exactly: {', '.join(names)}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, in order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def weights(self) -> dict[str, float]:
        """Axis -> weight, divided by the sum of all weights, so that a total is in [0, 1]."""
        total = sum(axis.weight for axis in self.axes)
        return {axis.name: axis.weight / total for axis in self.axes}

    @cached_property
    def sha256(self) -> str:
        """Hash of all that the judge reads of the rubric."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @cached_property
    def answer(self) -> type[BaseModel]:
        """Pydantic class of a verdict: the words, then one number from 0 to 1 for each axis, and no other field."""
        fields: dict[str, Any] = {
            REASON: (str, Field(description="Short reasons for the scores: what agrees and what differs."))
        }
        # The prompt describes the axes: here they would be paid for a second time.
        fields |= {axis.name: (Score, Field(description="Score from 0 to 1.")) for axis in self.axes}
        config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
        return create_model("Answer", __config__=config, **fields)

    @cached_property
    def schema_of_answer(self) -> dict[str, Any]:
        """JSON schema of a verdict, in the subset that providers can enforce."""
        schema = self.answer.model_json_schema()
        properties = {name: {k: v for k, v in p.items() if k != "title"} for name, p in schema["properties"].items()}
        return {
            "type": "object",
            "properties": properties,
            "required": [REASON, *self.names],
            "additionalProperties": False,
        }


VFIG = Rubric(
    instructions=(
        "The pictures are figures: diagrams, charts, plots or drawings made of shapes, lines and text. The candidate "
        "was drawn again from the reference by a program. Judge how faithfully it shows the same figure. Do not reward "
        "beauty, and do not punish small differences of fonts, of line smoothing or of the picture's size."
    ),
    axes=[
        Axis(
            name="presence",
            weight=0.25,
            describe=(
                "Share of the reference's elements (shapes, symbols, labels, legend entries, axes) that the candidate "
                "also has, less a share for elements that the reference lacks. 1: all of them and nothing else. 0: "
                "none, or an empty picture."
            ),
        ),
        Axis(
            name="layout",
            weight=0.25,
            describe=(
                "Agreement of places, relative sizes, alignment and order of the elements. 1: each element stands "
                "where it should. 0.5: the rough arrangement is right, and many elements are moved. 0: another "
                "arrangement."
            ),
        ),
        Axis(
            name="connectivity",
            weight=0.25,
            describe=(
                "Agreement of the relations between elements: lines and arrows join the same ends in the same "
                "direction, curves pass through the same points, containers hold the same elements. 1: all relations. "
                "0: none. In a figure without relations, judge what touches and what encloses what."
            ),
        ),
        Axis(
            name="details",
            weight=0.25,
            describe=(
                "Agreement of what is seen up close: exact text and numbers, colours, line styles, arrow heads, "
                "fillings, tick marks. 1: no visible difference. 0.5: about half of these agree. 0: nothing agrees."
            ),
        ),
    ],
    examples=[
        Example(
            words="The candidate is an empty white picture.",
            scores={"presence": 0.0, "layout": 0.0, "connectivity": 0.0, "details": 0.0},
        ),
        Example(
            words=(
                "A flow chart of six boxes: all boxes and labels are in their places, one of the five arrows is "
                "missing, another one points the wrong way, and all boxes are grey instead of blue."
            ),
            scores={"presence": 0.9, "layout": 1.0, "connectivity": 0.6, "details": 0.7},
        ),
        Example(
            words="Half of a bar chart's bars are missing; the rest, with the axes and their text, agrees.",
            scores={"presence": 0.6, "layout": 0.7, "connectivity": 0.7, "details": 0.7},
        ),
    ],
)
BUILT_IN = {"vfig": VFIG}
"""Built-in rubrics by name. Their text is part of every cached verdict's key."""


def load_rubric(name: str, base_dir: Path | None = None) -> Rubric:
    """Return a built-in rubric, or that of a TOML file.

    Args:
        name: name of a built-in, or a path that ends with `.toml`.
        base_dir: folder where a relative path starts; None = the current one.
    Raises: RecipeError for an unknown name, or a file that cannot be read or is no rubric.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not name.endswith(ENDING):
        raise unknown("rubric", name, BUILT_IN, more="; or the path of a .toml file of your own")
    path = (base_dir or Path()) / name
    try:
        problem = file_problem(path)
        if problem is None and path.stat().st_size > MOST_FILE_BYTES:
            problem = f"has more than {MOST_FILE_BYTES:,} bytes"
        if problem is not None:
            raise RecipeError(f"the rubric {problem}", where=str(path))
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"the rubric cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, or no TOML
        raise RecipeError(f"the rubric is no TOML: {excerpt(str(error), 200)}", where=str(path)) from None
    return read_rubric(values, str(path))


def read_rubric(values: Mapping[str, Any], where: str) -> Rubric:
    """Return the rubric of a table. Raises: RecipeError with all that is wrong."""
    return read_table(Rubric, values, where)
