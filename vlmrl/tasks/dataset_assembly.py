"""Writing of a dataset folder from checked rows, and its export as Hugging Face Parquet.

Prompts that are too long are handled first; then images, rows and the data doctor's report are written. The work is
done in parts, so that a killed run can be continued (data/parallel_parts.py). Memory holds facts of rows and images,
never the image files.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from vlmrl.data.dataset import Dataset, read_info
from vlmrl.data.dataset_writer import DROPPED_FILE, Build
from vlmrl.data.doctor import CheckLevel, DatasetFacts, RowFacts, examine_dataset
from vlmrl.data.image_scan import Examined, ShardReader, Stored, shrink_images, write_shards
from vlmrl.data.measurements import PATCH_PIXELS, estimate_image_tokens, estimate_text_tokens
from vlmrl.data.parallel_parts import Progress
from vlmrl.errors import DataError, VlmrlError
from vlmrl.tasks.base import Task
from vlmrl.tasks.prompt import IMAGE, place_images, render_user
from vlmrl.types import LeftOut, Media, Message, Row
from vlmrl.untrusted import visible

OnOverlong = Literal["fail", "resize", "drop"]
SHOWN_DROPS = 100
"""Maximum number of dropped rows that are listed in dataset.json; all of them are in dropped.jsonl."""
MIN_IMAGE_TOKENS = 4
SHOWN_BAD = 5
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LEAST_VALIDATION, LEAST_TEST = 20, 40


class PlannedRow(NamedTuple):
    """Row to be written: its place in the source, and its facts."""

    key: Any
    facts: RowFacts


RowFields = Callable[[Sequence[PlannedRow], Sequence[Media]], Iterator[dict[str, Any]]]
"""(Rows of a split, in the order of the source; every image as stored) -> the rows for `Build.write_rows`."""


@dataclass(frozen=True)
class Limits:
    """Common options of every `vlmrl prep`.

    Args:
        max_prompt_tokens: limit of a row's prompt in tokens, images included; None = no limit.
        on_overlong: treatment of rows over the limit: drop them, shrink their images, or fail.
        workers: number of processes; None = one per core.
        progress: called when parts are finished.
        force: whether a dataset of other arguments is replaced.
    """

    max_prompt_tokens: int | None = None
    on_overlong: OnOverlong = "fail"
    workers: int | None = None
    progress: Progress | None = None
    force: bool = False

    @property
    def args(self) -> dict[str, Any]:
        """Options as dataset.json has them: those that change the rows."""
        limit = self.max_prompt_tokens
        return {"max_prompt_tokens": limit, "on_overlong": self.on_overlong if limit else None}


@dataclass
class Assembly:
    """Content of a dataset that is to be written.

    Args:
        images: facts of every distinct image.
        places: for each of `images`, the place of its file, as `reader` expects it. Places are hashable; files are
            read fastest in the sorted order of their places.
        rows: split -> its rows, in the order of the source.
        fields: returns the columns of rows.
        schema: Arrow schema of the rows; None = derived from the first rows.
        group: see `DatasetFacts.group`.
        notes: see `DatasetFacts.notes`.
    """

    images: list[Examined]
    places: list[Any]
    reader: ShardReader
    rows: dict[str, list[PlannedRow]]
    fields: RowFields
    schema: Any = None
    dropped: list[LeftOut] = field(default_factory=list)
    group: str = ""
    notes: dict[str, tuple[CheckLevel, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """Result of `prep`.

    Args:
        path: the dataset folder.
        outcome: "created", "replaced" or "up to date".
        info: its dataset.json.
        leftovers: notes on what earlier, interrupted runs had left.
    """

    path: Path
    outcome: str
    info: Mapping[str, Any]
    leftovers: Sequence[str] = field(default_factory=tuple)


def check_name(name: str) -> str:
    """Return the name of a dataset. Raises: DataError for a name that cannot be used."""
    if not NAME.fullmatch(name):
        raise DataError(f"the dataset name {name!r} cannot be used", hint="give --name with letters, digits, . _ and -")
    return name


def short_source(source: str) -> str:
    """Return a source without its folder: a dataset holds no path of the machine that made it."""
    return source if source.startswith("hub:") else Path(source).name


def drawn_counts(num_rows: int) -> dict[str, int]:
    """Return split -> number of rows to draw beside this many training rows."""
    held_out = {"validation": max(LEAST_VALIDATION, num_rows // 10), "test": max(LEAST_TEST, num_rows // 5)}
    return {"train": num_rows, **held_out}


def assemble(build: Build, parts: Assembly, info: Mapping[str, Any], limits: Limits) -> Prepared:
    """Handle prompts that are too long, write the dataset, examine it, and put its folder in place.

    Args:
        info: fields of dataset.json; counts, the doctor's report and the dropped rows are added here.
    Raises: DataError when rows are over the limit and `on_overlong` is "fail", or another dataset is at the target.
    """
    shrunk = fit_prompts(build, parts, limits)
    used = sorted({i for rows in parts.rows.values() for row in rows for i in row.facts.images})
    stored: dict[str, Stored] = {}
    for i in reversed(used):
        sha256 = parts.images[i].media.sha256
        stored[sha256] = Stored(sha256, parts.images[i].bytes, parts.places[i], shrunk.get(i))
    in_order = sorted(stored.values(), key=lambda one: one.place)
    write_shards(build.folder, in_order, parts.reader, workers=limits.workers, progress=limits.progress)
    media = [image.media for image in parts.images]
    for split, rows in parts.rows.items():
        build.write_rows(split, parts.fields(rows, media), parts.schema)
    if parts.dropped:
        first = parts.dropped[0]
        finding = f"{len(parts.dropped):,}, such as {first.origin}: {first.reason}"
        parts.notes["left out"] = ("look", finding)
    facts_of = {split: [row.facts for row in rows] for split, rows in parts.rows.items()}
    facts = DatasetFacts(parts.images, facts_of, parts.group, parts.notes)
    report = examine_dataset(facts, max_prompt_tokens=limits.max_prompt_tokens)
    if parts.dropped:
        lines = "".join(json.dumps(drop._asdict(), ensure_ascii=False) + "\n" for drop in parts.dropped)
        (build.folder / DROPPED_FILE).write_text(lines, encoding="utf-8")
    whole = {
        **info,
        "counts": {**info.get("counts", {}), "images_stored": len(stored), "dropped": len(parts.dropped)},
        "dropped": [drop._asdict() for drop in parts.dropped[:SHOWN_DROPS]],
        "doctor": report,
    }
    outcome = build.finish(whole, force=limits.force)
    return Prepared(build.target, outcome, read_info(build.target), build.leftovers)


def fit_prompts(build: Build, parts: Assembly, limits: Limits) -> dict[int, int]:
    """Handle rows whose prompt is over the limit: drop them, shrink their images, or raise an error.

    An image that occurs in several rows has one size, the same in all of them.

    Returns: position of an image -> its area in pixels after shrinking; only the images that were shrunk.
    """
    limit = limits.max_prompt_tokens
    if limit is None:
        return {}
    over = [row for rows in parts.rows.values() for row in rows if row_tokens(parts.images, row.facts) > limit]
    if not over:
        return {}
    names = ", ".join(row.facts.name for row in over[:3])
    if limits.on_overlong == "fail":
        longest = max(row_tokens(parts.images, row.facts) for row in over)
        raise DataError(
            f"{len(over):,} rows are over --max-prompt-tokens {limit:,} (the longest: {longest:,}), such as {names};"
            " nothing was written",
            hint="--on-overlong resize makes large images smaller, --on-overlong drop leaves the rows out",
        )
    if limits.on_overlong == "drop":
        reason = f"a prompt of more than {limit:,} tokens"
        parts.dropped += [LeftOut(row.facts.name, reason) for row in over]
        gone = {id(row) for row in over}
        left = {split: [row for row in rows if id(row) not in gone] for split, rows in parts.rows.items()}
        if bare := [split for split, rows in parts.rows.items() if rows and not left[split]]:
            raise DataError(
                f"every row of {' and '.join(bare)} is over --max-prompt-tokens {limit:,}; nothing was written",
                hint="raise it, or --on-overlong resize makes large images smaller",
            )
        parts.rows = left
        parts.notes["prompts over the limit"] = ("look", f"{len(over):,} rows over {limit:,} tokens were dropped")
        return {}
    return _shrink(build, parts, limits, limit, len(over))


def _shrink(build: Build, parts: Assembly, limits: Limits, limit: int, num_over: int) -> dict[int, int]:
    every = [row.facts for rows in parts.rows.values() for row in rows]
    room = min((limit - facts.text_tokens) // len(facts.images) for facts in every if facts.images)
    if room < MIN_IMAGE_TOKENS:
        raise DataError(
            f"--max-prompt-tokens {limit:,} leaves {room} tokens for an image beside the text; nothing was written",
            hint=f"at least {MIN_IMAGE_TOKENS} are needed: raise it, or use --on-overlong drop",
        )
    max_pixels = room * PATCH_PIXELS**2
    large = [i for i, image in enumerate(parts.images) if estimate_image_tokens(image.media) > room]
    places = [parts.places[i] for i in large]
    small = shrink_images(
        parts.reader, places, max_pixels, build.work, workers=limits.workers, progress=limits.progress
    )
    for i, seen in zip(large, small, strict=True):
        parts.images[i] = seen
    note = f"{num_over:,} rows were over {limit:,} tokens: {len(large):,} images shrunk to {room:,} tokens"
    parts.notes["prompts over the limit"] = ("look", note)
    return dict.fromkeys(large, max_pixels)


def row_tokens(images: Sequence[Examined], facts: RowFacts) -> int:
    """Return the estimated number of tokens of a row's prompt, images included (data/measurements.py)."""
    return facts.text_tokens + sum(estimate_image_tokens(images[i].media) for i in facts.images)


class PromptLengths:
    """Counter of the text tokens of a task's prompts. Rows with the same columns are rendered once."""

    def __init__(self, task: Task) -> None:
        self._tokens = lru_cache(maxsize=10_000)(self._render)
        self._task = task

    def of(self, columns: Mapping[str, Any], media: Sequence[Media], where: str = "") -> int:
        """Return the text tokens of a row with these columns and as many images as `media`.

        Raises: DataError at `where` when the template fails on these columns, or has not one `<image>` mark per image.
        """
        try:
            try:
                return self._tokens(tuple(columns.items()), len(media))
            except TypeError:  # a list or a mapping among them cannot be a cache key
                return self._render(tuple(columns.items()), len(media))
        except DataError as error:
            raise DataError(error.message, where=where or error.where, hint=error.hint) from error

    def _render(self, columns: tuple[tuple[str, Any], ...], num_images: int) -> int:
        row = Row("", "", self._task.name, {}, (Media("", 1, 1),) * num_images, dict(columns))
        text = render_user(self._task.template, row, self._task.variables, where=self._task.template_file)
        place_images((Message("user", text),), row)
        return estimate_text_tokens(len(text.replace(IMAGE, "")))


def is_few(bad: int, total: int, max_bad: float) -> bool:
    """Return whether `bad` of `total` rows are within the share --max-bad.

    29 of 100 are within 0.29: a tolerance allows for the rounding of floats.
    """
    return bad <= max_bad * total + 1e-9


def leave_out(bad: int, total: int) -> str:
    """Return a hint with the smallest --max-bad, in hundredths, with which `bad` of `total` rows may be left out."""
    return f"--max-bad {math.ceil(100 * bad / total) / 100:g} leaves them out and lists them in dropped.jsonl"


def first_bad(bad: Sequence[LeftOut]) -> str:
    """Return the first rows of a list as lines of a message, and how many more there are."""
    lines = "".join(f"\n  {origin}: {visible(reason)}" for origin, reason in bad[:SHOWN_BAD])
    return lines + (f"\n  ... and {len(bad) - SHOWN_BAD:,} more" if len(bad) > SHOWN_BAD else "")


def row_schema(truth: Sequence[tuple[str, Any]], *columns: tuple[str, Any]) -> Any:
    """Return the Arrow schema of rows. `truth`, `columns`: (name, Arrow type) of its fields, and of further columns."""
    import pyarrow as pa

    image = [("sha256", pa.string()), ("width", pa.int64()), ("height", pa.int64()), ("kind", pa.string())]
    first = [("prompt_id", pa.string()), ("truth", pa.struct(truth)), ("images", pa.list_(pa.struct(image)))]
    return pa.schema([*first, *columns])


def parse_limits(
    max_prompt_tokens: int | None, on_overlong: str, workers: int | None, progress: Progress | None, force: bool
) -> Limits:
    """Return the limits of a command line. Raises: DataError for an unknown --on-overlong."""
    if on_overlong not in get_args(OnOverlong):
        raise DataError(f"--on-overlong {on_overlong!r} is unknown", hint=f"one of: {', '.join(get_args(OnOverlong))}")
    if on_overlong != "fail" and max_prompt_tokens is None:
        message = f"--on-overlong {on_overlong} without --max-prompt-tokens"
        raise DataError(message, hint="give the limit, too, such as 2048")
    return Limits(max_prompt_tokens, cast(OnOverlong, on_overlong), workers, progress, force)


BATCH_ROWS = 256
RESERVED = ("prompt_id", "prompt", "images", "truth")


def row_messages(task: Task, row: Row) -> tuple[Message, ...]:
    """Return the task's own prompt for a row, without a recipe's template."""
    if task.messages is not None:
        turns = task.messages(row)
    else:
        text = render_user(task.template, row, task.variables, where=task.template_file)
        turns = (Message("user", text),)
    return place_images(turns, row)[0]


def prompt_tokens(task: Task) -> Callable[[Row], int]:
    """Return a function: row -> estimated text tokens of its prompt. Rows with equal columns are rendered once."""
    lengths = PromptLengths(task)

    def of(row: Row) -> int:
        if task.messages is not None:
            return estimate_text_tokens(sum(len(turn.content.replace(IMAGE, "")) for turn in row_messages(task, row)))
        shown = {name: value for name, value in row.columns.items() if isinstance(value, str) and name in task.template}
        return lengths.of(shown, row.media)

    return of


def prompt_texts(task: Task) -> Callable[[Row], list[str]]:
    """Return a function: row -> the texts in it that a model reads as a prompt or learns in `vlmrl sft`."""

    def of(row: Row) -> list[str]:
        if task.messages is not None:
            texts = [turn.content for turn in row_messages(task, row)]
        else:
            texts = [value for name, value in row.columns.items() if isinstance(value, str) and name in task.template]
        response = row.columns.get("response")
        return [text.replace(IMAGE, " ") for text in (*texts, *([response] if isinstance(response, str) else []))]

    return of


def export_dataset(
    dataset: Dataset, task: Task, out: Path, *, splits: list[str] | None = None, bad: list[LeftOut] | None = None
) -> dict[str, int]:
    """Write `<split>.parquet` for `datasets.load_dataset(out)`: prompt_id, prompt, images, truth (JSON text), columns.

    Args:
        out: folder to write to; an existing file of the same name is an error.
        splits: the splits to write; default: all.
        bad: gets the rows that cannot be read, shown or learned from, which are left out; None = they are errors.
    Returns: split -> number of rows.
    Raises: DataError when a file exists already or a row cannot be read.
    """
    chosen = list(dataset.splits) if splits is None else splits
    taken = [split for split in chosen if (out / f"{split}.parquet").exists()]
    if taken:
        raise DataError(f"{out / taken[0]}.parquet exists; nothing was written", hint="give another folder")
    out.mkdir(parents=True, exist_ok=True)
    return {split: _export_split(dataset, task, split, out / f"{split}.parquet", bad) for split in chosen}


def _export_split(dataset: Dataset, task: Task, split: str, path: Path, bad: list[LeftOut] | None) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = path.with_name(f".{path.name}.{os.getpid()}")
    first = islice(_usable(dataset, task, split, None if bad is None else []), BATCH_ROWS)
    names = sorted({name for row in first for name in row.columns} - set(RESERVED))
    schema, count = _schema(names), 0
    try:
        with part.open("wb") as sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for batch in _batches(dataset, task, _usable(dataset, task, split, bad), names):
                count += len(batch)
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            writer.close()
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return count


def _usable(dataset: Dataset, task: Task, split: str, bad: list[LeftOut] | None) -> Iterator[Row]:
    for index in range(len(rows := dataset.rows(split))):
        try:
            row = rows[index]
            if bad is not None:
                _ = row_messages(task, row), [dataset.image(media) for media in row.media]
                _ = task.trace and task.correct_response(row, random.Random(0))
        except VlmrlError as error:
            if bad is None:
                raise
            bad.append(LeftOut(error.where or f"{split} row {index}", error.message))
        else:
            yield row


def _batches(dataset: Dataset, task: Task, rows: Iterator[Row], names: list[str]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        turns = [{"role": turn.role, "content": turn.content} for turn in row_messages(task, row)]
        images = [{"bytes": dataset.image_bytes(media), "path": None} for media in row.media]
        columns = {name: _text(row.columns.get(name)) for name in names}
        truth = json.dumps(dict(row.truth), ensure_ascii=False)
        batch.append({"prompt_id": row.prompt_id, "prompt": turns, "images": images, "truth": truth, **columns})
        if len(batch) == BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _text(value: Any) -> str | None:
    """Return a column's value as text. A value that is no text becomes JSON: the rows may hold values of many types."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _schema(names: list[str]) -> Any:
    import pyarrow as pa

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    text = {"dtype": "string", "_type": "Value"}
    features = {
        "prompt_id": text,
        "prompt": [{"role": text, "content": text}],
        "images": {"feature": {"_type": "Image"}, "_type": "List"},
        "truth": text,
        **dict.fromkeys(names, text),
    }
    nested = [("prompt", pa.list_(turn)), ("images", pa.list_(image))]
    fields = [("prompt_id", pa.string()), *nested, ("truth", pa.string())]
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema(fields + [(name, pa.string()) for name in names], metadata=metadata)
