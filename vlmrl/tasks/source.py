"""The class Source: an opened `[[data]]` entry of a recipe with its rows, task, prompt and reward; order of the rows.

The reward is a single one, or several. The outcome of a scored response is that of its task, with the part of the
reward that is an accuracy. `PromptStream` mixes the rows of several sources by their shares.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from vlmrl.algo.credit import RewardWeights
from vlmrl.algo.credit import Weights as PartWeights
from vlmrl.data.dataset import Dataset, require_split
from vlmrl.data.open_dataset import open_dataset
from vlmrl.environments.processes import LoadedEnvironment, load_environment
from vlmrl.environments.row_fields import Repeats, repeats_of, sampled
from vlmrl.errors import DataError, RecipeError, VlmrlError, listed
from vlmrl.recipe.schema import Data, Environment, Recipe, Reward
from vlmrl.recipe.tables import AUTO, LOSSES, OF_TASK, ListedReward
from vlmrl.recipe.template import read_template
from vlmrl.redaction.redact import learn
from vlmrl.rewards.base import Member, RewardSpec, accuracy_words, with_accuracy
from vlmrl.tasks import task_of
from vlmrl.tasks.base import Measure, Outcome, PooledMetrics, Task, no_outcome
from vlmrl.tasks.prompt import compile_template, earlier_prints, place_images, prompt_print, render_user
from vlmrl.types import Finish, Group, Message, RewardInput, Row, Rows, ScoredSample, hash64

if TYPE_CHECKING:
    from vlmrl.data.encode import Encoder

Chosen = tuple["RewardSpec", dict[str, float]]
"""Reward, and the weights of its parts; of several rewards, the weights of the rewards by their labels."""


def reward_of(data: Data, reward: Reward, task: Task, scored: bool = True) -> Chosen:
    """Return the reward of an entry: its list of rewards, or a single one.

    A single one is the entry's own, else that of `[reward] name`, else that of the task's profile `[reward] profile`.
    `[reward] args` and `[reward] weights` belong to the reward that `[reward]` selects. They apply to the entry's own
    reward only if `[reward] name` is the same reward or is not set. The arguments replace those that the task binds,
    key by key, also within a table (such as `aliases`).

    Args:
        scored: whether responses will be scored. If not, a missing reward is no error, and NO_REWARD takes its place.
    Raises: RecipeError or RewardError for a reward that is missing or cannot be loaded.
    """
    from vlmrl.rewards import name_accuracy
    from vlmrl.rewards.base import NO_REWARD
    from vlmrl.rewards.several import compose

    if data.all_rewards:
        several = compose([_member(one, data, task) for one in data.all_rewards])
        return name_accuracy(several, reward.accuracy), dict(several.weights)
    is_named = bool(data.reward or reward.name)
    own, own_args = (None, {}) if is_named and not task.has_profile(reward.profile) else task.profile(reward.profile)
    name = data.reward or reward.name or own
    if name is None and not scored:
        return NO_REWARD, {}
    if name is None:
        raise _no_reward(task, data)
    meant = data.reward is None or reward.name in (None, data.reward)
    settings = reward if meant else Reward(style=reward.style)
    settings._judge = reward._judge
    spec, weights = _load(name, settings, own_args if name == own else {})
    return name_accuracy(spec, settings.accuracy), weights


def _member(one: ListedReward, data: Data, task: Task) -> Member:
    """Return one of the several rewards of an entry."""
    from vlmrl.rewards.several import label_from

    has_profile = one.name == OF_TASK or task.has_profile(one.profile)
    own, own_args = task.profile(one.profile) if has_profile else (None, {})
    name = own if one.name == OF_TASK else one.name
    if name is None:
        raise _no_reward(task, data)
    spec, weights = _load(name, one, own_args if name == own else {})
    return Member(
        one.label or label_from(one.name),
        spec,
        weights,
        one.weight,
        one.gate,
        one.timeout_seconds,
        of_task=name in {profile_name for profile_name, _ in task.profiles.values()},
    )


def _no_reward(task: Task, data: Data) -> RecipeError:
    return RecipeError(
        f"task `{task.name}` has no reward of its own",
        where=data.path,
        hint="name one, `path/to/file.py:function` or a built-in (`vlmrl recipe list --rewards`): [reward] name, or "
        "--set reward.name=NAME; "
        "a supervised start needs none where eval.metric is left out or is loss",
    )


def _load(name: str, settings: Reward | ListedReward, own_args: Mapping[str, Any]) -> Chosen:
    """Return a reward with a recipe's settings. `own_args`: the arguments that the task binds."""
    from vlmrl.rewards import earn_on_timeout
    from vlmrl.rewards.base import check_weight_sizes
    from vlmrl.tasks.builtin_rewards import load_reward, takes_judge

    args = dict(own_args) | {key: _over(own_args.get(key), value) for key, value in settings.args.items()}
    if takes_judge(name):
        args["judge"] = settings._judge.changed_by(args.get("judge", {}))
    spec = earn_on_timeout(load_reward(name, args=args, style=settings.style), settings.on_timeout)
    weights = dict(settings.weights or spec.weights)
    check_weight_sizes(weights, f"reward `{name}`")
    unknown = [part for part in weights if part not in spec.ranges] if spec.is_builtin else []
    if unknown:
        raise RecipeError(
            f"reward `{name}` has no part `{unknown[0]}`",
            where="[reward] weights" if isinstance(settings, Reward) else "weights of [[rewards]]",
            hint=listed(unknown[0], spec.ranges, "its parts"),
        )
    return spec, weights


def _over(own: Any, given: Any) -> Any:
    """Return the recipe's value of an argument. Two tables are merged; the recipe's keys replace the task's."""
    return {**own, **given} if isinstance(own, Mapping) and isinstance(given, Mapping) else given


def outcome_with(task: Task, spec: RewardSpec) -> Measure:
    """Return the task's measure of a response that this reward scores.

    Of several rewards, the measure reads the score of the task's own one, as if it were the only one; without one, it
    reads the whole score.
    """
    from vlmrl.rewards.several import score_of, task_member

    member = task_member(spec) if spec.members else None
    read_as = member.spec if member is not None else None if spec.members else spec
    measure = task.outcome if task.outcome_as is None else task.outcome_as(read_as)
    return measure if member is None else lambda x, score: measure(x, score_of(score, member))


def accuracy_notes(spec: RewardSpec) -> Sequence[str]:
    """Return a note if several rewards have an accuracy, as far as this is known before they have run."""
    from vlmrl.rewards.base import other_choices
    from vlmrl.rewards.several import declared_parts

    return [note] if spec.members and (note := other_choices(declared_parts(spec, {}), spec)) else []


TABLE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
VALIDATION = "validation"
"""Split that training validates on, unless `data.validation` names other rows."""


@dataclass
class Source:
    """Rows with everything needed to render their prompts and to score responses.

    Args:
        name: name of the source in metrics and rollouts.
        rows: the rows; each is created when it is indexed.
        share: relative share of the prompts of a step.
        weights: reward part -> weight: the recipe's weights if it sets any, else the reward's own. Of several rewards,
            label -> weight of the reward.
        template: Jinja source of the user message; "" = the rows have their own messages.
        prompt_sha256, prompt_earlier: fingerprint of the prompt without the row (`prompt_print`), now and formerly.
        notes: messages for the user; some are added while rows are rendered.
        environment, environment_settings: the tools of the model (None = a response is one turn), and their table.
        repeats: columns that repeat the truth in the entry's training rows: an environment gets none that it does not
            name.
        demonstrations: what the entry of the recipe names as demonstrations.
    """

    name: str
    task: Task
    dataset: Dataset
    split: str
    rows: Sequence[Row]
    share: float
    reward: RewardSpec
    weights: Mapping[str, float]
    template: str
    template_path: str
    system: str | None
    prompt_sha256: str
    prompt_earlier: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    environment: LoadedEnvironment | None = None
    environment_settings: Environment = field(default_factory=Environment)
    repeats: Repeats = field(default_factory=dict)
    demonstrations: str = "rows"

    @property
    def environment_record(self) -> dict[str, Any]:
        """Record of the environment; {} without one."""
        return {**self.environment.record, "repeats": dict(self.repeats)} if self.environment else {}

    @property
    def entry(self) -> dict[str, Any]:
        """Entry of a recipe's `[[data]]` that opens these rows, with their images, from any folder."""
        return self.dataset.info.get("entry") or {"path": str(Path(self.dataset.path).resolve())}

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def part_weights(self) -> PartWeights:
        """Weights of the reward's parts; of several rewards, those of each."""
        if not self.reward.members:
            return self.weights
        own = self.weights
        return [
            RewardWeights(m.label, own.get(m.label, 0.0), {m.name_of(p): w for p, w in m.weights.items()}, m.gate_part)
            for m in self.reward.members
        ]

    @property
    def prompt_record(self) -> dict[str, Any]:
        """Record of the prompt in a run's manifest, with the environment whose tools it shows."""
        own = {"environment": self.environment_record} if self.environment else {}
        return {"source": self.name, "sha256": self.prompt_sha256, "earlier": list(self.prompt_earlier), **own}

    def encoder(self, encoder: Encoder, row: Row) -> Encoder:
        """Return the encoder of a row's prompt, which shows the tools of its environment, else those of the row."""
        if self.environment is None:
            return encoder.with_tools(row.tools) if row.tools else encoder
        own = self.environment.of(row)
        return encoder.with_tools(own.tools, self.environment_settings.calls, is_open=own.is_open)

    def messages(self, row: Row) -> tuple[Message, ...]:
        """Return the prompt: the system message if there is one, then the other messages, with one mark per image.

        Raises: DataError with the row when the template fails, or the `<image>` marks do not match its images.
        """
        if self.template:
            text = render_user(self.template, row, self.task.variables, where=self.template_path)
            turns: tuple[Message, ...] = (Message("user", text),)
        elif self.task.messages is not None:
            turns = self.task.messages(row)
        else:
            raise RecipeError(
                f"task `{self.task.name}` has no prompt", where=self.name, hint="give `prompt` in `[[data]]`"
            )
        if self.system is not None:
            turns = (Message("system", self.system), *(turn for turn in turns if turn.role != "system"))
        turns, moved = place_images(turns, row)
        note = "prompts have no <image> mark: the images were put in front of the first user message"
        if moved and note not in self.notes:
            self.notes.append(note)
        return turns

    def reward_input(self, row: Row, text: str, finish: Finish, num_tokens: int, prompt: str) -> RewardInput:
        """Return the input of the reward for one response. Images are decoded only if the reward needs them."""
        images = [self.dataset.image(media) for media in row.media] if self.reward.needs_images else []
        measures = self.environment is not None and self.environment.of(row).own_reward
        measured = {"reward": 0.0} if measures else {}  # an episode puts its own in its place
        return RewardInput(text, row.truth, row.columns, images, finish, num_tokens, prompt, measured=measured)

    def with_split(self, split: str) -> Source:
        """Return the same source for another split of its dataset."""
        require_split(self.dataset, split)
        return replace(self, split=split, rows=self.dataset.rows(split), notes=self.notes)


def scores_responses(recipe: Recipe) -> bool:
    """Return whether a run of the recipe needs a reward.

    Supervised training needs none, unless its validation measures something else than the loss.
    """
    return recipe.kind == "rl" or (recipe.eval.enabled and recipe.eval.metric not in (AUTO, *LOSSES))


def open_source(data: Data, reward: Reward, *, split: str | None = None, scored: bool = True) -> Source:
    """Open a `[[data]]` entry with its task, prompt and reward.

    Args:
        split: the split to open; None = the entry's own.
        scored: whether responses will be scored. If not, a missing reward is no error, and NO_REWARD takes its place.
    Raises: DataError, RecipeError or RewardError: a missing file, task, split or reward, or an invalid template.
    """
    dataset = open_dataset(data)
    task = task_of(dataset, data.task, data.variant)
    split = split or data.split
    require_split(dataset, split)
    rows = dataset.rows(split)
    if data.max_rows is not None and split == data.split and data.max_rows < len(rows):
        rows = Rows(data.max_rows, rows.__getitem__)
    if not rows:
        raise DataError(f"split `{split}` of {dataset.path} has no rows")
    return make_source(data, reward, dataset, task, split, rows, scored=scored)


def make_source(
    data: Data,
    reward: Reward,
    dataset: Dataset,
    task: Task,
    split: str,
    rows: Sequence[Row],
    *,
    scored: bool = True,
    template: tuple[str, str] | None = None,
) -> Source:
    """Return the source of opened rows.

    Args:
        data: entry with the prompt, the reward and the share.
        template: text of the template and its place, for messages; None = that of the entry or the task.
    Raises: RecipeError or RewardError, as `open_source`.
    """
    text, path = _template(data, task) if template is None else template
    spec, weights = reward_of(data, reward, task, scored)
    settings = data.own_environment
    environment = settings and load_environment(*task.named_environment(settings.name, settings.args))
    warnings = [one.warning for one in environment.described.values() if one.warning] if environment else []
    users = [single.user.source for single in spec.singles if single.user]
    learn(filter(None, (text, data.system, *users, environment and environment.user.code, task.own and task.own.text)))
    task = replace(task, outcome=outcome_with(task, spec))
    print_now = prompt_print(text, data.system, task.variables, task.name)
    return Source(
        name=dataset.name,
        task=task,
        dataset=dataset,
        split=split,
        rows=rows,
        share=data.share,
        reward=spec,
        weights=weights,
        template=text,
        template_path=path,
        system=data.system,
        prompt_sha256=print_now,
        prompt_earlier=earlier_prints(print_now, task.name, text, data.system, task.variables),
        notes=[*dataset.notes, *accuracy_notes(spec), *warnings],
        environment=environment,
        environment_settings=settings or Environment(),
        repeats=_repeats(data, dataset, rows) if environment else {},
        demonstrations=data.demonstrations,
    )


def _repeats(data: Data, dataset: Dataset, rows: Sequence[Row] = ()) -> Repeats:
    """Return the columns that repeat the truth in the training rows of an entry, else in `rows`."""
    return repeats_of(sampled(dataset.rows(data.split) if data.split in dataset.splits else rows))


def open_validation(data: Data, reward: Reward, *, scored: bool = True) -> Source | None:
    """Open the validation rows of an entry: the split or file that it names, else the split `validation`, if any.

    A share of the rows that is held out is the split `validation`, too.

    Returns: None if the entry names no validation rows and the dataset has no split `validation`.
    Args, Raises: as `open_source`; also when the split or file that the entry names does not exist.
    """
    named = data.validation
    if isinstance(named, str) and is_table_file(named):
        return open_rows_file(data, reward, named, VALIDATION, scored=scored)
    if named is None and VALIDATION not in open_dataset(data).splits:
        return None
    return open_source(data, reward, split=named if isinstance(named, str) else VALIDATION, scored=scored)


def open_rows_file(data: Data, reward: Reward, file: str, split: str, *, scored: bool = True) -> Source:
    """Open another table file as a source with the prompt and reward of an entry.

    Args:
        split: name of the split that the file's rows get.
    Raises: as `open_source`.
    """
    other = data.model_copy(update={"path": file, "split": "train", "max_rows": None, "validation": None})
    source = open_source(other, reward, scored=scored)
    repeats = _repeats(data, open_dataset(data)) if source.environment else {}
    return replace(source, name=data.name or open_dataset(data).name, split=split, repeats=repeats)


def open_set(data: Data, reward: Reward, name: str, *, scored: bool = True) -> Source | None:
    """Open the rows of one of `eval.sets` for an entry, as `open_source` does; None if the entry does not have it."""
    if is_table_file(name):
        return open_rows_file(data, reward, name, set_label(name), scored=scored)
    if name == VALIDATION:
        return open_validation(data, reward, scored=scored)
    return open_source(data, reward, split=name, scored=scored) if name in open_dataset(data).splits else None


def is_table_file(name: str) -> bool:
    """Return whether the name of rows to evaluate is that of a table file, and not of a split."""
    return Path(name).suffix.lower() in TABLE_SUFFIXES


def set_label(name: str) -> str:
    """Return the name of one of `eval.sets` in metrics: that of a file without its folder and ending."""
    return Path(name).stem if is_table_file(name) else name


def _template(data: Data, task: Task) -> tuple[str, str]:
    """Return the template's text and path: from the recipe's file, else the task's own template.

    The template is compiled here, so that an invalid template is reported before the run begins.
    """
    template, where = task.template, task.template_file
    if data.prompt is not None:
        template, where = read_template(Path(data.prompt)), data.prompt
    if template:
        compile_template(template, where)
    return template, where


def outcome_of(task: Task, group: Group, sample: ScoredSample, spec: RewardSpec) -> tuple[Outcome, str]:
    """Return the outcome of a response of a group, and the reason why it is incomplete, or "".

    If a task fails on one response, only the numbers of that response are lost.

    Args:
        spec: the reward that gave the score.
    """
    outcome: Outcome = {}
    problem = ""
    try:
        if task.outcome is not no_outcome:
            outcome = task.outcome(response_input(group, sample), sample.score)
    except VlmrlError as error:
        problem = str(error)
    return with_accuracy(outcome, sample.score.parts, spec), problem


def response_input(group: Group, sample: ScoredSample) -> RewardInput:
    """Return the reward's input for a scored response, without the pixels."""
    row, trajectory = group.row, sample.trajectory
    return RewardInput(
        sample.text,
        row.truth,
        row.columns,
        finish=trajectory.finish,
        num_tokens=trajectory.num_sampled_tokens,
        prompt=group.prompt_text,
        token_ids=trajectory.response_ids or None,
        step=trajectory.version,
        prompt_id=row.prompt_id,
        sample=trajectory.sample,
        media=row.media,
        seen_sizes=trajectory.seen_sizes,
        turns=sample.turns,
        measured=sample.measured,
    )


def accuracies(groups: Sequence[Group], sources: Sequence[Source]) -> list[list[float | None]]:
    """Return the accuracy of every sample of every group; None if it has none."""
    return [[outcome.get("accuracy") for outcome, _ in measured] for measured in _outcomes(groups, sources)]


def accuracy_metrics(groups: Sequence[Group], sources: Sequence[Source]) -> dict[str, float]:
    """Return `reward/accuracy` and `reward/outcome_errors`, each only if there is one.

    The first is the mean over the samples that have an accuracy, the second the number of samples on which the task
    failed.
    """
    measured = [one for of_group in _outcomes(groups, sources) for one in of_group]
    values = [value for outcome, _ in measured if (value := outcome.get("accuracy")) is not None]
    failed = sum(bool(problem) for _, problem in measured)
    errors = {"reward/outcome_errors": float(failed)} if failed else {}
    return ({"reward/accuracy": fmean(values)} if values else {}) | errors


def _outcomes(groups: Sequence[Group], sources: Sequence[Source]) -> list[list[tuple[Outcome, str]]]:
    """Return `outcome_of` every sample of every group."""
    by_name = {source.name: source for source in sources}
    return [
        [outcome_of(source.task, group, s, source.reward) for s in group.samples]
        for group in groups
        for source in (by_name[group.row.source],)
    ]


def pooled_metrics(groups: Sequence[Group], sources: Sequence[Source]) -> dict[str, float | None]:
    """Return the PooledMetrics of the sources' tasks and their sums, over all responses of a step.

    Sources whose tasks have the same metrics are pooled. A metric that is not defined is None. If a task fails,
    `reward/set_metrics_errors` is the number of the responses that it was to measure, and its metrics are missing.
    """
    by_metrics: dict[PooledMetrics, list[Source]] = {}
    for source in sources:
        if isinstance(source.task.set_metrics, PooledMetrics):
            by_metrics.setdefault(source.task.set_metrics, []).append(source)
    measured: dict[str, float | None] = {}
    failed = 0
    for pooled, own_sources in by_metrics.items():
        names = {source.name for source in own_sources}
        own = [group for group in groups if group.row.source in names]
        outcomes = _outcomes(own, own_sources)
        responses = [
            (response_input(group, s), s.score, outcome)
            for group, of_group in zip(own, outcomes, strict=True)
            for s, (outcome, _) in zip(group.samples, of_group, strict=True)
        ]
        if not responses:
            continue
        try:
            sums = pooled.sums(responses)
            measured |= {name: float(number) for name, number in sums.items()} | dict(pooled.metrics(sums))
        except VlmrlError:
            failed += len(responses)
    return measured | ({"reward/set_metrics_errors": float(failed)} if failed else {})


def accuracy_text(groups: Sequence[Group], sources: Sequence[Source]) -> str:
    """Return in words where sources get their accuracy from, if it is their reward; "" if none does."""
    texts = []
    for source in sources:
        own = [g for g in groups if g.row.source == source.name]
        values = [a for values_of_group in accuracies(own, [source]) for a in values_of_group if a is not None]
        parts = dict.fromkeys(name for g in own for s in g.samples for name in s.score.parts)
        words = accuracy_words(source.task.measured(own[0].row.truth), parts, values, source.reward) if own else ""
        if words:
            texts.append(f"{words} ({source.name})" if len(sources) > 1 else words)
    return f"accuracy is {'; '.join(texts)}" if texts else ""


class Draw(NamedTuple):
    """Drawn row: index of its source, its index in that source, and the number of times it was drawn before."""

    source: int
    row: int
    occurrence: int


class Deck:
    """Order of the rows of one source: each epoch is a shuffle that follows from the seed and the number of the epoch.

    `waiting` holds the (row, epoch) that were passed over because the row was already in the step.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self.restore(0, 0, [])

    def restore(self, epoch: int, position: int, waiting: list[tuple[int, int]]) -> None:
        self.epoch, self.position, self.waiting = epoch, position, waiting
        self._order = self._shuffled(epoch)

    def draw(self, used: set[int]) -> tuple[int, int]:
        """Return the next row that is not in `used`, and its epoch.

        The row is added to `used`, which is emptied first if it holds all rows.
        """
        if len(used) == self._length:
            used.clear()
        for index, (row, epoch) in enumerate(self.waiting):
            if row not in used:
                del self.waiting[index]
                used.add(row)
                return row, epoch
        while True:
            if self.position == self._length:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled(self.epoch)
            row = self._order[self.position]
            self.position += 1
            if row not in used:
                used.add(row)
                return row, self.epoch
            self.waiting.append((row, self.epoch))

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._length))
        random.Random(hash64(self._seed, epoch)).shuffle(order)
        return order


class PromptStream:
    """Endless, deterministic stream of dataset rows.

    In every epoch of a source, each of its rows is drawn once, in a new order. After any number of draws, the number of
    rows from a source is its exact share, rounded up or down. A step never contains a row twice, unless a source has
    fewer rows than its part of the step. If a new epoch begins within a step, a row that is already in the step is
    passed over and drawn in the next step.

    Args:
        lengths_by_source: number of rows of each source, all > 0.
        shares: relative share of each source, all > 0; 0.1 means exactly one tenth, not the nearest binary number.
    """

    def __init__(self, lengths_by_source: Sequence[int], shares: Sequence[float], seed: int) -> None:
        if not lengths_by_source or len(shares) != len(lengths_by_source):
            raise DataError(f"{len(lengths_by_source)} sources with {len(shares)} shares")
        for index, (length, share) in enumerate(zip(lengths_by_source, shares, strict=True)):
            if length <= 0:
                raise DataError(f"source {index} has no rows")
            if not share > 0:
                raise DataError(f"source {index} has the share {share}; shares are positive")
        self._lengths = tuple(int(length) for length in lengths_by_source)
        self._given = tuple(float(share) for share in shares)
        # Fraction(str(0.1)) is 1/10; Fraction(0.1) would be the binary number next to it.
        exact = [Fraction(str(share)) for share in self._given]
        self._shares = [share / sum(exact) for share in exact]
        self._seed = seed
        self._drawn = [0] * len(self._lengths)
        self._decks = [Deck(length, hash64(seed, "order", i)) for i, length in enumerate(self._lengths)]

    def next(self, count: int) -> list[Draw]:
        """Draw the `count` rows of the next step."""
        used: list[set[int]] = [set() for _ in self._lengths]
        draws = []
        for _ in range(count):
            source = self._next_source()
            self._drawn[source] += 1
            row, occurrence = self._decks[source].draw(used[source])
            draws.append(Draw(source, row, occurrence))
        return draws

    def _facts(self) -> dict[str, Any]:
        return {"schema": 1, "seed": self._seed, "lengths": list(self._lengths), "shares": list(self._given)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, as JSON values. Call it between steps only."""
        return {
            **self._facts(),
            "drawn": list(self._drawn),
            "decks": [
                {"epoch": d.epoch, "position": d.position, "waiting": [list(w) for w in d.waiting]} for d in self._decks
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`.

        Raises: DataError when `state` belongs to other sources, shares or another seed.
        """
        for key, value in self._facts().items():
            if state.get(key) != value:
                raise DataError(
                    f"the saved data order has {key} {state.get(key)}, this run has {value}",
                    hint="resume with the data, shares and seed of the run, or start a new run from its checkpoint",
                )
        self.adopt(state)

    def adopt(self, state: Mapping[str, Any]) -> list[str]:
        """Continue at the position of `state` as far as possible; sources, shares and seed may have changed.

        If the seed is the same, a source with the same number of rows as before continues at its position. Any other
        source begins its first epoch. If the shares or the number of sources have changed, the rows drawn so far do not
        count for the shares.

        Returns: a sentence for each thing that begins anew; [] = everything continues.
        """
        lengths, shares = list(self._lengths), list(self._given)
        if state.get("seed") != self._seed:
            return ["the order of the rows begins anew: train.seed has changed"]
        notes = []
        for index, (deck, saved) in enumerate(zip(self._decks, state["decks"], strict=False)):
            if state["lengths"][index] == lengths[index]:
                waiting = [(int(r), int(e)) for r, e in saved["waiting"]]
                deck.restore(int(saved["epoch"]), int(saved["position"]), waiting)
            else:
                rows = f"{state['lengths'][index]} rows before, {lengths[index]} now"
                notes.append(f"source {index} begins its first epoch anew: {rows}")
        if state["shares"] == shares:
            self._drawn = [int(count) for count in state["drawn"]]
        else:
            notes.append(f"the shares of the sources are counted from here on: {state['shares']} before, {shares} now")
        return notes

    def _next_source(self) -> int:
        """Return the source of the next row, by the quota method.

        Sources whose count would exceed their exact share, rounded up, are excluded. Of the others, the one with the
        earliest deadline for its next row is returned. So after every draw, the count of each source differs from its
        exact share by less than one.

        Source: Balinski and Young 1975; Tijdeman 1980.
        """
        total = sum(self._drawn) + 1
        due = [i for i, share in enumerate(self._shares) if self._drawn[i] < share * total]
        return min(due, key=lambda i: (Fraction(self._drawn[i] + 1) / self._shares[i], i))
