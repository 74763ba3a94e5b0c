"""Sets and settings in the names of a run's validation metrics: `eval/[<source>/][<set>/][<setting>/]<metric>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlmrl.errors import VlmrlError
from vlmrl.recipe.load import recipe_from_resolved
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.runs import Run
from vlmrl.tasks.source import set_label


class Cell(NamedTuple):
    """A set and a setting; "" = the recipe names none."""

    set_name: str
    setting: str

    @property
    def words(self) -> str:
        return "/".join(filter(None, self))


def cells_of(run: Run) -> list[Cell]:
    """Return the cells of a run's newest recipe; [] for one without `eval.sets` and settings, or that is damaged."""
    try:
        settings = recipe_from_resolved(read_resolved(run.dir), where=str(run.dir)).eval
    except VlmrlError:
        return []
    if not settings.sets and not settings.settings:
        return []
    sets = [set_label(name) for name in settings.sets] or [""]
    return [Cell(one, setting) for one in sets for setting in settings.named_settings]


def cell_in(name: str, cells: Sequence[Cell]) -> tuple[str, Cell | None, str]:
    """Return (place, cell, metric) of a metric's name without `eval/`; the place is the source and the set, in words.

    Example: "birds/validation/pass8/accuracy" -> ("birds, validation", Cell("validation", "pass8"), "accuracy").
    """
    for cell in cells:
        source, words, metric = f"/{name}".partition(f"/{cell.words}/")
        if words and "/" not in source[1:]:
            return ", ".join(filter(None, (source[1:], cell.set_name))), cell, metric
    return "", None, name
