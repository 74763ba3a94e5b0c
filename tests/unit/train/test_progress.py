"""What a run goes on with of a checkpoint's counters: all of it, or what a fork or a change leaves of it."""

from __future__ import annotations

from vlmrl.store.manifest import Attempt, Manifest
from vlmrl.train.journal import Progress

SAVED = Progress(4, 2, 0.5, 1, 4, 60, 3, 12.5, 0.07)


def manifest(*attempts: tuple[int, list[list[str]]], fork: bool = False) -> Manifest:
    """A manifest whose attempts began at these steps, with changes that make these things begin anew."""
    made = tuple(
        Attempt(number, "", "host", 1, step, changes=tuple({"what": "x", "restarts": r} for r in restarts))
        for number, (step, restarts) in enumerate(attempts, 1)
    )
    return Manifest("id", "rl", "recipe", "", origin={} if fork else None, attempts=made)


def test_a_plain_resume_goes_on_with_everything():
    assert SAVED.begun_anew(manifest((0, []), (4, []))) == SAVED
    assert SAVED.begun_anew(manifest((0, []), (4, [[]]))) == SAVED


def test_a_change_of_what_is_measured_forgets_the_best_and_validates_anew():
    found = SAVED.begun_anew(manifest((0, []), (4, [[], ["best"]])))
    assert (found.best_step, found.best_value, found.stale, found.validated) == (None, None, 0, -1)
    assert (found.step, found.samples, found.reward_errors, found.seconds, found.kl_coef) == (4, 60, 3, 12.5, 0.07)


def test_a_changed_kl_forgets_what_was_steered():
    assert SAVED.begun_anew(manifest((0, []), (4, [["kl"]]))).kl_coef is None


def test_a_change_holds_for_the_checkpoint_it_was_made_on_also_when_its_attempt_died_and_not_for_later_ones():
    died = manifest((0, []), (4, [["best"]]), (4, []))
    assert SAVED.begun_anew(died).best_step is None
    later = manifest((0, []), (2, [["best", "kl"]]), (4, []))
    assert SAVED.begun_anew(later) == SAVED


def test_a_fork_counts_its_own_best_and_seconds_and_goes_on_with_the_rest():
    found = SAVED.begun_anew(manifest((4, []), fork=True))
    assert found == Progress(4, None, None, 0, -1, 60, 3, 0.0, 0.07)
    assert Progress(6, 6, 0.7, 0, 6, 90, 3, 5.0).begun_anew(manifest((4, []), (6, []), fork=True)).best_step == 6
