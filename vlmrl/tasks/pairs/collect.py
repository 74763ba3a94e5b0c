"""`vlmrl prep pairs`: make a pair dataset from a folder or archive of labelled images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.labelled_images import Labelled, collection_state, read_labelled
from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name
from vlmrl.tasks.pairs.prep import PairPlan, fill_pairs
from vlmrl.tasks.pairs.task import check_levels, pair_task


def prepare_folder(
    source: Path,
    levels: Sequence[str],
    *,
    name: str | None = None,
    out: Path | None = None,
    num_pairs: Mapping[str, int],
    seed: int = 0,
    unseen_classes: int = 0,
    distance_shares: Mapping[int, float] | None = None,
    force: bool = False,
    limits: Limits = Limits(),
) -> Prepared:
    """Read the images, distribute them over the splits, draw pairs, and write the dataset.

    Args:
        source: a folder or a zip archive; the names of the last len(levels) folders above an image are its labels.
        levels: names of the levels, coarse to fine.
        name: name of the dataset; default: the source's name without its ending.
        out: the dataset folder; default: `data/<name>`.
        num_pairs: split -> number of pairs.
        unseen_classes: number of whole classes that only the test split has.
        distance_shares: distance -> relative share of the different pairs; None = equal.
    Raises: DataError for a source, level or name that cannot be used, or too few images.
    """
    check_levels(levels)
    name = check_name(name or (source.stem if source.is_file() else source.resolve().name))
    shares = {str(d): share for d, share in sorted(distance_shares.items())} if distance_shares else None
    args = {
        "levels": list(levels),
        "pairs": dict(num_pairs),
        "seed": seed,
        "unseen_classes": unseen_classes,
        "distance_shares": shares,
    }
    target = out or Path("data") / name
    refuse_other(target, args, force=force)
    task = pair_task({"name": name, "levels": list(levels)})
    with building(target, key=[name, args, collection_state(source)]) as build:
        read = read_labelled(source, levels, build.work, workers=limits.workers, progress=limits.progress)
        plan = _plan(read, name, levels, num_pairs, seed, args, unseen_classes, distance_shares)
        return fill_pairs(
            build, plan, task, read.images, read.collection, dropped=read.dropped, force=force, limits=limits
        )


def _plan(
    read: Labelled,
    name: str,
    levels: Sequence[str],
    num_pairs: Mapping[str, int],
    seed: int,
    args: Mapping[str, Any],
    unseen_classes: int,
    distance_shares: Mapping[int, float] | None,
) -> PairPlan:
    return PairPlan(
        name=name,
        levels=levels,
        num_pairs=num_pairs,
        seed=seed,
        args=args,
        source={
            "name": read.name,
            "images": len(read.images),
            "ignored_files": read.ignored,
            "fingerprint": read.fingerprint,
        },
        unseen_classes=unseen_classes,
        distance_shares=distance_shares,
    )


def parse_shares(text: str | None) -> dict[int, float] | None:
    """Return `1=0.5,2=0.5` as {1: 0.5, 2: 0.5}; None stays None. Raises: DataError when the text has another form."""
    if text is None:
        return None
    shares: dict[int, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*=\s*([0-9]*\.?[0-9]+)\s*", part)
        if match is None or int(match.group(1)) in shares:
            raise DataError(
                f"--distance-shares {text!r} is not of the form 1=0.5,2=0.5", hint="distance=share, comma between"
            )
        shares[int(match.group(1))] = float(match.group(2))
    return shares
