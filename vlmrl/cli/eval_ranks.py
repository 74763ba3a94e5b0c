"""`vlmrl eval --gpus`: start one process a GPU, which run the same command without it, and wait for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlmrl.cli.output import say
from vlmrl.cli.ranks import launch_options, without_launch_options
from vlmrl.errors import Interruption

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Recipe


def evaluate_on(gpus: str, recipe: Recipe, run_dir: Path | None, root: Path) -> Path | None:
    """Evaluate in several processes. Returns the run that the results are in; None when this process itself is to be
    the one: `--gpus 1`.

    Args:
        recipe: with nothing left open (setup/open_values.py).
        run_dir: the run that is evaluated; None = the processes make one.
    Raises: LaunchError for GPUs that are not there; typer.Exit with the code of the process that failed.
    """
    from vlmrl.launch.agent import Job, launch
    from vlmrl.launch.gpu_assignment import place
    from vlmrl.launch.hub_fetch import offline_environment
    from vlmrl.store.manifest import settle

    parts = recipe.rollout.tensor_parallel if recipe.rollout.engine == "vllm" else 1
    placement = place(gpus, 0, parts)
    env = {**placement.env, **offline_environment(recipe, root)}
    if placement.ranks == 1:
        os.environ.update(env)
        return None
    what = "CPU processes" if placement.devices is None else "GPUs"
    say(f"{placement.ranks} {what}, {placement.threads} thread{'s' if placement.threads != 1 else ''} each")
    command = ("-m", "vlmrl", *without_launch_options(sys.argv[1:]))
    job = Job(
        command=command, launch_words=launch_options(sys.argv[1:]), ranks=placement.ranks, env=env,
        timeout_seconds=recipe.parallel.timeout_seconds,
    )  # fmt: skip
    ending, made = launch(job)
    if not ending.code:
        return run_dir or made
    if run_dir is None and made is not None:
        settle(made, "interrupted" if ending.code == 130 else "failed", ending.reason)
    if ending.code == 130:
        raise Interruption("eval", "nothing of an unfinished evaluation was written")
    say(ending.message)
    say("nothing of an unfinished evaluation was written")
    raise typer.Exit(ending.code)
