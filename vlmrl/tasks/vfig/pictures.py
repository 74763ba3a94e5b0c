"""Pictures that compare a response with the true figure: of rewards, and drawn again for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmrl.errors import RewardError

if TYPE_CHECKING:
    import numpy as np

RENDER, OVERLAY = "render", "overlay"
"""Names of the artifacts: the picture of the response, and it over that of the truth."""


def overlaid(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return two pictures of one size over each other: what only the first has is red, what only the second has blue.

    Args:
        first, second: (height, width, 3) uint8 RGB, of the truth and of the response.
    """
    import numpy as np

    grey = [picture.astype(np.int16).mean(axis=2) for picture in (first, second)]
    both = np.maximum(grey[0], grey[1])
    overlay = np.stack((grey[1], both * 0.5 + (grey[0] + grey[1]) * 0.25, grey[0]), axis=2)
    return np.clip(overlay, 0, 255).astype(np.uint8)


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
    from vlmrl.svg.extract import find_svg
    from vlmrl.svg.limits import SvgRefused

    try:
        return find_svg(response)
    except SvgRefused:
        return None
