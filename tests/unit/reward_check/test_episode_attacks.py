"""Tricks with calls of tools: named where a reward pays the use of tools, quiet where it pays the answer alone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from sample_rewards import WORDS, rows_of

from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.attack import responding
from vlmrl.types import Call, RewardInput, Turn

TRICKS = {"calls without an answer", "endless calls", "the tool's text", "answer in a call"}
TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {"properties": {"box": {"type": "string"}}}}}]
FORM = re.compile(r"<answer>([^<]*)</answer>")


def right(text: str, x: RewardInput) -> float:
    said = FORM.findall(text)
    return float(len(said) == 1 and said[0].strip().lower() == x.truth["answer"].lower())


def calls(x: RewardInput) -> int:
    return sum(len(turn.calls) for turn in x.turns)


def published(x: RewardInput) -> float:
    """RLLaVA's scheme: 0.8 x accuracy + 0.2 x format + 1.2 x whether a tool was called."""
    return 0.8 * right(x.answer, x) + 0.2 * bool(FORM.search(x.answer)) + 1.2 * (calls(x) > 0)


def by_call(x: RewardInput) -> float:
    return right(x.answer, x) + 0.05 * calls(x)


def gated(x: RewardInput) -> float:
    return right(x.answer, x) * (1.0 + 0.2 * (calls(x) > 0))


def anywhere(x: RewardInput) -> float:
    return float(x.truth["answer"].lower() in [said.strip().lower() for said in FORM.findall(x.response)])


def in_tools(x: RewardInput) -> float:
    """Pays what a tool said: for the text of a tool the same as for the truth."""
    said = FORM.findall(x.answer)
    return float(len(said) == 1 and said[0].strip().lower() in [x.truth["answer"].lower(), *seen(x)])


def seen(x: RewardInput) -> list[str]:
    return [turn.text.lower() for turn in x.turns if turn.role == "tool"]


def verdicts(reward, episode=(TOOLS, 3)) -> dict[str, str]:
    somebody = (Turn("assistant", "x", calls=(Call("zoom", {}),)), Turn("tool", "y"), Turn("assistant", "z"))
    rows = [replace(x, turns=somebody, measured={"reward": 1.0}) for x in rows_of(WORDS)]
    report = probe_reward(RewardSpec("r", reward, {}, {}, pure=True), {}, rows, episode=episode)
    assert not report["not_probed"]
    return {p["name"]: p["verdict"] for p in report["probes"]}


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (published, dict.fromkeys(TRICKS, "hole")),
        (by_call, {"endless calls": "leak", "calls without an answer": "leak", "answer in a call": "leak"}),
        (anywhere, {"answer in a call": "hole"}),
        (in_tools, {"the tool's text": "hole"}),
        (gated, {}),
    ],
)  # fmt: skip
def test_a_reward_that_pays_the_use_of_tools_is_named_and_one_with_a_gate_is_not(reward, named):
    found = verdicts(reward)
    assert found.keys() >= TRICKS
    assert {name: verdict for name, verdict in found.items() if verdict and name in TRICKS} == named


def test_a_gate_passes_clean_and_without_an_environment_no_tool_is_called():
    assert not any(verdicts(gated).values())
    assert not TRICKS & verdicts(published, None).keys()


def test_endless_calls_are_as_many_as_the_limit_of_turns_permits():
    most = []
    verdicts(lambda x: most.append((calls(x), x.finish)) or gated(x), (TOOLS, 5))
    assert max(most) == (5, "length")


def test_a_response_that_was_written_for_a_row_has_no_turns_of_another():
    x = RewardInput("a", turns=(Turn("assistant", "a", calls=(Call("zoom", {}),)),), measured={"reward": 0.7})
    said = responding(x, "b")
    assert (said.turns, said.measured, said.answer) == ((), {"reward": 0.0}, "b")
    turns = (Turn("assistant", "a"), Turn("tool", "t"), Turn("assistant", "b"))
    said = responding(x, turns)
    assert (said.turns, said.response, said.answer, said.num_tokens) == (turns, "a\nb", "b", 1)


def test_arguments_have_the_types_of_the_parameters() -> None:
    kinds = {"box": "array", "n": "integer", "x": "number", "why": "string"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    function = {"name": "zoom", "parameters": {"properties": properties}}
    given = []

    def reward(x: RewardInput) -> float:
        given.extend(call.arguments for turn in x.turns for call in turn.calls if call.arguments)
        return right(x.answer, x)

    verdicts(reward, ([{"function": function}], 3))
    assert given and all({k: type(v) for k, v in one.items()} == {"box": list, "n": int, "x": float, "why": str}
                         for one in given)  # fmt: skip
    properties.pop("why")
    assert verdicts(gated, ([{"function": function}], 3)).keys() & TRICKS == TRICKS - {"answer in a call"}
