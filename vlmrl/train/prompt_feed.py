"""Prompts of a run: the mixed stream of dataset rows, their encoding and sampling, and the scorers of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.data.images import decode_image
from vlmrl.data.sampler import PromptStream
from vlmrl.dist.world import ALONE, World
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.open_services import ServiceMeter
from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.rollout.sample import Prompt, Weights, encode_prompt
from vlmrl.rollout.scoring import Outages
from vlmrl.setup.sources import EvalSet
from vlmrl.tasks.source import Source
from vlmrl.train.step_batch import Tail
from vlmrl.types import Row, SamplingParams, ScoredSample

Drawn = tuple[Source, Row, int]
"""Drawn dataset row: its source, the row, its occurrence (number of earlier draws)."""


@dataclass
class PromptFeed:
    """Prompts of a run, and the scorers of their answers.

    Args:
        recipe: the run's recipe.
        sources: the training sources.
        validation: the sets that are evaluated; [] = the run does not validate.
        stream: draws from the training sources in the recipe's shares.
        encoder: renders and tokenizes a row.
        scorers: the scorer of each source, by its name.
        sampling: sampling parameters of training.
        evaluation: sampling parameters of validation, by the name of the setting ("" = a recipe without settings).
        world: the ranks, which share the prompts of a draw.
        cursor: position of the stream to save in a checkpoint while rows are drawn whose step is not done; None = its
            current position.
        outages: what happens when a service that a reward needs is down.
        meter: counts of the services on this rank.
        service_counts: (attribute) metric -> number of all ranks so far.
    """

    recipe: Recipe
    sources: Sequence[Source]
    validation: Sequence[EvalSet]
    stream: PromptStream
    encoder: Encoder
    scorers: Mapping[str, RewardScorer]
    sampling: SamplingParams
    evaluation: Mapping[str, SamplingParams]
    world: World = ALONE
    cursor: Mapping[str, Any] | None = None
    outages: Outages = field(default_factory=Outages)
    meter: ServiceMeter = field(default_factory=ServiceMeter)
    service_counts: dict[str, float] = field(default_factory=dict)

    def service_metrics(self) -> dict[str, float]:
        """Return metric -> number since the last call, of all ranks, for the services that rewards ask.

        All ranks call it together.
        """
        if not any(single.service for scorer in self.scorers.values() for single in scorer.spec.singles):
            return {}
        new = self.meter.read(service for scorer in self.scorers.values() for service in scorer.services)
        of_ranks = self.world.gather(new)
        names = dict.fromkeys(name for counts in of_ranks for name in counts)
        sums = {name: sum(counts.get(name, 0) for counts in of_ranks) for name in names}
        for name, number in sums.items():
            self.service_counts[name] = self.service_counts.get(name, 0) + number
        return sums

    def service_summary(self) -> str:
        """Return the counts of this attempt in one line; "" if no service was asked. All ranks call it together."""
        self.service_metrics()
        return self.meter.last.summary(self.service_counts) if self.meter.last is not None else ""

    @property
    def position(self) -> dict[str, Any]:
        """Position of the stream at which a resumed run continues."""
        return dict(self.cursor or self.stream.state_dict())

    @property
    def weights(self) -> Weights:
        """Weights of the parts of each source's reward."""
        return {source.name: source.part_weights for source in self.sources}

    @property
    def training_rows(self) -> int:
        """Number of training rows of all sources."""
        return sum(len(source.rows) for source in self.sources)

    def draw(self, count: int) -> list[Drawn]:
        """Draw the next rows of the stream."""
        return [(self.sources[s], self.sources[s].rows[r], occurrence) for s, r, occurrence in self.stream.next(count)]

    def encode(self, source: Source, row: Row, occurrence: int) -> Prompt:
        """Encode the prompt of a row that was drawn.

        Raises: DataError when it cannot be encoded, or is longer than `rollout.max_prompt_tokens`.
        """
        return encode_prompt(source, row, occurrence, self.encoder, self.recipe.rollout.max_prompt_tokens)

    def encode_again(self, row: Row, occurrence: int) -> Prompt:
        """Encode a prompt that another rank has sampled: ranks exchange rows, but not pixels."""
        return self.encode(next(x for x in self.sources if x.name == row.source), row, occurrence)

    def encode_tail(self, sample: ScoredSample) -> Tail:
        """Encode the images within a response (those of tools' answers)."""
        media = [m for segment in sample.trajectory.segments for m in segment.media]
        images = [decode_image(sample.files[m.sha256]) for m in media]
        place = f"the response to {sample.trajectory.prompt_id}, sample {sample.trajectory.sample}"
        return self.encoder.encode_tail(sample.trajectory.response_ids, media, images, place)
