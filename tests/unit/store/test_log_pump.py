"""What processes print reaches their logs: all of it, in order, and no secret."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlmrl.store.log_pump import MOST_BYTES, LogPump, _Stream

TOKEN = "hf_" + "Ab3d" * 8
KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq0\nZm9vYmFyYmF6cXV4\n-----END RSA PRIVATE KEY-----\n"


@pytest.fixture
def pump():
    made = LogPump()
    yield made
    made.close(0.1)


def pipe(pump: LogPump, path: Path | None) -> int:
    reads, writes = os.pipe()
    pump.add("p", reads, path)
    return writes


def printed(pump: LogPump, path: Path, *parts: bytes) -> bytes:
    """What is in the log when these were written one by one, and the pipe was closed."""
    writes = pipe(pump, path)
    for part in parts:
        os.write(writes, part)
        time.sleep(0.01)
    os.close(writes)
    pump.wait("p", 10)
    return path.read_bytes()


def test_everything_is_written_as_it_was_printed(pump, tmp_path: Path):
    text = b"step 1\r 10%\r 20%\nstep \xff\xfe 2\nno end"
    assert printed(pump, tmp_path / "logs" / "a.log", text[:9], text[9:22], text[22:]) == text


def test_a_secret_that_comes_in_two_pieces_is_hidden(pump, tmp_path: Path):
    line = f"token {TOKEN} end\n".encode()
    found = printed(pump, tmp_path / "a.log", line[:15], line[15:20], line[20:])
    assert found == b"token <redacted> end\n"


def test_a_private_key_is_hidden_however_it_comes(pump, tmp_path: Path):
    lines = [f"{line}\n".encode() for line in ("before", *KEY.splitlines(), "after")]
    found = printed(pump, tmp_path / "a.log", *lines).decode()
    assert found.startswith("before\n-----BEGIN RSA") and found.endswith("END RSA PRIVATE KEY-----\nafter\n")
    assert "MIIE" not in found and "Zm9v" not in found and found.count("\n") == 6


def test_a_line_without_an_end_is_held_back_up_to_a_limit(pump, tmp_path: Path):
    writes = pipe(pump, tmp_path / "a.log")
    os.write(writes, b"waiting")
    os.write(writes, b"x" * (MOST_BYTES // 2))
    time.sleep(0.05)
    assert not (tmp_path / "a.log").exists()
    os.write(writes, b"x" * MOST_BYTES)
    until(lambda: (tmp_path / "a.log").exists())
    os.close(writes)
    pump.wait("p", 10)
    assert len((tmp_path / "a.log").read_bytes()) == 7 + MOST_BYTES // 2 + MOST_BYTES


def until(true) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_log_that_is_named_later_begins_with_what_was_printed_before(pump, tmp_path: Path):
    writes = pipe(pump, None)
    os.write(writes, b"early\n")
    time.sleep(0.05)
    pump.write_to("p", tmp_path / "a.log")
    os.write(writes, b"late\n")
    os.close(writes)
    pump.wait("p", 10)
    assert (tmp_path / "a.log").read_bytes() == b"early\nlate\n"


def test_a_process_that_is_killed_loses_no_word(pump, tmp_path: Path):
    code = "import os, signal; os.write(2, b'last words\\n'); os.kill(os.getpid(), signal.SIGKILL)"
    reads, writes = os.pipe()
    pump.add("p", reads, tmp_path / "a.log")
    with open(writes, "wb") as file:
        done = subprocess.run([sys.executable, "-c", code], stderr=file)
    assert done.returncode == -signal.SIGKILL
    pump.wait("p", 10)
    assert (tmp_path / "a.log").read_bytes() == b"last words\n"


@pytest.mark.slow
def test_a_log_that_cannot_be_written_is_said_once_and_the_printing_process_goes_on(pump, tmp_path: Path, capfd):
    (tmp_path / "a.log").mkdir()
    writes = pipe(pump, tmp_path / "a.log")
    for _ in range(200):
        os.write(writes, b"x" * 4096 + b"\n")  # more than a pipe holds
    os.close(writes)
    pump.wait("p", 10)
    err = capfd.readouterr().err
    assert err.count("cannot be written") == 1 and "a.log" in err


def test_closing_does_not_wait_for_a_process_that_goes_on_printing(tmp_path: Path):
    made = LogPump()
    reads, writes = os.pipe()
    made.add("p", reads, tmp_path / "a.log")
    os.write(writes, b"no end")
    made.close(0.2)
    assert (tmp_path / "a.log").read_bytes() == b"no end"
    os.close(writes)


@pytest.mark.parametrize("filler", [b"z ", b"zz", b"z,"])
@pytest.mark.parametrize("cut", [0, 5, 13, 30])
def test_no_place_in_a_long_line_cuts_a_secret_in_two(tmp_path: Path, filler: bytes, cut: int):
    stream = _Stream(-1, tmp_path / "a.log")
    before, secret = (filler * MOST_BYTES)[: MOST_BYTES + 1], f" {TOKEN} ".encode()
    for part in (before + secret[:cut], secret[cut:], filler * MOST_BYTES):
        stream.feed(part)
    stream.flush()
    assert (tmp_path / "a.log").read_bytes() == before + b" <redacted> " + filler * MOST_BYTES


def test_a_removed_folder_of_logs_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stream = _Stream(-1, tmp_path / "run" / "logs" / "a.log")
    stream.feed(b"first\n")
    shutil.rmtree(tmp_path / "run")
    stream.feed(b"second\n")
    assert not (tmp_path / "run").exists() and "cannot be written" in capsys.readouterr().err
