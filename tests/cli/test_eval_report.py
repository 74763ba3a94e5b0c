"""`vlmrl eval` and `vlmrl report` as a person runs them, on a real tiny model and on stored runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import answered, refused, this_process
from PIL import Image
from report_builders import make_run

REWARD = """
def length(x):
    return {"reward": min(1.0, len(x.response) / 100), "note": x.truth["answer"]}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of five rows with images, its reward and a recipe for it. Returns the recipe."""
    for i in range(5):
        Image.new("RGB", (56, 56), (50 * i, 90, 200)).save(tmp_path / f"{i}.png")
    rows = [{"prompt": f"<image>say {i}", "images": [f"{i}.png"], "answer": str(i)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[model]\npath = "nobody/nothing"\ndtype = "float32"\nmax_pixels = 12544\n'
        f'[[data]]\npath = "{tmp_path}/rows.jsonl"\n[reward]\nname = "{tmp_path}/reward.py:length"\n'
        '[rollout]\nmax_new_tokens = 5\n[paper]\nsource = "arXiv:1"\n[paper.numbers]\nreward = 0.9\n'
    )
    return recipe


@pytest.mark.slow
def test_a_model_folder_is_evaluated_into_a_run_of_its_own(table: Path, tiny_folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    found = answered("eval", tiny_folder, "--recipe", table, "--runs", runs)
    (one,) = found["evaluations"]
    assert one["rows"] == 5 and one["meta"]["greedy"] is True
    assert one["metrics"]["reward"]["n"] == 5
    assert one["metrics"]["response_tokens"]["value"] <= 5
    folder = Path(one["folder"])
    assert (folder / "rows.parquet").is_file() and (folder / "summary.json").is_file()
    listed = answered("runs", "list", "--runs", runs)
    assert "eval" in json.dumps(listed)

    again = answered("eval", tiny_folder, "--recipe", table, "--runs", runs, "--compare", folder)
    (two,) = again["evaluations"]
    assert two["metrics"] == one["metrics"]
    assert two["differences"]["reward"]["value"] == 0.0

    page = answered("report", "last", "--runs", runs, "-o", tmp_path / "r.html")
    assert "arXiv:1" in Path(page["report"]).read_text("utf-8")


@pytest.mark.slow
def test_a_reward_that_pays_no_truth_of_the_rows_is_told(table: Path, tiny_folder: Path, tmp_path: Path) -> None:
    words = ("eval", tiny_folder, "--recipe", table, "--runs", tmp_path / "runs", "--max-rows", "1")
    for name, count in (("number_match", 0), ("think_format", 1)):
        done = this_process(*words, "--set", f"reward.name={name}", cwd=tmp_path)
        assert done.code == 0 and done.err.count("no form of a right answer is known that the reward") == count, (
            done.err
        )


@pytest.mark.slow
def test_sampling_draws_n_answers_a_prompt(table: Path, tiny_folder: Path, tmp_path: Path) -> None:
    args = (
        "eval",
        tiny_folder,
        "--recipe",
        table,
        "--runs",
        tmp_path,
        "--sample",
        "1.0",
        "--n",
        "3",
        "--max-rows",
        "2",
    )
    (one,) = answered(*args)["evaluations"]
    assert (one["rows"], one["prompts"], one["samples"]) == (6, 2, 3)
    assert one["meta"]["sampling"]["temperature"] == 1.0
    (two,) = answered(*args)["evaluations"]
    assert two["metrics"]["reward"] == one["metrics"]["reward"]


def test_several_greedy_samples_are_refused(table: Path, tiny_folder: Path, tmp_path: Path) -> None:
    assert "--sample" in refused("eval", tiny_folder, "--recipe", table, "--runs", tmp_path, "--n", "3").message


def test_a_model_without_data_is_refused_with_the_way_out(tiny_folder: Path, tmp_path: Path) -> None:
    error = refused("eval", tiny_folder, "--runs", tmp_path)
    assert "no data on which" in error.message and "--recipe" in str(error.hint)


def test_a_split_that_is_not_there_is_named_with_those_that_are(table: Path, tiny_folder: Path, tmp_path: Path) -> None:
    error = refused("eval", tiny_folder, "--recipe", table, "--split", "test", "--runs", tmp_path / "runs")
    assert "no split `test`" in error.message and "train" in str(error.hint)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["../out", ".hidden", "a/b", " "])
def test_a_name_that_leaves_the_folder_is_refused(name: str, table: Path, tiny_folder: Path, tmp_path: Path) -> None:
    assert "cannot be the name" in refused("eval", tiny_folder, "--recipe", table, "--name", name).message


def test_a_run_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    done = make_run(tmp_path, steps=1)
    assert "no checkpoint" in refused("eval", done.id, "--runs", tmp_path).message


@pytest.mark.slow
def test_report_writes_into_the_runs_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = make_run(tmp_path, name="mine", steps=2)
    found = answered("report", "mine", "--runs", tmp_path)
    assert found == {"report": str(done.dir / "report.html"), "bytes": found["bytes"], "runs": [done.id], "damage": {}}
    assert (done.dir / "report.html").stat().st_size == found["bytes"] > 10_000
    page, other = (done.dir / "report.html").read_bytes(), make_run(tmp_path, name="other", steps=1)
    monkeypatch.chdir(tmp_path)
    both = answered("report", "other", "mine", "--runs", tmp_path)
    assert both["report"] == "report-other-mine.html" and both["runs"] == [other.id, done.id]
    assert (done.dir / "report.html").read_bytes() == page


def test_report_of_an_unknown_run_lists_those_there_are(tmp_path: Path) -> None:
    done = make_run(tmp_path, steps=0)
    assert done.id in str(refused("report", "nobody", "--runs", tmp_path).hint)


def test_report_of_a_truncated_manifest_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = make_run(tmp_path, steps=1)
    (done.dir / "manifest.json").write_text('{"id": "')
    error = refused("report", done.id, "--runs", tmp_path, "-o", tmp_path / "r.html")
    assert "manifest.json is cut off" in error.message
    assert not (tmp_path / "r.html").exists()


def test_report_below_a_file_is_refused(tmp_path: Path) -> None:
    done = make_run(tmp_path, steps=0)
    out = done.dir / "manifest.json" / "report.html"
    assert "cannot make the folder" in refused("report", done.id, "--runs", tmp_path, "-o", out).message


def test_report_to_a_folder_is_refused(tmp_path: Path) -> None:
    done = make_run(tmp_path, steps=0)
    assert "is a folder" in refused("report", done.id, "--runs", tmp_path, "-o", tmp_path).message
