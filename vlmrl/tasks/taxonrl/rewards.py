"""Built-in rewards of TaxonRL's tasks, by name, and those that TaxonRL published, with their flaws.

Use the published ones only to reproduce its runs. Source: arXiv:2603.04380 and its repository (max-vkl/TaxonRL at
f4b80ac, examples/reward_function). A name such as `lfw_fungi_im:compute_score_gemini` is the file and the function
there. Every flaw that is kept on purpose has a named test in tests/unit/rewards/test_taxonrl.py; R1, R2, ... are its
numbers of flaws. The rewards `taxonomy`, `pair_labels` and `pair_answer` (tasks/pairs/rewards.py) have none of them.
The time of all functions is linear in the length of a response; several of the originals are slower.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.errors import RewardError, did_you_mean, unknown
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.taxonrl.domains import LAYOUTS
from vlmrl.types import RewardInput

Fields = Sequence[str]
"""Fields of a ground truth: its text split at every `;`, without outer blanks."""
Middle = Callable[[str, Fields], float]
"""(Response after `squeeze`, ground truth) -> score in [0, 1] of the part that is neither format nor answer."""

EPSILON = 1e-15
MOST_ANSWER_CHARS = 200
"""Maximum length of an answer in `Score.detail`, in characters. Without a closed tag, it is the whole response."""
RANKS = ("order", "family", "genus")
FORMAT_END = re.compile(r"</think><answer>\d+\.\d{4}</answer>\Z")
RELAXED_FORMAT_END = re.compile(r"</?think><answer>\d+\.\d{4}</?answer>\Z")
RANK_TAGS = {rank: (re.compile(f"<{rank}>", re.I), re.compile(f"</{rank}>", re.I)) for rank in RANKS}
RANK_WORDS = {rank: re.compile(f"<{rank}>(same|different|uncertain)</{rank}>", re.I) for rank in RANKS}
AGES = re.compile(r"<age-group>([\w\s]+);([\w\s]+)</age-group>")
NAMED_AGES = re.compile(r"<age-group>Image1=([\w\s]+);\s*Image2=([\w\s]+)</age-group>")
TYPES = re.compile(r"<(?:age-group|type)>([\w\s-]+);([\w\s-]+)</(?:age-group|type)>")
NAMED_TYPES = re.compile(r"<(?:age-group|type)>Image1=([\w\s-]+);\s*Image2=([\w\s-]+)</(?:age-group|type)>")
SECOND_SPECIES = re.compile(r"([^<]+)</species>")
NAMED_SECOND_SPECIES = re.compile(r"\s*Image2=([^<]+)</species>")
SAME_RANKS = {"samespecies": 3, "samegenus": 3, "samefamily": 2, "sameorder": 1}
"""Word for the distance -> number of equal ranks, from the order down; any other word means 0."""


@dataclass(frozen=True)
class Function:
    """One published function.

    Args:
        layout: the layout of its ground truth; `answer` = the whole ground truth is the answer.
        part: name of the middle part, besides format and answer; "" = there is none.
        weights: format weight -> (weight of the answer, weight of the middle part).
        format_weight: default of the format weight.
        relaxed: whether the slashes of both closing tags may be missing.
    """

    layout: str
    part: str = ""
    middle: Middle = lambda text, fields: 0.0
    weights: Callable[[float], tuple[float, float]] = lambda w: (1 - w, 0.0)
    format_weight: float = 0.2
    relaxed: bool = False

    def parts(self, response: str, ground_truth: Any) -> tuple[dict[str, float], str | None, str]:
        """Return (scores of the parts, cell of the confusion matrix, text of the answer) for one response.

        The cell is tp, fp, fn or tn; None = the answer or the truth cannot be read.
        """
        text = squeeze(response)
        fields = [field.strip() for field in str(ground_truth).split(";")]
        truth = fields[0] if self.part else ground_truth
        answer = first_answer(text, ("</answer>", "<answer>") if self.relaxed else ("</answer>",))
        cell = confusion_kind(answer, truth)
        parts = {"format": format_score(text, self.relaxed), "accuracy": answer_score(answer, truth)}
        if self.part:
            parts[self.part] = self.middle(text, fields)
        true_positive = float(cell == "tp")
        return (
            parts | {"precision": true_positive, "f1": true_positive, "acutal_accuracy": float(cell in ("tp", "tn"))},
            cell,
            answer,
        )

    def shares(self, format_weight: float | None = None) -> dict[str, float]:
        """Return part -> weight, as published; the weights may add up to more or less than 1."""
        weight = self.format_weight if format_weight is None else format_weight
        answer, middle = self.weights(weight)
        return {"accuracy": answer} | ({self.part: middle} if self.part else {}) | {"format": weight}


def taxonrl(*, function: str, layout: str | None = None, format_weight: float | None = None) -> RewardSpec:
    """Return a published TaxonRL reward with the original names of the parts, their weights and the value.

    The value is the original's `overall`. `precision` and `f1` are computed for the sample alone (1 for a true
    positive, else 0). Some originals write the batch's precision and f1 into every sample; this is not done.

    Args:
        function: file and function, such as `lfw_fungi_im:compute_score_gemini`.
        layout: layout in which the typed truth is written if a row has no `ground_truth` text; default: the function's
            layout. If "answer" is given, only the answer is taken from a row's `ground_truth`, too: TaxonRL's baselines
            use the column `answer`, also of rows that have `answer_im`.
        format_weight: the original's parameter; default: the function's own.
    Raises: RewardError for an unknown function or layout, or a format weight that is not a number.
    """
    published = _published(function)
    answer_alone = layout == "answer"
    layout = published.layout if layout is None else layout
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS, error=RewardError)
    number = isinstance(format_weight, (int, float)) and math.isfinite(format_weight)
    if format_weight is not None and not number:
        raise RewardError(f"format_weight is {format_weight!r}, not a number")

    def score(x: RewardInput) -> dict[str, Any]:
        ground_truth = x.truth.get("ground_truth")
        if ground_truth is None and "same" in x.truth:
            ground_truth = LAYOUTS[layout].write(x.truth)
        elif answer_alone and isinstance(ground_truth, str):
            ground_truth = ground_truth.partition(";")[0].strip()
        parts, _, answer = published.parts(x.response, ground_truth)
        return {**parts, "detail": {"answer": answer[:MOST_ANSWER_CHARS]}}

    weights = published.shares(format_weight)
    names = ("format", *weights, "precision", "f1", "acutal_accuracy")
    return RewardSpec("taxonrl", score, dict.fromkeys(names, (0.0, 1.0)), weights, pure=True)


def squeeze(response: str) -> str:
    """Return the response without the white space around every `<`, `>` and `/`, and at its ends."""
    for mark in "<>/":
        response = mark.join(map(str.strip, response.split(mark)))
    return response


def format_score(text: str, relaxed: bool = False) -> float:
    """Return 1 if the text starts with `<think>` and ends with `</think>` and a four-place answer (R1 to R4)."""
    end = (RELAXED_FORMAT_END if relaxed else FORMAT_END).search(text, len("<think>"))
    return float(text.startswith("<think>") and end is not None)


def first_answer(text: str, closings: Sequence[str]) -> str:
    """Return the text in the first `<answer>` that is closed on the same line; without one, the whole text (R1, R6)."""
    start = text.find("<answer>")
    while start >= 0:
        start += len("<answer>")
        line_end = text.find("\n", start)
        line_end = len(text) if line_end < 0 else line_end
        ends = [end for closing in closings if (end := text.find(closing, start, line_end)) >= 0]
        if ends:
            return text[start : min(ends)].strip()
        start = text.find("<answer>", line_end)
    return text.strip()


def answer_score(answer: str, truth: Any) -> float:
    """Return 1 - min(cross-entropy, 1) of the answer as a probability; 0 if either side cannot be read (R5, R7, R8)."""
    numeric = isinstance(truth, (int, float))
    label = _float(truth) if numeric else _float(truth.strip()) if isinstance(truth, (str, bytes)) else None
    if label is None:
        return 0.0
    p = _float(answer)
    if p is None:
        return float(answer == str(truth).strip())
    if not (0 <= p <= 1 and 0 <= label <= 1):
        return 0.0
    p = max(min(p, 1 - EPSILON), EPSILON)
    return 1 - min(-(label * math.log(p) + (1 - label) * math.log(1 - p)), 1)


def confusion_kind(answer: str, truth: Any) -> str | None:
    """Return tp, fp, fn or tn for the threshold 0.5; None if answer or truth is not a number from 0 to 1 (R9)."""
    p = _float(answer)
    label = _float(truth if isinstance(truth, (int, float)) else str(truth).strip())
    if p is None or label is None or not (0 <= p <= 1 and 0 <= label <= 1):
        return None
    return ("t" if (p >= 0.5) == (label >= 0.5) else "f") + ("p" if p >= 0.5 else "n")


def names_of(order: int, family: int, genus: int, step: int) -> Middle:
    """Return the function for the part `taxonomy` of the concrete prompts: names per rank, by the rules R11 to R16.

    The ranks are checked from the order down. Both names must be right at every rank down to the first one at which the
    pair differs. All ranks below it must be missing. The check stops at a rank whose truth is not known.

    Args:
        order, family, genus: index of image 1's name in the ground truth.
        step: offset of image 2's names.
    """
    places = dict(zip(RANKS, (order, family, genus), strict=True))

    def score(text: str, fields: Fields) -> float:
        scores, parted = [], False
        for rank, place in places.items():
            stated = _stated_names(text, rank)
            if parted:
                scores.append(stated is None)
                continue
            names = [_field(fields, place + i * step).lower() for i in (0, 1)]
            if not all(names):
                break
            scores.append(stated == names)
            parted = names[0] != names[1]
        return sum(scores) / len(scores) if scores else 0.0

    return score


def relations(text: str, fields: Fields) -> float:
    """Return the part `taxonomy` of the basic prompt: Same or Different per rank; a missing rank is Different (R11).

    Uncertain is always wrong. An unknown distance counts as sameClass (R24).
    """
    same_ranks = SAME_RANKS.get(_field(fields, 1).lower(), 0)
    right = 0
    for place, rank in enumerate(RANKS):
        stated = RANK_WORDS[rank].search(text)
        word = stated[1].capitalize() if stated else "Different"
        right += word == ("Same" if place < same_ranks else "Different")
    return right / 3.0


def labels_in(pattern: re.Pattern[str], truths: Callable[[Fields], Fields]) -> Middle:
    """Return the function for `age_group`: 0.5 per right label in the first match, case ignored (R14, R18, R20)."""

    def score(text: str, fields: Fields) -> float:
        match = pattern.search(text)
        if not match:
            return 0.0
        return 0.5 * sum(match[i].strip().lower() == truth.lower() for i, truth in enumerate(truths(fields), start=1))

    return score


def species_in(opening: str, second: re.Pattern[str]) -> Middle:
    """Return the function for the part `species`: 0.5 for each name with the right `species_code` (R19)."""

    def score(text: str, fields: Fields) -> float:
        start = text.find(opening)
        while start >= 0:
            start += len(opening)
            end = text.find(";", start)
            if end < 0:
                return 0.0
            match = second.match(text, end + 1) if end > start else None
            if match:
                stated = (text[start:end], match[1])
                pairs = zip(stated, _second_and_third(fields), strict=True)
                return 0.5 * sum(species_code(name.strip()) == species_code(truth) for name, truth in pairs)
            start = text.find(opening, end)
        return 0.0

    return score


def species_code(label: str) -> str:
    """Return Asru or Anau if the text contains a word for this species, Asru first; else return the text itself."""
    plain = re.sub(r"[.\s]+", " ", label.lower()).strip()
    if plain == "asru" or plain == "anau":
        return plain.capitalize()
    if "asterias" in plain or " rubens" in plain:
        return "Asru"
    return "Anau" if "anthenea" in plain or " australiae" in plain else label


def _stated_names(text: str, rank: str) -> list[str] | None:
    """Return the first two names in the first tag of a rank, in lower case; None if there is no such tag.

    Upper and lower case of the tag are accepted.
    """
    opening, closing = RANK_TAGS[rank]
    start = opening.search(text)
    end = closing.search(text, start.end()) if start else None
    if not start or not end:
        return None
    return [name.strip().lower() for name in text[start.end() : end.start()].split(";")][:2]


def _float(text: Any) -> float | None:
    try:
        return float(text)
    except (ValueError, OverflowError):
        return None


def _field(fields: Fields, place: int) -> str:
    return fields[place] if place < len(fields) else ""


def _chimp(fields: Fields) -> Fields:
    return _field(fields, 1), _field(fields, 3)


def _gorilla(fields: Fields) -> Fields:
    """Return the fields in gorilla's layout. Five fields are taken for chimp's layout and reordered."""
    return _chimp(fields) if len(fields) >= 5 else _second_and_third(fields)


def _second_and_third(fields: Fields) -> Fields:
    return (fields[1], fields[2]) if len(fields) >= 3 else ("", "")


def _published(function: str) -> Function:
    if function not in FUNCTIONS:
        hint = did_you_mean(function, FUNCTIONS, f"known: {', '.join(FUNCTIONS)}", cutoff=0.4)
        raise RewardError(f"TaxonRL has published no reward `{function}`", hint=hint)
    return FUNCTIONS[function]


def _halves(w: float) -> tuple[float, float]:
    return (1 - w) / 2, (1 - w) / 2


def _fixed(share: float) -> Callable[[float], tuple[float, float]]:
    return lambda w: (1 - w - share, share)


def _table() -> dict[str, Function]:
    bird, fungi = names_of(order=4, family=3, genus=2, step=3), names_of(order=3, family=1, genus=2, step=4)
    table = {
        "lfw:compute_score": Function("answer", format_weight=0.5),
        "lfw_relax_format:compute_score": Function("answer", format_weight=0.5, relaxed=True),
        "lfw_bird_im_basic:compute_score": Function("answer"),
        "lfw_bird_im_basic:compute_score_gemini": Function("bird", "taxonomy", relations, _halves),
    }
    concrete: list[tuple[str, str, Middle, Callable[[float], tuple[float, float]], float]] = [
        ("lfw_bird_im_concrete", "bird", bird, _halves, 0.2),
        ("lfw_bird_im_concrete_20p", "bird", bird, _fixed(0.2), 0.2),
        ("lfw_bird_im_concrete_60p", "bird", bird, _fixed(0.6), 0.2),
        ("lfw_bird_im_concrete_80p", "bird", bird, _fixed(0.8), 0.1),
        ("lfw_fungi_im", "fungi", fungi, _halves, 0.2),
    ]
    for file, layout, middle, weights, format_weight in concrete:
        for name in ("compute_score", "compute_score_gemini"):
            table[f"{file}:{name}"] = Function(layout, "taxonomy", middle, weights, format_weight)
    ages = labels_in(AGES, _chimp), labels_in(NAMED_AGES, _chimp)
    types = labels_in(TYPES, _gorilla), labels_in(NAMED_TYPES, _gorilla)
    species = species_in("<species>", SECOND_SPECIES), species_in("<species>Image1=", NAMED_SECOND_SPECIES)
    labels = [
        ("lfw_intermediate", "chimp", "age_group", *ages),
        ("lfw_intermediate_gorilla", "gorilla", "age_group", *types),
        ("lfw_sea_star_im", "sea_star", "species", *species),
    ]
    for file, layout, part, plain, named in labels:
        table[f"{file}:compute_score"] = Function("answer")
        table[f"{file}:compute_score_gemini"] = Function(layout, part, plain, _halves)
        # R22: both weights are 0.4 for any weight of the format.
        table[f"{file}:compute_score_chatgpt"] = Function(layout, part, named, lambda w: (0.4, 0.4))
    return table


FUNCTIONS: dict[str, Function] = _table()
"""Name of a published function, `file:function` -> its definition."""


REWARDS: Mapping[str, Builtin] = {
    "taxonrl": Builtin(
        taxonrl,
        "pairs: a reward that TaxonRL published, to the digit, to reproduce its runs",
        version=1,
        any_truth=True,
    )
}
