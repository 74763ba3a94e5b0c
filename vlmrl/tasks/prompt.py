"""Prompt templates: Jinja in a sandbox, in which an unknown variable is an error; fingerprints of prompts.

`<image>` marks the row's images. A fingerprint identifies the rendered text, not the template's path or the style of
its source. A template is reduced with the settings of its task (`Task.variables`, which a row cannot override). Parts
that do not depend on the row are rendered to text. The others stay as Jinja's parsed tree, together with the settings
that they read: without comments, quotes and blanks within `{{ }}`, with the white space around them. Two prompts with
the same fingerprint therefore render the same text for every row. The converse does not hold: two programs that render
the same text differ, and so may one program under two releases of Jinja.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from jinja2 import nodes


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


REVEAL, HIDDEN = "teacher.reveal", "(not shown)"
"""Recipe key of a text that a teacher alone reads; text in the place of each value if the values are hidden."""


def render_revealed(source: str, row: Row, variables: Mapping[str, Any], *, hides: bool) -> str:
    """Return the text of `teacher.reveal` for a row. The truth is among its variables.

    Args:
        hides: whether a text takes the place of each value of the row.
    Raises: as `render_user`.
    """
    columns, truth = (hidden(x) if hides else x for x in (row.columns, row.truth))
    return render_user(source, replace(row, columns=columns), {**variables, "truth": truth}, where=REVEAL)


def hidden(value: Any) -> Any:
    """Return a value of the same structure, with a text in the place of each number, text and truth value."""
    if isinstance(value, Mapping):
        return {key: hidden(x) for key, x in value.items()}
    return [hidden(x) for x in value] if isinstance(value, list | tuple) else HIDDEN


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
        shown, where = len(row.response_media), "prompt"
        if shown:  # the last images of the row belong to the results of tools
            marks, where = marks + shown, "chat"
        count = len(row.media) + shown
        raise DataError(
            f"the row has {count} image{plural(count)} but its {where} has {marks} {IMAGE} mark{plural(marks)}",
            where=row.place,
            hint=f"write {IMAGE} once for each image, or not at all (then the images come first)",
        )
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise DataError("the row has images but no user message", where=row.place)
    text = IMAGE * len(row.media) + messages[first].content
    return (*messages[:first], Message("user", text), *messages[first + 1 :]), True


Piece = str | list[Any]
"""Piece of a reduced template: rendered text, or a parsed tree as JSON values."""


def prompt_print(template: str, system: str | None, variables: Mapping[str, Any], rows_of: str = "") -> str:
    """Return the fingerprint of a prompt, as the hex digits of a SHA-256.

    It includes `prompt_template.RENDERING`, the version of the rules for all prompts (image marks, outer white space).

    Args:
        template: Jinja source of the user message; "" = the rows have their own messages.
        variables: settings of the task.
        rows_of: name of the task; used only without a template, when the rows have their own messages.
    """
    pieces: list[Any] = _reduced(template, variables) if template else [["messages", rows_of]]
    return _sha256([RENDERING, system, pieces])


def earlier_prints(
    now: str, task: str, template: str, system: str | None, variables: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the fingerprints that earlier versions recorded for this prompt.

    Earlier fingerprints were hashes of the template's source, the task's name and all its settings. For the prompts
    that are part of vlmrl, `OLD_PROMPTS` lists them, because the sources and names have changed since then. For other
    prompts they are computed.

    Args:
        now: the prompt's present fingerprint (`prompt_print`).
        template, system, variables: as for `prompt_print`.
    """
    computed = _sha256([task, template, system, dict(variables)])
    return tuple(dict.fromkeys((computed, OLD_PROMPTS.get(now[:40], computed))))


def same_prompt(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two records describe the same prompt: equal fingerprints, earlier fingerprints included."""
    a, b = one.get("sha256"), other.get("sha256")
    return a == b or a in (other.get("earlier") or ()) or b in (one.get("earlier") or ())


def _reduced(template: str, variables: Mapping[str, Any]) -> list[Any]:
    """Return the pieces of a template without outer white space. The last item holds the settings that they read."""
    from jinja2.nodes import Assign

    tree = parse_template(template, "prompt template")
    # Parts are rendered only if the template is plain: an assignment or a macro could give a setting another value, and
    # a template that is not plain must not run in this process.
    pieces = _pieces(tree.body, variables if is_plain(tree) and tree.find(Assign) is None else None)
    left = [piece for piece in pieces if not isinstance(piece, str)]
    reads = {name: value for name, value in variables.items() if any(_mentions(piece, name) for piece in left)}
    return [*_stripped(pieces), reads]


def _pieces(body: Sequence[nodes.Node], variables: Mapping[str, Any] | None) -> list[Piece]:
    """Return the nodes as pieces, in order: nodes that do not depend on the row as text. Adjacent texts are joined.

    Args:
        variables: settings of the task; None = no node is rendered.
    """
    from jinja2.nodes import If, Output, TemplateData

    pieces: list[Piece] = []
    for node in body:
        for part in node.nodes if isinstance(node, Output) else [node]:
            if isinstance(part, TemplateData):
                pieces.append(part.data)
            elif variables is not None and (text := _constant_text(part, variables)) is not None:
                pieces.append(text)
            elif isinstance(part, If):
                branches = [part, *part.elif_]
                tests = [[_as_json(b.test), _joined(_pieces(b.body, variables))] for b in branches]
                pieces.append(["If", *tests, _joined(_pieces(part.else_, variables))])
            else:
                pieces.append(_as_json(part))
    return _joined(pieces)


def _constant_text(node: nodes.Node, variables: Mapping[str, Any]) -> str | None:
    """Return the rendered text of a node that depends only on the task's settings; else None.

    The result is also None if rendering the node without a row fails.
    """
    from jinja2.meta import find_undeclared_variables
    from jinja2.nodes import Expr, Output, Template

    environment = make_environment()
    alone = Template([Output([node], lineno=1) if isinstance(node, Expr) else node], lineno=1)
    alone.set_environment(environment)
    if not find_undeclared_variables(alone) <= set(variables):
        return None
    try:
        return render_bounded(environment.from_string(alone), variables)
    except (TemplateFailedError, TemplateLimitError):
        return None


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with adjacent texts joined, and without empty ones."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece != "":
            joined.append(piece)
    return joined


def _stripped(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces without the white space that rendering strips at both ends."""
    stripped = list(pieces)
    if stripped and isinstance(stripped[0], str):
        stripped[0] = stripped[0].lstrip()
    if stripped and isinstance(stripped[-1], str):
        stripped[-1] = stripped[-1].rstrip()
    return _joined(stripped)


def _as_json(node: Any) -> Any:
    """Return a part of a tree as JSON values: the type and the fields of each node, without line numbers."""
    from jinja2.nodes import Node, Output

    if isinstance(node, Output):
        return _pieces([node], None)
    if isinstance(node, Node):
        return [type(node).__name__, {name: _as_json(value) for name, value in node.iter_fields()}]
    if isinstance(node, (list, tuple)):
        return [_as_json(value) for value in node]
    return node if node is None or isinstance(node, (str, int, float, bool)) else repr(node)


def _mentions(piece: Any, name: str) -> bool:
    """Return whether a name occurs anywhere in a tree."""
    if isinstance(piece, Mapping):
        return any(_mentions(value, name) for value in piece.values())
    return any(_mentions(value, name) for value in piece) if isinstance(piece, list) else piece == name


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


OLD_PROMPTS: Mapping[str, str] = {
    "ee2e7db0d9e6824d51bfaec10ff7a110bbef0750": "ebf9e6cc62ffefcd6d449596555945c93cf4385a8b99ed4d59371b0d7655b7c9",
    "915eba7b1ebfac82416126e1c9744251c214b198": "0ec26e0e4520eaca1b94204b2cbd65976bfe8cf3d5b68a4b0e1cff60fadd95d2",
    "1ea608e0f51f0b9703674880532cbc628c167801": "581f008e9003a08744ad93ad438c5d0844cfcbb540fab04f8586d403d9c8bf05",
    "1de658e95d8806556cedb71b859c8c01129fa4a6": "0366a845c198ca52b75c296699699f6d5cbd4e8b09f113b5bcd279d5da97a24f",
    "02bdcc1ba400a9d5e28f072f10d918509b51d96e": "67136e8dc158c010086293894dbff487bcab8d1a15632c5c4c96d46c246db2fb",
    "cca60209007e8e3139bbff9ac501db6394828472": "1200b2f46388b4e16a4ab4c9a99b9e7d23a4289e8142adf5ffdd65407334e275",
    "2d223ff8310aca9f9fe88dd052c33929c9b5dc8e": "d5dda6ed02085d7a38b76d72517e0e785cad8f4cf0a31119eabfac442b0c83e0",
    "c38290d4b363b344a1ce11ae185b3897d400b89a": "d1cc99571167a313448867a0995c229d1bcbbf567b3fc5951e4df2d171a96020",
    "e40cacbe07d3f524262db6bd10cdc97ba9265912": "e8dde27b005e1fd6ab1a6388e5807dcc81d2431c594c8a522acb8bb921a0dda1",
    "b2aa11ab5dd73b44097e9357f9102a8155f0a0e7": "daed23739996368ca5250a66640ed69fe306d1f3e68ab6a7ac177c9418cf8ee2",
    "05ee460298aa1c0c7ea16f8f9d2e432284b7e8b4": "1162b48d4de97a3b8e0b4e505e0f56d07d16110970bca4396066bbbb830e426a",
    "873ca7fdb12de61d7a2ce22ea53a22e73927410d": "92c832db02c7b3f96b34722e5932825d37b0f9f80704e9c5770aa762fdf49800",
    "2fc9618953b44021baf39c2518899b3e69f13b8f": "727bc1a92f0dde646b590e2c5230df8b80e76a7567c880e9f46bf23d80f5adc9",
    "5af6821d43fab41fca91eab19fcff7b5f8b75db5": "45a28d332c7938a79146a4ff167f79c89d2e40700f01fd075b4040fb86144c28",
    "a797fdf400a62492a59f72cb4c4c5c9c42da8914": "555d94f6c24dc1b64e5b47c3acbdeef625c9b3066b5d61ceefac5bd987a692cf",
}
"""First 40 digits of the fingerprint of a prompt without a system message -> the one that earlier versions recorded."""
