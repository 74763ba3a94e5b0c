"""Saved rollouts as the inputs of a reward: what `vlmrl reward-check` reads, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import StoreError, VlmrlError
from vlmrl.store import layout
from vlmrl.store.kept import newest_resolved
from vlmrl.store.metrics import newest
from vlmrl.store.rollouts import read_table
from vlmrl.store.runs import Run, open_run
from vlmrl.types import Media, RewardInput, Score

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Recipe

COLUMNS = (
    "step", "group", "source", "task", "prompt_id", "sample", "truth", "columns", "prompt_text", "text", "token_ids",
    "finish", "parts", "score", "note", "error", "advantage", "masked", "images", "num_row_images",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedSample:
    """One saved response with the score it got. `group` counts the groups over all steps; `input` has no images."""

    step: int
    group: int
    source: str
    task: str
    prompt_id: str
    sample: int
    input: RewardInput
    media: tuple[Media, ...]
    score: Score
    advantage: float

    @property
    def where(self) -> str:
        return f"step {self.step}, {self.source} row {self.prompt_id} sample {self.sample}"


@dataclass
class Saved:
    """Rollouts to look at.

    Args:
        path: what was read.    samples: in the order of steps, groups and samples.
        run: the run they belong to; None for loose files.    recipe: the run's, when it can be read.
        records: source -> what the run's manifest says of its reward.
        notes: what a person should know.
    """

    path: Path
    samples: list[SavedSample]
    run: Run | None = None
    recipe: Recipe | None = None
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(s.source for s in self.samples))

    @property
    def groups(self) -> list[list[int]]:
        """Indices of the samples of each group."""
        members: dict[int, list[int]] = {}
        for index, sample in enumerate(self.samples):
            members.setdefault(sample.group, []).append(index)
        return list(members.values())

    @property
    def levels(self) -> dict[str, list[str]]:
        """Source -> the hierarchy levels of its pair task; sources without one are left out.

        From the run's reward arguments; else every truth field with two names, as ordered in the truth.
        """
        found: dict[str, list[str]] = {}
        for sample in self.samples:
            if sample.source in found or "same" not in sample.input.truth:
                continue
            known = self.records.get(sample.source, {}).get("args", {}).get("levels")
            pairs = [k for k, v in sample.input.truth.items() if isinstance(v, list) and len(v) == 2]
            found[sample.source] = list(known or pairs)
        return found


def open_saved(ref: str, root: Path, *, steps: tuple[int, int] | None = None, source: str | None = None) -> Saved:
    """The rollouts that `ref` names: a run (as in `open_run`), a run folder, a rollouts folder, or one Parquet file.

    Args:
        steps: only steps from the first to the second, both included.
        source: only rollouts of this `[[data]]` entry.
    Raises: StoreError when there are none, or a file cannot be read.
    """
    path = Path(ref)
    notes: list[str] = []
    if path.suffix == ".parquet":
        if not path.is_file():
            raise StoreError("no such rollout file", where=ref)
        run, files = _run_of(path.resolve().parent.parent, notes), {0: path}
    elif path.is_dir() and not (path / layout.MANIFEST).exists() and (found := _loose_files(path)):
        run = _run_of(path.resolve().parent, notes)
        files = run.rollout_files() if run is not None else found
    else:
        run = open_run(root, ref)
        path, files = run.dir, run.rollout_files()
    if steps is not None and path.suffix != ".parquet":
        files = {step: file for step, file in files.items() if steps[0] <= step <= steps[1]}
    saved = Saved(path, [], run, _recipe_of(run, notes), _records_of(run), notes)
    offset = 0
    for file in files.values():
        new = _read_file(file, offset)
        offset = max((s.group for s in new), default=offset - 1) + 1
        saved.samples += [s for s in new if source in (None, s.source)]
    if not saved.samples:
        within = f" in steps {steps[0]} to {steps[1]}" if steps else ""
        of = f" of source `{source}`" if source else ""
        raise StoreError(f"there are no saved rollouts{of}{within}", where=str(path))
    return saved


def _loose_files(folder: Path) -> dict[int, Path]:
    found = [
        (*parsed, p) for p in sorted(folder.iterdir()) if (parsed := layout.parse_rollout_name(p.name)) is not None
    ]
    return newest(found, {})


def _run_of(run_dir: Path, notes: list[str]) -> Run | None:
    """The run around loose files, if there is one that can be read."""
    if not (run_dir / layout.MANIFEST).exists():
        return None
    try:
        return open_run(run_dir.parent, str(run_dir))
    except StoreError as error:
        notes.append(f"the run around these rollouts cannot be read: {error.message}")
        return None


def _records_of(run: Run | None) -> dict[str, Mapping[str, Any]]:
    records = run.manifest.rewards if run is not None else ()
    return {str(r.get("source")): r for r in records if isinstance(r, Mapping)}


def _recipe_of(run: Run | None, notes: list[str]) -> Recipe | None:
    from vlmrl.recipe.load import recipe_from_resolved

    if run is None:
        return None
    path = newest_resolved(run.dir)
    try:
        return recipe_from_resolved(json.loads(path.read_text("utf-8")), where=str(path))
    except OSError as error:
        notes.append(f"the run's resolved.json cannot be read: {error.strerror}")
    except ValueError as error:
        notes.append(f"the run's resolved.json is damaged: {error}")
    except VlmrlError as error:
        notes.append(f"the run's resolved.json cannot be used: {error.message}")
    return None


def _read_file(path: Path, offset: int) -> list[SavedSample]:
    table = read_table(path, COLUMNS)
    lengths = [n for chunk in table["token_ids"].chunks for n in chunk.value_lengths().to_pylist()]
    rows = table.drop_columns(["token_ids"]).to_pylist()
    shared: dict[int, tuple[Any, Any]] = {}
    samples: list[SavedSample] = []
    try:
        for row, length in zip(rows, lengths, strict=True):
            group = row["group"]
            if group not in shared:
                shared[group] = (json.loads(row["truth"]), json.loads(row["columns"]))
            samples.append(_sample(row, length, shared[group], group + offset))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"rollouts have a value of the wrong kind: {error}", where=str(path)) from error
    return samples


def _sample(row: Mapping[str, Any], num_tokens: int, shared: tuple[Any, Any], group: int) -> SavedSample:
    media: Sequence[Mapping[str, Any]] = row["images"][: row["num_row_images"]]
    return SavedSample(
        row["step"],
        group,
        row["source"],
        row["task"],
        row["prompt_id"],
        row["sample"],
        RewardInput(row["text"], shared[0], shared[1], (), row["finish"], num_tokens, row["prompt_text"]),
        tuple(Media(**m) for m in media),
        Score(row["score"], json.loads(row["parts"]), row["note"], row["error"]),
        row["advantage"],
    )
