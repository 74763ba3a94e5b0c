"""Which rows `vlmrl eval` takes, and what the model has to do with them. One rule for every command that says so.

Of each source: its split `test`; else the very rows that training validated on; else, and said before it starts, the
rows that training draws from. `--split` names a split or a file instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, StoreError, VlmrlError
from vlmrl.json_text import parse_json
from vlmrl.recipe.load import recipe_from_resolved
from vlmrl.recipe.schema import Data, Recipe
from vlmrl.setup.run_records import VALIDATION_SUFFIX
from vlmrl.store.evaluated_rows import Role
from vlmrl.store.kept_recipe import read_resolved, resolved_files
from vlmrl.store.manifest import Manifest, read_manifest
from vlmrl.tasks.source import TABLE_SUFFIXES, Source, open_rows_file, open_source, open_validation

TEST, VALIDATION, ONLY = "test", "validation", "train"
"""Names of splits; a single file is one split, `train`."""
MOST_PARENTS = 100
RowsKey = tuple[str, str]
"""(fingerprint of a dataset, or absolute path where that is all that is known; its split)."""


@dataclass(frozen=True)
class EvalRows:
    """The rows of one source to evaluate.

    Args:
        source: `source.split` is how the rows are called in names and on screens.
        role: what the model has to do with them.
        max_rows: only so many, the first ones; None = all.
        origin: where they are, for people: "split test of data/digits", "the file val.jsonl".
        others: splits of the dataset that were not taken, where these are training rows.
    """

    source: Source
    role: Role
    max_rows: int | None
    origin: str
    others: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return min(len(self.source.rows), self.max_rows or len(self.source.rows))

    @property
    def described(self) -> str:
        """What is evaluated, in one line. What must be known of it stands in `LABELS`."""
        count = len(self.source.rows)
        of = f"{self.count:,} of {count:,} rows" if self.count < count else f"{count:,} rows"
        return f"{self.source.name}: {of}, {self.origin}"


@dataclass(frozen=True)
class SeenRows:
    """What a model's record says of the rows it was trained on, and those that its checkpoint was chosen by."""

    trained: frozenset[RowsKey] = frozenset()
    validated: frozenset[RowsKey] = frozenset()

    def role(self, source: Source) -> Role:
        """The role of rows by these records, else by the name of their split."""
        keys = _keys(source)
        if keys & self.trained:
            return "training"
        if keys & self.validated:
            return "validation"
        return "test" if source.split == TEST and TEST in source.dataset.splits else "held out"


def rows_to_evaluate(
    recipe: Recipe, seen: SeenRows, split: str | None = None, max_rows: int | None = None, source: str | None = None
) -> list[EvalRows]:
    """The rows of every source of a recipe, or of the one called `source`.

    Args:
        split: a split's name or a table file; None = by the rule of this module.
        max_rows: the first so many rows of each source; None = all, or `eval.max_rows` of the rows that the rule takes
            because training validated on them.
    Raises: DataError when there is no such source, split or file, or a file is given for several sources.
    """
    entries = [d for d in recipe.data if source is None or (d.name or open_dataset(d).name) == source]
    if not entries:
        names = ", ".join(d.name or open_dataset(d).name for d in recipe.data)
        raise DataError(f"there is no source `{source}`", hint=f"sources: {names}")
    if split is None:
        found = [_by_rule(d, recipe, seen) for d in entries]
    else:
        found = [_named(d, recipe, seen, split, len(entries)) for d in entries]
    return [replace(r, max_rows=max_rows) if max_rows is not None else r for r in found]


def only_training_rows(run_dir: Path) -> bool:
    """Whether `vlmrl eval` of a run, without `--split`, would score training rows alone: then it needs a file named.

    Data that cannot be opened any more is no reason to say so.
    """
    try:
        recipe = recipe_from_resolved(read_resolved(run_dir), where=str(run_dir))
        return all(r.role == "training" for r in rows_to_evaluate(recipe, seen_by(run_dir)))
    except VlmrlError:
        return False


def seen_by(run_dir: Path) -> SeenRows:
    """What a run was trained and validated on, by its record and those of the runs that its weights come from."""
    trained: set[RowsKey] = set()
    validated: set[RowsKey] = set()
    for place, manifest in _lineage(run_dir):
        records = [d for d in manifest.all_datasets if not str(d.get("name")).endswith(VALIDATION_SUFFIX)]
        files = [d for d in manifest.all_datasets if str(d.get("name")).endswith(VALIDATION_SUFFIX)]
        trained |= {(str(d.get("fingerprint")), str(d.get("split"))) for d in records}
        validated |= {(str(d.get("fingerprint")), ONLY) for d in files}
        for entry, validates in _entries(place):
            path = _place(str(entry.get("path")), Path(manifest.cwd or "."))
            trained.add((path, str(entry.get("split", ONLY))))
            named = entry.get("validation")
            if validates and not _is_file(named):
                prints = {str(d.get("fingerprint")) for d in records if d.get("path") == entry.get("path")}
                validated |= {(key, str(named or VALIDATION)) for key in (path, *prints)}
    return SeenRows(frozenset(trained), frozenset(validated))


def trained_by(recipe: Recipe) -> SeenRows:
    """What a recipe trains on, for a model without a record of its own."""
    return SeenRows(frozenset((_place(d.path), d.split) for d in recipe.data))


def _by_rule(data: Data, recipe: Recipe, seen: SeenRows) -> EvalRows:
    dataset = open_dataset(data)
    if TEST in dataset.splits and data.split != TEST:
        return _of_split(data, recipe, seen, TEST)
    validation = open_validation(data, recipe.reward)
    if validation is not None:
        named = data.validation
        origin = f"the file {named}" if _is_file(named) else f"split {validation.split} of {data.path}"
        role = seen.role(validation)
        return EvalRows(validation, role, recipe.eval.max_rows if role == "validation" else None, origin)
    others = tuple(s for s in dataset.splits if s != data.split)
    return replace(_of_split(data, recipe, seen, data.split), others=others)


def _named(data: Data, recipe: Recipe, seen: SeenRows, split: str, sources: int) -> EvalRows:
    dataset = open_dataset(data)
    if split in dataset.splits:
        return _of_split(data, recipe, seen, split)
    if split == VALIDATION and data.validation is not None:
        source = open_validation(data, recipe.reward)
        assert source is not None
        return EvalRows(source, seen.role(source), None, f"the file {data.validation}")
    if _is_file(split):
        if sources > 1:
            raise DataError(f"--split {split}: a file has the rows of one source, and there are {sources}",
                            hint="say which: --source NAME")  # fmt: skip
        source = open_rows_file(data, recipe.reward, split, Path(split).stem)
        return EvalRows(source, seen.role(source), None, f"the file {split}")
    there = ", ".join(f"{name} ({rows} rows)" for name, rows in dataset.splits.items()) or "none"
    raise DataError(f"no split `{split}` in {dataset.path}", hint=f"splits there: {there}; a file of rows will do too")


def _of_split(data: Data, recipe: Recipe, seen: SeenRows, split: str) -> EvalRows:
    source = open_source(data, recipe.reward, split=split)
    only = len(source.dataset.splits) == 1
    return EvalRows(source, seen.role(source), None, f"all of {data.path}" if only else f"split {split} of {data.path}")


def _keys(source: Source) -> set[RowsKey]:
    """How a source's rows may be called in a record."""
    dataset = source.dataset
    split = source.split if source.split in dataset.splits else ONLY
    return {(place, split) for place in (dataset.fingerprint, _place(dataset.path))}


def _place(path: str, base: Path = Path()) -> str:
    """A dataset's path as it may be compared: absolute, or the hub name as it is."""
    return path if path.startswith("hub:") else str((base / path).resolve())


def _lineage(run_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """A run and the runs that its weights come from, as far as they are still there."""
    place = run_dir
    for _ in range(MOST_PARENTS):
        try:
            manifest = read_manifest(place)
        except StoreError:
            return
        if manifest.kind in ("rl", "sft"):
            yield place, manifest
        parent = (manifest.parent or {}).get("run")
        if not isinstance(parent, str) or Path(parent).name != parent:
            return
        place = place.parent / parent


def _entries(run_dir: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """(`[[data]]` entry, whether training validates) of every recipe that a run has had; damaged ones are left out."""
    for path in resolved_files(run_dir):
        try:
            recipe = parse_json(path.read_bytes())["recipe"]
            entries: Sequence[Any] = recipe["data"]
            validates = recipe.get("eval", {}).get("enabled", True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        yield from ((entry, bool(validates)) for entry in entries if isinstance(entry, dict))


def _is_file(named: Any) -> bool:
    return isinstance(named, str) and Path(named).suffix.lower() in TABLE_SUFFIXES
