"""Tables of a recipe: their base class, the marks of keys, and `[algo]`, `[eval]`, `[judge]`, `[[rewards]]`.

Marks are written in the annotation of a key: `lr: Annotated[Positive, UPDATE] = 1e-6`. They say what a change on resume
does, which kind of run reads the key, and whether it names a file. Every key has exactly one `OnResume` mark. Every
number has a smallest and a largest value, far wider than any sensible run needs: they exclude values that would only
cause an overflow. Keys of `[algo]` are made from the cells in algo/algo_keys.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, WithJsonSchema, create_model, model_validator

from vlmrl import key_facts
from vlmrl.algo.algo_keys import CELLS, KL
from vlmrl.algo.algorithms import ALGORITHMS, value_in_row
from vlmrl.algo.cells import Cell
from vlmrl.key_facts import OnResume, Range
from vlmrl.recipe.toml_lines import Key

LENGTH = OnResume("free", "the length of the run")
CADENCE = OnResume("free", "validation, output and saving")
DISPLAY = OnResume("free", "the loggers that show the numbers")
SPEED = OnResume("free", "the place and speed of the same computation")
LIMIT = OnResume("free", "a bound that stops a run, or a permission")
MOVED = OnResume("free", "the path of a file; its content is compared by its hash")
ROWS = OnResume("asked", "the rows")
SOURCES = OnResume("asked", "the sources")
ORDER = OnResume("asked", "the order of the rows, and every sample")
PROMPT = OnResume("asked", "the prompt and its images", ("best",))
REWARD = OnResume("asked", "the reward", ("best",))
ENVIRONMENT = OnResume("asked", "the environment that answers the model", ("best",))
MEASURE = OnResume("asked", "the validation and its metrics", ("best",))
SAMPLING = OnResume("asked", "the sampling")
ENDING = OnResume("asked", "the end of sampled and validated responses", ("best",))
UPDATE = OnResume("asked", "the update")
RUN_KIND = OnResume("refused", "sft and rl are different runs: start a new one from the weights, --set model.path=RUN")
TEACHING = OnResume("asked", "the teacher")
WEIGHTS = OnResume("refused", "the weights are the checkpoint's: start a new run from the other model")
WEIGHT_TYPE = OnResume(
    "refused", "the saved weights and moments are of this type: start a new run from the weights, --set model.path=RUN"
)
TRAINED_PARTS = OnResume(
    "refused",
    "the checkpoint holds the moments of the parts that were trained, and no others: start a new run from the weights, "
    "--set model.path=RUN",
)
ADAPTER = OnResume(
    "refused",
    "the checkpoint holds this adapter and no other: merge it with `vlmrl merge RUN --out FOLDER`, then start a new "
    "run, --set model.path=FOLDER",
)


@dataclass(frozen=True)
class ReadBy:
    """Mark of a key that only one kind of run reads. A recipe of the other kind gets a warning if it sets the key."""

    kind: Literal["rl", "sft"]


RL_ONLY, SFT_ONLY = ReadBy("rl"), ReadBy("sft")


@dataclass(frozen=True)
class NamesFile:
    """Mark of a key whose value, or whose list of values, may name a file or folder.

    Args:
        or_name: whether the value may also be a plain name (of a task, a split, a reward, a logger). Then a plain name
            is never read as the path of a folder that has the same name.
    """

    or_name: bool = False


FILE, FILE_OR_NAME = NamesFile(), NamesFile(or_name=True)


MAX_PIXELS = 100_000_000
"""Maximum area of an image that is decoded, in pixels (data/images.py)."""


def bounds(limits: Range) -> Any:
    """Return the pydantic constraint for a number in this range."""
    return Field(ge=limits.ge, gt=limits.gt, le=limits.le, lt=limits.lt)


PositiveInt = Annotated[int, bounds(key_facts.POSITIVE_INT)]
Count = Annotated[int, bounds(key_facts.COUNT)]
Tokens = Annotated[int, Field(gt=0, le=2**31 - 1)]
Pixels = Annotated[int, Field(gt=0, le=MAX_PIXELS)]
Number = Annotated[float, bounds(key_facts.NUMBER)]
NotNegative = Annotated[float, bounds(key_facts.NOT_NEGATIVE)]
Positive = Annotated[float, bounds(key_facts.POSITIVE)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e9)]
Share = Annotated[float, Field(ge=1e-6, le=1e6)]
Fraction = Annotated[float, bounds(key_facts.FRACTION)]
PositiveFraction = Annotated[float, bounds(key_facts.POSITIVE_FRACTION)]
Text = Annotated[str, Field(min_length=1)]


class RecipeTable(BaseModel):
    """Base class of all recipe tables: unknown keys are errors, and types are never converted silently."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class Log(RecipeTable):
    """Output of a run: what is shown, and the loggers that receive it."""

    sample_every_steps: Annotated[Count, CADENCE] = 10
    """Steps between two prints of a sampled rollout. Some rollouts then go to the loggers too, with their images. 0 =
    never."""
    keep_rollouts: Annotated[PositiveInt | None, CADENCE] = None
    """Number of newest steps whose rollouts are kept on disk; those of older steps are deleted during the run. Left out
    = all steps."""
    keep_rollouts_every: Annotated[Count, CADENCE] = 0
    """With `keep_rollouts`: rollouts of older steps are kept too if the step is a multiple of this number; 0 = none."""
    sinks: Annotated[list[str], DISPLAY, FILE_OR_NAME] = []
    """Loggers besides metrics.jsonl, which is always written: "tensorboard", "wandb", "trackio", or a class of your own
    as `path/to/file.py:Class`; `vlmrl check` names the methods that it lacks. Keys and tokens come from the environment
    alone."""
    project: Annotated[Text | None, DISPLAY] = None
    """Project of wandb and trackio. Left out = WANDB_PROJECT for wandb, else "vlmrl"."""
    entity: Annotated[Text | None, DISPLAY] = None
    """Team or user that owns the wandb project. Left out = WANDB_ENTITY, else your default there. trackio's Space is
    named by TRACKIO_SPACE_ID."""
    group: Annotated[Text | None, DISPLAY] = None
    """Group of runs in wandb and trackio. Left out = none."""
    name: Annotated[Text | None, DISPLAY] = None
    """Name of the run in wandb and trackio. Left out = the run's `--name`, else its id."""


class AlgoRow(RecipeTable):
    """Algorithm of the GRPO family. `name`: a row of the table in algo/algorithms.py; other keys override its cells."""

    name: Annotated[str, KL, RL_ONLY] = "grpo"
    """Row of the algorithm table; `vlmrl recipe list --algos` lists the rows, and how they differ from others' code."""


def values_by_row(cell: str) -> dict[str, Any]:
    """Return row -> value of the cell if a recipe selects the row and does not set the cell; {} for other keys."""
    return {row: value_in_row(row, cell) for row in ALGORITHMS} if cell in CELLS else {}


def _default_words(cell: Cell) -> str:
    """Return the default in words; "" if the type of the key already contains the default."""
    values = {repr(value): value for value in values_by_row(cell.name).values()}
    if not cell.of_row:
        return ""
    if len(values) > 1:
        return "Default: the row's."
    (value,) = values.values()
    if value is None:
        return "Default: none."
    return f"Default: {str(value).lower() if isinstance(value, bool) else format(value, 'g') if cell.range else value}."


def _type(cell: Cell) -> Any:
    """Return the type of the recipe key, with its bounds or choices.

    For an open list of choices the type is a string, and recipe/checks.py compares its value with the choices. The JSON
    Schema lists the choices in both cases.
    """
    if cell.range is not None:
        return Annotated[cell.type, bounds(cell.range)]
    if cell.open_list:
        return Annotated[str, WithJsonSchema({"type": "string", "enum": list(cell.choices)})]
    return Literal[tuple(cell.choices)] if cell.choices else cell.type


def _key(cell: Cell) -> tuple[Any, Any]:
    """Return (type, default) of the recipe key. The default is None if the row determines the value."""
    text = f"{cell.description} {_default_words(cell)}".strip()
    value_type = _type(cell) | None if cell.of_row else _type(cell)
    default = None if cell.of_row else cell.default
    return Annotated[value_type, cell.on_resume, RL_ONLY], Field(default, description=text)


if TYPE_CHECKING:

    class Algo(AlgoRow):
        """The table `[algo]`. Every cell is an attribute: its value in the recipe; None = the row's value is used."""

        def __init__(self, name: str = "grpo", **cells: Any) -> None: ...

        def __getattr__(self, cell: str) -> Any: ...

else:
    Algo = create_model(
        "Algo",
        __base__=AlgoRow,
        __module__=__name__,
        __doc__=AlgoRow.__doc__,
        **{name: _key(cell) for name, cell in CELLS.items()},
    )


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


Money = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Prices(RecipeTable):
    """Prices of the judge's model, per million tokens. vlmrl knows no prices: copy them from your provider's list."""

    input: Annotated[Money, LIMIT]
    """Price of a million tokens of prompts, pictures included."""
    output: Annotated[Money, LIMIT]
    """Price of a million tokens of answers, thoughts included."""


class Judge(RecipeTable):
    """Model that the rewards `judge` and `vfig` ask. The key itself is never in a recipe."""

    provider: Annotated[Literal["gemini", "openai", "vllm"], REWARD] = "gemini"
    """gemini = Google's API, by its SDK; openai = OpenAI's API, or another one of its protocol; vllm = a server of your
    own with OpenAI's protocol, which needs no key."""
    model: Annotated[Annotated[str, Field(min_length=1, max_length=200)] | None, REWARD] = None
    """Name of the model, as the provider writes it. Left out = there is no judge."""
    rubric: Annotated[Text, REWARD, FILE_OR_NAME] = "vfig"
    """Name of a built-in rubric, or the path of a TOML file of your own. The reward `vfig` always uses its own."""
    endpoint: Annotated[Text | None, MOVED] = None
    """Address of the server, without a key or password. Left out = the provider's usual one; for vllm
    http://localhost:8000/v1."""
    key_env: Annotated[Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None, SPEED] = None
    """Environment variable that has the key. Left out = GEMINI_API_KEY or OPENAI_API_KEY, by the provider; none for
    vllm."""
    concurrency: Annotated[int, Field(ge=1, le=1024), SPEED] = 16
    """Maximum number of calls in flight in one process."""
    max_calls: Annotated[Annotated[int, Field(ge=1, le=2**53)] | None, LIMIT] = None
    """Maximum number of calls of a run: of all its processes and resumes together. The call after it is not sent: a
    checkpoint is saved and the run ends (exit code 75). Calls that were refused with an error status do not count.
    Left out = any number."""
    max_cost: Annotated[Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None, LIMIT] = None
    """Maximum cost of a run, in the currency of `prices`; see `max_calls`. A call that could exceed it is not sent.
    Left out = any cost."""
    prices: Prices | None = None
    outage: Annotated[Literal["mask", "wait", "zero"], REWARD] = "mask"
    """Outcome of a response that the judge does not answer. mask and wait = it has no score, and `reward.outage` says
    whether the run waits or leaves it out. zero = it scores 0 after `attempts`, as in VFig's published code: this
    trains the model for an outage, so choose it for evaluations alone."""
    outage_minutes: Annotated[float, Field(gt=0, le=10_080), LIMIT] = 30.0
    """With outage = "wait": longest wait of a request outside of runs, in minutes; runs: `reward.outage_minutes`."""
    cache: Annotated[Text | Literal[False] | None, SPEED] = None
    """File of judgements and of the budget, on a local disk; relative to the current folder. Left out = judge.sqlite in
    the run's folder, where resumes, evaluations and `reward-check` find it. false = nothing is kept, and the budget
    cannot be limited."""
    timeout_seconds: Annotated[float, Field(ge=0.01, le=3600), SPEED] = 120.0
    """Time limit of one call, from connecting to the last byte, in seconds."""
    attempts: Annotated[int, Field(ge=1, le=20), SPEED] = 6
    """Number of times that a request is sent before it counts as an outage, and number of invalid answers after which
    it has no judgement."""
    max_tokens: Annotated[int, Field(ge=64, le=2**20), REWARD] = 4096
    """Token limit of an answer. Thoughts of a model that thinks count too."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), REWARD] = 0.0
    """Sampling temperature. 0 = the most likely answer. Some models accept 1 alone."""

    @model_validator(mode="after")
    def _check_budget(self) -> Judge:
        if self.max_cost is not None and self.prices is None:
            raise ValueError(
                "`max_cost` needs `prices`; add: prices = { input = ..., output = ... } (per million tokens)"
            )
        if self.cache is False and (self.max_calls is not None or self.max_cost is not None):
            raise ValueError(
                "`max_calls` and `max_cost` are counted in the file of the cache, and `cache` is false; name a file"
            )
        return self

    def changed_by(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that differ from the defaults, for one reward with some values of its own.

        Address, key and prices belong to a provider, prices to a model: another one does not take them over.
        """
        values = self.model_dump(exclude_defaults=True)
        left_out = {"endpoint", "key_env", "prices"} if own.get("provider", self.provider) != self.provider else set()
        left_out |= {"prices"} if own.get("model", self.model) != self.model else set()
        return {key: value for key, value in values.items() if key not in left_out} | dict(own)


OF_SCORE = tuple(name for name, field in Judge.model_fields.items() if REWARD in field.metadata)
"""Keys on which scores depend. All others may change during a run."""


OF_TASK = "task"
"""Name that stands for the task's own reward."""
ARGUMENTS = ("reward.args", "rewards.args", "data.rewards.args")
"""Keys of the arguments of rewards, without positions in lists."""
OF_ONE_REWARD = ("name", "profile", "style", "args", "weights", "on_timeout")
"""Keys of `[reward]` that belong to a single reward. In a list, each reward has its own."""


class ListedReward(RecipeTable):
    """One of several rewards. The score is the sum of weight times score over the rewards of the list."""

    name: Annotated[str, REWARD, FILE_OR_NAME] = Field(min_length=1)
    """"task" = the task's own reward; else a built-in reward or `path/to/file.py:function`."""
    label: Annotated[str | None, REWARD] = None
    """Name of this reward, and the first half of the names of its parts: `label.part`, or `label` alone for a plain
    number. Left out = the function of `file.py:function`, else `name`."""
    weight: Annotated[Number, REWARD] = 1.0
    """Weight of this reward's score in the sum; 0 = it is reported, and does not count."""
    args: Annotated[dict[str, Any], REWARD] = {}
    """Keyword arguments of this reward; see `reward.args`."""
    gate: Annotated[str | None, REWARD] = None
    """Part of another reward of the list, such as "grade.accuracy". This reward scores only responses in which that
    part is above 0; in the others it adds 0, and is not called."""
    weights: Annotated[dict[str, Number], REWARD] = {}
    """Weight of each part within this reward's own score; see `reward.weights`."""
    profile: Annotated[str, REWARD] = "default"
    """Profile of the task's own reward, with `name = "task"`; see `reward.profile`."""
    style: Annotated[Literal["auto", "vlmrl", "trl", "verl", "easyr1"], REWARD] = "auto"
    """Calling convention of a `file.py:function`; see `reward.style`."""
    on_timeout: Annotated[dict[str, Number], REWARD] = {}
    """Parts of the score of a response that hangs or kills this reward twice; see `reward.on_timeout`."""
    timeout_seconds: Annotated[Annotated[float, Field(ge=1e-3, le=3600)] | None, SPEED] = None
    """Maximum wall time of one call of this reward in a worker, in seconds. Left out = `reward.timeout_seconds`."""
    _judge: Judge = PrivateAttr(default_factory=Judge)


def drop_replaced(raw: dict[str, Any], layer: Mapping[str, Any]) -> list[Key]:
    """Remove from `raw` what a later file replaces: its list replaces one reward, its `reward.name` replaces a list.

    Args:
        raw: values of the earlier files; changed in place.
        layer: values of the later file.
    Returns: the keys that were removed.
    """
    earlier, later = raw.get("reward"), layer.get("reward")
    if "rewards" in layer and isinstance(earlier, dict):
        keys = [key for key in OF_ONE_REWARD if key in earlier]
        for key in keys:
            del earlier[key]
        return [("reward", key) for key in keys]
    if "rewards" in raw and isinstance(later, Mapping) and "name" in later:
        del raw["rewards"]
        return [("rewards",)]
    return []
