"""Process that draws SVG text: one request at a time, from standard input to standard output, under limits.

A request is a frame of JSON and a frame of UTF-8 text; an answer is a frame of JSON and a frame of pixels. A frame is
its length in bytes, as four bytes with the highest first, then its bytes.
"""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from vlmrl.svg.draw import FONT_SAMPLE, Drawing, DrawJob, draw_svg
from vlmrl.svg.parse import BrokenPainter, SvgLimits, SvgRefused
from vlmrl.untrusted import parse_json

LENGTH = struct.Struct(">I")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


def frame(content: bytes) -> bytes:
    """Return a frame."""
    return LENGTH.pack(len(content)) + content


def main() -> None:
    """Answer requests until the input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    settings = parse_json(first)
    limits = SvgLimits(**settings["limits"])
    draw = draw_svg
    if settings["drawer"] == "cairosvg":
        from vlmrl.svg.cairosvg_drawing import draw_with_cairosvg as draw
    draw(DrawJob(FONT_SAMPLE))  # what is loaded once is not a request's memory
    _limit(limits)
    sink.write(frame(b"ready"))
    sink.flush()
    while (head := read_frame(source)) is not None:
        text = read_frame(source)
        if text is None:
            return
        size = parse_json(head)["size"]
        _limit_cpu(limits)
        job = DrawJob(text.decode("utf-8", "surrogatepass"), (size[0], size[1]) if size else None)
        answer, pixels, is_broken = _answer(partial(draw, job, limits, images=settings["images"]), limits)
        sink.write(frame(json.dumps(answer).encode()) + frame(pixels))
        sink.flush()
        if is_broken:
            return


def _answer(draw: Callable[[], Drawing], limits: SvgLimits) -> tuple[dict[str, Any], bytes, bool]:
    """Return the answer, its pixels, and whether this process must not draw again."""
    try:
        drawing = draw()
    except SvgRefused as error:
        return {"kind": error.kind, "reason": error.reason}, b"", isinstance(error, BrokenPainter)
    except MemoryError:
        return {"kind": "limit", "reason": f"drawing needs more than {limits.memory_mb} MB"}, b"", True
    except RecursionError:
        return {"kind": "limit", "reason": "its elements are nested too deep"}, b"", False
    height, width = drawing.pixels.shape[:2]
    head = {"size": [width, height], "digest": drawing.digest, "seconds": drawing.seconds}
    return head, drawing.pixels.tobytes(), False


def _limit(limits: SvgLimits) -> None:
    """Limit the memory of this process, and what it may write."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + (limits.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _limit_cpu(limits: SvgLimits) -> None:
    """Limit the processor time of the next request, as far as a limit of the shell leaves some."""
    used, most = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    seconds = math.ceil(used.ru_utime + used.ru_stime + limits.cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if most < 0 else min(seconds, most), most))


if __name__ == "__main__":
    main()
