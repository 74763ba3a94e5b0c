"""`vlmrl prep <domain>`: make the dataset of a domain from any kind of source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from vlmrl.data.dataset_writer import Build, building, refuse_other
from vlmrl.data.image_folders import collection_state
from vlmrl.data.table_files import SUFFIXES, is_saved
from vlmrl.data.table_pieces import Located, locate_rows, open_row_files, split_spelling
from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name, drawn_counts
from vlmrl.tasks.pairs.prep import SPLIT_SHARES, PairPlan, fill_pairs, write_pairs
from vlmrl.tasks.prep_options import Option
from vlmrl.tasks.taxonrl.domains import DOMAINS, INDIVIDUAL, Domain, classes_of
from vlmrl.tasks.taxonrl.published_rows import DomainRequest, domain_schema, prepare_rows
from vlmrl.tasks.taxonrl.raw_images import (
    Specimens,
    find_pair_lists,
    is_image_table,
    pair_truth,
    read_face_pairs,
    read_folders,
    read_image_table,
    refuse_bad,
)
from vlmrl.tasks.taxonrl.specimens import draw_collection
from vlmrl.tasks.taxonrl.task import domain_task

CUT_HELP = "Rows cut off train where the source has no validation split (0: none); pairs to make."
LEVELS_HELP = "Raw images: what the folders above an image are, outermost first: type,individual"


def prepare_domain(
    domain: str,
    source: Annotated[str | None, Option("Rows or images, as described above.", positional=True)] = None,
    synthetic: Annotated[int | None, Option("Draw this many training pairs instead of reading.", min=20)] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: the domain.")] = None,
    seed: Annotated[int, Option("Seed of splits, pairs and drawings.")] = 0,
    validation_pairs: Annotated[int, Option(CUT_HELP, min=0)] = 300,
    num_pairs: Annotated[int, Option("Raw images: training pairs to make.", flag="--pairs", min=2)] = 6000,
    test_pairs: Annotated[int, Option("Raw images: test pairs to make.", min=2)] = 1200,
    levels: Annotated[str | None, Option(LEVELS_HELP)] = None,
    max_bad: Annotated[float, Option("Largest share of wrong rows that are left out.", min=0, max=1)] = 0.01,
    images_root: Annotated[
        Path | None, Option("Folder that image paths are relative to; default: the table's.")
    ] = None,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of a domain. Raises: DataError for a source, name or row that cannot be used."""
    about, name = DOMAINS[domain], check_name(name or domain)
    counts = {"train": num_pairs, "validation": validation_pairs, "test": test_pairs}
    folders = [level.strip() for level in levels.split(",")] if levels else None
    place, target = source or published(about), out or Path("data") / name
    request = DomainRequest(about, name, target, place, seed, counts, folders, max_bad, images_root)
    if synthetic is not None:
        if source is not None:
            raise DataError(f"--synthetic draws images, but {source} is a source of images", hint="leave one out")
        return _prepare_drawn(request, synthetic, limits)
    if is_raw(place, by_folders=bool(folders)):
        return _prepare_images(request, None, limits)
    if folders:
        hint = "leave it out; or give a folder or zip archive of images"
        raise DataError(f"--levels names folders, but {place} is a table", hint=hint)
    located = locate_rows(place, images_root)
    if is_image_table(about, located.columns()):
        return _prepare_images(request, located, limits)
    return prepare_rows(request, located, limits)


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


def _prepare_images(request: DomainRequest, located: Located | None, limits: Limits) -> Prepared:
    domain, source = request.domain, Path(request.source)
    args = {"source": source.name, "levels": list(request.levels) if request.levels else None}
    args |= _pair_args(request, limits) | {"max_bad": request.max_bad}
    refuse_other(request.out, args, force=limits.force)
    state = located.state if located else collection_state(source if source.is_dir() else source.parent)
    with building(request.out, key=[domain.name, request.name, args, state]) as build:
        table = open_row_files(located, build.work) if located else None
        if table is not None:
            specimens = read_image_table(domain, table, build.work, limits)
        elif not request.levels and (lists := find_pair_lists(source)):
            specimens = read_face_pairs(lists, build.work, limits)
        else:
            specimens = read_folders(domain, source, request.levels, build.work, limits)
        refuse_bad(specimens, request.max_bad)
        return _write(build, request, specimens, args, limits)


def _prepare_drawn(request: DomainRequest, num_pairs: int, limits: Limits) -> Prepared:
    most = drawn_counts(num_pairs)
    counts = {split: min(count, most.get(split, count)) for split, count in request.num_pairs.items()}
    request = replace(request, num_pairs={**counts, "train": num_pairs})
    args = {"synthetic": num_pairs} | _pair_args(request, limits)
    refuse_other(request.out, args, force=limits.force)
    images, files = draw_collection(request.domain, num_pairs, seed=request.seed)
    source = {"name": f"drawn {request.domain.subject}", "images": len(images)}
    specimens = Specimens(images, files.__getitem__, [], source=source)
    with building(request.out) as build:
        return _write(build, request, specimens, args, replace(limits, workers=1))


def _pair_args(request: DomainRequest, limits: Limits) -> dict[str, Any]:
    return {"pairs": dict(request.num_pairs), "seed": request.seed, **limits.args}


def _write(
    build: Build, request: DomainRequest, specimens: Specimens, args: Mapping[str, Any], limits: Limits
) -> Prepared:
    domain = request.domain
    known = {one for image in specimens.images for one, value in image.facts.items() if value is not None}
    fields = [one for one in domain.field_names if one in domain.ranks or one in known]
    individuals = domain.target == INDIVIDUAL
    shares = {split: share for split, share in SPLIT_SHARES.items() if request.num_pairs[split]}
    plan = PairPlan(
        name=request.name,
        levels=classes_of(domain),
        num_pairs=request.num_pairs,
        seed=request.seed,
        args=args,
        source=specimens.source,
        split_shares={split: share / sum(shares.values()) for split, share in shares.items()},
        split_of=specimens.split_of,
        whole_classes=individuals,
        truth_of=partial(pair_truth, domain),
        schema=domain_schema(domain, "individuals" if individuals else None),
        individuals=individuals,
        truth_fields=fields,
    )
    task = domain_task(domain, {"truth_fields": fields})
    if specimens.pairs is None:
        return fill_pairs(build, plan, task, specimens.images, specimens.read, dropped=specimens.dropped, limits=limits)
    counts = {"images": len(specimens.images), "classes": len({image.labels for image in specimens.images})}
    info = {"counts": counts, "splits": {split: {"reports": []} for split in specimens.pairs}}
    dropped = [*specimens.dropped, *specimens.lost, *specimens.spare]
    return write_pairs(build, plan, task, specimens.pairs, specimens.read, info, dropped=dropped, limits=limits)


def published(domain: Domain) -> str:
    """Return the hub name of the domain's published data set; one with names besides the answer, if there is one."""
    with_truth = [name for name in domain.datasets if re.search(r"-im(-|$)", name)]
    return f"hub:{(with_truth or domain.datasets)[0]}"
