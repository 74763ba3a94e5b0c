"""The data doctor: checks of a dataset before training, each with numbers and a level.

It checks lengths (would rows be cut or dropped?), copies (is a test image also a training image, unchanged or
resized?), names (do individuals of the test split occur in training?) and labels (what does the answer "always the
same class" earn?). It needs only facts about rows and images, which a visit collects from a prepared folder or a table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

from vlmrl.data.chat_template import typed_in
from vlmrl.data.dataset import Dataset, content_hash
from vlmrl.data.image_scan import Examined, examined, find_near_copies, look_at
from vlmrl.data.measurements import NOTE, estimate_image_tokens, histogram, measure_images
from vlmrl.data.parallel_parts import Progress
from vlmrl.errors import DataError
from vlmrl.types import LONG_SIDES, Media, Row
from vlmrl.untrusted import number_of

CheckLevel = Literal["ok", "look", "bad"]
TOKEN_LIMIT = 2048
"""Default limit of a prompt in tokens: rows above it are counted. EasyR1 drops such rows silently."""
EVEN, SKEWED = 0.6, 0.8
"""Limits for the share of the most frequent label: up to EVEN, labels are balanced; above SKEWED, badly unbalanced."""
SHOWN = 20
"""Maximum number of copies, unusable rows or broken images that the report lists."""
MAX_SPLITS = 62
"""Largest number of splits: a set of splits is stored in the bits of one integer."""


class RowFacts(NamedTuple):
    """Facts of a dataset row that the doctor uses.

    Args:
        images: positions in `DatasetFacts.images`.
        label: its class as text; None = it has none. Too many different ones are no classes, and not counted.
        distance: distance of a pair, 0 = the same class.
        text_tokens: number of tokens of its prompt without images.
        groups: names of the individuals or things in its images.
    """

    images: tuple[int, ...]
    label: str | None
    distance: int | None
    text_tokens: int
    groups: tuple[str, ...]
    name: str


@dataclass
class DatasetFacts:
    """Facts of a dataset that the doctor uses.

    Args:
        images: facts of the images, each content once.
        group: kind of the names in `RowFacts.groups`, such as "individual"; "" = not known.
        notes: further checks by the program that made the dataset: name of the check -> (level, finding).
    """

    images: Sequence[Examined]
    rows: Mapping[str, Sequence[RowFacts]]
    group: str = ""
    notes: Mapping[str, tuple[CheckLevel, str]] = field(default_factory=dict)


def examine_dataset(facts: DatasetFacts, *, max_prompt_tokens: int | None = None) -> dict[str, Any]:
    """Return the doctor's report, a JSON value.

    Args:
        max_prompt_tokens: limit of the prompt in tokens, images included; None = the user gave no limit: rows over
            2,048 are counted, and the finding says how to set one.
    Returns: {"checks": [{"check", "verdict": "ok" | "look" | "bad", "finding"}], and the numbers behind them}.
    Raises: DataError for more than 62 splits.
    """
    if len(facts.rows) > MAX_SPLITS:
        raise DataError(
            f"the dataset has {len(facts.rows)} splits; the doctor compares at most {MAX_SPLITS}",
            hint="join some of them",
        )
    tokens = {split: _tokens(facts.images, rows) for split, rows in facts.rows.items()}
    limit = max_prompt_tokens or TOKEN_LIMIT
    masks = _splits_of_images(facts)
    if len({row.label for rows in facts.rows.values() for row in rows}) > MAX_LABELS:
        unlabelled = {split: [row._replace(label=None) for row in rows] for split, rows in facts.rows.items()}
        facts = replace(facts, rows=unlabelled)
    report: dict[str, Any] = {
        **measure_images([image.media for image in facts.images]),
        "image_tokens": {split: histogram([image for image, _ in counts]) for split, counts in tokens.items()},
        "prompt_tokens": {
            split: histogram([image + text for image, text in counts]) for split, counts in tokens.items()
        },
        "max_prompt_tokens": limit,
        "rows_over_limit": {split: sum(a + b > limit for a, b in counts) for split, counts in tokens.items()},
        "labels": {split: _labels(rows) for split, rows in facts.rows.items()},
        "exact_copies": _exact_copies(facts, masks),
        "near_copies": _near_copies(facts, masks),
        "repeated_pairs": _repeated_pairs(facts),
        "groups": _groups(facts),
        "long_images": _long_images(facts),
        "remarks": dict(Counter(remark for image in facts.images for remark in image.remarks).most_common()),
        "note": NOTE,
    }
    checks = [
        _check_lengths(report),
        _check_limit(report, by_user=max_prompt_tokens is not None),
        _check_labels(report),
        *_check_distances(report),
        *_check_images(facts),
        *([_check_exact(report), _check_near(report)] if facts.images else []),
        *_check_repeats(report),
        *_check_groups(report, facts.group),
        *_check_shapes(report),
        *_check_remarks(report),
        *({"check": name, "verdict": level, "finding": finding} for name, (level, finding) in facts.notes.items()),
    ]
    return {"checks": checks, **report}


def baseline(shares: Mapping[str, int]) -> dict[str, Any]:
    """Return the accuracy of a blind baseline that always answers the most frequent label.

    With at most two labels, return also the Brier score of a baseline that always states the frequency p of a label:
    p (1 - p); 0 is best.

    Example: 60 same, 40 different -> accuracy 0.6, Brier 0.24.
    """
    total = sum(shares.values())
    label, most = max(shares.items(), key=lambda item: (item[1], item[0]))
    earned: dict[str, Any] = {"label": label, "accuracy": round(most / total, 4)}
    if len(shares) <= 2:
        earned["brier"] = round(most / total * (1 - most / total), 4)
    return earned


def _tokens(images: Sequence[Examined], rows: Sequence[RowFacts]) -> list[tuple[int, int]]:
    """Return (image tokens, text tokens) of each row."""
    tokens_by_image = [estimate_image_tokens(image.media) for image in images]
    return [(sum(tokens_by_image[i] for i in row.images), row.text_tokens) for row in rows]


def _labels(rows: Sequence[RowFacts]) -> dict[str, Any] | None:
    counts = Counter(row.label for row in rows if row.label is not None)
    if not counts:
        return None
    distances = Counter(row.distance for row in rows if row.distance is not None)
    out: dict[str, Any] = {"counts": dict(sorted(counts.items())), "baseline": baseline(counts)}
    if distances:
        out["distances"] = {str(distance): distances[distance] for distance in sorted(distances)}
        out["distance_unknown"] = len(rows) - sum(distances.values())
    return out


def _splits_of_images(facts: DatasetFacts) -> list[int]:
    """Return a bit mask for each image: bit i is set if the image is in the i-th split."""
    masks = [0] * len(facts.images)
    for bit, rows in enumerate(facts.rows.values()):
        for row in rows:
            for index in row.images:
                masks[index] |= 1 << bit
    return masks


def _named(splits: Sequence[str], mask: int) -> list[str]:
    """Return the names of the splits in a mask."""
    return [split for bit, split in enumerate(splits) if mask >> bit & 1]


def _exact_copies(facts: DatasetFacts, masks: Sequence[int]) -> dict[str, Any]:
    splits = list(facts.rows)
    shared: Counter[str] = Counter()
    for mask, count in Counter(masks).items():
        shared.update({f"{a}+{b}": count for a, b in combinations(_named(splits, mask), 2)})
    examples = (
        {"sha256": image.media.sha256, "splits": _named(splits, mask)}
        for image, mask in zip(facts.images, masks, strict=True)
        if mask.bit_count() > 1
    )
    return {"between": dict(shared), "examples": list(islice(examples, SHOWN))}


def _near_copies(facts: DatasetFacts, masks: Sequence[int]) -> dict[str, Any]:
    """Count the images that look like another image.

    `between["train+test"]` counts the test images that are not in train, but look like an image of train. `within`
    counts the images that look like another image of the same split.
    """
    splits = list(facts.rows)
    likeness = find_near_copies([image.look for image in facts.images], masks, SHOWN)
    counts = Counter(zip(masks, likeness.near, strict=True))
    between = {
        f"{a}+{b}": sum(
            count
            for (own, near), count in counts.items()
            if own >> later & 1 and not own >> earlier & 1 and near >> earlier & 1
        )
        for (earlier, a), (later, b) in combinations(enumerate(splits), 2)
    }
    return {
        "between": {pair: count for pair, count in between.items() if count},
        "within": sum(count for (own, near), count in counts.items() if own & near),
        "flat_images": likeness.skipped,
        "examples": [
            {
                "images": [facts.images[k].media.sha256 for k in pair],
                "splits": [_named(splits, masks[k]) for k in pair],
            }
            for pair in likeness.examples
        ],
    }


def _repeated_pairs(facts: DatasetFacts) -> dict[str, Any]:
    """Count the rows with the same images, in any order, and the cases in which their labels contradict each other."""
    rows_by_images: dict[tuple[int, ...], list[tuple[str, RowFacts]]] = defaultdict(list)
    for split, rows in facts.rows.items():
        for row in rows:
            if len(row.images) > 1:
                rows_by_images[tuple(sorted(row.images))].append((split, row))
    groups = [group for group in rows_by_images.values() if len(group) > 1]
    contradicting = [group for group in groups if len({row.label for _, row in group}) > 1]
    return {
        "rows": sum(len(group) for group in groups),
        "across_splits": sum(len({split for split, _ in group}) > 1 for group in groups),
        "contradicting": len(contradicting),
        "examples": [[row.name for _, row in group] for group in (contradicting or groups)[:SHOWN]],
    }


def _groups(facts: DatasetFacts) -> dict[str, Any] | None:
    if not facts.group:
        return None
    names = {split: {name for row in rows for name in row.groups} for split, rows in facts.rows.items()}
    train = names.get("train", set())
    shared = {split: len(members & train) for split, members in names.items() if split != "train"}
    return {
        "what": facts.group,
        "counts": {split: len(members) for split, members in names.items()},
        "shared_with_train": shared,
    }


def _check(name: str, level: CheckLevel, finding: str) -> dict[str, str]:
    return {"check": name, "verdict": level, "finding": finding}


def _check_lengths(report: Mapping[str, Any]) -> dict[str, str]:
    parts = []
    for split, counts in report["prompt_tokens"].items():
        images = report["image_tokens"][split]
        if counts["bins"]:
            parts.append(f"{split} {counts['min']}-{counts['max']} ({images['min']}-{images['max']} of images)")
    return _check("prompt tokens", "ok", "; ".join(parts) or "no rows")


def _check_limit(report: Mapping[str, Any], *, by_user: bool) -> dict[str, str]:
    over, limit = report["rows_over_limit"], report["max_prompt_tokens"]
    total = sum(over.values())
    if not total:
        return _check("rows over the limit", "ok", f"none over {limit:,} tokens")
    counts = ", ".join(f"{split} {count}" for split, count in over.items() if count)
    advice = "" if by_user else "; raise rollout.max_prompt_tokens, or make the dataset with --max-prompt-tokens"
    return _check("rows over the limit", "look", f"{total:,} over {limit:,} tokens ({counts}){advice}")


def _check_labels(report: Mapping[str, Any]) -> dict[str, str]:
    labels = {split: stats for split, stats in report["labels"].items() if stats}
    if not labels:
        return _check("majority class", "ok", "none to count: no truth has an `answer`, or answers have many values")
    worst = max(stats["baseline"]["accuracy"] for stats in labels.values())
    parts = []
    for split, stats in labels.items():
        base = stats["baseline"]
        brier = f", Brier {base['brier']:.3f}" if "brier" in base else ""
        parts.append(f"{split}: always `{base['label']}` is right in {base['accuracy']:.1%}{brier}")
    level: CheckLevel = "ok" if worst <= EVEN else "look" if worst <= SKEWED else "bad"
    return _check("majority class", level, "; ".join(parts))


def _check_distances(report: Mapping[str, Any]) -> list[dict[str, str]]:
    parts, level = [], "ok"
    for split, stats in report["labels"].items():
        if stats and "distances" in stats:
            different = {d: count for d, count in stats["distances"].items() if d != "0"}
            shown = ", ".join(f"{d}: {count:,}" for d, count in stats["distances"].items())
            unknown = f", unknown: {stats['distance_unknown']:,}" if stats["distance_unknown"] else ""
            parts.append(f"{split} {shown}{unknown}")
            if different and max(different.values()) > SKEWED * sum(different.values()) and len(different) > 1:
                level = "look"
    return [_check("pairs by distance", level, "; ".join(parts))] if parts else []  # type: ignore[arg-type]


def _check_images(facts: DatasetFacts) -> list[dict[str, str]]:
    """Return a check that says how many rows have no image; none if all rows have one."""
    rows = [row for members in facts.rows.values() for row in members]
    without = sum(not row.images for row in rows)
    if not without:
        return []
    if without == len(rows):
        return [_check("images", "ok", "no row has an image: none was looked at")]
    return [_check("images", "look", f"{without:,} of {len(rows):,} rows have no image")]


def _check_exact(report: Mapping[str, Any]) -> dict[str, str]:
    between = report["exact_copies"]["between"]
    if not between:
        return _check("same image in two splits", "ok", "none")
    finding = "; ".join(f"{number_of(n, 'image')} in {pair.replace('+', ' and ')}" for pair, n in between.items())
    return _check("same image in two splits", "bad", finding)


def _check_near(report: Mapping[str, Any]) -> dict[str, str]:
    copies = report["near_copies"]
    findings = []
    for pair, count in copies["between"].items():
        train, _, test = pair.partition("+")
        findings.append(f"{number_of(count, 'image')} of {test} look{'s' * (count == 1)} like one of {train}")
    if copies["within"]:
        findings.append(f"{copies['within']:,} look like another image of their split")
    if copies["flat_images"]:
        findings.append(f"{number_of(copies['flat_images'], 'flat image')} not compared")
    return _check("near copies (by look)", "look" if copies["between"] else "ok", "; ".join(findings) or "none")


def _check_repeats(report: Mapping[str, Any]) -> list[dict[str, str]]:
    repeats = report["repeated_pairs"]
    if not repeats["rows"]:
        return []
    finding = f"{repeats['rows']:,} rows repeat the images of another row"
    if repeats["across_splits"]:
        finding += f", {repeats['across_splits']:,} across splits"
    if repeats["contradicting"]:
        cases, names = number_of(repeats["contradicting"], "case"), ", ".join(repeats["examples"][0][:2])
        finding += f"; in {cases} their labels contradict, such as {names}"
    return [
        _check("repeated pairs", "bad" if repeats["contradicting"] or repeats["across_splits"] else "look", finding)
    ]


def _check_groups(report: Mapping[str, Any], group: str) -> list[dict[str, str]]:
    groups = report["groups"]
    if not groups or not groups["shared_with_train"]:
        return []
    parts, shared = [], 0
    for split, count in groups["shared_with_train"].items():
        parts.append(f"{split}: {count:,} of {groups['counts'][split]:,} are in train")
        shared += count
    bad = shared and group == "individual"
    return [_check(f"{group} overlap", "bad" if bad else "look" if shared else "ok", "; ".join(parts))]


def _long_images(facts: DatasetFacts) -> list[dict[str, Any]]:
    """Return the images whose longer side is over `LONG_SIDES` times the shorter, each with a row that contains it."""
    media = [image.media for image in facts.images]
    long = {i for i, one in enumerate(media) if max(one.width, one.height) > LONG_SIDES * min(one.width, one.height)}
    shown: dict[int, str] = {}
    for row in (row for rows in facts.rows.values() for row in rows) if long else ():
        for i in long.intersection(row.images):
            shown.setdefault(i, row.name)
    return [
        {"sha256": media[i].sha256, "width": media[i].width, "height": media[i].height, "row": shown.get(i, "")}
        for i in sorted(long)
    ]


def _check_shapes(report: Mapping[str, Any]) -> list[dict[str, str]]:
    images = report["long_images"]
    if not images:
        return []
    first = images[0]
    finding = (
        f"{len(images):,} with one side over {LONG_SIDES} times the other, which the processors of Qwen-VL and GLM-V "
        f"refuse, such as {first['width']} x {first['height']} pixels in {first['row'] or first['sha256'][:16]}"
    )
    return [_check("very long images", "bad", finding)]


def _check_remarks(report: Mapping[str, Any]) -> list[dict[str, str]]:
    finding = ", ".join(f"{remark}: {count:,}" for remark, count in report["remarks"].items())
    return [_check("unusual images, handled", "ok", finding)] if finding else []


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
    group, repeats = "", list[tuple[str, str]]()
    first_places: dict[bytes, str] = {}
    unusable: list[str] = []
    for split, count in dataset.splits.items():
        members = dataset.rows(split)
        rows[split] = []
        for index in range(count):
            try:
                row = members[index]
                row_labels, length, tokens = labels_of(row), text_tokens(row), sum(map(typed_in, texts(row)), Counter())
            except DataError as error:
                unusable.append(f"{error.where or f'{split} row {index}'}: {error.message}")
                continue
            first = first_places.setdefault(content_hash(row.media, row.columns, row.truth), row.place)
            repeats += [(row.place, first)] * (first != row.place)
            for one in row.media:
                if image_numbers.setdefault(one.sha256, len(media)) == len(media):
                    media.append(one)
            images = tuple(image_numbers[one.sha256] for one in row.media)
            name = row.origin or f"{split} row {index}"
            rows[split].append(RowFacts(images, row_labels.label, row_labels.distance, length, row_labels.names, name))
            group = group or row_labels.group
            if tokens:
                rows_with_tokens.append((row.place, tokens))
    results, broken = _examine_images(dataset, media, workers, progress)
    notes: dict[str, tuple[CheckLevel, str]] = {"columns": ("look", "; ".join(dataset.notes))} if dataset.notes else {}
    if repeats:
        finding = f"{number_of(len(repeats), 'row')} equal to an earlier row, such as {repeats[0][0]}: {repeats[0][1]}"
        notes["repeated rows"] = ("look", finding)
    if rows_with_tokens:
        notes["control tokens in text"] = ("look", _note_on_control_tokens(rows_with_tokens))
    both = (("rows that cannot be used", unusable), ("broken images", broken))
    notes |= {name: ("bad", _listed(bad)) for name, bad in both if bad}
    report = examine_dataset(DatasetFacts(results, rows, group, notes), max_prompt_tokens=max_prompt_tokens)
    present = {"labels", *(check["check"] for check in report["checks"])}  # "labels": an earlier name
    return {**report, "checks": [*report["checks"], *(c for c in _kept_checks(dataset) if c["check"] not in present)]}


def _listed(bad: Sequence[str]) -> str:
    """Return the number of faults, and the first ones."""
    more = f"; and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
    return f"{len(bad):,}: {'; '.join(bad[:SHOWN])}{more}"


def _kept_checks(dataset: Dataset) -> list[dict[str, str]]:
    """Return the checks in dataset.json. Some need what is no longer there: the sources, or another dataset."""
    report = dataset.info.get("doctor")
    checks = report.get("checks") if isinstance(report, Mapping) else None
    return [
        {column: str(check.get(column)) for column in ("check", "verdict", "finding")}
        for check in (checks if isinstance(checks, list) else [])
        if isinstance(check, Mapping) and check.get("verdict") in get_args(CheckLevel)
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
