"""The data doctor on a dataset that is there already: a prepared folder, or a table of one's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vlmrl.data.control_tokens import typed_in
from vlmrl.data.dataset import Dataset
from vlmrl.data.doctor import DatasetFacts, RowFacts, Verdict, examine_dataset
from vlmrl.data.image_scan import examined, look_at
from vlmrl.data.image_shards import Examined
from vlmrl.data.parallel_parts import Progress
from vlmrl.types import Media, Row

MAX_LABELS = 20
"""A column of answers with more different values is no class label."""


class RowLabels(NamedTuple):
    """What the doctor counts of a row.

    Args:
        label: the class of its answer; None = it has none.    distance: how hard it is, 0 = the same class.
        group: what `names` are ("individual"); "" = not known.    names: whom or what its images show.
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
    """The doctor's report of a dataset; see `examine_dataset`. Images are read once, on all cores.

    Args:
        text_tokens: of a row's prompt, without images.
        labels_of: what is counted of a row; a task knows it (`tasks.kind_of`).
        texts: what a model reads or learns of a row, `<image>` marks taken out; searched for control tokens.
    """
    typed: list[tuple[str, Counter[str]]] = []
    number_of: dict[str, int] = {}
    media: list[Media] = []
    rows: dict[str, list[RowFacts]] = {}
    group = ""
    for split, count in dataset.splits.items():
        members = dataset.rows(split)
        rows[split] = []
        for index in range(count):
            row = members[index]
            for one in row.media:
                if number_of.setdefault(one.sha256, len(media)) == len(media):
                    media.append(one)
            found = labels_of(row)
            images = tuple(number_of[one.sha256] for one in row.media)
            name = row.origin or f"{split} row {index}"
            rows[split].append(RowFacts(images, found.label, found.distance, text_tokens(row), found.names, name))
            group = group or found.group
            if tokens := sum(map(typed_in, texts(row)), Counter()):
                typed.append((row.place, tokens))
    seen, broken = _look_at(dataset, media, workers, progress)
    labels = {row.label for members in rows.values() for row in members}
    if len(labels) > MAX_LABELS:
        rows = {split: [row._replace(label=None) for row in members] for split, members in rows.items()}
    notes: dict[str, tuple[Verdict, str]] = {}
    if typed:
        notes["control tokens in text"] = ("look", _of_control_tokens(typed))
    if broken:
        notes["broken images"] = ("bad", f"{len(broken):,}, such as {broken[0]}")
    return examine_dataset(DatasetFacts(seen, rows, group, notes), max_prompt_tokens=max_prompt_tokens)


def _of_control_tokens(typed: Sequence[tuple[str, Counter[str]]]) -> str:
    total: Counter[str] = Counter()
    for _, tokens in typed:
        total.update(tokens.keys())
    listing = ", ".join(f"{token} in {count:,}" for token, count in total.most_common(3))
    return (
        f"{len(typed):,} rows hold what models use as control tokens ({listing}); read as letters; first: {typed[0][0]}"
    )


def _look_at(
    dataset: Dataset, media: Sequence[Media], workers: int | None, progress: Progress | None
) -> tuple[list[Examined], list[str]]:
    with TemporaryDirectory() as folder:
        looks = look_at(media, dataset.image_bytes, Path(folder), workers=workers, progress=progress)
        seen, broken = [], []
        for one, fields in zip(media, looks, strict=True):
            if "reason" in fields:
                broken.append(f"{dataset.place_of(one)}: {fields['reason']}")
                seen.append(Examined(one, 0, "0" * 80))
            else:
                found = examined(fields)
                seen.append(Examined(one, found.bytes, found.look, found.remarks))
        return seen, broken
