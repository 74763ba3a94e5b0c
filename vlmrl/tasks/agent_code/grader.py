"""Grader of the reward `agent_code`. It runs in workers: code of the model is run in their sandbox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from vlmrl.errors import EngineError, RewardError
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.rewards.text_parsing import BLANKS, VISIBLE, form_problem, tagged_text
from vlmrl.rewards.text_rewards import accepted_answers, word_overlap
from vlmrl.sandbox.box import GONE, Ran, Sandbox
from vlmrl.sandbox.confine import BoxLimits
from vlmrl.tasks.agent_code.rows import (
    ANSWER,
    COPY,
    INPUT_NAME,
    OUTPUT_NAME,
    PROBLEM,
    STEPS,
    read_code,
    read_labels,
)
from vlmrl.types import RewardInput, RewardResult

Pixels = np.ndarray[Any, Any]
LIMITS = BoxLimits(seconds=10.0, images=2)
SAME = 0.999
"""Least share of the repair from which a picture counts as the same: what JPEG changes is below."""
KEPT = 64
"""Number of true repairs that are kept: all responses to a prompt need one."""


def make_grader(*, thought: str) -> Callable[[RewardInput], RewardResult]:
    """Return the grader for the arguments of `agent_code`. A sandbox starts when the first code is run."""
    repairs = lru_cache(maxsize=KEPT)(_true_repair)

    def grade(x: RewardInput) -> RewardResult:
        step = x.truth.get("step", ANSWER)
        if step not in STEPS.values():
            raise RewardError(f"the row's `step` is {quoted(step, 40)}, not one of {', '.join(STEPS.values())}")
        text, problem = tagged_text(x.answer, step)
        last = replace(x, response=x.answer)
        form = problem or form_problem(last, thought, step=step, steps=(*STEPS.values(),))
        form = form or ("" if text is None or VISIBLE.search(text) else "an empty tag")
        detail: dict[str, Any] = {step: None if text is None else excerpt(text.strip(BLANKS), 400)}
        if text is None:
            right, is_exact, note = 0.0, False, problem
        elif step == ANSWER:
            right, is_exact = word_overlap(text, accepted_answers(x))
            note = ""
        elif step == PROBLEM:
            right, is_exact, note = *_labels(read_labels(text), x), ""
        else:
            right, note = _repaired(read_code(text), x.images[0], *repairs(_Key(x)))
            is_exact = right >= SAME
        parts: dict[str, float | None] = {"right": right, "format": float(not form), "exact": float(is_exact)}
        return RewardResult(parts, note or form, detail)

    return grade


def _labels(labels: set[str], x: RewardInput) -> tuple[float, bool]:
    truth = {str(label) for label in x.truth.get("damage") or ()}
    if not truth:
        raise RewardError("the row's `damage` names no label")
    return len(labels & truth) / len(labels | truth), labels == truth


class _Key:
    """Row as the key of its true repair, with its picture."""

    def __init__(self, x: RewardInput) -> None:
        self.code, self.image = str(x.truth.get("code") or ""), x.images[0] if x.images else None
        self.name = (self.code, *(media.sha256 for media in x.media)) if x.media else (self.code, id(self.image))

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.name == other.name


def _true_repair(key: _Key) -> tuple[Pixels, Pixels]:
    """Return the picture that a row's own code makes, and that of code which copies the picture, in the same size.

    Raises: RewardError when its own code makes none.
    """
    if key.image is None or not key.code.strip():
        raise RewardError("a row that asks for code has an image and a truth `code`, which repairs it")
    ran, copied = run(key.code, key.image), run(COPY, key.image)
    if not ran.images or not copied.images:
        raise RewardError(f"the row's own code makes no {OUTPUT_NAME}: {excerpt(ran.error or ran.printed, 300)}")
    (_, truth), (_, copy) = ran.images[0], copied.images[0]
    return _pixels(truth), _pixels(copy.resize(truth.size))


def _repaired(code: str, image: Any, truth: Pixels, before: Pixels) -> tuple[float, str]:
    """Return (share of the difference to the true repair that code removes, why it is 0)."""
    ran = run(code, image)
    if not ran.images:
        return 0.0, excerpt(ran.error.splitlines()[-1] if ran.error else f"no {OUTPUT_NAME} was written", 300)
    new = _pixels(ran.images[0][1])
    if new.shape != truth.shape:
        shapes = [f"{shape[1]} x {shape[0]}" for shape in (new.shape, truth.shape)]
        return 0.0, f"the picture is {shapes[0]} pixels large, not {shapes[1]}"
    damage, left = float(np.abs(before - truth).mean()), float(np.abs(new - truth).mean())
    if damage == 0.0:
        return float(left == 0.0), ""
    return max(0.0, 1.0 - left / damage), ""


def _pixels(image: Any) -> Pixels:
    return np.asarray(image.convert("RGB"), dtype=np.float64)


def run(code: str, image: Any) -> Ran:
    """Run code that reads the picture from INPUT_NAME. Of its pictures, only OUTPUT_NAME is returned."""
    try:
        with _sandbox().open(limits=LIMITS) as session:
            # The published placeholders, with a path or without one.
            ran = session.run(code, [image.convert("RGB")], [INPUT_NAME], [OUTPUT_NAME])
            if ran.error == GONE:
                raise EngineError(GONE)
    except EngineError as error:
        _sandbox.cache_clear()  # the next run starts another one
        raise RewardError(error.message, hint=error.hint) from error
    ran.images = [(name, picture) for name, picture in ran.images if name == OUTPUT_NAME]
    return ran


@cache
def _sandbox() -> Sandbox:
    return Sandbox(LIMITS)
