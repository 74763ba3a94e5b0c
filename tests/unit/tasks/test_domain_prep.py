from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pair_tables import composite, photo, table_rows, write_parquet
from task_tables import checks_of

from vlmrl.data.image_scan import write_shards
from vlmrl.data.images import decode_image
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks import dataset_assembly
from vlmrl.tasks.dataset_assembly import Limits, OnOverlong, Prepared, is_few, leave_out
from vlmrl.tasks.source import open_source
from vlmrl.tasks.taxonrl.domains import DOMAINS, LAYOUTS
from vlmrl.tasks.taxonrl.prepare import prepare_domain, published

ONE = Limits(workers=1)


def prepare(
    out: Path, domain: str, source: Path | str, limits: Limits = ONE, force: bool = False, **more: Any
) -> Prepared:
    return prepare_domain(domain, str(source), out=out, **more, limits=replace(limits, force=force))


@pytest.mark.parametrize("domain", DOMAINS)
def test_published_rows_become_typed_truth_that_writes_the_published_text_back(tmp_path: Path, domain: str) -> None:
    rows = table_rows(domain, 40)
    for split, part in (("train", rows[:24]), ("validation", rows[24:30]), ("test", rows[30:])):
        write_parquet(tmp_path / "in" / f"{split}-00000.parquet", part)
    made = prepare(tmp_path / "out", domain, tmp_path / "in")
    assert made.outcome == "created" and not made.info["dropped"]
    dataset = open_dataset(Data(path=str(tmp_path / "out")))
    assert dataset.splits == {"train": 24, "validation": 6, "test": 10}
    layout = LAYOUTS[DOMAINS[domain].layout]
    for row, source in zip([r for s in dataset.splits for r in dataset.rows(s)], rows, strict=True):
        assert layout.write(row.truth) == source.get("answer_im", source["answer"])
        assert [dataset.image_bytes(media) for media in row.media] == [one["bytes"] for one in source["images"]]
        assert row.columns["problem"] == source["problem"] and row.truth["ground_truth"] is None
    assert made.info["truth_fields"] == list(DOMAINS[domain].field_names)
    assert checks_of(made.info)["validation split"] == ("ok", "the source's own")
    source = open_source(Data(path=str(tmp_path / "out"), split="test"), Reward())
    assert source.task.variant == (DOMAINS[domain].variant(DOMAINS[domain].main or "baseline").name)
    assert "<image>" in source.messages(source.rows[0])[-1].content


def test_a_table_without_intermediate_truth_gives_the_baseline(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "answer_im"} for row in table_rows("fungi", 20)]
    made = prepare(tmp_path / "out", "fungi", write_parquet(tmp_path / "rows.parquet", rows))
    assert made.info["truth_fields"] == []
    row = open_dataset(Data(path=str(tmp_path / "out"))).rows("train")[0]
    assert row.truth["order"] == [None, None] and row.truth["same"] in (True, False)
    assert open_source(Data(path=str(tmp_path / "out")), Reward()).task.variant == "baseline"


def test_what_is_spelt_otherwise_keeps_its_text_for_the_published_reward(tmp_path: Path) -> None:
    rows = table_rows("bird", 20)
    plain = rows[0]["answer_im"]
    rows[0]["answer_im"] = plain.replace(";", " ; ")
    made = prepare(tmp_path / "out", "bird", write_parquet(tmp_path / "rows.parquet", rows), validation_pairs=0)
    truths = [row.truth for row in open_dataset(Data(path=str(made.path))).rows("train")]
    assert truths[0]["ground_truth"] == plain.replace(";", " ; ") and LAYOUTS["bird"].write(truths[0]) == plain
    assert all(truth["ground_truth"] is None for truth in truths[1:])


def spoilt(rows: list[dict[str, Any]]) -> dict[int, str]:
    """Spoil rows of a fungi table, each in its own way. Returns row -> what is said of it."""
    rows[3]["answer_im"] = rows[3]["answer_im"].rpartition(";")[0]
    rows[5]["answer_im"] = composite("fungi", False, (0, 15)).replace("F0", "", 1).replace("0", "7", 1)  # type: ignore
    rows[8]["images"] = rows[8]["images"][:1]
    rows[11]["problem"] = "<image> Is this the same?"
    rows[14]["images"][1] = {"bytes": rows[14]["images"][1]["bytes"][:-100], "path": None}
    rows[17]["images"][0] = {"bytes": b"", "path": None}
    rows[20]["answer"] = "1" if rows[20]["answer"] == "0" else "0"
    rows[23]["images"][0] = {"bytes": None, "path": "https://example.org/a.jpg"}
    rows[26]["images"][0] = {"bytes": None, "path": "../../etc/passwd"}
    rows[29]["answer_im"] = composite("fungi", True, (0, 15))
    rows[32]["problem"] = None
    rows[35]["images"] = rows[2]["images"]
    rows[35]["answer"], rows[35]["answer_im"] = "0", composite("fungi", False, (0, 15))
    return {
        2: "called the same in one row and different in another", 35: "called the same in one row and different",
        3: "has 8 fields, not 9", 5: "has the answer '7'", 8: "1 image, not 2", 11: "2 images, but 1 <image> mark in",
        14: "image 2: broken image: image file is truncated", 17: "image 1: an empty file (0 bytes)",
        20: "`answer_im` says the opposite", 26: "leaves",
        23: "nothing is fetched from the network: download it first, and give its path or bytes",
        29: "contradicts itself", 32: "`problem` is None, not a text",
    }  # fmt: skip


def test_an_image_that_changes_during_a_prep_is_named_by_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table_rows("fungi", 20)
    for number in (0, 1):
        (tmp_path / f"{number}.jpg").write_bytes(rows[4]["images"][number]["bytes"])
        rows[4]["images"][number] = {"bytes": None, "path": f"{number}.jpg"}

    def write(*args: Any, **settings: Any) -> None:
        (tmp_path / "1.jpg").write_bytes(photo(999, 80, 60))
        write_shards(*args, **settings)

    monkeypatch.setattr(dataset_assembly, "write_shards", write)
    with pytest.raises(DataError, match="an image changed while it was read") as caught:
        prepare(tmp_path / "out", "fungi", write_parquet(tmp_path / "rows.parquet", rows))
    assert caught.value.where == "train row 4, image 2"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_every_wrong_row_is_listed_with_its_number_and_left_out(tmp_path: Path, kind: str) -> None:
    rows = table_rows("fungi", 60)
    wrong = spoilt(rows)
    if kind == "parquet":
        source, name = write_parquet(tmp_path / "rows.parquet", rows), "train row {}"
    else:
        import base64

        source, name = tmp_path / "rows.jsonl", "rows.jsonl:{}"
        for row in rows:
            row["images"] = [
                base64.b64encode(one["bytes"]).decode() if one["bytes"] else one["path"] or "" for one in row["images"]
            ]
        source.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(
        DataError, match=r"of 60 rows \(21\.7%\) are wrong, more than --max-bad 0\.01; nothing was written"
    ):
        prepare(tmp_path / "out", "fungi", source)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    made = prepare(tmp_path / "out", "fungi", source, max_bad=0.3, validation_pairs=0)
    listed = {one["origin"]: one["reason"] for one in map(json.loads, (made.path / "dropped.jsonl").open())}
    first = 1 if kind == "jsonl" else 0
    assert listed.keys() == {name.format(number + first) for number in wrong}
    for number, reason in wrong.items():
        told = listed[name.format(number + first)]
        if kind == "parquet" or number not in (14, 17):  # base64 that is no image is taken for a path
            assert reason in told, (number, told)
    assert made.info["splits"]["train"]["rows"] == 60 - len(wrong)
    assert checks_of(made.info)["rows that are wrong"] == ("look", "13 of 60 rows (21.67%) left out: dropped.jsonl")


def from_rows(folder: Path, domain: str, rows: list[dict[str, Any]], **more: Any) -> Prepared:
    source = write_parquet(folder / "rows.parquet", rows)
    return prepare(folder / "out", domain, source, validation_pairs=0, **more)


def test_a_row_that_is_wrong_is_told_what_would_be_right(tmp_path: Path) -> None:
    rows = table_rows("gorilla", 40)
    rows[1]["answer_im"] = "0;Silverbeck;Infant"
    rows[2]["answer_im"] = "0;sameGenus;G0;F0;O0;G1;F0;O0"
    rows[3]["answer"] = rows[3]["answer_im"] = "0.7"
    rows[4]["images"] = [*rows[4]["images"], rows[5]["images"][0]]
    rows[6]["images"][1] = {"bytes": b"<html>", "path": "found/on\x1b[31m.jpg"}
    rows[7]["images"][0] = {"bytes": None, "path": "data:text/html,hello"}
    made = from_rows(tmp_path, "gorilla", rows, max_bad=0.2)
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
    made = from_rows(tmp_path, "chimp", rows)
    # 20 rows, 5 without names: 15 know both ages; one of these knows one gender alone: 14 know both
    verdict, told = checks_of(made.info)["names in the truth"]
    assert verdict == "look" and told.startswith("of 20 rows age_group in 15, gender in 14; ")
    assert made.info["truth_fields"] == ["age_group", "gender"]


def all_of_another_domain(rows: list[dict[str, Any]]) -> None:
    for row, other in zip(rows, table_rows("chimp", len(rows)), strict=True):
        row |= {"answer": other["answer"], "answer_im": other["answer_im"]}


def few(rows: list[dict[str, Any]]) -> None:
    for row in rows[:3]:
        row["problem"] = None


def no_image(rows: list[dict[str, Any]]) -> None:
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
    tmp_path: Path, spoil: Callable[[list[dict[str, Any]]], None], max_bad: float, told: str, hint: str
) -> None:
    rows = table_rows("sea_star", 40)
    spoil(rows)
    with pytest.raises(DataError, match=told) as caught:
        from_rows(tmp_path, "sea_star", rows, max_bad=max_bad)
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
        from_rows(tmp_path, "whale", rows)


def test_a_repeated_row_is_kept_once(tmp_path: Path) -> None:
    rows = table_rows("whale", 30)
    made = prepare(
        tmp_path / "out", "whale", write_parquet(tmp_path / "r.parquet", [*rows, rows[4]]), validation_pairs=0
    )
    assert made.info["splits"]["train"]["rows"] == 30
    assert made.info["dropped"] == [{"origin": "train row 30", "reason": "the same two images as train row 4"}]


def test_a_validation_split_is_cut_off_where_there_is_none(tmp_path: Path) -> None:
    made = prepare(tmp_path / "out", "whale", write_parquet(tmp_path / "rows.parquet", table_rows("whale", 80)))
    assert {split: fields["rows"] for split, fields in made.info["splits"].items()} == {"train": 72, "validation": 8}
    verdict, told = checks_of(made.info)["validation split"]
    assert verdict == "look" and "8 rows cut off train, which share no image with it" in told
    none = prepare(tmp_path / "b", "whale", tmp_path / "rows.parquet", validation_pairs=0)
    assert "do not choose checkpoints on the test split" in checks_of(none.info)["validation split"][1]


def long_rows(tmp_path: Path) -> Path:
    rows = table_rows("human", 20)
    for i, row in enumerate(rows):
        size = (800, 800) if i % 4 == 0 else (280, 280)
        row["images"] = [{"bytes": photo(2 * i + side, *size), "path": None} for side in (0, 1)]
    return write_parquet(tmp_path / "rows.parquet", rows)


def test_rows_over_the_limit_fail_or_are_dropped_or_made_smaller_and_counted(tmp_path: Path) -> None:
    source = long_rows(tmp_path)

    def made(name: str, how: OnOverlong):
        return prepare(
            tmp_path / name,
            "human",
            source,
            replace(ONE, max_prompt_tokens=1000, on_overlong=how),
            validation_pairs=0,
        )

    with pytest.raises(DataError, match=r"5 rows are over --max-prompt-tokens 1,000.*nothing was written") as caught:
        made("a", "fail")
    assert "--on-overlong resize" in str(caught.value.hint) and not (tmp_path / "a").exists()
    dropped = made("b", "drop")
    assert dropped.info["splits"]["train"]["rows"] == 15 and dropped.info["counts"]["dropped"] == 5
    assert "5 rows over 1,000 tokens were dropped" in checks_of(dropped.info)["prompts over the limit"][1]
    with pytest.raises(
        DataError, match=r"every row of train and validation is over --max-prompt-tokens 50; nothing was written"
    ):
        prepare(tmp_path / "d", "human", source, replace(ONE, max_prompt_tokens=50, on_overlong="drop"))
    assert not (tmp_path / "d").exists()
    smaller = made("c", "resize")
    assert smaller.info["splits"]["train"]["rows"] == 20
    assert smaller.info["doctor"]["prompt_tokens"]["train"]["max"] <= 1000
    assert "5 rows were over 1,000 tokens: 10 images shrunk" in checks_of(smaller.info)["prompts over the limit"][1]
    dataset = open_dataset(Data(path=str(smaller.path)))
    sizes = {decode_image(dataset.image_bytes(media)).size for row in dataset.rows("train") for media in row.media}
    assert (280, 280) in sizes and (800, 800) not in sizes and len(sizes) == 2


def test_a_table_that_is_none_of_ours_says_which_columns_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column `answer` or `answer_im`; the table has: problem, images") as caught:
        prepare(tmp_path / "o", "fungi", write_parquet(tmp_path / "r.parquet", [{"problem": "p", "images": ["a"]}]))
    assert "TaxonRL" in str(caught.value.hint)


def test_the_default_source_is_the_published_data_set_with_intermediate_truth() -> None:
    assert published(DOMAINS["chimp"]) == "hub:maxvonk/chimp-pairs-v2-800px-meta-data-fixed-names-im"
    assert published(DOMAINS["fungi"]) == "hub:maxvonk/danish-fungi-2024-pairs-800px"


def command(out: Path, source: Path) -> list[str]:
    return [sys.executable, "-m", "vlmrl", "prep", "whale", str(source), "--out", str(out), "--workers", "2"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was_and_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "rows.parquet", slow_rows(), group=4)
    prepare(tmp_path / "whole", "whale", source)
    run = subprocess.Popen(command(tmp_path / "killed", source), stderr=subprocess.PIPE, start_new_session=True)
    work = tmp_path / ".killed.building" / "work"
    wait_for(lambda: len(list(work.glob("rows-*.jsonl"))) >= 3, run)
    os.kill(run.pid, signal.SIGKILL)  # the process that leads; the others end with it
    run.wait()
    done = {path: path.stat().st_mtime_ns for path in work.glob("rows-*.jsonl")}
    assert done and not (tmp_path / "killed").exists()
    again = subprocess.Popen(command(tmp_path / "killed", source), stderr=subprocess.PIPE)
    wait_for(lambda: len(list(work.glob("rows-*.jsonl"))) > len(done), again)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items() if path.exists())
    told = again.communicate(timeout=120)[1].decode()
    assert again.returncode == 0 and "an interrupted run had made" in told and "not made again" in told
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "rows.parquet", "whole"]


def slow_rows() -> list[dict[str, Any]]:
    """Enough pixels that a part takes a moment."""
    rows = table_rows("whale", 96)
    for i, row in enumerate(rows):
        row["images"] = [{"bytes": photo(2 * i + side, 800, 600), "path": None} for side in (0, 1)]
    return rows


def wait_for(happened: Any, run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end and run.poll() is None, (run.communicate()[1] or b"").decode()
        time.sleep(0.005)
