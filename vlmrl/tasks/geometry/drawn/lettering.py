"""Lettering of figures: names and unknowns in italics, numbers upright.

Pillow's own font is used, so that a figure does not depend on the fonts of the machine.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

RUNS = re.compile(r"[A-Za-z]+|[^A-Za-z]+")
SLANT = 0.2
"""Slant of letters: names of points and unknowns are italic in mathematics."""


@lru_cache(maxsize=4096)
def text_ink(text: str, em: int) -> PILImage:
    """Return the ink of a text, cut to its edges: 255 where it is black.

    Args:
        text: letters are italic.
        em: height of the font, in pixels.
    """
    from PIL import Image

    pieces = [_run_ink(run, em) for run in RUNS.findall(text)]
    image = Image.new("L", (sum(piece.width for piece in pieces), max(piece.height for piece in pieces)), 0)
    x = 0
    for piece in pieces:
        image.paste(255, (x, 0), piece)
        x += piece.width
    return image.crop(image.getbbox())


def _font(em: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(em)


def _run_ink(run: str, em: int) -> PILImage:
    """Return the ink of letters, slanted, or of other signs, upright; 1.4 em high, on one base line."""
    from PIL import Image, ImageDraw

    font = _font(em)
    width = math.ceil(font.getlength(run)) + 1
    height = round(1.4 * em)
    slack = round(SLANT * height) if run[0].isalpha() else 0
    image = Image.new("L", (width + slack, height), 0)
    ImageDraw.Draw(image).text((0, 1.1 * em), run, fill=255, font=font, anchor="ls")
    if not slack:
        return image
    shift = SLANT * 1.1 * em
    image = image.transform(image.size, Image.Transform.AFFINE, (1, SLANT, -shift, 0, 1, 0), Image.Resampling.BICUBIC)
    return image.crop((0, 0, width + round(0.06 * em), height))
