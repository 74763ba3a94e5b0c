"""Reader of the images of a run: from its folder media/, the prepared datasets that it used, and the user's tables."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError, VlmrlError
from vlmrl.store.evaluated_rows import read_summary
from vlmrl.store.kept_recipe import kept_recipes
from vlmrl.store.layout import eval_dirs
from vlmrl.store.manifest import read_manifest
from vlmrl.store.media import Resolver, RunImages
from vlmrl.types import Media


def run_images(run_dir: Path) -> RunImages:
    """Return the images of a run folder, by content.

    Tables are looked for, and opened, only when the run and the prepared datasets lack an image. If the manifest is
    damaged, only the run's own media/ is read.
    """
    try:
        manifest = read_manifest(run_dir)
    except VlmrlError:
        return RunImages(run_dir)
    images = RunImages(run_dir, manifest.all_datasets, cwd=manifest.cwd)

    @cache
    def resolvers() -> list[Resolver]:
        return [_table_resolver(entry, manifest.cwd, images.notes) for entry in _data_entries(run_dir)]

    images.add_resolvers([lambda media: next((c for one in resolvers() if (c := one(media)) is not None), None)])
    return images


def _data_entries(run_dir: Path) -> list[dict[str, Any]]:
    """Return the `[[data]]` entries of the run's evaluations, and of all recipes of its attempts, the newest first.

    Damaged ones are left out. Evaluations of older versions record only the path of their rows.
    """
    distinct: list[dict[str, Any]] = []
    for recipe in reversed(list(kept_recipes(run_dir))):
        distinct += [entry for entry in recipe.get("data", ()) if entry not in distinct]
    named = {entry.get("path") for entry in distinct}
    for folder in eval_dirs(run_dir):
        with suppress(StoreError, AttributeError, TypeError):
            meta = read_summary(folder).get("meta") or {}
            entry = meta.get("entry") or {"path": (meta.get("dataset") or {}).get("path")}
            distinct += [entry] if entry.get("path") and entry not in distinct and entry["path"] not in named else []
    return distinct


def _table_resolver(entry: dict[str, Any], cwd: str, notes: list[str]) -> Resolver:
    """Return a function that reads image files of one `[[data]]` entry, which is opened at the first call.

    If it cannot be opened, the reason is added to `notes`, once.
    """
    opened: list[Any] = []  # after the first call, it holds the dataset, or None if this cannot be opened

    def resolve(media: Media) -> bytes | None:
        from vlmrl.data.open_dataset import open_dataset
        from vlmrl.recipe.schema import Data

        if not opened:
            try:
                path = Path(str(entry.get("path", "")))
                if not path.exists() and not path.is_absolute() and (Path(cwd) / path).exists():
                    path = Path(cwd) / path
                local = not str(entry.get("path", "")).startswith("hub:")
                opened.append(open_dataset(Data(**{**entry, **({"path": str(path)} if local else {})})))
            except (VlmrlError, ValueError) as error:
                notes.append(f"dataset {entry.get('path')} cannot be opened: {getattr(error, 'message', error)}")
                opened.append(None)
        if opened[0] is None:
            return None
        try:
            return opened[0].image_bytes(media)
        except VlmrlError:
            return None

    return resolve
