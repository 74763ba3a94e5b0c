from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl.data.dataset import PreparedDataset
from vlmrl.data.dataset_writer import building, old_folder
from vlmrl.data.images import encode_png, image_hash
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.types import Media


def png(seed: int = 0) -> bytes:
    from PIL import Image

    return encode_png(Image.new("RGB", (4, 4), (seed, 0, 0)))


def make(target: Path, *, seed: int = 0, force: bool = False, args: dict | None = None, text: str = "") -> str:
    with building(target) as build:
        if text:
            build.write_text("passages.jsonl", text)
        data = png(seed)
        build.images.add(image_hash(data), data)
        row = {"prompt_id": "a", "truth": {"same": True}, "images": [Media(image_hash(data), 4, 4)], "note": f"n{seed}"}
        build.write_rows("train", [row])
        info = {"name": "d", "task": "digits", "levels": ["digit"], "args": args or {"seed": seed}}
        return build.finish(info, force=force)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_give_the_same_bytes_and_a_second_run_says_up_to_date(tmp_path: Path) -> None:
    assert make(tmp_path / "a") == "created" and make(tmp_path / "b") == "created"
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert make(tmp_path / "a") == "up to date"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_another_dataset_is_refused_and_left_as_it_was_unless_forced(tmp_path: Path) -> None:
    make(tmp_path / "a")
    before = files(tmp_path / "a")
    with pytest.raises(DataError, match=r"seed was 0, now 1.*nothing was written") as caught:
        make(tmp_path / "a", seed=1)
    assert "--force" in str(caught.value.hint) and files(tmp_path / "a") == before
    with pytest.raises(DataError, match="from other source data"):
        make(tmp_path / "a", seed=1, args={"seed": 0})
    assert make(tmp_path / "a", seed=1, force=True) == "replaced"
    assert files(tmp_path / "a") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_damaged_dataset_is_not_called_up_to_date(tmp_path: Path) -> None:
    make(tmp_path / "a")
    shard = tmp_path / "a" / "media-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-8] + bytes(8))
    with pytest.raises(DataError, match=r"media-00000\.arrow has other bytes"):
        make(tmp_path / "a")
    assert make(tmp_path / "a", force=True) == "replaced"


def test_force_never_removes_what_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="is not a dataset folder"):
        make(tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_what_is_no_dataset_is_refused_before_any_work(tmp_path: Path) -> None:
    """A table of one's own looks like a dataset but for dataset.json: it is never removed."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.parquet").write_bytes(b"the only copy")
    (tmp_path / "file").write_text("x")
    os.symlink("nowhere", tmp_path / "dangling")
    for name in ("rows", "file", "dangling"):
        with pytest.raises(DataError, match="is not replaced, not even with --force"), building(tmp_path / name):
            raise AssertionError("work was begun")
    assert (tmp_path / "rows" / "train.parquet").read_bytes() == b"the only copy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "rows"]


def test_a_file_beside_a_dataset_is_never_removed_and_is_no_reason_to_refuse_what_is_up_to_date(tmp_path: Path) -> None:
    make(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    assert make(tmp_path / "a") == "up to date"
    with pytest.raises(DataError, match=r"holds notes\.txt, which is not a file of a dataset, and is not replaced"):
        make(tmp_path / "a", seed=1, force=True)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert open_dataset(Data(path=str(tmp_path / "a"))).splits == {"train": 1}


def test_a_further_file_is_a_part_of_the_dataset(tmp_path: Path) -> None:
    make(tmp_path / "plain")
    assert make(tmp_path / "a", text="one\n") == "created" and make(tmp_path / "a", text="one\n") == "up to date"
    facts = [json.loads((tmp_path / name / "dataset.json").read_text()) for name in ("plain", "a")]
    assert "passages.jsonl" in facts[1]["files"] and facts[0]["fingerprint"] != facts[1]["fingerprint"]
    with pytest.raises(DataError, match="from other source data"):
        make(tmp_path / "a", text="two\n")
    (tmp_path / "a" / "passages.jsonl.fts5").write_text("index")  # of the tool `search`
    (tmp_path / "a" / "passages.jsonl.fts5.lock").write_text("")
    assert make(tmp_path / "a", text="two\n", force=True) == "replaced"
    assert not (tmp_path / "a" / "passages.jsonl.fts5").exists()
    assert (tmp_path / "a" / "passages.jsonl").read_text() == "two\n"


@pytest.mark.parametrize("name", ["passages.jsonl.bak", "passages.csv", "mine.jsonl", "mine.jsonl.fts5"])
def test_a_file_that_only_looks_like_a_further_one_is_never_removed(tmp_path: Path, name: str) -> None:
    make(tmp_path / "a", text="one\n")
    (tmp_path / "a" / name).write_text("mine")
    with pytest.raises(DataError, match="which is not a file of a dataset, and is not replaced"):
        make(tmp_path / "a", text="two\n", force=True)
    assert (tmp_path / "a" / name).read_text() == "mine"


def test_a_dataset_goes_into_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert make(tmp_path / "a") == "created"
    assert open_dataset(Data(path=str(tmp_path / "a"))).splits == {"train": 1}


def test_a_link_to_a_dataset_is_read_and_never_replaced(tmp_path: Path) -> None:
    make(tmp_path / "disk" / "a")
    os.symlink(tmp_path / "disk" / "a", tmp_path / "a")
    assert make(tmp_path / "a") == "up to date"
    with pytest.raises(DataError, match="is a link and is not replaced"):
        make(tmp_path / "a", seed=1, force=True)
    assert (tmp_path / "a").is_symlink() and open_dataset(Data(path=str(tmp_path / "a"))).splits == {"train": 1}


@pytest.mark.parametrize("place", ["file/a", "/proc/a"])
def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"/a cannot be made: "):
        make(tmp_path / place)


def test_a_full_disk_is_told_with_what_is_kept(tmp_path: Path) -> None:
    def fill(key: str | None) -> str:
        told = r"no room for .*/a: No space left on device"
        with pytest.raises(DataError, match=told) as caught, building(tmp_path / "a", key):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return str(caught.value.hint)

    assert "run the same command again" in fill("key") and (tmp_path / ".a.building").is_dir()
    assert fill(None) == "free disk space" and not list(tmp_path.iterdir())


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), building(tmp_path / "a") as build:
        build.write_rows("train", [{"prompt_id": "a", "truth": {"x": 1}, "images": []}])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import vlmrl.data.dataset_writer as build_module
from test_dataset_writer import make
point = {point!r}
real = os.rename
def rename(a, b):
    if point == "before rename" or (point == "between renames" and str(b).endswith("a")):
        os.kill(os.getpid(), signal.SIGKILL)
    real(a, b)
os.rename = rename
make(Path({target!r}), seed={seed}, force=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before rename", "between renames"])
def test_a_killed_run_leaves_the_old_dataset_or_none_and_the_next_one_says_what_it_found(
    tmp_path: Path, point: str
) -> None:
    target = tmp_path / "a"
    make(target)
    code = KILLED.format(folder=str(Path(__file__).parent), point=point, target=str(target), seed=1)
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    assert not (target / "dataset.json").exists() or json.loads((target / "dataset.json").read_text())["args"] == {
        "seed": 0
    }
    with building(target) as build:
        assert any("interrupted" in line for line in build.leftovers)
    assert PreparedDataset(target).info["args"] == {"seed": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert make(target) == "up to date"


def test_two_writers_of_one_dataset_do_not_meet(tmp_path: Path) -> None:
    code = f"""
import sys
from vlmrl.data.dataset_writer import building
with building({str(tmp_path / "a")!r}):
    print("in", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "in\n"
    with pytest.raises(DataError, match="another process is making"):
        make(tmp_path / "a")
    other.communicate(timeout=30)
    assert make(tmp_path / "a") == "created"


def test_a_copy_left_after_a_replacement_is_removed(tmp_path: Path) -> None:
    make(tmp_path / "a")
    old_folder(tmp_path / "a").mkdir()
    assert make(tmp_path / "a") == "up to date"
    assert not old_folder(tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda info: info.pop("task"), "has no `task`"),
        (lambda info: info.update(schema=99), "schema 99"),
        (lambda info: info["splits"].update(train={}), "no row count"),
        (lambda info: info["splits"]["train"].update(rows=5), "has 1 rows"),
    ],
)
def test_a_dataset_json_that_does_not_fit_is_a_clear_error(tmp_path: Path, damage, message: str) -> None:
    make(tmp_path / "a")
    path = tmp_path / "a" / "dataset.json"
    info = json.loads(path.read_text())
    damage(info)
    path.write_text(json.dumps(info))
    with pytest.raises(DataError, match=message):
        open_dataset(Data(path=str(tmp_path / "a"))).rows("train")


def test_an_unknown_split_names_those_that_exist(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(DataError, match="no split `test`") as caught:
        open_dataset(Data(path=str(tmp_path / "a"))).rows("test")
    assert "train (1 rows)" in str(caught.value.hint)


def test_rows_and_images_come_back_as_written(tmp_path: Path) -> None:
    make(tmp_path / "a", seed=7)
    dataset = open_dataset(Data(path=str(tmp_path / "a"), name="mine"))
    (row,) = dataset.rows("train")
    assert (row.prompt_id, row.source, row.task, row.truth, row.columns) == (
        "a",
        "mine",
        "digits",
        {"same": True},
        {"note": "n7"},
    )
    assert dataset.image_bytes(row.media[0]) == png(7) and dataset.image(row.media[0]).getpixel((0, 0)) == (7, 0, 0)
    assert os.fspath(dataset.path) == str(tmp_path / "a")


def test_rows_that_were_exchanged_are_no_rows_of_the_dataset(tmp_path: Path) -> None:
    """As many rows of the same columns, with other truths: dataset.json still names the fingerprint of the old ones."""
    import pyarrow.parquet as pq

    make(tmp_path / "set")
    path = next((tmp_path / "set").glob("*.parquet"))
    opened = PreparedDataset(tmp_path / "set")
    assert len(list(opened.rows(path.stem)))
    table = pq.read_table(path)
    pq.write_table(table.take(list(range(len(table)))[::-1]).replace_schema_metadata({b"a": b"b"}), path)
    with pytest.raises(DataError, match=r"was changed since dataset.json was written"):
        PreparedDataset(tmp_path / "set").rows(path.stem)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is a named pipe"):
        PreparedDataset(tmp_path / "set").rows(path.stem)
