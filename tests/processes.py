"""Processes as tests see them: ranks that are started, who started whom, and that nobody is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import warm

TESTS = Path(__file__).parent
END_SECONDS = 30.0
"""What is promised: so long after the death of any process of a run none is left."""


def free_endpoint() -> str:
    """`host:port` of this machine where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def run_ranks(size: int, script: Path, *arguments: object, new: bool = False) -> None:
    """Run a script as so many processes; `new`: their interpreters have loaded nothing, and differ in their hashes.

    Raises: AssertionError with what they said when one fails.
    """
    host, port = free_endpoint().split(":")
    common = os.environ | {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
    }
    ranks = [
        (subprocess.Popen if new else warm.Popen)(
            [sys.executable, str(script), *map(str, arguments)],
            env=common | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(told)[-4000:]


def awaited(path: Path, process: subprocess.Popen | None = None, seconds: float = 90.0) -> str:
    """What a process writes into a file, once it is there. Not by the clock: a machine that stands still is no failure.

    Args: process: who writes it, or started who does; when that ends before, there is nothing to wait for.
    """
    for _ in range(int(seconds / 0.02)):
        if path.exists() and (text := path.read_text()):
            return text
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"{path.name} was never written")


def below(pid: int) -> list[int]:
    """What a process started, and what these started."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def command_of(pid: int) -> str:
    """The words of a process's command; empty when it is gone."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def assert_all_gone(pids: Iterable[int], seconds: float = END_SECONDS) -> None:
    """Wait until none of these processes lives; not by the clock either."""
    for _ in range(int(seconds / 0.1) + 1):
        left = [pid for pid in pids if lives(pid)]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes {left} are left: {[command_of(pid) for pid in left]}")
