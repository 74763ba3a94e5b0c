"""A checkpoint's files: their table, the seal that is put on again after a test has changed one, what is in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmrl.checkpoint.io import CheckpointContent, stage, write_staged
from vlmrl.checkpoint.proof import make_proof
from vlmrl.dist.world import ALONE, World
from vlmrl.model.packing import TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.store.layout import COMPLETE, META

BESIDE = (META, COMPLETE)


def save_checkpoint(
    run_dir: Path, saved: CheckpointContent, *content: Any, world: World = ALONE, **options: Any
) -> Path:
    """The folder of a checkpoint that is collected and written at once; arguments as of `stage`."""
    return write_staged(stage(run_dir, saved, *content, world=world, **options), world)


def file_table(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> bytes and sha256, as meta.json has it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in BESIDE)
    return {
        p.relative_to(folder).as_posix(): {
            "bytes": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in files
    }


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Another meta.json, and the marker that goes with it."""
    (folder / META).write_text(json.dumps(meta))
    (folder / COMPLETE).write_text(hashlib.sha256((folder / META).read_bytes()).hexdigest())


def seal(folder: Path, **changes: Any) -> None:
    """Describe the files as they are now, with these changes of meta.json: what a save does at its end."""
    meta = json.loads((folder / META).read_text())
    write_meta(folder, meta | {"files": file_table(folder)} | changes)


def contents_of(folder: Path) -> dict[str, tuple[Any, bytes]]:
    """File -> what is in it, of all but the table of their hashes. Metadata in a safetensors header comes in any order:
    read, it is the same.
    """
    found: dict[str, tuple[Any, bytes]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in BESIDE):
        data, header = path.read_bytes(), None
        if path.suffix == ".safetensors":
            length = int.from_bytes(data[:8], "little")
            header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
        found[path.relative_to(folder).as_posix()] = header, data
    return found


def prove_items(policy: Policy, items: Sequence[TrainItem]) -> dict[str, Tensor]:
    """Return `make_proof` with this policy's present log-probs, each trajectory in a row of its own."""
    return make_proof(items, [policy(make_row([item], policy.device)).logp for item in items])
