"""Limits of one SVG text, and the refusal of a text that is beyond them or is not SVG."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SvgLimits:
    """Limits of one SVG text. A text beyond one of them is refused as a whole, with the limit in the reason.

    Args:
        chars: characters of the text.
        elements: elements, those that are not drawn included.
        depth: nested elements.
        attribute_chars: characters of one attribute. Paths of traced figures are the longest.
        drawn_elements: elements after every `use` is replaced by what it shows.
        pixels: width times height of the picture.
        seconds: wall clock of drawing.
        memory_mb: address space of a worker beyond what it has at its start, in MiB.
    """

    chars: int = 1_000_000
    elements: int = 20_000
    depth: int = 100
    attribute_chars: int = 200_000
    drawn_elements: int = 50_000
    pixels: int = 16_777_216
    seconds: float = 5.0
    memory_mb: int = 384


class SvgRefused(Exception):
    """Refusal of an SVG text: the fault of the model that wrote it, never of vlmrl.

    Args:
        kind: one word for statistics: `missing`, `cut`, `syntax`, `limit`, `forbidden`, `blank` or `drawing`.
        reason: one sentence for people.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason
