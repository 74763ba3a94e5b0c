"""Texts of models and datasets on a page: escaped, with visible control characters, cut where they are long."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from vlmrl.untrusted import visible

MAX_TEXT = 6000
"""Characters of a text that stands open on a page."""
MAX_WHOLE = 100_000
"""Characters of a text that is folded. Longer ones are cut, or a single one could make the page too large."""
TAG = re.compile(r"&lt;/?[A-Za-z][\w-]{0,40}&gt;")


def marked_text(text: str) -> Markup:
    """Return a text of a model or dataset, escaped, with visible control characters and tags in bold; cut if long."""
    body = Markup(TAG.sub(lambda m: f"<b>{m[0]}</b>", str(escape(visible(text[:MAX_TEXT])))))
    return body + _rest(len(text) - MAX_TEXT)


def whole_text(text: str) -> Markup:
    """Return a text for a folded place, escaped: all of it up to MAX_WHOLE characters, and no markup but the cut."""
    return escape(visible(text[:MAX_WHOLE])) + _rest(len(text) - MAX_WHOLE)


def _rest(cut: int) -> Markup:
    return Markup('<span class="note"> ... {:,} more characters</span>').format(cut) if cut > 0 else Markup("")
