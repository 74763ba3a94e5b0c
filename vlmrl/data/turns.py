"""Tokens between two turns of the policy: what the chat template writes from one assistant's turn to the next.

An observation is what a tool or an environment answers: texts and images. Its tokens follow those that the policy has
sampled, which are never decoded and encoded again. So the stream of an episode is exact to the token, even for chat
templates that would write earlier turns differently when they render the whole conversation anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from vlmrl.data.chat_template import IMAGE_SLOT, ControlTokens
from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.data.images import decode_image
from vlmrl.environments.calls import end_of_thought
from vlmrl.errors import DataError
from vlmrl.model.packing import join_images
from vlmrl.types import Media, Message, Row, Sample, Segment

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    Part = str | Image
    """Part of an observation. A place for an image is a part, so `<image>` in a text is a word."""

Role = Literal["tool", "user"]
ROLES: tuple[Role, ...] = ("tool", "user")
"""Roles in which an observation may be shown; the first one that works is used."""
ANSWER = "vlmrlAnswerMark"
"""Text of an assistant's turn; the tokens of an observation begin behind it."""
_SLOT = re.compile(r"vlmrlText(\d+)Mark")
_EDGE = "\t\n \t \n\t"
"""White space around a slot. A template that trims a text takes it away."""
_PROBES = ('5 "é" < 6 & {{ x }} \\n\\', "two\n\n  lines", " <b>white space</b> \n")
"""Texts that a template which escapes, splits or trims would change."""
_SHAPES = ("t", "i", "it", "ti", "tit", "iti")
"""Observations of a text (t) and images (i) that are tried at the start."""
KEPT_FRAMES = 64


@dataclass(frozen=True)
class Shown:
    """Observation of an episode.

    Args:
        parts: texts and images (RGB), in order.
        media, files: the images by content, and their PNG files.
        spans: begin and end in `parts` of what each call returned.
        place: of the episode, for errors.
    """

    parts: Sequence[Part]
    media: tuple[Media, ...]
    files: Sequence[bytes]
    spans: Sequence[Sequence[int]]
    place: str


@dataclass(frozen=True)
class _Frame:
    """Rendered observation without its texts. Text i of `order` goes between `pieces` i and i + 1.

    Args:
        trims: for each text of the observation, whether the template removes white space (before, behind) it.
    """

    pieces: tuple[str, ...]
    order: tuple[int, ...]
    trims: tuple[tuple[bool, bool], ...]

    def trimmed(self, texts: Sequence[str]) -> list[str]:
        """Return the texts without the white space that the template would remove."""
        pairs = zip(texts, self.trims, strict=True)
        starts = [(text.lstrip() if left else text, right) for text, (left, right) in pairs]
        return [text.rstrip() if right else text for text, right in starts]

    def filled(self, texts: Sequence[str]) -> str:
        """Return the text of an observation with these texts."""
        placed = (texts[number] + piece for number, piece in zip(self.order, self.pieces[1:], strict=True))
        return self.pieces[0] + "".join(placed)


class TurnEncoder:
    """Encoder of observations, in the role in which this chat template shows them.

    Args:
        encoder: of the prompts that they follow, with its tools.
        roles: roles to try; the first one that works is used.
    Raises: DataError when the chat template shows them in no role.

    Attributes:
        problems: for each role that was tried before, why it does not work.
    """

    role: Role

    def __init__(self, encoder: Encoder, roles: Sequence[Role] = ROLES) -> None:
        self.encoder = encoder
        self.problems: dict[str, str] = {}
        # There are few kinds of observations: a text, an image and a text. Most of the time goes into rendering.
        self._frame = lru_cache(KEPT_FRAMES)(self._make_frame)
        for role in roles:
            self.role = role
            self._frame.cache_clear()
            try:
                self._require_role()
            except DataError as error:
                self.problems[role] = error.message
            else:
                break
        else:
            problems = "; ".join(f"in role {role}, {problem}" for role, problem in self.problems.items())
            raise DataError(
                f"the model's chat template cannot show what a tool answers: {problems}",
                hint="use a model whose chat template shows turns of a tool, or of a user behind an assistant's turn, "
                "with images; or train without tools",
            )
        # The template may write other tokens around an observation than around a prompt, such as <tool_response>.
        names = "".join(encoder.control.names)
        self.control = ControlTokens(encoder.processor, lambda text: names + self._suffix(text))

    def encode(
        self, parts: Sequence[Part], media: Sequence[Media], place: str, *, images_before: int, is_first: bool = False
    ) -> EncodedPrompt:
        """Return the tokens from the end of an assistant's turn to the beginning of the next one.

        The first token often ends the assistant's turn; see `without_first`. Control tokens in the texts stay letters.

        Args:
            parts: texts and images (RGB) in order. Texts that follow each other are joined.
            images_before: number of images in the prompt and in the turns before; some processors write it.
            is_first: it goes on with the last message of an open prompt; no turn is before it.
        Returns: `text` and all else are of the observation alone.
        Raises: DataError when the processor refuses an image, or the chat template such a beginning.
        """
        images = [part for part in parts if not isinstance(part, str)]
        shape, texts = _shape_of(parts)
        frame = self._frame(shape, is_first)
        marked = frame.filled([self.control.guard(text) for text in frame.trimmed(texts)])
        row = Row(place, "", "", {}, tuple(media), origin=place)
        return self.encoder.encode_rendered(row, marked, images, self.control, images_before)

    @property
    def is_open(self) -> bool:
        """Return whether an observation goes on with the prompt, before the first turn."""
        return self.encoder.is_open

    def text_ids(self, text: str) -> list[int]:
        """Return the tokens of a text within an observation."""
        return self.control.encode(self.control.guard(text))

    def follow(self, prompt: EncodedPrompt, last: Sample | None, shown: Shown) -> tuple[Segment, EncodedPrompt, bool]:
        """Return the segment of an observation, the prompt of the next turn, and whether that begins a thought.

        Args:
            last: the last turn; None = the observation goes on with an open prompt.
        """
        before, is_first = prompt.num_images, last is None
        seen = self.encode(shown.parts, shown.media, shown.place, images_before=before, is_first=is_first)
        role, sampled, more = ("user", (), seen) if last is None else ("tool", last.token_ids, seen)
        more = without_first(more, sampled[-1]) if sampled else more
        how = {"author": "environment", "media": shown.media, "seen_sizes": more.seen_sizes}
        segment = Segment(role, more.prompt_ids, False, **how)
        return segment, followed(prompt, sampled, more), bool(end_of_thought(seen.text))

    @cached_property
    def end_id(self) -> int:
        """First token of every observation, which usually ends the assistant's turn."""
        return self.encode((), (), "an observation", images_before=0).prompt_ids[0]

    def _require_role(self) -> None:
        """Raise a DataError unless observations can be shown in this role."""
        for shape in _SHAPES:
            frame, texts = self._frame(shape, False), _probe_texts(shape)
            if self._suffix(_content(shape, texts), second=True) != frame.filled(frame.trimmed(texts)):
                raise DataError("what is written around it depends on the turns before it")

    def _suffix(self, content: str, second: bool = False, is_first: bool = False) -> str:
        """Return what is rendered behind an assistant's turn for an observation, or behind an open prompt.

        Args:
            second: whether another assistant's turn and the same observation go before.
        """
        before = [Message("user", "u")]
        if second:
            before += [Message("assistant", "a"), Message(self.role, content)]
        turns = [Message("assistant", ANSWER), Message(self.role, content)]
        text = self.encoder.render([Message("user", ANSWER + content)] if is_first else [*before, *turns])
        if text.count(ANSWER) != 1:
            author = "user" if is_first else "assistant"
            raise DataError(f"the {author}'s text before it is written {text.count(ANSWER)} times instead of once")
        return text.partition(ANSWER)[2]

    def _make_frame(self, shape: str, is_first: bool) -> _Frame:
        """Return the frame of an observation. Raises: DataError when texts and images do not stand in it as given."""
        slots = [f"{_EDGE}vlmrlText{i}Mark{_EDGE}" for i in range(shape.count("t"))]
        text = self._suffix(_content(shape, slots), is_first=is_first)
        self.encoder.require_placeholders(text, shape.count("i"), Row("", "", "", {}))
        # [piece, number, piece, number, ..., piece]
        split = _SLOT.split(text)
        pieces, order = split[::2], [int(number) for number in split[1::2]]
        for number in range(len(slots)):
            if order.count(number) != 1:
                raise DataError(f"its text is written {order.count(number)} times instead of once")
        trims = [(False, False)] * len(slots)
        for place, number in enumerate(order):
            before, behind = pieces[place], pieces[place + 1]
            trims[number] = not before.endswith(_EDGE), not behind.startswith(_EDGE)
            pieces[place : place + 2] = before.removesuffix(_EDGE), behind.removeprefix(_EDGE)
        frame = _Frame(tuple(pieces), tuple(order), tuple(trims))
        texts = _probe_texts(shape)
        if frame.filled(frame.trimmed(texts)) != self._suffix(_content(shape, texts), is_first=is_first):
            raise DataError("its text is not written as it is")
        return frame


def encode_tail(
    encoder: Encoder, segments: Sequence[Segment], files: Mapping[str, bytes], place: str
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return the kinds and image tensors of a response whose tools showed images; see `Encoder.encode_tail`.

    Args:
        files: sha256 -> image file.
    """
    media = [m for segment in segments for m in segment.media]
    images = [decode_image(files[m.sha256]) for m in media]
    return encoder.encode_tail([i for segment in segments for i in segment.ids], media, images, place)


def without_first(encoded: EncodedPrompt, last_id: int) -> EncodedPrompt:
    """Return an observation without its first token if it is `last_id`, the last token that the policy has sampled.

    It ends the assistant's turn. Where a stop string ended the turn, the policy has not sampled it: then it belongs to
    the observation, and is not trained. `text` stays.
    """
    if encoded.prompt_ids[:1] != (last_id,):
        return encoded
    return replace(
        encoded,
        prompt_ids=encoded.prompt_ids[1:],
        kinds=encoded.kinds[1:],
        unexpanded_ids=encoded.unexpanded_ids[1:],
    )


def followed(prompt: EncodedPrompt, sampled_ids: Sequence[int], more: EncodedPrompt) -> EncodedPrompt:
    """Return the prompt of the next turn: a prompt, the tokens that were sampled for it, and an observation.

    `text` stays that of the first prompt, because the sampled tokens are ids and no text.

    Args:
        more: the observation, after `without_first`.
    """
    sampled = tuple(sampled_ids)
    num_images, seen = prompt.num_images + more.num_images, prompt.seen_sizes + more.seen_sizes
    return EncodedPrompt(
        row=replace(prompt.row, media=prompt.row.media + more.row.media),
        text=prompt.text,
        prompt_ids=prompt.prompt_ids + sampled + more.prompt_ids,
        kinds=prompt.kinds + (0,) * len(sampled) + more.kinds,
        images=join_images([prompt.images, more.images]),
        num_images=num_images,
        num_image_tokens=prompt.num_image_tokens + more.num_image_tokens,
        image_sizes=prompt.image_sizes + more.image_sizes,
        unexpanded_ids=prompt.unexpanded_ids + sampled + more.unexpanded_ids,
        pictures=prompt.pictures + more.pictures,
        seen_sizes=seen if len(seen) == num_images else (),
    )


def _shape_of(parts: Sequence[Part]) -> tuple[str, list[str]]:
    """Return (shape, texts). The shape has an `i` for each image and a `t` for each text.

    Texts side by side are one, empty ones none. An observation without anything is an empty text.
    """
    shape, texts = "", []
    for part in parts:
        if not isinstance(part, str):
            shape += "i"
        elif part and shape.endswith("t"):
            texts[-1] += part
        elif part:
            shape += "t"
            texts.append(part)
    return (shape, texts) if shape else ("t", [""])


def _probe_texts(shape: str) -> list[str]:
    return [_PROBES[(len(shape) + i) % len(_PROBES)] for i in range(shape.count("t"))]


def _content(shape: str, texts: Sequence[str]) -> str:
    rest = iter(texts)
    return "".join(IMAGE_SLOT if letter == "i" else next(rest) for letter in shape)
