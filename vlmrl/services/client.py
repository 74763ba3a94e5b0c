"""Client of an endpoint: many requests at once, retries, limits of time and size. It has a thread with an event loop.

The key is sent to the endpoint's own address alone: redirects are not followed, and no error or log has the key.
Libraries that take an HTTP client, such as the SDK of a provider, get one that asks for no compression and refuses it
unasked, so that an answer cannot grow in memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import cycle
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from vlmrl.redaction.redact import remember
from vlmrl.services.protocol import (
    MOST_TOKENS_NAMES,
    BrokenAnswer,
    ChatAnswer,
    ChatRequest,
    EndpointDown,
    EndpointError,
    RequestRefused,
    error_words,
    failure_of,
    read_answers,
    retry_seconds,
    what_to_check,
)
from vlmrl.types import ServedCall

Result = TypeVar("Result")
PER_POOL = 4
"""Number of connections that a pool has on average."""
KEEP_SECONDS = 30.0
"""Time after which a connection that is not used is closed, in seconds."""
HTTP_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
"""Errors that a request of the client may raise; `failure_of_http` translates them."""
NOT_ARRIVED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol)
"""Those of them after which a request has certainly not reached the endpoint."""


class _TooLargeError(httpx.ReadError):
    """Answer beyond the limit of size. Its text, like that of _CutError, is the whole message for the user."""


class _CutError(httpx.ReadError):
    """Answer that ended, or was compressed, after its head had come."""


class _BoundedStream(httpx.AsyncByteStream):
    """Body of an answer, of at most `most_bytes` bytes."""

    def __init__(self, stream: httpx.AsyncByteStream, most_bytes: int) -> None:
        self._stream, self._most = stream, most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._stream:
                size += len(chunk)
                if size > self._most:
                    raise _TooLargeError(f"the endpoint's answer has more than {self._most:,} bytes")
                yield chunk
        except _TooLargeError:
            raise
        except httpx.HTTPError as error:
            raise _CutError(f"the endpoint's answer was cut: {_words_of(error)}") from None

    async def aclose(self) -> None:
        await self._stream.aclose()


def _words_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def bounded_client(
    *, most_bytes: int, concurrency: int, headers: Mapping[str, str] = MappingProxyType({})
) -> httpx.AsyncClient:
    """Return a client for one event loop. It limits no time: bound each request as a whole with `asyncio.wait_for`.

    Args:
        most_bytes: maximum size of an answer's body.
        concurrency: number of connections that are kept for further requests.
    """

    async def bound(response: httpx.Response) -> None:
        if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise _CutError("the endpoint sent a compressed answer, which was not requested")
        if isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _BoundedStream(response.stream, most_bytes)

    headers = {**headers, "accept-encoding": "identity"}
    return open_client(concurrency=concurrency, headers=headers, event_hooks={"response": [bound]})


def failure_of_http(error: BaseException, clean: Callable[[str], str], where: str) -> EndpointError:
    """Return the endpoint's error for one of HTTP_ERRORS. `clean`: hides the key in its text."""
    words = clean(_words_of(error))
    if isinstance(error, _CutError):
        return BrokenAnswer(words, where=where)
    is_large = isinstance(error, _TooLargeError)
    message = words if is_large else f"the endpoint cannot be reached: {words}"
    failure = (RequestRefused if is_large else EndpointDown)(message, where=where)
    failure.may_be_charged = not isinstance(error, NOT_ARRIVED)
    return failure


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


PATH = "/chat/completions"
HIDDEN = "<hidden>"
NOTIFY_SECONDS = 10.0


@dataclass(frozen=True)
class EndpointOptions:
    """Settings of a client.

    Args:
        url: address of the server up to its version, such as `http://localhost:8000/v1`.
        key_env: environment variable that holds the key; None = no key is sent.
        concurrency: maximum number of requests in flight.
        timeout_seconds: limit of one request, from connecting to the last byte.
        attempts: number of times that a request is sent before it counts as failed.
        backoff_seconds: pause before the second attempt; it doubles with each further one. The pauses are drawn between
            half of that and all of it.
        most_pause_seconds: maximum pause, also of a Retry-After.
    """

    url: str
    model: str
    key_env: str | None = None
    concurrency: int = 16
    timeout_seconds: float = 600.0
    attempts: int = 6
    backoff_seconds: float = 1.0
    most_pause_seconds: float = 120.0
    most_answer_bytes: int = 16 * 1024 * 1024


@dataclass(frozen=True)
class Pauses:
    """Lengths of the pauses before further attempts, in seconds.

    Args:
        first: pause before the second attempt; it doubles with each further one.
        most: longest pause without a Retry-After.
        most_retry_after: longest pause that an endpoint can wish.
    """

    first: float = 1.0
    most: float = 30.0
    most_retry_after: float = 120.0

    def after(self, failed: int, retry_after: float, rng: random.Random) -> float:
        """Return the pause after so many failed attempts: half of its length and all of it are the bounds of a draw.

        The jitter comes on top of a Retry-After: otherwise all requests would come back at the same moment.
        """
        whole = min(self.first * 2 ** min(failed - 1, 30), self.most)
        return self.wished(retry_after) + whole * rng.uniform(0.5, 1.0)

    def wished(self, retry_after: float) -> float:
        """Return the pause for a Retry-After."""
        return min(retry_after, self.most_retry_after)


class LoopThread:
    """Thread with an event loop. `run` may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Return whether it has not been closed."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin a coroutine. Return the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Cancel what is in flight, wait for `end()` and end the thread."""
        self.run(self._shut(end)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self, end: Callable[[], Awaitable[None]]) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await end()


class EndpointClient:
    """Client of one model of one endpoint. Use it as a context manager; its methods may be called from any thread.

    Args:
        notify: called, from the client's thread, with a line for the user when a request is tried again; at most every
            `NOTIFY_SECONDS`.
        sleep: coroutine function that waits for a number of seconds.
        rng: source of the jitter.
    Raises: EndpointError for an address that cannot be used, or when the variable of the key is not set.
    """

    def __init__(
        self,
        options: EndpointOptions,
        *,
        notify: Callable[[str], Any] = lambda text: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.options = options
        self.url = base_url(options.url)
        self._key = read_key(options.key_env)
        self._notify, self._sleep, self._rng = notify, sleep, rng or random.Random()
        self._notified = -NOTIFY_SECONDS
        self._takes_n, self._limit_name = True, MOST_TOKENS_NAMES[0]
        self._calm_from = 0.0
        self._pauses = Pauses(options.backoff_seconds, options.most_pause_seconds, options.most_pause_seconds)
        self._thread = LoopThread("endpoint")
        self._thread.run(self._open()).result()

    def __enter__(self) -> EndpointClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, request: ChatRequest) -> Future[list[ChatAnswer]]:
        """Send a request. Return the future of its `request.samples` answers.

        All samples are asked for at once. A server that gives fewer, or refuses that, is asked for each alone.

        The future raises: EndpointDown, EndpointRejects, RequestRefused or BrokenAnswer.
        """
        return self._thread.run(self._all_samples(request))

    def close(self) -> None:
        """Cancel the requests in flight and end the thread. A second call does nothing."""
        if self._thread.is_open:
            self._thread.close(self._http.aclose)

    async def _open(self) -> None:
        self._slots = asyncio.Semaphore(self.options.concurrency)
        headers = {"accept": "application/json", "content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        # The slots alone bound the requests: one that waits in httpx's own queue would use up its time.
        # Time is limited for each request as a whole, in _in_time: limits of single reads would not bound it.
        most, concurrency = self.options.most_answer_bytes, self.options.concurrency
        self._http = bounded_client(most_bytes=most, concurrency=concurrency, headers=headers)

    async def _all_samples(self, request: ChatRequest) -> list[ChatAnswer]:
        task = asyncio.current_task()
        assert task is not None
        # A caller that has cancelled its future does not read the error; asyncio would print it with a traceback.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        answers: list[ChatAnswer] = []
        while (missing := request.samples - len(answers)) > 0:
            count = missing if self._takes_n else 1
            try:
                received = await self._repeat(request, count, len(answers))
            except RequestRefused:
                if count == 1:
                    raise
                self._takes_n = False
                continue
            if len(received) < count:
                self._takes_n = False
            answers += received[:count]
        return answers

    async def _repeat(self, request: ChatRequest, count: int, first: int) -> list[ChatAnswer]:
        """Return the answers of one request for `count` responses, after as many attempts as it needs."""
        attempt = 1
        while True:
            # The last Retry-After holds for all requests, not only for the one that got it.
            if (seconds := self._calm_from - time.monotonic()) > 0:
                await self._sleep(seconds)
            limit_name = self._limit_name
            body = request.body(self.options.model, count=count, first=first, limit_name=limit_name)
            try:
                async with self._slots:
                    return await self._in_time(body)
            except RequestRefused as refusal:
                # OpenAI's newer models refuse `max_tokens` and name the parameter that they know.
                if limit_name == MOST_TOKENS_NAMES[0] and MOST_TOKENS_NAMES[1] in refusal.message:
                    self._limit_name = MOST_TOKENS_NAMES[1]
                    continue
                raise
            except (EndpointDown, BrokenAnswer) as failure:
                wished = self._pauses.wished(failure.retry_after)
                self._calm_from = max(self._calm_from, time.monotonic() + wished) if wished else self._calm_from
                if attempt >= self.options.attempts:
                    raise
                pause = self._pauses.after(attempt, failure.retry_after, self._rng)
                if time.monotonic() - self._notified >= NOTIFY_SECONDS:
                    self._notified = time.monotonic()
                    which = f"attempt {attempt + 1} of {self.options.attempts}"
                    self._notify(f"{failure.message}; {which} in {pause:.0f} s")
                await self._sleep(pause)
            attempt += 1

    async def _in_time(self, body: bytes) -> list[ChatAnswer]:
        try:
            return await asyncio.wait_for(self._call(body), self.options.timeout_seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise no_answer(self.options.timeout_seconds, self.url) from None

    async def _call(self, body: bytes) -> list[ChatAnswer]:
        """Send a request once and read its answer. Raises: EndpointError."""
        try:
            response = await self._http.post(self.url + PATH, content=body)
        except HTTP_ERRORS as error:
            raise failure_of_http(error, self._clean, self.url) from None
        if 200 <= response.status_code < 300:
            try:
                # A server might send the key back.
                return [self._cleaned(one) for one in read_answers(response.content)]
            except BrokenAnswer as error:
                raise BrokenAnswer(self._clean(error.message), where=self.url) from None
        headers = response.headers
        raise failure_of(
            response.status_code,
            error_words(response.content, self._clean),
            where=self.url,
            hint=what_to_check(self.options.key_env, self.options.model),
            location=self._clean(headers.get("location", "")),
            retry_after=retry_seconds(headers.get("retry-after"), datetime.now(timezone.utc)),
        )

    def _cleaned(self, answer: ChatAnswer) -> ChatAnswer:
        calls = [ServedCall(c.id, self._clean(c.name), self._clean(c.arguments)) for c in answer.calls]
        return replace(answer, text=self._clean(answer.text), calls=tuple(calls))

    def _clean(self, text: str) -> str:
        return text.replace(self._key, HIDDEN) if self._key else text


def no_answer(seconds: float, where: str) -> EndpointDown:
    """Return the error for an endpoint that did not answer within the limit of time."""
    failure = EndpointDown(f"the endpoint did not answer within {seconds:g} s", where=where)
    failure.may_be_charged = True
    return failure


def base_url(
    text: str, example: str = "http://localhost:8000/v1 or https://api.openai.com/v1", key_option: str = "--key-env"
) -> str:
    """Return the address of an endpoint without the path of chat completions.

    Args:
        example, key_option: an address, and the option that names the variable of the key, for messages.
    Raises: EndpointError unless it is an http or https address without a password, a query or a fragment.
    """
    hint = f"write it like {example}"
    try:
        parts = urlsplit(text.strip())
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_address = is_address and not re.search(r"[\s\x00-\x1f\x7f]", text.strip())
    except ValueError:
        is_address, parts = False, urlsplit("")
    if not is_address:
        raise EndpointError("the endpoint's address is not one of http or https", hint=hint)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise EndpointError(
            "the endpoint's address has a user, a password, a query or a fragment",
            hint=f"put the key into an environment variable and name it with {key_option}",
        )
    return text.strip().rstrip("/").removesuffix(PATH).rstrip("/")


def read_key(name: str | None) -> str:
    """Return the key in an environment variable; "" without one. Raises: EndpointError when it cannot be a key."""
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        state = "has no key" if name in os.environ else "is not set"
        raise EndpointError(f"the environment variable {name} {state}", hint=f"export {name}=...")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EndpointError(f"the environment variable {name} holds characters that no key has", hint="set it again")
    remember([key])
    return key
