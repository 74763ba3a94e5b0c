"""HTTP client with a limit of size for libraries that take one, such as the SDK of an endpoint.

It follows no redirect, asks for no compression and refuses it unasked, so that an answer cannot grow in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any
from urllib.request import getproxies

import httpx

from vlmrl.endpoint.failures import BrokenAnswer, EndpointDown, EndpointError, RequestRefused

PER_POOL = 4
"""Number of connections that a pool has on average."""
KEEP_SECONDS = 30.0
"""Time after which a connection that is not used is closed, in seconds."""
HTTP_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
"""Errors that a request of the client may raise; `failure_of_http` translates them."""


class _TooLargeError(httpx.ReadError):
    """Answer beyond the limit of size."""


class _CutError(httpx.ReadError):
    """Answer that ended, or was compressed, after its head had come."""


class _BoundedStream(httpx.AsyncByteStream):
    """Body of an answer, of at most `most_bytes` bytes."""

    def __init__(self, stream: httpx.AsyncByteStream, most_bytes: int) -> None:
        self._stream, self._left = stream, most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                self._left -= len(chunk)
                if self._left < 0:
                    raise _TooLargeError("the endpoint's answer is larger than the limit")
                yield chunk
        except _TooLargeError:
            raise
        except httpx.HTTPError as error:
            raise _CutError(str(error) or type(error).__name__) from None

    async def aclose(self) -> None:
        await self._stream.aclose()


def bounded_client(*, most_bytes: int, concurrency: int) -> httpx.AsyncClient:
    """Return a client for one event loop. It limits no time: bound each request as a whole with `asyncio.wait_for`.

    Args:
        most_bytes: maximum size of an answer's body.
        concurrency: number of connections that are kept for further requests.
    """

    async def bound(response: httpx.Response) -> None:
        if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise _CutError("the endpoint compresses its answer unasked")
        if isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _BoundedStream(response.stream, most_bytes)

    headers = {"accept-encoding": "identity"}
    return open_client(concurrency=concurrency, headers=headers, event_hooks={"response": [bound]})


def failure_of_http(error: BaseException, words: str, where: str) -> EndpointError:
    """Return the endpoint's error for one of HTTP_ERRORS. `words`: the text of the error, without the key."""
    if isinstance(error, _TooLargeError):
        failure: EndpointError = RequestRefused(words, where=where)
        failure.may_be_charged = True
    elif isinstance(error, _CutError):
        failure = BrokenAnswer(f"the endpoint's answer was cut: {words}", where=where)
    else:
        failure = EndpointDown(f"the endpoint cannot be reached: {words}", where=where)
        failure.may_be_charged = may_have_arrived(error)
    return failure


def may_have_arrived(error: BaseException) -> bool:
    """Return whether a request that failed like this may have reached the endpoint."""
    return not isinstance(
        error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol)
    )


class _SpreadTransport(httpx.AsyncBaseTransport):
    """Several pools of connections, used in turn: the time of one pool grows with the square of its connections."""

    def __init__(self, concurrency: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=2 * PER_POOL, keepalive_expiry=KEEP_SECONDS)
        number, trusted = -(-concurrency // PER_POOL), httpx.create_ssl_context()  # reading certificates takes 25 ms
        self._pools = [httpx.AsyncHTTPTransport(verify=trusted, limits=limits) for _ in range(number)]
        self._turn = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request over the next pool."""
        return await next(self._turn).handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.aclose()


LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def open_client(*, concurrency: int, **options: Any) -> httpx.AsyncClient:
    """Return a client that follows no redirect and limits no time, for so many requests at once.

    Args:
        concurrency: number of connections that are kept for further requests.
        options: further arguments of httpx.AsyncClient.
    """
    if getproxies():  # httpx itself reads the proxies of the environment, unless it is given a transport
        limits = httpx.Limits(max_keepalive_connections=concurrency, keepalive_expiry=KEEP_SECONDS)
        # No proxy serves this machine.
        direct: dict[str, httpx.AsyncBaseTransport | None] = {f"all://{host}": None for host in LOOPBACK}
        return httpx.AsyncClient(limits=limits, timeout=None, follow_redirects=False, mounts=direct, **options)
    spread = _SpreadTransport(concurrency)
    return httpx.AsyncClient(transport=spread, timeout=None, follow_redirects=False, **options)
