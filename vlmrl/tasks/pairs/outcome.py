"""Outcome of an answer to a pair: the response as the parser of the reward reads it, compared with the truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmrl.metric import SHARE, Metric
from vlmrl.rewards import load_reward
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.base import Outcome, Verdict
from vlmrl.tasks.figure import Histogram, by_label
from vlmrl.tasks.pairs.labels import LabelForm
from vlmrl.tasks.pairs.reward import PairReading, PairReward
from vlmrl.tasks.pairs.rewards import REWARDS
from vlmrl.types import RewardInput, Score

METRICS = {
    "label_accuracy": Metric("higher", SHARE),
    "consistent": Metric("higher", SHARE),
    "repaired": Metric("lower", SHARE),
}
"""Ranges and better directions of the metrics of `pair_outcome` that no other task has."""
RELAXED_FUNCTION = "lfw_relax_format:"
"""Prefix of TaxonRL's reward functions that accept a closing tag without its slash."""


def outcome_as(name: str, args: Mapping[str, Any]) -> Callable[[RewardSpec | None], Callable[..., Outcome]]:
    """Return a function for `Task.outcome_as`: the reward that scores the rows -> a function for `Task.outcome`.

    If the scoring reward is a pair reward, responses are read by its rules, including its repairs and aliases; the
    levels are always those of the task. If its rules equal those of the task's own reward, the reading is taken from
    the score, so that no response is read twice.

    Args:
        name, args: the task's own reward and its arguments.
    """
    own = load_reward(name, args=args, builtins=REWARDS).fn
    assert isinstance(own, PairReward)

    def measure(spec: RewardSpec | None) -> Callable[[RewardInput, Score], Outcome]:
        reads = own if spec is None else _read_as(own, spec)
        return pair_outcome(reads, spec.key if spec is not None and _reads_alike(spec.fn, reads) else None)

    return measure


def _reads_alike(scored_by: Any, reads: PairReward) -> bool:
    """Return whether two rewards find the same content in every response, before their rules are applied."""
    names = ("form", "levels", "levels_decide", "relaxed")
    return isinstance(scored_by, PairReward) and all(getattr(scored_by, n) == getattr(reads, n) for n in names)


def _read_as(own: PairReward, spec: RewardSpec) -> PairReward:
    other = spec.fn
    if isinstance(other, PairReward):
        alike = type(other.form) is type(own.form) and other.levels == own.levels
        return replace(own, form=other.form if alike else own.form, relaxed=other.relaxed)
    published = str(spec.args.get("function", "")) if spec.name == "taxonrl" else ""
    return replace(own, relaxed=published.startswith(RELAXED_FUNCTION))


def pair_outcome(reward: PairReward, scored_by: str | None = None) -> Callable[[RewardInput, Score], Outcome]:
    """Return a function that measures an answer as `reward` reads it.

    Args:
        scored_by: name of the reward whose reading in `Score.detail` is used; its rules equal those of `reward`. A
            response without such a detail is read here. None = every response is read here.

    The measured numbers are:
    accuracy: 1 if the probability is on the right side of 0.5; exactly 0.5 is wrong.
    accuracy/<field>: 1 if the tag is right for both images. A relation that is left out below Different counts as
    Different, as in the reward. None if a coarser level truly differs (the tag is then not required), or if the truth
    is not known.
    label_accuracy/<field>, for labels: share of the two labels that are right.
    brier: (probability - label) squared; 0 is best, and 1 is used when the answer cannot be parsed.
    confidence: the probability; None when it cannot be parsed. label: 1 = same.
    parse_failure: 1 when the response does not follow the format; it then counts as wrong in all of the above.
    consistent: 1 if the answer agrees with the tags; None if the tags determine no answer. Measured only for rewards
    whose tags can determine the answer.
    repaired: 1 if a closing tag had to be repaired. Measured only for rewards that allow this.
    """
    judge = replace(reward, consistency="part", complete=False)

    def outcome(x: RewardInput, score: Score) -> Outcome:
        same, right = judge.read_truth(x.truth)
        reading = None if scored_by is None else PairReading.of_detail((score.detail or {}).get(scored_by))
        problem, confidence, stated, agrees, repair = reading or judge.read(x.response)
        label = float(same)
        numbers: dict[str, float | None] = {
            "accuracy": 0.0 if confidence is None else float(confidence > 0.5 if same else confidence < 0.5),
            "brier": 1.0 if confidence is None else (confidence - label) ** 2,
            "confidence": confidence,
            "label": label,
            "parse_failure": float(bool(problem)),
        }
        numbers |= _levels(judge, stated, right)
        if judge.levels and judge.levels_decide:
            numbers["consistent"] = None if agrees is None else float(agrees)
        if judge.relaxed:
            numbers["repaired"] = float(bool(repair and not problem))
        return numbers

    return outcome


def confidence_figures(verdicts: Sequence[Verdict]) -> list[Histogram]:
    """Return a histogram of the confidence with two groups: pairs of the same class, and pairs of different classes."""
    note = (
        "Bars up: pairs that are the same; down: pairs that differ. "
        "A model that hedges answers in the middle, one that knows at the ends."
    )
    texts = ("truly the same", "truly different")
    return by_label((o for _, _, o in verdicts), texts, "probability that both are the same", note)


def _levels(judge: PairReward, stated: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, float | None]:
    """Return `accuracy/<field>` of every level, and for labels also `label_accuracy/<field>`."""
    accuracies: dict[str, float | None] = {}
    stated = judge.form.said(stated, judge.levels)
    due = True
    for level in judge.levels:
        truth, said, field = right[level], stated.get(level), judge.fields.get(level, level)
        counts = due and truth is not None
        accuracies[f"accuracy/{field}"] = float(said == truth) if counts else None
        if isinstance(judge.form, LabelForm):
            hits = sum(a == b for a, b in zip(said or (None, None), truth or (), strict=False))
            accuracies[f"label_accuracy/{field}"] = hits / 2 if counts else None
        due = due and not _differs(truth)
    return accuracies


def _differs(truth: Any) -> bool:
    """Return whether the two images differ at a level. `truth`: its true value, two names or a word for a relation."""
    if truth is None:
        return False
    return truth == "different" if isinstance(truth, str) else truth[0] != truth[1]
