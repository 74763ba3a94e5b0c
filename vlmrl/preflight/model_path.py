"""First check: does the model exist, and is it complete? The module imports little, so that the check is fast."""

from __future__ import annotations

from pathlib import Path

from vlmrl.errors import Problem, VlmrlError
from vlmrl.model.model_files import folder_problems, require_source
from vlmrl.recipe.load import LoadedRecipe


def check_location(loaded: LoadedRecipe, model_files: str | None = None) -> list[Problem]:
    """Return a problem if the model's folder, its name on the hub, or some of its files are missing.

    This takes at most a second, except for a hub name that is not in the cache. Nothing of torch is imported.

    Args:
        model_files: see `preflight`.
    """
    model = loaded.recipe.model
    folder = Path(model_files or model.path).expanduser()
    if folder.is_dir():
        elsewhere = model_files is not None and model_files != model.path
        return folder_problems(folder, has_weights=not elsewhere, own_code=model.trust_remote_code)
    try:
        require_source(model_files or model.path, model.revision)
    except VlmrlError as error:
        return [Problem(error.message, error.where or loaded.where(("model", "path")), error.hint)]
    return []
