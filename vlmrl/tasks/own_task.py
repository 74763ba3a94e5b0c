"""Loader of users' own tasks: `path/to/file.py:function`. Their code runs in this process, without a sandbox.

The function takes the dataset's dataset.json (an empty mapping as long as there is none) and returns a `Task`. The file
runs only if the user names it, in a recipe or on the command line. If only a dataset names the file, it does not run.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from vlmrl.errors import DataError, RecipeError, VlmrlError
from vlmrl.redaction.redact import quoted
from vlmrl.tasks.attack import Attack
from vlmrl.tasks.base import Task
from vlmrl.tasks.own_checks import (
    POOLED_RETURNS,
    RETURNS,
    check_fields,
    content_of,
    marks_of,
    positions_of,
    response_of,
)
from vlmrl.tasks.pooled import PooledMetrics
from vlmrl.tasks.positions import Positions
from vlmrl.untrusted import run_around

MAX_SOURCE_BYTES = 1_000_000
HOW = "write it as path/to/file.py:function"
ONE_FILE = "a task is one file: it may import installed packages, but no file beside it"
INFO = "a task's function gets the dataset's dataset.json, empty where there is no dataset yet"


@dataclass(frozen=True)
class OwnFile:
    """File of a user's own task, as it was read.

    Args:
        path: the path as the user wrote it.
        text: the whole text of the file.
        sha256: hash of the file's bytes.
    """

    path: str
    text: str
    sha256: str


def is_own(name: str) -> bool:
    """Return whether a task's name has the form `path/to/file.py:function`."""
    return ".py:" in name or name.endswith(".py")


def load_own(name: str, info: Mapping[str, Any]) -> Task:
    """Return the task that the user's function returns for a dataset, under the name `name`.

    Names of rewards in the task's profiles may be relative to the file: `:score` is a function in the file itself,
    `reward.py:score` is a function in another file of the same folder.

    Raises: RecipeError with file and line: no such file or function, code that cannot be imported or that raises, or a
        function that returns anything but a `Task`.
    """
    path_text, _, function_name = name.rpartition(":")
    if not path_text.endswith(".py") or not function_name.isidentifier():
        raise RecipeError(f"task `{name}` does not name a function", hint=HOW)
    file = read_own(path_text)
    module = _module(path_text, file)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RecipeError(
            f"{path_text} has no function `{function_name}`",
            where=path_text,
            hint=f"it defines: {', '.join(_functions(module)) or 'no function'}",
        )
    make: Callable[[Mapping[str, Any]], Any] = function
    task = guarded(f"`{name}`", path_text, lambda: make(info), hint=INFO)
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", 1)
    if not isinstance(task, Task):
        raise RecipeError(
            f"`{name}` returned {type(task).__name__}, not a Task",
            where=f"{path_text}:{line}",
            hint="return vlmrl.Task(...); `vlmrl init --task NAME` writes an example",
        )
    check_fields(task, f"{path_text}:{line}")
    profiles = {key: (_beside(path_text, reward), args) for key, (reward, args) in task.profiles.items()}
    watched: dict[str, Any] = {
        key: _watched(function, f"`{key}` of `{name}`", path_text, check)
        for key, check in RETURNS.items()
        if (function := getattr(task, key)) is not None
    }
    if isinstance(pooled := task.set_metrics, PooledMetrics):
        watched["set_metrics"] = PooledMetrics(
            *(
                _watched(getattr(pooled, key), f"`{key}` of `set_metrics` of `{name}`", path_text, check)
                for key, check in POOLED_RETURNS.items()
            )
        )
    watched["attacks"] = _with_attacks_watched(watched["attacks"], f"`attacks` of `{name}`", path_text)
    if task.outcome_as is not None:
        measure_for = _watched(task.outcome_as, f"`outcome_as` of `{name}`", path_text, _function)
        watched["outcome_as"] = lambda spec: _watched(
            measure_for(spec), f"`outcome` of `{name}`", path_text, RETURNS["outcome"]
        )
    if task.positions is not None:
        positions_for = _watched(task.positions, f"`positions` of `{name}`", path_text, positions_of)
        watched["positions"] = lambda spec: _with_marks_watched(positions_for(spec), name, path_text)
    if task.file is not None:
        content = _watched(task.file.content, f"`content` of `file` of `{name}`", path_text, content_of)
        watched["file"] = replace(task.file, content=content)
    return replace(
        task,
        name=name,
        profiles=profiles,
        own=file,
        template_file=task.template_file or f"template of {path_text}",
        **watched,
    )


def read_own(path_text: str) -> OwnFile:
    """Read the file of a user's own task. Raises: RecipeError when it cannot be read."""
    path = Path(path_text).expanduser()
    if (run := run_around(path)) is not None:
        message = f"{path_text} lies in the run {run.name}: code there is never run"
        raise RecipeError(message, hint="copy it out, and name the copy")
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            raise RecipeError(f"the task file has more than {MAX_SOURCE_BYTES:,} bytes", where=path_text)
        data = path.read_bytes()
        return OwnFile(path_text, data.decode(), hashlib.sha256(data).hexdigest())
    except OSError as error:
        raise RecipeError(
            f"the task file {path_text} cannot be read: {error.strerror}",
            where=str(Path.cwd()),
            hint='name it from here, or in the recipe: [[data]] task = "path/to/file.py:function"',
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError("the task file is not UTF-8 text", where=path_text) from error


class _Loader(SourceFileLoader):
    """Loader that compiles the text that was read. A compiled file in __pycache__ may belong to an older version."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.text.encode(), self.path)


def _module(path_text: str, file: OwnFile) -> ModuleType:
    """Import a file under a unique module name, so that its classes can be pickled. Equal content is imported once."""
    path = str(Path(path_text).expanduser().resolve())
    name = f"vlmrl_task_{hashlib.sha256(f'{path} {file.sha256}'.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _Loader(name, path, file.text)
    module = module_from_spec(ModuleSpec(name, loader, origin=path))
    module.__file__ = path
    sys.modules[name] = module
    try:
        guarded(f"the task file {path_text}", path_text, lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def guarded(what: str, path_text: str, run: Callable[[], Any], *, hint: str | None = None) -> Any:
    """Run the user's code. Raises: RecipeError with the line of the user's file that failed."""
    try:
        return run()
    except VlmrlError as error:
        place = _place(error, path_text)
        if place == path_text and (error.where or "").startswith(f"{path_text}:"):
            place = str(error.where)
        raise RecipeError(error.message, where=place, hint=error.hint) from error
    except SyntaxError as error:
        where = f"{path_text}:{error.lineno or 1}"
        raise RecipeError(f"{what} is not valid Python: {error.msg}", where=where) from error
    except (Exception, SystemExit) as error:
        message = f"{what} raised {type(error).__name__}: {_said(error)}"
        hint = ONE_FILE if isinstance(error, ImportError) else hint
        raise RecipeError(message, where=_place(error, path_text), hint=hint) from error


def _watched(
    function: Callable[..., Any], what: str, path_text: str, check: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return the user's function in a wrapper that checks its result, and reports its errors with file and line."""
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
    place = path_text if line is None else f"{path_text}:{line}"

    def checked(returned: Any) -> Any:
        try:
            return check(returned)
        except DataError as error:
            raise RecipeError(f"{what}: {error.message}", where=place, hint=error.hint) from error

    @wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        # Inside `guarded`, because the code of a generator function runs only when the check reads its items.
        return guarded(what, path_text, lambda: checked(function(*args, **more)))

    return call


def _with_marks_watched(positions: Positions, name: str, path_text: str) -> Positions:
    """Return the positions with `marks` in the wrapper of `_watched`, which checks that it returns marks."""
    return replace(positions, marks=_watched(positions.marks, f"`marks` of `{name}`", path_text, marks_of))


def _with_attacks_watched(
    attacks: Callable[..., Sequence[Attack]], what: str, path_text: str
) -> Callable[..., list[Attack]]:
    """Return a task's `attacks` with every trick in the wrapper of `_watched`, which checks that it returns a text."""

    def call(*args: Any, **more: Any) -> list[Attack]:
        return [
            replace(
                attack,
                make=_watched(attack.make, what, path_text, response_of),
                turned=None if attack.turned is None else _watched(attack.turned, what, path_text, response_of),
            )
            for attack in attacks(*args, **more)
        ]

    return call


def _function(returned: Any) -> Callable[..., Any]:
    if not callable(returned):
        raise DataError(f"it returned {quoted(returned)}, not a function")
    return returned


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as nested:
        return f"(its text cannot be made: {type(nested).__name__})"


def _place(error: BaseException, path_text: str) -> str:
    """Return `file:line` of the innermost frame that is in the user's file."""
    path = str(Path(path_text).expanduser().resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path_text}:{lines[-1]}" if lines else path_text


def _functions(module: ModuleType) -> list[str]:
    own = (n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return [n for n in own if callable(getattr(module, n)) and not n.startswith("_")]


def _beside(path_text: str, reward: str) -> str:
    """Return a reward's name that is relative to the user's file in the form that a recipe needs."""
    if reward.startswith(":"):
        return path_text + reward
    file, colon, function = reward.rpartition(":")
    near = Path(path_text).parent / file
    return f"{near}{colon}{function}" if file.endswith(".py") and near.is_file() else reward
