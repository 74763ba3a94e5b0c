"""Checks of tasks whose answers are boxes: the declared coordinate space, seen in numbers and in pictures."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import Problem, VlmrlError
from vlmrl.preflight.rows import problems_in, sample_rows
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.rewards.base import NO_REWARD
from vlmrl.rewards.boxes.planes import MEANINGS
from vlmrl.rewards.boxes.reading import Coordinates
from vlmrl.store.layout import CHECKED
from vlmrl.tasks.positions import Fit, caption_of, save_overlays
from vlmrl.types import RewardInput

if TYPE_CHECKING:
    from vlmrl.data.encode import Encoder
    from vlmrl.tasks.source import Source

DRAWN_ROWS = 8


def check_boxes(
    source: Source, encoder: Encoder | None, where: str, root: Path
) -> tuple[list[Problem], dict[str, Any]]:
    """Draw the truth and a correct response of some rows, and compare how prompt and reward state boxes.

    The correct response has the form that the prompt asks for, and the reward's settings read it. If a truth was
    declared in a wrong space, the picture shows it.

    Args:
        encoder: encoder of the model, for the size at which it sees an image; None = an image counts as not resized.
        root: folder of the runs. The pictures go to `checked/<source>/`; those of an earlier check are replaced.
    Returns: problems, and facts for the plan (empty if the answers of the task are no boxes).
    """
    if source.task.positions is None:
        return [], {}
    positions = source.task.positions(None if source.reward is NO_REWARD else source.reward)
    folder = root / CHECKED / re.sub(r"[^A-Za-z0-9._-]+", "-", source.name)
    inputs: list[RewardInput] = []
    pictures: list[Path] = []
    try:
        for number, row in enumerate(sample_rows(source, DRAWN_ROWS)):
            images = [source.dataset.image(media) for media in row.media]
            seen = encoder.encode(row, source.messages(row), images).seen_sizes if encoder is not None else ()
            text = source.task.correct_response(row, random.Random(0), seen) if source.task.trace is not None else ""
            inputs.append(RewardInput(text, row.truth, row.columns, media=row.media, seen_sizes=seen))
            marks = positions.marks(inputs[-1], positions.declared)
            caption, image_of = caption_of(row.columns), source.dataset.image
            pictures += save_overlays(folder, f"boxes-{number}", row.media, marks, image_of, caption)
    except VlmrlError as error:
        return problems_in(error, where), {}
    if not inputs:
        return [], {}
    fit = positions.fit(inputs)
    problems = []
    if (better := fit.better) is not None:
        problems.append(_asked_otherwise(source.name, fit, better, where))
    return problems, {
        "space": fit.declared.space,
        "order": fit.declared.order,
        "meaning": MEANINGS[fit.declared.space],
        "rows": len(inputs),
        "correct_response": inputs[0].response,
        "overlap": fit.overlaps[fit.declared] if fit.answers else None,
        "pictures": [str(path) for path in pictures],
    }


def _asked_otherwise(source: str, fit: Fit, of_prompt: Coordinates, where: str) -> Problem:
    """Return the problem of a prompt that asks for other coordinates than the reward reads.

    Another order is a warning: a prompt of one's own can ask for it, and what it asks for is not known.
    """
    read, is_order = fit.declared, of_prompt.space == fit.declared.space
    kind = "order" if is_order else "space"
    message = (
        f"the prompt of `{source}` asks for boxes in the {kind} `{getattr(of_prompt, kind)}`, but the reward reads "
        f"them in `{getattr(read, kind)}`: a correct response has an IoU of {fit.overlaps[read]:.2f} instead of "
        f"{fit.overlaps[of_prompt]:.2f}"
    )
    if is_order:
        return Problem(message, where, "leave out `order` of reward.args, unless your prompt asks for it", "warning")
    return Problem(message, where, "set `variant` of [[data]] and `space` of reward.args to the same space")


def check_spoken(loaded: LoadedRecipe, source: Source, model_type: str, where: str) -> list[Problem]:
    """Return a warning if boxes are declared in another space than the model family was trained on.

    Supervised training teaches any space, so it gets no warning; neither does the model of a run.

    Args:
        model_type: as in the model's configuration.
    """
    from vlmrl.model.spoken_boxes import SPOKEN

    spoken = SPOKEN.get(model_type)
    if source.task.positions is None or spoken is None or loaded.recipe.kind != "rl":
        return []
    declared = source.task.positions(None if source.reward is NO_REWARD else source.reward).declared.space
    if declared == spoken:
        return []
    message = (
        f"`{source.name}` declares boxes in the space `{declared}` ({MEANINGS[declared]}); the published weights of "
        f"`{model_type}` state them in `{spoken}` ({MEANINGS[spoken]})"
    )
    hint = f"set a `variant` of [[data]] for `{spoken}`, or look at `vlmrl try` before training"
    return [Problem(message, where, hint, "warning")]
