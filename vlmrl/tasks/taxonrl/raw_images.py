"""`vlmrl prep <domain>` from raw images. Names come from folders, a table, or the text files of LFW and CPLFW."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from vlmrl.data.image_folders import check_name, read_labelled, refuse_twins
from vlmrl.data.image_scan import ReadFile, scan_files
from vlmrl.data.open_dataset import RowUnits, cut_rows
from vlmrl.data.splits import LabelledImage
from vlmrl.data.table_files import SPLIT_NAMES
from vlmrl.data.table_pieces import RowFiles, read_piece
from vlmrl.data.table_values import IMAGE_SUFFIXES, image_bytes, match_columns, read_image
from vlmrl.errors import DataError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.text_parsing import normalise_name
from vlmrl.tasks.dataset_assembly import Limits, is_few, leave_out
from vlmrl.tasks.pairs.draw import Pair
from vlmrl.tasks.taxonrl.domains import INDIVIDUAL, LAYOUTS, UNKNOWN, Domain, classes_of
from vlmrl.tasks.taxonrl.published_rows import complete_truth
from vlmrl.types import LeftOut
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
        read: reads an image file by its place.
        split_of: origin -> split, if the source has splits.
        pairs: split -> pairs, if the source has pairs; None = pairs are to be drawn.
        lost: pairs of the source that are wrong and were left out.
        spare: correct pairs that were left out because they repeat another pair or have images of two splits.
        source: entry of dataset.json about the source.
    """

    images: list[LabelledImage]
    read: ReadFile
    dropped: list[LeftOut]
    split_of: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, list[Pair]] | None = None
    lost: list[LeftOut] = field(default_factory=list)
    spare: list[LeftOut] = field(default_factory=list)
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


def pair_truth(domain: Domain, pair: Pair) -> dict[str, Any]:
    """Return the truth of a pair of specimens, with all keys of the domain's schema."""
    truth: dict[str, Any] = {"same": pair.distance == 0, "distance": pair.distance if domain.ranks else None}
    for name in domain.field_names:
        if name in domain.ranks:
            level = domain.ranks.index(name)
            truth[name] = [pair.first.labels[level], pair.second.labels[level]]
        else:
            truth[name] = [pair.first.facts.get(name), pair.second.facts.get(name)]
    return complete_truth(domain, truth)


def read_folders(domain: Domain, source: Path, levels: Sequence[str] | None, work: Path, limits: Limits) -> Specimens:
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
            dropped.append(LeftOut(image.origin, error.message))
    images = keep_one_parent(domain, images, dropped)
    return Specimens(images, read.collection.read, dropped, source={**read.about, "images": len(images)})


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


def _read_below(root: Path, path: str) -> bytes:
    """Return an image file. Its path must stay inside the root folder."""
    return image_bytes(read_image(path, root, ""), "")


def is_image_table(domain: Domain, columns: Sequence[str]) -> bool:
    """Return whether a table has one image and its names per row, and not a pair of images."""
    roles = _columns(domain, columns)
    return "image" in roles and all(name in roles for name in classes_of(domain))


def read_image_table(domain: Domain, table: RowFiles, work: Path, limits: Limits) -> Specimens:
    """Read images from a table of paths and names, such as Danish Fungi's: image_path, order, family, genus, species.

    A column `split` determines the split of each image. If there are several tables (train, test), the name of each
    table is the split of its images.
    """
    columns = _columns(domain, table.columns)
    labels = [name for name in columns if name not in ("image", "split")]
    rows: dict[str, dict[str, str]] = {}
    split_of: dict[str, str] = {}
    dropped: list[LeftOut] = []
    for piece in table.pieces:
        for number, row in enumerate(read_piece(piece, list(columns.values()))):
            path = row.get(columns["image"])
            is_embedded = isinstance(path, bytes) or (isinstance(path, Mapping) and path.get("bytes") is not None)
            path = path.get("path") if isinstance(path, Mapping) else path
            try:
                if is_embedded:
                    raise DataError("the image is in the table itself, which must give its path instead")
                if not isinstance(path, str) or not path:
                    raise DataError("no path")
                if path in rows:
                    raise DataError(f"the path {path} is in the table twice")
                split = _split(row.get(columns["split"])) if "split" in columns else piece.split
                rows[path] = _names(domain, {name: row.get(columns[name]) for name in labels})
            except DataError as error:
                dropped.append(LeftOut(table.where(piece, number), error.message))
                continue
            if "split" in columns or len(table.splits) > 1:
                split_of[path] = split
    if table.root is None:
        message = "the folder of the table's paths is not known"
        raise DataError(message, hint="name it with --images-root", where=table.label)
    read, images = partial(_read_below, table.root), []
    for path, facts in scan_files(read, list(rows), work, workers=limits.workers, progress=limits.progress):
        try:
            if isinstance(facts, str):
                raise DataError(facts)
            images.append(specimen(domain, LabelledImage(facts.media, (), path, facts), rows[path]))
        except DataError as error:
            dropped.append(LeftOut(encodable(path), error.message))
    refuse_twins(images, classes_of(domain))
    images = keep_one_parent(domain, images, dropped)
    source_entry = {"name": Path(table.label).name, "images": len(images), "columns": sorted(columns.values())}
    return Specimens(images, read, dropped, split_of, source=source_entry)


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


def keep_one_parent(domain: Domain, images: Sequence[LabelledImage], dropped: list[LeftOut]) -> list[LabelledImage]:
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
            dropped.append(LeftOut(image.origin, reason))
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


def _refuse_share(what: str, bad: Sequence[LeftOut], sound: int, max_bad: float, name: Any) -> None:
    total = sound + len(bad)
    if sound and is_few(len(bad), total, max_bad):
        return
    lines = "".join(f"\n  {drop.origin}: {drop.reason}" for drop in bad[:5])
    finding = f"{len(bad):,} of {total:,} {what} cannot be used, more than --max-bad {max_bad:g}"
    hint = f"fix them, or {leave_out(len(bad), total)}"
    if not sound:
        finding = f"none of the {total:,} {what} can be used"
        hint = f"check that {name} is the right source, and that its folders or columns have the expected names"
    raise DataError(f"{finding}; nothing was written:{lines}", hint=hint)


LISTS = {"pairsDevTrain.txt": "train", "pairsDevTest.txt": "test"}
"""File of LFW's view 1 -> split. `pairs.txt` is its view 2: ten folds that share no person."""
FOLDS = {8: "validation", 9: "test"}
"""Number of a fold of pairs.txt, from 0 -> split; the other folds are train."""
CPLFW_LINE = re.compile(r"(\S+\.(?:jpe?g|png))\s+([0-9]+)", re.IGNORECASE)
PERSON = re.compile(r"_[0-9]+\.[a-z]+$", re.IGNORECASE)
INDEX = re.compile(r"[0-9]{1,9}")
CUT_SHARE = 0.1


@dataclass(frozen=True)
class FacePair:
    """Two faces: their paths, whether they show one person, their fold (None = the list has none), and their line."""

    first: str
    second: str
    same: bool
    fold: int | None
    where: str = field(default="", compare=False)


def find_pair_lists(source: Path) -> dict[str, Path]:
    """Return split -> file with its pairs; the key "" = one list for all splits. Empty = the source has no list."""
    if source.is_file():
        return {"": source} if source.suffix == ".txt" else {}
    if not source.is_dir():
        return {}
    view_2 = sorted(path for path in source.glob("pairs*.txt") if path.name not in LISTS)
    if view_2:
        return {"": view_2[0]}
    return {split: source / name for name, split in LISTS.items() if (source / name).is_file()}


def parse_pairs(text: str, where: str) -> list[FacePair]:
    """Return the pairs of a list in LFW's or CPLFW's form.

    LFW: the first line has the number of folds and the number of pairs per fold. A line `name i j` is a pair of the
    same person, `name i name j` a pair of two persons. CPLFW: two lines `file.jpg label` per pair, label 0 = different.

    Raises: DataError with a line of another form, or when the number of pairs differs from that of the first line.
    Example: "10 300" first; "Ann_Li 1 4" -> Ann_Li/Ann_Li_0001.jpg, Ann_Li/Ann_Li_0004.jpg, the same, fold 0.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise DataError("the list of pairs is empty", where=where)
    if CPLFW_LINE.fullmatch(lines[0][1]):
        return _cplfw(lines, where)
    per_fold = 0
    if head := re.fullmatch(r"([0-9]{1,9})(?:\s+([0-9]{1,9}))?", lines[0][1]):
        lines.pop(0)
        per_fold = 2 * int(head[2] or 0)
        promised = 2 * int(head[1]) * int(head[2] or 1)
        if len(lines) != promised:
            message = f"the first line, {head[0]}, announces {promised:,} pairs, but there are {len(lines):,}"
            raise DataError(message, where=f"{where}:1", hint="get the whole list, or remove the first line")
    pairs = []
    for position, (number, line) in enumerate(lines):
        words = line.split("\t") if "\t" in line else line.split()
        if len(words) not in (3, 4) or not all(INDEX.fullmatch(word) for word in (words[1], words[-1])):
            hint = "`name 1 4` or `name 1 other 2`"
            raise DataError(f"{quoted(line)} is not a pair", where=f"{where}:{number}", hint=hint)
        names = (words[0], words[0] if len(words) == 3 else words[2])
        first, second = (
            f"{name}/{name}_{int(index):04d}.jpg" for name, index in zip(names, (words[1], words[-1]), strict=True)
        )
        fold = position // per_fold if per_fold else None
        pairs.append(FacePair(first, second, names[0] == names[1], fold, f"{where}:{number}"))
    return pairs


def _cplfw(lines: list[tuple[int, str]], where: str) -> list[FacePair]:
    labelled = []
    for number, line in lines:
        match = CPLFW_LINE.fullmatch(line)
        if match is None:
            raise DataError(f"{quoted(line)} is not `file.jpg label`", where=f"{where}:{number}")
        labelled.append((match[1], match[2] != "0"))
    if len(labelled) % 2:
        raise DataError(f"{len(labelled)} lines, but a pair has two", where=where)
    pairs = []
    for position in range(0, len(labelled), 2):
        (first, same), (second, again) = labelled[position : position + 2]
        if same != again:
            raise DataError("the two lines of a pair have different labels", where=f"{where}:{lines[position][0]}")
        pairs.append(FacePair(first, second, same, None, f"{where}:{lines[position][0]}"))
    return pairs


def read_face_pairs(lists: Mapping[str, Path], work: Path, limits: Limits) -> Specimens:
    """Read the pairs of the lists, and examine their images, which are in the list's folder or in a folder inside it.

    Several lists are one split each. Of a single list with ten folds, the last two folds are validation and test, and
    the others train. Otherwise the persons are distributed over the splits.
    """
    pairs: dict[str, list[FacePair]] = {}
    for split, path in lists.items():
        try:
            pairs[split] = parse_pairs(path.read_text(encoding="utf-8-sig"), path.name)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the list of pairs cannot be read: {error}", where=str(path)) from error
    folder = next(iter(lists.values())).parent
    named = [path for of_list in pairs.values() for pair in of_list for path in (pair.first, pair.second)]
    read, paths = partial(_read_below, image_root(folder, named)), sorted(set(named))
    images: dict[str, LabelledImage] = {}
    dropped: list[LeftOut] = []
    for path, seen in scan_files(read, paths, work, workers=limits.workers, progress=limits.progress):
        if isinstance(seen, str):
            dropped.append(LeftOut(path, seen))
        else:
            images[path] = LabelledImage(seen.media, (person_of(path),), path, seen)
    sound, lost, repeated = _sound_pairs(pairs, images)
    splits, between = _with_splits(sound)
    pairs_of = {
        split: [Pair(images[pair.first], images[pair.second], 0 if pair.same else 1) for pair in of_list]
        for split, of_list in splits.items()
    }
    about = {"name": folder.name, "lists": [path.name for path in lists.values()], "images": len(images)}
    return Specimens(
        list(images.values()), read, dropped, pairs=pairs_of, lost=lost, spare=[*repeated, *between], source=about
    )


def _sound_pairs(
    pairs: Mapping[str, list[FacePair]], images: Mapping[str, LabelledImage]
) -> tuple[dict[str, list[FacePair]], list[LeftOut], list[LeftOut]]:
    """Return the sound pairs of each list, each once; then the wrong pairs and the repeated pairs, with reasons.

    A pair is sound if both images exist and are sound, and no list gives it another label.
    """
    content = {path: image.media.sha256 for path, image in images.items()}
    keys = {
        pair: tuple(sorted((content[pair.first], content[pair.second])))
        for of_list in pairs.values()
        for pair in of_list
        if pair.first in content and pair.second in content
    }
    labels: dict[tuple[str, ...], set[bool]] = {}
    for pair, key in keys.items():
        labels.setdefault(key, {True} if key[0] == key[1] else set()).add(pair.same)
    sound: dict[str, list[FacePair]] = {}
    lost: list[LeftOut] = []
    spare: list[LeftOut] = []
    for split, of_list in pairs.items():
        kept: dict[tuple[str, ...], FacePair] = {}
        for pair in of_list:
            if pair not in keys:
                missing = pair.first if pair.first not in content else pair.second
                reason = f"{missing} cannot be used"
            elif len(labels[keys[pair]]) > 1:
                reason = "one image twice, or the same two images elsewhere, called the same and different"
            elif keys[pair] in kept:
                reason = f"the same two images as {kept[keys[pair]].where}"
                spare.append(LeftOut(pair.where, reason))
                continue
            else:
                kept[keys[pair]] = pair
                continue
            lost.append(LeftOut(pair.where, reason))
        sound[split] = list(kept.values())
    return sound, lost, spare


def person_of(path: str) -> str:
    """Return the person's name from an image's path: `Ann_Li/Ann_Li_0004.jpg` and `Ann_Li_4.jpg` -> Ann_Li."""
    return PERSON.sub("", path.rpartition("/")[2])


def image_root(folder: Path, paths: list[str]) -> Path:
    """Return the folder, or a folder inside it, whichever has most of the first images.

    Raises: DataError when none of these folders has any of them.
    """
    some = paths[:200]
    places = [folder, *sorted(place for place in folder.iterdir() if place.is_dir() and not place.is_symlink())]
    best = max(places, key=lambda place: sum((place / path).is_file() for path in some))
    if not any((best / path).is_file() for path in some):
        raise DataError(f"none of the images is in {folder} or a folder in it, such as {some[0]}")
    return best


def _with_splits(pairs: Mapping[str, list[FacePair]]) -> tuple[dict[str, list[FacePair]], list[LeftOut]]:
    """Return the pairs of each split, and the pairs that fit no split, with reasons."""
    if "" not in pairs:
        return dict(pairs), []
    every = pairs[""]
    if len({pair.fold for pair in every}) == 10:
        out: dict[str, list[FacePair]] = {"train": [], "validation": [], "test": []}
        for pair in every:
            out[FOLDS.get(pair.fold or 0, "train")].append(pair)
        return out, []
    out, rest, between = {}, every, list[LeftOut]()
    for split in ("test", "validation"):
        units = [RowUnits((person_of(pair.first), person_of(pair.second)), pair.same) for pair in rest]
        cut = cut_rows(units, int(CUT_SHARE * len(every)), seed=0)
        gone = {*cut.taken, *cut.lost}
        out[split] = [rest[i] for i in cut.taken]
        reason = f"one of its persons is in {split}, the other is not"
        between += [LeftOut(rest[i].where, reason) for i in sorted(cut.lost)]
        rest = [pair for i, pair in enumerate(rest) if i not in gone]
    by_split = {"train": rest, "validation": out["validation"], "test": out["test"]}
    return {split: members for split, members in by_split.items() if members}, between
