"""Form of a response in tags: one thought, then one answer, and nothing else."""

from __future__ import annotations

from vlmrl.errors import RewardError
from vlmrl.rewards.text_parsing import BLANKS, VISIBLE, find_tags, tagged_text
from vlmrl.types import RewardInput

REQUIRED, OPTIONAL = "required", "optional"
THOUGHTS = (REQUIRED, OPTIONAL)


def check_thought(thought: str) -> None:
    """Raise a RewardError unless this is one of THOUGHTS."""
    if thought not in THOUGHTS:
        raise RewardError(f"thought = {thought!r} is unknown", hint=f"one of: {', '.join(THOUGHTS)}")


def format_weights(format_weight: float) -> dict[str, float]:
    """Return the weights of the parts `accuracy` and `format`, which add up to 1.

    Raises: RewardError for a weight of the format that is not in [0, 1].
    """
    if not (isinstance(format_weight, (int, float)) and 0 <= format_weight <= 1):
        raise RewardError(f"format_weight = {format_weight!r} is not a number from 0 to 1")
    return {"accuracy": 1.0 - format_weight, "format": float(format_weight)}


def final_answer(response: str) -> tuple[str | None, str]:
    """Return (the text of the only `<answer>`, ""), or (None, the problem). An answer within the thought is none."""
    text, problem = tagged_text(response, "answer")
    if text is not None:
        order = [(tag.name, tag.closes) for tag in find_tags(response, ("think", "answer"))]
        place = order.index(("answer", False))
        if ("think", False) in order[:place] and ("think", True) in order[place:]:
            return None, "the answer stands within the thought"
    return text, problem


def form_problem(x: RewardInput, thought: str, *, tagged: bool = True) -> str:
    """Return what is wrong with the form of a response that has one answer; "" if nothing is.

    Args:
        thought: whether the form needs a `<think>` thought before the answer: one of THOUGHTS.
        tagged: whether the answer stands in `<answer>`; else it is the text after the thought.
    """
    if x.finish == "length":
        return "cut off at the token limit"
    names = ("think", "answer") if tagged else ("think",)
    tags = find_tags(x.response, names)
    order = [(tag.name, tag.closes) for tag in tags]
    whole = [(name, closes) for name in names for closes in (False, True)]
    if order != whole and not (thought == OPTIONAL and order == whole[2:]):
        return "not exactly one thought, then one answer" if thought == REQUIRED else "not exactly one answer"
    edges = [0, *(edge for tag in tags for edge in (tag.start, tag.end)), len(x.response)]
    texts = [x.response[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    outside = texts[::2] if tagged else texts[:1] if tags else []
    if any(text.strip(BLANKS) for text in outside):
        return "text outside of the tags"
    if order == whole and not VISIBLE.search(texts[1]):
        return "an empty thought"
    return ""
