"""Files of the task figures: the SVG code of a response, and its drawing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vlmrl.redaction.redact import excerpt
from vlmrl.svg.parse import Node, SvgRefused, find_svg, parse_svg
from vlmrl.tasks.response_file import Draw, NoFile, ResponseFile

MOST_WORKERS = 8
ACTIVE_TAGS = {"script", "foreignobject", "iframe", "embed", "object", "audio", "video", "handler", "listener"}
INLINE_IMAGES = tuple(f"data:image/{kind};base64," for kind in ("png", "jpeg", "jpg", "gif", "webp"))
LOADS = re.compile(r"@import|(?:url|image-set|src)\(\s*(?![\"']?\s*(?:#|data:image/(?:png|jpe?g|gif|webp);))|\\", re.I)
"""Beginning of a reference in a style to anything but a part of the document or an inline bitmap, or an escape."""


def svg_of(response: str) -> str | NoFile:
    """Return the last complete `svg` element of a response, unchanged, or why there is none.

    A file that a browser opens must not run anything or load anything: code that would is no file.
    """
    try:
        code = find_svg(response)
        active = active_content(parse_svg(code))
    except SvgRefused as error:
        return NoFile(error.reason)
    return code if active is None else NoFile(f"it would run or load something when it is opened: {active}")


def active_content(root: Node) -> str | None:
    """Return the first thing in an SVG document that runs code or loads a file in a browser; None without any."""
    for node in root.walk():
        if node.tag == "" or node.tag.lower() in ACTIVE_TAGS:
            return f"the element {node.tag or 'of another namespace'}"
        for name, value in node.attributes.items():
            low = re.sub(r"[\x00-\x20]", "", value).lower()
            if name.lower().startswith("on"):
                return f"the attribute {name}"
            if name == "href" and not low.startswith(("#", *INLINE_IMAGES)):
                return f"the reference {excerpt(value, 40)}"
            if "javascript:" in low or (name == "attributeName" and low.endswith("href")):
                return f"the attribute {name}"
            if LOADS.search(value):
                return f"{name} with {excerpt(value, 40)}"
        if node.tag == "style" and LOADS.search("".join(node.texts)):
            return "a style sheet that loads a file"
    return None


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
