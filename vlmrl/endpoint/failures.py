"""Errors of an endpoint. Each kind says who can repair it, and whether to try again."""

from __future__ import annotations

from vlmrl.errors import VlmrlError

TOO_MANY = 429


class EndpointError(VlmrlError):
    """Request to an endpoint that gave no answer."""

    status: int = 0
    """HTTP status of the answer; 0 = there was none, or it is not the reason."""
    retry_after: float = 0.0
    """Pause in seconds that the endpoint wishes before the next request; 0 = it says nothing."""
    may_be_charged: bool = False
    """true = the endpoint may have worked on the request: it was sent, and no error status came back."""

    @property
    def is_busy(self) -> bool:
        """Whether the endpoint works and has too much to do at the moment."""
        return self.status == TOO_MANY


class EndpointDown(EndpointError):
    """Outage: the endpoint does not answer, is overloaded or fails, after all attempts. It is nobody's mistake."""


class EndpointRejects(EndpointError):
    """Rejection that every request would meet: a wrong key, model or address."""


class RequestRefused(EndpointError):
    """Refusal of one request: the endpoint works, but does not answer this prompt."""


class BrokenAnswer(EndpointError):
    """Answer that is not whole or cannot be read, in all attempts. A response at its token limit is not broken."""

    may_be_charged = True
