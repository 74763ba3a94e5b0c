"""Preparation of a training run: check the recipe, or plan a resume or fork; then create or reopen the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.dist.world import launched
from vlmrl.errors import Problem
from vlmrl.launch.request import TrainRequest
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.setup.checked_recipe import check_loaded, load_checked, parse_target
from vlmrl.setup.open_values import choice_text, choices_of
from vlmrl.store.checkpoints import HF
from vlmrl.train.resume import ResumePlan, ResumeRequest, changes_in_words, notes_of, plan_fork, plan_resume

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Recipe
    from vlmrl.store.runs import Run

Plan = LoadedRecipe | ResumePlan
"""The recipe of a new run, or the plan of a resume or fork."""


def prepare(request: TrainRequest, root: Path) -> tuple[Plan, list[Problem]]:
    """Return the checked recipe or plan of the training, and warnings. Nothing is written.

    Args:
        root: folder of the runs.
    Raises: the errors of recipe, data, reward and model; StoreError for changes that the run does not allow.
    """
    ref, gpus = request.resume if request.resume is not None else request.fork, request.machines.gpus
    if ref is None:
        assert request.recipe is not None
        return load_checked(request.recipe, request.overrides, request.kind, root, gpus=gpus)
    is_fork, warnings = request.fork is not None, []
    target = parse_target(gpus)
    resume = ResumeRequest(ref, request.kind, request.recipe, request.overrides, request.accept_changes, target)
    plan = plan_fork(root, resume) if is_fork else plan_resume(root, resume)
    if plan.changes_recipe or is_fork:
        files = str(plan.checkpoint / HF) if plan.checkpoint else None
        _, warnings = check_loaded(plan.loaded, root, trains=is_fork, asks=is_fork, files=files, gpus=gpus)
    return plan, [*warnings, *plan.warnings]


def describe_changes(plan: Plan) -> list[str]:
    """Return lines about the changes of a resume or fork, and notes on their consequences; [] for a new run."""
    if not isinstance(plan, ResumePlan) or not plan.changes:
        return []
    return [f"changed:\n{changes_in_words(plan.changes)}", *(f"note: {note}" for note in notes_of(plan))]


def recipe_of(plan: Plan) -> Recipe:
    """Return the recipe that will be trained."""
    return plan.loaded.recipe if isinstance(plan, ResumePlan) else plan.recipe


def begin_run(
    request: TrainRequest, plan: Plan, root: Path, argv: Sequence[str], say: Callable[[str], None]
) -> tuple[Run, Recipe, Path | None]:
    """Create or reopen the run, report which one it is, and lock it for this process.

    Args:
        root: folder of the runs.
        argv: command line for the record.
        say: function that prints a line.
    Returns: (run, its recipe, checkpoint to start from; None at step 0).
    """
    from vlmrl.setup.model_origin import describe_origin
    from vlmrl.setup.new_run import Labels, start_run
    from vlmrl.store.listing import namesake_warning
    from vlmrl.train.resume import fork_run, reopen_run

    if not launched():  # else the launcher has already printed the changes
        for line in describe_changes(plan):
            say(line)
    labels = Labels(request.name, request.tags, request.note)
    if isinstance(plan, LoadedRecipe):
        run, recipe, checkpoint = start_run(plan, root, argv, labels), plan.recipe, None
        say(f"run {run.id}\n{describe_size(recipe)}")
        for choice in choices_of(plan):
            say(f"chosen: {choice_text(choice)}")
        if origin := describe_origin(recipe.model.path, run.manifest.parent):
            say(origin)
    elif request.fork is not None:
        run, recipe, checkpoint = fork_run(root, plan, argv, labels)
        say(f"run {run.id}\n{run.manifest.parent_text}, up to step {recipe.train.steps}")
    else:
        run, recipe, checkpoint = reopen_run(root, plan, argv)
        at = f"checkpoint {checkpoint.name}" if checkpoint else "the start: it had no complete checkpoint"
        say(f"resuming {run.id} (attempt {run.attempt}) from {at}")
        if note := describe_other_processes(run):
            say(note)
    if request.name is not None and (warning := namesake_warning(run.dir, request.name)):
        say(warning)
    return run, recipe, checkpoint


def describe_size(recipe: Recipe) -> str:
    """Describe the number of responses (examples in supervised learning) and updates of a recipe, in one line."""
    t, r = recipe.train, recipe.rollout
    if recipe.kind == "sft":
        return f"{t.steps} steps x {t.rows_per_step} rows = {t.steps * t.rows_per_step:,} examples"
    responses = t.steps * r.prompts_per_step * r.samples_per_prompt
    updates = f", {t.updates_per_step} update{'s' if t.updates_per_step > 1 else ''} per step"
    shape = f"{t.steps} steps x {r.prompts_per_step} prompts x {r.samples_per_prompt} samples"
    return f"{shape} = {responses:,} responses{updates}"


def describe_other_processes(run: Run) -> str:
    """Return a note if a resumed run has a different number of processes than before (this is allowed); else ""."""
    if len(run.manifest.attempts) < 2:
        return ""
    before, now = (attempt.processes for attempt in run.manifest.attempts[-2:])
    if before == now:
        return ""
    processes = "1 process" if now == 1 else f"{now} processes"
    return f"note: this attempt has {processes}, the one before had {before}; --gpus {before} keeps that number"
