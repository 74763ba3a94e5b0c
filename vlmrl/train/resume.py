"""Resume and fork of a run: a plan with all changes, their check, and the run that continues.

`plan_resume` and `plan_fork` only read, and raise if a change is refused. `reopen_run` and `fork_run` take a plan and
write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.algo.algorithms import algorithm_of
from vlmrl.errors import Problem, StoreError, VlmrlError
from vlmrl.recipe.auto_values import keep_choices
from vlmrl.recipe.changes import Change, compare_recipes
from vlmrl.recipe.load import LoadedRecipe, load_recipe, recipe_from_resolved, reload_recipe, with_defaults
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import HIDDEN, redact_value
from vlmrl.setup.memory_fit import HERE, Target
from vlmrl.store import layout
from vlmrl.store.checkpoints import left_out_by_pack, read_meta, split_checkpoint
from vlmrl.store.kept_recipe import Fork, Renewal, Texts, newest_resolved, read_resolved, recipe_text, refuse_hidden
from vlmrl.store.lock import RunLock
from vlmrl.store.manifest import short_value
from vlmrl.store.provenance import usable_threads
from vlmrl.store.runs import Run, create_run, open_run, resume_run

if TYPE_CHECKING:
    from vlmrl.setup.run_records import Labels, Records

COMMANDS = {"rl": "train", "sft": "sft"}
LENGTH_KEYS = {"train.steps", "train.epochs", "train.stop_above", "train.max_seconds", "eval.patience"}
"""Keys whose change can make a finished run continue."""


@dataclass(frozen=True)
class ResumeRequest:
    """Arguments of a command that resumes or forks a run.

    Args:
        ref: the run; for a fork also with `@STEP`, `@best` or `@last`.
        kind: "rl" or "sft", by the command.
        recipe: a recipe file to use; None = the run's own recipe.
        overrides: values of `--set`; they have priority over either recipe.
        accept: whether `--accept-changes` was given.
    """

    ref: str
    kind: str
    recipe: Path | None = None
    overrides: Sequence[str] = ()
    accept: bool = False
    target: Target = HERE


@dataclass(frozen=True)
class ResumePlan:
    """Plan of a resumed run or of a fork.

    Args:
        run: the run, for reading.
        checkpoint: the checkpoint to load; None = the run begins at step 0 again.
        loaded: the recipe that will be used.
        changes: its changes against the run.
        records, texts: current records and texts of datasets, rewards and prompts, for the manifest.
        accepted: whether `--accept-changes` was given.
        warnings: warnings about values that were chosen again for this machine.
    """

    run: Run
    checkpoint: Path | None
    loaded: LoadedRecipe
    changes: tuple[Change, ...]
    records: Records
    texts: Texts
    accepted: bool = False
    warnings: tuple[Problem, ...] = ()

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else layout.parse_checkpoint_name(self.checkpoint.name) or 0

    @property
    def recipe_given(self) -> bool:
        """Return whether another recipe file than the run's own was given."""
        return self.loaded.path.parent != self.run.dir

    @property
    def changes_recipe(self) -> bool:
        return self.loaded.resolved["recipe"] != with_defaults(read_resolved(self.run.dir)["recipe"])

    @property
    def renewal(self) -> Renewal | None:
        """Records that a resume writes; None when nothing changes."""
        if not self.changes:
            return None
        given_text = self.loaded.text if self.recipe_given else None
        seeds = {"run": self.loaded.recipe.train.seed}
        changes, resolved = _recorded(self.changes), self.loaded.resolved
        return Renewal(changes, self.accepted, resolved, given_text, self.records, self.texts, seeds)

    @property
    def fork(self) -> Fork:
        """Checkpoint and records that a new run begins with."""
        assert self.checkpoint is not None
        return Fork(self.checkpoint, dict(self.run.manifest.first_weights or {}), _recorded(self.changes))


def plan_resume(root: Path, request: ResumeRequest) -> ResumePlan:
    """Plan the resume of a run. Nothing is written.

    Raises: StoreError when the run is being written, is of another kind, has nothing left to do or no checkpoint left,
        or has a change that is refused or was not accepted; CheckpointError when the folder of its newest checkpoint is
        not what was saved; the errors of recipe, data and reward.
    """
    run = open_run(root, request.ref)
    _same_kind(run, request.kind, f"--resume {request.ref}")
    RunLock(run.dir).refuse_living()
    checkpoints = run.checkpoint_dirs()
    if not checkpoints and left_out_by_pack(run.dir):
        run.checkpoint("last")  # raises: a run that has trained must not begin at step 0 again
    plan = _plan(run, checkpoints[-1] if checkpoints else None, request)
    _something_left(plan)
    not_allowed = [c for c in plan.changes if c.kind == "refused" or (c.kind == "asked" and not request.accept)]
    if not_allowed:
        refused = any(c.kind == "refused" for c in not_allowed)
        advice = "leave out the refused changes" if refused else "add --accept-changes (the run records it)"
        fork_command = f"vlmrl {COMMANDS[request.kind]} --from {run.id}@last"
        hint = f"{advice}; or leave this run as it is and fork it: {fork_command} ...; nothing was written"
        raise StoreError(
            f"run {run.id} would not go on as it was:\n{changes_in_words(plan.changes, run.id)}",
            where=str(run.dir),
            hint=hint,
        )
    return plan


def plan_fork(root: Path, request: ResumeRequest) -> ResumePlan:
    """Plan a new run that begins with all of a checkpoint (`RUN@STEP`, `RUN@best`, `RUN@last`, `RUN` = last).

    Raises: StoreError when there is no such checkpoint, or it does not fit; the errors of recipe, data and reward.
    """
    ref, which = split_checkpoint(request.ref, "last")
    run = open_run(root, ref)
    _same_kind(run, request.kind, f"--from {request.ref}")
    checkpoint = run.checkpoint(which)
    try:
        plan = _plan(run, checkpoint, request)
    except VlmrlError as error:
        if checkpoint.is_dir():
            raise
        message, hint = f"{checkpoint.name} was removed meanwhile: the run goes on", f"--from {run.id}@best, or wait"
        raise StoreError(message, where=str(run.dir), hint=hint) from error
    refused = [c for c in plan.changes if c.kind == "refused"]
    if refused:
        raise StoreError(
            f"the checkpoint does not fit:\n{changes_in_words(refused, run.id)}",
            where=str(plan.checkpoint),
            hint="leave out these changes; nothing was written",
        )
    if plan.step >= plan.loaded.recipe.train.steps:
        raise StoreError(
            f"train.steps = {plan.loaded.recipe.train.steps}, but the checkpoint is already at step {plan.step}",
            where=str(plan.checkpoint),
            hint=f"set more steps: --set train.steps={more_steps(plan.step)}; or name an older checkpoint",
        )
    return plan


ALL_DONE = "all steps done"
"""Reason in the event of a run that ended after all its steps."""


def changes_in_words(changes: Sequence[Change], run: str = "RUN") -> str:
    """Return the changes in words: key, old -> new, reason; a diff below if there is one. `run`: its name in hints."""
    mark = {"free": "", "asked": "asked: ", "refused": "REFUSED: "}
    lines = []
    for c in changes:
        old, new = (redact_value(short_value(v), c.what) for v in (c.old, c.new))
        why = mark[c.kind] + c.reason.replace("RUN", run)
        lines.append(f"  {c.what}: {old} -> {new}   [{why}]{f'  {c.where}' if c.where else ''}")
        lines += [f"      {line}" for line in c.diff.splitlines()]
    return "\n".join(lines)


def notes_of(plan: ResumePlan) -> list[str]:
    """Return notes for the user about changes that are allowed but have consequences."""
    notes, keys = [], {c.what for c in plan.changes}
    schedule = plan.loaded.recipe.optim.schedule
    if "train.steps" in keys and schedule != "constant":
        notes.append(
            f'optim.schedule = "{schedule}" ends at train.steps: from step {plan.step} on the learning rate follows '
            "the new number of steps, so its curve differs from that of a run that had this number from the start"
        )
    restarts = {name for c in plan.changes for name in c.rule.restarts}
    if "best" in restarts:
        notes.append("the best validation and eval.patience begin anew: earlier validations measured something else")
    if "kl" in restarts:
        notes.append("an adaptive KL coefficient begins anew at the recipe's value")
    return notes


def _plan(run: Run, checkpoint: Path | None, request: ResumeRequest) -> ResumePlan:
    """Return the plan, with changes of every kind, also refused ones."""
    from vlmrl.setup.auto_choice import fill_for_run
    from vlmrl.setup.run_records import content_changes, records_of, texts_of
    from vlmrl.setup.sources import open_sources

    if checkpoint is not None:
        read_meta(checkpoint)  # raises for a damaged checkpoint before anything is written
    old_resolved = read_resolved(run.dir)
    old = recipe_from_resolved(old_resolved, where=str(newest_resolved(run.dir)))
    if request.recipe is not None:
        loaded = load_recipe(request.recipe, overrides=request.overrides)
    else:
        cwd = Path(run.manifest.cwd) if run.manifest.cwd else None
        loaded = reload_recipe(
            old_resolved, newest_resolved(run.dir), recipe_text(run.dir), overrides=request.overrides, cwd=cwd
        )
    refuse_hidden(loaded.resolved["recipe"], str(loaded.path))
    loaded, warnings = fill_for_run(keep_choices(loaded, old_resolved), run.dir.parent, request.target)
    sources, validation = open_sources(loaded.recipe)
    records, texts = records_of(sources, validation), texts_of(sources)
    changes = compare_recipes(old_resolved["recipe"], loaded, Path(run.manifest.cwd or "."), HIDDEN)
    if checkpoint is not None:
        changes = [_fitted(change, old, loaded.recipe) for change in changes]
    changes = _without_adapter(changes, old, loaded.recipe)
    changes += content_changes(run, records, texts, changes)
    return ResumePlan(run, checkpoint, loaded, tuple(changes), records, texts, request.accept, tuple(warnings))


def _fitted(change: Change, old: Recipe, new: Recipe) -> Change:
    """Return the change, refused if it needs a critic that the checkpoint does not have."""
    if old.kind != "rl" or new.kind != "rl" or change.what not in ("algo.name", "algo.advantage"):
        return change
    if algorithm_of(new.algo).needs_critic and not algorithm_of(old.algo).needs_critic:
        unfit = "the checkpoint has no critic: start a new run from its weights with --set model.path=RUN"
        return replace(change, unfit=unfit)
    return change


def _without_adapter(changes: Sequence[Change], old: Recipe, new: Recipe) -> list[Change]:
    """Return the changes. For a run that trains all weights, all keys of an adapter become one refused change."""
    adapter_changes = [c for c in changes if c.what == "lora" or c.what.startswith("lora.")]
    if not adapter_changes or old.lora is not None or new.lora is None:
        return list(changes)
    unfit = "that run trains all weights and has no adapter: start a new run from its weights with --set model.path=RUN"
    merged = replace(adapter_changes[0], what="lora", old=None, new=f"rank {new.lora.rank}", unfit=unfit)
    return [merged if c is adapter_changes[0] else c for c in changes if c not in adapter_changes[1:]]


def _same_kind(run: Run, kind: str, option: str) -> None:
    """Raise a StoreError if another command made the run. `option`: the option that names the run, for the hint."""
    run_kind = run.manifest.kind
    if run_kind != kind:
        command = COMMANDS.get(run_kind)
        hint = (
            f"use vlmrl {command} {option}; or start a new run from its weights: --set model.path={run.id}@last"
            if command
            else None
        )
        run_command = f"vlmrl {command}" if command else run_kind
        raise StoreError(
            f"run {run.id} was made by `{run_command}`, not `vlmrl {COMMANDS[kind]}`", where=str(run.dir), hint=hint
        )


def _something_left(plan: ResumePlan) -> None:
    """Raise a StoreError if the run would end before its first step."""
    run, steps = plan.run, plan.loaded.recipe.train.steps
    keys = {c.what for c in plan.changes}
    # After a resume that failed before its first step, the run is done, and its recipe may have more steps already.
    done = run.status == "done" and run.manifest.attempts[-1].status == "done"
    nothing_left = plan.step >= steps or not keys & LENGTH_KEYS if done else "train.steps" in keys and plan.step > steps
    if not nothing_left:
        return
    ended = [e for e in run.metrics("event") if e.get("event") == "ended"]
    reason = str(ended[-1].get("reason")) if ended and done else ""
    finished = f"has done all its {plan.step} steps" if reason == ALL_DONE else f"is done{reason and f': {reason}'}"
    state = finished if done else f"is at step {plan.step}, and train.steps = {steps}"
    command = f"vlmrl {COMMANDS[run.manifest.kind]}"
    raise StoreError(
        f"run {run.id} {state}: there is nothing to resume",
        where=str(run.dir),
        hint=f"more steps: {command} --resume {run.id} --set train.steps={more_steps(max(plan.step, steps))}; "
        f"or start a new run from its weights: --set model.path={run.id}@last",
    )


def more_steps(steps: int) -> int:
    """Return a round, larger number of steps: twice as many, rounded up to its first digit.

    Example: 14 -> 30; 100 -> 200; 0 -> 1.
    """
    twice = max(1, 2 * steps)
    unit = 10 ** (len(str(twice)) - 1)
    return -(-twice // unit) * unit


def _recorded(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Return the changes as the manifest records them, with secrets hidden."""
    records = [c.record() for c in changes]
    return [r | {side: redact_value(r[side], r["what"]) for side in ("old", "new")} for r in records]


def reopen_run(root: Path, plan: ResumePlan, argv: Sequence[str]) -> tuple[Run, Recipe, Path | None]:
    """Open a run for a new attempt, as planned.

    Returns: (run, recipe, checkpoint to continue from or None).
    Raises: StoreError when a live process writes it.
    """
    run = resume_run(root, str(plan.run.dir), argv=argv, threads=usable_threads(), renewal=plan.renewal)
    if plan.changes:
        run.event(
            run.start_step, "resumed with changes", changes=[c["what"] for c in run.manifest.attempts[-1].changes]
        )
    checkpoints = run.checkpoint_dirs()
    return run, plan.loaded.recipe, checkpoints[-1] if checkpoints else None


def fork_run(root: Path, plan: ResumePlan, argv: Sequence[str], labels: Labels) -> tuple[Run, Recipe, Path | None]:
    """Create a run that continues from all of a checkpoint of another run.

    Returns: (run, recipe, its copy of the checkpoint).
    """
    parent, loaded = plan.run, plan.loaded
    assert plan.checkpoint is not None
    run = create_run(
        root,
        kind=parent.manifest.kind,
        recipe_name=loaded.path.stem if plan.recipe_given else parent.manifest.recipe,
        recipe_text=loaded.text,
        resolved=loaded.resolved,
        argv=argv,
        seeds={"run": loaded.recipe.train.seed},
        name=labels.name,
        tags=labels.tags,
        note=labels.note,
        threads=usable_threads(),
        texts=plan.texts,
        fork=plan.fork,
        parent={"run": parent.id, "checkpoint": plan.checkpoint.name, "step": plan.step},
        **plan.records,
    )
    run.event(plan.step, "forked", parent=parent.id, checkpoint=plan.checkpoint.name)
    return run, loaded.recipe, run.checkpoint_dirs()[-1]
