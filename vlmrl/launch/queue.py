"""Queue of runs over seeds and a grid of recipe keys.

The queue stores no state: it reads the folders of the runs. The name of a member is derived from the recipe and the
member's values, and all members share a tag. So if the same command is given again after a kill, it skips the members
whose run is done, resumes those whose run was interrupted, and starts the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from vlmrl.errors import LaunchError
from vlmrl.launch.gpu_assignment import Placement
from vlmrl.process import die_with_parent
from vlmrl.store import layout
from vlmrl.store.listing import ListedRun, list_runs
from vlmrl.store.log_pump import LogPump
from vlmrl.store.provenance import usable_threads

POLL_SECONDS = 0.2
LOG_SECONDS = 5.0
"""Time limit in seconds for the rest of a command's output after the command has ended."""
MOST_MEMBERS = 1000
"""Maximum number of runs of a queue."""


@dataclass(frozen=True)
class Member:
    """One run of the queue. `values`: (key, value as typed) pairs, including the seed (`train.seed`)."""

    name: str
    values: tuple[tuple[str, str], ...]

    @property
    def overrides(self) -> list[str]:
        """`--set` options for the values, as words of a command line."""
        return [word for key, value in self.values for word in ("--set", f"{key}={value}")]


@dataclass(frozen=True)
class Slot:
    """GPUs or CPU threads for one run at a time. `env`: environment variables of the run's command."""

    env: Mapping[str, str]


@dataclass
class Queue:
    """Runs of a group.

    Args:
        command: words that start `vlmrl train` or `vlmrl sft`.
        recipe: words of a new run: the recipe file and the overrides common to all members.
        options: words of every run, new or resumed (`--gpus`, `--runs`).
        members: the runs, in the order in which they start.
        slots: places that run one member at a time each.
        root: folder of the runs.
        group: tag of the runs.
        say: function that prints a line.
        signals: numbers of the signals caught so far; each is forwarded once to every running command.
        logs: writes the commands' output to log files.
    """

    command: Sequence[str]
    recipe: Sequence[str]
    options: Sequence[str]
    members: Sequence[Member]
    slots: Sequence[Slot]
    root: Path
    group: str
    say: Callable[[str], None]
    signals: list[int] = field(default_factory=list)
    logs: LogPump = field(default_factory=LogPump, repr=False)

    def found(self) -> dict[str, ListedRun]:
        """Return member -> its newest run, for the members that have one."""
        runs = {run.name: run for run in reversed(list_runs(self.root, tag=self.group)) if run.name}
        return {m.name: runs[m.name] for m in self.members if m.name in runs}

    def run(self) -> int:
        """Run the members that are not done.

        Returns: 0 if all are done at the end, 130 if a signal stopped the queue, else 2.
        """
        runs = self.found()
        done = {name for name, run in runs.items() if run.status == "done"}
        waiting = [m for m in self.members if m.name not in done]
        if done:
            self.say(f"{len(done)} of {len(self.members)} runs are already done")
        free, running, failed = list(self.slots), dict[str, tuple[subprocess.Popen[bytes], Slot, int]](), False
        with self._catching_signals():
            while running or (waiting and not self.signals):
                while waiting and free and not self.signals:
                    member, slot = waiting.pop(0), free.pop(0)
                    running[member.name] = (self._start(member, slot, runs.get(member.name)), slot, 0)
                time.sleep(POLL_SECONDS)
                for name, (process, slot, num_sent) in list(running.items()):
                    for number in self.signals[num_sent:]:
                        process.send_signal(number)
                    running[name] = (process, slot, len(self.signals))
                    if (code := process.poll()) is not None:
                        del running[name]
                        free.append(slot)
                        failed |= code not in (0, 130)
                        self._tell(name, code)
        self.logs.close()
        if self.signals:
            return 130
        return 2 if failed or len(done | self._done()) < len(self.members) else 0

    def _done(self) -> set[str]:
        return {name for name, run in self.found().items() if run.status == "done"}

    def _start(self, member: Member, slot: Slot, before: ListedRun | None) -> subprocess.Popen[bytes]:
        if before is None:
            words = [*self.recipe, *member.overrides, "--name", member.name, "--tag", self.group]
        else:
            words = ["--resume", before.id]
        log = layout.queue_log(self.root, self.group, member.name)
        self.say(f"{'starting' if before is None else 'resuming'} {member.name}")
        reads, writes = os.pipe()
        self.logs.add(member.name, reads, log)
        with open(writes, "wb") as pipe:
            # A new session: the command gets Ctrl-C only once, forwarded by us. If this process dies, the command dies.
            return subprocess.Popen(
                [*self.command, *words, *self.options],
                env={**os.environ, **slot.env},
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def _tell(self, name: str, code: int) -> None:
        self.logs.wait(name, LOG_SECONDS)
        if code in (0, 130):
            self.say(f"{name}: {'done' if code == 0 else 'interrupted; a checkpoint was saved'}")
            return
        log = layout.queue_log(self.root, self.group, name)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        errors = [line for line in lines if line.startswith("error: ")]
        self.say(f"{name}: failed: {errors[-1].removeprefix('error: ') if errors else f'exit code {code}'}; log: {log}")

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {s: signal.signal(s, lambda number, _: self.signals.append(number)) for s in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def plan_members(stem: str, identity: str, seeds: str | None, grid: Sequence[str]) -> list[Member]:
    """Return the members of a queue: for each point of the grid, one member per seed, in this order.

    Args:
        stem: first part of every name.
        identity: text that identifies recipe and overrides; names contain its hash.
        seeds: `1,2,3`; None = the recipe's seed.
        grid: `key=value,value`, one text per key.
    Raises: LaunchError for text that cannot be parsed, a key or value given twice, or more than 1000 members.
    """
    axes = [_axis(text) for text in grid]
    if seeds is not None:
        key, values = _axis(f"train.seed={seeds}")
        if not all(v.isascii() and v.isdigit() for v in values):
            raise LaunchError(f"--seeds cannot be `{seeds}`", hint="whole numbers: --seeds 1,2,3")
        axes.append((key, values))
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise LaunchError(f"a key is given twice: {', '.join(keys)}", hint="give all its values in one --grid")
    points = list(itertools.islice(itertools.product(*(values for _, values in axes)), MOST_MEMBERS + 1))
    if len(points) > MOST_MEMBERS:
        raise LaunchError(f"the queue would have more than {MOST_MEMBERS} runs")
    return [_member(stem, identity, tuple(zip(keys, point, strict=True))) for point in points]


def make_slots(placement: Placement, per_run: int) -> list[Slot]:
    """Return slots of `per_run` ranks each, with GPUs or CPU threads of the placement.

    GPUs that are left over remain unused.

    Raises: LaunchError if there are too few GPUs for one slot.
    """
    count = placement.ranks // per_run
    if count == 0:
        raise LaunchError(
            f"--gpus-per-run {per_run} needs more than the {placement.ranks} GPU(s) of --gpus",
            hint="give a larger --gpus or a smaller --gpus-per-run",
        )
    if placement.devices is None:
        return [Slot({"OMP_NUM_THREADS": str(max(1, usable_threads() // count))})] * count
    names = placement.devices.split(",")
    order = {"CUDA_DEVICE_ORDER": placement.env["CUDA_DEVICE_ORDER"]}
    gpu_lists = [",".join(names[n * per_run : (n + 1) * per_run]) for n in range(count)]
    return [Slot({"CUDA_VISIBLE_DEVICES": gpus, **order}) for gpus in gpu_lists]


def group_of(stem: str, identity: str) -> str:
    """Return the default tag of a recipe's queue."""
    return f"{stem}-{_short_hash(identity)}"


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    choices = split_values(values)
    if not equals or not key.strip() or not choices or not all(choices):
        raise LaunchError(f"--grid cannot be `{text}`", hint="--grid optim.lr=1e-6,3e-6")
    if len(set(choices)) < len(choices):
        raise LaunchError(f"a value of `{key}` is given twice: {values}")
    return key.strip(), choices


def split_values(text: str) -> list[str]:
    """Split at commas, but not within brackets or quotes: a value may be a TOML list or string."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "[{":
            depth += 1
        elif c in "]}":
            depth -= 1
        if c == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += c
    return [value.strip() for value in parts]


def _member(stem: str, identity: str, values: tuple[tuple[str, str], ...]) -> Member:
    settings = "-".join(f"{key.rpartition('.')[2]}{value}" for key, value in values)
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{stem}-{settings}")[:70].strip("._-")
    return Member(f"{readable}-{_short_hash(identity + repr(sorted(values)))}", values)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
