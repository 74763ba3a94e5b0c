"""What user code says reaches the terminal without the secrets of the environment, through every door."""

from __future__ import annotations

import io
import json

import pytest

from vlmrl.cli.output import console, emit, print_error, say, show_table
from vlmrl.cli.progress import ConsoleWatcher
from vlmrl.redaction.redact import HIDDEN
from vlmrl.rewards.worker_pool import Failure, as_error

VALUE = "Qq7-Zz9-Xx5"


def test_every_door_to_the_terminal_hides_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SMTP_PASSWD", VALUE)
    error = as_error(Failure("ValueError", f"auth failed for {VALUE}", (), None, f"connecting with {VALUE}\n"), "r")
    stream = io.StringIO()
    doors = (
        lambda: print_error(str(error)),
        lambda: say(str(error)),
        lambda: emit({"error": str(error)}, True),
        lambda: console().print(str(error)),
        lambda: show_table("t", ("a",), [(VALUE,)]),
        lambda: ConsoleWatcher(stream).message(VALUE),
    )
    for door in doors:
        door()
        said = capsys.readouterr()
        text = said.out + said.err + stream.getvalue()
        assert HIDDEN in text and VALUE not in text


def test_json_stays_json(capsys: pytest.CaptureFixture[str]):
    result = {"a": [1, 2.5, None, True], "b": {"text": 'a "quote" and a riddle: the password is "swordfish"'}}
    emit(result, True)
    assert json.loads(capsys.readouterr().out) == result
