"""Model and datasets that a recipe needs from the hub: check which ones are on this machine, download the others."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlmrl.model import model_files
from vlmrl.recipe.schema import Recipe
from vlmrl.setup.model_origin import find_model
from vlmrl.store.checkpoints import read_meta

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Environment variables with which the Hugging Face libraries send no requests to the hub."""
OPEN = "import sys; from vlmrl.data.table_dataset import open_tables; open_tables(sys.argv[1])"
"""Python program that opens the dataset named on its command line; it fails if the dataset cannot be opened."""


@dataclass(frozen=True)
class Need:
    """Model or dataset that a recipe names. `on_hub`: whether it comes from the hub, not from a path or run."""

    kind: Literal["model", "data"]
    name: str
    on_hub: bool
    revision: str | None = None

    def is_here(self) -> bool:
        """Return whether the model or dataset can be opened without a network."""
        if not self.on_hub:
            return True
        if self.kind == "model":
            return model_files.is_cached(self.name, self.revision)
        # In a separate process: the library reads the offline variables only once, when it is imported.
        command = [sys.executable, "-c", OPEN, self.name]
        return subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True).returncode == 0

    def fetch(self) -> None:
        """Download the model or dataset. Raises: CheckpointError or DataError when the download fails."""
        if self.kind == "model":
            model_files.download(self.name, self.revision)
        else:
            from vlmrl.data.table_dataset import open_tables

            open_tables(self.name)


def needs_of(recipe: Recipe, runs_root: Path) -> list[Need]:
    """Return the model of a recipe (for an adapter's checkpoint, its base model) and its datasets, without repeats."""
    origin = find_model(recipe.model.path, runs_root)
    path, revision = origin.path, recipe.model.revision
    if origin.checkpoint is not None:
        base = read_meta(origin.checkpoint).get("base", {})
        path, revision = base.get("path", str(origin.checkpoint)), base.get("revision")
    elsewhere = origin.checkpoint is None or recipe.lora is not None
    needs = [Need("model", path, elsewhere and not Path(path).exists(), revision)]
    for data in recipe.data:
        name = data.path.removeprefix("hub:").partition("#")[0]
        needs.append(Need("data", data.path, data.path.startswith("hub:") and not Path(name).exists()))
    return list(dict.fromkeys(needs))


def offline_environment(recipe: Recipe, runs_root: Path) -> dict[str, str]:
    """Return variables that prevent requests to the hub if model and data are on this machine; {} if they are not."""
    needs = needs_of(recipe, runs_root)
    return dict(OFFLINE) if any(n.on_hub for n in needs) and all(n.is_here() for n in needs) else {}
