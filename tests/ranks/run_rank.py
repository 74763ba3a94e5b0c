"""One process of whole runs: `python run_rank.py JOBS`, with torchrun's environment, or alone without it.

JOBS is a JSON file, a list of what `job` makes.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from processes import run_ranks
from small_runs import Ears

from vlmrl.dist.world import World, join_world
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.setup.run_records import Labels, start_run
from vlmrl.train.resume import ResumeRequest, plan_resume, reopen_run
from vlmrl.train.start import run_session, share_run


def job(
    place: Path, root: str, *overrides: str, kind: str = "rl", stop_at: int | None = None, resume: bool = False
) -> dict:
    """A run of `place`'s recipe of that kind in `place/root`, trained to its end, or to a step, where the last process
    alone is interrupted. With `resume` the run there is gone on with, with these changes.
    """
    recipe = str(place / f"{kind}.toml")
    return {
        "root": str(place / root),
        "recipe": recipe,
        "kind": kind,
        "overrides": overrides,
        "stop_at": stop_at,
        "resume": resume,
    }


def run_jobs(size: int, jobs: Sequence[dict], folder: Path, new: bool = False) -> None:
    """Do these one after the other, with so many processes; `new` as for `run_ranks`."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_ranks(size, Path(__file__), path, new=new)


def train(job: dict, world: World) -> None:
    root = Path(job["root"])

    def make():
        if job["resume"]:
            return reopen_run(
                root, plan_resume(root, ResumeRequest("last", job["kind"], None, job["overrides"])), ["vlmrl"]
            )
        loaded = load_recipe(job["recipe"], overrides=job["overrides"], kind=job["kind"])
        loaded, _ = fill_for_run(loaded, root)
        return start_run(loaded, root, ["vlmrl"], Labels()), loaded.recipe, None

    run, recipe, checkpoint = share_run(world, make)
    interrupts = world.rank == world.size - 1
    status = run_session(run, recipe, root, Ears(job["stop_at"] if interrupts else None), checkpoint, world)
    assert status == ("interrupted" if job["stop_at"] else "done"), status


if __name__ == "__main__":
    gc.freeze()  # as in tests/conftest.py: a run collects garbage
    with join_world("cpu", timeout_seconds=60) as everyone:
        for one in json.loads(Path(sys.argv[1]).read_text()):
            train(one, everyone)
