"""Rollouts of schema 1, written before segments had authors, are read as what they were."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from vlmrl.errors import StoreError
from vlmrl.reward_check.responses import RolloutReader
from vlmrl.store.rollouts import arrow_schema, read_batches, read_rollouts, read_table, rollout_media, write_rollouts
from vlmrl.types import INAPPLICABLE, Group, Media, Row, Segment

OLD = Path(__file__).parents[2] / "data" / "rollouts-1" / "step-000004.parquet"
A, B = Media("a" * 64, 30, 20), Media("b" * 64, 8, 9)


def test_an_old_file_has_the_defaults_of_the_new_fields():
    [group] = read_rollouts(OLD)
    assert group.row == Row("shapes-1", "shapes", "table", {"answer": 3}, (A, B), {"hard": True})
    first, tool, bug, unfit = group.samples
    said = Segment("assistant", (5, 6), True, (-0.5, -0.25))
    assert first.trajectory.segments == (said,) and first.trajectory.media == (A, B)
    assert first.trajectory.seen_sizes == () and first.turns == () and first.score.artifacts == {}
    assert (first.score.value, first.score.parts, first.score.note) == (1.0, {"answer": 1.0, "format": None}, "good")
    assert first.score.status == "ok" and first.score.detail is None and first.advantage == 0.75
    assert tool.trajectory.segments == (
        said,
        Segment("tool", (7, 8, 9), False, author="environment"),
        Segment("assistant", (4,), True, (-1.0,)),
    )
    assert tool.trajectory.num_sampled_tokens == 3 and len(tool.trajectory.response_ids) == 6
    assert bug.score.status == "failed" and bug.score.failed and math.isnan(bug.score.value)
    assert unfit.score.error == INAPPLICABLE and unfit.score.status == "ok" and not unfit.score.failed


def test_it_is_written_again_as_the_newest_schema_and_read_as_the_same(tmp_path):
    groups = read_rollouts(OLD)
    write_rollouts(tmp_path / OLD.name, groups, step=4)
    assert pq.read_schema(tmp_path / OLD.name).metadata[b"vlmrl.schema"] == b"4"
    assert pq.read_schema(OLD).metadata[b"vlmrl.schema"] == b"1"
    assert repr(read_rollouts(tmp_path / OLD.name)) == repr(groups)


def test_columns_that_it_lacks_are_there_for_every_reader():
    names = ("status", "text", "detail", "artifacts", "turns")
    table = read_table(OLD, names)
    assert table.column_names == list(names) and table.column("status").to_pylist() == ["ok"] * 4
    assert [table.schema.field(n).type for n in names] == [arrow_schema().field(n).type for n in names]
    [batch] = read_batches(OLD, names, rows=100, repeated=("status",))
    assert batch.column("status").dictionary.to_pylist() == ["ok"] and batch.num_rows == 4
    assert sorted(rollout_media([OLD])) == [A.sha256, B.sha256]


def test_its_rows_are_scored_again_with_the_lengths_of_the_policys_tokens():
    reader = RolloutReader((str(OLD),))
    [chunk] = reader.chunks()
    decoded = reader.decode(chunk, media=True)
    assert [x.num_tokens for x in decoded.inputs] == [2, 3, 2, 2]
    assert [x.sample for x in decoded.inputs] == [0, 1, 2, 3] and decoded.inputs[0].prompt_id == "shapes-1"
    assert decoded.inputs[0].media == (A, B) and decoded.inputs[0].seen_sizes == () and decoded.media[0] == (A, B)


def test_a_file_of_schema_3_has_no_dependency(tmp_path):
    groups, path = read_rollouts(OLD), tmp_path / OLD.name
    measured = replace(groups[0].samples[0], dependency=(0.5, 0.25))
    write_rollouts(path, [replace(groups[0], samples=(measured, *groups[0].samples[1:]))], step=4)
    assert [s.dependency for s in read_rollouts(path)[0].samples] == [(0.5, 0.25), None, None, None]
    table = pq.read_table(path).drop_columns(["dependency"])
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"vlmrl.schema": b"3"}), path)
    assert {s.dependency for s in read_rollouts(path)[0].samples} == {None}


@pytest.mark.parametrize("column", ["status", "artifacts", "turns", "dependency"])
def test_a_file_of_schema_2_without_a_column_is_damaged(column, tmp_path):
    groups: list[Group] = read_rollouts(OLD)
    path = tmp_path / OLD.name
    write_rollouts(path, groups, step=4)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([column]), path)
    with pytest.raises(StoreError, match=f"lack the column.* {column}"):
        read_rollouts(path)


def test_an_unknown_status_and_damaged_turns_are_errors_of_the_file(tmp_path):
    import pyarrow as pa

    path = tmp_path / OLD.name
    for column, value in (("status", "fine"), ("turns", "{}"), ("turns", "[")):
        write_rollouts(path, read_rollouts(OLD), step=4)
        table = pq.read_table(path)
        at = table.column_names.index(column)
        pq.write_table(table.set_column(at, table.schema.field(at), pa.array([value] * len(table))), path)
        with pytest.raises(StoreError, match=r"wrong type|damaged"):
            read_rollouts(path)


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / OLD.name
    shutil.copy(OLD, path)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"vlmrl.schema": b"5"}), path)
    with pytest.raises(StoreError, match="schema 5; this vlmrl reads schema 4"):
        read_rollouts(path)
