"""Two processes never write one run; a dead owner is recognised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from store_builders import make_run

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.lock import Owner, RunLock, force_release, owner_state, read_owner, this_process
from vlmrl.store.runs import open_run, resume_run
from vlmrl.store.summary import describe
from vlmrl.train.resume import ResumeRequest, plan_resume

HOLD = """
import sys, time
from vlmrl.store.runs import resume_run
from vlmrl.store.summary import describe
run = resume_run({root!r}, {ref!r})
print("held", flush=True)
{then}
"""


def hold(root: Path, ref: str, then: str = "time.sleep(60)") -> subprocess.Popen:
    """A process that takes the run; it has it when this returns."""
    code = HOLD.format(root=str(root), ref=ref, then=then)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "held"
    return process


def write_owner(run_dir: Path, owner: Owner) -> None:
    (run_dir / layout.LOCK).write_text(json.dumps(asdict(owner)))


def test_a_living_owner_is_named_and_keeps_the_run(tmp_path: Path):
    with make_run(tmp_path) as run:
        pass
    RunLock(run.dir).refuse_living()
    process = hold(tmp_path, run.id)
    try:
        with pytest.raises(StoreError, match=f"written by process {process.pid} on"):
            resume_run(tmp_path, run.id)
        with pytest.raises(StoreError, match=f"written by process {process.pid} on"):
            plan_resume(tmp_path, ResumeRequest(run.id, run.manifest.kind))  # before it reads what may go meanwhile
        assert open_run(tmp_path, run.id).status == "running"
        with pytest.raises(StoreError, match="on this machine is running"):
            force_release(run.dir)
    finally:
        process.kill()
        process.wait()
    killed = open_run(tmp_path, run.id)
    assert killed.status == "killed" and describe(killed)["attempts"][-1]["status"] == "killed"
    resume_run(tmp_path, run.id).finish()


def test_the_same_process_cannot_take_a_run_twice(tmp_path: Path):
    run = make_run(tmp_path)
    with pytest.raises(StoreError, match=f"process {os.getpid()} "):
        resume_run(tmp_path, run.id)
    run.finish()
    resume_run(tmp_path, run.id).finish()


def test_a_zombie_does_not_hold_a_run(tmp_path: Path):
    with make_run(tmp_path) as run:
        pass
    process = hold(tmp_path, run.id)
    process.kill()
    try:
        deadline = time.monotonic() + 10
        while open_run(tmp_path, run.id).status == "running" and time.monotonic() < deadline:
            time.sleep(0.02)
        resume_run(tmp_path, run.id).finish()
    finally:
        process.wait()


def test_a_child_left_behind_by_a_dead_owner_does_not_hold_the_run(tmp_path: Path):
    with make_run(tmp_path) as run:
        pass
    orphan = "import os\npid = os.fork()\nif pid == 0:\n    time.sleep(30)\nprint(pid, flush=True)\nos._exit(9)"
    process = hold(tmp_path, run.id, orphan)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.wait()
        resume_run(tmp_path, run.id).finish()
    finally:
        os.kill(child, 9)


def test_a_process_id_that_was_given_to_somebody_else_is_a_dead_owner(tmp_path: Path):
    me = this_process()
    assert owner_state(me) == "alive"
    assert owner_state(replace(me, process_start=str(int(me.process_start) + 1))) == "dead"
    assert owner_state(replace(me, pid=2**22 + 12345)) == "dead"


def test_an_owner_before_the_reboot_is_dead_and_one_elsewhere_cannot_be_asked():
    me = this_process()
    assert owner_state(replace(me, boot_id="another")) == "dead"
    assert owner_state(replace(me, boot_id="another", host="another")) == "elsewhere"
    assert owner_state(replace(me, pid_namespace="pid:[1]")) == "elsewhere"


def test_an_owner_on_another_machine_keeps_the_run_until_it_is_unlocked(tmp_path: Path):
    run = make_run(tmp_path)
    run.close()
    write_owner(run.dir, replace(this_process(), host="node7", boot_id="another"))
    assert open_run(tmp_path, run.id).status == "running"
    with pytest.raises(StoreError, match="on node7, which cannot be seen") as caught:
        resume_run(tmp_path, run.id)
    assert f"vlmrl runs unlock {run.id}" in (caught.value.hint or "")
    owner = force_release(run.dir)
    assert owner is not None and owner.host == "node7"
    resume_run(tmp_path, run.id).finish()


def test_an_owner_in_another_container_of_this_machine_is_dead_when_its_file_lock_is_free(tmp_path: Path):
    run = make_run(tmp_path)
    run.close()
    write_owner(run.dir, replace(this_process(), host="container", pid_namespace="pid:[1]"))
    resume_run(tmp_path, run.id).finish()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_lock_file_torn_by_a_kill_does_not_hold_a_run(tmp_path: Path, content: str):
    run = make_run(tmp_path)
    run.close()
    (run.dir / layout.LOCK).write_text(content)
    assert read_owner(run.dir) is None and open_run(tmp_path, run.id).status == "killed"
    resume_run(tmp_path, run.id).finish()


@pytest.mark.slow
def test_of_many_processes_exactly_one_gets_the_run(tmp_path: Path):
    with make_run(tmp_path) as run:
        pass
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from vlmrl.errors import StoreError\nfrom vlmrl.store.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\nsys.stdin.readline()\n"
        "try:\n    lock.acquire(); print('got', flush=True); sys.stdin.read()\n"
        "except StoreError:\n    print('no', flush=True)\n"
    )
    arguments = [sys.executable, "-c", code, str(run.dir)]
    made = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    said = []
    for process in made:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in made:
        assert process.stdout is not None
        said.append(process.stdout.readline().strip())
    for process in made:
        process.communicate()
    assert sorted(said) == ["got"] + ["no"] * 5


def test_a_file_lock_that_is_held_is_respected_whatever_the_file_says(tmp_path: Path):
    import fcntl

    run = make_run(tmp_path)
    run.close()
    for content, message in (("", "being opened by another"), (elsewhere(), "cannot be seen from here")):
        (run.dir / layout.LOCK).write_text(content)
        with open(run.dir / layout.LOCK, "r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(StoreError, match=message):
                resume_run(tmp_path, run.id)
    resume_run(tmp_path, run.id).finish()


def elsewhere() -> str:
    return json.dumps(asdict(replace(this_process(), host="container", pid_namespace="pid:[1]")))


def test_one_whose_lock_was_taken_away_does_not_remove_the_next_owners(tmp_path: Path):
    run = make_run(tmp_path)
    (run.dir / layout.LOCK).unlink()
    second = RunLock(run.dir)
    second.acquire()
    run.close()
    assert (run.dir / layout.LOCK).exists()
    second.release()
    assert not (run.dir / layout.LOCK).exists()


def test_releasing_twice_does_not_take_the_lock_of_the_next_owner(tmp_path: Path):
    run = make_run(tmp_path)
    run.close()
    first, second = RunLock(run.dir), RunLock(run.dir)
    first.acquire()
    first.release()
    second.acquire()
    first.release()
    assert (run.dir / layout.LOCK).exists()
    second.release()
    assert not (run.dir / layout.LOCK).exists()
