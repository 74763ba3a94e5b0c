"""The page of `vlmrl reward-check --diff --html`: two rewards, and the responses that they judge most differently.

Like the report it is one file without a script that asks for nothing; all that comes from a model or a dataset is
escaped, and images are inside it, shrunk and within a budget.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.data.run_images import run_images
from vlmrl.report.examples import Album, Picture, marked_text, visible
from vlmrl.report.shell import render
from vlmrl.store.files import write_atomic
from vlmrl.store.media import RunImages

if TYPE_CHECKING:
    from markupsafe import Markup

    from vlmrl.check.reward_check import Checked
    from vlmrl.check.saved import Saved


@dataclass(frozen=True)
class ChangedView:
    """One response under both rewards. Values are None where a reward failed; `parts`: name -> (first, second)."""

    where: str
    text: Markup
    truth: Mapping[str, str]
    pictures: Sequence[Picture]
    first: float | None
    second: float | None
    advantage: tuple[float, float] | None
    parts: Mapping[str, tuple[float | None, float | None]]
    notes: tuple[str, str]


def write_reward_diff(out: Path, saved: Saved, checked: Checked) -> None:
    """Write the page, atomically. The folder of `out` is made. Raises: StoreError when it cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, render_reward_diff(saved, checked).encode("utf-8", "backslashreplace"))


def render_reward_diff(saved: Saved, checked: Checked) -> str:
    """The page as text, of a report that has a diff."""
    album = Album()
    images = run_images(saved.run.dir) if saved.run is not None else None
    views = [_view(row, checked, images, album) for row in checked.report["diff"]["changed"]]
    return render(
        "reward_diff.html",
        report=checked.report,
        diff=checked.report["diff"],
        rows=views,
        grouped=saved.grouped,
        shared=album.shared(),
        left_out=album.left_out,
        notes=images.notes if images is not None else [],
    )


def _view(row: Mapping[str, Any], checked: Checked, images: RunImages | None, album: Album) -> ChangedView:
    sample = checked.samples[row["row"]]
    before, after = row["old"], row["new"]
    names = dict.fromkeys([*before["parts"], *after["parts"]])
    return ChangedView(
        where=visible(sample.where),
        text=marked_text(sample.input.response),
        truth={visible(str(k)): visible(_json(v)) for k, v in sample.input.truth.items()},
        pictures=[album.add(media, images) for media in sample.media] if images is not None else [],
        first=before["value"],
        second=after["value"],
        advantage=tuple(row["advantage"]) if checked.report["diff"]["advantages"] is not None else None,
        parts={n: (before["parts"].get(n), after["parts"].get(n)) for n in names},
        notes=(visible(before["error"] or before["note"]), visible(after["error"] or after["note"])),
    )


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
