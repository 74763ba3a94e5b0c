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
from vlmrl.store.layout import MANIFEST


def is_table(path: Path) -> bool:
    """Return whether a path is a table: a text file, Parquet that is no rollout file, or a folder of N.jsonl."""
    if path.is_dir():
        return not (path / MANIFEST).exists() and bool(numbered_files(path))
    kind = path.suffix.lower()
    if kind == ".parquet":
        return path.is_file() and not _is_rollouts(path)
    return kind in SUFFIXES


def numbered_files(folder: Path) -> list[Path]:
    """Return the files N.jsonl of a folder, one per step, in the order of their numbers."""
    files = [p for p in folder.glob("*.jsonl") if p.stem.isascii() and p.stem.isdigit()]
    return sorted(files, key=lambda p: int(p.stem))


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
        columns: role -> column, for column names that are not recognised; see data/table_values.py.
        task, variant: task whose prompts the responses answer. It determines how truths are read, the reward, and how
            accuracy is measured.
        lenient: see `TruthRule`.
    Raises: DataError for a file without rows or responses, or if the table lacks the truth that the task needs;
        RecipeError for a task or variant that does not exist.
    """
    files = numbered_files(path) if path.is_dir() else [path]
    for file in files:
        require_file(file, hint="name a table of responses, or a run")
    kind = files[0].suffix.lower()
    names, first = first_row(str(files[0]), kind)
    roles = map_roles(names, columns or {}, str(path))
    rule, ref = _task_rule(path, task, variant, lenient, names, first, roles)
    if "ground_truth" not in roles and not rule.fields_in(first) and ref is not None:
        raise DataError(
            f"no column of ground truths; the table has: {', '.join(names)}",
            where=str(path),
            hint="name the column: --columns ground_truth=...; or give the fields of the truth as columns",
        )
    texts, rewards, notes = tuple(map(str, files)), stored_rewards(names, first, roles), []
    decoder = TableDecoder(texts, kind, path.stem, roles, rule, rule.fields_in(first), rewards)
    reader = TableReader(texts, decoder, tuple(names))
    if decoder.infers_groups:
        notes.append(
            f"rows of one step with equal `{roles['prompt']}` and truth are a group (else --columns group=...)"
        )
    if rewards:
        notes.append(f"the stored score is the sum of {', '.join(rewards)}; the table does not name their weights")
    truth, _, _ = rule.read(first.get(roles.get("ground_truth", "")), first)
    head = Head(ref.name if ref is not None else "", truth, {})
    return SavedResponses(
        path,
        reader,
        {path.stem: head},
        task=ref,
        grouped="group" in roles or decoder.infers_groups,
        has_scores="score" in roles or bool(rewards),
        first_step=0,
        notes=notes,
    )


def stored_rewards(names: list[str], first: Mapping[str, Any], roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of rewards in a table as TRL writes it: the numbers between `completion` and `advantage`."""
    if "score" in roles or not {"completion", "advantage"} <= set(names):
        return ()
    between = names[names.index("completion") + 1 : names.index("advantage")]
    return tuple(n for n in between if n not in roles.values() and isinstance(first.get(n), float))


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
