"""Texts of responses with each token coloured by how much it depends on the images.

Rollouts keep token ids, so the model's tokenizer gives the text of each. It comes from a checkpoint of the run, or from
the model's folder; without it, or where the tokens do not give the text that was kept, a response has no colours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from vlmrl.errors import StoreError
from vlmrl.report.page_parts import MAX_TEXT, cut_note
from vlmrl.store.checkpoints import HF
from vlmrl.store.kept_recipe import newest_resolved, read_resolved
from vlmrl.store.runs import Run
from vlmrl.types import ScoredSample
from vlmrl.untrusted import visible

LEVELS = (0.01, 0.1, 0.5, 2.0)
"""Smallest dependency of each colour, in nats; below the first one a token has none."""
FILE = "tokenizer.json"


class TokenTexts:
    """Texts of the tokens of a run's responses. The tokenizer is read when it is first used."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run's model; None if there is no file of it, or one that cannot be read."""
        folders = [checkpoint / HF for checkpoint in reversed(self.run.checkpoint_dirs())]
        if newest_resolved(self.run.dir).exists():
            with suppress(StoreError, KeyError, TypeError):
                folders.append(Path(read_resolved(self.run.dir)["recipe"]["model"]["path"]))
        file = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
        if file is None:
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file))
        except Exception:  # `tokenizers` raises plain exceptions of its own
            return None

    def pieces(self, ids: Sequence[int], room: int) -> list[str]:
        """Return the text that each token adds, for as many tokens as give `room` characters.

        A character of several tokens belongs to the last of them.
        """
        pieces, first, done, before = [], 0, 0, ""
        for end in range(1, len(ids) + 1):
            # A token's text may depend on the one before it (spaces), so both are decoded.
            text = self._decoded(ids[first:end])
            if text.endswith("\ufffd") and end < len(ids):
                pieces.append("")
                continue
            pieces.append(text[len(before) :])
            if (room := room - len(pieces[-1])) <= 0:
                break
            first, done = done, end
            before = self._decoded(ids[first:done])
        return pieces

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def coloured(self, sample: ScoredSample) -> Markup | None:
        """Return the text of a response with coloured tokens, cut if long; None if it cannot be coloured.

        Secrets are hidden in the text that was kept, but not in the tokens: the two must be the same.
        """
        values, ids = sample.dependency, sample.trajectory.response_ids
        if values is None or len(values) != len(ids) or min(ids, default=-1) < 0 or self.tokenizer is None:
            return None
        pieces = self.pieces(ids, MAX_TEXT)
        if self._decoded(ids) != sample.text or not sample.text.startswith("".join(pieces)):
            return None
        parts, room = [], MAX_TEXT
        for piece, value in zip(pieces, values, strict=False):
            shown, level = escape(visible(piece[:room])), bisect_right(LEVELS, value)
            room -= len(piece)
            if level and piece:
                shown = Markup('<span class="k{}" title="{:.3f} nats">{}</span>').format(level, value, shown)
            parts.append(shown)
        return Markup("").join(parts) + cut_note(len(sample.text) - MAX_TEXT)


def colour_legend() -> list[tuple[str, str]]:
    """Return (class of the colour, its range in nats) of each colour."""
    ends = [*(f"{low:g} to {high:g}" for low, high in pairwise(LEVELS)), f"{LEVELS[-1]:g} or more"]
    return [(f"k{level}", text) for level, text in enumerate(ends, start=1)]
