#!/usr/bin/env python3
"""Prove that a change of words changed no code: compile every changed Python file before and after, and compare.

Docstrings, comments, line numbers and formatting never count. Exit code 0 = every file has the same code, 1 = one
differs (its functions are named), 2 = a wrong argument.

    scripts/same_code.py                    the working tree against the branch's base (else its parent commit)
    scripts/same_code.py --locals           consistent renaming of local variables is allowed, too
    scripts/same_code.py --texts            changed string constants are listed; everything else must be equal
    scripts/same_code.py --base A --head B  two commits

Docstrings of vlmrl/cli and vlmrl/recipe are shown to users (`--help`, `vlmrl recipe explain`): the report says where
one of them changed, for it is read, and not compared.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dis
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType

from changes import add_commits, changed_files, default_base, source_at
from local_names import NumberedLocals

SHOWN = ("vlmrl/cli/", "vlmrl/recipe/")
"""Folders whose docstrings are help texts."""


@dataclass
class Comparison:
    """Differences of one file.

    Args:
        differences: what differs and where, one line each; empty = the code is the same.
        texts: (old, new) string constants, with `--texts`.
        shown: names of the definitions whose docstring changed.
    """

    differences: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)


def compare(old: str, new: str, *, rename_locals: bool = False, texts: bool = False) -> Comparison:
    """Compare two versions of a module.

    Args:
        rename_locals: allow local variables to be renamed, one name for one name in each function.
        texts: allow string constants to change; values within an f-string may change their order.
    Raises: SyntaxError when one of them is no Python.
    """
    trees = [ast.parse(source) for source in (old, new)]
    result = Comparison(shown=_changed_docstrings(*trees))
    trees = [_without_docstrings(tree) for tree in trees]
    lines = dict(_definitions(trees[1]))
    if texts:
        before, after = [list(_texts(tree)) for tree in trees]
        if len(before) == len(after):
            result.texts = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        trees = [_HideTexts().visit(tree) for tree in trees]
    if rename_locals:
        trees = [NumberedLocals().visit(tree) for tree in trees]
    codes = [compile(_at_line_one(tree), "<module>", "exec", dont_inherit=True, optimize=0) for tree in trees]
    for name, reason in _code_differences(*codes):
        known = name if name in lines else name.rpartition(".<locals>")[0]  # lambdas and comprehensions
        line = f" (line {lines[known]})" if known in lines else ""
        result.differences.append(f"{name}{line}: {reason}")
    return result


# Docstrings and positions


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove every statement that is a string alone: docstrings of definitions and of attributes."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        for name, body in ast.iter_fields(node):
            if isinstance(body, list) and any(isinstance(s, ast.stmt) for s in body):
                rest = [s for s in body if not _is_text(s)]
                setattr(node, name, rest or ([ast.Pass()] if name == "body" else []))
    return tree


def _at_line_one(tree: ast.Module) -> ast.Module:
    """Move everything to line 1: the compiler keeps empty instructions for the sake of line numbers."""
    for node in ast.walk(tree):
        if hasattr(node, "lineno") or isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = 1  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    return ast.fix_missing_locations(tree)


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield (qualified name, line) of every function and class, as code objects name them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield f"{prefix}{node.name}", node.lineno
            inner = "." if isinstance(node, ast.ClassDef) else ".<locals>."
            yield from _definitions(node, f"{prefix}{node.name}{inner}")
        else:
            yield from _definitions(node, prefix)


def _changed_docstrings(old: ast.Module, new: ast.Module) -> list[str]:
    before, after = (dict(_docstrings(tree)) for tree in (old, new))
    return [name for name, text in after.items() if before.get(name, text) != text]


def _docstrings(tree: ast.AST, name: str = "module") -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every docstring; of that of an attribute, the name of the attribute."""
    prefix, own = "" if name == "module" else f"{name}.", name
    for node in getattr(tree, "body", []):
        if _is_text(node):
            yield own, node.value.value
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            own = f"{prefix}{ast.unparse(target)}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _docstrings(node, f"{prefix}{node.name}")


# Texts


def _plain(node: ast.AST) -> str | None:
    """Return the text of a string constant (an f-string without values is one); None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr) and all(isinstance(v, ast.Constant) for v in node.values):
        return "".join(str(v.value) for v in node.values if isinstance(v, ast.Constant))
    return None


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield every string constant and f-string in source order."""
    for node in ast.iter_child_nodes(tree):
        if (text := _plain(node)) is not None:
            yield repr(text)
        elif isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)
        else:
            yield from _texts(node)


class _HideTexts(ast.NodeTransformer):
    """Give every string constant the same text; an f-string keeps its values, in an order of their own."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("text") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        if _plain(node) is not None:
            return ast.Constant("text")
        values = [v for v in node.values if isinstance(v, ast.FormattedValue)]
        for value in values:  # the format after the colon is no text: it stays
            value.value = self.visit(value.value)
        return ast.JoinedStr(sorted(values, key=ast.dump))

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.AST:
        """Leave the keys of a pattern: no two of them may be equal."""
        node.patterns = [self.visit(p) for p in node.patterns]
        return node


# Code objects

FIELDS = (
    "co_name",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_varnames",
    "co_cellvars",
    "co_freevars",
    "co_names",
    "co_code",
)


def _code_differences(old: CodeType, new: CodeType, name: str = "module") -> list[tuple[str, str]]:
    """Return (qualified name, what differs) of the innermost code objects that differ."""
    inner = (
        [(a, b) for a, b in zip(_codes(old), _codes(new), strict=False) if a.co_name == b.co_name]
        if len(_codes(old)) == len(_codes(new))
        else []
    )
    differences = [d for a, b in inner for d in _code_differences(a, b, _name_of(b))]
    if not _same_here(old, new):
        differences.append((name, _reason(old, new)))
    elif len(inner) < len(_codes(old)):
        differences.append((name, "functions were added, removed or renamed"))
    return differences


def _name_of(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def _codes(code: CodeType) -> list[CodeType]:
    return [c for c in code.co_consts if isinstance(c, CodeType)]


def _constants(code: CodeType) -> list[str]:
    """Return the constants that are no code, with their types: True is not 1, and -0.0 is not 0.0."""
    return [_with_types(c) for c in code.co_consts if not isinstance(c, CodeType)]


def _with_types(value: object) -> str:
    if isinstance(value, (tuple, frozenset)):
        parts = [_with_types(v) for v in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return f"{type(value).__name__} {value!r}"


def _same_here(old: CodeType, new: CodeType) -> bool:
    same = all(getattr(old, f) == getattr(new, f) for f in FIELDS) and _constants(old) == _constants(new)
    same = same and getattr(old, "co_exceptiontable", b"") == getattr(new, "co_exceptiontable", b"")
    return same and len(_codes(old)) == len(_codes(new))


def _reason(old: CodeType, new: CodeType) -> str:
    """Name the first difference for a reader."""
    counts = old.co_argcount + old.co_kwonlyargcount, new.co_argcount + new.co_kwonlyargcount
    parameters = old.co_varnames[: counts[0]], new.co_varnames[: counts[1]]
    if parameters[0] != parameters[1]:
        return f"parameters ({', '.join(parameters[0])}) -> ({', '.join(parameters[1])})"
    instructions = [[(i.opname, i.argrepr) for i in dis.get_instructions(code)] for code in (old, new)]
    for a, b in zip(*instructions, strict=False):
        before, after = (re.sub(r"<code object (\S+) at .*", r"\1", " ".join(x).strip()) for x in (a, b))
        if before != after:
            return f"{before} -> {after}"
    lengths = [len(i) for i in instructions]
    if lengths[0] != lengths[1]:
        return f"{lengths[0]} -> {lengths[1]} instructions"
    for name in FIELDS:
        if getattr(old, name) != getattr(new, name) and name != "co_code":
            return f"{name[3:]} {getattr(old, name)} -> {getattr(new, name)}"
    return "constants, exception table or inner functions"


# The command line


def report(path: str, comparison: Comparison) -> list[str]:
    """Return the lines about one file."""
    lines = [f"{'differs' if comparison.differences else 'same   '}  {path}"]
    lines += [f"           {d}" for d in comparison.differences]
    for old, new in comparison.texts:
        lines += [f"         - {old}", f"         + {new}"]
    if comparison.shown and path.startswith(SHOWN):
        lines.append(f"         help texts changed: {', '.join(comparison.shown)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--locals", action="store_true", help="allow consistent renaming of local variables")
    parser.add_argument("--texts", action="store_true", help="list changed string constants, allow no other change")
    add_commits(parser)
    options = parser.parse_args()
    base = options.base or default_base(options.head)
    files = changed_files(base, options.head, list(options.paths))
    failed = 0
    for status, path in files:
        if status != "M":
            failed += 1
            print(f"differs  {path}\n           the file was {'added' if status == 'A' else 'removed'}")
            continue
        sources = source_at(base, path), source_at(options.head, path)
        comparison = compare(*sources, rename_locals=options.locals, texts=options.texts)
        failed += bool(comparison.differences)
        print("\n".join(report(path, comparison)))
    print(f"{len(files)} changed files since {base[:10]}, {failed} with other code", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
