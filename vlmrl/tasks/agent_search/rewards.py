"""Rewards of the task agent_search: the right query or answer, and those that RLLaVA published, flaws included.

Use the published ones only to repeat RLLaVA's runs. Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/`,
written from a description. Flaws that are kept. Of `agent_search.py`: without its tag, or with a line break in it, the
whole response is compared; a repeated word of an answer counts once; text behind the step is accepted; a query has the
score 0 below a similarity of 0.5. Of `agent_search_agentic.py`: a call is paid 1.2 beside a wrong answer, too, so a
wrong answer with a call (1.4) earns more than a right one without (1.0), and a call that brings nothing counts.
Difference: without a model, queries are compared by their words; theirs loads MiniLM from the hub in every process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.metric import SHARE
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardFn, RewardSpec, WorkerFunction
from vlmrl.rewards.text_parsing import BLANKS, REQUIRED, VISIBLE, check_thought, form_problem, tagged_text
from vlmrl.rewards.text_rewards import accepted_answers, word_overlap
from vlmrl.tasks.agent_code.rewards import published_answers, published_f1, published_form, rllava_agent_code_episodes
from vlmrl.tasks.agent_search.rows import ANSWER, SEARCH, STEPS
from vlmrl.types import RewardInput

NAME, PUBLISHED, PUBLISHED_EPISODES = "agent_search", "rllava_agent_search", "rllava_agent_search_episodes"
GRADER = "vlmrl.tasks.agent_search.grader"
WEIGHTS: Mapping[str, float] = {"right": 0.6, "exact": 0.3, "format": 0.1}
"""A wrong answer earns at most 0.7, and a right one at least 0.9, whatever else a response does."""
LEAST = 0.5  # similarity below which the published reward gives a query 0
MODEL_HINT = "copy a model of sentence embeddings there, such as all-MiniLM-L6-v2, with model.safetensors"
Similarity = Callable[[str, str], float]


def agent_search(*, thought: str = REQUIRED, model: str = "") -> RewardSpec:
    """Return a reward. Part `right`, weight 0.6: how right the answer in the last turn is, or the query of a step.

    An answer counts by the F1 of its words (see `token_f1`), best of the accepted ones; without one it is 0. A query
    counts by the F1 of its words with those of the true query; with a model, by the cosine of their embeddings.

    `exact`, 0.3: the words are the same, in the same order; it is the accuracy. `format`, 0.1: the response has the
    form that the prompt asks for. A call of a tool earns nothing by itself: `tool_use` behind a gate pays it.

    Args:
        thought: whether the form needs a `<think>` thought: "required" or "optional".
        model: folder of a model of sentence embeddings in safetensors, such as all-MiniLM-L6-v2; "" = words alone.
    """
    check_thought(thought)
    return _reward(NAME, partial(score, thought=thought), WEIGHTS, "exact", {"thought": thought}, model)


def rllava_agent_search(*, model: str = "") -> RewardSpec:
    """Return the published reward of single steps: the mean of `accuracy` and `format`.

    Args:
        model: folder of a model of sentence embeddings for queries; see `agent_search`.
    """
    return _reward(PUBLISHED, score_step_as_published, {"accuracy": 0.5, "format": 0.5}, "accuracy", {}, model)


def _reward(
    name: str, fn: RewardFn, weights: Mapping[str, float], accuracy: str, args: Mapping[str, Any], model: str
) -> RewardSpec:
    """Return a reward of steps: a function of this process, or with a model one of workers."""
    ranges = dict.fromkeys(weights, SHARE)
    if not model:
        return RewardSpec(name, fn, ranges, weights, pure=True, accuracy=accuracy)
    if not (Path(model) / "config.json").is_file() or not [*Path(model).glob("*.safetensors")]:
        message = f"`model` = {quoted(model, 200)} is no folder with config.json and *.safetensors"
        raise RewardError(message, hint=MODEL_HINT)
    worker = WorkerFunction(name, GRADER, "make_grader", {"name": name, "model": model, **args})
    return worker.reward(ranges, weights, seconds=30.0, accuracy=accuracy)


def rllava_agent_search_episodes() -> RewardSpec:
    """Return the published reward of episodes: 0.8 x f1 + 0.2 x format + 1.2 x tool."""
    return replace(rllava_agent_code_episodes(), name=PUBLISHED_EPISODES)


def score(x: RewardInput, *, thought: str = REQUIRED, similarity: Similarity | None = None) -> dict[str, Any]:
    """Return the parts of a response; see `agent_search`."""
    step, text, right, is_exact, problem = graded(x, similarity)
    problem = problem or form_problem(replace(x, response=x.answer), thought, step=step, steps=STEPS)
    problem = problem or ("" if text is None or VISIBLE.search(text) else "an empty tag")
    detail = {step: None if text is None else excerpt(text.strip(BLANKS), 200)}
    return {"right": right, "exact": float(is_exact), "format": float(not problem), "note": problem, "detail": detail}


def graded(x: RewardInput, similarity: Similarity | None = None) -> tuple[str, str | None, float, bool, str]:
    """Return (step that the row asks for, its text in the last turn, how right it is, whether it is exact, problem).

    Raises: RewardError for a row without a step or truth that can be used.
    """
    step = x.truth.get("step", ANSWER)
    if step not in STEPS:
        raise RewardError(f"the row's `step` is {quoted(step, 40)}, not one of {', '.join(STEPS)}")
    accepted = accepted_answers(x, "query" if step == SEARCH else "answer", step)
    text, problem = tagged_text(x.answer, step)
    if text is None:
        return step, None, 0.0, False, problem
    right, is_exact = word_overlap(text, accepted)
    if step == SEARCH and similarity is not None and not is_exact:
        right = min(1.0, max(0.0, similarity(text, accepted[0])))
    return step, text, right, is_exact, ""


def score_step_as_published(x: RewardInput, *, similarity: Similarity | None = None) -> dict[str, Any]:
    """Return the published parts of a single step."""
    text, step = x.response, x.truth.get("step", ANSWER)
    match = re.search(f"<{step}>(.*?)</{step}>", text)
    own = match[1].strip() if match else text
    if f"<{SEARCH if step == ANSWER else ANSWER}>" in text:
        accuracy = 0.0
    elif step == ANSWER:
        accuracy = published_f1(own, published_answers(x)[0])
    else:
        query = str(x.truth.get("query") or "")
        accuracy = min(1.0, similarity(own, query) if similarity else word_overlap(own, [query])[0])
        accuracy = accuracy if accuracy >= LEAST else 0.0
    return {"accuracy": accuracy, "format": published_form(text, STEPS)}


REWARDS: Mapping[str, Builtin] = {
    NAME: Builtin(agent_search, "agent_search: the right answer, or the query that a step asks for", version=2),
    PUBLISHED: Builtin(
        rllava_agent_search,
        "agent_search: RLLaVA's reward of single steps, to repeat its run: without a tag, all of the text is read",
        version=1,
    ),
    PUBLISHED_EPISODES: Builtin(
        rllava_agent_search_episodes,
        "agent_search: RLLaVA's reward of episodes, to repeat its run: it pays a call beside a wrong answer",
        version=1,
    ),
}
