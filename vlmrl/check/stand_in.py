"""Responses that no model wrote, for rewards that also look at tokens."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Literal

from vlmrl.types import RewardInput

CHARS_OF_A_TOKEN = 4


def responding(x: RewardInput, text: str, finish: Literal["stop", "length"] = "stop") -> RewardInput:
    """Return a row's input with another response; a token is four characters, and equal ones have equal ids."""
    pieces = [text[i : i + CHARS_OF_A_TOKEN] for i in range(0, len(text), CHARS_OF_A_TOKEN)]
    ids = tuple(zlib.crc32(piece.encode("utf-8", "surrogatepass")) % 50_000 for piece in pieces)
    tokens = max(1, len(text) // CHARS_OF_A_TOKEN)
    return replace(x, response=text, finish=finish, num_tokens=tokens, token_ids=ids)
