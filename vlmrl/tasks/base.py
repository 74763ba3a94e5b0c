"""The class Task: one bundle that training, validation, `eval` and `reward-check` all use."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlmrl.errors import unknown
from vlmrl.metric import Metric
from vlmrl.tasks.attack import Attack
from vlmrl.tasks.figure import Figure
from vlmrl.tasks.truth_kinds import RowKind, TruthForm
from vlmrl.types import Message, RewardInput, Row, Score

if TYPE_CHECKING:
    from vlmrl.rewards.base import RewardSpec
    from vlmrl.tasks.own_prep import NewRow
    from vlmrl.tasks.own_task import OwnFile

REPLICATES = 400
Outcome = Mapping[str, float | None]
Measure = Callable[[RewardInput, Score], Outcome]
Verdict = tuple[RewardInput, Score, Outcome]
"""Response, its score, and its outcome."""
SetMetrics = Callable[[Sequence[Verdict]], Mapping[str, float | None]]


@dataclass(frozen=True)
class Task:
    """A task bound to one dataset.

    Args:
        name: as in `[[data]] task`.
        summary: one line for `vlmrl recipe list --tasks`.
        template: Jinja source of the user message. Variables: the row's columns and those of `variables`, never the
            truth.
        variables: further template variables that come from the dataset, such as the names of levels.
        template_file: where `template` is, for messages.
        validate: truth of a row -> its faults, in words; empty if there are none.
        profiles: reward profile (`[reward] profile`) -> name in REWARDS and arguments that the task binds; `default` is
            the task's own reward. Empty when the user must bring one.
        outcome: (what the reward saw, its score) -> measured numbers of one answer, e.g. accuracy 0/1, brier,
            confidence, label, parse_failure 0/1; None, or a number that is not finite = does not apply. A response that
            cannot be parsed counts as wrong, never as missing. The values that the reward has read are in
            `Score.detail`. The detail of an older rollout may be None; then they are read from the text again. If
            `accuracy` is among the numbers, pass@k is computed too.
        outcome_as: the reward that scores the rows -> `outcome`, reading responses as that reward does (its repairs and
            aliases); None = `outcome` whatever the reward.
        metrics: facts about numbers of `outcome` and `set_metrics`: their range and which way is better. Without them a
            difference of two evaluations is called neither better nor worse.
        by: fields of the truth, such as a count or a category. The accuracy is also given for each value of the field,
            as `accuracy/<field>-<value>`, if there are 2 to 20 different values.
        set_metrics: all responses of a split -> numbers of the whole, such as an average precision; None = not defined.
            It is called again for every resample, in which responses are there several times or not at all, and must
            take any list of at least one. None = the task has none.
        replicates: number of resamples for an interval of `set_metrics`, which is called once for each; 0 = no
            intervals.
        figures: all responses of a split -> figures for its report (tasks/figure.py), such as a confusion matrix.
        unit: row (`truth`, `columns`, `media`, `prompt_id`) -> a name; rows of one name are resampled together for the
            intervals of `set_metrics`. None = rows that share an image belong together.
        messages: row -> the prompt when the rows bring their own (task `table`); None = `template` is rendered.
        trace: (row, rng) -> a correct response in the task's own format, for `vlmrl sft`; None when there is none.
        attacks: inputs of rows -> tricks that the probe tries on the reward beside the known ones (tasks/attack.py).
        truths: how a table of responses holds the truths; None = each as a mapping, or a plain value as its `answer`.
        kind: facts about the rows for the probe, the data doctor and `diagnose` (tasks/truth_kinds.py); None = those
            that the truths show.
        prep: options -> split -> rows (tasks/own_prep.py), for `vlmrl prep file.py:function`; its parameters are the
            options of the command; one without a default must be given.
        own: the file of a user's own task (tasks/own_task.py).
        variant: how much a response must state, one of `variants`; "" for a task without variants.
    """

    name: str
    summary: str
    template: str
    validate: Callable[[Mapping[str, Any]], list[str]] = lambda truth: []
    variables: Mapping[str, Any] = field(default_factory=dict)
    profiles: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    outcome: Measure = lambda x, score: {}
    outcome_as: Callable[[RewardSpec | None], Measure] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    set_metrics: SetMetrics | None = None
    replicates: int = REPLICATES
    figures: Callable[[Sequence[Verdict]], Sequence[Figure]] = lambda verdicts: ()
    unit: Callable[[Row], Hashable] | None = None
    messages: Callable[[Row], tuple[Message, ...]] | None = None
    trace: Callable[[Row, random.Random], str] | None = None
    variant: str = ""
    variants: tuple[str, ...] = ()
    template_file: str = ""
    attacks: Callable[[Sequence[RewardInput]], Sequence[Attack]] = lambda rows: ()
    truths: TruthForm | None = None
    kind: RowKind | None = None
    prep: Callable[..., Mapping[str, Iterable[NewRow]]] | None = None
    own: OwnFile | None = None

    @property
    def reward(self) -> str | None:
        """Name in REWARDS of the task's own reward; None when the user must bring one."""
        return self.profiles["default"][0] if "default" in self.profiles else None

    @property
    def reward_args(self) -> Mapping[str, Any]:
        """Arguments of that reward that come from the dataset."""
        return self.profiles["default"][1] if "default" in self.profiles else {}

    def measured(self, truth: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the numbers that `outcome` measures of an answer to this truth."""
        from vlmrl.rewards.base import UNSCORED

        return tuple(self.outcome(RewardInput("", truth), UNSCORED))

    def measured_of_sets(self, truth: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of what `set_metrics` measures."""
        from vlmrl.rewards.base import UNSCORED

        if self.set_metrics is None:
            return ()
        x = RewardInput("", truth)
        verdict = (x, UNSCORED, self.outcome(x, UNSCORED))
        self.set_metrics([verdict, verdict])  # a resample may hold a response twice
        return tuple(self.set_metrics([verdict]))

    def has_profile(self, name: str) -> bool:
        """Return whether `profile` accepts the name."""
        return name == "default" or name in self.profiles

    def profile(self, name: str) -> tuple[str | None, Mapping[str, Any]]:
        """Return the reward and the arguments of a profile; (None, {}) for the default of a task without an own reward.

        Raises: RecipeError with the nearest name when the task has no such profile.
        """
        if name in self.profiles:
            return self.profiles[name]
        if name == "default":
            return None, {}
        raise unknown("reward profile", name, self.profiles, whose=f" of task `{self.name}`")
