"""Creation of a run folder for a checked recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmrl.recipe.auto_values import require_settled
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.setup.run_records import records_of, texts_of
from vlmrl.store.provenance import usable_threads
from vlmrl.store.runs import Run, create_run


@dataclass(frozen=True)
class Labels:
    """Labels by which a person tells runs apart."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    note: str = ""


def start_run(loaded: LoadedRecipe, root: Path, argv: Sequence[str], labels: Labels, *, kind: str | None = None) -> Run:
    """Create a run folder for this recipe, locked by this process. Its parent is the run of the model's checkpoint.

    Args:
        kind: kind of the run, if it differs from the recipe's kind (for a trial); None = the recipe's kind.
    """
    from vlmrl.setup.model_origin import find_model
    from vlmrl.setup.sources import open_sources

    recipe = loaded.recipe
    require_settled(recipe)
    sources, validation = open_sources(recipe)
    origin = find_model(recipe.model.path, root)
    return create_run(
        root,
        kind=kind or recipe.kind,
        recipe_name=loaded.path.stem,
        recipe_text=loaded.text,
        resolved=loaded.resolved,
        argv=argv,
        seeds={"run": recipe.train.seed},
        name=labels.name,
        tags=labels.tags,
        note=labels.note,
        parent=origin.parent,
        threads=usable_threads(),
        texts=texts_of(sources),
        **records_of(sources, validation),
    )
