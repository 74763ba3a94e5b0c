"""Responses to dataset rows, of a local engine or an endpoint, in one form.

They are kept piece by piece, so that a killed evaluation goes on.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.data.images import encode_png, probe_image, remarks_on
from vlmrl.dist.world import World
from vlmrl.errors import DataError
from vlmrl.evaluate.run import NO_PROMPT_LIMIT, NumberedRow, Responses
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import hide_known, learn
from vlmrl.rollout.chat import MOST_SEED, ChatPrompt
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.sample import (
    LISTEN_SECONDS,
    Prompt,
    Rollout,
    answer_pieces,
    encode_prompt,
    rollouts_of,
    without_pixels,
)
from vlmrl.services.protocol import BrokenAnswer, ChatTurn, EndpointError, ImageFile, RequestRefused, Withheld
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.response_journal import DROPPED, ResponseJournal
from vlmrl.store.rollouts import episode_fields, read_episode
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.source import Source
from vlmrl.types import Media, Message, Row, Sample, SamplingParams, Segment, sample_seed

PIECE_PROMPTS = 128
"""Number of prompts that are generated and kept together: a kill loses the work on one piece. A piece is generated as a
whole, also again: so its batches, and with them the last bits of its numbers, are those of a run without a kill."""
GENERATION = (
    *("model", "endpoint", "checkpoint", "split", "source", "dataset", "prompt_sha256", "seed", "dtype", "vlmrl"),
    "environment",
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
    made_by = {key: meta.get(key) for key in GENERATION if key != "environment" or meta.get(key)}
    return {**made_by, "sampling": sampling, **shown, **setting}


def work_identity(
    meta: Mapping[str, Any], recipe: Recipe, origin: ModelOrigin, samples: int, world: World
) -> dict[str, Any]:
    """Return the identity of one rank's share of the responses: also what the model and its engine depend on."""
    rollout = recipe.rollout
    if origin.endpoint:  # more samples of the same work go on from those that are there
        return {**journal_identity(meta), "rollout": [rollout.top_p, rollout.top_k, list(rollout.stop)]}
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


@dataclass(kw_only=True)
class Responder:
    """Responses to the rows of a source; each is in the journal as soon as it is there.

    Args:
        source: the rows as the model sees them.
        samples: responses per row.
        progress: called with the number of newly finished responses.
        drops: whether a row that cannot be shown to the model, such as one with a broken image, is dropped: it gets no
            response, and the journal has the reason. False = it is an error.
        refusals: (prompt id, sample) -> why an endpoint gave no response; it counts as an empty one.
    """

    journal: ResponseJournal
    source: Source
    params: SamplingParams
    seed: int
    samples: int
    progress: Callable[[int], Any]
    drops: bool = False
    refusals: dict[tuple[str, int], str] = field(default_factory=dict)

    def __call__(self, chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        """Yield the responses to rows as they are complete; those that the journal has are not made again."""
        raise NotImplementedError

    def keep(self, number: int, k: int, text: str, finish: str, seed: int, tokens: Any, **more: Any) -> None:
        """Put a response into the journal. `tokens`: its ids, or their number; None = not known."""
        more = {name: hide_known(value) if isinstance(value, str) else value for name, value in more.items()}
        self.journal.add(
            number, k, {"text": hide_known(text), "finish": finish, "seed": seed, "tokens": tokens, **more}
        )

    def drop(self, number: int, error: DataError) -> None:
        """Note in the journal that a row cannot be shown to the model."""
        for k in self.journal.missing(number):
            self.keep(number, k, "", "stop", 0, 0, **{DROPPED: error.message})

    def kept(self, number: int, row: Row, version: int) -> tuple[Sample, ...] | None:
        """Return the responses that the journal has, without log-probs, which no evaluation reads; None if dropped."""
        samples = []
        for k in range(self.samples):
            kept = self.journal.read(number, k)
            if DROPPED in kept:
                return None
            if refusal := kept.get("refusal"):
                self.refusals[row.prompt_id, k] = refusal
            tokens = kept["tokens"]
            listed = isinstance(tokens, list)
            ids = tuple(tokens) if listed else ()
            segment = Segment("assistant", ids, listed, unlisted=0 if listed else tokens or 0)
            more = {"segments": (segment,), **read_episode(kept, ids)}
            more |= {} if listed else {"segments": (segment,)}
            samples.append(Sample(ids, kept["text"], (), kept["finish"], version, kept["seed"], **more))
        return tuple(samples)


@dataclass(kw_only=True)
class EngineResponder(Responder):
    """Responses of an engine. A piece of the built-in engine is in the journal as a whole."""

    engine: Generator
    encoder: Encoder

    def __call__(self, chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        """Yield the responses to rows as they are complete; those that the journal has are not generated again.

        An engine that admits requests at any time gets the rows that the journal lacks, and each response is kept at
        once. For the built-in engine a piece is generated and kept as a whole.
        """
        kept: deque[NumberedRow] = deque()
        open_rows: dict[int, Rollout] = {}  # of the piece that the built-in engine generates
        sizes: deque[int] = deque()

        def pieces() -> Iterator[list[tuple[int, Prompt]]]:
            starts = ((chunk, start) for chunk in chunks for start in range(0, len(chunk), PIECE_PROMPTS))
            for piece in (chunk[start : start + PIECE_PROMPTS] for chunk, start in starts):
                missing = [(number, row) for number, row in piece if self.journal.missing(number)]
                if missing and not self.engine.admits:
                    missing = list(piece)
                there = {number for number, _ in missing}
                kept.extend((number, row) for number, row in piece if number not in there)
                prompts = self._prompts(missing)
                if prompts:
                    sizes.append(len(prompts))
                yield prompts

        more: dict[str, Any] = {"num_samples": self.samples, "run_seed": self.seed, "progress": self.progress}
        for answer in answer_pieces(self.engine, pieces(), self.params, **more):
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
                self.drop(number, error)
                self.progress(self.samples)
        return prompts

    def _keep(self, rollouts: Mapping[int, Rollout]) -> None:
        for number, rollout in sorted(rollouts.items()):
            for k, one in enumerate(rollout.samples):
                self.keep(number, k, one.text, one.finish, one.seed, list(one.token_ids), **episode_fields(one))

    def _read(self, kept: deque[NumberedRow]) -> Responses:
        """Yield the responses that the journal has, and remove their rows from `kept`."""
        version = self.engine.version
        while kept:
            number, row = kept.popleft()
            self.progress(self.samples)
            if (samples := self.kept(number, row, version)) is not None:
                (rollout,) = rollouts_of([without_pixels(self._prompt(row))], [samples], 0.0, version)
                yield number, rollout


AHEAD = 2
"""Responses that are begun, as a multiple of the requests in flight: their images are in memory."""
Place = tuple[int, Row, int]
"""(number of the row, the row, sample)."""
SENT_AS_STORED = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


@dataclass(kw_only=True)
class EndpointResponder(Responder):
    """Responses of an endpoint; each has requests and a seed of its own.

    Images of a row that may be dropped are decoded before they are sent.

    Args:
        most_open: largest number of responses that are begun and not complete.
    """

    engine: Generator
    most_open: int

    def __post_init__(self) -> None:
        self._answers_some = self.journal.count > 0

    def __call__(self, chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        """Yield the responses to rows as they are complete; those that the journal lacks are requested.

        Raises: EndpointError when the endpoint is down, rejects all requests, or gave a broken answer. Responses that
            came before are in the journal.
        """
        pending: dict[int, Place] = {}
        refused: list[tuple[Place, Sample]] = []
        broken: list[BrokenAnswer] = []
        num_requests = 0
        try:
            with self.engine.round():
                for chunk in chunks:
                    for number, row in chunk:
                        missing = self.journal.missing(number)
                        self.progress(self.samples - len(missing))
                        if not missing:
                            yield from self._complete(number, row)
                        if missing and self.drops and not self._can_show(number, row):
                            continue
                        for k in missing:
                            num_requests += 1
                            request = SamplingRequest(self._prompt(row), 1, self._seed_of(row, k))
                            pending[self.engine.submit(request, self.params)] = (number, row, k)
                            while len(pending) >= self.most_open:
                                yield from self._collect(pending, refused, broken)
                    if broken or (refused and not self._answers_some):
                        break  # no further chunk is begun
                while pending:
                    yield from self._collect(pending, refused, broken)
        except EndpointError as error:
            kept = f"{self.journal.count:,} responses are kept: the same command goes on from there"
            error.hint = f"{error.hint}; {kept}" if error.hint else kept
            raise
        if refused and not self._answers_some and isinstance(first := refused[0][1].error, RequestRefused):
            message = f"the endpoint refused all of the first {len(refused)} requests: {first.message}"
            hint = "does the server take tools? vLLM needs --enable-auto-tool-choice and --tool-call-parser"
            raise RequestRefused(message, where=first.where, hint=hint if self.source.environment else None)
        if broken:
            raise BrokenAnswer(
                f"{len(broken)} of {num_requests} requests got no whole answer: {broken[0].message}",
                where=broken[0].where,
                hint="the other responses are kept; run the same command again",
            )

    def _can_show(self, number: int, row: Row) -> bool:
        """Return whether all images of a row can be decoded. If not, drop the row."""
        try:
            for media in row.media:
                self.source.dataset.image(media)
        except DataError as error:
            self.progress(len(self.journal.missing(number)))
            self.drop(number, error)
            return False
        return True

    def _collect(
        self, pending: dict[int, Place], refused: list[tuple[Place, Sample]], broken: list[BrokenAnswer]
    ) -> Responses:
        """Wait for a moment for one of the responses, and keep all that are there; yield complete rows.

        Refusals are kept as empty responses as soon as the endpoint has answered any request.
        """
        failure: BaseException | None = None
        complete: list[tuple[Place, Sample]] = []
        for number, (sample,) in self.engine.poll(LISTEN_SECONDS):
            one, error = (pending.pop(number), sample), sample.error
            is_later = sum(turn.role == "assistant" for turn in sample.turns) > 1
            has_answer = error is None or isinstance(error, Withheld) or is_later
            self._answers_some = self._answers_some or has_answer
            if error is None or isinstance(error, RequestRefused):
                (complete if has_answer else refused).append(one)
            elif isinstance(error, BrokenAnswer):
                broken.append(error)
            else:
                failure = error
        if self._answers_some:
            complete += refused
            refused.clear()
        for (number, _, k), sample in complete:
            self._keep(number, k, sample)
        if failure is not None:
            raise failure
        for number, row in {number: row for (number, row, _), _ in complete}.items():
            if not self.journal.missing(number):
                yield from self._complete(number, row)
        if not complete:
            yield None

    def _keep(self, number: int, k: int, sample: Sample) -> None:
        more = episode_fields(sample)
        if isinstance(sample.error, EndpointError):
            more["refusal"] = sample.error.message
        counts = [part.num_tokens for part in sample.parts if part.author == "policy"]
        tokens = sum(counts) if all(counts) else None  # an endpoint may not tell it
        self.keep(number, k, sample.text, sample.finish, sample.seed, tokens, **more)
        self.progress(1)

    def _seed_of(self, row: Row, k: int) -> int:
        seed = sample_seed(self.seed, 0, row.prompt_id, 0) + k
        return seed if self.source.environment else seed % MOST_SEED  # an environment gets the seed of a local engine

    def _prompt(self, row: Row) -> ChatPrompt:
        """Return the prompt to send; the environment of an episode gets its images as pixels, too."""
        source, own = self.source, self._encoded(row)
        if source.environment is None:
            return ChatPrompt(**vars(own), chat=tuple(chat_turns(source, row)))
        own = replace(own, pictures=tuple(map(source.dataset.image, row.media)))
        return ChatPrompt(**vars(own), chat=tuple(chat_turns(source, row)), tools=source.environment.of(row).tools)

    def _encoded(self, row: Row) -> EncodedPrompt:
        text = "\n".join(f"{m.role}: {m.content}" for m in self.source.messages(row))
        # Ids, pixels and log-probs exist only on the endpoint's side. Its resize is unknown; images are sent as stored.
        sizes = tuple((m.width, m.height) for m in row.media)
        return EncodedPrompt(row, text, (), (), {}, len(row.media), 0, sizes, seen_sizes=sizes)

    def _complete(self, number: int, row: Row) -> Responses:
        if (samples := self.kept(number, row, 0)) is not None:
            yield number, Rollout(Prompt(self.source, row, 0, self._encoded(row)), samples, 0.0)


def chat_turns(source: Source, row: Row) -> Iterator[ChatTurn]:
    """Yield the turns of a row's prompt, as for a local model, with each image in the place of its mark.

    Raises: DataError when the prompt cannot be rendered, or an image is broken.
    """
    images = iter(row.media)
    for message in source.messages(row):
        yield ChatTurn(message.role, tuple(_parts(message, source, images)))


def _parts(message: Message, source: Source, images: Iterator[Media]) -> Iterator[str | ImageFile]:
    for index, text in enumerate(message.content.split(IMAGE)):
        if index:
            yield image_file(source, next(images))
        if text:
            yield text


def image_file(source: Source, media: Media) -> ImageFile:
    """Return an image to send: the file as stored if it is a plain PNG, JPEG or WebP, else its pixels as PNG."""
    data = source.dataset.image_bytes(media)
    _, kind = probe_image(data)
    # Servers disagree on what a rotated, animated or transparent file shows.
    if kind in SENT_AS_STORED and not remarks_on(data):
        return ImageFile(data, SENT_AS_STORED[kind])
    return ImageFile(encode_png(source.dataset.image(media)), SENT_AS_STORED["PNG"])


def learn_key(name: str | None) -> None:
    """Let everything that is written hide the key in an environment variable, whatever the variable's name."""
    key = os.environ.get(name, "").strip() if name else ""
    if key:
        learn([f'api_key = "{key}"'])
