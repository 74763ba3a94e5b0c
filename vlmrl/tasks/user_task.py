"""Users' own tasks: `path/to/file.py:function`. Their code runs in this process without a sandbox.

The function takes the dataset's dataset.json (an empty mapping as long as there is none) and returns a `Task`. The file
runs only if the user names it, in a recipe or on the command line. If only a dataset names the file, it does not run.
A wrong value would often fail much later, in other code. So each value is checked where a function returns it, and the
error names the function. Numbers of NumPy and torch become floats, iterators become lists.
"""

from __future__ import annotations

import hashlib
import math
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, get_args

from vlmrl.data.doctor import CheckLevel
from vlmrl.environments.calls import traced_turns
from vlmrl.errors import DataError, RecipeError, VlmrlError
from vlmrl.metric import Metric
from vlmrl.redaction.redact import quoted
from vlmrl.tasks.attack import Attack, Kind, Make
from vlmrl.tasks.base import NoFile, Outcome, OwnFile, PooledMetrics, ResponseFile, Task
from vlmrl.tasks.figure import MAX_FIGURES
from vlmrl.tasks.positions import Mark, Positions
from vlmrl.tasks.truth_kinds import RowKind, TruthForm
from vlmrl.types import Message
from vlmrl.untrusted import run_around

ALWAYS = ("validate", "outcome", "attacks", "figures")
"""Functions that every task must have. The other functions may be None."""
FUNCTIONS = (*ALWAYS, "set_metrics", "messages", "trace", "unit", "outcome_as", "prep", "positions")
MOST_ATTACKS = 1000
MOST_NUMBERS = 1000
"""Maximum number of metrics per response, and of metrics per split."""


def check_fields(task: Task, where: str) -> None:
    """Raise a RecipeError if a field of a task has a wrong type."""
    for key in FUNCTIONS:
        value = getattr(task, key)
        if not callable(value) and (value is not None or key in ALWAYS):
            raise RecipeError(f"`{key}` of the task is {quoted(value)}, not a function", where=where)
    for key, (is_sound, words) in FIELDS.items():
        if not is_sound(value := getattr(task, key)):
            raise RecipeError(f"`{key}` of the task is {quoted(value)}", where=where, hint=words)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_text, value))


def _named(value: Any, is_sound: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and is_sound(v) for k, v in value.items())


def _is_profile(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list)) and len(value) == 2 and _is_text(value[0]) and _named(value[1], lambda _: True)
    )


FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "summary": (_is_text, 'a line of text: summary="count the squares"'),
    "template": (_is_text, 'a text: template="How many squares are there? <image>"'),
    "template_file": (_is_text, "a text: the place of `template`, for messages"),
    "variables": (lambda v: _named(v, lambda _: True), 'names with values: variables={"most": 9}'),
    "profiles": (lambda v: _named(v, _is_profile), 'rewards with arguments: profiles={"default": (":score", {})}'),
    "metrics": (
        lambda v: _named(v, lambda m: isinstance(m, Metric)),
        'metrics={"error": vlmrl.Metric("lower", (0.0, 1.0))}',
    ),
    "replicates": (lambda v: type(v) is int and v >= 0, "a number of resamples, 0 = no intervals"),
    "by": (_are_texts, 'names of fields of the truth: by=("count",)'),
    "variant": (_is_text, "leave it out: a user's own task has no variants"),
    "variants": (_are_texts, "leave it out: a user's own task has no variants"),
    "trace_sees": (lambda v: type(v) is bool, "True if `trace` takes the sizes of the images as its third argument"),
    "truths": (lambda v: v is None or isinstance(v, TruthForm), "a vlmrl.tasks.truth_kinds.TruthForm, or None"),
    "kind": (lambda v: v is None or isinstance(v, RowKind), "a vlmrl.tasks.truth_kinds.RowKind, or None"),
    "file": (lambda v: v is None or isinstance(v, ResponseFile), 'vlmrl.ResponseFile("SVG code", ".svg", code_of)'),
}


def _measures(returned: Any) -> Outcome:
    """Return the outcome of one answer as floats. None stays None: the metric does not apply to the answer.

    Raises: DataError for anything but a mapping of names to finite numbers.
    """
    return {_name(k): None if v is None else _number(k, v) for k, v in _mapping(returned).items()}


def _whole(returned: Any) -> Outcome:
    """Return the metrics of a split. NaN, such as NumPy's mean of an empty list, becomes None: not defined."""
    numbers = {_name(k): math.nan if v is None else _number(k, v, nan=True) for k, v in _mapping(returned).items()}
    return {name: None if math.isnan(number) else number for name, number in numbers.items()}


def _sums(returned: Any) -> dict[str, int]:
    """Return the counts of a response as integers."""
    numbers = {_name(k): _number(k, v) for k, v in _mapping(returned).items()}
    if fractions := [name for name, number in numbers.items() if number != int(number)]:
        raise DataError(f"the count `{fractions[0]}` is {numbers[fractions[0]]!r}, not a whole number")
    return {name: int(number) for name, number in numbers.items()}


def _mapping(returned: Any) -> Mapping[Any, Any]:
    if not isinstance(returned, Mapping):
        raise DataError(
            f"it returned {_shown(returned)}, not a mapping of names to numbers", hint='return {"accuracy": 1.0}'
        )
    if len(returned) > MOST_NUMBERS:
        raise DataError(f"it returned {len(returned):,} numbers; at most {MOST_NUMBERS:,} are allowed")
    return returned


def _name(key: Any) -> str:
    if not isinstance(key, str) or not key.strip() or not key.isprintable():
        raise DataError(f"a metric is called {quoted(key)}; its name is a text on one line", hint='such as "accuracy"')
    return str(key)


def _number(name: str, value: Any, *, nan: bool = False) -> float:
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    try:
        if isinstance(value, (str, bytes, bytearray)) or kind not in "biuf":
            raise TypeError("no real number")
        number = float(value.item() if getattr(value, "shape", ()) or hasattr(value, "is_complex") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"the metric `{name}` is {quoted(value)}, not a number or None") from error
    if not (math.isfinite(number) or (nan and math.isnan(number))):
        hint = "None says that it does not apply"
        raise DataError(f"the metric `{name}` is {quoted(value)}, not a finite number or None", hint=hint)
    return number


def _texts(returned: Any) -> list[str]:
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise DataError(f"it returned {_shown(returned)}, not a list of texts", hint="an empty list means: no problem")
    texts = list(islice(returned, MOST_NUMBERS))
    if not all(map(_is_text, texts)):
        raise DataError("it returned a list with a value that is not a text", hint="return the problems in words")
    return texts


def _turns(returned: Any) -> tuple[Message, ...]:
    turns = tuple(returned) if isinstance(returned, (tuple, list)) else ()
    if not turns or not all(isinstance(turn, Message) for turn in turns):
        raise DataError(f"it returned {_shown(returned)}, not a tuple of vlmrl.types.Message")
    return turns


def _response(returned: Any) -> str | None:
    """Return the text of a trick's response; None = the trick cannot be used on the row."""
    return None if returned is None else _text(returned)


def _one(kinds: type | tuple[type, ...], words: str) -> Callable[[Any], Any]:
    """Return a check: a value of one of these types. Raises: DataError for any other value."""

    def check(returned: Any) -> Any:
        if not isinstance(returned, kinds):
            raise DataError(f"it returned {_shown(returned)}, not {words}")
        return returned

    return check


_content = _one((str, NoFile), "a text or a vlmrl.NoFile")
_positions = _one(Positions, "vlmrl.tasks.positions.Positions")
_text = _one(str, "the text of a response")


def _listed(returned: Any, kind: type, words: str, most: int = MOST_NUMBERS) -> list[Any]:
    members: list[Any] = list(islice(returned, most)) if isinstance(returned, Iterable) else [None]
    if not all(isinstance(member, kind) for member in members):
        raise DataError(f"it returned {_shown(returned)}, not a list of {words}")
    return members


def _marks(returned: Any) -> list[Mark]:
    return _listed(returned, Mark, "vlmrl.tasks.positions.Mark")


def _attacks(returned: Any) -> list[Attack]:
    attacks = _listed(returned, Attack, "vlmrl.Attack", MOST_ATTACKS)
    for attack in attacks:
        if attack.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise DataError(f"the attack `{attack.name}` has the kind {quoted(attack.kind)}", hint=f"kinds: {known}")
    return attacks


def _unit(returned: Any) -> Hashable:
    try:
        hash(returned)
    except TypeError as error:
        raise DataError(f"it returned {_shown(returned)}, which cannot be a key", hint="a text, or a number") from error
    return returned


def _figures(returned: Any) -> list[Any]:
    """Return the figures as a list, cut after one figure more than allowed; figure.py then reports too many figures."""
    if not isinstance(returned, Iterable):
        raise DataError(f"it returned {_shown(returned)}, not a list of figures")
    return list(islice(returned, MAX_FIGURES + 1))


def _shown(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {quoted(value)}"


def _notes(returned: Any) -> dict[str, tuple[CheckLevel, str]]:
    notes: dict[Any, Any] = dict(returned) if isinstance(returned, Mapping) else {"": None}
    for name, note in notes.items():
        is_note = isinstance(note, tuple) and len(note) == 2 and note[0] in get_args(CheckLevel)
        if not (isinstance(name, str) and is_note and isinstance(note[1], str)):
            kinds = ", ".join(get_args(CheckLevel))
            raise DataError(f"it returned {_shown(returned)}, not a mapping of names to ({kinds}; a text)")
    return notes


RETURNS: Mapping[str, Callable[[Any], Any]] = {
    "validate": _texts,
    "outcome": _measures,
    "set_metrics": _whole,
    "messages": _turns,
    "trace": lambda returned: traced_turns(returned, ""),
    "attacks": _attacks,
    "unit": _unit,
    "figures": _figures,
    "notes": _notes,
}
"""Name of a task's function -> the check of its results, which returns them converted."""


MAX_SOURCE_BYTES = 1_000_000
HOW = "write it as path/to/file.py:function"
ONE_FILE = "a task is one file: it may import installed packages, but no file beside it"
INFO = "a task's function gets the dataset's dataset.json, empty where there is no dataset yet"


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
        whole = f"of `set_metrics` of `{name}`"
        count = _watched(pooled.count, f"`count` {whole}", path_text, _sums)
        watched["set_metrics"] = PooledMetrics(count, _watched(pooled.metrics, f"`metrics` {whole}", path_text, _whole))
    watched["attacks"] = _with_attacks_watched(watched["attacks"], f"`attacks` of `{name}`", path_text)
    if task.outcome_as is not None:
        measure_for = _watched(task.outcome_as, f"`outcome_as` of `{name}`", path_text, _function)
        of_outcome = f"`outcome` of `{name}`"
        watched["outcome_as"] = lambda spec: _watched(measure_for(spec), of_outcome, path_text, _measures)
    if task.positions is not None:
        positions_for = _watched(task.positions, f"`positions` of `{name}`", path_text, _positions)
        what = f"`marks` of `{name}`"
        watched["positions"] = lambda spec: replace(
            positions := positions_for(spec), marks=_watched(positions.marks, what, path_text, _marks)
        )
    if task.file is not None:
        content = _watched(task.file.content, f"`content` of `file` of `{name}`", path_text, _content)
        watched["file"] = replace(task.file, content=content)
    return replace(
        task,
        name=name,
        profiles=profiles,
        own=file,
        environments=path_text,
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


def _with_attacks_watched(
    attacks: Callable[..., Sequence[Attack]], what: str, path_text: str
) -> Callable[..., list[Attack]]:
    """Return a task's `attacks` with every trick in the wrapper of `_watched`, which checks that it returns a text."""

    def call(*args: Any, **more: Any) -> list[Attack]:
        def watch(make: Make | None) -> Make | None:
            return None if make is None else _watched(make, what, path_text, _response)

        every = attacks(*args, **more)
        return [replace(attack, make=watch(attack.make), turned=watch(attack.turned)) for attack in every]

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
