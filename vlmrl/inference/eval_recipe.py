"""Choice of the recipe that `vlmrl eval` uses, and of the record of the rows that the model has seen."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.data.dataset import INFO_FILE
from vlmrl.errors import Problem, ProblemsError, RecipeError, StoreError, did_you_mean
from vlmrl.inference.eval_rows import SeenRows, seen_by, trained_by
from vlmrl.model.model_files import models_beside
from vlmrl.recipe.files import find_recipe, has_table, read_layers
from vlmrl.recipe.key_fields import is_path_key, names_file
from vlmrl.recipe.load import apply_override, load_recipe, parse_override, recipe_from_resolved, refuse_remote_code
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.toml_lines import AUTO_ORIGIN
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.evaluated_rows import images_of, read_summary
from vlmrl.store.kept_recipe import newest_resolved, read_resolved, refuse_hidden
from vlmrl.store.layout import EVAL_SUMMARY, MANIFEST, eval_dir, eval_dirs
from vlmrl.store.lineage import merged_run
from vlmrl.store.listing import can_be_scored, eval_command, list_runs
from vlmrl.store.runs import open_run

IMAGES_ALONE = "images:"
"""Path of the source of a recipe that has none, where the user's own images take the place of rows. No file has it."""
NEWEST = 200
"""Maximum number of newest runs whose names are compared with an unknown name, to suggest a similar one."""


@dataclass(frozen=True)
class ChosenRecipe:
    """Recipe that a model is evaluated with.

    Args:
        run_dir: the run that the checkpoint belongs to; None for a model that is no run.
        seen: rows that the model has seen, by the run's record.
    """

    recipe: Recipe
    run_dir: Path | None
    seen: SeenRows


def choose_recipe(
    origin: ModelOrigin,
    root: Path,
    *,
    recipe: str | None = None,
    data: str | None = None,
    task: str | None = None,
    images: bool = False,
    overrides: Sequence[str] = (),
) -> ChosenRecipe:
    """Return the recipe to evaluate with, and the rows that the model has seen.

    The recipe is the named one (a file, or a run's), else the run's own, else defaults on `data`; `overrides` are
    applied to it. A named file without `[[data]]`, such as a scheme of evaluation, overrides the run's own recipe, or
    the defaults on `data`, key by key. For a model that `vlmrl merge` wrote, the run is the one it was made from, while
    that exists.
    When a run is evaluated, the table `model` is always the run's own: its pixels and dtype belong to its weights.

    Args:
        task: task of all sources, instead of the recipe's.
        images: whether the user's own images take the place of rows. A recipe without `[[data]]` is enough then.
    Raises: RecipeError when nothing says what data to use; StoreError when there is no such run or model folder; the
        errors of the recipe.
    """
    run_dir = origin.run_dir
    is_served = bool(origin.endpoint)  # its name belongs to the endpoint, whatever is here under that name
    if run_dir is None and origin.checkpoint is None and not is_served:
        _require_there(origin.path, root)
    source_run = run_dir or (None if is_served else _merged_from(origin.path, root))
    run_values = None if source_run is None else _run_recipe(source_run, overrides)
    values: dict[str, Any] = {"model": {"path": origin.path}}
    if recipe is not None:
        alone = data or (IMAGES_ALONE if images else None)
        under = run_values if run_values is not None else {} if alone is None else {**values, "data": [{"path": alone}]}
        values = _named_recipe(recipe, origin, root, under, overrides)
        if run_values is not None:
            values["model"] = run_values["model"]
    elif run_values is not None:
        values = run_values
    elif images:
        values["data"] = [{"path": IMAGES_ALONE}]
    elif data is None:
        raise RecipeError(
            f"nothing says on what data to evaluate `{origin.path}`",
            hint="add --recipe with a file or a run, such as --recipe recipes/digits_im.toml, or --data data/digits",
        )
    if data is not None:
        values["data"] = [_data_entry(data, values.get("data") or [{}])]
    if task is not None:
        values["data"] = [{**entry, "task": task} for entry in values["data"]]
    problems = []
    for text in overrides:
        parsed = parse_override(text)
        applied = parsed if isinstance(parsed, Problem) else apply_override(values, parsed)
        if isinstance(applied, Problem):
            problems.append(applied)
    if problems:
        raise ProblemsError(problems)
    values["model"] = {**values["model"], "path": origin.path}
    refuse_hidden(values, recipe or origin.path)
    chosen = recipe_from_resolved({"schema": 1, "recipe": values}, where=recipe or data or origin.path)
    seen = SeenRows() if source_run is None else seen_by(source_run)
    if source_run is None and data is None:
        seen = trained_by(chosen)
    return ChosenRecipe(chosen, run_dir, seen)


def _require_there(path: str, root: Path) -> None:
    """Raise StoreError for a word that is no run and no folder.

    A word with a `/` may name a model of the hub: loading it then reports a wrong name.
    """
    if "/" in path or os.path.exists(path):
        return
    runs = list_runs(root, limit=NEWEST)
    names = [*(name for run in runs for name in (run.id, run.name) if name), *models_beside(path)]
    hint = did_you_mean(path, names, "`vlmrl runs list` lists the runs; a model of the hub is called OWNER/NAME")
    raise StoreError(f"there is no run and no model folder `{path}`", where=str(root), hint=hint)


def find_evaluation(
    ref: str,
    root: Path,
    split: str,
    source: str,
    like: Mapping[str, Any] | None = None,
    option: str = "--compare",
) -> Path:
    """Return the evaluation folder that `ref` names: a path, RUN/NAME, or RUN alone.

    RUN alone means the run's own evaluation on this split of this source.

    Args:
        like: `meta` of the evaluation to compare; of several evaluations, the one with its sampling is meant.
        option: option that names it, for messages.
    Raises: StoreError when there is none, or several to choose from.
    """
    if (Path(ref) / EVAL_SUMMARY).is_file():
        return Path(ref)
    head, _, tail = ref.rpartition("/")
    if head and not (Path(ref) / MANIFEST).is_file():
        folder = eval_dir(open_run(root, head).dir, tail)
        if (folder / EVAL_SUMMARY).is_file():
            return folder
        raise StoreError(f"run `{head}` has no evaluation `{tail}`", where=str(folder))
    run = open_run(root, ref)
    folders = [f for f in eval_dirs(run.dir) if _is_own(f, split, source)]
    if len(folders) > 1 and like is not None:  # of several settings, the one with the same sampling
        folders = [
            f for f in folders if read_summary(f).get("meta", {}).get("sampling") == like.get("sampling")
        ] or folders
    if len(folders) == 1:
        return folders[0]
    names = ", ".join(f.name for f in folders) or "none"
    if folders:
        hint = f"name it: {option} {ref}/NAME"
    elif can_be_scored(run):
        hint = f"create it: {eval_command(run)}"
    else:
        hint = "evaluate it, too, with a recipe that names a reward: vlmrl eval RUN --recipe RECIPE"
    raise StoreError(
        f"run {run.id} has {len(folders) or 'no'} evaluation(s) on `{source}/{split}` to compare with: {names}",
        hint=hint,
    )


def _is_own(folder: Path, split: str, source: str) -> bool:
    """Return whether `vlmrl eval`, not training, made a normal evaluation, on this split of a source of this name."""
    meta = read_summary(folder).get("meta", {})
    is_normal = not meta.get("during") and images_of(meta) is None
    return is_normal and (meta.get("split"), meta.get("source")) == (split, source)


def _named_recipe(
    name: str, origin: ModelOrigin, root: Path, under: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the values of a recipe file, or of the run of that name if there is no such file.

    Args:
        under: values that a file without `[[data]]` overrides key by key.
    """
    try:
        file = find_recipe(name)
    except RecipeError:
        with suppress(StoreError):
            values = _run_recipe(open_run(root, name).dir, overrides)
            if values is not None:
                return values
        raise
    is_whole = not under or has_table(read_layers(file), "data")
    loaded = load_recipe(file, overrides=[f"model.path={json.dumps(origin.path)}"], under=None if is_whole else under)
    return loaded.recipe.model_dump(mode="json")


def _merged_from(path: str, root: Path) -> Path | None:
    """Return the run that a merged model was made from, by its merge.json. None if it is gone or not below `root`."""
    name = merged_run(Path(path))
    try:
        return open_run(root, name).dir if isinstance(name, str) and Path(name).name == name else None
    except StoreError:
        return None


def _run_recipe(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the resolved recipe of a run, or None if it has none.

    Files that it names are looked for where the run was started, if they are not below the current directory.

    Raises: RecipeError if it runs the code of a model, and no override repeats that.
    """
    path = newest_resolved(run_dir)
    if not path.exists():
        return None
    resolved = read_resolved(run_dir)
    values = recipe_from_resolved(resolved, where=str(path)).model_dump(mode="json")
    refuse_remote_code(values, overrides, str(path))
    if str((resolved.get("origins") or {}).get("rollout.engine", "")).startswith(AUTO_ORIGIN):
        values["rollout"]["engine"] = "auto"  # it was chosen for the training machine: choose again for this one
    cwd = Path(open_run(run_dir.parent, run_dir.name).manifest.cwd)
    sources = values["data"]
    lists = [(("rewards",), values["rewards"]), *((("data", "rewards"), entry["rewards"]) for entry in sources)]
    tables = [(("reward",), values["reward"]), *((("data",), entry) for entry in sources)]
    values["eval"]["sets"] = [
        _existing_path(name, cwd) if names_file(("eval", "sets"), name) else name for name in values["eval"]["sets"]
    ]
    for name, table in [*tables, *((name, listed) for name, rewards in lists for listed in rewards)]:
        for key, value in table.items():
            place = (*name, key)
            if is_path_key(place) and isinstance(value, str) and names_file(place, value):
                table[key] = _existing_path(value, cwd)
    return values


def _existing_path(value: str, cwd: Path) -> str:
    """Return `value` if that file exists here, else the file below `cwd` if that exists, else `value`."""
    file = Path(value.partition(":")[0] if ".py:" in value else value)
    moved = not file.is_absolute() and not file.exists() and (cwd / file).exists()
    return str(cwd / value) if moved else value


def _data_entry(path: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `[[data]]` entry for another dataset.

    A prepared dataset names its task; a table is read like the recipe's first source.
    """
    if (Path(path) / INFO_FILE).is_file():
        return {"path": path}
    inherited = ("prompt", "system", "reward", "rewards", "columns", "task")
    return {"path": path, **{key: entries[0][key] for key in inherited if key in entries[0]}}
