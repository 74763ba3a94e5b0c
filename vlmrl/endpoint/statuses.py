"""HTTP statuses of an endpoint's answers: which error each one is, and the pause that an answer wishes."""

from __future__ import annotations

from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from vlmrl.endpoint.failures import EndpointDown, EndpointError, EndpointRejects, RequestRefused
from vlmrl.redaction.redact import excerpt

TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP statuses after which the same request may succeed: overload, and failures of a server or a gateway."""
REJECTS_ALL = frozenset({401, 402, 403, 404, 405, 407})
"""HTTP statuses that every request would get: key, payment, permission, address or model."""
MOST_PLACE_CHARS = 300


def failure_of(
    status: int, words: str, *, where: str, hint: str, location: str = "", retry_after: float = 0.0
) -> EndpointError:
    """Return the error for an answer whose HTTP status is not a success.

    Args:
        words: the endpoint's message, without the key.
        where: address of the endpoint.
        hint: what to check if every request would get this status.
        location: address to which it redirects.
        retry_after: pause in seconds that the answer wishes.
    """
    words = f"HTTP {status}: {words}"
    if status in TRY_AGAIN or status >= 500:
        failure: EndpointError = EndpointDown(f"the endpoint fails: {words}", where=where)
        failure.retry_after = retry_after
    elif 300 <= status < 400:
        place = excerpt(location, MOST_PLACE_CHARS) or "nowhere"
        failure = EndpointRejects(
            f"the endpoint redirects to {place}, which is not followed: it would get the key and the images",
            where=where,
            hint="give the final address, if you trust it",
        )
    elif status in REJECTS_ALL:
        failure = EndpointRejects(f"the endpoint rejects the request: {words}", where=where, hint=hint)
    else:
        failure = RequestRefused(f"the endpoint refuses this request: {words}", where=where)
    failure.status = status
    return failure


def what_to_check(key_env: str | None, model: str) -> str:
    """Return the hint for a rejection. `key_env`: the environment variable of the key; None = no key was sent."""
    key = f"the key in ${key_env}" if key_env else "whether it needs a key"
    return f"check {key}, the model's name `{model}` and the address"


def retry_seconds(header: str | None, now: datetime) -> float:
    """Return the pause that a Retry-After header wishes, in seconds; 0 if there is none or it cannot be read."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = parsedate_to_datetime(header)
        except (ValueError, TypeError, IndexError, OverflowError):
            return 0.0
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        seconds = (moment - now).total_seconds()
    return seconds if 0 < seconds < 1e9 else 0.0
