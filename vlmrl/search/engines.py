"""Search engines over HTTP: what each is asked, what its answer says, and who can repair a failure.

Whether an answer is a result, an outage or the query's own fault is decided from its body, engine by engine: SearXNG
answers 200 when none of its sources has answered, and Serper answers 400 both to a bad query and to an account without
credit. The addresses, requests and answers are those of the documentation of SearXNG, Serper, Tavily and Bocha.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlencode

from vlmrl.redaction.redact import excerpt
from vlmrl.search.index import Passage
from vlmrl.services.client import (
    HIDDEN,
    HTTP_ERRORS,
    Pauses,
    base_url,
    bounded_client,
    failure_of_http,
    no_answer,
    read_key,
)
from vlmrl.services.protocol import (
    BrokenAnswer,
    EndpointDown,
    EndpointError,
    EndpointRejects,
    RequestRefused,
    failure_of,
    retry_seconds,
)
from vlmrl.untrusted import parse_json

MOST_BYTES, MOST_QUERY = 8 << 20, 400
"""Largest answer in bytes, and longest query in characters, which is what the engines take."""
MOST_FIELD = 20_000
ATTEMPTS = 4
Words = Callable[[int, Mapping[str, Any]], EndpointError | None]


@dataclass(frozen=True)
class EngineForm:
    """Form of an engine's requests and answers.

    Args:
        url: its address; "" = the user's own server.
        path: path of a search.
        key_env: usual environment variable of the key; "" = it has none.
        header: (name, value with {key}) of the header that carries the key.
        body: (query, number of results) -> the JSON of a POST, or, with `is_get`, the parameters of a GET.
        pages: answer -> its results, the best first. Raises: BrokenAnswer for an answer without the list of results.
        failure: (HTTP status, answer) -> what is wrong with it, where the status alone does not say it; None = nothing.
        hint: what to do if it lets nobody in.
    """

    url: str
    path: str
    key_env: str
    header: tuple[str, str]
    body: Callable[[str, int], dict[str, Any]]
    pages: Callable[[Mapping[str, Any]], list[Passage]]
    failure: Words
    hint: str
    is_get: bool = False


def _texts(rows: Any, title: str, texts: tuple[str, ...], name: str) -> list[Passage]:
    """Return rows of an answer as passages. `texts`: names of the field with the text; the first that is there.

    Raises: BrokenAnswer for anything but a list of objects.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BrokenAnswer("the search engine's answer has no list of results", hint=_URL)
    pages = []
    for row in rows:
        text = next((row[key] for key in texts if isinstance(row.get(key), str) and row[key].strip()), "")
        if text:
            fields = (row.get(title), text, row.get(name))
            pages.append(Passage(*(one[:MOST_FIELD] if isinstance(one, str) else "" for one in fields)))
    return pages


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _serper_pages(answer: Mapping[str, Any]) -> list[Passage]:
    box, graph = _dict(answer.get("answerBox")), _dict(answer.get("knowledgeGraph"))
    first = _texts([box], "title", ("answer", "snippet"), "link")
    first += _texts([graph], "title", ("description",), "website")
    return first + _texts(answer.get("organic"), "title", ("snippet",), "link")


def _bocha_pages(answer: Mapping[str, Any]) -> list[Passage]:
    """Return the results; `webPages` is null if there are none, as `images` and `videos` are."""
    data = _dict(answer.get("data"))
    rows = [] if data.get("webPages", "") is None else _dict(data.get("webPages")).get("value")
    return _texts(rows, "name", ("summary", "snippet"), "url")


def _searxng_failure(status: int, answer: Mapping[str, Any]) -> EndpointError | None:
    silent = answer.get("unresponsive_engines")
    if status == 200 and not answer.get("results") and silent:
        names = ", ".join(" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in silent)
        return EndpointDown(f"none of its sources has answered: {excerpt(names, 200)}")
    return None


def _tavily_failure(status: int, answer: Mapping[str, Any]) -> EndpointError | None:
    # 432 and 433: the limit of the plan, or of the payment, is reached.
    return EndpointDown(f"HTTP {status}: {_words(answer)}", hint=_EMPTY) if status in (432, 433) else None


def _bocha_failure(status: int, answer: Mapping[str, Any]) -> EndpointError | None:
    """Return the failure that the code in an answer says, a number or a text; the status may be 200."""
    try:
        code = int(answer.get("code", status))
    except (TypeError, ValueError):
        code = 500
    if code == 200:
        return None
    words = f"code {code}: {_words(answer)}"
    if code == 400:
        return RequestRefused(words)
    if code == 401:
        return EndpointRejects(words, hint=_KEY)
    return EndpointDown(words, hint=_EMPTY if code == 403 else HINTS.get(code))


_KEY = "check the key in the environment variable that `environment.args.key_env` names"
_URL = "is `environment.args.url` the address of the engine?"
_EMPTY = "the account is empty, or its plan is used up"
HINTS: Mapping[int, str] = {
    404: _URL,
    405: _URL,
    429: "the engine has too many requests: try later, or set `environment.args.per_second`",
}
"""HTTP status -> what to do."""
ENGINES: Mapping[str, EngineForm] = {
    "searxng": EngineForm(
        "", "/search", "", ("", ""),
        lambda query, count: {"q": query, "format": "json"},
        lambda answer: _texts(answer.get("results"), "title", ("content",), "url"),
        _searxng_failure,
        "let its settings.yml have `json` among search.formats, and its limiter or a proxy's password let you in",
        is_get=True,
    ),
    "serper": EngineForm(
        "https://google.serper.dev", "/search", "SERPER_API_KEY", ("X-API-KEY", "{key}"),
        lambda query, count: {"q": query, "num": count},
        _serper_pages, lambda status, answer: None, _KEY,
    ),
    "tavily": EngineForm(
        "https://api.tavily.com", "/search", "TAVILY_API_KEY", ("Authorization", "Bearer {key}"),
        lambda query, count: {"query": query, "max_results": count},
        lambda answer: _texts(answer.get("results"), "title", ("content",), "url"),
        _tavily_failure, _KEY,
    ),
    "bocha": EngineForm(
        "https://api.bochaai.com", "/v1/web-search", "BOCHA_API_KEY", ("Authorization", "Bearer {key}"),
        lambda query, count: {"query": query, "count": count, "summary": True},
        _bocha_pages, _bocha_failure, _KEY,
    ),
}  # fmt: skip


class HttpEngine:
    """Search engine, for one event loop.

    Args:
        name: one of ENGINES.
        url: its address; "" = the engine's own.
        key_env: environment variable of the key; "" = the engine's usual one.
        seconds: longest time of a search with all attempts.
        turn: takes the next place in the queue of requests, if it is due within so many seconds. Returns the seconds
            until then. Raises: EndpointDown.
    Raises: EndpointError for an address that cannot be used, or when the variable of the key is not set.
    """

    def __init__(
        self, name: str, url: str, key_env: str, seconds: float, turn: Callable[[float], float] = lambda most: 0.0
    ) -> None:
        self.form, self._seconds, self._turn = ENGINES[name], seconds, turn
        address = self.form.url or "http://localhost:8888"
        self.url = base_url(url or address, f"environment.args.url = {address!r}", "environment.args.key_env")
        variable = key_env or self.form.key_env
        self._key = read_key(variable) if variable else ""
        self._pauses, self._rng = Pauses(0.5, 4.0, seconds), random.Random()

    async def search(self, query: str, most: int) -> list[Passage]:
        """Return the results for a query, the best first.

        Raises: RequestRefused for a query that the engine refuses; EndpointRejects for what every query would meet;
            EndpointDown or BrokenAnswer after all attempts.
        """
        headers = {"accept": "application/json", "content-type": "application/json"}
        if self._key and self.form.header[0]:
            headers[self.form.header[0]] = self.form.header[1].format(key=self._key)
        last: list[EndpointError] = []
        try:
            async with bounded_client(most_bytes=MOST_BYTES, concurrency=1, headers=headers) as client:
                return await asyncio.wait_for(self._repeat(client, query, most, last), self._seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise (last[-1] if last else no_answer(self._seconds, self.url)) from None

    async def _repeat(self, client: Any, query: str, most: int, last: list[EndpointError]) -> list[Passage]:
        end = time.monotonic() + self._seconds / 2
        while True:
            # Later ones would have no time for their answer.
            await asyncio.sleep(self._turn(max(0.0, end - time.monotonic())))
            try:
                return await self._ask(client, query, most)
            except (EndpointDown, BrokenAnswer) as error:
                last.append(error)
                if len(last) >= ATTEMPTS:
                    raise
                await asyncio.sleep(self._pauses.after(len(last), error.retry_after, self._rng))

    async def _ask(self, client: Any, query: str, most: int) -> list[Passage]:
        """Ask once. Raises: EndpointError."""
        form, address = self.form, self.url + self.form.path
        body = form.body(query, most)
        try:
            if form.is_get:
                response = await client.get(f"{address}?{urlencode(body)}")
            else:
                response = await client.post(address, json=body)
        except HTTP_ERRORS as error:
            failure = failure_of_http(error, self._clean, self.url)
            if isinstance(failure, RequestRefused):  # too large
                failure = BrokenAnswer(failure.message, where=self.url)
            raise failure from None
        status, answer, text = response.status_code, {}, self._clean(response.content.decode("utf-8", "replace"))
        try:
            answer = _dict(parse_json(text))
        except ValueError:
            if 200 <= status < 300:
                what = "a page" if text.lstrip().startswith("<") else "not JSON"
                raise BrokenAnswer(f"the search engine's answer is {what}", where=self.url, hint=_URL) from None
        failure, words = form.failure(status, answer), _words(answer)
        if failure is None and not 200 <= status < 300:
            place = self._clean(response.headers.get("location", ""))
            failure = failure_of(status, words, where=self.url, hint=HINTS.get(status, form.hint), location=place)
            failure.hint = failure.hint or HINTS.get(status)
            if status == 402 or ("credit" in words.lower() and "credit" not in query.lower()):
                failure = EndpointDown(f"HTTP {status}: {words}", hint=_EMPTY)
        try:
            if failure is not None:
                raise failure
            return form.pages(answer)[:most]
        except EndpointError as error:
            error.where = self.url
            error.retry_after = retry_seconds(response.headers.get("retry-after"), datetime.now(timezone.utc))
            raise

    def _clean(self, text: str) -> str:
        return text.replace(self._key, HIDDEN) if self._key else text


def _words(answer: Mapping[str, Any]) -> str:
    """Return what an answer says about a failure."""
    detail = answer.get("detail")
    words = answer.get("message") or answer.get("msg") or _dict(detail).get("error") or detail or answer.get("error")
    return excerpt(str(words or "no message"), 300)
