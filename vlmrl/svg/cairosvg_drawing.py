"""Drawing by cairosvg, for the sake of a published reward that draws with it.

A text passes the checks and the counted work of vlmrl's own drawing first. cairosvg then gets the elements that are
known, and nothing that it could fetch, and its work is counted, too. It draws letters with the fonts of the machine.
"""

from __future__ import annotations

import io
import time
import xml.etree.ElementTree as ET
from itertools import zip_longest

import numpy as np
from cairocffi import CairoError
from cairosvg.surface import PNGSurface
from PIL import Image

from vlmrl.redaction.redact import excerpt
from vlmrl.svg.build import DRAWN, Images
from vlmrl.svg.cairosvg_work import counted
from vlmrl.svg.draw import Drawing, DrawJob, draw_svg, pixels_digest
from vlmrl.svg.parse import SVG, XML, BrokenPainter, Node, SvgLimits, Work, parse_svg
from vlmrl.untrusted import CodeRefused

KNOWN = frozenset(DRAWN) - {"image"} | {
    "defs", "symbol", "style", "linearGradient", "radialGradient", "stop", "pattern", "clipPath", "mask", "marker",
    "filter", "feOffset", "feBlend", "feFlood", "tspan", "textPath", "tref",
}  # fmt: skip
"""Elements that cairosvg gets. It would draw what is within others, too."""


def draw_with_cairosvg(job: DrawJob, limits: SvgLimits | None = None, *, images: Images = "refuse") -> Drawing:
    """Return the picture of an SVG text as cairosvg draws it, on white. Embedded pictures are left out or refused.

    Raises: CodeRefused as `draw_svg`, and for what cairosvg cannot draw.
    """
    begin, work = time.perf_counter(), Work((limits or SvgLimits()).steps)
    height, width = draw_svg(job, limits, images="refuse" if images == "refuse" else "drop").pixels.shape[:2]
    builder = ET.TreeBuilder()
    _write(parse_svg(job.svg, limits), builder)
    content, sizes = ET.tostring(builder.close()), {"output_width": width, "output_height": height}
    try:
        with counted(work, width, height):
            png = PNGSurface.convert(content, **sizes, url_fetcher=lambda url, kind: b"<svg/>")
    except (MemoryError, RecursionError, CodeRefused):
        raise
    except Exception as error:  # it raises whatever a wrong value leads to
        raise (BrokenPainter if isinstance(error, CairoError) else CodeRefused)(
            "drawing", f"cairosvg cannot draw it: {type(error).__name__}: {excerpt(str(error), 100)}"
        ) from None
    with Image.open(io.BytesIO(png or b""), formats=["PNG"]) as picture:
        page = Image.new("RGBA", picture.size, "white")
        page.alpha_composite(picture.convert("RGBA"))
    pixels = np.asarray(page.convert("RGB"))
    return Drawing(pixels, pixels_digest(pixels), time.perf_counter() - begin)


def _write(node: Node, builder: ET.TreeBuilder) -> None:
    """Write an element with the known ones within it."""
    attributes = {f"{{{XML}}}space" if name == "space" else name: value for name, value in node.attributes.items()}
    builder.start(f"{{{SVG}}}{node.tag}", attributes)
    for text, child in zip_longest(node.texts, node.children):
        builder.data(text)
        if child is not None and child.tag in KNOWN:
            _write(child, builder)
    builder.end(f"{{{SVG}}}{node.tag}")
