"""The ranks of a run: the collective operations between them, and the channel to the launcher that started them.

torch is not imported until there is a process group. Each of several ranks is started with RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun's names). On one machine, the ranks of vlmrl's
launcher meet at a file in a folder that only this user can open, gloo and NCCL listen on the loopback interface alone,
and torch's object collectives, those of its checkpoints too, unpickle only what is signed with a key from that folder.
On several machines nothing is signed: see OPEN_PORTS.

A rank ends when its launcher ends. They communicate through small files in one folder (`VLMRL_LAUNCH_DIR`), which
launch/ranks.py reads:

    rank-0.beat     JSON: pid, phase, step, ticks (number of phases entered), run folder, log
    rank-0.out      pipe (FIFO) with all the rank's output; the launcher writes it to the run's logs, secrets hidden
    rank-0.end      JSON: exit code, message, reason, time, budgets of a second start; missing if it was killed

In a process that no launcher started, the functions for this channel do nothing.
"""

from __future__ import annotations

import atexit
import bdb
import contextlib
import faulthandler
import fcntl
import hmac
import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar, cast

from vlmrl.errors import LaunchError, OutOfMemoryError, Problem, exit_of, reason_of
from vlmrl.process import DEBUG_RANK, die_with_parent, has_terminal, lasting, leave
from vlmrl.redaction.redact import redact_text
from vlmrl.store import layout
from vlmrl.untrusted import visible

T = TypeVar("T")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with the network interface that gloo listens on. By default it is the one of the machine's name."""
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
MEETING_VARIABLE = "VLMRL_MEETING"
"""Variable with the file at which the ranks of one machine meet. It lies in a folder that only this user can open."""

OPEN_PORTS = Problem(
    "on several machines the rendezvous (`--rdzv-endpoint`) and the ports of gloo and NCCL accept anyone who reaches "
    "them, and whoever reaches them can run code as you",
    hint="let a firewall admit only the machines of the job: all TCP ports between them, none from elsewhere",
    level="warning",
)
"""Warning of a run on several machines: what must be firewalled."""

SILENT_SECONDS = 3.0
KEY_FILE, SIGNATURE_BYTES = "key", 32


@dataclass(frozen=True)
class World:
    """All ranks of a run, with the rank of this process. Every method must be called by all ranks.

    Args:
        rank: 0 <= rank < size; rank 0 prints and writes.
        local_rank, local_size: rank on this machine, and number of ranks on it.
        group: torch's process group for the operations; None = the default group of all ranks.
        store: torch's store of small values, which all ranks read and write at any time; None = there is none. It is
            a file, or a server on rank 0. Its counters (`add`) are for work that is not the same on all ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: Any = field(default=None, compare=False, repr=False)
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """Return the values of all ranks, in order of rank. For small values: numbers, ids, names."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, mine, group=self.group)
        return values  # type: ignore[return-value]  # all entries are filled

    def gather_to_main(self, mine: T) -> list[T]:
        """Return the values of all ranks, in order of rank, on rank 0, and [] on the others. For values of any size."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        values: list[Any] = [None] * (self.size if self.is_main else 0)
        dist.gather_object(mine, values or None, dst=0, group=self.group)
        return values

    def hand_out(self, of_ranks: Sequence[T]) -> T:
        """Return this rank's item of rank 0's list, which has one per rank. For values of any size."""
        if self.size == 1:
            return of_ranks[0]
        import torch.distributed as dist

        received: list[Any] = [None]
        dist.scatter_object_list(received, list(of_ranks) if self.is_main else None, src=0, group=self.group)
        return received[0]

    def from_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on all ranks. If it raises, the other ranks fail too."""
        return self.gather(make() if self.is_main else None)[0]  # type: ignore[return-value]  # rank 0 returns a T

    def wait(self) -> None:
        """Return when all ranks have called this."""
        self.gather(None)

    def apart(self) -> World:
        """Return the same ranks with a second group (gloo), for communication by a thread beside the main thread."""
        if self.size == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo"))

    def mine(self, count: int) -> range:
        """Return the indices of this rank's items among `count` items: every size-th index, beginning with its rank."""
        return range(self.rank, count, self.size)

    def interleave(self, own: Sequence[T]) -> list[T]:
        """Return the items of all ranks in the order of their indices. `own`: items of this rank, as in `mine`."""
        values = self.gather(list(own))
        return [values[i % self.size][i // self.size] for i in range(sum(map(len, values)))]


ALONE = World()


def is_main_process() -> bool:
    """Return whether this process is rank 0, according to its environment. This works before `join_world` too."""
    return int(os.environ.get("RANK", "0")) == 0


LAST_SECONDS = 0.1
"""Time in seconds that a rank waits after its last collective operation.

A thread of gloo lets go of the operation's tensors a moment after it is complete. If the interpreter ends before, that
thread aborts the process (`terminate called without an active exception`): on a busy machine one of 64 ranks that ended
at once, and none of 128 that waited.
"""


@contextmanager
def join_world(device: str, timeout_seconds: float = 1800.0) -> Iterator[World]:
    """Context manager: join the process group of all ranks, with the rank that the environment gives this process.

    Args:
        device: "cpu" (gloo), "cuda" (NCCL, with gloo for tensors in main memory), or "auto".
        timeout_seconds: time in seconds that a rank waits for the others before it fails with an error.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore, PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=timeout_seconds)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    meeting = os.environ.pop(MEETING_VARIABLE, None)
    if meeting is not None:
        store: Any = FileStore(meeting, size)
    else:
        store = _met(lambda: next(rendezvous("env://", rank, size, timeout=timeout))[0], rank, size)
    store.set_timeout(timeout)
    own_store = PrefixStore("vlmrl", store)
    if local_size == size:
        os.environ[GLOO_INTERFACE] = os.environ[NCCL_INTERFACE] = _loopback()
        _sign_objects(_shared_key(own_store, rank, meeting))
    world = World(rank, size, int(os.environ.get("LOCAL_RANK", rank)), local_size, store=own_store)
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group(
        _backend(device), store=PrefixStore("default_pg", store), rank=rank, world_size=size, timeout=timeout
    )
    yield world
    # Not after an error: the other ranks would fail before this rank has reported its own error.
    dist.destroy_process_group()
    time.sleep(LAST_SECONDS)


@contextmanager
def group_of_one(device: str) -> Iterator[None]:
    """Context manager: torch's process group of this process alone, which FSDP2 needs. No effect if there is a group.

    No other machine can reach it: its store is in this process, and gloo listens on the loopback interface only.

    Args:
        device: as in `join_world`.
    """
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    if dist.is_initialized():
        yield
        return
    configured = os.environ.get(GLOO_INTERFACE)
    os.environ[GLOO_INTERFACE] = _loopback()
    try:
        dist.init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
    finally:
        del os.environ[GLOO_INTERFACE]
        if configured is not None:
            os.environ[GLOO_INTERFACE] = configured
    try:
        yield
    finally:
        dist.destroy_process_group()


def _met(meet: Callable[[], T], rank: int, size: int) -> T:
    """Return what `meet` returns, and stay interruptible: torch waits for the other ranks in C++.

    After a few seconds the ranks that are waited for are named: the variables may be left over from another program.
    """
    results: list[T] = []
    failures: list[Exception] = []

    def wait() -> None:
        try:
            results.append(meet())
        except Exception as error:  # raised below, in the main thread
            failures.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(SILENT_SECONDS)
    if thread.is_alive():
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(
            f"rank {rank} waits at {where} for {size - 1} more processes, since the environment has WORLD_SIZE={size}\n"
            "if no program has started them: stop this one (Ctrl-C), `unset WORLD_SIZE RANK`; several GPUs: --gpus N",
            file=stderr(),
            flush=True,
        )
    while thread.is_alive():
        thread.join(0.2)
    if failures:
        raise failures[0]
    return results[0]


def _loopback() -> str:
    """Return the name of the loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _shared_key(store: Any, rank: int, meeting: str | None) -> bytes:
    """Return the key of the ranks, from a file that only this user can read.

    Rank 0 makes it: in the launcher's folder, or in a new one under torchrun.

    Raises: OSError if the file is open to other users.
    """
    if rank == 0:
        folder = Path(meeting).parent if meeting is not None else Path(tempfile.mkdtemp(prefix="vlmrl-key-"))
        if meeting is None:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / KEY_FILE).write_bytes(secrets.token_bytes(SIGNATURE_BYTES))
        store.set("key", str(folder / KEY_FILE))
    path = Path(store.get("key").decode())
    facts = path.parent.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise OSError(f"{path.parent} is open to other users")
    return path.read_bytes()


def _sign_objects(key: bytes) -> None:
    """Make torch's object collectives sign what they send, and refuse to unpickle what is not signed with the key."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    pack, unpack = c10d._object_to_tensor, c10d._tensor_to_object

    def signature(content: bytes) -> bytes:
        return hmac.digest(key, content, "sha256")

    def signed(value: Any, device: Any, *more: Any) -> tuple[Any, Any]:
        tensor, size = pack(value, device, *more)
        mark = torch.frombuffer(bytearray(signature(tensor.cpu().numpy().tobytes())), dtype=torch.uint8)
        return torch.cat([mark.to(tensor.device), tensor]), size + SIGNATURE_BYTES

    def verified(tensor: Any, size: Any, *more: Any) -> Any:
        content = tensor.cpu().numpy().tobytes()[: int(size)]
        if not hmac.compare_digest(content[:SIGNATURE_BYTES], signature(content[SIGNATURE_BYTES:])):
            raise RuntimeError("a message between the ranks is not signed: it comes from another program")
        return unpack(tensor[SIGNATURE_BYTES:], int(size) - SIGNATURE_BYTES, *more)

    c10d._object_to_tensor, c10d._tensor_to_object = signed, verified  # pyright: ignore[reportAttributeAccessIssue]


def _backend(device: str) -> str:
    """Return the name of torch's backends for a device, as `join_world` gets it."""
    import torch

    return "cpu:gloo,cuda:nccl" if device != "cpu" and torch.cuda.is_available() else "gloo"


FOLDER_VARIABLE = "VLMRL_LAUNCH_DIR"
PARENT_VARIABLE = "VLMRL_LAUNCHER_PID"
ENGINES_VARIABLE = "VLMRL_ENGINE_CARDS"
"""Variable with the GPUs of engines that have their own processes: CUDA's numbers; on a CPU, one word per engine."""
HALVED_VARIABLE = "VLMRL_HALVED"
CHOICES_VARIABLE = "VLMRL_CHOICES"
SHARED_VARIABLE = "VLMRL_SHARED_ROWS"
"""Variable with what the launcher of an evaluation has seen of training's rows: JSON, (role, shared) of each source."""
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
        self.terminal, self.log = terminal, log

    def write(self, text: str) -> int:
        line = text.rpartition("\r")[2]  # lines that are overwritten, such as counters, are not logged
        if line == text or line.endswith("\n"):
            self.log.write(line)
        return self.terminal.write(text)

    def flush(self) -> None:
        self.log.flush()
        self.terminal.flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()

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


def print_line(text: str, stream: TextIO, before: str = "", after: str = "") -> None:
    """Print a line. On a terminal it is broken between words; a pipe and the log have it whole.

    Args:
        before, after: control codes of the terminal.
    """
    terminal = stream.terminal if isinstance(stream, _Both) else stream
    if isinstance(stream, _Both):
        stream.log.write(f"{text}\n")
    if terminal.isatty():
        with contextlib.suppress(OSError, AttributeError):  # a stream without a file
            text = wrapped(text, os.get_terminal_size(terminal.fileno()).columns or sys.maxsize)  # 0 = not known
    terminal.write(f"{before}{text}{after}\n")
    stream.flush()


def wrapped(text: str, columns: int) -> str:
    """Return a text whose long lines are broken between words. A command of vlmrl stays on one line, to be copied.

    The text behind a short label and two spaces is continued below itself.
    """
    whole = re.sub(r"vlmrl [^;,`)\n]+", lambda command: command[0].replace(" ", "\0"), text)
    lines: list[str] = []
    for line in whole.split("\n"):
        label = re.match(r" *(?:\S.{0,13}? {2,})?", line)
        indent = min(label.end() if label else 0, columns // 3)
        lines += textwrap.wrap(
            line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines).replace("\0", " ")


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

    Returns: {"key", "value", "reason"} each (recipe/auto_values.py).
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
