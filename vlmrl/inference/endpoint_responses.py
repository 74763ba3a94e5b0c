"""Responses of an endpoint to dataset rows, in the form in which responses of a local engine are graded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from vlmrl.data.encode import EncodedPrompt
from vlmrl.data.images import encode_png, probe_image, remarks_on
from vlmrl.errors import DataError
from vlmrl.evaluate.grading import NumberedRow, Responses
from vlmrl.inference.engine_responses import keep_dropped
from vlmrl.redaction.redact import hide_known, learn
from vlmrl.rollout.sample import Prompt, Rollout
from vlmrl.rollout.scoring import LISTEN_SECONDS
from vlmrl.services.client import EndpointClient
from vlmrl.services.protocol import (
    BrokenAnswer,
    ChatAnswer,
    ChatRequest,
    ChatTurn,
    EndpointError,
    ImageFile,
    RequestRefused,
)
from vlmrl.store.response_journal import DROPPED, ResponseJournal
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.source import Source
from vlmrl.types import Finish, Media, Message, Row, Sample, SamplingParams, Segment, sample_seed

MOST_SEED = 2**31
"""Seeds that are sent are below this number: not every server takes larger ones."""
AHEAD = 2
"""Requests that are prepared, as a multiple of those in flight: their images are in memory."""
Place = tuple[int, Row, int]
"""(number of the row, the row, sample)."""
SENT_AS_STORED = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


class EndpointResponder:
    """Responses of an endpoint to the rows of a source; each is in the journal as soon as it is there.

    Args:
        params: sampling parameters. Strings that end a response are applied here, as endpoints cut them off.
        seed: seed of the sampling.
        samples: responses per row; each has a request and a seed of its own.
        progress: called with the number of newly finished responses.
        drops: as of `EngineResponder`. Images are then decoded before they are sent.

    Attributes:
        refusals: (prompt id, sample) -> why the endpoint gave no response; it counts as an empty one.
    """

    def __init__(
        self,
        client: EndpointClient,
        journal: ResponseJournal,
        source: Source,
        params: SamplingParams,
        *,
        seed: int,
        samples: int,
        progress: Callable[[int], Any],
        drops: bool = False,
    ) -> None:
        self._drops = drops
        self._client, self._journal, self._source, self._params = client, journal, source, params
        self._seed, self._samples, self._progress = seed, samples, progress
        self._answers_some = journal.count > 0
        self.refusals: dict[tuple[str, int], str] = {}

    def __call__(self, chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
        """Yield the responses to rows as they are complete; those that the journal lacks are requested.

        Raises: EndpointError when the endpoint is down, rejects all requests, or gave a broken answer. Responses that
            came before are in the journal.
        """
        pending: dict[Future[list[ChatAnswer]], Place] = {}
        refused: list[tuple[Place, RequestRefused]] = []
        broken: list[BrokenAnswer] = []
        num_requests = 0
        try:
            for chunk in chunks:
                for number, row in chunk:
                    missing = self._journal.missing(number)
                    self._progress(self._samples - len(missing))
                    if not missing and DROPPED not in self._journal.read(number, 0):
                        yield number, self._rollout(number, row)
                    if missing and self._drops and not self._can_show(number, row):
                        continue
                    for k in missing:
                        num_requests += 1
                        pending[self._client.submit(self._request(row, k))] = (number, row, k)
                        while len(pending) >= AHEAD * self._client.options.concurrency:
                            yield from self._collect(pending, refused, broken)
                if broken or (refused and not self._answers_some):
                    break  # no further chunk is begun
            while pending:
                yield from self._collect(pending, refused, broken)
        except EndpointError as error:
            kept = f"{self._journal.count:,} responses are kept: the same command goes on from there"
            error.hint = f"{error.hint}; {kept}" if error.hint else kept
            raise
        finally:
            for future in pending:
                future.cancel()
        if refused and not self._answers_some:
            first = refused[0][1]
            raise RequestRefused(
                f"the endpoint refused all of the first {len(refused)} requests: {first.message}", where=first.where
            )
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
                self._source.dataset.image(media)
        except DataError as error:
            self._progress(len(self._journal.missing(number)))
            keep_dropped(self._journal, number, error)
            return False
        return True

    def _collect(
        self,
        pending: dict[Future[list[ChatAnswer]], Place],
        refused: list[tuple[Place, RequestRefused]],
        broken: list[BrokenAnswer],
    ) -> Responses:
        """Wait for a moment for one of the requests, and keep all answers that are there; yield complete rows.

        Refusals are kept as empty responses as soon as the endpoint has answered any request.
        """
        failure: BaseException | None = None
        places: list[Place] = []
        for future in wait(pending, timeout=LISTEN_SECONDS, return_when=FIRST_COMPLETED).done:
            place = pending.pop(future)
            try:
                (answer,) = future.result()
            except RequestRefused as error:
                refused.append((place, error))
            except BrokenAnswer as error:
                broken.append(error)
            except Exception as error:
                failure = error
            else:
                self._answers_some = True
                self._keep(place, answer)
                places.append(place)
        if failure is not None:
            raise failure
        while refused and self._answers_some:
            place, refusal = refused.pop(0)
            self._keep(place, ChatAnswer("", "stop", None, refusal.message))
            places.append(place)
        for number, row in {number: row for number, row, _ in places}.items():
            if not self._journal.missing(number):
                yield number, self._rollout(number, row)
        if not places:
            yield None

    def _keep(self, place: Place, answer: ChatAnswer) -> None:
        number, row, k = place
        text, finish = _ended(answer.text, answer.finish, self._params.stop)
        fields: dict[str, Any] = {"text": hide_known(text), "finish": finish, "seed": self._seed_of(row, k)}
        fields["tokens"] = answer.num_tokens
        self._journal.add(number, k, fields | ({"refusal": hide_known(answer.refusal)} if answer.refusal else {}))
        self._progress(1)

    def _request(self, row: Row, k: int) -> ChatRequest:
        params = self._params
        return ChatRequest(
            tuple(chat_turns(self._source, row)),
            params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=self._seed_of(row, k) if params.temperature else None,
        )

    def _seed_of(self, row: Row, k: int) -> int:
        return (sample_seed(self._seed, 0, row.prompt_id, 0) + k) % MOST_SEED

    def _rollout(self, number: int, row: Row) -> Rollout:
        messages = self._source.messages(row)
        text = "\n".join(f"{m.role}: {m.content}" for m in messages)
        # Ids, pixels and log-probs exist only on the endpoint's side. Its resize is unknown; images are sent as stored.
        sizes = tuple((m.width, m.height) for m in row.media)
        encoded = EncodedPrompt(row, text, (), (), {}, len(row.media), 0, sizes, seen_sizes=sizes)
        samples = tuple(self._sample(number, row, k) for k in range(self._samples))
        return Rollout(Prompt(self._source, row, 0, encoded), samples, 0.0)

    def _sample(self, number: int, row: Row, k: int) -> Sample:
        kept = self._journal.read(number, k)
        if refusal := kept.get("refusal"):
            self.refusals[row.prompt_id, k] = refusal
        finish: Finish = "length" if kept["finish"] == "length" else "stop"
        segment = Segment("assistant", (), False, unlisted=kept["tokens"] or 0)
        return Sample((), kept["text"], (), finish, 0, kept["seed"], (segment,))


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


def _ended(text: str, finish: Finish, stops: Sequence[str]) -> tuple[str, Finish]:
    """Return (text up to the end of the first stop string, reason of its end); without a stop string both as given.

    A stop string has priority over the token limit, as with an engine. Only an engine's last token can hold more text.
    """
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(ends)], "stop") if ends else (text, finish)


def learn_key(name: str | None) -> None:
    """Let everything that is written hide the key in an environment variable, whatever the variable's name."""
    key = os.environ.get(name, "").strip() if name else ""
    if key:
        learn([f'api_key = "{key}"'])
