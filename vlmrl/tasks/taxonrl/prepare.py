"""`vlmrl prep <domain>`: make the dataset of a domain from any kind of source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.data.dataset_writer import Build, building, refuse_other
from vlmrl.data.image_folders import collection_state
from vlmrl.data.image_scan import MemoryFiles
from vlmrl.data.table_files import SUFFIXES, is_saved
from vlmrl.data.table_pieces import Located, locate_rows, open_row_files, split_spelling
from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name, drawn_counts
from vlmrl.tasks.pairs.prep import SPLIT_SHARES, PairPlan, fill_pairs, write_pairs
from vlmrl.tasks.taxonrl.domains import DOMAINS, INDIVIDUAL, Domain, classes_of
from vlmrl.tasks.taxonrl.published_rows import DomainRequest, prepare_rows, row_schema
from vlmrl.tasks.taxonrl.raw_images import (
    PairTruth,
    Specimens,
    find_pair_lists,
    is_image_table,
    read_face_pairs,
    read_folders,
    read_image_table,
    refuse_bad,
)
from vlmrl.tasks.taxonrl.specimens import draw_collection
from vlmrl.tasks.taxonrl.task import domain_task


def prepare_domain(request: DomainRequest, limits: Limits) -> Prepared:
    """Make the dataset. Raises: DataError for a source, name or row that cannot be used."""
    domain = DOMAINS[request.domain]
    name = check_name(request.name or domain.name)
    source = request.source or published(domain)
    out = request.out or Path("data") / name
    if request.synthetic is not None:
        return _prepare_drawn(request, domain, name, request.synthetic, out, limits)
    if is_raw(source, by_folders=bool(request.levels)):
        return _prepare_images(request, domain, name, Path(source), None, out, limits)
    if request.levels:
        hint = "leave it out; or give a folder or zip archive of images"
        raise DataError(f"--levels names folders, but {source} is a table", hint=hint)
    located = locate_rows(source, request.images_root)
    if is_image_table(domain, located.columns()):
        return _prepare_images(request, domain, name, Path(source), located, out, limits)
    return prepare_rows(out, domain, name, source, request, limits)


def is_raw(source: str, *, by_folders: bool = False) -> bool:
    """Return whether a source holds raw images: an archive, a list of pairs, or a folder without tables.

    Args:
        by_folders: whether the user has named the folders' levels; any folder then counts as raw images.
    """
    place = Path(split_spelling(source)[0])
    if source.startswith("hub:") or not place.exists():
        return False
    if place.is_file():
        return place.suffix.lower() in (".zip", ".txt")
    if is_saved(place) or find_pair_lists(place) or by_folders:
        return not is_saved(place)
    return not any(path.suffix.lower() in SUFFIXES for path in place.rglob("*") if path.is_file())


def _prepare_images(
    request: DomainRequest,
    domain: Domain,
    name: str,
    source: Path,
    located: Located | None,
    out: Path,
    limits: Limits,
) -> Prepared:
    args = {"source": source.name, "levels": list(request.levels) if request.levels else None}
    args |= _pair_args(request, limits) | {"max_bad": request.max_bad}
    refuse_other(out, args, force=limits.force)
    state = located.state if located else collection_state(source if source.is_dir() else source.parent)
    with building(out, key=[domain.name, name, args, state]) as build:
        table = open_row_files(located, build.work) if located else None
        if table is not None:
            specimens = read_image_table(domain, table, build.work, limits)
        elif not request.levels and (lists := find_pair_lists(source)):
            specimens = read_face_pairs(lists, build.work, limits)
        else:
            specimens = read_folders(domain, source, request.levels, build.work, limits)
        refuse_bad(specimens, request.max_bad)
        return _write(build, request, domain, name, specimens, args, limits)


def _prepare_drawn(
    request: DomainRequest, domain: Domain, name: str, num_pairs: int, out: Path, limits: Limits
) -> Prepared:
    if request.source is not None:
        raise DataError(f"--synthetic draws images, but {request.source} is a source of images", hint="leave one out")
    most = drawn_counts(num_pairs)
    counts = {split: min(count, most.get(split, count)) for split, count in request.num_pairs.items()}
    request = replace(request, num_pairs={**counts, "train": num_pairs})
    args = {"synthetic": num_pairs} | _pair_args(request, limits)
    refuse_other(out, args, force=limits.force)
    images, files = draw_collection(domain, num_pairs, seed=request.seed)
    source = {"name": f"drawn {domain.subject}", "images": len(images)}
    specimens = Specimens(images, MemoryFiles(files), [], source=source)
    with building(out) as build:
        return _write(build, request, domain, name, specimens, args, replace(limits, workers=1))


def _pair_args(request: DomainRequest, limits: Limits) -> dict[str, Any]:
    return {"pairs": dict(request.num_pairs), "seed": request.seed, **limits.args}


def _write(
    build: Build,
    request: DomainRequest,
    domain: Domain,
    name: str,
    specimens: Specimens,
    args: Mapping[str, Any],
    limits: Limits,
) -> Prepared:
    known = {one for image in specimens.images for one, value in image.facts.items() if value is not None}
    fields = [one for one in domain.field_names if one in domain.ranks or one in known]
    individuals = domain.target == INDIVIDUAL
    shares = {split: share for split, share in SPLIT_SHARES.items() if request.num_pairs[split]}
    plan = PairPlan(
        name=name,
        levels=classes_of(domain),
        num_pairs=request.num_pairs,
        seed=request.seed,
        args=args,
        source=specimens.source,
        split_shares={split: share / sum(shares.values()) for split, share in shares.items()},
        split_of=specimens.split_of,
        whole_classes=individuals,
        truth_of=PairTruth(domain.name),
        schema=row_schema(domain, "individuals" if individuals else None),
        individuals=individuals,
        truth_fields=fields,
    )
    task = domain_task(domain, {"truth_fields": fields})
    if specimens.pairs is None:
        return fill_pairs(
            build, plan, task, specimens.images, specimens.files, dropped=specimens.dropped, limits=limits
        )
    counts = {"images": len(specimens.images), "classes": len({image.labels for image in specimens.images})}
    info = {"counts": counts, "splits": {split: {"reports": []} for split in specimens.pairs}}
    dropped = [*specimens.dropped, *specimens.lost, *specimens.spare]
    return write_pairs(build, plan, task, specimens.pairs, specimens.files, info, dropped=dropped, limits=limits)


def published(domain: Domain) -> str:
    """Return the hub name of the domain's published data set; one with names besides the answer, if there is one."""
    with_truth = [name for name in domain.datasets if re.search(r"-im(-|$)", name)]
    return f"hub:{(with_truth or domain.datasets)[0]}"
