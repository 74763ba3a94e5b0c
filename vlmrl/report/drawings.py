"""Responses that are code of a picture, on pages: the source is folded text, pictures stand beside the truth.

The code is never part of a page as markup. Pictures come from rewards, or from a renderer in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from vlmrl.report.texts import marked_text, whole_text
from vlmrl.tasks import kind_of
from vlmrl.tasks.truth_kinds import Drawn
from vlmrl.types import Media

if TYPE_CHECKING:
    from vlmrl.report.rollout_examples import Picture

Truth = Mapping[str, Any]
TRUTH = "truth"
"""Label of the picture that shows the truth."""


def drawn_by(truth: Truth) -> Drawn | None:
    """Return the facts about rows whose responses are code of a picture; None for other rows."""
    return kind_of(truth).drawn


def legend(truths: Iterable[Truth]) -> str:
    """Return what the colours of the pictures of these rows mean; "" for rows without such pictures."""
    kinds = (drawn_by(truth) for truth in truths)
    return " ".join(dict.fromkeys(drawn.legend for drawn in kinds if drawn is not None and drawn.legend))


def fold_words(truth: Truth, text: str) -> str:
    """Return the line below which a response is folded; "" for a response that stands open."""
    drawn = drawn_by(truth)
    return f"{drawn.language} code, {len(text):,} characters" if drawn is not None and text else ""


def answer_text(truth: Truth, text: str) -> Markup:
    """Return a response as a page shows it: code whole, since it is folded, other texts with their tags in bold."""
    return marked_text(text) if drawn_by(truth) is None else whole_text(text)


def render_name(drawn: Drawn, artifacts: Mapping[str, Media]) -> str | None:
    """Return the name of the artifact with the picture of the response; None if there is none.

    Of several rewards, each artifact is called `<label>.<name>`; the first one with the name counts.
    """
    return next((name for name in artifacts if name == drawn.render or name.endswith(f".{drawn.render}")), None)


def compared(
    truth: Truth, artifacts: Mapping[str, Media], media: Sequence[Media], picture_of: Callable[[Media], Picture]
) -> list[tuple[str, Picture]]:
    """Return (name, picture) of a score's artifacts; before them, the image that shows the truth, if there is one."""
    drawn = drawn_by(truth)
    shows_truth = artifacts and drawn is not None and drawn.image < len(media)
    first = [(TRUTH, picture_of(media[drawn.image]))] if shows_truth and drawn is not None else []
    names = sorted(artifacts, key=lambda name: drawn is not None and name != render_name(drawn, artifacts))
    return [*first, *((name, picture_of(artifacts[name])) for name in names)]
