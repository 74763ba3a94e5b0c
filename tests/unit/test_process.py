"""`die_with_parent`, with real processes: a child ends when the process that started it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from processes import assert_all_gone, lives

CHILD = "import os, sys, time; from vlmrl.process import die_with_parent; die_with_parent(int(sys.argv[1]))"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked on Linux only")
def test_a_child_is_killed_with_its_parent():
    child = f"{CHILD}; print(os.getpid(), flush=True); time.sleep(60)"
    middle = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert lives(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert_all_gone([pid], 20)
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    no_parent = os.getpid() + 1  # not the process that starts it
    command = [sys.executable, "-c", f"{CHILD}; print('lived')", str(no_parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
