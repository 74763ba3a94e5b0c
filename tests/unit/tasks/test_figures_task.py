"""The task figures: sources of code, filters, splits by picture, `vlmrl prep figures`, and the task's measures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmrl.data.prepared_dataset import PreparedDataset
from vlmrl.errors import DataError
from vlmrl.rewards.base import UNSCORED
from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.vfig.command import prep
from vlmrl.tasks.vfig.filters import Filters, count_shapes, repeats
from vlmrl.tasks.vfig.rows import Shares, split_of
from vlmrl.tasks.vfig.sources import Candidate, code_of, read_sources
from vlmrl.tasks.vfig.task import figures_task
from vlmrl.tasks.vfig.truth import truth_problems
from vlmrl.types import RewardInput, Row, Score

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40">'


def box(side: int) -> str:
    return f'{HEAD}<rect width="{side}" height="{side}" fill="red"/></svg>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with 30 figures, one of them twice, one empty, one that is no SVG and one that is forbidden."""
    place = tmp_path / "svg"
    (place / "deep").mkdir(parents=True)
    for side in range(1, 31):
        (place / "deep" / f"{side:02}.svg").write_text(f"<?xml version='1.0'?>\n<!-- a -->{box(side)}\n")
    (place / "twice.svg").write_text(box(7).replace("red", "#f00"))
    (place / "empty.svg").write_text(f"{HEAD}</svg>")
    (place / "none.svg").write_text("no code")
    (place / "script.svg").write_text(f"{HEAD}<script/></svg>")
    return place


def made(out: Path, sources: str | None = None, **options: object) -> dict[str, list[Row]]:
    prep(sources, out=out, limits=Limits(workers=1), **options)  # pyright: ignore[reportArgumentType]
    dataset = PreparedDataset(out, name=None, task=None)
    return {split: list(dataset.rows(split)) for split in dataset.splits}


def dropped(out: Path) -> dict[str, str]:
    lines = (out / "dropped.jsonl").read_text().splitlines()
    return {Path(row["origin"]).name: row["reason"] for row in map(json.loads, lines)}


def test_a_folder_becomes_rows_and_the_rest_is_listed(folder: Path, tmp_path: Path):
    out = tmp_path / "data"
    splits = made(out, f"boxes={folder}", val_share=0.3)
    assert set(splits) == {"train", "validation"} and sum(map(len, splits.values())) == 30
    assert {row.truth["source"] for rows in splits.values() for row in rows} == {"boxes"}
    assert all(row.truth["svg"].startswith("<svg") for rows in splits.values() for row in rows)
    reasons = dropped(out)
    assert set(reasons) == {"twice.svg", "empty.svg", "none.svg", "script.svg"}
    assert "shows the same" in reasons["twice.svg"] and "empty" in reasons["empty.svg"]
    assert "no svg element" in reasons["none.svg"] and "script" in reasons["script.svg"]


def test_a_figure_is_in_the_same_split_of_every_dataset(folder: Path, tmp_path: Path):
    first = made(tmp_path / "a", str(folder), val_share=0.3)
    few = tmp_path / "few"
    few.mkdir()
    for file in list((folder / "deep").glob("*.svg"))[:12]:
        (few / f"other-{file.name}").write_text(file.read_text())
    second = made(tmp_path / "b", str(few), val_share=0.3)
    where = {row.truth["svg"]: split for split, rows in first.items() for row in rows}
    assert all(where[row.truth["svg"]] == split for split, rows in second.items() for row in rows)


def test_figures_of_the_bench_are_in_test_alone(folder: Path, tmp_path: Path):
    bench = tmp_path / "bench"
    bench.mkdir()
    for side in (3, 4, 39):
        (bench / f"{side}.svg").write_text(box(side).replace('fill="red"', 'style="fill: red"'))
    splits = made(tmp_path / "data", str(folder), bench=str(bench), val_share=0.2, start_share=0.4)
    assert set(splits) == {"train", "start", "validation", "test"}
    assert len(splits["test"]) == 3 and sum(map(len, splits.values())) == 31
    reasons = dropped(tmp_path / "data")
    assert "in the bench" in reasons["03.svg"] and "in the bench" in reasons["04.svg"]


def test_conversations_and_columns_of_tables(tmp_path: Path):
    talks = [
        {"messages": [{"role": "user", "content": "<image>\nGenerate"}, {"role": "assistant", "content": box(side)}]}
        for side in (5, 6)
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    table = pa.table(
        {
            "data_source": ["star", "arxiv"],
            "response": [box(7), box(8)],
            "reward_model": [{"style": "rule", "ground_truth_code": box(9)}] * 2,
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    candidates = list(read_sources(f"{tmp_path}/talks.json, mine={tmp_path}/rows.parquet,{tmp_path}/rows.parquet"))
    assert [c.label for c in candidates] == ["talks", "talks", "mine", "mine", "star", "arxiv"]
    assert [c.svg for c in candidates] == [box(k) for k in (5, 6, 7, 8, 7, 8)]


@pytest.mark.parametrize(
    "row",
    [
        {"svg": box(3)},
        {"Svg": box(3), "response": "no"},
        {"reward_model": json.dumps({"ground_truth_code": box(3)})},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": box(3)}]},
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": box(3)}]}]},
    ],
)
def test_code_of_a_row(row: dict):
    assert code_of(row) == box(3)


@pytest.mark.parametrize("row", [{}, {"svg": None}, {"messages": "x"}, {"messages": [1]}, {"reward_model": "{"}])
def test_a_row_without_code(row: dict):
    assert code_of(row) is None


def test_what_cannot_be_a_source(tmp_path: Path, folder: Path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(DataError, match="no column with SVG code"):
        list(read_sources(str(tmp_path / "a.jsonl")))
    with pytest.raises(DataError):
        list(read_sources(str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="no source"):
        made(tmp_path / "data")
    with pytest.raises(DataError, match="--synthetic"):
        made(tmp_path / "data", str(folder), synthetic=20)
    with pytest.raises(DataError, match="no figure is left"):
        made(tmp_path / "data", str(folder), max_chars=100)
    assert not (tmp_path / "data").exists()


def test_drawn_figures_are_rows_and_the_seed_decides(tmp_path: Path):
    first, second, other = (
        made(tmp_path / name, synthetic=20, simple=True, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert len(first["train"]) == 20 and {"train", "validation", "test"} == set(first)
    svgs = [[row.truth["svg"] for row in splits["train"]] for splits in (first, second, other)]
    assert svgs[0] == svgs[1] != svgs[2]


def task() -> Task:
    return figures_task({"name": "figures", "task": "figures"})


def test_the_right_response_is_the_code(tmp_path: Path):
    row = made(tmp_path / "a", synthetic=20, simple=True)["train"][0]
    assert task().correct_response(row, random.Random(0)) == row.truth["svg"]


def test_measures_are_the_parts_of_the_reward():
    x = RewardInput("", {"svg": box(3), "source": "a"})
    score = Score(0.5, {"svg.elements": 0.4, "svg.render": 1.0, "svg.accuracy": 0.0})
    measures = task().outcome(x, score)
    assert measures["elements"] == 0.4 and measures["parse_failure"] == 0 and measures["accuracy"] == 0
    assert set(task().outcome(x, UNSCORED).values()) == {None}


@pytest.mark.parametrize(
    "truth", [{}, {"svg": "", "source": "a"}, {"svg": box(3)}, {"svg": box(3), "source": "x" * 61}]
)
def test_faults_of_a_truth(truth: dict):
    assert truth_problems(truth)


def test_filters():
    basic = f'{HEAD}<rect width="1" height="1"/><line x2="3"/><path d="M0 0"/><defs><path/></defs></svg>'
    assert count_shapes(basic) == (2, 1)
    assert not Filters(0.6, 1).reason(basic)
    assert "67%" in Filters(0.7).reason(basic)
    assert "limit is 1" in Filters(0, 1).reason(basic.replace("<line", "<path/><line"))
    assert "characters" in Filters(max_chars=100).reason(basic)


def test_code_that_repeats_itself():
    piece = '<path d="M1 2 L3 4"/>'
    assert repeats(f"{HEAD}{piece * 12}</svg>") and repeats(f"{HEAD}<g>{piece * 12}</g></svg>") and repeats(piece * 12)
    assert not repeats(f"{HEAD}{piece * 8}</svg>")
    assert not repeats(HEAD + "".join(f'<path d="M1 {k} L3 4"/>' for k in range(30)) + "</svg>")


def test_shares_of_the_splits():
    digests = [f"{hash_:064x}" for hash_ in (random.Random(k).getrandbits(256) for k in range(4000))]
    splits = [split_of(digest, Shares(0.1, 0.5)) for digest in digests]
    assert abs(splits.count("validation") / 4000 - 0.1) < 0.02 and abs(splits.count("start") / 4000 - 0.45) < 0.03


def test_candidates_say_why_they_have_no_code(tmp_path: Path):
    (tmp_path / "a.svg").write_text("<svg><g>")
    (candidate,) = read_sources(str(tmp_path))
    assert candidate == Candidate(None, tmp_path.name[:60], str(tmp_path / "a.svg"), "the svg element has no end tag")
