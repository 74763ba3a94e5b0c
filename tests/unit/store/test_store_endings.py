"""How a run's record says that it failed: on a disk that is full, and when another process knows better why."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from store_builders import make_run

from vlmrl.errors import CheckpointError, StoreError, exit_of
from vlmrl.store import files, layout
from vlmrl.store.lock import read_owner
from vlmrl.store.manifest import MAX_ERROR_CHARS, Status, read_manifest, record_end
from vlmrl.store.runs import open_run


def test_a_disk_too_full_for_the_manifest_does_not_hide_what_happened(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = make_run(tmp_path)
    with pytest.raises(CheckpointError, match="could not be saved"), run:
        monkeypatch.setattr(files.os, "replace", full)
        raise CheckpointError("the checkpoint of step 4 could not be saved")
    monkeypatch.undo()
    assert not run.writable and open_run(tmp_path, run.id).status == "killed", "its lock is given back"


def test_a_run_on_a_full_disk_says_why_it_failed_in_the_room_that_its_lock_kept(tmp_path: Path, monkeypatch) -> None:
    run, replace = make_run(tmp_path), files.os.replace
    owner = read_owner(run.dir)

    def full(*names: Path) -> None:
        if (run.dir / layout.LOCK).stat().st_size > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert read_owner(run.dir) == owner, "still locked"
        replace(*names)

    with pytest.raises(StoreError, match="No space left"), run:
        monkeypatch.setattr(files.os, "replace", full)
        run.add_label("one more")
    ended = open_run(tmp_path, run.id)
    assert ended.status == "failed" and "No space left on device" in (ended.manifest.error or "")


def test_a_failure_of_our_own_making_is_still_raised_where_the_run_ended_well(tmp_path: Path, monkeypatch) -> None:
    run = make_run(tmp_path)
    with pytest.raises(StoreError, match="cannot write"), run:
        monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert not run.writable


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_no_bug_wherever_it_strikes(number: int) -> None:
    code, text = exit_of(OSError(number, "No space left on device", "/data/runs/x"))
    assert code == 2 and text.startswith("error: cannot write to the disk: No space left on device\n  --> /data")
    assert "vlmrl runs du" in text and "Traceback" not in text


def test_a_name_that_no_file_system_takes_is_no_bug(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long") as caught:
        (tmp_path / ("x" * 300)).stat()
    code, text = exit_of(caught.value)
    assert code == 2 and text.startswith("error: a name is too long: File name too long\n  --> ")
    assert " ... xxx" in text and "255 bytes" in text and len(text) < 350


def test_other_errors_of_the_system_are_bugs() -> None:
    code, text = exit_of(OSError(errno.EBADF, "Bad file descriptor"))
    assert code == 1 and "internal error: OSError" in text


def test_the_launcher_corrects_why_a_run_failed_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path, name="mine")
    run.finish("failed", "RuntimeError: connection closed by peer")
    before = read_manifest(run.dir)
    record_end(run.dir, "failed", "rank 1 was killed by SIGKILL; Authorization: Bearer " + "s3cr3ts3cr3t" + "x" * 3000)
    after = read_manifest(run.dir)
    assert after.error is not None and after.error.startswith("rank 1 was killed by SIGKILL")
    assert len(after.error) <= MAX_ERROR_CHARS and "s3cr3t" not in after.error
    assert (after.status, after.end, after.attempts, after.name) == (
        before.status,
        before.end,
        before.attempts,
        before.name,
    )


def test_the_launcher_ends_a_run_whose_writer_was_killed_before_it_could(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_end(run.dir, None, "rank 1 was killed")
    assert read_manifest(run.dir).status == "running", "its writer may live"
    record_end(run.dir, "interrupted", "")
    after = read_manifest(run.dir)
    assert (after.status, after.error, after.attempts[-1].status) == ("interrupted", "rank 1 was killed", "interrupted")
    assert after.end is not None and after.end == after.attempts[-1].end
    run.close()


def test_a_failure_elsewhere_replaces_interrupted_and_nothing_else(tmp_path: Path) -> None:
    """A rank that is told to end because another one was killed writes `interrupted`; the run has failed."""
    cases: list[tuple[Status, Status | None, Status]] = [
        ("interrupted", "failed", "failed"),
        ("interrupted", "interrupted", "interrupted"),
        ("interrupted", None, "interrupted"),
        ("done", "failed", "done"),
    ]
    for number, (stored, status, expected) in enumerate(cases):
        run = make_run(tmp_path / str(number))
        run.finish(stored)
        record_end(run.dir, status, "rank 1 was killed")
        after = read_manifest(run.dir)
        assert after.status == after.attempts[-1].status == expected


def test_an_interrupted_run_is_not_called_failed_for_what_followed(tmp_path: Path) -> None:
    """At the second Ctrl-C, one rank may end first; the writer then fails for its closed connection."""
    run = make_run(tmp_path)
    run.finish("failed", "RuntimeError: connection closed by peer")
    record_end(run.dir, "interrupted", "")
    after = read_manifest(run.dir)
    assert (after.status, after.attempts[-1].status, after.error) == ("interrupted", "interrupted", None)
