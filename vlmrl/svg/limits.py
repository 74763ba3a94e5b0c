"""Limits of one SVG text, and the refusal of a text that is beyond them or is not SVG."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT, LETTER, POINT, STOP, GLYPH = 1000, 10, 10, 100, 150
"""Steps of work of an element, of a character of its attributes, of a point of an outline, of a colour of a gradient,
and of a character of text."""


@dataclass(frozen=True)
class SvgLimits:
    """Limits of one SVG text. A text beyond one of them is refused as a whole, with the limit in the reason.

    Args:
        chars: characters of the text.
        elements: elements, those that are not drawn included.
        depth: nested elements.
        attribute_chars: characters of one attribute. Paths of traced figures are the longest.
        pixels: width times height of the picture.
        steps: work of reading what is drawn, and again of painting it; see `Work`.
        cpu_seconds, seconds: processor time and wall clock of a worker: backstops, far above what `steps` allow.
        memory_mb: address space of a worker beyond what it has at its start, in MiB.
    """

    chars: int = 1_000_000
    elements: int = 20_000
    depth: int = 100
    attribute_chars: int = 200_000
    pixels: int = 16_777_216
    steps: int = 50_000_000
    cpu_seconds: float = 60.0
    seconds: float = 600.0
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


class BrokenPainter(SvgRefused):
    """Refusal after which this process must not draw again: cairo keeps some errors, such as those of a font."""


class Work:
    """Counter of the work that a text asks for: elements, characters, points, pixels. It is the same on every machine.

    A step is about 0.1 microseconds of one core.

    Args:
        most: number of steps from which on the text is refused.
    """

    def __init__(self, most: int = SvgLimits.steps) -> None:
        self.most = self.left = most

    def spend(self, steps: float) -> None:
        """Count steps. Raises: SvgRefused (`limit`) when there were more than `most`."""
        self.left -= steps
        if not self.left >= 0:  # it may be no number
            raise SvgRefused("limit", f"drawing it takes more than {self.most:,} steps of work")
