"""Logger for Weights & Biases. Its own environment variables set the destination and hold the key.

They are WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL.

The remote run has the id of vlmrl's run, so that every attempt continues it. wandb's own step must always increase, but
vlmrl's steps go back if an attempt resumes. So wandb's step is `Line.number`, and the x axis of all charts is the
metric `step`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.sinks.base import NAME, Ending, Line, SampledRollout, SinkRun, sample_table

DEFAULT_PROJECT = "vlmrl"
INIT_SECONDS = 40.0
"""Time limit in seconds for wandb to begin a run online. After it, an offline run begins.

The environment variable WANDB_INIT_TIMEOUT overrides it.
"""
EXIT_CODES: dict[Ending, int] = {"done": 0, "interrupted": 130, "failed": 1}
SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_save_requirements": False,
}
"""Settings with which wandb does not record the command line, code, git remote and terminal output.

These may contain secrets. The run's folder has them with the secrets hidden.
"""


class WandbSink:
    """Logger for Weights & Biases. Its files are in the run's folder, below `wandb`."""

    def open(self, run: SinkRun) -> Mapping[str, Any]:
        """Begin or continue the remote run. If the service cannot be reached, begin an offline run to send later."""
        import wandb

        self._wandb: Any = wandb
        os.environ.setdefault("WANDB_DATA_DIR", str(Path(run.folder) / "wandb" / "data"))
        known_settings = wandb.Settings.model_fields
        limit = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": INIT_SECONDS}
        settings: dict[str, Any] = {name: value for name, value in (SETTINGS | limit).items() if name in known_settings}
        remembered = run.remembered
        options: dict[str, Any] = {
            "id": remembered.get("id") or run.id,
            "resume": "allow",
            "dir": run.folder,
            "name": run.label,
            "project": remembered.get("project") or run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            "entity": remembered.get("entity") or run.entity,
            "group": run.group,
            "tags": list(run.tags) or None,
            "notes": run.note or None,
            "job_type": run.kind,
            "config": dict(run.config),
            "allow_val_change": True,
            "settings": wandb.Settings(**settings),
        }
        reason = ""
        try:
            self._run = wandb.init(**options)
        except wandb.Error as error:
            reason = f" ({str(error).strip().splitlines()[0]})"
            self._run = wandb.init(**options, mode="offline")
        self._run.define_metric("*", step_metric="step")
        return self._about(options, reason)

    def _about(self, options: Mapping[str, Any], why: str) -> dict[str, Any]:
        """Return the values to save in the run's folder, and the note for the user."""
        values = {"id": options["id"], "project": options["project"], "entity": self._run.entity or options["entity"]}
        if self._run.offline:
            return values | {"note": f"offline{why}; send it later with: wandb sync {Path(self._run.dir).parent}"}
        return values | {"url": self._run.url}

    def log(self, line: Line) -> None:
        """Write one row of the remote run's history."""
        self._run.log({"step": line.step, "attempt": line.attempt, **line.metrics}, step=line.number)

    def samples(self, line: Line, samples: Sequence[SampledRollout]) -> None:
        """Write a table of the responses with their images, in the history row of its step."""
        columns, rows = sample_table(line, samples, self._image)
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"step": line.step, NAME: table}, step=line.number)

    def _image(self, content: bytes) -> Any:
        from PIL import Image

        image = Image.open(io.BytesIO(content))
        return self._wandb.Image(image, file_type="jpg" if image.format == "JPEG" else "png")

    def close(self, status: Ending) -> None:
        """Send the remaining data. An interrupted run is marked as one that will continue."""
        self._run.summary["status"] = status
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=EXIT_CODES[status])
