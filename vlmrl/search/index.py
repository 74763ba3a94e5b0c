"""Index of passages on this machine, ranked by BM25: SQLite's FTS5 in one file, or tantivy in a folder.

    with open_index("data/wiki.jsonl") as index:
        index.search("river of Velmora", 4)

A passage is a row with a `text` and, if there is one, a `title`. Both are split into words by one rule, `words_of`, in
passages and in queries, so both kinds of index rank alike. FTS5 needs a time for a query that grows with the number of
passages that have its words. So only the passages with its rarer words are ranked by FTS5, and the best of them are
ranked again here, by all words.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sqlite3
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from vlmrl.errors import DataError, cell_text
from vlmrl.redaction.redact import excerpt
from vlmrl.store.checkpoints import sha256_of
from vlmrl.untrusted import number_of, parse_json

FTS5, TANTIVY = "fts5", "tantivy"
KINDS = (FTS5, TANTIVY)
TEXTS = ("text", "contents", "content", "passage", "paragraph_text", "body")
TITLES = ("title", "name")
NAMES = ("id", "docid", "_id", "doc_id")
"""Names of the columns of a passage, whatever their case."""
PARAGRAPHS, SENTENCES = ("paragraphs", "context"), ("sentences",)
"""Names of the column of a question that has its paragraphs, and of the texts of those."""
VERSION = 2
K1, B = 1.2, 0.75
"""Constants of BM25: how soon a word counts no more when it is repeated, and how much the length counts."""
MOST_TERMS = 64
"""Most words of a query that count."""
RARE_SHARE, MOST_RANKED, LEAST_RANKED = 0.15, 20_000, 1_000
"""Passages that FTS5 ranks for a query: at most this share of all, and within these numbers."""
BEST, COMMON = 256, 500
"""Passages that are ranked again, for a query with rarer words, and for one of common words alone."""
BATCH = 1_000
MOST_LINE = 1 << 22
"""Longest row in characters."""
MOST_AT_START = 128 << 20
"""Largest table in bytes whose index is made at the start of a run: about 20 s."""
WORD = re.compile(r"[a-z0-9]{1,64}")
ANY_WORD = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
    "|[^\\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]{1,64}"
)
"""A word, or 64 characters of a longer one. Characters of a script without spaces between words are words."""
SCHEMA = """
CREATE TABLE passages (id INTEGER PRIMARY KEY, name TEXT, title TEXT, text TEXT);
CREATE VIRTUAL TABLE words USING fts5(body, content='', tokenize='ascii');
CREATE VIRTUAL TABLE vocabulary USING fts5vocab(words, 'row');
CREATE TABLE counts (word TEXT PRIMARY KEY, passages INTEGER) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage. `name`: its id in the table, or the address of a page."""

    title: str
    text: str
    name: str = ""


class Index(Protocol):
    """Index of passages. `sha256`: of the table that it was made from; `count`: number of passages.

    `left_out`: number of rows and paragraphs without a text.
    """

    sha256: str
    count: int
    left_out: int

    def search(self, query: str, most: int) -> list[Passage]:
        """Return the best passages for a query, at most so many, the best first; [] if none has a word of it."""
        ...

    def close(self) -> None:
        """Close the index."""
        ...


def words_of(text: str) -> list[str]:
    """Return the words of a text: runs of letters and digits in lower case, without accents."""
    if text.isascii():
        return WORD.findall(text.lower())
    parts = unicodedata.normalize("NFKD", text).casefold()
    return ANY_WORD.findall(unicodedata.normalize("NFC", "".join(c for c in parts if unicodedata.category(c) != "Mn")))


def bm25(query: Mapping[str, float], words: Counter[str], length: int, mean: float) -> float:
    """Return the score of a passage. `query`: word -> its weight; `length`, `mean`: number of words, and the mean."""
    norm = K1 * (1 - B + B * length / mean)
    return sum(weight * (count := words[word]) * (K1 + 1) / (count + norm) for word, weight in query.items())


def weight_of(count: int, passages: int) -> float:
    """Return the weight of a word that so many of the passages have."""
    return math.log(1 + (passages - count + 0.5) / (count + 0.5))


def read_passages(path: Path, facts: MutableMapping[str, Any] | None = None) -> Iterator[Passage]:
    """Yield the passages of a table: JSON lines, JSON, CSV or TSV with a head, or Parquet.

    A row is a passage, or a question with its paragraphs, as in HotpotQA, 2WikiMultihopQA and MuSiQue. Of such rows,
    a paragraph that comes again is left out. A row or paragraph whose text is empty is left out and counted.

    Args:
        facts: gets `left_out`, their number, at the end.
    Raises: DataError for a table or row that cannot be read, and for a table without a passage.
    """
    seen, count, left_out = set[bytes](), 0, 0
    try:
        for number, row in enumerate(_rows(path), 1):
            where, values = f"{path}, row {number:,}", _by_name(row)
            paragraphs = next((values[name] for name in PARAGRAPHS if values.get(name)), None)
            if paragraphs is None and number == 1 and not values.keys() & {*TEXTS, *PARAGRAPHS}:
                message = f"no column with a text; the row has: {', '.join(map(str, row)) if values else 'no columns'}"
                raise DataError(excerpt(message, 300), where=where, hint=_COLUMNS)
            for one in [_passage(values, where)] if paragraphs is None else _paragraphs(paragraphs, where):
                key = hashlib.sha256(f"{one.title}\n{one.text}".encode()).digest() if paragraphs else b""
                left_out += not one.text.strip()
                if one.text.strip() and key not in seen:
                    seen |= {key} if key else set()
                    count += 1
                    yield one
    except UnicodeDecodeError as error:
        with path.open("rb") as file:
            packed = file.read(4).startswith(_PACKED)
        hint = f"unpack it first, as by: gunzip {path}"
        hint = hint if packed else f"if it is in Latin-1: iconv -f LATIN1 -t UTF-8 {path} > NEW{path.suffix}"
        words = "is compressed" if packed else f"is not text in UTF-8: {error.reason}"
        raise DataError(f"the table of passages {words}", where=str(path), hint=hint) from None
    except (OSError, csv.Error) as error:
        raise DataError(f"the passages cannot be read: {error}", where=str(path)) from None
    if not count:
        rows = f"; {number_of(left_out, 'row')} without a text" if left_out else ""
        raise DataError(f"the table has no passage{rows}", where=str(path), hint=_COLUMNS)
    if facts is not None:
        facts["left_out"] = left_out


def _by_name(row: Any) -> dict[str, Any]:
    """Return the cells of a row by the names of their columns in lower case; {} for what is no row."""
    return {str(name).casefold().strip(): value for name, value in row.items()} if isinstance(row, dict) else {}


def _rows(path: Path) -> Iterator[Any]:
    kind = path.suffix.lower()
    if kind == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            for batch in pq.ParquetFile(path).iter_batches(BATCH):
                yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise DataError(f"the passages cannot be read: {error}", where=str(path)) from None
        return
    with path.open(encoding="utf-8-sig", newline="") as file:
        if kind == ".json":
            try:
                rows = parse_json(file.read())
            except ValueError as error:
                raise DataError(f"it is not JSON: {error}", where=str(path)) from None
            yield from rows if isinstance(rows, list) else [rows]
            return
        if kind in (".csv", ".tsv"):
            csv.field_size_limit(MOST_LINE)
            yield from csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ",")
            return
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), ""), 1):
            if line.strip():
                try:
                    yield parse_json(line)
                except ValueError as error:
                    hint = "passages are JSON lines, JSON, CSV, TSV or Parquet with a column `text`"
                    raise DataError(f"line {number:,} is not JSON: {error}", where=str(path), hint=hint) from None


def _paragraphs(value: Any, where: str) -> Iterator[Passage]:
    """Yield the paragraphs of a question: [title, sentences] each, or rows, or columns; also as a JSON text.

    Raises: DataError for a paragraph of another form.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            value = parse_json(value)
    if isinstance(value, dict):  # as the `datasets` library stores lists of records
        texts = next((value[name] for name in (*SENTENCES, *TEXTS) if isinstance(value.get(name), list)), [None])
        titles = value.get("title") or [""] * len(texts)
        if len(titles) != len(texts):
            raise DataError(f"{number_of(len(titles), 'title')} for {number_of(len(texts), 'paragraph')}", where=where)
        value = list(zip(titles, texts, strict=True))
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, (list, tuple)) and len(one) == 2:
            one = {"title": one[0], "text": one[1]}
        one = _by_name(one)
        if not one.keys() & {*TEXTS, *SENTENCES}:
            raise DataError("a paragraph has no text", where=where, hint="it is [title, sentences], or has a `text`")
        text = next((one[name] for name in (*TEXTS, *SENTENCES) if one.get(name)), None)
        parts = text if isinstance(text, list) else [text]
        joined = " ".join(cell_text(part, "a paragraph", where).strip() for part in parts)
        yield _passage({"title": one.get("title"), "text": joined}, where)


def _passage(values: Mapping[str, Any], where: str) -> Passage:
    """Return a row as a passage; its text may be empty. Raises: DataError for a cell that is no text."""

    def first(names: tuple[str, ...]) -> str:
        value = next((cell_text(values[n], f"`{n}`", where) for n in names if values.get(n) is not None), "")
        return value if value.isascii() else value.encode(errors="replace").decode()  # half of a surrogate pair

    return Passage(first(TITLES), first(TEXTS), first(NAMES))


class Fts5Index:
    """Index in a file of SQLite. A process that was forked must open it anew.

    Raises: DataError when the file is no such index.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            meta = dict(self._db.execute("SELECT key, value FROM meta"))
            self.sha256, self.count = str(meta["sha256"]), int(meta["passages"])
            self._mean, self.version = float(meta["words"]) / max(1, self.count), int(meta["version"])
            self.left_out = int(meta.get("left_out", 0))
        except (sqlite3.Error, KeyError, ValueError) as error:
            raise DataError(f"the index cannot be read: {error}", where=str(path), hint=_AGAIN) from None

    def search(self, query: str, most: int) -> list[Passage]:
        """Return the best passages for a query: see `Index.search`."""
        terms = list(dict.fromkeys(words_of(query)))[:MOST_TERMS]
        counts = {word: count for word in terms if (count := self._passages_with(word))}
        weights = {word: weight_of(count, self.count) for word, count in counts.items()}
        scored = []
        for number, name, title, text in self._candidates(counts, most):
            words = words_of(f"{title} {text}")
            score = bm25(weights, Counter(words), len(words), self._mean)
            scored.append((-score, number, Passage(title, text, name)))
        return [passage for *_, passage in sorted(scored, key=lambda one: one[:2])[:most]]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _passages_with(self, word: str) -> int:
        row = self._db.execute("SELECT passages FROM counts WHERE word = ?", (word,)).fetchone()
        return int(row[0]) if row else 0

    def _candidates(self, counts: Mapping[str, int], most: int) -> Iterable[tuple[int, str, str, str]]:
        """Return the passages that may be the best: for the rarer words, those that FTS5 ranks highest."""
        if not counts:
            return []
        rarest = sorted(counts, key=lambda word: counts[word])
        limit = min(max(self.count * RARE_SHARE, LEAST_RANKED), MOST_RANKED)
        total, rare = 0, list[str]()
        for word in rarest:
            total += counts[word]
            if total > limit:
                break
            rare.append(word)
        if rare:
            numbers = self._matching(rare, "OR", f"ORDER BY rank LIMIT {max(BEST, most)}")
        else:  # ranking them would take too long: any passages with all words, then any with the rarest
            numbers = self._matching(rarest, "AND", f"LIMIT {COMMON}")
            if len(numbers) < COMMON:
                numbers = list(dict.fromkeys([*numbers, *self._matching(rarest[:1], "AND", f"LIMIT {COMMON}")]))
        marks = ",".join("?" * len(numbers))
        return self._db.execute(f"SELECT id, name, title, text FROM passages WHERE id IN ({marks})", numbers).fetchall()

    def _matching(self, words: Iterable[str], operator: str, rest: str) -> list[int]:
        # FTS5 has a query language. A word is only letters and digits, and the quotes make it a text.
        match = f" {operator} ".join(f'"{word}"' for word in words)
        return [row[0] for row in self._db.execute(f"SELECT rowid FROM words WHERE words MATCH ? {rest}", (match,))]


def _make_fts5(passages: Iterable[Passage], path: Path, meta: Mapping[str, Any]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=OFF")
        db.execute("PRAGMA synchronous=OFF")
        db.executescript(SCHEMA)
        db.execute("BEGIN")
        count, total = 0, 0
        rest = iter(passages)
        while batch := list(islice(rest, BATCH)):
            lists = [words_of(f"{one.title} {one.text}") for one in batch]
            numbers = range(count + 1, count + 1 + len(batch))
            rows = [(n, one.name, one.title, one.text) for n, one in zip(numbers, batch, strict=True)]
            db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?)", rows)
            bodies = [(n, " ".join(words)) for n, words in zip(numbers, lists, strict=True)]
            db.executemany("INSERT INTO words (rowid, body) VALUES (?, ?)", bodies)
            total += sum(map(len, lists))
            count += len(batch)
        db.execute("INSERT INTO words (words) VALUES ('optimize')")
        # Counting the passages of a frequent word takes as long as reading them.
        db.execute("INSERT INTO counts SELECT term, doc FROM vocabulary")
        db.executemany("INSERT INTO meta VALUES (?, ?)", {**meta, "passages": count, "words": total}.items())
        db.execute("COMMIT")


class TantivyIndex:
    """Index in a folder of tantivy. Raises: DataError when tantivy is not installed, or the folder is no such index."""

    def __init__(self, path: Path) -> None:
        tantivy = _tantivy()
        try:
            meta = parse_json((path / "vlmrl.json").read_bytes())
            self.sha256, self.count, self.version = str(meta["sha256"]), int(meta["passages"]), int(meta["version"])
            self.left_out = int(meta.get("left_out", 0))
            self._index = tantivy.Index.open(str(path))
            self._index.config_reader("manual", 1)  # no thread watches the folder
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"the index cannot be read: {error}", where=str(path), hint=_AGAIN) from None
        self._searcher, self._query, self._occur = self._index.searcher(), tantivy.Query, tantivy.Occur

    def search(self, query: str, most: int) -> list[Passage]:
        """Return the best passages for a query: see `Index.search`."""
        terms = list(dict.fromkeys(words_of(query)))[:MOST_TERMS]
        parts = [(self._occur.Should, self._query.term_query(self._index.schema, "body", word)) for word in terms]
        if not parts:
            return []
        documents = [
            self._searcher.doc(at) for _, at in self._searcher.search(self._query.boolean_query(parts), most).hits
        ]
        return [Passage(*(str(one.get_first(key) or "") for key in ("title", "text", "name"))) for one in documents]

    def close(self) -> None:
        """Close the index."""


def _make_tantivy(passages: Iterable[Passage], path: Path, meta: Mapping[str, Any]) -> None:
    tantivy = _tantivy()
    path.mkdir()
    fields = tantivy.SchemaBuilder()
    for name in ("title", "text", "name"):
        fields.add_text_field(name, stored=True, tokenizer_name="raw", index_option="basic")
    fields.add_text_field("body", tokenizer_name="whitespace", index_option="freq")
    index = tantivy.Index(fields.build(), path=str(path))
    writer, count = index.writer(1 << 27, 1), 0
    for one in passages:
        count += 1
        body = " ".join(words_of(f"{one.title} {one.text}"))
        writer.add_document(tantivy.Document(title=one.title, text=one.text, name=one.name, body=body))
    writer.commit()
    writer.wait_merging_threads()
    (path / "vlmrl.json").write_text(json.dumps({**meta, "passages": count}), encoding="utf-8")


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError:
        hint = "pip install '.[search]' in the checkout, or take the engine fts5, which is a part of Python"
        raise DataError("tantivy is not installed", hint=hint) from None
    return tantivy


MAKE = {FTS5: _make_fts5, TANTIVY: _make_tantivy}
OPEN = {FTS5: Fts5Index, TANTIVY: TantivyIndex}
_AGAIN = "delete it, and it is made again"
_COLUMNS = (
    f"a passage has a text in the column {', '.join(TEXTS[:-1])} or {TEXTS[-1]}, and may have a `title`; "
    f"a question has its passages in {' or '.join(PARAGRAPHS)}"
)
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zX", b"BZh", b"PK\x03\x04")
"""First bytes of files of gzip, zstd, xz, bzip2 and zip."""


def open_index(corpus: Path | str, kind: str = FTS5, *, reads: bool = False) -> Index:
    """Return the index of a table of passages. It lies beside the table, and is made if it is missing or older.

    Args:
        kind: "fts5" or "tantivy".
        reads: whether the table is read, whatever its times say.
    Raises: DataError for a table that cannot be read, or a folder that cannot be written.
    """
    table = Path(corpus)
    try:
        with table.open("rb"):
            pass
    except OSError as error:
        words = f"no file {table}" if not table.exists() else f"the file {table} cannot be read: {error.strerror}"
        hint = f"name a table of passages with a column `text`; the current folder is {Path.cwd()}"
        raise DataError(words, where=str(table), hint=hint) from None
    place = table.with_name(f"{table.name}.{kind}")
    if (index := _current(place, table, kind, reads)) is not None:
        return index
    try:
        with place.with_name(f"{place.name}.lock").open("a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            if (index := _current(place, table, kind, reads)) is not None:
                return index
            make_index(table, place, kind)
    except OSError as error:
        hint = "copy the table to a folder that can be written: its index lies beside it"
        raise DataError(f"the index cannot be written: {error.strerror}", where=str(place), hint=hint) from None
    return OPEN[kind](place)


def is_large(corpus: Path | str, kind: str) -> bool:
    """Return whether making the missing index of a table takes longer than the start of a run should."""
    table = Path(corpus)
    if not table.is_file() or table.stat().st_size <= MOST_AT_START:
        return False
    index = _current(table.with_name(f"{table.name}.{kind}"), table, kind)
    if index is not None:
        index.close()
    return index is None


def _current(place: Path, table: Path, kind: str, reads: bool = False) -> Index | None:
    """Return the index at a place, if it is that of the table as it is now. `reads`: as for `open_index`."""
    with suppress(DataError, OSError):
        index = OPEN[kind](place)
        facts = table.stat()
        # A copy may keep the time of its content. The other one is that of the last change, also of the name.
        changed = max(facts.st_mtime_ns, facts.st_ctime_ns)
        if index.version == VERSION and place.stat().st_mtime_ns > changed and not reads:
            return index
        start = time.time_ns()
        if index.version == VERSION and index.sha256 == sha256_of(table):
            with suppress(OSError):  # later ones, as of each episode, need not read the table again
                os.utime(place, ns=(start, start))
            return index
        index.close()
    return None


def make_index(table: Path, place: Path, kind: str) -> None:
    """Write the index of a table: whole, or not at all. Raises: DataError, OSError."""
    _remove(new := place.with_name(f"{place.name}.new"))
    try:
        start = time.time_ns()
        facts = {"sha256": sha256_of(table), "version": VERSION}
        MAKE[kind](read_passages(table, facts), new, facts)
        os.utime(new, ns=(start, start))  # what changes the table meanwhile is newer
        _remove(place)
        new.rename(place)
    except sqlite3.Error as error:
        raise DataError(f"the index cannot be written: {error}", where=str(place), hint="is the disk full?") from None
    finally:
        _remove(new)


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
