from __future__ import annotations

import os
import random
import stat
import struct
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from PIL import Image

from vlmrl.data import image_folders as labelled_module
from vlmrl.data.image_folders import Labelled, check_name
from vlmrl.data.images import encode_png, image_hash
from vlmrl.errors import DataError
from vlmrl.types import LeftOut

LEVELS = ["alphabet", "character"]


def png(seed: int) -> bytes:
    return encode_png(Image.new("RGB", (4, 4), (seed, 0, 0)))


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as out:
        for name, data in files.items():
            out.writestr(name, data)
    return path


def read_labelled(source: Path, levels: list[str], workers: int | None = None) -> Labelled:
    with TemporaryDirectory() as work:
        return labelled_module.read_labelled(source, levels, Path(work), workers=workers)


def reasons(dropped: list[LeftOut]) -> dict[str, str]:
    return {row.origin: row.reason for row in dropped}


def test_the_last_folders_above_a_file_are_its_names_in_a_folder_and_in_an_archive(tmp_path: Path) -> None:
    files = {"set/Greek/alpha/1.png": png(1), "set/Greek/beta/2.png": png(2), "set/Latin/alpha/3.PNG": png(3)}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    from_folder = read_labelled(tmp_path / "set", LEVELS)
    from_zip = read_labelled(archive(tmp_path / "set.zip", files), LEVELS)
    assert [one.labels for one in from_zip.images] == [("Greek", "alpha"), ("Greek", "beta"), ("Latin", "alpha")]
    assert [(one.labels, one.media) for one in from_folder.images] == [
        (one.labels, one.media) for one in from_zip.images
    ]
    assert from_folder.fingerprint == from_zip.fingerprint
    assert from_zip.collection.read(from_zip.images[1].place) == png(2)


def test_what_cannot_be_used_is_dropped_with_its_reason_and_nothing_is_written(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a/b/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = archive(
        tmp_path / "set.zip",
        {
            "a/b/good.png": png(1),
            "a/b/broken.png": png(2)[:45],
            "a/b/text.png": b"hello",
            "../../evil/a/b/out.png": png(3),
            "/abs/a/b/out.png": png(4),
            "a\\b\\win.png": png(5),
            "lonely.png": png(6),
            "a/b;c/name.png": png(7),
            "__MACOSX/a/b/._good.png": b"x",
            "a/b/.hidden.png": png(8),
            "a/b/readme.txt": b"read me",
            "a/b/Thumbs": b"x",
        },
    )
    with zipfile.ZipFile(path, "a") as out:
        out.writestr(link, "/etc/passwd")
    before = sorted(tmp_path.rglob("*"))
    made = read_labelled(path, LEVELS)
    assert [one.origin for one in made.images] == ["a/b/good.png"]
    found = reasons(made.dropped)
    assert "not an image" in found["a/b/text.png"] and "broken image" in found["a/b/broken.png"]
    assert found["../../evil/a/b/out.png"] == found["/abs/a/b/out.png"] == "its path leaves the archive"
    assert found["a\\b\\win.png"].startswith("its path leaves") and found["a/b/link.png"].startswith("a link")
    assert found["lonely.png"].startswith("0 folders above the file") and "'b;c'" in found["a/b;c/name.png"]
    assert made.ignored == {"(no ending)": 1, ".txt": 1, "hidden": 2}
    assert len(found) == 8 and sorted(tmp_path.rglob("*")) == before


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside" / "c").mkdir(parents=True)
    (tmp_path / "outside" / "c" / "secret.png").write_bytes(png(9))
    (tmp_path / "set" / "a" / "b").mkdir(parents=True)
    (tmp_path / "set" / "a" / "b" / "good.png").write_bytes(png(1))
    os.symlink(tmp_path / "outside" / "c" / "secret.png", tmp_path / "set" / "a" / "b" / "link.png")
    os.symlink(tmp_path / "outside", tmp_path / "set" / "linked")
    os.mkfifo(tmp_path / "set" / "a" / "b" / "pipe.png")
    made = read_labelled(tmp_path / "set", LEVELS)
    assert [one.media.sha256 for one in made.images] == [image_hash(png(1))]
    assert sorted(reasons(made.dropped)) == ["a/b/link.png", "a/b/pipe.png", "linked"]


def test_an_entry_that_lies_about_its_size_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "set.zip", {"a/b/big.png": b"\0" * 5000, "a/b/good.png": png(1)})
    monkeypatch.setattr(labelled_module, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(labelled_module, "_entry_problem", lambda entry: None)
    assert "more than 1,000 bytes" in reasons(read_labelled(path, LEVELS).dropped)["a/b/big.png"]
    monkeypatch.undo()
    monkeypatch.setattr(labelled_module, "MAX_TOTAL_BYTES", 1000)
    with pytest.raises(DataError, match=r"has 2 files and [0-9,]+ bytes; at most 5,000,000 files and 1,000 bytes are"):
        read_labelled(path, LEVELS)


def test_an_encrypted_or_damaged_archive_is_a_clear_error(tmp_path: Path) -> None:
    path = archive(tmp_path / "set.zip", {"a/b/1.png": png(1), "a/b/2.png": png(2)})
    damaged = bytearray(path.read_bytes())
    damaged[60:90] = bytes(30)
    path.write_bytes(bytes(damaged))
    made = read_labelled(path, LEVELS)
    assert len(made.images) == 1 and "cannot be read from the archive" in made.dropped[0].reason
    (tmp_path / "set.tar").write_bytes(b"not a zip")
    with pytest.raises(DataError, match="neither a folder nor a zip"):
        read_labelled(tmp_path / "set.tar", LEVELS)
    with pytest.raises(DataError, match="no folder or archive"):
        read_labelled(tmp_path / "gone", LEVELS)


def test_siblings_that_the_reward_takes_for_one_name_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "set.zip", {"x/Old-Norse/1.png": png(1), "x/old norse/2.png": png(2)})
    with pytest.raises(DataError, match="'Old-Norse' and 'old norse'"):
        read_labelled(path, ["family", "language"])
    fine = archive(tmp_path / "fine.zip", {"x/a/1.png": png(1), "y/A/2.png": png(2)})
    assert len(read_labelled(fine, ["family", "language"]).images) == 2


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "Corvus\u200b", "\ufeffCorvus", "a\udcffb", "a;b", "a<b", ""])
def test_names_with_what_cannot_be_seen_or_written_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="cannot be written in an answer"):
        check_name(name)
    assert check_name("Müller's Öl-käfer 二") == "Müller's Öl-käfer 二"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_path_that_is_in_an_archive_more_than_once_is_taken_once_and_said(tmp_path: Path) -> None:
    path = archive(tmp_path / "set.zip", {"a/b/1.png": png(1), "a/b/2.png": png(2)})
    with zipfile.ZipFile(path, "a") as out:
        out.writestr("a/b/1.png", png(3))
        out.writestr("a/b/1.png", png(4))
    found = read_labelled(path, LEVELS)
    assert [image.media.sha256 for image in found.images] == [image_hash(png(1)), image_hash(png(2))]
    assert [drop.origin for drop in found.dropped] == ["a/b/1.png"] * 2
    assert "twice: the first of these files is used" in found.dropped[0].reason


def _packed(path: Path, method: int) -> bytes:
    with zipfile.ZipFile(path, "w", method) as out:
        for seed in range(3):
            out.writestr(f"a/b/{seed}.png", png(seed))
    return path.read_bytes()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_with_any_damage_is_read_as_far_as_it_goes_or_refused(tmp_path: Path, method: int) -> None:
    path, rng = tmp_path / "set.zip", random.Random(method)
    whole = _packed(path, method)
    directory, end = whole.find(b"PK\1\2"), whole.find(b"PK\5\6")
    contents = [bytearray(whole) for _ in range(60)]
    for content in contents:
        for _ in range(rng.choice((1, 4))):
            content[rng.randrange(len(content))] = rng.randrange(256)
    for offset, value in ((6, 99), (10, 99), (8, 0x20)):  # the version that is needed, the method, patched data
        contents.append(bytearray(whole))
        contents[-1][directory + offset] = value
    for disks in (1, 9):  # a locator of a 64-bit directory that is not there
        contents.append(whole[:end] + b"PK\6\7" + struct.pack("<LQL", disks - 1, 1 << 60, disks) + whole[end:])
    for content in contents:
        path.write_bytes(content)
        try:
            read = read_labelled(path, LEVELS, workers=1)
        except DataError:
            continue
        assert len(read.images) + len(read.dropped) + sum(read.ignored.values()) <= 3


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_never_opened_as_an_archive(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "set.zip"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="not a regular file"):
        read_labelled(path, LEVELS)
