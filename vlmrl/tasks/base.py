"""The class Task: prompt, truth, reward and metrics, as training, validation, `eval` and `reward-check` use them.

A measure is a number that `vlmrl eval` takes of responses beside their reward, such as the distance of pictures: never
in training, since it may need a model of its own. Measures that have weights are absent where the weights are, and the
summary says why. Metrics of a whole set of responses come from a count per response, summed over the set, or from an
examination of each response, such as an average precision. A task may turn responses into files (ResponseFile).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmrl.environments.calls import traced_turns, turn_text
from vlmrl.errors import DataError, RecipeError, listed, unknown
from vlmrl.metric import Metric
from vlmrl.tasks.attack import Attack
from vlmrl.tasks.figure import Figure
from vlmrl.tasks.positions import Positions
from vlmrl.tasks.truth_kinds import RowKind, TruthForm
from vlmrl.types import LeftOut, Message, RewardInput, Row, Score, Size, TraceTurn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vlmrl.rewards.base import RewardSpec


VALID, CEILING = "valid", "ceiling"
"""Last words of metrics: `<measure>/valid` is over the responses that can be measured at all, as papers give it;
`<measure>/ceiling` is the measure of the truth beside itself. `<measure>` alone is over all responses, with the worst
value for those that cannot be measured."""
EVERYTHING = "all"
"""Name in `eval.measures` that means every measure of the task."""
Outcome = Mapping[str, float | None]
"""Name of a metric -> its value; None = it is not defined, or does not apply."""


@dataclass(frozen=True)
class MeasureSettings:
    """Measures that are to be taken, and with what.

    Args:
        weights: measure -> folder, or model of the hub, in place of the task's own (`eval.weights`).
        device: as `model.device` of a recipe.
        timeout_seconds, memory_mb, workers: limits and number of worker processes, as of a reward.
    """

    names: tuple[str, ...]
    weights: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    timeout_seconds: float = 10.0
    memory_mb: int = 4096
    workers: int = 1


class Measurer(Protocol):
    """Measures that are ready."""

    @property
    def absent(self) -> Mapping[str, str]:
        """Name of each measure that was to be taken and cannot be -> why."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """Reasons why responses were not measured through no fault of theirs, one text for each."""
        ...

    def measure(self, inputs: Sequence[RewardInput]) -> Sequence[Outcome]:
        """Return the metrics of each response by name."""
        ...

    def close(self) -> None:
        """End the worker processes, and forget the models."""
        ...


@dataclass(frozen=True)
class Measures:
    """Measures of a task. The facts about their metrics stand in `Task.metrics`, by the name of the measure.

    Args:
        names: all of them, in the order in which they are shown.
        default: those that are taken if a recipe names none: they need no weights.
        weights: measure -> its weights, a model of the hub or "" if a recipe must name them.
        open: settings -> measurer.
    """

    names: tuple[str, ...]
    default: tuple[str, ...]
    weights: Mapping[str, str]
    open: Callable[[MeasureSettings], Measurer]

    def chosen(self, names: Sequence[str] | None, weights: Mapping[str, str], task: str) -> tuple[str, ...]:
        """Return the measures that a recipe asks for, in the order of `names`.

        Args:
            names: `eval.measures`; None = the default ones, and those whose weights the recipe names.
            weights: `eval.weights`.
        Raises: RecipeError for a measure that the task does not have, or that has no weights.
        """
        for name in [name for name in names or () if name != EVERYTHING]:
            if name not in self.names:
                raise unknown("measure", name, (*self.names, EVERYTHING), whose=f" of task `{task}`")
        for name in weights:
            if name not in self.weights:
                hint = listed(name, self.weights, "those with weights")
                raise RecipeError(f"eval.weights names `{name}`, no measure with weights of task `{task}`", hint=hint)
        if names is None:
            return tuple(name for name in self.names if name in self.default or name in weights)
        return tuple(name for name in self.names if name in names or EVERYTHING in names)


GradedResponse = tuple[RewardInput, Score, Outcome]
"""Response, its score, and its outcome."""


@dataclass(frozen=True)
class PooledMetrics:
    """Metrics that depend only on sums over responses, such as the ratio of two counts.

    As `Task.set_metrics`, they are measured in evaluations, and in training at every step on the responses of all
    ranks. The sums are stored with them. So the metrics of several steps, runs or sources together can be computed from
    the added sums.

    Args:
        count: response -> its integers by name; the same names for every response, none of them that of a metric.
        metrics: sums by name -> metrics by name; None = not defined, such as a ratio whose denominator is 0.
    Example: shouting = PooledMetrics(
        count=lambda graded: {"loud": int(graded[0].response.isupper()), "all": 1},
        metrics=lambda sums: {"shouting": sums["loud"] / sums["all"] if sums["all"] else None},
    )
    """

    count: Callable[[GradedResponse], Mapping[str, int]]
    metrics: Callable[[Mapping[str, int]], Outcome]

    def sums(self, responses: Iterable[GradedResponse]) -> dict[str, int]:
        """Return the sums over responses; {} without responses."""
        total = Counter[str]()
        for graded in responses:
            total.update(self.count(graded))
        return dict(total)

    def __call__(self, responses: Iterable[GradedResponse]) -> Outcome:
        """Return the metrics of responses, at least one."""
        return self.metrics(self.sums(responses))


@dataclass(frozen=True)
class AccumulatedMetrics:
    """Metrics that are accumulated from facts about single responses.

    As `Task.set_metrics`, a resample examines no response again. Without this class, each of the 400 resamples would.

    Args:
        examine: response -> facts about it.
        accumulate: facts about all responses, in their order -> function from how often each response is taken, [N], to
            the metrics by name; None = not defined.
        reflected: range of the metrics, if they are biased for few responses, as an average precision is. Resamples
            repeat this bias, so the percentiles are reflected at the value and cut to this range. None = they are not.
    """

    examine: Callable[[GradedResponse], Any]
    accumulate: Callable[[Sequence[Any]], Callable[[NDArray[np.int64]], Outcome]]
    reflected: tuple[float, float] | None = None

    def __call__(self, responses: Sequence[GradedResponse]) -> Outcome:
        """Return the metrics of responses, at least one."""
        import numpy as np

        facts = [self.examine(graded) for graded in responses]
        return self.accumulate(facts)(np.ones(len(facts), dtype=np.int64))


@dataclass(frozen=True)
class NoFile:
    """Result for a response that gives no file. `reason`: one sentence for people."""

    reason: str


Draw = Callable[[Sequence[str]], Sequence[bytes | NoFile]]
"""Contents of files -> a picture of each as PNG bytes, or the reason why there is none."""


@dataclass(frozen=True)
class ResponseFile:
    """Kind of file that a response contains, for `vlmrl generate --images`.

    Args:
        kind: word for messages, such as "SVG code".
        suffix: ending of the files, such as ".svg".
        content: text of a response -> content of its file, or the reason why there is none. Responses are hostile.
        drawing: opens what draws the files; it is closed at the end. None = there are no pictures.
    """

    kind: str
    suffix: str
    content: Callable[[str], str | NoFile]
    drawing: Callable[[], AbstractContextManager[Draw]] | None = None


REPLICATES = 400
Measure = Callable[[RewardInput, Score], Outcome]
SetMetrics = Callable[[Sequence[GradedResponse]], Outcome] | PooledMetrics


def no_outcome(x: RewardInput, score: Score) -> Outcome:
    """Return no numbers, as the outcome of a task that measures nothing of its own."""
    return {}


@dataclass(frozen=True)
class NewRow:
    """Row that a task's `prep` makes.

    Args:
        truth: the known right facts, as JSON values; responses are compared with them.
        images: in the order of the prompt's `<image>` marks; each a PIL image, a file's path, a file's bytes, or a
            `SoundImage`.
        columns: variables of the prompt's template; all rows of a split have the same column names.
        id: the prompt id; None = made from the content of the row.
        origin: place in the user's source, for messages; "" = unknown.
    """

    truth: Mapping[str, Any]
    images: Sequence[Any] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    origin: str = ""


@dataclass(frozen=True)
class OwnFile:
    """File of a user's own task, as it was read.

    Args:
        path: the path as the user wrote it.
    """

    path: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Task:
    """A task bound to one dataset.

    Args:
        name: as in `[[data]] task`.
        summary: one line for `vlmrl recipe list --tasks`.
        template: Jinja source of the user message. Variables: the row's columns and those of `variables`, never the
            truth.
        variables: further template variables that come from the dataset, such as the names of levels.
        template_file: path of the template, for messages.
        validate: truth of a row -> its faults, in words; an empty list if the truth has no fault.
        profiles: reward profile (`[reward] profile`) -> name in REWARDS and arguments that the task binds; `default` is
            the task's own reward. Empty when the user must provide a reward.
        outcome: (input of the reward, its score) -> measured numbers of one answer, e.g. accuracy 0/1, brier,
            confidence, label, parse_failure 0/1; None, or a number that is not finite = does not apply. A response that
            cannot be parsed counts as wrong, never as missing. The values that the reward has read are in
            `Score.detail`. The detail of an older rollout may be None; then they are read from the text again. If
            `accuracy` is among the numbers, pass@k is computed too.
        outcome_as: takes the reward that scores the rows, and returns an `outcome` that reads responses as this reward
            does (with its repairs and aliases); None = `outcome` is used with every reward.
        metrics: range and better direction of the numbers of `outcome` and `set_metrics`. For a metric that is not
            listed, a difference of two evaluations is called neither better nor worse.
        by: fields of the truth, such as a count or a category. The accuracy is also reported for each value of the
            field, as `accuracy/<field>-<value>`, if there are 2 to 20 different values.
        set_metrics: all responses of a split -> metrics of the whole split, such as an average precision; the value
            None = not defined. It is also called once per resample, in which a response may be repeated or missing, so
            it must accept any list of at least one response. PooledMetrics are measured in training too, at every
            step. AccumulatedMetrics (tasks/base.py) examine each response once. None = the task has no such
            metrics.
        replicates: number of resamples for an interval of a metric of `set_metrics`; 0 = no intervals.
        figures: all responses of a split -> figures for its report (tasks/figure.py), such as a confusion matrix.
        unit: row (`truth`, `columns`, `media`, `prompt_id`) -> a name. Rows with the same name are resampled together
            for the intervals of `set_metrics`. None = rows that share an image are resampled together.
        messages: row -> its prompt, if the rows have their own prompts (task `table`); None = `template` is rendered.
        trace: (row, rng) -> a correct response in the task's own format, for `vlmrl sft`; None = the task has none. A
            list has the assistant's turns of an episode: texts, calls (`Call`), or lists of these. A `Message` between
            them answers in the place of an environment. Callers use `correct_turns` and `correct_response`.
        trace_sees: whether `trace` takes a third argument: (width, height) of each image as the model sees it.
        attacks: inputs of rows -> tricks of this task, which the probe tries besides the known ones (tasks/attack.py).
        truths: form of the truths in a table of responses; None = a cell holds a mapping, or a value for `answer`.
        positions: reward that scores the rows -> reading of positions from responses (tasks/positions.py), as this
            reward reads them. `check` and `try` draw them and compare coordinate spaces. None = the answers are no
            positions.
        measures: what `vlmrl eval` measures on responses beside their reward (tasks/base.py); None = nothing.
        kind: facts about the rows for the probe, the data doctor and `diagnose` (tasks/truth_kinds.py); None = the kind
            is found from the truths.
        notes: all truths of a new dataset -> notes of the data doctor: name of the check -> ("ok", "look" or "bad",
            what it found). For what one truth alone does not show.
        prep: options -> split -> rows (tasks/own_prep.py), for `vlmrl prep file.py:function`. Its parameters are the
            options of the command; an option without a default is required.
        file: kind of file that a response contains; `vlmrl generate --images` writes it. None = responses are texts.
        environments: path of a Python file: `environment.name = ":NAME"` is NAME in it. Of a user's task, its own file.
        environment_args: arguments that the task binds to a class there; those of the recipe replace them.
        own: the file of a user's own task (tasks/user_task.py).
        variant: name of the task's variant (`TaskEntry.variants`): it sets how much a response must state. "" = the
            task has no variants.
    """

    name: str
    summary: str
    template: str
    validate: Callable[[Mapping[str, Any]], list[str]] = lambda truth: []
    variables: Mapping[str, Any] = field(default_factory=dict)
    profiles: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    outcome: Measure = no_outcome
    outcome_as: Callable[[RewardSpec | None], Measure] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    set_metrics: SetMetrics | None = None
    replicates: int = REPLICATES
    figures: Callable[[Sequence[GradedResponse]], Sequence[Figure]] = lambda responses: ()
    unit: Callable[[Row], Hashable] | None = None
    messages: Callable[[Row], tuple[Message, ...]] | None = None
    trace: Callable[..., str | Sequence[Any]] | None = None
    trace_sees: bool = False
    variant: str = ""
    variants: tuple[str, ...] = ()
    template_file: str = ""
    attacks: Callable[[Sequence[RewardInput]], Sequence[Attack]] = lambda rows: ()
    truths: TruthForm | None = None
    positions: Callable[[RewardSpec | None], Positions] | None = None
    measures: Measures | None = None
    kind: RowKind | None = None
    notes: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, tuple[str, str]]] = lambda truths: {}
    prep: Callable[..., Mapping[str, Iterable[NewRow | LeftOut]]] | None = None
    file: ResponseFile | None = None
    environments: str = ""
    environment_args: Mapping[str, Any] = field(default_factory=dict)
    own: OwnFile | None = None

    @property
    def reward(self) -> str | None:
        """Name in REWARDS of the task's own reward; None when the user must bring one."""
        return self.profiles["default"][0] if "default" in self.profiles else None

    def correct_response(self, row: Row, rng: random.Random, seen_sizes: Sequence[Size] = ()) -> str:
        """Return a correct response to a row as text, made by `trace`: all its turns, calls in the format `hermes`.

        Args, Raises: see `correct_turns`.
        """
        turns = self.correct_turns(row, rng, seen_sizes)
        return "\n".join(turn_text(turn, "hermes") for turn in turns if not isinstance(turn, Message))

    def correct_turns(self, row: Row, rng: random.Random, seen_sizes: Sequence[Size] = ()) -> tuple[TraceTurn, ...]:
        """Return the turns of a correct response to a row, made by `trace`; one for a text.

        Args:
            rng: chooses among the task's templates.
            seen_sizes: (width, height) in pixels of each image as the model sees it; () = unknown: they count as not
                resized. Responses that are trained on need the true sizes.
        Raises: DataError when the task has no `trace`; also the errors of the task.
        """
        if self.trace is None:
            raise DataError(f"task `{self.name}` writes no correct responses", where=row.place)
        sizes = tuple(seen_sizes) or tuple((media.width, media.height) for media in row.media)
        return traced_turns(self.trace(row, rng, sizes) if self.trace_sees else self.trace(row, rng), row.place)

    def named_environment(self, name: str, args: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the name and the arguments of an environment: `:NAME` is NAME in the file `environments`.

        Raises: RecipeError if there is no such file.
        """
        if not name.startswith(":"):
            return name, args
        if not self.environments:
            message = f"task `{self.name}` has no environments of its own, such as `{name}`"
            raise RecipeError(message, where="[environment] name", hint="name one as path/to/file.py:name")
        return f"{self.environments}{name}", {**self.environment_args, **args}

    def measured(self, truth: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the numbers that `outcome` measures on a response to a row with this truth."""
        from vlmrl.rewards.base import UNSCORED

        return tuple(self.outcome(RewardInput("", truth), UNSCORED))

    def measured_of_sets(self, truth: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the metrics that `set_metrics` computes for rows with this truth."""
        from vlmrl.rewards.base import UNSCORED

        if self.set_metrics is None:
            return ()
        x = RewardInput("", truth)
        graded = (x, UNSCORED, self.outcome(x, UNSCORED))
        self.set_metrics([graded, graded])  # it must accept a repeated response, as resamples contain them
        return tuple(self.set_metrics([graded]))

    def has_profile(self, name: str) -> bool:
        """Return whether `profile` accepts the name."""
        return name == "default" or name in self.profiles

    def profile(self, name: str) -> tuple[str | None, Mapping[str, Any]]:
        """Return the reward and arguments of a profile; (None, {}) for `default` if the task has no reward of its own.

        Raises: RecipeError with the nearest name when the task has no such profile.
        """
        if name in self.profiles:
            return self.profiles[name]
        if name == "default":
            return None, {}
        raise unknown("reward profile", name, self.profiles, whose=f" of task `{self.name}`")


def prepared_task(
    name: str, summary: str, info: Mapping[str, Any], template: str, *, environments: str = "", **fields: Any
) -> Task:
    """Return a task bound to a dataset that `vlmrl prep` made.

    Args:
        info: dataset.json of the dataset, or the facts of a table.
        template, environments: files in this folder, for these fields.

    Raises: DataError if the dataset is a table that was not prepared: its rows lack what the task needs.
    """
    if "style" in info:
        raise DataError(
            f"task `{name}` needs a prepared dataset, not a table",
            hint=f"make one: `vlmrl prep {name} {info['entry']['path']}`",
        )
    folder = Path(__file__).parent
    fields = {"template_file": f"tasks/{template}", **fields}
    fields["environments"] = str(folder / environments) if environments else ""
    return Task(name, summary, (folder / template).read_text(encoding="utf-8"), **fields)
