"""What is said of wrong rows: each reason must be enough to mend the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair_tables import photo, table_rows, write_parquet

from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared, is_few, leave_out
from vlmrl.tasks.taxonrl.prepare import prepare_domain

Rows = list[dict[str, Any]]


def prepare(folder: Path, domain: str, rows: Rows, **more: Any) -> Prepared:
    source = write_parquet(folder / "rows.parquet", rows)
    limits = Limits(workers=1)
    return prepare_domain(domain, str(source), out=folder / "out", validation_pairs=0, **more, limits=limits)


def test_a_row_that_is_wrong_is_told_what_would_be_right(tmp_path: Path) -> None:
    rows = table_rows("gorilla", 40)
    rows[1]["answer_im"] = "0;Silverbeck;Infant"
    rows[2]["answer_im"] = "0;sameGenus;G0;F0;O0;G1;F0;O0"
    rows[3]["answer"] = rows[3]["answer_im"] = "0.7"
    rows[4]["images"] = [*rows[4]["images"], rows[5]["images"][0]]
    rows[6]["images"][1] = {"bytes": b"<html>", "path": "found/on\x1b[31m.jpg"}
    rows[7]["images"][0] = {"bytes": None, "path": "data:text/html,hello"}
    made = prepare(tmp_path, "gorilla", rows, max_bad=0.2)
    listed = {one["origin"]: one["reason"] for one in map(json.loads, (made.path / "dropped.jsonl").open())}
    assert listed.keys() == {f"train row {number}" for number in (1, 2, 3, 4, 6, 7)}
    assert "unknown type 'Silverbeck' (known: Silverback, Blackback, Adult female" in listed["train row 1"]
    assert listed["train row 2"].endswith("(it has as many fields as the layout bird)")
    assert "the reward `taxonrl` scores such rows as they are" in listed["train row 3"]
    assert listed["train row 4"] == "3 images, not 2"
    assert listed["train row 6"].startswith(r"image 2: 'found/on\x1b[31m.jpg': not an image in a known format")
    assert listed["train row 7"] == "image 1: the data URI 'data:text/html,hello' is not an image in base64"


def test_names_that_only_some_rows_know_are_counted(tmp_path: Path) -> None:
    rows = table_rows("chimp", 20)
    for row in rows[:5]:
        row["answer_im"] = None
    rows[5]["answer_im"] = rows[5]["answer"] + ";Adult;;Adult;Male"
    made = prepare(tmp_path, "chimp", rows)
    found = {one["check"]: (one["verdict"], one["finding"]) for one in made.info["doctor"]["checks"]}
    # 20 rows, 5 without names: 15 know both ages; one of these knows one gender alone: 14 know both
    verdict, told = found["names in the truth"]
    assert verdict == "look" and told.startswith("of 20 rows age_group in 15, gender in 14; ")
    assert made.info["truth_fields"] == ["age_group", "gender"]


def all_of_another_domain(rows: Rows) -> None:
    for row, other in zip(rows, table_rows("chimp", len(rows)), strict=True):
        row |= {"answer": other["answer"], "answer_im": other["answer_im"]}


def few(rows: Rows) -> None:
    for row in rows[:3]:
        row["problem"] = None


def no_image(rows: Rows) -> None:
    for row in rows:
        row["images"] = []


@pytest.mark.parametrize(
    ("spoil", "max_bad", "told", "hint"),
    [
        (few, 0.01, r"3 of 40 rows \(7.5%\) are wrong, more than --max-bad 0.01", "--max-bad 0.08 leaves them out"),
        (all_of_another_domain, 0.5, "all 40 rows are wrong", "are these rows of the domain `sea_star`"),
        (no_image, 1, "all 40 rows are wrong", "--images-root"),
    ],
)
def test_too_many_wrong_rows_are_told_with_the_next_step(
    tmp_path: Path, spoil: Callable[[Rows], None], max_bad: float, told: str, hint: str
) -> None:
    rows = table_rows("sea_star", 40)
    spoil(rows)
    with pytest.raises(DataError, match=told) as caught:
        prepare(tmp_path, "sea_star", rows, max_bad=max_bad)
    assert hint in str(caught.value.hint) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("total", [100, 1000, 977])
def test_the_share_that_is_named_is_enough(total: int) -> None:
    for bad in range(1, total):
        named = float(leave_out(bad, total).split()[1])
        assert is_few(bad, total, named) and (named < 0.02 or not is_few(bad, total, round(named - 0.01, 2)))


def test_a_path_is_named_with_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    rows = table_rows("whale", 20)
    for number, row in enumerate(rows):
        row["images"] = [f"{number}-{side}.jpg" for side in (0, 1)]
        for side, name in enumerate(row["images"]):
            (tmp_path / name).write_bytes(photo(2 * number + side))
    (tmp_path / "4-1.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"train row 4: image 2: '4-1\.jpg': an empty file \(0 bytes\)"):
        prepare(tmp_path, "whale", rows)
