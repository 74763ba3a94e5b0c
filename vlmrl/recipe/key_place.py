"""Place of a recipe key: the file and line that set it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

AUTO_ORIGIN = "auto: "
"""Prefix of the origin of a value that the recipe left open (recipe/settle.py). The reason for the value follows it."""


@dataclass(frozen=True)
class KeyPlace:
    """Place where a value is set: a line of a file, or a `--set`."""

    file: Path | None
    line: int = 0
    override: str = ""

    @property
    def origin(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "--set"

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"--set {self.override}"
