"""Local variables of a module's functions: number them, so that consistent renaming changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

LOOKS_AT_NAMES = {"locals", "vars", "dir", "eval", "exec"}
"""A function that calls one of these keeps the names of its variables."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, class or comprehension in source order, without those of the scopes within it.

    The decorators and defaults of an inner function and the first iterable of an inner comprehension belong to the
    outer scope.
    """
    if isinstance(scope, FUNCTIONS):
        start: list[ast.AST] = [*scope.body] if isinstance(scope.body, list) else [scope.body]
    elif isinstance(scope, COMPREHENSIONS):
        first, *others = scope.generators
        results = [scope.key, scope.value] if isinstance(scope, ast.DictComp) else [scope.elt]
        start = [first.target, *first.ifs, *others, *results]
    else:
        start = [*getattr(scope, "body", [])]
    for node in start:
        yield from _walk(node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        children: list[ast.AST] = [*node.decorator_list, *_defaults(node.args)]
    elif isinstance(node, ast.Lambda):
        children = _defaults(node.args)
    elif isinstance(node, ast.ClassDef):
        children = [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]
    elif isinstance(node, COMPREHENSIONS):
        children = [node.generators[0].iter]
    else:
        children = [*ast.iter_child_nodes(node)]
    for child in children:
        yield from _walk(child)


def _defaults(arguments: ast.arguments) -> list[ast.AST]:
    return [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]


def _walrus_names(scope: ast.AST) -> Iterator[str]:
    """Yield the names that `:=` binds in the comprehensions of a function: they are variables of the function."""
    for node in inside(scope):
        if isinstance(node, COMPREHENSIONS):
            for inner in inside(node):
                if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name):
                    yield inner.target.id
            yield from _walrus_names(node)


def bound_names(scope: ast.AST) -> tuple[list[str], set[str], set[str]]:
    """Return the names of a function or comprehension.

    Returns: (names that may be renamed, in the order in which they are bound; names that it binds and that stay; names
        that it declares global). Names stay that a caller can pass by keyword, that an import, an inner function or a
        class binds, and that begin with two underscores (Python rewrites those in a class).
    """
    bound: list[str] = []
    kept: set[str] = set()
    elsewhere: set[str] = set()
    globals_: set[str] = set()
    if isinstance(scope, FUNCTIONS):
        a = scope.args
        kept |= {p.arg for p in (*a.args, *a.kwonlyargs)}
        bound += [p.arg for p in (*a.posonlyargs, a.vararg, a.kwarg) if p is not None]
    for node in inside(scope):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere |= set(node.names)
            globals_ |= set(node.names) if isinstance(node, ast.Global) else set()
        elif (
            isinstance(node, ast.NamedExpr) and isinstance(scope, COMPREHENSIONS) and isinstance(node.target, ast.Name)
        ):
            elsewhere.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            bound.append(node.id)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            bound.append(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.append(node.rest)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            kept.add(node.name)
        elif isinstance(node, ast.alias):
            kept.add((node.asname or node.name).split(".")[0])
    if not isinstance(scope, COMPREHENSIONS):
        bound += _walrus_names(scope)
    kept |= {name for name in bound if name.startswith("__")}
    return [n for n in dict.fromkeys(bound) if n not in kept | elsewhere], kept - elsewhere, globals_


def _looks_at_names(scope: ast.AST) -> bool:
    calls = (n.func for n in ast.walk(scope) if isinstance(n, ast.Call))
    return any(isinstance(f, ast.Name) and f.id in LOOKS_AT_NAMES for f in calls)


class NumberedLocals(ast.NodeTransformer):
    """Rename the local variables of every function to numbers, in the order in which they are bound.

    Two functions are the same up to consistent renaming just when they are equal after this.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # variable that the current scope sees -> its number; other names stay
        self.depth = 0

    def _number(self, name: str) -> str:
        return self.names.get(name, name)

    def _scope(self, node: ast.AST, fields: tuple[str, ...]) -> None:
        """Visit these fields of a function or comprehension with the names of its own scope."""
        outer = self.names
        free, kept, globals_ = bound_names(node)
        if _looks_at_names(node):
            free, kept = [], kept | set(free)
        self.names = {k: v for k, v in outer.items() if k not in kept | globals_}
        self.names |= {name: f"local_{self.depth}_{i}" for i, name in enumerate(free)}
        self.depth += 1
        for name in fields:
            setattr(node, name, self._visited(getattr(node, name)))
        self.depth -= 1
        self.names = outer

    def _visited(self, value: object) -> object:
        if isinstance(value, list):
            return [self.visit(v) for v in value]
        return self.visit(value) if isinstance(value, ast.AST) else value

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        self._visit_defaults(node.args)
        self._scope(node, ("args", "returns", "body"))
        return node

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._visit_defaults(node.args)
        self._scope(node, ("args", "body"))
        return node

    def _visit_defaults(self, arguments: ast.arguments) -> None:
        arguments.defaults = [self.visit(d) for d in arguments.defaults]
        arguments.kw_defaults = [self.visit(d) if d else None for d in arguments.kw_defaults]

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        every = [*node.posonlyargs, *node.args, *node.kwonlyargs, node.vararg, node.kwarg]
        for parameter in every:
            if parameter is not None:
                parameter.arg = self._number(parameter.arg)
                parameter.annotation = self.visit(parameter.annotation) if parameter.annotation else None
        return node

    def _comprehension(self, node: ast.AST) -> ast.AST:
        generators = node.generators  # type: ignore[attr-defined]
        first = self.visit(generators[0].iter)  # the outer scope evaluates it
        generators[0].iter = ast.Constant(None)
        self._scope(node, ("generators", "key", "value") if isinstance(node, ast.DictComp) else ("generators", "elt"))
        generators[0].iter = first
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Keep the names of a class's body, which are its attributes. Its methods see the outer function's."""
        for name in ("decorator_list", "bases", "keywords"):
            setattr(node, name, self._visited(getattr(node, name)))
        outer = self.names
        own = {n.id for n in inside(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        body: list[ast.stmt] = []
        for statement in node.body:
            is_method = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
            self.names = outer if is_method else {k: v for k, v in outer.items() if k not in own}
            body.append(self.visit(statement))
        self.names, node.body = outer, body
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._number(node.id)
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        node.names = [self._number(n) for n in node.names]
        return node

    def _named(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> ast.AST:
        self.generic_visit(node)
        node.name = self._number(node.name) if node.name else None
        return node

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = _named

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.AST:
        self.generic_visit(node)
        node.rest = self._number(node.rest) if node.rest else None
        return node
