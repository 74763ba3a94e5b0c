"""Communication of a rank with the launcher that started it: its log, its phase, and its end.

A rank ends when its launcher ends. They communicate through small files in one folder (`VLMRL_LAUNCH_DIR`), which
launch/rank_watch.py reads:

    rank-0.beat     JSON: pid, phase, step, ticks (number of phases entered), run folder, log
    rank-0.out      pipe (FIFO) with all the rank's output; the launcher writes it to the run's logs, secrets hidden
    rank-0.end      JSON: exit code, message, reason, time, budgets of a second start; missing if it was killed

In a process that no launcher started, every function here does nothing. No torch.
"""

from __future__ import annotations

import bdb
import contextlib
import faulthandler
import fcntl
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from vlmrl.errors import LaunchError, OutOfMemoryError, exit_of, reason_of
from vlmrl.process import DEBUG_RANK, die_with_parent, has_terminal, lasting, leave
from vlmrl.redaction.redact import redact_text
from vlmrl.store import layout
from vlmrl.visible import visible

FOLDER_VARIABLE = "VLMRL_LAUNCH_DIR"
PARENT_VARIABLE = "VLMRL_LAUNCHER_PID"
ENGINES_VARIABLE = "VLMRL_ENGINE_CARDS"
"""Variable with the GPUs of engines that have their own processes: CUDA's numbers; on a CPU, one word per engine."""
HALVED_VARIABLE = "VLMRL_HALVED"
CHOICES_VARIABLE = "VLMRL_CHOICES"
TYPED_FILE = "typed.json"
"""File with a JSON list: the command line of the launcher. Commands of ranks do not have the launcher's options."""
OPEN_SECONDS = 3.0
"""Longest time in seconds that a rank waits at its end until the launcher reads its output."""
BEAT_BYTES = 4096
PIPE_BYTES = 1 << 20
"""Size of the pipe's buffer in bytes. While the launcher is stopped (Ctrl-Z), a rank can print this much."""
STACK_SIGNAL = signal.SIGUSR2
"""Signal at which a rank writes the stacks of its threads to its log, even if it hangs."""


class _Both(io.TextIOBase):
    """Text stream that writes to the terminal and to the log. `isatty` is the terminal's."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal, self._log = terminal, log

    def write(self, text: str) -> int:
        line = text.rpartition("\r")[2]  # lines that are overwritten, such as counters, are not logged
        if line == text or line.endswith("\n"):
            self._log.write(line)
        return self._terminal.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._terminal.flush()

    def isatty(self) -> bool:
        return self._terminal.isatty()

    def fileno(self) -> int:
        return self._terminal.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"


class Rank:
    """This process as a rank of its launcher. Created by `begin`.

    Attributes:
        terminal: whether the rank writes to the terminal. Only rank 0 does, or the rank that is debugged.
        debugged: whether the rank is debugged: its input and output are not redirected.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.debugged = folder, rank, has_terminal()
        self.terminal = self.debugged or (rank == 0 and DEBUG_RANK not in os.environ)
        self.voices: dict[str, TextIO] = {}
        self._state: dict[str, Any] = {
            "rank": rank,
            "pid": os.getpid(),
            "phase": "start",
            "step": 0,
            "ticks": 0,
            "run": None,
            "log": None,
        }
        self._beat = os.open(folder / f"rank-{rank}.beat", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.note()

    def note(self, **changes: Any) -> None:
        """Write the rank's state with these changes, as a sign of life. It is one write of a few microseconds."""
        self._state |= changes
        self._state["ticks"] += 1
        os.pwrite(self._beat, json.dumps(self._state).encode().ljust(BEAT_BYTES), 0)

    def take_output(self) -> None:
        """Send everything that is written to stdout and stderr, by any library in C or Python, to the log.

        vlmrl's own output on rank 0 goes to terminal and log (`stdout`, `stderr` of this module). So progress bars and
        warnings of libraries do not appear between its lines. No rank reads from the terminal, except the rank that is
        debugged, which keeps all of its streams.
        """
        if self.debugged:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        terminals = [os.dup(1), os.dup(2)]
        self._send_to_pipe()
        sys.stdout, sys.stderr = (
            lasting(1),
            lasting(2),
        )  # new streams, because a stream that was opened for a file fails on a pipe
        for name, log, fd in zip(("stdout", "stderr"), (sys.stdout, sys.stderr), terminals, strict=True):
            if self.terminal:
                self.voices[name] = cast(TextIO, _Both(lasting(fd), log))
            else:
                os.close(fd)

    def end(self, code: int, message: str, reason: str = "", halved: Mapping[str, list[int]] | None = None) -> None:
        """Write the end of the rank: exit code, printed message, and the reason in one sentence.

        Args:
            halved: token budgets with which all ranks may be started again.
        """
        record = {"code": code, "message": message, "reason": reason, "time": time.time(), "halved": dict(halved or {})}
        content = json.dumps(record)
        temp = self.folder / f".rank-{self.rank}.end"
        temp.write_text(content)
        os.replace(temp, self.folder / f"rank-{self.rank}.end")
        self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        """Wait until the launcher has opened the pipe, at most OPEN_SECONDS: what an unopened pipe holds is lost."""
        end = time.monotonic() + OPEN_SECONDS
        while (self.folder / f"rank-{self.rank}.out").exists() and time.monotonic() < end:
            time.sleep(0.01)

    def _send_to_pipe(self) -> None:
        """Redirect stdout and stderr to a new pipe, and give the pipe its final name when it can be read.

        The launcher opens the pipe and removes its name. No process waits for that until it ends.
        """
        temp, pipe = (self.folder / f"{prefix}rank-{self.rank}.out" for prefix in (".", ""))
        os.mkfifo(temp, 0o600)
        handle = os.open(temp, os.O_RDWR | os.O_CLOEXEC)
        with contextlib.suppress(OSError, AttributeError):  # only Linux can enlarge a pipe
            fcntl.fcntl(handle, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
        os.replace(temp, pipe)


_me: Rank | None = None
_typed_words: list[str] = []
_doing: tuple[str, int] = ("start", 0)


def launched() -> bool:
    """Return whether one of vlmrl's launchers started this process as one rank of several."""
    return _me is not None or FOLDER_VARIABLE in os.environ


def stdout() -> TextIO:
    """Return the stream for output that programs read: on a rank, the terminal of rank 0 and the log."""
    return _voice("stdout")


def stderr() -> TextIO:
    """Return the stream for messages to people: on a rank, the terminal of rank 0 and the log."""
    return _voice("stderr")


def _voice(name: str) -> TextIO:
    return getattr(sys, name) if _me is None else _me.voices.get(name) or getattr(sys, name)


def phase(name: str, step: int | None = None) -> None:
    """Record the present phase of this process, for messages of timeouts and errors.

    Args:
        step: the new step; None = the step has not changed.
    """
    global _doing
    _doing = name, _doing[1] if step is None else step
    if _me is not None:
        _me.note(phase=name, **({} if step is None else {"step": step}))


def doing() -> str:
    """Describe the present phase of this process. Example: ``phase `update` of step 12 on rank 0``."""
    return f"phase `{_doing[0]}` of step {_doing[1]} on rank {os.environ.get('RANK', '0')}"


def join_run(run_dir: Path, attempt: int) -> None:
    """Tell the launcher which run this rank belongs to. The run's folder then has its log, with all output so far."""
    if _me is not None:
        _me.note(run=str(run_dir), log=str(layout.log_path(run_dir, attempt, _me.rank)))


def join_evaluation(run_dir: Path, name: str) -> None:
    """Tell the launcher which evaluation this rank belongs to. Its log is then beside those of the run's attempts."""
    if _me is not None:
        _me.note(run=str(run_dir), log=str(layout.eval_log_path(run_dir, name, f"rank-{_me.rank}")))


def halved() -> dict[str, list[int]]:
    """Return the lower token budgets of a second start after memory ran out; {} if this is no second start.

    Returns: recipe key -> [its value in the recipe, its value now].
    """
    return json.loads(os.environ.get(HALVED_VARIABLE, "{}"))


def choices() -> list[dict[str, Any]]:
    """Return the launcher's choices for keys that the recipe leaves open; [] when no launcher started this process.

    Returns: {"key", "value", "reason"} each (recipe/settle.py).
    """
    return json.loads(os.environ.get(CHOICES_VARIABLE, "[]")) if launched() else []


def recorded_command(own_words: Sequence[str]) -> list[str]:
    """Return the command line as the user typed it, for the record of a run.

    Args:
        own_words: words after `vlmrl` in this process's command line; used if no launcher started it.
    """
    return list(_typed_words) or ["vlmrl", *own_words]


def run(program: Callable[[], object]) -> NoReturn:
    """Run a rank's program and record how it ended. Errors go to the log here; the launcher prints them.

    A clean interruption (SystemExit 130: the step was finished, the state saved) ends with exit code 0, so that
    torchrun's agent lets the other ranks finish theirs.
    """
    rank = begin()
    code, message = 0, ""
    try:
        program()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        message = "" if isinstance(exit_.code, (int, type(None))) else str(exit_.code)
        rank.end(code, message)
        leave(0 if code == 130 else code)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, bdb.BdbQuit) and not rank.debugged:
            hint = f"--debug-rank {rank.rank} gives it the terminal"
            error = LaunchError(f"breakpoint() on rank {rank.rank}, which has no terminal", hint=hint)
        code, message = exit_of(error)
        message = redact_text(message)  # the message may quote errors or output of the user's code
        # Written before it is printed: the order of these files tells which rank failed first.
        rank.end(
            code, message, redact_text(reason_of(error)), error.halved if isinstance(error, OutOfMemoryError) else None
        )
        print(visible(message), file=sys.stderr, flush=True)
        leave(code)
    rank.end(code, message)
    leave(0)


def begin() -> Rank:
    """Make this process a rank of its launcher. Remove `VLMRL_LAUNCH_DIR`, so that its children do not become ranks."""
    global _me
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    folder = Path(os.environ.pop(FOLDER_VARIABLE))
    if (typed := folder / TYPED_FILE).is_file():
        _typed_words[:] = json.loads(typed.read_text(encoding="utf-8"))
    _me = Rank(folder, int(os.environ["RANK"]))
    _me.take_output()
    if DEBUG_RANK in os.environ and not _me.debugged:
        os.environ["PYTHONBREAKPOINT"] = "0"  # breakpoints are ignored in ranks without the terminal
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return _me
