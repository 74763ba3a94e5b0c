"""What a run keeps of its recipes and texts: nothing old is lost, and the newest is what the manifest says."""

from __future__ import annotations

import errno
import json
import os

import pytest

from vlmrl.errors import StoreError
from vlmrl.store import kept_recipe
from vlmrl.store.files import link_tree
from vlmrl.store.runs import create_run, open_run, resume_run

SHA = "ab" * 32
CHANGE = {"what": "train.steps", "old": 1, "new": 2, "kind": "free", "why": "length"}


@pytest.fixture
def run(tmp_path):
    made = create_run(
        tmp_path,
        kind="rl",
        recipe_name="r",
        recipe_text="a = 1\n",
        resolved={"recipe": {"a": 1}},
        rewards=[{"source": "s", "sha256": "old"}],
        texts={("reward", SHA): "def f(x):\n    return 1\n"},
        seeds={"run": 0},
    )
    made.finish()
    return made


def resume(run, changes=(CHANGE,), resolved=None, text=None, **more):
    renewal = kept_recipe.Renewal(
        changes, True, resolved or {"recipe": {"a": 2}}, text, {"rewards": [{"sha256": "new"}]}, **more
    )
    resumed = resume_run(run.dir.parent, run.id, renewal=renewal)
    resumed.finish()
    return open_run(run.dir.parent, run.id)


def test_each_changed_attempt_has_its_own_recipe_and_readers_get_the_newest(run):
    assert kept_recipe.newest_resolved(run.dir).name == "resolved.json"
    second = resume(run, text="a = 2\n", seeds={"run": 5})
    assert (second.manifest.rewards, second.manifest.seeds) == (({"sha256": "new"},), {"run": 5})
    resume_run(run.dir.parent, run.id).finish()  # a third attempt that changes nothing
    fourth = resume(run, resolved={"recipe": {"a": 4}})
    assert [p.name for p in kept_recipe.resolved_files(run.dir)] == [
        "resolved.json",
        "resolved-a2.json",
        "resolved-a4.json",
    ]
    assert kept_recipe.read_resolved(run.dir) == {"recipe": {"a": 4}}
    assert json.loads((run.dir / "resolved.json").read_text()) == {"recipe": {"a": 1}}
    assert kept_recipe.newest_recipe(run.dir).read_text() == "a = 2\n", "the fourth gave no file"
    assert [len(a.changes) for a in fourth.manifest.attempts] == [0, 1, 0, 1]
    assert fourth.manifest.attempts[1].changes_text == "train.steps 1 -> 2 (accepted)"


def test_a_recipe_written_by_an_attempt_that_never_began_counts_for_nobody(run, monkeypatch):
    def full(*_, **__):
        raise StoreError("cannot write: No space left on device")

    monkeypatch.setattr("vlmrl.store.manifest.update_manifest", full)
    with pytest.raises(StoreError, match="No space"):
        resume(run)
    monkeypatch.undo()
    assert (run.dir / "resolved-a2.json").exists()
    assert kept_recipe.read_resolved(run.dir) == {"recipe": {"a": 1}}
    resume_run(run.dir.parent, run.id).finish()  # attempt 2 at last, and it changes nothing
    assert kept_recipe.read_resolved(run.dir) == {"recipe": {"a": 1}}


def test_a_damaged_manifest_hides_no_recipe(run):
    (run.dir / "manifest.json").write_text("{")
    assert kept_recipe.read_resolved(run.dir) == {"recipe": {"a": 1}}


def test_texts_are_kept_once_by_their_hash_with_secrets_hidden(run):
    assert kept_recipe.kept_text(run.dir, "reward", SHA) == "def f(x):\n    return 1\n"
    assert (
        kept_recipe.kept_text(run.dir, "reward", "cd" * 32) is None
        and kept_recipe.kept_text(run.dir, "prompt", SHA) is None
    )
    kept_recipe.keep_texts(run.dir, {("reward", SHA): "other", ("prompt", SHA): 'api_key = "abcdefgh123"'})
    assert kept_recipe.kept_text(run.dir, "reward", SHA) == "def f(x):\n    return 1\n"
    assert "abcdefgh123" not in (kept_recipe.kept_text(run.dir, "prompt", SHA) or "")
    assert sorted(p.name for p in (run.dir / "kept").iterdir()) == [f"prompt-{SHA[:16]}.jinja", f"reward-{SHA[:16]}.py"]


def test_the_best_begins_anew_with_a_change_that_says_so_and_old_ones_do_not_come_back(tmp_path):
    run = create_run(tmp_path, kind="rl", recipe_name="r")
    run.log(0, "validation", {"eval/metric": 0.5, "eval/is_best": True})
    run.set_best(0, "reward", 0.5)
    run.finish()
    assert resume(run).manifest.best is not None
    resumed = resume_run(tmp_path, run.id, renewal=kept_recipe.Renewal([CHANGE | {"restarts": ["best"]}], True, {}))
    assert resumed.manifest.best is None
    resumed.log(3, "validation", {"eval/metric": 0.1, "eval/is_best": True})
    resumed.set_best(3, "accuracy", 0.1)
    resumed.finish()
    assert resume_run(tmp_path, run.id).manifest.best is None, "a best of the old kind came back"


def make_checkpoint(folder, step):
    path = folder / "checkpoints" / f"step-{step:06d}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "a.safetensors").write_bytes(b"weights")
    (path / "COMPLETE").write_text("")
    return path


@pytest.mark.slow
def test_a_fork_has_the_checkpoint_as_its_own_and_needs_the_parent_no_more(run, tmp_path):
    checkpoint = make_checkpoint(run.dir, 7)
    parent = {"run": run.id, "checkpoint": checkpoint.name, "step": 7}
    forking = kept_recipe.Fork(checkpoint, {}, [CHANGE])
    fork = create_run(tmp_path, kind="rl", recipe_name="f", parent=parent, fork=forking)
    own = fork.dir / "checkpoints" / "step-000007" / "model" / "a.safetensors"
    assert os.path.samefile(own, checkpoint / "model" / "a.safetensors")
    assert fork.checkpoint_dirs() == [own.parent.parent]
    m = fork.manifest
    assert (m.forked_at, m.first_weights, m.parent_text) == (7, None, f"forked from {run.id} at step 7")
    assert (m.attempts[0].from_step, m.attempts[0].from_checkpoint) == (7, "checkpoints/step-000007")
    fork.finish()
    assert resume_run(tmp_path, fork.id).start_step == 7


@pytest.mark.slow
def test_a_fork_whose_checkpoint_cannot_be_copied_leaves_nothing(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr("shutil.copy2", refuse)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StoreError, match="No space left"):
        create_run(tmp_path, kind="rl", recipe_name="f", fork=kept_recipe.Fork(make_checkpoint(run.dir, 7), {}))
    assert sorted(os.listdir(tmp_path)) == before


def test_folders_are_copied_where_there_are_no_hard_links(tmp_path, monkeypatch):
    source = make_checkpoint(tmp_path / "run", 1)

    def no_links(*_, **__):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no_links)
    link_tree(source, tmp_path / "copy")
    copied = tmp_path / "copy" / "model" / "a.safetensors"
    assert copied.read_bytes() == b"weights" and not os.path.samefile(copied, source / "model" / "a.safetensors")
