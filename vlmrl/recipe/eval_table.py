"""The table `[eval]` of a recipe, and its named settings `[eval.settings.<name>]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vlmrl.recipe.key_rules import CADENCE, FILE_OR_NAME, LENGTH, MEASURE
from vlmrl.recipe.table import Count, NotNegative, PositiveFraction, PositiveInt, RecipeTable, Tokens

AUTO = "auto"
"""Value of `eval.metric` of a supervised run that leaves the choice open: loss or reward."""
LOSSES = ("loss", "perplexity")
"""Metrics of a validation by loss: no response is generated and no reward is needed."""
TEST_SPLITS = ("test", "testing")
"""Names of splits that need `eval.allow_test_split`, and that never select a checkpoint as one of `eval.sets`."""
SettingName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,39}$")]


class EvalSetting(RecipeTable):
    """Sampling of the responses of an evaluation, under a name of your own."""

    temperature: Annotated[NotNegative, MEASURE] = 0.0
    """Sampling temperature. 0 = greedy: the most likely token each time."""
    top_p: Annotated[PositiveFraction, MEASURE] = 1.0
    """Nucleus sampling: sample among the most likely tokens that together have this probability; 1 = off."""
    top_k: Annotated[Count, MEASURE] = 0
    """Sample among the k most likely tokens; 0 = off."""
    samples: Annotated[int, Field(gt=0, le=1_000_000), MEASURE] = 1
    """Responses per prompt, for pass@k, maj@k and mean@k."""
    max_new_tokens: Annotated[Tokens | None, MEASURE] = None
    """Token limit of a response; default: eval.max_new_tokens, else rollout.max_new_tokens."""

    def record(self, token_limit: int) -> dict[str, Any]:
        """Return the sampling as the summary of an evaluation has it. `token_limit`: the one that holds."""
        greedy = self.temperature == 0
        filters = {"top_p": self.top_p if self.top_p < 1 else None, "top_k": self.top_k or None}
        return {
            "greedy": greedy,
            "temperature": None if greedy else self.temperature,
            "samples": self.samples,
            "max_new_tokens": token_limit,
            **{name: value for name, value in filters.items() if value is not None and not greedy},
        }


GREEDY = EvalSetting()


class Eval(RecipeTable):
    """Validation during training. Decoding is greedy unless `[eval.settings.<name>]` tables say otherwise."""

    every_steps: Annotated[Count, CADENCE] = 10
    """Steps between validations; 0 = only at the start and at the end. `every_epochs` may be given instead; then this
    key is 0."""
    max_rows: Annotated[PositiveInt | None, MEASURE] = None
    """Use the first rows of the validation split only."""
    metric: Annotated[str, MEASURE] = "reward"
    """Metric that decides which checkpoint is the best: reward, accuracy, or any key of the evaluation summary. With
    `[eval.settings.<name>]` it is that of the first setting; `<name>/<metric>`, such as `pass8/pass@8`, is that of
    another one. In `vlmrl sft` also loss, the mean negative log-likelihood of the tokens of the rows' own responses, or
    perplexity, its exponential (goal = "min"): nothing is generated and no reward is needed. auto, the default there =
    loss if a source has no reward, else reward."""
    goal: Annotated[Literal["max", "min"], MEASURE] = "max"
    """Direction in which the metric improves: max = it rises, min = it falls."""
    patience: Annotated[PositiveInt | None, LENGTH] = None
    """Stop when the metric has not improved for this many validations."""
    max_new_tokens: Annotated[Tokens | None, MEASURE] = None
    """Token limit in validation; default: rollout.max_new_tokens."""
    allow_test_split: Annotated[bool, MEASURE] = False
    """Allow a split called test for training or validation. The run's manifest and every report then say so."""
    enabled: Annotated[bool, CADENCE] = True
    """false = no validation, although there are rows for it: no best checkpoint, no early stop."""
    at_start: Annotated[bool, CADENCE] = True
    """Validate before the first step too; false = the first validation is that of `every_steps`, or the one at the
    end."""
    sets: Annotated[list[str], MEASURE, FILE_OR_NAME] = []
    """Splits, or table files, that a validation evaluates; each applies to the sources that have such a split.
    `validation` means the rows of `data.validation` where a source names some. The first one that is not a test split
    selects the best checkpoint; a test split needs `allow_test_split`, and never selects. `vlmrl eval` takes the same
    sets. Left out = the validation rows alone."""
    every_epochs: Annotated[Annotated[float, Field(gt=0, le=1e6)] | None, CADENCE] = None
    """Number of passes over the data between validations, in place of `every_steps`. Epochs are counted as in
    `train.epochs`. The k-th validation comes after the first step by which k times that many epochs are drawn (rounded
    up to whole steps), so rounding does not add up. `at_start` is epoch 0, and the end of the run is always
    validated."""
    settings: Annotated[dict[SettingName, EvalSetting], MEASURE] = {}
    """Named settings of sampling, one table each: `[eval.settings.pass8]` with temperature, top_p, top_k, samples and
    max_new_tokens. Every set is evaluated under every setting, and metrics and evaluations carry the setting's name.
    Left out = one greedy response per prompt."""
    measures: Annotated[list[str] | None, MEASURE] = None
    """Measures that `vlmrl eval` takes of each response beside its reward, such as distances of pictures; the tasks'
    pages list them. "all" = all that the task has. Left out = those that need no weights, and those in
    `eval.weights`. Training takes none."""
    weights: Annotated[dict[SettingName, str], MEASURE] = {}
    """Weights of measures, in a table of their own: `[eval.weights]` with the measure's name = a folder, or a model of
    the hub. Left out = the published ones, from the hub's cache or the hub. A measure whose weights cannot be loaded is
    named as absent, with the reason."""

    @property
    def named_settings(self) -> Mapping[str, EvalSetting]:
        """All settings by name, in the recipe's order; the name is "" if the recipe has none."""
        return self.settings or {"": GREEDY}

    @property
    def selecting(self) -> tuple[str, str]:
        """(name of a setting, name of its metric) that decide which checkpoint is the best."""
        name, slash, metric = self.metric.partition("/")
        if slash and name in self.settings:
            return name, metric
        return next(iter(self.named_settings)), self.metric

    @property
    def by_loss(self) -> bool:
        """Return whether a validation measures the loss of given responses, and generates none."""
        return self.metric in LOSSES

    @property
    def validates_between(self) -> bool:
        """Return whether there are validations between the start and the end of a run."""
        return bool(self.every_steps or self.every_epochs)

    def token_limit(self, setting: EvalSetting, rollout_limit: int) -> int:
        """Return the token limit of a response under a setting. `rollout_limit`: `rollout.max_new_tokens`."""
        return setting.max_new_tokens or self.max_new_tokens or rollout_limit

    def longest(self, rollout_limit: int) -> int:
        """Return the largest token limit of any setting. `rollout_limit`: `rollout.max_new_tokens`."""
        return max(self.token_limit(setting, rollout_limit) for setting in self.named_settings.values())


def is_test_split(name: str) -> bool:
    """Return whether a split is called test."""
    return name in TEST_SPLITS
