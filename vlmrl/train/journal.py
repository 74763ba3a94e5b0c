"""Journal of a run: writes metrics and rollouts, informs the console and the loggers, and measures the run's health.

A thread writes rollouts while training goes on; a step's metrics wait for its rollouts. Progress has the counters that
a checkpoint saves, and those that start anew in a fork or after a change. Loggers get the metrics of every step, some
rollouts, and the ending; no function waits for a logger or fails because of one (loggers/feed.py), and only the rank
that writes the run has loggers.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol, TextIO

import numpy as np
import torch

from vlmrl.diagnose.signs import Sampled, find_signs, is_watched, measure_health, warning_of
from vlmrl.dist import world
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import StoreError, VlmrlError
from vlmrl.evaluate.estimates import Interval, mean_interval
from vlmrl.loggers import short_name
from vlmrl.loggers.base import Ending, Line, SampledRollout, SinkRun
from vlmrl.loggers.feed import CLOSE_SECONDS, HURRY_SECONDS, Feed
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import redact_value
from vlmrl.rewards.base import earned_on_timeout
from vlmrl.rewards.scoring import Scorer
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.episodes import episode_metrics
from vlmrl.store import layout
from vlmrl.store.manifest import Manifest, read_remote, write_remote
from vlmrl.store.metrics import WARNING, counted, read_file
from vlmrl.store.prune import RolloutRule
from vlmrl.store.rollouts import RolloutFiles
from vlmrl.store.runs import Run
from vlmrl.tasks.source import Source
from vlmrl.types import NO_SCORE, Group, Score, is_cut
from vlmrl.workers.frames import pack

LENGTH_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def group_metrics(groups: Sequence[Group], scorers: Mapping[str, Scorer] | None = None) -> dict[str, Any]:
    """Return the metrics of a step's rollouts: rewards and their parts, shares, lengths in tokens.

    The mean reward comes with its 95% interval over prompts; a single prompt has no interval.

    Args:
        scorers: the scorers by source name; the interval stays within the range that they declare.
    """
    samples = [x for g in groups for x in g.samples]
    scored = [x for x in samples if x.score.error is None]
    lengths = [x.trajectory.num_sampled_tokens for x in samples]
    quantiles = np.quantile(lengths, list(LENGTH_QUANTILES.values())).tolist()
    metrics: dict[str, Any] = {
        "reward/errors": sum(x.score.failed for x in samples),
        "rollout/dead_group_share": fmean(float(g.is_dead and not g.is_shown) for g in groups),
        "rollout/truncated_share": fmean(float(is_cut(x.trajectory.finish, x.ending)) for x in samples),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_max": max(lengths),
        **{f"rollout/response_tokens_{name}": q for name, q in zip(LENGTH_QUANTILES, quantiles, strict=True)},
        "rollout/prompt_tokens_mean": fmean(len(g.samples[0].trajectory.prompt_ids) for g in groups),
        "rollout/samples": len(samples),
    }
    if any(x.ending for x in samples):
        metrics |= episode_metrics(samples)
    if unavailable := sum(x.score.status == "unavailable" for x in samples):
        metrics["reward/unavailable"] = unavailable
    if timeouts := sum(map(earned_on_timeout, (x.score for x in scored))):
        metrics["reward/timeouts"] = timeouts
    if left_out := len(samples) - len(scored) - metrics["reward/errors"] - unavailable:
        metrics["reward/inapplicable"] = left_out
    if not scored:
        return metrics
    interval = _reward_interval(groups, scorers or {})
    metrics["reward/mean"] = fmean(x.score.value for x in scored)
    if math.isfinite(interval.low):
        metrics |= {"reward/low": interval.low, "reward/high": interval.high}
    for name in sorted({n for x in scored for n in x.score.parts}):
        values = [v for x in scored if (v := x.score.parts.get(name)) is not None]
        if values:
            metrics[f"reward/part/{name}"] = fmean(values)
    sources = sorted({g.row.source for g in groups})
    for source in sources if len(sources) > 1 else ():
        own = [x.score for g in groups if g.row.source == source for x in g.samples]
        if values := [score.value for score in own if score.error is None]:
            metrics[f"reward/source/{source}"] = fmean(values)
    return metrics


def _reward_interval(groups: Sequence[Group], scorers: Mapping[str, Scorer]) -> Interval:
    """Return the mean reward of all samples with its interval.

    Samples of one prompt, or of prompts that share their images, are dependent: they form one cluster.
    """
    scored = [(g, x.score) for g in groups for x in g.samples if x.score.error is None]
    clusters = [tuple(m.sha256 for m in g.row.media) or (g.row.source, g.row.prompt_id) for g, _ in scored]
    ranges = [
        scorer.possible_values([score.parts for g, score in scored if g.row.source == name])
        for name, scorer in scorers.items()
        if any(g.row.source == name for g, _ in scored)
    ]
    declared, whole_range = [r for r in ranges if r is not None], None
    if declared and declared == ranges:
        whole_range = (min(low for low, _ in declared), max(high for _, high in declared))
    return mean_interval([score.value for _, score in scored], clusters, whole_range)


def rollout_speed(groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """Return `rollout/tokens_per_second`: the sampled tokens over the seconds of sampling."""
    tokens = sum(x.trajectory.num_sampled_tokens for g in groups for x in g.samples)
    return {"rollout/tokens_per_second": tokens / max(seconds, 1e-9)}


def sync_speed(generator: Generator) -> dict[str, float]:
    """Return `sync/bytes` and `sync/gb_per_second` of this rank's last weight sync; {} without one.

    The seconds are those of the transfer and of the engine's loader, without the check of the sync.
    """
    speed = generator.last_sync
    return {} if speed is None else {"sync/bytes": speed.bytes, "sync/gb_per_second": speed.gb_per_second}


class Clock:
    """Stopwatch of a step: adds up the seconds of each part, `with clock("rollout"): ...`.

    Args:
        step: the step, counted from 0. Messages of hangs and killed ranks count from 1, as the step lines do.
    """

    def __init__(self, step: int) -> None:
        self._shown_step = counted(step)
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        world.phase(part, self._shown_step)
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return `time/<part>_seconds` of each part and `time/step_seconds`, the seconds since the clock was made."""
        parts = {f"time/{part}_seconds": seconds for part, seconds in self.seconds.items()}
        return parts | {"time/step_seconds": time.perf_counter() - self._start}


def memory_metrics(device: torch.device, world: World) -> dict[str, float]:
    """Return `memory/peak_bytes`, in bytes: the largest peak of all ranks.

    On a CUDA device it is the peak of the allocated memory, else that of the process's resident memory. If
    FlexAttention is used, `policy/attention_compilations` is the number of shapes that it was compiled for.
    """
    if device.type == "cuda":
        from vlmrl.model.attention import compiled_shapes

        peak = float(torch.cuda.max_memory_allocated())
        other_metrics = {"policy/attention_compilations": float(len(compiled_shapes))} if compiled_shapes else {}
    else:
        import resource
        import sys

        peak, other_metrics = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), {}
        # ru_maxrss is in bytes on macOS, in KiB elsewhere.
        peak *= 1 if sys.platform == "darwin" else 1024
    return {"memory/peak_bytes": max(world.gather(peak))} | other_metrics


MOST_UNDER_WAY = 2
"""Maximum number of steps whose rollouts are being written at once; they are held in memory until then."""


@dataclass
class _Step:
    """Step whose rollouts are being written.

    Args:
        written: done when its rollouts are on disk.
        line: writes its metrics; None until they are known.
    """

    step: int
    written: Future[None]
    line: Callable[[], None] | None = None


class RolloutWriter:
    """Writer of a run's rollouts, one step after the other, and of the metrics of each step after its rollouts.

    A step that has metrics on disk has its rollouts there too, whenever the run is killed. The next call after a failed
    write raises its error; nothing is written after it.

    Args:
        run: the run; if another rank writes it, nothing is written.
        rule: rule for deleting old rollouts after each write; None = all are kept.
    """

    def __init__(self, run: Run, rule: RolloutRule | None = None) -> None:
        self.run, self.rule = run, rule
        self.files, self._lines = RolloutFiles(run.dir, run.attempt), run.lines if run.writable else None
        self._steps: deque[_Step] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._failed = False

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Begin to write the rollouts of a step. Wait while those of `MOST_UNDER_WAY` steps are being written.

        Raises: StoreError when the rollouts of an earlier step could not be written.
        """
        self._write_waiting(waiting=len(self._steps) >= MOST_UNDER_WAY, at_most=1)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._steps.append(_Step(step, self._thread.submit(self._write, step, groups)))

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write a line of metrics.

        A line of training waits until the step's rollouts are on disk. Any other line is written at once, after all
        earlier rollouts and lines.

        Raises: StoreError as `write`.
        """
        if kind == "train" and self._steps and self._steps[-1].step == step:
            self._steps[-1].line = lambda: self._line(step, kind, metrics)
            self._write_waiting(waiting=False)
        else:
            self.finish()
            self._line(step, kind, metrics)

    def finish(self) -> None:
        """Wait for all rollouts, then write the metrics that waited for them. Raises: StoreError as `write`."""
        self._write_waiting(waiting=True)

    def close(self) -> None:
        """Finish in a run that may already have failed: a further failure is only a line in its log."""
        try:
            self.finish()
        except StoreError as error:
            self.run.write_log(f"rollouts were not written: {error.message}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _line(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(step, kind, metrics)

    def _write(self, step: int, groups: Sequence[Group]) -> None:
        if self._lines is None:
            return
        if self._failed:
            raise StoreError(f"the rollouts of step {step} were not written, since an earlier write failed")
        try:
            self._lines.files |= self.files.write(step, groups)
            if self.rule is not None:
                self.run.prune_rollouts(self.rule)
        except BaseException:
            self._failed = True
            raise

    def _write_waiting(self, *, waiting: bool, at_most: int | None = None) -> None:
        """Write the metrics of the oldest steps whose rollouts are on disk, and forget these steps.

        Args:
            waiting: wait for the steps whose rollouts are still being written.
            at_most: maximum number of steps; None = no limit.
        """
        while self._steps and (waiting or self._steps[0].written.done()):
            first = self._steps.popleft()
            first.written.result()
            if first.line is not None:
                first.line()
            if at_most is not None and (at_most := at_most - 1) < 1:
                return


@dataclass
class Progress:
    """Counters of a run. A checkpoint saves all of them in its data.json.

    Args:
        step: number of steps done, which is the policy version.
        best_step, best_value: step and value of the best validation metric; None before the first validation.
        stale: number of validations since the best.
        validated: step of the last validation; -1 before the first.
        samples, reward_errors: number of samples and of failed rewards since the run began.
        seconds: seconds of training, over all attempts.
        halved: token budgets that were halved because memory ran out: recipe key -> [its value in the recipe, its value
            now].
        kl_coef: current value of an adaptive KL coefficient; None = the recipe's.
    """

    step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    stale: int = 0
    validated: int = -1
    samples: int = 0
    reward_errors: int = 0
    seconds: float = 0.0
    kl_coef: float | None = None
    halved: dict[str, list[int]] = field(default_factory=dict)

    def count_validation(self, value: float, goal: Literal["max", "min"]) -> bool:
        """Count a validation of this step. Return whether it is the best so far."""
        best_so_far = self.best_value
        if math.isnan(value):
            best = False
        elif best_so_far is None or (value == best_so_far and self.best_step == 0):
            best = True  # in a tie with the start weights, the trained model is the best: it is a checkpoint of the run
        else:
            best = value > best_so_far if goal == "max" else value < best_so_far
        self.validated = self.step
        self.stale = 0 if best else self.stale + 1
        if best:
            self.best_step, self.best_value = self.step, value
        return best

    def begun_anew(self, manifest: Manifest) -> Progress:
        """Return the counters of a checkpoint with which a run with this manifest continues.

        The best validation and its count start anew in a fork, and when validation measures something else now. The
        seconds start anew in a fork. An adaptive KL coefficient starts anew when the recipe's was changed.
        """
        forked, restarts = manifest.forked_at == self.step, manifest.restarts_since(self.step)
        names = ["best_step", "best_value", "stale", "validated"] if forked or "best" in restarts else []
        names += ["seconds"] if forked else []
        names += ["kl_coef"] if "kl" in restarts else []
        fresh = Progress()
        return replace(self, **{name: getattr(fresh, name) for name in names})


MOST_PROMPTS = 4
"""Maximum number of prompts per step that are sent: the first ones drawn."""
MOST_SAMPLES = 4
"""Maximum number of responses that are sent per prompt: the first ones sampled."""


@dataclass
class Loggers:
    """Loggers of one attempt. Without any, no method does anything.

    Args:
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


NOT_METRICS = ("step", "attempt", "kind", "time")


def open_loggers(run: Run, recipe: Recipe, root: Path, say: Callable[[str], None]) -> Loggers:
    """Start the process of each logger. If one cannot start, the user is told why and the run goes on without it."""
    manifest, loggers = run.manifest, Loggers(run)
    try:
        remote = read_remote(run.dir)
    except StoreError as error:
        say(f"the loggers begin anew, without the ids of earlier attempts: {error.message} ({error.where})")
        remote = {}
    parent_ids, lines = {}, read_file(run.dir)
    parent = root / str((manifest.parent or {}).get("run"))
    if manifest.parent and (parent / layout.MANIFEST).is_file():
        with suppress(StoreError):  # the ids that the parent's loggers kept are a convenience
            parent_ids = read_remote(parent)
    loggers.number = len(lines.lines) + len(lines.torn)
    standing = [
        Line(n["step"], n["attempt"], n["kind"], 0, {name: n[name] for name in n if name not in NOT_METRICS})
        for n in run.metrics("validation")
        if n["step"] == run.start_step and n["attempt"] < run.attempt
    ]
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
            standing=standing,
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


class Watcher(Protocol):
    """Console of a run. Its methods return at once and never raise."""

    def message(self, text: str) -> None: ...
    def generated(self, done: int, total: int) -> None: ...
    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None: ...
    def validation(self, step: int, summary: Mapping[str, Any], best: bool, metric: str) -> None: ...
    def sample(self, step: int, group: Group) -> None: ...


class SilentWatcher:
    """Console that shows nothing."""

    def message(self, *_: Any, **__: Any) -> None:
        """Show nothing."""

    generated = step = validation = sample = message


@dataclass
class Journal:
    """Record of a training run: its folder, counters, console and loggers.

    Args:
        watcher: the console.
        rollouts: writes the rollouts of each step, and its metrics after them.
        world: the ranks of the run; rank 0 writes.

    Attributes:
        counted_before: (samples, failed rewards) of earlier attempts; they do not count against a repaired reward.
        started: start of this attempt, in seconds of `time.perf_counter`.
        warned: signs in notes of the reward that this attempt has told of: a metric that is not finite, an absent part.
    """

    run: Run
    watcher: Watcher
    progress: Progress
    loggers: Loggers
    rollouts: RolloutWriter
    world: World = ALONE
    health: Health = field(init=False)
    counted_before: tuple[int, int] = field(init=False)
    started: float = field(init=False, default_factory=time.perf_counter)
    warned: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.health = Health(self.run)
        self.counted_before = (self.progress.samples, self.progress.reward_errors)

    @property
    def seconds(self) -> float:
        """Seconds of training over all attempts."""
        return self.progress.seconds + time.perf_counter() - self.started

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step to metrics.jsonl and send them to the loggers.

        Args:
            kind: "train" or "validation".
        """
        if kind == "validation":
            self.health.validation.append({"step": step, **metrics})
        self.rollouts.log(step, kind, metrics)
        self.loggers.log(step, kind, metrics)
        for text in self.loggers.news():
            self.watcher.message(text)


class Health:
    """Health of a run, measured on its metrics so far, those of earlier attempts included.

    Only the rank that writes the run measures it.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._measures = run, run.writable
        self._lines: list[dict[str, Any]] | None = None
        self.validation: list[dict[str, Any]] = []

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the `health/...` metrics of a step."""
        return measure_health(list(samples_of(groups))) if self._measures else {}

    def warn(self, step: int, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Remember the metrics of a step. Return a warning in words as a metric, or {} without one."""
        if not self._measures:
            return {}
        if self._lines is None:
            # First step of this attempt: read what earlier attempts have logged. The validations in the file include
            # those of this attempt.
            self._lines = [_watched(line) for line in self._run.metrics("train")]
            self.validation = [*self._run.metrics("validation")] if self._lines else self.validation
        self._lines.append(_watched({"step": step, **metrics}))
        warning = warning_of(find_signs(self._lines, self.validation))
        return {WARNING: warning} if warning else {}


def samples_of(groups: Sequence[Group]) -> Iterator[Sampled]:
    """Yield the responses of the groups in the form that `measure_health` takes."""
    for number, group in enumerate(groups):
        truth = json.dumps(dict(group.row.truth), sort_keys=True, default=str) if group.row.truth else ""
        for s in group.samples:
            # Well formed: no part of the score with "format" in its name is 0.
            formed = all(value != 0 for name, value in s.score.parts.items() if "format" in name.lower())
            score = s.score.value if s.score.error is None else None
            yield Sampled(
                number,
                group.row.prompt_id,
                truth,
                s.text,
                s.trajectory.num_sampled_tokens,
                is_cut(s.trajectory.finish, s.ending),
                score,
                formed,
            )


def _watched(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a line that the search for signs reads; a long run keeps only these in memory."""
    return {name: value for name, value in line.items() if is_watched(name)}
