"""What `vlmrl reward-check` does, as one function: read, score again, compare, attack. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmrl.check.diff import diff_rewards
from vlmrl.check.probe import probe_reward
from vlmrl.check.rescore import (
    Chosen,
    compare_stored,
    disagreements,
    image_reader,
    other_rewards,
    own_rewards,
    part_table,
    reasons,
    score_saved,
)
from vlmrl.check.saved import Saved
from vlmrl.errors import RewardError, VlmrlError


@dataclass(frozen=True)
class RewardQuestion:
    """What is asked.

    Args:
        reward: score with this one instead of the run's own.
        diff: another reward to compare with.
        args, weights, style: of `diff` when given, else of `reward`, else changes to the run's own.
        probe: attack the reward as well.
        most: rows shown of each kind.
    """

    reward: str | None = None
    diff: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] | None = None
    style: str = "auto"
    probe: bool = False
    most: int = 5


def check_rewards(saved: Saved, question: RewardQuestion) -> dict[str, Any]:
    """The whole report as JSON values.

    Returns a mapping with: path, run, steps, samples, groups, sources, notes, seconds;
        rewards: source -> name, weights, args, changed (of the scores that follow);
        stored: see `compare_stored`, when the run's own reward was used unchanged, else None;
        parts, reasons, disagreements: of the new scores (rescore.py);
        diff: see `diff_rewards`, with `names` of both sides, when there are two sides, else None;
        probes: source -> see `probe_reward`, when asked for, else None.
    Raises: RewardError for a reward that cannot be loaded or that fails on a row.
    """
    start = time.perf_counter()
    own, own_error = _own(saved)
    base, candidate = _sides(saved, question, own, own_error)
    stored_scores = [s.score for s in saved.samples]
    scores = score_saved(saved, base) if base is not None else stored_scores
    shown, shown_scores = base, scores
    diff = None
    if candidate is not None:
        other = score_saved(saved, candidate)
        diff = diff_rewards(saved, scores, other, question.most)
        diff["names"] = {"first": _names(base) if base is not None else "as stored", "second": _names(candidate)}
        if question.diff is None:
            shown, shown_scores = candidate, other
    return {
        **_about(saved),
        "rewards": {source: _described(c) for source, c in (shown or {}).items()},
        "stored": compare_stored(saved, scores, question.most) if base is not None and base is own else None,
        "parts": part_table(shown_scores),
        "reasons": reasons(shown_scores),
        "disagreements": disagreements(saved, shown_scores, question.most),
        "diff": diff,
        "probes": _probes(saved, candidate or base or {}) if question.probe else None,
        "seconds": round(time.perf_counter() - start, 3),
    }


def _own(saved: Saved) -> tuple[dict[str, Chosen] | None, VlmrlError | None]:
    try:
        return own_rewards(saved), None
    except RewardError as error:
        return None, error


def _sides(
    saved: Saved, question: RewardQuestion, own: dict[str, Chosen] | None, own_error: VlmrlError | None
) -> tuple[dict[str, Chosen] | None, dict[str, Chosen] | None]:
    """(the reward that scores first, the one to compare it with). A first side of None stands for the stored scores."""
    q = question
    if q.diff is not None:
        base = other_rewards(saved, q.reward, args={}, weights=None) if q.reward is not None else own
        if base is None and own_error is not None:
            saved.notes.append(f"compared with the stored scores: {own_error.message}")
        return base, other_rewards(saved, q.diff, args=q.args, weights=q.weights, style=q.style)
    if q.reward is not None:
        return None, other_rewards(saved, q.reward, args=q.args, weights=q.weights, style=q.style)
    if own is None:
        raise own_error or RewardError("the run's reward cannot be loaded")
    if q.args:
        record = saved.records
        names = {source: str(record[source]["name"]) for source in own}
        made = {name: other_rewards(saved, name, args=q.args, weights=q.weights) for name in set(names.values())}
        return own, {source: made[name][source] for source, name in names.items()}
    if q.weights is not None:
        return own, {source: replace(c, weights=q.weights) for source, c in own.items()}
    return own, None


def _probes(saved: Saved, chosen: Mapping[str, Chosen]) -> dict[str, Any]:
    """The attack on each source's reward, with the truths of its first different prompts."""
    image_of = image_reader(saved)
    found: dict[str, Any] = {}
    for source, choice in chosen.items():
        first = {s.prompt_id: s for s in reversed(saved.samples) if s.source == source}
        samples = list(first.values())[::-1]
        inputs = [replace(s.input, images=image_of(s)) if choice.spec.needs_images else s.input for s in samples[:48]]
        limits: dict[str, Any] = {}
        if saved.recipe is not None:
            limits = {k: getattr(saved.recipe.reward, k) for k in ("timeout_seconds", "memory_mb", "workers")}
        levels: Sequence[str] = saved.levels.get(source, ())
        found[source] = probe_reward(choice.spec, choice.weights, inputs, levels=levels, limits=limits)
    return found


def _about(saved: Saved) -> dict[str, Any]:
    steps = [s.step for s in saved.samples]
    return {
        "path": str(saved.path),
        "run": saved.run.id if saved.run is not None else None,
        "steps": [min(steps), max(steps)],
        "samples": len(saved.samples),
        "groups": len(saved.groups),
        "sources": saved.sources,
        "notes": list(saved.notes),
    }


def _described(choice: Chosen) -> dict[str, Any]:
    return {
        "name": choice.spec.name,
        "args": dict(choice.spec.args),
        "weights": dict(choice.weights),
        "changed": choice.changed,
    }


def _names(chosen: Mapping[str, Chosen]) -> str:
    return ", ".join(dict.fromkeys(c.spec.name for c in chosen.values()))
