"""`verify` finds what is wrong, and a packed run opens elsewhere with its images."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
from store_builders import make_checkpoint, make_group, make_run

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.media import RunImages, ShardFolder, write_shard
from vlmrl.store.pack import pack_run
from vlmrl.store.runs import Run, open_run
from vlmrl.store.verify import verify_run
from vlmrl.types import Media

CONTENT = {hashlib.sha256(c).hexdigest(): c for c in (b"image one", b"image two")}
MEDIA = [Media(sha256, 8, 6) for sha256 in CONTENT]


def make_dataset(folder: Path, fingerprint: str = "f" * 64) -> Path:
    write_shard(folder / "media-00000.arrow", CONTENT.items())
    (folder / "dataset.json").write_text(json.dumps({"schema": 1, "fingerprint": fingerprint}))
    return folder


def finished_run(root: Path, dataset: Path) -> Run:
    datasets = [{"name": "digits", "path": str(dataset), "fingerprint": "f" * 64}]
    run = make_run(root, datasets=datasets, recipe_text="x = 1\n", resolved={"recipe": {}})
    for step in range(2):
        run.write_rollouts(step, [make_group(step, media=(MEDIA[step],))])
        run.log(step, "train", {"rollout/samples": 2})
    make_checkpoint(run.dir, 2)
    run.finish()
    return open_run(root, run.id)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return finished_run(tmp_path / "runs", make_dataset(tmp_path / "data"))


def test_a_whole_run_has_no_problems(run: Run):
    verdict = verify_run(run.dir)
    assert verdict.problems == []
    assert verdict.counts == {
        "rollout files": 2, "samples": 4, "metrics lines": 2, "checkpoints": 1, "evaluations": 0, "images": 2,
    }  # fmt: skip


def damage_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def overwrite_stale(run: Run) -> None:
    from vlmrl.store.rollouts import write_rollouts

    write_rollouts(layout.rollout_path(run.dir, 1), [make_group(0, media=(MEDIA[0],))], step=1)


DAMAGE = {
    "manifest.json is cut off": lambda run: (run.dir / "manifest.json").write_text('{"schema": 1, '),
    "the recipe was changed": lambda run: (run.dir / "recipe.toml").write_text("x = 2\n"),
    "the recipe cannot be read": lambda run: (run.dir / "recipe.toml").unlink(),
    "is not whole JSON": lambda run: (run.dir / "resolved.json").write_text("{"),
    "a line of metrics is damaged": lambda run: damage_byte_line(run),
    "which the manifest does not know": lambda run: append(run, {"step": 0, "attempt": 7, "kind": "train"}),
    "the rollout file is damaged": lambda run: (run.dir / "rollouts/step-000000.parquet").write_bytes(b"PAR1 no"),
    "have metrics but no rollouts: 1": lambda run: (run.dir / "rollouts/step-000001.parquet").unlink(),
    "metrics say 9 samples, the rollouts hold 2": lambda run: append(run, samples_line(9)),
    "samples of policy version 0 in the rollouts of step 1": overwrite_stale,
    "hash differs": lambda run: damage_byte(run.dir / "checkpoints/step-000002/model/a.safetensors"),
    "a file of this checkpoint cannot be read": lambda run: next(run.dir.glob("checkpoints/*/model/*")).unlink(),
    "names a file outside of itself": lambda run: escape(run),
    "images of the rollouts cannot be found": lambda run: next(run.dir.parent.parent.glob("data/*.arrow")).unlink(),
}


def damage_byte_line(run: Run) -> None:
    path = run.dir / layout.METRICS
    path.write_text('{"broken\n'.join(path.read_text().splitlines(keepends=True)))


def samples_line(samples: int) -> dict:
    return {"step": 0, "attempt": 1, "kind": "train", "rollout/samples": samples}


def append(run: Run, line: dict) -> None:
    with open(run.dir / layout.METRICS, "a") as file:
        file.write(json.dumps(line) + "\n")


def escape(run: Run) -> None:
    path = run.dir / "checkpoints/step-000002/meta.json"
    path.write_text(json.dumps({"files": {"../../../data/dataset.json": "0"}}))


@pytest.mark.parametrize("message", DAMAGE)
def test_every_damage_is_found_and_named(run: Run, message: str):
    DAMAGE[message](run)
    errors = verify_run(run.dir).errors
    assert any(message in e.message for e in errors), errors
    assert all(e.where for e in errors)


def test_several_damages_are_told_at_once(run: Run):
    (run.dir / "recipe.toml").unlink()
    (run.dir / "rollouts/step-000001.parquet").unlink()
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


def test_packing_twice_gives_the_same_bytes(run: Run, tmp_path: Path):
    import os

    images = RunImages(run.dir, run.manifest.datasets)
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
    with pytest.raises(StoreError, match="is not there"):
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
    assert gone.find(MEDIA[0]) is None and gone.notes == ["dataset nowhere is not there"]


def test_shards_hold_each_image_once_and_damaged_ones_are_told(tmp_path: Path):
    path = tmp_path / "a.arrow"
    assert write_shard(path, [*CONTENT.items(), *CONTENT.items()]) == 2
    folder = ShardFolder(tmp_path)
    assert folder.hashes() == list(CONTENT) and folder.get("0" * 64) is None
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(StoreError, match="shard cannot be read"):
        ShardFolder(tmp_path)
