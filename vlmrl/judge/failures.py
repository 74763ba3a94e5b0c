"""Errors of a judge. None of them is a score: a request without a verdict is left out, or asked again."""

from __future__ import annotations

from vlmrl.errors import RewardError, RewardUnavailable, VlmrlError


class InvalidVerdict(VlmrlError):
    """Answer of a judge that is not exactly one verdict of the rubric's schema."""


class JudgeDown(RewardUnavailable):
    """Outage: the judge does not answer, is overloaded or fails. The same request may get a verdict later."""


class NoVerdict(RewardUnavailable):
    """Request that gets no verdict although the judge works: it refuses the request, or its answers are invalid.

    Asking again is no use.
    """

    is_final = True


class NotInCache(RewardUnavailable):
    """Request that a judge without a network cannot answer, because its verdict is not in the cache."""

    is_final = True


class BudgetSpent(RewardUnavailable):
    """End of the budget: the next call could exceed `max_calls` or `max_cost`, so it was not sent."""

    is_final = True
    ends_run = True


class JudgeRejected(RewardError):
    """Mistake in the settings that every request meets: a wrong key, model or address, or a model without schemas."""
