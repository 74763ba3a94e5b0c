"""Users' rewards: `path/to/file.py:function` in our calling convention, TRL's, verl's or EasyR1's.

- vlmrl: `fn(x: RewardInput, **args)` -> a number, or parts by name.
- trl: `fn(completions, prompts=None, **columns)`, completions and columns as lists -> a list of numbers or None.
- verl: `fn(data_source, solution_str, ground_truth, extra_info=None)` -> a number, or a dict with `score`.
- easyr1: `fn(reward_inputs)`, `fn(reward_input)`, or the older `fn(predicts, ground_truths)`, `fn(predict_str,
  ground_truth)` -> dicts with `overall`.

A file may declare NEEDS_IMAGES (bool), WEIGHTS (part -> number), RANGES (part -> (low, high)) and EasyR1's REWARD_TYPE.
Everything below except `load_user_reward` runs in the worker process.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.base import RewardSpec, UserReward
from vlmrl.rewards.text import ground_truth
from vlmrl.types import RewardInput, Score

MARKS = {
    "trl": {"completions"},
    "verl": {"solution_str", "data_source", "solution_strs", "data_sources"},
    "easyr1": {"reward_inputs", "reward_input", "predicts", "predict_str", "predict"},
}
"""Parameter names that only one convention uses."""
TEXT_NAMES = {"response", "text", "completion", "prediction", "pred", "answer", "output", "s", "string"}
TRL_EXTRAS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
VALUE_PART = {"trl": "reward", "verl": "score", "easyr1": "overall"}


def load_user_reward(name: str, *, args: dict[str, Any], style: str, base_dir: Path | str | None) -> RewardSpec:
    """Find the file, let a worker import it and look at the function. See `vlmrl.rewards.load_reward`."""
    from vlmrl.rewards.pool import inspect_user_reward

    path_text, _, function = name.rpartition(":")
    if not path_text.endswith(".py") or not function.isidentifier():
        raise RewardError(f"reward `{name}` does not name a function", hint="write it as path/to/file.py:function")
    path = _find(path_text, base_dir)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RewardError(f"the reward file cannot be read: {error.strerror}", where=str(path)) from error
    try:
        text = source.decode()
    except UnicodeDecodeError as error:
        raise RewardError(f"reward file {path_text} is not UTF-8 text", where=str(path)) from error
    user = UserReward(str(path), function, text, style, args)
    found = inspect_user_reward(user)
    user = UserReward(str(path), function, text, found["style"], args, found["batched"])
    ranges = {part: (float(low), float(high)) for part, (low, high) in found["ranges"].items()}
    sha256 = hashlib.sha256(source).hexdigest()
    needs = found["needs_images"]
    return RewardSpec(name, _worker_only, ranges, found["weights"], False, needs, sha256, user, args)


def _find(path_text: str, base_dir: Path | str | None) -> Path:
    places = [Path(base_dir)] if base_dir is not None else []
    for place in (*places, Path.cwd()):
        path = place / Path(path_text).expanduser()
        if path.is_file():
            return path
    tried = ", ".join(str(p) for p in dict.fromkeys((*places, Path.cwd())))
    raise RewardError(f"there is no reward file {path_text}", hint=f"looked in {tried}")


def _worker_only(x: RewardInput) -> float:
    raise RuntimeError("a user's reward runs in a worker: use vlmrl.rewards.scorer.Scorer")


@dataclass(frozen=True)
class BoundReward:
    """A user's function bound to its style and arguments: a list of inputs in, one raw result each out."""

    call: Callable[[Sequence[RewardInput]], list[Any]]
    style: str
    batched: bool
    needs_images: bool
    weights: Mapping[str, float]
    ranges: Mapping[str, Sequence[float]]


def bind_user_reward(module: ModuleType, user: UserReward) -> BoundReward:
    """Look up the function, settle its style, check the arguments.

    Raises: RewardError for a missing function, an unclear style or an argument that the function does not take.
    """
    target = getattr(module, user.function, None)
    if target is None:
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        known = ", ".join(names) or "none"
        raise RewardError(f"{user.file} has no function `{user.function}`", hint=f"functions there: {known}")
    function = target() if inspect.isclass(target) else target
    if not callable(function):
        raise RewardError(f"`{user.function}` in {user.file} is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters
    style = detect_style(parameters, user) if user.style == "auto" else user.style
    tree = ast.parse(user.source)
    words = _words(tree)
    needs = getattr(module, "NEEDS_IMAGES", None)
    needs_images = bool(needs) if needs is not None else bool({"image", "images"} & {*words, *parameters})
    needs_images = needs_images and style in ("vlmrl", "trl")
    if style == "easyr1":
        batched, call = _easyr1(function, parameters, module, user)
    elif style == "verl":
        batched, call = _verl(function, parameters, user)
    elif style == "trl":
        batched, call = _trl(function, parameters, user, "content" in words)
    else:
        _check_args(user, parameters, set(list(parameters)[:1]))
        batched, call = False, lambda inputs: [_run(function, x, **user.args) for x in inputs]
    default = {VALUE_PART[style]: 1.0} if style in VALUE_PART else {}
    weights = {str(k): float(v) for k, v in getattr(module, "WEIGHTS", default).items()}
    return BoundReward(call, style, batched, needs_images, weights, dict(getattr(module, "RANGES", {})))


def detect_style(parameters: Mapping[str, inspect.Parameter], user: UserReward) -> str:
    """The style that the parameter names belong to. Raises: RewardError when none or several fit."""
    names = set(parameters) - set(user.args)
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
    why = f"it could be {' or '.join(fits)}" if fits else "its parameter names belong to none that is known"
    raise RewardError(
        f"the calling convention of reward `{shown}` is unclear: {why}",
        where=user.file,
        hint='set [reward] style = "vlmrl" (one RewardInput), "trl" (completions, **columns), '
        '"verl" (data_source, solution_str, ground_truth) or "easyr1" (reward_inputs)',
    )


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    if inspect.iscoroutine(result):
        import asyncio

        result = asyncio.run(result)
    return {**result.parts, "note": result.note} if isinstance(result, Score) else result


def _words(tree: ast.AST) -> set[str]:
    """Attribute names and text constants of a source: what it reads from its inputs."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (attributes - {"image"}) | texts


def _check_args(user: UserReward, parameters: Mapping[str, inspect.Parameter], filled: set[str]) -> None:
    """Every bound argument must exist, and every parameter without default must be bound or filled."""
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    usable = {
        k: p for k, p in parameters.items() if k not in filled and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    for key in user.args:
        if key in filled or (key not in usable and not open_ended):
            known = f"it takes: {', '.join(usable) or 'none'}"
            raise RewardError(f"reward `{user.function}` takes no argument `{key}`", where=user.file, hint=known)
    for name, parameter in usable.items():
        if parameter.default is parameter.empty and name not in user.args:
            raise RewardError(
                f"reward `{user.function}` needs the argument `{name}`",
                where=user.file,
                hint=f"set [reward.args] {name} = ..., or give the parameter a default",
            )


def _as_list(result: Any, inputs: Sequence[RewardInput], name: str) -> list[Any]:
    """A batch result as one entry a response, or a RewardError that says what came instead."""
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
        raise RewardError(f"reward `{name}` returned {result!r:.80} for {len(inputs)} responses, not a list")
    values = list(result)
    if len(values) != len(inputs):
        raise RewardError(f"reward `{name}` returned {len(values)} scores for {len(inputs)} responses")
    return values


def _scored(result: Any, part: str, name: str) -> Any:
    """A number as the part `part`; of a dict its numbers, `part` among them (texts are left out)."""
    if not isinstance(result, Mapping):
        return {part: result}
    if part not in result:
        raise RewardError(f"reward `{name}` returned a dict without `{part}`: {sorted(map(str, result))}")
    return {str(k): v for k, v in result.items() if k == part or not isinstance(v, (str, bytes, list, dict))}


def _expected(x: RewardInput) -> Any:
    """The expected answer, or all truth fields of a task that has several."""
    try:
        return ground_truth(x)
    except RewardError:
        if not x.truth:
            raise
        return dict(x.truth)


def _trl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], user: UserReward, reads_content: bool
) -> tuple[bool, Callable[[Sequence[RewardInput]], list[Any]]]:
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "completion_ids" in parameters and parameters["completion_ids"].default is inspect.Parameter.empty:
        raise RewardError(
            f"reward `{user.function}` needs `completion_ids`, which are not passed to rewards",
            where=user.file,
            hint="read `completions`, or use our signature and `x.num_tokens`",
        )
    columns = {
        k for k, p in parameters.items() if p.default is p.empty and k not in user.args and p.kind is not p.VAR_KEYWORD
    }
    _check_args(user, parameters, {*TRL_EXTRAS, *columns})
    fixed: dict[str, Any] = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    fixed = {k: v for k, v in fixed.items() if k in parameters}

    def call(inputs: Sequence[RewardInput]) -> list[Any]:
        chat = reads_content or any(isinstance(x.columns.get("prompt"), list) for x in inputs)
        values = _trl_columns(inputs, chat)
        missing = [name for name in parameters if name in columns and name not in values and name not in fixed]
        if missing:
            known = ", ".join(values)
            raise RewardError(f"reward `{user.function}` needs the column `{missing[0]}`; the rows have: {known}")
        taken = {k: v for k, v in values.items() if (open_ended or k in parameters) and k not in user.args}
        result = _run(function, **taken, **fixed, **user.args)
        return [{"reward": v} for v in _as_list(result, inputs, user.function)]

    return True, call


def _ignore(*args: Any, **kwargs: Any) -> None:
    """TRL's logging hooks: parts are logged anyway."""


def _trl_columns(inputs: Sequence[RewardInput], chat: bool) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for x in inputs for name in (*x.truth, *x.columns) if name != "prompt")
    columns = {name: [x.columns.get(name, x.truth.get(name)) for x in inputs] for name in names}
    if any(x.images for x in inputs):
        columns |= {"images": [list(x.images) for x in inputs], "image": [next(iter(x.images), None) for x in inputs]}
    if chat:
        given = [x.columns.get("prompt") for x in inputs]
        prompts = [
            p if isinstance(p, list) else [{"role": "user", "content": x.prompt}]
            for p, x in zip(given, inputs, strict=True)
        ]
        completions = [[{"role": "assistant", "content": x.response}] for x in inputs]
        return {**columns, "prompts": prompts, "completions": completions}
    return {**columns, "prompts": [x.prompt for x in inputs], "completions": [x.response for x in inputs]}


def _verl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], user: UserReward
) -> tuple[bool, Callable[[Sequence[RewardInput]], list[Any]]]:
    singular = {"data_source", "solution_str", "ground_truth", "extra_info"}
    plural = {"data_sources", "solution_strs", "ground_truths", "extra_infos"}
    batched = bool(plural & set(parameters))
    filled = (plural if batched else singular) & set(parameters)
    _check_args(user, parameters, filled)
    if not filled & {"solution_str", "solution_strs"}:
        raise RewardError(f"reward `{user.function}` has no parameter `solution_str`, as verl's have", where=user.file)

    def one(x: RewardInput) -> dict[str, Any]:
        extra = x.columns.get("extra_info")
        values = {
            "data_source": x.columns.get("data_source", ""),
            "solution_str": x.response,
            "extra_info": dict(extra if isinstance(extra, Mapping) else x.columns),
        }
        if filled & {"ground_truth", "ground_truths"}:
            values["ground_truth"] = _expected(x)
        return values

    def call(inputs: Sequence[RewardInput]) -> list[Any]:
        rows = [one(x) for x in inputs]
        if batched:
            lists = {k: [row[k[:-1]] for row in rows] for k in filled}
            results = _as_list(_run(function, **lists, **user.args), inputs, user.function)
        else:
            results = [_run(function, **{k: row[k] for k in filled}, **user.args) for row in rows]
        return [_scored(r, "score", user.function) for r in results]

    return batched, call


def _easyr1(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], module: ModuleType, user: UserReward
) -> tuple[bool, Callable[[Sequence[RewardInput]], list[Any]]]:
    positional = [p for p in parameters.values() if p.default is p.empty and p.name not in user.args][:2]
    if not positional:
        raise RewardError(f"reward `{user.function}` takes no input", where=user.file)
    _check_args(user, parameters, {p.name for p in positional})
    first = positional[0]
    declared = getattr(module, "REWARD_TYPE", None)
    listed = "list" in str(first.annotation).lower() or first.name.endswith("s")
    batched = declared == "batch" if declared in ("batch", "sequential") else listed

    def row(x: RewardInput) -> dict[str, Any]:
        return {"response": x.response, "response_length": x.num_tokens, "ground_truth": _expected(x)}

    def call(inputs: Sequence[RewardInput]) -> list[Any]:
        rows = [row(x) for x in inputs]
        if len(positional) == 2:
            pairs = [(r["response"], r["ground_truth"]) for r in rows]
            if not batched:
                results = [_run(function, *pair, **user.args) for pair in pairs]
            else:
                results = _run(function, [p[0] for p in pairs], [p[1] for p in pairs], **user.args)
        else:
            results = _run(function, rows, **user.args) if batched else [_run(function, r, **user.args) for r in rows]
        return [_scored(r, "overall", user.function) for r in _as_list(results, inputs, user.function)]

    return batched, call
