"""The index of passages: its words, its ranking beside a slow one, its tables, and what happens to it."""

from __future__ import annotations

import csv
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vlmrl.cli.app import app
from vlmrl.errors import DataError, VlmrlError
from vlmrl.search import index as module
from vlmrl.search.index import (
    FTS5,
    KINDS,
    TANTIVY,
    Passage,
    bm25,
    is_large,
    open_index,
    read_passages,
    weight_of,
    words_of,
)
from vlmrl.store.checkpoints import sha256_of

ROWS = [
    {"id": "a", "title": "Velmora", "text": "Velmora lies on the river Askel."},
    {"id": "b", "title": "Askel", "text": "The Askel is a river. It is 300 km long."},
    {"id": "c", "title": "Tarn", "text": "Tarn is a town with a castle and a café."},
]


def table(folder: Path, rows: list[Any], name: str = "passages.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Café's  № 12-b", ["the", "cafe", "s", "no", "12", "b"]),
        ("snake_case A_1", ["snake", "case", "a", "1"]),
        ("北京大学 2024", ["北", "京", "大", "学", "2024"]),
        ("한국어 말", ["한국어", "말"]),
        ("Straße", ["strasse"]),
        ("x" * 100, ["x" * 64, "x" * 36]),
        ("\ud800 \x00 -- ", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_the_score_is_that_of_the_formula() -> None:
    # idf = ln(1 + (3 - 1 + 0.5) / (1 + 0.5)) = 0.9808; tf part = 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 8)) = 1.6
    assert weight_of(1, 3) == pytest.approx(0.980829, abs=1e-6)
    assert bm25({"a": 1.0}, Counter({"a": 2, "b": 2}), 4, 8.0) == pytest.approx(1.6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_passage_is_first(tmp_path: Path, kind: str) -> None:
    index = open_index(table(tmp_path, ROWS), kind)
    assert index.count == 3
    assert [one.name for one in index.search("river AND long", 4)] == ["b", "c", "a"]  # `and` is a word of c
    assert index.search("castle", 4) == [Passage("Tarn", ROWS[2]["text"], "c")]
    assert [one.name for one in index.search("cafe", 1)] == ["c"]
    assert index.search("nowhere", 4) == index.search("", 4) == []


HOSTILE = [
    '"',
    "* OR NEAR(",
    "title:x",
    "'); DROP TABLE passages;--",
    "a" * 100_000,
    "\x00\ud800",
    "NOT AND OR",
    "-river",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_is_only_words(tmp_path: Path, kind: str) -> None:
    index = open_index(table(tmp_path, ROWS), kind)
    for query in HOSTILE:
        assert len(index.search(query, 4)) <= 3
    assert [one.name for one in index.search('-castle" OR', 4)] == ["c"]


def slow_search(texts: list[str], query: str) -> list[float]:
    """The scores of all texts that have a word of the query, the best first."""
    lists = [words_of(text) for text in texts]
    mean = sum(map(len, lists)) / len(lists)
    weights = {w: weight_of(sum(w in one for one in lists), len(lists)) for w in set(words_of(query))}
    scores = (bm25(weights, Counter(one), len(one), mean) for one in lists if set(one) & weights.keys())
    return sorted(scores, reverse=True)


words = st.lists(
    st.sampled_from(["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "12", "ü", "é", "北"]), min_size=1, max_size=12
).map(" ".join)


@given(st.lists(words, min_size=1, max_size=12), words)
@settings(max_examples=30, deadline=None)
def test_the_ranking_is_that_of_a_slow_search(texts: list[str], query: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = table(Path(folder), [{"text": text} for text in texts])
        for kind in KINDS:
            index = open_index(path, kind)
            shown = [one.text for one in index.search(query, 3)]
            index.close()
            ranks = [slow_search([*texts], query)[i] for i in range(len(shown))]
            lists = [words_of(text) for text in texts]
            mean = sum(map(len, lists)) / len(lists)
            weights = {w: weight_of(sum(w in one for one in lists), len(lists)) for w in set(words_of(query))}
            own = [bm25(weights, Counter(words_of(text)), len(words_of(text)), mean) for text in shown]
            assert len(shown) == min(3, len(slow_search(texts, query)))
            assert own == pytest.approx(ranks, rel=0.02 if kind == TANTIVY else 1e-9)  # it rounds lengths to a byte


def test_a_query_of_frequent_words_alone_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_RANKED", 10)
    rows = [{"text": f"the river of town {n}" + (" and the the lake" if n % 7 == 0 else "")} for n in range(200)]
    index = open_index(table(tmp_path, rows))
    assert len(index.search("the of", 4)) == 4
    best = index.search("the lake river", 4)
    assert len(best) == 4 and all("lake" in one.text for one in best)
    assert len(index.search("the missing of", 300)) == 200


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_tables_of_all_kinds_are_read(tmp_path: Path, kind: str) -> None:
    rows = [{"id": str(i), "contents": f'text {i}, "x"\nline', "title": "ü"} for i in range(3)]
    path = tmp_path / f"p.{kind}"
    if kind == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    assert list(read_passages(path)) == [Passage("ü", row["contents"], row["id"]) for row in rows]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.jsonl", '{"text": "a"}\n{"text": ["b"]}\n', "p.jsonl, row 2"),
        ("p.jsonl", '{"text": {"a": 1}}', "`text` is an object, not a text"),
        ("p.jsonl", '{"text": true}', "`text` is true or false, not a text"),
        ("p.jsonl", '{"text": "a", "title": ["b"]}', "`title` is a list, not a text"),
        ("p.jsonl", '{"text": "a"}\nnot json\n', "line 2 is not JSON"),
        ("p.jsonl", "[" * 100_000, "not JSON"),
        ("p.jsonl", '["a"]', "row 1"),
        ("p.csv", "a,b\n1,2\n", "the row has: a, b"),
        ("p.csv", "a,b\n1,2\n", "in the column text, contents"),
        ("p.parquet", "no parquet", "cannot be read"),
        ("p.jsonl", b"\xff\xfe{}", "is not text in UTF-8"),
        ("p.jsonl", b"\xff\xfe{}", "iconv"),
        ("p.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0), "gunzip"),
        ("p.jsonl", "", "has no passage"),
        ("p.jsonl", '{"text": ""}\n{"text": null}\n', "has no passage; 2 rows without a text"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_and_leaves_nothing(
    tmp_path: Path, name: str, content: str | bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        open_index(path)
    assert says in str(caught.value), str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} <= {name, f"{name}.fts5.lock"}


TWICE = {"title": "Askel", "text": "It is a river. It is long."}


@pytest.mark.parametrize(
    "rows",
    [
        [{"question": "q", "context": [["Askel", ["It is a river.", " It is long."]], ["Tarn", ["A town."]]]}],
        [{"context": {"title": ["Askel", "Tarn"], "sentences": [["It is a river.", "It is long."], ["A town."]]}}],
        [{"context": json.dumps([["Askel", ["It is a river.", "It is long."]], ["Tarn", ["A town."]]])}],
        [{"paragraphs": [{"idx": 0, "title": "Askel", "paragraph_text": TWICE["text"]},
                         {"idx": 1, "title": "Tarn", "paragraph_text": "A town."}]}],  # MuSiQue
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_paragraphs_of_questions_are_passages_once(tmp_path: Path, rows: list[Any], kind: str) -> None:
    path = table(tmp_path, rows * 2)
    if kind == "json":
        path = tmp_path / "p.json"
        path.write_text(json.dumps(rows * 2))
    assert list(read_passages(path)) == [Passage(**TWICE), Passage("Tarn", "A town.")]


NO_TEXT = [[["a"]], [["a", []]], ["a"], {"title": ["a"]}, {"title": ["a", "b"], "text": ["c"]}, 3, [{"title": "a"}]]


@pytest.mark.parametrize("context", [*NO_TEXT, "text", [[1, 2, 3]], [["a", [["b"]]]]])
def test_paragraphs_of_another_form_are_named(tmp_path: Path, context: Any) -> None:
    rows = [{"context": context}]
    with pytest.raises(
        DataError, match=r"a paragraph has no text|has no passage|a paragraph is a list|2 titles for 1 p"
    ):
        list(read_passages(table(tmp_path, rows)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_text_are_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    rows = [{"text": " "}, *ROWS, {"title": "none"}, {"text": float("nan")}, {"context": [["a", []], ["b", ["c"]]]}]
    index = open_index(table(tmp_path, rows), kind)
    assert (index.count, index.left_out) == (4, 4)
    assert open_index(tmp_path / "passages.jsonl", kind).left_out == 4


@pytest.mark.parametrize(("name", "text"), [("p.jsonl", '{"TEXT": 5, "Title": "T"}\n'), ("p.csv", "Title,Text\nT,5\n")])
def test_a_mark_at_the_begin_and_the_case_of_names_do_not_count(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert list(read_passages(tmp_path / name)) == [Passage("T", "5")]


def test_a_large_table_without_an_index_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path, ROWS)
    assert not is_large(path, FTS5)
    monkeypatch.setattr(module, "MOST_AT_START", 10)
    assert is_large(path, FTS5)
    open_index(path).close()
    assert not is_large(path, FTS5)


def test_the_command_makes_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path, ROWS)
    shown = CliRunner().invoke(app, ["prep", "passages", str(path), "--json"])
    facts = json.loads(shown.stdout)
    assert facts == {"path": f"{path}.fts5", "passages": 3, "left_out": 0, "sha256": open_index(path).sha256}
    table(tmp_path, [{"text": "new"}, {"text": ""}])
    os.utime(f"{path}.fts5", ns=(2**62, 2**62))  # it looks newer, as with a clock that is wrong
    shown = CliRunner().invoke(app, ["prep", "passages", str(path)])
    assert "1 passage; 1 row without a text left out" in shown.output
    refused = CliRunner().invoke(app, ["prep", "passages", str(path), "--kind", "lucene"])
    assert isinstance(refused.exception, VlmrlError)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*p\.jsonl") as caught:
        open_index(tmp_path / "p.jsonl")
    assert str(Path.cwd()) in str(caught.value)
    with pytest.raises(DataError, match=f"the file {tmp_path} cannot be read: Is a directory"):
        open_index(tmp_path)


def test_another_table_with_the_time_of_the_first_is_seen(tmp_path: Path) -> None:
    path = table(tmp_path, ROWS)
    first, facts = open_index(path).sha256, path.stat()
    table(tmp_path, [{"text": "x" * len(json.dumps(ROWS))}], "other.jsonl")
    os.utime(tmp_path / "other.jsonl", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    (tmp_path / "other.jsonl").rename(path)
    assert open_index(path).sha256 != first


def test_a_surrogate_in_a_row_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "half \\ud800 pair", "title": "\\udfff"}\n')
    assert open_index(path).search("pair", 1) == [Passage("?", "half ? pair")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_table_gets_a_new_index(tmp_path: Path, kind: str) -> None:
    path = table(tmp_path, ROWS)
    first = open_index(path, kind).sha256
    place = path.with_name(f"{path.name}.{kind}")
    inode = place.stat().st_ino
    os.utime(path, ns=(2**62, 2**62))  # another time, the same content
    assert open_index(path, kind).sha256 == first and place.stat().st_ino == inode
    table(tmp_path, [{"text": "new"}])
    os.utime(path, ns=(2**62, 2**62))
    index = open_index(path, kind)
    assert index.sha256 != first and [one.text for one in index.search("new", 4)] == ["new"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_touched_table_is_read_once_more(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = table(tmp_path, ROWS), []
    open_index(path, kind).close()
    place = path.with_name(f"{path.name}.{kind}")
    os.utime(place, ns=(1, 1))  # the table is newer, as after a copy of both
    monkeypatch.setattr(module, "sha256_of", lambda one: read.append(one) or sha256_of(one))
    for _ in range(3):
        open_index(path, kind).close()
    assert read == [path]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_index_is_made_again(tmp_path: Path, kind: str) -> None:
    path = table(tmp_path, ROWS)
    open_index(path, kind).close()
    place = path.with_name(f"{path.name}.{kind}")
    (place / "vlmrl.json" if place.is_dir() else place).write_bytes(b"damaged")
    assert open_index(path, kind).count == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path, ROWS)

    opened = Path.open

    def refused(self: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "rb":
            return opened(self, mode, **options)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DataError, match="cannot be written: Permission denied") as caught:
        open_index(path)
    assert "folder that can be written" in str(caught.value)


def test_tantivy_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tantivy", None)
    with pytest.raises(DataError, match="tantivy is not installed") as caught:
        open_index(table(tmp_path, ROWS), TANTIVY)
    assert "'.[search]'" in str(caught.value)


def count_of(path: str) -> int:
    return open_index(path).count


def test_several_processes_make_one_index(tmp_path: Path) -> None:
    path = table(tmp_path, [{"text": f"word{n} in a passage"} for n in range(3000)])
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(count_of, [str(path)] * 6) == [3000] * 6
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, f"{path.name}.fts5", f"{path.name}.fts5.lock"]


@pytest.mark.slow
def test_a_killed_process_leaves_no_half_index(tmp_path: Path) -> None:
    path = table(tmp_path, [{"text": " ".join(f"w{n * i}" for i in range(60))} for n in range(30_000)])
    code = f"from vlmrl.search.index import open_index; open_index({str(path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    new = path.with_name(f"{path.name}.{FTS5}.new")
    while not new.exists() or new.stat().st_size < 1 << 16:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not path.with_name(f"{path.name}.{FTS5}").exists()
    assert open_index(path).count == 30_000
    assert not new.exists()
