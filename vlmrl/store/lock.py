"""Lock of a run: two processes never write one run, and a dead owner is recognised.

The owner is the process that writes the run. `run.lock` describes it in JSON, and the owner holds an advisory file lock
on this file. On the same machine, the file lock shows whether the owner is alive, or else its process id and start
time: the system may have given the process id to a new process, but that has another start time. After a reboot, the
boot id differs. An owner on another machine cannot be checked, and is treated as alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.layout import ago, now
from vlmrl.untrusted import parse_json, read_regular

try:
    import fcntl
except ImportError:  # some platforms lack fcntl: there, only process ids are compared
    fcntl = None

State = Literal["alive", "dead", "elsewhere"]
ROOM = 1 << 16
"""Size in bytes to which a lock file is filled with spaces: more than a manifest has."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Process that writes a run. `process_start`: its start in clock ticks since boot; "" if it is not known."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_start: str
    since: str


def this_process() -> Owner:
    return Owner(
        host=socket.gethostname(),
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()) or "",
        since=now(),
    )


def owner_state(owner: Owner) -> State:
    """Return the state of an owner. "dead" is returned only if it is certain."""
    here = this_process()
    if owner.boot_id != here.boot_id or not here.boot_id:
        if owner.host != here.host:
            return "elsewhere"
        if owner.boot_id != here.boot_id:
            return "dead"
    if owner.pid_namespace != here.pid_namespace:
        return "elsewhere"
    start = process_start(owner.pid)
    return "alive" if start is not None and start == owner.process_start else "dead"


def read_owner(run_dir: Path) -> Owner | None:
    """Return the owner from the run's lock file; None if there is no lock file, or a kill left it incomplete."""
    from pydantic import TypeAdapter  # importing it is slow, and few commands read a lock

    try:
        value = parse_json(read_regular(run_dir / layout.LOCK))
        return TypeAdapter(Owner).validate_python(value)
    except (OSError, ValueError):
        return None


def force_release(run_dir: Path) -> Owner | None:
    """Remove the lock of an owner whose state is unknown. Return the owner; None if there was no lock.

    Raises: StoreError if the owner is alive on this machine. The user should stop that process instead.
    """
    owner = read_owner(run_dir)
    if owner is not None and owner_state(owner) == "alive":
        message = f"process {owner.pid} on this machine is running and writes this run"
        raise StoreError(message, where=str(run_dir), hint="stop it first; nothing was changed")
    with contextlib.suppress(FileNotFoundError):
        (run_dir / layout.LOCK).unlink()
    return owner


class RunLock:
    """Right to write a run, from `acquire` to `release` or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / layout.LOCK
        self.run_dir = run_dir
        self._handle: int | None = None

    def acquire(self) -> None:
        """Lock the run for this process.

        Raises: StoreError that names the owner if the owner is alive or its state is unknown.
        """
        for _ in range(20):
            handle = self._open()
            exclusive = try_flock(handle)
            if not is_current(handle, self.path):
                os.close(handle)
                continue
            owner = read_owner(self.run_dir)
            if owner is not None and (state := owner_state(owner)) != "dead":
                # The kernel granted the file lock, and the owner was on this machine: so the owner no longer runs, even
                # if its process id cannot be checked from here (as from another container).
                freed = (
                    exclusive
                    and state == "elsewhere"
                    and owner.boot_id == _read("/proc/sys/kernel/random/boot_id") != ""
                )
                if not freed:
                    os.close(handle)
                    raise self._owner_error(owner, state)
            elif not exclusive and owner is None:
                os.close(handle)
                raise StoreError(
                    "this run is being opened by another process", where=str(self.run_dir), hint="try again"
                )
            if exclusive:
                self._claim(handle)
                return
            # The owner is dead, but a child of it still holds the file: remove the file and try again with a new one.
            os.close(handle)
            with contextlib.suppress(FileNotFoundError):
                aside = self.path.with_name(f".tmp-{layout.LOCK}-{secrets.token_hex(3)}")
                os.replace(self.path, aside)
                aside.unlink()
        raise StoreError(
            "cannot lock this run: other processes lock it again and again", where=str(self.run_dir), hint="try again"
        )

    def refuse_living(self) -> None:
        """Raise the StoreError of `acquire` if a living process of this machine writes the run. Nothing is locked."""
        owner = read_owner(self.run_dir)
        if owner is not None and (state := owner_state(owner)) == "alive":
            raise self._owner_error(owner, state)

    def moved(self, run_dir: Path) -> None:
        """Update the paths after the run folder was renamed. The file lock moves with the file."""
        self.run_dir, self.path = run_dir, run_dir / layout.LOCK

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._handle is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if is_current(self._handle, self.path):
                self.path.unlink()
        os.close(self._handle)
        self._handle = None

    def give_room(self) -> None:
        """Give back the room on the disk that the file keeps, so that the end can be recorded on a full one."""
        if self._handle is not None:
            os.ftruncate(self._handle, len(os.pread(self._handle, ROOM, 0).rstrip()))

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot lock this run: {error.strerror}", where=str(self.path)) from error

    def _claim(self, handle: int) -> None:
        content = json.dumps(asdict(this_process()), indent=1).encode().ljust(ROOM) + b"\n"
        os.ftruncate(handle, 0)
        os.pwrite(handle, content, 0)
        os.fsync(handle)
        self._handle = handle

    def _owner_error(self, owner: Owner, state: State) -> StoreError:
        place = f"process {owner.pid} on {owner.host}"
        if state == "alive":
            message = f"run {self.run_dir.name} is being written by {place}, for {ago(owner.since)}"
            hint = "wait for it to end, or stop it with Ctrl-C; two processes never write one run"
        else:
            message = (
                f"run {self.run_dir.name} was taken {ago(owner.since)} ago by {place}, which cannot be seen from here"
            )
            hint = f"if that process has certainly ended: vlmrl runs unlock {self.run_dir.name}"
        return StoreError(message, where=str(self.path), hint=hint)


def is_current(handle: int, path: Path) -> bool:
    """Return whether an open file still has this path; another process may have replaced or removed it."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def try_flock(handle: int) -> bool:
    """Try to take a file lock. Return True if this process holds it now, or if the file system has no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def process_start(pid: int) -> str | None:
    """Return the start time of a living process, or None if there is none. A zombie counts as dead: it cannot write."""
    stat = _read(f"/proc/{pid}/stat")
    if stat:
        # The name in parentheses may hold spaces: count from after it. Field 3 is the state, field 22 the start time.
        after = stat.rpartition(")")[2].split()
        return None if after[0] in "ZXx" else after[19]
    if os.path.isdir("/proc/self"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
