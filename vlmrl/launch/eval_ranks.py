"""`vlmrl eval --gpus`: evaluate in one process per GPU, and find the run with the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlmrl.errors import Interruption
from vlmrl.launch.answer_ranks import answer_on_ranks
from vlmrl.launch.request import EvalRequest
from vlmrl.recipe.schema import Recipe
from vlmrl.store.manifest import settle

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
        recipe: recipe without open values (setup/open_values.py).
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
        settle(new_run_dir, "interrupted" if ending.code == 130 else "failed", ending.reason)
    if ending.code == 130:
        raise Interruption("eval", NOTHING_KEPT)
    say(ending.message)
    say(NOTHING_KEPT)
    return EvalEnding(ending.code, None)
