"""Validations during training: every set under every setting, and the choice of the best step.

Responses are generated and scored, or the loss of given responses is measured (`eval.metric = "loss"`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.dist import world
from vlmrl.evaluate.metrics import metric_value, task_problems
from vlmrl.evaluate.records import KEPT_BYTES, training_folder, write_evaluation
from vlmrl.evaluate.run import Evaluation, evaluate
from vlmrl.evaluate.significance import LEADING
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import EvalSetting
from vlmrl.rollout.engine import Generator
from vlmrl.setup.sources import EvalSet
from vlmrl.store.evaluated_rows import Role
from vlmrl.tasks.source import Source
from vlmrl.train.collect import PromptFeed, epochs_at
from vlmrl.train.journal import Journal
from vlmrl.train.session import Session
from vlmrl.train.targets import loss_metrics, loss_sum, target_items


@dataclass(frozen=True)
class Planned:
    """One evaluation of a validation: the rows of a set and a source, under a setting.

    Args:
        set_name, setting_name: "" for a recipe without `eval.sets`, or without settings.
        role: relation of the rows to the training.
        prefix: beginning of the names of its metrics, without a slash at the end.
        selects: whether its metric decides which step is the best.
    """

    source: Source
    setting: EvalSetting
    set_name: str
    setting_name: str
    role: Role
    prefix: str
    selects: bool


def validate(session: Session, generator: Generator) -> None:
    """Evaluate the current policy on every set under every setting, once per step at most."""
    feed, journal = session.feed, session.journal
    step = journal.progress.step
    if not feed.validation or journal.progress.validated == step:
        return
    world.phase("validation", step)
    if feed.recipe.eval.by_loss:
        validate_by_loss(session, generator)
        return
    evaluation_of = partial(answer, feed, generator, step)
    write_validation(journal, feed.recipe, feed.validation, feed.training_rows, evaluation_of)


def validate_by_loss(session: Session, generator: Generator) -> None:
    """Measure the loss of the rows' own responses on every set: the mean over the target tokens of all its rows."""
    feed, recipe = session.feed, session.recipe
    setting, metric = recipe.eval.selecting
    metrics: dict[str, Any] = {}
    sums = [0.0, 0]
    for one in planned(recipe, feed.validation):
        if one.setting_name == setting:  # settings are about sampling, and nothing is sampled
            items_of = partial(target_items, feed, generator)
            nats, tokens = loss_sum(session.learner, recipe, one.source, items_of)
            metrics |= loss_metrics(one.prefix, nats, tokens)
            sums = [sums[0] + nats, sums[1] + tokens] if one.selects else sums
    if sums[1]:
        metrics |= loss_metrics("eval", *sums)
    _count(session.journal, recipe, metrics, metrics.get(f"eval/{metric}", math.nan), feed.training_rows)


def planned(recipe: Recipe, sets: Sequence[EvalSet]) -> Iterator[Planned]:
    """Yield the evaluations of a validation: set by set, each setting after the other, all sources.

    Metrics are called `eval/[<source>/][<set>/][<setting>/]<metric>`: the source where there are several, set and
    setting where the recipe names some.
    """
    several = len({source.name for one in sets for source in one.sources}) > 1
    trained: dict[str, set[str]] = {}
    for one in sets:
        for source in one.sources:
            trained[source.name] = {d.split for d in recipe.data if d.path == source.dataset.path}
    chosen, _ = recipe.eval.selecting
    for one in sets:
        for setting_name, setting in recipe.eval.named_settings.items():
            for source in one.sources:
                words = ("eval", source.name if several else "", one.name, setting_name)
                yield Planned(
                    source,
                    setting,
                    one.name,
                    setting_name,
                    one.role(source, trained[source.name]),
                    "/".join(filter(None, words)),
                    one.selects and setting_name == chosen,
                )


def answer(feed: PromptFeed, generator: Generator, step: int, one: Planned) -> Evaluation:
    """Answer and score the rows of an evaluation.

    A service that a reward needs may be down: see `AttemptRule`. With "mask", one that is down for all rows is an
    error at step 0, and later there are no scores then.
    """
    recipe = feed.recipe
    return evaluate(
        generator,
        feed.encoder,
        one.source,
        feed.scorers[one.source.name],
        params=feed.evaluation[one.setting_name],
        seed=recipe.train.seed,
        max_rows=recipe.eval.max_rows,
        samples=one.setting.samples,
        world=feed.world,
        artifact_bytes=KEPT_BYTES // 8,
        patient=step > 0,
        rule=feed.rule,
        ranks=feed.ranks,
    )


def write_validation(
    journal: Journal,
    recipe: Recipe,
    sets: Sequence[EvalSet],
    training_rows: int,
    evaluation_of: Callable[[Planned], Evaluation],
) -> None:
    """Write the evaluations of a validation, and record whether the policy is the best so far.

    Args:
        training_rows: number of training rows of all sources.
        evaluation_of: answers and scores the rows of an evaluation; called once for each, and its result is written at
            once.
    """
    step = journal.progress.step
    settings, metric = recipe.eval, recipe.eval.selecting[1]
    values: list[float] = []
    metrics: dict[str, Any] = {}
    for one in planned(recipe, sets):
        evaluation = evaluation_of(one)
        for problem in task_problems(evaluation.summary):
            words = " ".join(filter(None, (one.source.name, one.set_name, one.setting_name)))
            journal.watcher.message(f"validation on {words}: {problem}")
        metrics |= _numbers(one.prefix, evaluation.summary["metrics"])
        if one.selects:
            values.append(metric_value(evaluation.summary, metric))
            # Curves and warnings of any recipe read the leading metrics under these names.
            leading = {name: m for name, m in evaluation.summary["metrics"].items() if name in LEADING}
            if one.prefix == "/".join(filter(None, ("eval", one.set_name, one.setting_name))):
                metrics |= _numbers("eval", leading)
        if journal.world.is_main:
            source = one.source
            folder = training_folder(journal.run.dir, source.split, source.name, step, one.setting_name)
            write_evaluation(folder, evaluation, _meta(one, recipe, step))
    if all(math.isnan(v) for v in values):
        problem = f"validation has no metric `{settings.metric}` (eval.metric)" if values else "no set selects"
        journal.watcher.message(f"{problem}: no step can be the best")
    # The mean over the sources decides which step is the best; NaN (no such metric) is never the best.
    _count(journal, recipe, metrics, sum(values) / len(values) if values else math.nan, training_rows)


def _count(journal: Journal, recipe: Recipe, metrics: dict[str, Any], value: float, training_rows: int) -> None:
    """Write the metrics of a validation, and record whether the policy is the best so far. `value`: what selects it."""
    step, settings = journal.progress.step, recipe.eval
    if settings.every_epochs is not None:
        metrics = {"eval/epoch": float(epochs_at(recipe, training_rows, step)), **metrics}
    best_before = journal.progress.best_value
    best = journal.progress.count_validation(value, settings.goal)
    if best:
        journal.run.set_best(step, settings.metric, value)
    metrics |= {"eval/metric": value, "eval/is_best": best}
    journal.log(step, "validation", metrics)
    # A tie with the start is kept as the best checkpoint, but it is no progress.
    journal.watcher.validation(step, metrics, best and value != best_before, settings.metric)


def _numbers(prefix: str, metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the logged numbers of a summary's metrics: the values, then the ends of their intervals."""
    values = {f"{prefix}/{name}": m["value"] for name, m in metrics.items()}
    return values | {f"{prefix}/{name}_{end}": m[end] for name, m in metrics.items() for end in ("low", "high")}


def _meta(one: Planned, recipe: Recipe, step: int) -> dict[str, Any]:
    source, setting = one.source, one.setting
    meta = {
        "step": step,
        "greedy": setting.temperature == 0,
        "checkpoint": None,
        "during": "training",
        "split": source.split,
        "source": source.name,
        "role": one.role,
        "max_rows": recipe.eval.max_rows,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
        "entry": source.entry,
    }
    if one.setting_name:
        limit = recipe.eval.token_limit(setting, recipe.rollout.max_new_tokens)
        meta |= {"setting": one.setting_name, "sampling": setting.record(limit)}
    return meta
