"""Logger for trackio. Its own environment variables set the destination and hold the token.

They are TRACKIO_DIR, TRACKIO_SPACE_ID with HF_TOKEN, or TRACKIO_SERVER_URL with TRACKIO_WRITE_TOKEN. Without them,
trackio writes to a database on this machine.

trackio identifies a run by project and name. So the name ends with the end of vlmrl's run id, to be unique.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.sinks.base import NAME, Ending, Line, SampledRollout, SinkRun, sample_table

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
        from PIL import Image

        return self._trackio.Image(Image.open(io.BytesIO(content)).convert("RGB"))

    def close(self, status: Ending) -> None:
        """Write the remaining rows, and the status as the last row."""
        self._run.log({"status": status}, step=self._last_step)
        self._run.finish()
