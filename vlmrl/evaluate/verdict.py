"""Verdict on a paired difference, and the sentence that says whether B is better than A."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vlmrl.evaluate.interval import excludes_zero
from vlmrl.evaluate.repeated import BEGINNINGS
from vlmrl.metric import metric_facts
from vlmrl.store.evaluated_rows import ROLES

Verdict = Literal["better", "worse", "differs", "not clear", "no difference shown", "other reward"]
Answer = Literal["better", "worse", "mixed", "not clear", "no difference shown", "same", "not known"]

OTHER_REWARDS = "A and B were scored by different rewards"
OF_THE_REWARD = ("reward", "part")
"""Metrics that come from the reward: the score and its parts."""
OF_THE_ACCURACY = ("accuracy", *BEGINNINGS)
"""Beginnings of metrics that come from the accuracy.

They come from the reward if the task has no measure of its own.
"""


def verdict(
    metric: str, difference: Mapping[str, Any], scored_alike: bool = True, accuracy_of_reward: bool = False
) -> Verdict:
    """Return the verdict on B for a difference (B - A) of a metric: better or worse if its 95% interval excludes 0.

    If it is not known whether higher is better, B only differs. Equal values do not prove that A and B are equally
    good (the interval says how far apart they may be), so the verdict is that no difference is shown.

    Args:
        difference: {"value", "low", "high", "a", "b"}, as of `evaluate.metrics.paired_differences`; "better" if the
            task has declared it.
        scored_alike: whether one reward scored both; if not, the score and its parts cannot be compared.
        accuracy_of_reward: whether the accuracy is a part of the reward, so that it cannot be compared either.
    """
    name = metric.split("/")[0]
    if not scored_alike and (name in OF_THE_REWARD or (accuracy_of_reward and name.startswith(OF_THE_ACCURACY))):
        return "other reward"
    if not excludes_zero(difference["low"], difference["high"]):
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
        advice: how to make an evaluation of both, if they have none in common.
    Returns: {"answer": an Answer, "text": one sentence, "evaluations": the names of those that it is based on}.
    """
    if probe := next((e["blind_probe"] for e in evaluations if e.get("blind_probe")), None):
        text = f"One of the two saw changed images, so they do not say which model is better. {probe['conclusion'][0]}"
        return {"answer": "not known", "text": text, "evaluations": []}
    usable = [e for e in evaluations if _deciding(e)]
    usable = [e for e in usable if not any(e.get("shown", ()))] or usable
    if usable and all(e["a"] == e["b"] for e in usable):
        return {"answer": "same", "text": "A and B are the same run.", "evaluations": []}
    if not usable:
        return {"answer": "not known", "text": _why_unknown(evaluations, advice), "evaluations": []}
    role = min((e["role"] for e in usable), key=ROLES.index)
    usable = [e for e in usable if e["role"] == role]
    verdicts = {m["verdict"] for e in usable for m in _deciding(e)}
    answer = overall(verdicts)
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
    return {"answer": answer, "text": f"{begin}: {numbers}{warning}.", "evaluations": [e["name"] for e in usable]}


def overall(verdicts: set[Verdict]) -> Answer:
    """Return the answer that the verdicts on several metrics give together."""
    clear = verdicts & {"better", "worse"}
    if len(clear) == 2:
        return "mixed"
    if clear:
        return "better" if "better" in clear else "worse"
    return "no difference shown" if verdicts == {"no difference shown"} else "not clear"


def _deciding(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    names = ("reward", "accuracy") if evaluation["scored_alike"] else ("accuracy",)
    return [m for m in evaluation["metrics"] if m["metric"] in names and m["verdict"] != "other reward"]


def _numbers_text(evaluation: Mapping[str, Any]) -> str:
    """Return `reward +0.110 [+0.081, +0.141] (0.765 -> 0.875), accuracy ..., paired on 1,200 rows of test-digits`."""
    metrics = _deciding(evaluation)
    parts = [f"{m['metric']} {signed(m)} ({m['a']:.3f} -> {m['b']:.3f})" for m in metrics]
    n, clusters = metrics[0]["n"], metrics[0]["clusters"]
    rows = f"{n:,} row{'s' if n != 1 else ''} of {evaluation['name']}"
    shared = f" ({clusters:,} cluster{'s' if clusters != 1 else ''})" if clusters < n else ""
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
        return f"{OTHER_REWARDS}, and {why}. {begin}: score both with one reward (vlmrl eval RUN --recipe RECIPE)."
    return f"{begin}: no row has a score in both."
