"""Worker's side: answers requests by the code of a user of the kit, and limits what its process may use.

The first request is the setup. The user's function `begin` gets it with the channel, and returns facts for the pool and
a handler. A handler gets the body and the blobs of a request, and yields answers: the item (WHOLE for the one answer to
a request), a body, and blobs.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from vlmrl.workers.frames import BROKEN, WHOLE, Channel

Answer = tuple[int, dict[str, Any], Sequence[bytes]]
Handler = Callable[[dict[str, Any], list[bytes]], Iterable[Answer]]
Begin = Callable[[dict[str, Any], Channel], tuple[dict[str, Any], Handler]]
_write, _exit = os.write, os._exit


def serve(request_fd: int, response_fd: int, begin: Begin) -> None:
    """Answer requests until their pipe ends."""
    for fd in (request_fd, response_fd):
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    channel, handler = Channel(request_fd, response_fd), None
    try:
        for body, blobs in channel.requests():
            if handler is None:
                facts, handler = begin(body, channel)
                channel.answer(WHOLE, facts)
                continue
            for item, answer, files in handler(body, blobs):
                channel.answer(item, answer, files)
    except BaseException as error:  # only if the code of others damaged Python: report it with plain system calls
        channel.stay_alone()
        with suppress(BaseException):
            _write(2, f"{type(error).__name__}: {error}".encode(errors="backslashreplace"))
        _exit(BROKEN)


def limit_memory(size: int) -> None:
    """Limit the address space; an allocation beyond it raises MemoryError. Core files are disabled."""
    for limit, most in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # a lower hard limit of the system stays
            resource.setrlimit(limit, (most, most))


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so many more seconds of processor time; a lower hard limit stays."""
    used, most = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if most == resource.RLIM_INFINITY else min(soft, most), most))
