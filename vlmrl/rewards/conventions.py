"""Calling conventions of TRL, verl and EasyR1: from a user's function and its parameters to a call on RewardInputs.

This runs in the worker process. Each of `call_trl`, `call_verl` and `call_easyr1` checks the function's parameters when
the reward is loaded, and returns (whether one call takes the whole batch, the call).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.rewards.worker_code import UserReward
from vlmrl.types import RewardInput

Parameters = Mapping[str, inspect.Parameter]
Call = Callable[[Sequence[RewardInput]], list[Any]]
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NO_PARTS = (str, bytes, list, tuple, set, frozenset, Mapping)
TRL_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer passes besides the columns of the dataset."""


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
        return [{**{k: v[i] for k, v in columns.items()}, "reward": result} for i, result in enumerate(results)]

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
        values |= {"images": [list(x.images) for x in inputs], "image": [next(iter(x.images), None) for x in inputs]}
    prompts = [p if isinstance(p := x.columns.get("prompt"), (list, str)) else x.prompt for x in inputs]
    if chat or any(isinstance(p, list) for p in prompts):
        values["prompts"] = [p if isinstance(p, list) else [{"role": "user", "content": p}] for p in prompts]
        values["completions"] = [[{"role": "assistant", "content": x.response}] for x in inputs]
    else:
        values |= {"prompts": prompts, "completions": [x.response for x in inputs]}
    if all(x.token_ids is not None for x in inputs):
        values["completion_ids"] = [list(x.token_ids or ()) for x in inputs]
    return values | {"trainer_state": TrainerState(max((x.step for x in inputs), default=0))}


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
            "solution_str": x.response,
            "extra_info": dict(extra if isinstance(extra, Mapping) else x.columns),
        }
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
    """Return a number as the part `part`; of a dict, all entries except texts and collections (a parsed answer)."""
    if not isinstance(result, Mapping):
        return {part: result}
    if part not in result:
        raise RewardError(f"reward `{name}` returned a dict without `{part}`: {sorted(map(str, result))}")
    return {k: v for k, v in result.items() if k == part or not isinstance(v, NO_PARTS)}


def expected(x: RewardInput) -> Any:
    """Return the expected answer, or all truth fields if a task has several."""
    try:
        return ground_truth(x)
    except RewardError:
        if not x.truth:
            raise
        return dict(x.truth)
