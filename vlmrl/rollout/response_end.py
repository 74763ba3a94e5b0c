"""Rule that decides at which token a response ends, in every engine; stop strings are searched as the text grows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from vlmrl.rewards.boxes.reading import POSITION_TOKEN
from vlmrl.types import Finish, SamplingParams

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Character that a decoder writes for bytes that are no character, or not yet."""
OPEN_TOKENS = 16
"""Number of open tokens from which the first of them are fixed."""
LATER_TOKENS = range(4, 8)
"""Number of tokens that stay open. A character has at most 4 bytes, so one of these ends before a character's
first byte, and the tokens after it show whether the text before it is final."""
GARBLED_TOKENS = 64
"""Number of open tokens from which tokens are fixed although the text ends with `UNKNOWN`: it stays so."""


class ResponseTexts:
    """Texts of an engine's responses, without special tokens. Stop strings are searched in these texts.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._silent: dict[int, bool] = {}

    def __call__(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def response(self, ids: Sequence[int]) -> str:
        """Return the text of a whole response for rewards and people: tokens that state positions stay in it.

        All other special tokens are removed. Without such tokens, the text is that of a call.
        """
        if not self._position_ids.intersection(ids):
            return self(ids)
        removed = self._special_ids - self._position_ids
        return self._tokenizer.decode([i for i in ids if i not in removed], skip_special_tokens=False)

    @property
    def is_local(self) -> bool:
        """Return whether a token changes the text of its neighbours only.

        This holds for all decoders of the library `tokenizers`. A tokenizer in Python may do anything with the text.
        """
        return bool(getattr(self._tokenizer, "is_fast", False))

    def is_silent(self, token: int) -> bool:
        """Return whether a local decoder never sees a token: it is special, or only the model has its id."""
        if token not in self._silent:
            self._silent[token] = token in self._special_ids or self._tokenizer.convert_ids_to_tokens(token) is None
        return self._silent[token]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def _position_ids(self) -> frozenset[int]:
        """Ids of the special tokens that state positions, such as `<|box_start|>`."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return frozenset(i for i, token in added.items() if token.special and POSITION_TOKEN.fullmatch(token.content))


class ResponseEnd:
    """Rule that ends one response. Both engines use it, so they stop at the same token.

    A response ends with the first token that is a stop id, with which its text contains a stop string, or that reaches
    the limit. A stop id or a stop string has priority over the limit when both happen at the same token.
    """

    def __init__(self, params: SamplingParams, texts: ResponseTexts) -> None:
        self._params, self._num_tokens = params, 0
        self._search = StopSearch(params.stop, texts) if params.stop else None

    def add(self, token: int) -> Finish | None:
        """Return why the response ends with its next token, or None if it goes on."""
        self._num_tokens += 1
        if token in self._params.stop_ids or (self._search is not None and self._search.add(token)):
            return "stop"
        return "length" if self._num_tokens >= self._params.max_new_tokens else None


class StopSearch:
    """Search for stop strings in a text that grows by tokens: exact, in constant time per token on average.

    With each token only the last tokens are decoded. The tokens before them are fixed: the end of their text is kept,
    as long as a stop string can begin in it. Some fixed tokens are decoded again with the last ones, because the text
    of a token depends on its neighbours.

    A match is confirmed by decoding everything. Everything is also decoded if a token changes the text of fixed
    tokens, if the tokenizer's decoder is not local, or if a stop string contains `UNKNOWN`.
    """

    def __init__(self, stops: Sequence[str], texts: ResponseTexts) -> None:
        self._stops, self._texts = tuple(stops), texts
        self._fixes = texts.is_local and not any(UNKNOWN in stop for stop in stops)
        self._ids: list[int] = []
        self._num_dropped = self._num_fixed = 0  # ids[dropped:fixed] are fixed and still decoded
        self._head = self._tail = ""  # text of ids[dropped:fixed]; end of the text of all fixed tokens

    def add(self, token: int) -> bool:
        """Return whether the text contains a stop string with the next token. It did not without it."""
        if self._fixes and self._texts.is_silent(token):
            return False
        self._ids.append(token)
        window = self._texts(self._ids[self._num_dropped :])
        if window.startswith(self._head):
            recent = self._tail + window[len(self._head) :]
        elif window.endswith(UNKNOWN) and self._head.startswith(window.rstrip(UNKNOWN)):
            recent = ""  # the token makes a whole run of bytes unreadable, and nothing else is new
        else:
            recent = self._texts(self._ids)
        if self._has_stop(recent) and self._has_stop(self._texts(self._ids)):
            return True
        if self._fixes and len(self._ids) - self._num_fixed >= OPEN_TOKENS:
            self._fix(window, recent)
        return False

    def _has_stop(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)

    def _fix(self, window: str, recent: str) -> None:
        """Fix all tokens but the last, if their text is final: later tokens cannot change it.

        Args:
            window: text of the tokens that are not dropped.
            recent: end of the whole text, `_tail` and the text of the open tokens.
        """
        if window.endswith(UNKNOWN) and len(self._ids) - self._num_fixed < GARBLED_TOKENS:
            return
        for later in LATER_TOKENS:
            before = self._texts(self._ids[self._num_dropped : -later])
            if window.startswith(before):
                break
        else:
            return
        fixed = recent[: len(recent) - (len(window) - len(before))]
        longest = max(map(len, self._stops))
        self._tail = fixed[max(0, len(fixed) - longest + 1) :]
        self._num_dropped, self._num_fixed = self._num_fixed, len(self._ids) - later
        self._head = self._texts(self._ids[self._num_dropped : self._num_fixed])
