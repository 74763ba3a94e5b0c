"""Comparison of settings: each is one run, or several runs that differ only in their seed.

A setting's result is the mean over its runs, with a band of one standard deviation between runs. The difference of two
settings is taken on the rows that all runs answered. Its interval covers new rows and new seeds: the variance over rows
(of the mean difference over runs, robust to shared images) plus the variance of each setting's mean over runs, with
Student's t and Satterthwaite's degrees of freedom. The sum counts noise of single rows twice, so it is slightly too
large. A setting of a single run adds nothing: the interval is then about this run. Two single runs are compared as
`evaluate/compare.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.errors import StoreError
from vlmrl.evaluate.blind_probe import family_of, require_same_image_condition
from vlmrl.evaluate.compare import (
    Side,
    SideEvaluation,
    common_evaluations,
    describe,
    eval_like,
    matched,
    open_side,
    recipe_differences,
)
from vlmrl.evaluate.estimates import METHOD, Clusters, Floats, Interval, Range, Units, difference_interval
from vlmrl.evaluate.metrics import Aligned, EvalColumns, aligned, aligned_prompts
from vlmrl.evaluate.over_training import over_checkpoints, over_epochs, picked_by_hand, read_epochs
from vlmrl.evaluate.paired import LEVEL, comparison, joined_by, joined_ranges, sampled_apart
from vlmrl.evaluate.records import Evaluation, read_evaluation
from vlmrl.evaluate.significance import LEADING, TEST_METHODS, correct_for_many, is_tested, paired_test
from vlmrl.store.evaluated_rows import ROLES, image_condition, refused_words, role_label, role_of, shown_label
from vlmrl.store.runs import names_in
from vlmrl.untrusted import plural

BY_RUNS = "Student's t over rows and runs"
SETTING_METHOD = (
    "of settings with several runs: Student's t from the variance over rows plus that of the means over runs; "
    "bands: one standard deviation between runs"
)


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed.

    Args:
        letter: A, B, C, ...
    """

    letter: str
    sides: tuple[Side, ...]

    @property
    def title(self) -> str:
        """Names of its runs."""
        return ", ".join(side.title for side in self.sides)


def is_list(refs: Sequence[str]) -> bool:
    """Return whether these arguments of `vlmrl compare` are settings: more than two, or one with several runs."""
    return len(refs) > 2 or any(len(names_in(ref)) > 1 for ref in refs)


def open_settings(root: Path, refs: Sequence[str]) -> list[Setting]:
    """Return the settings of `A1,A2,A3 B1,B2,B3 ...`; each run by any of its names, or an evaluation's folder.

    Raises: StoreError for what is no run, a run that is twice in a setting, and more than 26 settings.
    """
    if len(refs) > 26:
        raise StoreError(f"{len(refs)} settings to compare; at most 26 can be")
    settings = []
    for letter, ref in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", refs, strict=False):
        sides = tuple(open_side(root, one) for one in names_in(ref))
        places = [tuple(map(str, side.named)) or (side.run.id if side.run else side.ref,) for side in sides]
        for i, place in enumerate(places):
            if place in places[:i]:
                raise StoreError(f"`{ref}` has the run {sides[i].title} twice", hint="give each run of a setting once")
        settings.append(Setting(letter, sides))
    return settings


def compare_settings(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the results of each setting, and the difference of each later setting to the first; JSON values.

    Returns: {"conclusion", "settings", "evaluations", "checkpoints", "epochs", "intervals", "tests", "notes"}. Each
        evaluation has "settings": letter -> metric -> {"mean", "sd", "runs"}, and "differences": one mapping per pair
        and metric.
    """
    notes: list[str] = []
    sides = [side for setting in settings for side in setting.sides]
    for setting in settings:
        notes += _mixed(setting) + _alone(setting, settings)
    notes += [note for s in sides for folder in s.named for note in [picked_by_hand(folder, s.run)] if note]
    evaluations = []
    letters = [setting.letter for setting in settings for _ in setting.sides]
    for name, group in common_evaluations(sides, letters):
        try:
            evaluations.append(_evaluation(name, group, sides, letters, notes))
        except StoreError as error:
            notes.append(f"evaluation {name} is left out: {error.message}")
    if not evaluations:
        notes.append("no evaluation in common of all runs (make them: vlmrl eval RUN --recipe RECIPE)")
    evaluations.sort(key=lambda e: (any(e["shown"]), ROLES.index(e["role"])))
    differences = [d for e in evaluations for d in e["differences"]]
    correct_for_many((family_of(e), d["metric"], d["test"]) for e in evaluations for d in e["differences"])
    for d in differences:
        if d["verdict"] in ("better", "worse") and d["test"]["p_holm"] > LEVEL:
            d["verdict"] = "not clear"
    epochs = [(s.letter, [e for side in s.sides if side.run and (e := read_epochs(side.run))]) for s in settings]
    return {
        "conclusion": _conclusion(evaluations),
        "settings": [{"letter": s.letter, "runs": [describe(side) for side in s.sides]} for s in settings],
        "evaluations": evaluations,
        "checkpoints": [
            {"side": f"{setting.letter} {side.title}", **entry}
            for setting in settings
            for side in setting.sides
            if side.run
            for entry in over_checkpoints(side.run)
        ],
        "epochs": over_epochs([(letter, runs) for letter, runs in epochs if runs]),
        "intervals": f"{METHOD}; {SETTING_METHOD}",
        "tests": f"{TEST_METHODS}; where a setting has several runs: Student's t",
        "notes": notes,
    }


def _mixed(setting: Setting) -> list[str]:
    """Return a note if the recipes of the runs of a setting differ in more than seeds."""
    keys: dict[str, None] = {}
    first = setting.sides[0]
    for side in setting.sides[1:]:
        if first.run and side.run:
            keys |= dict.fromkeys(row["key"] for row in recipe_differences(first, side, []))
    keys = {key: None for key in keys if not key.endswith("seed")}
    if not keys:
        return []
    return [f"the runs of setting {setting.letter} differ in {', '.join(keys)}: they are not seeds of one setting"]


def _alone(setting: Setting, settings: Sequence[Setting]) -> list[str]:
    """Return a note if a setting has one run where others have several."""
    if len(setting.sides) > 1 or all(len(other.sides) == 1 for other in settings):
        return []
    return [
        f"setting {setting.letter} has one run, so its spread between seeds is not known: its intervals are about this "
        "run, not about new seeds"
    ]


def _evaluation(
    name: str,
    group: Sequence[SideEvaluation | None],
    sides: Sequence[Side],
    letters: Sequence[str],
    notes: list[str],
) -> dict[str, Any]:
    """Return the results on one evaluation of all settings that can be compared.

    Args:
        group, sides, letters: of each run: its evaluation, its side and the letter of its setting.
        notes: gets why others cannot be compared.
    Raises: StoreError when fewer than two can be.
    """
    alike = matched([[one] if one else [] for one in group], letters)
    like = next(one for one in alike if one)
    require_same_image_condition(*(one.folder for one in group if one))
    read = {i: read_evaluation(one.folder) for i, one in enumerate(group) if one}
    keys = {i: {(row["prompt_id"], row["sample"]) for row in e.rows} for i, e in read.items()}
    reasons = {i: "it has no evaluation of these rows" for i in range(len(group)) if i not in read}
    reasons |= {i: "it answered other rows" for i, own in keys.items() if not own & keys[alike.index(like)]}
    kept = [i for i in read if i not in reasons]
    shared = shared_values([read[i] for i in kept])
    if odd := [i for i in kept if alike[i] is None]:
        of_reward = any("accuracy_of" in read[i].summary for i in kept)
        shared = {} if of_reward else {metric: one for metric, one in shared.items() if metric != "reward"}
        words = f"{name}: the runs were scored by different rewards; what comes from the reward is not compared"
        notes += [words] if shared else []
    if odd and not shared:
        for i in odd:
            how = eval_like(sides[i], like)
            reasons[i] = f"it was scored by another reward than {like.title}" + (
                f" (make one alike: {how})" if how else ""
            )
        kept = [i for i in kept if i not in odd]
        shared = shared_values([read[i] for i in kept])
    notes += [f"{name}: {letters[i]} {sides[i].title} is left out: {why}" for i, why in reasons.items()]
    here = list(dict.fromkeys(letters[i] for i in kept))
    if len(here) < 2 or not shared:
        raise StoreError("no two settings have a score of the same rows")
    metas = [one.meta for i in kept if (one := group[i])]
    if ways := sampled_apart(metas):
        notes.append(f"{name}: the runs were evaluated with different {', '.join(ways)}")
    worst = max(metas, key=lambda meta: ROLES.index(role_of(meta)))
    refused = [f"{sides[i].title}: {words}" for i in kept if (words := refused_words(read[i].summary))]
    # [all runs, N] -> [runs, N] of each setting
    ends = np.cumsum([sum(letters[i] == letter for i in kept) for letter in here])[:-1]
    values_by_metric = {metric: np.split(one.value_EN, ends) for metric, one in shared.items()}
    better = {n: m.get("better") for i in kept for n, m in read[i].summary["metrics"].items()}
    return {
        "name": name,
        "role": role_of(worst),
        "label": ", ".join(filter(None, (shown_label(worst), role_label(worst)))),
        "shown": [image_condition(worst)],
        "refused": refused,
        "rows": next((len(one.clusters) for one in shared.values()), 0),
        "settings": {
            letter: {metric: band(values[i]) for metric, values in values_by_metric.items()}
            for i, letter in enumerate(here)
        },
        "differences": [
            _difference(metric, values[0], values[i], shared[metric], f"{letter} - {here[0]}", better)
            for i, letter in enumerate(here)
            if i
            for metric, values in values_by_metric.items()
        ],
    }


def shared_values(evaluations: Sequence[Evaluation]) -> dict[str, Aligned]:
    """Return metric -> its values on the rows that all evaluations have, for the metrics that are tested."""
    rows_by_key = [{(r["prompt_id"], r["sample"]): r for r in e.rows} for e in evaluations]
    first = rows_by_key[0]
    keys = [key for key in first if all(key in own and own[key]["truth"] == first[key]["truth"] for own in rows_by_key)]
    rows = [[own[key] for key in keys] for own in rows_by_key]
    summaries = [e.summary for e in evaluations]
    ranges, by = joined_ranges(*summaries), joined_by(*summaries)
    columns = [EvalColumns(by, own) for own in rows] if keys else []
    every = aligned(columns, ranges) | aligned_prompts(columns) if columns else {}
    return {metric: one for metric, one in every.items() if is_tested(metric)}


def band(values: Floats) -> dict[str, Any]:
    """Return {"mean" over runs, "sd": sample standard deviation between runs, None for one run, "runs": their means}.

    Args:
        values: [runs, N].
    """
    means = values.mean(1)
    sd = float(means.std(ddof=1)) if len(means) > 1 else None
    return {"mean": float(means.mean()), "sd": sd, "runs": means.tolist()}


def _difference(
    metric: str, a: Floats, b: Floats, shared: Aligned, pair: str, better: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the difference of a setting (b) to the first one (a), with its interval, its test and its comparison."""
    interval, p, method = setting_difference(a, b, shared.clusters, shared.declared)
    low, high = (x if math.isfinite(x) else None for x in (interval.low, interval.high))
    means = {"a": float(a.mean()), "b": float(b.mean())}
    facts = {"value": interval.mean, "low": low, "high": high, "better": better.get(metric), **means}
    return {
        "metric": metric,
        "pair": pair,
        **means,
        "difference": interval.mean,
        "low": low,
        "high": high,
        "n": interval.n,
        "clusters": interval.clusters,
        "runs": [len(a), len(b)],
        "test": {"method": method, "p": p},
        "verdict": comparison(metric, facts),
    }


def setting_difference(a: Floats, b: Floats, clusters: Clusters, declared: Range | None) -> tuple[Interval, float, str]:
    """Return the interval of the mean of b - a over runs and rows, the p-value, and the method of the test.

    Args:
        a, b: values of two settings on the same rows, [runs of a, N] and [runs of b, N].
        declared: range of a value.
    """
    if len(a) == len(b) == 1:
        result = paired_test(a[0], b[0], clusters)
        return difference_interval(b[0], a[0], clusters, declared), result.p, result.method
    from scipy.stats import t

    difference_N = b.mean(0) - a.mean(0)
    value = float(difference_N.mean())
    units = Units(clusters, len(difference_N))
    none = Interval(value, math.nan, math.nan, len(difference_N), units.count)
    if units.count < 2:
        return none, 1.0, BY_RUNS
    influence_N = difference_N - value
    parts = [(float(x.mean(1).var(ddof=1)) / len(x), len(x) - 1.0) for x in (a, b) if len(x) > 1]
    parts.append((units.variance(influence_N), units.freedom(influence_N) if influence_N.any() else 1.0))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return none, 1.0, BY_RUNS
    freedom = variance**2 / sum(part**2 / df for part, df in parts)
    half = float(t.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(variance)
    width = math.inf if declared is None else declared[1] - declared[0]
    p = float(2 * t.sf(abs(value) / math.sqrt(variance), freedom))
    ends = max(-width, value - half), min(width, value + half)
    return Interval(value, *ends, len(difference_N), units.count), p, BY_RUNS


def _conclusion(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"text": one sentence per pair, on the rows that say most about new rows, "evaluation": its name}."""
    for evaluation in evaluations:
        metric = next((m for m in LEADING if any(d["metric"] == m for d in evaluation["differences"])), None)
        if metric is not None:
            chosen = [d for d in evaluation["differences"] if d["metric"] == metric]
            texts = [_sentence(d) for d in chosen]
            texts += [f"{line}." for line in (f"Rows: {evaluation['name']}", *evaluation["refused"])]
            return {"text": " ".join(texts), "evaluation": evaluation["name"]}
    text = "It is not known which setting is better: there are no rows in common, or different rewards scored them."
    return {"text": text, "evaluation": None}


def _sentence(d: Mapping[str, Any]) -> str:
    letter, _, first = d["pair"].partition(" - ")
    begin = {
        "better": f"{letter} is better than {first}",
        "worse": f"{letter} is worse than {first}",
        "no difference shown": f"No difference between {first} and {letter} is shown",
    }.get(d["verdict"], f"It is not clear whether {letter} is better than {first}")
    ends = "no interval" if d["low"] is None else f"[{d['low']:+.3f}, {d['high']:+.3f}]"
    runs = f"{d['runs'][1]} against {d['runs'][0]} run{plural(d['runs'][0])}"
    corrected = f" with Holm's correction for {d['test']['comparisons']}" if d["test"]["comparisons"] > 1 else ""
    return f"{begin}: {d['metric']} {d['difference']:+.3f} {ends}, {runs}, p = {d['test']['p_holm']:.3g}{corrected}."
