"""What a killed merge leaves beside its folder: removed and told by the next one, unless in use."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from vlmrl.checkpoint.merge import _writing, merge, remove_leftovers
from vlmrl.errors import CheckpointError


def left(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    return path


def test_leftovers_of_this_folder_go_and_all_else_stays(tmp_path):
    gone = [left(tmp_path, ".tmp-model-123-0a1b2c"), left(tmp_path, ".trash-model-124-aaaaaa")]
    names = ("model", ".tmp-model-2-123-0a1b2c", ".tmp-other-1-aaaaaa", "tmp-model-1-aaaaaa")
    stay = [left(tmp_path, n) for n in names]
    told = remove_leftovers(tmp_path / "model")
    assert not any(p.exists() for p in gone) and all(p.exists() for p in stay)
    assert len(told) == 2 and all("interrupted merge" in line for line in told)
    assert remove_leftovers(tmp_path / "model") == []
    assert remove_leftovers(tmp_path / "nowhere" / "model") == []


def test_a_merge_that_is_running_keeps_its_folder(tmp_path):
    path = left(tmp_path, ".tmp-model-123-0a1b2c")
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert remove_leftovers(tmp_path / "model") == [] and path.exists()
    os.close(lock)
    assert len(remove_leftovers(tmp_path / "model")) == 1


def test_a_refused_merge_says_what_it_found_too(tmp_path):
    left(tmp_path, "model"), left(tmp_path, ".tmp-model-123-0a1b2c")
    with pytest.raises(CheckpointError, match=r"exists; an interrupted merge had left \.tmp-model-123-0a1b2c"):
        merge(tmp_path / "checkpoint", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"half"


@pytest.mark.parametrize("place", ["run", "models"])
def test_the_folder_of_a_run_that_was_removed_is_not_left_by_a_merge_into_it(tmp_path: Path, place: str):
    run, out = tmp_path / "run", tmp_path / place / "merged"
    out.parent.mkdir()
    with pytest.raises(FileNotFoundError), _writing(out, run) as temp:
        shutil.rmtree(out.parent)
        temp.mkdir(parents=True)  # as `save_pretrained` does
        raise FileNotFoundError
    assert out.parent.exists() == (place != "run")
