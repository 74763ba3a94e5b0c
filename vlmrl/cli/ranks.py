"""`vlmrl train` and `vlmrl sft` with `--gpus`: check, start one process a card, wait, say how it ended."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlmrl.cli.output import emit, say

if TYPE_CHECKING:
    from vlmrl.cli.begin import Beginning
    from vlmrl.cli.sft import Machines
    from vlmrl.recipe.load import LoadedRecipe
    from vlmrl.train.resume import ResumePlan

LAUNCH_OPTIONS = {"--gpus": 1, "--nnodes": 1, "--node-rank": 1, "--rdzv-endpoint": 1, "--dry-run": 0,
                  "--debug-rank": 1}  # fmt: skip
"""Options that are the launcher's alone, with the number of words that follow each."""


def run_ranks(asked: Beginning, runs: Path | None, machines: Machines, as_json: bool) -> LoadedRecipe | ResumePlan:
    """Start the ranks and leave with their exit code. Returns only when this process itself is to be the one rank: what
    it is to train, checked.
    """
    from vlmrl.cli.begin import prepare, recipe_of, show_changes
    from vlmrl.cli.sft import resume_command
    from vlmrl.dist.rank_process import CHOICES_VARIABLE
    from vlmrl.errors import LaunchError, StoreError
    from vlmrl.launch.agent import Job, launch_twice, torchrun_line
    from vlmrl.launch.gpu_assignment import place
    from vlmrl.launch.hub_fetch import offline_environment
    from vlmrl.recipe.load import LoadedRecipe
    from vlmrl.setup.open_values import choices_of
    from vlmrl.store.layout import runs_root
    from vlmrl.store.manifest import settle

    root = runs_root(runs)
    ready = prepare(asked, root, machines.gpus)
    settings, known = recipe_of(ready), None
    if asked.resume is not None and not isinstance(ready, LoadedRecipe):
        known = ready.run.dir
        if ready.run.status == "running":
            raise StoreError(f"run {ready.run.id} is being written", where=str(known), hint="wait for it to end")
    rollout = settings.rollout
    engines, parts = (rollout.engine_gpus, rollout.tensor_parallel) if asked.kind == "rl" else (0, 1)
    if engines and machines.nnodes > 1:
        message = f"rollout.engine_gpus = {engines} is for one machine"
        raise LaunchError(message, hint="leave it out: each card does both")
    placement = place(machines.gpus or "1", engines, parts)
    env = {**placement.env, **offline_environment(settings, root)}
    chosen = choices_of(ready if isinstance(ready, LoadedRecipe) else ready.loaded)
    if chosen and not machines.dry_run:  # torchrun's processes choose for themselves, on the same machine
        env[CHOICES_VARIABLE] = json.dumps(chosen)
    env |= _debugging(machines.debug_rank, placement.ranks)
    job = Job(
        command=("-m", "vlmrl", *without_launch_options(sys.argv[1:])), launch_words=launch_options(sys.argv[1:]),
        ranks=placement.ranks, nnodes=machines.nnodes,
        node_rank=machines.node_rank, endpoint=machines.endpoint, env=env,
        timeout_seconds=settings.parallel.timeout_seconds,
    )  # fmt: skip
    alone = job.ranks * job.nnodes == 1
    if machines.dry_run or not alone:
        show_changes(ready)
    if machines.dry_run:
        line = torchrun_line(job)
        emit({"command": line}, as_json)
        if not as_json:
            print(line)
        raise typer.Exit
    if alone:
        os.environ.update(env)
        return ready
    what = ("CPU process" if job.ranks == 1 else "CPU processes") if placement.devices is None else "card(s)"
    nodes = f" on machine {job.node_rank} of {job.nnodes}" if job.nnodes > 1 else ""
    engines = f", {len(placement.engines)} more generate" if placement.engines else ""
    engines += f"; rank {machines.debug_rank} has this terminal" if machines.debug_rank is not None else ""
    say(f"{job.ranks} {what}{nodes}, {placement.threads} thread{'s' if placement.threads != 1 else ''} each{engines}")
    flags = [flag for flag in ("--quiet", "--json") if flag in sys.argv]
    ending, run_dir = launch_twice(
        job, lambda run: ("-m", "vlmrl", asked.command, "--resume", run.name, "--runs", str(root), *flags), say
    )
    if ending.code and run_dir is not None:
        told = ending.code == 2 or job.nnodes == 1  # elsewhere another machine may know better
        status = "interrupted" if ending.code == 130 else "failed"
        settle(run_dir, status if job.node_rank == 0 else None, ending.reason if told else "")
    run_dir = run_dir or known
    if ending.message:
        say(ending.message)
    if ending.code == 1 and job.nnodes > 1:
        say("another machine may have failed first, and this is what came of it here: see its terminal")
    if ending.code and run_dir is not None:
        say(f"go on from the last checkpoint with: {resume_command(asked.kind, run_dir, machines)}")
    raise typer.Exit(ending.code)


def _debugging(rank: int | None, ranks: int) -> dict[str, str]:
    """The variable that names the rank to debug. Raises: LaunchError where there is no such rank."""
    from vlmrl.errors import LaunchError
    from vlmrl.process import DEBUG_RANK

    if rank is None:
        return {}
    if rank >= ranks:
        raise LaunchError(f"--debug-rank {rank} of {ranks} processes", hint="from 0 on")
    return {DEBUG_RANK: str(rank)}


def without_launch_options(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line that every rank runs: all but the launcher's own options."""
    return _split_launch_options(argv)[0]


def launch_options(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the launcher's own options on a command line, each with its value: what the ranks do not get."""
    return tuple(_split_launch_options(argv)[1])


def _split_launch_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    launch: list[str] = []
    values = 0
    for word in argv:
        if values:
            values -= 1
            launch.append(word)
        elif word.split("=", 1)[0] in LAUNCH_OPTIONS:
            values = 0 if "=" in word else LAUNCH_OPTIONS[word]
            launch.append(word)
        else:
            kept.append(word)
    return kept, launch
