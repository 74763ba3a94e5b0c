"""Command `vlmrl prep` of a task whose rows come from tables of others, or are drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.own_prep import NewRow, prepare_own
from vlmrl.tasks.table_rows import TEST, TRAIN, VALIDATION, RowForm, TableSource, read_tables

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LEAST_VALIDATION, LEAST_TEST = 20, 40


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
    name = request.name or task.name
    if not NAME.fullmatch(name):
        raise DataError(f"the dataset name {name!r} cannot be used", hint="give --name with letters, digits, . _ and -")
    if request.synthetic is not None:
        if other := request.source or request.test:
            raise DataError(f"--synthetic draws the rows, but {other} is a source of rows", hint="leave one out")
        num_rows = request.synthetic
        counts = {
            TRAIN: num_rows,
            VALIDATION: max(LEAST_VALIDATION, num_rows // 10),
            TEST: max(LEAST_TEST, num_rows // 5),
        }
        args = {"synthetic": num_rows, "seed": request.seed, **drawn_settings}
        splits = partial(draw, counts)
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
            "source": _short(source),
            "test": _short(request.test) if request.test else None,
            "seed": request.seed,
            "validation_rows": request.validation_rows,
            "max_bad": request.max_bad,
            **settings,
        }
        splits = partial(read_tables, tables, form)
    args |= {
        "max_prompt_tokens": limits.max_prompt_tokens,
        "on_overlong": limits.on_overlong if limits.max_prompt_tokens else None,
    }
    out = request.out or Path("data") / name
    return prepare_own(replace(task, prep=lambda **_: splits()), args, out, limits, name=name, force=force)


def _short(source: str) -> str:
    """Return a source without its folder: a dataset holds no path of the machine that made it."""
    return source if source.startswith("hub:") else Path(source).name
