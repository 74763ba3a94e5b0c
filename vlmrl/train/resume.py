"""Resume and fork of a run: what would change, whether it may change, and the run that goes on.

`plan_resume` and `plan_fork` read and refuse; nothing is written before `reopen_run` or `fork_run` takes their plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.algo.family import algorithm_of
from vlmrl.errors import Problem, StoreError
from vlmrl.recipe.changes import Change, compare_recipes
from vlmrl.recipe.load import LoadedRecipe, load_recipe, recipe_from_resolved, reload_recipe, with_defaults
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.settle import keep_settled
from vlmrl.setup.new_run import Labels
from vlmrl.setup.open_values import settle_for_run
from vlmrl.setup.run_records import Records, content_changes, records_of, texts_of
from vlmrl.store import layout
from vlmrl.store.checkpoints import read_meta
from vlmrl.store.kept_recipe import Fork, Renewal, Texts, newest_recipe, newest_resolved, read_resolved, refuse_hidden
from vlmrl.store.manifest import short_value
from vlmrl.store.provenance import usable_threads
from vlmrl.store.runs import Run, create_run, open_run, resume_run
from vlmrl.store.secrets.redact import HIDDEN, redact_value

if TYPE_CHECKING:
    pass

COMMANDS = {"rl": "train", "sft": "sft"}
LENGTH_KEYS = {"train.steps", "train.epochs", "train.stop_above", "train.max_seconds", "eval.patience"}
"""Keys that can make a run go on that was done."""


@dataclass(frozen=True)
class ResumeRequest:
    """What a command says of the run it goes on from.

    Args:
        ref: the run; of a fork with `@STEP`, `@best` or `@last`.    kind: rl or sft: the command that asks.
        recipe: a recipe file whose values are to hold; None = the run's own.    overrides: `--set`, on top of either.
        accept: --accept-changes.
    """

    ref: str
    kind: str
    recipe: Path | None = None
    overrides: Sequence[str] = ()
    accept: bool = False


@dataclass(frozen=True)
class ResumePlan:
    """How a run goes on, or a fork begins.

    Args:
        run: the run, for reading.    checkpoint: what is loaded; None = it begins at step 0 again.
        loaded: the recipe as it will be.    changes: against the run.    records, texts: as they are now.
        accepted: whether --accept-changes was said.
        warnings: about values that the run chose anew for its machine.
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
        """Whether a recipe file was given, not the run's own."""
        return self.loaded.path.parent != self.run.dir

    @property
    def changes_recipe(self) -> bool:
        return self.loaded.resolved["recipe"] != with_defaults(read_resolved(self.run.dir)["recipe"])

    @property
    def renewal(self) -> Renewal | None:
        """What a resume writes; None when nothing changes."""
        if not self.changes:
            return None
        given = self.loaded.text if self.recipe_given else None
        seeds = {"run": self.loaded.recipe.train.seed}
        changes, resolved = _recorded(self.changes), self.loaded.resolved
        return Renewal(changes, self.accepted, resolved, given, self.records, self.texts, seeds)

    @property
    def fork(self) -> Fork:
        """What a new run begins with."""
        assert self.checkpoint is not None
        return Fork(self.checkpoint, dict(self.run.manifest.first_weights or {}), _recorded(self.changes))


def plan_resume(root: Path, asked: ResumeRequest) -> ResumePlan:
    """How a run would go on.

    Raises: StoreError when it is of another kind, has nothing left to do, or would change what it must not or what was
    not accepted; CheckpointError when the folder of its newest checkpoint is not what was saved; the errors of recipe,
    data and reward. Nothing is written.
    """
    run = open_run(root, asked.ref)
    _same_kind(run, asked.kind, f"--resume {asked.ref}")
    found = run.checkpoint_dirs()
    plan = _plan(run, found[-1] if found else None, asked)
    _something_left(plan)
    wanted = [c for c in plan.changes if c.kind == "refused" or (c.kind == "asked" and not asked.accept)]
    if wanted:
        refused = any(c.kind == "refused" for c in wanted)
        way = "leave out what is refused" if refused else "the same command with --accept-changes, which is recorded"
        fork = f"vlmrl {COMMANDS[asked.kind]} --from {run.id}@last"
        hint = f"{way}; or leave this run as it is and fork it: {fork} ...; nothing was written"
        raise StoreError(
            f"run {run.id} would not go on as it was:\n{told(plan.changes, run.id)}", where=str(run.dir), hint=hint
        )
    return plan


def plan_fork(root: Path, asked: ResumeRequest) -> ResumePlan:
    """How a new run would begin with the whole of a checkpoint (`RUN@STEP`, `RUN@best`, `RUN@last`, `RUN` = last).

    Raises: StoreError when there is no such checkpoint, or it does not fit; the errors of recipe, data and reward.
    """
    ref, which = parse_fork(asked.ref)
    run = open_run(root, ref)
    _same_kind(run, asked.kind, f"--from {asked.ref}")
    plan = _plan(run, run.checkpoint(which), asked)
    if any(c.kind == "refused" for c in plan.changes):
        raise StoreError(
            f"the checkpoint does not fit:\n{told([c for c in plan.changes if c.kind == 'refused'], run.id)}",
            where=str(plan.checkpoint), hint="leave that out; nothing was written",
        )  # fmt: skip
    if plan.step >= plan.loaded.recipe.train.steps:
        raise StoreError(
            f"train.steps = {plan.loaded.recipe.train.steps}, and the checkpoint is of step {plan.step}",
            where=str(plan.checkpoint),
            hint=f"give more: --set train.steps={more_steps(plan.step)}, or an older checkpoint",
        )  # fmt: skip
    return plan


ALL_DONE = "all steps done"
"""Why a run ended that has all its steps."""


def parse_fork(ref: str) -> tuple[str, str | int]:
    """(run, checkpoint) of `RUN@STEP`, `RUN@best`, `RUN@last` or `RUN`."""
    run, at, which = ref.rpartition("@")
    if at and run and which in ("best", "last"):
        return run, which
    if at and run and which.isascii() and which.isdigit():
        return run, int(which)
    return ref, "last"


def told(changes: Sequence[Change], run: str = "RUN") -> str:
    """Changes for people: what, old -> new, why; a diff below where there is one. `run`: its name in commands."""
    mark = {"free": "", "asked": "asked: ", "refused": "REFUSED: "}
    lines = []
    for c in changes:
        old, new = (redact_value(short_value(v), c.what) for v in (c.old, c.new))
        why = mark[c.kind] + c.reason.replace("RUN", run)
        lines.append(f"  {c.what}: {old} -> {new}   [{why}]{f'  {c.where}' if c.where else ''}")
        lines += [f"      {line}" for line in c.diff.splitlines()]
    return "\n".join(lines)


def notes_of(plan: ResumePlan) -> list[str]:
    """What a person should know of changes that are allowed."""
    notes, keys = [], {c.what for c in plan.changes}
    schedule = plan.loaded.recipe.optim.schedule
    if "train.steps" in keys and schedule != "constant":
        notes.append(
            f'optim.schedule = "{schedule}" ends at train.steps: from step {plan.step} on the learning rate follows '
            "the new number of steps, so the curve is not that of a run which had it from the start"
        )
    restarts = {name for c in plan.changes for name in c.rule.restarts}
    if "best" in restarts:
        notes.append("the best validation and eval.patience begin anew: what was measured before was another thing")
    if "kl" in restarts:
        notes.append("a steered KL coefficient begins anew at the recipe's")
    return notes


def _plan(run: Run, checkpoint: Path | None, asked: ResumeRequest) -> ResumePlan:
    """The plan, whatever it may hold."""
    from vlmrl.setup.sources import open_sources

    if checkpoint is not None:
        read_meta(checkpoint)  # what does not belong into its folder is refused before anything is written
    before = read_resolved(run.dir)
    old = recipe_from_resolved(before, where=str(newest_resolved(run.dir)))
    if asked.recipe is not None:
        loaded = load_recipe(asked.recipe, overrides=asked.overrides)
    else:
        text = newest_recipe(run.dir).read_text("utf-8", "replace") if newest_recipe(run.dir).is_file() else ""
        cwd = Path(run.manifest.cwd) if run.manifest.cwd else None
        loaded = reload_recipe(before, newest_resolved(run.dir), text, overrides=asked.overrides, cwd=cwd)
    refuse_hidden(loaded.resolved["recipe"], str(loaded.path))
    loaded, warnings = settle_for_run(keep_settled(loaded, before), run.dir.parent)
    sources, validation = open_sources(loaded.recipe)
    records, texts = records_of(sources, validation), texts_of(sources)
    changes = compare_recipes(before["recipe"], loaded, Path(run.manifest.cwd or "."), HIDDEN)
    if checkpoint is not None:
        changes = [_fitted(change, old, loaded.recipe) for change in changes]
    changes = _without_adapter(changes, old, loaded.recipe)
    changes += content_changes(run, records, texts, changes)
    return ResumePlan(run, checkpoint, loaded, tuple(changes), records, texts, asked.accept, tuple(warnings))


def _fitted(change: Change, old: Recipe, new: Recipe) -> Change:
    """The change, refused when it needs a critic that the checkpoint has not."""
    if old.kind != "rl" or new.kind != "rl" or change.what not in ("algo.name", "algo.advantage"):
        return change
    if algorithm_of(new.algo).needs_critic and not algorithm_of(old.algo).needs_critic:
        unfit = "the checkpoint has no critic: start a new run from the weights, --set model.path=RUN"
        return replace(change, unfit=unfit)
    return change


def _without_adapter(changes: Sequence[Change], old: Recipe, new: Recipe) -> list[Change]:
    """Return the changes; all keys of an adapter for a run that trains all weights are one change, and refused."""
    whole = [c for c in changes if c.what == "lora" or c.what.startswith("lora.")]
    if not whole or old.lora is not None or new.lora is None:
        return list(changes)
    unfit = "that run trains all weights and has no adapter: start a new run from it, --set model.path=RUN"
    one = replace(whole[0], what="lora", old=None, new=f"rank {new.lora.rank}", unfit=unfit)
    return [one if c is whole[0] else c for c in changes if c not in whole[1:]]


def _same_kind(run: Run, kind: str, option: str) -> None:
    is_kind = run.manifest.kind
    if is_kind != kind:
        command = COMMANDS.get(is_kind)
        hint = (
            f"vlmrl {command} {option}; or a new run from its weights: --set model.path={run.id}" if command else None
        )
        told_kind = f"vlmrl {command}" if command else is_kind
        raise StoreError(
            f"run {run.id} was made by `{told_kind}`, not `vlmrl {COMMANDS[kind]}`", where=str(run.dir), hint=hint
        )


def _something_left(plan: ResumePlan) -> None:
    """Raise when the run would end before its first step."""
    run, steps = plan.run, plan.loaded.recipe.train.steps
    keys = {c.what for c in plan.changes}
    done = run.status == "done"
    over = plan.step >= steps or not keys & LENGTH_KEYS if done else "train.steps" in keys and plan.step > steps
    if not over:
        return
    ended = [e for e in run.metrics("event") if e.get("event") == "ended"]
    reason = str(ended[-1].get("reason")) if ended and done else ""
    finished = f"has done all its {plan.step} steps" if reason == ALL_DONE else f"is done{reason and f': {reason}'}"
    state = finished if done else f"is at step {plan.step}, and train.steps = {steps}"
    command = f"vlmrl {COMMANDS[run.manifest.kind]}"
    raise StoreError(
        f"run {run.id} {state}: there is nothing to resume", where=str(run.dir),
        hint=f"more steps: {command} --resume {run.id} --set train.steps={more_steps(max(plan.step, steps))}; "
             f"or a new run from its weights: --set model.path={run.id}",
    )  # fmt: skip


def more_steps(steps: int) -> int:
    """Return a round number of steps to go on to: twice as many, rounded up to its first digit.

    Example: 14 -> 30; 100 -> 200; 0 -> 1.
    """
    twice = max(1, 2 * steps)
    unit = 10 ** (len(str(twice)) - 1)
    return -(-twice // unit) * unit


def _recorded(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Changes as the manifest keeps them, secrets hidden."""
    records = [c.record() for c in changes]
    return [r | {side: redact_value(r[side], r["what"]) for side in ("old", "new")} for r in records]


def reopen_run(root: Path, plan: ResumePlan, argv: Sequence[str]) -> tuple[Run, Recipe, Path | None]:
    """A run taken for a new attempt, as planned: (run, recipe, the checkpoint to go on from).

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
    """A new run that goes on from the whole of a checkpoint of another: (run, recipe, its copy of the checkpoint)."""
    parent, loaded = plan.run, plan.loaded
    assert plan.checkpoint is not None
    run = create_run(
        root, kind=parent.manifest.kind, recipe_name=loaded.path.stem if plan.recipe_given else parent.manifest.recipe,
        recipe_text=loaded.text, resolved=loaded.resolved, argv=argv, seeds={"run": loaded.recipe.train.seed},
        name=labels.name, tags=labels.tags, note=labels.note, threads=usable_threads(), texts=plan.texts,
        fork=plan.fork, parent={"run": parent.id, "checkpoint": plan.checkpoint.name, "step": plan.step},
        **plan.records,
    )  # fmt: skip
    run.event(plan.step, "forked", parent=parent.id, checkpoint=plan.checkpoint.name)
    return run, loaded.recipe, run.checkpoint_dirs()[-1]
