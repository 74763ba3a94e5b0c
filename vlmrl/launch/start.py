"""`--gpus` of the commands: prepare the run, start one process per GPU with the same command, wait, record the end.

For training, the recipe is checked, or a resume or fork planned; then the run's folder is created or reopened. Commands
that answer rows evaluate or generate in each process, and the run with the results is found. Large modules are imported
inside the functions, so that a wrong name of a recipe or run is reported before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.dist.world import CHOICES_VARIABLE, OPEN_PORTS, launched
from vlmrl.errors import Interruption, LaunchError, Problem, StoreError
from vlmrl.launch.gpu_assignment import Placement, place
from vlmrl.launch.request import EvalRequest, GenerateRequest, TrainRequest
from vlmrl.process import DEBUG_RANK
from vlmrl.recipe.load import REMOTE_CODE, LoadedRecipe
from vlmrl.recipe.schema import Recipe
from vlmrl.setup.checked_recipe import check_loaded, load_checked, parse_target
from vlmrl.store.checkpoints import HF
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.listing import command_line
from vlmrl.store.manifest import read_manifest, record_end
from vlmrl.store.removal import set_aside
from vlmrl.train.resume import ResumePlan, ResumeRequest, changes_in_words, notes_of, plan_fork, plan_resume
from vlmrl.untrusted import number_of, plural

if TYPE_CHECKING:
    from vlmrl.launch.ranks import Ending, Job
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
    Returns: (run, its recipe, checkpoint to start from; None at step 0).
    """
    from vlmrl.setup.auto_choice import choice_texts, choices_of
    from vlmrl.setup.model_origin import describe_origin
    from vlmrl.setup.run_records import Labels, start_run
    from vlmrl.store.listing import namesake_warning
    from vlmrl.train.resume import fork_run, reopen_run

    if not launched():  # else the launcher has already printed the changes
        for line in describe_changes(plan):
            say(line)
    labels = Labels(request.name, request.tags, request.note)
    if isinstance(plan, LoadedRecipe):
        run, recipe, checkpoint = start_run(plan, root, argv, labels), plan.recipe, None
        say(f"run {run.id}\n{describe_size(recipe)}")
        for text in choice_texts(choices_of(plan)):
            say(f"chosen: {text}")
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
        shape = f"{number_of(t.steps, 'step')} x {number_of(t.rows_per_step, 'row')}"
        return f"{shape} = {number_of(t.steps * t.rows_per_step, 'example')}"
    responses = t.steps * r.prompts_per_step * r.samples_per_prompt
    updates = f", {number_of(t.updates_per_step, 'update')} per step"
    factors = (t.steps, "step"), (r.prompts_per_step, "prompt"), (r.samples_per_prompt, "sample")
    return f"{' x '.join(number_of(*one) for one in factors)} = {number_of(responses, 'response')}{updates}"


def describe_other_processes(run: Run) -> str:
    """Return a note if a resumed run has a different number of processes than before (this is allowed); else ""."""
    if len(run.manifest.attempts) < 2:
        return ""
    before, now = (attempt.processes for attempt in run.manifest.attempts[-2:])
    if before == now:
        return ""
    processes = "1 process" if now == 1 else f"{now} processes"
    return f"note: this attempt has {processes}, the one before had {before}; --gpus {before} keeps that number"


@dataclass(frozen=True)
class RankPlan:
    """Processes of a run on this machine.

    Args:
        run_dir: folder of the run that is resumed; None for a new run.
    """

    job: Job
    placement: Placement
    run_dir: Path | None

    @property
    def is_one_process(self) -> bool:
        """Return whether the run has a single process on all machines. Then the calling process trains by itself."""
        return self.job.ranks * self.job.nnodes == 1


def plan_ranks(request: TrainRequest, plan: Plan, root: Path) -> RankPlan:
    """Choose GPUs and environment of the ranks. Nothing is started.

    Raises: LaunchError for GPUs or machines that do not fit; StoreError if another process is writing the run.
    """
    from vlmrl.launch.hub_fetch import offline_environment
    from vlmrl.launch.ranks import Job
    from vlmrl.setup.auto_choice import choices_of

    machines, recipe, run_dir = request.machines, recipe_of(plan), None
    if request.resume is not None and not isinstance(plan, LoadedRecipe):
        run_dir = plan.run.dir
        if plan.run.status == "running":
            raise StoreError(f"run {plan.run.id} is being written", where=str(run_dir), hint="wait for it to end")
    rollout = recipe.rollout
    engines, parts = (rollout.engine_gpus, rollout.tensor_parallel) if request.kind == "rl" else (0, 1)
    if engines and machines.nnodes > 1:
        message = f"rollout.engine_gpus = {engines} works on one machine only"
        raise LaunchError(message, hint="leave it out: each GPU then trains and generates")
    placement = place(machines.gpus or "1", engines, parts)
    env = {**placement.env, **offline_environment(recipe, root)}
    choices = choices_of(plan if isinstance(plan, LoadedRecipe) else plan.loaded)
    if choices and not request.dry_run:  # processes started by torchrun make the same choices themselves
        env[CHOICES_VARIABLE] = json.dumps(choices)
    job = Job(
        command=("-m", "vlmrl", *request.rank_words()),
        argv=("vlmrl", *request.argv),
        ranks=placement.ranks,
        nnodes=machines.nnodes,
        node_rank=machines.node_rank,
        endpoint=machines.endpoint,
        env=env | _debugging(machines.debug_rank, placement.ranks),
        timeout_seconds=recipe.parallel.timeout_seconds,
    )
    return RankPlan(job, placement, run_dir)


def run_ranks(request: TrainRequest, ranks: RankPlan, root: Path, say: Callable[[str], None]) -> int:
    """Start the ranks, wait for them, record and print how the run ended, and return the exit code."""
    from vlmrl.launch.ranks import EXPLAINED, launch_twice

    job = ranks.job
    say(_describe(request, ranks))
    if job.nnodes > 1:
        say(f"{OPEN_PORTS.message}: {OPEN_PORTS.hint}")

    def again(run_dir: Path) -> Job:
        words = request.resume_words(run_dir.name, root)
        argv = ("vlmrl", *words, *request.machines.words)
        return replace(job, command=("-m", "vlmrl", *words), argv=argv)

    ending, run_dir = launch_twice(job, again, say)
    if ending.code and run_dir is not None:
        is_cause_known = ending.code in EXPLAINED or job.nnodes == 1  # else another machine may have the cause
        status = "interrupted" if ending.code == 130 else "failed"
        record_end(run_dir, status if job.node_rank == 0 else None, ending.reason if is_cause_known else "")
    run_dir = run_dir or ranks.run_dir
    if ending.message:
        say(ending.message)
    if ending.code and run_dir is not None and job.nnodes == 1 and (line := set_aside(run_dir)):
        say(line)
        return ending.code
    if ending.code == 1 and job.nnodes > 1:
        say("the cause may be an earlier failure on another machine: see the terminals of the other machines")
    if ending.code and run_dir is not None:
        say(f"continue from the last checkpoint with: {resume_command(request, run_dir)}")
    return ending.code


def resume_command(request: TrainRequest, run_dir: Path) -> str:
    """Return the command that resumes a run on the same machines.

    It repeats the consent to a model's own code, which the user who reads it has just given, as a resume asks for it.
    """
    own_code = read_resolved(run_dir)["recipe"].get("model", {}).get("trust_remote_code", False)
    consent = ("--set", f"{REMOTE_CODE}=true") if own_code else ()
    words = (request.command, "--resume")
    return command_line(words, run_dir, read_manifest(run_dir).name, *request.machines.words, *consent)


def describe_processes(placement: Placement) -> str:
    """Describe number and kind of the processes, such as `2 GPUs` or `1 CPU process`."""
    on_cpu, several = placement.devices is None, placement.ranks != 1
    processes = f"CPU process{'es' if several else ''}" if on_cpu else f"GPU{'s' if several else ''}"
    return f"{placement.ranks} {processes}"


def describe_threads(placement: Placement) -> str:
    return f"{placement.threads} thread{plural(placement.threads)} each"


def _describe(request: TrainRequest, ranks: RankPlan) -> str:
    job, placement, debug_rank = ranks.job, ranks.placement, request.machines.debug_rank
    machine = f" on machine {job.node_rank} of {job.nnodes}" if job.nnodes > 1 else ""
    engines = f", {len(placement.engines)} more to generate" if placement.engines else ""
    terminal = f"; rank {debug_rank} has this terminal" if debug_rank is not None else ""
    return f"{describe_processes(placement)}{machine}, {describe_threads(placement)}{engines}{terminal}"


def _debugging(rank: int | None, ranks: int) -> dict[str, str]:
    """Return the environment variable with the rank to debug; {} if no rank is debugged.

    Raises: LaunchError if the rank does not exist.
    """
    if rank is None:
        return {}
    if rank >= ranks:
        raise LaunchError(
            f"--debug-rank {rank} does not exist: there are {ranks} processes", hint="ranks are numbered from 0"
        )
    return {DEBUG_RANK: str(rank)}


RESPONSES_KEPT = "the responses so far are kept, and the same command goes on"


def answer_on_ranks(
    gpus: str, words: Sequence[str], argv: Sequence[str], recipe: Recipe, root: Path, say: Callable[[str], None]
) -> tuple[Ending, Path | None] | None:
    """Run a command in several processes; for `--gpus 1`, only set the environment of this one.

    An engine in parts (`rollout.tensor_parallel`) is shared by as many processes.

    Args:
        gpus: value of `--gpus`.
        words: words of every process's command after `vlmrl`.
        argv: words that the user typed after `vlmrl`.
        recipe: recipe without open values (setup/auto_choice.py).
        root: folder of the runs.
    Returns: as `launch`. None = no process was started: the caller must do the work in its own process.
    Raises: LaunchError for GPUs that do not exist.
    """
    from vlmrl.launch.hub_fetch import offline_environment
    from vlmrl.launch.ranks import Job, launch

    parts = recipe.rollout.tensor_parallel if recipe.rollout.engine == "vllm" else 1
    placement = place(gpus, 0, parts)
    env = {**placement.env, **offline_environment(recipe, root)}
    if placement.ranks == 1:
        os.environ.update(env)
        return None
    say(f"{describe_processes(placement)}, {describe_threads(placement)}")
    job = Job(
        command=("-m", "vlmrl", *words),
        argv=("vlmrl", *argv),
        ranks=placement.ranks,
        env=env,
        timeout_seconds=recipe.parallel.timeout_seconds,
    )
    return launch(job)


def generate_on_ranks(
    gpus: str, request: GenerateRequest, recipe: Recipe, root: Path, say: Callable[[str], None]
) -> int | None:
    """Generate in several processes, and return the exit code. None = the caller must generate in its own process.

    Raises: as `answer_on_ranks`; Interruption for Ctrl-C.
    """
    launched = answer_on_ranks(gpus, request.rank_words(), request.argv, recipe, root, say)
    if launched is None:
        return None
    ending, _ = launched
    if ending.code == 130:
        raise Interruption("generate", RESPONSES_KEPT)
    if ending.code:
        say(ending.message)
        say(RESPONSES_KEPT)
    return ending.code


NOTHING_KEPT = "the unfinished evaluation left no results"


@dataclass(frozen=True)
class EvalEnding:
    """End of an evaluation in several processes.

    Args:
        code: exit code, 0 = done.
        run_dir: folder of the run with the results. None with code 0 = no process was started: the caller must evaluate
            in its own process.
    """

    code: int
    run_dir: Path | None


def evaluate_on_ranks(
    gpus: str, request: EvalRequest, recipe: Recipe, run_dir: Path | None, root: Path, say: Callable[[str], None]
) -> EvalEnding:
    """Evaluate in several processes; for `--gpus 1`, only set the environment of this one.

    Args:
        gpus: value of `--gpus`.
        recipe: recipe without open values (setup/auto_choice.py).
        run_dir: folder of the run that is evaluated; None = the processes create a run.
        root: folder of the runs.
    Raises: LaunchError for GPUs that do not exist; Interruption for Ctrl-C.
    """
    launched = answer_on_ranks(gpus, request.rank_words(), request.argv, recipe, root, say)
    if launched is None:
        return EvalEnding(0, None)
    ending, new_run_dir = launched
    if not ending.code:
        return EvalEnding(0, run_dir or new_run_dir)
    if run_dir is None and new_run_dir is not None:
        record_end(new_run_dir, "interrupted" if ending.code == 130 else "failed", ending.reason)
    if ending.code == 130:
        raise Interruption("eval", NOTHING_KEPT)
    say(ending.message)
    say(NOTHING_KEPT)
    return EvalEnding(ending.code, None)
