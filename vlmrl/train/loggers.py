"""What a run sends to its loggers (`log.sinks`): the numbers of every step, some of its rollouts, how it ended.

Nothing here waits for a logger or fails because of one (sinks/feed.py). Of several processes the one that writes the
run has loggers, the others have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from vlmrl.errors import StoreError, VlmrlError
from vlmrl.recipe.schema import Recipe
from vlmrl.sinks import short_name
from vlmrl.sinks.base import Ending, Line, SampledRollout, SinkRun
from vlmrl.sinks.feed import CLOSE_SECONDS, HURRY_SECONDS, Feed
from vlmrl.sinks.wire import pack
from vlmrl.store import layout
from vlmrl.store.logger_ids import read_remote, write_remote
from vlmrl.store.manifest import Manifest
from vlmrl.store.metrics import read_file
from vlmrl.store.runs import Run
from vlmrl.store.secrets.redact import redact_value
from vlmrl.tasks.source import Source
from vlmrl.types import NO_SCORE, Group, Score

MOST_PROMPTS = 4
"""Prompts of a step that are sent, the first ones drawn."""
MOST_SAMPLES = 4
"""Responses to each of them, the first ones sampled."""


@dataclass
class Loggers:
    """The loggers of one attempt. Without any, every method does nothing.

    Args: run: that they log.    feeds: one a logger.    files: where they print.    number: of the next line.
        ending: how the attempt ends, as far as is known.
    """

    run: Run
    feeds: list[Feed] = field(default_factory=list)
    files: list[TextIO] = field(default_factory=list)
    number: int = 0
    ending: Ending = "failed"
    _line: Line | None = None

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Send the numbers of a step: `kind` is train or validation."""
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
        """What the user should read of the loggers and has not read yet; what they want kept is kept."""
        found: list[str] = []
        for feed in self.feeds:
            opened, feed.opened = feed.opened, None
            try:
                if opened:
                    write_remote(self.run.dir, feed.name, opened)
            except (StoreError, TypeError) as error:
                found.append(f"logger {feed.name}: what it wants to be kept was not: {error}")
            found += feed.notes()
        return found

    def close(self, seconds: float) -> list[str]:
        """Let all loggers send what is left, for at most so long. Returns what the user should read. Lines that were
        not taken are an event of the run.
        """
        deadline = time.monotonic() + seconds
        for feed in self.feeds:
            feed.ask_to_close(self.ending)
        for feed in self.feeds:
            feed.end(deadline)
        for file in self.files:
            file.close()
        told = self.news()
        for feed in self.feeds:
            if lost := feed.sent - feed.taken:
                step = self._line.step if self._line else self.run.start_step
                self.run.event(step, "logger lost lines", logger=feed.name, lost=lost, sent=feed.sent)
                told.append(f"logger {feed.name} took {feed.taken} of {feed.sent} lines; metrics.jsonl holds all")
        return told

    def _put(self, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        frame = pack(header, blobs)
        for feed in self.feeds:
            feed.put(frame)


@contextmanager
def loggers_of(run: Run, recipe: Recipe, root: Path, say: Callable[[str], None]) -> Iterator[Loggers]:
    """The loggers of a recipe, opened. At the end they are closed with `Loggers.ending`; after an error in a hurry.

    Args: root: the runs folder.    say: told what the user should read.
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
    """Start the process of each logger. What keeps one from starting is said."""
    manifest, loggers = run.manifest, Loggers(run)
    try:
        remote = read_remote(run.dir)
    except StoreError as error:
        say(f"loggers begin anew: {error.message} ({error.where})")
        remote = {}
    above, lines = _parent_of(manifest, root), read_file(run.dir)
    loggers.number = len(lines.lines) + len(lines.torn)
    standing = [n for n in run.metrics("validation") if n["step"] == run.start_step and n["attempt"] < run.attempt]
    for sink in recipe.log.sinks:
        name = short_name(sink)
        about = SinkRun(
            id=run.id, label=recipe.log.name or manifest.name or run.id, folder=str(run.dir.resolve()),
            kind=recipe.kind, attempt=run.attempt, from_step=run.start_step, config=config_of(run, recipe),
            project=recipe.log.project, entity=recipe.log.entity, group=recipe.log.group, tags=list(manifest.tags),
            note=manifest.note, parent={**manifest.parent, "remote": above.get(name)} if manifest.parent else None,
            remembered=remote.get(name, {}), standing=[_line_of(n) for n in standing],
        )  # fmt: skip
        try:
            log = open(run.process_log(name), "a", encoding="utf-8")  # noqa: SIM115 (closed with the loggers)
            loggers.files.append(log)
            loggers.feeds.append(Feed(name, sink, asdict(about), log))
        except OSError as error:
            say(f"logger {name} could not begin, and the run goes on without it: {error.strerror or error}")
    return loggers


def config_of(run: Run, recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe by table, and under `run` what made it, secrets hidden."""
    manifest = run.manifest
    about = {
        "id": run.id, "attempt": run.attempt, "recipe": manifest.recipe, "vlmrl": manifest.vlmrl,
        "git": manifest.git, "hardware": manifest.hardware, "datasets": list(manifest.datasets),
        "parent": manifest.parent, "processes": manifest.attempts[-1].processes,
    }  # fmt: skip
    return redact_value(recipe.model_dump(mode="json") | {"run": about})


def sampled(group: Group) -> list[SampledRollout]:
    """The first responses of a group, without images."""
    row = group.row
    return [
        SampledRollout(
            row.source, row.prompt_id, group.prompt_text, s.text, row.truth, s.score.value, s.score.parts, s.advantage,
            s.score.note, _no_score(s.score), s.trajectory.finish,
        )
        for s in group.samples[:MOST_SAMPLES]
    ]  # fmt: skip


def _no_score(score: Score) -> str | None:
    """Return why there is no score, in words; None where there is one."""
    if score.error is None or score.status == "ok":
        return score.error
    return f"{NO_SCORE[score.status]}: {score.error}"


def _line_of(line: Mapping[str, Any]) -> Line:
    metrics = {name: value for name, value in line.items() if name not in ("step", "attempt", "kind", "time")}
    return Line(line["step"], line["attempt"], line["kind"], 0, metrics)


def _parent_of(manifest: Manifest, root: Path) -> dict[str, dict[str, Any]]:
    """What the loggers of the run's parent kept; {} when it has none, or is gone."""
    folder = root / str((manifest.parent or {}).get("run"))
    if not manifest.parent or not (folder / layout.MANIFEST).is_file():
        return {}
    try:
        return read_remote(folder)
    except StoreError:
        return {}
