"""Numbers of the graded responses of an evaluation, column by column: all that its metrics are computed from.

A response takes about 8 bytes per number and id; its texts are not kept. So an evaluation of any size can be summarised
while its records go to disk.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrl.evaluate.interval import Floats
from vlmrl.evaluate.row_keys import Integers, RowKeys, as_numbers
from vlmrl.types import INAPPLICABLE, hash64

Record = Mapping[str, Any]

ANSWER_KEYS = ("answer_value", "answer")
"""Keys of a reward's detail with the answer that it has read, for maj@k; the first that is not None counts."""
MAX_VALUES = 20
"""Maximum number of different values of a field that groups rows. With more, it is a measurement or a name."""
NO_ANSWER = -1
OTHER = -1
"""Code of a row that has no accuracy, or a value that cannot group rows."""


class EvalColumns:
    """Columns of an evaluation. NaN stands for a number that a response does not have.

    Args:
        by: see `Task.by`.
        records: as `evaluate.run.make_records` makes them; more can be added later.

    Attributes:
        outcomes, parts: names of the outcomes and of the reward's parts, in order of first appearance.
        applying: which parts apply (name, whether it is a number), once per pattern, of responses with a score.
        has_answers: whether a reward's detail has a key for an answer.
        by_values: field -> its values that group rows, with their codes in `codes`; only fields with few values.
    """

    def __init__(self, by: Sequence[str] = (), records: Iterable[Record] = ()) -> None:
        self.by = tuple(by)
        self.count = self.max_sample = self.reward_errors = self.unavailable = 0
        self.outcomes: dict[str, None] = {}
        self.parts: dict[str, None] = {}
        self.applying: set[frozenset[tuple[str, bool]]] = set()
        self.has_answers = False
        self._numbers: dict[tuple[str, str], array[float]] = {}
        self._has_confidence, self._truncated = array("b"), array("b")
        self._prompts, self._answers = array("q"), array("q")
        self._image_starts, self._images = array("q", [0]), array("q")
        self.by_values: dict[str, dict[Any, int]] = {field: {} for field in self.by}
        self._codes: dict[str, array[int]] = {field: array("h") for field in self.by}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add the numbers of one response."""
        outcome, error = record["outcome"], record.get("error")
        self._put("", "reward", record["score"])
        self._put("", "response_tokens", record["num_tokens"])
        for name, value in outcome.items():
            self.outcomes.setdefault(name)
            self._put("outcome", name, value)
        for name, value in record["parts"].items():
            self.parts.setdefault(name)
            self._put("part", name, value)
        if error is None:
            self.applying.add(frozenset((name, value is not None) for name, value in record["parts"].items()))
        self._has_confidence.append("confidence" in outcome)
        self._truncated.append(record["finish"] == "length")
        self._prompts.append(hash64(record["prompt_id"]))
        self._images.extend(hash64(key) for key in image_ids(record))
        self._image_starts.append(len(self._images))
        self._add_answer(record)
        self._add_truth(record["truth"], outcome.get("accuracy") is not None)
        unavailable = record.get("status") == "unavailable"
        self.unavailable += unavailable
        self.reward_errors += error not in (None, INAPPLICABLE) and not unavailable
        self.max_sample = max(self.max_sample, record["sample"] + 1)
        self.count += 1

    def number(self, kind: str, name: str) -> Floats:
        """Return a column, [N].

        Args:
            kind: "outcome", "part", or "" for `reward` and `response_tokens`.
        """
        column = self._numbers.get((kind, name), array("d"))
        values_N = np.full(self.count, math.nan)
        values_N[: len(column)] = column
        return values_N

    def truncated(self) -> Floats:
        """Return 1 for each response that was cut at the token limit, else 0, [N]."""
        return np.frombuffer(self._truncated, dtype=np.int8).astype(np.float64)

    def has_confidence(self) -> NDArray[np.bool_]:
        """Return whether the task measures a confidence on each response, [N]."""
        return np.frombuffer(self._has_confidence, dtype=np.int8).astype(bool)

    def codes(self, field: str) -> NDArray[np.int16]:
        """Return the code of each row's value of a field of `by`, OTHER for none, [N]."""
        return np.frombuffer(self._codes[field], dtype=np.int16)

    def prompts(self) -> Integers:
        """Return the hash of each response's prompt id, [N]."""
        return as_numbers(self._prompts)

    def answers(self) -> Integers:
        """Return the hash of each response's answer, NO_ANSWER for none, [N]."""
        return as_numbers(self._answers)

    @property
    def scored_parts(self) -> list[str]:
        """Names of the parts of responses that have a score."""
        return sorted({name for pattern in self.applying for name, _ in pattern}, key=list(self.parts).index)

    @property
    def num_images(self) -> int:
        return len(np.unique(as_numbers(self._images)))

    def clusters(self) -> RowKeys:
        """Return the clusters of the responses: the images that they show, or the prompt of one without images."""
        starts_N1, images = as_numbers(self._image_starts), as_numbers(self._images)
        without_N = np.diff(starts_N1) == 0
        if not without_N.any():
            return RowKeys(starts_N1, images)
        counts_N = np.where(without_N, 1, np.diff(starts_N1))
        all_starts = np.concatenate([[0], np.cumsum(counts_N)])
        keys = np.empty(int(counts_N.sum()), dtype=np.int64)
        is_prompt = np.repeat(without_N, counts_N)
        keys[is_prompt], keys[~is_prompt] = self.prompts()[without_N], images
        return RowKeys(all_starts, keys)

    def _put(self, kind: str, name: str, value: Any) -> None:
        column = self._numbers.setdefault((kind, name), array("d"))
        if len(column) < self.count:
            column.extend([math.nan] * (self.count - len(column)))
        number = finite(value)
        column.append(math.nan if number is None else number)

    def _add_answer(self, record: Record) -> None:
        self.has_answers = self.has_answers or has_answer(record)
        answer = answer_of(record)
        if answer is None:
            self._answers.append(NO_ANSWER)
        elif isinstance(answer, str):
            self._answers.append(hash64(answer))
        else:  # equal numbers have one text, whatever their type
            self._answers.append(hash64("number", _number_text(answer)))

    def _add_truth(self, truth: Mapping[str, Any], has_accuracy: bool) -> None:
        for field, codes in self._codes.items():
            values, value = self.by_values[field], truth.get(field)
            usable = has_accuracy and isinstance(value, (int, str)) and not isinstance(value, bool)
            if usable and len(values) <= MAX_VALUES:
                codes.append(values.setdefault(value, len(values)))
            else:
                codes.append(values.get(value, OTHER) if usable else OTHER)


def answer_of(row: Record) -> Hashable | None:
    """Return the answer with which a response votes in maj@k; None if there is none.

    It is `answer_value`, else `answer`, in the reward's detail: the first as the reward has read it, in a form in which
    equal answers are equal. White space at the ends and the case of a text do not count.
    """
    for detail in _details(row):
        for key in ANSWER_KEYS:
            answer = detail.get(key)
            if isinstance(answer, str):
                return answer.strip().casefold() or None
            if isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer)):
                return answer
            if isinstance(answer, float):
                return None
            if answer is not None:
                return json.dumps(answer, sort_keys=True)
    return None


def _number_text(number: Any) -> str:
    """Return one text for equal numbers, and another for others. `hash` would not do: hash(-1) == hash(-2)."""
    exact = Fraction(number)
    return f"{exact.numerator:x}/{exact.denominator:x}"


def has_answer(row: Record) -> bool:
    """Return whether the reward's detail has a key for an answer."""
    return any(key in detail for detail in _details(row) for key in ANSWER_KEYS)


def _details(row: Record) -> list[Mapping[str, Any]]:
    """Return the details of a response's rewards."""
    details = row.get("detail")
    return [d for d in details.values() if isinstance(d, Mapping)] if isinstance(details, Mapping) else []


def image_ids(row: Record) -> tuple[str, ...]:
    """Return the content hashes of a row's images."""
    return tuple(image["sha256"] for image in row["images"])


def finite(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else, and for an integer that is too large for a float."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:
        return None
