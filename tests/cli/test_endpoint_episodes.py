"""`vlmrl eval --endpoint` and `vlmrl generate --endpoint` with tools: whole episodes of a server on loopback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_line import Done, this_process
from desk_tools import DESK
from endpoint_server import Behaviour, Endpoint, Reply, completion, failure, serve_endpoint, turn
from PIL import Image

from vlmrl.types import sample_seed

ROWS = 4
REWARD = """
def score(x):
    tools = [turn for turn in x.turns if turn.role == "tool"]
    assert not x.turns or x.answer == x.turns[-1].text
    pictures = sum(len(turn.media) for turn in tools)
    assert not x.turns or len(x.images) == 1 + pictures
    return {
        "accuracy": float(x.answer == f"answer {x.truth['answer']}"),
        "uses": x.measured.get("reward", 0.0),
        "calls": min(1.0, sum(len(turn.calls) for turn in x.turns) / 8),
    }

NEEDS_IMAGES = True
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table, a reward, an environment and a recipe whose model does not exist."""
    for i in range(ROWS):
        Image.new("RGB", (56, 28), (50 * i, 90, 200)).save(tmp_path / f"{i}.png")
    rows = [{"prompt": f"<image>row {i}", "images": [f"{i}.png"], "answer": str(i)} for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    begin = "self.images, self.uses = images, 0"
    (tmp_path / "desk.py").write_text(DESK.replace(begin, f"{begin}\n        assert images[0].size == (56, 28)"))
    (tmp_path / "mine.toml").write_text(
        '[model]\npath = "no/model"\n[[data]]\npath = "rows.jsonl"\n[reward]\nname = "reward.py:score"\n'
        '[rollout]\nmax_new_tokens = 50\n[environment]\nname = "desk.py:Desk"\nturns = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def row_of(body: dict[str, Any]) -> int:
    """The row whose episode a request goes on with."""
    content = body["messages"][0]["content"]
    return int((content if isinstance(content, str) else content[-1]["text"])[-1])


def works(number: int, body: dict[str, Any]) -> Reply:
    """Two calls, a picture, and the answer. What is said depends on the row and the turn alone."""
    row, turns = row_of(body), sum(m["role"] == "assistant" for m in body["messages"])
    if turns == 0 and "tools" in body:
        return turn(f"first {row}", ("add", json.dumps({"a": row, "b": 1})), ("add", "{"))
    if turns == 1:
        return turn(None, ("look", "{}"))
    return completion(f"answer {row}")


def command(place: Path, endpoint: Endpoint, *more: str, verb: str = "eval") -> Done:
    words = [verb, "--endpoint", endpoint.address, "--model", "m", "--recipe", "mine.toml"]
    return this_process(*words, *more, cwd=place)


def run(place: Path, behaviour: Behaviour, *more: str) -> tuple[dict[str, Any], list[dict[str, Any]], Endpoint]:
    """(the evaluation as --json prints it, its rows, the server)."""
    with serve_endpoint(behaviour) as endpoint:
        done = command(place, endpoint, "--json", *more)
    (evaluation,) = done.json["evaluations"]
    return evaluation, pq.read_table(Path(evaluation["folder"]) / "rows.parquet").to_pylist(), endpoint


SAME = ("prompt_id", "sample", "text", "finish", "num_tokens", "score", "parts", "ending", "measured", "seed")


def facts(rows: list[dict[str, Any]]) -> list[Any]:
    """Parts that two evaluations of the same thing have in common; not the time that tools took."""
    turns = [[{**t, "seconds": 0} for t in json.loads(row["turns"])["turns"]] for row in rows]
    return [[row[name] for name in SAME] + [t] for row, t in zip(rows, turns, strict=True)]


def test_an_evaluation_runs_whole_episodes_and_the_reward_sees_the_turns(place: Path) -> None:
    evaluation, rows, endpoint = run(place, works)
    assert evaluation["metrics"]["accuracy"]["value"] == 1.0 and len(endpoint.requests) == 3 * ROWS
    assert [json.loads(row["parts"]) for row in rows] == [{"accuracy": 1.0, "uses": 0.5, "calls": 3 / 8}] * ROWS
    turns = json.loads(rows[1]["turns"])["turns"]
    assert [t["role"] for t in turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert turns[1]["text"].startswith("sum 2\nerror: the call cannot be read") and turns[1]["errors"] == 1
    assert [c["name"] for c in turns[0]["calls"]] == ["add", ""] and turns[4]["text"] == "answer 1"
    assert {row["ending"] for row in rows} == {"answer"} and {row["num_tokens"] for row in rows} == {21}
    seeds = [sample_seed(0, 0, row["prompt_id"], 0) for row in rows]
    assert [row["seed"] for row in rows] == seeds, "an environment gets the seed of a local engine"
    run_dir = Path(evaluation["folder"]).parent.parent
    replayed = this_process("reward-check", str(run_dir), "--replay", "--json", cwd=place)
    assert (replayed.code, replayed.json["equal"]) == (0, ROWS), replayed.err


def test_the_same_command_goes_on_and_asks_no_complete_episode_again(place: Path) -> None:
    more = ("--sample", "0.5", "--n", "2", "--concurrency", "1")
    _, whole, _ = run(place, works, *more)
    state = {"dies": True}

    def behaves(number: int, body: dict[str, Any]) -> Reply:
        return failure(403, "withdrawn") if state["dies"] and number >= 13 else works(number, body)

    with serve_endpoint(behaves) as endpoint:
        assert command(place, endpoint, *more).code == 2
        (journal,) = (place / "runs" / "unfinished").glob("*.jsonl")
        kept = len(journal.read_text().splitlines()) - 1
        state["dies"] = False
        del endpoint.requests[:]
        done = command(place, endpoint, *more, "--json")
        assert 0 < kept < 2 * ROWS and len(endpoint.requests) == 3 * (2 * ROWS - kept), done.err
    rows = pq.read_table(Path(done.json["evaluations"][0]["folder"]) / "rows.parquet").to_pylist()
    assert facts(rows) == facts(whole)


def test_a_refused_turn_counts_as_an_empty_answer_and_is_named(place: Path) -> None:
    def refuses(number: int, body: dict[str, Any]) -> Reply:
        is_second = row_of(body) == 2 and len(body["messages"]) > 1
        return failure(413, "too many pictures") if is_second else works(number, body)

    evaluation, rows, _ = run(place, refuses)
    assert evaluation["metrics"]["accuracy"]["value"] == 0.75 and evaluation["refused"]["rows"] == 1
    assert "too many pictures" in rows[2]["note"] and rows[2]["note"].startswith("no response: ")
    turns = json.loads(rows[2]["turns"])["turns"]
    assert [t["text"] for t in turns if t["role"] == "assistant"][-1] == "" and rows[2]["num_tokens"] is None


def test_an_endpoint_that_refuses_every_second_turn_has_answered(place: Path) -> None:
    evaluation, rows, _ = run(place, lambda n, b: failure(400, "no") if len(b["messages"]) > 1 else works(n, b))
    assert evaluation["refused"]["rows"] == ROWS and all(row["note"].startswith("no response: ") for row in rows)


def test_an_endpoint_that_refuses_tools_is_an_error_and_not_a_score_of_0(place: Path) -> None:
    message = '"auto" tool choice requires --enable-auto-tool-choice'
    with serve_endpoint(lambda n, body: failure(400, message)) as endpoint:
        done = command(place, endpoint)
    assert done.code == 2 and "refused all of the first 4 requests" in done.err and message in done.err
    assert "hint: does the server take tools?" in done.err


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    from vlmrl.services.client import EndpointClient

    async def no_pause(seconds: float) -> None:
        pass

    more = {"notify": lambda text: None, "sleep": no_pause, "rng": None}
    monkeypatch.setattr(EndpointClient.__init__, "__kwdefaults__", more)


@pytest.mark.usefixtures("no_pauses")
def test_an_overload_in_the_middle_is_tried_again(place: Path) -> None:
    failed: set[int] = set()

    def overloaded(number: int, body: dict[str, Any]) -> Reply:
        if len(body["messages"]) > 1 and row_of(body) not in failed:
            failed.add(row_of(body))
            return failure(503, "busy")
        return works(number, body)

    evaluation, rows, endpoint = run(place, overloaded)
    assert evaluation["metrics"]["accuracy"]["value"] == 1.0 and len(endpoint.requests) == 4 * ROWS
    assert "refused" not in evaluation and {row["ending"] for row in rows} == {"answer"}


@pytest.mark.usefixtures("no_pauses")
def test_a_broken_answer_in_the_middle_leaves_the_episode_out(place: Path) -> None:
    def breaks(number: int, body: dict[str, Any]) -> Reply:
        return Reply(body=b"{") if row_of(body) == 1 and len(body["messages"]) > 1 else works(number, body)

    with serve_endpoint(breaks) as endpoint:
        done = command(place, endpoint, "--concurrency", "2")
    assert done.code == 2 and "1 of 4 requests got no whole answer" in done.err, done.err
    (journal,) = (place / "runs" / "unfinished").glob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 1 + ROWS - 1


def test_tools_off_and_blank(place: Path) -> None:
    off, rows, endpoint = run(place, works, "--tools", "off", "--name", "plain")
    assert len(endpoint.requests) == ROWS and not any("tools" in body for body in endpoint.bodies)
    assert off["metrics"]["accuracy"]["value"] == 1.0 and not any(row["turns"] for row in rows)
    _, rows, endpoint = run(place, works, "--tools", "blank", "--name", "grey")
    assert len(endpoint.requests) == 3 * ROWS and {row["ending"] for row in rows} == {"answer"}


def test_generate_writes_the_turns(place: Path) -> None:
    with serve_endpoint(works) as endpoint:
        done = command(place, endpoint, "--out", "a.jsonl", "--json", verb="generate")
        assert done.json == {"out": "a.jsonl", "rows": ROWS, "responses": ROWS, "refused": 0}
    lines = [json.loads(line) for line in (place / "a.jsonl").read_text().splitlines()]
    assert [line["turns"][-1]["text"] for line in lines] == [f"answer {i}" for i in range(ROWS)]
    assert {line["ending"] for line in lines} == {"answer"} and {line["num_tokens"] for line in lines} == {21}
    # The table is graded as the same episodes are by an evaluation, but for a reward that looks at pictures.
    blind = [line for line in REWARD.splitlines() if "images" not in line and "NEEDS" not in line]
    (place / "blind.py").write_text("\n".join(blind))
    assert {line["measured"]["reward"] for line in lines} == {0.5}
    scored = this_process("reward-check", "a.jsonl", "--reward", "blind.py:score", "--out", "s.jsonl", cwd=place)
    assert scored.code == 0, scored.err
    scores = [json.loads(line) for line in (place / "s.jsonl").read_text().splitlines()]
    assert [[s[name] for name in ("accuracy", "uses", "calls")] for s in scores] == [[1.0, 0.5, 3 / 8]] * ROWS
    seen = this_process("reward-check", "a.jsonl", "--reward", "reward.py:score", cwd=place)
    assert seen.code == 2 and "images of a table" in seen.err
    replayed = this_process("reward-check", "a.jsonl", "--replay", cwd=place)
    assert replayed.code == 2 and "a table does not say where its calls can run" in replayed.err
    (place / "length.py").write_text("def score(x):\n    return len(x.response)\n")
    with serve_endpoint(lambda n, b: works(n, b) if n < 9 else failure(403, "no")) as endpoint:
        more = ("--out", "b.jsonl", "--concurrency", "1")
        assert command(place, endpoint, *more, verb="generate").code == 2
        del endpoint.requests[:]
        more = (*more, "--set", "environment.turns=1", "--json")
        assert command(place, endpoint, *more, verb="generate").code == 0 and len(endpoint.requests) == ROWS
    checked = this_process("reward-check", "a.jsonl", "--reward", "length.py:score", "--json", cwd=place)
    assert checked.code == 0, checked.err


def test_an_environment_that_fails_has_no_score(place: Path) -> None:
    (place / "desk.py").write_text(DESK.replace("self.images, self.uses = images, 0", "raise ValueError('no desk')"))
    with serve_endpoint(works) as endpoint:
        done = command(place, endpoint)
    assert done.code == 2 and "no desk" in done.err and "Traceback" not in done.err, done.err


def test_an_environment_that_does_not_exist_is_an_error_before_any_request(place: Path) -> None:
    with serve_endpoint(works) as endpoint:
        done = command(place, endpoint, "--set", "environment.name=desk.py:Missing")
        assert done.code == 2 and "Missing" in done.err and not endpoint.requests
