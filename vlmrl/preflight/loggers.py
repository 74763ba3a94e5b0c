"""Check of a recipe's `[log]`: names, libraries and classes of loggers. The code in a user's file is not run."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from vlmrl.errors import Problem, did_you_mean
from vlmrl.loggers import BUILTIN, file_and_class, short_name
from vlmrl.recipe.load import LoadedRecipe

METHODS = ("open", "log", "samples", "close")
FOR_SERVICES = ("project", "entity", "group", "name")
UNFIT = re.compile(r"[/\\#?%:]")
"""Characters that the project name of a service cannot contain."""
MAX_CHARS = 128


def check_loggers(loaded: LoadedRecipe) -> list[Problem]:
    """Return every problem of `[log]` that can be found before a run."""
    return [*_sinks(loaded), *_names(loaded)]


def _sinks(loaded: LoadedRecipe) -> Iterator[Problem]:
    where, seen = loaded.where(("log", "sinks")), set[str]()
    for sink in loaded.recipe.log.sinks:
        name, own = short_name(sink), file_and_class(sink)
        if name in seen:
            yield Problem(f"`log.sinks` has two loggers called {name}", where, "name each once")
        seen.add(name)
        if own is not None:
            yield from _own_class(loaded, *own)
        elif sink not in BUILTIN:
            listing = f"loggers: {', '.join(BUILTIN)}; or a class of your own as path/to/file.py:Class"
            message = f"`log.sinks` names `{sink}`, and there is no such logger"
            yield Problem(message, where, did_you_mean(sink, BUILTIN, listing))
        elif not is_installed(BUILTIN[sink].package):
            extra = BUILTIN[sink].extra
            hint = f"in the checkout of vlmrl: pip install '.[{extra}]'; or leave it out of log.sinks"
            yield Problem(f"the logger {sink} needs {BUILTIN[sink].package}, which is not installed", where, hint)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder with its name, such as wandb's own files, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _own_class(loaded: LoadedRecipe, file: str, class_name: str) -> Iterator[Problem]:
    where, path = loaded.where(("log", "sinks")), Path(file)
    if not path.is_file():
        yield Problem(f"`log.sinks` names a file that does not exist: {file}", where)
        return
    try:
        tree = ast.parse(path.read_bytes(), filename=file)
    except SyntaxError as error:
        yield Problem(f"the logger's file is not valid Python: {error.msg}", f"{file}:{error.lineno or 1}")
        return
    except (OSError, ValueError, RecursionError) as error:
        yield Problem(f"cannot read the logger's file: {error}", file)
        return
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        listing = f"{file} defines: {', '.join(classes) or 'no class'}"
        yield Problem(f"{file} has no class `{class_name}`", where, listing)
        return
    node = classes[class_name]
    has = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    missing = [name for name in METHODS if name not in has]
    if missing and not node.bases:
        hint = f"a logger has the methods {', '.join(METHODS)} (vlmrl/loggers/base.py)"
        yield Problem(f"`{class_name}` has no method `{missing[0]}`", f"{file}:{node.lineno}", hint)


def _names(loaded: LoadedRecipe) -> Iterator[Problem]:
    log = loaded.recipe.log
    services = [sink for sink in log.sinks if sink != "tensorboard"]
    for key in FOR_SERVICES:
        value, where = getattr(log, key), loaded.where(("log", key))
        if value is None:
            continue
        if not services:
            hint = 'log.sinks = ["wandb"] or ["trackio"], or leave it out'
            yield Problem(f"`log.{key}` does nothing: no logger of log.sinks uses it", where, hint, "warning")
        if len(value) > MAX_CHARS or not value.isprintable():
            yield Problem(
                f"`log.{key}` has more than {MAX_CHARS} characters, or characters that cannot be displayed", where
            )
        elif key == "project" and UNFIT.search(value):
            yield Problem(f"`log.project` cannot be `{value}`", where, "leave out / \\ # ? % and :")
