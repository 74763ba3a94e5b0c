"""Causes that are lasting changes during a run, such as a rise of the reward without a rise of the accuracy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmrl.diagnose.health import MAX_RESPONSES, PREFIX, Sampled, measure_health
from vlmrl.diagnose.run_facts import Response, RunFacts, read_responses, spread_steps
from vlmrl.diagnose.signs import Sign, find_signs, since
from vlmrl.diagnose.thresholds import (
    Cause,
    Level,
    again,
    learned,
    limit,
    look_again,
    reward_check,
    rows_of,
)
from vlmrl.errors import VlmrlError

MOST_STEPS = 40
"""Maximum number of steps whose rollouts are measured if the metrics of a run have no `health/...`."""
EXAMPLES = 2
"""Number of example responses from before a change; the same number is taken from after it."""
LEVELS: dict[str, tuple[Level, float]] = {
    "reward_without_accuracy": ("error", 1.0),
    "one_response": ("error", 0.9),
    "repetition": ("error", 0.85),
    "characters": ("error", 0.8),
    "grown_length": ("warning", 0.8),
    "no_signal": ("warning", 0.7),
    "all_cut": ("error", 0.5),
}


def lasting_changes(facts: RunFacts) -> Iterator[Cause]:
    """Report the signs that training warns of (diagnose/signs.py), with responses from before and after each change."""
    for sign in find_signs(_lines(facts), facts.validation):
        level, weight = LEVELS[sign.name]
        rise = learned(facts) if sign.name == "no_signal" else ""
        evidence = [f"{rise}: there may be nothing left to learn"] if rise else []
        rows = _examples(facts, sign)
        yield Cause(
            sign.name, "note" if rise else level, sign.what + since(sign), _command(facts, sign), weight, evidence, rows
        )


def _command(facts: RunFacts, sign: Sign) -> str:
    if sign.name == "no_signal":
        return again(facts, "algo.filter=spread")
    if sign.name == "all_cut":
        most = facts.recipe.rollout.max_new_tokens if facts.recipe else 256
        return look_again(facts, f"rollout.max_new_tokens={4 * most}")
    return reward_check(facts, "--probe")


def _lines(facts: RunFacts) -> Sequence[Mapping[str, Any]]:
    """Return the train lines with their `health/...` metrics.

    If the run did not log these metrics, they are measured from the rollouts of some steps, and the lines of these
    steps are returned.
    """
    if facts.manifest.kind != "rl" or any(n.startswith(PREFIX) for line in facts.train[-1:] for n in line):
        return facts.train
    files = facts.run.rollout_files()
    lines = {line["step"]: line for line in facts.train if line["step"] in files}
    if len(lines) < 2 * limit("sign_steps"):
        return facts.train
    measured = []
    for step in spread_steps(sorted(lines), MOST_STEPS):
        try:
            responses = read_responses(files[step], step, most=MAX_RESPONSES)
        except VlmrlError as error:
            facts.notes.append(f"{files[step].name} was left out: {error.message}")
            continue
        measured.append({**lines[step], **measure_health([_sampled(r) for r in responses])})
    return measured


def _sampled(r: Response) -> Sampled:
    formed = all(value != 0 for name, value in r.parts.items() if "format" in name.lower())
    truth = json.dumps(dict(r.truth), sort_keys=True) if r.truth else ""
    return Sampled(r.group, r.prompt_id, truth, r.text, r.tokens, r.cut, None if r.error else r.score, formed)


def _examples(facts: RunFacts, sign: Sign) -> list[dict[str, Any]]:
    """Return the responses with the highest scores, of different prompts: before the change, and at the last step."""
    files = facts.run.rollout_files()
    before = [step for step in files if sign.step is not None and step < sign.step]
    steps = {"before": before[-1:], "after": [] if not files else [max(files)]}
    rows: list[dict[str, Any]] = []
    for when, chosen in steps.items():
        for step in chosen:
            try:
                responses = read_responses(files[step], step)
            except VlmrlError:
                continue  # `read_facts` adds the note about an unreadable file
            ranked = sorted((r for r in responses if r.error is None), key=lambda r: -r.score)
            prompts = {r.prompt_id: r for r in reversed(ranked)}
            best = sorted(prompts.values(), key=lambda r: -r.score)[:EXAMPLES]
            shown = rows_of(best)
            rows += [{**row, "where": f"{when}, {row['where']}"} for row in shown] if before else shown
    return rows
