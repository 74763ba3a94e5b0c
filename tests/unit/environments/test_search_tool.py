"""The tool `search` in the real processes of an environment: passages, engines, outages, and what a run says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import Reply, serve_endpoint
from test_environment_processes import Place

from vlmrl.environments.base import EnvironmentLimits
from vlmrl.environments.processes import Answer, EnvironmentPool, LoadedEnvironment, Stopped, load_environment
from vlmrl.errors import RewardError

ROWS = [
    {"title": "Velmora", "text": "Velmora lies on the\nriver Askel." + " It is old." * 200},
    {"text": "The Askel is long."},
]
ANSWER = {"results": [{"title": "One", "content": "First <image> page.", "url": "https://a.example"}]}


pytestmark = pytest.mark.slow


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text("from vlmrl.search.tool import Search\n")
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return path


def load(file: Path, **args: Any) -> LoadedEnvironment:
    return load_environment(f"{file}:Search", args)


@contextmanager
def episode(environment: LoadedEnvironment) -> Iterator[Place]:
    pool = EnvironmentPool(environment, "hermes", EnvironmentLimits(tool_seconds=15.0))
    try:
        place = Place(pool)
        first = place.begin()
        assert isinstance(first, Answer), first
        yield place
    finally:
        pool.close()


def said(place: Place, query: str) -> str:
    answer = place.call("search", query=query)
    assert isinstance(answer, Answer), answer
    return "".join(map(str, answer.parts))


def test_passages_are_shown_as_a_list_and_are_a_part_of_the_identity(file: Path) -> None:
    environment = load(file, corpus=str(file.parent / "p.jsonl"), chars=30, results=2)
    (described,) = environment.described.values()
    assert described.note == f"search in 2 passages of {file.parent / 'p.jsonl'} (fts5)"
    assert [tool["function"]["name"] for tool in described.tools] == ["search"]
    identity = environment.record["contents"][""]
    with episode(environment) as place:
        assert said(place, " river \n Askel ") == (
            "1. Velmora: Velmora lies on the river Aske[... cut ...]\n2. The Askel is long."
        )
        assert said(place, "long") == "1. The Askel is long."
        assert said(place, "zebra") == "nothing was found; try other words"
        assert said(place, "  ") == "error: the query is empty"
    (file.parent / "p.jsonl").write_text('{"text": "other"}')
    file.write_text(file.read_text() + "# changed\n")
    again = load(file, corpus=str(file.parent / "p.jsonl"), chars=30, results=2)
    assert again.record["contents"][""] != identity


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "searches in a table of passages, and none is named"),
        ({"engine": "gogle"}, "unknown search engine `gogle`"),
        ({"engine": "searxng"}, "the engine searxng has no address of its own"),
        ({"corpus": "nowhere.jsonl"}, "there are no passages"),
        ({"corpus": "p.jsonl", "results": 0}, "results is 1 to 50"),
        ({"corpora": "p.jsonl"}, "unexpected keyword argument 'corpora'"),
        ({"engine": "serper", "key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY has no key"),
        ({"engine": "searxng", "url": "ftp://x"}, "the endpoint's address is not one of http or https"),
    ],
)
def test_arguments_that_cannot_be_used_are_named_when_it_is_loaded(
    file: Path, args: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(RewardError) as caught:
        load(file, **args)
    assert says in str(caught.value), str(caught.value)
    assert "Traceback" not in str(caught.value)


def searxng(number: int, body: dict[str, Any]) -> Reply:
    query = body["q"]
    if query == "down":
        return Reply(body=b'{"results": [], "unresponsive_engines": [["google", "timeout"]]}')
    if query == "bad":
        return Reply(400, b'{"error": "a bad query"}')
    return Reply(body=json.dumps(ANSWER).encode())


def test_an_engine_is_tried_at_the_start_asked_once_a_query_and_replayed(file: Path) -> None:
    cache = str(file.parent / "s.sqlite")
    with serve_endpoint(searxng, path="/search") as server:
        args = {"engine": "searxng", "url": server.address.removesuffix("/v1"), "cache": cache}
        environment = load(file, **args)
        assert server.requests == []  # a check asks nobody
        with episode(environment) as place:
            assert len(server.requests) == 1
            assert said(place, "velmora") == "1. One: First <image> page."
            assert said(place, "velmora") == "1. One: First <image> page."
            assert said(place, "bad") == "error: searxng refuses this query: " + (
                "the endpoint refuses this request: HTTP 400: a bad query"
            )
            stopped = place.call("search", query="down")
        assert isinstance(stopped, Stopped) and stopped.is_outage and "google timeout" in stopped.why
        with episode(environment) as place:
            before = len(server.requests)
            assert said(place, "velmora") == "1. One: First <image> page."
            assert len(server.requests) == before
    with episode(load(file, **args, replay=True)) as place:  # the server is gone
        assert said(place, "velmora") == "1. One: First <image> page."
        assert said(place, "bad").startswith("error: searxng refuses")
        stopped = place.call("search", query="new")
        assert isinstance(stopped, Stopped) and stopped.is_outage and "replay is true" in stopped.why


def test_a_forbidden_form_stops_at_the_start(file: Path) -> None:
    with serve_endpoint(lambda *_: Reply(403, b"Forbidden"), path="/search") as server:
        args = {"engine": "searxng", "url": server.address.removesuffix("/v1"), "cache": str(file.parent / "s")}
        with pytest.raises(RewardError) as caught, episode(load(file, **args)):
            pass
    assert "HTTP 403" in str(caught.value) and "search.formats" in str(caught.value)


def test_an_engine_that_dies_ends_the_episode_and_no_run(file: Path) -> None:
    with serve_endpoint(searxng, path="/search") as server:
        args = {"engine": "searxng", "url": server.address.removesuffix("/v1"), "cache": str(file.parent / "s"),
                "seconds": 2.0}  # fmt: skip
        pool = episode(load(file, **args))
        place = pool.__enter__()
    stopped = place.call("search", query="velmora")
    assert isinstance(stopped, Stopped) and stopped.is_outage and "cannot be reached" in stopped.why
    pool.__exit__(None, None, None)
