"""Removal of whole runs: what a user names, only in the folder of runs; what failed before its first step moves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_builders import make_checkpoint, make_group, make_run

from vlmrl.errors import StoreError
from vlmrl.store.listing import run_ids
from vlmrl.store.removal import removable, remove_runs, set_aside
from vlmrl.store.runs import Run, open_run, resume_run


def ended(root: Path, status: str = "done", **settings) -> Run:
    run = make_run(root, **settings)
    run.finish(status)  # pyright: ignore[reportArgumentType]
    return run


def test_named_runs_are_removed_and_what_their_links_lead_to_stays(tmp_path: Path):
    root, outside = tmp_path / "runs", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    first, second, third = ended(root, name="a"), ended(root), ended(root)
    (first.dir / "link").symlink_to(outside, target_is_directory=True)
    (first.dir / "checkpoints").symlink_to(outside, target_is_directory=True)
    remove_runs(removable(root, ["a", second.id, "a"]))
    assert run_ids(root) == [third.id] and sorted(os.listdir(root)) == [third.id]
    assert (outside / "precious").read_text() == "mine"


def test_what_is_not_in_the_folder_of_runs_or_is_in_use_is_refused(tmp_path: Path):
    root, other = tmp_path / "runs", tmp_path / "other"
    stranger, writing = ended(other), make_run(root, name="busy")
    (root / stranger.id).symlink_to(stranger.dir, target_is_directory=True)
    for ref, words in {
        str(stranger.dir): "only runs there are removed",
        stranger.id: "only runs there are removed",
        "last": "another run after each removal",
        "nothing": "no run `nothing`",
    }.items():
        with pytest.raises(StoreError, match=words):
            removable(root, [ref])
    done = ended(root)
    with pytest.raises(StoreError, match="is being written by"):
        remove_runs([done.dir, writing.dir])
    assert done.dir.is_dir() and not (done.dir / "run.lock").exists()
    assert run_ids(root) and open_run(other, "last").id == stranger.id
    writing.finish()


def test_a_run_that_another_began_with_stays_unless_both_go(tmp_path: Path):
    parent = ended(tmp_path)
    make_checkpoint(parent.dir, 3)
    origin = {"run": parent.id, "checkpoint": "step-000003", "step": 3}
    child = ended(tmp_path, parent=origin)
    with pytest.raises(StoreError, match=f"{child.id} began with a checkpoint of run {parent.id}"):
        removable(tmp_path, [parent.id])
    assert removable(tmp_path, [parent.id, child.id]) == [parent.dir, child.dir]


@pytest.mark.parametrize("begun", ["train", "validation", "rollouts", "checkpoint", "done", "interrupted", ""])
def test_a_failed_run_moves_only_if_nothing_in_it_was_worked_out(tmp_path: Path, begun: str):
    run = make_run(tmp_path, name="mine")
    run.event(0, "parts")
    if begun in ("train", "validation"):
        run.log(0, begun, {"reward/mean": 0.0})
    if begun == "rollouts":
        run.write_rollouts(0, [make_group()])
    if begun == "checkpoint":
        make_checkpoint(run.dir, 1)
    run.finish("failed" if begun not in ("done", "interrupted") else begun)  # pyright: ignore[reportArgumentType]
    line = set_aside(run.dir)
    if begun:
        assert line == "" and run_ids(tmp_path) == [run.id]
    else:
        assert str(tmp_path / "unfinished" / run.id) in line and run_ids(tmp_path) == []
        assert open_run(tmp_path / "unfinished", "mine").status == "failed"


@pytest.mark.parametrize("before", ["done", "interrupted", "killed", "failed"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_resume_that_fails_before_its_first_step_leaves_the_status_as_it_was(
    tmp_path: Path, before: str, trains: bool
):
    run = make_run(tmp_path)
    run.log(0, "train", {"reward/mean": 0.0})
    run.close() if before == "killed" else run.finish(before)  # pyright: ignore[reportArgumentType]
    end = open_run(tmp_path, run.id).manifest.end
    for _ in range(2):  # the second one looks past the first
        again = resume_run(tmp_path, run.id)
        again.log(0, "validation", {"eval/metric": 0.0})
        if trains:
            again.log(0, "train", {"reward/mean": 0.0})
        again.finish("failed", "the base is gone")
        line = set_aside(run.dir)
        now = open_run(tmp_path, run.id)
        if trains or before == "failed":
            assert line == "" and (now.status, now.manifest.error) == ("failed", "the base is gone")
        else:
            assert line == f"the resume failed before its first step: the run is {before}, as before"
            assert (now.status, now.manifest.error, now.manifest.end) == (before, None, end)
        assert now.manifest.attempts[-1].status == "failed"


def test_a_link_in_the_place_of_unfinished_is_not_followed(tmp_path: Path):
    root, outside = tmp_path / "runs", tmp_path / "outside"
    outside.mkdir()
    run = ended(root, "failed")
    (root / "unfinished").symlink_to(outside, target_is_directory=True)
    assert "is a link" in set_aside(run.dir)
    assert run_ids(root) == [run.id] and list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["web", "20260718-101500-digits-3f2a"])
@pytest.mark.parametrize("content", ['{"name": "my app"}', '{"schema": 1}', "", None])
def test_only_what_is_recognised_as_a_run_is_removed(tmp_path: Path, name: str, content: str | None):
    """A damaged run has the name of a run and an entry of one."""
    (tmp_path / name / "src").mkdir(parents=True)
    if content is not None:
        (tmp_path / name / "manifest.json").write_text(content)
    if content is not None and name != "web":
        assert removable(tmp_path, [name]) == [tmp_path / name]
    else:
        with pytest.raises(StoreError, match=r"nothing shows that it is a run|there are no runs"):
            removable(tmp_path, [name])
    assert (tmp_path / name / "src").is_dir()


def test_a_file_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = ended(tmp_path)
    (run.dir / "kept-out").mkdir()
    (run.dir / "kept-out" / "file").write_text("x")
    unlink = os.unlink

    def refuse(path, **settings):
        if str(path) == "file":
            raise PermissionError(13, "Permission denied")
        unlink(path, **settings)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StoreError, match="cannot be deleted") as error:
        remove_runs([run.dir])
    assert Path(str(error.value.where)).read_text() == "x"
    assert str(Path(str(error.value.where)).parents[1]) in str(error.value.hint)
