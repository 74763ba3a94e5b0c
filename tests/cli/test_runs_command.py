"""`vlmrl runs` and `vlmrl compare` as a user types them."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Done, this_process

from vlmrl.cli.output import table_lines
from vlmrl.cli.runs import list_
from vlmrl.errors import StoreError
from vlmrl.evaluate.metrics import summarise
from vlmrl.store import layout
from vlmrl.store.media import write_shard
from vlmrl.store.runs import Run, create_run
from vlmrl.types import Group, Media, Row, Score, ScoredSample, Segment, Trajectory

IMAGE = b"an image file"
MEDIA = Media(hashlib.sha256(IMAGE).hexdigest(), 8, 6)


def vlmrl(*arguments: str, runs: Path) -> Done:
    return this_process(*arguments, cwd=runs.parent, env={layout.RUNS_VARIABLE: str(runs)})


def as_json(*arguments: str, runs: Path, code: int = 0) -> dict[str, Any]:
    done = vlmrl(*arguments, "--json", runs=runs)
    assert done.code == code, done.err
    return json.loads(done.out)


def make(root: Path, steps: int = 3, **settings: Any) -> Run:
    values: dict[str, Any] = {
        "kind": "rl",
        "recipe_name": "digits",
        "resolved": {"recipe": {"train": {"steps": steps}}},
    }
    run = create_run(root, **{**values, **settings})
    for step in range(steps):
        row = Row("p", "digits", "pairs", {"same": True}, (MEDIA,))
        t = Trajectory(
            "pairs", "p", 0, 0, step, 1, (1,), (Segment("assistant", (2,), True, (-0.5,)),), (MEDIA,), "stop"
        )
        run.write_rollouts(step, [Group(row, "prompt", (ScoredSample(t, "yes", Score(step / 10, {"answer": 1.0})),))])
        run.log(step, "train", {"reward/mean": step / 10, "rollout/samples": 1, "time/step_seconds": 1.5})
    for step in (0, steps):
        run.log(step, "validation", {"eval/accuracy": 0.5 + step / 10})
    run.set_best(steps, "accuracy", 0.5 + steps / 10)
    return run


def add_evaluation(run: Run, name: str, correct: list[int], **meta: Any) -> Path:
    from vlmrl.evaluate.records import Evaluation, write_evaluation

    rows = []
    for i, right in enumerate(correct):
        outcome = {"accuracy": float(right), "label": 1.0}
        images = [{"sha256": f"{i:064x}", "width": 8, "height": 8, "kind": "image"}]
        row = {
            "prompt_id": f"p{i}",
            "sample": 0,
            "seed": 1,
            "source": "digits",
            "task": "pairs",
            "truth": {"same": True},
        }
        row |= {
            "text": "x",
            "finish": "stop",
            "num_tokens": 3,
            "score": float(right),
            "parts": {"answer": float(right)},
        }
        rows.append(row | {"note": "", "error": None, "images": images, "outcome": outcome, **outcome})
    folder = layout.eval_dir(run.dir, name)
    write_evaluation(folder, Evaluation(rows, summarise(rows)), {"split": "test", **meta})
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_list_without_runs_says_so(root: Path):
    done = vlmrl("runs", "list", runs=root)
    assert (done.code, done.out) == (0, "") and "no runs in" in done.err
    assert as_json("runs", "list", runs=root)["runs"] == []


def test_list_shows_newest_first_filters_and_survives_a_damaged_manifest(root: Path):
    with make(root, name="old", tags=["paper"]) as old:
        pass
    with make(root, kind="sft", recipe_name="digits_sft") as new:
        pass
    with make(root) as bad:
        pass
    (bad.dir / layout.MANIFEST).write_text('{"schema": 1, "id')
    result = as_json("runs", "list", runs=root)
    assert [r["id"] for r in result["runs"]][1:] != [] and result["total"] == 3
    by_id = {r["id"]: r for r in result["runs"]}
    assert by_id[bad.id]["status"] == "damaged" and "cut off" in by_id[bad.id]["problem"]
    assert (by_id[old.id]["step"], by_id[old.id]["best"]["value"], by_id[old.id]["name"]) == (3, 0.8, "old")
    for option, wanted in (("--kind=sft", new), ("--tag=paper", old), ("--status=damaged", bad)):
        assert [r["id"] for r in as_json("runs", "list", option, runs=root)["runs"]] == [wanted.id]
    plain = vlmrl("runs", "list", runs=root).out.splitlines()
    assert plain[0].split("\t")[:4] == ["run", "name", "kind", "status"] and len(plain) == 4
    limited = vlmrl("runs", "list", "--limit", "1", runs=root)
    assert len(limited.out.splitlines()) == 2 and "the newest 1 of 3 runs" in limited.err
    for option, word, known in (("--status", "dead", "running"), ("--kind", "grpo", "rl, sft, eval, try")):
        wrong = vlmrl("runs", "list", option, word, runs=root)
        assert wrong.code == 2 and f"known: {known}" in wrong.err


def test_a_narrow_list_keeps_id_status_step_best_and_age(root: Path, monkeypatch: pytest.MonkeyPatch):
    with make(root, name="a-name-that-takes-a-lot-of-space", note="a long note " * 9):
        pass
    shown = []

    def lines_of_80(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str]) -> None:
        shown.append(table_lines([columns, *rows], 80, spare))

    monkeypatch.setattr("vlmrl.cli.runs.show_table", lines_of_80)
    list_(None, None, None, 30, root)
    ((head, *_), left_out) = shown.pop()
    assert head.split() == ["run", "status", "step", "best", "age"] and left_out == ["kind", "about", "name"]


def test_show_tells_later_evaluations_from_validations_during_training(root: Path):
    run = make(root, name="night")
    run.finish()
    own = add_evaluation(run, "test-digits-step-000003", [1, 0])
    during = add_evaluation(run, "validation-digits-step-000003", [1, 0]) / layout.EVAL_SUMMARY
    summary = json.loads(during.read_text())
    during.write_text(json.dumps(summary | {"meta": summary["meta"] | {"during": "training"}}))
    shown = vlmrl("runs", "show", "night", runs=root).out
    assert f"{own.name}: accuracy 0.5, 2 responses, greedy; 1 during training\n" in shown


@pytest.mark.parametrize("more", [(), ("--recipe", "digits_im")])
def test_eval_of_a_name_that_is_no_run_says_so_and_leaves_no_run(root: Path, more: tuple[str, ...]):
    make(root, name="night").finish()
    done = vlmrl("eval", "nigth", *more, runs=root)
    assert done.code == 2 and "there is no run and no model folder `nigth`" in done.err
    assert "did you mean `night`?" in done.err and len(list(root.iterdir())) == 1
    assert f"runs are searched in {root}" in done.err


def test_a_checkpoint_that_was_pruned_is_answered_with_those_that_are_there(root: Path):
    run = make(root, name="night")
    run.finish()
    for step in (10, 12):
        folder = layout.checkpoint_dir(run.dir, step)
        folder.mkdir(parents=True)
        (folder / layout.COMPLETE).write_text("")
    with pytest.raises(StoreError) as caught:
        run.checkpoint(8)
    assert "step-000010, step-000012" in str(caught.value.hint) and "checkpoint.keep_last" in str(caught.value.hint)
    with pytest.raises(StoreError) as caught:
        run.checkpoint(14)
    assert "keep_last" not in str(caught.value.hint), "it was never there"


def test_show_says_how_to_go_on(root: Path):
    run = make(root, name="night")
    run.finish("interrupted")
    done = vlmrl("runs", "show", "night", runs=root)
    for text in (
        "interrupted",
        "3: reward/mean 0.2",
        "accuracy 0.5 -> 0.8",
        "3 steps, 1 to 3",
        "vlmrl train --resume night",
        str(run.dir),
    ):
        assert text in done.out, done.out
    about = as_json("runs", "show", "last", runs=root)
    assert about["last_train"]["reward/mean"] == 0.2 and about["rollout_steps"] == [0, 1, 2]


def test_the_table_of_a_step_names_the_command_that_shows_a_response(root: Path):
    run = make(root, name="mine")
    table = vlmrl("runs", "show", "mine", "--rollout", "1", runs=root)
    assert "vlmrl runs show mine --rollout 1/p" in table.err and '{"same": true}' in table.out
    shown = vlmrl("runs", "show", run.id, "--rollout", "1/p", runs=root).out
    assert 'truth: {"same": true}' in shown and "| yes" in shown


def test_show_of_a_damaged_or_unknown_run_is_a_message_and_code_2(root: Path):
    with make(root) as run:
        pass
    (run.dir / layout.MANIFEST).write_text("{")
    for arguments, text in ((("show", run.id), "cut off or damaged"), (("show", "nothing"), "no run `nothing`")):
        done = vlmrl("runs", *arguments, runs=root)
        assert done.code == 2 and text in done.err and "Traceback" not in done.err and done.out == ""


def test_verify_ends_with_2_and_names_every_problem(root: Path, tmp_path: Path):
    write_shard(tmp_path / "data" / "media-00000.arrow", [(MEDIA.sha256, IMAGE)])
    (tmp_path / "data" / "dataset.json").write_text('{"schema": 1, "fingerprint": "f"}')
    with make(root, datasets=[{"name": "d", "path": str(tmp_path / "data"), "fingerprint": "f"}]) as run:
        pass
    assert vlmrl("runs", "verify", "last", runs=root).code == 0
    (run.dir / "rollouts/000002.parquet").unlink()
    (run.dir / "resolved.json").write_text("{")
    done = vlmrl("runs", "verify", "last", runs=root)
    assert (
        done.code == 2
        and "with metrics, but without rollouts: 2" in done.err
        and "the run's recipe cannot be read" in done.err
    )
    result = as_json("runs", "verify", "last", runs=root, code=2)
    assert result["ok"] is False and len(result["problems"]) == 3


def test_pack_makes_a_file_that_opens_elsewhere(root: Path, tmp_path: Path):
    write_shard(tmp_path / "data" / "media-00000.arrow", [(MEDIA.sha256, IMAGE)])
    (tmp_path / "data" / "dataset.json").write_text('{"schema": 1, "fingerprint": "f"}')
    with make(root, datasets=[{"name": "d", "path": str(tmp_path / "data"), "fingerprint": "f"}]) as run:
        pass
    result = as_json("runs", "pack", "last", "-o", str(tmp_path / "run.tar.gz"), runs=root)
    assert (result["images"], result["missing_images"]) == (1, [])
    (tmp_path / "data").rename(tmp_path / "gone")
    subprocess.run(["tar", "xf", "run.tar.gz"], cwd=tmp_path, check=True)
    assert as_json("runs", "verify", str(tmp_path / run.id), runs=tmp_path / "none")["ok"] is True
    lost = vlmrl("runs", "pack", "last", "-o", str(tmp_path / "b.tar.gz"), runs=root)
    assert lost.code == 0 and "1 image that the rollouts name could not be found" in lost.err


def test_notes_names_and_tags(root: Path):
    with make(root) as run:
        pass
    assert as_json("runs", "note", "last", "lr too high", "--name", "try1", runs=root)["note"] == "lr too high"
    assert as_json("runs", "tag", "try1", "paper", "seed1", runs=root)["tags"] == ["paper", "seed1"]
    assert as_json("runs", "tag", "try1", "--remove", "paper", runs=root)["tags"] == ["seed1"]
    for wrong in ("+x", "#x"):
        assert "no `+`, `-` or `#` at the beginning" in vlmrl("runs", "tag", "try1", wrong, runs=root).err
    assert as_json("runs", "note", "try1", runs=root) == {"run": run.id, "name": "try1", "note": "lr too high"}
    refused = vlmrl("runs", "note", "try1", "--name", "last", runs=root)
    assert refused.code == 2 and "`last` cannot be the name" in refused.err


def test_prune_asks_first_and_keeps_the_best(root: Path):
    run = make(root)
    for step in (1, 2, 3, 4):
        folder = layout.checkpoint_dir(run.dir, step)
        folder.mkdir(parents=True)
        (folder / layout.COMPLETE).write_text("")
    busy = vlmrl("runs", "prune", "last", "--keep-last", "1", "--yes", runs=root)
    assert busy.code == 2 and "is being written by process" in busy.err
    run.finish()
    plan = as_json("runs", "prune", "last", "--keep-last", "1", runs=root)
    assert plan["would_delete"] == ["step-000001", "step-000002"] and len(run.checkpoint_dirs()) == 4
    told = vlmrl("runs", "prune", "last", "--keep-last", "1", "--yes", runs=root)
    assert "kept: step-000003, step-000004" in told.out
    assert [p.name for p in run.checkpoint_dirs()] == ["step-000003", "step-000004"]


def test_prune_of_rollouts_says_first_what_would_go(root: Path):
    with make(root, steps=6) as run:
        pass
    files = [p.name for p in sorted((run.dir / "rollouts").glob("*.parquet"))]
    nothing = vlmrl("runs", "prune", "last", runs=root)
    assert nothing.code == 2 and "no option says what to delete" in nothing.err
    rules = ("--keep-rollouts", "2", "--keep-rollouts-every", "3")
    plan = as_json("runs", "prune", "last", *rules, "--yes", "--dry-run", runs=root)
    gone = [n for n in files[:-2] if (int(n[:6]) - 1) % 3]
    assert gone and plan["would_delete"] == [f"rollouts/{n}" for n in gone] and plan["bytes"] > 0
    assert [p.name for p in sorted((run.dir / "rollouts").glob("*.parquet"))] == files
    told = vlmrl("runs", "prune", "last", *rules, "--yes", runs=root)
    assert f"deleted {len(gone)} rollout files" in told.out
    assert [p.name for p in sorted((run.dir / "rollouts").glob("*.parquet"))] == [n for n in files if n not in gone]
    assert "no rollouts" not in vlmrl("runs", "verify", "last", runs=root).out  # deleted, not lost


def test_du_adds_up(root: Path):
    with make(root) as run:
        pass
    (found,) = as_json("runs", "du", runs=root)["runs"]
    files = [p for p in run.dir.rglob("*") if p.is_file()]
    assert found["total"] == sum(p.stat().st_size for p in files) and found["rollouts"] > 0
    kinds = ("rollouts", "checkpoints", "media", "eval", "logs", "merged", "other")
    assert found["total"] == sum(found[kind] for kind in kinds)
    merged = run.dir / "merged-step-000002" / "model.safetensors"
    merged.parent.mkdir()
    merged.write_bytes(b"x" * 12345)
    (again,) = as_json("runs", "du", runs=root)["runs"]
    assert again["merged"] == 12345 and again["total"] == found["total"] + 12345
    assert "merged" in vlmrl("runs", "du", runs=root).out


def test_compare_shows_what_differs_and_a_paired_difference(root: Path):
    with make(root, name="a") as a:
        add_evaluation(a, "test", [0, 0, 0, 1, 1, 0, 0, 1, 0, 0] * 5)
    with make(root, name="b", steps=5) as b:
        add_evaluation(b, "test", [1, 1, 0, 1, 1, 1, 0, 1, 1, 1] * 5)
    result = as_json("compare", "a", "b", runs=root)
    assert result["recipe"] == [{"key": "train.steps", "a": 3, "b": 5}]
    assert {"key": "reward/mean", "a": 0.2, "b": 0.4} in result["train"]
    (evaluation,) = result["evaluations"]
    accuracy = next(m for m in evaluation["metrics"] if m["metric"] == "accuracy")
    assert (evaluation["rows_paired"], accuracy["a"], accuracy["b"], accuracy["difference"]) == (50, 0.3, 0.8, 0.5)
    assert 0 < accuracy["low"] < 0.5 < accuracy["high"] and accuracy["excludes_zero"] is True
    same = as_json("compare", "a", "a", runs=root)
    assert same["recipe"] == [] and same["made_with"] == []
    assert all(m["difference"] == 0 and not m["excludes_zero"] for m in same["evaluations"][0]["metrics"])
    text = vlmrl("compare", "a", "b", runs=root)
    assert text.code == 0 and "train.steps\t3\t5" in text.out and "better" in text.out
    zeros = [m["metric"] for m in evaluation["metrics"] if m["a"] == m["b"] == 0]
    assert zeros == ["truncated"] and "\ntruncated\t" not in text.out
    assert "left out: 1 metric, 0 on both sides" in text.out
    for title in ("Evaluation test, paired on 50 responses", "Recipe", "Training, last step"):
        assert f"\n{title}\n" in f"\n{text.out}"


def test_compare_tests_the_difference_and_says_how_many_rows_would_show_a_small_one(root: Path):
    with make(root, name="a") as a:
        for name in ("test", "other"):
            add_evaluation(a, name, [1, 0, 0, 0, 0, 0, 0, 0, 1, 0] * 2)
        add_evaluation(a, "held", [1] * 20, role="held out")
    with make(root, name="b") as b:
        add_evaluation(b, "held", [0] * 20, role="held out")
        add_evaluation(b, "test", [0, 1, 1, 1, 1, 1, 1, 1, 1, 0] * 2)
        add_evaluation(b, "other", [1, 0, 0, 0, 0, 0, 0, 0, 1, 1] * 2)
    result = as_json("compare", "a", "b", runs=root)
    tests = {e["name"]: {m["metric"]: m["test"] for m in e["metrics"]} for e in result["evaluations"]}
    # 2 of the 16 rows that tell speak for A: 2 * (1 + 16 + 120) / 2^16; Holm doubles the smaller of two p-values.
    test = tests["test"]["accuracy"]
    assert (test["method"], test["only_a"], test["only_b"], test["groups"]) == ("exact McNemar", 2, 14, 20)
    assert test["p"] == pytest.approx(274 / 65536) and test["p_holm"] == pytest.approx(548 / 65536)
    assert tests["held"]["accuracy"]["comparisons"] == 1, "rows of another role"
    assert tests["other"]["accuracy"]["p"] == tests["other"]["accuracy"]["p_holm"] == 0.5
    low, high = test["bootstrap"]
    assert 0 < low < 0.6 < high < 1 and tests["test"]["truncated"] is None
    power = next(e["power"] for e in result["evaluations"] if e["name"] == "test")
    assert power["metric"] == "accuracy" and power["discordant"] == 0.8 and 15_000 < power["rows"] < 16_500
    text = vlmrl("compare", "a", "b", runs=root).out
    assert "accuracy: exact McNemar p = 0.00418 (only A right on 2 rows, only B on 14), 0.00836 with Holm" in text
    assert "to see 2 points of accuracy with 80% chance: 15," in text and "disagree on 80.0%" in text


def test_compare_takes_several_runs_as_seeds_of_a_setting_and_several_settings(root: Path):
    for name, answers in (("a1", [0, 0, 0, 1]), ("a2", [0, 0, 1, 1]), ("b1", [1, 1, 1, 1]), ("b2", [1, 1, 0, 1])):
        with make(root, name=name) as run:
            add_evaluation(run, "test", answers * 5, role="test")
    result = as_json("compare", "a1,a2", "b1,b2", runs=root)
    (evaluation,) = result["evaluations"]
    assert [s["letter"] for s in result["settings"]] == ["A", "B"] and len(result["settings"][0]["runs"]) == 2
    assert evaluation["settings"]["B"]["accuracy"]["runs"] == [1.0, 0.75]
    done = vlmrl("compare", "a1,a2", "b1,b2", runs=root)
    assert done.code == 0 and "A\taccuracy\t0.3750\t0.1768\t0.250 0.500" in done.out
    assert "B - A\taccuracy\t+0.5000\t[" in done.out and "2 against 2 runs" in done.out
    several = vlmrl("compare", "a1", "a2", "b1", runs=root)
    assert several.code == 0 and "with Holm's correction for 2" in several.out.splitlines()[0]
    twice = vlmrl("compare", "a1,a1", "b1", runs=root)
    assert twice.code == 2 and "has the run a1 twice" in twice.err


def test_compare_labels_a_maximum_over_checkpoints_that_was_chosen_on_test(root: Path):
    with make(root, name="a") as a:
        for step, answers in ((1, [1, 1]), (3, [0, 1])):
            add_evaluation(a, f"test-digits-step-{step:06d}", answers * 10, step=step)
    with make(root, name="b") as b:
        add_evaluation(b, "test-digits-step-000003", [0, 1] * 10, step=3)
    result = as_json("compare", "a", "b", runs=root)
    (entry,) = result["checkpoints"]
    assert (entry["side"], entry["mean"], entry["best"]["value"], entry["selected"]["value"]) == ("A", 0.75, 1.0, 0.5)
    text = vlmrl("compare", "a", "b", runs=root).out
    assert "1.000 at step 1 (best of 2 checkpoints, chosen on these test rows themselves" in text
    folders = [str(layout.eval_dir(run.dir, f"test-digits-step-{step:06d}")) for run, step in ((a, 1), (b, 3))]
    (note,) = as_json("compare", *folders, runs=root)["notes"]
    assert "1 of 2 checkpoints evaluated on these rows, and validation selected step 3" in note


def test_compare_pairs_evaluations_of_other_steps_and_keeps_suffixes_apart(root: Path):
    with make(root, name="a") as a:
        for step, answers in ((1, [1, 1]), (3, [0, 0])):
            add_evaluation(a, f"test-digits-step-{step:06d}-first-20", answers * 10)
        a.set_best(1, "accuracy", 1.0)
    with make(root, name="b", steps=5) as b:
        add_evaluation(b, "test-digits-step-000005-first-20", [0, 1] * 10)
        add_evaluation(b, "test-digits-step-000005", [0, 1] * 10)
    (evaluation,) = as_json("compare", "a", "b", runs=root)["evaluations"]
    assert evaluation["name"] == "test-digits-first-20"
    accuracy = next(m for m in evaluation["metrics"] if m["metric"] == "accuracy")
    assert (accuracy["a"], accuracy["b"]) == (1.0, 0.5)  # of A the best step, not the last


def test_compare_takes_the_folder_of_an_evaluation(root: Path):
    with make(root, name="a") as a:
        first, second = add_evaluation(a, "one", [0, 1] * 10), add_evaluation(a, "two", [1, 1] * 10)
    result = as_json("compare", str(first), str(second), runs=root)
    assert result["evaluations"][0]["metrics"][0]["difference"] == 0.5


def test_compare_warns_when_the_rewards_differ(root: Path):
    for name, weight in (("a", 1.0), ("b", 0.5), ("c", 0.5)):
        with make(
            root, name=name, rewards=[{"source": "digits", "name": "r", "sha256": "0", "weights": {"x": weight}}]
        ):
            pass
    (note,) = (n for n in as_json("compare", "a", "b", runs=root)["notes"] if "different rewards" in n)
    assert "A by r source 0, weights x 1.0; B by r source 0, weights x 0.5" in note
    assert not any("different rewards" in note for note in as_json("compare", "b", "c", runs=root)["notes"])


AT_75082C1 = "33af6ce6b71c533cc1ffc60aaac03d3868f9f443e005848dda2761ec0512ffcb"
"""What runs of that commit recorded for the reward `taxonomy`."""


def test_compare_knows_a_built_in_by_its_version_and_says_it(root: Path):
    kinds = {
        "old": {"sha256": AT_75082C1},
        "new": {"version": 1},
        "newer": {"version": 2},
        "partial": {"version": 1, "args": {"levels": ["a"], "partial": False}},
    }
    for name, kind in kinds.items():
        record = {"source": "digits", "name": "taxonomy", "args": {"levels": ["a"]}, "weights": {"answer": 1.0}} | kind
        prompt = {"sha256": "1" * 64} if name == "old" else {"sha256": "2" * 64, "earlier": ["1" * 64]}
        with make(root, name=name, rewards=[record], prompts=[{"source": "digits", **prompt}]) as run:
            meta = {"reward": {k: v for k, v in record.items() if k not in ("source", "args")}}
            add_evaluation(run, "test", [0, 1] * 10, **meta, reward_args=record["args"])
    alike = as_json("compare", "old", "new", runs=root)
    assert not any("different rewards" in note for note in alike["notes"]) and alike["evaluations"][0]["scored_alike"]
    assert not [row for row in alike["made_with"] if row["key"].startswith(("reward", "prompt"))]
    other = as_json("compare", "old", "newer", runs=root)
    told = 'A by taxonomy version 1, levels = ["a"], weights answer 1.0; B by taxonomy version 2, levels = ["a"]'
    assert any(told in note for note in other["notes"])
    assert not other["evaluations"][0]["scored_alike"]
    assert [row["b"] for row in other["made_with"] if row["key"] == "reward digits"] == [
        'taxonomy version 2, levels = ["a"], weights answer 1.0'
    ]
    args = as_json("compare", "new", "partial", runs=root)
    assert any("partial = false" in note for note in args["notes"]) and not args["evaluations"][0]["scored_alike"]


def test_compare_without_rows_in_common_says_so(root: Path):
    with make(root, name="a") as a:
        add_evaluation(a, "test", [1])
    with make(root, name="b"):
        pass
    assert "no evaluation in common: A has test, greedy. B has none" in as_json("compare", "a", "b", runs=root)["notes"]


def test_compare_takes_an_evaluation_as_run_and_name_and_lists_those_that_there_are(root: Path):
    for name, scores in (("a", [0] * 20), ("b", [1] * 20)):
        with make(root, name=name) as run:
            add_evaluation(run, "test", scores)
    for a, b in (("a/test", "b/test"), (str(root / "a"), str(root / "b"))):
        assert as_json("compare", a, b, runs=root)["evaluations"][0]["metrics"][0]["difference"] == 1.0
    errors = [vlmrl("compare", name, "b", runs=root).err for name in ("tset", "a/tset")]
    assert "did you mean `test`?  evaluations of these, as RUN/NAME: test" in errors[0]
    assert "run `a` has no evaluation `tset`" in errors[1] and "did you mean `test`?" in errors[1]


def test_rm_asks_for_yes_and_says_what_it_freed(tmp_path: Path):
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        make(runs, name=name).finish()
    wished = as_json("runs", "rm", "one", "two", runs=runs)
    assert len(wished["would_remove"]) == 2 and wished["bytes"] > 1000 and len(list(runs.iterdir())) == 2
    done = vlmrl("runs", "rm", "one", runs=runs)
    assert done.code == 0 and "would remove" in done.out and "add --yes" in done.err
    done = vlmrl("runs", "rm", "one", "--yes", runs=runs)
    assert done.code == 0 and "removed 2" in done.out and " in all" in done.out
    assert [run["name"] for run in as_json("runs", "list", runs=runs)["runs"]] == ["two"]
    refused = vlmrl("runs", "rm", "two", "missing", "--yes", runs=runs)
    assert refused.code == 2 and "no run `missing`" in refused.err
    assert [run["name"] for run in as_json("runs", "list", runs=runs)["runs"]] == ["two"]
