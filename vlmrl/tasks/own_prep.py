"""Writing of a dataset folder from the rows of a user's own task, with checks of the truths and the doctor's report."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from vlmrl.data.dataset import content_hash
from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.doctor import RowFacts
from vlmrl.data.image_scan import Examined, examine
from vlmrl.data.images import encode_png
from vlmrl.errors import DataError, RecipeError
from vlmrl.redaction.redact import quoted
from vlmrl.tasks.base import NewRow, Task
from vlmrl.tasks.dataset_assembly import Assembly, Limits, PlannedRow, Prepared, PromptLengths, assemble
from vlmrl.tasks.prep_options import Option, PrepCommand, hints_of, parameters_of
from vlmrl.tasks.user_task import guarded, load_own
from vlmrl.types import LeftOut, Media, Row

SHOWN_BAD = 3
SPLIT = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
"""Pattern of a split's name, which is also the name of a file."""
COLUMNS = ("prompt_id", "truth", "images")
"""Columns of every dataset. The rows of a task cannot have further columns with these names."""
MOST_ID_CHARS = 200
TAKEN = {"out", "name", "limits", "force", "as_json", "json", "help", "max_prompt_tokens", "on_overlong", "workers"}
"""Names of the options of every `vlmrl prep`. No parameter of a task's `prep` can have one of them."""


@dataclass(frozen=True)
class SoundImage:
    """Image file that has been decoded already, with its facts: it is not decoded a second time."""

    data: bytes
    facts: Examined


def _read_in(folder: Path, names: Sequence[str]) -> Iterator[bytes]:
    return ((folder / name).read_bytes() for name in names)


@dataclass
class _Shelf:
    """Collection of the distinct images, which are kept in a folder until they are stored in the dataset."""

    folder: Path
    seen: list[Examined] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def put(self, image: Any, where: str) -> int:
        """Add an image unless it is there already, and return its number. Raises: DataError if it is no image."""
        try:
            data = _file_of(image)
            name = hashlib.sha256(data).hexdigest()
            if name not in self.numbers:
                examined = image.facts if isinstance(image, SoundImage) else examine(data)
                (self.folder / name).write_bytes(data)
                self.numbers[name] = len(self.seen)
                self.seen.append(examined)
                self.places.append(name)
        except (OSError, ValueError) as error:
            raise DataError(f"an image cannot be read: {error}", where=where) from error
        except DataError as error:
            raise DataError(f"an image cannot be used: {error.message}", where=where, hint=error.hint) from error
        return self.numbers[name]


def prepare_own(
    task: Task,
    options: Mapping[str, Any],
    out: Path,
    limits: Limits,
    *,
    name: str | None = None,
    source: Callable[[], Mapping[str, Any]] = dict,
    files: Mapping[str, str] | None = None,
) -> Prepared:
    """Make the dataset folder of a task's own `prep`.

    Args:
        options: keyword arguments of `Task.prep`; they are stored in dataset.json.
        source: returns facts about the sources for dataset.json, when all rows have been read.
        files: name -> text of further files of the dataset.
    Raises: DataError for a task without `prep`, rows whose truth the task does not accept, images that cannot be read,
        or a folder that holds something else than a dataset of these options.
    """
    if task.prep is None:
        raise no_prep(task.name)
    args = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    require_kept(args, f"the options of `prep` of `{task.name}`")
    refuse_other(out, args, force=limits.force)
    splits = _watched(task, lambda: task.prep and task.prep(**options))
    if not isinstance(splits, Mapping) or not splits:
        raise DataError(f"`prep` of `{task.name}` returned {type(splits).__name__}, not a mapping of split -> rows")
    for split in splits:
        if not isinstance(split, str) or not SPLIT.fullmatch(split):
            raise DataError(f"`prep` calls a split {quoted(split)}", hint="letters, digits, `-` and `_`, such as train")
    with building(out) as build:
        shelf = _Shelf(build.work / "own")
        shelf.folder.mkdir()
        for file, text in (files or {}).items():
            build.write_text(file, text)
        dropped: list[LeftOut] = []
        rows = {split: _planned(task, split, rows, shelf, dropped) for split, rows in splits.items()}
        parts = Assembly(shelf.seen, shelf.places, partial(_read_in, shelf.folder), rows, _fields, dropped=dropped)
        parts.group = next((p.key[1].group for planned in rows.values() for p in planned if p.key[1].group), "")
        truths = [one.key[0].truth for planned in rows.values() for one in planned]
        parts.notes = dict(task.notes(truths))  # type: ignore[arg-type]
        facts = {"name": task.name, **source()}
        whole = {"name": name or out.name, "task": task.name, "source": facts, "args": args}
        for split, planned in rows.items():
            if not planned:
                hint = "leave the split out, or give it rows"
                raise DataError(f"`prep` returned no row for the split `{split}`", hint=hint)
        for split, planned in rows.items():
            _require_alike(split, [row.key[0] for row in planned])
        return assemble(build, parts, whole, limits)


def own_command(name: str) -> PrepCommand:
    """Return the command `vlmrl prep file.py:function`: the options are the parameters of the task's `prep`.

    Raises: RecipeError for a file, function or parameter that cannot be used; DataError for a task without `prep`.
    """
    task = load_own(name, {})
    path = Path(task.own.path if task.own is not None else task.name)
    return rows_command(task, named=name, default=path.parent.resolve().name if path.stem == "task" else path.stem)


def rows_command(task: Task, *, named: str | None = None, default: str | None = None) -> PrepCommand:
    """Return the command `vlmrl prep NAME` of a task that has a `prep`: the options are its parameters.

    Args:
        named: word for the task after `vlmrl prep`; None = the task's name.
        default: name of the dataset if no option sets it; None = the task's name.
    Raises: RecipeError for a parameter that cannot be used; DataError for a task without `prep`.
    """
    named, default = named or task.name, default or task.name
    if task.prep is None:
        raise no_prep(named)
    parameters_of(task.prep, named)
    if taken := sorted(TAKEN & inspect.signature(task.prep).parameters.keys()):
        raise RecipeError(
            f"`prep` of `{named}` has the parameter `{taken[0]}`, which every `vlmrl prep` has", where=named
        )

    def run(
        out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
        name: Annotated[str | None, Option("Name of the dataset; default: the task's.")] = None,
        *,
        limits: Limits,
        **options: Any,
    ) -> Prepared:
        dataset_name = name or (out.name if out is not None else default)
        return prepare_own(task, options, out or Path("data") / dataset_name, limits, name=dataset_name)

    about = inspect.getdoc(task.prep) or task.summary or "Make the dataset of this task."
    return PrepCommand(_with_parameters(run, task.prep), f"{about}\n\nExample: vlmrl prep {named} --out data/mine")


def _with_parameters(run: Callable[..., Prepared], prep: Callable[..., Any]) -> Callable[..., Prepared]:
    """Return `run` with a signature in which the parameters of `prep` replace `**options`."""
    own = [p for p in inspect.signature(run).parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(prep).parameters.values()]
    hints = get_type_hints(run, include_extras=True) | hints_of(prep)
    run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = hints
    return run


def no_prep(name: str) -> DataError:
    return DataError(f"the task `{name}` has no `prep`", hint="give its Task a `prep`, or bring a table of rows")


def _require_alike(split: str, rows: Sequence[Row]) -> None:
    """Raise a DataError unless the truths and columns of all rows of a split fit into one table."""
    import pyarrow as pa

    try:
        pa.Table.from_pylist([{"truth": dict(row.truth), "columns": dict(row.columns)} for row in rows])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(
            f"the rows of the split `{split}` do not fit together: {error}",
            hint="each truth field and each column needs one type in all rows",
        ) from error


def _planned(
    task: Task, split: str, rows: Iterable[NewRow | LeftOut], shelf: _Shelf, dropped: list[LeftOut]
) -> list[PlannedRow]:
    """Check the rows of a split and return them, without repeated rows. A `LeftOut` is added to `dropped` instead."""
    from vlmrl.tasks import kind_of

    lengths, planned, bad = PromptLengths(task), list[PlannedRow](), list[str]()
    taken: set[str] = set()
    for index, row in enumerate(_each(task, rows)):
        if isinstance(row, LeftOut):
            dropped.append(row)
            continue
        where = str(row.origin) if isinstance(row, NewRow) and row.origin else f"{split} row {index}"
        if not isinstance(row, NewRow):
            raise DataError(f"`prep` yielded {type(row).__name__}, not a vlmrl.NewRow", where=where)
        _check_row(row, where)
        bad += [f"{where}: {problem}" for problem in task.validate(row.truth)]
        numbers = tuple(shelf.put(image, where) for image in row.images)
        media = tuple(shelf.seen[number].media for number in numbers)
        prompt_id = row.id or content_hash(media, row.columns, row.truth).hex()[:16]
        if prompt_id in taken:
            raise DataError(f"`{prompt_id}` is the id of two rows of the split `{split}`", where=where)
        taken.add(prompt_id)
        checked = Row(prompt_id, "", task.name, row.truth, media, dict(row.columns), where)
        labels = (task.kind or kind_of(row.truth)).labels(checked)
        tokens = lengths.of(dict(row.columns), media, where) if task.template else 0
        facts = RowFacts(numbers, labels.label, labels.distance, tokens, labels.names, where)
        planned.append(PlannedRow((checked, labels), facts))
    if bad:
        shown = "".join(f"\n    {line}" for line in bad[:SHOWN_BAD])
        raise DataError(f"{len(bad):,} mistakes in the truths that `prep` made:{shown}", hint="nothing was written")
    return planned


def _check_row(row: NewRow, where: str) -> None:
    """Raise a DataError for a field of a row that has a wrong type."""
    for key in ("truth", "columns"):
        value = getattr(row, key)
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise DataError(
                f"`{key}` of a row of `prep` is {quoted(value)}, not a mapping of names to values", where=where
            )
    if not row.truth:
        raise DataError("a row of `prep` has an empty `truth`", where=where, hint="what its answer is checked against")
    if taken := [name for name in COLUMNS if name in row.columns]:
        hint = "give it another name; `NewRow` has fields for the id, the truth and the images"
        raise DataError(f"a row of `prep` has the column `{taken[0]}`, which every dataset has", where=where, hint=hint)
    if not isinstance(row.images, (list, tuple)):
        hint = "one image is a list too: images=[image]"
        raise DataError(f"`images` of a row of `prep` is {quoted(row.images)}, not a list", where=where, hint=hint)
    is_named = row.id is None or (isinstance(row.id, str) and row.id.isprintable() and len(row.id) <= MOST_ID_CHARS)
    if not is_named:
        hint = f"a text on one line, of at most {MOST_ID_CHARS} characters"
        raise DataError(f"the `id` of a row of `prep` is {quoted(row.id)}", where=where, hint=hint)
    require_kept([dict(row.truth), dict(row.columns)], "a row of `prep`", where)


def require_kept(value: Any, what: str, where: str | None = None) -> None:
    """Raise a DataError unless a value can be written as JSON in UTF-8."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what} cannot be stored as JSON: {error}", where=where) from error


def _each(task: Task, rows: Iterable[NewRow | LeftOut]) -> Iterator[NewRow | LeftOut]:
    """Yield the rows one by one; an error of the user's code is reported with its line."""
    end = object()
    iterator: Iterator[Any] = _watched(task, lambda: iter(rows))
    while (row := _watched(task, lambda: next(iterator, end))) is not end:
        yield row


def _watched(task: Task, run: Callable[[], Any]) -> Any:
    """Run code of a task's `prep`; an error of a user's own code is reported with its line."""
    if task.own is None:
        return run()
    return guarded(f"`prep` of `{task.name}`", task.own.path, run)


def _fields(rows: Sequence[PlannedRow], media: Sequence[Media]) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row, with references to its stored images."""
    for planned in rows:
        row = planned.key[0]
        images = [media[number] for number in planned.facts.images]
        yield {**row.columns, "prompt_id": row.prompt_id, "truth": dict(row.truth), "images": images}


def _file_of(image: Any) -> bytes:
    if isinstance(image, SoundImage):
        return image.data
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, Path)):
        return Path(image).read_bytes()
    if hasattr(image, "save"):
        return encode_png(image)
    raise DataError(f"{type(image).__name__} is not an image", hint="give a PIL image, a path, or the bytes of a file")
