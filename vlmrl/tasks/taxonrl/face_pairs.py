"""Reader of face pairs from the text files of LFW and CPLFW."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.data.image_scan import scan_files
from vlmrl.data.splits import LabelledImage
from vlmrl.data.validation_cut import RowUnits, cut_rows
from vlmrl.errors import DataError
from vlmrl.redaction.redact import quoted
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.pairs.draw import Pair
from vlmrl.tasks.taxonrl.domain_images import RootedFiles, Specimens

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
            raise DataError(
                f"{quoted(line)} is no pair", where=f"{where}:{number}", hint="`name 1 4` or `name 1 other 2`"
            )
        names = (words[0], words[0] if len(words) == 3 else words[2])
        first, second = (
            f"{name}/{name}_{int(index):04d}.jpg" for name, index in zip(names, (words[1], words[-1]), strict=True)
        )
        fold = position // per_fold if per_fold else None
        pairs.append(FacePair(first, second, names[0] == names[1], fold, f"{where}:{number}"))
    return pairs


def _cplfw(lines: list[tuple[int, str]], where: str) -> list[FacePair]:
    cells = []
    for number, line in lines:
        match = CPLFW_LINE.fullmatch(line)
        if match is None:
            raise DataError(f"{quoted(line)} is not `file.jpg label`", where=f"{where}:{number}")
        cells.append((match[1], match[2] != "0"))
    if len(cells) % 2:
        raise DataError(f"{len(cells)} lines, but a pair has two", where=where)
    pairs = []
    for position in range(0, len(cells), 2):
        (first, same), (second, again) = cells[position : position + 2]
        if same != again:
            raise DataError("the two lines of a pair have different labels", where=f"{where}:{lines[position][0]}")
        pairs.append(FacePair(first, second, same, None, f"{where}:{lines[position][0]}"))
    return pairs


def read_face_pairs(lists: Mapping[str, Path], work: Path | None, limits: Limits) -> Specimens:
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
    root = image_root(
        folder, [path for of_list in pairs.values() for pair in of_list for path in (pair.first, pair.second)]
    )
    files = RootedFiles(root)
    paths = sorted({path for of_list in pairs.values() for pair in of_list for path in (pair.first, pair.second)})
    images: dict[str, LabelledImage] = {}
    dropped: list[dict[str, Any]] = []
    for path, seen in scan_files(files, paths, work, workers=limits.workers, progress=limits.progress):
        if isinstance(seen, str):
            dropped.append({"origin": path, "reason": seen})
        else:
            images[path] = LabelledImage(seen.media, (person_of(path),), path, seen)
    sound, lost, repeated = _sound_pairs(pairs, images)
    splits, between = _with_splits(sound)
    spare = [*repeated, *between]
    pairs_of = {
        split: [Pair(images[pair.first], images[pair.second], 0 if pair.same else 1) for pair in of_list]
        for split, of_list in splits.items()
    }
    about = {"name": folder.name, "lists": [path.name for path in lists.values()], "images": len(images)}
    return Specimens(list(images.values()), files, dropped, pairs=pairs_of, lost=lost, spare=spare, source=about)


def _sound_pairs(
    pairs: Mapping[str, list[FacePair]], images: Mapping[str, LabelledImage]
) -> tuple[dict[str, list[FacePair]], list[dict[str, Any]], list[dict[str, Any]]]:
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
    lost: list[dict[str, Any]] = []
    spare: list[dict[str, Any]] = []
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
                spare.append({"origin": pair.where, "reason": reason})
                continue
            else:
                kept[keys[pair]] = pair
                continue
            lost.append({"origin": pair.where, "reason": reason})
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


def _with_splits(pairs: Mapping[str, list[FacePair]]) -> tuple[dict[str, list[FacePair]], list[dict[str, Any]]]:
    """Return the pairs of each split, and the pairs that fit no split, with reasons."""
    if "" not in pairs:
        return dict(pairs), []
    every = pairs[""]
    if len({pair.fold for pair in every}) == 10:
        out: dict[str, list[FacePair]] = {"train": [], "validation": [], "test": []}
        for pair in every:
            out[FOLDS.get(pair.fold or 0, "train")].append(pair)
        return out, []
    out, rest, between = {}, every, list[dict[str, Any]]()
    for split in ("test", "validation"):
        units = [RowUnits((person_of(pair.first), person_of(pair.second)), pair.same) for pair in rest]
        cut = cut_rows(units, int(CUT_SHARE * len(every)), seed=0)
        gone = {*cut.taken, *cut.lost}
        out[split] = [rest[i] for i in cut.taken]
        reason = f"one of its persons is in {split}, the other is not"
        between += [{"origin": rest[i].where, "reason": reason} for i in sorted(cut.lost)]
        rest = [pair for i, pair in enumerate(rest) if i not in gone]
    by_split = {"train": rest, "validation": out["validation"], "test": out["test"]}
    return {split: members for split, members in by_split.items() if members}, between
