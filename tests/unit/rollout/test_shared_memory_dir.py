"""A folder in memory is gone with its owner: at the end, or at the next start after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl import owned_folder
from vlmrl.rollout.vllm import transports
from vlmrl.rollout.vllm.transports import PREFIX, SharedFolder

HOLD = """
import sys, time
from pathlib import Path
from vlmrl.rollout.vllm.transports import SharedFolder
folder = SharedFolder(Path(sys.argv[1]))
(folder.path / "adapter").write_text("weights")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_a_closed_folder_is_gone(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    (folder.path / "deep").mkdir()
    assert folder.path.name.startswith(PREFIX) and list(tmp_path.iterdir()) == [folder.path]
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_it_is_made_in_memory_unless_told() -> None:
    folder = SharedFolder()
    assert not transports.TMPFS.is_dir() or folder.path.parent == transports.TMPFS
    folder.close()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_never(tmp_path: Path) -> None:
    (tmp_path / "somebody else's").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        SharedFolder(tmp_path).close()
        assert (theirs / "adapter").exists(), "a living owner was robbed"
    finally:
        process.kill()
        process.communicate()
    assert theirs.exists()
    own = SharedFolder(tmp_path)
    assert not theirs.exists() and {p.name for p in tmp_path.iterdir()} == {own.path.name, "somebody else's"}
    own.close()


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_folder_that_is_taken_away_before_it_is_held_is_made_anew(tmp_path: Path, monkeypatch, moment: str) -> None:
    """Between its making and its lock another process may take it for a dead one's."""
    make, lock, made = owned_folder.tempfile.mkdtemp, owned_folder.fcntl.flock, []

    def cleaned_up(when: str) -> None:
        if when == moment and len(made) == 1:
            Path(made[0]).rmdir()

    def mkdtemp(**options) -> str:
        made.append(make(**options))
        cleaned_up("before it is opened")
        return made[-1]

    def flock(handle: int, how: int) -> None:
        cleaned_up("before it is locked")
        lock(handle, how)

    monkeypatch.setattr(owned_folder.tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(owned_folder.fcntl, "flock", flock)
    folder = SharedFolder(tmp_path)
    assert len(made) == 2 and str(folder.path) == made[1] and folder.path.is_dir() and not Path(made[0]).exists()
    folder.close()


@pytest.mark.parametrize("what", ["held", "gone"])
def test_a_lock_is_refused_for_a_folder_that_is(tmp_path: Path, what: str) -> None:
    folder = SharedFolder(tmp_path)
    if what == "gone":
        folder.close()
    assert owned_folder._lock(folder.path) is None
    folder.close()


SHARE = """
import mmap, os, subprocess, sys, time
from pathlib import Path
def share(name):
    with open(name, "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)
if len(sys.argv) == 3:
    held = share(sys.argv[2])
    print("ready", flush=True)
    time.sleep(600)
from vlmrl.rollout.vllm.transports import SharedFolder
folder, held = SharedFolder(Path(sys.argv[1])), share(sys.argv[2])
below = subprocess.Popen([sys.executable, __file__, sys.argv[1], sys.argv[3]], stdout=subprocess.PIPE)
below.stdout.readline()
folder.adopt_segments()
print(below.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not (transports.TMPFS.is_dir() and Path("/proc/self/maps").exists()), reason="Linux's own")
def test_shared_memory_of_a_killed_engine_is_removed_by_the_next_that_makes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "share.py").write_text(SHARE)
    names = [transports.TMPFS / f"vlmrl-test-{part}-{os.getpid()}" for part in ("own", "below")]
    other = transports.TMPFS / f"vlmrl-test-other-{os.getpid()}"
    other.write_text("somebody else's")
    folders = tmp_path / "folders"
    folders.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "share.py"), str(folders), *map(str, names)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        below = int(process.stdout.readline())
        SharedFolder(folders).close()
        assert all(name.exists() for name in names), "a living owner was robbed"
        process.kill()
        os.kill(below, signal.SIGKILL)
        process.communicate()
        SharedFolder(folders).close()
        assert not any(name.exists() for name in names) and other.exists()
    finally:
        for name in (*names, other):
            name.unlink(missing_ok=True)


def test_no_name_leads_out_of_the_place_of_shared_memory(tmp_path: Path) -> None:
    """What is in such a folder is not to be trusted."""
    dead, victim = tmp_path / f"{PREFIX}dead", tmp_path / "victim"
    dead.mkdir()
    victim.write_text("precious")
    (dead / transports.SEGMENTS).write_text(f"{victim}\n../../{victim}\n\n.\n..")
    SharedFolder(tmp_path).close()
    assert victim.exists() and not dead.exists()
