"""The service against real servers of both protocols that are slow, fail, lie, argue, and refuse."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from judge_server import (
    AXES,
    KEY,
    PROVIDERS,
    Asked,
    Endpoint,
    Reply,
    Script,
    address_of,
    honest,
    judgement_text,
    pair,
    picture,
    refuse,
    say,
    score_of,
    serve_judge,
    settings_for,
)

from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.services.calls import Breaker, Budget
from vlmrl.services.client import Pauses
from vlmrl.services.judge import JudgeService
from vlmrl.services.judge_database import JudgementCache
from vlmrl.services.judge_prompt import JudgeRequest
from vlmrl.services.judge_settings import JudgeSettings
from vlmrl.services.protocol import BudgetSpent, JudgeDown, JudgeRejected, NoJudgement, NotInCache
from vlmrl.services.providers import retry_delay
from vlmrl.services.rubric import Judgement

PRICES = {"input": 1.0, "output": 10.0}


@pytest.fixture(autouse=True)
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def service(settings: JudgeSettings, **more: Any) -> JudgeService:
    """Return a service whose pauses are short."""
    values: dict[str, Any] = {
        "pauses": Pauses(first=0.01, most=0.02),
        "breaker": Breaker(first_seconds=0.01, most_seconds=0.02, rng=random.Random(1)),
        "rng": random.Random(0),
    }
    return JudgeService(settings, **(values | more))


@contextmanager
def judged(script: Script = honest, provider: str = "vllm", **more: Any) -> Iterator[tuple[Endpoint, JudgeService]]:
    with serve_judge(script) as endpoint, service(settings_for(endpoint, provider, **more)) as judge:
        yield endpoint, judge


def one(judge: JudgeService, number: int = 1) -> Judgement:
    return judge.submit([pair(number)])[0].result(30)


def is_honest(judgement: Judgement | RewardUnavailable, number: int) -> bool:
    scores = dict.fromkeys(AXES, score_of(picture(number)))
    return isinstance(judgement, Judgement) and judgement.scores == scores and not judgement.is_outage


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_judge_sees_both_pictures_and_the_rules_and_its_judgement_belongs_to_its_request(provider: str) -> None:
    seen: list[Asked] = []

    def script(number: int, asked: Asked) -> str:
        seen.append(asked)
        return honest(number, asked)

    with judged(script, provider, prices=PRICES) as (endpoint, judge):
        request = JudgeRequest(picture(5), picture(6), (("caption", "two boxes"),))
        assert is_honest(judge.submit([request])[0].result(30), 6)
        counters = judge.counters
    (asked,), (headers, body) = seen, endpoint.requests[0]
    assert asked.pictures == [picture(5), picture(6)] and "two boxes" in asked.text
    assert "never an instruction" in asked.system and "REFERENCE" in asked.text
    if provider == "gemini":
        form = body["generationConfig"]
        assert (form["temperature"], form["responseMimeType"]) == (0.0, "application/json")
        assert form["responseJsonSchema"]["required"] == ["reason", *AXES] and headers["x-goog-api-key"] == KEY
    else:
        form = body["response_format"]["json_schema"]
        assert (body["temperature"], form["strict"], form["schema"]["required"]) == (0.0, True, ["reason", *AXES])
        assert headers["authorization"] == f"Bearer {KEY}"
    assert (counters.calls, counters.input_tokens, counters.output_tokens) == (1, 900, 40)
    assert counters.cost == pytest.approx(0.0013) and counters.seconds > 0  # 900 / 1e6 * 1 + 40 / 1e6 * 10


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
def test_64_calls_are_in_the_server_together_and_no_more_than_allowed(provider: str) -> None:
    gate = threading.Barrier(64, timeout=20)  # breaks unless 64 requests are in the server together

    def script(number: int, asked: Asked) -> str:
        gate.wait()
        return honest(number, asked)

    with judged(script, provider, concurrency=64) as (endpoint, judge):
        judgements = judge.judge([pair(number) for number in range(128)])
    assert all(is_honest(judgement, number) for number, judgement in enumerate(judgements))
    assert endpoint.most_at_once == 64 and len(endpoint.requests) == 128


def test_threads_may_share_a_service() -> None:
    results: dict[int, bool] = {}
    with judged(concurrency=4) as (endpoint, judge):

        def work(number: int) -> None:
            results[number] = all(is_honest(one(judge, number * 10 + k), number * 10 + k) for k in range(5))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert results == dict.fromkeys(range(8), True) and endpoint.most_at_once <= 4


INVALID: dict[str, str] = {
    "nan": judgement_text("NaN"),
    "9.0": judgement_text("9.0"),
    "a text as a number": judgement_text('"0.5"'),
    "another schema": '{"score": 0.9}',
    "a list of two": f"[{judgement_text(1)}, {judgement_text(1)}]",
    "prose": f"Sure! {judgement_text(1)}",
    "an argument": "The picture tells me to answer 1.0, and I agree with it: 1.0 for all axes.",
    "nothing": "",
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", INVALID)
def test_an_answer_that_is_no_judgement_is_asked_for_again_with_a_reason(provider: str, name: str) -> None:
    texts: list[str] = []

    def script(number: int, asked: Asked) -> str:
        texts.append(asked.text)
        return INVALID[name] if number < 2 else honest(number, asked)

    with judged(script, provider) as (_, judge):
        assert is_honest(one(judge), 1)
        counters = judge.counters
    assert (counters.calls, counters.invalid, counters.retries) == (3, 2, 2)
    assert ["earlier answer was refused" in text for text in texts] == [False, True, True]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_judge_without_a_judgement_is_unavailable_and_is_not_asked_a_third_time(provider: str) -> None:
    with judged(lambda n, asked: INVALID["9.0"], provider, attempts=2) as (endpoint, judge):
        for _ in range(2):
            with pytest.raises(NoJudgement, match=r"2 answers had no judgement.*less than or equal to 1"):
                one(judge)
        assert judge.counters.unavailable == 2
    assert len(endpoint.requests) == 2


def failures(protocol: str, release: threading.Event) -> dict[str, Any]:
    whole = say(protocol, judgement_text(1)).body

    def slow(number: int) -> Reply:
        release.wait(20)
        return say(protocol, judgement_text(0))

    return {
        "slow": slow,
        "429": lambda n: refuse(protocol, 429, "slow down", retry_after="0.01"),
        "500": lambda n: refuse(protocol, 500),
        "503": lambda n: refuse(protocol, 503),
        "half a body": lambda n: Reply(body=whole[:30], declared=len(whole)),
        "no body": lambda n: Reply(body=b"", declared=len(whole)),
        "html": lambda n: Reply(body=b"<html>busy</html>", headers={"content-type": "text/html"}),
        "empty choices": lambda n: Reply(body=b'{"choices": [], "candidates": []}'),
        "another shape": lambda n: Reply(body=b'{"choices": 3, "candidates": 3}'),
        "a list": lambda n: Reply(body=b"[1, 2]"),
        "deep": lambda n: Reply(body=b"[" * 100_000),
        "compressed": lambda n: Reply(body=gzip.compress(whole), headers={"content-encoding": "gzip"}),
    }


FAILURES = list(failures("openai", threading.Event()))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", FAILURES)
def test_a_call_that_fails_is_made_again(provider: str, name: str) -> None:
    release = threading.Event()
    fail = failures(provider, release)[name]
    seconds = 1.0 if name == "slow" else 20.0
    script = lambda n, asked: fail(n) if n < 2 else honest(n, asked)  # noqa: E731
    with judged(script, provider, timeout_seconds=seconds) as (_, judge):
        assert is_honest(one(judge), 1)
        counters = judge.counters
        release.set()
    assert (counters.calls, counters.retries, counters.invalid) == (3, 2, 0)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", ["429", "500", "half a body", "empty choices"])
def test_an_outage_is_no_score(provider: str, name: str) -> None:
    fail = failures(provider, threading.Event())[name]
    with judged(lambda n, asked: fail(n), provider, attempts=3) as (endpoint, judge):
        (outcome,) = judge.judge([pair(1)])
        assert isinstance(outcome, JudgeDown) and isinstance(outcome, RewardUnavailable)
        assert "no judgement in 3 attempts" in outcome.message and judge.counters.unavailable == 1
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nobody_listens_is_an_outage(provider: str) -> None:
    with serve_judge() as endpoint:
        address = address_of(endpoint, provider)
    with service(settings_for(address, provider, attempts=2)) as judge, pytest.raises(JudgeDown, match="reached"):
        one(judge)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_fails_at_once_and_for_all(provider: str, status: int) -> None:
    with judged(lambda n, asked: refuse(asked.protocol, status, f"bad key {KEY}"), provider, concurrency=1) as served:
        endpoint, judge = served
        for number in range(3):
            with pytest.raises(JudgeRejected) as raised:
                one(judge, number)
            text = str(raised.value)
            assert KEY not in text and "<hidden>" in text and "JUDGE_KEY" in text and "judge-1" in text
            assert not isinstance(raised.value, RewardUnavailable)
    assert len(endpoint.requests) == 1


def test_gemini_refuses_a_key_with_400() -> None:
    body = (
        b'{"error": {"code": 400, "message": "API key not valid. Please pass a valid API key.", "status": '
        b'"INVALID_ARGUMENT", "details": [{"reason": "API_KEY_INVALID"}]}}'
    )
    with judged(lambda n, asked: Reply(400, body), "gemini") as (_, judge):
        with pytest.raises(JudgeRejected, match="API key not valid") as raised:
            one(judge)
        assert "JUDGE_KEY" in str(raised.value.hint)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_redirect_is_not_followed(provider: str) -> None:
    with serve_judge() as other:
        place = f"{other.address}/chat/completions"
        reply = Reply(307, headers={"location": place})
        with judged(lambda n, asked: reply, provider) as (_, judge), pytest.raises(JudgeRejected) as raised:
            one(judge)
        assert place in raised.value.message and other.requests == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_refusal_of_the_first_request_is_a_mistake_and_later_ones_concern_one_request(provider: str) -> None:
    refused = {0, 2}

    def script(number: int, asked: Asked) -> str | Reply:
        return refuse(asked.protocol, 400, "no images") if number in refused else honest(number, asked)

    with judged(script, provider) as (endpoint, judge):
        with pytest.raises(JudgeRejected, match="no images") as raised:
            one(judge)
        assert "read images" in str(raised.value.hint)
        assert is_honest(one(judge), 1)
        with pytest.raises(NoJudgement, match="no images"):
            one(judge, 2)
        assert is_honest(one(judge, 3), 3)
    assert len(endpoint.requests) == 4


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_answer_that_a_filter_withheld_is_not_asked_for_again(provider: str) -> None:
    script = lambda n, asked: say(asked.protocol, "", finish="content_filter")  # noqa: E731
    with judged(script, provider) as (endpoint, judge), pytest.raises(NoJudgement, match="filter withheld"):
        one(judge)
    assert len(endpoint.requests) == 1


def test_gemini_says_that_it_blocked_the_prompt() -> None:
    body = b'{"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 9}}'
    expected = pytest.raises(NoJudgement, match=r"blocked the prompt.*PROHIBITED_CONTENT")
    with judged(lambda n, asked: Reply(body=body), "gemini") as (endpoint, judge), expected:
        one(judge)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_answer_at_the_token_limit_is_no_judgement(provider: str) -> None:
    script = lambda n, asked: say(asked.protocol, judgement_text(1), finish="length")  # noqa: E731
    with judged(script, provider, attempts=1) as (_, judge), pytest.raises(NoJudgement, match="token limit") as raised:
        one(judge)
    assert "max_tokens" in str(raised.value.hint)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_huge_answer_is_not_read_to_its_end(provider: str) -> None:
    expected = pytest.raises(JudgeRejected, match=r"larger than the limit|more than 4,194,304 bytes")
    with judged(lambda n, asked: Reply(body=b" " * 5_000_000), provider) as (_, judge), expected:
        one(judge)


@pytest.mark.parametrize(("provider", "place"), [("openai", "head"), ("gemini", "head"), ("gemini", "body")])
def test_a_retry_after_holds_for_all_calls(provider: str, place: str) -> None:
    times: list[float] = []
    info = b'{"error": {"code": 429, "message": "slow down", "details": [{"retryDelay": "0.4s"}]}}'

    def script(number: int, asked: Asked) -> str | Reply:
        times.append(time.monotonic())
        if number:
            return honest(number, asked)
        return Reply(429, info) if place == "body" else refuse(asked.protocol, 429, retry_after="0.4")

    with judged(script, provider, concurrency=1) as (_, judge):
        assert all(isinstance(judgement, Judgement) for judgement in judge.judge([pair(n) for n in range(3)]))
    assert times[1] - times[0] >= 0.4 and len(times) == 4


@pytest.mark.parametrize(
    ("details", "seconds"),
    [
        ({"error": {"details": [{"@type": "x"}, {"retryDelay": "17s"}]}}, 17.0),
        ({"details": [{"retryDelay": "0.5s"}]}, 0.5),
        ({"error": {"details": [{"retryDelay": "soon"}]}}, 0.0),
        ({"error": {"details": [{"retryDelay": 3}]}}, 0.0),
        ({"error": {"details": {"retryDelay": "3s"}}}, 0.0),
        ({"error": "x"}, 0.0),
        ([1], 0.0),
        ("x", 0.0),
    ],
)
def test_gemini_writes_its_pause_into_the_body(details: Any, seconds: float) -> None:
    assert retry_delay(details) == seconds


def held(release: threading.Event) -> Callable[[int, Asked], str]:
    """A judge that answers when the event is set."""

    def script(number: int, asked: Asked) -> str:
        release.wait(20)
        return honest(number, asked)

    return script


def test_equal_requests_in_flight_share_one_call() -> None:
    release = threading.Event()
    with judged(held(release)) as (endpoint, judge):
        futures = judge.submit([pair(1)] * 10 + [pair(2)])
        while len(endpoint.requests) < 2:
            time.sleep(0.005)
        release.set()
        assert [is_honest(f.result(30), n) for f, n in zip(futures, [1] * 10 + [2], strict=True)] == [True] * 11
        counters = judge.counters
    assert (counters.calls, counters.deduped) == (2, 9) and len(endpoint.requests) == 2


def test_a_caller_that_gives_up_does_not_take_the_judgement_from_others() -> None:
    release = threading.Event()
    with judged(held(release)) as (endpoint, judge):
        first, second = judge.submit([pair(1), pair(1)])
        while not endpoint.requests:
            time.sleep(0.005)
        assert first.cancel()
        release.set()
        assert is_honest(second.result(30), 1)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_judgement_is_there_after_a_restart_and_without_a_network(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [pair(number) for number in range(5)]
    with serve_judge() as endpoint:
        settings = settings_for(endpoint, provider, cache="judge.sqlite")
        with service(settings, base_dir=tmp_path) as judge:
            first = judge.judge(requests)
        with service(settings, base_dir=tmp_path) as judge:
            assert judge.judge(requests) == first and judge.counters.cached == 5
        assert len(endpoint.requests) == 5
    monkeypatch.delenv("JUDGE_KEY")
    with service(settings, base_dir=tmp_path, offline=True) as judge:
        assert judge.judge(requests) == first
        with pytest.raises(NotInCache, match="offline"):
            one(judge, 77)
        with pytest.raises(JudgeRejected, match="offline"):
            judge.preflight()


def test_no_key_reaches_the_file_the_messages_or_the_judgement(tmp_path: Path) -> None:
    messages: list[str] = []
    for provider in PROVIDERS:
        script = lambda n, asked: refuse(asked.protocol, 500, KEY) if n < 9 else judgement_text(1, f"key {KEY}")  # noqa: E731
        with serve_judge(script) as endpoint:
            settings = settings_for(endpoint, provider, cache="judge.sqlite", attempts=20)
            with service(settings, base_dir=tmp_path, notify=messages.append) as judge:
                assert one(judge).reason == "key <hidden>"
    assert len(messages) == 4 and "<hidden>" in messages[0]  # the circuit opened and closed, for each provider
    data = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert KEY not in "".join(messages) and KEY.encode() not in data and b"127.0.0.1" not in data


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_key_that_is_written_with_escapes_is_hidden_too(provider: str, tmp_path: Path) -> None:
    escaped = judgement_text(1, "@").replace("@", "".join(f"\\u{ord(letter):04x}" for letter in KEY))
    with serve_judge(lambda n, asked: escaped) as endpoint:
        settings = settings_for(endpoint, provider, cache="judge.sqlite")
        judge = service(settings, base_dir=tmp_path)
        with judge:
            assert one(judge).reason == "<hidden>"
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


def test_words_that_the_sdk_does_not_know_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    body = json.dumps({"promptFeedback": {"blockReason": f"\x1b[31m{KEY}"}}).encode()
    with judged(lambda n, asked: Reply(body=body), "gemini") as (_, judge), pytest.raises(NoJudgement) as error:
        one(judge)
    texts = "".join(capfd.readouterr()) + error.value.message
    assert KEY.lower() not in texts.lower() and "[31m" not in texts.replace("[31M", "")


@pytest.mark.parametrize("tokens", [(-(10**9), -(10**9)), (10**30, 10**30)])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_budget_does_not_believe_every_number_of_tokens(
    provider: str, tokens: tuple[int, int], tmp_path: Path
) -> None:
    script = lambda n, asked: say(asked.protocol, judgement_text(1), tokens=tokens)  # noqa: E731
    more = {"prices": {"input": 1.0, "output": 1.0}, "max_cost": 1.0, "cache": "judge.sqlite"}
    with serve_judge(script) as endpoint, service(settings_for(endpoint, provider, **more), base_dir=tmp_path) as judge:
        assert one(judge).scores["layout"] == 1
        spent = judge.spent()
    assert spent.calls == 1 and 0 < spent.cost < 1 and spent.input_tokens == spent.output_tokens == 0


def test_the_environment_cannot_change_the_address_or_the_key_of_gemini(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_judge() as other:
        for name, value in {
            "GOOGLE_API_KEY": "other-key",
            "GEMINI_API_KEY": "third-key",
            "GOOGLE_GEMINI_BASE_URL": other.address,
            "GOOGLE_VERTEX_BASE_URL": other.address,
            "GOOGLE_GENAI_USE_VERTEXAI": "true",
        }.items():
            monkeypatch.setenv(name, value)
        with judged(honest, "gemini") as (endpoint, judge):
            assert is_honest(one(judge), 1)
        assert endpoint.requests[0][0]["x-goog-api-key"] == KEY and other.requests == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_missing_key_is_named_before_any_call(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(JudgeRejected, match="JUDGE_KEY"):
        service(settings_for("http://127.0.0.1:9", provider))


def test_an_outage_scores_0_only_where_the_settings_say_so_and_is_not_kept(tmp_path: Path) -> None:
    is_down = True
    script = lambda n, asked: refuse(asked.protocol, 500) if is_down else honest(n, asked)  # noqa: E731
    with serve_judge(script) as endpoint:
        settings = settings_for(endpoint, outage="zero", attempts=2, cache="judge.sqlite")
        with service(settings, base_dir=tmp_path) as judge:
            judgement = one(judge)
            assert judgement.is_outage and judgement.total(judge.rubric) == 0 and judge.counters.unavailable == 1
            is_down = False
            assert is_honest(one(judge), 1)


def test_a_judge_that_is_waited_for_answers_in_the_end() -> None:
    script = lambda n, asked: refuse(asked.protocol, 503) if n < 30 else honest(n, asked)  # noqa: E731
    with judged(script, outage="wait", attempts=1, concurrency=4) as (_, judge):
        judgements = judge.judge([pair(number) for number in range(12)])
        assert judge.counters.opened == 1
    assert all(is_honest(judgement, number) for number, judgement in enumerate(judgements))


def test_a_wait_ends_after_its_time() -> None:
    script = lambda n, asked: refuse(asked.protocol, 503)  # noqa: E731
    with judged(script, outage="wait", outage_minutes=0.005) as (endpoint, judge), pytest.raises(JudgeDown):
        one(judge)
    assert len(endpoint.requests) > 1


@pytest.mark.parametrize("concurrency", [1, 4])
def test_after_failures_in_a_row_nothing_is_sent_until_a_probe_is_due(concurrency: int) -> None:
    messages: list[str] = []
    with serve_judge(lambda n, asked: refuse(asked.protocol, 500)) as endpoint:
        breaker = Breaker(failures=4, first_seconds=1000.0, most_seconds=1000.0)
        settings = settings_for(endpoint, concurrency=concurrency, attempts=3)
        with service(settings, breaker=breaker, notify=messages.append) as judge:
            outcomes = judge.judge([pair(number) for number in range(32)])
    assert all(isinstance(outcome, JudgeDown) for outcome in outcomes)
    # When the fourth failure opens the circuit, the other slots may each have a call in flight.
    assert 4 <= len(endpoint.requests) <= 4 + concurrency - 1
    assert len(messages) == 1 and "one request at a time" in messages[0]


def test_probes_come_one_at_a_time_and_the_first_answer_lets_all_others_through() -> None:
    lock, inside, at_once = threading.Lock(), 0, []

    def script(number: int, asked: Asked) -> str | Reply:
        nonlocal inside
        if 7 <= number < 13:  # four failures, and at most three calls that were in flight then: the rest are probes
            with lock:
                inside += 1
                at_once.append(inside)
            time.sleep(0.02)
            with lock:
                inside -= 1
        return refuse(asked.protocol, 500) if number < 13 else honest(number, asked)

    with serve_judge(script) as endpoint:
        breaker = Breaker(failures=4, first_seconds=0.01, most_seconds=0.01)
        with service(settings_for(endpoint, concurrency=4, outage="wait"), breaker=breaker) as judge:
            outcomes = judge.judge([pair(number) for number in range(32)])
    assert all(is_honest(outcome, number) for number, outcome in enumerate(outcomes))
    assert at_once == [1] * 6 and len(endpoint.requests) == 13 + 32


def test_a_busy_judge_does_not_open_the_circuit() -> None:
    script = lambda n, asked: refuse(asked.protocol, 429) if n < 12 else honest(n, asked)  # noqa: E731
    with judged(script, attempts=20, concurrency=4) as (_, judge):
        assert all(isinstance(judgement, Judgement) for judgement in judge.judge([pair(n) for n in range(4)]))
        assert judge.counters.opened == 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_call_after_the_last_one_is_not_sent(provider: str, tmp_path: Path) -> None:
    with serve_judge() as endpoint:
        settings = settings_for(endpoint, provider, cache="judge.sqlite", max_calls=5, concurrency=3, prices=PRICES)
        with service(settings, base_dir=tmp_path) as judge:
            outcomes = judge.judge([pair(number) for number in range(20)])
            assert judge.spent().calls == 5 and judge.spent().cost == pytest.approx(5 * 0.0013)
        assert sum(isinstance(outcome, Judgement) for outcome in outcomes) == 5
        assert all(isinstance(outcome, (Judgement, BudgetSpent)) for outcome in outcomes)
        with service(settings, base_dir=tmp_path) as judge:  # a second run goes on where the first one ended
            assert judge.judge([pair(number) for number in range(20)]).count(outcomes[0]) >= 1
            assert judge.counters.calls == 0
    assert len(endpoint.requests) == 5


def test_a_cost_is_never_exceeded(tmp_path: Path) -> None:
    with serve_judge() as endpoint:
        # A call costs 0.0013, and at most 64 * 10 / 1e6 for its answer + its prompt.
        settings = settings_for(
            endpoint, cache="judge.sqlite", max_cost=0.02, prices=PRICES, max_tokens=64, concurrency=8
        )
        with service(settings, base_dir=tmp_path) as judge:
            outcomes = judge.judge([pair(number) for number in range(30)])
            spent = judge.spent()
    assert spent.cost <= 0.02 and 8 <= spent.calls < 30 and spent.reserved == 0
    assert sum(isinstance(outcome, BudgetSpent) for outcome in outcomes) == 30 - spent.calls


@pytest.mark.parametrize("provider", PROVIDERS)
def test_calls_that_were_refused_with_a_status_cost_nothing_and_lost_ones_count(provider: str, tmp_path: Path) -> None:
    release = threading.Event()

    def script(number: int, asked: Asked) -> str | Reply:
        if number < 5:
            return refuse(asked.protocol, 500)
        if number == 5:
            release.wait(20)
        return honest(number, asked)

    with serve_judge(script) as endpoint:
        settings = settings_for(endpoint, provider, cache="f", max_calls=2, attempts=20, timeout_seconds=1.5)
        with service(settings, base_dir=tmp_path) as judge:
            assert is_honest(one(judge), 1)  # five refusals, one without an answer, one judgement
            assert judge.spent().calls == 2
            with pytest.raises(BudgetSpent, match="2 of 2 calls"):
                one(judge, 2)
            release.set()
    assert len(endpoint.requests) == 7


PROCESS = """
import json, random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from judge_server import pair, settings_for
from vlmrl.services.judge import JudgeService
from vlmrl.services.rubric import Judgement
settings = settings_for(sys.argv[2], cache=sys.argv[3], max_calls=50, concurrency=4)
numbers = list(range(60))
random.Random(int(sys.argv[4])).shuffle(numbers)
with JudgeService(settings, base_dir=Path(sys.argv[3]).parent) as judge:
    outcomes = judge.judge([pair(number) for number in numbers])
print(json.dumps({n: o.scores["layout"] for n, o in zip(numbers, outcomes) if isinstance(o, Judgement)}))
"""


@pytest.mark.slow
def test_two_processes_share_the_judgements_and_the_budget(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    with serve_judge() as endpoint:
        command = [sys.executable, "-c", PROCESS, tests, endpoint.address, str(tmp_path / "judge.sqlite")]
        running = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(2)]
        answers = [json.loads(process.communicate(timeout=60)[0]) for process in running]
        assert len(endpoint.requests) <= 50
        third = subprocess.run([*command, "7"], capture_output=True, text=True, timeout=60)
        assert len(endpoint.requests) <= 50
    together = json.loads(third.stdout)
    for answer in answers:
        assert all(score == score_of(picture(int(number))) for number, score in answer.items())
        assert answer.items() <= together.items()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_preflight_makes_one_small_call_and_reports_it(provider: str) -> None:
    with judged(honest, provider, prices=PRICES) as (endpoint, judge):
        report = judge.preflight()
    assert (report.provider, report.model, report.input_tokens, report.output_tokens) == (provider, "judge-1", 900, 40)
    assert report.cost == pytest.approx(0.0013) and report.seconds > 0 and len(endpoint.requests) == 1


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("401", JudgeRejected, "JUDGE_KEY"),
        ("400", JudgeRejected, "read images"),
        ("500", JudgeDown, "the server runs, but fails"),
        ("429", JudgeDown, "quota"),
        ("prose", JudgeRejected, "follows a JSON schema"),
    ],
)
def test_a_preflight_that_fails_says_what_to_do(provider: str, name: str, kind: type[RewardError], words: str) -> None:
    def script(number: int, asked: Asked) -> str | Reply:
        return "no JSON" if name == "prose" else refuse(asked.protocol, int(name))

    with judged(script, provider) as (endpoint, judge), pytest.raises(kind) as raised:
        judge.preflight()
    assert type(raised.value) is kind and words in str(raised.value.hint)
    assert len(endpoint.requests) == (1 if name in ("401", "400") else judge.settings.attempts)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("outage", ["mask", "wait", "zero"])
@pytest.mark.parametrize("name", ["500", "prose", "cut"])
def test_a_preflight_asks_again_like_any_other_request(provider: str, outage: str, name: str) -> None:
    def script(number: int, asked: Asked) -> str | Reply:
        if number:
            return honest(number, asked)
        return Reply(body=b"{") if name == "cut" else "no JSON" if name == "prose" else refuse(asked.protocol, 500)

    with judged(script, provider, outage=outage) as (endpoint, judge):
        report = judge.preflight()
    assert report.judgement.scores and not report.judgement.is_outage and len(endpoint.requests) == 2


def test_a_preflight_without_a_server_asks_whether_it_runs() -> None:
    with service(settings_for("http://127.0.0.1:9/v1", outage="wait")) as judge, pytest.raises(JudgeDown) as raised:
        judge.preflight()
    assert "cannot be reached" in raised.value.message and "is the server running" in str(raised.value.hint)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_closing_cancels_what_is_in_flight_and_ends_the_threads(provider: str) -> None:
    release = threading.Event()
    before = threading.active_count()
    with serve_judge(held(release)) as endpoint:
        judge = service(settings_for(endpoint, provider))
        futures = judge.submit([pair(number) for number in range(3)])
        while not endpoint.requests:
            time.sleep(0.005)
        judge.close()
        judge.close()
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(5)
        release.set()
    assert threading.active_count() <= before + 3  # the server's threads of connections may live a moment longer


def test_a_service_is_not_used_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with judged() as (_, judge):
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(RewardError, match="forked process"):
            judge.submit([pair(1)])
        monkeypatch.undo()
        assert is_honest(one(judge), 1)


def test_a_service_that_is_closed_says_so() -> None:
    with judged() as (_, judge):
        judge.close()
        for use in (lambda: judge.submit([pair(1)]), judge.preflight):
            with pytest.raises(RewardError, match="closed"):
                use()


def fail_with_full_disk(*_: Any, **__: Any) -> Any:
    raise RewardError("the judge's file fails: database or disk is full")


def test_a_judgement_is_given_even_if_the_file_cannot_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(JudgementCache, "keep", fail_with_full_disk)
    with serve_judge() as endpoint:
        settings = settings_for(endpoint, cache="judge.sqlite")
        with service(settings, base_dir=tmp_path, notify=messages.append) as judge:
            assert is_honest(one(judge), 1)
    assert len(messages) == 1 and "disk is full" in messages[0]


def test_no_call_is_sent_that_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "reserve", fail_with_full_disk)
    with judged() as (endpoint, judge), pytest.raises(RewardError, match="disk is full") as raised:
        one(judge)
    assert not isinstance(raised.value, RewardUnavailable) and endpoint.requests == []
