"""Making a pair dataset from labelled images: splits, pairs, rows, measurements, folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.data.build import Build, building
from vlmrl.data.dataset import read_info
from vlmrl.data.images import store_form
from vlmrl.data.measure import measure_rows
from vlmrl.data.pairs import Pair, build_pairs
from vlmrl.data.splits import LabelledImage, drop_repeats, split_images
from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.tasks.render import place_images, render_user
from vlmrl.types import Message, Row, hash64

SPLIT_SHARES = {"train": 0.65, "validation": 0.15, "test": 0.2}
"""Of each class. With 20 images in a class, validation gets 3 of them: three same pairs; two would make one."""


@dataclass(frozen=True)
class PairPlan:
    """What to make.

    Args:
        name: name of the dataset.
        levels: names of the hierarchy's levels, coarse to fine.
        num_pairs: split -> pairs.
        seed: of splits and pairs.
        unseen_classes: whole classes that only the test split has.
        distance_shares: distance -> relative share of the different pairs; None = equal.
        args: the arguments as given, for dataset.json.
        split_shares: split -> share of each class's images.
        source: what the images are and where they came from, for dataset.json.
    """

    name: str
    levels: Sequence[str]
    num_pairs: Mapping[str, int]
    seed: int
    args: Mapping[str, Any]
    source: Mapping[str, Any]
    unseen_classes: int = 0
    distance_shares: Mapping[int, float] | None = None
    split_shares: Mapping[str, float] = field(default_factory=lambda: SPLIT_SHARES)


@dataclass(frozen=True)
class Prepared:
    """What `prep` did: the folder, "created" / "replaced" / "up to date", dataset.json, and leftovers it found."""

    path: Path
    outcome: str
    info: Mapping[str, Any]
    found: Sequence[str] = field(default_factory=tuple)


def prepare_pairs(
    out: Path,
    plan: PairPlan,
    task: Task,
    images: Sequence[LabelledImage],
    read: Callable[[LabelledImage], bytes],
    *,
    dropped: Sequence[Mapping[str, Any]] = (),
    force: bool = False,
) -> Prepared:
    """Split, pair, check every row against the task's truth schema, and write the folder.

    Args:
        out: the dataset folder.
        plan: what to make.
        task: gives the prompt and the truth schema.
        images: the labelled collection; sound images only.
        read: the file of an image, in the form that is stored.
        dropped: what the reader left out already, each {"origin", "reason"}.
        force: replace another dataset at `out`.
    Raises: DataError when there are too few images or another dataset is at `out`.
    """
    with building(out) as build:
        unique, repeats = drop_repeats(images)
        if not unique:
            raise DataError(f"no usable image in {plan.source.get('name')}", hint=_first_reason(dropped))
        splits = split_images(unique, plan.split_shares, seed=plan.seed, unseen_classes=plan.unseen_classes)
        rows_by_split: dict[str, list[dict[str, Any]]] = {}
        extra: dict[str, dict[str, Any]] = {}
        lost: list[Mapping[str, Any]] = [*dropped, *repeats]
        for split, members in splits.images.items():
            pairs, reports = _pairs_of_split(split, members, set(splits.unseen), plan)
            rows = [_row(plan, pair, set(splits.unseen)) for pair in pairs]
            rows_by_split[split], wrong = _validated(rows, task, split)
            lost += wrong
            extra[split] = {**_count(rows_by_split[split]), "images": len(members), "reports": reports}
        _store_images(build, splits.images, rows_by_split, read)
        for split, rows in rows_by_split.items():
            build.write_rows(split, rows)
        info = {
            "name": plan.name,
            "task": task.name,
            "levels": list(plan.levels),
            "seed": plan.seed,
            "source": dict(plan.source),
            "args": dict(plan.args),
            "splits": extra,
            "counts": {
                "images": len(unique),
                "images_stored": len(build.images),
                "classes": len({i.labels for i in unique}),
            },
            "unseen_classes": ["/".join(labels) for labels in splits.unseen],
            "histograms": _measure(rows_by_split, task),
            "dropped": lost,
        }
        outcome = build.finish(info, force=force)
        return Prepared(build.target, outcome, read_info(build.target), build.found)


def _first_reason(dropped: Sequence[Mapping[str, Any]]) -> str | None:
    return (
        f"the first of {len(dropped)} dropped files: {dropped[0]['origin']}: {dropped[0]['reason']}"
        if dropped
        else None
    )


def _pairs_of_split(
    split: str, members: Sequence[LabelledImage], unseen: set[tuple[str, ...]], plan: PairPlan
) -> tuple[list[Pair], list[dict[str, Any]]]:
    """With unseen classes the test split is half pairs of seen, half pairs of unseen classes."""
    seed = hash64(plan.seed, split)
    groups = {"": list(members)}
    if split == "test" and unseen:
        groups = {
            "seen": [image for image in members if image.labels not in unseen],
            "unseen": [image for image in members if image.labels in unseen],
        }
    pairs, reports = [], []
    for group, images in groups.items():
        wanted = plan.num_pairs[split] if not group else (plan.num_pairs[split] + 1) // 2
        try:
            made = build_pairs(images, wanted, seed=hash64(seed, group), distance_shares=plan.distance_shares)
        except DataError as error:
            place = f"split `{split}`" + (f", {group} classes" if group else "")
            raise DataError(f"{place}: {error.message}", where=error.where, hint=error.hint) from error
        pairs += made.pairs
        reports += [{**report, "classes": group} if group else report for report in made.reports]
    if len(groups) > 1:
        pairs.sort(key=lambda pair: hash64(seed, *pair.key))
    return pairs, reports


def _row(plan: PairPlan, pair: Pair, unseen: set[tuple[str, ...]]) -> dict[str, Any]:
    first, second = pair.first, pair.second
    truth: dict[str, Any] = {"same": pair.distance == 0, "distance": pair.distance}
    truth |= {level: [first.labels[i], second.labels[i]] for i, level in enumerate(plan.levels)}
    identity = f"{hash64(plan.name, first.media.sha256, second.media.sha256):016x}"
    row = {
        "prompt_id": f"{plan.name}-{identity}",
        "truth": truth,
        "images": [first.media, second.media],
        "origins": [first.origin, second.origin],
    }
    if unseen:
        row["unseen"] = first.labels in unseen
    return row


def _validated(
    rows: Sequence[dict[str, Any]], task: Task, split: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    sound, wrong = [], []
    for row in rows:
        problems = task.validate(row["truth"])
        if problems:
            wrong.append({"origin": f"{split}/{row['prompt_id']}", "reason": "; ".join(problems)})
        else:
            sound.append(row)
    return sound, wrong


def _count(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    distances = Counter(row["truth"]["distance"] for row in rows)
    return {"same": distances[0], "by_distance": {str(d): distances[d] for d in sorted(distances)}}


def _store_images(
    build: Build,
    members: Mapping[str, Sequence[LabelledImage]],
    rows_by_split: Mapping[str, Sequence[Mapping[str, Any]]],
    read: Callable[[LabelledImage], bytes],
) -> None:
    """The images that are in a pair, in split order."""
    for split, rows in rows_by_split.items():
        used = {media.sha256 for row in rows for media in row["images"]}
        for image in members[split]:
            if image.media.sha256 in used and image.media.sha256 not in build.images:
                data, media = store_form(read(image))
                if media.sha256 != image.media.sha256:
                    raise DataError(f"{image.origin} changed while it was read", hint="run the command again")
                build.images.add(media.sha256, data)


def _measure(rows_by_split: Mapping[str, Sequence[Mapping[str, Any]]], task: Task) -> dict[str, Any]:
    out = {}
    for split, rows in rows_by_split.items():
        prompts = []
        for row in rows:
            columns = {key: row[key] for key in row if key not in ("prompt_id", "truth", "images")}
            made = Row(row["prompt_id"], split, task.name, row["truth"], tuple(row["images"]), columns)
            text = render_user(task.template, made, task.variables, where=task.template_file)
            place_images((Message("user", text),), made)
            prompts.append(text)
        out[split] = measure_rows([row["images"] for row in rows], prompts)
    return out
