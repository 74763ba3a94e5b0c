"""`--gpus` of `vlmrl train` and `vlmrl sft`: start one process per GPU, wait for them, record how the run ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vlmrl.dist.world import CHOICES_VARIABLE, OPEN_PORTS
from vlmrl.errors import LaunchError, StoreError
from vlmrl.launch.agent import Job, launch_twice
from vlmrl.launch.gpu_assignment import Placement, place
from vlmrl.launch.hub_fetch import offline_environment
from vlmrl.launch.rank_watch import EXPLAINED
from vlmrl.launch.request import TrainRequest
from vlmrl.launch.train_plan import Plan, recipe_of
from vlmrl.process import DEBUG_RANK
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.setup.open_values import choices_of
from vlmrl.store.listing import command_line
from vlmrl.store.manifest import read_manifest, settle
from vlmrl.store.removal import set_aside


@dataclass(frozen=True)
class RankPlan:
    """Processes of a run on this machine.

    Args:
        job: command of the processes, and its environment.
        placement: GPUs of the processes.
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
        settle(run_dir, status if job.node_rank == 0 else None, ending.reason if is_cause_known else "")
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
    """Return the command that resumes a run on the same machines."""
    words = (request.command, "--resume")
    return command_line(words, run_dir, read_manifest(run_dir).name, *request.machines.words)


def describe_processes(placement: Placement) -> str:
    """Describe number and kind of the processes, such as `2 GPUs` or `1 CPU process`."""
    on_cpu, several = placement.devices is None, placement.ranks != 1
    processes = f"CPU process{'es' if several else ''}" if on_cpu else f"GPU{'s' if several else ''}"
    return f"{placement.ranks} {processes}"


def describe_threads(placement: Placement) -> str:
    return f"{placement.threads} thread{'s' if placement.threads != 1 else ''} each"


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
