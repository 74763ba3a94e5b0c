"""`vlmrl eval --endpoint`: the rows and graders of a local model, with responses of a server on loopback."""

from __future__ import annotations

import base64
import io
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import Done, this_process
from endpoint_server import Behaviour, Endpoint, Reply, completion, echo, failure, prompt_of, serve_endpoint
from PIL import Image

ROWS = 6
KEY = "a-key-without-any-known-form"
REWARD = """
def score(x):
    right = x.response == f"say {x.truth['answer']} yes"
    return {"reward": float(right), "accuracy": float(right)}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table, a reward and a recipe whose model does not exist. One image has a rotation to apply."""
    for i in range(ROWS - 1):
        Image.new("RGB", (56, 28), (50 * i, 90, 200)).save(tmp_path / f"{i}.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (56, 28), (9, 9, 9)).save(tmp_path / f"{ROWS - 1}.jpg", exif=turned)
    images = [f"{i}.png" for i in range(ROWS - 1)] + [f"{ROWS - 1}.jpg"]
    rows = [{"prompt": f"look <image> say {i}", "images": [images[i]], "answer": str(i)} for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "mine.toml").write_text(
        '[model]\npath = "no/model"\n[[data]]\npath = "rows.jsonl"\n[reward]\nname = "reward.py:score"\n'
        '[rollout]\nmax_new_tokens = 6\nstop = ["yes"]\n'
    )
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def say_yes(number: int, body: dict[str, Any]) -> Reply:
    return completion(f"{prompt_of(body).removeprefix('look ').strip()} yes and more")


def evaluate(place: Path, endpoint: Endpoint, *more: str, model: str = "org/served") -> Done:
    words = ["eval", "--endpoint", endpoint.address, "--model", model, "--recipe", "mine.toml", "--key-env", "MY_KEY"]
    return this_process(*words, *more, cwd=place)


def run(place: Path, behaviour: Behaviour, *more: str, model: str = "org/served") -> tuple[dict[str, Any], Endpoint]:
    """(the evaluation as --json prints it, the server)."""
    with serve_endpoint(behaviour) as endpoint:
        done = evaluate(place, endpoint, "--json", *more, model=model)
    (evaluation,) = done.json["evaluations"]
    return evaluation, endpoint


def rows_of(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    return pq.read_table(Path(evaluation["folder"]) / "rows.parquet").to_pylist()


def image_of(body: dict[str, Any]) -> Image.Image:
    (url,) = (part["image_url"]["url"] for part in body["messages"][-1]["content"] if part["type"] == "image_url")
    return Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))


def test_an_endpoint_gets_the_rows_and_its_answers_the_grader(place: Path) -> None:
    evaluation, endpoint = run(place, say_yes)
    bodies = sorted(endpoint.bodies, key=prompt_of)
    assert [part["type"] for part in bodies[0]["messages"][-1]["content"]] == ["text", "image_url", "text"]
    assert [prompt_of(b) for b in bodies] == [f"look  say {i}" for i in range(ROWS)]
    assert {(b["model"], b["max_tokens"], b["temperature"]) for b in bodies} == {("org/served", 6, 0.0)}
    assert [image_of(b).size for b in bodies] == [(56, 28)] * (ROWS - 1) + [(28, 56)]  # the last one is upright
    assert image_of(bodies[3]).getpixel((0, 0)) == (150, 90, 200)
    # The stop string of the recipe ends a response, and stays in it: so all are right.
    assert evaluation["metrics"]["accuracy"]["value"] == 1.0 and evaluation["metrics"]["response_tokens"]["value"] == 7
    assert {row["text"] for row in rows_of(evaluation)} == {f"say {i} yes" for i in range(ROWS)}
    meta = evaluation["meta"]
    assert (meta["model"], meta["endpoint"], meta["device"]) == ("org/served", endpoint.address, "endpoint")


def test_the_run_of_an_endpoint_began_with_its_first_request(place: Path) -> None:
    before = time.time()
    evaluation, _ = run(place, lambda number, body: time.sleep(0.3) or say_yes(number, body), "--concurrency", "2")
    shown = this_process("runs", "show", evaluation["folder"].split("/")[1], "--json", cwd=place).json
    assert shown["seconds"] >= 0.3 * ROWS / 2  # two requests at a time
    assert datetime.fromisoformat(shown["start"]).timestamp() >= before - 0.001


def test_two_endpoints_are_compared_row_by_row(place: Path) -> None:
    good, _ = run(place, say_yes, model="good")
    half, _ = run(
        place, lambda n, body: say_yes(n, body) if prompt_of(body)[-1] in "012" else completion("no"), model="half"
    )
    done = this_process("compare", half["folder"], good["folder"], "--json", cwd=place)
    (paired,) = done.json["evaluations"]
    (accuracy,) = [m for m in paired["metrics"] if m["metric"] == "accuracy"]
    assert (paired["rows_paired"], accuracy["a"], accuracy["b"]) == (ROWS, 0.5, 1.0)
    by_run = this_process("compare", half["folder"].split("/")[1], good["folder"].split("/")[1], "--json", cwd=place)
    assert by_run.json["evaluations"][0]["rows_paired"] == ROWS
    assert [way["key"] for way in paired["evaluated_with"]] == ["endpoint"]
    assert "different" not in done.json["conclusion"]["text"]


def test_a_comparison_of_two_samplings_says_so(place: Path) -> None:
    greedy, _ = run(place, say_yes)
    sampled, _ = run(place, say_yes, "--sample", "1", "--n", "2")
    done = this_process("compare", greedy["folder"], sampled["folder"], "--json", cwd=place)
    endpoints = [evaluation["meta"]["endpoint"] for evaluation in (greedy, sampled)]
    assert done.json["evaluations"][0]["evaluated_with"] == [
        {"key": "temperature", "a": None, "b": 1.0},
        {"key": "samples", "a": 1, "b": 2},
        {"key": "endpoint", "a": endpoints[0], "b": endpoints[1]},
    ]
    assert done.json["conclusion"]["text"].endswith("A and B were evaluated with different temperature, samples.")
    shown = this_process("compare", greedy["folder"], sampled["folder"], cwd=place).out
    assert "temperature: A -, B 1\n" in shown and f"endpoint: A {endpoints[0]}, B {endpoints[1]}\n" in shown


@pytest.mark.parametrize("is_old", [False, True])
def test_rows_of_a_file_are_scored_again_with_the_own_reward(place: Path, is_old: bool) -> None:
    (place / "held.jsonl").write_text((place / "rows.jsonl").read_text())
    recipe = (place / "mine.toml").read_text()
    (place / "mine.toml").write_text(recipe.replace('"rows.jsonl"\n', '"rows.jsonl"\nvalidation = "held.jsonl"\n'))
    evaluation, _ = run(place, say_yes)
    rows = Path(evaluation["folder"]) / "rows.parquet"
    assert {row["source"] for row in rows_of(evaluation)} == {"rows"}
    if is_old:  # it has the name of the file
        table = pq.read_table(rows)
        names = pa.array(["held"] * ROWS)
        pq.write_table(table.set_column(table.schema.get_field_index("source"), "source", names), rows)
    for what in (evaluation["folder"].split("/eval/")[0], str(rows)):
        done = this_process("reward-check", what, "--json", cwd=place)
        assert (done.code, done.json["sources"], done.json["samples"]) == (0, ["rows"], ROWS)


def test_the_run_of_an_evaluation_has_its_name_and_lists_its_number(place: Path) -> None:
    first, _ = run(place, say_yes, "--name", "mine", "--sample", "1", "--n", "2")
    second, _ = run(place, say_yes, "--name", "mine")  # a name stays that of one run
    spaced, _ = run(place, lambda n, body: completion("no"), "--name", "two words")
    by_id = {one["id"]: one for one in this_process("runs", "list", "--json", cwd=place).json["runs"]}
    ids = [one["folder"].split("/")[1] for one in (first, second, spaced)]
    assert [by_id[run_id]["name"] for run_id in ids] == ["mine", None, None]
    assert [by_id[run_id]["evaluated"][0]["text"] for run_id in ids] == [
        "mine: accuracy 1, 12 responses, T=1.0, n=2",
        "mine: accuracy 1, 6 responses, greedy",
        "two words: accuracy 0, 6 responses, greedy",
    ]
    line = next(t for t in this_process("runs", "list", cwd=place).out.splitlines() if ids[0] in t).split("\t")
    assert line[1] == "mine" and line[5] == "accuracy 1" and line[7] == "mine: accuracy 1, 12 responses, T=1.0, n=2"
    assert "mine: accuracy 1, 12 responses" in this_process("runs", "show", "mine", cwd=place).out
    assert this_process("compare", "mine", ids[1], "--json", cwd=place).code == 0


def test_the_report_says_where_a_length_is_not_known(place: Path) -> None:
    evaluation, _ = run(place, lambda n, body: completion("no", tokens=None))
    this_process("report", evaluation["folder"].split("/")[1], "-o", "page.html", cwd=place)
    page = (place / "page.html").read_text()
    assert "None tokens" not in page and page.count("length not known") == ROWS


def test_a_failed_reward_leaves_no_number_but_the_lengths(place: Path) -> None:
    (place / "reward.py").write_text(f"{REWARD.rstrip()} if x.truth['answer'] != '2' else 1 / 0\n")
    with serve_endpoint(say_yes) as endpoint:
        done = evaluate(place, endpoint, "--json")
    counts = {name: m["n"] for name, m in done.json["evaluations"][0]["metrics"].items()}
    whole = {name for name, n in counts.items() if n == ROWS}
    assert whole == {"response_tokens", "truncated"} and set(counts.values()) == {ROWS, ROWS - 1}
    assert "only `response_tokens` and `truncated` count them" in done.err


def test_samples_have_requests_and_seeds_of_their_own(place: Path) -> None:
    evaluation, endpoint = run(place, echo, "--sample", "0.8", "--n", "3", "--concurrency", "2")
    assert len({b["seed"] for b in endpoint.bodies}) == 3 * ROWS and all("n" not in b for b in endpoint.bodies)
    assert endpoint.most_at_once <= 2
    assert sorted(row["seed"] for row in rows_of(evaluation)) == sorted(b["seed"] for b in endpoint.bodies)
    again, _ = run(place, echo, "--sample", "0.8", "--n", "3")
    assert [r["text"] for r in rows_of(again)] == [r["text"] for r in rows_of(evaluation)]


def test_after_an_outage_the_same_command_goes_on_and_asks_for_nothing_twice(place: Path) -> None:
    def dies(number: int, body: dict[str, Any]) -> Reply:
        return say_yes(number, body) if number < 4 else failure(403, "the key was withdrawn")

    with serve_endpoint(dies) as endpoint:
        done = evaluate(place, endpoint, "--concurrency", "1")
        assert done.code == 2 and "the key was withdrawn" in done.err and "Traceback" not in done.err
        assert "4 responses are kept: the same command goes on from there" in done.err
        assert [p.name for p in (place / "runs").iterdir()] == ["unfinished"]
        kept = {prompt_of(b) for b in endpoint.bodies[:4]}
        del endpoint.requests[:]
        # The server has recovered: it counts its requests from 0 again.
        done = evaluate(place, endpoint, "--concurrency", "1", "--json")
        asked = [prompt_of(b) for b in endpoint.bodies]
    assert len(asked) == ROWS - 4 and not kept & set(asked)
    assert f"4 of {ROWS} responses are there from before" in done.err
    (evaluation,) = done.json["evaluations"]
    assert [row["text"] for row in rows_of(evaluation)] == [f"say {i} yes" for i in range(ROWS)]
    assert list((place / "runs" / "unfinished").iterdir()) == []


def test_a_refused_prompt_counts_as_wrong_and_says_so(place: Path) -> None:
    def refuses_one(number: int, body: dict[str, Any]) -> Reply:
        return failure(400, "this image is not allowed") if "say 2" in prompt_of(body) else say_yes(number, body)

    evaluation, _ = run(place, refuses_one)
    assert evaluation["metrics"]["accuracy"]["value"] == pytest.approx(5 / 6)
    assert evaluation["refused"]["rows"] == 1 and "this image is not allowed" in evaluation["refused"]["first"]
    refused = rows_of(evaluation)[2]
    assert refused["text"] == "" and refused["note"].startswith("no response: ") and refused["num_tokens"] is None
    whole, _ = run(place, say_yes)
    words = "the endpoint refused 1 of 6 responses, which count as empty ones (the first: "
    pair = whole["folder"], evaluation["folder"]
    conclusion = this_process("compare", *pair, "--json", cwd=place).json["conclusion"]["text"]
    assert f". B: {words}" in conclusion and "A: the endpoint" not in conclusion
    runs = [folder.split("/")[1] for folder in pair]
    assert words in this_process("compare", *runs, runs[0], cwd=place).out.partition("\n\n")[0]
    assert words in this_process("runs", "show", runs[1], cwd=place).out
    this_process("report", *runs, "-o", "page.html", cwd=place)
    assert words in (place / "page.html").read_text()


def test_an_endpoint_that_refuses_everything_is_an_error_and_not_a_score_of_0(place: Path) -> None:
    with serve_endpoint(lambda n, body: failure(400, "images are not supported")) as endpoint:
        done = evaluate(place, endpoint)
    assert done.code == 2 and "images are not supported" in done.err and "refused all of the first 6" in done.err


def test_a_broken_answer_stops_after_the_others_are_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmrl.services.client import EndpointClient

    async def no_pause(seconds: float) -> None:
        pass

    monkeypatch.setattr(EndpointClient.__init__, "__kwdefaults__", {"notify": print, "sleep": no_pause, "rng": None})
    with serve_endpoint(lambda n, b: Reply(body=b"{") if "say 1" in prompt_of(b) else say_yes(n, b)) as endpoint:
        done = evaluate(place, endpoint)
        assert done.code == 2 and "1 of 6 requests got no whole answer" in done.err
    (journal,) = (place / "runs" / "unfinished").iterdir()
    assert len(journal.read_text().splitlines()) == 1 + ROWS - 1


def test_the_key_is_in_no_file_and_on_no_screen(place: Path) -> None:
    def tells_it(number: int, body: dict[str, Any]) -> Reply:
        return completion(f"{KEY} {KEY[:10]}") if number < 5 else failure(401, f"{KEY} is wrong")

    with serve_endpoint(tells_it) as endpoint:
        first = evaluate(place, endpoint, "--concurrency", "1")
        del endpoint.requests[:]
        second = evaluate(place, endpoint, "--concurrency", "1", "--json")
        assert all(headers["authorization"] == f"Bearer {KEY}" for headers, _ in endpoint.requests)
    assert (first.code, second.code) == (2, 0)
    written = b"".join(p.read_bytes() for p in place.rglob("*") if p.is_file())
    printed = "".join((first.out, first.err, second.out, second.err))
    assert KEY.encode() not in written and KEY not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no model is named"),
        ("im --endpoint http://a/v1 --model m", "both name a model"),
        ("--endpoint http://a/v1", "--endpoint needs the name of the model"),
        ("im --model m", "belong to --endpoint"),
        ("--endpoint http://a/v1 --model m --gpus 2", "--gpus is for a model that is loaded"),
        ("--endpoint a/v1 --model m", "address is not one of http"),
        ("--endpoint http://a/v1 --model m", "there is no data on which"),
        ("--endpoint http://a/v1 --model m --key-env NO_SUCH --recipe mine.toml", "NO_SUCH"),
    ],
)
def test_options_that_do_not_go_together_are_errors(place: Path, words: str, message: str) -> None:
    done = this_process("eval", *words.split(), cwd=place)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
