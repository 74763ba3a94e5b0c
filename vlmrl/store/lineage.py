"""Runs behind the weights of a run: each began with a checkpoint of the next, or with the model merged from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.layout import MANIFEST, MERGE_RECORD, runs_root
from vlmrl.store.manifest import Manifest, read_manifest
from vlmrl.untrusted import parse_json, read_regular

MOST_PARENTS = 100
"""Maximum number of runs that are followed back."""


def lineage(run_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield (folder, manifest) of a run and of the runs that its weights come from, as far as they still exist."""
    place = run_dir
    for _ in range(MOST_PARENTS):
        try:
            manifest = read_manifest(place)
        except StoreError:
            return
        yield place, manifest
        name = origin_of(place, manifest)
        if name is None:
            return
        place = place_of(name, place)


def places_of(run: str, child: Path, root: Path | None = None) -> list[Path]:
    """Return the folders in which the run that another run's weights come from may be, by its id, without repeats.

    They are beside the other run (`child`), in `root` (`--runs`; None = the usual folder), and where it was started.
    """
    roots = [child.parent, root or runs_root()]
    with suppress(StoreError):  # a checkpoint that was moved out of its run has no manifest
        roots.append(Path(read_manifest(child).cwd) / runs_root())
    return list(dict.fromkeys((folder / run).absolute() for folder in roots))


def place_of(run: str, child: Path, root: Path | None = None) -> Path:
    """Return the first of `places_of` that holds a run; if none does, the one beside the other run."""
    return min(places_of(run, child, root), key=lambda folder: not (folder / MANIFEST).is_file())


def origin_of(run_dir: Path, manifest: Manifest) -> str | None:
    """Return the id of the run that a run's first weights come from; None if they come from no run."""
    name = (manifest.parent or {}).get("run")
    if name is None:
        path = model_of(run_dir).get("path")
        name = merged_run(Path(manifest.cwd or ".") / path) if isinstance(path, str) else None
    return name if isinstance(name, str) and Path(name).name == name else None


def model_of(run_dir: Path) -> dict[str, Any]:
    """Return the table `model` of a run's recipe; {} if it cannot be read."""
    try:
        return read_resolved(run_dir)["recipe"].get("model") or {}
    except StoreError:
        return {}


def merged_run(folder: Path) -> str | None:
    """Return the id of the run from which `vlmrl merge` wrote a folder; None for any other folder."""
    try:
        name = parse_json(read_regular(folder / MERGE_RECORD))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and Path(name).name == name else None
