"""The class Source: an opened `[[data]]` entry of a recipe with its rows, task, prompt and reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.algo.credit import RewardWeights
from vlmrl.algo.credit import Weights as PartWeights
from vlmrl.data.dataset import Dataset, Rows, require_split
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, RecipeError
from vlmrl.recipe.eval_table import AUTO, LOSSES
from vlmrl.recipe.schema import Data, Recipe, Reward
from vlmrl.recipe.template import read_template
from vlmrl.redaction.redact import learn
from vlmrl.tasks import task_of
from vlmrl.tasks.base import Task
from vlmrl.tasks.prompt_identity import earlier_prints, prompt_print
from vlmrl.tasks.prompt_template import compile_template, place_images, render_user
from vlmrl.tasks.source_rewards import accuracy_notes, outcome_with, reward_of
from vlmrl.types import Finish, Message, RewardInput, Row

if TYPE_CHECKING:
    from vlmrl.rewards.base import RewardSpec

TABLE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
VALIDATION = "validation"
"""Split that training validates on, unless `data.validation` names other rows."""


@dataclass
class Source:
    """Rows with everything needed to render their prompts and to score responses.

    Args:
        name: name of the source in metrics and rollouts.
        split: the split that `rows` belong to.
        rows: the rows; each is created when it is indexed.
        share: relative share of the prompts of a step.
        weights: reward part -> weight: the recipe's weights if it sets any, else the reward's own. Of several rewards,
            label -> weight of the reward.
        template: Jinja source of the user message; "" = the rows have their own messages.
        template_path: path of the template, for messages.
        system: the system message; None = none.
        prompt_sha256: fingerprint of the prompt without the row (`prompt_print`).
        prompt_earlier: fingerprints of the same prompt in earlier versions of vlmrl.
        notes: messages for the user; some are added while rows are rendered.
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

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def part_weights(self) -> PartWeights:
        """Weights of the reward's parts; of several rewards, those of each."""
        if not self.reward.members:
            return self.weights
        return [
            RewardWeights(
                m.label,
                self.weights.get(m.label, 0.0),
                {m.name_of(part): weight for part, weight in m.weights.items()},
                m.gate_part,
            )
            for m in self.reward.members
        ]

    @property
    def prompt_record(self) -> dict[str, Any]:
        """Record of the prompt in a run's manifest."""
        return {"source": self.name, "sha256": self.prompt_sha256, "earlier": list(self.prompt_earlier)}

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
        return RewardInput(text, row.truth, row.columns, images, finish, num_tokens, prompt)

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
        scored: as for `open_source`.
    Raises: RecipeError or RewardError, as `open_source`.
    """
    text, path = _template(data, task) if template is None else template
    spec, weights = reward_of(data, reward, task, scored)
    users = [single.user.source for single in spec.singles if single.user]
    learn(filter(None, (text, data.system, *users, task.own and task.own.text)))
    task = replace(task, outcome=outcome_with(task, spec))
    print_now = prompt_print(text, data.system, task.variables, task.name)
    earlier = earlier_prints(print_now, task.name, text, data.system, task.variables)
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
        prompt_earlier=earlier,
        notes=[*dataset.notes, *accuracy_notes(spec)],
    )


def open_validation(data: Data, reward: Reward, *, scored: bool = True) -> Source | None:
    """Open the validation rows of an entry: the split or file that it names, else the split `validation`, if any.

    A share of the rows that is held out is the split `validation`, too.

    Args:
        scored: as for `open_source`.
    Returns: None if the entry names no validation rows and the dataset has no split `validation`.
    Raises: as `open_source`; also when the split or file that the entry names does not exist.
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
        scored: as for `open_source`.
    Raises: as `open_source`.
    """
    other = data.model_copy(update={"path": file, "split": "train", "max_rows": None, "validation": None})
    return replace(open_source(other, reward, scored=scored), name=data.name or open_dataset(data).name, split=split)


def open_set(data: Data, reward: Reward, name: str, *, scored: bool = True) -> Source | None:
    """Open the rows of one of `eval.sets` for an entry; None if the entry does not have it.

    Args:
        scored: as for `open_source`.
    Raises: as `open_source`.
    """
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
    if data.prompt is None:
        where = task.template_file
        template = task.template
    else:
        where = data.prompt
        template = read_template(Path(data.prompt))
    if template:
        compile_template(template, where)
    return template, where
