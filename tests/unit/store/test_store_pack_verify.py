"""`verify` finds what is wrong, and a packed run opens elsewhere with its images."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import evaluate_run
from store_builders import META, make_checkpoint, make_group, make_run

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.checkpoints import sha256_of
from vlmrl.store.manifest import manifest_fault
from vlmrl.store.media import RunImages, ShardFolder, write_shard
from vlmrl.store.metrics import SEAL, sealed
from vlmrl.store.pack import pack_run
from vlmrl.store.rollouts import write_rollouts
from vlmrl.store.runs import Run, open_run, resume_run
from vlmrl.store.verify import _gaps, verify_run
from vlmrl.types import Group, Media, Segment

REWARD = "def score(x):\n    return 1\n"
CONTENT = {hashlib.sha256(c).hexdigest(): c for c in (b"image one", b"image two")}
MEDIA = [Media(sha256, 8, 6) for sha256 in CONTENT]


def make_dataset(folder: Path, fingerprint: str = "f" * 64) -> Path:
    write_shard(folder / "media-00000.arrow", CONTENT.items())
    (folder / "dataset.json").write_text(json.dumps({"schema": 1, "fingerprint": fingerprint}))
    return folder


def finished_run(root: Path, dataset: Path) -> Run:
    datasets = [{"name": "digits", "path": str(dataset), "fingerprint": "f" * 64}]
    sha256 = hashlib.sha256(REWARD.encode()).hexdigest()
    run = make_run(
        root,
        datasets=datasets,
        recipe_text="x = 1\n",
        resolved={"recipe": {"train": {"steps": 2}}},
        texts={("reward", sha256): REWARD},
        rewards=[{"source": "digits", "name": "reward.py:score", "sha256": sha256}],
    )
    for step in range(2):
        run.write_rollouts(step, [make_group(step, media=(MEDIA[step],))])
        run.log(step, "train", {"rollout/samples": 2, "reward/mean": 0.05})
    make_checkpoint(run.dir, 2)
    evaluate_run(run.dir, "test", [0.1, 0.2, 0.9])
    run.finish()
    return open_run(root, run.id)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    code = ({"commit": "c" * 40, "dirty": True}, "+x = 2\n")
    monkeypatch.setattr("vlmrl.store.provenance.git_state", lambda: code)
    return finished_run(tmp_path / "runs", make_dataset(tmp_path / "data"))


def test_a_whole_run_has_no_problems(run: Run):
    result = verify_run(run.dir)
    assert result.problems == verify_run(run.dir, quick=True).problems == []
    assert result.counts == {
        "rollout files": 2, "samples": 4, "metrics lines": 2, "checkpoints": 1, "evaluations": 1, "images": 2,
    }  # fmt: skip


def put(path: Path, place: int, byte: int) -> None:
    """Change one byte of the file itself: a file that is cut and written anew waits for the disk."""
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([byte]))


def damage_byte(path: Path) -> None:
    content = path.read_bytes()
    put(path, len(content) // 2, content[len(content) // 2] ^ 0xFF)


def overwrite_stale(run: Run) -> None:
    write_rollouts(rollouts(run, 2), [make_group(0, media=(MEDIA[1],))], step=1)


def overwrite_stale_segment(run: Run) -> None:
    """The policy of step 0 began a response that the policy of step 1 went on with, after a tool's answer."""
    group = make_group(1, media=(MEDIA[1],))
    first, *others = group.samples
    parts = (
        Segment("assistant", (5,), True, (-0.5,), version=0),
        Segment("tool", (6,), False, author="environment", version=7),
        Segment("assistant", (7,), True, (-1.0,)),
    )
    first = replace(first, trajectory=replace(first.trajectory, segments=parts))
    write_rollouts(rollouts(run, 2), [replace(group, samples=(first, *others))], step=1)


def append(run: Run, line: dict) -> None:
    with open(metrics(run), "a") as file:
        file.write(json.dumps(line) + "\n")


def resealed(line: str) -> str:
    raw = line.removesuffix("\n").encode()
    end = SEAL.search(raw)
    return line if end is None else sealed(raw[: end.start()] + b"}").decode() + "\n"


def metrics(run: Run) -> Path:
    return run.dir / layout.METRICS


def edit(change: Callable[[list[str]], list[str]]) -> Callable[[Run], object]:
    """Change the lines of metrics. A line with a checksum gets the one of its new text."""

    def edited(run: Run) -> str:
        return "".join(map(resealed, change(metrics(run).read_text().splitlines(keepends=True))))

    return lambda run: metrics(run).write_text(edited(run))


def rollouts(run: Run, number: int) -> Path:
    return run.dir / f"rollouts/{number:06d}.parquet"


def checkpoint(run: Run) -> Path:
    return run.dir / "checkpoints" / "step-000002"


def weights(run: Run) -> Path:
    return checkpoint(run) / "model/a.safetensors"


def kept(run: Run) -> Path:
    return next((run.dir / layout.KEPT).glob("reward-*"))


def samples_line(samples: int) -> dict:
    return {"step": 0, "attempt": 1, "kind": "train", "rollout/samples": samples}


def describe_outside(run: Run) -> None:
    files = {"../../../data/dataset.json": {"bytes": 1, "sha256": "0"}}
    (checkpoint(run) / layout.META).write_text(json.dumps(META | {"step": 2, "files": files}))


def copy_checkpoint(run: Run, name: str) -> None:
    shutil.copytree(checkpoint(run), checkpoint(run).with_name(name))


def replace_with_file(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.write_text("a file")


def change_rollouts(run: Run, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.read_table(rollouts(run, 2))), rollouts(run, 2))


def summary(run: Run) -> Path:
    return layout.eval_dir(run.dir, "test") / layout.EVAL_SUMMARY


def evaluated_rows(run: Run) -> Path:
    return layout.eval_dir(run.dir, "test") / layout.EVAL_ROWS


def line_of(step: int, kind: str = "train") -> dict:
    return {"step": step, "attempt": 1, "kind": kind, "time": "2026-01-01T00:00:00Z"}


def cut_rows(run: Run) -> None:
    """The same evaluation with one row less."""
    pq.write_table(pq.read_table(evaluated_rows(run)).slice(1), evaluated_rows(run))


FAR = 900_000_000_000
BEYOND = "is beyond the run, which has 2 steps"
NO_FOLDER = "this is a file, but should be a folder"
NO_STEP = "this is not the name of a step, so nothing reads it"
DEEP_JSON = "[" * 200_000
LINE_DAMAGED = "a line of metrics is damaged"
WEIGHTS_CHANGED = "model/a.safetensors was changed since it was saved"
ROLLOUTS_DAMAGED = "the rollout file is damaged"
CHANGED = "this file was changed"
GONE = "a file that the manifest names is missing"
DAMAGE: dict[str, tuple[str, Callable[[Run], object]]] = {
    "manifest cut off": ("manifest.json is cut off", lambda r: (r.dir / "manifest.json").write_text('{"schema": 1, ')),
    "recipe changed": (CHANGED, lambda r: (r.dir / "recipe.toml").write_text("x = 2\n")),
    "recipe gone": (GONE, lambda r: (r.dir / "recipe.toml").unlink()),
    "resolved cut": ("the run's recipe cannot be read", lambda r: (r.dir / "resolved.json").write_text("{")),
    "resolved changed": (CHANGED, lambda r: (r.dir / "resolved.json").write_text("{}")),
    "kept gone": (GONE, lambda r: shutil.rmtree(r.dir / layout.KEPT)),
    "kept changed": (CHANGED, lambda r: kept(r).write_text("def score(x):\n    return 2\n")),
    "code.diff gone": (GONE, lambda r: (r.dir / layout.CODE_DIFF).unlink()),
    "metrics cut inside": (LINE_DAMAGED, edit(lambda lines: ['{"step": 0\n', *lines])),
    "garbage first": (LINE_DAMAGED, edit(lambda lines: ["garbage\n", *lines])),
    "garbage last": (LINE_DAMAGED, edit(lambda lines: [*lines, "garbage"])),
    "garbage between": (LINE_DAMAGED, edit(lambda lines: [lines[0], "\x00\x01\n", lines[1]])),
    "whole JSON, no line": (LINE_DAMAGED, edit(lambda lines: ['{"step": 0}\n', *lines])),
    "a metrics line gone": ("1 step without a line of metrics: 1", edit(lambda n: n[1:])),
    "metrics cut short": ("1 step without a line of metrics: 2", edit(lambda n: n[:1])),
    "metrics gone": ("2 steps without a line of metrics: 1, 2", lambda r: metrics(r).unlink()),
    "unknown attempt": (
        "which is not in the manifest",
        lambda r: append(r, {"step": 0, "attempt": 7, "kind": "train"}),
    ),
    "rollouts damaged": (ROLLOUTS_DAMAGED, lambda r: rollouts(r, 1).write_bytes(b"PAR1 no")),
    "rollouts cut": (ROLLOUTS_DAMAGED, lambda r: halve(rollouts(r, 1))),
    "rollouts gone": ("with metrics, but without rollouts: 2", lambda r: rollouts(r, 2).unlink()),
    "all rollouts gone": ("with metrics, but without rollouts: 1, 2", lambda r: shutil.rmtree(r.dir / "rollouts")),
    "rollouts of another step": (
        "the rollouts are of step 1 (attempt 1), the file's name says step 2",
        lambda r: shutil.copy(rollouts(r, 1), rollouts(r, 2)),
    ),
    "fewer samples": ("metrics say 9 samples, but the rollouts have 2", lambda r: append(r, samples_line(9))),
    "stale samples": ("the rollouts of step 2 have samples of policy version 0", overwrite_stale),
    "a stale segment": ("the rollouts of step 2 have samples of policy version 0", overwrite_stale_segment),
    "shard changed": (WEIGHTS_CHANGED, lambda r: damage_byte(weights(r))),
    "shard cut": (WEIGHTS_CHANGED, lambda r: halve(weights(r))),
    "shard gone": ("model/a.safetensors is missing", lambda r: weights(r).unlink()),
    "shard too many": (
        "meta.json does not list it",
        lambda r: (checkpoint(r) / "model/zz-extra.safetensors").write_bytes(b"x"),
    ),
    "folder renamed": (
        "meta.json says step 2, the folder's name says step 9",
        lambda r: checkpoint(r).rename(checkpoint(r).with_name("step-000009")),
    ),
    "file outside": ("or one for a file outside of the checkpoint", describe_outside),
    "no summary": ("this evaluation has no summary.json", lambda r: summary(r).unlink()),
    "no evaluated rows": ("the rows of this evaluation cannot be read", lambda r: evaluated_rows(r).unlink()),
    "fewer evaluated rows": ("the summary has 3 rows, but the file has 2", cut_rows),
    "summary of nothing": (
        "this file is not the summary of an evaluation",
        lambda r: summary(r).write_text('{"metrics": [], "step": "x"}'),
    ),
    "summary deep": ("the evaluation's summary is damaged", lambda r: summary(r).write_text(DEEP_JSON)),
    "checkpoint beyond the run": (BEYOND, lambda r: copy_checkpoint(r, f"step-{FAR}")),
    "trained line beyond the run": (BEYOND, lambda r: append(r, line_of(FAR))),
    "event beyond the run": (BEYOND, lambda r: append(r, line_of(FAR, "event"))),
    "the last step trained twice": ("step 3 is beyond the run, which has 2 steps", lambda r: append(r, line_of(2))),
    "line below 0": ("step -1 is before the first", lambda r: append(r, line_of(-1, "validation"))),
    "rollouts beyond the run": (BEYOND, lambda r: shutil.copy(rollouts(r, 1), rollouts(r, FAR))),
    "metrics deep": (LINE_DAMAGED, edit(lambda n: [DEEP_JSON + "\n", *n])),
    "metrics deep within": (
        LINE_DAMAGED,
        edit(lambda n: [n[0].replace("{", '{"x": ' + "[" * 500 + "]" * 500 + ", ", 1), n[1]]),
    ),
    "manifest deep": ("manifest.json is cut off or damaged", lambda r: (r.dir / "manifest.json").write_text(DEEP_JSON)),
    "resolved deep": ("the run's recipe cannot be read", lambda r: (r.dir / "resolved.json").write_text(DEEP_JSON)),
    "metrics doubled": (
        "2 lines of metrics repeated or out of order; the first is of step 1",
        edit(lambda lines: lines * 2),
    ),
    "metrics reversed": (
        "1 line of metrics repeated or out of order; the first is of step 1",
        edit(lambda lines: lines[::-1]),
    ),
    "another mean": (
        "step 1: metrics say a mean reward of 0.999, but the scores of the rollouts have the mean 0.05",
        edit(lambda lines: [n.replace("0.05", "0.999") for n in lines]),
    ),
    "checkpoint is a file": (NO_FOLDER, lambda r: replace_with_file(checkpoint(r))),
    "checkpoints is a file": (NO_FOLDER, lambda r: replace_with_file(r.dir / "checkpoints")),
    "logs is a file": (NO_FOLDER, lambda r: replace_with_file(r.dir / "logs")),
    "an evaluation is a file": (NO_FOLDER, lambda r: replace_with_file(layout.eval_dir(r.dir, "test"))),
    "checkpoint of a short name": (NO_STEP, lambda r: copy_checkpoint(r, "step-5")),
    "copy of a checkpoint": (NO_STEP, lambda r: copy_checkpoint(r, "step-000002 (copy)")),
    "copy of rollouts": (NO_STEP, lambda r: (r.dir / "rollouts/000002 (copy).parquet").write_bytes(b"")),
    "images gone": (
        "images of the rollouts cannot be found",
        lambda r: next(r.dir.parent.parent.glob("data/*.arrow")).unlink(),
    ),
    "rollouts of fewer rows": (
        "metrics say 2 samples, but the rollouts have 1",
        lambda r: change_rollouts(r, lambda table: table.slice(0, 1)),
    ),
    "rollouts without columns": (
        "the rollouts lack the columns text, score",
        lambda r: change_rollouts(r, lambda table: table.drop_columns(["text", "score"])),
    ),
}
"""What was done to a run -> what `verify` says of it."""
DEEP = {"shard changed", "stale samples", "a stale segment", "another mean", "images gone"}
"""Damage that only a reading of every byte can see."""


def finds(run: Run, message: str, quick: bool = False) -> bool:
    return any(message in e.message for e in verify_run(run.dir, quick=quick).errors)


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_is_found_and_named(run: Run, name: str):
    message, damage = DAMAGE[name]
    damage(run)
    errors = verify_run(run.dir).errors
    assert any(message in e.message for e in errors), errors
    assert all(e.where for e in errors)
    assert finds(run, message, quick=True) == (name not in DEEP)


@pytest.mark.parametrize("where", ["checkpoint", "pruned"])
def test_a_large_step_number_costs_no_memory_where_no_recipe_says_how_long_the_run_is(tmp_path: Path, where: str):
    run, steps = make_run(tmp_path, resolved={"recipe": {}}), 3_000_000
    run.log(0, "train", {"rollout/samples": 2})
    run.finish()
    (run.dir / layout.ROLLOUTS).mkdir(exist_ok=True)
    if where == "checkpoint":
        make_checkpoint(run.dir, steps)
    else:
        (run.dir / layout.ROLLOUTS / layout.PRUNED).write_text(json.dumps({"schema": 1, "steps": [[1, steps]]}))
    tracemalloc.start()
    try:
        messages = [e.message for e in verify_run(run.dir).errors]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20, "a number for each step was made"
    gap = f"{steps - 1:,} steps without a line of metrics: 2, 3, 4, 5, 6 ..."
    assert messages == ["1 step with metrics, but without rollouts: 1", *([gap] if where == "checkpoint" else [])]


@given(st.integers(0, 6), st.integers(0, 20), st.lists(st.integers(-3, 25), unique=True).map(sorted))
def test_gaps_are_the_steps_that_have_no_line(first: int, end: int, steps: list[int]):
    gaps = list(_gaps(first, end, steps))
    assert [step for gap in gaps for step in gap] == sorted(set(range(first, end)) - set(steps))
    assert all(gap.start < gap.stop for gap in gaps)


def drawn(group: Group, media: Media) -> Group:
    """The group with an image that the reward of each sample made."""
    files = {media.sha256: CONTENT[media.sha256]}
    samples = [replace(s, score=replace(s.score, artifacts={"drawing": media}, files=files)) for s in group.samples]
    return replace(group, samples=tuple(samples))


def test_every_changed_byte_of_metrics_rollouts_images_and_evaluations_is_seen(tmp_path: Path):
    """Each file: its ends, and bytes all over it; each byte with another bit changed."""
    run = make_run(tmp_path)
    for step in range(2):
        run.write_rollouts(step, [drawn(make_group(step, media=(MEDIA[step],)), MEDIA[step])])
        run.log(step, "train", {"rollout/samples": 2})
    evaluate_run(run.dir, "test", [0.1, 0.2, 0.9])
    run.event(2, "ended", reason="all steps done")
    run.finish()
    assert verify_run(run.dir, RunImages(run.dir)).problems == []
    paths = [metrics(run), *(p for n in ("rollouts", "media", "eval") for p in (run.dir / n).rglob("*") if p.is_file())]
    assert {path.name for path in paths} == {
        *("metrics.jsonl", "000001.parquet", "000002.parquet", "000001.arrow", "000002.arrow"),
        *("rows.parquet", "summary.json", "SHA256SUMS"),
    }
    for path in paths:
        whole = path.read_bytes()
        places = {*range(0, len(whole), len(whole) // 12), len(whole) - 2, len(whole) - 1}
        places |= {*range(0, len(whole), 3)} if path.name == "metrics.jsonl" else set()
        for place in places:
            put(path, place, whole[place] ^ 1 << place % 8)
            assert verify_run(run.dir, RunImages(run.dir), quick=path == metrics(run)).errors, (path.name, place)
            put(path, place, whole[place])


def test_hashes_of_rollouts_survive_a_kill_and_a_resume(tmp_path: Path):
    """The rollouts of a step whose line a kill prevented have no hash, and do not count after the resume."""
    run = make_run(tmp_path)
    run.write_rollouts(0, [make_group(0, media=())])
    run.log(0, "train", {"rollout/samples": 2})
    run.write_rollouts(1, [make_group(1, media=())])
    run.close()
    make_checkpoint(run.dir, 1)
    with open(run.dir / layout.METRICS, "a") as file:
        file.write('{"step": 1, "attempt": 1, "ki')
    again = resume_run(tmp_path, run.id)
    again.write_rollouts(1, [make_group(1, media=())])
    again.log(1, "train", {"rollout/samples": 2})
    again.finish()
    assert verify_run(run.dir).errors == []
    tables = [line["files"] for line in again.metrics("train")]
    assert [[*table] for table in tables] == [["rollouts/000001.parquet"], ["rollouts/000002-a2.parquet"]]
    damage_byte(run.dir / "rollouts/000002-a2.parquet")
    assert finds(run, "was changed after")


def test_a_line_of_metrics_that_lost_its_checksum_is_seen_and_old_runs_have_none(tmp_path: Path):
    run = make_run(tmp_path)
    for step in range(3):
        run.log(step, "train", {})
    run.finish()
    whole = metrics(run).read_bytes()
    metrics(run).write_bytes(whole.replace(b"crc32", b"crc33", 1))
    assert finds(run, "no checksum")
    metrics(run).write_bytes(re.sub(rb', "crc32": "[0-9a-f]+"', b"", whole))
    assert verify_run(run.dir).errors == []
    assert len(open_run(tmp_path, run.id).metrics()) == 3


def test_a_run_of_overlapped_steps_holds_samples_of_the_step_before(run: Run):
    path = rollouts(run, 2)
    before = sha256_of(path)
    overwrite_stale(run)
    lag = '{"rollout/version_lag": 1, '
    edit(lambda lines: [lines[0], lines[1].replace("{", lag, 1).replace(before, sha256_of(path))])(run)
    assert [e.message for e in verify_run(run.dir).errors] == []


def test_a_line_that_a_kill_cut_is_no_error(tmp_path: Path):
    run = make_run(tmp_path)
    run.log(0, "train", {"x": {"y": [1, 'a\\"}}}']}})
    run.close()
    whole = metrics(run).read_bytes()
    for cut in range(1, len(whole) - 1):
        metrics(run).write_bytes(whole[:-cut])
        result = verify_run(run.dir)
        assert not [e for e in result.errors if "damaged" in e.message], whole[:-cut]
        assert any("cut by a kill" in w.message for w in result.warnings) == (cut > 1), whole[:-cut]
    for foreign in (b"}" + whole[1:-2], whole[:-2].replace(b'"x"', b'"\x01"'), whole[1:-2], b'{"step": 1]'):
        metrics(run).write_bytes(foreign)
        assert finds(run, "damaged"), foreign


def legacy(run: Run) -> None:
    """The manifest as it was before it had a table of files."""
    path = run.dir / "manifest.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in ("files", "crc32")}))


def test_no_changed_byte_of_a_manifest_that_changes_a_value_passes(run: Run):
    path = run.dir / "manifest.json"
    content = path.read_bytes()
    value = json.loads(content)
    assert value["crc32"] and manifest_fault(run.dir) is None
    for place in range(len(content)):
        for byte in (content[place] ^ 1, content[place] ^ 32):
            put(path, place, byte)
            with contextlib.suppress(StoreError):
                assert manifest_fault(run.dir) or json.loads(path.read_bytes()) == value, (place, byte)
        put(path, place, content[place])
    path.write_bytes(content.replace(b'"note": ""', b'"note": "x"'))
    assert [e.message for e in verify_run(run.dir).errors] == ["the manifest was changed after the run had written it"]


def test_a_run_without_a_table_of_files_is_checked_as_far_as_its_manifest_goes(run: Run):
    legacy(run)
    assert verify_run(run.dir).problems == []
    source = kept(run)
    source.write_text("def score(x):\n    return 2\n")
    assert finds(run, "this file was changed")
    source.write_text('api_key = "<redacted>"\n')
    assert verify_run(run.dir).errors == [], "a text with something hidden in it has another hash"
    source.unlink()
    assert finds(run, "is missing")


def test_several_damages_are_told_at_once(run: Run):
    (run.dir / "recipe.toml").unlink()
    (run.dir / "rollouts/000002.parquet").unlink()
    damage_byte(run.dir / "checkpoints/step-000002/model/a.safetensors")
    assert len(verify_run(run.dir).errors) == 3


def test_verify_changes_nothing(run: Run):
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.dir.rglob("*") if p.is_file()}
    verify_run(run.dir)
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.dir.rglob("*") if p.is_file()}


def unpack(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return next(target.iterdir())


def test_a_packed_run_opens_elsewhere_without_the_dataset(run: Run, tmp_path: Path):
    packed = pack_run(run.dir, tmp_path / "a.tar.gz", RunImages(run.dir, run.manifest.datasets))
    assert (packed.num_images, packed.missing, packed.left_out) == (2, (), ("step-000002",))
    assert not (run.dir / layout.MEDIA).exists()
    next((tmp_path / "data").glob("*.arrow")).unlink()
    opened = open_run(tmp_path, str(unpack(packed.path, tmp_path / "elsewhere")))
    assert opened.id == run.id and opened.metrics() == run.metrics()
    assert [opened.read_rollouts(s) for s in (0, 1)] == [run.read_rollouts(s) for s in (0, 1)]
    with pytest.raises(StoreError, match="has no checkpoint last") as caught:
        opened.checkpoint("last")
    assert "`vlmrl runs pack` left out step-000002" in str(caught.value.hint)
    images = RunImages(opened.dir)
    assert [images.read(m) for m in MEDIA] == list(CONTENT.values())
    assert verify_run(opened.dir).errors == []
    again = pack_run(opened.dir, tmp_path / "b.tar.gz", RunImages(opened.dir))
    assert (again.num_images, again.missing) == (2, ())


def test_a_merged_model_stays_behind_and_is_named(run: Run, tmp_path: Path):
    for name in ("merged-step-000002", "adapter-step-000002"):
        (run.dir / name).mkdir()
        (run.dir / name / "model.safetensors").write_bytes(b"x" * 1000)
    packed = pack_run(run.dir, tmp_path / "a.tar.gz", RunImages(run.dir, run.manifest.datasets))
    assert packed.left_out == ("step-000002", "adapter-step-000002", "merged-step-000002")
    opened = unpack(packed.path, tmp_path / "elsewhere")
    assert not list(opened.rglob("model.safetensors")) and (opened / "manifest.json").is_file()


@pytest.mark.parametrize("place", ["notes.txt", "rollouts/000100.parquet", "logs/rank-9.log"])
def test_a_link_out_of_the_run_is_not_packed(run: Run, tmp_path: Path, place: str):
    outside = tmp_path / "private"
    outside.write_text("private")
    (run.dir / place).parent.mkdir(exist_ok=True)
    (run.dir / place).symlink_to(outside)
    with pytest.raises(StoreError, match="outside the run"):
        pack_run(run.dir, tmp_path / "run.tar.gz", RunImages(run.dir, []))
    assert not (tmp_path / "run.tar.gz").exists()


def test_packing_twice_gives_the_same_bytes(run: Run, tmp_path: Path):
    import os

    images = RunImages(run.dir, run.manifest.datasets)
    make_checkpoint(run.dir, 1)
    assert pack_run(run.dir, tmp_path / "c.tar.gz", images, checkpoints="last").left_out == ("step-000001",)
    first = pack_run(run.dir, tmp_path / "a.tar.gz", images, checkpoints="all").path.read_bytes()
    for path in run.dir.rglob("*"):
        os.utime(path, (1, 1))
    (run.dir / ".tmp-x").write_text("half")
    (run.dir / layout.LOCK).write_text("{}")
    second = pack_run(run.dir, tmp_path / "b.tar.gz", images, checkpoints="all")
    assert second.path.read_bytes() == first and second.left_out == ()
    assert first[4:8] == bytes(4), "the gzip header holds a clock"
    with tarfile.open(second.path) as tar:
        members = tar.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in members} == {(0, 0, 0, "", 0o644)}
    names = [m.name.partition("/")[2] for m in members]
    assert "checkpoints/step-000002/model/a.safetensors" in names and "media/pack-00000.arrow" in names
    assert not [n for n in names if ".tmp-" in n or n == layout.LOCK]


def test_an_archive_inside_its_run_is_refused(run: Run):
    with pytest.raises(StoreError, match="inside the run"):
        pack_run(run.dir, run.dir / "a.tar.gz", RunImages(run.dir))
    assert not (run.dir / "a.tar.gz").exists()


def test_a_missing_image_is_told_not_hidden(run: Run, tmp_path: Path):
    packed = pack_run(run.dir, tmp_path / "a.tar.gz", RunImages(run.dir))
    assert set(packed.missing) == set(CONTENT) and packed.num_images == 0
    with pytest.raises(StoreError, match="cannot be found"):
        RunImages(run.dir).read(MEDIA[0])


def test_an_image_with_other_bytes_under_its_name_is_not_shown(tmp_path: Path):
    write_shard(tmp_path / "media" / "x.arrow", [(MEDIA[0].sha256, b"something else")])
    assert RunImages(tmp_path).find(MEDIA[0]) is None
    assert (
        RunImages(tmp_path, resolvers=[lambda m: b"wrong", lambda m: CONTENT[m.sha256]]).find(MEDIA[1]) == b"image two"
    )


def test_a_changed_dataset_still_gives_images_by_content_and_is_noted(tmp_path: Path):
    folder = make_dataset(tmp_path / "data", fingerprint="0" * 64)
    images = RunImages(tmp_path, [{"path": "data", "fingerprint": "f" * 64}], cwd=str(tmp_path))
    assert images.find(MEDIA[0]) == b"image one" and "has changed since the run" in images.notes[0]
    (folder / "dataset.json").unlink()
    gone = RunImages(tmp_path, [{"path": "nowhere"}])
    assert gone.find(MEDIA[0]) is None and gone.notes == ["dataset nowhere cannot be found"]


def test_shards_hold_each_image_once_and_damaged_ones_are_told(tmp_path: Path):
    path = tmp_path / "a.arrow"
    write_shard(path, [*CONTENT.items(), *CONTENT.items()])
    folder = ShardFolder(tmp_path)
    assert sum(batch.num_rows for batch in folder._batches) == 2
    assert folder.hashes() == list(CONTENT) and folder.get("0" * 64) is None
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(StoreError, match="shard cannot be read"):
        ShardFolder(tmp_path)


@pytest.mark.parametrize("shift", [0, 40, 700, 1500])
def test_a_private_key_across_the_parts_of_a_log_is_not_packed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int
):
    part = 1 << 17
    monkeypatch.setattr("vlmrl.store.pack.LOG_PART", part)
    body = [hashlib.sha512(b"%d" % i).hexdigest()[:64] for i in range(25)]
    key = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *body, "-----END RSA PRIVATE KEY-----\n"])
    filler = "a line\n" * (part // 7 + 1)
    log = layout.log_path(run.dir, 1)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(filler[: part - shift] + "\n" + key + filler)
    opened = unpack(pack_run(run.dir, tmp_path / "a.tar.gz", RunImages(run.dir)).path, tmp_path / "elsewhere")
    text = layout.log_path(opened, 1).read_text()
    assert not [line for line in body if line in text] and text.count("<redacted>") == len(body)
    assert text.replace("<redacted>\n", "") == log.read_text().replace("\n".join(body) + "\n", "")


def test_links_of_a_logger_hide_no_run_and_are_not_packed(run: Run, tmp_path: Path):
    (tmp_path / "outside.log").write_text("theirs")
    (run.dir / "wandb" / "logs").mkdir(parents=True)
    (run.dir / "wandb" / "logs" / "core.log").symlink_to(tmp_path / "outside.log")
    (run.dir / "wandb" / "config.yaml").write_text("a: 1")
    assert verify_run(run.dir).errors == []
    packed = pack_run(run.dir, tmp_path / "a.tar.gz", RunImages(run.dir, run.manifest.datasets))
    with tarfile.open(packed.path) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert "wandb/config.yaml" in names and "wandb/logs/core.log" not in names
