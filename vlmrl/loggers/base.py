"""Protocol of `log.sinks`: inputs and methods of a logger.

A logger is a class with the four methods of `Sink`; it is created without arguments. The recipe names a built-in logger
(`vlmrl.loggers.BUILTIN`) or a class in a file: `log.sinks = ["my_logger.py:MyLogger"]`. It runs in a process of its own
(host.py), which gets its input through a queue (feed.py). So if it is slow, hangs, prints or crashes, the run goes on.
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
        step: policy version. An attempt that resumes repeats the steps after its checkpoint, so steps can go back.
        attempt: number of the attempt. If two lines have the same step and kind, only that of the newer attempt counts.
        kind: "train" or "validation".
        number: number of the line in the run, counted over all attempts; it always increases.
        metrics: name -> number, bool or text. A number may be NaN or infinite.
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
        label: name of the run for the user; other runs may have the same.
        folder: the run's folder. A logger may write files to a subfolder of it.
        kind: "rl" or "sft".
        attempt: number of the attempt, from 1; every resume adds one.
        from_step: step at which the attempt begins.
        config: the resolved recipe by table, with secrets hidden, and the facts of the manifest under `run`.
        project, entity, group: values of these keys in the recipe's `[log]`.
        tags, note: the user's tags and note.
        parent: for a fork, {"run", "checkpoint", "step", "remote"}; `remote` is the value that this logger's `open`
            returned for the parent.
        remembered: the value that `open` returned in the attempt before; {} in the first attempt.
        standing: lines of `from_step` that older attempts logged and that are still valid: those of its validation.
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
        """Label that no other run has: the label with the end of the id appended, or the id itself."""
        return self.label if self.label == self.id else f"{self.label}-{self.id.rpartition('-')[2]}"


@dataclass(frozen=True)
class SampledRollout:
    """Response of a step with its score.

    Args:
        score, parts, advantage, note, finish: the same values as in the rollouts.
        error: reason why there is no score; None if there is one.
        images: the prompt's images as PNG or JPEG files, at most `host.MAX_SIDE` pixels wide and high. An image that
            cannot be read is left out.
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
    """Logger. Its exceptions are counted and reported once. `close` must end within `feed.CLOSE_SECONDS` seconds."""

    def open(self, run: SinkRun) -> Mapping[str, Any] | None:
        """Begin an attempt of a run. This method is called first, and once.

        Returns: JSON values, such as the id of the remote run. They are saved in the run's folder, and the next attempt
            gets them as `SinkRun.remembered`. The values `url` and `note` are printed for the user.
        """
        ...

    def log(self, line: Line) -> None:
        """Log the numbers of one step."""
        ...

    def samples(self, line: Line, samples: Sequence[SampledRollout]) -> None:
        """Log some responses of the step that was logged last. It is called every `log.sample_every_steps` steps."""
        ...

    def close(self, status: Ending) -> None:
        """End the attempt. This method is called last, and once, unless the process is killed."""
        ...


NAME = "samples"
"""Name of the table of responses in every logger."""


def sample_table(
    line: Line, samples: Sequence[SampledRollout], show_image: Callable[[bytes], Any]
) -> tuple[list[str], list[list[Any]]]:
    """Return (columns, rows): one row per response, one column per image of the prompt and per part of the reward.

    Args:
        show_image: function that converts an image file to the logger's own type of image; called once per image.
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
