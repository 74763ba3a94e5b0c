"""Fingerprints of prompts: of the text that a prompt renders, wherever its template lies and however it is written.

A template is reduced with the settings of its task (`Task.variables`, which a row cannot override): what does not
depend on the row becomes the text that it renders. The rest stays as Jinja's parsed tree, with the settings that it
reads. Comments, quotes and blanks within `{{ }}` are not in that tree; the white space around it is. So two prompts
with one fingerprint render the same text for every row: their texts are equal, and the trees between them are the same
program on the same values. The other way round does not hold: two programs that happen to give the same text have two
fingerprints, and so may one program under two releases of Jinja whose trees differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmrl.recipe.template import is_plain, make_environment, parse_template
from vlmrl.recipe.template_worker import TemplateFailedError, TemplateLimitError, render_bounded
from vlmrl.tasks.old_prompts import OLD_PROMPTS
from vlmrl.tasks.render import RENDERING

if TYPE_CHECKING:
    from jinja2 import nodes

Piece = str | list[Any]
"""A text as it is rendered, or a tree as JSON values."""


def prompt_print(template: str, system: str | None, variables: Mapping[str, Any], rows_of: str = "") -> str:
    """Return the fingerprint of a prompt, as the hex digits of a SHA-256.

    Args:
        template: Jinja source of the user message; "" where the rows bring their messages.
        system: the system message.    variables: settings of the task.
        rows_of: the name of the task whose rows bring their messages, where there is no template.
    The rules that hold for every prompt (marks of images, outer white space) are in it by `render.RENDERING`.
    """
    pieces: list[Any] = _reduced(template, variables) if template else [["messages", rows_of]]
    return _sha256([RENDERING, system, pieces])


def earlier_prints(
    now: str, task: str, template: str, system: str | None, variables: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the fingerprints that runs recorded for this prompt before they were of the rendered text.

    Args: now: its `prompt_print`.    task: its task's name.    template, system, variables: as of `prompt_print`.
    They were hashes of the template's source, of the task's name and of all its settings. What they were for the
    prompts that vlmrl brings is listed in `OLD_PROMPTS`, for sources and names change; of others it is computed.
    """
    computed = _sha256([task, template, system, dict(variables)])
    return tuple(dict.fromkeys((computed, *OLD_PROMPTS.get(now, ()))))


def same_prompt(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two records are of one prompt: by the fingerprint, or where one has an earlier one, by that."""
    a, b = one.get("sha256"), other.get("sha256")
    return a == b or a in (other.get("earlier") or ()) or b in (one.get("earlier") or ())


def _reduced(template: str, variables: Mapping[str, Any]) -> list[Any]:
    """Return the pieces of a template, without outer white space, and last the settings that its trees read."""
    from jinja2.nodes import Assign

    tree = parse_template(template, "prompt template")
    # Behind assignments and macros a name may mean something else, and what is not plain may not be run here.
    pieces = _pieces(tree.body, variables if is_plain(tree) and tree.find(Assign) is None else None)
    left = [piece for piece in pieces if not isinstance(piece, str)]
    reads = {name: value for name, value in variables.items() if any(_mentions(piece, name) for piece in left)}
    return [*_stripped(pieces), reads]


def _pieces(body: Sequence[nodes.Node], variables: Mapping[str, Any] | None) -> list[Piece]:
    """Return nodes in order, as texts where the row does not matter; neighbouring texts are one.

    Args: variables: settings of the task; None = no node is rendered.
    """
    from jinja2.nodes import If, Output, TemplateData

    pieces: list[Piece] = []
    for node in body:
        for part in node.nodes if isinstance(node, Output) else [node]:
            if isinstance(part, TemplateData):
                pieces.append(part.data)
            elif variables is not None and (text := _settled(part, variables)) is not None:
                pieces.append(text)
            elif isinstance(part, If):
                branches = [part, *part.elif_]
                tests = [[_as_json(b.test), _joined(_pieces(b.body, variables))] for b in branches]
                pieces.append(["If", *tests, _joined(_pieces(part.else_, variables))])
            else:
                pieces.append(_as_json(part))
    return _joined(pieces)


def _settled(node: nodes.Node, variables: Mapping[str, Any]) -> str | None:
    """Return the text of a node that reads the task's settings alone; None for another, and for one that cannot be
    rendered without a row.
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
    """Return the pieces with neighbouring texts as one, and without empty ones."""
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
    """Return a part of a tree as JSON values: the kinds of its nodes and what is in them, without line numbers."""
    from jinja2.nodes import Node, Output

    if isinstance(node, Output):
        return _pieces([node], None)
    if isinstance(node, Node):
        return [type(node).__name__, {name: _as_json(value) for name, value in node.iter_fields()}]
    if isinstance(node, (list, tuple)):
        return [_as_json(value) for value in node]
    return node if node is None or isinstance(node, (str, int, float, bool)) else repr(node)


def _mentions(piece: Any, name: str) -> bool:
    """Say whether a name stands anywhere in a tree."""
    if isinstance(piece, Mapping):
        return any(_mentions(value, name) for value in piece.values())
    return any(_mentions(value, name) for value in piece) if isinstance(piece, list) else piece == name


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
