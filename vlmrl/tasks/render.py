"""Prompt templates: Jinja in a sandbox, every variable known, `<image>` for each of the row's images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vlmrl.errors import DataError, RecipeError
from vlmrl.types import Message, Row

if TYPE_CHECKING:
    from jinja2 import Template

IMAGE = "<image>"


@lru_cache(maxsize=64)
def compile_template(source: str, where: str) -> Template:
    """A template from its text. Raises: RecipeError with file and line when it is not valid Jinja."""
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise RecipeError(
            f"the prompt template is not valid Jinja: {error.message}", where=f"{where}:{error.lineno}"
        ) from error


def render_user(source: str, row: Row, variables: Mapping[str, Any], *, where: str) -> str:
    """The user message of a row. The row's columns are variables by name, all of them together are `columns`.

    The truth is not among the variables: a prompt cannot give the answer away by mistake.
    Raises: DataError when the template uses what the row does not have, or does something the sandbox refuses.
    """
    from difflib import get_close_matches

    from jinja2 import TemplateError

    template = compile_template(source, where)
    names: dict[str, Any] = {**row.columns, "columns": row.columns, **variables}
    try:
        return template.render(names).strip()
    except TemplateError as error:
        missing = str(error).split("'")[1] if str(error).startswith("'") else ""
        close = get_close_matches(missing, list(names), 1)
        known = ", ".join(sorted(names))
        hint = f"did you mean `{close[0]}`?  " if close else ""
        raise DataError(
            f"the prompt template fails on row {row.prompt_id}: {error}",
            where=where,
            hint=f"{hint}known names: {known}",
        ) from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, OverflowError) as error:
        raise DataError(
            f"the prompt template fails on row {row.prompt_id}: {type(error).__name__}: {error}", where=where
        ) from error


def place_images(messages: tuple[Message, ...], row: Row) -> tuple[tuple[Message, ...], bool]:
    """Make the `<image>` marks match the row's images.

    Returns: (messages, moved): with no mark at all, the images go in front of the first user message and `moved` is
        True.
    Raises: DataError when there are marks, but not one for each image.
    """
    marks = sum(message.content.count(IMAGE) for message in messages)
    if marks == len(row.media):
        return messages, False
    if marks:
        raise DataError(
            f"row {row.prompt_id} has {len(row.media)} images but its prompt has {marks} {IMAGE} marks",
            where=row.source, hint=f"write {IMAGE} once for each image, or not at all (then the images come first)",
        )  # fmt: skip
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise DataError(f"row {row.prompt_id} has images but no user message", where=row.source)
    text = IMAGE * len(row.media) + messages[first].content
    return (*messages[:first], Message("user", text), *messages[first + 1 :]), True
