"""Responses of unfinished work: written one by one, found again, and safe from kills and from a second process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.errors import StoreError
from vlmrl.store.response_journal import ResponseJournal

WORK = {"model": "m", "seed": 0}


def journal(root: Path, rows: int = 3, samples: int = 2, **other: object) -> ResponseJournal:
    return ResponseJournal(root, "digits", {**WORK, **other}, rows=rows, samples=samples)


def test_the_same_work_finds_its_responses_and_other_work_does_not(tmp_path: Path) -> None:
    with journal(tmp_path) as one:
        one.add(2, 1, {"text": "a\nb \ud800"})
        one.add(0, 0, {"text": "c"})
        assert one.read(2, 1)["text"] == "a\nb \ud800"
    with journal(tmp_path) as again:
        assert again.count == 2 and [again.missing(row) for row in range(3)] == [[1], [0, 1], [0]]
        assert (again.read(2, 1)["text"], again.read(0, 0)["text"]) == ("a\nb \ud800", "c")
    with journal(tmp_path, seed=1) as other:
        assert other.count == 0 and other.path != again.path
    again.remove()
    again.remove()
    with journal(tmp_path) as anew:
        assert anew.count == 0


def test_more_rows_and_samples_keep_what_is_there_and_fewer_ignore_the_rest(tmp_path: Path) -> None:
    with journal(tmp_path) as one:
        for row in range(3):
            one.add(row, 1, {"text": str(row)})
    with journal(tmp_path, rows=5, samples=3) as more:
        assert more.count == 3 and [more.missing(row) for row in (0, 4)] == [[0, 2], [0, 1, 2]]
        assert [more.read(row, 1)["text"] for row in range(3)] == ["0", "1", "2"]
    with journal(tmp_path, rows=1, samples=2) as fewer:
        assert fewer.count == 1


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_response_that_a_kill_cut_is_given_up_and_the_others_stay(tmp_path: Path, kept: int) -> None:
    with journal(tmp_path) as one:
        one.add(0, 0, {"text": "whole"})
        size = one.path.stat().st_size
        one.add(0, 1, {"text": "x" * 40})
        assert one.path.stat().st_size > size + kept
    with one.path.open("r+b") as file:
        file.truncate(size + kept)
    with journal(tmp_path) as again:
        assert again.missing(0) == [1] and again.path.stat().st_size == size
        again.add(0, 1, {"text": "new"})
    with journal(tmp_path) as whole:
        assert [whole.read(0, k)["text"] for k in (0, 1)] == ["whole", "new"]


def test_a_kill_before_the_first_line_was_whole_begins_anew(tmp_path: Path) -> None:
    with journal(tmp_path) as one:
        one.add(0, 0, {"text": "a"})
    with one.path.open("r+b") as file:
        file.truncate(10)
    with journal(tmp_path) as again:
        assert again.count == 0
        again.add(1, 1, {"text": "b"})
    with journal(tmp_path) as third:
        assert third.count == 1


def test_a_damaged_line_costs_its_own_response_alone(tmp_path: Path) -> None:
    with journal(tmp_path) as one:
        for k in (0, 1):
            one.add(0, k, {"text": "abc"})
    lines = one.path.read_bytes().splitlines(keepends=True)
    one.path.write_bytes(lines[0] + b"\0" * (len(lines[1]) - 1) + b"\n" + lines[2])
    with journal(tmp_path) as again:
        assert again.missing(0) == [0] and again.read(0, 1)["text"] == "abc"


def test_two_processes_never_work_on_the_same_responses(tmp_path: Path) -> None:
    with journal(tmp_path), pytest.raises(StoreError, match="another process works on the same responses"):
        journal(tmp_path)
    journal(tmp_path).close()


def test_a_file_of_other_work_under_this_name_is_not_read(tmp_path: Path) -> None:
    with journal(tmp_path) as one:
        one.add(0, 0, {"text": "a"})
    lines = one.path.read_bytes().splitlines(keepends=True)
    header = json.loads(lines[0])
    header["identity"]["seed"] = 7
    one.path.write_bytes(json.dumps(header).encode() + b"\n" + lines[1])
    with pytest.raises(StoreError, match="other work"):
        journal(tmp_path)


def test_with_keys_a_response_stays_with_its_row(tmp_path: Path) -> None:
    """Rows b and c were answered; then a is removed, c replaced, and d put first."""
    with ResponseJournal(tmp_path, "w", {}, rows=3, samples=1, keys=["a", "b", "c"]) as journal:
        journal.add(1, 0, {"text": "of b"})
        journal.add(2, 0, {"text": "of c"})
    with ResponseJournal(tmp_path, "w", {}, rows=3, samples=1, keys=["d", "b", "c2"]) as journal:
        assert [journal.missing(row) for row in range(3)] == [[0], [], [0]] and journal.count == 1
        assert journal.read(1, 0)["text"] == "of b"
    with ResponseJournal(tmp_path, "w", {}, rows=1, samples=1, keys=["c"]) as journal:
        assert journal.read(0, 0)["text"] == "of c"
