"""Command `vlmrl prep` of a task whose rows come from tables of others, or are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name, drawn_counts, short_source
from vlmrl.tasks.own_prep import NewRow, prepare_own
from vlmrl.tasks.table_rows import RowForm, TableSource, read_tables


@dataclass(frozen=True)
class TableRequest:
    """Options that every such command has.

    Args:
        source: table as `locate_rows` takes it; None = the published one, `published`.
        synthetic: number of training rows to draw instead; None = read tables.
        out, name: default data/<name>, and the task's name.
    """

    published: str
    source: str | None
    test: str | None
    synthetic: int | None
    out: Path | None
    name: str | None
    seed: int
    validation_rows: int
    max_bad: float
    images_root: Path | None


def prepare_table(
    task: Task,
    request: TableRequest,
    limits: Limits,
    *,
    form: RowForm,
    settings: Mapping[str, Any],
    draw: Callable[[Mapping[str, int]], Mapping[str, list[NewRow]]],
    drawn_settings: Mapping[str, Any],
    split_names: Mapping[str, str] | None = None,
    force: bool = False,
) -> Prepared:
    """Make the dataset of a task from tables, or draw it.

    Args:
        form, settings: form of the rows in tables, and the task's own options for them.
        draw, drawn_settings: split -> number of rows -> drawn rows, and the task's own options for them.
        split_names: name of a split in published tables -> its name in the dataset.
    Raises: DataError for a source, name or row that cannot be used; nothing is written.
    """
    name = check_name(request.name or task.name)
    if request.synthetic is not None:
        if other := request.source or request.test:
            raise DataError(f"--synthetic draws the rows, but {other} is a source of rows", hint="leave one out")
        args = {"synthetic": request.synthetic, "seed": request.seed, **drawn_settings}
        splits = partial(draw, drawn_counts(request.synthetic))
    else:
        source = request.source or request.published
        tables = TableSource(
            source,
            request.test,
            request.images_root,
            request.validation_rows,
            request.seed,
            request.max_bad,
            dict(split_names or {}),
        )
        args = {
            "source": short_source(source),
            "test": short_source(request.test) if request.test else None,
            "seed": request.seed,
            "validation_rows": request.validation_rows,
            "max_bad": request.max_bad,
            **settings,
        }
        splits = partial(read_tables, tables, form)
    args |= limits.args
    out = request.out or Path("data") / name
    return prepare_own(replace(task, prep=lambda **_: splits()), args, out, limits, name=name, force=force)
