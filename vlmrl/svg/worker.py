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
from pathlib import Path
from typing import Any, BinaryIO

from vlmrl.json_text import parse_json
from vlmrl.svg.draw import FONT_SAMPLE, DrawJob, draw_svg
from vlmrl.svg.limits import SvgLimits, SvgRefused

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
    limits, images = SvgLimits(**settings["limits"]), settings["images"]
    draw_svg(DrawJob(FONT_SAMPLE))  # what is loaded once is not a request's memory
    _limit(limits)
    sink.write(frame(b"ready"))
    sink.flush()
    while (head := read_frame(source)) is not None:
        text = read_frame(source)
        if text is None:
            return
        size = parse_json(head)["size"]
        _limit_cpu(limits)
        answer, pixels = _answer(text.decode("utf-8", "surrogatepass"), size, limits, images)
        sink.write(frame(json.dumps(answer).encode()) + frame(pixels))
        sink.flush()


def _answer(text: str, size: list[int] | None, limits: SvgLimits, images: Any) -> tuple[dict[str, Any], bytes]:
    try:
        drawing = draw_svg(DrawJob(text, (size[0], size[1]) if size else None), limits, images=images)
    except SvgRefused as error:
        return {"kind": error.kind, "reason": error.reason}, b""
    except MemoryError:
        return {"kind": "limit", "reason": f"drawing needs more than {limits.memory_mb} MB"}, b""
    except RecursionError:
        return {"kind": "limit", "reason": "its elements are nested too deep"}, b""
    height, width = drawing.pixels.shape[:2]
    return {"size": [width, height], "digest": drawing.digest, "seconds": drawing.seconds}, drawing.pixels.tobytes()


def _limit(limits: SvgLimits) -> None:
    """Limit the memory of this process, and what it may write."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + (limits.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _limit_cpu(limits: SvgLimits) -> None:
    """Limit the time of the next request. It ends a process whose parent is gone; the parent has a clock of its own."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + 2 * limits.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
