"""Making, finding, resuming and writing runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from store_builders import make_checkpoint, make_group, make_run
from typer.testing import CliRunner

from vlmrl.cli.app import app
from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.files import TEMP_PREFIX
from vlmrl.store.listing import find, list_runs
from vlmrl.store.manifest import edit, read_manifest
from vlmrl.store.metrics import read_tail
from vlmrl.store.runs import open_run, resume_run


def test_a_run_is_whole_under_its_name_from_the_start(tmp_path: Path):
    run = make_run(
        tmp_path,
        recipe_text="[model]\npath = 'x'\n",
        resolved={"recipe": {"a": 1}},
        name="first",
        tags=["t", "t"],
        note="n",
    )
    assert layout.RUN_ID.fullmatch(run.id) and run.dir == tmp_path / run.id
    assert (run.dir / "recipe.toml").read_text() == "[model]\npath = 'x'\n"
    assert json.loads((run.dir / "resolved.json").read_text()) == {"recipe": {"a": 1}}
    manifest = read_manifest(run.dir)
    assert (manifest.name, manifest.tags, manifest.note, manifest.status) == ("first", ("t",), "n", "running")
    assert manifest.seeds == {"run": 1} and manifest.attempts[0].pid == os.getpid()
    assert manifest.packages["torch"] and manifest.hardware["cpu_cores"] >= 1 and len(manifest.source_sha256) == 64
    assert run.status == "running" and open_run(tmp_path, run.id).status == "running"
    assert [p.name for p in tmp_path.iterdir()] == [run.id]
    run.finish()


def test_odd_recipe_names_make_sound_folder_names(tmp_path: Path):
    for name in ("", "../../evil", "a b/c", "x" * 300, "日本", ".hidden"):
        with make_run(tmp_path, recipe_name=name) as run:
            assert layout.RUN_ID.fullmatch(run.id) and run.dir.parent == tmp_path and len(run.id) < 80


@pytest.mark.parametrize("name", ["last", "a/b", "", " x", "-x", "a b", "x" * 81, "..", "new\nline"])
def test_unusable_names_are_refused_and_nothing_is_made(tmp_path: Path, name: str):
    with pytest.raises(StoreError, match="name"):
        make_run(tmp_path / "runs", name=name)
    assert not (tmp_path / "runs").exists()


def test_a_runs_root_that_cannot_be_written_is_an_error_with_the_place(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        make_run(tmp_path / "file" / "runs")
    assert caught.value.where == str(tmp_path / "file" / "runs")


def test_a_run_is_found_by_id_prefix_name_suffix_last_and_path(tmp_path: Path):
    with make_run(tmp_path, name="first") as first:
        pass
    with make_run(tmp_path, recipe_name="other") as second:
        pass
    for ref in (first.id, "first", str(first.dir), f"{first.dir}/", first.id[-4:], f"{tmp_path}/first"):
        assert open_run(tmp_path, ref).id == first.id, ref
    assert open_run(tmp_path, "last").id == second.id
    assert open_run("somewhere/else", f"{tmp_path}/last").id == second.id
    assert open_run(tmp_path, second.id[:-3]).id == second.id


def test_an_ambiguous_or_unknown_reference_lists_the_candidates(tmp_path: Path):
    with make_run(tmp_path, name="same") as first:
        pass
    with make_run(tmp_path, name="same") as second:
        pass
    for ref in ("same", "2"):
        with pytest.raises(StoreError, match="more than one run") as caught:
            find(tmp_path, ref)
        assert first.id in str(caught.value) and second.id in str(caught.value)
    with pytest.raises(StoreError, match="no run `nothing`") as caught:
        find(tmp_path, "nothing")
    assert first.id in (caught.value.hint or "")
    with pytest.raises(StoreError, match="there are no runs"):
        find(tmp_path / "empty", "last")
    with pytest.raises(StoreError):
        find(tmp_path, "")


def test_last_is_the_run_that_started_last_even_within_one_second(tmp_path: Path):
    made = []
    for _ in range(5):
        with make_run(tmp_path) as run:
            made.append(run.id)
        assert find(tmp_path, "last").name == run.id
    assert [r.id for r in list_runs(tmp_path)] == made[::-1]
    assert [r.id for r in list_runs(tmp_path, limit=2)] == made[:2:-1]


def test_last_of_those_that_train_passes_over_trials(tmp_path: Path):
    with make_run(tmp_path, kind="try") as tried:
        pass
    assert find(tmp_path, "last", trained=True).name == tried.id  # there is no other
    with make_run(tmp_path) as trained:
        pass
    with make_run(tmp_path, kind="try") as tried:
        pass
    assert find(tmp_path, "last", trained=True).name == open_run(tmp_path, "last", trained=True).id == trained.id
    assert find(tmp_path, "last").name == tried.id == find(tmp_path, tried.id, trained=True).name


def test_how_a_with_block_ends_is_the_status(tmp_path: Path):
    with make_run(tmp_path) as done:
        pass
    with pytest.raises(KeyboardInterrupt), make_run(tmp_path) as stopped:
        raise KeyboardInterrupt
    with pytest.raises(SystemExit), make_run(tmp_path) as left:
        sys.exit(0)
    with pytest.raises(SystemExit), make_run(tmp_path) as given_up:
        sys.exit(1)
    with pytest.raises(ValueError), make_run(tmp_path) as failed:
        raise ValueError("lr is nan, token hf_abcdefghijklmnopqrstuvwx")
    statuses = [open_run(tmp_path, r.id).status for r in (done, left, stopped, given_up, failed)]
    assert statuses == ["done", "done", "interrupted", "failed", "failed"]
    error = read_manifest(failed.dir).error or ""
    assert error.startswith("ValueError: lr is nan") and "hf_abc" not in error
    assert not list(tmp_path.glob("*/run.lock"))


def test_a_reader_cannot_write(tmp_path: Path):
    with make_run(tmp_path) as run:
        pass
    reader = open_run(tmp_path, run.id)
    for write in (
        lambda: reader.log(0, "train", {}),
        lambda: reader.write_rollouts(0, []),
        lambda: reader.update(note="x"),
        lambda: reader.prune_checkpoints(1),
    ):
        with pytest.raises(StoreError, match="opened for reading"):
            write()


def test_notes_and_tags_edited_while_a_run_writes_survive(tmp_path: Path):
    run = make_run(tmp_path, tags=["a"])
    edit(run.dir, note="looks good", add=["b"], drop=["a"])
    run.set_best(3, "accuracy", 0.5)
    run.finish()
    manifest = read_manifest(run.dir)
    assert (manifest.note, manifest.tags, manifest.status) == ("looks good", ("b",), "done")
    assert manifest.best is not None and manifest.best.step == 3


def test_a_manifest_damaged_under_a_running_owner_is_written_again(tmp_path: Path):
    run = make_run(tmp_path, note="kept")
    (run.dir / layout.MANIFEST).write_text("{")
    run.finish()
    assert (read_manifest(run.dir).note, read_manifest(run.dir).status) == ("kept", "done")


def test_resume_is_a_new_attempt_from_the_newest_complete_checkpoint(tmp_path: Path):
    run = make_run(tmp_path)
    make_checkpoint(run.dir, 10)
    make_checkpoint(run.dir, 20)
    make_checkpoint(run.dir, 30, complete=False)
    run.close()
    assert open_run(tmp_path, run.id).status == "killed"
    with resume_run(tmp_path, run.id, argv=["vlmrl", "train", "--resume", "x"]) as again:
        assert (again.attempt, again.start_step) == (2, 20)
        assert [p.name for p in again.checkpoint_dirs()] == ["step-000010", "step-000020"]
        assert not layout.checkpoint_dir(run.dir, 30).exists()
        assert again.log_path(1) == run.dir / "logs/attempt-2/rank-1.log"
    attempts = read_manifest(run.dir).attempts
    assert [(a.number, a.from_step, a.from_checkpoint, a.status) for a in attempts] == [
        (1, 0, None, "killed"),
        (2, 20, "checkpoints/step-000020", "done"),
    ]


def test_resume_from_a_step_without_checkpoint_is_refused_and_leaves_the_run_free(tmp_path: Path):
    with make_run(tmp_path) as run:
        make_checkpoint(run.dir, 10)
    with pytest.raises(StoreError, match="no complete checkpoint of step 7"):
        resume_run(tmp_path, run.id, from_step=7)
    assert not (run.dir / layout.LOCK).exists() and len(read_manifest(run.dir).attempts) == 1
    resume_run(tmp_path, run.id, from_step=10).finish()


def test_metrics_of_steps_that_a_resume_made_void_do_not_count(tmp_path: Path):
    run = make_run(tmp_path)
    for step in range(25):
        run.log(step, "train", {"x": 1})
        if step % 10 == 0:
            run.log(step, "validation", {"v": 1})
            run.event(step, "saved")
    make_checkpoint(run.dir, 10)
    make_checkpoint(run.dir, 20)
    run.close()
    second = resume_run(tmp_path, run.id, from_step=10)
    assert [n["step"] for n in second.metrics()] == list(range(10))
    assert [n["step"] for n in second.metrics("validation")] == [0, 10]
    for step in range(10, 13):
        second.log(step, "train", {"x": 2})
    assert [(n["step"], n["x"]) for n in second.metrics()] == [(s, 1) for s in range(10)] + [
        (s, 2) for s in (10, 11, 12)
    ]
    for step in (10, 20):  # the line of step 10 counts in both attempts, and the newer one is shown
        second.log(step, "validation", {"v": 2})
    assert [(n["step"], n["v"]) for n in second.metrics("validation")] == [(0, 1), (10, 2), (20, 2)]
    assert len(second.metrics("event")) == 3
    second.close()
    third = resume_run(tmp_path, run.id, from_step=10)
    assert [n["step"] for n in third.metrics()] == list(range(10))
    third.close()
    lines = (run.dir / layout.METRICS).read_text().splitlines()
    assert len(lines) == 25 + 6 + 3 + 2


def test_rollouts_follow_the_same_rule_and_older_files_stay(tmp_path: Path):
    run = make_run(tmp_path)
    for step in range(4):
        run.write_rollouts(step, [make_group(step)])
    make_checkpoint(run.dir, 2)
    run.close()
    second = resume_run(tmp_path, run.id)
    assert list(second.rollout_files()) == [0, 1]
    path = second.write_rollouts(2, [make_group(2, "new")])
    assert path.name == "000003-a2.parquet"
    assert [p.name for p in second.rollout_files().values()] == [
        "000001.parquet",
        "000002.parquet",
        path.name,
    ]
    assert second.read_rollouts(2) == [make_group(2, "new")]
    assert (run.dir / "rollouts/000004.parquet").exists()
    with pytest.raises(StoreError, match="no rollouts of step 3"):
        second.read_rollouts(3)
    second.close()


def test_the_best_goes_back_with_the_resume(tmp_path: Path):
    run = make_run(tmp_path)
    for step, value in ((0, 0.1), (10, 0.5), (20, 0.9)):
        run.log(step, "validation", {"eval/metric": value, "eval/is_best": True})
        run.set_best(step, "accuracy", value)
    make_checkpoint(run.dir, 10)
    run.close()
    with resume_run(tmp_path, run.id) as again:
        best = again.manifest.best
        assert best is not None and (best.step, best.metric, best.value) == (10, "accuracy", 0.5)


def test_pruning_keeps_the_newest_and_the_named(tmp_path: Path):
    run = make_run(tmp_path)
    for step in (5, 10, 15, 20):
        make_checkpoint(run.dir, step)
    make_checkpoint(run.dir, 25, complete=False)
    gone = run.prune_checkpoints(1, keep_steps=[10])
    assert [p.name for p in gone] == ["step-000005", "step-000015"]
    assert [p.name for p in run.checkpoint_dirs()] == ["step-000010", "step-000020"]
    assert sorted(os.listdir(run.dir / "checkpoints")) == ["step-000010", "step-000020", "step-000025"]
    assert run.prune_checkpoints(5) == []
    with pytest.raises(ValueError):
        run.prune_checkpoints(0)
    run.close()


def test_the_best_checkpoint_is_chosen_and_never_another_in_its_place(tmp_path: Path):
    run = make_run(tmp_path)
    with pytest.raises(StoreError, match="no checkpoint best"):
        run.checkpoint()
    make_checkpoint(run.dir, 10)
    make_checkpoint(run.dir, 20)
    assert run.checkpoint().name == "step-000020"
    run.set_best(10, "accuracy", 0.7)
    assert (run.checkpoint().name, run.checkpoint("last").name) == ("step-000010", "step-000020")
    with pytest.raises(StoreError, match="no checkpoint 15"):
        run.checkpoint(15)
    run.set_best(15, "accuracy", 0.8)
    with pytest.raises(StoreError, match=r"no checkpoint of its best step, 15 \(accuracy 0.8\)\n") as refused:
        run.checkpoint()
    assert "--checkpoint last" in str(refused.value.hint)
    run.set_best(0, "accuracy", 0.9)
    with pytest.raises(StoreError, match="the model it started from; later steps were at most as good"):
        run.checkpoint()
    run.close()


def test_a_number_that_is_not_finite_survives_in_metrics_as_strict_json(tmp_path: Path):
    import numpy as np

    run = make_run(tmp_path)
    run.log(0, "train", {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": np.int64(3), "e": True, "f": "text"})
    raw = (run.dir / layout.METRICS).read_text()
    assert json.loads(raw, parse_constant=lambda name: pytest.fail(name))["b"] == "-Infinity"
    line = run.metrics()[0]
    assert math.isnan(line["a"]) and line["b"] == -math.inf
    assert (line["c"], line["d"], line["e"], line["f"]) == (0.5, 3, True, "text")
    with pytest.raises(TypeError, match="cannot be set"):
        run.log(1, "train", {"a": {1}})
    with pytest.raises(ValueError, match="kind"):
        run.log(1, "trian", {})
    run.close()


def test_a_torn_last_line_is_skipped_kept_and_closed_off_at_the_resume(tmp_path: Path):
    run = make_run(tmp_path)
    run.log(0, "train", {"x": 1})
    run.close()
    path = run.dir / layout.METRICS
    with open(path, "ab") as file:
        file.write(b'{"step": 1, "attempt": 1, "ki')
    with make_run(tmp_path) as other:
        for step in (0, 2):
            other.log(step, "validation", {})
    assert [(read_tail(one.dir) or {})["step"] for one in (run, other)] == [0, 2]
    assert [n["step"] for n in open_run(tmp_path, run.id).metrics()] == [0]
    with resume_run(tmp_path, run.id) as again:
        again.log(0, "train", {"x": 2})
        assert [(n["attempt"], n["x"]) for n in again.metrics()] == [(2, 2)]
    assert path.read_bytes().count(b'"ki\n') == 1


def test_listing_tells_damaged_runs_and_shows_the_others(tmp_path: Path):
    contents = [
        '{"schema": 1, "id": "x',
        "",
        "[]",
        '{"schema": 99, "vlmrl": "9.9"}',
        '{"schema": 1}',
        "\x00\xff",
        '"x"',
    ]
    for content in contents:
        with make_run(tmp_path) as bad:
            pass
        (bad.dir / layout.MANIFEST).write_bytes(content.encode("latin-1"))
        with pytest.raises(StoreError) as caught:
            open_run(tmp_path, bad.id)
        assert caught.value.where and "Traceback" not in str(caught.value)
    with make_run(tmp_path) as headless:
        pass
    (headless.dir / layout.MANIFEST).unlink()
    with make_run(tmp_path, tags=["good"]) as good:
        pass
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("")
    found = {r.id: r for r in list_runs(tmp_path)}
    assert len(found) == len(contents) + 2
    assert found[good.id].problem is None
    assert all(r.status == "damaged" and r.problem for r in found.values() if r.id != good.id)
    assert [r.id for r in list_runs(tmp_path, tag="good")] == [good.id]
    assert len(list_runs(tmp_path, status="damaged")) == len(contents) + 1


def test_a_manifest_of_a_newer_schema_asks_for_an_upgrade(tmp_path: Path):
    with make_run(tmp_path) as run:
        pass
    raw = json.loads((run.dir / layout.MANIFEST).read_text())
    (run.dir / layout.MANIFEST).write_text(json.dumps({**raw, "schema": 2, "vlmrl": "9.9"}))
    with pytest.raises(
        StoreError, match=r"written by vlmrl 9.9 \(manifest schema 2\); this vlmrl reads schema 1"
    ) as caught:
        open_run(tmp_path, run.id)
    assert caught.value.hint == "upgrade vlmrl"


WRONG_VALUES = [
    {"labels": [5]},
    {"labels": "text"},
    {"tags": {"a": 1}},
    {"tags": [[]]},
    {"tags": 5},
    {"best": [1]},
    {"best": {"step": 1}},
    {"best": {"step": "x", "metric": 1, "value": {}}},
    {"start": 5},
    {"status": "odd"},
    {"status": []},
    {"error": {}},
    {"parent": "run"},
    {"origin": 7},
    {"attempts": 3},
    {"attempts": [5]},
    {"attempts": [{}]},
    {"attempts": {"number": 1}},
    {"id": None},
    {"name": ["x"]},
    {"note": None},
    {"end": 3.5},
]


def test_a_value_of_the_wrong_type_damages_only_its_run(tmp_path: Path):
    with make_run(tmp_path, name="good") as good:
        pass
    manifest = json.loads((good.dir / layout.MANIFEST).read_text())
    for number, change in enumerate(WRONG_VALUES):
        folder = tmp_path / f"{good.id[:-4]}{number:04d}"
        folder.mkdir()
        (folder / layout.MANIFEST).write_text(json.dumps({**manifest, **change}))
        with pytest.raises(StoreError, match=f"`{next(iter(change))}"):
            open_run(tmp_path, folder.name)
    result = CliRunner().invoke(app, ["runs", "list", "--runs", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "good" in result.output and result.output.count("damaged") == len(WRONG_VALUES)


def test_a_manifest_that_is_no_regular_file_hides_no_other_run(tmp_path: Path):
    with make_run(tmp_path, name="good") as good:
        pass
    pipe, folder, huge, endless, link = (tmp_path / f"{good.id[:-4]}000{i}" / layout.MANIFEST for i in range(5))
    for path in (pipe, folder, huge, endless, link):
        path.parent.mkdir()
    os.mkfifo(pipe)
    folder.mkdir()
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # a file with a hole: it takes no space
    endless.symlink_to("/dev/zero")
    link.symlink_to(good.dir / layout.MANIFEST)
    # In a process of its own: a reader that waits for the pipe would hold up all tests.
    code = (
        "import sys; from vlmrl.store.listing import *; root = sys.argv[1]\n"
        "print(*(run.problem for run in list_runs(root)), find(root, 'last'), find(root, 'good'), sep='\\n')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("cannot read the manifest") == 5 and result.stdout.count(str(good.dir)) == 2


@pytest.mark.parametrize(
    "content", ['{"pid": "x"}', "[]", "5", "\xff", '{"host": [], "pid": [], "boot": 1, "start": {}}']
)
def test_a_damaged_lock_hides_no_run(tmp_path: Path, content: str):
    with make_run(tmp_path) as run:
        path = run.dir / layout.LOCK
        full = json.loads(path.read_text())
        path.write_bytes(content.encode("latin-1"))
        assert [r.status for r in list_runs(tmp_path)] == ["killed"]
        path.write_text(json.dumps({**full, "pid": "x"}))
        assert [r.status for r in list_runs(tmp_path)] == ["killed"]


def test_a_newer_minor_field_is_ignored(tmp_path: Path):
    with make_run(tmp_path) as run:
        pass
    raw = json.loads((run.dir / layout.MANIFEST).read_text())
    raw["from_the_future"] = 1
    raw["attempts"][0]["also"] = 2
    (run.dir / layout.MANIFEST).write_text(json.dumps(raw))
    assert open_run(tmp_path, run.id).manifest == replace(read_manifest(run.dir))


def test_leftovers_are_swept_at_the_resume_only(tmp_path: Path):
    run = make_run(tmp_path)
    make_checkpoint(run.dir, 10)
    run.close()
    trash = run.dir / "checkpoints/.trash-step-000005-abc"
    trash.mkdir()
    temp = run.dir / f"{TEMP_PREFIX}manifest.json-1-abc"
    temp.write_text("{")
    assert [p.name for p in open_run(tmp_path, run.id).checkpoint_dirs()] == ["step-000010"]
    assert trash.exists() and temp.exists()
    resume_run(tmp_path, run.id).close()
    assert not trash.exists() and not temp.exists()


def test_secrets_reach_no_file(tmp_path: Path):
    token = "hf_" + "a1B2" * 8
    run = make_run(
        tmp_path,
        argv=["vlmrl", "train", "--hf-token", token, "--set", "reward.args.api_key=zzz9secret"],
        recipe_text=f'api_key = "zzz9secret"\nother = "{token}"\nstop_token = "<|im_end|>"\nmax_tokens = 512\n',
        rewards=[{"source": "s", "args": {"api_key": "zzz9secret"}}],
        resolved={"recipe": {"api_key": "zzz9secret", "nested": [{"x": token}], "tokens": 512}},
    )
    run.event(0, "note", text=f"sent {token}")
    run.finish("failed", f"401 for {token}")
    for path in run.dir.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert token not in text and "zzz9secret" not in text, path
    recipe = (run.dir / layout.RECIPE).read_text()
    assert 'stop_token = "<|im_end|>"' in recipe and "max_tokens = 512" in recipe
