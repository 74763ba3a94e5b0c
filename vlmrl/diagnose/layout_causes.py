"""Causes found in right answers that earn nothing: in a layout, words or coordinates that the reward does not read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from vlmrl.diagnose.run_facts import ANSWER_PARTS, Response, RunFacts
from vlmrl.diagnose.thresholds import Cause, limit, look_again, reward_check, rows_of
from vlmrl.reward_check.texts import answer_of

FIELD = re.compile(r"<([A-Za-z][A-Za-z0-9_-]{0,30})>([^<>]{1,200})</\1>")
POSITION = re.compile(r"\b(?:image|img|picture|photo|left|right|first|second)\s*_?\d?\s*[=:]\s*", re.IGNORECASE)
PIECES = re.compile(r"[;,|/\n]+")
YES, NO = {"true", "yes", "same", "1"}, {"false", "no", "different", "0"}
TRUE_ANSWERS = ("answer", "ground_truth", "solution", "label")


def other_coordinates(facts: RunFacts) -> Iterator[Cause]:
    """Report boxes that fit the truth clearly better in another space or order than the declared one."""
    if facts.coordinates:
        name, positions = list(facts.coordinates.items())[-1]
        yield Cause(
            "other_coordinates",
            "error",
            f"the boxes of the evaluation {name} have a meaning that is not declared: {positions['words']}",
            look_again(facts),
            0.95,
            [str(positions["advice"])],
        )


def other_layout(facts: RunFacts) -> Iterator[Cause]:
    """Report labels that are right but spelled in a way that the reward does not accept."""
    unpaid, hits, spelled = 0, {}, {}
    for r in facts.responses:
        for name, label, true in _labels(r):
            if (part := part_of(name, r.parts)) is None or r.cut or (r.parts.get(part) or 0.0) > 0:
                continue
            form = r.parts.get("format", 1.0)
            if form == 0 and f"<{name}>" not in r.note and r.note:
                continue  # another field breaks the format: the reward did not read this label
            unpaid += 1
            if label.strip() == true.strip():
                spelled.setdefault(name, []).append((r, label, true))
            elif why := agrees(label, true):
                hits.setdefault((name, why), []).append((r, label, true))
    for name, rows in spelled.items():  # reported only if no label at all earned this part
        if len(rows) >= limit("few_samples") and not any(facts.part(part_of(name, rows[0][0].parts) or "")):
            hits[name, "the reward compares with something else"] = rows
    num_hits = sum(map(len, hits.values()))
    if num_hits >= limit("layout_least") and num_hits >= limit("layout_share") * unpaid:
        (name, why), rows = max(hits.items(), key=lambda item: len(item[1]))
        _, label, true = rows[0]
        yield Cause(
            "other_layout",
            "error",
            f"labels are right and earn nothing, in another layout than the reward accepts: `{name}` ({why})",
            reward_check(facts),
            0.95 + 0.05 * min(1.0, num_hits / unpaid),
            [
                f"{num_hits} of {unpaid} unpaid labels agree with the truth if spelling is ignored",
                f"the response says {label!r}, the truth is {true!r}",
            ],
            rows_of([r for r, _, _ in rows]),
        )
    else:
        yield from _other_words(facts)


def _other_words(facts: RunFacts) -> Iterator[Cause]:
    """Report truths and responses whose labels come from small vocabularies that have no word in common."""
    labels: dict[str, list[str]] = {}
    true: dict[str, list[str]] = {}
    rows: dict[str, list[Response]] = {}
    for r in facts.responses:
        for name, one, other in _labels(r):
            if (part := part_of(name, r.parts)) is not None and not (r.parts.get(part) or 0.0) > 0 and not r.cut:
                labels.setdefault(name, []).extend(map(plain, split(one)))
                true.setdefault(name, []).extend(map(plain, split(other)))
                rows.setdefault(name, []).append(r)
    for name, words in labels.items():
        ours, theirs, closed = set(words), set(true[name]), limit("closed_labels")
        numbers = all(_number(w) is not None for w in ours | theirs)
        if (
            len(words) < limit("few_samples")
            or len(ours) > closed
            or len(theirs) > closed
            or len(theirs) < 2
            or numbers
        ):
            continue
        if (
            not ours & theirs
            and len(words) >= 4 * len(ours)
            and not any(facts.part(part_of(name, rows[name][0].parts) or ""))
        ):
            yield Cause(
                "other_layout",
                "error",
                f"`{name}`: no word of the responses is among the truth's labels",
                reward_check(facts),
                0.8,
                [f"labels of the truth: {some_of(theirs)}", f"labels of the responses: {some_of(ours)}"],
                rows_of(rows[name]),
            )


def plain(text: str) -> str:
    """Return a label in lower case, without accents, spaces, punctuation, and a prefix such as "Image1="."""
    text = unicodedata.normalize("NFKD", POSITION.sub("", text)).casefold()
    return re.sub(r"[^\w.]+|_", "", text).strip(".")


def split(text: str) -> list[str]:
    return [piece.strip() for piece in PIECES.split(text) if piece.strip()]


def agrees(said: str, true: str) -> str:
    """Describe how two spellings of one label differ; "" if they are equal, or are different labels."""
    if said.strip() == true.strip() or not plain(said):
        return ""
    ours, theirs = [plain(p) for p in split(said)], [plain(p) for p in split(true)]
    if POSITION.search(said) and not POSITION.search(true) and ours == theirs:
        return "the response names the images"
    if ours == theirs:
        return "case, spaces, punctuation or separators"
    if plain(said) == plain(true):
        return "the separators differ"
    one, other = _number(plain(said)), _number(plain(true))
    if one is not None and other is not None and one == other:
        return "the number is written differently"
    if {plain(said), plain(true)} <= YES or {plain(said), plain(true)} <= NO:
        return "another word for yes or no"
    if re.sub(r"</?[a-z]+>|\\boxed\{|\}", "", true.casefold()).strip() == said.casefold().strip():
        return "the truth still has its tags"
    windows = [theirs[i : i + len(ours)] for i in range(len(theirs) - len(ours) + 1)] if len(theirs) > 2 else []
    if ours in windows or (one is not None and [one] in [[_number(w) for w in window] for window in windows]):
        return "the truth holds several values in one text"
    return ""


def _labels(r: Response) -> Iterator[tuple[str, str, str]]:
    """Yield (field, the response's label, the truth's label) for each truth field that the response answers."""
    labels = dict(FIELD.findall(r.text))
    for name, value in r.truth.items():
        true = "; ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(true, (str, int, float)) and not isinstance(true, bool):
            if name in labels:
                yield name, labels[name], str(true)
            elif name in TRUE_ANSWERS and (answer := answer_of(r.text)) is not None:
                yield "answer", answer, str(true)


def part_of(name: str, parts: Mapping[str, Any]) -> str | None:
    """Return the reward's part that scores a field; None if there is none."""
    if name in parts:
        return name
    return (
        next((p for p in ANSWER_PARTS if p in parts), "reward" if "reward" in parts else None)
        if name == "answer"
        else None
    )


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{1,15})?", text) else None


def some_of(words: set[str]) -> str:
    return ", ".join(sorted(words)[:5])
