"""Confinement of a process: limits, no privileges, Landlock, the filter of system calls; and what this machine has.

Two things keep code away from files: Landlock, and bubblewrap (a namespace with few files). One of them is required,
and both are used where both work. The filter of system calls is always there: without it, Landlock leaves processes and
sockets, and bubblewrap leaves other processes in the namespace.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vlmrl.errors import EngineError
from vlmrl.sandbox.calls import ARCHITECTURES, filter_program

RUN, PAUSE = b"r", b"p"
"""Words of the caller to the zygote: code of a session may run, or nothing of it may."""
NOBODY = 65534
OPEN_FILES = 64
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, PR_GET_SECCOMP = 4, 38, 1, 21
SECCOMP, SECCOMP_SET_MODE_FILTER = {"x86_64": 317, "aarch64": 277}, 1
CAPSET, CAPABILITY_VERSION = {"x86_64": 126, "aarch64": 91}, 0x20080522
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ABI_VERSION, PATH_BENEATH = 1, 1
EXECUTE, WRITE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_SPECIAL = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # devices of characters, sockets, pipes, devices of blocks
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FIRST_RIGHTS = REFER - 1
"""Landlock's rights to files: those of its first version, then one more in versions 2, 3 and 5."""

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/fonts")
"""Paths that programs of the system need."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Layers:
    """Layers that this machine has to confine code.

    Args:
        machine: name of its processors, as `os.uname` gives it.
        seccomp: whether system calls can be filtered.
        landlock: version of Landlock's interface; 0 = it is not there.
        bubblewrap: path of a `bwrap` that works; "" = there is none.
    """

    machine: str
    seccomp: bool
    landlock: int
    bubblewrap: str

    @property
    def words(self) -> str:
        """The layers in words."""
        names = ["system calls filtered"] if self.seccomp else []
        names += [f"Landlock {self.landlock}"] if self.landlock else []
        return ", ".join([*names, *(["bubblewrap"] if self.bubblewrap else [])]) or "nothing"

    def require(self) -> None:
        """Raise an EngineError if code that a model wrote cannot be confined here."""
        if not sys.platform.startswith("linux") or self.machine not in ARCHITECTURES:
            raise EngineError(
                f"code cannot be confined on {sys.platform} {self.machine}, but on Linux with x86-64 or aarch64 alone",
                hint="run it on such a machine; there is no way to run the code without a sandbox",
            )
        if not self.seccomp:
            raise EngineError(
                "this kernel does not filter system calls (seccomp), so code cannot be confined",
                hint="use a kernel with CONFIG_SECCOMP_FILTER",
            )
        if not self.landlock and not self.bubblewrap:
            raise EngineError(
                "neither Landlock nor bubblewrap works here, so code could read every file",
                hint="use a kernel from 5.13 on with Landlock, or `apt install bubblewrap` where user namespaces are "
                "allowed; there is no way to run the code without a sandbox",
            )


@dataclass(frozen=True)
class BoxLimits:
    """Limits of sandboxed code.

    Args:
        seconds: wall time of a run.
        memory_mb: address space of the process, in MiB, with the 100 or so that Python and its libraries take.
        output: number of bytes that a run may print and still be shown; what is beyond them is dropped.
        file_mb: size of a file, in MiB.
        folder_mb: size of all files of a session, in MiB.
        images: number of pictures that a run may show.
        pixels: number of pixels of each of them.
    """

    seconds: float = 10.0
    memory_mb: int = 1024
    output: int = 16384
    file_mb: int = 16
    folder_mb: int = 64
    images: int = 8
    pixels: int = 4_000_000

    def fields(self) -> dict[str, Any]:
        """Return the limits as JSON values."""
        return asdict(self)


@cache
def layers() -> Layers:
    """Find out what this machine has; bubblewrap is tried once."""
    machine = platform.machine()
    linux = sys.platform.startswith("linux")
    has_filter = linux and _libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0
    abi = max(0, _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ABI_VERSION)) if linux else 0
    program = shutil.which("bwrap") if linux else None
    return Layers(machine, has_filter, abi, program if program and _works(program) else "")


def _works(program: str) -> bool:
    command = [*wrapped(program, ()), "/bin/true"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL).returncode == 0
    return False


def wrapped(program: str, paths: Sequence[str], *, python: bool = True) -> list[str]:
    """Return the begin of a command that runs in bubblewrap, with these paths for reading and hardly anything else.

    /tmp is a file system of its own in main memory. `python`: whether what Python needs is there, too.
    """
    base = readable() if python else SYSTEM
    binds = [word for path in dict.fromkeys((*base, *paths)) for word in ("--ro-bind-try", path, path)]
    apart = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    return [program, *apart, "--proc", "/proc", "--dev", "/dev", "--tmpfs", tempfile.gettempdir(), *binds]


@cache
def readable() -> tuple[str, ...]:
    """Return the paths that Python and its libraries need: nothing of the user's own, as far as they lie elsewhere."""
    system = (*SYSTEM, "/dev/urandom")
    own = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(Path(sys.executable).resolve().parents[1])]
    return tuple(dict.fromkeys(path for path in (*system, *own) if os.path.exists(path)))


def drop_privileges(folder: str) -> None:
    """Lose all privileges, and all ways to get some again. Root becomes nobody if nobody can read the interpreter.

    Args:
        folder: it will belong to nobody.
    """
    if os.geteuid() == 0 and all(_is_open(path) for path in (sys.prefix, sys.base_prefix)):
        with suppress(OSError):  # in a namespace of bubblewrap there is no other user
            os.chown(folder, NOBODY, NOBODY)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    head, none = struct.pack("<Ii", CAPABILITY_VERSION, 0), bytes(24)
    _call(_libc.syscall(CAPSET[platform.machine()], head, none), "capset")
    _call(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    hide_memory()


def hide_memory() -> None:
    """Keep other processes of the same user from reading this one's memory."""
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _is_open(path: str) -> bool:
    """Return whether every user can reach a folder."""
    return all(os.stat(parent).st_mode & 0o001 for parent in (path, *Path(path).parents))


def limit(limits: BoxLimits) -> None:
    """Set this process's limits of memory, files and core dumps."""
    sizes = {
        resource.RLIMIT_AS: limits.memory_mb << 20,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        **dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE), 0),
    }
    for name, most in sizes.items():
        resource.setrlimit(name, (most, most))


def open_rules(abi: int, folder: str) -> int:
    """Return the descriptor of Landlock's rules: read what `readable` names, write in `folder`. Needs no privileges.

    Args:
        abi: version of the interface; at least 1.
    Raises: OSError when the kernel refuses.
    """
    rights = FIRST_RIGHTS | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    network, scopes = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)  # TCP; abstract sockets and signals
    attributes = struct.pack("<QQQ", rights, network, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _call(_libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock")
    writes = rights & ~EXECUTE & ~MAKE_SPECIAL
    for path, allowed in [*((p, EXECUTE | READ_FILE | READ_DIR) for p in readable()), (folder, writes)]:
        with suppress(FileNotFoundError, PermissionError):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            of_path = allowed if os.path.isdir(path) else allowed & (EXECUTE | WRITE | READ_FILE | TRUNCATE)
            _call(_libc.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("<Qi", of_path & rights, fd), 0), path)
            os.close(fd)
    return rules


def close_rules(rules: int) -> None:
    """Apply rules to this process for ever."""
    _call(_libc.syscall(RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


def filter_calls(machine: str) -> None:
    """Filter the system calls of this process for ever; `drop_privileges` comes before."""
    program = filter_program(machine, os.getpid())
    content = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(content))
    _call(_libc.syscall(SECCOMP[machine], SECCOMP_SET_MODE_FILTER, 0, head), "seccomp")


def die_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends. A change of the user would undo this."""
    _libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _call(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
