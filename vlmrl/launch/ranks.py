"""Start of a run's ranks with torchrun's agent, one process per rank, and the watch over them.

The agent starts the ranks and waits. They meet at a file: no port is opened, so no other user can join or send
anything. The watch is a thread that reads the files that the ranks write (dist/world.py) and asks the kernel which of
them are alive. It forwards signals, ends all ranks if one dies or hangs, and reports that rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from vlmrl.dist.world import (
    FOLDER_VARIABLE,
    HALVED_VARIABLE,
    MEETING_VARIABLE,
    PARENT_VARIABLE,
    STACK_SIGNAL,
    TYPED_FILE,
)
from vlmrl.errors import TRY_AGAIN, LaunchError, format_error
from vlmrl.process import patience, signal_name
from vlmrl.store.lock import process_start
from vlmrl.store.log_pump import LogPump
from vlmrl.untrusted import parse_json, visible

POLL_SECONDS = 0.2
LAST_LINES = 20
"""Maximum number of lines of a rank's output that an error quotes."""
GRACE_SECONDS = 10.0
"""Time limit in seconds until the other ranks are killed after one has died. Until then they may end by themselves and
record the reason."""
STACK_SECONDS = 1.0
"""Time limit in seconds for the ranks to write their stacks before they are killed because one hangs."""
SYSTEM_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that make a rank the cause of a failure: the errors of the other ranks are consequences. SIGABRT does not
belong here: a communication library aborts with it after another rank has died."""

EXPLAINED = (2, TRY_AGAIN)
"""Exit codes of a rank that has recorded a reason which the user can do something about."""


@dataclass(frozen=True)
class Ending:
    """End of a run of several ranks.

    Args:
        code: exit code.
        message: the error to print, formatted; "" = no error.
        reason: the same error in one sentence.
        halved: after a rank ran out of memory, recipe key -> [token budget until now, budget of the next start]
            (dist/world.py).
    """

    code: int
    message: str = ""
    reason: str = ""
    halved: Mapping[str, list[int]] = field(default_factory=dict)


@dataclass
class _Seen:
    """State of one rank.

    Args:
        start: start time of its process, to distinguish it from a later process with the same id; "" = it had already
            ended.
        state: content of its last `beat` file.
        idle: seconds since it last entered a phase. Time in which the machine was suspended does not count.
        signals_sent: number of caught signals that were forwarded to it.
    """

    start: str
    state: dict[str, Any]
    idle: float = 0.0
    signals_sent: int = 0
    dead: bool = False


class Watch(threading.Thread):
    """Thread that watches the ranks of a run, from `start` to `stop`.

    Args:
        timeout_seconds: time limit in seconds for one phase of a rank; a rank that exceeds it hangs.
    """

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.folder, self.timeout_seconds = folder, timeout_seconds
        self.signals: list[int] = []
        self.ranks: dict[int, _Seen] = {}
        self.hang: str | None = None
        self.killed: set[int] = set()
        self._first_death: float | None = None
        self._stopped = threading.Event()
        self._logs = LogPump()

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run; None until a rank has written it."""
        return next((Path(s.state["run"]) for s in self.ranks.values() if s.state["run"]), None)

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Forward Ctrl-C and SIGTERM to the ranks, each once. Before the first rank runs, raise KeyboardInterrupt."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if not self.ranks and not self._read("beat"):  # a rank may be running that the thread has not seen yet
                raise KeyboardInterrupt
            self.signals.append(number)

        before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(POLL_SECONDS):
            now = time.monotonic()
            # Limited: after the machine was suspended or this process was stopped, ranks must not be taken as hanging.
            self._look(min(now - last, 5 * POLL_SECONDS))
            last = now

    def stop(self) -> None:
        """End the watch, and kill the processes that the ranks left running."""
        self._stopped.set()
        self.join()
        self._look(0.0)
        self._take_output()  # again: a short run may have become known only now
        for rank in self.ranks:
            self._signal_group(rank, signal.SIGKILL)
        self._logs.close()

    def ending(self, exit_codes: Mapping[int, int]) -> Ending:
        """Return how the run ended.

        Args:
            exit_codes: failed rank -> its exit code, or minus the number of the signal that killed it.
        """
        ends = self._read("end")
        failed = sorted((w["time"], rank) for rank, w in ends.items() if w["code"] not in (0, 130))
        stopped = any(w["code"] == 130 for w in ends.values()) or not ends
        if self.hang is not None:
            return Ending(2, self.hang, _sentence(self.hang))
        if self.signals and stopped and not any(ends[rank]["code"] in EXPLAINED for _, rank in failed):
            return Ending(130)
        for rank, code in sorted(exit_codes.items()):
            if -code in SYSTEM_SIGNALS and rank not in self.killed and rank not in ends:
                return self._lost(rank, code)
        # If a rank's debugger is quit, the rank ends with code 130 and a reason. The others fail because it has ended.
        quit_debuggers = sorted((w["time"], rank) for rank, w in ends.items() if w["code"] == 130 and w["reason"])
        came_first = bool(quit_debuggers) and not self.signals and (not failed or quit_debuggers[0] < failed[0])
        if came_first and not any(ends[rank]["code"] in EXPLAINED for _, rank in failed):
            return Ending(130, ends[quit_debuggers[0][1]]["message"])
        if failed:
            first = failed[0][1]
            end = ends[first]
            message = self._with_place(end["message"], first)
            return Ending(end["code"], message, end["reason"], end["halved"])
        if any(w["code"] == 130 for w in ends.values()):
            return Ending(130)
        for rank, code in sorted(exit_codes.items()):
            return self._lost(rank, code)
        return Ending(0)

    def _look(self, passed: float) -> None:
        self._take_output()
        for rank, state in self._read("beat").items():
            known = self.ranks.get(rank)
            if known is None:
                start = process_start(state["pid"])
                self.ranks[rank] = _Seen(start or "", state, dead=start is None)
            elif state["ticks"] != known.state["ticks"]:
                known.state, known.idle = state, 0.0
            else:
                known.idle += passed
        for rank, seen in self.ranks.items():
            self._hand_on(seen)
            if not seen.dead and process_start(seen.state["pid"]) != seen.start:
                seen.dead = True
                self._signal_group(rank, signal.SIGKILL)
        self._end_survivors()
        if self.hang is None and any(not s.dead and s.idle > self.timeout_seconds for s in self.ranks.values()):
            self._end_hang()

    def _take_output(self) -> None:
        """Open the pipes of ranks that have begun to print; set their log files once their run is known."""
        for pipe in self.folder.glob("rank-*.out"):
            if pipe.name not in self._logs:
                self._logs.add(pipe.name, os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                pipe.unlink()  # tells the rank that its output is read
        for rank in self.ranks:
            if (log := self._log(rank)) is not None and f"rank-{rank}.out" in self._logs:
                self._logs.write_to(f"rank-{rank}.out", Path(log))

    def _hand_on(self, seen: _Seen) -> None:
        while seen.signals_sent < len(self.signals) and not seen.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(seen.state["pid"], self.signals[seen.signals_sent])
            seen.signals_sent += 1

    def _end_survivors(self) -> None:
        """Kill all ranks GRACE_SECONDS after one failed: a collective may wait forever for a dead rank."""
        ends = self._read("end")
        failed = [r for r, s in self.ranks.items() if s.dead and ends.get(r, {"code": 1})["code"] not in (0, 130)]
        if not failed:
            return
        now = time.monotonic()
        self._first_death = self._first_death or now
        if now - self._first_death > GRACE_SECONDS:
            self._kill_all()

    def _end_hang(self) -> None:
        living = {rank: s for rank, s in self.ranks.items() if not s.dead}
        # All ranks enter the same phases: the others wait for the rank that has entered the fewest.
        behind = min(living, key=lambda rank: (living[rank].state["ticks"], rank))
        state = living[behind].state
        others = ", ".join(f"rank {r} in `{s.state['phase']}`" for r, s in sorted(living.items()) if r != behind)
        self.hang = format_error(
            f"rank {behind} hangs: in phase `{state['phase']}` of step {state['step']} for more than "
            f"{self.timeout_seconds:g} s" + (f" ({others})" if others else ""),
            self._log(behind),
            "the stacks of all ranks are at the end of their logs; if the phase is only slow, raise "
            "parallel.timeout_seconds",
        )
        for rank in living:
            self._signal(rank, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        self._kill_all()

    def _kill_all(self) -> None:
        for rank, seen in self.ranks.items():
            if not seen.dead:
                self.killed.add(rank)
                self._signal_group(rank, signal.SIGKILL)

    def _signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[rank].state["pid"], number)

    def _signal_group(self, rank: int, number: int) -> None:
        """Send a signal to the rank's process group: the rank and the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.ranks[rank].state["pid"], number)

    def _lost(self, rank: int, code: int) -> Ending:
        """Return the end of a run if it was caused by a rank that ended without a recorded reason."""
        message = self._killed_by(rank, -code) if code < 0 else self._left(rank, code)
        return Ending(2, message, _sentence(message))

    def _killed_by(self, rank: int, number: int) -> str:
        name = signal_name(number)
        hint = "the system may have run out of memory: see `dmesg`" if number == signal.SIGKILL else "see its log"
        message = f"rank {rank} was killed by {name} in {self._doing(rank)}{self._printed(rank)}"
        return format_error(message, self._log(rank), hint if self._log(rank) or number == signal.SIGKILL else None)

    def _left(self, rank: int, code: int) -> str:
        message = f"rank {rank} ended with exit code {code} and without an error message{self._printed(rank)}"
        return format_error(message, self._log(rank))

    def _printed(self, rank: int) -> str:
        """Return the last lines that a rank printed; "" if it has a log. Before its run is known, a rank has no log."""
        lines = self._logs.held(f"rank-{rank}.out").splitlines() if self._log(rank) is None else []
        return "".join(f"\n    {visible(line)}" for line in lines[-LAST_LINES:])

    def _doing(self, rank: int) -> str:
        if rank not in self.ranks:
            return "its start-up phase"
        state = self.ranks[rank].state
        return f"phase `{state['phase']}` of step {state['step']}"

    def _with_place(self, message: str, rank: int) -> str:
        log = self._log(rank)
        return f"{message}\n(on rank {rank}{f'; its log: {log}' if log else ''})"

    def _log(self, rank: int) -> str | None:
        seen = self.ranks.get(rank)
        return None if seen is None else seen.state["log"]

    def _read(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return rank -> content of its `beat` or `end` file. A file that is being written is read the next time."""
        states: dict[int, dict[str, Any]] = {}
        for path in self.folder.glob(f"rank-*.{kind}"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                states[int(path.stem.removeprefix("rank-"))] = parse_json(path.read_bytes())
        return states


def _sentence(message: str) -> str:
    """Return the first line of a formatted error, without `error: `."""
    return message.splitlines()[0].removeprefix("error: ")


JOIN_SECONDS = 900
"""Time limit in seconds until all machines have joined the rendezvous."""


@dataclass(frozen=True)
class Job:
    """Processes to start on this machine.

    Args:
        command: arguments of the Python interpreter of each rank.
        ranks: number of processes on this machine.
        nnodes, node_rank: count of machines, and index of this one, from 0 (machine 0 hosts the rendezvous).
        endpoint: `host:port` of the rendezvous of all machines; None for one machine.
        job_id: name of the rendezvous: the same on all machines of a job, so that other jobs' machines do not join it.
        env: environment of the ranks, in addition to this process's.
        timeout_seconds: time limit in seconds of one phase of a rank.
        argv: command line as the user typed it, for the record of the run; () = record the rank's own command line.
    """

    command: tuple[str, ...]
    ranks: int
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    job_id: str = "vlmrl"
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 1800.0
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nnodes > 1 and not self.endpoint:
            raise LaunchError("--nnodes needs --rdzv-endpoint", hint="--rdzv-endpoint HOST:PORT, the same on all nodes")
        if not 0 <= self.node_rank < self.nnodes:
            raise LaunchError(
                f"--node-rank {self.node_rank} does not exist: there are {self.nnodes} nodes",
                hint="nodes are numbered from 0",
            )


def torchrun_line(job: Job) -> str:
    """Return the torchrun command that starts the same ranks without vlmrl's launcher."""
    words = [f"{k}={shlex.quote(v)}" for k, v in job.env.items()] + ["torchrun"]
    if job.nnodes == 1:
        words.append("--standalone")
    else:
        words += [
            f"--nnodes={job.nnodes}",
            f"--node-rank={job.node_rank}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={job.endpoint}",
            f"--rdzv-id={job.job_id}",
        ]
    return " ".join([*words, f"--nproc-per-node={job.ranks}", shlex.join(job.command)])


def launch_twice(job: Job, again: Callable[[Path], Job], say: Callable[[str], None]) -> tuple[Ending, Path | None]:
    """Run `launch`; if a rank ran out of memory, start all ranks once more on the same run with half the token budget.

    All ranks are started again, because the others cannot wait until one rank has resumed. On several machines there is
    no second start: each machine has its own launcher, and the launchers do not communicate.

    Args:
        again: function that takes the run's folder and returns a job that resumes the run.
        say: function that prints a line about the second start.
    """
    ending, run_dir = launch(job)
    if not ending.halved or run_dir is None or job.nnodes > 1:
        return ending, run_dir
    budgets = ", ".join(f"{key} = {now} (was {before})" for key, (before, now) in ending.halved.items())
    say(f"{ending.message}\nstarting all processes once more, with {budgets}")
    env = {**job.env, HALVED_VARIABLE: json.dumps(dict(ending.halved))}
    return launch(replace(again(run_dir), env=env))


def launch(job: Job) -> tuple[Ending, Path | None]:
    """Run the job to its end.

    No rank keeps running: a rank that dies or hangs ends the others (launch/ranks.py), and the kernel ends all of
    them when this process is killed.

    Returns: (how the job ended, folder of the run; None if no rank has named a folder).
    Raises: LaunchError if the machines do not find each other.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import launch_agent

    # Otherwise the agent would print its own report of a failure before vlmrl's error.
    logging.disable(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="vlmrl-launch-"))
    remover = _remover(folder)
    variables = {FOLDER_VARIABLE: str(folder), PARENT_VARIABLE: str(os.getpid())}
    if job.nnodes == 1:
        variables[MEETING_VARIABLE] = str(folder / "ranks")
    os.environ.update({**job.env, **variables})
    if job.argv:  # in a file that only this user can read: it may be long and contain a secret
        (folder / TYPED_FILE).write_text(json.dumps(job.argv), encoding="utf-8")
    watch = Watch(folder, patience(job.timeout_seconds))
    exit_codes: dict[int, int] = {}
    try:
        with watch.catching_signals():
            watch.start()
            try:
                launch_agent(_config(job, folder), sys.executable, list(job.command))
            except ChildFailedError as error:
                exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            except RendezvousError as error:
                where = job.endpoint or "this machine"
                raise LaunchError(f"the nodes did not connect at {where}: {error}", hint="does node 0 run?") from error
            finally:
                watch.stop()
        return watch.ending(exit_codes), watch.run_dir
    finally:
        logging.disable(logging.NOTSET)
        for name in (FOLDER_VARIABLE, PARENT_VARIABLE, HALVED_VARIABLE, MEETING_VARIABLE):
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)
        remover.communicate()


def _remover(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that removes the folder a second after this process has ended, however it ends."""
    script = 'read -r _; [ -d "$1" ] || exit 0; sleep 1; exec rm -rf -- "$1"'
    return subprocess.Popen(["/bin/sh", "-c", script, "sh", str(folder)], stdin=subprocess.PIPE, start_new_session=True)


def _config(job: Job, folder: Path):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    one_machine = job.nnodes == 1
    rendezvous = {"timeout": JOIN_SECONDS, "read_timeout": JOIN_SECONDS, "is_host": str(job.node_rank == 0)}
    return LaunchConfig(
        min_nodes=job.nnodes,
        max_nodes=job.nnodes,
        nproc_per_node=job.ranks,
        max_restarts=0,
        role="rank",
        run_id=uuid.uuid4().hex if one_machine else job.job_id,
        rdzv_backend=BACKEND if one_machine else "c10d",
        rdzv_endpoint=str(folder / "agent") if one_machine else job.endpoint or "",
        rdzv_configs=rendezvous,
        local_addr="127.0.0.1" if one_machine else None,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        # vlmrl's handler forwards SIGINT and SIGTERM, so that ranks finish their step; the agent's would kill them.
        signals_to_handle="SIGQUIT",
    )


BACKEND = "vlmrl-file"


class FileMeeting(RendezvousHandler):
    """Rendezvous of the only agent of a job. Its store is a file in the launcher's folder."""

    def __init__(self, store: Path, run_id: str) -> None:
        self._path, self._run_id = store, run_id

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, FileStore(str(self._path), -1))
        # The ranks meet at a file, too (`dist.world.MEETING_VARIABLE`): nothing listens at this address.
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _meeting(parameters: RendezvousParameters) -> RendezvousHandler:
    return FileMeeting(Path(parameters.endpoint), parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _meeting)
