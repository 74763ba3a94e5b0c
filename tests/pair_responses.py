"""Pair responses read whole: the format and the names together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmrl.rewards.text_parsing import Tag, find_tags
from vlmrl.tasks.pairs.answer import Names, PairFormat, parse_probability, two_names


@dataclass(frozen=True, slots=True)
class PairResponse:
    """Content of a pair response.

    Args:
        ok: whether the whole text follows the format. If not, the response earns nothing.
        problem: the first reason why the text does not follow the format, in words; "" if `ok`.
        confidence: probability of "same" in [0, 1]; if not `ok`, that of the last readable answer; None = there is no
            readable answer.
        names: level -> the two names, normalised, image 1 first; None = the level is not stated or not readable.
        think: text inside think, tags included; "" if there is no closed think.
    """

    ok: bool
    problem: str
    confidence: float | None
    names: Mapping[str, Names | None]
    think: str


def parse_pair_response(
    text: str, levels: Sequence[str], aliases: Mapping[str, str] | None = None, *, relaxed: bool = False
) -> PairResponse:
    """Read a pair response with names. Never raises on a text; time is linear in its length.

    Args:
        text: the response, special tokens removed.
        levels: tag names of the hierarchy, coarse -> fine; may be empty.
        aliases: other spelling -> name, both normalised before use.
        relaxed: as in `PairFormat`.
    Raises: ValueError for level names that cannot be tags (a programming error, not a bad response).
    Example: `<think><genus>Corvus; Pica</genus></think><answer>0.1</answer>` -> ok, 0.1, {"genus": ("corvus", "pica")}.
    """
    levels = tuple(levels)
    problem, confidence, bodies, _ = PairFormat(levels, relaxed=relaxed).split(text)
    spans = _closed_spans(find_tags(text, ("think", "answer", *levels)))
    if problem:
        bodies = {level: text[slice(*spans[level])] for level in levels if level in spans}
        confidence = parse_probability(text[slice(*spans["answer"])]) if "answer" in spans else None
    names: dict[str, Names | None] = dict.fromkeys(levels)
    for level, body in bodies.items():
        names[level], wrong = two_names(body, level, aliases)
        problem = problem or wrong
    think = text[slice(*spans["think"])] if "think" in spans else ""
    return PairResponse(not problem, problem, confidence, names, think)


def _closed_spans(tags: Sequence[Tag]) -> dict[str, tuple[int, int]]:
    """Return tag name -> (start, end) of the text between its last opening tag and the closing tag after that."""
    spans: dict[str, tuple[int, int]] = {}
    opened: dict[str, int] = {}
    for tag in tags:
        if not tag.closes:
            opened[tag.name] = tag.end
        elif tag.name in opened:
            spans[tag.name] = (opened.pop(tag.name), tag.start)
    return spans
