"""Datasets of the task figures: splits by figure, leaks, counts, the command, and the task that they are for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import Done, this_process
from task_tables import checks_of, rows_of, sizes_of

from vlmrl.data.images import decode_image
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, RewardError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.svg.draw import DrawJob, draw_svg
from vlmrl.tasks import TASKS, find_task, kind_of, make_task
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.dataset_assembly import Limits, Prepared, row_messages
from vlmrl.tasks.source import open_source
from vlmrl.tasks.vfig.collecting import Collector, split_point
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings
from vlmrl.tasks.vfig.figure_sources import Filters, PictureSizes, Plan
from vlmrl.tasks.vfig.task import mean_per_source, values_of
from vlmrl.tasks.vfig.truth import make_truth, metadata_of, size_of, truth_problems
from vlmrl.types import RewardInput, Score

REAL = Path(__file__).parents[2] / "data" / "figures"


def figure(number: int, *, comment: str = "") -> str:
    """A figure of its own for each number."""
    shapes = "".join(
        f'<rect x="{10 + 20 * i}" y="{10 + (number >> i & 1) * 30}" width="12" height="{10 + number % 7}"/>'
        for i in range(6)
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 140 80">{comment}\n{shapes}</svg>'


def write_figures(folder: Path, numbers: Any, **more: Any) -> Path:
    folder.mkdir(parents=True)
    for number in numbers:
        (folder / f"{number}.svg").write_text(figure(number, **more))
    return folder


def prepared(tmp_path: Path, **options: Any) -> Prepared:
    command = TASKS["figures"].prep
    assert command is not None
    return command.run(**{"out": tmp_path / "out", "max_bad": 0.0, **options}, limits=Limits(workers=1))


def codes(dataset: Prepared, split: str) -> list[str]:
    return [row.truth["svg"] for row in rows_of(dataset, split)]


def counts(dataset: Prepared, source: str) -> dict[str, Any]:
    return dataset.info["source"]["sources"][source]


def test_the_first_rows_of_a_split_stand_for_all_sources(tmp_path: Path) -> None:
    """`max_rows` takes the first rows, so they must not be those of one source, nor the simplest drawn ones."""
    folders = [write_figures(tmp_path / name, numbers) for name, numbers in (("a", range(32)), ("b", range(32, 64)))]
    rows = rows_of(prepared(tmp_path, svg=[str(folder) for folder in folders]), "train")
    hashes = [str(row.columns["picture_hash"]) for row in rows]
    assert hashes == sorted(hashes) and len(hashes) > 50
    labels = [row.truth["data_source"] for row in rows[:24]]
    assert 4 <= labels.count("a") <= 20  # 12 expected; in the order of the sources it would be 24


def test_rows_of_svg_files_and_the_split_by_figure(tmp_path: Path) -> None:
    folder = write_figures(tmp_path / "diagrams", range(60))
    dataset = prepared(tmp_path, svg=[str(folder)], val_share=0.3)
    train, validation = (rows_of(dataset, split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 60 and 8 < len(validation) < 28
    assert all(split_point(str(row.columns["picture_hash"])) < 0.3 for row in validation)
    assert not any(split_point(str(row.columns["picture_hash"])) < 0.3 for row in train)
    row = train[0]
    assert row.truth == make_truth(str(row.truth["svg"]), 140, 80, "diagrams")
    assert row.truth["svg"] in map(figure, range(60))  # unchanged, its line break included
    pixels = np.asarray(decode_image(open_dataset(Data(path=str(dataset.path))).image_bytes(row.media[0])))
    assert (pixels == draw_svg(DrawJob(str(row.truth["svg"]))).pixels).all()
    assert counts(dataset, "diagrams")["kept"] == {"train": len(train), "validation": len(validation)}
    again = prepared(tmp_path, svg=[str(folder)], val_share=0.3)
    assert again.outcome == "up to date"
    other = prepared(
        tmp_path, svg=[str(write_figures(tmp_path / "half", range(30)))], val_share=0.3, out=tmp_path / "b"
    )
    assert set(codes(other, "validation")) == set(codes(dataset, "validation")) & set(map(figure, range(30)))


def test_copies_are_kept_once_and_no_figure_of_a_benchmark_is_in_train(tmp_path: Path) -> None:
    one = write_figures(tmp_path / "one", range(20))
    (one / "copy.svg").write_text(figure(3).replace('fill="x"', "").replace("\n", "  "))
    (one / "moved.svg").write_text(figure(4).replace('viewBox="0 0 140 80"', 'viewBox="-10 -5 150 85"'))
    two = write_figures(tmp_path / "two", range(15, 25), comment="<!-- a copy -->")
    bench = write_figures(tmp_path / "bench", (2, 7, 17, 99))
    (bench / "again.svg").write_text(figure(2, comment="<!-- the same -->"))
    (bench / "words.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><text y="20">words</text></svg>')
    dataset = prepared(tmp_path, svg=[str(one), f"second={two}"], bench=[f"held={bench}"])
    assert len(codes(dataset, "test")) == 5  # what the filters would leave out is there
    everything = codes(dataset, "train") + codes(dataset, "validation")
    assert len(everything) == len(set(everything)) == 22
    held = {figure(number) for number in (2, 7, 17)}
    assert not any(svg.replace("<!-- a copy -->", "") in held for svg in everything)
    assert counts(dataset, "one")["leaks"] == 3 and counts(dataset, "second")["leaks"] == 1
    assert counts(dataset, "one")["duplicates"] == 2 and counts(dataset, "second")["duplicates"] == 4
    assert counts(dataset, "held (bench)")["duplicates"] == 1
    assert dataset.info["source"]["leaks"] == {"held": 4}
    assert checks_of(dataset.info)["leakage"] == ("look", "figures taken out of train and validation: 4 of held")
    assert (
        "22 rows: 12 train, 5 validation; left out:" in checks_of(dataset.info)["source one"][1]
        and "3 of held-out sets" in checks_of(dataset.info)["source one"][1]
    )
    dropped = [json.loads(line) for line in (dataset.path / "dropped.jsonl").read_text().splitlines()]
    assert len(dropped) == 11
    assert {"origin": "one: 2.svg", "reason": "the figure is in held, which is held out"} in dropped
    assert {"origin": "one: copy.svg", "reason": "the same figure as one: 3.svg"} in dropped


def test_a_clean_dataset_says_that_nothing_leaks(tmp_path: Path) -> None:
    bench = write_figures(tmp_path / "bench", range(50, 55))
    dataset = prepared(tmp_path, svg=[str(write_figures(tmp_path / "one", range(9)))], bench=[str(bench)])
    assert checks_of(dataset.info)["leakage"] == ("ok", "no figure of bench is in train or validation")


def test_datasets_that_are_used_together_hold_out_the_same_figures(tmp_path: Path) -> None:
    supervised = prepared(
        tmp_path, out=tmp_path / "sft", val_share=0.0,
        svg=[str(write_figures(tmp_path / "one", range(12)))], bench=[str(write_figures(tmp_path / "bench", (20, 21)))],
    )  # fmt: skip
    assert sizes_of(supervised.info) == {"train": 12, "test": 2}
    dataset = prepared(
        tmp_path, val_share=0.5, beside=[supervised.path], svg=[str(write_figures(tmp_path / "two", range(2, 40)))],
        bench=[str(write_figures(tmp_path / "bench2", (3, 41)))],
    )  # fmt: skip
    validation = codes(dataset, "validation")
    assert validation and not set(validation) & set(codes(supervised, "train"))
    assert dataset.info["source"]["leaks"] == {"sft@test": 2, "bench2": 1}
    assert dataset.info["source"]["moved_to_train"] > 0
    assert dataset.info["source"]["trained_elsewhere"] == {"sft@train": 1}
    assert checks_of(dataset.info)["leakage"] == ("bad", "figures of the test split: 1 are trained on in sft@train")
    shown = this_process("data", "doctor", str(dataset.path), "--workers", "1", "--json", cwd=tmp_path).json
    assert shown["doctor"]["checks"] == dataset.info["doctor"]["checks"]  # the other dataset need not be there
    with pytest.raises(DataError, match="not a dataset of figures"):
        table = tmp_path / "rows.jsonl"
        table.write_text('{"prompt": "a", "answer": "b"}\n')
        prepared(tmp_path, beside=[table], synthetic=5, out=tmp_path / "c")


def test_sources_are_mixed_and_each_is_counted(tmp_path: Path) -> None:
    from PIL import Image

    from vlmrl.data.images import encode_png

    (tmp_path / "p.png").write_bytes(encode_png(Image.fromarray(draw_svg(DrawJob(figure(1))).pixels)))
    rows = [{"data_source": f"s{i % 2}", "response": figure(i), "images": ["p.png"]} for i in (1, 44)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    dataset = prepared(
        tmp_path, parquet=[str(tmp_path / "t.parquet")], svg=[str(REAL / "icons"), str(REAL / "flags")], val_share=0.0,
        synthetic=3, simple=True, bench=[f"plots={REAL / 'plots'}"],
    )  # fmt: skip
    labels = [row.truth["data_source"] for row in rows_of(dataset, "train")]
    assert sorted(set(labels)) == ["flags", "icons", "s0", "s1", "synthetic"]
    assert counts(dataset, "s1") | {"rows": 0} == {
        "rows": 0, "kept": {"train": 1}, "dropped": {}, "duplicates": 0, "leaks": 0, "drawn": 0, "doubtful": 0,
    }  # fmt: skip
    assert (
        counts(dataset, "s0")["doubtful"] == 1 and "differ from the drawing" in checks_of(dataset.info)["source s0"][1]
    )
    assert counts(dataset, "icons")["dropped"] == {"few basic shapes": 1}
    assert {row.truth["data_source"] for row in rows_of(dataset, "test")} == {"plots"}
    assert dataset.info["args"]["sources"][0] == "svg icons=icons"
    assert str(tmp_path) not in (dataset.path / "dataset.json").read_text()


def test_drawn_figures_of_the_command(tmp_path: Path) -> None:
    words = ("prep", "figures", "--synthetic", "20", "--workers", "1", "--json")
    info = this_process(*words, "--out", "a", cwd=tmp_path).json["info"]
    assert sizes_of(info) == {"train": 20, "validation": 2}
    dataset = open_dataset(Data(path=str(tmp_path / "a")))
    task = make_task("figures", dataset.info)
    row = dataset.rows("train")[0]
    metadata = metadata_of(row.truth)
    assert metadata is not None and "shape_0" in metadata["entities"] and task.validate(row.truth) == []
    (message,) = row_messages(task, row)
    assert message.content.startswith("<image>\n") and message.content.count("<image>") == 1
    assert task.correct_response(row, random.Random(0)) == row.truth["svg"]
    assert draw_svg(DrawJob(str(row.truth["svg"]))).pixels.shape[:2] == size_of(row.truth)[::-1]


def test_the_seed_alone_decides_what_is_drawn(tmp_path: Path) -> None:
    sizes = {"synthetic": 12, "synthetic_bench": 5, "simple": True}
    one, same, other = (
        prepared(tmp_path, out=tmp_path / name, seed=seed, **sizes).info
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert sizes_of(one) == {"train": 12, "validation": 1, "test": 5}
    assert one["files"] == same["files"] and one["fingerprint"] not in (None, other["fingerprint"])


def test_the_printed_report_has_each_source(tmp_path: Path) -> None:
    words = ("prep", "figures", "--svg", REAL / "flags", "--svg", REAL / "icons", "--min-basic", "0", "--out", "a")
    done = this_process(*words, "--workers", "1", cwd=tmp_path)
    text = " ".join(done.out.split())
    assert done.code == 0 and "source flags" in text and "source icons" in text and "5 rows: 5 train" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no figures are named"),
        (("--svg", "nowhere"), "is not there"),
        (("--sharegpt", "nowhere.json"), "no such file: nowhere.json"),
        (("--sharegpt", "object.json"), "expected a list of objects"),
        (("--sharegpt", "lost.json"), "1 of 1 rows cannot be read, more than --max-bad 0.01"),
        (("--parquet", "bare.parquet"), "none of the columns"),
        (("--bench", "text.txt", "--synthetic", "20"), "not a source of figures"),
        (("--svg", "icons", "--image-root", "nowhere"), "--image-root nowhere is not a folder"),
        (("--svg", "icons", "--svg", "icons", "--label", "a"), "--label names one source, but there are 2"),
        (("--svg", "icons"), "no figure is left to train on"),
        (("--svg", "icons"), "hint: --min-basic 0 keeps figures of paths"),
        (("--svg", "icons", "--min-basic", "0", "--bench", "icons"), "hint: the figures are held out by --bench"),
        (("--svg", "icons", "--min-basic", "0", "--max-chars", "100"), "hint: see the reasons above"),
        (("--synthetic", "20", "--simple", "--beside", "nowhere"), "nowhere"),
    ],
)
def test_wrong_input_is_an_error_and_nothing_is_written(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "icons").mkdir()
    (tmp_path / "icons" / "a.svg").write_text((REAL / "icons" / "diagram-3.svg").read_text())
    (tmp_path / "object.json").write_text('{"a": 1}')
    (tmp_path / "text.txt").write_text("x")
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": figure(1)}]
    (tmp_path / "lost.json").write_text(json.dumps([{"messages": turns, "images": ["nowhere.png"]}]))
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "bare.parquet")
    done: Done = this_process("prep", "figures", *words, "--workers", "1", "--out", "out", cwd=tmp_path)
    assert done.code == 2 and message in " ".join(done.err.split()) and not (tmp_path / "out").exists(), done
    if "lost.json" in words:
        assert "lost: lost.json row 0: no image file 'nowhere.png'" in done.err and "--image-root" in done.err


def test_drawing_ends_when_it_brings_nothing_new() -> None:
    plan = Plan(
        (), Filters(), PictureSizes(10_000, 64), drawn=20, drawn_settings=DrawnSettings(simple=True),
        drawn_filters=Filters(max_chars=99), workers=1,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"error: 0 of 22 figures were drawn, and then no new one: .* long"):
        Collector(plan).splits()


def test_few_unreadable_rows_are_left_out(tmp_path: Path) -> None:
    folder = write_figures(tmp_path / "one", range(9))
    (folder / "bad.svg").write_bytes(b"\xff")
    with pytest.raises(DataError, match="1 of 10 rows cannot be read"):
        prepared(tmp_path, svg=[str(folder)])
    dataset = prepared(tmp_path, svg=[str(folder)], max_bad=0.1)
    assert counts(dataset, "one")["dropped"] == {"wrong": 1} and counts(dataset, "one")["rows"] == 10


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"svg": ""}, "`svg`"), ({"svg": 5}, "`svg`"), ({"width": 0}, "width and height"),
        ({"width": 10**6, "height": 10**6}, "width and height"), ({"height": True}, "width and height"),
        ({"metadata": "{"}, "not JSON"), ({"metadata": "[1]"}, "not an object"), ({"data_source": "a b"}, "name of"),
        ({"data_source": None}, "name of"),
    ],
)  # fmt: skip
def test_a_wrong_truth_is_described(change: dict[str, Any], problem: str) -> None:
    truth = make_truth("<svg/>", 10, 20, "a", {"entities": {}, "layouts": []})
    assert truth_problems(truth) == [] and size_of(truth) == (10, 20)
    (text,) = truth_problems({**truth, **change})
    assert problem in text
    with pytest.raises(RewardError):
        metadata_of({"metadata": "[" * 5000})


def test_metrics_of_each_source() -> None:
    def graded(source: Any, value: float, error: str | None = None) -> Any:
        score = Score(value, {"drawn": value / 2, "other": None}, error=error)
        return RewardInput("", {"svg": "<svg/>", "data_source": source}), score, {}

    responses = [graded("a", 1.0), graded("a", 0.5), graded("b", 0.2), graded("b", 9.0, "failed"), graded(None, 1)]
    facts = [values_of(one) for one in responses]
    means = mean_per_source(facts)
    assert means(np.ones(5, dtype=np.int64)) == pytest.approx(
        {"reward/a": 0.75, "reward/b": 0.2, "part/drawn/a": 0.375, "part/drawn/b": 0.1}
    )
    resampled = means(np.array([3, 1, 0, 1, 0]))
    assert resampled["reward/a"] == pytest.approx(0.875) and resampled["reward/b"] is None
    assert mean_per_source(facts[:2])(np.ones(2, dtype=np.int64)) == {}  # one source
    many = [values_of(graded(f"s{i}", 1.0)) for i in range(21)]
    assert mean_per_source(many)(np.ones(21, dtype=np.int64)) == {}


def test_the_task_knows_its_rows() -> None:
    truth = make_truth("<svg/>", 10, 20, "a")
    task = make_task("figures", {})
    assert task.kind is not None and kind_of(truth) is task.kind and task.reward == "svg"
    assert metadata_of(truth) is None and "metadata" not in task.template


def test_the_true_code_earns_all_of_the_tasks_own_reward(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, synthetic=3, simple=True)
    source = open_source(Data(path=str(dataset.path)), Reward())
    row = source.rows[0]
    name, args = source.task.profile("default")
    reward = load_reward(str(name), args=dict(args))
    code = source.task.correct_response(row, random.Random(0))
    scores = [reward.fn(RewardInput(text, row.truth)).parts for text in (code, f"```svg\n{code}\n```", "no")]
    assert scores[0]["elements"] == scores[0]["picture"] == scores[1]["accuracy"] == 1.0
    assert scores[2]["render"] == 0.0


def test_responses_in_a_table_beside_the_true_code_are_scored(tmp_path: Path) -> None:
    rows = [{"response": figure(number), "ground_truth": figure(3)} for number in (3, 5)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("reward-check", "answers.jsonl", "--task", "figures", "--reward", "svg", "--set", "key=svg", "--json")
    done = this_process(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    truth = find_task("figures").truth_form({}, []).read
    assert truth is not None and truth(figure(3)) == {"svg": figure(3)} and truth_problems(truth(figure(3))) == []
    with pytest.raises(RewardError):
        truth(" ")
