"""Blind probe: how much of an accuracy needs the images, from a normal evaluation and one with changed images.

All differences are normal minus changed, row by row. Rows that the change leaves as they are do not count.

The share that is lost is (normal - changed) / normal on the same rows. Its 95% interval comes from three intervals that
have good limits near their bounds: those of the two means and of their paired difference. Their distances from the
estimates take the place of standard errors in Fieller's equation (the "method of variance estimates recovery"). The
equation is solved for difference / normal and for 1 - changed / normal. These are the same number, but the first
equation knows no uncertainty where no row differs, and the second none where the changed mean is 0. So the wider of
both limits counts. Sources: Fieller 1954; Donner and Zou 2012 and Tang et al. 2013 for ratios of paired shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vlmrl.errors import StoreError
from vlmrl.evaluate.estimates import (
    EMPTY,
    Clusters,
    Floats,
    Interval,
    Range,
    Units,
    difference_interval,
    excludes_zero,
    mean_interval,
)
from vlmrl.evaluate.metrics import LENGTHS, Record, baselines, image_ids
from vlmrl.evaluate.paired import (
    PairedColumn,
    joined_by,
    joined_ranges,
    paired_columns,
    paired_differences,
    scored_alike,
    shared_rows,
)
from vlmrl.evaluate.records import Evaluation, read_evaluation
from vlmrl.evaluate.significance import leading_metrics, tests_of
from vlmrl.metric import metric_facts
from vlmrl.store.evaluated_rows import (
    SHOWN_IMAGES,
    changed_thing,
    condition_words,
    image_condition,
    read_summary,
    role_label,
    role_of,
    shown_label,
)
from vlmrl.store.rollouts import read_turns
from vlmrl.untrusted import plural


class _Estimate(NamedTuple):
    """Estimate, its interval, and the influence of each row, [N]."""

    value: float
    low: float
    high: float
    influence_N: Floats


def relative_drop(normal: ArrayLike, changed: ArrayLike, clusters: Clusters | None, value_range: Range) -> Interval:
    """Return (mean of normal - mean of changed) / mean of normal, on the same rows.

    Args:
        normal, changed: [N], finite, at least 0.
        clusters: image ids of each row; None = rows are independent.
        value_range: range of the quantity, which begins at 0.
    Returns: at most 1, and below 0 if the changed mean is larger. EMPTY where it is not defined: the interval of the
        normal mean contains 0, or there is none.
    Raises: ValueError for a range that does not begin at 0.
    Example: normal 1, 1, 1, 0 and changed 1, 0, 0, 0 -> (3 - 1) / 3 = 0.667.
    """
    if value_range[0] != 0:
        raise ValueError(f"a share of a quantity in {value_range}: the range must begin at 0")
    a_N, b_N = np.asarray(normal, dtype=np.float64), np.asarray(changed, dtype=np.float64)
    whole = mean_interval(a_N, clusters, value_range)
    if not len(a_N) or not whole.low > 0:
        return EMPTY
    units = Units(clusters, len(a_N))
    one = _estimate(whole, a_N)
    rest = _estimate(mean_interval(b_N, clusters, value_range), b_N)
    lost = _estimate(difference_interval(a_N, b_N, clusters, value_range), a_N - b_N)
    low, high = _ratio_limits(lost, one, units)
    rest_low, rest_high = _ratio_limits(rest, one, units)
    value = lost.value / one.value
    low, high = min(low, 1 - rest_high, value), max(high, 1 - rest_low, value)
    return Interval(value, low, min(1.0, high), len(a_N), units.count)


def _estimate(interval: Interval, values_N: Floats) -> _Estimate:
    return _Estimate(interval.mean, interval.low, interval.high, values_N - interval.mean)


def _correlation(a_N: Floats, b_N: Floats, units: Units) -> float:
    """Return the correlation of two means whose rows have these influences; 0 if one of them does not vary."""
    spread = math.sqrt(units.variance(a_N) * units.variance(b_N))
    if not spread > 0:
        return 0.0
    covariance = (units.variance(a_N + b_N) - units.variance(a_N - b_N)) / 4
    return min(1.0, max(-1.0, covariance / spread))


def _ratio_limits(top: _Estimate, bottom: _Estimate, units: Units) -> tuple[float, float]:
    """Return the limits of top / bottom. The lower limit of `bottom` is above 0.

    A limit R solves (top - R * bottom)^2 = s^2 + R^2 t^2 - 2 c R s t, with the distances s, t of the estimates from
    their limits and their correlation c. Which of the limits of `bottom` counts depends on the sign of R, which is that
    of the limit of `top`.
    """
    c = _correlation(top.influence_N, bottom.influence_N, units)

    def limit(s: float, t: float, upper: bool, positive: bool) -> float:
        square = bottom.value**2 - t**2
        half = top.value * bottom.value - c * s * t
        constant = top.value**2 - s**2
        root = math.sqrt(max(0.0, half**2 - square * constant))
        if upper:
            return (half + root) / square if positive else _quotient(constant, half - root)
        return _quotient(constant, half + root) if positive or half + root > 0 else (half - root) / square

    low_positive, high_positive = top.low > 0, top.high > 0
    below, above = bottom.value - bottom.low, bottom.high - bottom.value
    low = limit(top.value - top.low, above if low_positive else below, False, low_positive)
    high = limit(top.high - top.value, below if high_positive else above, True, high_positive)
    return low, high


def _quotient(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


NORMAL = "normal"
"""Key of `meta`: the normal evaluation that one with changed images is compared with, by name or folder."""
ANSWER = "answer"
"""Field of a truth that holds the answer, if there is one; else the whole truth is taken for it."""


def normal_folder(folder: Path, meta: Mapping[str, Any]) -> Path | None:
    """Return the folder of the normal evaluation that an evaluation with changed images names; None if it is gone.

    Args:
        folder, meta: of the evaluation with changed images.
    """
    name = meta.get(NORMAL)
    if not isinstance(name, str) or image_condition(meta) is None:
        return None
    places = [folder.parent / name, Path(name)]
    return next((place for place in places if (place / "summary.json").is_file()), None)


def probe_of(folder: Path, evaluation: Evaluation) -> dict[str, Any] | None:
    """Return the blind probe of an evaluation with changed images; None for a normal one, or without its partner.

    Raises: StoreError when the normal evaluation cannot be read.
    """
    meta = evaluation.summary.get("meta") or {}
    normal = normal_folder(folder, meta)
    return None if normal is None else {NORMAL: str(normal), **blind_probe(read_evaluation(normal), evaluation)}


def blind_probe(normal: Evaluation, changed: Evaluation) -> dict[str, Any]:
    """Return how much of the metrics needs the images, as JSON values.

    Args:
        normal: evaluation with the images as they are.
        changed: evaluation of the same rows with changed images.
    Returns: {"images": the change, "prompts", "rows": that count, "without_images", "unchanged", "unpaired": prompts
        that do not count, "same_answer": prompts whose shown images belong to a row with the same answer (only for
        shuffled images), "scored_alike", "metrics": name -> {"normal", "changed", "difference", "low", "high", "n",
        "clusters", "range", "share": (difference / normal) {"value", "low", "high"} or None, "chance": {"value",
        "what"} or None, "test"}, "other_answer": {"prompts", "metrics"} of the rows whose shown images belong to rows
        with another answer, or None, "no_pictures" (only for blank tools): whether no tool has returned one,
        "one_text": of the normal evaluation,
        "conclusion": sentences}.
    Raises: StoreError when `normal` was made with changed images, or `changed` was not.
    """
    metas = [e.summary.get("meta") or {} for e in (normal, changed)]
    change = image_condition(metas[1])
    if image_condition(metas[0]) is not None or change is None:
        raise StoreError("a blind probe needs a normal evaluation and one with changed images")
    pairs, _ = shared_rows(changed.rows, normal.rows)
    of_images = changed_thing(change) == "images"
    bare = {r["prompt_id"] for r, _ in pairs if of_images and not r["images"]}
    same = {r["prompt_id"] for r, _ in pairs if of_images and r["images"] and shown_ids(r) == image_ids(r)}
    counted = [(c, n) for c, n in pairs if c["prompt_id"] not in bare | same]
    prompts = {r["prompt_id"] for r in (*normal.rows, *changed.rows)}
    alike = scored_alike(*metas) is not False
    result = {
        "images": change,
        "prompts": _prompts(counted),
        "rows": len(counted),
        "without_images": len(bare),
        "unchanged": len(same),
        "unpaired": len(prompts - {c["prompt_id"] for c, _ in pairs}),
        "same_answer": None,
        "scored_alike": alike,
        "metrics": _measured(counted, normal.summary, changed.summary, alike),
        "other_answer": None,
        "one_text": normal.one_text,
    }
    if change == "tools blank":
        turns = (turn for row in (*normal.rows, *changed.rows) for turn in read_turns(row.get("turns")))
        result["no_pictures"] = not any(turn.media for turn in turns)
    if change == "shuffled":
        answers = _answers_by_images(normal.rows)
        others = [(c, n) for c, n in counted if _answer(n) not in answers.get(shown_ids(c), ())]
        result["same_answer"] = result["prompts"] - _prompts(others)
        if others and result["same_answer"]:
            measured = _measured(others, normal.summary, changed.summary, alike)
            result["other_answer"] = {"prompts": _prompts(others), "metrics": measured}
    return {**result, "conclusion": conclusions(result)}


def shown_ids(row: Record) -> tuple[str, ...]:
    """Return the content hashes of the images that the model saw."""
    shown = row.get(SHOWN_IMAGES)
    return image_ids(row) if shown is None else tuple(image["sha256"] for image in shown)


def _prompts(pairs: Sequence[tuple[Record, Record]]) -> int:
    return len({c["prompt_id"] for c, _ in pairs})


def _measured(
    pairs: Sequence[tuple[Record, Record]], of_normal: Mapping[str, Any], of_changed: Mapping[str, Any], alike: bool
) -> dict[str, dict[str, Any]]:
    """Return metric -> its numbers on pairs (row with changed images, normal row)."""
    changed, normal = [c for c, _ in pairs], [n for _, n in pairs]
    ranges, by = joined_ranges(of_changed, of_normal), joined_by(of_changed, of_normal)
    columns = paired_columns(normal, changed, ranges, by)
    tests, chances = tests_of(columns), baselines(normal)
    return {
        name: {
            "normal": d["b"],
            "changed": d["a"],
            "difference": d["value"],
            **{key: d[key] for key in ("low", "high", "n", "clusters", "range")},
            "share": _share(name, columns[name], of_normal),
            "chance": chances.get(name),
            "test": tests.get(name),
        }
        for name, d in paired_differences(columns).items()
        if alike or not name.startswith(("reward", "part/"))
    }


def _share(name: str, column: PairedColumn, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the share of a metric that is lost; None where it is not defined, or lower is not worse."""
    better = (summary["metrics"].get(name) or {}).get("better") or metric_facts(name).better
    if column.declared is None or column.declared[0] != 0 or better != "higher" or name in LENGTHS:
        return None
    share = relative_drop(column.after, column.before, column.clusters, column.declared)
    ends = (None if math.isnan(end) else end for end in (share.low, share.high))
    return {"value": share.mean, "low": next(ends), "high": next(ends)} if share.n else None


def _answer(row: Record) -> str:
    """Return the answer of a row as text: the task's label, else the truth's answer, else the whole truth."""
    label = row["outcome"].get("label")
    value = row["truth"].get(ANSWER, row["truth"]) if label is None else label
    return json.dumps(value, sort_keys=True)


def _answers_by_images(rows: Sequence[Record]) -> dict[tuple[str, ...], set[str]]:
    """Return images of a row -> the answers of all rows with these images."""
    answers: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        answers.setdefault(image_ids(row), set()).add(_answer(row))
    return answers


def conclusions(probe: Mapping[str, Any]) -> list[str]:
    """Return the result of a blind probe in sentences, the most important one first."""
    prompts = probe["prompts"]
    if probe.get("no_pictures"):
        return ["No tool returned a picture, so nothing was changed; --tools off says how much needs the tools."]
    what, names = changed_thing(probe["images"]), leading_metrics(probe["metrics"])
    if probe["one_text"]:
        texts = [f"No answer needs the {what}, whatever the numbers: {probe['one_text']}, with the true {what}."]
    elif names:
        sentence = _sentence(names[0], probe["metrics"][names[0]], probe["images"])
        texts = [f"{sentence}; {prompts:,} prompt{plural(prompts)}."]
    else:
        texts = [f"No row can be compared with and without its {what}."]
    if probe["same_answer"]:
        texts.append(
            f"{probe['same_answer']:,} of {prompts:,} prompts were shown the images of a prompt with the same answer."
        )
    if (other := probe["other_answer"]) and not probe["one_text"]:
        sentence = _sentence(names[0], other["metrics"][names[0]], probe["images"])
        texts.append(f"On the other prompts: {sentence[0].lower()}{sentence[1:]}.")
    reasons = {
        "without_images": "Prompts without images, which do not count",
        "unchanged": "Prompts whose images are not larger than the small ones, which do not count",
        "unpaired": "Prompts that are only in one of the two evaluations, or with another truth",
    }
    texts += [f"{words}: {probe[key]:,}." for key, words in reasons.items() if probe[key]]
    if not probe["scored_alike"]:
        texts.append("The two evaluations were scored by different rewards: `reward` and its parts are left out.")
    return texts


def _sentence(name: str, m: Mapping[str, Any], change: str) -> str:
    """Return the difference of a metric in words, without the final full stop."""
    what, is_off = changed_thing(change), change == "tools off"
    true, changed = (what, "without them") if is_off else (f"the true {what}", "with changed ones")
    ends = "" if m["low"] is None else f" [{m['low']:.3f}, {m['high']:.3f}]"
    numbers = f"{m['normal']:.3f} with {true} and {m['changed']:.3f} {changed} ({change}"
    if chance := m["chance"]:
        numbers += f"; {chance['what']}: {chance['value']:.3f}"
    numbers += ")"
    if not excludes_zero(m["low"], m["high"]):
        return f"It is not clear whether the {name} needs the {what}: {numbers}, difference {m['difference']:.3f}{ends}"
    if m["difference"] < 0:
        return f"The {name} is higher without {true}: {numbers}, difference {m['difference']:.3f}{ends}"
    share = m["share"]
    ends_of_share = "" if share is None or share["low"] is None else f" [{share['low']:.0%}, {share['high']:.0%}]"
    part = "" if share is None else f", a share of {share['value']:.0%}{ends_of_share}"
    return f"The {name} is {numbers}: {m['difference']:.3f}{ends} of it needs the {what}{part}"


def require_same_image_condition(*folders: Path) -> None:
    """Raise a StoreError if evaluations differ in the images that the models saw."""
    changes = {image_condition(read_summary(folder).get("meta") or {}) for folder in folders}
    if len(changes) > 1:
        words = " and ".join(sorted(change or "true" for change in changes))
        raise StoreError(
            f"the models saw {words} images or tools, which is not a difference between models; to see how much needs "
            "them, name the folders of both evaluations"
        )


def label_of_both(metas: Sequence[Mapping[str, Any]]) -> str:
    """Return the label of the rows of two evaluations; "" if no label is needed."""
    words = [str(meta.get("shared") or f"{role_of(meta)} rows") for meta in metas]
    label = role_label(metas[0]) if words[0] == words[1] else f"{words[0]} for A and {words[1]} for B"
    shown = [shown_label(meta) for meta in metas]
    if shown[0] != shown[1]:
        conditions = [image_condition(meta) for meta in metas]
        what = changed_thing(next(filter(None, conditions), ""))
        words = [f"with the true {what}" if one is None else condition_words(one) for one in conditions]
        return f"rows {words[0]} for A and {words[1]} for B"
    return ", ".join(filter(None, (shown[0], label)))


def probe_between(left: Evaluation, right: Evaluation) -> dict[str, Any] | None:
    """Return the blind probe of two evaluations; None unless exactly one of them was made with changed images."""
    changed = [image_condition(e.summary.get("meta") or {}) is not None for e in (left, right)]
    if changed[0] == changed[1]:
        return None
    return blind_probe(left, right) if changed[1] else blind_probe(right, left)


def family_of(evaluation: Mapping[str, Any]) -> str:
    """Return the family of an evaluation's tests for Holm's correction: the role of its rows, and changed images."""
    return " ".join([evaluation["role"], *filter(None, evaluation["shown"])])
