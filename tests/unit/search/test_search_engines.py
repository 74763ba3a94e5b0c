"""Search engines on loopback, in the shapes of their real answers: results, outages, refusals, keys, and the cache."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import Reply, serve_endpoint

from vlmrl.errors import VlmrlError
from vlmrl.search.cache import Results, SearchCache
from vlmrl.search.engines import ENGINES, HttpEngine
from vlmrl.search.index import Passage
from vlmrl.services.protocol import BrokenAnswer, EndpointDown, EndpointError, EndpointRejects, RequestRefused

KEY = "tvly-secret-4711"
SEARXNG = {
    "query": "velmora", "number_of_results": 0,
    "results": [
        {"url": "https://a.example/1", "title": "Velmora", "content": "A town.", "engine": "brave", "score": 4.0},
        {"url": "https://a.example/2", "title": "No text", "content": "", "engine": "brave"},
        {"url": "https://a.example/3", "title": None, "content": "A river.", "engine": "mojeek"},
    ],
    "answers": [], "corrections": [], "infoboxes": [], "suggestions": [],
    "unresponsive_engines": [["google", "timeout"]],
}  # fmt: skip
SERPER = {
    "searchParameters": {"q": "velmora", "type": "search", "num": 4},
    "answerBox": {"title": "Velmora", "answer": "a town", "link": "https://b.example/0"},
    "knowledgeGraph": {"title": "Velmora", "description": "Town on the Askel.", "website": "https://v.example"},
    "organic": [{"title": "One", "link": "https://b.example/1", "snippet": "First.", "position": 1}],
    "credits": 1,
}
TAVILY = {
    "query": "velmora", "answer": None, "images": [], "response_time": 1.2,
    "results": [{"title": "One", "url": "https://c.example", "content": "First.", "score": 0.9, "raw_content": None}],
}  # fmt: skip
BOCHA = {
    "code": 200, "log_id": "1", "msg": None,
    "data": {
        "_type": "SearchResponse", "queryContext": {"originalQuery": "velmora"},
        "webPages": {
            "webSearchUrl": "", "totalEstimatedMatches": 9,
            "value": [
                {"id": "0", "name": "One", "url": "https://d.example", "snippet": "Short.", "summary": "Long."},
                {"id": "1", "name": "Two", "url": "https://d.example/2", "snippet": "Only short.", "summary": None},
            ],
        },
        "images": {"value": []}, "videos": None,
    },
}  # fmt: skip


def reply(status: int, body: Any, **headers: str) -> Reply:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(status, text, {name.replace("_", "-"): value for name, value in headers.items()})


def search(name: str, url: str, monkeypatch: pytest.MonkeyPatch, seconds: float = 20.0) -> list[Passage]:
    monkeypatch.setenv("KEY", KEY)
    engine = HttpEngine(name, url, "KEY", seconds)
    engine._pauses = type(engine._pauses)(0.001, 0.002, seconds)
    return asyncio.run(engine.search("velmora & co", 4))


@pytest.mark.parametrize(
    ("name", "body", "passages"),
    [
        ("searxng", SEARXNG, [Passage("Velmora", "A town.", "https://a.example/1"), Passage("", "A river.", "https://a.example/3")]),
        ("serper", SERPER, [
            Passage("Velmora", "a town", "https://b.example/0"),
            Passage("Velmora", "Town on the Askel.", "https://v.example"),
            Passage("One", "First.", "https://b.example/1"),
        ]),
        ("tavily", TAVILY, [Passage("One", "First.", "https://c.example")]),
        ("bocha", BOCHA, [Passage("One", "Long.", "https://d.example"), Passage("Two", "Only short.", "https://d.example/2")]),
    ],
)  # fmt: skip
def test_the_results_of_each_engine_are_read(
    name: str, body: Any, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_endpoint(lambda *_: reply(200, body), path=ENGINES[name].path) as server:
        assert search(name, server.address.removesuffix("/v1"), monkeypatch) == passages
    (headers, sent), *more = server.requests
    assert not more and "velmora & co" in (sent.get("q"), sent.get("query"))
    carried = {"searxng": None, "serper": headers.get("x-api-key")}.get(name, headers.get("authorization", "")[7:])
    assert carried == (None if name == "searxng" else KEY)


EMPTY = {"searxng": SEARXNG | {"results": [], "unresponsive_engines": []}, "serper": {"organic": []},
         "tavily": {"results": []}, "bocha": {"code": 200, "data": {"webPages": None}}}  # fmt: skip
CASES: list[tuple[str, int, Any, type[EndpointError], str]] = [
    ("searxng", 200, SEARXNG | {"results": []}, EndpointDown, "google timeout"),
    ("searxng", 200, b"<html>captcha</html>", BrokenAnswer, "is a page"),
    ("searxng", 200, b"\x00", BrokenAnswer, "not JSON"),
    ("searxng", 400, {"error": "No query"}, RequestRefused, "No query"),
    ("searxng", 403, b"<h1>Forbidden</h1>", EndpointRejects, "HTTP 403"),
    ("searxng", 429, b"Too Many Requests", EndpointDown, "HTTP 429"),
    ("serper", 400, {"message": "Not enough credits", "statusCode": 400}, EndpointDown, "Not enough credits"),
    ("serper", 400, {"message": "Query not allowed", "statusCode": 400}, RequestRefused, "Query not allowed"),
    ("serper", 402, {"message": "Pay first"}, EndpointDown, "Pay first"),
    ("tavily", 403, {"detail": {"error": "No more credits"}}, EndpointDown, "No more credits"),
    ("serper", 403, {"message": "Unauthorized.", "statusCode": 403}, EndpointRejects, "Unauthorized"),
    ("serper", 500, b"oops", EndpointDown, "HTTP 500"),
    ("tavily", 400, {"detail": {"error": "Query is too long."}}, RequestRefused, "Query is too long"),
    ("tavily", 401, {"detail": {"error": "Unauthorized: invalid API key."}}, EndpointRejects, "invalid API key"),
    ("tavily", 429, {"detail": {"error": "excessive requests"}}, EndpointDown, "excessive requests"),
    ("tavily", 432, {"detail": {"error": "exceeds your plan's limit"}}, EndpointDown, "plan's limit"),
    ("tavily", 433, {"detail": "PayGo limit"}, EndpointDown, "PayGo limit"),
    ("bocha", 200, {"code": "429", "message": "request limit"}, EndpointDown, "request limit"),
    ("bocha", 200, {"code": 500, "msg": "inner"}, EndpointDown, "inner"),
    ("bocha", 200, {"code": {}}, EndpointDown, "code 500"),
    ("bocha", 400, {"code": "400", "message": "Missing parameter query"}, RequestRefused, "Missing parameter"),
    ("bocha", 401, {"code": "401", "message": "Invalid API KEY"}, EndpointRejects, "Invalid API KEY"),
    ("bocha", 403, {"code": "403", "message": "You do not have enough money"}, EndpointDown, "enough money"),
    ("tavily", 302, b"", EndpointRejects, "redirects"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "status", "body", "kind", "says"), CASES)
def test_the_body_says_whose_fault_a_failure_is(
    name: str, status: int, body: Any, kind: type[EndpointError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serve_endpoint(lambda *_: reply(status, body), path=ENGINES[name].path) as server,
        pytest.raises(EndpointError) as caught,
    ):
        search(name, server.address.removesuffix("/v1"), monkeypatch)
    assert type(caught.value) is kind, caught.value
    assert says in caught.value.message and caught.value.where
    assert len(server.requests) == (4 if kind in (EndpointDown, BrokenAnswer) else 1)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "body",
    [[], None, 3, {}, {"results": 3, "organic": {}, "data": []}, {"code": 200, "data": None, "results": None},
     {"results": [3, {"content": {}}], "organic": [None], "data": {"webPages": {"value": [[]]}}}],
)  # fmt: skip
def test_an_answer_of_another_shape_is_broken_and_not_empty(
    name: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serve_endpoint(lambda *_: reply(200, body), path=ENGINES[name].path) as server,
        pytest.raises(BrokenAnswer, match="no list of results") as caught,
    ):
        search(name, server.address.removesuffix("/v1"), monkeypatch)
    assert caught.value.where and "`environment.args.url`" in str(caught.value)


def test_a_row_without_a_text_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_endpoint(lambda *_: reply(200, {"results": [{"content": {}}, {"title": 3}]}), path="/search") as server:
        assert search("tavily", server.address.removesuffix("/v1"), monkeypatch) == []


HINTS = [
    ("serper", 404, b"<html>", "is `environment.args.url` the address"),
    ("searxng", 404, {}, "is `environment.args.url` the address"),
    ("serper", 429, {}, "try later"),
    ("serper", 402, {}, "the account is empty"),
    ("serper", 403, {}, "check the key"),
    ("bocha", 200, {"code": 401}, "check the key"),
    ("bocha", 200, {"code": 403}, "the account is empty"),
    ("searxng", 401, {}, "a proxy's password"),
    ("searxng", 403, {}, "limiter"),
    ("searxng", 200, b"<html>", "is `environment.args.url` the address"),
    ("tavily", 302, b"", "give the final address"),
]


@pytest.mark.parametrize(("name", "status", "body", "hint"), HINTS)
def test_the_hint_is_about_what_happened(
    name: str, status: int, body: Any, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serve_endpoint(lambda *_: reply(status, body), path=ENGINES[name].path) as server,
        pytest.raises(EndpointError) as caught,
    ):
        search(name, server.address.removesuffix("/v1"), monkeypatch)
    assert hint in (caught.value.hint or ""), caught.value
    assert "image" not in str(caught.value) and ("key" in str(caught.value)) <= (status in (302, 401, 403, 200))


def test_a_query_about_credit_is_no_empty_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", KEY)
    refused = reply(400, {"message": "Query not allowed: credit cards"})
    with serve_endpoint(lambda *_: refused, path="/search") as server, pytest.raises(RequestRefused):
        asyncio.run(HttpEngine("serper", server.address.removesuffix("/v1"), "KEY", 9.0).search("credit cards", 4))


def test_an_answer_that_is_too_large_is_not_the_querys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.search.engines.MOST_BYTES", 100)
    with (
        serve_endpoint(lambda *_: reply(200, {"organic": ["x" * 200]}), path="/search") as server,
        pytest.raises(BrokenAnswer, match="more than 100 bytes"),
    ):
        search("serper", server.address.removesuffix("/v1"), monkeypatch)


@pytest.mark.parametrize(
    ("url", "says"),
    [("localhost:8888", "http://localhost:8888"), ("http://a/?key=x", "name it with environment.args.key_env")],
)
def test_a_wrong_address_gets_an_example_of_an_engine(url: str, says: str) -> None:
    with pytest.raises(EndpointError) as caught:
        HttpEngine("searxng", url, "", 1.0)
    assert says in str(caught.value) and "openai" not in str(caught.value)


@pytest.mark.parametrize("name", ENGINES)
def test_no_results_are_no_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_endpoint(lambda *_: reply(200, EMPTY[name]), path=ENGINES[name].path) as server:
        assert search(name, server.address.removesuffix("/v1"), monkeypatch) == []


def test_an_outage_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_endpoint(lambda n, _: reply(503, {}) if n < 2 else reply(200, TAVILY), path="/search") as server:
        assert len(search("tavily", server.address.removesuffix("/v1"), monkeypatch)) == 1


def test_time_is_limited_for_all_attempts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = reply(503, {}, retry_after="30")
    with serve_endpoint(lambda *_: busy, path="/search") as server, pytest.raises(EndpointDown, match="HTTP 503"):
        search("tavily", server.address.removesuffix("/v1"), monkeypatch, seconds=1.0)


def test_the_key_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    said = reply(401, {"detail": {"error": f"bad {KEY}"}})
    with serve_endpoint(lambda *_: said, path="/search") as server, pytest.raises(EndpointRejects) as caught:
        search("tavily", server.address.removesuffix("/v1"), monkeypatch)
    assert KEY not in str(caught.value) and "key_env`" in str(caught.value)
    monkeypatch.setenv("KEY", "")
    with pytest.raises(EndpointError, match="environment variable KEY has no key"):
        HttpEngine("tavily", "", "KEY", 1.0)
    monkeypatch.delenv("KEY")
    with pytest.raises(EndpointError, match="environment variable KEY is not set"):
        HttpEngine("tavily", "", "KEY", 1.0)


def test_results_are_kept_by_engine_query_and_number(tmp_path: Path) -> None:
    path, kept = tmp_path / "a" / "s.sqlite", Results([Passage("ü", "text", "url")])
    with_url, other = SearchCache(path, "searxng http://a"), SearchCache(path, "searxng http://b")
    with_url.keep("q", 4, kept)
    with_url.keep("q", 4, Results([]))  # the first one stays
    with_url.keep("bad", 4, Results(refusal="no"))
    assert with_url.get("q", 4) == kept and with_url.get("q", 3) is None and with_url.get("Q", 4) is None
    assert with_url.get("bad", 4) == Results([], "no")
    assert other.get("q", 4) is None and (with_url.count(), other.count()) == (2, 0)
    with_url.close(), other.close()


def test_the_rate_is_that_of_all_processes(tmp_path: Path) -> None:
    now = 1000.0
    one, two = (SearchCache(tmp_path / "s.sqlite", "serper", 4.0, lambda: now) for _ in range(2))
    assert [one.pause(0.5), two.pause(0.5), one.pause(0.5)] == pytest.approx([0.0, 0.25, 0.5])
    for _ in range(2):  # a place that comes too late is not taken
        with pytest.raises(EndpointDown, match="the queue of requests is longer"):
            two.pause(0.5)
    assert two.pause(0.8) == pytest.approx(0.75)
    now = 1010.0
    assert two.pause(0.5) == 0.0
    assert SearchCache(tmp_path / "s.sqlite", "serper").pause(0.0) == 0.0


def test_no_attempt_is_faster_than_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", KEY)
    times, cache = list[float](), SearchCache(tmp_path / "s.sqlite", "tavily", 4.0)

    def fails(*_: Any) -> Reply:
        times.append(time.monotonic())
        return reply(503, {})

    with serve_endpoint(fails, path="/search") as server:

        async def burst() -> list[Any]:
            engines = [
                HttpEngine("tavily", server.address.removesuffix("/v1"), "KEY", 2.0, cache.pause) for _ in "abcd"
            ]
            for engine in engines:
                engine._pauses = type(engine._pauses)(0.001, 0.002, 2.0)
            return await asyncio.gather(*(one.search("q", 4) for one in engines), return_exceptions=True)

        failures = asyncio.run(burst())
    assert all(isinstance(one, EndpointDown) for one in failures), failures
    assert 3 <= len(times) <= 5  # at most 4 a second, of those that begin within the first half of 2 s
    assert min(b - a for a, b in pairwise(times)) > 0.2


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    from vlmrl.services.judge_database import JUDGEMENTS
    from vlmrl.services.shared_file import Database

    Database(JUDGEMENTS, tmp_path / "judge.sqlite").close()
    with pytest.raises(VlmrlError, match="the file of search results belongs to another program"):
        SearchCache(tmp_path / "judge.sqlite", "serper")


@pytest.mark.parametrize("text", ["my notes\n", "n" * 5000, "SQLite format 3\0" + "x" * 5000])
def test_a_file_that_was_never_a_cache_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.txt").write_text(text)
    for _ in range(2):
        with pytest.raises(VlmrlError, match="the file of search results belongs to another program"):
            SearchCache(tmp_path / "notes.txt", "serper")
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == text


def test_a_damaged_file_is_told_before_a_new_one_begins(tmp_path: Path) -> None:
    path, notes = tmp_path / "s.sqlite", list[str]()
    SearchCache(path, "serper").close()
    path.write_bytes(b"x" * 5000)
    SearchCache(path, "serper", notify=notes.append).close()
    assert len(notes) == 1 and "is damaged" in notes[0] and str(path) in notes[0] and path.exists()
