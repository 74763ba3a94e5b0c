"""What of a run may be deleted: never what somebody needs, and never so that it looks lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_builders import make_checkpoint, make_group, make_run

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import rows_schema
from vlmrl.store.media import write_shard
from vlmrl.store.prune import RolloutRule, Rules, children, plan_prune, prune_run, pruned_ranges
from vlmrl.store.runs import Run
from vlmrl.store.verify import verify_run
from vlmrl.types import Media


def train(run: Run, steps: int, media: tuple[Media, ...] = ()) -> None:
    for step in range(steps):
        groups = [make_group(step, media=media)]
        run.write_rollouts(step, groups)
        run.log(step, "train", {"rollout/samples": sum(len(g.samples) for g in groups)})


def kept_steps(run_dir: Path) -> list[int]:
    return sorted(parsed[0] for p in (run_dir / "rollouts").iterdir() if (parsed := layout.parse_rollout_name(p.name)))


@given(st.sets(st.integers(0, 60)), st.integers(1, 10), st.integers(0, 7))
def test_the_newest_and_every_kth_stay(steps, keep, every):
    doomed = RolloutRule(keep, every).doomed(steps)
    stay = steps - set(doomed)
    assert doomed == sorted(doomed) and set(sorted(steps)[-keep:]) <= stay
    assert all(s % every for s in doomed) if every else len(stay) == min(keep, len(steps))


def test_rollouts_pruned_as_the_run_goes_are_not_lost_ones(tmp_path):
    run = make_run(tmp_path)
    for step in range(7):
        run.write_rollouts(step, [make_group(step, media=())])
        run.log(step, "train", {"rollout/samples": 2})
        run.prune_rollouts(RolloutRule(2, every=3))
    run.finish()
    assert kept_steps(run.dir) == [0, 3, 5, 6] and pruned_ranges(run.dir) == [range(1, 3), range(4, 5)]
    assert verify_run(run.dir).errors == []
    (run.dir / "rollouts" / "000004.parquet").unlink()
    (error,) = verify_run(run.dir).errors
    assert "1 step with metrics, but without rollouts: 4" in error.message


def test_a_damaged_note_is_told(tmp_path):
    run = make_run(tmp_path)
    train(run, 2)
    run.finish()
    (run.dir / "rollouts" / layout.PRUNED).write_text("{")
    assert any("record of deleted rollouts is damaged" in p.message for p in verify_run(run.dir).errors)
    with pytest.raises(StoreError, match="is damaged"):
        prune_run(run.dir, Rules(rollouts=RolloutRule(1)))
    assert kept_steps(run.dir) == [0, 1]


def test_all_attempts_of_a_step_go_together(tmp_path):
    run = make_run(tmp_path)
    train(run, 3)
    again = layout.rollout_path(run.dir, 0, attempt=2)
    again.write_bytes(layout.rollout_path(run.dir, 0).read_bytes())
    run.finish()
    assert {p.name for p in prune_run(run.dir, Rules(rollouts=RolloutRule(2)))} == {again.name, "000001.parquet"}


def test_the_newest_the_best_and_what_another_run_began_with_stay(tmp_path):
    run = make_run(tmp_path)
    for step in (1, 2, 3, 4, 5):
        make_checkpoint(run.dir, step)
    make_checkpoint(run.dir, 6, complete=False)
    run.finish()
    with make_run(tmp_path, parent={"run": run.id, "checkpoint": "step-000002"}) as child:
        pass
    assert children(run.dir) == {2: child.id} and children(child.dir) == {}
    doomed = prune_run(run.dir, Rules(keep_last=1), [3, *children(run.dir)])
    assert [p.name for p in doomed] == ["step-000001", "step-000004"]
    assert [p.name for p in layout.complete_checkpoints(run.dir)] == ["step-000002", "step-000003", "step-000005"]
    with pytest.raises(ValueError, match="at least 1"):
        plan_prune(run.dir, Rules(keep_last=0))


def test_images_go_when_nothing_left_names_them(tmp_path):
    run = make_run(tmp_path)
    media = [Media(c * 64, 4, 4) for c in "abc"]
    (run.dir / "media").mkdir()
    for number, m in enumerate(media):
        write_shard(run.dir / "media" / f"{number}.arrow", [(m.sha256, b"png")])
    run.write_rollouts(0, [make_group(0, media=(media[0],))])
    run.write_rollouts(1, [make_group(1, media=(media[1],))])
    run.finish()
    assert [p.name for p in plan_prune(run.dir, Rules(media=True))] == ["2.arrow"]
    both = Rules(rollouts=RolloutRule(1), media=True)
    prune_run(run.dir, both)
    assert sorted(p.name for p in (run.dir / "media").iterdir()) == ["1.arrow"] and kept_steps(run.dir) == [1]
    assert plan_prune(run.dir, both) == []


def test_an_image_that_an_evaluation_names_stays(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = make_run(tmp_path)
    (run.dir / "media").mkdir()
    write_shard(run.dir / "media" / "0.arrow", [("a" * 64, b"png")])
    folder = layout.eval_dir(run.dir, "test")
    folder.mkdir(parents=True)
    images = pa.schema([rows_schema((), shown=False).field("images")])
    rows = pa.table({"images": [[Media("a" * 64, 8, 6).fields()]]}, schema=images)
    pq.write_table(rows, folder / layout.EVAL_ROWS)
    (folder / layout.EVAL_SUMMARY).write_text("{}")
    run.finish()
    assert plan_prune(run.dir, Rules(media=True)) == []
    (folder / layout.EVAL_ROWS).write_bytes(b"cut")
    with pytest.raises(StoreError, match="cannot be read"):  # nothing is deleted on a guess
        plan_prune(run.dir, Rules(media=True))


def test_a_run_that_is_being_written_is_not_pruned(tmp_path):
    run = make_run(tmp_path)
    train(run, 3)
    with pytest.raises(StoreError, match="is being written"):
        prune_run(run.dir, Rules(rollouts=RolloutRule(1)))
    assert kept_steps(run.dir) == [0, 1, 2]
    run.finish()


KILLED = """
import os, sys
from pathlib import Path
from vlmrl.store import prune
unlink, left = Path.unlink, int(sys.argv[2])
def killed(path, missing_ok=False):
    global left
    if path.parent.name in ("rollouts", "checkpoints"):
        if left == 0:
            os._exit(137)
        left -= 1
    unlink(path, missing_ok)
Path.unlink = killed
prune.prune_run(Path(sys.argv[1]), prune.Rules(rollouts=prune.RolloutRule(1)))
"""


@pytest.mark.parametrize("after", [0, 1])
def test_killed_while_pruning_nothing_looks_lost_and_the_next_one_finishes(tmp_path, after):
    run = make_run(tmp_path)
    train(run, 4)
    run.finish()
    done = subprocess.run([sys.executable, "-c", KILLED, str(run.dir), str(after)], timeout=60)
    assert done.returncode == 137 and kept_steps(run.dir) == list(range(after, 4))
    assert verify_run(run.dir).errors == []
    prune_run(run.dir, Rules(rollouts=RolloutRule(1)))
    assert kept_steps(run.dir) == [3] and verify_run(run.dir).errors == []
