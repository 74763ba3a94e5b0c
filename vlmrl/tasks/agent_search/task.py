"""The task agent_search: its prompts, demonstrations, measures and tricks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.environments.calls import write_call
from vlmrl.errors import RewardError
from vlmrl.metric import SHARE, Metric
from vlmrl.rewards.text_parsing import OPTIONAL
from vlmrl.tasks.agent_code.task import step_task
from vlmrl.tasks.agent_search.rewards import NAME, PUBLISHED, PUBLISHED_EPISODES, graded
from vlmrl.tasks.agent_search.rows import ANSWER, HARD, SEARCH, SIMPLE, STEPS, written
from vlmrl.tasks.attack import Attack, Kind, says
from vlmrl.tasks.base import Outcome, Task
from vlmrl.tasks.truth_kinds import problems_of
from vlmrl.types import Call, RewardInput, Row, Score, Turn

SUMMARY = "a question about a picture whose answer must be looked up (by `vlmrl prep agent_search`)"


def agent_search_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    rewards = NAME, PUBLISHED, PUBLISHED_EPISODES
    validate = partial(problems_of, lambda truth: graded(RewardInput("", truth)))
    facts = {"validate": validate, "attacks": attacks, "metrics": {"f1": Metric("higher", SHARE)}}
    return step_task(SUMMARY, rewards, info, variant, write_trace, outcome=measure, **facts)


def measure(x: RewardInput, score: Score) -> Outcome:
    """Return the exact match and the F1 of a response, whatever its reward; for MAT-Search's levels by themselves."""
    try:
        _, _, f1, is_exact, _ = graded(x)
    except RewardError:
        return {}
    level = x.truth.get("level")
    of_level = {f"f1/{level}": f1} if level in (SIMPLE, HARD) else {}
    return {"accuracy": float(is_exact), "f1": f1, **of_level}


def write_trace(thought: str, row: Row, rng: random.Random) -> list[str | list[str | Call]]:
    """Return a right step; of a drawn row that asks for the answer alone, an episode that looks it up first."""
    truth, think = row.truth, "" if thought == OPTIONAL else "<think>{}.</think>"
    step, start = truth.get("step", ANSWER), rng.choice(("I look it up", "I search for it", "I need a passage"))
    last = think.format(start if step == SEARCH else "The passages say it") + written(step, truth)
    queries = () if "step" in truth else truth.get("queries") or ()
    calls = ((think.format(f"{start}: {query}"), Call("search", {"query": query})) for query in queries)
    return [*([part for part in turn if part] for turn in calls), last]


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks with steps and with calls."""
    think = "<think>I look.</think>"
    every = " ".join(dict.fromkeys(text for x in rows for text in x.truth.get("answer") or [])) or "none"

    def right(x: RewardInput) -> str:
        return written(x.truth.get("step", ANSWER), x.truth)

    def trick(name: str, idea: str, kind: Kind, last: str, *, before: bool = False) -> Attack:
        """Return a trick of four calls and a last turn. `before`: the right answer stands in the turns before it."""

        def turns(x: RewardInput) -> tuple[Turn, ...]:
            call = Call("search", {"query": right(x) if before else "x"})
            text = think + (right(x) if before else "") + write_call(call, "hermes")
            return (*(Turn("assistant", text, calls=(call,)), Turn("tool", "1. x")) * 4, Turn("assistant", last))

        return Attack(name, idea, kind, says(""), episode=turns)

    return [
        Attack("every answer", "all answers of the rows in one tag", "guess",
               lambda x: f"{think}<answer>{every}</answer>" if x.truth.get("step") != SEARCH else None),
        Attack("another step", "a query where an answer is due, or the other way round", "void",
               lambda x: think + written(STEPS[x.truth.get("step") == SEARCH], {"answer": ["x"], "query": "x"})),
        Attack("two answers", "the right step twice", "broken", lambda x: think + right(x) * 2),
        trick("calls alone", "four calls and no answer", "void", ""),
        trick("wrong after four calls", "a wrong answer beside calls", "miss", f"{think}<answer>none</answer>"),
        trick("answer in a query", "the right answer only in the turns before the last", "broken", "No.", before=True),
    ]  # fmt: skip
