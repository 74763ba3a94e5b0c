"""The judge's file: judgements and budget that several processes share, and what happens when it is damaged."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import AXES, judgement_text, pair, picture

from vlmrl.errors import RecipeError, RewardError
from vlmrl.recipe.tables import Prices
from vlmrl.services.calls import Budget, Spent, spent_in
from vlmrl.services.judge_database import JUDGEMENTS, JudgementCache, request_key
from vlmrl.services.judge_prompt import JudgeRequest
from vlmrl.services.protocol import BudgetSpent
from vlmrl.services.rubric import VFIG, Judgement, read_judgement
from vlmrl.services.shared_file import Database

HALF = read_judgement(VFIG, judgement_text(0.5))
ONE = read_judgement(VFIG, judgement_text(1))
COSTS = {"input_tokens": 900, "output_tokens": 40, "seconds": 0.1}


def cache_at(path: Path | None) -> JudgementCache:
    return JudgementCache(Database(JUDGEMENTS, path), VFIG)


def budget_at(path: Path | None, clock=lambda: 1000.0, account: str = "run", **limits) -> Budget:
    values = {"max_calls": None, "max_cost": None, "prices": None} | limits
    return Budget(Database(JUDGEMENTS, path), account=account, hold_seconds=60.0, clock=clock, **values)


def key(request: JudgeRequest = pair(1), rubric=VFIG, **more) -> str:
    values = {"provider": "vllm", "model": "m", "parameters": {"temperature": 0.0}} | more
    return request_key(request, rubric, **values)


def test_a_key_changes_with_all_that_a_judgement_depends_on() -> None:
    other_rubric = VFIG.model_copy(update={"instructions": "other"})
    keys = [
        key(),
        key(JudgeRequest(picture(1), picture(-1))),
        key(pair(2)),
        key(pair(1, reference=1)),
        key(JudgeRequest(pair(1).reference, pair(1).candidate, (("caption", "x"),))),
        key(rubric=type(VFIG).model_validate(other_rubric.model_dump())),
        key(provider="openai"),
        key(model="n"),
        key(parameters={"temperature": 0.1}),
    ]
    assert len(set(keys)) == len(keys) and key() == keys[0] and len(keys[0]) == 64


def test_a_judgement_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "judge.sqlite"
    assert cache_at(path).get("a") is None
    assert cache_at(path).keep("a", HALF, **COSTS) == HALF
    assert cache_at(path).get("a") == HALF and cache_at(path).count() == 1


def test_the_first_judgement_is_that_of_all_processes(tmp_path: Path) -> None:
    first, second = cache_at(tmp_path / "f"), cache_at(tmp_path / "f")
    assert first.keep("a", HALF, **COSTS) == HALF
    assert second.keep("a", ONE, **COSTS) == HALF and second.get("a") == HALF


def test_what_is_no_judgement_is_never_kept(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "f")
    for judgement in (Judgement(dict.fromkeys(AXES, math.nan), ""), replace(ONE, is_outage=True)):
        with pytest.raises(ValueError):
            cache.keep("a", judgement, **COSTS)
    assert cache.count() == 0


@pytest.mark.parametrize("text", [judgement_text("NaN"), judgement_text(9.0), "", "{}", "\x00"])
def test_a_kept_text_that_is_no_judgement_is_deleted(tmp_path: Path, text: str) -> None:
    cache = cache_at(tmp_path / "f")
    cache.keep("a", HALF, **COSTS)
    with sqlite3.connect(tmp_path / "f") as connection:
        connection.execute("UPDATE verdicts SET verdict = ?", (text,))
    connection.close()
    assert cache.get("a") is None and cache.count() == 0


@pytest.mark.parametrize("damage", ["garbage", "head", "cut", "middle"])
def test_a_damaged_file_is_renamed_and_a_new_one_begins(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "judge.sqlite"
    database = Database(JUDGEMENTS, path)
    cache = JudgementCache(database, VFIG)
    for number in range(200):
        cache.keep(f"key {number}", HALF, **COSTS)
    database.close()
    data = bytearray(path.read_bytes())
    damaged = {
        "garbage": b"not a database at all " * 100,
        "head": b"X" * 16 + bytes(data[16:]),
        "cut": bytes(data[: len(data) // 2]),
        "middle": bytes(data[:4096]) + b"\xff" * 8192 + bytes(data[4096 + 8192 :]),
    }[damage]
    path.write_bytes(damaged)
    messages: list[str] = []
    new = JudgementCache(Database(JUDGEMENTS, path, notify=messages.append), VFIG)
    assert new.get("key 1") is None and new.keep("a", HALF, **COSTS) == HALF
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == damaged
    assert len(messages) == 1 and aside.name in messages[0] and "counted from 0" in messages[0]


def test_damage_while_the_file_is_open_is_repaired_by_all_that_use_it(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    first, second = cache_at(path), cache_at(path)
    first.keep("a", HALF, **COSTS)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # else all that is read lies in the log beside the file
    connection.close()
    path.write_bytes(b"garbage" * 5000)  # as a failing disk might
    third = cache_at(path)
    third.keep("b", ONE, **COSTS)
    for cache in (first, second):
        assert cache.get("b") == ONE
    first.keep("c", HALF, **COSTS)
    assert second.get("c") == third.get("c") == HALF and len(list(tmp_path.glob("*.damaged-*"))) == 1


def test_a_file_that_was_deleted_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    cache = cache_at(path)
    cache.keep("a", HALF, **COSTS)
    for file in tmp_path.glob("judge.sqlite*"):
        file.unlink()
    assert cache.get("a") is None and cache.keep("b", ONE, **COSTS) == ONE and cache_at(path).get("b") == ONE


def test_a_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "mine.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(RecipeError, match="belongs to another program"):
        Database(JUDGEMENTS, path)
    assert path.read_bytes() == before
    with pytest.raises(RecipeError, match="cannot be opened"):
        Database(JUDGEMENTS, tmp_path)


def test_calls_are_reserved_counted_and_given_back() -> None:
    budget = budget_at(None, max_calls=2, prices=Prices(input=1.0, output=10.0))
    first, second = budget.reserve(1000, 100), budget.reserve(1000, 100)
    assert first is not None and second is not None
    assert first.cost == pytest.approx(0.002)  # 1000 / 1e6 * 1 + 100 / 1e6 * 10
    assert budget.reserve(1, 1) is None  # one in flight may be given back
    budget.give_back(first)
    assert budget.settle(second, 500, 50) == pytest.approx(0.001)
    third = budget.reserve(1, 1)
    assert third is not None
    budget.settle(third, None, None)
    with pytest.raises(BudgetSpent, match="2 of 2 calls") as raised:
        budget.reserve(1, 1)
    assert "max_calls" in str(raised.value.hint)
    spent = budget.spent()
    assert (spent.calls, spent.input_tokens, spent.output_tokens, spent.reserved) == (2, 500, 50, 0)


def test_a_call_that_could_exceed_the_cost_is_not_sent() -> None:
    budget = budget_at(None, max_cost=0.01, prices=Prices(input=0.0, output=1000.0))
    call = budget.reserve(0, 9)  # 9 / 1e6 * 1000 = 0.009
    assert call is not None and budget.reserve(0, 5) is None  # 0.009 + 0.005 > 0.01, but the first may cost less
    budget.settle(call, 0, 2)  # it did cost 0.002
    call = budget.reserve(0, 5)
    assert call is not None
    budget.settle(call, 0, 5)
    with pytest.raises(BudgetSpent, match=r"0\.0070 of 0\.01, and the next call may cost 0\.0040") as raised:
        budget.reserve(0, 4)
    assert "max_cost" in str(raised.value.hint)


def test_the_expected_cost_learns_from_the_largest_prompt() -> None:
    budget = budget_at(None, prices=Prices(input=1e6, output=0.0))
    call = budget.reserve(100, 1)
    assert call is not None and call.cost == 100
    budget.settle(call, 4000, 1)
    call = budget.reserve(100, 1)
    assert call is not None and call.cost == 5000  # 1.25 * 4000


def test_a_reservation_of_a_killed_process_counts_in_full_after_its_time() -> None:
    now = [1000.0]
    budget = budget_at(None, clock=lambda: now[0], max_calls=2, prices=Prices(input=1e6, output=0.0))
    late = budget.reserve(3, 1)
    now[0] += 61.0
    assert budget.spent().calls == 1 and budget.spent().cost == 3.0
    assert late is not None
    budget.settle(late, 1, 1)  # it lives after all: it was counted already, and is not counted twice
    assert budget.spent().calls == 1 and budget.spent().cost == 3.0


def test_a_clock_that_is_set_back_does_not_keep_a_killed_process_reservation_for_years() -> None:
    now = [1e9]
    budget = budget_at(None, clock=lambda: now[0], max_calls=2)
    assert budget.reserve(3, 1) is not None and budget.reserve(3, 1) is not None
    assert budget.reserve(3, 1) is None  # both are in flight: wait
    now[0] -= 1e8
    with pytest.raises(BudgetSpent):
        budget.reserve(3, 1)


def test_accounts_are_counted_apart(tmp_path: Path) -> None:
    one, other = (budget_at(tmp_path / "f", account=name, max_calls=1) for name in ("a", "b"))
    for budget in (one, other):
        call = budget.reserve(1, 1)
        assert call is not None
        budget.settle(call, 1, 1)
    assert one.spent().calls == other.spent().calls == 1


def test_what_was_spent_is_read_from_the_file_beside_a_process_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    assert spent_in(path) == {}
    prices = Prices(input=1e6, output=1e6)
    budget, waiting = (budget_at(path, account=name, prices=prices) for name in ("run", "eval a"))
    call = budget.reserve(3, 1)
    assert call is not None and waiting.reserve(3, 1) is not None
    budget.settle(call, 5, 2)
    assert spent_in(path) == {"eval a": Spent(0, 0.0, 0, 0, 1), "run": Spent(1, 7.0, 5, 2, 0)}
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"no database, but as long as the head of one" * 99)
    with pytest.raises(RewardError, match="the judge's file cannot be read"):
        spent_in(damaged)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["reserve", "settle", "give back"]), st.integers(0, 3000)), max_size=40))
def test_no_order_of_events_exceeds_the_limits(events: list[tuple[str, int]]) -> None:
    budget = budget_at(None, max_calls=5, max_cost=10_000.0, prices=Prices(input=0.0, output=1e6))
    in_flight, true_cost, true_calls = [], 0, 0
    for event, tokens in events:
        if event == "reserve":
            try:
                call = budget.reserve(0, tokens)
            except BudgetSpent:
                assert true_calls == 5 or true_cost + tokens > 10_000
                continue
            in_flight += [(call, tokens)] if call is not None else []
        elif in_flight:
            call, limit = in_flight.pop(0)
            if event == "settle":
                budget.settle(call, 0, min(limit, tokens))
                true_cost, true_calls = true_cost + min(limit, tokens), true_calls + 1
            else:
                budget.give_back(call)
        worst = true_cost + sum(limit for _, limit in in_flight)
        assert worst <= 10_000 and true_calls + len(in_flight) <= 5
    spent = budget.spent()
    assert (spent.calls, spent.cost, spent.reserved) == (true_calls, true_cost, len(in_flight))


PROCESS = """
import json, sys
from pathlib import Path
from vlmrl.services.calls import Budget, Spent, spent_in
from vlmrl.services.judge_database import JUDGEMENTS
from vlmrl.services.shared_file import Database
from vlmrl.services.protocol import BudgetSpent
database = Database(JUDGEMENTS, Path(sys.argv[1]))
budget = Budget(database, account="run", max_calls=900, max_cost=None, prices=None, hold_seconds=60)
calls = 0
print("ready", flush=True)
sys.stdin.readline()
while True:
    try:
        call = budget.reserve(1, 1)
    except BudgetSpent:
        break
    if call is not None:
        budget.settle(call, 2, 3)
        calls += 1
print(calls)
"""


@pytest.mark.slow
def test_processes_together_never_exceed_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    command = [sys.executable, "-c", PROCESS, str(path)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    calls = [int(process.communicate(timeout=60)[0]) for process in running]
    assert sum(calls) == 900
    spent = budget_at(path).spent()
    assert (spent.calls, spent.input_tokens, spent.output_tokens, spent.reserved) == (900, 1800, 2700, 0)


def test_threads_together_never_exceed_the_budget(tmp_path: Path) -> None:
    budget, sent = budget_at(tmp_path / "f", max_calls=40), []

    def work() -> None:
        while True:
            try:
                call = budget.reserve(1, 1)
            except BudgetSpent:
                return
            if call is not None:
                sent.append(call.number)
                budget.settle(call, 1, 1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(sent) == len(set(sent)) == 40


def test_what_the_file_keeps_is_plain_json(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "f")
    cache.keep("a", HALF, **COSTS)
    with sqlite3.connect(tmp_path / "f") as connection:
        (row,) = connection.execute("SELECT key, verdict, input_tokens, output_tokens, seconds FROM verdicts")
    connection.close()
    assert json.loads(row[1]) == {"reason": "as drawn", **dict.fromkeys(AXES, 0.5)}
    assert (row[0], *row[2:]) == ("a", 900, 40, 0.1)


def test_a_run_that_was_removed_is_not_made_again_by_its_judge(tmp_path: Path) -> None:
    database = Database(JUDGEMENTS, tmp_path / "run" / "judge.sqlite")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RecipeError):
        database.run(lambda connection: connection)
    assert not (tmp_path / "run").exists()
