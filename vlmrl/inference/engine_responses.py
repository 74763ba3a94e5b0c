"""Responses of a local engine to dataset rows, kept piece by piece, so that a killed evaluation goes on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.dist.world import World
from vlmrl.errors import DataError
from vlmrl.evaluate.grading import NumberedRow, Responses
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import hide_known
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Prompt, Rollout, encode_prompt, rollouts_of
from vlmrl.rollout.scoring import answer_pieces, without_pixels
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.response_journal import DROPPED, ResponseJournal
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
    # Settings of one recipe may differ in the number of samples alone; each has a file of its own.
    setting = {"setting": meta["setting"]} if meta.get("setting") else {}
    shown = {"images": [meta["images"], meta.get("max_rows")]} if meta.get("images") else {}
    return {**{key: meta.get(key) for key in GENERATION}, "sampling": sampling, **shown, **setting}


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
        drops: whether a row that cannot be shown to the model, such as one with a broken image, is dropped: it gets no
            response, and the journal has the reason. False = it is an error.
    """

    engine: Generator
    encoder: Encoder
    journal: ResponseJournal
    source: Source
    params: SamplingParams
    seed: int
    samples: int
    progress: Callable[[int], Any]
    drops: bool = False

    def __call__(self, chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        """Yield the responses to rows as they are complete; those that the journal has are not generated again.

        An engine that admits requests at any time gets the rows that the journal lacks, and each response is kept at
        once. For the built-in engine a piece is generated and kept as a whole.
        """
        kept: deque[NumberedRow] = deque()
        open_rows: dict[int, Rollout] = {}  # of the piece that the built-in engine generates
        sizes: deque[int] = deque()

        def pieces() -> Iterator[list[tuple[int, Prompt]]]:
            for piece in _pieces(chunks):
                missing = [(number, row) for number, row in piece if self.journal.missing(number)]
                if missing and not self.engine.admits:
                    missing = list(piece)
                there = {number for number, _ in missing}
                kept.extend((number, row) for number, row in piece if number not in there)
                prompts = self._prompts(missing)
                if prompts:
                    sizes.append(len(prompts))
                yield prompts

        answers = answer_pieces(
            self.engine,
            pieces(),
            self.params,
            num_samples=self.samples,
            run_seed=self.seed,
            progress=self.progress,
        )
        for answer in answers:
            if answer is not None:
                open_rows.update([answer])
                if self.engine.admits or len(open_rows) == sizes[0]:
                    self._keep(open_rows)
                    open_rows.clear()
                    if not self.engine.admits:
                        sizes.popleft()
            yield answer
            yield from self._read(kept)
        yield from self._read(kept)

    def _prompt(self, row: Row) -> Prompt:
        return encode_prompt(self.source, row, 0, self.encoder, NO_PROMPT_LIMIT)

    def _prompts(self, rows: Sequence[NumberedRow]) -> list[tuple[int, Prompt]]:
        """Return the prompts of rows; without those that are dropped."""
        prompts = []
        for number, row in rows:
            try:
                prompts.append((number, self._prompt(row)))
            except DataError as error:
                if not self.drops:
                    raise
                keep_dropped(self.journal, number, error)
                self.progress(self.samples)
        return prompts

    def _keep(self, rollouts: Mapping[int, Rollout]) -> None:
        for number, rollout in sorted(rollouts.items()):
            for k, sample in enumerate(rollout.samples):
                self.journal.add(number, k, _fields(sample))

    def _read(self, kept: deque[NumberedRow]) -> Responses:
        """Yield the responses that the journal has, and remove their rows from `kept`."""
        version = self.engine.version
        while kept:
            number, row = kept.popleft()
            responses = [self.journal.read(number, k) for k in range(self.samples)]
            self.progress(self.samples)
            if DROPPED in responses[0]:
                continue
            samples = [_sample(response, version) for response in responses]
            (rollout,) = rollouts_of([without_pixels(self._prompt(row))], [samples], 0.0, version)
            yield number, rollout


def keep_dropped(journal: ResponseJournal, number: int, error: DataError) -> None:
    """Note in the journal that a row cannot be shown to the model."""
    reason = hide_known(error.message)
    for k in journal.missing(number):
        journal.add(number, k, {"text": "", "finish": "stop", "seed": 0, "tokens": 0, DROPPED: reason})


def _pieces(chunks: Iterator[Sequence[NumberedRow]]) -> Iterator[Sequence[NumberedRow]]:
    for chunk in chunks:
        for start in range(0, len(chunk), PIECE_PROMPTS):
            yield chunk[start : start + PIECE_PROMPTS]


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
