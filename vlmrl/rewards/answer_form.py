"""Form of a response in tags: one thought, then one answer, and nothing else."""

from __future__ import annotations

from vlmrl.errors import RewardError
from vlmrl.rewards.text_parsing import BLANKS, VISIBLE, find_tags
from vlmrl.types import RewardInput

REQUIRED, OPTIONAL = "required", "optional"
THOUGHTS = (REQUIRED, OPTIONAL)


def check_thought(thought: str) -> None:
    """Raise a RewardError unless this is one of THOUGHTS."""
    if thought not in THOUGHTS:
        raise RewardError(f"thought = {thought!r} is unknown", hint=f"one of: {', '.join(THOUGHTS)}")


def form_problem(x: RewardInput, thought: str) -> str:
    """Return what is wrong with the form of a response that has one answer; "" if nothing is.

    Args:
        thought: whether the form needs a `<think>` thought before the answer: one of THOUGHTS.
    """
    if x.finish == "length":
        return "cut off at the token limit"
    tags = [(tag.name, tag.closes) for tag in find_tags(x.response, ("think", "answer"))]
    whole = [("think", False), ("think", True), ("answer", False), ("answer", True)]
    if tags != whole and not (thought == OPTIONAL and tags == whole[2:]):
        return "not exactly one thought, then one answer" if thought == REQUIRED else "not exactly one answer"
    places = find_tags(x.response, ("think", "answer"))
    edges = [0, *(edge for tag in places for edge in (tag.start, tag.end)), len(x.response)]
    texts = [x.response[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    if any(text.strip(BLANKS) for text in texts[::2]):
        return "text outside of the tags"
    if len(texts) > 3 and not VISIBLE.search(texts[1]):
        return "an empty thought"
    return ""
