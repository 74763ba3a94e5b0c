"""How `vlmrl train` and `vlmrl sft` begin: a new run, the next attempt of one (`--resume`), or a fork (`--from`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.cli.output import say, say_origin, warn_of_namesakes
from vlmrl.errors import RecipeError

if TYPE_CHECKING:
    from vlmrl.recipe.load import LoadedRecipe
    from vlmrl.recipe.schema import Recipe
    from vlmrl.store.runs import Run
    from vlmrl.train.resume import ResumePlan


@dataclass(frozen=True)
class Beginning:
    """The options that say what is trained. `labels`: name, tags and note of a new run."""

    kind: str
    recipe: Path | None
    overrides: Sequence[str]
    resume: str | None = None
    fork: str | None = None
    accept: bool = False
    labels: tuple[str | None, Sequence[str], str] = (None, (), "")

    @property
    def command(self) -> str:
        return "train" if self.kind == "rl" else "sft"

    def check(self) -> None:
        """Raise a RecipeError when the options do not go together."""
        if self.recipe is None and self.resume is None and self.fork is None:
            raise RecipeError(
                "give a recipe, or --resume RUN, or --from RUN",
                hint=f"vlmrl {self.command} recipes/digits_im.toml   or   vlmrl {self.command} --resume last",
            )
        if self.resume is not None and self.fork is not None:
            raise RecipeError("--resume goes on with a run and --from begins a new one", hint="leave one of them out")
        name, tags, note = self.labels
        if self.resume is not None and (name or tags or note):
            raise RecipeError(
                "--name, --tag and --note are for a new run: a resumed one keeps its own",
                hint=f"vlmrl runs note {self.resume} ...   or   vlmrl runs tag {self.resume} ...",
            )
        if self.accept and self.resume is None:
            raise RecipeError(
                "--accept-changes goes with --resume: a new run has nothing to accept", hint="leave it out"
            )


def prepare(asked: Beginning, root: Path, gpus: str | None = None) -> LoadedRecipe | ResumePlan:
    """The recipe of a new run, or the plan of a resume or fork, checked. Nothing is written.

    Args: gpus: as `--gpus` says.
    Raises: the errors of recipe, data, reward and model; StoreError for what a run may not become.
    """
    from vlmrl.checkpoint.format import HF
    from vlmrl.cli.sft import check_loaded, load_checked, warn
    from vlmrl.train.resume import ResumeRequest, plan_fork, plan_resume

    ref = asked.resume if asked.resume is not None else asked.fork
    if ref is None:
        assert asked.recipe is not None
        return load_checked(asked.recipe, list(asked.overrides), asked.kind, root, gpus=gpus)
    words = ResumeRequest(ref, asked.kind, asked.recipe, asked.overrides, asked.accept)
    plan = plan_fork(root, words) if asked.fork is not None else plan_resume(root, words)
    if plan.changes_recipe or asked.fork is not None:
        files = str(plan.checkpoint / HF) if plan.checkpoint else None
        check_loaded(plan.loaded, root, trains=asked.fork is not None, files=files, gpus=gpus)
    warn(plan.warnings)
    return plan


def show_changes(ready: LoadedRecipe | ResumePlan) -> None:
    """What a resume or fork does otherwise, and what follows from it."""
    from vlmrl.train.resume import ResumePlan, notes_of, told

    if isinstance(ready, ResumePlan) and ready.changes:
        say(f"changed:\n{told(ready.changes)}")
        for note in notes_of(ready):
            say(f"note: {note}")


def recipe_of(ready: LoadedRecipe | ResumePlan) -> Recipe:
    """The recipe that will be trained."""
    from vlmrl.train.resume import ResumePlan

    return ready.loaded.recipe if isinstance(ready, ResumePlan) else ready.recipe


def begin(
    asked: Beginning, ready: LoadedRecipe | ResumePlan, root: Path, argv: Sequence[str]
) -> tuple[Run, Recipe, Path | None]:
    """The run, taken by this process; its recipe; the checkpoint it goes on from, None at step 0."""
    from vlmrl.cli.sft import arithmetic
    from vlmrl.dist.rank_process import launched
    from vlmrl.recipe.load import LoadedRecipe
    from vlmrl.setup.new_run import Labels, start_run
    from vlmrl.train.resume import fork_run, reopen_run

    if not launched():  # the launcher has shown them
        show_changes(ready)
    name, tags, note = asked.labels
    labels = Labels(name, tuple(tags), note)
    if isinstance(ready, LoadedRecipe):
        run, recipe, checkpoint = start_run(ready, root, argv, labels), ready.recipe, None
        say(f"run {run.id}\n{arithmetic(recipe)}")
        say_origin(recipe.model.path, run.manifest.parent)
    elif asked.fork is not None:
        run, recipe, checkpoint = fork_run(root, ready, argv, labels)
        say(f"run {run.id}\n{run.manifest.parent_text}, up to step {recipe.train.steps}")
    else:
        run, recipe, checkpoint = reopen_run(root, ready, argv)
        at = f"checkpoint {checkpoint.name}" if checkpoint else "the start: it had no complete checkpoint"
        say(f"resuming {run.id} (attempt {run.attempt}) from {at}")
        say_other_processes(run)
    if name is not None:
        warn_of_namesakes(run.dir, name)
    return run, recipe, checkpoint


def say_other_processes(run: Run) -> None:
    """Say when a resumed run has another number of processes than its attempt before. That is allowed."""
    if len(run.manifest.attempts) < 2:
        return
    before, now = (attempt.processes for attempt in run.manifest.attempts[-2:])
    if before != now:
        words = "1 process" if now == 1 else f"{now} processes"
        say(f"note: this attempt has {words}, the one before had {before}; --gpus {before} keeps that number")
