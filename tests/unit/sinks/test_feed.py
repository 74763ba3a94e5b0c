"""A logger in its process: what it gets, and that nothing it does reaches the run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from processes import assert_all_gone
from tinyworld import image

from vlmrl.data.images import encode_png
from vlmrl.loggers.base import Line, SampledRollout, SinkRun
from vlmrl.loggers.feed import Feed, Outbox
from vlmrl.loggers.host import MAX_SIDE, small_image
from vlmrl.workers.frames import pack

WELL = """
import json, sys
from pathlib import Path

class Logger:
    def open(self, run):
        self.path = Path(run.folder) / "heard.jsonl"
        self.say("open", run.attempt, run.unique_label, dict(run.remembered), [line.step for line in run.standing])
        return {"id": f"remote-{run.id}", "url": "https://there/x", "note": "look"}

    def log(self, line):
        self.say("log", line.step, line.attempt, line.kind, line.number, line.metrics)

    def samples(self, line, samples):
        self.say("samples", line.step, [(s.response, s.parts, [list(i[:4]) for i in s.images]) for s in samples])

    def close(self, status):
        self.say("close", status)

    def say(self, *words):
        with open(self.path, "a") as file:
            file.write(json.dumps(words) + "\\n")
"""


def logger(folder: Path, *changes: tuple[str, str], name: str = "logger.py") -> str:
    """A logger's file, as the recipe names it: the one above with some of its text replaced."""
    text = WELL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return f"{folder / name}:Logger"


def feed(folder: Path, sink: str, **more: Any) -> Feed:
    run = SinkRun("20260101-000000-x-beef", "mine", str(folder), "rl", 1, 0, {})
    return Feed("Logger", sink, asdict(run), io.StringIO(), **more)


def line(step: int, **metrics: Any) -> bytes:
    return pack({"op": "log", "line": asdict(Line(step, 1, "train", step, metrics))})


def finish(feed: Feed, seconds: float = 30.0) -> list[str]:
    """Close it, and what the user was told."""
    feed.ask_to_close("done")
    feed.end(time.monotonic() + seconds)
    assert not feed.pids()
    return feed.notes()


def heard(folder: Path) -> list[Any]:
    path = folder / "heard.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def test_a_logger_gets_everything_in_order_and_what_it_returns_is_kept(tmp_path):
    one = feed(tmp_path, logger(tmp_path))
    one.put(line(0, **{"reward/mean": 0.5, "odd": float("inf"), "is_best": True}))
    picture = encode_png(image(0, 2 * MAX_SIDE, 8))
    samples = [SampledRollout("s", "p", "prompt", text, {}, 1.0, {"a": None}, 0.0) for text in ("x", "\ud800")]
    items = [{**asdict(sample), "images": [0, 1]} for sample in samples]
    one.put(
        pack({"op": "samples", "line": asdict(Line(0, 1, "train", 0, {})), "samples": items}, [picture, b"no image"])
    )
    told = finish(one)
    assert told == ["logger Logger: https://there/x; look"]
    assert (one.sent, one.taken) == (2, 2)
    assert one.opened == {"id": "remote-20260101-000000-x-beef", "url": "https://there/x"}
    png = [137, 80, 78, 71]
    assert heard(tmp_path) == [
        ["open", 1, "mine-beef", {}, []],
        ["log", 0, 1, "train", 0, {"reward/mean": 0.5, "odd": float("inf"), "is_best": True}],
        ["samples", 0, [["x", {"a": None}, [png]], ["\ud800", {"a": None}, [png]]]],
        ["close", "done"],
    ]


def test_images_are_made_small_and_broken_ones_are_left_out():
    from PIL import Image

    small = small_image(encode_png(image(1, 3 * MAX_SIDE, 10)))
    assert small is not None and Image.open(io.BytesIO(small)).size == (MAX_SIDE, 3)
    same = encode_png(image(1, 20, 10))
    kept = small_image(same)
    assert kept is not None and Image.open(io.BytesIO(kept)).size == (20, 10)
    assert small_image(same[: len(same) // 2]) is None


FAILS = ('self.say("log", line.step', 'line.metrics["x"] or self.say("log", line.step')


def test_what_a_logger_raises_is_counted_and_said_once(tmp_path):
    one = feed(tmp_path, logger(tmp_path, FAILS))
    for step in range(4):
        one.put(line(step, **({} if step < 3 else {"x": 0})))
    told = finish(one)
    assert told[1:] == ["logger Logger failed, and the run goes on: KeyError: 'x'"]
    assert (one.sent, one.taken) == (4, 1)
    assert [words[1] for words in heard(tmp_path) if words[0] == "log"] == [3], "and the next line is tried again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ('return {"id"', 'raise OSError("no network")\n        return {"id"'),
            "could not begin, and the run goes on without it: OSError: no network",
        ),
        (
            ('return {"id"', 'sys.exit("not logged in")\n        return {"id"'),
            "could not begin, and the run goes on without it: SystemExit: not logged in",
        ),
        (("class Logger", "class Loger"), "could not begin, and the run goes on without it: there is no `Logger`"),
        (
            ("import json, sys", "import not_there"),
            "could not begin, and the run goes on without it: ModuleNotFoundError: No module named 'not_there'",
        ),
        (("import json, sys", "import json,"), "could not begin, and the run goes on without it: SyntaxError: "),
        (('self.say("log"', 'import os; os._exit(3); self.say("log"'), "ended with exit code 3"),
        (('self.say("log"', 'import os; os.kill(os.getpid(), 11); self.say("log"'), "ended by SIGSEGV"),
        (('self.say("close"', '1 / 0; self.say("close"'), "failed, and the run goes on: ZeroDivisionError"),
    ],
)
def test_a_logger_that_cannot_go_on_is_said_once_and_left(tmp_path, change, said):
    one = feed(tmp_path, logger(tmp_path, change))
    for step in range(50):
        one.put(line(step))
        time.sleep(0.002)
    told = [text for text in finish(one) if "there/x" not in text]
    assert len(told) == 1 and told[0].startswith(f"logger Logger {said}"), told
    assert one.taken == (50 if "close" in change[0] else 0)


HANGS = ('self.say("log", line.step', '__import__("time").sleep(600); self.say("log", line.step')


@pytest.mark.slow
def test_a_logger_that_hangs_takes_no_time_and_is_ended(tmp_path):
    """Each `put` returns although nobody reads; the queue has a bound; the end waits no longer than it was told."""
    one = feed(tmp_path, logger(tmp_path, HANGS), queue_bytes=100_000)
    big = line(0, text="x" * 20_000)
    for _ in range(100):
        one.put(big)
    told = finish(one, seconds=1.0)
    assert [text.removeprefix("logger Logger ") for text in told if "there/x" not in text] == [
        "is too slow: lines are dropped until it has caught up",
        "did not finish in time, and was ended",
    ]
    assert (one.sent, one.taken) == (100, 0)


def test_a_slow_logger_gets_what_was_queued(tmp_path):
    slow = ('self.say("log", line.step', '__import__("time").sleep(0.02); self.say("log", line.step')
    one = feed(tmp_path, logger(tmp_path, slow))
    for step in range(20):
        one.put(line(step))
    finish(one)
    assert [words[1] for words in heard(tmp_path) if words[0] == "log"] == list(range(20))


def test_what_a_logger_prints_is_kept_without_secrets(tmp_path):
    key = "hf_" + "a1B2" * 8
    one = feed(
        tmp_path,
        logger(tmp_path, ('self.say("close"', f'print("token {key}"); print("end", end=""); self.say("close"')),
    )
    finish(one)
    log = one._log.getvalue()  # type: ignore[attr-defined]
    assert log == "token <redacted>\nend\n"


def test_what_a_logger_raises_is_said_without_secrets(tmp_path):
    key = "hf_" + "a1B2" * 8
    one = feed(tmp_path, logger(tmp_path, ('return {"id"', f'raise ValueError("{key}")\n        return {{"id"')))
    assert finish(one) == ["logger Logger could not begin, and the run goes on without it: ValueError: <redacted>"]


def test_processes_that_a_logger_starts_end_with_it(tmp_path):
    """They hold on to its output, which must not keep the run waiting."""
    starts = (
        'self.say("close", status)',
        'import subprocess; child = subprocess.Popen(["sleep", "600"]); self.say("child", child.pid)',
    )
    one = feed(tmp_path, logger(tmp_path, starts))
    finish(one)
    assert_all_gone([heard(tmp_path)[-1][1]])


OWNER = """
import io, sys, time
from dataclasses import asdict
from vlmrl.loggers.base import SinkRun
from vlmrl.loggers.feed import Feed
run = SinkRun("r", "r", sys.argv[1], "rl", 1, 0, {})
feed = Feed("x", sys.argv[2], asdict(run), io.StringIO())
while not feed.pids(): time.sleep(0.01)
print(*feed.pids(), flush=True)
time.sleep(600)
"""


def test_a_logger_does_not_outlive_a_killed_run(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path, logger(tmp_path, HANGS)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert_all_gone([pid])


def test_ctrl_c_does_not_reach_a_logger(tmp_path):
    one = feed(tmp_path, logger(tmp_path))
    one.put(line(0))
    while not one.taken:
        time.sleep(0.01)
    (pid,) = one.pids()
    assert os.getsid(pid) == pid, "the terminal's Ctrl-C goes to another session"
    os.kill(pid, signal.SIGINT)
    one.put(line(1))
    finish(one)
    assert one.taken == 2


def test_an_outbox_holds_so_many_bytes_and_no_more():
    outbox = Outbox(max_bytes=10)
    assert outbox.put(b"12345") and outbox.put(b"12345") and not outbox.put(b"1")
    assert outbox.put(b"close", always=True)
    assert outbox.get(0.0) == b"12345" and outbox.put(b"") and not outbox.put(b"1")
    outbox.shut()
    assert outbox.get(9.0) is None and not outbox.put(b"")
