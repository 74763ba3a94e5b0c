"""The tool `search` in the real processes of an environment: passages, engines, outages, and what a run says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import Reply, serve_endpoint
from test_environment_processes import Place, opened

from vlmrl.environments.base import EnvironmentLimits
from vlmrl.environments.processes import PACKAGE, Answer, LoadedEnvironment, Stopped, load_environment
from vlmrl.errors import RewardError
from vlmrl.search.cache import SearchCache
from vlmrl.search.tool import Search

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
    with opened(environment, EnvironmentLimits(tool_seconds=15.0)) as place:
        first = place.begin()
        assert isinstance(first, Answer), first
        yield place


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
        ({"corpus": "nowhere.jsonl"}, "no file nowhere.jsonl (`corpus` in environment.args)"),
        ({"corpus": "."}, "the file . cannot be read: Is a directory"),
        ({"corpus": "p.jsonl", "results": 0}, "`results` in environment.args is 0, not a whole number from 1 to 50"),
        ({"corpus": "p.jsonl", "results": "4"}, "`results` in environment.args is '4', not a whole number"),
        ({"corpus": "p.jsonl", "results": 2.5}, "`results` in environment.args is 2.5, not a whole number"),
        ({"corpus": "p.jsonl", "results": True}, "`results` in environment.args is True, not a whole number"),
        ({"corpus": "p.jsonl", "seconds": float("nan")}, "`seconds` in environment.args is nan, not a number from"),
        ({"corpus": "p.jsonl", "per_second": -1}, "`per_second` in environment.args is -1, not a number of 0 or more"),
        ({"corpus": ["p.jsonl"]}, "`corpus` in environment.args is ['p.jsonl'], not a text"),
        ({"corpus": "p.jsonl", "replay": "yes"}, "`replay` in environment.args is 'yes', not true or false"),
        ({"engine": "serper", "key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
        ({"engine": "serper", "replay": True, "cache": "none.sqlite"}, "no file none.sqlite, and replay is true"),
        ({"engine": "serper", "cache": "p.jsonl"}, "the file of search results belongs to another program"),
        ({"engine": "searxng", "url": "ftp://x"}, "the endpoint's address is not one of http or https"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    file: Path, args: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(RewardError) as caught:
        Search.__vlmrl_start__(args, forks=False)
    assert says in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"corpora": "p.jsonl"},
            ("unknown argument `corpora` in environment.args", "did you mean `corpus`?  known: engine, corpus, url"),
        ),
        ({"corpus": "nowhere.jsonl"}, ("no file nowhere.jsonl (`corpus` in environment.args)",)),
        ({"corpus": "p.jsonl", "results": 0}, ("`results` in environment.args is 0, not a whole number",)),
    ],
)
def test_they_are_named_when_it_is_loaded(file: Path, args: dict[str, Any], says: tuple[str, ...]) -> None:
    with pytest.raises(RewardError) as caught:
        load(file, **args)
    assert all(words in str(caught.value) for words in says), str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_the_recipe_is_to_blame_for_the_arguments_of_a_built_in_environment(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no file nowhere") as caught:
        load_environment("vlmrl/tasks/agent_search/environment.py:Search", {"corpus": "nowhere"}, PACKAGE.parent)
    assert caught.value.where is None  # so that the place in the recipe is named


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


def test_a_replay_needs_results_and_repairs_nothing(file: Path) -> None:
    args = {"engine": "serper", "cache": str(file.parent / "s.sqlite"), "replay": True}
    SearchCache(file.parent / "s.sqlite", "serper http://other").close()
    with pytest.raises(RewardError, match=r"s.sqlite has no results of serper, and replay is true"):
        load(file, **args)
    (file.parent / "s.sqlite").write_bytes(b"x" * 5000)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"s.sqlite is damaged, and replay is true"):
            load(file, **args)
    assert (file.parent / "s.sqlite").read_bytes() == b"x" * 5000


def test_a_damaged_file_of_results_is_a_warning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "key")
    SearchCache(file.parent / "s.sqlite", "serper").close()
    (file.parent / "s.sqlite").write_bytes(b"x" * 5000)
    (described,) = load(file, engine="serper", cache=str(file.parent / "s.sqlite")).described.values()
    assert "is damaged" in described.warning and "queries are asked again" in described.warning


def test_a_wrong_shape_stops_at_the_start_and_is_never_kept(file: Path) -> None:
    with serve_endpoint(
        lambda n, _: Reply(body=json.dumps(ANSWER if n == 0 else {}).encode()), path="/search"
    ) as server:
        args = {"engine": "searxng", "url": server.address.removesuffix("/v1"), "cache": str(file.parent / "s")}
        with episode(load(file, **args)) as place:
            stopped = place.call("search", query="velmora")
        assert isinstance(stopped, Stopped) and stopped.is_outage and "no list of results" in stopped.why
        assert SearchCache(file.parent / "s", f"searxng {args['url']}").count() == 0
        with pytest.raises(RewardError, match="no list of results"), episode(load(file, **args)):
            pass


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
