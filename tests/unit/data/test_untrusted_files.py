"""Files, tables and options that a stranger wrote: each is refused in words, none hangs or ends in a traceback."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmrl.data.encode import Encoder
from vlmrl.data.table_dataset import open_tables
from vlmrl.data.table_files import parsed_row
from vlmrl.data.table_pieces import TablePiece, read_piece
from vlmrl.errors import CheckpointError, DataError, LaunchError, RecipeError
from vlmrl.evaluate.eval_plan import _words
from vlmrl.model.gpus import parse_gpus
from vlmrl.recipe.load import Problem, parse_override
from vlmrl.recipe.template import read_template
from vlmrl.recipe.template_worker import TemplateLimitError, TemplateWorker
from vlmrl.reward_check.response_tables import first_row
from vlmrl.reward_check.responses import ArrowCells
from vlmrl.setup.memory_sizes import parse_gpu
from vlmrl.setup.model_origin import find_model
from vlmrl.tasks.scaffold import write_task
from vlmrl.types import Media, Row


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", tz="Nowhere/Town")])
def test_a_date_that_python_cannot_hold_is_named_by_column_and_row(tmp_path, kind):
    path = tmp_path / "rows.parquet"
    when = [1, 2**62] if kind.tz is None else [1, 2]
    table = pa.table({"response": ["a", "b"], "when": pa.array(when, pa.int64()).cast(kind)})
    pq.write_table(table, path)
    bad = 1 if kind.tz is None else 0
    with pytest.raises(DataError) as error:
        open_tables(str(path))["train"].row(bad)
    assert "column `when`" in error.value.where and f"row {bad}" in error.value.where
    with pytest.raises(DataError) as error:
        list(read_piece(TablePiece("train", 0, 2, "parquet", str(path)), ["response", "when"]))
    assert error.value.where == f"train row {bad}, column `when`"
    assert len(list(read_piece(TablePiece("train", 0, 2, "parquet", str(path)), ["response"]))) == 2
    batch = table.to_batches()[0]
    assert ArrowCells(batch, 0).column("response") == ["a", "b"]
    with pytest.raises(DataError, match="cannot be read"):
        ArrowCells(batch, 0).column("when")
    if bad == 0:
        with pytest.raises(DataError, match="cannot be read"):
            first_row(str(path), ".parquet")


def test_named_pipes_and_lfs_pointers_are_named(tmp_path):
    for name in ("prompt.jinja", "rows.jsonl", "rows.parquet"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(RecipeError, match="is a named pipe"):
        read_template(tmp_path / "prompt.jinja")
    for name in ("rows.jsonl", "rows.parquet"):
        with pytest.raises(DataError, match="is a named pipe"):
            open_tables(str(tmp_path / name))
    pointer = tmp_path / "lfs.parquet"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match="run git lfs pull"):
        open_tables(str(pointer))


def test_a_repeated_key_of_a_json_row_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": {"b": 1, "b": 2}}\n')
    with pytest.raises(DataError, match="`b` occurs more than once") as error:
        open_tables(str(path))
    assert error.value.where.endswith("rows.jsonl:2")
    assert "more than once" in parsed_row(b'{"a": 1, "a": 2}')


@pytest.mark.parametrize("text", ["1g.0gb", "9g.1gb", "0g.5gb", "H100,A100", "\uff11", "\uff13g.40gb", "1g.99999gb"])
def test_gpu_sizes_that_are_none(text):
    with pytest.raises(RecipeError, match="--gpu-memory cannot be"):
        parse_gpu(text)


def test_limits_of_options(tmp_path):
    for text in ("9" * 20, "9" * 5000, "1," + "9" * 20):
        with pytest.raises(LaunchError, match="at most"):
            parse_gpus(text)
    problem = parse_override(".".join("a" * 2000) + "=1")
    assert isinstance(problem, Problem) and "2,000 parts" in problem.message
    with pytest.raises(DataError, match="cannot be made"):
        write_task(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="empty"):
        find_model("", tmp_path)
    assert _words("dataset", {"dataset": {"path": "a/rows.jsonl", "rows": 2}}) == "a/rows.jsonl"


@pytest.mark.slow
def test_a_slow_template_ends_after_a_few_rows():
    worker = TemplateWorker(cpu_seconds=1)
    source = "{% for i in range(99999) %}{{ i|string|upper|lower|title|trim }}{% endfor %}"
    try:
        with pytest.raises(TemplateLimitError, match=r"seconds for|more than 1 seconds"):
            for _ in range(200):
                worker.render(source, {})
    finally:
        worker.close()


def test_images_that_do_not_fit_are_refused_by_their_size_alone():
    processor = SimpleNamespace(
        tokenizer=None,
        image_processor=SimpleNamespace(
            merge_size=2,
            size={"shortest_edge": 1, "longest_edge": 2},
            get_number_of_image_patches=lambda height, width, arguments: arguments["size"]["shortest_edge"] // 196,
        ),
    )
    row = Row("id", "rows", "", {}, (Media("0" * 64, 56, 56),))
    Encoder(processor, min_pixels=784 * 9, max_pixels=10**8).require_fit(row, 9)
    with pytest.raises(DataError, match="images alone have 10 tokens"):
        Encoder(processor, min_pixels=784 * 10, max_pixels=10**8).require_fit(row, 9)
