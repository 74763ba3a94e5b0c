"""Prompt templates as text: reading, parsing, and a check of the cost of rendering. Templates are not rendered here.

A template is an untrusted program. Most templates only put a row's values into a text: `is_plain` returns True for
them, because their time and memory are bounded by the length of the row and of the template. Any other template could
run forever or fill the memory in one expression (`{{ 'a' * 10 ** 10 }}`), which Python cannot interrupt. So
template_worker.py renders it in a process with limits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vlmrl.errors import RecipeError
from vlmrl.untrusted import file_problem

if TYPE_CHECKING:
    from jinja2 import Environment, nodes
    from jinja2.parser import Parser

MAX_TEMPLATE_BYTES = 1 << 18
_FILTERS = (
    "trim", "lower", "upper", "capitalize", "title", "length", "count", "first", "last", "default", "d", "string",
    "int", "float", "list", "sort", "unique", "reverse",
)  # fmt: skip
"""Filters whose result is longer than their input by at most a constant factor."""
_GROWING_FILTERS = ("join", "tojson")
"""Filters that may multiply the length of their input, so that a chain of them has no bound. Their arguments must be
short constants."""
_SHORT = 100
"""Maximum length of an argument of `_GROWING_FILTERS`, in characters."""
_METHODS = (
    "items", "keys", "values", "get", "strip", "lstrip", "rstrip", "lower", "upper", "title", "split", "splitlines",
    "startswith", "endswith",
)  # fmt: skip
_READING = (
    "TemplateData", "Name", "Const", "Getattr", "Getitem", "Neg", "CondExpr", "Operand", "And", "Or", "Not",
    "Keyword",
)  # fmt: skip
"""jinja2 node types of expressions that only read or select a value."""
_MAKING = ("List", "Tuple", "Add", "Sub", "Concat")
"""jinja2 node types of expressions whose value is as long as all operands together."""
_STEPS = ("Getattr", "Getitem", "Filter", "Call")


def make_environment() -> Environment:
    """Return the sandbox for prompt templates: unknown names are errors, and blocks leave no empty lines."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    # A prompt must be the same in every run of a recipe.
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def make_chat_environment() -> Environment:
    """Return a sandbox similar to that of transformers, to measure the cost of rendering a model's chat template.

    Real prompts are rendered in the sandbox of transformers itself. Unknown names are empty texts. `{% break %}`, `{%
    continue %}` and `{% generation %}` exist, and so do `raise_exception` and `strftime_now`.
    """
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Block around text that the model generates. Its content is rendered as if there were no block."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def read_template(path: Path) -> str:
    """Read a prompt template. Raises: RecipeError when it is unreadable, empty, too large or not valid Jinja."""
    where = str(path)
    try:
        if problem := file_problem(path):
            raise RecipeError(f"the prompt template {problem}", where=where, hint="check `prompt` in `[[data]]`")
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= MAX_TEMPLATE_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"the prompt template cannot be read: {error}", where=where, hint="check `prompt` in `[[data]]`"
        ) from error
    if size > MAX_TEMPLATE_BYTES:
        raise RecipeError(
            f"the prompt template has {size:,} bytes; at most {MAX_TEMPLATE_BYTES:,} are read", where=where
        )
    if not text.strip():
        raise RecipeError("the prompt template is empty", where=where)
    parse_template(text, where)
    return text


def parse_template(text: str, where: str) -> nodes.Template:
    """Return the syntax tree of a template. Raises: RecipeError with file and line when it is not valid Jinja."""
    from jinja2 import TemplateSyntaxError

    try:
        return make_environment().parse(text)
    except TemplateSyntaxError as error:
        message = f"the prompt template is not valid Jinja: {error.message}"
        raise RecipeError(message, where=f"{where}:{error.lineno}") from error
    except RecursionError as error:
        raise RecipeError("the prompt template is nested too deeply", where=where) from error


def is_plain(tree: nodes.Template) -> bool:
    """Return whether the cost of rendering is bounded by the length of the row and of the template.

    A plain template reads values, selects between them, and loops over the row once. A template is not plain if it uses
    arithmetic with long results (`*`, `**`, `%`), macros, loops inside loops or over calls, assignments of computed
    values, chains of growing filters, or any filter, method or statement that is not listed in this file.
    """
    return _is_plain(tree, _Scope())


class _Scope(NamedTuple):
    """Context of a part of a template.

    Args:
        loop: variables of the loop around the part; None = it is not in a loop.
        named: whether the part is in an assignment.
    """

    loop: frozenset[str] | None = None
    named: bool = False

    def is_of_loop(self, node: Any) -> bool:
        """Return whether a value is part of the loop's current item, so that the loop reads each value only once."""
        return self.loop is None or type(node).__name__ == "Const" or _root(node) in self.loop


def _is_plain(node: Any, scope: _Scope) -> bool:
    kind = type(node).__name__
    if kind == "For":
        return _is_plain_loop(node, scope)
    if kind == "Assign":
        return scope.loop is None and type(node.target).__name__ == "Name" and _is_plain(node.node, _Scope(None, True))
    children = list(node.iter_child_nodes())
    if kind in ("Template", "Output", "If") or kind in _READING:
        is_allowed = True
    elif kind == "Compare":
        # `in` reads a whole value, and inside a loop it would do so for each item.
        is_allowed = scope.loop is None or not any(operand.op in ("in", "notin") for operand in node.ops)
    elif kind == "Test":
        is_allowed = node.name != "in"
    elif kind == "Slice":
        is_allowed = scope.loop is None
    elif kind in _MAKING:
        # An assigned value could grow with each assignment, and a loop would repeat a value from outside for each item.
        is_allowed = not scope.named and all(map(scope.is_of_loop, children))
    elif kind == "Filter":
        grows = node.name in _GROWING_FILTERS and _has_growing_filter(node.node)
        is_short = all(type(part).__name__ == "Const" and len(str(part.value)) <= _SHORT for part in node.args)
        is_listed = node.name in _FILTERS or (node.name in _GROWING_FILTERS and is_short)
        is_allowed = is_listed and not grows and not scope.named and scope.is_of_loop(node)
    elif kind == "Call":
        is_allowed = getattr(node.node, "attr", None) in _METHODS and not scope.named and scope.is_of_loop(node)
    else:
        is_allowed = False
    return is_allowed and all(_is_plain(child, scope) for child in children)


def _is_plain_loop(node: Any, scope: _Scope) -> bool:
    targets = [node.target] if type(node.target).__name__ == "Name" else list(node.target.iter_child_nodes())
    if scope.loop is not None or node.recursive or any(type(target).__name__ != "Name" for target in targets):
        return False
    if not _is_plain(node.iter, scope) or _has_growing_filter(node.iter):
        return False
    inner = _Scope(frozenset(("loop", *(target.name for target in targets))))
    return all(_is_plain(child, inner) for child in (*node.body, *node.else_, *([node.test] if node.test else [])))


def _has_growing_filter(node: Any) -> bool:
    from jinja2.nodes import Filter

    return any(part.name in _GROWING_FILTERS for part in (node, *node.find_all(Filter)) if isinstance(part, Filter))


def _root(node: Any) -> str | None:
    """Return the variable at the start of a chain of attributes, items, filters and calls; None if there is none."""
    while type(node).__name__ in _STEPS:
        node = node.node
    return node.name if type(node).__name__ == "Name" else None
