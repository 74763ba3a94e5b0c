from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from vlmrl.data.dataset_writer import building
from vlmrl.data.parallel_parts import LostWorkerError, make_parts
from vlmrl.errors import DataError


@dataclass(frozen=True)
class Numbered:
    """Writes a part's number; `fatal` kills its process, `wrong` is the user's mistake."""

    fatal: int = -1
    wrong: int = -1

    def __call__(self, index: int, path: Path) -> None:
        path.write_text(f"half of {index}")
        if index == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.wrong:
            raise DataError(f"part {index} is wrong")
        path.write_text(f"part {index}, {len(os.listdir(path.parent)) > 0}")


DEAF_AT_IMPORT = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def tell_whether_deaf(index: int, path: Path) -> None:
    path.write_text(str(DEAF_AT_IMPORT))


def paths_in(folder: Path, count: int) -> list[Path]:
    return [folder / f"part-{i}" for i in range(count)]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.slow
def test_parts_are_the_same_from_one_process_and_from_several_and_what_is_there_is_not_made_again(
    tmp_path: Path,
) -> None:
    (one, several) = (tmp_path / "one", tmp_path / "several")
    one.mkdir()
    several.mkdir()
    told: list[tuple[str, int, int]] = []
    assert (
        make_parts(Numbered(), range(7), paths_in(one, 7), workers=1, progress=lambda *a: told.append(a), what="w") == 0
    )
    assert contents(one)["part-5"] == "part 5, True"
    assert told == [("w", done, 7) for done in range(8)]
    (several / "part-3").write_text("was there")
    assert make_parts(Numbered(), range(7), paths_in(several, 7), workers=2) == 1
    assert contents(several) == {**contents(one), "part-3": "was there"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_that_fails_leaves_no_half_of_itself_and_the_others_stay(tmp_path: Path, workers: int) -> None:
    with pytest.raises(DataError, match="part 4 is wrong"):
        make_parts(Numbered(wrong=4), range(6), paths_in(tmp_path, 6), workers=workers)
    left = contents(tmp_path)
    assert "part-4" not in left and {f"part-{i}" for i in range(3)} <= left.keys()
    assert not any(text.startswith("half") for text in left.values())


@pytest.mark.slow
def test_a_killed_process_is_told_as_lost_memory_and_the_work_is_kept_for_the_next_run(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(LostWorkerError, match="killed") as caught, building(target, key=["a"]) as build:
        make_parts(Numbered(fatal=5), range(6), [build.work / f"p{i}.jsonl" for i in range(6)], workers=2)
    assert "--workers" in str(caught.value.hint)
    with building(target, key=["a"]) as build:
        kept = list(build.work.glob("*.jsonl"))
        assert kept and build.leftovers == (
            f"an interrupted run had made {len(kept)} parts of this dataset; they were not made again",
        )
    assert not list(tmp_path.iterdir())


def test_work_of_another_source_is_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), building(tmp_path / "out", key=["a"]) as build:
        (build.work / "p0.jsonl").write_text("of a")
        (build.folder / "media-00000.arrow").write_text("of a")
        raise KeyboardInterrupt
    with building(tmp_path / "out", key=["b"]) as build:
        assert not list(build.work.glob("*.jsonl")) and not list(build.folder.glob("*.arrow"))
        assert "removed" in build.leftovers[0]


def test_a_mistake_of_the_user_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(DataError), building(tmp_path / "out", key=["a"]) as build:
        (build.work / "p0.jsonl").write_text("of a")
        raise DataError("too many wrong rows")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_is_for_the_parent_from_the_first_import_of_the_others(tmp_path: Path) -> None:
    """Or each of them would write a traceback of its own, which is what a person reads who was too early."""
    make_parts(tell_whether_deaf, range(6), paths_in(tmp_path, 6), workers=2)
    assert set(contents(tmp_path).values()) == {"True"}
    assert not DEAF_AT_IMPORT and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
