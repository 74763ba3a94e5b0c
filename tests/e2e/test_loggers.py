"""Real runs with their loggers: what reaches wandb, trackio, TensorBoard and a logger of one's own, read back."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from small_runs import Ears, assert_same_run, begin, events, go_on, make_place, train

from vlmrl.store.manifest import read_remote
from vlmrl.store.runs import FollowedRun, Run
from vlmrl.store.verify import verify_run
from vlmrl.train.journal import MOST_PROMPTS, MOST_SAMPLES, loggers_of

SETTINGS = """
rollout = {prompts_per_step = 5, samples_per_prompt = 3, max_new_tokens = 12, temperature = 0.9}
train = {steps = 3, rows_per_step = 7, tokens_per_row = 400}
optim.lr = 1e-3
eval = {every_steps = 1, max_rows = 4}
checkpoint = {every_steps = 1, keep_last = 9}
log = {sample_every_steps = 2, project = "there", group = "these"}
"""
OWN = """
import json
from pathlib import Path

class Own:
    def open(self, run):
        self.path = Path(run.folder) / "own.jsonl"
        self.say("open", run.label, run.attempt, run.kind, run.from_step, run.project, run.parent, run.remembered)
        return {"id": run.id}
    def log(self, line):
        self.say("log", line.step, line.kind, line.metrics)
    def samples(self, line, samples):
        self.say("samples", line.step, len(samples))
    def close(self, status):
        self.say("close", status)
    def say(self, *words):
        with open(self.path, "a") as file:
            file.write(json.dumps(words) + "\\n")

class Broken(Own):
    def log(self, line):
        raise OSError("the network is down")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    place = make_place(tmp_path_factory.mktemp("place"), tiny_folder, SETTINGS, kinds=("rl", "sft"))
    (place / "own.py").write_text(OWN)
    return place


@pytest.fixture(scope="module")
def plain(place, tmp_path_factory) -> Run:
    """The run without loggers."""
    return train(place, tmp_path_factory.mktemp("plain"))


def said(run: Run, what: str) -> list[list[Any]]:
    """What the logger of one's own was told."""
    lines = (json.loads(line) for line in (run.dir / "own.jsonl").read_text().splitlines())
    return [words[1:] for words in lines if words[0] == what]


# Loggers that come along


@pytest.fixture(scope="module")
def logged(place, tmp_path_factory) -> Iterator[Run]:
    """A run that was stopped after its second step and went on from its first: steps go back for its loggers."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        for name in ("WANDB_PROJECT", "WANDB_DATA_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        ears = Ears(stop_at=2)
        sinks = 'log.sinks=["tensorboard", "wandb", "trackio"]'
        run, status = begin(place, folder / "runs", sinks, ears=ears)
        assert status == "interrupted" and sum("logger" in text for text in ears.heard) == 3, ears.heard
        shutil.rmtree(run.checkpoint_dirs()[-1])
        ears = Ears()
        run, status = go_on(run, ears=ears)
        assert status == "done" and run.start_step == 1 and sum("logger" in text for text in ears.heard) == 3
        yield run


@pytest.mark.slow
def test_loggers_change_nothing_of_a_run(logged, plain):
    assert_same_run(logged, plain)
    result = verify_run(logged.dir)
    assert not result.problems
    assert not events(logged, "lost")


@pytest.mark.slow
def test_no_key_reaches_the_runs_folder(logged):
    for path in logged.dir.rglob("*"):
        if path.is_file():
            assert os.environ["WANDB_API_KEY"].encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_tensorboard_shows_the_lines_that_count(logged):
    from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

    found = EventAccumulator(str(logged.dir / "tensorboard"), STORE_EVERYTHING_SIZE_GUIDANCE)
    found.Reload()
    for kind, name in (("train", "reward/mean"), ("train", "policy/entropy"), ("validation", "eval/metric")):
        lines = logged.metrics(kind)
        assert len(lines) == 3 + (kind == "validation")
        shown = [(event.step, event.value) for event in found.Scalars(name)]
        assert shown == [(n["step"], pytest.approx(n[name])) for n in lines], name
    images = found.Images("samples/prompt 1/image 2")
    assert [event.step for event in images] == [0, 2]
    from PIL import Image

    assert Image.open(BytesIO(images[0].encoded_image_string)).size == (56, 56)
    text = found.Tensors("samples")[-1].tensor_proto.string_val[0].decode()
    assert logged.read_rollouts(2)[0].samples[0].text.splitlines()[0] in text
    assert [t.tensor_proto.string_val for t in found.Tensors("status")] == [[b"interrupted"], [b"done"]]


def wandb_records(run: Run) -> list[list[Any]]:
    """The records of each attempt, from its offline file: wandb's messages in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    attempts = []
    for path in sorted((run.dir / "wandb").glob("offline-run-*/*.wandb")):
        data, at, parts, records = path.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            if (left := 32_768 - at % 32_768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            parts += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
                record.ParseFromString(parts)
                records.append(record)
                parts = b""
        attempts.append(records)
    return attempts


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    rows = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


@pytest.mark.slow
def test_wandb_gets_one_run_over_all_attempts(logged):
    attempts = wandb_records(logged)
    assert len(attempts) == 2
    starts = [r.run for records in attempts for r in records if r.WhichOneof("record_type") == "run"]
    assert {(r.run_id, r.project, r.run_group, r.display_name) for r in starts} == {
        (logged.id, "there", "these", logged.id)
    }
    assert read_remote(logged.dir)["wandb"] == {"id": logged.id, "project": "there", "entity": None}
    config = {item.key: json.loads(item.value_json) for item in starts[-1].config.update}
    assert config["optim"]["lr"] == 1e-3 and config["run"]["attempt"] == 2 and config["run"]["id"] == logged.id
    metric = next(r.metric for r in attempts[0] if r.WhichOneof("record_type") == "metric")
    assert (metric.glob_name, metric.step_metric) == ("*", "step")


@pytest.mark.slow
def test_wandbs_own_step_grows_although_steps_go_back(logged):
    """It drops whatever has a smaller one. Every line of both attempts has to be there."""
    rows = [row for records in wandb_records(logged) for row in history_of(records)]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))
    assert [row["step"] for row in rows if "reward/mean" in row] == [0, 1, 1, 2]
    from vlmrl.store.metrics import read_file

    lines = [n for n in read_file(logged.dir).lines if n["kind"] != "event"]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "attempt":
                assert row[name] == pytest.approx(value, nan_ok=True), name


@pytest.mark.slow
def test_wandb_is_told_how_each_attempt_ended(logged):
    first, second = wandb_records(logged)
    kinds = [[r.WhichOneof("record_type") for r in records] for records in (first, second)]
    assert "preempting" in kinds[0] and "preempting" not in kinds[1]
    codes = [next(r.exit.exit_code for r in records if r.HasField("exit")) for records in (first, second)]
    assert codes == [130, 0]


@pytest.mark.slow
def test_wandb_shows_rollouts_with_their_images(logged):
    first, _ = wandb_records(logged)
    row = next(row for row in history_of(first) if "samples/_type" in row)
    assert (row["step"], row["samples/_type"], row["samples/nrows"]) == (0, "table-file", MOST_PROMPTS * 3)
    artifact = next(r.artifact for r in first if r.WhichOneof("record_type") == "artifact")
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert all(path.is_relative_to(logged.dir) for path in files.values()), "what is sent later is in the run's folder"
    table = json.loads(files["samples.table.json"].read_text())
    cells = dict(zip(table["columns"], table["data"][0], strict=True))
    sample = logged.read_rollouts(0)[0].samples[0]
    assert cells["response"] == sample.text and cells["score"] == pytest.approx(sample.score.value)
    assert cells["reward/part/length"] == pytest.approx(sample.score.parts["length"])
    picture = cells["image 1"]
    assert (picture["_type"], picture["width"], picture["height"]) == ("image-file", 56, 56)
    assert files[picture["path"]].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_trackio_holds_one_run_with_everything(logged):
    name = read_remote(logged.dir)["trackio"]["name"]
    database = logged.dir.parent.parent / "trackio" / "there.db"
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
        (config,) = connection.execute("select config from configs").fetchone()
    assert {(run_id, run_name) for run_id, run_name, _, _ in rows} == {(rows[0][0], name)}
    values = [(step, json.loads(metrics)) for _, _, step, metrics in rows]
    assert [step for step, m in values if "reward/mean" in m] == [0, 1, 1, 2]
    counted = {step: m["reward/mean"] for step, m in values if "reward/mean" in m}
    assert counted == {n["step"]: pytest.approx(n["reward/mean"]) for n in logged.metrics("train")}
    assert [m["status"] for _, m in values if "status" in m] == ["interrupted", "done"]
    table = next(m["samples"] for _, m in values if "samples" in m)
    assert table["_type"] == "trackio.table" and len(table["_value"]) == MOST_PROMPTS * 3
    picture = database.parent / "media" / table["_value"][0]["image 1"]["file_path"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(config)["optim"]["lr"] == 1e-3


# A logger of one's own


@pytest.mark.slow
def test_a_logger_of_ones_own_gets_both_kinds_of_runs_and_forks_have_a_parent(place, plain, tmp_path):
    from vlmrl.setup.run_records import Labels
    from vlmrl.train.resume import ResumeRequest, fork_run, plan_fork
    from vlmrl.train.start import run_session

    sink = f'log.sinks=["{place / "own.py"}:Own"]'
    run = train(place, tmp_path, sink, "train.steps=2")
    assert said(run, "open") == [[run.id, 1, "rl", 0, "there", None, {}]]
    assert [tuple(words[:2]) for words in said(run, "log")] == [
        (0, "validation"),
        (0, "train"),
        (1, "validation"),
        (1, "train"),
        (2, "validation"),
    ]
    assert said(run, "samples") == [[0, MOST_PROMPTS * min(3, MOST_SAMPLES)]]
    assert said(run, "close") == [["done"]]
    for words, line in zip(said(run, "log")[1::2], run.metrics("train"), strict=True):
        assert words[2] == {k: v for k, v in line.items() if k not in ("step", "attempt", "kind", "time", "files")}

    plan = plan_fork(tmp_path, ResumeRequest(f"{run.id}@1", "rl", None, ("optim.lr=2e-3",), False))
    forked, recipe, checkpoint = fork_run(tmp_path, plan, ["vlmrl"], Labels("fork"))
    run_session(forked, recipe, tmp_path, Ears(), checkpoint)
    ((label, attempt, _, step, _, parent, remembered),) = said(forked, "open")
    assert (label, attempt, step, remembered) == ("fork", 1, 1, {})
    assert (parent["run"], parent["step"], parent["remote"]) == (run.id, 1, {"id": run.id})

    supervised = train(place, tmp_path, sink, "train.steps=1", kind="sft")
    assert said(supervised, "open")[0][2] == "sft" and said(supervised, "close") == [["done"]]
    assert "loss/cross_entropy" in said(supervised, "log")[1][2] and not said(supervised, "samples")


@pytest.mark.slow
def test_a_broken_logger_costs_its_lines_and_nothing_else(place, plain, tmp_path):
    ears = Ears()
    run, status = begin(place, tmp_path, f'log.sinks=["{place / "own.py"}:Broken"]', ears=ears)
    assert status == "done"
    assert_same_run(run, plain)
    assert [text for text in ears.heard if text.startswith("logger")] == [
        "logger Broken failed, and the run goes on: OSError: the network is down",
        "logger Broken took 2 of 9 lines; metrics.jsonl holds all",
    ]
    (event,) = events(run, "lost")
    assert (event["logger"], event["sent"], event["lost"]) == ("Broken", 9, 7), "the samples of two steps were taken"


@pytest.mark.slow
def test_a_failed_run_says_so_to_its_loggers(place, tmp_path):
    (tmp_path / "bad.py").write_text("def score(x):\n    return 1 / 0\n")
    sink = f'log.sinks=["{place / "own.py"}:Own"]'
    from vlmrl.errors import RewardError

    with pytest.raises(RewardError):
        begin(place, tmp_path, sink, f"reward.name={tmp_path / 'bad.py'}:score", "eval.every_steps=0")
    (folder,) = tmp_path.glob("unfinished/*/own.jsonl")
    assert json.loads(folder.read_text().splitlines()[-1]) == ["close", "failed"]


def test_only_the_process_that_writes_a_run_has_loggers(plain, place):
    from vlmrl.recipe.load import load_recipe

    recipe = load_recipe(place / "rl.toml", overrides=[f'log.sinks=["{place / "own.py"}:Own"]']).recipe
    with loggers_of(FollowedRun(plain.dir, 1), recipe, plain.dir.parent, print) as loggers:
        loggers.log(0, "train", {})
        loggers.samples([], [])
        assert loggers.feeds == [] and loggers.news() == []
    assert not (plain.dir / "own.jsonl").exists()
