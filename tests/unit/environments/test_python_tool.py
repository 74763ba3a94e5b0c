"""The tool `python` in the real processes of an environment: state, pictures, errors, ends, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image
from processes import assert_all_gone, lives
from test_environment_processes import PICTURE, Place, opened

from vlmrl.environments.base import EnvironmentLimits
from vlmrl.environments.processes import Answer, Stopped

FILE = """
from vlmrl.environments.python_tool import Python

class Short(Python):
    def __init__(self):
        super().__init__(seconds=2.0, memory_mb=768, output=100, images=2)
"""
ALONE = """
from PIL import Image
from vlmrl.environments.python_tool import Python

tool = Python()
tool.reset([Image.new("RGB", (4, 4))], seed=0)
print(tool.python("1 + 1").text)
print(tool.python("images[0].size").text)
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("python") / "tools.py"
    path.write_text(FILE)
    limits = EnvironmentLimits(tool_seconds=5.0, workers=3)
    before = set(psutil.Process().children(recursive=True))
    with opened(f"{path}:Short", limits) as place:
        yield place
        pids = [p.pid for p in set(psutil.Process().children(recursive=True)) - before]
    assert_all_gone(pids)


@pytest.fixture
def place(shared: Place):
    assert isinstance(shared.begin(), Answer)
    yield shared
    shared.pool.drop(0)


def said(place: Place, code: str) -> str:
    answer = place.call("python", code=code)
    assert isinstance(answer, Answer), answer
    assert all(isinstance(part, str) for part in answer.parts)
    return "".join(map(str, answer.parts))


def test_variables_files_and_pictures_stay_until_the_answer(place: Place) -> None:
    assert said(place, "x = 3; open('f', 'w').write('hello'); None") == "the code printed and showed nothing"
    assert said(place, "print(open('f').read())\nx + 1") == "hello\n4"
    assert said(place, "images[0].size, images[0].getpixel((0, 0))") == str((PICTURE.size, (255, 0, 0)))
    answer = place.call("python", code="print('turned'); show(images[0].rotate(90, expand=True))")
    assert isinstance(answer, Answer) and answer.errors == 0
    file, text = sorted(answer.parts, key=lambda part: isinstance(part, str))
    assert text == "turned" and isinstance(file, bytes)
    with Image.open(__import__("io").BytesIO(file)) as image:
        assert image.size == PICTURE.size[::-1]
    assert said(place, "[i.size for i in images]") == str([PICTURE.size, PICTURE.size[::-1]])
    assert said(place, "from PIL import Image; Image.open('image_1.png').size") == str(PICTURE.size[::-1])


def test_another_episode_sees_nothing_of_it(shared: Place) -> None:
    for key in ("a", "b"):
        assert isinstance(shared.begin(key), Answer)
    answer = shared.call("python", "a", code="secret = 5; open('note', 'w').write('x')")
    assert isinstance(answer, Answer) and not answer.errors
    answer = shared.call("python", "b", code="import os; print(os.listdir(), 'secret' in globals())")
    assert isinstance(answer, Answer) and answer.parts == ["['image_0.png'] False"]
    for key in ("a", "b"):
        shared.pool.drop(key)


def test_an_error_is_told_with_its_line_and_counts(place: Place) -> None:
    answer = place.call("python", code="print('so far')\n1 / 0")
    assert isinstance(answer, Answer) and answer.errors == 1
    (text,) = answer.parts
    assert isinstance(text, str) and text.startswith("error: Traceback") and "line 2" in text
    assert "ZeroDivisionError" in text and text.endswith("printed before: so far") and "zygote" not in text
    assert said(place, "1 + 1") == "2", "the session goes on"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("while True: pass", "the code took more than 2 s\nThe variables and files are lost."),
        ("import os; os._exit(3)", "the code ended its interpreter (exit code 3)"),
        ("x = bytearray(1 << 33)", "MemoryError"),
        ("input('name?')", "NotHereError: nobody can type here"),
        ("import asyncio\nasync def f(): pass\nasyncio.run(f())", "NotHereError: asyncio needs sockets"),
        ("import subprocess; subprocess.run(['ls'])", "NotHereError: no other program can be started here"),
        ("import multiprocessing; multiprocessing.Pool(2).map(len, [''])", "no other process"),
        ("from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()", "NotHereError: no other process"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:80')", "there is no network here"),
        ("open('/etc/passwd')", "/etc/passwd"),
        ("show(images[0]); show(images[0]); show(images[0])", "at most 2 pictures"),
        ("exit(2)", "the code ended itself: exit(2)"),
        ("def f(:\n  pass", "SyntaxError"),
    ],
)
def test_what_cannot_be_done_fails_in_words(place: Place, code: str, words: str) -> None:
    answer = place.call("python", code=code)
    assert isinstance(answer, Answer) and answer.errors == 1, answer
    assert str(answer.parts[0]).startswith("error: ") and words in str(answer.parts[0])
    assert said(place, "len(images), images[0].size") == str((1, PICTURE.size)), "the next call has the pictures again"


def test_a_run_over_the_time_of_the_tool_ends_its_session(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(FILE)
    with opened(f"{tmp_path}/tools.py:Short", EnvironmentLimits(tool_seconds=0.5)) as place:
        place.begin()
        answer = place.call("python", code="x = 1\nwhile True: pass")
        assert isinstance(answer, Answer) and answer.parts == ["error: python took more than 0.5 s"]
        assert said(place, "'x' in globals(), len(images)") == "(False, 1)"


def test_printing_is_cut_and_random_numbers_follow_the_seed(place: Place) -> None:
    assert said(place, "print('x' * 1000)") == "x" * 100 + "\n[901 more bytes]"
    code = "import random, numpy as np; print(random.random(), np.random.rand())"
    first = said(place, code)
    place.pool.drop(0)
    place.begin()
    again = said(place, code)
    place.pool.drop(0)
    place.begin(seed=2)
    assert again == first != said(place, code)


def is_zygote(process: psutil.Process) -> bool:
    try:
        return "vlmrl.sandbox.zygote" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_killed_sandbox_ends_the_episode_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(FILE)
    before = set(psutil.Process().children(recursive=True))
    with opened(f"{tmp_path}/tools.py:Short", EnvironmentLimits(tool_seconds=5.0)) as place:
        place.begin()
        assert said(place, "1") == "1"
        new = [p for p in set(psutil.Process().children(recursive=True)) - before if is_zygote(p)]
        zygotes = [p for p in new if p.ppid() not in {other.pid for other in new}]  # the others are its sessions
        assert len(zygotes) < len(new)
        for process in zygotes:
            os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while any(lives(p.pid) for p in new) and time.monotonic() < deadline:  # its sessions end with it
            time.sleep(0.05)
        stopped = place.call("python", code="2")
        assert isinstance(stopped, Stopped) and "the sandbox has ended" in stopped.why


def test_it_can_be_called_in_python_after_its_reset() -> None:
    words = [sys.executable, "-c", ALONE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "2\n(4, 4)\n"), done.stderr
