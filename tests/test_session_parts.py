"""Functions of the training code take one part of the session, or the very values that they need."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vlmrl"
PARTS = {"Learner", "PromptFeed", "Journal", "Saver"}
WHOLE = {
    "rl.train_rl",
    "rl._open_engine",
    "sft.train_sft",
    "session._add_others",
    "session._load_teacher",
    "validation.validate",
    "loop.validate_at_start",
    "validation.validate_by_loss",
    "loop.after_step",
    "loop.end",
    "loop.leaving_steps",
    "loop.save_once",
    "checkpointing.save",
    "checkpointing.restore",
}
"""Functions that may take a session as a whole: the loops, and what opens, saves and restores it."""


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def classes_taken(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names in the annotations of a function's parameters, those within strings too."""
    given = node.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    annotations = [p.annotation for p in parameters if p is not None and p.annotation is not None]
    texts = [a.value if isinstance(a, ast.Constant) else ast.unparse(a) for a in annotations]
    return [n.id for text in texts for n in ast.walk(ast.parse(str(text))) if isinstance(n, ast.Name)]


def offenders(source: str, module: str) -> list[str]:
    """The functions of a module that take the session, or two parts of it, and may not."""
    wrong = []
    for node in functions(source):
        taken = classes_taken(node)
        if "Session" in taken and f"{module}.{node.name}" not in WHOLE:
            wrong.append(f"{module}:{node.lineno} {node.name} takes the session")
        if sum(name in PARTS for name in taken) > 1:
            wrong.append(f"{module}:{node.lineno} {node.name} takes {', '.join(n for n in taken if n in PARTS)}")
    return wrong


def modules() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in sorted((PACKAGE / "train").glob("*.py"))}


def test_no_function_takes_two_parts_of_a_session_and_few_take_it_whole():
    assert [line for module, source in modules().items() for line in offenders(source, module)] == []


@pytest.mark.parametrize(("parameters", "wrong"), [
    ("learner: Learner, step: int", 0), ("learner: Learner, feed: PromptFeed", 1), ("session: Session", 1),
    ("learner: Learner | None = None, *, journal: Journal", 1), ("learner: 'Learner', *savers: 'Saver'", 1),
    ("feed: PromptFeed, encode: Callable[[Learner], int]", 1),
])  # fmt: skip
def test_the_rule_sees_what_it_should(parameters, wrong):
    assert len(offenders(f"def work({parameters}): ...", "collect")) == wrong


def test_the_exceptions_and_the_parts_are_those_of_the_code():
    from vlmrl.train.session import Session

    names = {f"{module}.{node.name}" for module, source in modules().items() for node in functions(source)}
    assert names >= WHOLE
    takes_it = {
        f"{m}.{n.name}" for m, source in modules().items() for n in functions(source) if "Session" in classes_taken(n)
    }
    assert takes_it == WHOLE
    assert {f.type for f in dataclasses.fields(Session)} >= PARTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        object.__new__(Session).learner = None  # type: ignore[misc]
