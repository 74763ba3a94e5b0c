"""`vlmrl runs diagnose`: ranked causes why a run does not learn, with evidence from the run's folder alone.

Each rule reads the facts and yields the causes that it finds. If one cause explains another, the explained cause is
listed in `follows` of the first and comes last. For example, responses that are cut off do not meet the format, and
groups of such responses are dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from vlmrl.diagnose import response_causes as responses
from vlmrl.diagnose import score_causes as scores
from vlmrl.diagnose import training_causes as training
from vlmrl.diagnose.run_facts import RunFacts, read_facts
from vlmrl.diagnose.thresholds import LEVELS, Cause
from vlmrl.errors import StoreError
from vlmrl.store.runs import Run
from vlmrl.untrusted import number_of

Rule = Callable[[RunFacts], Iterator[Cause]]
RULES: tuple[Rule, ...] = (
    training.stopped,
    scores.failing_reward,
    scores.service_down,
    responses.chat_template,
    responses.prefilled_tag,
    responses.stop_string,
    responses.cut_off,
    responses.format_unmet,
    responses.tool_use,
    responses.tool_errors,
    responses.episode_limits,
    responses.other_coordinates,
    responses.other_layout,
    scores.constant_truth,
    training.unpaid,
    training.few_pixels,
    training.entropy_term,
    training.kl_term,
    training.overlong,
    training.weight_decay,
    training.clipped_gradient,
    training.clipped_ratio,
    training.learning_rate,
    training.gradients,
    training.no_updates,
    training.engine_gap,
    training.entropy,
    scores.pays_wrong,
    scores.pays_length,
    scores.constant_part,
    scores.no_contrast,
    responses.few_answers,
    training.validation,
    training.no_better_validation,
    training.risen_loss,
    training.lasting_changes,
)
RL_ONLY = frozenset(
    {training.kl_term, training.entropy_term, training.clipped_ratio, training.entropy, training.no_updates}
)
"""Rules on settings that act only in reinforcement learning, or on metrics that mean something else without it."""
_NO_CONTRAST = ("all_wrong", "dead_groups", "constant_part", "no_updates", "zero_gradient", "pays_wrong", "no_signal")
EXPLAINS: dict[str, tuple[str, ...]] = {
    "failing_reward": ("failed", *_NO_CONTRAST),
    "service_down": ("failed", *_NO_CONTRAST),
    "reward_without_accuracy": (
        "characters",
        "repetition",
        "one_response",
        "grown_length",
        "pays_length",
        "one_answer",
        "few_distinct",
        "entropy_collapse",
        "all_right",
        *_NO_CONTRAST,
    ),
    "one_response": ("one_answer", "few_distinct", "entropy_collapse", "dead_groups", "no_signal", "no_updates"),
    "repetition": ("few_distinct", "entropy_collapse", "dead_groups", "no_signal", "no_updates"),
    "characters": ("few_distinct", "entropy_collapse", "dead_groups", "no_signal", "no_updates"),
    "chat_template": ("cut_off", "format_unmet", "one_answer", *_NO_CONTRAST),
    "prefilled_tag": ("format_unmet", "cut_off", *_NO_CONTRAST),
    "temperature_high": ("format_unmet", "cut_off", *_NO_CONTRAST),
    "constant_reward": ("all_wrong", "all_right", "zero_gradient", *_NO_CONTRAST),
    "stop_string": ("format_unmet", "one_answer", "few_distinct", *_NO_CONTRAST),
    "cut_off": ("all_cut", "format_unmet", "few_distinct", *_NO_CONTRAST),
    "entropy_coef": (
        "collapse",
        "cut_off",
        "format_unmet",
        "entropy_collapse",
        "few_distinct",
        "lr_large",
        *_NO_CONTRAST,
    ),
    "weight_decay": ("collapse", "cut_off", "format_unmet", "failed", *_NO_CONTRAST),
    "clipped_gradient": ("lr_small",),
    "kl_large": ("lr_small",),
    "unpaid": ("all_right", "pays_length", *_NO_CONTRAST),
    "pays_wrong": ("all_wrong",),
    "other_coordinates": ("one_answer", "format_unmet", *_NO_CONTRAST),
    "other_layout": ("one_answer", *_NO_CONTRAST),
    "constant_truth": ("one_answer", "all_right", *_NO_CONTRAST),
    "format_unmet": _NO_CONTRAST,
    "lr_large": (
        "collapse",
        "cut_off",
        "format_unmet",
        "few_distinct",
        "entropy_collapse",
        "failed",
        "one_answer",
        "engine_gap",
        *_NO_CONTRAST,
    ),
    "temperature_low": ("few_distinct", "dead_groups", "constant_part", "no_updates"),
    "few_distinct": ("dead_groups", "no_updates", "no_signal"),
    "entropy_collapse": ("few_distinct", "dead_groups", "no_signal"),
    "all_wrong": ("dead_groups", "constant_part", "no_updates", "zero_gradient", "no_signal"),
    "all_right": ("dead_groups", "constant_part", "no_updates", "zero_gradient", "no_signal"),
    "constant_part": ("dead_groups", "no_updates", "no_signal"),
    "dead_groups": ("no_updates", "zero_gradient", "no_signal"),
}
"""Cause -> causes that may be only consequences of it."""


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a run.

    Args:
        run, status, steps: id of the run, its status (such as failed), and the number of steps in its metrics.
        causes: most likely first; causes that follow from another cause come last.
        figures: name -> means over the first and over the last third of the run, see FIGURES.
        read: text with the numbers of steps, updates and responses that the diagnosis is based on.
        notes: files that could not be read.
    """

    run: str
    status: str
    steps: int
    causes: list[Cause]
    figures: dict[str, list[float]]
    read: str
    notes: list[str]

    @property
    def healthy(self) -> bool:
        return all(cause.level == "note" for cause in self.causes)

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values."""
        return {**asdict(self), "healthy": self.healthy}


FIGURES = {
    "reward": "reward/mean",
    "loss": "loss/cross_entropy",
    "dead": "rollout/dead_group_share",
    "cut": "rollout/truncated_share",
    "tokens": "rollout/response_tokens_mean",
    "entropy": "policy/entropy",
    "gradient": "optim/grad_norm",
    "lr": "optim/lr",
}
"""Name of a figure in the output -> the metric whose means it gives."""


def diagnose(run: Run) -> Diagnosis:
    """Return the causes that keep a run from learning, with the main figures of the run.

    Raises: StoreError if the run has neither metrics nor rollouts, so that there is nothing to examine.
    """
    facts = read_facts(run)
    if not facts.train and not facts.responses and not run.manifest.error:
        raise StoreError(
            f"run {run.id} has no steps yet: there is nothing to diagnose",
            where=str(run.dir),
            hint="look again after a few steps (`vlmrl runs watch` shows them); before training: `vlmrl check RECIPE`",
        )
    rules = [rule for rule in RULES if rule not in RL_ONLY or run.manifest.kind == "rl"]
    causes = ranked([cause for rule in rules for cause in rule(facts)])
    series = {name: facts.series(metric) for name, metric in FIGURES.items()}
    third = {name: max(1, len(values) // 3) for name, values in series.items()}
    figures = {n: [fmean(v[: third[n]]), fmean(v[-third[n] :])] for n, v in series.items() if v}
    return Diagnosis(run.id, run.status, len(facts.train), causes, figures, _read(facts), facts.notes)


def _read(facts: RunFacts) -> str:
    """Return a text with the numbers of steps, updates and responses that the diagnosis is based on."""
    steps, updates = len(facts.train), len(facts.updates)
    with_update = "" if updates == steps else f" ({updates or 'none'} of them with an update)"
    rollouts = f"{number_of(len(facts.responses), 'response')} of {number_of(facts.steps_read, 'step')}"
    if facts.steps_read < facts.steps_saved:
        rollouts += f" (of {facts.steps_saved} that have rollouts: evenly spread, with the first and the last)"
    return f"{number_of(steps, 'step')} of metrics{with_update}, {rollouts}"


def ranked(causes: list[Cause]) -> list[Cause]:
    """Set `follows` of each cause, and return the causes sorted by level and weight, with consequences last."""
    alike: dict[str, list[Cause]] = {}
    for cause in causes:
        alike.setdefault(cause.name, []).append(cause)
    follows: set[str] = set()
    for cause in causes:
        if cause.level == "error" or cause.name in ("cut_off", "few_distinct", "entropy_collapse"):
            cause.follows = [n for n in EXPLAINS.get(cause.name, ()) if n in alike and n != cause.name]
            follows |= set(cause.follows)
    order = lambda c: (c.name in follows, LEVELS.index(c.level), -c.weight)  # noqa: E731
    return sorted(causes, key=order)
