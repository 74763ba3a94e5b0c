"""Rewards of the task agent_code: the right step or answer, and those that RLLaVA published, flaws included.

Use the published ones only to repeat RLLaVA's runs. Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/`,
written from a description. Flaws that are kept. Of `agent_code.py`: any response to a code row without <answer> and
<problem> earns 0.9, an empty one too, since no code is run; a right diagnosis earns 0, as the code ends with an error
there, and a half of one 0.5; a repeated word of an answer counts once. Of `agent_code_agentic.py`: a call is paid 1.2
beside a wrong answer, too, so a wrong answer with a call (1.4) earns more than a right one without (1.0).
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from vlmrl.metric import SHARE
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec, WorkerFunction
from vlmrl.rewards.text_parsing import REQUIRED, check_thought
from vlmrl.rewards.text_rewards import answered_calls
from vlmrl.tasks.agent_code.rows import ANSWER, CODE, PROBLEM, STEPS, read_labels
from vlmrl.types import RewardInput

NAME, PUBLISHED, PUBLISHED_EPISODES = "agent_code", "rllava_agent_code", "rllava_agent_code_episodes"
SECONDS = 60.0
"""Time limit of one response: two runs of code, each with a limit of its own, and the start of the sandbox."""


def agent_code(*, thought: str = REQUIRED) -> RewardSpec:
    """Return a reward. Part `right`, weight 0.9: how right the step is that the row asks for.

    An answer, in the last turn, counts by the F1 of its words (see `token_f1`), best of the accepted ones. A damage
    counts by the labels: those of both, divided by those of either. Code is run in the sandbox on the picture of the
    row; its picture counts by the share of the difference to the true repair's picture that is gone: 0 for a picture no
    nearer than the damaged one, 1 for the same.

    `format`, 0.1: the response has the form that the prompt asks for. Reported: `exact`, 1 if the words, the labels or
    the pictures are the same; it is the accuracy.

    Args:
        thought: whether the form needs a `<think>` thought: "required" or "optional".
    """
    check_thought(thought)
    worker = WorkerFunction(NAME, "vlmrl.tasks.agent_code.grader", "make_grader", {"thought": thought})
    ranges: dict[str, tuple[float, float]] = dict.fromkeys(("right", "format", "exact"), SHARE)
    facts = {"needs_images": True, "accuracy": "exact"}
    return worker.reward(ranges, {"right": 0.9, "format": 0.1}, seconds=SECONDS, **facts)


def rllava_agent_code() -> RewardSpec:
    """Return the published reward of single steps: the mean of `accuracy` and `format`."""
    ranges = {"accuracy": SHARE, "format": SHARE}
    weights = {"accuracy": 0.5, "format": 0.5}
    return RewardSpec(PUBLISHED, score_step_as_published, ranges, weights, pure=True, accuracy="accuracy")


def rllava_agent_code_episodes() -> RewardSpec:
    """Return the published reward of episodes: 0.8 x f1 + 0.2 x format + 1.2 x tool."""
    ranges = {"f1": SHARE, "format": SHARE, "tool": SHARE}
    weights = {"f1": 0.8, "format": 0.2, "tool": 1.2}
    return RewardSpec(PUBLISHED_EPISODES, score_episode_as_published, ranges, weights, pure=True, accuracy="f1")


def score_step_as_published(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a single step."""
    text, step = x.response, x.truth.get("step", ANSWER)
    if step == CODE:
        accuracy = 0.0 if "<answer>" in text or "<problem>" in text else 0.9
    elif step == PROBLEM:
        labels, truth = read_labels(last_tagged(text, PROBLEM)), set(x.truth.get("damage") or ())
        rotations = {label for label in truth if label.startswith("rotation")}
        accuracy = 0.5 if len(truth) == 2 and rotations and labels == rotations else 0.0
    else:
        accuracy = published_f1(last_tagged(text, ANSWER) if "<answer>" in text else text, published_answers(x)[0])
    return {"accuracy": accuracy, "format": published_form(text, STEPS.values())}


def score_episode_as_published(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of an episode."""
    text, answer = x.answer, last_tagged(x.answer, ANSWER)
    f1 = max(1.0 if answer.strip() == one.strip() else published_f1(answer, one) for one in published_answers(x))
    is_double = any(text.count(f"<{tag}>") > 1 for tag in ("think", ANSWER))
    form = re.search(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL)
    called = answered_calls(x) >= 1
    return {"f1": f1, "format": float(form is not None and not is_double), "tool": float(called)}


def published_form(text: str, steps: Iterable[str]) -> float:
    """Return 1 for a text that begins with a thought and a step, and has no tag twice, else 0."""
    is_double = any(text.count(f"<{tag}>") > 1 for tag in ("think", *steps))
    form = re.match(rf"<think>.*?</think>\s*<({'|'.join(steps)})>.*?</\1>", text, re.DOTALL)
    return float(form is not None and not is_double)


def published_answers(x: RewardInput) -> list[str]:
    """Return the accepted answers of a row as they are; one empty text if there is none."""
    answers = x.truth.get("answer") or ""
    return [str(one) for one in answers] if isinstance(answers, list) else [str(answers)]


def last_tagged(text: str, tag: str) -> str:
    """Return the text behind the last such tag, up to its end or that of the text; "" without one."""
    return text.rpartition(f"<{tag}>")[2].partition(f"</{tag}>")[0] if f"<{tag}>" in text else ""


def published_f1(answer: str, truth: str) -> float:
    """Return the published F1: distinct shared words over the numbers of all words."""

    def words(text: str) -> list[str]:
        plain = "".join(c for c in text.lower() if c not in string.punctuation)
        if re.search(r"[\u4e00-\u9fff]", plain):
            return [c for c in plain if not c.isspace()]
        return [word for word in plain.split() if word not in ("a", "an", "the")]

    ours, theirs = words(answer), words(truth)
    shared = len(set(ours) & set(theirs))
    if not shared:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


REWARDS: Mapping[str, Builtin] = {
    NAME: Builtin(agent_code, "agent_code: the right damage, code that repairs it, or the right answer", version=2),
    PUBLISHED: Builtin(
        rllava_agent_code,
        "agent_code: RLLaVA's reward of single steps, to repeat its run: no code is run, and an empty response is paid",
        version=1,
    ),
    PUBLISHED_EPISODES: Builtin(
        rllava_agent_code_episodes,
        "agent_code: RLLaVA's reward of episodes, to repeat its run: it pays a call beside a wrong answer",
        version=1,
    ),
}
