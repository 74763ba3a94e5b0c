"""The pair task: two images, are they of one class? Its truth, by which its rows are recognised, and its outcome.

The outcome is the response as the parser of the reward reads it, compared with the truth. A model learns the format
from correct answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.data.doctor import RowLabels, answer_labels
from vlmrl.errors import DataError
from vlmrl.metric import SHARE, Metric
from vlmrl.rewards import load_reward
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.text_parsing import LEVEL_NAME
from vlmrl.tasks.base import GradedResponse, Outcome, Task, prepared_task
from vlmrl.tasks.figure import Histogram, by_label
from vlmrl.tasks.pairs.answer import form_of
from vlmrl.tasks.pairs.draw import pair_distance
from vlmrl.tasks.pairs.probe_responses import pair_probe
from vlmrl.tasks.pairs.reward import PairReading, PairReward
from vlmrl.tasks.pairs.rewards import REWARDS, LabelForm
from vlmrl.tasks.truth_kinds import RowKind, Truth, TruthForm
from vlmrl.types import RewardInput, Row, Score

NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")


def level_names(truth: Truth) -> list[str]:
    """Return the truth fields that hold two names, in their order. They are the levels if no levels are known."""
    return [name for name, value in truth.items() if isinstance(value, list) and len(value) == 2]


def side_of(truth: Truth, answer: str) -> bool | None:
    """Return whether an answer is a probability on the right side of 0.5; None for 0.5 and for any other text."""
    if not isinstance(truth.get("same"), bool):
        return None
    confidence = float(answer) if NUMBER.fullmatch(answer) else 0.5
    return (confidence > 0.5) == truth["same"] if confidence != 0.5 and confidence <= 1 else None


def pair_labels_of(row: Row) -> RowLabels:
    """Return the labels of a pair for the data doctor: same or different, its distance, and the individuals shown."""
    same, distance = row.truth.get("same"), row.truth.get("distance")
    label = ("same" if same else "different") if isinstance(same, bool) else answer_labels(row).label
    shown = row.columns.get("individuals")
    names = tuple(str(name) for name in shown or () if name is not None)
    return RowLabels(label, distance if isinstance(distance, int) else None, "individual" if shown else "", names)


PAIRS = RowKind(
    matches=lambda truth: "same" in truth,
    arguments=lambda truth: {"levels": level_names(truth)},
    probe=lambda tried: pair_probe(form_of(level_names(tried.rows[0].truth)), tried),  # without a task
    is_right=side_of,
    labels=pair_labels_of,
    specificity=1,
)


def truth_form(truth: Truth, columns: Sequence[str]) -> TruthForm:
    """Return the form of pair truths in a table: `same`, and two names per level, in columns or in one mapping."""
    named = level_names(truth)
    levels = {"levels": [name for name in named if name != "same"] or None}
    fields = ("same", "distance", *(name for name in columns if name in named))
    return TruthForm(fields, settings=levels, info=partial(_levels_alone, levels))


def _levels_alone(levels: Mapping[str, Any], truth: Truth, is_sure: bool) -> Mapping[str, Any]:
    return levels


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


def confidence_figures(responses: Sequence[GradedResponse]) -> list[Histogram]:
    """Return a histogram of the confidence with two groups: pairs of the same class, and pairs of different classes."""
    note = (
        "Bars up: pairs that are the same; down: pairs that differ. "
        "A model that hedges answers in the middle, one that knows at the ends."
    )
    texts = ("truly the same", "truly different")
    return by_label((o for _, _, o in responses), texts, "probability that both are the same", note)


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


SUMMARY = "same class or not: two images, a hierarchy of names, a probability (made by `vlmrl prep pairs`)"
RESERVED_LEVELS = frozenset({"think", "answer", "format", "consistency", "note", "detail", "same", "distance"})
"""Names that no level may have, because the answer format, the truth or the reward's parts use them."""


def pair_task(info: Mapping[str, Any], *, name: str = "pairs", summary: str = SUMMARY) -> Task:
    """Return the task bound to a dataset made by `vlmrl prep`; `info` is its dataset.json (`levels`, coarse to fine).

    Raises: DataError when the dataset has no levels.
    """
    levels = info.get("levels")
    if not isinstance(levels, list) or not levels:
        raise DataError(
            f"task `{name}` needs a dataset with levels",
            where=str(info.get("name")),
            hint="make one with `vlmrl prep pairs --levels a,b`, or use task `table`",
        )
    check_levels(levels)
    measure = outcome_as("taxonomy", {"levels": levels})
    return prepared_task(
        name,
        summary,
        info,
        f"{name}/prompt.jinja",
        variables={"levels": levels},
        validate=partial(_problems, levels),
        profiles={"default": ("taxonomy", {"levels": levels})},
        outcome=measure(None),
        outcome_as=measure,
        metrics=METRICS,
        figures=confidence_figures,
        by=("distance",),
        trace=lambda row, rng: write_trace(row.truth, levels, rng),
        kind=replace(PAIRS, probe=partial(pair_probe, form_of(levels))),
    )


def check_levels(levels: Sequence[str]) -> None:
    """Raise a DataError unless all levels are valid tags, no level is repeated, and none has a reserved name."""
    for level in levels:
        if not LEVEL_NAME.fullmatch(level) or level in RESERVED_LEVELS:
            raise DataError(
                f"level name {level!r} cannot be used",
                hint=f"letters, digits, - and _, a letter first; not {', '.join(sorted(RESERVED_LEVELS))}",
            )
    if not levels or len(set(levels)) < len(levels):
        raise DataError(f"levels {', '.join(levels) or '(none)'}: name each level once, coarse to fine")


def levels_due(truth: Mapping[str, Any], levels: Sequence[str]) -> list[str]:
    """Return the levels that an answer must state: all levels down to the first one whose two names differ."""
    due = []
    for level in levels:
        due.append(level)
        if truth[level][0] != truth[level][1]:
            break
    return due


def write_trace(truth: Mapping[str, Any], levels: Sequence[str], rng: random.Random) -> str:
    """Return a correct answer: the names of the required levels (`levels_due`), and a probability on the right side.

    For a pair of the same class, the probability is at least 0.6, and most often 0.9. For a different pair it is at
    most 0.4, and most often 0.1. It varies, so that a policy trained on these answers can explore several
    probabilities. It varies little, because random numbers are noise: they delay learning how the answer follows from
    the names.
    """
    tags = "".join(f"<{level}>{truth[level][0]}; {truth[level][1]}</{level}>" for level in levels_due(truth, levels))
    return f"<think>{tags}</think><answer>{draw_probability(truth['same'], rng):.1f}</answer>"


def draw_probability(same: bool, rng: random.Random) -> float:
    """Draw a probability on the right side of 0.5, a multiple of 0.1; see `write_trace`."""
    tenths = rng.choices((9, 8, 7, 6), (6, 2, 1, 1))[0]
    return (tenths if same else 10 - tenths) / 10


def _problems(levels: Sequence[str], truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    wrong = []
    if not isinstance(truth.get("same"), bool):
        wrong.append(f"`same` is {truth.get('same')!r}, not true or false")
    for level in levels:
        names = truth.get(level)
        if not (isinstance(names, (list, tuple)) and len(names) == 2 and all(isinstance(n, str) and n for n in names)):
            wrong.append(f"`{level}` is {names!r}, not two names")
        elif bad := [n for n in names if any(c in n for c in ";<>\n") or n != n.strip()]:
            wrong.append(
                f"`{level}` has the name {bad[0]!r}, which the answer format cannot hold (; < > or outer spaces)"
            )
    if wrong:
        return wrong
    first, second = (tuple(truth[level][side] for level in levels) for side in (0, 1))
    distance = pair_distance(first, second)
    if truth["same"] != (distance == 0):
        wrong.append(f"`same` is {truth['same']} but the names are {'equal' if distance == 0 else 'different'}")
    if truth.get("distance") != distance:
        wrong.append(f"`distance` is {truth.get('distance')!r}; the names make it {distance}")
    return wrong
