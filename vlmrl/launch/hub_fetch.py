"""What a recipe needs from the hub: what of it is here already, and bringing the rest, on a machine with a network."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlmrl.model import hub
from vlmrl.recipe.schema import Recipe
from vlmrl.setup.model_origin import find_model
from vlmrl.store.checkpoints import read_meta

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Environment in which nothing is asked of the hub."""
OPEN = "import sys; from vlmrl.data.tables import open_tables; open_tables(sys.argv[1])"


@dataclass(frozen=True)
class Need:
    """A model or a dataset that a recipe names. `on_hub`: whether it is the hub's, not a path or a run here."""

    kind: Literal["model", "data"]
    name: str
    on_hub: bool
    revision: str | None = None

    def is_here(self) -> bool:
        """Whether it can be opened without a network."""
        if not self.on_hub:
            return True
        if self.kind == "model":
            return hub.is_cached(self.name, self.revision)
        # In a process of its own: the library reads once, when it is loaded, whether it may ask the hub.
        command = [sys.executable, "-c", OPEN, self.name]
        return subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True).returncode == 0

    def fetch(self) -> None:
        """Bring it here. Raises: CheckpointError or DataError when it cannot be had."""
        if self.kind == "model":
            hub.download(self.name, self.revision)
        else:
            from vlmrl.data.tables import open_tables

            open_tables(self.name)


def needs_of(recipe: Recipe, runs_root: Path) -> list[Need]:
    """The model (of an adapter's checkpoint: its base) and the datasets of a recipe, each once."""
    origin = find_model(recipe.model.path, runs_root)
    path, revision = origin.path, recipe.model.revision
    if origin.checkpoint is not None:
        base = read_meta(origin.checkpoint).get("base", {})
        path, revision = base.get("path", str(origin.checkpoint)), base.get("revision")
    elsewhere = origin.checkpoint is None or recipe.lora is not None
    found = [Need("model", path, elsewhere and not Path(path).exists(), revision)]
    for data in recipe.data:
        name = data.path.removeprefix("hub:").partition("#")[0]
        found.append(Need("data", data.path, data.path.startswith("hub:") and not Path(name).exists()))
    return list(dict.fromkeys(found))


def offline_environment(recipe: Recipe, runs_root: Path) -> dict[str, str]:
    """The environment that keeps ranks from asking the hub, when they need nothing that is not here; else nothing."""
    needs = needs_of(recipe, runs_root)
    return dict(OFFLINE) if any(n.on_hub for n in needs) and all(n.is_here() for n in needs) else {}
