"""Role of the rows of an evaluation, from its summary: test rows, rows that training validated on, or others.

`vlmrl eval` chooses and labels the rows (evaluate/eval_rows.py); compare, report and the model card show the label.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vlmrl.errors import StoreError
from vlmrl.store.layout import EVAL_SUMMARY, eval_name, step_name
from vlmrl.store.manifest import check_record
from vlmrl.store.table_reader import arrow_fields, check_values, group_rows, open_parquet
from vlmrl.untrusted import parse_json, read_regular

SCHEMA = 1
"""Schema number of the files of an evaluation."""
UNREADABLE = "the rows of this evaluation cannot be read"
FIELDS = (
    "prompt_id:string sample:int32 seed:int64 source:string task:string truth:string columns:string prompt_text:string "
    "text:string finish:string num_tokens:int32 score:double parts:string note:string error:string status:string "
    "images:images detail:string artifacts:artifacts turns:string ending:string measured:string"
)
COLUMNS = tuple(word.partition(":")[0] for word in FIELDS.split())
"""Columns of the rows of an evaluation; `FIELDS` has their types (`arrow_fields`).

Evaluations of older versions lack `columns`, `prompt_text`, `turns`, `ending`, `measured` and the sizes that the model
saw.
"""
SHOWN_IMAGES = "shown_images"
"""Column with the images that the model saw, only of evaluations with changed images (`vlmrl eval --images`)."""
OUTCOME = "outcome/"
"""Prefix of the columns with the task's outcome, in the Parquet file."""
Role = Literal["test", "validation", "training", "held out"]
"""Role of evaluated rows.

test: rows of the split `test`. validation: training chose its best checkpoint by these rows. training: the model was
trained on some of these rows. held out: none of these, according to the records of the run.
"""
ROLES: tuple[Role, ...] = ("test", "held out", "validation", "training")
"""All roles, the best measure of the performance on new rows first."""

TRAINING_STEP = re.compile(r"-step-(\d{6,})(?=-|$)")
"""Pattern of the step in the name of an evaluation's folder."""
LABELS: Mapping[Role, str] = {
    "test": "",
    "validation": "rows that training validated on: they were used to choose its checkpoint",
    "training": "training rows: the result on new rows may differ",
    "held out": "",
}
"""Role -> label that is printed beside the numbers; "" if no label is needed."""
UNCERTAIN = "rows that training may have had: its own rows were changed, are gone, or take long to read"
"""Label of held-out rows of another dataset, where it is not known whether training had them."""
FEW_TEXTS, ONE_TEXT = 8, 0.9
"""Fewer answers may be alike by accident; share of answers that are one text from which `one_text` says so."""
ON_TEST = "validated on the test split"
"""Label of a run whose checkpoints were selected on test rows, as the recipe allowed."""


def read_summary(folder: Path) -> dict[str, Any]:
    """Return summary.json of an evaluation. Raises: StoreError when it is missing, damaged or of a newer schema."""
    path = folder / EVAL_SUMMARY
    try:
        summary = parse_json(read_regular(path))
    except FileNotFoundError:
        raise StoreError("there is no finished evaluation", where=str(folder)) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"the evaluation's summary is damaged: {error}", where=str(path)) from error
    if not isinstance(summary, dict) or not isinstance(summary.get("metrics"), dict):
        raise StoreError("this file is not the summary of an evaluation", where=str(path))
    if summary.get("schema") != SCHEMA:
        message = f"this evaluation has schema {summary.get('schema')!r}; this vlmrl reads {SCHEMA}"
        raise StoreError(message, where=str(path), hint="upgrade vlmrl")
    check_record(_model(), summary, "the evaluation's summary", path)
    return summary


def made_in_training(folder: Path) -> bool:
    """Return whether an evaluation is a validation during training; False for one that cannot be read."""
    try:
        return bool((read_summary(folder).get("meta") or {}).get("during"))
    except StoreError:
        return False


class OneText(NamedTuple):
    """Text that nearly all answers of an evaluation are, though the truths differ."""

    text: str
    count: int
    rows: int
    truths: int

    def words(self, of: str = "") -> str:
        """Return `all 16 answers are one text, to 5 different truths`."""
        count = "all" if self.count == self.rows else f"{self.count:,} of"
        return f"{count} {self.rows:,} answers{of} are one text, to {self.truths:,} different truths"


def one_text(texts: Sequence[str], truths: Iterable[str]) -> OneText | None:
    """Return the text that nearly all answers are; None if they differ, are few, or have one truth."""
    (text, count), *_ = Counter(texts).most_common(1) or [("", 0)]
    same = OneText(text, count, len(texts), len(set(truths)))
    return same if len(texts) >= FEW_TEXTS and same.truths > 1 and count >= ONE_TEXT * len(texts) else None


@cache
def _model() -> Any:
    """Return the model of a summary: the types of the keys that readers use."""
    from pydantic import TypeAdapter, create_model  # at the first use: importing it is slow

    number: Any = (float | None, ...)
    span: Any = (list[float | None] | None, None)
    metric: Any = create_model("Metric", value=number, low=number, high=number, n=(int, ...), range=span)
    fields: Any = {
        "metrics": (dict[str, metric], ...),
        "baselines": (dict[str, dict[str, Any]], {}),
        "by": (list[str], []),
        "figures": (list[dict[str, Any]], []),
        **dict.fromkeys(("rows", "prompts", "samples", "images", "reward_errors"), (int, 0)),
        **dict.fromkeys(("meta", "set_metrics", "positions"), (dict[str, Any] | None, None)),
    }
    return TypeAdapter(create_model("Summary", **fields))


def rows_schema(outcomes: Iterable[str], *, shown: bool) -> Any:
    """Return the Arrow schema of the rows of an evaluation.

    Args:
        shown: whether there is the column SHOWN_IMAGES.
    """
    import pyarrow as pa

    words = f"{FIELDS} {SHOWN_IMAGES}:images" if shown else FIELDS
    return pa.schema([*arrow_fields(words), *((OUTCOME + name, pa.float64()) for name in outcomes)])


def read_rows(path: Path, columns: Sequence[str] | None = None, group: int | None = None) -> Any:
    """Return the rows of an evaluation, or some of their columns, as an Arrow table with checked values.

    Args:
        group: number of the only row group to read; None = all.
    Raises: StoreError when the file is missing or damaged, or lacks a column of `columns`.
    """
    with open_parquet(path, UNREADABLE) as file:
        table = file.read(columns) if group is None else file.read_row_group(group, columns)
        for name in columns or ():
            table.schema.field(name)  # `read` leaves out a column that is not there
        outcomes = [n.removeprefix(OUTCOME) for n in table.schema.names if n.startswith(OUTCOME)]
        check_values(table, rows_schema(outcomes, shown=True))
        return table


def row_groups(path: Path) -> list[int]:
    """Return the number of rows in each row group of an evaluation's file. Raises: StoreError as `read_rows`."""
    with open_parquet(path, UNREADABLE) as file:
        return group_rows(file)


def role_of(meta: Mapping[str, Any]) -> Role:
    """Return the role of the rows of an evaluation, from the `meta` of its summary.

    Evaluations of older versions record only the split. They used `train` if a table had no other split.
    """
    for role in ROLES:
        if meta.get("role") == role:
            return role
    by_split: dict[str, Role] = {"test": "test", "validation": "validation", "train": "training"}
    return "validation" if meta.get("during") else by_split.get(str(meta.get("split")), "held out")


def role_label(meta: Mapping[str, Any]) -> str:
    """Return the label that is printed beside the numbers of an evaluation; "" if no label is needed."""
    return str(meta.get("shared") or LABELS[role_of(meta)])


def image_condition(meta: Mapping[str, Any]) -> str | None:
    """Return what was changed for the model: its images, such as "blank", or "tools off"; None = nothing."""
    return str(meta["images"]) if meta.get("images") else f"tools {meta['tools']}" if meta.get("tools") else None


def changed_thing(condition: str) -> str:
    """Return what an `image_condition` is a change of: "images" or "tools"."""
    return "tools" if condition.startswith("tools ") else "images"


def condition_words(condition: str) -> str:
    """Return an `image_condition` in words: "with changed images (blank)" or "without tools (tools off)"."""
    words = "without tools" if condition == "tools off" else f"with changed {changed_thing(condition)}"
    return f"{words} ({condition})"


def shown_label(meta: Mapping[str, Any]) -> str:
    """Return the label of an evaluation with a change, which is printed beside its numbers; "" for others."""
    change = image_condition(meta)
    return "" if change is None else f"rows shown {condition_words(change)}"


def refused_words(summary: Mapping[str, Any]) -> str:
    """Return how many responses the endpoint of an evaluation refused, which count as empty ones; "" for none."""
    if not (refused := summary.get("refused")):
        return ""
    counts = f"the endpoint refused {refused['rows']:,} of {summary['rows']:,} responses, which count as empty ones"
    return f"{counts} (the first: {refused['first']})"


def method_of(summary: Mapping[str, Any]) -> str:
    """Return the name of the method of a summary's intervals. Older versions record none: they always bootstrapped."""
    return str(summary.get("intervals") or "bootstrap over images (of an older version)")


def set_method_of(summary: Mapping[str, Any]) -> str:
    """Return the name of the method for intervals of metrics of the whole split; "" if the summary has none."""
    sets = summary.get("set_metrics") or {}
    names = sets.get("names") or ()
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"of {', '.join(names[:3])}{more}: {sets.get('method')}" if names else ""


def without_step(name: str) -> str:
    """Return an evaluation's folder name without its step. The result is equal for all checkpoints of a run."""
    return TRAINING_STEP.sub("", name)


def names_a_step(name: str) -> bool:
    """Return whether a name ends with a step, as names of validations do. A later step of the run may need it."""
    return re.search(r"-step-\d+$", name) is not None


def training_name(split: str, source: str, step: int, setting: str = "") -> str:
    """Return the folder name of a validation during training. `vlmrl eval` never uses it for the same rows."""
    return eval_name(*filter(None, (split, source, setting)), step_name(step))


def sampling_words(meta: Mapping[str, Any]) -> str:
    """Return the sampling of an evaluation, from the `meta` of its summary. Example: pass8 (T=1, n=8); greedy."""
    sampling = meta.get("sampling") or {}
    words = "greedy"
    if not meta.get("greedy", True):
        words = f"T={sampling.get('temperature')}, n={sampling.get('samples')}"
        words += "".join(f", {name}={sampling[name]}" for name in ("top_p", "top_k") if sampling.get(name))
    return f"{meta['setting']} ({words})" if meta.get("setting") else words


def listed_in_words(folders: Mapping[str, Path]) -> str:
    """Return names and sampling of evaluations. Example: test-digits, greedy; test-digits-pass8, pass8 (T=1.0, n=8)."""
    texts = []
    for name, folder in folders.items():
        try:
            texts.append(f"{name}, {sampling_words(read_summary(folder).get('meta') or {})}")
        except StoreError:
            texts.append(f"{name}, damaged")
    return "; ".join(texts) or "none"


def same_rows_key(meta: Mapping[str, Any]) -> str | None:
    """Return a key that is equal for evaluations of the same rows, shown alike, with the same sampling.

    It is None if these are unknown.
    """
    if not meta.get("split") or not meta.get("source"):
        return None
    sampling = meta.get("sampling") or {}
    sampled = "" if meta.get("greedy", True) else f"T{sampling.get('temperature')}-n{sampling.get('samples')}"
    filtered = [f"{name}{sampling[name]}" for name in ("top_p", "top_k") if sampling.get(name)]
    words = (meta["split"], meta["source"], sampled, *filtered, meta.get("max_rows"), image_condition(meta))
    return "-".join(str(w) for w in words if w)
