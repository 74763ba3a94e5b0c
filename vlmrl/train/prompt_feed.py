"""The prompts of a run: the mixed stream of dataset rows, how a row is encoded and sampled, who scores its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.data.images import decode_image
from vlmrl.data.sampler import PromptStream
from vlmrl.dist.world import ALONE, World
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.scorer import Scorer
from vlmrl.rollout.sample import Prompt, encode_prompt
from vlmrl.tasks.source import Source
from vlmrl.train.step_batch import Tail
from vlmrl.types import Row, SamplingParams, ScoredSample

Drawn = tuple[Source, Row, int]
"""A row of the stream: its source, itself, how often it was drawn before."""


@dataclass
class PromptFeed:
    """Source of a run's prompts, and of the scores of their answers.

    Args:
        recipe: the run's recipe.
        sources: the training sources.
        validation: the validation sources; [] = the run does not validate.
        stream: draws from the training sources in the recipe's shares.
        encoder: renders and tokenizes a row.
        scorers: the scorer of each source, by its name.
        sampling: how training samples.
        greedy: how validation samples.
        world: the processes, which share the prompts of a draw.
        cursor: position of the stream that a checkpoint saves when rows were drawn ahead; None = where the stream is.
    """

    recipe: Recipe
    sources: Sequence[Source]
    validation: Sequence[Source]
    stream: PromptStream
    encoder: Encoder
    scorers: Mapping[str, Scorer]
    sampling: SamplingParams
    greedy: SamplingParams
    world: World = ALONE
    cursor: Mapping[str, Any] | None = None

    @property
    def position(self) -> dict[str, Any]:
        """The position of the stream at which a resumed run goes on."""
        return dict(self.cursor or self.stream.state_dict())

    @property
    def weights(self) -> dict[str, Mapping[str, float]]:
        """The weights of the reward's parts, by the source's name."""
        return {source.name: source.weights for source in self.sources}

    def draw(self, count: int) -> list[Drawn]:
        """Draw the next rows of the stream."""
        return [(self.sources[s], self.sources[s].rows[r], occurrence) for s, r, occurrence in self.stream.next(count)]

    def encode(self, source: Source, row: Row, occurrence: int) -> Prompt:
        """Encode the prompt of a row that was drawn.

        Raises: DataError when it cannot be encoded, or is longer than `rollout.max_prompt_tokens`.
        """
        return encode_prompt(source, row, occurrence, self.encoder, self.recipe.rollout.max_prompt_tokens)

    def encode_again(self, row: Row, occurrence: int) -> Prompt:
        """Encode a prompt that another process has sampled: rows travel between processes, pixels do not."""
        return self.encode(next(x for x in self.sources if x.name == row.source), row, occurrence)

    def encode_tail(self, sample: ScoredSample) -> Tail:
        """Encode the images within a response."""
        media = [m for segment in sample.trajectory.segments for m in segment.media]
        images = [decode_image(sample.files[m.sha256]) for m in media]
        place = f"the response to {sample.trajectory.prompt_id}, sample {sample.trajectory.sample}"
        return self.encoder.encode_tail(sample.trajectory.response_ids, media, images, place)
