"""Saved responses that `vlmrl reward-check` reads, with facts about their run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.errors import RecipeError, StoreError, VlmrlError
from vlmrl.reward_check.evaluated_files import evaluated_files, evaluation_of, run_dir_of
from vlmrl.reward_check.response_columns import Head, PieceReader
from vlmrl.reward_check.rollout_files import RolloutReader
from vlmrl.reward_check.scoring import TaskRef
from vlmrl.rewards.identity import single_records
from vlmrl.rewards.used_code import same_code
from vlmrl.rewards.worker_code import ServicePlace
from vlmrl.store import layout
from vlmrl.store.kept_recipe import kept_text, newest_resolved, read_resolved
from vlmrl.store.metrics import counted, newest
from vlmrl.store.runs import Run, open_run
from vlmrl.store.verify import damage_of, shortened
from vlmrl.tasks.user_task import is_own, read_own
from vlmrl.types import Media, RewardInput, Score

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class SavedSample:
    """Saved response with its score (None = no score). `media` refers to its images; `input` has none."""

    where: str
    source: str
    prompt_id: str
    step: int
    input: RewardInput
    media: tuple[Media, ...]
    score: Score | None


@dataclass
class SavedResponses:
    """Saved responses and facts about their run. Texts are read when they are needed.

    Args:
        path: file or folder of the responses.
        reader: reads the rows.
        heads: source -> its task and facts from its first row.
        run: the run that made the responses; None for files outside a run.
        recipe: the run's recipe; None if it cannot be read.
        records: source -> record of its reward in the manifest.
        task: the task that the user named for a table; for other inputs see `task_ref`.
        grouped: whether it is known which rows belong to one prompt.
        has_scores: whether scores were saved with the responses.
        first_step: number that is shown for step 0; a table's steps are shown as they are.
        notes: messages for the user.
    """

    path: Path
    reader: PieceReader
    heads: Mapping[str, Head]
    run: Run | None = None
    recipe: Recipe | None = None
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task: TaskRef | None = None
    grouped: bool = True
    has_scores: bool = True
    first_step: int = counted(0)
    notes: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        return list(self.heads)

    @property
    def evaluations(self) -> list[str]:
        """Names of the evaluations that the responses are of; [] for rollouts and tables."""
        paths = self.reader.paths if isinstance(self.reader, RolloutReader) else ()
        return [name for path in paths if (name := evaluation_of(Path(path).absolute()))]

    def arguments(self, source: str) -> dict[str, Any]:
        """Return arguments for a built-in reward that follow from a source's rows, such as the names of levels.

        They come from the truth of the first row. Arguments of the run's own reward replace them.
        """
        from vlmrl.tasks import kind_of

        singles = single_records(self.records.get(source, {}))
        recorded = {name: value for single in reversed(singles) for name, value in (single.get("args") or {}).items()}
        arguments = kind_of(self.heads[source].truth).arguments(self.heads[source].truth)
        return {name: list(recorded.get(name) or value) for name, value in arguments.items()}

    def task_ref(self, source: str) -> TaskRef | None:
        """Return the task of a source; None for a table for which the user named no task."""
        if self.task is not None:
            return self.task
        name = self.heads[source].task
        datasets = self.run.manifest.datasets if self.run is not None else ()
        record = next((one for one in datasets if one.get("name") == source), {})
        if is_own(name):
            return self._own_task(source, name, record)
        variant = record.get("variant")
        return TaskRef(name, {"name": source, **self.arguments(source)}, variant) if name else None

    def _own_task(self, source: str, name: str, record: Mapping[str, Any]) -> TaskRef | None:
        """Return a user's task if its code is the same as in the run; changed code is never run."""
        file, _, function = name.rpartition(":")
        path = str(Path(self.run.manifest.cwd or "") / file) if self.run is not None else file
        try:
            before = kept_text(self.run.dir, "task", str(record.get("task_sha256"))) if self.run is not None else None
            same = before is not None and same_code(before, read_own(path).text, function)
        except RecipeError:
            same = False
        if same:
            return TaskRef(f"{path}:{function}", {"name": source}, None)
        note = f"the task {name} is not the code that these rollouts were made with; its measures are left out"
        if note not in self.notes:
            self.notes.append(note)
        return None

    def limits(self) -> dict[str, Any]:
        """Return arguments of a scorer: the recipe's limits for a user's reward, and the place of a service's files."""
        if self.recipe is None or self.run is None:
            return {}
        limits = {k: getattr(self.recipe.reward, k) for k in ("timeout_seconds", "memory_mb", "workers")}
        return {**limits, "place": ServicePlace(str(self.run.dir), "reward-check")}

    def pick(self, rows: Iterable[int]) -> dict[int, SavedSample]:
        """Return row -> its response with texts for `rows` of the input; filtered and broken rows are left out."""
        indices = np.unique(np.asarray(list(rows), dtype=np.int64))
        samples: dict[int, SavedSample] = {}
        decoder = self.reader.decoder
        for chunk in self.reader.chunks(indices) if len(indices) else ():
            here = indices[(indices >= chunk.first) & (indices < chunk.first + chunk.rows)] - chunk.first
            if not len(here):
                continue
            decoded = decoder.decode(chunk, here.tolist(), media=True)
            facts = decoded.facts
            for i, x in enumerate(decoded.inputs):
                samples[int(facts.rows_N[i])] = SavedSample(
                    decoder.where(facts, i),
                    facts.sources[i] or "",
                    facts.prompts[i] or "",
                    int(facts.steps_N[i]),
                    x,
                    decoded.media[i],
                    decoded.stored[i] if decoded.stored is not None else None,
                )
        return samples


def open_saved(
    ref: str, root: Path, *, steps: tuple[int, int] | None = None, source: str | None = None
) -> SavedResponses:
    """Open the rollouts that `ref` names: a run (see `open_run`), a run folder, a rollouts folder, or a Parquet file.

    The Parquet file may be `eval/<name>/rows.parquet` of a run: the responses of an evaluation. Of a run without
    rollouts, such as one of `vlmrl eval`, the responses of all its evaluations are read.

    Args:
        steps: (first, last) step to read, both included; None = all steps.
        source: name of a `[[data]]` entry: only its rollouts are read; None = all.
    Raises: StoreError if there are no such rollouts, or a file cannot be read.
    """
    path = Path(ref)
    notes: list[str] = []
    if path.suffix == ".parquet" and not path.is_dir():
        if not path.is_file():
            raise StoreError("no such rollout file", where=ref)
        run, files = _run_of(run_dir_of(path.resolve()), notes), {0: path}
    elif path.is_dir() and not (path / layout.MANIFEST).exists() and (loose := _loose_files(path)):
        run = _run_of(path.resolve().parent, notes)
        files = run.rollout_files() if run is not None else loose
    else:
        run = _run(root, ref)
        path, files = run.dir, run.rollout_files()
        if not files and steps is None:
            files = dict(enumerate(evaluated_files(run.dir)))
    if steps is not None and not path.is_file():
        files = {step: file for step, file in files.items() if steps[0] <= step <= steps[1]}
    reader = RolloutReader(tuple(str(file) for file in files.values()), source)
    heads = reader.heads()
    if not heads:
        within = f" in steps {counted(steps[0])} to {counted(steps[1])}" if steps else ""
        of = f" of source `{source}`" if source else ""
        hint = "name the rows of an evaluation, <run>/eval/<name>/rows.parquet, or a file of `vlmrl generate`"
        raise StoreError(f"there are no saved rollouts{of}{within}", where=str(path), hint=hint)
    if run is not None:
        notes += _damage(run, path)
    return SavedResponses(path, reader, heads, run, _recipe_of(run, notes), _records_of(run), notes=notes)


def _damage(run: Run, path: Path) -> list[str]:
    """Return the damaged files of a run, one line each; if `path` is one rollout file, only the damage of that file."""
    lines = damage_of(run.dir)
    if path.suffix == ".parquet" and path.is_file():
        lines = [line for line in lines if line.startswith(f"{layout.ROLLOUTS}/{path.name}: ")]
    return shortened(lines, run.id)


def _run(root: Path, ref: str) -> Run:
    try:
        return open_run(root, ref)
    except StoreError as error:
        if Path(ref).is_dir() and not (Path(ref) / layout.MANIFEST).exists():
            hint = "name a run, a folder of step-*.parquet, or one table of responses"
            raise StoreError("the folder holds neither a run nor saved rollouts", where=ref, hint=hint) from error
        raise


def _loose_files(folder: Path) -> dict[int, Path]:
    files = [
        (*parsed, p) for p in sorted(folder.iterdir()) if (parsed := layout.parse_rollout_name(p.name)) is not None
    ]
    return newest(files, {})


def _run_of(run_dir: Path, notes: list[str]) -> Run | None:
    """Return the run whose folder contains the files; None if there is none or it cannot be read."""
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
        return recipe_from_resolved(read_resolved(run.dir), where=str(path))
    except VlmrlError as error:
        notes.append(f"the run's resolved.json cannot be used: {error.message}")
    return None
