"""The table of a checkpoint's files, made again after a test has changed one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

BESIDE = ("meta.json", "COMPLETE")


def file_table(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> bytes and sha256, as meta.json has it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in BESIDE)
    return {
        p.relative_to(folder).as_posix(): {
            "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in files
    }  # fmt: skip
