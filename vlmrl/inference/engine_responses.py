"""Responses of a local engine to dataset rows, kept piece by piece, so that a killed evaluation goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.dist.world import World
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Prompt, Rollout, encode_prompt, rollouts_of, sample_rollouts
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.response_journal import ResponseJournal
from vlmrl.store.secrets.redact import hide_known
from vlmrl.tasks.source import Source
from vlmrl.types import Row, Sample, SamplingParams, Segment

PIECE_PROMPTS = 128
"""Number of prompts that are generated and kept together: a kill loses the work on one piece. A piece is generated as a
whole, also again: so its batches, and with them the last bits of its numbers, are those of a run without a kill."""
NO_PROMPT_LIMIT = 2**31
GENERATION = (
    "model",
    "endpoint",
    "checkpoint",
    "split",
    "source",
    "dataset",
    "prompt_sha256",
    "seed",
    "dtype",
    "vlmrl",
)
"""Keys of an evaluation's `meta` that responses depend on, besides the sampling."""


def journal_identity(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of an evaluation's `meta` that its responses depend on: not the reward, nor how many there are.

    The dtype and the version of vlmrl count, because responses of different ones may differ.
    """
    sampling = {key: value for key, value in meta["sampling"].items() if key != "samples"}
    # Images are shuffled among all rows that are evaluated.
    shown = {"images": [meta["images"], meta.get("max_rows")]} if meta.get("images") else {}
    return {**{key: meta.get(key) for key in GENERATION}, "sampling": sampling, **shown}


def engine_identity(
    meta: Mapping[str, Any], recipe: Recipe, origin: ModelOrigin, samples: int, world: World
) -> dict[str, Any]:
    """Return the identity of one rank's share of the responses: also what the model and its engine depend on."""
    rollout = recipe.rollout
    return {
        **journal_identity(meta),
        "model_table": recipe.model.model_dump(mode="json"),
        "files": _file_facts(Path(origin.files)),
        "rollout": [rollout.engine, rollout.top_p, rollout.top_k, list(rollout.stop)],
        "samples": samples,
        "rank": [world.rank, world.size],
    }


def _file_facts(folder: Path) -> list[list[Any]]:
    """Return name, size and time of the files of a model folder: it may have been replaced. Empty for a hub name."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted([e.name, e.stat().st_size, e.stat().st_mtime_ns] for e in entries if e.is_file())


@dataclass(frozen=True)
class EngineResponder:
    """Responses of an engine to the rows of a source; each piece is in the journal as soon as it is generated.

    Args:
        samples: responses per row.
        progress: called with the number of newly finished responses.
    """

    engine: Generator
    encoder: Encoder
    journal: ResponseJournal
    source: Source
    params: SamplingParams
    seed: int
    samples: int
    progress: Callable[[int], Any]

    def __call__(self, numbers: Sequence[int], rows: Sequence[Row]) -> list[Rollout]:
        """Return the responses to rows, in order; those that the journal has are not generated again."""
        rollouts: list[Rollout] = []
        for start in range(0, len(rows), PIECE_PROMPTS):
            piece = slice(start, start + PIECE_PROMPTS)
            rollouts += self._piece(numbers[piece], rows[piece])
        return rollouts

    def _piece(self, numbers: Sequence[int], rows: Sequence[Row]) -> list[Rollout]:
        prompts = [encode_prompt(self.source, row, 0, self.encoder, NO_PROMPT_LIMIT) for row in rows]
        if not any(map(self.journal.missing, numbers)):
            self.progress(len(rows) * self.samples)
            return self._kept(numbers, prompts)
        rollouts = sample_rollouts(
            self.engine,
            prompts,
            self.params,
            num_samples=self.samples,
            run_seed=self.seed,
            version=self.engine.version,
            progress=self.progress,
        )
        for number, rollout in zip(numbers, rollouts, strict=True):
            for k, sample in enumerate(rollout.samples):
                self.journal.add(number, k, _fields(sample))
        return rollouts

    def _kept(self, numbers: Sequence[int], prompts: Sequence[Prompt]) -> list[Rollout]:
        version = self.engine.version
        samples = [[_sample(self.journal.read(n, k), version) for k in range(self.samples)] for n in numbers]
        return rollouts_of(prompts, samples, 0.0, version)


def _fields(sample: Sample) -> dict[str, Any]:
    return {
        "text": hide_known(sample.text),
        "finish": sample.finish,
        "seed": sample.seed,
        "tokens": list(sample.token_ids),
    }


def _sample(kept: Mapping[str, Any], version: int) -> Sample:
    """Return the response that `_fields` describes; its log-probs, which no evaluation reads, are not kept."""
    ids = tuple(kept["tokens"])
    segment = Segment("assistant", ids, True)
    return Sample(ids, kept["text"], (), kept["finish"], version, kept["seed"], (segment,))
