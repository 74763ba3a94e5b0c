"""Rubrics, by whose axes a judge scores pictures: a TOML file or built in; and strict reading of its judgements.

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

A wrong key or value gets a message with a hint. An answer that is not exactly one judgement is refused, never repaired:
only a fence around it, a list with it alone, and further fields are passed over.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from vlmrl.errors import Problem, ProblemsError, RecipeError, did_you_mean, unknown
from vlmrl.recipe.tables import RecipeTable
from vlmrl.redaction.redact import excerpt
from vlmrl.services.client import HIDDEN
from vlmrl.services.protocol import ChatAnswer, InvalidJudgement
from vlmrl.untrusted import file_problem, one_line, parse_json, visible

MOST_VALUE_CHARS = 60
NEVER_SHOWN = {
    "key_env": "the name of an environment variable in capital letters, such as GEMINI_API_KEY",
    "endpoint": "an address",
}
"""Key whose wrong value may be a secret -> what it should be."""
FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
"""Text that is one code fence."""
_BRANCHES = ("constrained-str", "str", "literal[")


Table = TypeVar("Table", bound=BaseModel)


def read_table(kind: type[Table], values: Mapping[str, Any], where: str) -> Table:
    """Return a checked table.

    Args:
        where: name of the table or of its file, for messages.
    Raises: RecipeError with all that is wrong.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # The members of a union each have a finding for the same key: the first one speaks for all.
        # Pydantic's names for the members of a union are no part of the key.
        findings = {
            tuple(part for part in finding["loc"] if not str(part).startswith(_BRANCHES)): finding
            for finding in reversed(error.errors(include_url=False))
        }
    problems = [_problem(kind, place, findings[place], where) for place in reversed(findings)]
    if len(problems) == 1:
        raise RecipeError(problems[0].message, where=where, hint=problems[0].hint)
    raise ProblemsError(problems)


def _problem(kind: type[BaseModel], place: tuple[Any, ...], finding: Mapping[str, Any], where: str) -> Problem:
    name = ".".join(str(part + 1) if isinstance(part, int) else one_line(part) for part in place)
    if finding["type"] == "extra_forbidden":
        keys = list(_table_at(kind, place[:-1]).model_fields)
        hint = did_you_mean(str(place[-1]), keys, f"known keys: {', '.join(keys)}")
        return Problem(f"unknown key `{name}`", where, hint)
    if finding["type"] == "missing":
        return Problem(f"`{name}` is missing", where, f"add a line: {place[-1]} = ...")
    if finding["type"] == "value_error":
        message, _, hint = str(finding["ctx"]["error"]).partition("; ")
        return Problem(message, where, hint or None)
    if place and place[-1] in NEVER_SHOWN:
        return Problem(f"`{name}` is not {NEVER_SHOWN[place[-1]]}", where, _help(kind, place))
    value = excerpt(one_line(repr(finding.get("input"))), MOST_VALUE_CHARS)
    words = finding["msg"].replace("Input should be", "it must be")
    return Problem(f"`{name}` is {value}; {words}", where, _help(kind, place))


def _table_at(kind: type[BaseModel], place: Sequence[Any]) -> type[BaseModel]:
    """Return the class of a table inside a table; `place` may contain positions in lists."""
    for part in place:
        field = kind.model_fields.get(part) if isinstance(part, str) else None
        inner = _table_in(field.annotation) if field else None
        kind = inner or kind
    return kind


def _table_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for inner in map(_table_in, getattr(annotation, "__args__", ())) if inner), None)


def _help(kind: type[BaseModel], place: Sequence[Any]) -> str | None:
    names = [part for part in place if isinstance(part, str)]
    field = _table_at(kind, names[:-1]).model_fields.get(names[-1]) if names else None
    return f"`{names[-1]}`: {' '.join(field.description.split())}" if field and field.description else None


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

REASON = "reason"
"""Field of a judgement with the judge's words. It comes first, so that the judge reasons before it scores."""
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
    """Axes in the order of the judgement."""
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
        """Pydantic class of a judgement: the words, then one number from 0 to 1 for each axis; others are ignored."""
        fields: dict[str, Any] = {
            REASON: (str, Field(description="Short reasons for the scores: what agrees and what differs."))
        }
        # The prompt describes the axes: here they would be paid for a second time.
        fields |= {axis.name: (Score, Field(description="Score from 0 to 1.")) for axis in self.axes}
        config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())
        return create_model("Answer", __config__=config, **fields)

    @cached_property
    def schema_of_answer(self) -> dict[str, Any]:
        """JSON schema of a judgement, in the subset that providers can enforce."""
        schema = self.answer.model_json_schema()
        properties = {name: {k: v for k, v in p.items() if k != "title"} for name, p in schema["properties"].items()}
        return {
            "type": "object",
            "properties": properties,
            "required": [REASON, *self.names],
            "additionalProperties": False,
        }


VFIG_AXES = {
    "presence": "Share of the reference's elements (shapes, symbols, labels, legend entries, axes) that the candidate "
    "also has, less a share for elements that the reference lacks. 1: all of them and nothing else. 0: none, or an "
    "empty picture.",
    "layout": "Agreement of places, relative sizes, alignment and order of the elements. 1: each element stands where "
    "it should. 0.5: the rough arrangement is right, and many elements are moved. 0: another arrangement.",
    "connectivity": "Agreement of the relations between elements: lines and arrows join the same ends in the same "
    "direction, curves pass through the same points, containers hold the same elements. 1: all relations. 0: none. In "
    "a figure without relations, judge what touches and what encloses what.",
    "details": "Agreement of what is seen up close: exact text and numbers, colours, line styles, arrow heads, "
    "fillings, tick marks. 1: no visible difference. 0.5: about half of these agree. 0: nothing agrees.",
}
VFIG = Rubric(
    instructions=(
        "The pictures are figures: diagrams, charts, plots or drawings made of shapes, lines and text. The candidate "
        "was drawn again from the reference by a program. Judge how faithfully it shows the same figure. Do not reward "
        "beauty, and do not punish small differences of fonts, of line smoothing or of the picture's size."
    ),
    axes=[Axis(name=name, weight=0.25, describe=text) for name, text in VFIG_AXES.items()],
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
"""Built-in rubrics by name. Their text is part of every cached judgement's key."""


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
        raise RecipeError(f"the rubric is not TOML: {excerpt(str(error), 200)}", where=str(path)) from None
    return read_rubric(values, str(path))


def read_rubric(values: Mapping[str, Any], where: str) -> Rubric:
    """Return the rubric of a table. Raises: RecipeError with all that is wrong."""
    return read_table(Rubric, values, where)


MOST_REASON_CHARS = 2000
"""Maximum length of the judge's words that are kept."""
MOST_ANSWER_CHARS = 64 * 1024
MOST_LEVELS = 4


@dataclass(frozen=True)
class Judgement:
    """Scores of one candidate.

    Args:
        scores: axis -> number from 0 to 1, in the order of the rubric.
        reason: the judge's words, at most MOST_REASON_CHARS characters, without hidden characters.
        is_outage: the judge was down, and the settings say that this scores 0.
    """

    scores: Mapping[str, float]
    reason: str
    is_outage: bool = False

    def total(self, rubric: Rubric) -> float:
        """Return the weighted mean of the scores, from 0 to 1."""
        return min(1.0, max(0.0, math.fsum(weight * self.scores[name] for name, weight in rubric.weights.items())))

    def as_json(self) -> str:
        """Return the judgement as the text that `read_judgement` reads."""
        return json.dumps({REASON: self.reason, **self.scores}, allow_nan=False)


def judgement_of(rubric: Rubric, answer: ChatAnswer, secret: str = "") -> Judgement:
    """Return the judgement in a judge's answer.

    Args:
        secret: key of the judge, which its words may hold as escapes; "" = none.
    Raises: InvalidJudgement when it was cut by the token limit, or as `read_judgement`.
    """
    if answer.finish == "length":
        raise InvalidJudgement(
            "the judge's answer was cut by the token limit",
            hint="raise [judge] max_tokens; some models think first, and their thoughts count",
        )
    return read_judgement(rubric, answer.text, secret)


def read_judgement(rubric: Rubric, text: str, secret: str = "") -> Judgement:
    """Return the judgement in a text.

    The text is exactly one JSON object. It has the judge's words and a number for each axis: finite, from 0 to 1, no
    text, no truth value. No field is missing or repeated. Nothing stands around the object but a code fence or the
    marks of a list, as servers that enforce no schema write them. Further fields are ignored.

    Raises: InvalidJudgement.
    """
    if len(text) > MOST_ANSWER_CHARS:
        raise InvalidJudgement(f"the judge's answer has more than {MOST_ANSWER_CHARS:,} characters")
    try:
        fenced = FENCE.fullmatch(text)
        value = parse_json(fenced[1] if fenced else text, unique_keys=True, most_levels=MOST_LEVELS)
    except ValueError as error:
        words = excerpt(one_line(str(error)), 120)
        raise InvalidJudgement(f"the judge's answer is not one JSON object: {words}") from None
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(value, dict):
        raise InvalidJudgement(f"the judge's answer is a JSON {type(value).__name__}, not an object")
    try:
        fields = rubric.answer.model_validate(value).model_dump()
    except ValidationError as error:
        finding = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = excerpt(one_line(".".join(map(str, finding["loc"]))), 60)
        raise InvalidJudgement(f"the judge's answer is wrong at `{name}`: {finding['msg']}") from None
    words = fields.pop(REASON)
    reason = excerpt(visible(words.replace(secret, HIDDEN) if secret else words), MOST_REASON_CHARS)
    return Judgement({name: abs(float(fields[name])) for name in rubric.names}, reason)  # -0.0 is 0
