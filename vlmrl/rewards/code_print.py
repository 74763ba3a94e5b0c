"""Hash of the code that a function of a user's file depends on: other functions of the file may change."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator

DYNAMIC = re.compile(r"\b(?:globals|locals|vars|eval|exec|getattr|__import__)\s*\(")
"""Calls that reach code by a name that is not written out."""
UNUSED_IN_RUNS = ("attacks", "prep")
"""Arguments of a task that no run uses: the tricks of the probe, and the making of the dataset."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def code_print(text: str, function: str) -> str:
    """Return the SHA-256 of a function with all that it reaches in its file: functions, classes, and other statements.

    The whole file counts if it cannot be parsed, or if it reaches code by computed names.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return _sha256(text)
    definitions = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if function not in definitions or DYNAMIC.search(text):
        return _sha256(text)
    others = [node for node in tree.body[bool(ast.get_docstring(tree)) :] if not isinstance(node, Definition)]
    reached, waiting = set[str](), [function, *(name for node in others for name in _names(node))]
    while waiting:
        name = waiting.pop()
        if name in definitions and name not in reached:
            reached.add(name)
            waiting += _names(definitions[name])
    kept = [node for node in tree.body if node in others or getattr(node, "name", None) in reached]
    return _sha256("\n".join(ast.unparse(_Kept().visit(node)) for node in kept))


class _Kept(ast.NodeTransformer):
    """Removes arguments that no run uses from calls."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [one for one in node.keywords if one.arg not in UNUSED_IN_RUNS]
        return self.generic_visit(node)


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement uses, also those in `:score`, but for arguments that no run uses."""
    if isinstance(node, ast.keyword) and node.arg in UNUSED_IN_RUNS:
        return
    if isinstance(node, ast.Name):
        yield node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.rpartition(":")[2]
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
