"""The client of endpoints against a real server that is slow, fails, cuts its answers and sends garbage."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from endpoint_server import Behaviour, Endpoint, Reply, completion, echo, failure, prompt_of, serve_endpoint, turn

from vlmrl.services.client import EndpointClient, EndpointOptions, base_url
from vlmrl.services.protocol import (
    BrokenAnswer,
    ChatAnswer,
    ChatRequest,
    ChatTurn,
    EndpointDown,
    EndpointError,
    EndpointRejects,
    ImageFile,
    RequestRefused,
    retry_seconds,
)

KEY = "sk-secret-of-the-test-123"


class Pauses(list):
    """Stands in for sleep: remembers the seconds and does not wait."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


def request(text: str = "hello", **more: Any) -> ChatRequest:
    return ChatRequest((ChatTurn("user", (text,)),), 16, **more)


def client(endpoint: Endpoint | str, pauses: Callable[[float], Awaitable[None]], **options: Any) -> EndpointClient:
    address = endpoint if isinstance(endpoint, str) else endpoint.address
    return EndpointClient(EndpointOptions(address, "m", **options), sleep=pauses, rng=random.Random(0))


def ask(behaviour: Behaviour, asked: ChatRequest | None = None, **options: Any) -> tuple[list[str], Endpoint, Pauses]:
    """(texts of the answers, the server, the pauses) of one request."""
    pauses = Pauses()
    with serve_endpoint(behaviour) as endpoint, client(endpoint, pauses, **options) as one:
        answers = one.submit(asked or request()).result(20)
    return [a.text for a in answers], endpoint, pauses


def answer_to(behaviour: Behaviour) -> ChatAnswer:
    with serve_endpoint(behaviour) as endpoint, client(endpoint, Pauses()) as one:
        (answer,) = one.submit(request()).result(20)
    return answer


def error_of(
    behaviour: Behaviour, kind: type[EndpointError], asked: ChatRequest | None = None, **options: Any
) -> tuple[EndpointError, Endpoint, Pauses]:
    pauses = Pauses()
    with (
        serve_endpoint(behaviour) as endpoint,
        client(endpoint, pauses, **options) as one,
        pytest.raises(kind) as raised,
    ):
        one.submit(asked or request()).result(20)
    assert type(raised.value) is kind
    return raised.value, endpoint, pauses


def test_a_chat_is_sent_with_its_images_in_their_places() -> None:
    image = ImageFile(b"\x00\x01png", "image/png")
    turns = (ChatTurn("system", ("be brief",)), ChatTurn("user", ("a", image, "b")))
    texts, endpoint, _ = ask(echo, ChatRequest(turns, 9, temperature=0.5, top_p=0.9, top_k=3, seed=5))
    assert texts == ["ab 5"]
    assert endpoint.bodies == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "be brief"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAFwbmc="}},
                        {"type": "text", "text": "b"},
                    ],
                },
            ],
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "seed": 5,
        }
    ]


def test_all_samples_are_asked_for_at_once() -> None:
    texts, endpoint, _ = ask(lambda n, body: completion("x", "y", "z"), request(samples=3))
    assert texts == ["x", "y", "z"] and [b["n"] for b in endpoint.bodies] == [3]


@pytest.mark.parametrize("refuses", [True, False])
def test_a_server_without_n_is_asked_for_each_sample(refuses: bool) -> None:
    def behaviour(number: int, body: dict[str, Any]) -> Reply:
        if refuses and "n" in body:
            return failure(400, "n must be 1")
        return completion(f"s{body['seed']}")

    texts, endpoint, _ = ask(behaviour, request(samples=3, seed=10))
    assert texts == ["s10", "s11", "s12"]
    assert ["n" in b for b in endpoint.bodies] == ([True, False, False, False] if refuses else [True, False, False])


def test_requests_in_flight_are_bounded_and_answers_belong_to_their_requests() -> None:
    gate = threading.Barrier(3, timeout=20)  # breaks unless three requests are in the server together

    def behaviour(number: int, body: dict[str, Any]) -> Reply:
        gate.wait()
        return completion(prompt_of(body))

    with serve_endpoint(behaviour) as endpoint, client(endpoint, Pauses(), concurrency=3) as one:
        futures = [one.submit(request(f"p{i}")) for i in range(12)]
        assert [f.result(20)[0].text for f in futures] == [f"p{i}" for i in range(12)]
    assert endpoint.most_at_once == 3


@pytest.mark.parametrize("status", [408, 429, 500, 503, 529])
def test_an_overloaded_server_is_asked_again_with_growing_pauses(status: int) -> None:
    texts, endpoint, pauses = ask(lambda n, body: failure(status) if n < 3 else completion("at last"))
    assert texts == ["at last"] and len(endpoint.requests) == 4
    # Pauses are drawn from [half, whole] of 1, 2 and 4 s.
    assert all(whole / 2 <= p <= whole for p, whole in zip(pauses, (1, 2, 4), strict=True))


def test_retry_after_is_waited_for_by_all_requests_and_bounded() -> None:
    _, _, pauses = ask(lambda n, body: failure(429, retry_after="30") if n == 0 else completion("x"))
    assert 30.5 <= pauses[0] <= 31 and 29 < pauses[1] <= 30  # its own pause, and the one that holds for everybody
    _, _, pauses = ask(
        lambda n, body: failure(429, retry_after="99999") if n == 0 else completion("x"), most_pause_seconds=5.0
    )
    assert max(pauses) <= 6


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2.5", 2.5),
        ("Mon, 23 Nov 2026 12:00:10 GMT", 10.0),
        ("Mon, 23 Nov 2026 11:00:00 GMT", 0.0),
        (None, 0.0),
        ("soon", 0.0),
        ("Thu, 01 Jan 999999999999 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2026 00:00:00 +9999999999999", 0.0),
        ("9" * 5000, 0.0),
        ("-3", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float) -> None:
    assert retry_seconds(header, datetime(2026, 11, 23, 12, tzinfo=timezone.utc)) == seconds


def test_an_outage_is_reported_after_all_attempts() -> None:
    error, endpoint, pauses = error_of(lambda n, body: failure(503, "overloaded"), EndpointDown, attempts=4)
    assert "HTTP 503: overloaded" in error.message and (len(endpoint.requests), len(pauses)) == (4, 3)


def test_a_user_is_told_of_an_outage_once_and_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    told: list[str] = []
    with serve_endpoint(lambda n, body: failure(500, KEY) if n < 3 else completion("x")) as endpoint:
        options = EndpointOptions(endpoint.address, "m", "MY_KEY")
        with EndpointClient(options, notify=told.append, sleep=Pauses()) as one:
            one.submit(request()).result(20)
    assert len(told) == 1 and told[0].startswith("the endpoint fails: HTTP 500: <hidden>; attempt 2 of 6 in ")


def test_nobody_listens_is_an_outage() -> None:
    with serve_endpoint() as endpoint:
        address = endpoint.address
    with client(address, Pauses(), attempts=2) as one, pytest.raises(EndpointDown, match="cannot be reached"):
        one.submit(request()).result(20)


def test_a_slow_answer_is_given_up_after_the_limit_of_the_whole_call() -> None:
    release = threading.Event()

    def behaviour(number: int, body: dict[str, Any]) -> Reply:
        if number == 0:
            release.wait(20)
        return completion("quick")

    texts, endpoint, _ = ask(behaviour, timeout_seconds=1.0)
    release.set()
    assert texts == ["quick"] and len(endpoint.requests) == 2


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_is_of_one_request_and_not_tried_again(status: int) -> None:
    error, endpoint, _ = error_of(lambda n, body: failure(status, "too long"), RequestRefused)
    assert f"HTTP {status}: too long" in error.message and len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_is_rejected_at_once(status: int) -> None:
    error, endpoint, _ = error_of(lambda n, body: failure(status), EndpointRejects)
    assert "the model's name `m`" in str(error.hint) and len(endpoint.requests) == 1


def test_requests_that_fail_after_their_caller_has_gone_print_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with serve_endpoint(lambda n, body: failure(404)) as endpoint, client(endpoint, Pauses(), concurrency=32) as one:
        futures = [one.submit(request()) for _ in range(64)]
        with pytest.raises(EndpointRejects):
            futures[0].result(20)
        while not all(future.done() for future in futures):
            for future in futures:
                future.cancel()
    gc.collect()
    assert "never retrieved" not in caplog.text


CUT = completion("whole").body
BROKEN = {
    "garbage": Reply(body=b"<html>busy</html>"),
    "empty": Reply(),
    "half of it": Reply(body=CUT[:20], declared=len(CUT)),
    "no choices": Reply(body=b'{"choices": []}'),
    "another shape": Reply(body=b'{"choices": [{"message": 3}]}'),
    "deep": Reply(body=b"[" * 100_000),
    "no text": Reply(body=b'{"choices": [{"message": {"content": {"a": 1}}}]}'),
    "no utf-8": Reply(body=b"\xff\xfe"),
    "compressed": Reply(body=b"x", headers={"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_tried_again_and_is_no_outage(name: str) -> None:
    texts, _, _ = ask(lambda n, body: BROKEN[name] if n < 2 else completion("whole"))
    assert texts == ["whole"]
    _, endpoint, _ = error_of(lambda n, body: BROKEN[name], BrokenAnswer, attempts=3)
    assert len(endpoint.requests) == 3


def test_a_response_at_its_token_limit_is_an_answer() -> None:
    answer = answer_to(lambda n, body: completion("cut", finish="length", tokens=16))
    assert (answer.text, answer.finish, answer.num_tokens, answer.refusal) == ("cut", "length", 16, "")


def test_a_filtered_response_says_so() -> None:
    answer = answer_to(lambda n, body: completion("", finish="content_filter", tokens=None))
    assert (answer.num_tokens, answer.refusal) == (None, "the endpoint's content filter withheld the response")


def test_a_huge_answer_is_not_read_to_its_end() -> None:
    error, _, _ = error_of(lambda n, body: Reply(body=b" " * 100_000), RequestRefused, most_answer_bytes=50_000)
    assert "more than 50,000 bytes" in error.message


def test_the_key_is_hidden_in_calls_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITS_KEY", KEY)
    with (
        serve_endpoint(lambda n, b: turn(None, ("a", f'{{"x": "{KEY}"}}'))) as endpoint,
        client(endpoint, Pauses(), key_env="ITS_KEY") as one,
    ):
        ((call,),) = [answer.calls for answer in one.submit(request()).result(20)]
    assert call.name == "a" and KEY not in call.arguments and call.arguments.startswith('{"x": "<hidden')


def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with serve_endpoint() as other:
        place = f"{other.address}/chat/completions"
        error, _, _ = error_of(
            lambda n, body: Reply(307, headers={"location": place}), EndpointRejects, key_env="MY_KEY"
        )
        assert place in error.message and other.requests == []


def test_the_other_name_of_the_token_limit_is_learned_once() -> None:
    def behaviour(number: int, body: dict[str, Any]) -> Reply:
        if "max_tokens" in body:
            return failure(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return completion(str(body["max_completion_tokens"]))

    with serve_endpoint(behaviour) as endpoint, client(endpoint, Pauses()) as one:
        assert [one.submit(request()).result(20)[0].text for _ in range(3)] == ["16"] * 3
    assert len(endpoint.requests) == 4


def test_the_key_is_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    texts, endpoint, _ = ask(lambda n, body: completion(f"your key is {KEY}"), key_env="MY_KEY")
    assert endpoint.requests[0][0]["authorization"] == f"Bearer {KEY}" and texts == ["your key is <hidden>"]
    for status, kind in ((400, RequestRefused), (401, EndpointRejects), (500, EndpointDown)):
        error, _, _ = error_of(
            lambda n, body, s=status: failure(s, f"bad key {KEY}"), kind, key_env="MY_KEY", attempts=2
        )
        assert "bad key <hidden>" in error.message and KEY not in str(error)
    assert KEY not in caplog.text
    assert "authorization" not in ask(echo)[1].requests[0][0]


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "line\nbreak", "k\u00e4y"])
def test_a_variable_without_a_key_is_an_error_before_any_request(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(EndpointError, match="MY_KEY"):
        client("http://localhost:1/v1", Pauses(), key_env="MY_KEY")


@pytest.mark.parametrize(
    "text", ["localhost:8000", "ftp://a/v1", "http://", "http://u:p@a/v1", "http://a/v1?key=1", "http://a:x/v1"]
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(text: str) -> None:
    with pytest.raises(EndpointError) as raised:
        base_url(text)
    assert "u:p" not in str(raised.value) and "key=1" not in str(raised.value)


def test_an_address_may_end_with_the_path() -> None:
    assert {base_url(f"http://a/v1{end}") for end in ("", "/", "/chat/completions", "/chat/completions/")} == {
        "http://a/v1"
    }


def test_closing_cancels_what_is_in_flight_and_ends_the_thread() -> None:
    release = threading.Event()

    def behaviour(number: int, body: dict[str, Any]) -> Reply:
        release.wait(20)
        return completion("late")

    with serve_endpoint(behaviour) as endpoint:
        one = client(endpoint, Pauses())
        future = one.submit(request())
        while not endpoint.requests:
            pass
        one.close()
        one.close()
        release.set()
        assert future.cancelled() and not [t for t in threading.enumerate() if t.name == "endpoint"]


def test_texts_that_are_no_unicode_can_be_sent() -> None:
    texts, _, _ = ask(lambda n, body: completion(json.dumps(prompt_of(body))), request("half \ud800"))
    assert texts == [json.dumps("half \ud800")]


@pytest.mark.parametrize("as_json", [True, False])
def test_the_key_is_hidden_before_an_error_text_is_cut(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    # An error text is cut at 300 characters: here all of the key but its last character stands before the cut.
    words = "x" * (300 - len(KEY)) + " " + KEY
    reply = failure(400, words) if as_json else Reply(400, words.encode())
    error, _, _ = error_of(lambda n, body: reply, RequestRefused, key_env="MY_KEY")
    assert KEY[:8] not in str(error) and "xxx" in error.message
