"""Users' rewards: `path/to/file.py:function` in vlmrl's calling convention, TRL's, verl's or EasyR1's.

- vlmrl: `fn(x: RewardInput, **args)` -> a number, parts by name, or a RewardResult.
- trl: `fn(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)`, any subset of them,
  with responses and columns as lists -> a list of numbers or None.
- verl: `fn(data_source, solution_str, ground_truth, extra_info=None)` -> a number, or a dict with `score`.
  `solution_str` has all turns of an episode, those of tools included, and `extra_info` has `num_turns`, as there.
- easyr1: `fn(reward_inputs)`, `fn(reward_input)`, or the older `fn(predicts, ground_truths)`, `fn(predict_str,
  ground_truth)` -> dicts with `overall`.

A file may declare NEEDS_IMAGES (bool), WEIGHTS (part -> number), RANGES (part -> (low, high)), ON_TIMEOUT (part ->
number, for a response that hangs or kills the function twice) and EasyR1's REWARD_TYPE. The function's parameters are
checked when the reward is loaded. Everything below except `load_user_reward` runs in the worker process.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.base import (
    FUNCTION,
    NOT_FINITE,
    VALUE_PART,
    RewardSpec,
    UserReward,
    WorkerFunction,
    check_on_timeout,
    part_name,
)
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.types import RewardInput, Score
from vlmrl.untrusted import run_around

Parameters = Mapping[str, inspect.Parameter]
Call = Callable[[Sequence[RewardInput]], list[Any]]
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NO_PARTS = (str, bytes, list, tuple, set, frozenset, Mapping)
TRL_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer passes besides the columns of the dataset."""
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|<\|tool_call>.*?(?:<tool_call\|>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """TRL's `trainer_state`, with the fields that vlmrl knows.

    `global_step`: the policy version that sampled the responses.
    """

    global_step: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name}: vlmrl gives rewards only `trainer_state.global_step`")


def is_open(parameters: Parameters) -> bool:
    """Return whether a function takes keyword arguments of any name."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def call_trl(function: Callable[..., Any], parameters: Parameters, user: UserReward, chat: bool) -> tuple[bool, Call]:
    """Bind a function of TRL's form: `fn(prompts, completions, completion_ids, **columns)`, all lists.

    Args:
        chat: completions and prompts are lists of messages whatever the dataset holds, because the function reads them
            so.
    """
    required = {k for k, p in parameters.items() if p.default is p.empty and p.kind not in ANY and k not in user.args}
    check_args(user, parameters, {*TRL_GIVEN, *required})

    def call(inputs: Sequence[RewardInput]) -> list[Any]:
        values, extra = _trl_values(inputs, chat), _Extra()
        values |= {"log_extra": extra.log, "log_metric": _ignore}
        missing = [name for name in parameters if name in required and name not in values]
        if missing:
            raise _lacks(user, missing[0], values)
        arguments = {k: v for k, v in values.items() if (is_open(parameters) or k in parameters) and k not in user.args}
        results = as_list(function(**arguments, **user.args), inputs, user.function)
        columns = extra.columns(len(inputs))
        rows = [{k: v[i] for k, v in columns.items()} for i in range(len(inputs))]
        return [
            {**row, **no_metrics(k for k, v in row.items() if is_not_finite(v)), "reward": result}
            for row, result in zip(rows, results, strict=True)
        ]

    return True, call


def _lacks(user: UserReward, name: str, values: Mapping[str, Any]) -> RewardError:
    """Return the error for a parameter for which the rows have no value."""
    if name == "completion_ids":
        return RewardError(
            f"reward `{user.function}` needs `completion_ids`, but no token ids are saved with these responses",
            hint="a run's rollouts have them; a table needs a column `completion_ids` with lists of numbers",
        )
    known = ", ".join(k for k in values if k not in TRL_GIVEN)
    return RewardError(f"reward `{user.function}` needs the column `{name}`; the rows have: {known or 'none'}")


def _ignore(name: str, value: float) -> None:
    """Do nothing: TRL's `log_metric` gives a number of a whole batch, which belongs to no response and is not kept."""


class _Extra:
    """TRL's `log_extra`: a column of numbers becomes a part without weight; texts are not kept."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {}

    def log(self, column: str, values: Iterable[Any]) -> None:
        self._columns.setdefault(str(column), []).extend(values)

    def columns(self, size: int) -> dict[str, list[Any]]:
        """Return the columns that have a number or None for each of `size` responses."""
        return {
            name: values
            for name, values in self._columns.items()
            if len(values) == size and all(v is None or hasattr(v, "__float__") for v in values)
        }


def _trl_values(inputs: Sequence[RewardInput], chat: bool) -> dict[str, Any]:
    """Return all arguments that TRL's trainer would pass, by name; `completion_ids` if every response has them."""
    names = dict.fromkeys(name for x in inputs for name in (*x.truth, *x.columns))
    reserved = ("prompt", "completion", *TRL_GIVEN)
    values: dict[str, Any] = {
        name: [x.columns.get(name, x.truth.get(name)) for x in inputs] for name in names if name not in reserved
    }
    if any(x.images for x in inputs):
        own = [list(x.images[: len(x.images) - len(x.tool_media)]) for x in inputs]
        values |= {"images": own, "image": [next(iter(images), None) for images in own]}
    prompts = [p if isinstance(p := x.columns.get("prompt"), (list, str)) else x.prompt for x in inputs]
    if chat or any(isinstance(p, list) for p in prompts) or any(x.turns for x in inputs):
        messages = [p if isinstance(p, list) else [{"role": "user", "content": p}] for p in prompts]
        talks = [_messages(x) for x in inputs]
        counts = [int(talk[0]["role"] == "user") for talk in talks]  # what reset showed belongs to the prompt
        values["prompts"] = [[*p, *talk[:count]] for p, talk, count in zip(messages, talks, counts, strict=True)]
        values["completions"] = [talk[count:] for talk, count in zip(talks, counts, strict=True)]
    else:
        values |= {"prompts": prompts, "completions": [x.response for x in inputs]}
    if all(x.token_ids is not None for x in inputs):
        values["completion_ids"] = [list(x.token_ids or ()) for x in inputs]
    return values | {"trainer_state": TrainerState(max((x.step for x in inputs), default=0))}


def _messages(x: RewardInput) -> list[dict[str, Any]]:
    """Return a response as messages, as TRL's trainer passes them, without the calls in the texts.

    A turn of tools is one message, also if several were called. Without NEEDS_IMAGES, a block of an image has no
    `image`.
    """
    if not x.turns:
        return [{"role": "assistant", "content": x.response}]
    shown, messages, names = iter(x.images[len(x.images) - len(x.tool_media) :]), list[dict[str, Any]](), ""
    for turn in x.turns:
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls if call.name]
        text = _CALL.sub("", turn.text).strip() if turn.calls else turn.text
        blocks: list[dict[str, Any]] = [{"type": "image"} for _ in turn.media]
        for block, image in zip(blocks, shown, strict=False):
            block["image"] = image
        content = [*blocks, *([{"type": "text", "text": text}] if text else [])] if blocks else text
        more: dict[str, Any] = {"name": names} if turn.role == "tool" else {}
        if turn.calls:
            more["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            names = ", ".join(call["name"] for call in calls)
        messages.append({"role": turn.role, "content": content, **more})
    return messages


def call_verl(function: Callable[..., Any], parameters: Parameters, user: UserReward) -> tuple[bool, Call]:
    """Bind a function of verl's form: `fn(data_source, solution_str, ground_truth, extra_info)`, or their plurals."""
    singular = {"data_source", "solution_str", "ground_truth", "extra_info"}
    plural = {"data_sources", "solution_strs", "ground_truths", "extra_infos"}
    batched = bool(plural & set(parameters))
    names = plural if batched else singular
    filled = names if is_open(parameters) else names & set(parameters)
    needs_truth = bool({"ground_truth", "ground_truths"} & set(parameters))
    check_args(user, parameters, filled)
    if not filled & {"solution_str", "solution_strs"}:
        raise RewardError(
            f"reward `{user.function}` has no parameter `solution_str`, which verl's form needs", where=user.file
        )

    def one(x: RewardInput) -> dict[str, Any]:
        extra = x.columns.get("extra_info")
        values = {
            "data_source": x.columns.get("data_source", ""),
            "solution_str": "\n".join(turn.text for turn in x.turns) if x.turns else x.response,
            "extra_info": dict(extra if isinstance(extra, Mapping) else x.columns),
        }
        if x.turns:  # verl counts the prompt, too
            values["extra_info"]["num_turns"] = len(x.turns) + 1
        if needs_truth or (is_open(parameters) and x.truth):
            values["ground_truth"] = expected(x)
        return values

    def call(inputs: Sequence[RewardInput]) -> list[Any]:
        rows = [one(x) for x in inputs]
        if batched:
            lists = {k: [row.get(k[:-1]) for row in rows] for k in filled}
            results = as_list(function(**lists, **user.args), inputs, user.function)
        else:
            results = [function(**{k: v for k, v in row.items() if k in filled}, **user.args) for row in rows]
        return [scored(r, "score", user.function) for r in results]

    return batched, call


def call_easyr1(
    function: Callable[..., Any], parameters: Parameters, module: ModuleType, user: UserReward
) -> tuple[bool, Call]:
    """Bind a function of EasyR1's form: `fn(reward_inputs)`, `fn(reward_input)`, or the older ones of two arguments."""
    positional = [p for p in parameters.values() if p.default is p.empty and p.name not in user.args][:2]
    if not positional:
        raise RewardError(f"reward `{user.function}` takes no input", where=user.file)
    check_args(user, parameters, {p.name for p in positional})
    first = positional[0]
    declared = getattr(module, "REWARD_TYPE", None)
    listed = "list" in str(first.annotation).lower() or first.name.endswith("s")
    batched = declared == "batch" if declared in ("batch", "sequential") else listed

    def row(x: RewardInput) -> dict[str, Any]:
        return {"response": x.response, "response_length": x.num_tokens, "ground_truth": expected(x)}

    def call(inputs: Sequence[RewardInput]) -> list[Any]:
        rows = [row(x) for x in inputs]
        if len(positional) == 2:
            pairs = [(r["response"], r["ground_truth"]) for r in rows]
            if not batched:
                results = [function(*pair, **user.args) for pair in pairs]
            else:
                results = function([p[0] for p in pairs], [p[1] for p in pairs], **user.args)
        else:
            results = function(rows, **user.args) if batched else [function(r, **user.args) for r in rows]
        return [scored(r, "overall", user.function) for r in as_list(results, inputs, user.function)]

    return batched, call


def check_args(user: UserReward, parameters: Parameters, filled: set[str]) -> None:
    """Check that every bound argument exists, and every parameter without default is bound or filled.

    Raises: RewardError otherwise.
    """
    usable = {k: p for k, p in parameters.items() if k not in filled and p.kind not in ANY}
    for key in user.args:
        if key in filled or (key not in usable and not is_open(parameters)):
            known = f"it takes: {', '.join(usable) or 'none'}"
            raise RewardError(f"reward `{user.function}` takes no argument `{key}`", where=user.file, hint=known)
    for name, parameter in usable.items():
        if parameter.default is parameter.empty and name not in user.args:
            raise RewardError(
                f"reward `{user.function}` needs the argument `{name}`",
                where=user.file,
                hint=f"set [reward.args] {name} = ..., or give the parameter a default",
            )


def as_list(result: Any, inputs: Sequence[RewardInput], name: str) -> list[Any]:
    """Return a batch result as one entry per response. Raises: RewardError that says what came instead."""
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__iter__"):
        shown = excerpt(repr(result), 80)
        raise RewardError(f"reward `{name}` returned {shown} for {len(inputs)} responses, not a list")
    values = list(result)
    if len(values) != len(inputs):
        raise RewardError(f"reward `{name}` returned {len(values)} scores for {len(inputs)} responses")
    return values


def scored(result: Any, part: str, name: str) -> Any:
    """Return a number as the part `part`; of a dict, all entries except texts and collections (a parsed answer).

    A number beside `part` that is not finite does not apply, and the note says so.
    """
    if not isinstance(result, Mapping):
        return {part: result}
    if part not in result:
        raise RewardError(f"reward `{name}` returned a dict without `{part}`: {sorted(map(str, result))}")
    parts = {k: v for k, v in result.items() if k == part or not isinstance(v, NO_PARTS)}
    return parts | no_metrics(k for k, v in parts.items() if k != part and is_not_finite(v))


def is_not_finite(value: Any) -> bool:
    """Return whether a value is a number, and NaN or infinite."""
    try:
        return hasattr(value, "__float__") and not isfinite(float(value))
    except Exception:  # a value of the user's code; `check_parts` judges it
        return False


def no_metrics(names: Iterable[Any]) -> dict[Any, Any]:
    """Return the entries of a result for metrics that are not finite: None for each, and a note; {} without names."""
    none = dict.fromkeys(names)
    return {**none, "note": "; ".join(f"`{name}` {NOT_FINITE}" for name in none)} if none else {}


def expected(x: RewardInput) -> Any:
    """Return the expected answer, or all truth fields if a task has several."""
    try:
        return ground_truth(x)
    except RewardError:
        if not x.truth:
            raise
        return dict(x.truth)


MARKS = {
    "trl": {"completions", "completion_ids"},
    "verl": {"solution_str", "data_source", "solution_strs", "data_sources"},
    "easyr1": {"reward_inputs", "reward_input", "predicts", "predict_str", "predict"},
}
"""Parameter names that only one convention uses."""
TEXT_NAMES = {"response", "text", "completion", "prediction", "pred", "answer", "output", "s", "string"}


def load_user_reward(name: str, *, args: dict[str, Any], style: str, base_dir: Path | str | None) -> RewardSpec:
    """Find the file, let a worker import it and inspect the function. See `vlmrl.rewards.load_reward`."""
    from vlmrl.rewards.worker_pool import inspect_user_reward

    path, function, text = read_user_file(name, base_dir, "reward")
    user = UserReward(str(path), function, text, style, args)
    facts = inspect_user_reward(user)
    user = UserReward(str(path), function, text, facts["style"], args, facts["batched"])
    return RewardSpec(
        name,
        _worker_only,
        {part: (low, high) for part, (low, high) in facts["ranges"].items()},
        facts["weights"],
        needs_images=facts["needs_images"],
        needs_token_ids=facts["needs_token_ids"],
        accuracy=facts["accuracy"],
        on_timeout=facts["on_timeout"],
        source_sha256=hashlib.sha256(text.encode()).hexdigest(),
        files=facts["files"],
        user=user,
        args=args,
    )


def read_user_file(name: str, base_dir: Path | str | None, what: str) -> tuple[Path, str, str]:
    """Return path, name in it, and text of a file of the user's, which `name` gives as path/to/file.py:name.

    Args:
        base_dir: folder that is searched before the current one.
        what: "reward" or "environment", for messages.
    Raises: RewardError when there is no such file, it lies in a run, or it is no text.
    """
    path_text, _, function = name.rpartition(":")
    if not path_text.endswith(".py") or not function.isidentifier():
        raise RewardError(f"{what} `{name}` does not name a function", hint="write it as path/to/file.py:function")
    path = _find(path_text, base_dir, what)
    if (run := run_around(path)) is not None:
        raise RewardError(f"{path_text} lies in the run {run.name}: code there is never run", hint="copy it out first")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RewardError(f"the {what} file cannot be read: {error.strerror}", where=str(path)) from error
    try:
        return path, function, source.decode()
    except UnicodeDecodeError as error:
        raise RewardError(f"{what} file {path_text} is not UTF-8 text", where=str(path)) from error


def _find(path_text: str, base_dir: Path | str | None, what: str) -> Path:
    places = [Path(base_dir)] if base_dir is not None else []
    for place in (*places, Path.cwd()):
        path = place / Path(path_text).expanduser()
        if path.is_file():
            return path
    tried = ", ".join(str(p) for p in dict.fromkeys((*places, Path.cwd())))
    raise RewardError(f"there is no {what} file {path_text}", hint=f"these folders were searched: {tried}")


def _worker_only(x: RewardInput) -> float:
    raise RuntimeError("a user's reward runs in a worker: use vlmrl.rewards.scoring.Scorer")


@dataclass(frozen=True)
class BoundReward:
    """User's function bound to its style and arguments. It takes a list of inputs and returns one raw result for each.

    Args:
        accuracy: the part that is an accuracy by the function's name; None = see base.py.
    """

    call: Callable[[Sequence[RewardInput]], list[Any]]
    style: str
    batched: bool
    needs_images: bool
    needs_token_ids: bool
    weights: Mapping[str, float]
    ranges: Mapping[str, tuple[float, float]]
    accuracy: str | None
    on_timeout: Mapping[str, float]


def bind_user_reward(module: ModuleType, user: UserReward, guard: AbstractContextManager[Any]) -> BoundReward:
    """Look up the function, decide its style and check the arguments.

    Args:
        guard: context manager that is entered for every call of the user's code, and for nothing else.
    Raises: RewardError for a missing function, an unclear style, an argument that the function does not take, or a
        declaration (WEIGHTS, RANGES, ON_TIMEOUT) that makes no sense.
    """
    function = _find_function(module, user)
    parameters = inspect.signature(function).parameters
    words = _words(user, function)
    style = detect_style(parameters, user, words) if user.style == "auto" else user.style
    needs = getattr(module, "NEEDS_IMAGES", None)
    needs_images = bool(needs) if needs is not None else bool({"image", "images"} & {*words, *parameters})
    guarded = _guarded(function, guard)
    if style == "easyr1":
        batched, call = call_easyr1(guarded, parameters, module, user)
    elif style == "verl":
        batched, call = call_verl(guarded, parameters, user)
    elif style == "trl":
        batched, call = call_trl(guarded, parameters, user, chat="content" in words)
    else:
        check_args(user, parameters, set(list(parameters)[:1]))
        batched, call = False, lambda inputs: [guarded(x, **user.args) for x in inputs]
    ids = style == "trl" and (is_open(parameters) or "completion_ids" in parameters)
    default = {VALUE_PART[style]: 1.0} if style in VALUE_PART else {}
    names = (user.function, str(getattr(function, "__name__", "")))
    is_accuracy = style == "trl" and any(FUNCTION.fullmatch(name.lower()) for name in names)
    ranges = {part_name(k): _range(k, v) for k, v in getattr(module, "RANGES", {}).items()}
    return BoundReward(
        call,
        style,
        batched,
        needs_images and style in ("vlmrl", "trl"),
        ids or (style == "vlmrl" and "token_ids" in words),
        {part_name(k): float(v) for k, v in getattr(module, "WEIGHTS", default).items()},
        ranges,
        VALUE_PART[style] if is_accuracy else None,
        check_on_timeout(getattr(module, "ON_TIMEOUT", {}), ranges, f"ON_TIMEOUT of {Path(user.file).name}"),
    )


def bind_builtin(worker: WorkerFunction) -> BoundReward:
    """Return a built-in as a worker runs it, one response a call; what it declares is known where it was chosen."""
    fn = worker.make()
    return BoundReward(lambda inputs: [fn(x) for x in inputs], "auto", False, False, False, {}, {}, None, {})


def _find_function(module: ModuleType, user: UserReward) -> Callable[..., Any]:
    """Return the function of that name, or an instance if the name is that of a class."""
    target = getattr(module, user.function, None)
    if target is None:
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        known = ", ".join(names) or "none"
        raise RewardError(f"{user.file} has no function `{user.function}`", hint=f"functions there: {known}")
    function = target() if inspect.isclass(target) else target
    if not callable(function):
        raise RewardError(f"`{user.function}` in {user.file} is a {type(function).__name__}, not a function")
    return function


def _guarded(function: Callable[..., Any], guard: AbstractContextManager[Any]) -> Callable[..., Any]:
    """Return the function with the guard around it.

    A coroutine is run to its end; a Score becomes its parts and note.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with guard:
            result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            import asyncio

            with guard:
                result = asyncio.run(result)
        return {**result.parts, "note": result.note} if isinstance(result, Score) else result

    return call


def _range(part: Any, ends: Any) -> tuple[float, float]:
    """Return a declared range as two numbers. Raises: RewardError for anything else, or if the first is larger."""
    try:
        low, high = map(float, ends)
    except (TypeError, ValueError):
        low = high = nan
    if not low <= high:
        shown = excerpt(repr(ends), 60)
        raise RewardError(f"RANGES gives the part `{part}` {shown}, not two numbers with the smaller first")
    return low, high


def detect_style(parameters: Mapping[str, inspect.Parameter], user: UserReward, words: set[str]) -> str:
    """Return the style that the parameter names belong to.

    Args:
        words: names and texts in the source; they decide for a function that takes only keyword arguments.
    Raises: RewardError when none or several fit.
    """
    names = set(parameters) - set(user.args)
    if is_open(parameters) and len(parameters) == 1:
        names = words
    fits = [style for style, marks in MARKS.items() if marks & names]
    free = [
        p
        for p in parameters.values()
        if p.name not in user.args and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    first = next(iter(parameters.values()), None)
    if first is not None and "RewardInput" in str(first.annotation):
        fits.append("vlmrl")
    elif not fits and len(free) == 1 and free[0] is first:
        fits = [] if free[0].name in TEXT_NAMES or free[0].annotation in (str, "str") else ["vlmrl"]
    if len(fits) == 1:
        return fits[0]
    shown = f"{user.function}({', '.join(parameters)})"
    why = f"it could be {' or '.join(fits)}" if fits else "its parameter names fit no known convention"
    raise RewardError(
        f"the calling convention of reward `{shown}` is unclear: {why}",
        where=user.file,
        hint='set [reward] style = "vlmrl" (one RewardInput), "trl" (completions, **columns), '
        '"verl" (data_source, solution_str, ground_truth) or "easyr1" (reward_inputs)',
    )


def _words(user: UserReward, function: Callable[..., Any]) -> set[str]:
    """Return the attribute names and text constants of the user's file, which show what it reads from its inputs.

    If the function is imported from another file, its own source is included.
    """
    sources, target = [user.code], function if inspect.isroutine(function) else type(function)
    with suppress(OSError, TypeError):
        if inspect.getsourcefile(inspect.unwrap(target)) != user.file:
            sources.append(textwrap.dedent(inspect.getsource(inspect.unwrap(target))))
    words: set[str] = set()
    for source in sources:
        with suppress(SyntaxError):
            words |= _words_of(ast.parse(source))
    return words


def _words_of(tree: ast.AST) -> set[str]:
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (attributes - {"image"}) | texts
