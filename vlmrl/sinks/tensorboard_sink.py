"""TensorBoard event files in the run's folder, below `tensorboard`: `tensorboard --logdir runs`.

They are written with TensorBoard's own event writer, without torch. An attempt that resumes at step S records this in
its file. TensorBoard then ignores the values of older attempts from step S on.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.sinks.base import NAME, Ending, Line, SampledRollout, SinkRun, sample_table

FOLDER = "tensorboard"


class TensorBoardSink:
    """Logger for TensorBoard: scalars, images and texts of a run in event files."""

    def open(self, run: SinkRun) -> Mapping[str, Any]:
        """Begin an event file, and write the recipe to it as a text."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(run.folder) / FOLDER
        self._writer, self._last_step = EventFileWriter(str(folder)), run.from_step
        if run.attempt > 1:
            self._add(run.from_step, session_log=_session_start())
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


def _session_start() -> Any:
    """Return the message after which TensorBoard ignores older events of the same step and of later steps."""
    SessionLog = _proto("event").SessionLog
    return SessionLog(status=SessionLog.START)


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
    from PIL import Image

    Summary = _proto("summary").Summary
    width, height = Image.open(io.BytesIO(content)).size
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    return Summary.Value(tag=tag, image=image)
