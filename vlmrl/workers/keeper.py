"""Keeper of a worker: it starts the worker, reports how it ended, and leaves no process of a worker behind.

    pool -> keeper -> worker (code of others) -> processes that it starts

It runs none of that code. Processes below it that lose their parent become its own children, even daemons in a session
of their own, so it finds them all. It ends them with the worker: when the pool says so, when the pool's process has
ended, or when there are too many of them. If the worker kills the keeper, the pool finds them by a mark.

The pool writes one byte to the control socket: ASK (the worker seems to have ended: wait a moment for it) or END. The
socket's end means END too. The keeper answers with one line before it exits: `exit 3`, `signal 9`, `alive` (the worker
still ran) or `crowd` (too many processes). The process of a pool never imports this.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from importlib import import_module

from vlmrl.process import adopt_orphans, descendants, die_with_parent, kill_all, send, set_mark
from vlmrl.workers.frames import ASK, MOST_PROCESSES
from vlmrl.workers.serve import serve

TICK_SECONDS = 0.05
COUNT_SECONDS = 1.0
MANY_STARTED = 128
"""The processes are counted every COUNT_SECONDS, and after a tick in which the system started so many."""
PATIENCE_SECONDS = 0.5
"""Wait for a worker's end. Its descriptors are closed a moment before its end can be seen."""
KILL_SECONDS = 20.0
"""Time limit for killing processes. One that the kernel does not end (it waits for a disk) is left after this time."""


def main(request_fd: int, response_fd: int, control_fd: int, parent: int, mark: int, module: str) -> None:
    """Start the worker and watch it until its end. The descriptors are those that the pool passed.

    Args:
        module: module of the worker's code; it is loaded here, so that both processes share its memory.
    """
    me = os.getpid()
    adopt_orphans()
    set_mark(mark)
    code = import_module(module)
    begin, most = code.begin, getattr(code, "MOST_PROCESSES", MOST_PROCESSES)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(control_fd)
        die_with_parent(me)
        serve(request_fd, response_fd, begin)
        os._exit(0)
    for fd in (request_fd, response_fd):
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -5)  # get CPU time among a thousand processes, if this is allowed
    word = _keep(child, control_fd, parent, most)
    end_descendants(child)
    with contextlib.suppress(OSError):
        os.write(control_fd, word.encode())
    os._exit(0)


def _keep(child: int, control_fd: int, parent: int, most: int) -> str:
    """Wait until there is a reason to end. Return the word for the pool. `most`: largest number of processes."""
    wake, wake_up = os.pipe()
    for fd in (wake, wake_up):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    watch, poll = _Watch(child, most), select.poll()
    for fd in (control_fd, wake):
        poll.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(1000 * TICK_SECONDS)]
        if wake in ready:
            os.read(wake, 4096)
        if (ended := _reap(child)) is not None:
            return ended
        if control_fd in ready:
            request = os.read(control_fd, 1)
            return (_patient(child) if request == ASK else None) or "alive"
        if os.getppid() != parent:
            return "alive"
        if watch.is_crowded():
            return "crowd"


def _reap(child: int) -> str | None:
    """Collect every process that has ended. Return how the worker ended; None = it is running."""
    word = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                word = f"signal {-code}" if code < 0 else f"exit {code}"
    return word


def _patient(child: int) -> str | None:
    """Wait a moment for the worker. Return how it ended; None = it is running."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (word := _reap(child)) is None and time.monotonic() < until:
        time.sleep(0.002)
    return word


class _Watch:
    """Counter of the processes below this one, used when there is reason to count.

    Thousands of processes that fork leave little time to count them. So if very many were started, the worker's process
    group is stopped first, by one call, and continues if there were not too many.
    """

    def __init__(self, child: int, most: int) -> None:
        self._child, self._most = child, most
        self._counted, self._newest = time.monotonic(), _newest_pid()

    def is_crowded(self) -> bool:
        before, self._newest = self._newest, _newest_pid()
        now, hurried = time.monotonic(), not 0 <= self._newest - before < MANY_STARTED
        if now - self._counted < COUNT_SECONDS and not hurried:
            return False
        self._counted = now
        if hurried:
            send({-self._child}, signal.SIGSTOP)
        crowded = len(descendants(os.getpid())) > self._most
        if hurried and not crowded:
            send({-self._child}, signal.SIGCONT)
        return crowded


def _newest_pid() -> int:
    """Return the process that the system started last; 0 if the system does not give it."""
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def end_descendants(child: int) -> None:
    """End every process below this one: the group of `child` by one call, then all that left it."""
    me, until = os.getpid(), time.monotonic() + KILL_SECONDS
    send({-child}, signal.SIGKILL)
    while time.monotonic() < until:
        kill_all(lambda: descendants(me))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
