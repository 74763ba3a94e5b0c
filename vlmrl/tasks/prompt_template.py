"""Prompt templates: Jinja in a sandbox, in which an unknown variable is an error. `<image>` marks the row's images."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from vlmrl.errors import DataError, RecipeError, listed
from vlmrl.recipe.template import is_plain, make_environment, parse_template
from vlmrl.recipe.template_worker import (
    TemplateFailedError,
    TemplateInvalidError,
    TemplateLimitError,
    TemplateWorker,
    compile_source,
    render_bounded,
)
from vlmrl.types import Message, Row
from vlmrl.untrusted import plural

IMAGE = "<image>"
RENDERING = 1
"""Version of the code that renders all prompts: image marks, outer white space, the sandbox's filters.

The number is part of each prompt's fingerprint. Increase it with every change of the code that changes a prompt.
"""
ADDRESS = re.compile(r"<[^<>]{1,200} at 0x[0-9a-f]{6,16}>")
_BOUNDED = "a prompt needs no long loops, powers or padding"


WORKER = TemplateWorker()
"""Process that renders templates with limits. It is started for the first template that is not plain."""


@lru_cache(maxsize=64)
def compile_template(source: str, where: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that renders a template: in this process if the template is plain, else in `WORKER`.

    Raises: RecipeError with file and line when it is not valid Jinja.
    """
    try:
        if not is_plain(parse_template(source, where)):
            WORKER.compile(source)
            return lambda names: WORKER.render(source, names)
        template = compile_source(make_environment(), source)
        return lambda names: render_bounded(template, names)
    except TemplateInvalidError as error:
        place = f"{where}:{error.line}" if error.line else where
        raise RecipeError(f"the prompt template is not valid Jinja: {error.message}", where=place) from error
    except TemplateLimitError as error:
        raise RecipeError(f"the prompt template {error}", where=where, hint=_BOUNDED) from error


def render_user(source: str, row: Row, variables: Mapping[str, Any], *, where: str) -> str:
    """Return the user message of a row.

    Each column of the row is a variable of the template; the variable `columns` holds all of them. The truth is not
    among the variables, so a prompt cannot reveal the answer by mistake.

    Raises: DataError when the template uses an unknown name, or does something that the sandbox refuses; RecipeError
        when it exceeds the limits on time, memory or text.
    """
    names: dict[str, Any] = {**row.columns, "columns": row.columns, **variables}
    try:
        text = compile_template(source, where)(names).strip()
        if ADDRESS.search(text):
            raise DataError(
                "the prompt has the address of an object, which differs between runs",
                where=f"{where}, {row.place}",
                hint="the template prints a function or an object: call it, or name one of its values",
            )
        return text
    except TemplateLimitError as error:
        raise RecipeError(f"the prompt template {error}", where=f"{where}, {row.place}", hint=_BOUNDED) from error
    except TemplateFailedError as error:
        missing = error.message.split("'")[1] if error.missing and error.message.startswith("'") else ""
        hint = listed(missing, sorted(names), "known names") if error.missing else None
        raise DataError(f"the prompt template fails: {error}", where=f"{where}, {row.place}", hint=hint) from error


def place_images(messages: tuple[Message, ...], row: Row) -> tuple[tuple[Message, ...], bool]:
    """Ensure that the messages have one `<image>` mark per image of the row.

    Returns: (messages, moved). If no message has a mark, all marks are put before the text of the first user message,
        and `moved` is True.
    Raises: DataError when there are marks, but not one for each image.
    """
    marks = sum(message.content.count(IMAGE) for message in messages)
    if marks == len(row.media):
        return messages, False
    if marks:
        raise DataError(
            f"the row has {len(row.media)} image{plural(len(row.media))} but its prompt has {marks} {IMAGE} "
            f"mark{plural(marks)}",
            where=row.place,
            hint=f"write {IMAGE} once for each image, or not at all (then the images come first)",
        )
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise DataError("the row has images but no user message", where=row.place)
    text = IMAGE * len(row.media) + messages[first].content
    return (*messages[:first], Message("user", text), *messages[first + 1 :]), True
