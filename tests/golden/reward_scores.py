"""What a built-in reward makes of inputs, as JSON, and the file that keeps it: rewards/<name>.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.base import check_parts, combine, split_result
from vlmrl.tasks.builtin_rewards import REWARDS, load_reward
from vlmrl.types import RewardInput, Turn

FOLDER = Path(__file__).parent / "rewards"


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def scored(name: str, args: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Weights, ranges, names of parts, and for each input the parts and last the value; None where it raises.

    Notes are for people, and no part of it.
    """
    spec = load_reward(name, args=args)
    rows: list[list[float | None] | None] = []
    names: list[str] = []
    for given in inputs:
        try:
            turns = tuple(Turn.of(turn) for turn in given.get("turns", ()))
            parts = check_parts(split_result(spec.fn(RewardInput(**{**given, "turns": turns})))[0], spec.ranges)
            value = combine(parts, spec.weights)[0]
        except RewardError:
            rows.append(None)
            continue
        names = names or list(parts)
        assert names == list(parts), f"{name}: the parts of one response are {names}, of another {list(parts)}"
        rows.append([*(parts[part] for part in names), value])
    ranges = {part: list(ends) for part, ends in spec.ranges.items()}
    return {"args": dict(args), "weights": dict(spec.weights), "ranges": ranges, "parts": names, "scores": rows}


def recorded(name: str) -> dict[str, Any] | None:
    """The file of a reward: {"reward", "version", "inputs", "runs"}; None where there is none."""
    return json.loads(path_of(name).read_text("utf-8")) if path_of(name).is_file() else None


def golden(name: str, all_args: Sequence[Mapping[str, Any]], inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the file of a reward would hold today."""
    runs = [scored(name, args, inputs) for args in all_args]
    return {"reward": name, "version": REWARDS[name].version, "inputs": list(inputs), "runs": runs}


def as_text(value: Mapping[str, Any]) -> str:
    """The file's text: an input a line, a score a line, so that a change of one is a line of a diff."""
    lines = [f'{{"reward": "{value["reward"]}", "version": {value["version"]}, "inputs": [']
    lines.append(",\n".join(json.dumps(one) for one in value["inputs"]))
    lines.append('], "runs": [')
    runs = []
    for run in value["runs"]:
        head = json.dumps({key: run[key] for key in ("args", "weights", "ranges", "parts")})
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in run["scores"])
        runs.append(f'{head[:-1]}, "scores": [\n{rows}\n]}}')
    return "\n".join([*lines, ",\n".join(runs), "]}"]) + "\n"
