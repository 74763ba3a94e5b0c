"""Opening of a table of responses: finds its columns, its task and the form of its ground truths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.data.table_files import SUFFIXES, require_file
from vlmrl.errors import DataError
from vlmrl.reward_check.response_columns import Head
from vlmrl.reward_check.response_table import TableDecoder, TableReader, first_row, map_roles
from vlmrl.reward_check.saved_responses import SavedResponses
from vlmrl.reward_check.scoring import TaskRef
from vlmrl.reward_check.table_truths import TruthRule


def is_table(path: Path) -> bool:
    """Return whether a path is a table of responses: a text file, or Parquet that is no rollout file."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        return path.is_file() and not _is_rollouts(path)
    return kind in SUFFIXES and not path.is_dir()


def open_table(
    path: Path,
    *,
    columns: Mapping[str, str] | None = None,
    task: str | None = None,
    variant: str | None = None,
    lenient: bool = False,
) -> SavedResponses:
    """Open a table of responses for scoring.

    Args:
        columns: role -> column, for column names that are not recognised; see data/columns.py.
        task, variant: task whose prompts the responses answer. It determines how truths are read, the reward, and how
            accuracy is measured.
        lenient: see `TruthRule`.
    Raises: DataError for a file without rows or responses, or if the table lacks the truth that the task needs;
        RecipeError for a task or variant that does not exist.
    """
    require_file(path, hint="name a table of responses, or a run")
    kind = path.suffix.lower()
    names, first = first_row(str(path), kind)
    roles = map_roles(names, columns or {}, str(path))
    rule, ref = _task_rule(path, task, variant, lenient, names, first, roles)
    if "ground_truth" not in roles and not rule.fields_in(first) and ref is not None:
        raise DataError(
            f"no column of ground truths; the table has: {', '.join(names)}",
            where=str(path),
            hint="name the column: --columns ground_truth=...; or give the fields of the truth as columns",
        )
    decoder = TableDecoder(str(path), kind, path.stem, roles, rule, rule.fields_in(first))
    reader = TableReader(str(path), decoder, tuple(names))
    truth, _, _ = rule.read(first.get(roles.get("ground_truth", "")), first)
    head = Head(ref.name if ref is not None else "", truth, {})
    return SavedResponses(
        path, reader, {path.stem: head}, task=ref, grouped="group" in roles, has_scores="score" in roles
    )


def _task_rule(
    path: Path,
    task: str | None,
    variant: str | None,
    lenient: bool,
    names: list[str],
    first: Mapping[str, Any],
    roles: Mapping[str, str],
) -> tuple[TruthRule, TaskRef | None]:
    """Return (rule for reading truths, task); the task is None if the user named none."""
    from vlmrl.tasks import find_task, make_task

    if task is None:
        if variant is not None:
            raise DataError(f"--variant {variant} without a task", hint="name the task: --task NAME --variant ...")
        return TruthRule(), None
    cell = first.get(roles.get("ground_truth", ""))
    form = find_task(task).truth_form(TruthRule().read(cell, first)[0], [n for n in names if n not in roles.values()])
    rule = TruthRule(task, form, variant, lenient)
    truth, problem, _ = rule.read(cell, first)
    # If the first truth lacks the form's fields, it may not represent the truths of the other rows.
    is_sure = not problem and (any(n in truth for n in form.fields[:1]) or not (variant is None or lenient))
    info = {"name": path.stem, **form.info(truth, is_sure)}
    instance = make_task(task, info, variant)
    return rule, TaskRef(task, info, instance.variant or None)


def _is_rollouts(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return b"vlmrl.schema" in (pq.read_schema(path).metadata or {})
    except (OSError, pa.ArrowException):
        return False
