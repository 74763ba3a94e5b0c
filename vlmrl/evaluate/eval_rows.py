"""Recipe and rows that `vlmrl eval` takes, and the rows' role for the model. All commands that name them use this rule.

Of each source it takes the split `test`; else exactly the rows that training validated on; else the rows that training
draws from, which is reported before the evaluation starts. A recipe with `eval.sets` names the sets; the split `test`
is taken besides them. `--split` names a split or a file instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.data.dataset import INFO_FILE
from vlmrl.data.open_dataset import HeldOutDataset, open_dataset
from vlmrl.errors import DataError, Problem, ProblemsError, RecipeError, StoreError, VlmrlError
from vlmrl.recipe.files import find_recipe, has_table, read_layers
from vlmrl.recipe.key_fields import is_path_key, names_file
from vlmrl.recipe.load import apply_override, load_recipe, parse_override, recipe_from_resolved, refuse_remote_code
from vlmrl.recipe.schema import Data, Recipe
from vlmrl.recipe.tables import is_test_split
from vlmrl.recipe.toml_lines import AUTO_ORIGIN
from vlmrl.redaction.redact import excerpt
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.run_records import VALIDATION_SUFFIX
from vlmrl.setup.sources import missing_set
from vlmrl.store.evaluated_rows import Role, image_condition, read_summary
from vlmrl.store.kept_recipe import kept_recipes, newest_resolved, read_resolved, refuse_hidden
from vlmrl.store.layout import eval_dirs
from vlmrl.store.lineage import lineage, merged_run
from vlmrl.store.manifest import Manifest
from vlmrl.store.runs import can_be_scored, eval_command, open_evaluation, open_run
from vlmrl.tasks.source import TABLE_SUFFIXES, Source, open_rows_file, open_set, open_source, open_validation
from vlmrl.untrusted import number_of

TEST, VALIDATION, ONLY = "test", "validation", "train"
"""Names of splits; a single file is one split, `train`."""
RowsKey = tuple[str, str]
"""(fingerprint of a dataset, or its absolute path where only that is known; its split)."""


@dataclass(frozen=True)
class EvalRows:
    """Rows of one source to evaluate.

    Args:
        source: the rows; `source.split` is their name in files and on screens.
        role: relation of the rows to the model's training.
        max_rows: maximum number of rows, the first ones; None = all.
        origin: place of the rows, in words: "split test of data/digits", "the file val.jsonl".
        others: splits of the dataset that were not taken, if these are training rows.
        shared: what is known of rows that training had under another name (evaluate/shared_rows.py); "" = nothing.
        file: table file with the rows that the user named in place of a split; "" = none.
        by_option: whether the user gave `max_rows`; else it is that of the recipe, as in the run's validations.
    """

    source: Source
    role: Role
    max_rows: int | None
    origin: str
    others: tuple[str, ...] = ()
    shared: str = ""
    file: str = ""
    by_option: bool = False

    @property
    def count(self) -> int:
        return min(len(self.source.rows), self.max_rows or len(self.source.rows))

    @property
    def described(self) -> str:
        """Line that says what is evaluated. `LABELS` in store/evaluated_rows.py has the warning for the rows' role."""
        count = len(self.source.rows)
        amount = f"{self.count:,} of {count:,} rows" if self.count < count else f"{count:,} rows"
        limit = "" if self.by_option or self.count == count else " (eval.max_rows; --max-rows changes it)"
        return f"{self.source.name}: {amount}{limit}, {self.origin}"


@dataclass(frozen=True)
class SeenRows:
    """Rows that a model was trained on, and rows that its checkpoint was chosen by, from the record of `run_dir`."""

    trained: frozenset[RowsKey] = frozenset()
    validated: frozenset[RowsKey] = frozenset()
    run_dir: Path | None = None

    def role(self, source: Source) -> Role:
        """Return the role of a source's rows by these records, else by the name of their split."""
        for key in _keys(source):
            if key in self.trained:
                return "training"
            if key in self.validated:
                return "validation"
        return "test" if source.split == TEST and TEST in source.dataset.splits else "held out"


def rows_to_evaluate(
    recipe: Recipe, seen: SeenRows, split: str | None = None, max_rows: int | None = None, source: str | None = None
) -> list[EvalRows]:
    """Return the rows of every source of a recipe, or of the one called `source`.

    Args:
        split: name of a split, or a table file; None = by the rule of this module.
        max_rows: maximum number of rows per source, the first ones; None = all, or `eval.max_rows` if the rule takes
            the rows because training validated on them.
    Raises: DataError when there is no such source, split or file, or a file is given for several sources.
    """
    entries = entries_of(recipe, source)
    if split is None and recipe.eval.sets:
        result = _of_sets(entries, recipe, seen)
    elif split is None:
        result = [_by_rule(d, recipe, seen) for d in entries]
    else:
        result = [named_rows(d, recipe, seen, split, len(entries)) for d in entries]
    return [replace(r, max_rows=max_rows, by_option=True) if max_rows is not None else r for r in result]


def entries_of(recipe: Recipe, source: str | None) -> list[Data]:
    """Return the `[[data]]` entries of a recipe, or the one called `source`. Raises: DataError when there is none."""
    entries = [d for d in recipe.data if source is None or (d.name or open_dataset(d).name) == source]
    if not entries:
        names = ", ".join(d.name or open_dataset(d).name for d in recipe.data)
        raise DataError(f"there is no source `{source}`", hint=f"sources: {names}")
    return entries


def only_training_rows(run_dir: Path) -> bool:
    """Return whether `vlmrl eval` of a run, without `--split`, would score only training rows.

    The command then has to name a file. The result is False if the data cannot be opened any more.
    """
    try:
        recipe = recipe_from_resolved(read_resolved(run_dir), where=str(run_dir))
        return all(r.role == "training" for r in rows_to_evaluate(recipe, seen_by(run_dir)))
    except VlmrlError:
        return False


def seen_by(run_dir: Path) -> SeenRows:
    """Return the rows that a run was trained and validated on, by the records of all runs behind its weights."""
    trained: set[RowsKey] = set()
    validated: set[RowsKey] = set()
    chose = True  # whether the validations of the run selected the weights that the next one, or `vlmrl eval`, took
    for place, manifest in training_runs(run_dir):
        records, files = dataset_records(manifest)
        trained |= {(str(d.get("fingerprint")), str(d.get("split"))) for d in records}
        validated |= {(str(d.get("fingerprint")), ONLY) for d in files if chose}
        for entry, validates in _entries(place):
            path = place_of(str(entry.get("path")), Path(manifest.cwd or "."))
            trained.add((path, str(entry.get("split", ONLY))))
            validation = entry.get("validation")
            if validates and chose and not _is_file(validation):
                prints = {str(d.get("fingerprint")) for d in records if d.get("path") == entry.get("path")}
                split = validation if isinstance(validation, str) else VALIDATION
                validated |= {(key, split) for key in (path, *prints)}
        chose = not str((manifest.parent or {}).get("why")).startswith("the last")
    return SeenRows(frozenset(trained), frozenset(validated), run_dir)


def training_runs(run_dir: Path) -> list[tuple[Path, Manifest]]:
    """Return (folder, manifest) of the training runs behind the weights of a run, the newest first."""
    return [(place, manifest) for place, manifest in lineage(run_dir) if manifest.kind in ("rl", "sft")]


def dataset_records(manifest: Manifest) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return a run's records of (datasets that it was trained on, files that it was validated on)."""
    records, files = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for record in manifest.all_datasets:
        (files if str(record.get("name")).endswith(VALIDATION_SUFFIX) else records).append(record)
    return records, files


def trained_by(recipe: Recipe) -> SeenRows:
    """Return the rows that a recipe trains on, for a model without a record of its own."""
    return SeenRows(frozenset((place_of(d.path), d.split) for d in recipe.data))


def _of_sets(entries: Sequence[Data], recipe: Recipe, seen: SeenRows) -> list[EvalRows]:
    """Return the rows of `eval.sets`, and of the split `test` where there is one.

    Raises: DataError for a set that no source has.
    """
    result: list[EvalRows] = []
    for name in dict.fromkeys([*recipe.eval.sets, TEST]):
        rows = [r for data in entries if (r := _of_set(data, recipe, seen, name)) is not None]
        if not rows and name in recipe.eval.sets:
            raise missing_set(recipe, name)
        result += rows
    return result


def _of_set(data: Data, recipe: Recipe, seen: SeenRows, name: str) -> EvalRows | None:
    source = None if name == TEST and data.split == TEST else open_set(data, recipe.reward, name)
    if source is None:
        return None
    role = seen.role(source)
    origin = f"split {name} of {data.path}" if name in open_dataset(data).splits else f"the set {name}"
    return EvalRows(source, role, recipe.eval.max_rows if role == "validation" else None, origin)


def _by_rule(data: Data, recipe: Recipe, seen: SeenRows) -> EvalRows:
    dataset = open_dataset(data)
    if TEST in dataset.splits and data.split != TEST:
        return _of_split(data, recipe, seen, TEST)
    validation = open_validation(data, recipe.reward)
    if validation is not None:
        role, origin = seen.role(validation), _place_of_validation(data, validation)
        return EvalRows(validation, role, recipe.eval.max_rows if role == "validation" else None, origin)
    others = tuple(s for s in dataset.splits if s != data.split)
    return replace(_of_split(data, recipe, seen, data.split), others=others)


def named_rows(
    data: Data, recipe: Recipe, seen: SeenRows, split: str, sources: int = 1, *, scored: bool = True
) -> EvalRows:
    """Return the rows of a source that `--split` names: a split, or a table file.

    Args:
        sources: number of sources; a file has the rows of one.
        scored: as for `open_source`.
    Raises: DataError when there is no such split or file, or a file is given for several sources; as `open_source`.
    """
    dataset = open_dataset(data)
    if split in dataset.splits:
        return _of_split(data, recipe, seen, split, scored=scored)
    if split == VALIDATION and (source := open_validation(data, recipe.reward, scored=scored)) is not None:
        return EvalRows(source, seen.role(source), None, _place_of_validation(data, source))
    if _is_file(split):
        if sources > 1:
            raise DataError(
                f"--split {split}: a file has the rows of one source, and there are {sources} sources",
                hint="name the source: --source NAME",
            )
        columns = {role: column for role, column in data.columns.items() if role != "response"}  # nothing learns it
        plain = data.model_copy(update={"columns": columns})
        source = open_rows_file(plain, recipe.reward, split, Path(split).stem, scored=scored)
        return EvalRows(source, seen.role(source), None, f"the file {split}", file=split)
    splits = ", ".join(f"{name} ({rows} rows)" for name, rows in dataset.splits.items()) or "none"
    raise DataError(f"no split `{split}` in {dataset.path}", hint=f"splits there: {splits}; a file of rows works, too")


def _of_split(data: Data, recipe: Recipe, seen: SeenRows, split: str, *, scored: bool = True) -> EvalRows:
    source = open_source(data, recipe.reward, split=split, scored=scored)
    only = len(source.dataset.splits) == 1
    return EvalRows(source, seen.role(source), None, f"all of {data.path}" if only else f"split {split} of {data.path}")


def _place_of_validation(data: Data, source: Source) -> str:
    named = data.validation
    return f"the file {named}" if _is_file(named) else f"split {source.split} of {data.path}"


def _keys(source: Source) -> tuple[RowsKey, RowsKey]:
    """Return the keys that a source's rows may have in a record, the more precise one first.

    Rows that are held out are known by their fingerprint alone: with another share or seed they were trained on.
    """
    dataset = source.dataset
    split = source.split if source.split in dataset.splits else ONLY
    at_place = dataset.divided if isinstance(dataset, HeldOutDataset) and split == VALIDATION else split
    return (dataset.fingerprint, split), (place_of(dataset.path), at_place)


def place_of(path: str, base: Path = Path()) -> str:
    """Return a dataset's path in a form that can be compared: absolute, or the hub name as it is."""
    return path if path.startswith("hub:") else str((base / path).resolve())


def _entries(run_dir: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield (`[[data]]` entry, whether training validates) of every recipe that a run has had; skip damaged ones."""
    for recipe in kept_recipes(run_dir):
        entries, settings = recipe.get("data", ()), recipe.get("eval", {})
        try:
            validates = settings.get("enabled", True)
            selecting = next((name for name in settings.get("sets") or () if not is_test_split(name)), None)
        except (TypeError, AttributeError):
            continue
        # A set that selects checkpoints takes the place of `data.validation`, which the set `validation` means.
        chosen = {} if selecting in (None, VALIDATION) else {"validation": selecting}
        selects = bool(validates) and not (settings.get("sets") and selecting is None)
        yield from ((entry | chosen, selects) for entry in entries)


def _is_file(named: Any) -> bool:
    return isinstance(named, str) and Path(named).suffix.lower() in TABLE_SUFFIXES


IMAGES_ALONE = "images:"
"""Path of the source of a recipe that has none, where the user's own images take the place of rows. No file has it."""


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
    Raises: RecipeError when nothing says what data to use; the errors of the recipe.
    """
    run_dir = origin.run_dir
    is_served = bool(origin.endpoint)  # its name belongs to the endpoint, whatever is here under that name
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
        message = f"there is no data on which to evaluate `{origin.path}`"
        hint = "add --recipe with a file or a run, such as --recipe recipes/digits_im.toml, or --data data/digits"
        if not is_served and (name := merged_run(Path(origin.path))):
            message += f": it was made from run {excerpt(name, 60)}, which is not in {root}"
            hint = f"name the folder that has this run: --runs DIR; or {hint}"
        raise RecipeError(message, hint=hint)
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
    run = open_evaluation(root, ref)
    if isinstance(run, Path):
        return run
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
    there = number_of(len(folders), "evaluation") if folders else "no evaluation"
    raise StoreError(
        f"run {run.id} has {there} on `{source}/{split}` to compare with: {names}",
        hint=hint,
    )


def _is_own(folder: Path, split: str, source: str) -> bool:
    """Return whether `vlmrl eval`, not training, made a normal evaluation, on this split of a source of this name."""
    meta = read_summary(folder).get("meta", {})
    is_normal = not meta.get("during") and image_condition(meta) is None
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
            values = _run_recipe(open_run(root, name).dir, overrides, runs_model=not origin.endpoint)
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
        return None if name is None else open_run(root, name).dir
    except StoreError:
        return None


def _run_recipe(run_dir: Path, overrides: Sequence[str], *, runs_model: bool = True) -> dict[str, Any] | None:
    """Return the resolved recipe of a run, or None if it has none.

    Files that it names are looked for where the run was started, if they are not below the current directory.

    Args:
        runs_model: whether a model runs in this process; an endpoint's does not.
    Raises: RecipeError if it runs the code of a model, and no override repeats that.
    """
    path = newest_resolved(run_dir)
    if not path.exists():
        return None
    resolved = read_resolved(run_dir)
    values = recipe_from_resolved(resolved, where=str(path)).model_dump(mode="json")
    if runs_model:
        refuse_remote_code(values, overrides, str(path))
    else:
        values["model"]["trust_remote_code"] = False
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
