"""`vlmrl prep <domain>` from raw images. Their names come from folders, from a table, or from LFW's pairs.txt."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from vlmrl.data.cells import IMAGE_SUFFIXES, image_bytes, read_image
from vlmrl.data.columns import match_columns
from vlmrl.data.image_scan import Files, scan_files
from vlmrl.data.labelled_images import check_name, read_labelled, refuse_twins
from vlmrl.data.splits import LabelledImage
from vlmrl.data.table_pieces import RowFiles, read_piece
from vlmrl.data.table_sources import SPLIT_NAMES
from vlmrl.errors import DataError
from vlmrl.rewards.text_parsing import normalise_name
from vlmrl.tasks.dataset_assembly import Limits, is_few, leave_out
from vlmrl.tasks.pairs.draw import Pair
from vlmrl.tasks.taxonrl.domain import INDIVIDUAL, Domain, classes_of
from vlmrl.tasks.taxonrl.domain_rows import complete_truth
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.layouts import LAYOUTS, UNKNOWN
from vlmrl.untrusted import encodable

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "imagepath", "path", "filepath", "file", "filename"),
    INDIVIDUAL: ("individual", "individualid", "individualname", "identity", "person", "name", "id"),
    "split": ("split", "subset"),
    "age_group": ("agegroup", "age"),
    "gender": ("gender", "sex"),
    "type": ("type", "class"),
}
"""Role -> column names that are recognised for it, in lower case without blanks, - and _."""


@dataclass
class Specimens:
    """Labelled images of a domain.

    Args:
        images: the sound images; see `specimen`.
        files: reader of an image file by its origin.
        dropped: images that were left out, each {"origin", "reason"}.
        split_of: origin -> split, if the source has splits.
        pairs: split -> pairs, if the source has pairs; None = pairs are to be drawn.
        lost: pairs of the source that are wrong and were left out, each {"origin", "reason"}.
        spare: correct pairs that were left out because they repeat another pair or have images of two splits; each
            {"origin", "reason"}.
        source: entry of dataset.json about the source.
    """

    images: list[LabelledImage]
    files: Files
    dropped: list[dict[str, Any]]
    split_of: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, list[Pair]] | None = None
    lost: list[dict[str, Any]] = field(default_factory=list)
    spare: list[dict[str, Any]] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)


def specimen(domain: Domain, image: LabelledImage, labels: Mapping[str, str]) -> LabelledImage:
    """Return an image with its class as `labels`, and with the names of the domain's other truth fields as `facts`.

    Raises: DataError for a label that is not in the domain's vocabulary.
    """
    facts: dict[str, str | None] = {}
    vocabularies = LAYOUTS[domain.layout].vocabularies
    for name in domain.field_names:
        if name in classes_of(domain) or name not in labels:
            continue
        known = vocabularies.get(name)
        value = known.find(labels[name]) if known else labels[name]
        if value is None:
            raise DataError(f"the {name} {labels[name]!r} is unknown; known: {', '.join(known.names if known else ())}")
        facts[name] = value
    return replace(image, labels=tuple(labels[name] for name in classes_of(domain)), facts=facts)


@dataclass(frozen=True)
class PairTruth:
    """Function that returns the truth of a pair of specimens, with all keys of the domain's schema."""

    domain: str

    def __call__(self, pair: Pair) -> dict[str, Any]:
        domain, same = DOMAINS[self.domain], pair.distance == 0
        truth: dict[str, Any] = {"same": same, "distance": pair.distance if domain.ranks else None}
        for name in domain.field_names:
            if name in domain.ranks:
                level = domain.ranks.index(name)
                truth[name] = [pair.first.labels[level], pair.second.labels[level]]
            else:
                truth[name] = [pair.first.facts.get(name), pair.second.facts.get(name)]
        return complete_truth(domain, truth)


def read_folders(
    domain: Domain, source: Path, levels: Sequence[str] | None, work: Path | None, limits: Limits
) -> Specimens:
    """Read images that are named by their folders.

    Args:
        levels: for each folder above an image, outermost first, the truth field that the folder's name is for; "-" =
            the name is ignored; None = the folders name the classes (`classes_of`).
    """
    levels = check_folders(domain, levels)
    read = read_labelled(source, levels, work, workers=limits.workers, progress=limits.progress)
    images, dropped = [], list(read.dropped)
    for image in read.images:
        try:
            names = _names(domain, dict(zip(levels, image.labels, strict=True)))
            images.append(specimen(domain, image, names))
        except DataError as error:
            dropped.append({"origin": image.origin, "reason": error.message})
    images = keep_one_parent(domain, images, dropped)
    source_entry = {
        "name": read.name,
        "images": len(images),
        "ignored_files": read.ignored,
        "fingerprint": read.fingerprint,
    }
    return Specimens(images, read.collection, dropped, source=source_entry)


def check_folders(domain: Domain, levels: Sequence[str] | None) -> list[str]:
    """Return the truth field for each folder above an image; an ignored folder gets a unique name with "-".

    Raises: DataError if a required field of the domain is missing, or a field is unknown to it.
    """
    needed = classes_of(domain)
    chosen = list(levels) if levels else list(needed)
    allowed = {*needed, *domain.field_names, "-"}
    unknown = [level for level in chosen if level not in allowed]
    if unknown or any(chosen.count(level) != 1 for level in needed):
        more = sorted(allowed - {*needed, "-"})
        besides = f"; optional: {', '.join(more)}" if more else ""
        raise DataError(
            f"--levels {','.join(chosen)} does not fit `{domain.name}`",
            hint=f"{', '.join(needed)}: each once{besides}; - stands for a folder that says nothing",
        )
    return [f"-{number}" if level == "-" else level for number, level in enumerate(chosen)]


@dataclass(frozen=True)
class RootedFiles:
    """Reader of image files by path. The path must stay inside a root folder."""

    root: Path

    def read(self, path: str) -> bytes:
        return image_bytes(read_image(path, self.root, ""), "")


def is_image_table(domain: Domain, columns: Sequence[str]) -> bool:
    """Return whether a table has one image and its names per row, and not a pair of images."""
    roles = _columns(domain, columns)
    return "image" in roles and all(name in roles for name in classes_of(domain))


def read_image_table(domain: Domain, table: RowFiles, work: Path | None, limits: Limits) -> Specimens:
    """Read images from a table of paths and names, such as Danish Fungi's: image_path, order, family, genus, species.

    A column `split` determines the split of each image. If there are several tables (train, test), the name of each
    table is the split of its images.
    """
    columns = _columns(domain, table.columns)
    labels = [name for name in columns if name not in ("image", "split")]
    rows: dict[str, dict[str, str]] = {}
    split_of: dict[str, str] = {}
    dropped: list[dict[str, Any]] = []
    for piece in table.pieces:
        for number, row in enumerate(read_piece(piece, list(columns.values()))):
            path = row.get(columns["image"])
            is_embedded = isinstance(path, bytes) or (isinstance(path, Mapping) and path.get("bytes") is not None)
            path = path.get("path") if isinstance(path, Mapping) else path
            try:
                if is_embedded:
                    raise DataError("the image is in the table itself, which must give its path instead")
                if not isinstance(path, str) or not path or path in rows:
                    raise DataError(
                        "no path" if not isinstance(path, str) or not path else f"the path {path} is in the table twice"
                    )
                split = _split(row.get(columns["split"])) if "split" in columns else piece.split
                rows[path] = _names(domain, {name: row.get(columns[name]) for name in labels})
            except DataError as error:
                dropped.append({"origin": table.where(piece, number), "reason": error.message})
                continue
            if "split" in columns or len(table.splits) > 1:
                split_of[path] = split
    if table.root is None:
        raise DataError(
            "the folder of the table's paths is not known", hint="name it with --images-root", where=table.label
        )
    files, images = RootedFiles(table.root), []
    for path, facts in scan_files(files, list(rows), work, workers=limits.workers, progress=limits.progress):
        try:
            if isinstance(facts, str):
                raise DataError(facts)
            images.append(specimen(domain, LabelledImage(facts.media, (), path, facts), rows[path]))
        except DataError as error:
            dropped.append({"origin": encodable(path), "reason": error.message})
    refuse_twins(images, classes_of(domain))
    images = keep_one_parent(domain, images, dropped)
    source_entry = {"name": Path(table.label).name, "images": len(images), "columns": sorted(columns.values())}
    return Specimens(images, files, dropped, split_of, source=source_entry)


def _columns(domain: Domain, columns: Sequence[str]) -> dict[str, str]:
    """Return role or truth field -> name of the table's column for it."""
    by_spelling = {re.sub(r"[\s_-]+", "", column).lower(): column for column in reversed(columns)}
    roles = ("image", "split", *classes_of(domain), *domain.field_names)
    spellings = {role: SPELLINGS.get(role, (role,)) for role in roles}
    return {role: by_spelling[name] for role, name in match_columns(spellings, list(by_spelling)).items()}


def _split(value: Any) -> str:
    """Return the split that a cell contains; "" = no split. Raises: DataError for a word that is no split."""
    text = "" if value is None else str(value).strip()
    if text.lower() not in ("", *SPLIT_NAMES):
        raise DataError(f"the split {text!r} is none of train, validation, test")
    return SPLIT_NAMES.get(text.lower(), "")


def _names(domain: Domain, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of an image. Raises: DataError when a name of its class is not known."""
    names = {}
    for level, value in values.items():
        text = str(value).strip() if value is not None else ""
        if text.lower() in UNKNOWN:
            if level in classes_of(domain):
                raise DataError(f"the {level} is {text!r}, which names none" if text else f"no {level}")
            continue
        names[level] = check_name(text)
    return names


def keep_one_parent(
    domain: Domain, images: Sequence[LabelledImage], dropped: list[dict[str, Any]]
) -> list[LabelledImage]:
    """Return the images with consistent ranks: a genus belongs to one family only, a family to one order only.

    If a name occurs under several parents, images under its most frequent parent are kept; the others are added to
    `dropped`.
    """
    kept = list(images)
    for depth, (coarse, fine) in enumerate(pairwise(domain.ranks)):
        parent_counts: dict[str, Counter[str]] = defaultdict(Counter)
        for image in kept:
            parent_counts[normalise_name(image.labels[depth + 1], fine)][image.labels[depth]] += 1
        main_parent = {name: min(counts, key=lambda one: (-counts[one], one)) for name, counts in parent_counts.items()}
        candidates, kept = kept, []
        for image in candidates:
            name, parent = image.labels[depth + 1], image.labels[depth]
            main = main_parent[normalise_name(name, fine)]
            if parent == main:
                kept.append(image)
                continue
            count = parent_counts[normalise_name(name, fine)][main]
            reason = f"the {fine} {name} is in the {coarse} {parent} here and in {main} elsewhere ({count:,} images)"
            dropped.append({"origin": image.origin, "reason": reason})
    return kept


def refuse_bad(specimens: Specimens, max_bad: float) -> None:
    """Raise a DataError when too many images were left out: a share above `max_bad`, or all of them.

    The error lists the first of them. If the source has pairs, the pairs are checked in the same way.
    """
    name = specimens.source.get("name")
    if not specimens.images and not specimens.dropped:
        raise DataError(
            f"no image in {name}; nothing was written",
            hint=f"the names of image files end in {', '.join(IMAGE_SUFFIXES)}",
        )
    _refuse_share("images", specimens.dropped, len(specimens.images), max_bad, name)
    if specimens.pairs is not None:
        sound = sum(len(pairs) for pairs in specimens.pairs.values())
        _refuse_share("pairs", specimens.lost, sound + len(specimens.spare) if sound else 0, max_bad, name)


def _refuse_share(what: str, bad: Sequence[Mapping[str, Any]], sound: int, max_bad: float, name: Any) -> None:
    total = sound + len(bad)
    if sound and is_few(len(bad), total, max_bad):
        return
    lines = "".join(f"\n  {drop['origin']}: {drop['reason']}" for drop in bad[:5])
    too_many = f"{len(bad):,} of {total:,} {what} cannot be used, more than --max-bad {max_bad:g}"
    raise DataError(
        f"{too_many if sound else f'none of the {total:,} {what} can be used'}; nothing was written:{lines}",
        hint=f"mend them, or {leave_out(len(bad), total)}"
        if sound
        else f"check that {name} is the right source, and that its folders or columns have the expected names",
    )
