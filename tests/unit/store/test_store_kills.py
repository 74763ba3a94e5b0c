"""Killed at a named point, a run opens, says what it is, and can be resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_builders import make_checkpoint, make_group, make_run

from vlmrl.store import layout
from vlmrl.store.files import EXIT_CODE, VARIABLE, leftovers
from vlmrl.store.listing import list_runs
from vlmrl.store.manifest import read_manifest
from vlmrl.store.runs import open_run, resume_run
from vlmrl.store.verify import verify_run

BUILDERS = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom store_builders import *\n"


def die(root: Path, ref: str, point: str, body: str) -> None:
    """Resume the run in a process of its own, run `body`, and be killed at `point`."""
    code = f"{BUILDERS}from vlmrl.store.runs import resume_run\nrun = resume_run({str(root)!r}, {ref!r})\n{body}\n"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: point}, capture_output=True, text=True
    )
    assert done.returncode == EXIT_CODE, done.stderr


def test_without_the_variable_a_crash_point_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with make_run(tmp_path) as run:
        run.write_rollouts(0, [make_group()])


@pytest.mark.slow
def test_killed_in_the_middle_of_a_rollout_file(tmp_path: Path):
    run = make_run(tmp_path)
    run.close()
    body = (
        "run.write_rollouts(0, [make_group(0)])\nrun.log(0, 'train', {'x': 1})\nrun.write_rollouts(1, [make_group(1)])"
    )
    die(tmp_path, run.id, "mid-rollout:2", body)
    reader = open_run(tmp_path, run.id)
    assert reader.status == "killed" and list(reader.rollout_files()) == [0] and len(reader.metrics()) == 1
    half = leftovers(run.dir)
    assert len(half) == 1 and half[0].stat().st_size > 0
    result = verify_run(run.dir)
    assert [p.where for p in result.warnings] == [str(half[0])]
    with resume_run(tmp_path, run.id) as again:
        assert leftovers(run.dir) == [] and again.attempt == 3
        again.write_rollouts(0, [make_group(0, "again")])
        assert again.read_rollouts(0)[0].row.prompt_id == "again"


def test_killed_in_the_middle_of_the_manifest(tmp_path: Path):
    run = make_run(tmp_path, note="kept")
    run.close()
    die(tmp_path, run.id, "mid-manifest:2", "run.update(note='lost')")
    reader = open_run(tmp_path, run.id)
    assert reader.manifest.note == "kept" and reader.status == "killed" and len(reader.manifest.attempts) == 2
    resume_run(tmp_path, run.id).finish()
    assert [a.status for a in read_manifest(run.dir).attempts] == ["killed", "killed", "done"]


def test_killed_while_a_run_is_made_leaves_no_run(tmp_path: Path):
    code = f"{BUILDERS}make_run(Path({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: "mid-manifest"}, capture_output=True
    )
    assert done.returncode == EXIT_CODE
    assert [p.name[:5] for p in tmp_path.iterdir()] == [".tmp-"]
    assert list_runs(tmp_path) == []
    (half,) = tmp_path.iterdir()
    make_run(tmp_path).finish()
    assert half.exists()
    os.utime(half, (1, 1))
    make_run(tmp_path).finish()
    assert not half.exists() and len(list_runs(tmp_path)) == 2


def test_killed_in_the_middle_of_pruning_leaves_whole_checkpoints_only(tmp_path: Path):
    run = make_run(tmp_path)
    for step in (1, 2, 3):
        run.log(step - 1, "train", {})
        make_checkpoint(run.dir, step)
    run.close()
    die(tmp_path, run.id, "mid-prune", "run.prune_checkpoints(1)")
    reader = open_run(tmp_path, run.id)
    assert [p.name for p in reader.checkpoint_dirs()] == ["step-000002", "step-000003"]
    assert [p.name.startswith(".trash-step-000001-") for p in leftovers(run.dir)] == [True]
    assert not verify_run(run.dir).errors
    with resume_run(tmp_path, run.id) as again:
        assert leftovers(run.dir) == []
        again.prune_checkpoints(1)
        assert [p.name for p in again.checkpoint_dirs()] == ["step-000003"]


def test_killed_between_rename_and_marker_the_checkpoint_does_not_exist(tmp_path: Path):
    run = make_run(tmp_path)
    run.log(0, "train", {})
    make_checkpoint(run.dir, 1)
    run.close()
    body = (
        "from vlmrl.store.files import crash_point\nmake_checkpoint(run.dir, 2, complete=False)\n"
        "crash_point('before-complete')\n(run.dir / 'checkpoints/step-000002/COMPLETE').write_text('')"
    )
    die(tmp_path, run.id, "before-complete", body)
    assert [p.name for p in open_run(tmp_path, run.id).checkpoint_dirs()] == ["step-000001"]
    result = verify_run(run.dir)
    assert not result.errors and "no COMPLETE" in result.warnings[0].message
    with resume_run(tmp_path, run.id) as again:
        assert again.start_step == 1 and not layout.checkpoint_dir(run.dir, 2).exists()


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_metrics_cut_at_any_byte_lose_that_line_only(tmp_path: Path, cut: int):
    run = make_run(tmp_path)
    for step in range(3):
        run.log(step, "train", {"x": step})
    run.close()
    path = run.dir / layout.METRICS
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    kept = 3 if cut == 1 else 2
    assert len(open_run(tmp_path, run.id).metrics()) == kept
    with resume_run(tmp_path, run.id, from_step=0) as again:
        again.log(0, "train", {"x": 9})
        assert [(n["step"], n["x"]) for n in again.metrics()] == [(0, 9)]
    result = verify_run(run.dir)
    assert not result.errors and len(result.warnings) == (0 if cut == 1 else 1)
