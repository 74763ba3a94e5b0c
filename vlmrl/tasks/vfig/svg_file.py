"""Files of the task figures: the SVG code of a response, and its drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vlmrl.svg.extract import find_svg
from vlmrl.svg.limits import SvgRefused
from vlmrl.tasks.response_file import Draw, NoFile, ResponseFile

MOST_WORKERS = 8


def svg_of(response: str) -> str | NoFile:
    """Return the last complete `svg` element of a response, unchanged, or why there is none."""
    try:
        return find_svg(response)
    except SvgRefused as error:
        return NoFile(error.reason)


@contextmanager
def drawing() -> Iterator[Draw]:
    """Yield a function that draws SVG code, in processes with limits of time and memory."""
    from PIL import Image

    from vlmrl.data.images import encode_png
    from vlmrl.store.provenance import usable_cores
    from vlmrl.svg.renderer import DrawJob, SvgRenderer

    with SvgRenderer(min(usable_cores(), MOST_WORKERS)) as renderer:

        def draw(codes: Sequence[str]) -> list[bytes | NoFile]:
            drawings = renderer.draw([DrawJob(code) for code in codes])
            return [
                NoFile(one.reason) if isinstance(one, SvgRefused) else encode_png(Image.fromarray(one.pixels))
                for one in drawings
            ]

        yield draw


SVG_FILE = ResponseFile("SVG code", ".svg", svg_of, drawing)
