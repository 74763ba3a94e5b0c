"""Where a run's first weights come from: what `model.path` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.checkpoint.format import HF
from vlmrl.errors import CheckpointError, StoreError
from vlmrl.model.files import ADAPTER_CONFIG
from vlmrl.store.layout import COMPLETE, MANIFEST, checkpoint_dir, complete_checkpoints
from vlmrl.store.listing import run_ids
from vlmrl.store.runs import Run, open_run


@dataclass(frozen=True)
class ModelOrigin:
    """Where a run's first weights come from: a Hugging Face folder or name, or a checkpoint of another run."""

    path: str
    checkpoint: Path | None = None
    parent: Mapping[str, Any] | None = None

    @property
    def files(self) -> str:
        """Where config and processor are loaded from."""
        return str(self.checkpoint / HF) if self.checkpoint else self.path


def find_model(path: str, runs_root: Path, which: str | int = "best") -> ModelOrigin:
    """What `model.path` names: a local folder, a checkpoint folder, a run (one of its checkpoints), else a hub name.

    Args: which: checkpoint of a run: "best", "last", or a step.
    Raises: StoreError or CheckpointError when it names a run that has no complete checkpoint.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return ModelOrigin(path)
    if (folder / COMPLETE).is_file():
        return ModelOrigin(path, folder, {"checkpoint": folder.name, "run": folder.parent.parent.name})
    run = _last_trained(runs_root) if path == "last" else _run_named(path, runs_root)
    if run is not None:
        checkpoint = run.checkpoint(which)
        return ModelOrigin(path, checkpoint, {"run": run.id, "checkpoint": checkpoint.name})
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{path} holds an adapter without its base model", where=path,
                              hint="name the run that made it, or fold it in: vlmrl merge RUN")  # fmt: skip
    if folder.is_dir():
        raise CheckpointError(f"{path} holds no model: there is no config.json, and it is no run", where=path)
    return ModelOrigin(path)


def _last_trained(runs_root: Path) -> Run | None:
    """The newest run that has a checkpoint: `last` as a model must not stop at a `vlmrl try` or an evaluation."""
    for name in run_ids(runs_root):
        if complete_checkpoints(runs_root / name):
            return open_run(runs_root, name)
    return None


def _run_named(path: str, runs_root: Path) -> Run | None:
    """The run that `path` names, or None: then it is taken for a hub name, and the hub says whether it is one."""
    try:
        return open_run(runs_root, path)
    except StoreError as error:
        if (Path(path) / MANIFEST).exists() or "more than one" in error.message:
            raise
        return None


def origin_of(run: Run, path: str, runs_root: Path) -> ModelOrigin:
    """Where this run's first weights come from, as its manifest recorded it: `last`, and a run's best checkpoint, mean
    something else by now.
    """
    parent = run.manifest.first_weights
    if parent is None or (Path(path) / COMPLETE).is_file():
        return find_model(path, runs_root)
    step = int(parent["checkpoint"].rpartition("-")[2])
    return ModelOrigin(path, checkpoint_dir(runs_root / parent["run"], step), parent)
