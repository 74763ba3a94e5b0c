"""Origin of a run's first weights. The recipe key `model.path` selects it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.errors import CheckpointError, StoreError, did_you_mean
from vlmrl.model.model_files import ADAPTER_CONFIG, models_beside
from vlmrl.store.checkpoints import AS_ASKED, HF, choose_checkpoint, read_meta, split_checkpoint
from vlmrl.store.layout import CHECKPOINTS, COMPLETE, MANIFEST, complete_checkpoints
from vlmrl.store.lineage import place_of
from vlmrl.store.listing import list_runs, run_ids
from vlmrl.store.runs import Run, open_run


@dataclass(frozen=True)
class ModelOrigin:
    """Origin of a run's first weights: a Hugging Face folder or name, or a checkpoint of another run.

    Args:
        path: the path as the recipe or the command states it.
        checkpoint: folder of the checkpoint; None = the origin is no checkpoint.
        parent: as `Manifest.parent`: the run, the checkpoint's name, and the reason why this checkpoint was chosen.
        root: folder of the runs in which the base model of an adapter is searched, too; None = the usual one.
        endpoint: address of the server that answers for the model `path`; "" = its weights are loaded here.
    """

    path: str
    checkpoint: Path | None = None
    parent: Mapping[str, Any] | None = None
    root: Path | None = None
    endpoint: str = ""

    @property
    def files(self) -> str:
        """Folder or hub name from which configuration and processor are loaded."""
        return str(self.checkpoint / HF) if self.checkpoint else self.path

    @property
    def run_dir(self) -> Path | None:
        """Run folder of the checkpoint; None for a model, and for a checkpoint that was moved out of its run folder."""
        folder = self.checkpoint.parent.parent if self.checkpoint else None
        return folder if folder is not None and (folder / MANIFEST).is_file() else None

    @property
    def step(self) -> int | None:
        """Step of the checkpoint; None for a model that is no checkpoint."""
        return None if self.checkpoint is None else read_meta(self.checkpoint)["step"]


def describe_origin(path: str, parent: Mapping[str, Any] | None) -> str:
    """Describe the run and checkpoint that `path` means, and the reason for this choice; "" = no checkpoint of a run.

    Args:
        parent: as `ModelOrigin.parent`.
    """
    if parent is None or not parent.get("why"):
        return ""
    origin = f"{parent['checkpoint']} of run {parent['run']}"
    return f"model: {origin}" if parent["why"] == AS_ASKED else f"model: {path} is {origin}: {parent['why']}"


def find_model(path: str, runs_root: Path, which: str | int = "best") -> ModelOrigin:
    """Return the origin for `model.path`: a local folder, a checkpoint folder, a checkpoint of a run, or a hub name.

    A path that is none of the first three is treated as a hub name. `RUN@STEP`, `RUN@best` and `RUN@last` name a
    checkpoint of a run, too.

    Args:
        which: checkpoint of a run: "best", "last", or a step.
    Raises: StoreError or CheckpointError when `path` names a run without a complete checkpoint, or a checkpoint whose
        files differ from the saved ones (only the names of the files are checked; their content is compared when they
        are loaded).
    """
    if not path.strip():
        raise CheckpointError("the model's name is empty", hint="name a run, a model folder or a hub name")
    folder = Path(path)
    if os.path.isfile(folder / "config.json"):  # os.path.isfile returns False for a name that is too long for a path
        return ModelOrigin(path)
    if os.path.isfile(folder / COMPLETE):
        read_meta(folder)
        folder = folder.absolute()
        alone = ModelOrigin(path, folder, root=runs_root)
        if alone.run_dir is None:
            return alone
        return replace(alone, parent={"checkpoint": folder.name, "run": alone.run_dir.name, "why": AS_ASKED})
    run = _last_trained(runs_root) if path == "last" else _run_named(path, runs_root)
    if run is None and "@" in path:
        name, which = split_checkpoint(path, which)
        run = _run_named(name, runs_root)
    if run is not None:
        checkpoint, why = choose_checkpoint(run.dir, run.manifest, which)
        read_meta(checkpoint)
        return ModelOrigin(path, checkpoint, {"run": run.id, "checkpoint": checkpoint.name, "why": why}, runs_root)
    if os.path.isfile(folder / ADAPTER_CONFIG):
        raise CheckpointError(
            f"{path} holds an adapter without its base model",
            where=path,
            hint="name the run that made it, or fold it in: vlmrl merge RUN",
        )
    if os.path.isdir(folder):
        raise CheckpointError(f"{path} holds no model: it has no config.json and is not a run", where=path)
    return ModelOrigin(path)


def _last_trained(runs_root: Path) -> Run | None:
    """Return the newest run that has a checkpoint; None if no run has one.

    It is used for `last` as a model, which must skip runs without checkpoints, such as a `vlmrl try` or an evaluation.
    """
    for name in run_ids(runs_root):
        if complete_checkpoints(runs_root / name):
            return open_run(runs_root, name)
    return None


def _run_named(path: str, runs_root: Path) -> Run | None:
    """Return the run with the name or path `path`; None = there is no such run, and `path` may be a hub name."""
    try:
        return open_run(runs_root, path)
    except StoreError as error:
        if os.path.exists(Path(path) / MANIFEST) or "more than one" in error.message:
            raise
        return None


NEWEST = 200
"""Maximum number of newest runs whose names are compared with an unknown name, to suggest a similar one."""


def require_there(path: str, root: Path) -> None:
    """Raise StoreError for a word that is no run and no folder.

    A word with a `/` may name a model of the hub: loading it then reports a wrong name.
    """
    if "/" in path or os.path.exists(path):
        return
    runs = list_runs(root, limit=NEWEST)
    names = [*(name for run in runs for name in (run.id, run.name) if name), *models_beside(path)]
    hint = did_you_mean(path, names, "`vlmrl runs list` lists the runs; a model of the hub is called OWNER/NAME")
    message = f"there is no run and no model folder `{path}`: runs are searched in {root}"
    raise StoreError(message, where=str(root), hint=hint)


def origin_of(run: Run, path: str, runs_root: Path) -> ModelOrigin:
    """Return the origin of this run's first weights, as its manifest recorded it.

    The path is not looked up again, because `last` or the best checkpoint of a run may be another one by now.
    """
    parent = run.manifest.first_weights
    if parent is None or (Path(path) / COMPLETE).is_file():
        return find_model(path, runs_root)
    folder = Path(path)  # if the run is in another runs folder, `path` is the path of the run
    is_named = os.path.isfile(folder / MANIFEST) and folder.resolve().name == parent["run"]
    run_dir = folder if is_named else place_of(parent["run"], run.dir, runs_root)
    return ModelOrigin(path, run_dir / CHECKPOINTS / parent["checkpoint"], parent, runs_root)
