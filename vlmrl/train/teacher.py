"""Teacher: a frozen model that the policy learns from, on the policy's own responses.

It reads the dataset row of a prompt through its own processor and chat template, so its prompt may have another text
and another number of image tokens. The tokens behind the prompt are the policy's: both models have the same tokenizer.
What `teacher.reveal` adds is read by the teacher alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmrl.algo.advantages import visual_weights
from vlmrl.algo.algo_keys import Algorithm
from vlmrl.algo.divergence import Divergence
from vlmrl.data.blinded_images import ImageChange
from vlmrl.data.encode import Encoder
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Teacher as TeacherSettings
from vlmrl.tasks.prompt import render_revealed
from vlmrl.tasks.source import Source
from vlmrl.train.learner import ReferencePolicy
from vlmrl.train.step_batch import Beside, StepBatch, hidden_states, on_cpu
from vlmrl.train.update import fill_logps
from vlmrl.types import Group, Row


@dataclass
class Teacher:
    """Frozen model with everything that it needs to read a step's prompts.

    Args:
        policy: the model; its temperature is the teacher's, its banned ids are the policy's.
        with_changed: returns the source of a row and the row, both with changed images.
        algorithm: the row of the algorithm table: what is learned from it.
        filler: trajectory without loss, for its passes; None with a single rank.
    """

    policy: Policy | ReferencePolicy
    encoder: Encoder
    sources: Mapping[str, Source]
    with_changed: Callable[[Row, ImageChange, int], tuple[Source, Row]]
    algorithm: Algorithm
    settings: TeacherSettings
    filler: TrainItem | None = None

    def prompt_of(self, group: Group, change: ImageChange | None = None) -> PromptTokens:
        """Return a group's prompt as the teacher reads it.

        Args:
            change: of its images; None = they are as they are.
        Raises: DataError when it cannot be rendered or encoded.
        """
        row = group.row
        source = self.sources[row.source]
        if change is not None:
            source, row = self.with_changed(row, change, 0)
        messages = source.messages(row)
        if self.settings.reveal is not None:
            hides = self.settings.control
            text = render_revealed(self.settings.reveal, row, source.task.variables, hides=hides)
            last = max(i for i, message in enumerate(messages) if message.role == "user")
            longer = replace(messages[last], content=f"{messages[last].content}\n\n{text}")
            messages = (*messages[:last], longer, *messages[last + 1 :])
        images = [source.dataset.image(media) for media in row.media]
        return PromptTokens.of(source.encoder(self.encoder, row).encode(row, messages, images))

    def behind_own(
        self, batch: StepBatch, group_of: Callable[[int], Group], change: ImageChange | None = None
    ) -> StepBatch:
        """Return a batch with the same responses behind the teacher's prompts. `change`: of their images."""
        return batch.behind(lambda index: self.prompt_of(group_of(index), change), self.filler)

    @property
    def divergence(self) -> Divergence:
        """The policy's divergence from the teacher, where that is a term of the loss."""
        kind, row = self.algorithm.divergence, self.algorithm
        assert kind in ("reverse", "forward", "jsd")
        return Divergence(kind, row.jsd_weight, row.teacher_top_k, self.settings.temperature)

    def read(self, batch: StepBatch, group_of: Callable[[int], Group], tokens_per_row: int) -> dict[str, float]:
        """Store in the batch what the divergence from the teacher needs. All ranks call it together.

        Args:
            group_of: index of a group -> the group.
        Returns: `teacher/visual_gain`, the mean log-prob that a token gains by the images' details, in nats, if its
            weight depends on it.
        """
        weighs = self.algorithm.teacher_weights == "visual"
        logps: dict[int, Tensor] = {}
        own = self.behind_own(batch, group_of)
        hidden = hidden_states(self.policy, own, tokens_per_row, logps if weighs else None)
        batch.teacher = Beside(self.policy, self.divergence, hidden)
        return self._weigh(batch, group_of, logps, tokens_per_row) if weighs else {}

    def _weigh(
        self, batch: StepBatch, group_of: Callable[[int], Group], logps: Mapping[int, Tensor], tokens_per_row: int
    ) -> dict[str, float]:
        """Weigh each token by what the images' details gain it. `logps`: the teacher's, with the details."""
        row, low = self.algorithm, dict[int, Tensor]()
        fill_logps(
            self.policy,
            self.behind_own(batch, group_of, ImageChange("low", share=row.image_scale)),
            low,
            tokens_per_row,
        )
        gains = {i: x.double().numpy() for i, x in on_cpu({i: logps[i] - x for i, x in low.items()}).items()}
        groups: dict[int, list[int]] = {}
        for item in batch.items:
            groups.setdefault(item.group, []).append(item.trajectory)
        options = {"share": row.visual_share, "weight": row.visual_weight, "temperature": row.visual_temperature}
        for members in groups.values():
            weights = visual_weights([gains[i] for i in members], **options)
            batch.teacher_weight |= {i: torch.from_numpy(w).float() for i, w in zip(members, weights, strict=True)}
        sums = batch.world.gather((sum(float(x.clip(0).sum()) for x in gains.values()), sum(map(len, gains.values()))))
        total, count = (sum(of_rank[k] for of_rank in sums) for k in range(2))
        return {"teacher/visual_gain": total / max(1, count)}

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
