"""Removal of whole runs: what a user names, only in the folder of runs; what failed before its first step moves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_builders import make_checkpoint, make_group, make_run

from vlmrl.errors import StoreError
from vlmrl.store.listing import run_ids
from vlmrl.store.open_run import open_run
from vlmrl.store.removal import removable, remove_runs, set_aside
from vlmrl.store.runs import Run


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
