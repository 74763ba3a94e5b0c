"""Rewards: text and pixels in, parts out. `GENERAL` is the table of built-in rewards that belong to no task.

Tasks have built-ins of their own; `vlmrl.tasks.builtin_rewards` has all of them by name. Users bring
`file.py:function`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.errors import RewardError, listed, unknown
from vlmrl.rewards import text_rewards
from vlmrl.rewards.base import STYLES, Member, RewardSpec, check_on_timeout
from vlmrl.rewards.identity import single_records
from vlmrl.rewards.math import rules as math_rules
from vlmrl.rewards.several import compose, label_of


@dataclass(frozen=True)
class Builtin:
    """Built-in reward.

    Args:
        build: function that returns the reward for its arguments.
        summary: its line in `vlmrl recipe list --rewards`.
        version: number to raise with every change of a response's score, or of an argument's default. Runs, evaluations
            and checkpoints identify the reward by it (see identity.py); tests/golden/rewards has its scores.
        lacks: why it does not take an argument that similar rewards take.
        any_truth: it takes any ground truth unchanged, even one that breaks its task's form.
        shown: arguments that choose what is shown beside a score and change no score, such as pictures.
    """

    build: Callable[..., RewardSpec]
    summary: str
    version: int
    lacks: str = ""
    any_truth: bool = False
    shown: tuple[str, ...] = ()


GENERAL: dict[str, Builtin] = {
    "exact_match": Builtin(
        text_rewards.exact_match, "the answer is the expected text, ignoring case and white space", version=2
    ),
    "token_f1": Builtin(
        text_rewards.token_f1, "how many words the answer shares with the expected one, as SQuAD's F1", version=2
    ),
    "number_match": Builtin(
        text_rewards.number_match, "the answer is the expected number, within a tolerance", version=2
    ),
    "format_tags": Builtin(text_rewards.format_tags, "the response is exactly a sequence of tags", version=1),
    "length": Builtin(text_rewards.length, "full reward up to a soft length, falling to zero at a hard one", version=1),
    "think_format": Builtin(
        text_rewards.think_format, "the response is one thought in <think> tags, then an answer", version=1
    ),
    "language": Builtin(text_rewards.language, "minus the share of letters that belong to another script", version=1),
    "ending": Builtin(
        text_rewards.ending, "-1 for a response that the token limit cut, or that is too short", version=1
    ),
    "tool_use": Builtin(
        text_rewards.tool_use, "a tool has answered a call; behind a gate, beside a right answer alone", version=1
    ),
    "environment_reward": Builtin(
        text_rewards.environment_reward, "what the environment's own `get_reward` has returned, from 0 to 1", version=1
    ),
    "math": Builtin(
        math_rules.math,
        "the last box is the expected number, expression, set, interval or option; runs in workers",
        version=6,
    ),
    "maye": Builtin(
        math_rules.maye, "MAYE's published judge, format and language for boxed answers; runs in workers", version=1
    ),
    "rllava_math": Builtin(
        math_rules.rllava_math, "RLLaVA's published format and grader for boxed answers; runs in workers", version=1
    ),
}


def load_reward(
    name: str,
    *,
    args: Mapping[str, Any] | None = None,
    style: str = "auto",
    base_dir: Path | str | None = None,
    builtins: Mapping[str, Builtin] = GENERAL,
) -> RewardSpec:
    """Return a built-in reward by its name, or a user's `path/to/file.py:function`, with `args` bound.

    Args:
        style: calling convention of a user's function: auto, vlmrl, trl, verl, easyr1.
        base_dir: folder where a relative path starts (the recipe's folder); the current folder is tried next.
        builtins: the built-ins by name; `vlmrl.tasks.builtin_rewards.load_reward` includes those of the tasks.
    Raises: RewardError for an unknown name, a missing file or function, an argument that it does not take, an unclear
        calling convention, or a file that cannot be imported (with the lines of the user's traceback).
    """
    args = dict(args or {})
    if style not in ("auto", *STYLES):
        raise unknown("reward style", style, ("auto", *STYLES), error=RewardError)
    if ".py:" in name or name.endswith(".py"):
        from vlmrl.rewards.user_reward import load_user_reward

        return load_user_reward(name, args=args, style=style, base_dir=base_dir)
    if name not in builtins:
        own = "; or bring your own as path/to/file.py:function"
        raise unknown("reward", name, builtins, error=RewardError, more=own)
    build = builtins[name].build
    parameters = inspect.signature(build).parameters
    for key in args:
        if key not in parameters:
            raise _no_argument(name, key, parameters, builtins)
    missing = [k for k, p in parameters.items() if p.default is inspect.Parameter.empty and k not in args]
    if missing:
        raise RewardError(f"reward `{name}` needs the argument `{missing[0]}`", hint=f"set [reward.args] {missing[0]}")
    try:
        spec = build(**args)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward `{name}` cannot use its arguments {args}: {error}") from error
    scored, free = ({k: v for k, v in args.items() if (k in builtins[name].shown) is free} for free in (False, True))
    return replace(spec, version=builtins[name].version, args=spec.args or scored, free_args={**spec.free_args, **free})


def _no_argument(name: str, key: str, parameters: Mapping[str, Any], builtins: Mapping[str, Builtin]) -> RewardError:
    message, lacks = f"reward `{name}` takes no argument `{key}`", builtins[name].lacks
    other_rewards = [other for other, builtin in builtins.items() if key in inspect.signature(builtin.build).parameters]
    if not other_rewards or not lacks:
        return RewardError(message, hint=listed(key, parameters))
    hint = f"leave it out, or choose a `variant` of the task with a reward that takes it ({', '.join(other_rewards)})"
    return RewardError(f"{message}: {lacks}", hint=hint)


def reward_record(spec: RewardSpec, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the manifest's record of a reward, with all that is needed to load it again.

    It has the name, style, args, weights, and the version of a built-in or the sha256 of a user's source. If the recipe
    sets them, it also has the part that is the accuracy, and the parts for a response that hangs. Several rewards have
    their records under `rewards`, each with its label, weight and gate.
    """
    if spec.members:
        return {
            "name": spec.name,
            "weights": dict(weights or spec.weights),
            "rewards": [_member_record(member, weights) for member in spec.members],
            **({"accuracy": spec.accuracy} if spec.accuracy_named else {}),
        }
    style = spec.user.style if spec.user else "auto"
    args = json.loads(json.dumps(dict(spec.args), default=str))
    return {
        "name": spec.name,
        "style": style,
        "args": args,
        "weights": dict(weights),
        **({"free_args": dict(spec.free_args)} if spec.free_args else {}),
        **({"sha256": spec.source_sha256} if spec.version is None else {"version": spec.version}),
        **({"files": dict(spec.files)} if spec.files else {}),
        **({"accuracy": spec.accuracy} if spec.accuracy_named else {}),
        **({"on_timeout": dict(spec.on_timeout)} if spec.on_timeout else {}),
    }


def _member_record(member: Member, weights: Mapping[str, float]) -> dict[str, Any]:
    return {
        "label": member.label,
        "weight": weights.get(member.label, 0.0) if weights else member.weight,
        **({"gate": member.gate} if member.gate is not None else {}),
        **({"timeout_seconds": member.timeout_seconds} if member.timeout_seconds is not None else {}),
        **({"of_task": True} if member.of_task else {}),
        **reward_record(member.spec, member.weights),
    }


def load_recorded(
    record: Mapping[str, Any], base_dir: Path | str | None = None, *, builtins: Mapping[str, Builtin] = GENERAL
) -> RewardSpec:
    """Return the reward of a `reward_record` as it is now; `identity_of` both records tells whether it changed.

    Raises: RewardError as `load_reward`, also for a record that lacks its name or arguments.
    """
    singles = single_records(record)
    if singles != [record]:
        members = [_load_member(single, base_dir, builtins) for single in singles]
        return name_accuracy(compose(members), record.get("accuracy"))
    if not isinstance(record.get("name"), str) or not isinstance(record.get("args"), Mapping):
        raise RewardError("the run's manifest does not say which reward with which arguments scored its rollouts")
    style = str(record.get("style", "auto"))
    free_args = record.get("free_args")
    args = _merged(record["args"], free_args if isinstance(free_args, Mapping) else {})
    spec = load_reward(record["name"], args=args, style=style, base_dir=base_dir, builtins=builtins)
    return earn_on_timeout(name_accuracy(spec, record.get("accuracy")), record.get("on_timeout") or {})


def _merged(args: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return both; tables of the same name become one."""
    tables = {
        k: {**args[k], **v} for k, v in more.items() if isinstance(args.get(k), Mapping) and isinstance(v, Mapping)
    }
    return {**args, **more, **tables}


def _load_member(record: Mapping[str, Any], base_dir: Path | str | None, builtins: Mapping[str, Builtin]) -> Member:
    spec = load_recorded(record, base_dir, builtins=builtins)
    return Member(
        str(record.get("label")),
        spec,
        dict(record.get("weights") or spec.weights),
        float(record.get("weight", 1.0)),
        record.get("gate"),
        record.get("timeout_seconds"),
        bool(record.get("of_task")),
    )


def earn_on_timeout(spec: RewardSpec, parts: Mapping[str, float]) -> RewardSpec:
    """Return the reward with the recipe's parts for a response that hangs; {} = unchanged.

    Raises: RewardError when a built-in has no such part, or a part is outside its range.
    """
    if not parts:
        return spec
    where = "[reward] on_timeout"
    if spec.is_builtin and (unknown_parts := [part for part in parts if part not in spec.ranges]):
        raise RewardError(
            f"reward `{spec.name}` has no part `{unknown_parts[0]}`",
            where=where,
            hint=listed(unknown_parts[0], spec.ranges, "its parts"),
        )
    return replace(spec, on_timeout=check_on_timeout(parts, spec.ranges, where))


def name_accuracy(spec: RewardSpec, part: str | None) -> RewardSpec:
    """Return the reward with the recipe's choice of the part that is its accuracy; None = unchanged.

    Raises: RewardError when a built-in has no such part.
    """
    if part is None:
        return spec
    if spec.members and not any(member.has(part) for member in spec.members):
        labels = [member.label for member in spec.members]
        raise RewardError(
            f"[reward] accuracy names the part `{part}`, and no reward is called `{label_of(part)}`",
            hint=listed(label_of(part), labels, "the rewards") + '; accuracy = "LABEL.PART"',
        )
    if spec.is_builtin and part not in spec.ranges:
        raise RewardError(
            f"[reward] accuracy names the part `{part}`, which reward `{spec.name}` does not have",
            hint=listed(part, spec.ranges, "its parts"),
        )
    return replace(spec, accuracy=part, accuracy_named=True)
