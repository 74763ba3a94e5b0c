"""Teacher: a frozen model that the policy learns from, on the policy's own responses.

It reads the dataset row of a prompt through its own processor and chat template, so its prompt may have another text
and another number of image tokens. The tokens behind the prompt are the policy's: both models have the same tokenizer.
What `teacher.reveal` adds is read by the teacher alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vlmrl.algo.algo_keys import Algorithm
from vlmrl.algo.divergence import Divergence
from vlmrl.data.encode import Encoder
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Teacher as TeacherSettings
from vlmrl.tasks.prompt import compile_template, render_user
from vlmrl.tasks.source import Source
from vlmrl.train.learner import ReferencePolicy
from vlmrl.train.step_batch import Beside, StepBatch
from vlmrl.train.update import fill_logps, hidden_states
from vlmrl.types import Group, Row

REVEAL = "teacher.reveal"
HIDDEN = "(not shown)"
"""Text in the place of each value under `teacher.control`."""


@dataclass
class Teacher:
    """Frozen model with everything that it needs to read a step's prompts.

    Args:
        policy: the model; its temperature is the teacher's, its banned ids are the policy's.
        encoder: renders and tokenizes a row for it.
        sources: name of a source -> the source.
        divergence: the policy's divergence from it, where that is a term of the loss.
        settings: the recipe's table.
        filler: trajectory without loss, for its passes; None with a single rank.
    """

    policy: Policy | ReferencePolicy
    encoder: Encoder
    sources: Mapping[str, Source]
    divergence: Divergence
    settings: TeacherSettings
    filler: TrainItem | None = None

    def prompt_of(self, group: Group) -> PromptTokens:
        """Return a group's prompt as the teacher reads it.

        Raises: DataError when it cannot be rendered or encoded.
        """
        row = group.row
        source = self.sources[row.source]
        messages = source.messages(row)
        if self.settings.reveal is not None:
            text = self._revealed(self.settings.reveal, row, source.task.variables)
            last = max(i for i, message in enumerate(messages) if message.role == "user")
            longer = replace(messages[last], content=f"{messages[last].content}\n\n{text}")
            messages = (*messages[:last], longer, *messages[last + 1 :])
        images = [source.dataset.image(media) for media in row.media]
        return PromptTokens.of(source.encoder(self.encoder, row).encode(row, messages, images))

    def _revealed(self, template: str, row: Row, variables: Mapping[str, Any]) -> str:
        columns, truth = row.columns, row.truth
        if self.settings.control:
            columns, truth = hidden(columns), hidden(truth)
        return render_user(template, replace(row, columns=columns), {**variables, "truth": truth}, where=REVEAL)

    def behind_own(self, batch: StepBatch, group_of: Callable[[int], Group]) -> StepBatch:
        """Return a batch with the same responses behind the teacher's prompts."""
        return batch.behind(lambda index: self.prompt_of(group_of(index)), self.filler)

    def read(self, batch: StepBatch, group_of: Callable[[int], Group], tokens_per_row: int) -> None:
        """Store in the batch what the divergence from the teacher needs. All ranks call it together.

        Args:
            group_of: index of a group -> the group.
        """
        own = self.behind_own(batch, group_of)
        batch.teacher = Beside(self.policy, self.divergence, hidden_states(self.policy, own, tokens_per_row))

    def logps(self, batch: StepBatch, group_of: Callable[[int], Group], tokens_per_row: int) -> dict[int, Tensor]:
        """Return the teacher's log-probs of the sampled tokens: trajectory -> [trained tokens], in nats."""
        logps: dict[int, Tensor] = {}
        fill_logps(self.policy, self.behind_own(batch, group_of), logps, tokens_per_row)
        return logps

    def rehearse(self, batch: StepBatch, tokens_per_row: int) -> None:
        """Run the teacher on a rehearsed batch, with as many text tokens as the policy's prompts have tokens."""

        def as_text(item: TrainItem) -> TrainItem:
            words = [i for i, kind in zip(item.prompt.ids, item.prompt.kinds, strict=True) if not kind]
            ids = tuple(words[k % len(words)] for k in range(len(item.prompt.ids)))
            return replace(item, prompt=PromptTokens(ids, (0,) * len(ids), {}, 0), kinds=(), images={})

        texts = replace(batch, items=[as_text(item) for item in batch.items], filler=self.filler)
        batch.teacher = Beside(self.policy, self.divergence, hidden_states(self.policy, texts, tokens_per_row))


def hidden(value: Any) -> Any:
    """Return a value of the same structure, with a text in the place of each number, text and truth value."""
    if isinstance(value, Mapping):
        return {key: hidden(x) for key, x in value.items()}
    return [hidden(x) for x in value] if isinstance(value, list | tuple) else HIDDEN


def divergence_of(algorithm: Algorithm, temperature: float | None) -> Divergence:
    """Return the divergence of a row of the algorithm table. `temperature`: the teacher's; None = the policy's."""
    kind = algorithm.divergence
    assert kind in ("reverse", "forward", "jsd")
    return Divergence(kind, algorithm.jsd_weight, algorithm.teacher_top_k, temperature)


def require_reveal(settings: TeacherSettings) -> None:
    """Compile the template of `teacher.reveal`. Raises: RecipeError when it is not valid Jinja."""
    if settings.reveal is not None:
        compile_template(settings.reveal, REVEAL)
