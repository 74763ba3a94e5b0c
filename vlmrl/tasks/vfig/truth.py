"""Truth of the task figures: the SVG code of the figure, and the source that it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

MOST_LABEL_CHARS = 60


def make_truth(svg: str, source: str) -> dict[str, Any]:
    """Return the truth of a row. Evaluations also give the accuracy for each `source`."""
    return {"svg": svg, "source": source}


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words. It is not drawn here."""
    problems = []
    svg, source = truth.get("svg"), truth.get("source")
    if not isinstance(svg, str) or "<" not in svg or not svg.rstrip().endswith(">"):
        problems.append(f"`svg` is {svg!r:.60}, not the code of an svg element")
    if not isinstance(source, str) or not 0 < len(source) <= MOST_LABEL_CHARS:
        problems.append(f"`source` is {source!r:.60}, not a text of 1 to {MOST_LABEL_CHARS} characters")
    return problems


def notes_on(truths: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return a note for the data doctor: how many figures of each source there are, and how long their code is."""
    counts = Counter(str(truth.get("source")) for truth in truths)
    lengths = sorted(len(str(truth.get("svg"))) for truth in truths)
    if not lengths:
        return {}
    sources = ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    return {
        "sources": ("ok", sources),
        "code": ("ok", f"{middle:,} characters in the middle, {longest:,} at most"),
    }
