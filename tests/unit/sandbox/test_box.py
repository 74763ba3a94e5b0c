"""Sessions of a sandbox: what attacks reach, what hostile answers do, and what is left."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from PIL import Image
from processes import assert_all_gone
from sandbox_attacks import ATTACKS, SECRET, SLOW, Place, attack

from vlmrl.errors import EngineError
from vlmrl.owned_folder import OwnedFolder
from vlmrl.sandbox.box import CLEAN, Ran, Sandbox, Session
from vlmrl.sandbox.confine import BoxLimits, Layers, layers
from vlmrl.sandbox.zygote import FOLDERS

REQUIRED = os.environ.get("VLMRL_TEST_SANDBOX") == "required"
"""Whether a skip is an error: in continuous integration."""
pytestmark = pytest.mark.slow
LIMITS = BoxLimits(seconds=1.0)


@pytest.fixture(scope="module", params=["all", "Landlock alone", "bubblewrap alone"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    here = layers()
    if request.param == "Landlock alone":
        here = replace(here, bubblewrap="")
    if request.param == "bubblewrap alone":
        here = replace(here, landlock=0)
    try:
        here.require()
        if request.param != "Landlock alone" and not here.bubblewrap:
            raise EngineError("there is no bubblewrap")
    except EngineError as error:
        if REQUIRED:
            raise
        pytest.skip(error.message)
    os.environ["VLMRL_TEST_KEY"] = SECRET
    before = set(psutil.Process().children(recursive=True))
    with Sandbox(LIMITS, here) as one:
        yield one
        pids = [p.pid for p in set(psutil.Process().children(recursive=True)) - before]
    del os.environ["VLMRL_TEST_KEY"]
    assert_all_gone(pids)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    one = Place(tmp_path_factory.mktemp("place"))
    yield one
    one.close()


def test_attacks_reach_nothing_and_end_in_time(sandbox: Sandbox, place: Place, request: pytest.FixtureRequest) -> None:
    names = [name for name in ATTACKS if "all" in request.node.callspec.id or name not in SLOW]
    assert attack(sandbox, place, names, say=lambda _: None) == []
    with sandbox.open() as session:
        assert session.run("print(6 * 7)") == Ran("42\n"), "the next session works"


def test_the_attacks_work_without_a_sandbox(place: Place, tmp_path: Path) -> None:
    """They are able to tell that they got out: what they want can be had by a process that nothing confines."""
    import sys

    os.chdir(tmp_path)
    for name in ("read a file", "list home", "write outside", "rights and times outside", "TCP", "fork", "programs"):
        done = subprocess.run([sys.executable, "-c", place.code(name)], capture_output=True, text=True, cwd=tmp_path)
        assert "ESCAPED" in done.stdout or place.reached(), (name, done)
    assert place.reached()


def test_nothing_is_left_of_a_session(sandbox: Sandbox) -> None:
    before = set(psutil.Process().children(recursive=True))
    with sandbox.open() as session:
        session.run("import os; os.makedirs('a/b'); os.mkdir('c', 0); x = bytearray(1 << 20)")
        assert set(psutil.Process().children(recursive=True)) - before
    deadline = time.monotonic() + 10
    while (left := set(psutil.Process().children(recursive=True)) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_a_process_with_many_open_files_can_use_sessions(sandbox: Sandbox) -> None:
    with ExitStack() as files:
        while files.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        with sandbox.open() as session:
            assert session.run("print(1)").printed == "1\n"
            assert session.run("show(images[0])", [Image.new("RGB", (900, 700))]).images


def test_threads_that_code_leaves_run_in_its_calls_alone(sandbox: Sandbox) -> None:
    code = "import threading, time\nn = 0\ndef spin():\n    global n\n    while True: n += 1\n"
    with sandbox.open() as session:
        assert not session.run(code + "threading.Thread(target=spin, daemon=True).start()").error
        time.sleep(0.2)
        own = {p.pid for p in psutil.Process().children(recursive=True)}
        stopped = [p for p in psutil.process_iter(["status"]) if p.info["status"] == psutil.STATUS_STOPPED]
        (process,) = [p for p in stopped if p.pid in own]
        used = process.cpu_times().user
        time.sleep(0.6)
        assert process.cpu_times().user - used < 0.1
        assert session.run("a = n; time.sleep(0.1); print(n > a)").printed == "True\n"


def test_who_does_not_know_the_key_gets_no_session(sandbox: Sandbox) -> None:
    with Session(sandbox.address, "0" * 32, LIMITS) as session:
        assert session.run("print(1)") == Ran(error="the sandbox has ended", ended=True)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(sandbox.address)
        stranger.sendall(b"no JSON")
        assert stranger.recv(9) == b""
    with sandbox.open() as session:
        assert session.run("print(1)").printed == "1\n"


def test_what_a_killed_sandbox_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setitem(CLEAN, "TMPDIR", str(tmp_path))
    left = tmp_path / f"{FOLDERS}abc"
    (left / "s1").mkdir(parents=True)
    (left / "s1").chmod(0)
    with contextlib.closing(OwnedFolder(FOLDERS)) as other, Sandbox(LIMITS, replace(layers(), bubblewrap="")):
        left.mkdir()
        with Sandbox(LIMITS, replace(layers(), bubblewrap="")):
            names = sorted(path.name for path in tmp_path.iterdir())
            assert not left.exists() and other.path.exists() and len(names) == 3, "those of living processes"
    assert list(tmp_path.iterdir()) == []


def test_what_comes_out_is_bounded(sandbox: Sandbox) -> None:
    with sandbox.open(limits=replace(LIMITS, output=10, images=2, pixels=100)) as session:
        ran = session.run("print('é' * 20)")
        assert ran.printed == "é" * 5 + "\n[31 more bytes]"
        ran = session.run("from PIL import Image\nshow(Image.new('RGB', (40, 20), 'red'))")
        ((name, image),) = ran.images
        assert name == "" and image.size == (14, 7) and image.getpixel((3, 3)) == (255, 0, 0)
        ran = session.run("for n in range(5): Image.new('L', (9, 9), 7).save(f'{n}.png')")
        assert [name for name, _ in ran.images] == ["0.png", "1.png"]
        ran = session.run("raise ValueError('x' * 99999)")
        assert len(ran.error) <= 4000 and ran.error.endswith("x")


def test_pictures_of_all_kinds_are_shown(sandbox: Sandbox) -> None:
    kinds = {
        "np.zeros((4, 6, 3), np.uint8)": (0, 0, 0),
        "np.ones((4, 6))": (255, 255, 255),
        "np.full((4, 6, 1), 128, np.int64)": (128, 128, 128),
        "np.ones((4, 6), bool)": (255, 255, 255),
        "Image.new('RGBA', (6, 4), (255, 0, 0, 0))": (255, 255, 255),
        "Image.new('P', (6, 4))": (0, 0, 0),
        "Image.new('CMYK', (6, 4))": (255, 255, 255),
        "Image.new('1', (6, 4), 1)": (255, 255, 255),
    }
    for value, colour in kinds.items():
        with sandbox.open() as session:
            ran = session.run(f"import numpy as np\nfrom PIL import Image\nshow({value})")
        assert [(i.size, i.mode, i.getpixel((1, 1))) for _, i in ran.images] == [((6, 4), "RGB", colour)], (value, ran)
    with sandbox.open() as session:
        ran = session.run("show(3)\nprint('never')")
        assert ran.error and not ran.images and not ran.ended


def test_a_file_is_returned_by_its_name(sandbox: Sandbox) -> None:
    from PIL import Image

    picture = Image.new("RGB", (8, 6), "blue")
    code = "from PIL import Image\nImage.open('path_to_input_image.jpg').rotate(90, expand=True).save('x/out.png')"
    with sandbox.open() as session:
        ran = session.run("import os; os.mkdir('x')\n" + code, [picture], ["path_to_input_image.jpg"], ["x/out.png"])
    assert [(name, i.size) for name, i in ran.images] == [("x/out.png", (6, 8))]


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (Layers("x86_64", True, 0, ""), "neither Landlock nor bubblewrap works here"),
        (Layers("x86_64", False, 7, "/usr/bin/bwrap"), "does not filter system calls"),
        (Layers("riscv64", True, 7, ""), "code cannot be confined on"),
    ],
)
def test_a_machine_that_cannot_confine_is_refused_in_words(here: Layers, words: str) -> None:
    with pytest.raises(EngineError, match=words) as told:
        Sandbox(here=here)
    assert told.value.hint


def test_a_sandbox_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(EngineError, match="the sandbox did not start"):
        Sandbox(LIMITS, replace(layers(), bubblewrap=""))
