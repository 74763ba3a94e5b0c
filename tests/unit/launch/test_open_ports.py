"""Ports and files of a run of two ranks: nobody else can join it or hand it an object."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import warm
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as c10d

from vlmrl.dist import world as worlds

RANK = """
import os, sys, time
from pathlib import Path
from vlmrl.dist import world as rank_process
from vlmrl.dist.world import MEETING_VARIABLE, join_world

out = Path(sys.argv[1])
out.joinpath(f"folder-{os.environ['RANK']}").write_text(str(Path(os.environ[MEETING_VARIABLE]).parent))
rank_process.begin()
with join_world("cpu", timeout_seconds=60) as world:
    import torch.distributed as dist
    assert world.gather(world.rank) == [0, 1]
    values = [None] * world.size
    dist.all_gather_object(values, {"rank": world.rank})  # as torch's checkpoints do
    assert values == [{"rank": 0}, {"rank": 1}]
    assert world.apart().gather("x" * 100) == ["x" * 100] * 2
    out.joinpath(f"up-{world.rank}").write_text(str(os.getpid()))
    while not out.joinpath("go").exists():
        time.sleep(0.05)
    world.wait()
rank_process.leave(0)
"""
LAUNCH = """
import sys
from vlmrl.launch.ranks import Job, launch

ending, _ = launch(Job((sys.argv[1], sys.argv[2]), 2, env={"OMP_NUM_THREADS": "1"}, timeout_seconds=60))
sys.exit(ending.code)
"""
LOOPBACK = {"127.0.0.1", "::1"}


class Payload:
    """Object that writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def launched(tmp_path: Path) -> subprocess.Popen[str]:
    """A launcher whose two ranks are in their world and wait for the file `go`."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    words = [sys.executable, "-c", LAUNCH, str(script), str(tmp_path)]
    env = {**os.environ, warm.NEST: "1"}
    launcher = warm.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for _ in range(1200):
        if all(tmp_path.joinpath(f"up-{rank}").exists() for rank in (0, 1)):
            return launcher
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    launcher.kill()
    raise AssertionError("the ranks did not start")


@pytest.mark.slow
def test_no_port_is_open_to_others_and_what_a_stranger_sends_is_not_unpickled(tmp_path: Path) -> None:
    launcher = launched(tmp_path)
    try:
        processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        ports = [c.laddr for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert {port.ip for port in ports} <= LOOPBACK
        folder = Path(tmp_path.joinpath("folder-0").read_text())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
        for port in ports:
            with socket.create_connection((port.ip, port.port), timeout=5) as stranger:
                stranger.sendall(pickle.dumps(Payload(tmp_path / "ran")))
        tmp_path.joinpath("go").touch()
        assert launcher.wait(120) == 0, launcher.communicate()[0]
        assert not tmp_path.joinpath("ran").exists() and not folder.exists()
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_rank_and_no_folder(tmp_path: Path) -> None:
    launcher = launched(tmp_path)
    folder = Path(tmp_path.joinpath("folder-0").read_text())
    ranks = [int(tmp_path.joinpath(f"up-{rank}").read_text()) for rank in (0, 1)]
    launcher.kill()
    launcher.communicate()
    for _ in range(300):
        if not folder.exists() and not any(psutil.pid_exists(pid) for pid in ranks):
            return
        time.sleep(0.1)
    raise AssertionError((folder.exists(), [psutil.pid_exists(pid) for pid in ranks]))


def test_an_object_without_a_signature_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_object_to_tensor", "_tensor_to_object"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))  # put back at the end
    pack = c10d._object_to_tensor
    worlds._sign_objects(b"k" * 32)
    tensor, size = c10d._object_to_tensor({"a": 1}, "cpu", None)
    assert c10d._tensor_to_object(tensor, size, None) == {"a": 1}
    forged, forged_size = pack(Payload(tmp_path / "ran"), "cpu", None)
    changed = torch.cat([tensor[:-1], tensor[-1:] + 1])
    for given, length in ((forged, forged_size), (changed, size)):
        with pytest.raises(RuntimeError, match="not signed"):
            c10d._tensor_to_object(given, length, None)
    assert not tmp_path.joinpath("ran").exists()


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    store = HashStore()
    tmp_path.chmod(0o755)
    with pytest.raises(OSError, match="open to other users"):
        worlds._shared_key(store, 0, str(tmp_path / "ranks"))
    tmp_path.chmod(0o700)
    keys = {worlds._shared_key(store, rank, str(tmp_path / "ranks")) for rank in (0, 1)}
    assert len(keys) == 1 and len(keys.pop()) == 32


@pytest.mark.slow
def test_a_world_that_waits_for_others_says_so_and_can_be_interrupted(tmp_path: Path) -> None:
    code = "from vlmrl.dist.world import join_world\nwith join_world('cpu'): pass"
    left = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        left["MASTER_PORT"] = str(free.getsockname()[1])
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | left, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(2)
        assert process.wait(20) != 0
    finally:
        process.kill()
        process.communicate()
    assert "waits at 127.0.0.1" in line and "3 more processes" in line and "WORLD_SIZE=4" in line
