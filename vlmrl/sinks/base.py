"""Protocol of `log.sinks`: inputs and methods of a logger.

A logger is a class without arguments that has the four methods of `Sink`. The recipe names a built-in one
(`vlmrl.sinks.BUILTIN`) or a class in a file: `log.sinks = ["my_logger.py:MyLogger"]`. It runs in a process of its own
(host.py), which is fed through a queue (feed.py): it may be slow, hang, print or crash, and the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Ending = Literal["done", "interrupted", "failed"]


@dataclass(frozen=True)
class Line:
    """Numbers of one step, under the names that they have in metrics.jsonl.

    Args:
        step: policy version. An attempt that resumes repeats the steps after its checkpoint: steps go back.
        attempt: number of the attempt. Of two lines with the same step and kind, that of the newer attempt counts.
        kind: "train" or "validation".
        number: number of the line in the run, over all its attempts; it only grows.
        metrics: name -> number, truth value or text. A number may be NaN or infinite.
    """

    step: int
    attempt: int
    kind: str
    number: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class SinkRun:
    """Logged run, at the start of one of its attempts.

    Args:
        id: id of the run, unique; the name of its folder.
        label: name for people; not unique.
        folder: the run's folder, where a logger may keep files of its own in a subfolder.
        kind: "rl" or "sft".
        attempt: 1, and one more with every resume.
        from_step: the step it begins at.
        config: the resolved recipe by table, secrets hidden, and under `run` the facts of the manifest.
        project, entity, group: as in the recipe's `[log]`.
        tags, note: as a user gave them.
        parent: of a fork, {"run", "checkpoint", "step", "remote"}; `remote` is what this logger's `open` returned for
            the parent.
        remembered: what `open` returned in the attempt before; {} in the first.
        standing: lines of `from_step` itself that older attempts logged and that still count: its validation.
    """

    id: str
    label: str
    folder: str
    kind: str
    attempt: int
    from_step: int
    config: Mapping[str, Any]
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    note: str = ""
    parent: Mapping[str, Any] | None = None
    remembered: Mapping[str, Any] = field(default_factory=dict)
    standing: Sequence[Line] = ()

    @property
    def unique_label(self) -> str:
        """Label that no other run has: it ends with the end of the id, unless it is the id."""
        return self.label if self.label == self.id else f"{self.label}-{self.id.rpartition('-')[2]}"


@dataclass(frozen=True)
class SampledRollout:
    """Response of a step with its score.

    Args:
        source: name of the `[[data]]` entry.
        prompt_id: of the row.
        prompt: as rendered.
        truth: of the row.
        score, parts, advantage, note, finish: as in the rollouts; `error` says why there is no score.
        images: the prompt's images as PNG or JPEG files, at most `host.MAX_SIDE` pixels wide and high. One that cannot
            be read is left out.
    """

    source: str
    prompt_id: str
    prompt: str
    response: str
    truth: Mapping[str, Any]
    score: float
    parts: Mapping[str, float | None]
    advantage: float
    note: str = ""
    error: str | None = None
    finish: str = "stop"
    images: Sequence[bytes] = ()


class Sink(Protocol):
    """Logger. Its exceptions are counted and reported once. `close` has `feed.CLOSE_SECONDS` seconds."""

    def open(self, run: SinkRun) -> Mapping[str, Any] | None:
        """Begin an attempt of a run. This is called first, once.

        Returns: JSON values that the run's folder keeps, and that the next attempt gets as `SinkRun.remembered`, such
            as the id of the remote run. `url` and `note` among them are shown to the user.
        """
        ...

    def log(self, line: Line) -> None:
        """Take the numbers of one step."""
        ...

    def samples(self, line: Line, samples: Sequence[SampledRollout]) -> None:
        """Take some responses of the step that was logged last. This is called every `log.sample_every_steps` steps."""
        ...

    def close(self, status: Ending) -> None:
        """End the attempt. This is called last, once, unless the process is killed."""
        ...


NAME = "samples"
"""Name of the table in every logger."""


def sample_table(
    line: Line, samples: Sequence[SampledRollout], show_image: Callable[[bytes], Any]
) -> tuple[list[str], list[list[Any]]]:
    """Return (columns, rows): one row per response, one column per image of the prompt and per part of the reward.

    Args:
        show_image: function that returns an image file as the logger's own image value; called once for each image.
    """
    images_by_content = {content: show_image(content) for sample in samples for content in sample.images}
    parts = sorted({name for sample in samples for name in sample.parts})
    num_images = max((len(sample.images) for sample in samples), default=0)
    columns = ["step", "attempt", "source", "prompt_id", *(f"image {n + 1}" for n in range(num_images)), "prompt"]
    columns += ["response", "score", *(f"reward/part/{name}" for name in parts), "advantage", "note", "finish", "truth"]
    rows = []
    for sample in samples:
        images = [images_by_content[content] for content in sample.images]
        images += [None] * (num_images - len(images))
        note = sample.error or sample.note
        truth = json.dumps(dict(sample.truth), ensure_ascii=False)
        rows.append(
            [
                line.step,
                line.attempt,
                sample.source,
                sample.prompt_id,
                *images,
                sample.prompt,
                sample.response,
                sample.score,
                *(sample.parts.get(name) for name in parts),
                sample.advantage,
                note,
                sample.finish,
                truth,
            ]
        )
    return columns, rows
