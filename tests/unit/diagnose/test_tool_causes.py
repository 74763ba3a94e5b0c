"""`runs diagnose` of runs with tools: what their metrics and their responses tell, and what nearly does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sick_runs import look, make_run, plan

from vlmrl.diagnose.run_facts import read_responses
from vlmrl.store.rollouts import write_rollouts
from vlmrl.types import Group, Row, Score, ScoredSample, Segment, Trajectory, Turn


def episodes(calls: Any = 1.0, errors=0.0, reward=lambda step: 0.5, **ended):
    """Metrics of episodes: (calls at a step, share of them that fail, mean reward, shares of endings)."""
    at = calls if callable(calls) else lambda step: calls

    def metrics(step):
        shares = {f"episode/ended/{name}": share for name, share in ended.items() if share}
        more = {"episode/turns": 2.0, "episode/calls": at(step), "reward/mean": reward(step), **shares}
        return more | ({"episode/tool_errors": errors} if at(step) else {})

    return metrics


FAULTS = {
    "tools_unused": plan(metrics=episodes(0.0)),
    "tools_unused but for one": plan(metrics=episodes(0.009)),
    "tools_abandoned": plan(metrics=episodes(lambda step: 0.98 - 0.08 * step), steps=12),
    "tool_errors": plan(metrics=episodes(errors=0.11)),
    "tool_errors of late": plan(metrics=lambda step: episodes(errors=0.3 * (step > 3))(step)),
    "episode_limits": plan(metrics=episodes(turn_limit=0.15, token_limit=0.06, answer=0.79)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_first(fault, tmp_path):
    found = look(make_run(tmp_path, FAULTS[fault], prompts=2, samples=4))
    assert found.causes[0].name == fault.split()[0] and not found.healthy


TOOL_CAUSES = {"tools_unused", "tools_abandoned", "tool_errors", "episode_limits"}


@pytest.mark.parametrize(
    "metrics",
    [
        episodes(0.011, reward=lambda step: 0.5),
        episodes(errors=0.1, turn_limit=0.2),
        episodes(lambda step: 0.98 - 0.04 * step),  # to a half and more
        episodes(lambda step: 0.98 - 0.08 * step, reward=lambda step: 0.5 - 0.01 * step),  # the reward falls with it
        episodes(lambda step: 0.09 - 0.007 * step),  # there was little to fall
        lambda step: episodes(errors=0.5 * (step < 6), turn_cut=0.9 * (step < 6))(step),  # learned since
        lambda step: {},  # one turn
    ],
)
def test_what_nearly_is_a_cause_of_tools_is_none(metrics, tmp_path):
    found = look(make_run(tmp_path, plan(metrics=metrics, steps=12), prompts=2, samples=4))
    assert not TOOL_CAUSES & {c.name for c in found.causes}


def test_causes_of_tools_say_what_to_do(tmp_path):
    metrics = episodes(lambda step: 0.98 - 0.08 * step, errors=0.11, turn_limit=0.15, token_limit=0.06)
    run = make_run(tmp_path, plan(metrics=metrics, steps=12), prompts=2, samples=4)
    causes = {c.name: c for c in look(run).causes}
    assert TOOL_CAUSES & causes.keys() == TOOL_CAUSES - {"tools_unused"}
    assert causes["episode_limits"].command.endswith("--set environment.turns=8")  # twice the default of 4
    assert (
        "21% of the episodes" in causes["episode_limits"].what and "environment.turns" in causes["episode_limits"].what
    )
    # calls 0.98, 0.90, 0.82, 0.74 first: 0.86 on average; 0.34, 0.26, 0.18, 0.10 last: 0.22
    assert "0.86 calls per episode, then 0.22" in causes["tools_abandoned"].what
    assert (
        "11% of the calls of tools fail in the last third of the steps" in causes["tool_errors"].what
        and "report" in causes["tool_errors"].command
    )
    (unused,) = (c for c in look(make_run(tmp_path / "b", FAULTS["tools_unused"])).causes if c.name == "tools_unused")
    assert unused.level == "error" and "vlmrl try" in unused.command


def test_a_response_has_the_tokens_and_the_limit_of_the_policy_alone(tmp_path):
    own, seen = (
        Segment("assistant", (1, 2), True, (-1.0, -1.0)),
        Segment("tool", (3, 4, 5), False, author="environment"),
    )
    t = Trajectory("t", "p", 0, 0, 0, 7, (1,), (own, seen, replace(own, ids=(6, 7))), (), "length")
    turns = (Turn("assistant", "a"), Turn("tool", "ok\nerror: no box", errors=1), Turn("assistant", "b"))
    samples = [
        ScoredSample(replace(t, sample=k), "a\nb", Score(0.0, {}), turns=turns, ending=ending)
        for k, ending in enumerate(("turn limit", "turn cut"))
    ]
    write_rollouts(tmp_path / "r.parquet", [Group(Row("p", "s", "t", {}), "?", tuple(samples))], step=0)
    responses = read_responses(tmp_path / "r.parquet", 0)
    assert [(r.tokens, r.cut, r.tool_errors) for r in responses] == [
        (4, False, ("error: no box",)), (4, True, ("error: no box",))
    ]  # fmt: skip
