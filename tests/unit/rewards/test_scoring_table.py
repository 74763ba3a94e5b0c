"""The calls and outcomes of each kind of reward, for a response that is fine and for each way in which one is not.

A case names the kind of reward, the response under test and options. Expected are the calls in their order (texts of
one call joined by +), then the value or the error of each input, with its note. Every reward scores "a", then the
response under test, then "b"; the rewards of workers have one worker.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.rewards import RewardSpec
from vlmrl.rewards.attempts import AttemptRule
from vlmrl.rewards.base import EARNED, ServiceFunction
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.types import RewardInput, RewardResult, Score

FILE = """
import os, pathlib, time
from vlmrl import RewardUnavailable
HERE = pathlib.Path(__file__).parent
def answer(text):
    if text == "raises":
        raise KeyError("mine")
    if text == "hangs":
        time.sleep(60)
    if text == "kills":
        os._exit(3)
    if text == "fills":
        bytearray(1 << 46)
    if text == "is down" or (text == "was down" and not (HERE / "asked").exists()):
        (HERE / "asked").touch()
        raise RewardUnavailable("no answer")
    return 1.0
def called(texts):
    with open(HERE / "log", "a") as file:
        file.write("+".join(texts) + "\\n")
    return [answer(text) for text in texts]
def worker(x):
    return called([x.response])[0]
def batched(completions, **columns):
    return called(completions)
"""
DECLARED = {"reward": 0.25}
log: list[str] = []
"""Calls of the rewards that run in this process."""


def answer_here(x: RewardInput) -> float:
    log.append(x.response)
    if x.response == "raises":
        raise KeyError("mine")
    if x.response == "fills":
        raise MemoryError
    if x.response == "is down" or (x.response == "was down" and log.count("was down") == 1):
        raise RewardUnavailable("no answer")
    return 1.0


class InHouse:
    """A service that answers at once."""

    def submit(self, inputs: Sequence[RewardInput]) -> list[Future[RewardResult]]:
        futures = []
        for x in inputs:
            futures.append(Future())
            try:
                futures[-1].set_result(RewardResult({"reward": answer_here(x)}))
            except Exception as error:
                futures[-1].set_exception(error)
        return futures

    def close(self) -> None: ...


def open_service(place: Any) -> InHouse:
    return InHouse()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(AttemptRule, "first_seconds", 0.02)
    log.clear()


def opened(kind: str, reward_file: Any, on_timeout: bool) -> Scorer:
    if kind in ("worker", "batched"):
        spec = reward_file(FILE, kind)
    else:
        service = ServiceFunction("judge", __name__, "open_service") if kind == "service" else None
        spec = RewardSpec(kind, answer_here, {}, {}, pure=True, service=service)
    return Scorer(replace(spec, on_timeout=DECLARED if on_timeout else {}), timeout_seconds=0.7)


def scored(scorer: Scorer, texts: Sequence[str], strict: bool, on_outage: Any) -> list[Score]:
    rows = [f"row {text}" for text in texts]
    with ScoringSession({"": scorer}, AttemptRule(on_outage), strict=strict) as session:
        session.submit(0, "", [RewardInput(text) for text in texts], rows)
        (group,) = session.collect()
    assert len(group.seconds) == 3
    return list(group.scores)


def shown(score: Score) -> str:
    error = re.sub(r"\.py:\d+", ".py", str(score.error))
    text = f"{score.status}: {error}" if math.isnan(score.value) else f"{score.value:g}"
    return f"{text} ({score.note})" if score.note else text


TIME = "no answer within 0.7 s; its worker was ended"
KILLED = "it ended its worker process with exit code 3"
ALONE = "scored on its own, because the batch call failed"
TABLE: list[tuple[str, list[str]]] = [
    ("built-in, ok", ["a ok b", "1", "1", "1"]),
    ("built-in, raises", ["a raises b", "1", "failed: KeyError: 'mine' (test_scoring_table.py)", "1"]),
    ("built-in, raises, strict", ["a raises", "RewardError: reward `built-in` raised KeyError: 'mine' [row raises]"]),
    ("built-in, fills", ["a fills b", "1", "failed: MemoryError (test_scoring_table.py)", "1"]),
    ("built-in, is down", ["a is down b", "1", "unavailable: no answer", "1"]),
    (
        "built-in, is down, strict",
        ["a is down", "RewardUnavailable: reward `built-in` is unavailable: no answer [row is down]"],
    ),
    ("built-in, is down, mask", ["a is down b", "1", "unavailable: no answer", "1"]),
    ("built-in, is down, mask, strict", ["a is down b", "1", "unavailable: no answer", "1"]),
    ("built-in, was down, wait", ["a was down b was down", "1", "1", "1"]),
    ("built-in, was down, wait, strict", ["a was down b was down", "1", "1", "1"]),
    (
        "built-in, raises, wait, strict",
        ["a raises", "RewardError: reward `built-in` raised KeyError: 'mine' [row raises]"],
    ),
    ("worker, ok", ["a ok b", "1", "1", "1"]),
    ("worker, raises", ["a raises b", "1", "failed: KeyError: 'mine' (mine.py)", "1"]),
    (
        "worker, raises, strict",
        ["a raises", "RewardError: reward `mine.py:worker` raised KeyError: 'mine' [row raises]"],
    ),
    (
        "worker, raises, on_timeout, strict",
        ["a raises", "RewardError: reward `mine.py:worker` raised KeyError: 'mine' [row raises]"],
    ),
    ("worker, fills", ["a fills b", "1", "failed: MemoryError (mine.py)", "1"]),
    ("worker, fills, on_timeout", ["a fills b fills", "1", f"0.25 (MemoryError; {EARNED})", "1"]),
    ("worker, hangs", ["a hangs b", "1", f"failed: {TIME}", "1"]),
    ("worker, hangs, strict", ["a hangs", f"RewardError: reward `mine.py:worker` failed: {TIME} [row hangs]"]),
    ("worker, hangs, on_timeout", ["a hangs b hangs", "1", f"0.25 ({TIME}; {EARNED})", "1"]),
    ("worker, kills", ["a kills kills b", "1", f"failed: {KILLED}", "1"]),
    ("worker, kills, strict", ["a kills kills", f"RewardError: reward `mine.py:worker` failed: {KILLED} [row kills]"]),
    ("worker, kills, on_timeout", ["a kills kills b kills", "1", f"0.25 ({KILLED}; {EARNED})", "1"]),
    ("worker, kills, on_timeout, strict", ["a kills kills b kills", "1", f"0.25 ({KILLED}; {EARNED})", "1"]),
    ("worker, is down", ["a is down b", "1", "unavailable: no answer", "1"]),
    (
        "worker, is down, strict",
        ["a is down", "RewardUnavailable: reward `mine.py:worker` is unavailable: no answer [row is down]"],
    ),
    ("worker, is down, mask, strict", ["a is down b", "1", "unavailable: no answer", "1"]),
    ("worker, was down, wait, strict", ["a was down b was down", "1", "1", "1"]),
    (
        "worker, raises, wait, strict",
        ["a raises", "RewardError: reward `mine.py:worker` raised KeyError: 'mine' [row raises]"],
    ),
    ("batched, ok", ["a+ok+b", "1", "1", "1"]),
    (
        "batched, raises",
        ["a+raises+b a raises b", f"1 ({ALONE})", "failed: KeyError: 'mine' (mine.py)", f"1 ({ALONE})"],
    ),
    (
        "batched, raises, strict",
        ["a+raises+b", "RewardError: reward `mine.py:batched` raised KeyError: 'mine' [row a]"],
    ),
    ("batched, fills", ["a+fills+b a fills b", f"1 ({ALONE})", "failed: MemoryError (mine.py)", f"1 ({ALONE})"]),
    (
        "batched, fills, on_timeout",
        ["a+fills+b a fills b", f"1 ({ALONE})", f"0.25 (MemoryError; {EARNED})", f"1 ({ALONE})"],
    ),
    ("batched, hangs", ["a+hangs+b a hangs b", f"1 ({ALONE})", f"failed: {TIME}", f"1 ({ALONE})"]),
    ("batched, hangs, strict", ["a+hangs+b", f"RewardError: reward `mine.py:batched` failed: {TIME} [row a]"]),
    ("batched, hangs, on_timeout", ["a+hangs+b a hangs b", f"1 ({ALONE})", f"0.25 ({TIME}; {EARNED})", f"1 ({ALONE})"]),
    ("batched, kills", ["a+kills+b a kills kills b", f"1 ({ALONE})", f"failed: {KILLED}", f"1 ({ALONE})"]),
    ("batched, kills, strict", ["a+kills+b", f"RewardError: reward `mine.py:batched` failed: {KILLED} [row a]"]),
    (
        "batched, kills, on_timeout",
        ["a+kills+b a kills kills b", f"1 ({ALONE})", f"0.25 ({KILLED}; {EARNED})", f"1 ({ALONE})"],
    ),
    (
        "batched, kills, on_timeout, strict",
        ["a+kills+b a kills kills b", f"1 ({ALONE})", f"0.25 ({KILLED}; {EARNED})", f"1 ({ALONE})"],
    ),
    ("batched, is down", ["a+is down+b", "unavailable: no answer", "unavailable: no answer", "unavailable: no answer"]),
    (
        "batched, is down, strict",
        ["a+is down+b", "RewardUnavailable: reward `mine.py:batched` is unavailable: no answer [row a]"],
    ),
    (
        "batched, is down, mask, strict",
        ["a+is down+b", "unavailable: no answer", "unavailable: no answer", "unavailable: no answer"],
    ),
    ("batched, was down, wait, strict", ["a+was down+b a+was down+b", "1", "1", "1"]),
    (
        "batched, raises, wait, strict",
        ["a+raises+b", "RewardError: reward `mine.py:batched` raised KeyError: 'mine' [row a]"],
    ),
    ("service, ok", ["a ok b", "1", "1", "1"]),
    ("service, raises", ["a raises b", "1", "failed: KeyError: 'mine' (test_scoring_table.py)", "1"]),
    ("service, raises, strict", ["a raises b", "RewardError: reward `service` raised KeyError: 'mine' [row raises]"]),
    ("service, fills", ["a fills b", "1", "failed: MemoryError (test_scoring_table.py)", "1"]),
    ("service, is down", ["a is down b", "1", "unavailable: no answer", "1"]),
    (
        "service, is down, strict",
        ["a is down b", "RewardUnavailable: reward `service` is unavailable: no answer [row is down]"],
    ),
    ("service, is down, mask", ["a is down b", "1", "unavailable: no answer", "1"]),
    ("service, is down, mask, strict", ["a is down b", "1", "unavailable: no answer", "1"]),
    ("service, was down, wait", ["a was down b was down", "1", "1", "1"]),
    ("service, was down, wait, strict", ["a was down b was down", "1", "1", "1"]),
    (
        "service, raises, wait, strict",
        ["a raises b", "RewardError: reward `service` raised KeyError: 'mine' [row raises]"],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "expected"), TABLE, ids=[case for case, _ in TABLE])
def test_calls_and_outcomes(reward_file, tmp_path, case, expected):
    kind, text, *options = case.split(", ")
    on_outage = next((o for o in ("mask", "wait") if o in options), "raise")
    with opened(kind, reward_file, "on_timeout" in options) as scorer:
        try:
            scores = scored(scorer, ["a", text, "b"], "strict" in options, on_outage)
            outcomes = [shown(score) for score in scores]
            assert scorer.failures == sum(score.failed for score in scores)
        except RewardError as error:
            outcomes = [f"{type(error).__name__}: {error.message.splitlines()[0]} [{error.where}]"]
    kept = tmp_path / "log"
    calls = " ".join(kept.read_text().split("\n")[:-1] if kept.exists() else log)
    if kind == "worker" and len(outcomes) == 1:
        calls = calls.removesuffix(" b")  # it may begin with the next one before it is ended
    assert [calls, *outcomes] == expected
