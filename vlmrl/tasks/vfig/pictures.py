"""Pictures that compare a response with the true figure: of rewards, and drawn again for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmrl.errors import RewardError
from vlmrl.untrusted import CodeRefused

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

RENDER, OVERLAY = "render", "overlay"
"""Names of the artifacts: the picture of the response, and it over that of the truth."""
MISSING, NEEDLESS = (225.0, 30.0, 30.0), (30.0, 80.0, 235.0)
LEGEND = f"In an {OVERLAY}, red is missing, blue is too much, purple has another colour, grey is right."
FULL_DIFFERENCE = 64.0
"""Difference of two pixels, of 255, from which an overlay has its full colour."""


def overlaid(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return two pictures of one size over each other, in the colours that LEGEND names; where they agree, pale grey.

    Ink is what differs from the most frequent colour of the truth, so dark pages are read like light ones.

    Args:
        first, second: (height, width, 3) uint8 RGB, of the truth and of the response.
    """
    import numpy as np

    from vlmrl.tasks.vfig.scoring.picture import background

    page = background(first)
    inks = [np.abs(picture - page).max(axis=2) for picture in (first, second)]
    difference = np.abs(first.astype(np.float64) - second).max(axis=2)
    missing = 0.5 + 0.5 * np.clip((inks[0] - inks[1]) / np.maximum(difference, 1.0), -1.0, 1.0)[:, :, None]
    colour = missing * np.array(MISSING) + (1.0 - missing) * np.array(NEEDLESS)
    amount = np.minimum(difference / FULL_DIFFERENCE, 1.0)[:, :, None]
    agreed = 255.0 - 0.5 * np.minimum(*inks)[:, :, None]
    return np.clip(amount * colour + (1.0 - amount) * agreed, 0, 255).astype(np.uint8)


def shown_pictures(first: np.ndarray, second: np.ndarray) -> dict[str, Image]:
    """Return the artifacts of a response. `first`, `second`: pictures as `overlaid` takes them."""
    from PIL import Image

    return {RENDER: Image.fromarray(second), OVERLAY: Image.fromarray(overlaid(first, second))}


def draw_pairs(pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[Mapping[str, bytes] | str]:
    """Return the pictures of truths and responses as PNG files: truth, render, overlay. See `Drawn.draw`.

    A page shows few, so one process draws them.
    """
    from PIL import Image

    from vlmrl.data.images import encode_png
    from vlmrl.svg.renderer import Drawing, DrawJob, SvgRenderer
    from vlmrl.tasks.vfig.scoring.compare import compared_size
    from vlmrl.tasks.vfig.truth import code_of

    results: list[Mapping[str, bytes] | str] = []
    with SvgRenderer() as renderer:
        for truth, response in pairs:
            try:
                code, answer = code_of(truth), _code(response)
            except RewardError as error:
                results.append(error.message)
                continue
            declared = renderer.draw([DrawJob(code)])[0]
            if not isinstance(declared, Drawing):
                results.append(f"the truth is not drawn: {declared.reason}")
                continue
            height, width = declared.pixels.shape[:2]
            size = compared_size(width, height)
            drawn = renderer.draw([DrawJob(text, size) for text in (code, *([answer] if answer is not None else []))])
            pixels = [one.pixels for one in drawn if isinstance(one, Drawing)]
            if len(pixels) == 2:
                pixels.append(overlaid(*pixels))
            named = zip(("truth", RENDER, OVERLAY), pixels, strict=False)
            results.append({name: encode_png(Image.fromarray(picture)) for name, picture in named})
    return results


def _code(response: str) -> str | None:
    """Return the SVG code in a response; None if there is none."""
    from vlmrl.svg.parse import find_svg

    try:
        return find_svg(response)
    except CodeRefused:
        return None
