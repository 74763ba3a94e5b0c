"""What the lists of SVG attacks are built of: the tuple of one attack, two colours, a frame, small files as data URLs."""

# ruff: noqa: E501
from __future__ import annotations

import base64
import gzip
import struct
import zlib
from typing import Literal, NamedTuple

Expect = Literal["refused", "drawn", "either"]
KINDS = ("memory", "time", "files", "network", "parser", "copy", "hidden", "crash", "odd")
"""`odd` is honest SVG that looks strange; the other kinds are attacks proper."""
PAYLOAD = "#ff00ff"
"""Colour of what must never reach the picture: no pixel of a `refused` attack may be near it."""
MARK = "#008000"
"""Colour of what must reach the picture: the pixel in the middle of a `drawn` attack has it."""
PAYLOAD_PIXEL = (255, 0, 255)
SIDE = 100
"""Width and height of the picture of most attacks, in pixels."""
XMLNS = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
HREF = "http://www.w3.org/1999/xlink"
BOX = 'x="20" y="20" width="60" height="60"'
"""Geometry of a rectangle that covers the middle of the picture."""
PAID = f'<rect {BOX} fill="{PAYLOAD}"/>'
DRAWN = f'<rect {BOX} fill="{MARK}"/>'


class SvgAttack(NamedTuple):
    """One text that is given to the renderer as a model's answer.

    `refused`: the renderer refuses it, or its picture has no pixel of `PAYLOAD`. `drawn`: the picture has `MARK` in its
    middle. `either`: only time, memory and the outer world count.
    """

    name: str
    kind: str
    aim: str
    svg: str
    expect: Expect = "either"


def svg(inside: str, attributes: str = "", size: str = f'width="{SIDE}" height="{SIDE}"') -> str:
    return f"<svg {XMLNS} {size} {attributes}>{inside}</svg>".replace(" >", ">", 1)


def attacks(kind: str, expect: Expect, *rows: tuple[str, str, str]) -> tuple[SvgAttack, ...]:
    """Return the attacks of rows (name, aim, svg); the kind is put before the name."""
    return tuple(SvgAttack(f"{kind}: {name}", kind, aim, text, expect) for name, aim, text in rows)


def data_url(content: bytes | str, media: str = "image/png") -> str:
    raw = content.encode() if isinstance(content, str) else content
    return f"data:{media};base64,{base64.b64encode(raw).decode()}"


def png(side: int = SIDE, pixel: tuple[int, int, int] = PAYLOAD_PIXEL) -> bytes:
    """Return a square PNG of one colour."""
    return png_of(side, side, 8, 2, (b"\0" + bytes(pixel) * side) * side)


def png_of(width: int, height: int, depth: int, color_type: int, rows: bytes) -> bytes:
    """Return a PNG of the rows as they are: a header may promise more than they hold."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body)) for tag, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def gzip_bomb(mebibytes: int) -> bytes:
    """Return about 1 KB for each MiB that it unpacks to: many members of one file, which gzip reads as one."""
    return gzip.compress(b" " * (8 << 20), 9) * (mebibytes // 8)


PAYLOAD_PNG = data_url(png())
"""A picture of `PAYLOAD` alone: it stands for a raster of the true figure."""
PAYLOAD_SVG = svg(PAID)
PAYLOAD_SVG_URL = data_url(PAYLOAD_SVG, "image/svg+xml")


def image(href: str, attribute: str = "href") -> str:
    """Return an `image` element that fills the picture."""
    return f'<image {attribute}="{href}" width="{SIDE}" height="{SIDE}"/>'
