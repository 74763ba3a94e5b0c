"""Code of a user's file that a run can depend on. The rest of the file may change while a run continues."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

DYNAMIC = re.compile(
    r"\b(?:globals|locals|vars|dir|eval|exec|compile|getattr|attrgetter|importlib|import_module|modules|inspect|gc)\b"
    r"|__(?!(?:future|init|post_init|call|name|main)__)\w+__|coding[:=]"
)
"""Words with which code is reached by a name that is not written out, or a file is read in another encoding."""
UNUSED_IN_RUNS = ("attacks", "prep")
"""Arguments of `Task` that no run uses: the attacks of the probe, and the function that makes the dataset."""


def same_code(before: str, after: str, function: str) -> bool:
    """Return whether two texts of a file give `function` the same code: see `used_code`."""
    return before == after or used_code(before, function) == used_code(after, function)


def used_code(text: str, function: str) -> str:
    """Return a file without comments and formatting, `attacks` and `prep` of `Task`, and functions that nothing names.

    Only plain functions are left out: a decorator, or a call as a default, may do something when the file is imported.
    The whole text is returned if it cannot be parsed, or if it may reach code by computed names.
    """
    try:
        tree = _Kept().visit(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):
        return text
    if DYNAMIC.search(text):
        return text
    while True:
        uses = Counter(_names(tree))
        unused = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and _is_plain(node)
            and node.name != function
            and uses[node.name] == Counter(_names(node))[node.name]  # only in itself, where its definition counts, too
        ]
        if not unused:
            return ast.unparse(tree)
        tree.body = [node for node in tree.body if node not in unused]


class _Kept(ast.NodeTransformer):
    """Removes the arguments that no run uses from calls of `Task`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if getattr(node.func, "attr", getattr(node.func, "id", "")) == "Task":
            node.keywords = [one for one in node.keywords if one.arg not in UNUSED_IN_RUNS]
        return self.generic_visit(node)


def _is_plain(node: ast.FunctionDef) -> bool:
    """Return whether the definition of a function does nothing but define it."""
    evaluated = [*node.args.defaults, *node.args.kw_defaults, node.returns]
    evaluated += [one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg)]
    simple = all(one is None or isinstance(one, (ast.Constant, ast.Name)) for one in evaluated)
    return simple and not node.decorator_list


def _names(node: ast.AST) -> Iterator[str]:
    """Yield all names in a tree, as often as they stand there: of variables, attributes, definitions, and in texts."""
    for one in ast.walk(node):
        for field in ("id", "attr", "name", "asname", "arg"):
            if isinstance(name := getattr(one, field, None), str):
                yield name
        if isinstance(one, (ast.Global, ast.Nonlocal)):
            yield from one.names
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield from re.findall(r"\w+", one.value)
