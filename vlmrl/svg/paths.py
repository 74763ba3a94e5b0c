"""Data of paths: read up to the first fault, as SVG has it, and given as absolute commands.

Source: SVG 1.1 (second edition), section 8.3, and appendix F.6 for arcs.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from vlmrl.svg.values import GAP, LARGEST, NUMBER, numbers_text

ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
"""Command -> number of its arguments."""
COMMAND = re.compile(r"[\s,]*([MmLlHhVvCcSsQqTtAaZz])")
FLAG = re.compile(r"[01]")


class Command(NamedTuple):
    """Command of a path with absolute coordinates: M, L, C, Q or Z.

    Args:
        numbers: x and y of each control point, the last one is the end. () for Z.
    """

    letter: str
    numbers: tuple[float, ...]


def read_path(text: str) -> list[Command]:
    """Return the commands of the `d` attribute, up to the first fault. H, V, S, T and A become L, C and Q."""
    pen, place, letter = _Pen(), 0, ""
    while True:
        match = COMMAND.match(text, place)
        if match is not None:
            letter, place = match[1], match.end()
        elif letter in ("", "Z", "z"):
            return pen.commands
        if not pen.commands and letter not in "Mm":
            return pen.commands
        read = _read_arguments(text, place, letter)
        if read is None:
            return pen.commands
        arguments, place = read
        if not pen.draw(letter, arguments):
            return pen.commands
        if letter in "Mm":
            letter = "L" if letter == "M" else "l"  # further pairs of a moveto are lines


def path_text(commands: list[Command]) -> str:
    """Return commands as the text of a `d` attribute."""
    return " ".join(f"{letter}{numbers_text(numbers)}" for letter, numbers in commands)


def _read_arguments(text: str, place: int, letter: str) -> tuple[list[float], int] | None:
    """Return the arguments of one command and the place behind them; None if they are wrong or incomplete."""
    numbers: list[float] = []
    for index in range(ARGUMENTS[letter.upper()]):
        place = GAP.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
        match = (FLAG if letter in "Aa" and index in (3, 4) else NUMBER).match(text, place)
        if match is None:
            return None
        numbers.append(min(LARGEST, max(-LARGEST, float(match[0]))))
        place = match.end()
    return numbers, place


class _Pen:
    """State of a path that is being read: the current point, the begin of the subpath, and the last control point."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.x = self.y = self.start_x = self.start_y = 0.0
        self.control: tuple[str, float, float] = ("", 0.0, 0.0)

    def draw(self, letter: str, n: list[float]) -> bool:
        """Add a command. Return False, and add nothing, if it leaves the range of coordinates."""
        kind, dx, dy = letter.upper(), *((self.x, self.y) if letter.islower() else (0.0, 0.0))
        if kind == "Z":
            self.commands.append(Command("Z", ()))
            self.x, self.y, self.control = self.start_x, self.start_y, ("", 0.0, 0.0)
            return True
        if kind == "A":
            return self._arc(n, n[5] + dx, n[6] + dy)
        if kind == "H":
            points = [n[0] + dx, self.y]
        elif kind == "V":
            points = [self.x, n[0] + dy]
        else:
            points = [value + (dx, dy)[i % 2] for i, value in enumerate(n)]
        if kind in "ST":
            points = [*self._reflected("C" if kind == "S" else "Q"), *points]
        name = {"H": "L", "V": "L", "S": "C", "T": "Q"}.get(kind, kind)
        return self._add(name, points)

    def _reflected(self, kind: str) -> tuple[float, float]:
        before, x, y = self.control
        return (2 * self.x - x, 2 * self.y - y) if before == kind else (self.x, self.y)

    def _add(self, name: str, points: list[float]) -> bool:
        if any(abs(value) > LARGEST for value in points):
            return False
        self.commands.append(Command(name, tuple(points)))
        self.control = (name, points[-4], points[-3]) if name in "CQ" else ("", 0.0, 0.0)
        self.x, self.y = points[-2], points[-1]
        if name == "M":
            self.start_x, self.start_y = self.x, self.y
        return True

    def _arc(self, n: list[float], x: float, y: float) -> bool:
        """Add an elliptical arc as cubic curves of at most a quarter turn."""
        rx, ry = abs(n[0]), abs(n[1])
        if rx == 0 or ry == 0:
            return self._add("L", [x, y])
        if (x, y) == (self.x, self.y):
            return True
        angle = math.radians(n[2])
        cos, sin = math.cos(angle), math.sin(angle)
        half_x, half_y = (self.x - x) / 2, (self.y - y) / 2
        px, py = cos * half_x + sin * half_y, cos * half_y - sin * half_x
        grown = math.hypot(px / rx, py / ry)
        if grown > 1:  # the ellipse is too small to reach both points
            rx, ry = rx * grown, ry * grown
        rest = max(0.0, 1 / ((px / rx) ** 2 + (py / ry) ** 2) - 1)
        root = math.sqrt(rest) * (-1 if n[3] == n[4] else 1)
        ux, uy = root * rx * py / ry, -root * ry * px / rx
        cx, cy = cos * ux - sin * uy + (self.x + x) / 2, sin * ux + cos * uy + (self.y + y) / 2
        begin = math.atan2((py - uy) / ry, (px - ux) / rx)
        turn = math.atan2((-py - uy) / ry, (-px - ux) / rx) - begin
        if n[4] and turn < 0:
            turn += 2 * math.pi
        elif not n[4] and turn > 0:
            turn -= 2 * math.pi
        pieces = max(1, math.ceil(abs(turn) / (math.pi / 2) - 1e-9))
        step = turn / pieces
        bend = 4 / 3 * math.tan(step / 4)

        def at(u: float, v: float) -> tuple[float, float]:
            return cos * rx * u - sin * ry * v + cx, sin * rx * u + cos * ry * v + cy

        for i in range(pieces):
            a, b = begin + i * step, begin + (i + 1) * step
            first = at(math.cos(a) - bend * math.sin(a), math.sin(a) + bend * math.cos(a))
            second = at(math.cos(b) + bend * math.sin(b), math.sin(b) - bend * math.cos(b))
            end = (x, y) if i == pieces - 1 else at(math.cos(b), math.sin(b))
            if not self._add("C", [*first, *second, *end]):
                return False
        self.control = ("", 0.0, 0.0)
        return True
