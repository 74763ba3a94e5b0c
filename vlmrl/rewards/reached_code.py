"""Code of a user's file that one of its functions depends on. The rest of the file may change while a run continues."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

DYNAMIC = re.compile(
    r"\b(?:globals|locals|vars|eval|exec|compile|getattr|attrgetter|importlib|import_module|modules|inspect|gc"
    r"|__(?:import|dict|getattr|getattribute|getitem|globals|builtins|code|class|subclasses)__)\b"
)
"""Words with which code is reached by a name that is not written out."""
UNUSED_IN_RUNS = ("attacks", "prep")
"""Arguments of `Task` that no run uses: the attacks of the probe, and the function that makes the dataset."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def same_code(before: str, after: str, function: str) -> bool:
    """Return whether two texts of a file give `function` the same code; comments and formatting do not count."""
    return before == after or reached_code(before, function) == reached_code(after, function)


def reached_code(text: str, function: str) -> str:
    """Return a function with all that it reaches in its file: functions, classes, and the file's other statements.

    The whole text is returned if it cannot be parsed, or if it reaches code by computed names.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return text
    definitions = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if function not in definitions or DYNAMIC.search(text):
        return text
    others = [node for node in tree.body[bool(ast.get_docstring(tree)) :] if not isinstance(node, Definition)]
    reached, waiting = set[str](), [function, *(name for node in others for name in _names(node))]
    while waiting:
        name = waiting.pop()
        if name in definitions and name not in reached:
            reached.add(name)
            waiting += _names(definitions[name])
    kept = [node for node in tree.body if node in others or getattr(node, "name", None) in reached]
    return "\n".join(ast.unparse(_Kept().visit(node)) for node in kept)


class _Kept(ast.NodeTransformer):
    """Removes arguments that no run uses from calls."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = _used(node)
        return self.generic_visit(node)


def _used(node: ast.Call) -> list[ast.keyword]:
    """Return the named arguments of a call that a run uses."""
    is_task = getattr(node.func, "attr", getattr(node.func, "id", "")) == "Task"
    return [one for one in node.keywords if not (is_task and one.arg in UNUSED_IN_RUNS)]


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement uses, also those in `:score`, but for arguments that no run uses."""
    if isinstance(node, ast.Name):
        yield node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.rpartition(":")[2]
    children = [node.func, *node.args, *_used(node)] if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    for child in children:
        yield from _names(child)
