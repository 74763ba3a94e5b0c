"""Two evaluations row by row: what both have, the differences, and the sentence that says whether B is better than A.

The rewards that scored them are compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vlmrl.evaluate.estimates import Clusters, Floats, Range, difference_interval, excludes_zero
from vlmrl.evaluate.metrics import LENGTHS, OLD_BY, EvalColumns, Record, aligned, aligned_prompts, as_json
from vlmrl.evaluate.repeated import BEGINNINGS
from vlmrl.metric import metric_facts
from vlmrl.rewards.identity import RewardIdentity, changed_files, identity_of, shown_weights
from vlmrl.store.evaluated_rows import ROLES
from vlmrl.untrusted import number_of


class PairedColumn(NamedTuple):
    """Values of one metric on the rows, or prompts, that two evaluations share.

    `before` and `after`: values of the other evaluation and of this one. `declared`: range of the metric.
    """

    before: Floats
    after: Floats
    clusters: Clusters
    declared: Range | None


def paired_columns(
    rows: Sequence[Record],
    others: Sequence[Record],
    ranges: Mapping[str, Range] | None = None,
    by: Sequence[str] = (),
) -> dict[str, PairedColumn]:
    """Return metric name -> its values on the rows that both have; names as in `summarise`. Empty when none is shared.

    Rows are the same if their prompt id, sample and truth are: an answer to another question is not a pair.
    pass@k, maj@k and mean@k have one value per prompt; the prompts are those that both have with the same truth.

    Args:
        ranges, by: as of `summarise`.
    """
    pairs, _ = shared_rows(rows, others)
    if not pairs:
        return {}
    prompts = {r["prompt_id"] for r, _ in pairs}
    of_prompts = ([r for r in side if r["prompt_id"] in prompts] for side in (rows, others))
    both = aligned([EvalColumns(by, side) for side in zip(*pairs, strict=True)], ranges or {})
    both |= aligned_prompts([EvalColumns((), side) for side in of_prompts])
    return {
        name: PairedColumn(before_N, after_N, clusters, declared)
        for name, ((after_N, before_N), clusters, declared) in both.items()
    }


def paired_differences(columns: Mapping[str, PairedColumn]) -> dict[str, dict[str, Any]]:
    """Return the mean of (after - before) of every metric.

    Returns: metric name -> {"value", "low", "high", "n", "clusters", "range" (of the metric), "a", "b": the means
        before and after}.
    """
    differences = {}
    for name, (theirs, mine, clusters, declared) in columns.items():
        difference = difference_interval(mine, theirs, clusters, declared, length=name in LENGTHS)
        means = {"a": math.fsum(theirs) / len(theirs), "b": math.fsum(mine) / len(mine)}
        differences[name] = as_json(difference, declared) | means
    return differences


def shared_rows(rows: Sequence[Record], others: Sequence[Record]) -> tuple[list[tuple[Record, Record]], int]:
    """Return (pairs of a row and the other's row with the same prompt, sample and truth; number with another truth)."""
    before = {(r["prompt_id"], r["sample"]): r for r in others}
    pairs = [(r, o) for r in rows if (o := before.get((r["prompt_id"], r["sample"]))) is not None]
    same = [(r, o) for r, o in pairs if r["truth"] == o["truth"]]
    return same, len(pairs) - len(same)


def joined_ranges(*summaries: Mapping[str, Any]) -> dict[str, Range]:
    """Return the widest range of each metric for which all of these summaries declare one. Older ones have none."""
    joined: dict[str, Range] = {}
    for name in summaries[0]["metrics"]:
        ranges: list[Any] = [(s["metrics"].get(name) or {}).get("range") for s in summaries]
        if all(ranges):
            joined[name] = (min(float(low) for low, _ in ranges), max(float(high) for _, high in ranges))
    return joined


def joined_by(*summaries: Mapping[str, Any]) -> list[str]:
    """Return the fields of the truth by which all of these summaries also average accuracy."""
    fields_of_summaries = [s.get("by", OLD_BY) for s in summaries]
    return [field for field in fields_of_summaries[0] if all(field in others for others in fields_of_summaries)]


Comparison = Literal["better", "worse", "differs", "not clear", "no difference shown", "other reward"]
Answer = Literal["better", "worse", "mixed", "not clear", "no difference shown", "same", "not known"]

LEVEL = 0.05
"""Level of all tests, two-sided."""
OTHER_REWARDS = "A and B were scored by different rewards"
OF_THE_REWARD = ("reward", "part")
"""Metrics that come from the reward: the score and its parts."""
OF_THE_ACCURACY = ("accuracy", *BEGINNINGS)
"""Beginnings of metrics that come from the accuracy.

They come from the reward if the task has no measure of its own.
"""


def comparison(
    metric: str,
    difference: Mapping[str, Any],
    scored_alike: bool = True,
    accuracy_of_reward: bool = False,
    test: Mapping[str, Any] | None = None,
) -> Comparison:
    """Return how B compares, by a difference (B - A) of a metric: better or worse if its 95% interval excludes 0.

    If the difference was tested, its p-value must also be at most LEVEL: with few rows, intervals alone are too short.
    If it is not known whether higher is better, B only differs. Equal values do not prove that A and B are equally
    good (the interval says how far apart they may be), so no difference is shown.

    Args:
        difference: {"value", "low", "high", "a", "b"}, as of `paired_differences`; "better" if the
            task has declared it.
        scored_alike: whether one reward scored both; if not, the score and its parts cannot be compared.
        accuracy_of_reward: whether the accuracy is a part of the reward, so that it cannot be compared either.
        test: of `tests_of`; None = the metric is not tested.
    """
    name = metric.split("/")[0]
    if not scored_alike and (name in OF_THE_REWARD or (accuracy_of_reward and name.startswith(OF_THE_ACCURACY))):
        return "other reward"
    if not excludes_zero(difference["low"], difference["high"]) or (test is not None and test["p"] > LEVEL):
        equal = difference["value"] == 0 and difference["a"] == difference["b"]
        return "no difference shown" if equal else "not clear"
    better = difference.get("better") or metric_facts(metric).better
    if better not in ("higher", "lower"):
        return "differs"
    return "better" if (difference["value"] > 0) == (better == "higher") else "worse"


def conclude(evaluations: Sequence[Mapping[str, Any]], advice: str = "") -> dict[str, Any]:
    """Return whether B is better than A, with the reasons in a sentence.

    The evaluations whose rows say most about new rows decide: test rows, else held-out ones, else those that training
    validated on, else training rows. Evaluations with changed images count only if there are no others. In each, the
    reward counts, and the accuracy if there is one. If the two were scored by different rewards, only an accuracy that
    the task itself measures counts, and the sentence says so.

    Args:
        evaluations: of `evaluate.compare`, each with its metrics, and whether both were scored alike.
        advice: how to make an evaluation of both by one reward, if they have none in common.
    Returns: {"answer": an Answer, "text": one sentence, "evaluations": the names of those that it is based on}.
    """
    if probe := next((e["blind_probe"] for e in evaluations if e.get("blind_probe")), None):
        text = "One of the two had changed images or tools, so they do not say which model is better. "
        text += probe["conclusion"][0]
        return {"answer": "not known", "text": text, "evaluations": []}
    usable = [e for e in evaluations if _deciding(e)]
    usable = [e for e in usable if not any(e.get("shown", ()))] or usable
    if usable and all(e["a"] == e["b"] for e in usable):
        return {"answer": "same", "text": "A and B are the same run.", "evaluations": []}
    if not usable:
        return {"answer": "not known", "text": _why_unknown(evaluations, advice), "evaluations": []}
    role = min((e["role"] for e in usable), key=ROLES.index)
    usable = [e for e in usable if e["role"] == role]
    comparisons = {m["verdict"] for e in usable for m in _deciding(e)}
    answer = overall(comparisons)
    begin = {
        "better": "B is better than A",
        "worse": "B is worse than A",
        "mixed": "B is better than A only in part",
        "no difference shown": "No difference between A and B is shown",
        "not clear": "It is not clear whether B is better than A",
    }[answer]
    if not all(e["scored_alike"] for e in usable):
        begin = f"{OTHER_REWARDS}, so only the task's own accuracy counts. {begin}"
    numbers = "; ".join(_numbers_text(e) for e in usable)
    labels = sorted({e["label"] for e in usable if e["label"]})
    warning = f". These are {'; '.join(labels)}" if labels else ""
    doubts = [zip("AB", e[key], strict=True) for e in usable for key in ("one_text", "refused")]
    warning += "".join(f". {x}: {words}" for pair in doubts for x, words in pair if words)
    ways = dict.fromkeys(way["key"] for e in usable for way in e["evaluated_with"] if way["key"] != "endpoint")
    warning += f". A and B were evaluated with different {', '.join(ways)}" if ways else ""
    return {"answer": answer, "text": f"{begin}: {numbers}{warning}.", "evaluations": [e["name"] for e in usable]}


def overall(comparisons: set[Comparison]) -> Answer:
    """Return the answer that the comparisons of several metrics give together."""
    clear = comparisons & {"better", "worse"}
    if len(clear) == 2:
        return "mixed"
    if clear:
        return "better" if "better" in clear else "worse"
    return "no difference shown" if comparisons == {"no difference shown"} else "not clear"


def _deciding(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    names = ("reward", "accuracy") if evaluation["scored_alike"] else ("accuracy",)
    return [m for m in evaluation["metrics"] if m["metric"] in names and m["verdict"] != "other reward"]


def _numbers_text(evaluation: Mapping[str, Any]) -> str:
    """Return `reward +0.110 [+0.081, +0.141] (0.765 -> 0.875), ..., paired on 1,200 responses of test-digits`."""
    metrics = _deciding(evaluation)
    parts = [f"{m['metric']} {signed(m)} ({m['a']:.3f} -> {m['b']:.3f})" for m in metrics]
    n, clusters = metrics[0]["n"], metrics[0]["clusters"]
    rows = f"{number_of(n, 'response')} of {evaluation['name']}"
    shared = f" ({number_of(clusters, 'cluster')})" if clusters < n else ""
    return f"{', '.join(parts)}, paired on {rows}{shared}"


def signed(m: Mapping[str, Any]) -> str:
    """Return a difference with its interval. Example: `+0.110 [+0.081, +0.141]`."""
    ends = "no interval" if m["low"] is None else f"[{m['low']:+.3f}, {m['high']:+.3f}]"
    return f"{m['difference']:+.3f} {ends}"


def _why_unknown(evaluations: Sequence[Mapping[str, Any]], advice: str) -> str:
    begin = "It is not known whether B is better than A"
    if not evaluations:
        return f"{begin}: they have no evaluation in common ({advice})."
    if not any(e["rows_paired"] for e in evaluations):
        return f"{begin}: their evaluations share no rows."
    if not any(e["scored_alike"] for e in evaluations):
        of_reward = any(e["accuracy_of_reward"] for e in evaluations)
        why = "their accuracy is a part of these rewards" if of_reward else "there is no accuracy"
        return f"{OTHER_REWARDS}, and {why}. {begin}: score both with one reward ({advice})."
    return f"{begin}: no row has a score in both."


Meta = Mapping[str, Any]
"""`meta` of an evaluation's summary. Most have `reward` (name, version or sha256, weights) and `reward_args`."""


def scored_alike(one: Meta, other: Meta) -> bool | None:
    """Return whether one reward with the same arguments and weights scored both; None if one does not record it."""
    if not (_says(one) and _says(other)):
        return None
    same_weights = one["reward"].get("weights") == other["reward"].get("weights")
    same_weights = same_weights and not changed_files(one["reward"], other["reward"])
    return same_weights and _identity(one, other) == _identity(other, one)


def scored_by(meta: Meta) -> str:
    """Return the reward in words, with its weights; "" if the evaluation does not record it."""
    return reward_words({**meta["reward"], "args": meta.get("reward_args")}) if _says(meta) else ""


def reward_words(record: Mapping[str, Any]) -> str:
    """Return a reward's record in words: name, version, arguments, weights."""
    return f"{identity_of(record).words}, {shown_weights(record.get('weights'))}"


def sampled_apart(metas: Sequence[Meta]) -> list[str]:
    """Return the settings of sampling that differ between evaluations; `temperature` stands for `greedy`, too."""
    ways = [meta.get("sampling") or {} for meta in metas]
    keys = dict.fromkeys(key for way in ways for key in way if key != "greedy")
    return [key for key in keys if any(way.get(key) != ways[0].get(key) for way in ways)]


def _says(meta: Meta) -> bool:
    return isinstance(meta.get("reward"), Mapping)


def _identity(meta: Meta, beside: Meta) -> RewardIdentity:
    """Return the reward of an evaluation; without arguments if one of the two does not record them."""
    has_args = "reward_args" in meta and "reward_args" in beside
    return identity_of({**meta["reward"], "args": meta["reward_args"] if has_args else {}})
