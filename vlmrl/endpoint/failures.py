"""Errors of an endpoint. Each kind says who can repair it, and whether to try again."""

from __future__ import annotations

from vlmrl.errors import VlmrlError


class EndpointError(VlmrlError):
    """Request to an endpoint that gave no answer."""


class EndpointDown(EndpointError):
    """Outage: the endpoint does not answer, is overloaded or fails, after all attempts. It is nobody's mistake."""


class EndpointRejects(EndpointError):
    """Rejection that every request would meet: a wrong key, model or address."""


class RequestRefused(EndpointError):
    """Refusal of one request: the endpoint works, but does not answer this prompt."""


class BrokenAnswer(EndpointError):
    """Answer that is not whole or cannot be read, in all attempts. A response at its token limit is not broken."""
