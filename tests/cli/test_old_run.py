"""A run of 75082c1, when rewards and prompts were known by the hash of their sources, in every command of today."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from command_line import Done, this_process
from safetensors.torch import load_file
from small_runs import copy_digits, weights
from tinyworld import assert_close

from vlmrl.checkpoint.merge import merge
from vlmrl.checkpoint.proof import ProofRequest, check_gap, prove
from vlmrl.errors import StoreError
from vlmrl.evaluate.eval import EvalSettings, plan
from vlmrl.evaluate.eval_rows import choose_recipe, rows_to_evaluate
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.run_records import Labels, start_run
from vlmrl.store.runs import Run, open_run
from vlmrl.store.verify import verify_run
from vlmrl.tasks.builtin_rewards import REWARDS
from vlmrl.train.resume import ResumeRequest, plan_resume

DATA = Path(__file__).parents[1] / "data" / "run-75082c1"
GONE_ON = json.loads((DATA / "gone-on.json").read_text("utf-8"))
"""Figures of the code of that time itself: of the second step of each run, and of the checkpoint of the first."""
WORDS_OF_CHANGE = ("has changed since", "different rewards", "source 33af6ce6b71c", "would not go on")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return copy_digits(tmp_path_factory.mktemp("data") / "digits", 8)


@pytest.fixture
def old(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The run, in a folder with its recipe and its data, which is the current one."""
    return open_run(copied(digits, tmp_path, monkeypatch) / "runs", "old")


@pytest.fixture
def project(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the model, the reward and the two trained runs: `trained`, and `adapter` with LoRA."""
    return copied(digits, tmp_path, monkeypatch)


def copied(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the folder in which the runs were made, with its data, as the current directory."""
    place = tmp_path / "project"
    shutil.copytree(DATA, place)
    (place / "digits").symlink_to(digits)
    for file in place.glob("runs/*/manifest.json"):
        file.write_text(file.read_text("utf-8").replace("/project", str(place)), "utf-8")
    monkeypatch.chdir(place)
    # what these responses earn has not changed since, although the version has for others
    monkeypatch.setitem(REWARDS, "taxonomy", replace(REWARDS["taxonomy"], version=1))
    return place


def edit(run: Run, **changes: object) -> None:
    """Change facts of the recorded reward."""
    manifest = json.loads((run.dir / "manifest.json").read_text("utf-8"))
    manifest["rewards"][0] |= changes
    (run.dir / "manifest.json").write_text(json.dumps(manifest), "utf-8")


def vlmrl(*words: object) -> Done:
    done = this_process(*words, cwd=Path.cwd())
    assert done.code == 0, done
    return done


def resumed(run: Run) -> dict[str, str]:
    """What a resume would change -> whether it may."""
    changes = plan_resume(run.dir.parent, ResumeRequest("old", "rl", None, ("train.steps=3",))).changes
    return {change.what: change.kind for change in changes}


def test_the_record_is_of_its_time(old: Run):
    (reward,), (prompt,) = old.manifest.rewards, old.manifest.prompts
    assert "version" not in reward and len(reward["sha256"]) == 64 and set(prompt) == {"source", "sha256"}


def test_a_resume_changes_nothing_but_what_is_set(old: Run):
    assert resumed(old) == {"train.steps": "free"}, "a key that was added since is no change of the run"


def test_a_resume_says_what_has_changed_since(old: Run):
    edit(old, sha256="4" * 64)
    with pytest.raises(StoreError, match="reward taxonomy: source 444444444444 -> version 1"):
        resumed(old)
    edit(old, sha256="", version=2)
    with pytest.raises(StoreError, match="reward taxonomy: version 2 -> version 1"):
        resumed(old)
    edit(old, version=1, args={"levels": ["loop"]})
    with pytest.raises(StoreError, match=r'reward taxonomy: levels = \["loop"\] -> levels = \["loop", "digit"\]'):
        resumed(old)


def test_another_prompt_is_still_another(old: Run):
    Path("ask.jinja").write_text("<image><image>Which digits?\n", "utf-8")
    overrides = ("train.steps=3", "data.0.prompt=ask.jinja")
    with pytest.raises(StoreError, match="prompt of digits: ebf9e6cc62ff -> "):
        plan_resume(old.dir.parent, ResumeRequest("old", "rl", None, overrides))
    asked = (old.dir / "kept" / "prompt-ebf9e6cc62ffefcd.jinja").read_text("utf-8")
    Path("ask.jinja").write_text(asked + "\n\n", "utf-8")
    same = plan_resume(old.dir.parent, ResumeRequest("old", "rl", None, overrides)).changes
    assert "prompt of digits" not in {change.what for change in same}, "the same text, from a file of one's own"


def test_its_rollouts_are_scored_again_to_the_digit(old: Run):
    checked = json.loads(vlmrl("reward-check", "old", "--json").out)
    assert checked["stored"]["equal"] and checked["samples"] == 24
    assert checked["rewards"]["digits"]["changed"] == ""
    assert checked["rewards"]["digits"]["identity"] == 'taxonomy version 1, levels = ["loop", "digit"]'


def test_an_evaluation_of_it_is_made_again_under_its_name(old: Run):
    origin = ModelOrigin("demo/model")
    chosen = choose_recipe(origin, Path("runs"), recipe="old")
    rows = rows_to_evaluate(chosen.recipe, chosen.seen, "test", max_rows=6)
    summary = old.dir / "eval" / "test-digits" / "summary.json"
    meta = json.loads(summary.read_text("utf-8"))
    meta["meta"]["model"] = "demo/model"
    summary.write_text(json.dumps(meta), "utf-8")
    (made,) = plan(chosen.recipe, origin, rows, old.dir, EvalSettings(name="test-digits"))
    assert made.meta["reward"]["version"] == 1 and "sha256" not in made.meta["reward"]


def test_it_is_compared_with_a_run_of_today_as_scored_alike(old: Run):
    loaded, _ = fill_for_run(load_recipe("old.toml"), Path("runs"))
    with start_run(loaded, Path("runs"), ["vlmrl"], Labels(name="new")) as new:
        shutil.copytree(old.dir / "eval", new.dir / "eval")
        new.finish("done")
    assert new.manifest.rewards[0]["version"] == 1
    compared = json.loads(vlmrl("compare", "old", "new", "--json").out)
    assert compared["evaluations"][0]["scored_alike"] and not any("rewards" in note for note in compared["notes"])
    assert compared["recipe"] == [{"key": "rollout.kv_cache_gib", "a": 4.0, "b": None}], "the default that has changed"
    assert not [row for row in compared["made_with"] if row["key"].startswith(("reward", "prompt"))]


@pytest.mark.parametrize(
    "words",
    [
        "runs list",
        "runs show old",
        "runs show old --json",
        "runs verify old",
        "runs diagnose old",
        "runs du",
        "report old",
        "reward-check old",
        "reward-check old --diff length --set soft_tokens=2 --set max_tokens=4",
        "compare old old",
        "runs pack old",
        "runs prune old --keep-rollouts 1 --dry-run",
    ],
)
def test_every_command_opens_it_and_none_says_that_something_has_changed(old: Run, words: str):
    done = vlmrl(*words.split())
    assert not [told for told in WORDS_OF_CHANGE if told in done.out + done.err]


def test_it_is_whole(old: Run):
    result = verify_run(old.dir)
    assert not result.errors and not result.warnings


@pytest.mark.slow
@pytest.mark.parametrize("name", GONE_ON)
def test_a_resume_goes_on_as_the_code_of_its_time_did(project: Path, name: str):
    done = vlmrl("train", "--resume", name, "--set", "train.steps=2")
    changed = done.err.partition("changed:\n")[2].partition("resuming")[0].splitlines()
    assert len(changed) == 1 and changed[0].startswith("  train.steps: 1 -> 2")
    run, then = open_run(project / "runs", name), GONE_ON[name]
    samples = [sample for group in run.read_rollouts(1) for sample in group.samples]
    for sample, wanted in zip(samples, then["rollouts of the step"], strict=True):
        assert list(sample.trajectory.response_ids) == wanted["ids"]
        assert (sample.score.value, sample.advantage) == (wanted["score"], pytest.approx(wanted["advantage"]))
    line = run.metrics("train")[-1]
    assert {key: line[key] for key in then["metrics of the step"]} == pytest.approx(
        then["metrics of the step"], rel=1e-4, abs=1e-6
    )
    found = weights(run)
    for key, wanted in load_file(DATA / "gone-on.safetensors").items():
        of, _, tensor = key.partition("/")
        if of == name and not tensor.endswith("k_proj.bias"):  # its gradient is rounding alone, which AdamW enlarges
            assert_close(found[tensor], wanted, tensor)


@pytest.mark.parametrize("name", GONE_ON)
def test_its_checkpoint_answers_and_is_scored_as_then(project: Path, name: str):
    words = ("eval", name, "--checkpoint", 1, "--split", "test", "--max-rows", 4, "--name", "t", "--json")
    (found,) = json.loads(vlmrl(*words).out)["evaluations"]
    then = GONE_ON[name]["evaluation of its checkpoint"]
    assert {key: found["metrics"][key]["value"] for key in then} == then
    rows = pq.read_table(open_run(project / "runs", name).dir / "eval" / "t" / "rows.parquet")
    assert rows["text"].to_pylist() == GONE_ON[name]["answers"]


@pytest.mark.parametrize("name", GONE_ON)
def test_its_checkpoint_is_merged_and_says_what_was_saved_with_it(project: Path, name: str):
    (checkpoint,) = open_run(project / "runs", name).checkpoint_dirs()
    merged = merge(checkpoint, project / "merged", skip_proof=True)
    asked = ProofRequest(str(checkpoint), str(merged.folder), "float32")
    proof = check_gap(asked, prove(asked))
    assert proof.logp_gap is not None and proof.rollouts > 0
    found = load_file(merged.folder / "model-00001-of-00001.safetensors")
    base = load_file(project / "model" / "model.safetensors")
    assert found.keys() == base.keys()
    if name == "trained":  # a merge gives the weights their published names
        stored = load_file(checkpoint / "model" / "model-00001-of-00001.safetensors")
        assert sorted(map(content, found.values())) == sorted(map(content, stored.values()))
    changed = [key for key in base if not torch.equal(found[key], base[key])]
    assert changed and not [key for key in changed if "visual" in key or "embed" in key], "they were frozen"


def content(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(tensor.shape), tensor.numpy().tobytes()


@pytest.mark.slow
def test_a_reward_file_that_has_changed_is_told(project: Path):
    source = Path("reward.py").read_text("utf-8")
    Path("reward.py").write_text(source.replace("97", "89"), "utf-8")
    with pytest.raises(StoreError, match=r"reward reward\.py:score") as told:
        plan_resume(project / "runs", ResumeRequest("trained", "rl", None, ("train.steps=2",)))
    assert "train.steps" in str(told.value) and "eval." not in str(told.value)
    assert "reward.py has changed since the run" in vlmrl("reward-check", "trained").out
    Path("reward.py").write_text(source, "utf-8")
    assert "has changed" not in vlmrl("reward-check", "trained").out
