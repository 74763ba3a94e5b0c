"""Data that a run sends to its loggers (`log.sinks`): the metrics of every step, some rollouts, and its ending.

No function here waits for a logger or fails because of one (loggers/feed.py). Only the rank that writes the run has
loggers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from vlmrl.errors import StoreError, VlmrlError
from vlmrl.loggers import short_name
from vlmrl.loggers.base import Ending, Line, SampledRollout, SinkRun, pack
from vlmrl.loggers.feed import CLOSE_SECONDS, HURRY_SECONDS, Feed
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import redact_value
from vlmrl.store import layout
from vlmrl.store.manifest import Manifest, read_remote, write_remote
from vlmrl.store.metrics import read_file
from vlmrl.store.runs import Run
from vlmrl.tasks.source import Source
from vlmrl.types import NO_SCORE, Group, Score

MOST_PROMPTS = 4
"""Maximum number of prompts per step that are sent: the first ones drawn."""
MOST_SAMPLES = 4
"""Maximum number of responses that are sent per prompt: the first ones sampled."""


@dataclass
class Loggers:
    """Loggers of one attempt. Without any, no method does anything.

    Args:
        run: the run to log.
        feeds: the connections, one per logger.
        files: the log files that the loggers' processes print to.
        number: number of the next line.
        ending: ending of the attempt, as far as it is known.
    """

    run: Run
    feeds: list[Feed] = field(default_factory=list)
    files: list[TextIO] = field(default_factory=list)
    number: int = 0
    ending: Ending = "failed"
    _line: Line | None = None

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of a step. `kind`: "train" or "validation"."""
        if self.feeds:
            self._line = Line(step, self.run.attempt, kind, self.number, dict(metrics))
            self.number += 1
            self._put({"op": "log", "line": asdict(self._line)})

    def samples(self, groups: Sequence[Group], sources: Iterable[Source]) -> None:
        """Send some rollouts of the step that was logged last, with the images of their prompts."""
        if not self.feeds or self._line is None:
            return
        datasets = {source.name: source.dataset for source in sources}
        blobs: list[bytes] = []
        items: list[dict[str, Any]] = []
        for group in groups[:MOST_PROMPTS]:
            first = len(blobs)
            for media in group.row.media:
                try:
                    blobs.append(datasets[group.row.source].image_bytes(media))
                except VlmrlError as error:  # a file that is gone by now
                    self.run.write_log(f"an image was not sent to the loggers: {error.message}")
            items += [{**asdict(s), "images": list(range(first, len(blobs)))} for s in sampled(group)]
        self._put({"op": "samples", "line": asdict(self._line), "samples": items}, blobs)

    def news(self) -> list[str]:
        """Return the loggers' new messages for the user, and save the values that the loggers want to keep."""
        messages: list[str] = []
        for feed in self.feeds:
            opened, feed.opened = feed.opened, None
            try:
                if opened:
                    write_remote(self.run.dir, feed.name, opened)
            except (StoreError, TypeError) as error:
                messages.append(f"logger {feed.name}: the values that it wants to keep were not saved: {error}")
            messages += feed.notes()
        return messages

    def close(self, seconds: float) -> list[str]:
        """Let all loggers send their remaining lines. Return the messages for the user.

        Lines that a logger did not take are an event of the run.

        Args:
            seconds: time limit for all loggers together.
        """
        deadline = time.monotonic() + seconds
        for feed in self.feeds:
            feed.ask_to_close(self.ending)
        for feed in self.feeds:
            feed.end(deadline)
        for file in self.files:
            file.close()
        messages = self.news()
        for feed in self.feeds:
            if lost := feed.sent - feed.taken:
                step = self._line.step if self._line else self.run.start_step
                self.run.event(step, "logger lost lines", logger=feed.name, lost=lost, sent=feed.sent)
                messages.append(f"logger {feed.name} took {feed.taken} of {feed.sent} lines; metrics.jsonl holds all")
        return messages

    def _put(self, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        frame = pack(header, blobs)
        for feed in self.feeds:
            feed.put(frame)


@contextmanager
def loggers_of(run: Run, recipe: Recipe, root: Path, say: Callable[[str], None]) -> Iterator[Loggers]:
    """Open the loggers of a recipe for a `with` block, and close them with `Loggers.ending` at its end.

    They have `CLOSE_SECONDS` to close; after an error `HURRY_SECONDS`.

    Args:
        root: the runs folder.
        say: shows a message to the user.
    """
    loggers = open_loggers(run, recipe, root, say) if run.writable and recipe.log.sinks else Loggers(run)
    seconds = HURRY_SECONDS
    try:
        yield loggers
        seconds = CLOSE_SECONDS
    except KeyboardInterrupt:
        loggers.ending = "interrupted"
        raise
    finally:
        for text in loggers.close(seconds):
            say(text)


def open_loggers(run: Run, recipe: Recipe, root: Path, say: Callable[[str], None]) -> Loggers:
    """Start the process of each logger. If one cannot start, the user is told why and the run goes on without it."""
    manifest, loggers = run.manifest, Loggers(run)
    try:
        remote = read_remote(run.dir)
    except StoreError as error:
        say(f"the loggers begin anew, without the ids of earlier attempts: {error.message} ({error.where})")
        remote = {}
    parent_ids, lines = _parent_of(manifest, root), read_file(run.dir)
    loggers.number = len(lines.lines) + len(lines.torn)
    standing = [n for n in run.metrics("validation") if n["step"] == run.start_step and n["attempt"] < run.attempt]
    for sink in recipe.log.sinks:
        name = short_name(sink)
        sink_run = SinkRun(
            id=run.id,
            label=recipe.log.name or manifest.name or run.id,
            folder=str(run.dir.resolve()),
            kind=recipe.kind,
            attempt=run.attempt,
            from_step=run.start_step,
            config=config_of(run, recipe),
            project=recipe.log.project,
            entity=recipe.log.entity,
            group=recipe.log.group,
            tags=list(manifest.tags),
            note=manifest.note,
            parent={**manifest.parent, "remote": parent_ids.get(name)} if manifest.parent else None,
            remembered=remote.get(name, {}),
            standing=[_line_of(n) for n in standing],
        )
        try:
            log = open(run.process_log(name), "a", encoding="utf-8")  # noqa: SIM115 (closed with the loggers)
            loggers.files.append(log)
            loggers.feeds.append(Feed(name, sink, asdict(sink_run), log))
        except OSError as error:
            say(f"logger {name} could not begin, and the run goes on without it: {error.strerror or error}")
    return loggers


def config_of(run: Run, recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe by table, and under `run` the origin of the run. Secrets are hidden."""
    manifest = run.manifest
    provenance = {
        "id": run.id,
        "attempt": run.attempt,
        "recipe": manifest.recipe,
        "vlmrl": manifest.vlmrl,
        "git": manifest.git,
        "hardware": manifest.hardware,
        "datasets": list(manifest.datasets),
        "parent": manifest.parent,
        "processes": manifest.attempts[-1].processes,
    }
    return redact_value(recipe.model_dump(mode="json") | {"run": provenance})


def sampled(group: Group) -> list[SampledRollout]:
    """Return the first responses of a group, without images."""
    row = group.row
    return [
        SampledRollout(
            row.source,
            row.prompt_id,
            group.prompt_text,
            s.text,
            row.truth,
            s.score.value,
            s.score.parts,
            s.advantage,
            s.score.note,
            _no_score(s.score),
            s.trajectory.finish,
        )
        for s in group.samples[:MOST_SAMPLES]
    ]


def _no_score(score: Score) -> str | None:
    """Return in words why there is no score, or None if there is one."""
    if score.error is None or score.status == "ok":
        return score.error
    return f"{NO_SCORE[score.status]}: {score.error}"


def _line_of(line: Mapping[str, Any]) -> Line:
    metrics = {name: value for name, value in line.items() if name not in ("step", "attempt", "kind", "time")}
    return Line(line["step"], line["attempt"], line["kind"], 0, metrics)


def _parent_of(manifest: Manifest, root: Path) -> dict[str, dict[str, Any]]:
    """Return the values that the loggers of the run's parent kept; {} if there is no parent, or it is gone."""
    folder = root / str((manifest.parent or {}).get("run"))
    if not manifest.parent or not (folder / layout.MANIFEST).is_file():
        return {}
    try:
        return read_remote(folder)
    except StoreError:
        return {}
