"""Checks of what a recipe evaluates during training: its sets, and the metric that selects the best checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmrl.errors import Problem, listed
from vlmrl.metric import metric_facts
from vlmrl.preflight.rows import Opened, check_traces, scorer_limits
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.eval import wrong_goal
from vlmrl.recipe.tables import AUTO
from vlmrl.rewards.accuracy_part import accuracy_part, with_accuracy
from vlmrl.rewards.several import declared_parts
from vlmrl.rewards.several_scorer import open_scorer
from vlmrl.tasks.attack import responding

if TYPE_CHECKING:
    from vlmrl.tasks.source import Source


def check_validation(loaded: LoadedRecipe, opened: Opened) -> list[Problem]:
    """Return a problem if validation is not possible: there are no rows for it, or no metric `eval.metric`."""
    sources = [e.validation for e in opened.entries if e.validation and e.reward_ok]
    settings = loaded.recipe.eval
    if settings.enabled and (missing := _missing_sets(loaded, opened)):
        return missing
    if opened.entries and settings.enabled and not any(e.validation for e in opened.entries):
        waiting = [("train", "stop_above"), ("eval", "patience")]
        waiting = [key for key in waiting if getattr(getattr(loaded.recipe, key[0]), key[1]) is not None]
        if waiting:
            key = ".".join(waiting[0])
            message = f"`{key}` waits for a validation, and no source has validation rows"
            return [Problem(message, loaded.where(waiting[0]), f"name some with data.validation, or remove {key}")]
        hint = "name a split or hold out a share: data.validation = 0.1; training runs without validation"
        where = loaded.where(("eval", "sets"), ("eval", "metric"), ("data", 0))
        lacks = "`eval.sets` has test splits alone" if settings.sets else "no source has validation rows"
        return [Problem(f"{lacks}: no best checkpoint, no early stop", where, hint, "warning")]
    if loaded.recipe.kind == "sft" and (settings.by_loss or not all(e.reward_ok for e in opened.entries)):
        measured = [(e.where, e.validation) for e in opened.entries if e.validation and e.train.task.trace]
        return [problem for where, source in measured for problem in check_traces(source, where)]
    setting_name, metric = settings.selecting
    if metric == AUTO:
        return []
    for source in sources:
        wrong = list(wrong_goal(loaded, metric_facts(metric, source.task.metrics)))
        if wrong and metric_facts(metric).better is None:  # otherwise the check of the recipe reports it
            return wrong
        known = metric_names(source)
        needs_accuracy = metric == "accuracy" or "@" in metric  # such as pass@8
        has_accuracy = "accuracy" in known or (needs_accuracy and _may_have_accuracy(loaded, source))
        if has_accuracy:
            known += repeated_names(settings.named_settings[setting_name].samples)
        open_ended = metric.startswith("part/") and not source.reward.is_builtin
        open_ended |= any(metric.startswith(f"accuracy/{field}-") for field in source.task.by)
        open_ended |= metric == "accuracy" and has_accuracy
        if metric not in known and not open_ended:
            hint = listed(metric, known, "there are")
            hint += '; [reward] accuracy = "PART" names the part' if needs_accuracy and not has_accuracy else ""
            message = f"validation of `{source.name}` has no metric `{metric}`"
            return [Problem(message, loaded.where(("eval", "metric")), hint)]
    return []


def _missing_sets(loaded: LoadedRecipe, opened: Opened) -> list[Problem]:
    """Return a problem for each of `eval.sets` that no source has. Entries that could not be opened have problems."""
    from vlmrl.tasks.source import VALIDATION, set_label

    there = {one.split for e in opened.entries for one in (e.validation, *e.others) if one is not None}
    has_validation = any(e.validation for e in opened.entries)
    names = [
        n for n in loaded.recipe.eval.sets if set_label(n) not in there and not (n == VALIDATION and has_validation)
    ]
    if opened.problems or not names:
        return []
    splits = ", ".join(dict.fromkeys(split for e in opened.entries for split in e.train.dataset.splits))
    where, hint = loaded.where(("eval", "sets")), f"splits there: {splits}; a table file works, too"
    return [Problem(f"`eval.sets` names `{name}`, and no source has such a split", where, hint) for name in names]


def repeated_names(samples: int) -> list[str]:
    """Return the names of the metrics of several samples per prompt, as far as they are known before an evaluation."""
    if samples == 1:
        return []
    ks = [k for k in range(1, samples + 1) if k == samples or k & (k - 1) == 0]
    return [*(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks if k > 2), f"mean@{samples}"]


def _may_have_accuracy(loaded: LoadedRecipe, source: Source) -> bool:
    """Return whether a user's reward returns a part that is the accuracy, or cannot be asked which parts it returns."""
    if source.reward.is_builtin:
        return False
    parts = _parts_seen(loaded, source)
    return not parts or accuracy_part(parts, source.reward) is not None


def _parts_seen(loaded: LoadedRecipe, source: Source) -> list[str]:
    """Return the parts that a user's reward returns for an empty response and for the truth as text; [] if it fails."""
    row = source.rows[0]
    texts = ["", *(str(value) for value in row.truth.values())][:2]
    inputs = [responding(source.reward_input(row, text, "stop", 0, ""), text) for text in texts]
    with open_scorer(source.reward, source.weights, **scorer_limits(loaded)) as scorer:
        return list(dict.fromkeys(name for score in scorer.score(inputs) for name in score.parts))


def metric_names(source: Source) -> list[str]:
    """Return the names of the metrics of an evaluation of this source: of the task, the reward's parts and lengths.

    See evaluate/metrics.py. The parts of a user's reward are known only after it has run. So only its parts with a
    weight are returned.
    """
    known = dict.fromkeys(declared_parts(source.reward, source.weights))
    outcome = with_accuracy(dict.fromkeys(source.task.measured(source.rows[0].truth)), known, source.reward)
    names = ["reward", *(name for name in outcome if name not in ("label", "confidence"))]
    names += ("auc", "ece", "precision", "recall", "f1") if {"label", "confidence"} <= set(outcome) else ()
    names += source.task.measured_of_sets(source.rows[0].truth)
    return [*names, *(f"part/{part}" for part in known), "response_tokens", "truncated"]
