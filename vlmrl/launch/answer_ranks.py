"""`--gpus` of the commands that answer rows: start one process per GPU, with the same command without `--gpus`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from vlmrl.errors import Interruption
from vlmrl.launch.agent import Job, launch
from vlmrl.launch.gpu_assignment import place
from vlmrl.launch.hub_fetch import offline_environment
from vlmrl.launch.rank_watch import Ending
from vlmrl.launch.request import GenerateRequest
from vlmrl.launch.train_ranks import describe_processes, describe_threads
from vlmrl.recipe.schema import Recipe

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
        recipe: recipe without open values (setup/open_values.py).
        root: folder of the runs.
    Returns: as `launch`. None = no process was started: the caller must do the work in its own process.
    Raises: LaunchError for GPUs that do not exist.
    """
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
