"""One process of whole runs: `python run_rank.py JOBS`, with torchrun's environment, or alone without it.

JOBS is a JSON file: a list of {root, recipe, kind, overrides, stop_at, resume}. A job trains a run in `root` to its
end, or to step `stop_at`, where the last process alone is interrupted; with `resume` the run there is gone on with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from vlmrl.dist.world import World, join_world
from vlmrl.recipe.load import load_recipe
from vlmrl.train.resume import Request, plan_resume
from vlmrl.train.start import Labels, reopen_run, run_session, share_run, start_run


class Watcher:
    """Hears nothing; presses Ctrl-C when a step is done."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at

    def message(self, text: str) -> None:
        pass

    def generated(self, done: int, total: int) -> None:
        pass

    def step(self, step: int, total: int, metrics) -> None:
        if step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    def validation(self, step: int, summary, best: bool) -> None:
        pass

    def sample(self, step: int, group) -> None:
        pass


def train(job: dict, world: World) -> None:
    root = Path(job["root"])

    def make():
        if job.get("resume"):
            return reopen_run(root, plan_resume(root, Request("last", job["kind"])), ["vlmrl"])
        loaded = load_recipe(job["recipe"], overrides=job["overrides"], kind=job["kind"])
        return start_run(loaded, root, ["vlmrl"], Labels()), loaded.recipe, None

    run, recipe, checkpoint = share_run(world, make)
    interrupts = world.rank == world.size - 1
    status = run_session(run, recipe, root, Watcher(job.get("stop_at") if interrupts else None), checkpoint, world)
    assert status == ("interrupted" if job.get("stop_at") else "done"), status


if __name__ == "__main__":
    with join_world("cpu", timeout_seconds=60) as everyone:
        for one in json.loads(Path(sys.argv[1]).read_text()):
            train(one, everyone)
