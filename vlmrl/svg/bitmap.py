"""Pictures within an SVG document: a `data:` URI as pixels, with limits."""

from __future__ import annotations

import base64
import binascii
import io
import re

import numpy as np
from PIL import Image, UnidentifiedImageError

from vlmrl.svg.limits import SvgRefused

DATA = re.compile(r"data:image/(png|jpe?g|gif|webp)((?:;[\w.=-]+)*);base64,", re.IGNORECASE)
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Formats that Pillow may read. Others run programs, such as EPS."""
MOST_PIXELS = 4_194_304


def read_bitmap(href: str) -> np.ndarray:
    """Return the picture of a data URI as (height, width, 4) uint8 RGBA.

    Raises: SvgRefused (`forbidden` for another kind of picture, `limit` for a picture that is too large, `drawing` for
        one that cannot be read).
    """
    match = DATA.match(href)
    if match is None:
        raise SvgRefused("forbidden", "it embeds a picture that is not PNG, JPEG, GIF or WebP in base64")
    try:
        content = base64.b64decode("".join(href[match.end() :].split()), validate=True)
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise SvgRefused("limit", f"it embeds a picture of more than {MOST_PIXELS:,} pixels")
            return np.asarray(image.convert("RGBA"))
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise SvgRefused("drawing", "a picture that it embeds cannot be read") from None
