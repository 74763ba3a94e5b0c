"""Plan of `vlmrl eval`: which evaluations are made, under which names, and their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl import __version__
from vlmrl.data.blinded_images import ImageChange
from vlmrl.errors import RecipeError, StoreError, listed
from vlmrl.inference.blinded import (
    GENERATION_KEY,
    changed_meta,
    changed_name,
    find_normal,
    generation_hash,
    require_images,
)
from vlmrl.inference.eval_identity import require_name
from vlmrl.inference.eval_rows import EvalRows
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import EvalSetting
from vlmrl.rewards import reward_record
from vlmrl.setup.measures import chosen_measures
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import names_a_step
from vlmrl.store.metrics import encode
from vlmrl.types import SamplingParams

EVALUATED_BY = ("name", "weights", "sha256", "version", "rewards")
"""Keys of a reward's record that `meta` keeps, besides its arguments."""


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation.

    Args:
        temperature: of sampling; None = greedy.
        samples: responses per prompt.
        name: of the evaluation; None = composed of rows, checkpoint and sampling.
        seed: of sampling.
        force: replace an evaluation of that name even if it was of something else.
        changes: of the images; for each, there is an evaluation besides the normal one.
        normal: folder of the normal evaluation; None = that of the run if it exists, else it is made.
        setting, sampling: the one of `[eval.settings]` that is used, and its name; None = none of them.
    """

    temperature: float | None = None
    samples: int = 1
    name: str | None = None
    seed: int = 0
    force: bool = False
    changes: tuple[ImageChange, ...] = ()
    normal: Path | None = None
    setting: str = ""
    sampling: EvalSetting | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature is None

    def under(self, name: str, setting: EvalSetting) -> EvalSettings:
        """Return the same settings under one of `[eval.settings]`."""
        return replace(
            self,
            temperature=setting.temperature or None,
            samples=setting.samples,
            setting=name,
            sampling=setting,
        )


@dataclass(frozen=True)
class PlannedEvaluation:
    """Evaluation that is still to be made.

    Args:
        name: of its folder.
        meta: record of its model, rows, reward and sampling.
        settings: its settings.
        change: of the images that the model sees; None = it sees them as they are.
    """

    rows: EvalRows
    name: str
    meta: Mapping[str, Any]
    settings: EvalSettings
    change: ImageChange | None = None

    @property
    def responses(self) -> int:
        """Number of responses that it needs."""
        return self.rows.count * self.settings.samples


def chosen_settings(recipe: Recipe, settings: EvalSettings, names: Sequence[str] = ()) -> list[EvalSettings]:
    """Return the settings under which a recipe's rows are evaluated: one for each of `[eval.settings]`.

    It is `settings` alone if the recipe has none, or if the user gave a temperature.

    Args:
        names: the recipe's settings to use; () = all.
    Raises: RecipeError for a name that the recipe does not have, and for names together with a temperature.
    """
    known = recipe.eval.settings
    if names and settings.temperature is not None:
        raise RecipeError("--settings names settings of the recipe, and --sample makes another", hint="leave one out")
    for name in names:
        if name not in known:
            hint = listed(name, known, "its settings") if known else "add a table [eval.settings.NAME] to it"
            raise RecipeError(f"the recipe has no setting `{name}`", where="--settings", hint=hint)
    if settings.temperature is not None or not known:
        return [settings]
    return [settings.under(name, setting) for name, setting in known.items() if not names or name in names]


def plan(
    recipe: Recipe,
    origin: ModelOrigin,
    rows: Sequence[EvalRows],
    run_dir: Path | None,
    settings: EvalSettings | Sequence[EvalSettings],
    argv: Sequence[str] = (),
) -> list[PlannedEvaluation]:
    """Return the evaluations that will be made, for the rows of every source: the normal one, then changed images.

    Several settings are all used for the rows of a source, before those of the next one.

    Args:
        run_dir: the run whose folder they go to; None = a new run.
    Raises: before any work, StoreError when a name belongs to an evaluation of something else or to one of training,
        and RecipeError for measures that a task does not have.
    """
    every = [settings] if isinstance(settings, EvalSettings) else list(settings)
    given = every[0].name
    if given is not None and names_a_step(given):
        raise StoreError(f"training uses names like `{given}` for its own evaluations", hint="choose another --name")
    planned = []
    for one in rows:
        chosen_measures(recipe, one.source)
        for own in every:
            name = _name(recipe, own, origin, one, rows, len(every))
            planned_one = PlannedEvaluation(one, name, _meta(recipe, origin, one, own, argv), own)
            planned += _with_changes(planned_one, run_dir, own)
    if run_dir is not None:
        for one in planned:
            require_name(layout.eval_dir(run_dir, one.name), one.meta, one.settings.force)
    return planned


def _with_changes(normal: PlannedEvaluation, run_dir: Path | None, settings: EvalSettings) -> list[PlannedEvaluation]:
    """Return a normal evaluation, unless it exists, and those of the same rows with changed images."""
    if not settings.changes:
        return [normal]
    for change in settings.changes:
        require_images(normal.rows.source, change, normal.rows.count)
    partner = find_normal(run_dir, normal.name, normal.meta, settings.normal)
    label = normal.name if partner is None else partner.name if settings.normal is None else str(partner)
    changed = [
        replace(normal, name=changed_name(normal.name, c), meta=changed_meta(normal.meta, c, label), change=c)
        for c in settings.changes
    ]
    return changed if partner is not None else [normal, *changed]


def params_of(recipe: Recipe, greedy: SamplingParams, settings: EvalSettings) -> SamplingParams:
    """Return the sampling parameters of an evaluation. `greedy`: those of a greedy one, with the recipe's limits."""
    if settings.sampling is not None:
        setting = settings.sampling
        limit = recipe.eval.token_limit(setting, recipe.rollout.max_new_tokens)
        greedy = replace(greedy, max_new_tokens=limit)
        if setting.temperature:
            greedy = replace(greedy, temperature=setting.temperature, top_p=setting.top_p, top_k=setting.top_k)
        return greedy
    if settings.temperature is None:
        return greedy
    return replace(greedy, temperature=settings.temperature, top_p=recipe.rollout.top_p, top_k=recipe.rollout.top_k)


def _name(
    recipe: Recipe,
    settings: EvalSettings,
    origin: ModelOrigin,
    rows: EvalRows,
    all_rows: Sequence[EvalRows],
    num_settings: int,
) -> str:
    source = rows.source
    if settings.name is not None:
        words = [settings.name]
        words += [source.name] if len({r.source.name for r in all_rows}) > 1 else []
        words += [source.split] if len({r.source.split for r in all_rows}) > 1 else []
        words += [settings.setting] if num_settings > 1 else []
        return settings.name if len(words) == 1 else layout.eval_name(*words)
    # Training names its own evaluations by split, source and step: `eval` in front keeps others on the same rows apart.
    is_trainings = rows.role == "validation" or source.split == "validation" or recipe.eval.sets
    words = [*(["eval"] if is_trainings else []), source.split, source.name]
    if origin.checkpoint is not None:
        words.append(origin.checkpoint.name)
    if settings.setting:
        words.append(settings.setting)
    elif settings.temperature is not None:
        words.append(f"T{settings.temperature:g}-n{settings.samples}")
    if rows.count < len(source.rows):
        words.append(f"first-{rows.count}")
    return layout.eval_name(*words)


def _meta(
    recipe: Recipe, origin: ModelOrigin, rows: EvalRows, settings: EvalSettings, argv: Sequence[str]
) -> dict[str, Any]:
    parent: Mapping[str, Any] = origin.parent or {}
    source = rows.source
    return {
        "model": parent.get("run", origin.path),
        "checkpoint": origin.checkpoint.name if origin.checkpoint else None,
        "step": origin.step,
        **({"endpoint": origin.endpoint} if origin.endpoint else {}),
        "split": source.split,
        "role": rows.role,
        **({"shared": rows.shared} if rows.shared else {}),
        "source": source.name,
        "task": source.task.name,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
        "reward": {k: v for k, v in reward_record(source.reward, source.weights).items() if k in EVALUATED_BY},
        "reward_args": encode(dict(source.reward.args)),
        "prompt_sha256": source.prompt_sha256,
        "prompt_earlier": list(source.prompt_earlier),
        **({"setting": settings.setting} if settings.setting else {}),
        "sampling": _sampling(recipe, settings),
        "greedy": settings.is_greedy,
        "max_rows": rows.max_rows,
        "seed": settings.seed,
        "dtype": recipe.model.dtype,
        GENERATION_KEY: generation_hash(recipe),
        "paper": encode(dict(recipe.paper)),
        "vlmrl": __version__,
        "argv": list(argv),
    }


def _sampling(recipe: Recipe, settings: EvalSettings) -> dict[str, Any]:
    if settings.sampling is not None:
        return settings.sampling.record(recipe.eval.token_limit(settings.sampling, recipe.rollout.max_new_tokens))
    return {
        "greedy": settings.is_greedy,
        "temperature": settings.temperature,
        "samples": settings.samples,
        "max_new_tokens": recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens,
    }
