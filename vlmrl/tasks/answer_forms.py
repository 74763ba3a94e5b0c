"""Forms of a right answer: how a truth may be written as text, and what may stand around it in a response.

No reward declares the form that it reads. It is looked for among the usual forms, those of saved responses, and those
that the prompt shows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vlmrl.errors import RewardError
from vlmrl.rewards.math.latex import last_box
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.types import RewardInput
from vlmrl.untrusted import parse_json

UNSURE = "I cannot tell."
MOST_ANSWERS = 20
MOST_LEARNED = 12
"""Maximum number of frames that are learned from the rows."""
SLOT = re.compile(
    r"<(?P<name>\w+)>(?P<tag>[^<>]*)</(?P=name)>|\\boxed\{(?P<box>[^{}]*)\}"
    r'|\{[^{}]*"\w+"\s*:\s*(?:"(?P<quoted>[^"]*)"|(?P<json>\[[^\[\]]*\]|[^\s"{}\[\],]+))\s*\}'
    r"|####[ ]*(?P<mark>\S+)|\*\*(?P<bold>[^*\n]+)\*\*"
    r"|(?i:answer|result|solution)(?: is|:|=)[ ]*(?P<said>[^\s.,;]+)"
)
"""Place in a response or a prompt where an answer stands."""
PLACEHOLDER = re.compile(
    r"[\[{](?P<brackets>[A-Za-z][\w -]{0,30})[\]}]|<(?P<angles>[A-Z][A-Z_ -]*)>"
    r"|\b[A-Z]{2,}(?:[_ -][A-Z]+)*\b|_{2,}|\.{3}|…"
)
"""Word of a prompt that a response replaces by the answer, such as ``[HOUR]`` in ``Write: The hour is [HOUR]``."""
CHOICE = re.compile(r"\(?([A-Z])(?:\)|[.:](?=\s|$)).*", re.DOTALL)
DECIMAL = re.compile(r"(-?[0-9]+)\.0+")


FRAMES = tuple(
    (before, after)
    for before, _, after in (
        text.partition("@")
        for text in (
            *("@", f"<think>{UNSURE}</think><answer>@</answer>", "\\boxed{@}", f"<think>{UNSURE}</think>\\boxed{{@}}"),
            *(
                "<answer>@</answer>",
                f"<think>\n{UNSURE}\n</think>\n<answer>\n@\n</answer>",
                f"<think>{UNSURE}</think>@",
            ),
            *('{"answer": @}', '{"answer": "@"}', '```json\n{"answer": @}\n```'),
            *("Answer: @", "The answer is @.", "#### @", "(@)"),
        )
    )
)
"""Texts before and after an answer that many rewards accept."""


class AnswerForm(NamedTuple):
    """Form of an answer: the texts around it, and how the truth is written, see `spellings`."""

    before: str = ""
    after: str = ""
    way: str = ""

    def around(self, text: str) -> str:
        return f"{self.before}{text}{self.after}"

    def text(self, x: RewardInput) -> str:
        """Return the right answer of a row without its frame; "" if it cannot be written in this way."""
        return spellings(x).get(self.way, "")

    def known(self, rows: Sequence[RewardInput]) -> list[str]:
        """Return the distinct right answers of the rows, the most frequent first."""
        counts = Counter(text for x in rows if (text := self.text(x)))
        return [text for text, _ in counts.most_common(MOST_ANSWERS)]

    def wrong(self, x: RewardInput, known: Sequence[str]) -> str:
        """Return the right answer of another row, or if all rows have the same, a changed one."""
        right = self.text(x)
        changed = f"{right}9" if right[-1:].isdigit() else f"no {right}"
        return next((text for text in known if text != right), changed)

    def union(self, rows: Sequence[RewardInput]) -> str | None:
        """Return the members of all rows' sets in one answer; None if the answers are no sets."""
        texts = self.known(rows)
        try:
            sets = [parse_json(text) for text in texts]
        except ValueError:
            sets = [text.split(", ") for text in texts] if any(", " in text for text in texts) else []
        if not sets or not all(isinstance(one, list) for one in sets):
            return None
        members = list({json.dumps(member): member for one in sets for member in one}.values())
        return json.dumps(members) if texts[0][:1] == "[" else ", ".join(members)


def spellings(x: RewardInput) -> dict[str, str]:
    """Return way -> the right answer of a row written in this way; the first is the usual one. {} = there is none."""
    return {f"{name}{way}": text for name, value in _values(x) for way, text in _spelled(value) if text}


def _values(x: RewardInput) -> list[tuple[str, Any]]:
    """Return ("", the expected answer), or if no field is the answer, (name, value) of each, and all in one."""
    try:
        return [("", ground_truth(x))]
    except RewardError:
        fields = [(f"{name} ", value) for name, value in x.truth.items() if value is not None]
        return [("", dict(x.truth)), *fields] if fields else []


def _spelled(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        yield "json", json.dumps(dict(value), default=str)
        yield "commas", ", ".join(map(str, value.values()))
    elif isinstance(value, (list, tuple)):
        if value:
            yield "", next(_spelled(value[0]))[1]  # the first of several accepted answers
        yield "json", json.dumps(list(value), default=str)
        yield "commas", ", ".join(map(str, value))
    else:
        whole = str(value)  # a solution, or the answer that its last box or mark states
        marks = [m[m.lastgroup or 0].strip() for m in SLOT.finditer(whole) if m.lastgroup in ("tag", "mark")]
        text = last_box(whole).text or "".join(marks[-1:]) or whole
        yield "", text
        if isinstance(value, bool):
            yield from (("lower", text.lower()), ("word", "yes" if value else "no"), ("digit", str(int(value))))
        if match := DECIMAL.fullmatch(text) or CHOICE.fullmatch(text):
            yield "short", match[1]


def answer_forms(rows: Sequence[RewardInput], echo: str = "") -> list[AnswerForm]:
    """Return the forms in which the rows may be answered, without those that would write the same.

    Args:
        echo: prompt template, used when a row has no stored prompt.
    """
    ways: dict[tuple[str, ...], str] = {}
    spelled = [spellings(x) for x in rows]
    for way in dict.fromkeys(way for texts in spelled for way in texts):
        if all(way in texts for texts in spelled if texts):
            ways.setdefault(tuple(texts.get(way, "") for texts in spelled), way)
    frames = dict.fromkeys([*FRAMES, *learned_frames(rows, echo)])
    return [AnswerForm(*frame, way) for way in ways.values() for frame in frames]


def learned_frames(rows: Sequence[RewardInput], echo: str = "") -> list[tuple[str, str]]:
    """Return frames that the rows show, the most frequent first.

    In a saved response, an answer stands at the last mention of the truth, or in the last slot. A prompt shows slots,
    in order the tags of a whole response, and sentences with a placeholder.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for x in rows:
        said = x.response
        spans = [m.span(m.lastgroup or 0) for m in SLOT.finditer(said)][-1:]
        spans += [(at, at + len(text)) for text in spellings(x).values() if (at := said.rfind(text)) >= 0]
        frames = [(said[:start], said[end:]) for start, end in spans]
        slots = list(SLOT.finditer(x.prompt or echo))
        for slot in slots[-3:]:
            start, end = (n - slot.start() for n in slot.span(slot.lastgroup or 0))
            frames.append((slot.group()[:start], slot.group()[end:]))
        if names := list(dict.fromkeys(slot["name"] for slot in slots if slot["name"])):
            thoughts = "".join(f"<{name}>{UNSURE}</{name}>" for name in names[:-1])
            frames.append((f"{thoughts}<{names[-1]}>", f"</{names[-1]}>"))
        frames += _sentences(x.prompt or echo)
        counts.update(list(dict.fromkeys(frames)))
    return [frame for frame, _ in counts.most_common(MOST_LEARNED)]


def _sentences(prompt: str) -> Iterator[tuple[str, str]]:
    """Yield the text around the last placeholders of a prompt, with their brackets and without.

    The text begins after a colon, a quotation mark or the end of a sentence: after the last one, or the one before.
    """
    for match in list(PLACEHOLDER.finditer(prompt))[-2:]:
        line = prompt[: match.start()].rpartition("\n")[2]
        starts = [0, *(mark.end() for mark in re.finditer(r"[:.!?]\s+|[\"`]", line))][-2:]
        after = re.split(r"[\n\"`]|(?<=[.!?])\s", prompt[match.end() :], maxsplit=1)[0].rstrip()
        for before in (line[start:] for start in reversed(starts)):
            yield before, after
            if inside := match["brackets"] or match["angles"]:
                left, _, right = match.group().partition(inside)
                yield before + left, right + after
