"""Second tries of responses that hung, ended or filled their worker: each alone, then it earns `on_timeout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vlmrl.rewards.outage import OnOutage
from vlmrl.rewards.sandbox.outcomes import Failure, Outcome, Place, Result
from vlmrl.rewards.sandbox.pool import WorkerPool
from vlmrl.rewards.scoring_call import EARNED, Call, broke_worker, noted
from vlmrl.rewards.service_pool import ServicePool

LOST_IN_A_ROW = 8
"""Without `on_timeout`: after so many rows in a row that hung or ended their worker, the rest of the call is not
scored, to save hours."""
ALONE_FAILURES = 3
"""Without `on_timeout`: after a failed batch call each row is scored alone, until this many rows in a row have
failed."""
FIRST_TRIES = 8
"""With `on_timeout`, if the reward has never answered: number of rows, spread over the call, that are tried alone
before the others. If they get no answer either, the reward hangs by itself."""


def settle(pool: WorkerPool | ServicePool, call: Call, on_timeout: Mapping[str, float]) -> None:
    """Score again what must be scored alone, and set the final outcome of every input.

    If a service is down meanwhile, nothing is final: it is called again when the missing inputs have been asked.

    Args:
        pool: the workers; none of them has work.
        call: the call; its outcomes are changed in place.
        on_timeout: parts of the score of an input that breaks its worker twice; empty = it has no score.
    """
    bugs = {place for place, o in call.outcomes.items() if is_bug(o, on_timeout, call.on_outage)}
    if call.strict and bugs:
        # A bug raises; inputs that would be tried again do not matter.
        call.outcomes = {p: o for p, o in call.outcomes.items() if isinstance(o, Result) or p in bugs}
        return
    if pool.runs.batched and not call.ran_alone and _batch_failed(call):
        call.ran_alone = True
        lost = {place for place, outcome in call.outcomes.items() if broke_worker(outcome)}
        _run_alone(pool, call, rest_matters=bool(on_timeout))
        call.retried |= lost
    if on_timeout and not call.missing:
        _try_again(pool, call)
    if call.missing and not call.stopped:
        return
    if on_timeout and call.answered:
        parts: dict[str, float | None] = {**on_timeout}
        for place in call.retried:
            if isinstance(failure := call.outcomes[place], Failure) and failure.broke_worker:
                call.outcomes[place] = Result(parts, f"{failure.text}; {EARNED}", 0.0)
    rest = Failure("", f"not scored: the worker had been lost {LOST_IN_A_ROW} times in a row")
    call.outcomes = {place: call.outcomes.get(place) or call.missing.get(place, rest) for place in call.inputs}


def is_bug(outcome: Outcome, on_timeout: Mapping[str, float], on_outage: OnOutage) -> bool:
    """Return whether the reward failed.

    With `on_timeout`, a response that breaks its worker is not a failure of the reward. An outage is one only in calls
    that raise.
    """
    if not isinstance(outcome, Failure) or (on_timeout and outcome.broke_worker):
        return False
    return not outcome.is_outage or on_outage == "raise"


def _batch_failed(call: Call) -> bool:
    """Return whether the one call for all inputs raised or was lost."""
    raised = sum(isinstance(o, Failure) and not o.is_contract and not o.is_outage for o in call.outcomes.values())
    return 1 < len(call.inputs) == raised


def _try_again(pool: WorkerPool | ServicePool, call: Call) -> None:
    """Score inputs that broke their worker again, each alone in a new worker."""
    before = dict(call.outcomes)
    lost = [place for place, outcome in before.items() if broke_worker(outcome) and place not in call.retried]
    for places in _portions(call, lost):
        outcomes = pool.run([[place] for place in places], call.inputs, fresh=True)
        for place, outcome in outcomes.items():
            call.keep_outcome(place, noted(outcome, before[place]))
        call.retried |= outcomes.keys() - call.missing.keys()


def _run_alone(pool: WorkerPool | ServicePool, call: Call, *, rest_matters: bool) -> None:
    """Score each input in a call of its own, after the call for all of them failed.

    Args:
        rest_matters: all inputs are tried. False = after too many failures in a row, the others keep the failure of the
            call for all.
    """
    failed, places = 0, sorted(call.inputs)
    for portion in _portions(call, places) if rest_matters else [[place] for place in places]:
        outcomes = pool.run([[place] for place in portion], call.inputs)
        for place, outcome in outcomes.items():
            if not (isinstance(outcome, Failure) and outcome.is_outage):  # an outage says nothing about the reward
                failed = failed + 1 if isinstance(outcome, Failure) else 0
            if isinstance(outcome, Result):
                note = "; ".join(filter(None, (outcome.note, "scored alone: the batch call failed")))
                outcome = replace(outcome, note=note)
            call.keep_outcome(place, outcome)
            if place in call.missing:
                del call.outcomes[place]  # asked again as any other input
        if failed >= ALONE_FAILURES and not rest_matters:
            return


def _portions(call: Call, places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    """Yield the inputs to try: all at once; if the reward has never answered, a few of them and then the others."""
    first = [] if call.answered else places[:: max(1, len(places) // FIRST_TRIES)][:FIRST_TRIES]
    if first:
        yield first
    rest = [place for place in places if place not in first]
    if rest and (call.answered or call.missing):
        yield rest
