"""The first request to each service of the rewards: what it tells, and what it says when it fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from endpoint_server import Reply
from judge_server import KEY, judgement_text, refuse, serve_judge

from vlmrl.rewards.base import Member
from vlmrl.rewards.several import compose
from vlmrl.setup.check import check_services, place_of_check
from vlmrl.tasks.builtin_rewards import load_reward

LOADED: Any = SimpleNamespace(where=lambda *keys: f"r.toml:{len(keys)}")


def source(address: str, **more: Any) -> Any:
    table = {
        "provider": "openai",
        "model": "judge-1",
        "endpoint": address,
        "key_env": "JUDGE_KEY",
        "attempts": 2,
        **more,
    }
    spec = load_reward("vfig", args={"judge": table})
    return SimpleNamespace(reward=compose([Member("a", spec, {}), Member("b", spec, {})]))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def test_one_call_says_who_answers_at_which_price(tmp_path: Path) -> None:
    with serve_judge(lambda number, asked: judgement_text(1)) as endpoint:
        prices = {"input": 2.0, "output": 10.0}
        problems, facts = check_services(LOADED, [source(endpoint.address, prices=prices)], place_of_check(tmp_path))
        assert problems == [] and len(endpoint.requests) == 1  # both rewards ask the same judge
    line = facts["vfig"]["line"]
    # 900 * 2 + 40 * 10 per million tokens.
    assert line.startswith(f"judge-1 answers at {endpoint.address} in ") and "900 + 40 tokens, cost 0.002200" in line
    assert facts["vfig"]["cost"] == pytest.approx(0.0022)


@pytest.mark.parametrize(
    ("reply", "message", "hint"),
    [
        (lambda: refuse("openai", 401, f"wrong key {KEY}"), "cannot be used", "JUDGE_KEY"),
        (lambda: refuse("openai", 404, "no such model"), "no such model", "judge-1"),
        (
            lambda: refuse("openai", 503, "busy"),
            "in 2 attempts: the endpoint fails: HTTP 503",
            "the server runs, but fails",
        ),
        (lambda: Reply(body=b"<html>welcome</html>"), "answer cannot be read", "is the address right"),
        (lambda: Reply(302, headers={"location": "http://127.0.0.1:9/steal"}), "127.0.0.1:9", ""),
    ],
    ids=["key", "model", "busy", "html", "redirect"],
)
def test_a_failure_names_the_address_and_what_to_do(tmp_path: Path, reply: Any, message: str, hint: str) -> None:
    with serve_judge(lambda number, asked: reply()) as endpoint:
        (problem,), facts = check_services(LOADED, [source(endpoint.address)], place_of_check(tmp_path))
    words = f"{problem.message} {problem.hint}"
    assert problem.level == "error" and facts == {} and KEY not in words
    assert message in problem.message and hint in (problem.hint or "") and endpoint.address in problem.message


def test_a_missing_key_is_named_before_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    (problem,), _ = check_services(LOADED, [source("http://127.0.0.1:9/v1")], place_of_check(tmp_path))
    assert "JUDGE_KEY" in problem.message and problem.hint == "export JUDGE_KEY=..."


def test_offline_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMRL_JUDGE_OFFLINE", "1")
    problems, facts = check_services(LOADED, [source("http://127.0.0.1:9/v1")], place_of_check(tmp_path))
    assert problems == [] and "offline" in facts["vfig"]["line"]
