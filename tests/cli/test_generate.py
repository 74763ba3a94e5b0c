"""`vlmrl generate`: responses without a grade, of a local model and of an endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import this_process
from endpoint_server import Reply, completion, echo, failure, prompt_of, serve_endpoint
from PIL import Image

ROWS = 5


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table alone: no recipe, and no reward."""
    for i in range(ROWS):
        Image.new("RGB", (56, 56), (50 * i, 90, 200)).save(tmp_path / f"{i}.png")
    rows = [{"prompt": f"<image>say {i}", "images": [f"{i}.png"], "answer": str(i)} for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def served(address: str, *more: str) -> list[str]:
    return [
        "generate",
        "--endpoint",
        address,
        "--model",
        "m",
        "--data",
        "rows.jsonl",
        "--out",
        "a/answers.jsonl",
        *more,
    ]


def test_the_rows_of_a_file_and_of_a_share_that_is_held_out_are_answered(place: Path) -> None:
    (place / "more.jsonl").write_text((place / "rows.jsonl").read_text().splitlines()[3] + "\n")
    with serve_endpoint() as endpoint:
        done = this_process(*served(endpoint.address, "--split", "more.jsonl"), cwd=place)
        assert done.code == 0 and "1 rows, the file more.jsonl" in done.err, done.err
        assert [w["ground_truth"] for w in lines(place / "a/answers.jsonl")] == [{"answer": "3"}]
        share = ("--split", "validation", "--set", "data.0.validation=0.4", "--force")
        done = this_process(*served(endpoint.address, *share), cwd=place)
        assert done.code == 0 and len(lines(place / "a/answers.jsonl")) == 2, done.err
        done = this_process(*served(endpoint.address, "--split", "dev", "--force"), cwd=place)
        assert done.code == 2 and "splits there: train (5 rows); a file of rows works, too" in done.err


def test_rows_that_repeat_an_earlier_one_are_said_with_their_number(place: Path) -> None:
    rows = (place / "rows.jsonl").read_text()
    (place / "rows.jsonl").write_text(rows + rows.splitlines()[1] + "\n")
    with serve_endpoint() as endpoint:
        done = this_process(*served(endpoint.address, "--sample", "1", "--n", "2"), cwd=place)
        counted = this_process(*served(endpoint.address, "--sample", "1", "--n", "2", "--force", "--json"), cwd=place)
    assert done.code == 0 and "warning: 1 row equal to an earlier one: same prompt_id, seeds" in done.err
    assert counted.json["repeated_rows"] == 1
    written = [json.dumps(line) for line in lines(place / "a/answers.jsonl")]
    assert written[10:] == written[2:4] and len(set(written[:10])) == 10


def test_an_endpoint_s_responses_are_written_in_the_order_of_the_rows(place: Path) -> None:
    with serve_endpoint() as endpoint:
        done = this_process(
            *served(endpoint.address, "--sample", "1", "--n", "2", "--max-rows", "3", "--json"), cwd=place
        )
    assert done.json == {"out": "a/answers.jsonl", "rows": 3, "responses": 6, "refused": 0}
    written = lines(place / "a/answers.jsonl")
    assert [(w["ground_truth"], w["sample"], w["num_tokens"]) for w in written] == [
        ({"answer": str(i)}, k, 7) for i in range(3) for k in range(2)
    ]
    assert [w["response"] for w in written] == [
        f"say {i} {written[2 * i + k]['seed'] % 7}" for i in range(3) for k in range(2)
    ]
    assert not list((place / "runs" / "unfinished").iterdir()) and len(list((place / "a").iterdir())) == 1


def test_after_an_outage_the_same_command_goes_on(place: Path) -> None:
    def dies(number: int, body: dict[str, Any]) -> Reply:
        return echo(number, body) if number < 3 else failure(401, "no more")

    with serve_endpoint(dies) as endpoint:
        words = served(endpoint.address, "--concurrency", "1")
        done = this_process(*words, cwd=place)
        assert done.code == 2 and "no more" in done.err and not (place / "a").exists()
        assert "3 responses are kept: the same command goes on from there" in done.err
        first = {prompt_of(b) for b in endpoint.bodies[:3]}
        del endpoint.requests[:]
        done = this_process(*words, cwd=place)
        assert done.code == 0 and not first & {prompt_of(b) for b in endpoint.bodies} and len(endpoint.requests) == 2
        assert [w["response"] for w in lines(place / "a/answers.jsonl")] == [f"say {i} 0" for i in range(ROWS)]
        done = this_process(*words, cwd=place)
        assert done.code == 2 and "a/answers.jsonl exists" in done.err and len(endpoint.requests) == 2


def test_refused_rows_are_marked(place: Path) -> None:
    with serve_endpoint(
        lambda n, b: failure(422, "not this") if "say 3" in prompt_of(b) else completion("x")
    ) as endpoint:
        done = this_process(*served(endpoint.address), cwd=place)
    assert done.code == 0 and "refused 1 of them" in done.err
    assert ["not this" in w.get("refusal", "") for w in lines(place / "a/answers.jsonl")] == [False] * 3 + [True, False]


@pytest.mark.slow
def test_a_local_model_s_responses_can_be_graded_afterwards(place: Path, tiny_folder: Path) -> None:
    words = [
        "generate",
        str(tiny_folder),
        "--data",
        "rows.jsonl",
        "--out",
        "answers.jsonl",
        "--sample",
        "1",
        "--n",
        "2",
    ]
    done = this_process(*words, "--set", "rollout.max_new_tokens=5", "--set", "rollout.engine=torch", cwd=place)
    assert done.code == 0, done.err
    written = lines(place / "answers.jsonl")
    assert len(written) == 2 * ROWS and all(1 <= w["num_tokens"] <= 5 for w in written)
    assert len({w["response"] for w in written}) > ROWS
    graded = this_process("reward-check", "answers.jsonl", "--reward", "exact_match", "--json", cwd=place)
    assert graded.code == 0, graded.err


def test_a_split_or_source_that_does_not_exist_is_an_error(place: Path) -> None:
    for words, message in ((["--split", "best"], "no split `best`"), (["--source", "no"], "no source `no`")):
        done = this_process(*served("http://127.0.0.1:9/v1", *words), cwd=place)
        assert done.code == 2 and message in done.err
