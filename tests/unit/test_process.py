"""What a process asks of the system, with real processes: to end with its parent, and streams to rely on."""

from __future__ import annotations

import ast
import os
import shlex
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


STREAMS = "import os, sys; from vlmrl.process import keep_standard_streams; keep_standard_streams()"
PLACES = "[os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]"


def shell(code: str, redirections: str) -> subprocess.CompletedProcess[str]:
    """A Python process whose streams the shell has treated like this; it may leave word in file descriptor 7."""
    line = f"exec 7>&1; {shlex.quote(sys.executable)} -c {shlex.quote(code)} {redirections}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a descriptor is")
@pytest.mark.parametrize("closed", ["0", "1", "2", "01", "02", "12", "012"])
def test_closed_streams_become_dev_null_before_their_numbers_go_to_others(closed: str):
    code = f"{STREAMS}; print('out'); print('err', file=sys.stderr); sys.stdin.read(); a, b = os.pipe()\n"
    code += f"assert min(a, b) > 2; os.write(7, repr({PLACES}).encode())"
    redirections = " ".join({"0": "<&-", "1": ">&-", "2": "2>&-"}[number] for number in closed)
    done = shell(code, redirections + ("" if "0" in closed else " </dev/null"))
    assert done.returncode == 0, done
    places = printed_list(done.stdout)
    assert [places[int(n)] for n in closed] == ["/dev/null"] * len(closed)
    assert ("err" in done.stderr) == ("2" not in closed)


def printed_list(text: str) -> list[str]:
    return ast.literal_eval(text[text.index("['") : text.rindex("']") + 2])


def test_a_child_inherits_them():
    child = f"import os; os.write(7, repr({PLACES}).encode())"
    code = f"{STREAMS}; import subprocess; subprocess.run([sys.executable, '-c', {child!r}], pass_fds=[7], check=True)"
    assert printed_list(shell(code, "<&- >&- 2>&-").stdout) == ["/dev/null"] * 3


def test_who_reads_no_more_ends_a_command_that_writes_to_stdout_only():
    loop = "\nfor n in range(100_000): print(n, file=sys.{})\nos.write(7, b'to the end')"
    err = shell(STREAMS + loop.format("stderr"), "2> >(exec 7>&-; read first)")
    assert (err.returncode, err.stdout) == (0, "to the end")
    out = shell(STREAMS + loop.format("stdout"), "> >(exec 7>&-; read first)")
    assert (out.returncode, out.stdout, out.stderr) == (141, "", "")


def test_a_full_disk_behind_stdout_is_an_error_once():
    done = shell(f"{STREAMS}; print('x'); sys.stdout.flush()", ">/dev/full")
    assert done.returncode == 1 and done.stderr.count("No space left") == 1 and "Exception ignored" not in done.stderr


def test_streams_that_somebody_has_replaced_stay():
    code = f"import io, sys; caught = sys.stdout = sys.stderr = io.StringIO(); {STREAMS}; assert sys.stdout is caught"
    assert shell(code, "").returncode == 0


def test_a_stream_made_anew_has_the_encoding_and_errors_of_the_old_one():
    code = f"{STREAMS}; print('\\u00e9', sys.stdout.encoding, sys.stderr.errors)"
    env = {**os.environ, "PYTHONIOENCODING": "iso8859-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env)
    assert done.stdout == b"\xe9 iso8859-1 backslashreplace\n", done


def test_leaving_runs_exit_functions_and_waits_for_threads() -> None:
    program = """
import atexit, sys, threading, time
from vlmrl.process import leave
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("unflushed ")
leave(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "unflushed thread\nexit function\n"


def test_a_command_ends_with_its_own_code_though_a_library_crashes_in_the_teardown() -> None:
    program = """
import os, sys
from vlmrl.cli.app import command
class Crashing:
    def __del__(self, abort=os.abort): abort()
kept = Crashing()
sys.argv = ["vlmrl", "train", "nothing.toml"]
command()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done
