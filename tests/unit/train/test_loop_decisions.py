"""When a run validates, saves and stops."""

from __future__ import annotations

import io
import math
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vlmrl.cli.progress import ConsoleWatcher
from vlmrl.dist.world import ALONE
from vlmrl.recipe.schema import Checkpoint, Eval, Train
from vlmrl.train import loop
from vlmrl.train.journal import Progress
from vlmrl.train.loop import StopRequest, catch_interrupt, stop_reason
from vlmrl.train.session import Saver
from vlmrl.train.validation import _count


def session(step: int = 3, *, train=None, evaluation=None, checkpoint=None, seconds: float = 0.0, **progress):
    recipe = SimpleNamespace(
        train=Train(steps=10, **(train or {})),
        eval=Eval(**(evaluation or {})),
        checkpoint=Checkpoint(**(checkpoint or {})),
    )
    journal = SimpleNamespace(progress=Progress(step=step, **progress), seconds=seconds, world=ALONE)
    return SimpleNamespace(recipe=recipe, journal=journal, saver=Saver(), feed=SimpleNamespace(training_rows=12))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (session(), None),
        (session(9), None),
        (session(10), "all steps done"),
        (session(11), "all steps done"),
        (session(train={"max_seconds": 60}, seconds=59.9), None),
        (session(train={"max_seconds": 60}, seconds=60.0), "max_seconds"),
        (session(train={"stop_above": 0.5}), None),
        (session(train={"stop_above": 0.5}, best_step=3, best_value=0.5), "reached"),
        (session(train={"stop_above": 0.5}, best_step=3, best_value=0.49), None),
        (session(train={"stop_above": 0.5}, evaluation={"goal": "min"}, best_step=3, best_value=0.6), None),
        (session(train={"stop_above": 0.5}, evaluation={"goal": "min"}, best_step=3, best_value=0.4), "reached"),
        (session(evaluation={"patience": 2}, stale=1), None),
        (session(evaluation={"patience": 2}, stale=2), "not improved"),
        (session(stale=99), None),
    ],
)
def test_reasons_to_stop(given, expected):
    reason = stop_reason(given.journal, given.recipe, StopRequest())
    assert (reason is None) if expected is None else (expected in (reason or ""))


def test_a_request_stops_an_unfinished_run_and_a_finished_run_is_finished():
    for step, reason in ((3, "interrupted"), (10, "all steps done")):
        asked = session(step)
        assert stop_reason(asked.journal, asked.recipe, StopRequest(is_set=True)) == reason


@pytest.mark.parametrize(
    ("goal", "before", "value", "best"),
    [
        ("max", None, 0.1, True),
        ("max", 0.1, 0.2, True),
        ("max", 0.2, 0.2, False),
        ("max", 0.2, 0.1, False),
        ("min", None, 0.1, True),
        ("min", 0.2, 0.1, True),
        ("min", 0.1, 0.2, False),
        ("max", None, math.nan, False),
        ("min", 0.1, math.nan, False),
    ],
)
def test_what_counts_as_the_best_so_far(goal, before, value, best):
    progress = Progress(step=3, best_value=before, best_step=None if before is None else 2, stale=1)
    assert progress.count_validation(value, goal) is best
    assert (progress.validated, progress.stale) == (3, 0 if best else 2)
    assert (progress.best_step, progress.best_value) == (
        (3, value) if best else (None if before is None else 2, before)
    )


@pytest.mark.parametrize(
    ("step", "evaluation", "checkpoint", "best_step", "validated", "saved"),
    [
        (3, {"every_steps": 3}, {"every_steps": 0}, None, True, False),
        (4, {"every_steps": 3}, {"every_steps": 0}, None, False, False),
        (4, {"every_steps": 0}, {"every_steps": 4}, None, False, True),
        (6, {"every_steps": 3}, {"every_steps": 0}, 6, True, True),  # a new best is always saved
        (6, {"every_steps": 3}, {"every_steps": 0, "keep_best": False}, 6, True, False),
        (7, {"every_steps": 3}, {"every_steps": 0}, 6, False, False),
    ],
)
def test_after_a_step(monkeypatch, step, evaluation, checkpoint, best_step, validated, saved):
    done: list[str] = []
    monkeypatch.setattr(loop, "validate", lambda s, g: done.append("validate"))
    monkeypatch.setattr(loop, "save", lambda s: done.append("save"))
    loop.after_step(session(step, evaluation=evaluation, checkpoint=checkpoint, best_step=best_step), None)  # type: ignore[arg-type]
    assert done == ["validate"] * validated + ["save"] * saved


def test_the_first_signal_asks_the_second_stops_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    heard: list[str] = []
    with pytest.raises(KeyboardInterrupt), catch_interrupt(heard.append) as request:
        assert not request.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.is_set and "saving" in heard[0]
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(("step", "best"), [(0, True), (2, False)])
def test_a_tie_is_won_by_the_trained_model_against_the_one_it_started_from_alone(step, best):
    assert Progress(step=3, best_step=step, best_value=0.5).count_validation(0.5, "max") is best


def test_a_tie_with_the_start_is_kept_but_not_shown_as_the_best_so_far():
    shown, kept = io.StringIO(), []
    journal = SimpleNamespace(
        progress=Progress(),
        watcher=ConsoleWatcher(shown),
        run=SimpleNamespace(set_best=lambda step, metric, value: kept.append(step)),
        log=lambda step, kind, metrics: None,
    )
    recipe = SimpleNamespace(eval=SimpleNamespace(every_epochs=None, goal="max", metric="reward"))
    for step, value in enumerate([0.0, 0.0, 0.0, 0.5]):
        journal.progress.step = step
        _count(cast(Any, journal), cast(Any, recipe), {"eval/reward": value}, value, 9)
    assert kept == [0, 1, 3]
    assert [line.endswith("(best so far)") for line in shown.getvalue().splitlines()] == [True, False, False, True]
