"""`vlmrl prep pairs`: a pair dataset from a folder or archive of labelled images.

Splits, pairs, rows and measurements are made, then the folder is written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from vlmrl.data.dataset_writer import Build, building, refuse_other
from vlmrl.data.doctor import RowFacts
from vlmrl.data.image_folders import collection_state, read_labelled
from vlmrl.data.image_scan import ReadFile, examine
from vlmrl.data.splits import LabelledImage, Splits, drop_repeats, split_classes, split_images
from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import Assembly, Limits, PlannedRow, Prepared, PromptLengths, assemble, check_name
from vlmrl.tasks.pairs.draw import Pair, build_pairs
from vlmrl.tasks.pairs.task import check_levels, pair_task
from vlmrl.tasks.prep_options import Option
from vlmrl.types import LeftOut, Media, hash64

SPLIT_SHARES = {"train": 0.65, "validation": 0.15, "test": 0.2}
"""Share of each class's images per split. Of 20 images of a class, validation gets 3. They make three pairs of the same
class, while two images would make only one.
"""


@dataclass(frozen=True)
class PairPlan:
    """Plan of a pair dataset.

    Args:
        unseen_classes: number of whole classes that only the test split has.
        distance_shares: distance -> relative share of the different pairs; None = equal.
        args: the arguments of the command, for dataset.json.
        split_shares: split -> share of each class's images.
        source: description and origin of the images, for dataset.json.
        split_of: origin of an image -> its split in the source, which is kept; empty = the source has no splits.
        whole_classes: whether each class is in one split only, as for individuals.
        truth_of: returns the truth of a pair; default: `level_truth` over the levels.
        schema: Arrow schema of the rows; None = derived from the first rows.
        truth_fields: the truth fields that are known, for dataset.json; used if not all fields are known.
        individuals: whether the last label is the name of an individual; it is then stored in a column of its own.
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
    split_of: Mapping[str, str] = field(default_factory=dict)
    whole_classes: bool = False
    truth_of: Callable[[Pair], dict[str, Any]] | None = None
    schema: Any = None
    individuals: bool = False
    truth_fields: Sequence[str] | None = None

    def truth(self, pair: Pair) -> dict[str, Any]:
        return self.truth_of(pair) if self.truth_of else level_truth(self.levels, pair)


def fill_pairs(
    build: Build,
    plan: PairPlan,
    task: Task,
    images: Sequence[LabelledImage],
    read: ReadFile,
    *,
    dropped: Sequence[LeftOut] = (),
    limits: Limits,
) -> Prepared:
    """Distribute images over splits, draw pairs, check every row against the task's truth schema, and write them.

    Args:
        images: the labelled collection; sound images only.
        read: reads an image's file by its place.
    Raises: DataError when there are too few images or another dataset is at the target of the build.
    """
    unique, repeats = drop_repeats(images)
    if not unique:
        hint = f"the first of {len(dropped)} dropped files: {': '.join(dropped[0])}" if dropped else None
        raise DataError(f"no usable image in {plan.source.get('name')}", hint=hint)
    splits = deal_images(unique, plan)
    pairs: dict[str, list[Pair]] = {}
    extra: dict[str, dict[str, Any]] = {}
    for split, members in splits.images.items():
        pairs[split], reports = _pairs_of_split(split, members, set(splits.unseen), plan)
        extra[split] = {"images": len(members), "reports": reports}
    counts = {"images": len(unique), "classes": len({image.labels for image in unique})}
    info = {
        "levels": list(plan.levels),
        "counts": counts,
        "splits": extra,
        "unseen_classes": ["/".join(labels) for labels in splits.unseen],
    }
    lost = [*dropped, *repeats]
    return write_pairs(build, plan, task, pairs, read, info, dropped=lost, limits=limits)


def write_pairs(
    build: Build,
    plan: PairPlan,
    task: Task,
    pairs: Mapping[str, Sequence[Pair]],
    read: ReadFile,
    info: Mapping[str, Any],
    *,
    dropped: Sequence[LeftOut],
    limits: Limits,
) -> Prepared:
    """Check the pairs of each split against the task's truth schema, and write them.

    Args:
        info: fields for dataset.json; the counts are added to its `splits`.
    """
    unseen = set(info.get("unseen_classes", ()))
    lost = list(dropped)
    number_of: dict[str, int] = {}
    seen: list[LabelledImage] = []
    rows: dict[str, list[PlannedRow]] = {}
    lengths = PromptLengths(task)
    for split, members in pairs.items():
        rows[split] = []
        for pair in members:
            truth = plan.truth(pair)
            if problems := task.validate(truth):
                lost.append(LeftOut(f"{split}/{pair.first.origin}", "; ".join(problems)))
                continue
            for image in (pair.first, pair.second):
                if image.media.sha256 not in number_of:
                    number_of[image.media.sha256] = len(seen)
                    seen.append(image)
            facts = RowFacts(
                (number_of[pair.first.media.sha256], number_of[pair.second.media.sha256]),
                "same" if truth["same"] else "different",
                truth.get("distance"),
                lengths.of({}, (pair.first.media, pair.second.media)),
                (pair.first.labels[-1], pair.second.labels[-1]),
                f"{split}: {pair.first.origin}, {pair.second.origin}",
            )
            rows[split].append(PlannedRow(pair, facts))
    assembly = Assembly(
        images=[image.seen or examine(read(image.place)) for image in seen],
        places=[image.place for image in seen],
        reader=partial(map, read),
        rows=rows,
        fields=partial(_fields, plan, unseen),
        schema=plan.schema,
        dropped=lost,
        group=plan.levels[-1],
    )
    splits = {split: {**count_pairs(members), **info["splits"].get(split, {})} for split, members in rows.items()}
    whole = {
        "name": plan.name,
        "task": task.name,
        "seed": plan.seed,
        "source": dict(plan.source),
        "args": dict(plan.args),
        **info,
        **({} if plan.truth_fields is None else {"truth_fields": list(plan.truth_fields)}),
        "splits": splits,
    }
    return assemble(build, assembly, whole, limits)


def deal_images(images: Sequence[LabelledImage], plan: PairPlan) -> Splits:
    """Distribute the images over the splits. An image that has a split in the source keeps it."""
    given: dict[str, list[LabelledImage]] = {}
    for image in images:
        given.setdefault(plan.split_of.get(image.origin, ""), []).append(image)
    deal = split_classes if plan.whole_classes else partial(split_images, unseen_classes=plan.unseen_classes)
    if set(given) <= {""}:
        _refuse_few_classes(images, plan)
        return deal(images, plan.split_shares, seed=plan.seed)
    if "" in given:
        some = given[""][0].origin
        raise DataError(f"some images have a split and others none, such as {some}", hint="give every image its split")
    if "validation" not in given and "train" in given and "validation" in plan.split_shares:
        validation = plan.split_shares.get("validation", 0)
        share = validation / (plan.split_shares["train"] + validation)
        splits = deal(given.pop("train"), {"train": 1 - share, "validation": share}, seed=plan.seed)
        given = {**splits.images, **given}
    return Splits(given)


def _refuse_few_classes(images: Sequence[LabelledImage], plan: PairPlan) -> None:
    """Raise a DataError if splits may not share a class and there are too few classes for two in every split.

    A split with one class would have no pair of different classes.
    """
    sizes, splits = Counter(image.labels for image in images), list(plan.split_shares)
    count = sum(size > 1 for size in sizes.values())
    if plan.whole_classes and count < 2 * len(splits):
        hint = "--validation-pairs 0 makes no validation split" if "validation" in splits else "more are needed"
        raise DataError(
            f"{count} {plan.levels[-1]}s with two images or more, and {' and '.join(splits)} need two of them each",
            hint=hint,
        )


def _pairs_of_split(
    split: str, members: Sequence[LabelledImage], unseen: set[tuple[str, ...]], plan: PairPlan
) -> tuple[list[Pair], list[dict[str, Any]]]:
    """Return (pairs, reports) of a split. Test pairs: half of unseen classes, if there are any, half of seen ones."""
    seed = hash64(plan.seed, split)
    groups = {"": list(members)}
    if split == "test" and unseen:
        groups = {
            "seen": [image for image in members if image.labels not in unseen],
            "unseen": [image for image in members if image.labels in unseen],
        }
    pairs, reports = [], []
    for group, images in groups.items():
        num_pairs = plan.num_pairs[split] if not group else (plan.num_pairs[split] + 1) // 2
        try:
            drawn = build_pairs(images, num_pairs, seed=hash64(seed, group), distance_shares=plan.distance_shares)
        except DataError as error:
            place = f"split `{split}`" + (f", {group} classes" if group else "")
            raise DataError(f"{place}: {error.message}", where=error.where, hint=error.hint) from error
        pairs += drawn.pairs
        reports += [{**report, "classes": group} if group else report for report in drawn.reports]
    if len(groups) > 1:
        pairs.sort(key=lambda pair: hash64(seed, *pair.key))
    return pairs, reports


def _fields(
    plan: PairPlan, unseen: set[str], rows: Sequence[PlannedRow], media: Sequence[Media]
) -> Iterator[dict[str, Any]]:
    for row in rows:
        pair, images = row.key, [media[i] for i in row.facts.images]
        fields = {
            "prompt_id": pair_id(plan.name, images),
            "truth": plan.truth(pair),
            "images": images,
            "origins": [pair.first.origin, pair.second.origin],
        }
        if plan.individuals:
            fields["individuals"] = [pair.first.labels[-1], pair.second.labels[-1]]
        if unseen:
            fields["unseen"] = "/".join(pair.first.labels) in unseen
        yield fields


def pair_id(name: str, images: Sequence[Media], *more: str) -> str:
    """Return the `prompt_id` of a pair in a dataset."""
    return f"{name}-{hash64(name, *(media.sha256 for media in images), *more):016x}"


def level_truth(levels: Sequence[str], pair: Pair) -> dict[str, Any]:
    """Return the truth of a pair over a hierarchy: `same`, `distance`, and two names per level."""
    truth: dict[str, Any] = {"same": pair.distance == 0, "distance": pair.distance}
    return truth | {level: [pair.first.labels[i], pair.second.labels[i]] for i, level in enumerate(levels)}


def count_pairs(rows: Sequence[PlannedRow]) -> dict[str, Any]:
    """Return the counts of a split for dataset.json, except its number of rows."""
    distances = Counter(row.facts.distance for row in rows if row.facts.distance is not None)
    same = sum(row.facts.label == "same" for row in rows)
    images = len({i for row in rows for i in row.facts.images})
    return {"same": same, "by_distance": {str(d): distances[d] for d in sorted(distances)}, "images": images}


SHARES_HELP = "Share of each distance of different pairs: 1=0.5,2=0.5"


def prepare_folder(
    source: Annotated[Path, Option("Folder or zip archive of images; the folders above an image are its names.")],
    levels: Annotated[str, Option("Names of the last folders above an image, coarse to fine: alphabet,character")],
    name: Annotated[str | None, Option("Name of the dataset; default: that of the source.")] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    num_pairs: Annotated[int, Option("Training pairs.", flag="--pairs", min=2)] = 6000,
    validation_pairs: Annotated[int, Option("Validation pairs.", min=2)] = 300,
    test_pairs: Annotated[int, Option("Test pairs.", min=2)] = 1200,
    seed: Annotated[int, Option("Seed of splits and pairs.")] = 0,
    unseen_classes: Annotated[int, Option("Whole classes that only the test has: half of its pairs.", min=0)] = 0,
    distance_shares: Annotated[str | None, Option(SHARES_HELP)] = None,
    *,
    limits: Limits,
) -> Prepared:
    """Read the images, distribute them over the splits, draw pairs, and write the dataset.

    Raises: DataError for a source, level or name that cannot be used, or too few images.
    """
    names, shares = [level.strip() for level in levels.split(",")], parse_shares(distance_shares)
    check_levels(names)
    name = check_name(name or (source.stem if source.is_file() else source.resolve().name))
    counts = {"train": num_pairs, "validation": validation_pairs, "test": test_pairs}
    args = {
        "levels": names,
        "pairs": counts,
        "seed": seed,
        "unseen_classes": unseen_classes,
        "distance_shares": {str(d): share for d, share in sorted(shares.items())} if shares else None,
    }
    target = out or Path("data") / name
    refuse_other(target, args, force=limits.force)
    task = pair_task({"name": name, "levels": names})
    with building(target, key=[name, args, collection_state(source)]) as build:
        read = read_labelled(source, names, build.work, workers=limits.workers, progress=limits.progress)
        plan = PairPlan(name, names, counts, seed, args, read.about, unseen_classes, shares)
        return fill_pairs(build, plan, task, read.images, read.collection.read, dropped=read.dropped, limits=limits)


def parse_shares(text: str | None) -> dict[int, float] | None:
    """Return `1=0.5,2=0.5` as {1: 0.5, 2: 0.5}; None stays None. Raises: DataError when the text has another form."""
    if text is None:
        return None
    shares: dict[int, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*=\s*([0-9]*\.?[0-9]+)\s*", part)
        if match is None or int(match.group(1)) in shares:
            message = f"--distance-shares {text!r} is not of the form 1=0.5,2=0.5"
            raise DataError(message, hint="distance=share, comma between")
        shares[int(match.group(1))] = float(match.group(2))
    return shares
