"""A message of a signal's handler reaches the user while another line is being written."""

from __future__ import annotations

import os

from vlmrl.cli.progress import ConsoleWatcher


class Busy:
    """A stream in the middle of a write, as a signal's handler meets it."""

    def __init__(self, descriptor: int) -> None:
        self.fileno = lambda: descriptor

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name=2>")


def test_a_message_while_a_line_is_being_written_is_shown():
    reader, writer = os.pipe()
    ConsoleWatcher(Busy(writer)).message("stopping after this step")
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        assert "stopping after this step" in pipe.read()
