"""Data doctor for an existing dataset: a prepared folder, or a user's own table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

from vlmrl.data.control_tokens import typed_in
from vlmrl.data.dataset import Dataset
from vlmrl.data.doctor import DatasetFacts, RowFacts, Verdict, examine_dataset
from vlmrl.data.image_scan import examined, look_at
from vlmrl.data.image_shards import Examined
from vlmrl.data.parallel_parts import Progress
from vlmrl.types import Media, Row

MAX_LABELS = 20
"""Maximum number of different answers for which the answer counts as a class label."""


class RowLabels(NamedTuple):
    """Labels of a dataset row, as the doctor counts them.

    Args:
        label: class of the row's answer; None if it has none.
        distance: distance between the classes of its two images, a measure of difficulty; 0 = the same class.
        group: kind of `names`, such as "individual"; "" = not known.
        names: individuals or things that the row's images show.
    """

    label: str | None
    distance: int | None = None
    group: str = ""
    names: tuple[str, ...] = ()


def answer_labels(row: Row) -> RowLabels:
    """Return the labels of a row whose truth holds a plain answer."""
    answer = row.truth.get("answer")
    return RowLabels(str(answer) if isinstance(answer, (str, int, float, bool)) else None)


def visit(
    dataset: Dataset,
    text_tokens: Callable[[Row], int],
    *,
    labels_of: Callable[[Row], RowLabels] = answer_labels,
    texts: Callable[[Row], Sequence[str]] = lambda row: (),
    max_prompt_tokens: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the doctor's report on a dataset; see `examine_dataset`. Images are read once, on all cores.

    Checks of `vlmrl prep` that cannot be made again, such as figures that another dataset trains on, are added.

    Args:
        text_tokens: returns the number of tokens of a row's prompt, without its images.
        labels_of: returns the labels that are counted for a row; the task provides it (`tasks.kind_of`).
        texts: returns the texts of a row that a model reads or learns, without `<image>` marks; they are searched for
            control tokens.
        max_prompt_tokens: limit that the prompts are compared with; None = no limit.
        workers: processes; None = one per core.
    """
    rows_with_tokens: list[tuple[str, Counter[str]]] = []
    image_numbers: dict[str, int] = {}  # content hash -> position in `media`
    media: list[Media] = []
    rows: dict[str, list[RowFacts]] = {}
    group = ""
    for split, count in dataset.splits.items():
        members = dataset.rows(split)
        rows[split] = []
        for index in range(count):
            row = members[index]
            for one in row.media:
                if image_numbers.setdefault(one.sha256, len(media)) == len(media):
                    media.append(one)
            row_labels = labels_of(row)
            images = tuple(image_numbers[one.sha256] for one in row.media)
            name = row.origin or f"{split} row {index}"
            rows[split].append(
                RowFacts(images, row_labels.label, row_labels.distance, text_tokens(row), row_labels.names, name)
            )
            group = group or row_labels.group
            if tokens := sum(map(typed_in, texts(row)), Counter()):
                rows_with_tokens.append((row.place, tokens))
    results, broken = _examine_images(dataset, media, workers, progress)
    labels = {row.label for members in rows.values() for row in members}
    if len(labels) > MAX_LABELS:
        rows = {split: [row._replace(label=None) for row in members] for split, members in rows.items()}
    notes: dict[str, tuple[Verdict, str]] = {"columns": ("look", "; ".join(dataset.notes))} if dataset.notes else {}
    if rows_with_tokens:
        notes["control tokens in text"] = ("look", _note_on_control_tokens(rows_with_tokens))
    if broken:
        notes["broken images"] = ("bad", f"{len(broken):,}, such as {broken[0]}")
    report = examine_dataset(DatasetFacts(results, rows, group, notes), max_prompt_tokens=max_prompt_tokens)
    present = {check["check"] for check in report["checks"]}
    return {**report, "checks": [*report["checks"], *(c for c in _kept_checks(dataset) if c["check"] not in present)]}


def _kept_checks(dataset: Dataset) -> list[dict[str, str]]:
    """Return the checks in dataset.json. Some need what is no longer there: the sources, or another dataset."""
    report = dataset.info.get("doctor")
    checks = report.get("checks") if isinstance(report, Mapping) else None
    return [
        {column: str(check.get(column)) for column in ("check", "verdict", "finding")}
        for check in (checks if isinstance(checks, list) else [])
        if isinstance(check, Mapping) and check.get("verdict") in get_args(Verdict)
    ]


def _note_on_control_tokens(rows_with_tokens: Sequence[tuple[str, Counter[str]]]) -> str:
    total: Counter[str] = Counter()
    for _, tokens in rows_with_tokens:
        total.update(tokens.keys())
    listing = ", ".join(f"{token} in {count:,}" for token, count in total.most_common(3))
    return (
        f"{len(rows_with_tokens):,} rows contain text that models use as control tokens ({listing}); "
        f"it is encoded as plain text; first: {rows_with_tokens[0][0]}"
    )


def _examine_images(
    dataset: Dataset, media: Sequence[Media], workers: int | None, progress: Progress | None
) -> tuple[list[Examined], list[str]]:
    with TemporaryDirectory() as folder:
        looks = look_at(media, dataset.image_bytes, Path(folder), workers=workers, progress=progress)
        results, broken = [], []
        for one, fields in zip(media, looks, strict=True):
            if "reason" in fields:
                broken.append(f"{dataset.place_of(one)}: {fields['reason']}")
                results.append(Examined(one, 0, "0" * 80))  # the hash of a flat image, which has no near duplicates
            else:
                result = examined(fields)
                results.append(Examined(one, result.bytes, result.look, result.remarks))
        return results, broken
