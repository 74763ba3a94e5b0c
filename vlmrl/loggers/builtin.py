"""Built-in loggers: TensorBoard, trackio, Weights & Biases. Their own environment variables set destination and key.

TensorBoard's event files are in the run's folder, below `tensorboard`, written without torch. An attempt that resumes
at step S records this in its file, and TensorBoard ignores the values of older attempts from step S on.

trackio reads TRACKIO_DIR, TRACKIO_SPACE_ID with HF_TOKEN, or TRACKIO_SERVER_URL with TRACKIO_WRITE_TOKEN; without them
it writes to a database on this machine. It identifies a run by project and name, so the name ends with the end of
vlmrl's run id.

Weights & Biases reads WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL. The remote run has the id of vlmrl's run, so that
every attempt continues it. wandb's own step must always increase, but vlmrl's steps go back if an attempt resumes. So
wandb's step is `Line.number`, and the x axis of all charts is the metric `step`.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.loggers.base import NAME, Ending, Line, SampledRollout, SinkRun, sample_table

FOLDER = "tensorboard"


class TensorBoardSink:
    """Logger for TensorBoard: scalars, images and texts of a run in event files."""

    def open(self, run: SinkRun) -> Mapping[str, Any]:
        """Begin an event file, and write the recipe to it as a text."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(run.folder) / FOLDER
        self._writer, self._last_step = EventFileWriter(str(folder)), run.from_step
        if run.attempt > 1:
            SessionLog = _proto("event").SessionLog  # TensorBoard ignores older events of this step and of later ones
            self._add(run.from_step, session_log=SessionLog(status=SessionLog.START))
            for line in run.standing:
                self.log(line)
        recipe = json.dumps(run.config, indent=1, ensure_ascii=False)
        self._values(run.from_step, [_text(f"recipe/attempt {run.attempt}", _code(recipe))])
        return {"note": f"tensorboard --logdir {folder}"}

    def log(self, line: Line) -> None:
        """Write one scalar per finite number. TensorBoard draws no other values."""
        self._last_step = line.step
        numbers = {"attempt": line.attempt, **line.metrics}
        self._values(
            line.step,
            [
                _proto("summary").Summary.Value(tag=name, simple_value=float(value))
                for name, value in numbers.items()
                if isinstance(value, (bool, int, float)) and math.isfinite(value)
            ],
        )
        self._writer.flush()

    def samples(self, line: Line, samples: Sequence[SampledRollout]) -> None:
        """Write all responses as one text, and the images of each prompt once."""
        columns, rows = sample_table(line, samples, lambda content: None)
        text_columns = [i for i, name in enumerate(columns) if not name.startswith("image ")]
        texts = ["\n".join(f"{columns[i]}: {row[i]}" for i in text_columns) for row in rows]
        values = [_text(NAME, "\n\n---\n\n".join(map(_code, texts)))]
        prompts = {(sample.source, sample.prompt_id): sample.images for sample in samples}
        for row, images in enumerate(prompts.values(), start=1):
            values += [_image(f"{NAME}/prompt {row}/image {n}", content) for n, content in enumerate(images, start=1)]
        self._values(line.step, values)
        self._writer.flush()

    def close(self, status: Ending) -> None:
        """Write the status at the end of the attempt, and flush the file."""
        self._values(self._last_step, [_text("status", status)])
        self._writer.close()

    def _values(self, step: int, values: Sequence[Any]) -> None:
        self._add(step, summary=_proto("summary").Summary(value=values))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(_proto("event").Event(step=step, wall_time=time.time(), **content))


def _proto(name: str) -> Any:
    """Import a module with TensorBoard's message classes, which type checkers do not know: they are made at import."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")


def _text(tag: str, markdown: str) -> Any:
    """Return a text as a value for TensorBoard's text dashboard."""
    Summary, SummaryMetadata = _proto("summary").Summary, _proto("summary").SummaryMetadata
    TensorShapeProto = _proto("tensor_shape").TensorShapeProto
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    content = markdown.encode("utf-8", "backslashreplace")
    tensor = _proto("tensor").TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=shape)
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _code(text: str) -> str:
    """Return Markdown that displays a text unchanged, so that a model's response is never interpreted as markup."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _image(tag: str, content: bytes) -> Any:
    Summary = _proto("summary").Summary
    width, height = _opened(content).size
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    return Summary.Value(tag=tag, image=image)


def _opened(content: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(content))


DEFAULT_PROJECT = "vlmrl"


class TrackioSink:
    """Logger for trackio: one run in a trackio project."""

    def open(self, run: SinkRun) -> Mapping[str, Any]:
        """Begin the run, or continue the run with the same name."""
        import trackio

        self._trackio, self._last_step = trackio, run.from_step
        project = run.remembered.get("project") or run.project or DEFAULT_PROJECT
        name = run.remembered.get("name") or re.sub(r"[^\w .-]", "_", run.unique_label)
        self._run = trackio.init(
            project=project, name=name, group=run.group, config=dict(run.config), resume="allow", embed=False
        )
        return {"project": project, "name": name, "note": f"trackio show --project {shlex.quote(project)}"}

    def log(self, line: Line) -> None:
        """Write one row of metrics. A step that a resume repeats gets a second row with another `attempt`."""
        self._last_step = line.step
        self._run.log({"attempt": line.attempt, **line.metrics}, step=line.step)

    def samples(self, line: Line, samples: Sequence[SampledRollout]) -> None:
        """Write a table of the responses, which contains their images."""
        columns, rows = sample_table(line, samples, self._image)
        self._run.log({NAME: self._trackio.Table(columns=columns, data=rows)}, step=line.step)

    def _image(self, content: bytes) -> Any:
        return self._trackio.Image(_opened(content).convert("RGB"))

    def close(self, status: Ending) -> None:
        """Write the remaining rows, and the status as the last row."""
        self._run.log({"status": status}, step=self._last_step)
        self._run.finish()


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
        image = _opened(content)
        return self._wandb.Image(image, file_type="jpg" if image.format == "JPEG" else "png")

    def close(self, status: Ending) -> None:
        """Send the remaining data. An interrupted run is marked as one that will continue."""
        self._run.summary["status"] = status
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=EXIT_CODES[status])
