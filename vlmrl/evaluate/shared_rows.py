"""Rows to evaluate that training had under another name: recognised by what they show, not by their file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vlmrl.data.dataset import Dataset
from vlmrl.data.open_dataset import open_dataset, prompt_of
from vlmrl.dist.world import SHARED_VARIABLE, launched
from vlmrl.errors import VlmrlError
from vlmrl.evaluate.eval_rows import EvalRows, dataset_records, place_of, training_runs
from vlmrl.recipe.load import recipe_from_resolved
from vlmrl.recipe.schema import Data
from vlmrl.store.evaluated_rows import UNCERTAIN
from vlmrl.store.kept_recipe import kept_recipes
from vlmrl.store.lineage import origin_of
from vlmrl.store.manifest import Manifest
from vlmrl.types import Row, hash64

SECONDS = 60.0
"""Time for reading the rows that the runs behind a model were trained on."""


@dataclass(frozen=True)
class Trained:
    """Content of the rows that the runs behind a model were trained on.

    Args:
        rows: hashes of what the rows show.
        images: content hashes of their images.
        is_complete: whether all of these rows are still there, unchanged, and were read.
    """

    rows: set[int]
    images: set[str]
    is_complete: bool


def with_shared(rows: Sequence[EvalRows], run_dir: Path | None) -> list[EvalRows]:
    """Return the rows to evaluate, with what is known of rows and images that the model was trained on.

    A launcher does this before it starts its ranks, and they inherit the result by SHARED_VARIABLE.

    Rows of a dataset that training used are known by their split, and not looked at.

    Args:
        run_dir: the run that the weights come from; None = the model has no record.
    """
    if run_dir is None:
        return list(rows)
    if SHARED_VARIABLE in os.environ and launched():  # all ranks have the launcher's rows: none reads those of training
        known = json.loads(os.environ[SHARED_VARIABLE])
        return [replace(one, role=role, shared=shared) for one, (role, shared) in zip(rows, known, strict=True)]
    runs = training_runs(run_dir)
    entries = entries_of_runs(runs)
    places = {data.path for data in entries}
    unknown = [r.role in ("test", "held out") and place_of(r.source.dataset.path) not in places for r in rows]
    trained = trained_rows(runs, entries) if any(unknown) else Trained(set(), set(), True)
    labelled = [_labelled(r, trained) if apart else r for r, apart in zip(rows, unknown, strict=True)]
    os.environ[SHARED_VARIABLE] = json.dumps([(one.role, one.shared) for one in labelled])
    return labelled


def trained_rows(runs: Sequence[tuple[Path, Manifest]], entries: Sequence[Data]) -> Trained:
    """Read the rows that runs were trained on, as far as they are unchanged.

    Only tables and images are read: tasks and rewards, which may be code of someone else, are not opened.

    Args:
        runs: (folder, manifest), newest first.
        entries: the `[[data]]` entries of their recipes.
    """
    end, rows, images = time.monotonic() + SECONDS, set[int](), set[str]()
    missing = {(d.get("fingerprint"), d.get("split")) for _, m in runs for d in dataset_records(m)[0]}
    for data in entries:
        try:
            dataset = open_dataset(data)
            key = (dataset.fingerprint, data.split)
            members = dataset.rows(data.split) if key in missing else ()
            for index in range(min(len(members), data.max_rows or len(members))):
                if time.monotonic() > end:
                    return Trained(rows, images, False)
                rows.add(_content(dataset, members[index]))
                images.update(media.sha256 for media in members[index].media)
            missing.discard(key)
        except (VlmrlError, OSError):
            continue
    is_whole = bool(runs) and origin_of(*runs[-1]) is None
    return Trained(rows, images, is_whole and not missing)


def _labelled(rows: EvalRows, trained: Trained) -> EvalRows:
    dataset, members = rows.source.dataset, [rows.source.rows[index] for index in range(rows.count)]
    same = sum(_content(dataset, row) in trained.rows for row in members)
    near = sum(any(media.sha256 in trained.images for media in row.media) for row in members)
    if same:
        words = f"rows of which {same:,} of {rows.count:,} are also in training: the result on new rows may differ"
        return replace(rows, role="training", shared=words)
    if near:
        return replace(rows, shared=f"rows of which {near:,} of {rows.count:,} have an image that is also in training")
    return rows if trained.is_complete else replace(rows, shared=UNCERTAIN)


def _content(dataset: Dataset, row: Row) -> int:
    """Return a hash of what a row shows: its images and the text of its prompt, without its answer."""
    return hash64(prompt_of(dataset, row), *(media.sha256 for media in row.media))


def entries_of_runs(runs: Sequence[tuple[Path, Manifest]]) -> list[Data]:
    """Return the distinct `[[data]]` entries of the recipes of runs, with absolute paths and without code."""
    known: list[Data] = []
    for run_dir, manifest, values in ((*run, values) for run in runs for values in kept_recipes(run[0])):
        try:
            entries = recipe_from_resolved({"schema": 1, "recipe": values}, where=str(run_dir)).data
        except VlmrlError:
            continue
        for data in entries:
            paths = {"path": data.path, "images_root": data.images_root, "prompt": data.prompt}
            changes: dict[str, object] = {k: v and place_of(v, Path(manifest.cwd)) for k, v in paths.items()}
            changes["validation"] = data.validation if isinstance(data.validation, float) else None
            plain = data.model_copy(update=changes | {"task": "table", "reward": None, "rewards": []})
            known += [plain] if plain not in known else []
    return known
