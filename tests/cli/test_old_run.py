"""A run of 75082c1, when rewards and prompts were known by the hash of their sources, in every command of today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import Done, this_process

from vlmrl.errors import StoreError
from vlmrl.recipe.load import load_recipe
from vlmrl.store.runs import Run, open_run
from vlmrl.store.verify import verify_run
from vlmrl.tasks.digits.task import prepare_digits
from vlmrl.train.eval_recipe import choose_recipe
from vlmrl.train.eval_rows import rows_to_evaluate
from vlmrl.train.evaluation import EvalSettings, plan
from vlmrl.train.origin import ModelOrigin
from vlmrl.train.resume import Request, plan_resume
from vlmrl.train.start import Labels, start_run

DATA = Path(__file__).parents[1] / "data" / "run-75082c1"
WORDS_OF_CHANGE = ("has changed since", "different rewards", "source 33af6ce6b71c", "would not go on")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return prepare_digits(tmp_path_factory.mktemp("data") / "digits", num_pairs=8).path


@pytest.fixture
def old(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The run, in a folder with its recipe and its data, which is the current one."""
    place = tmp_path / "project"
    shutil.copytree(DATA, place)
    (place / "digits").symlink_to(digits)
    (folder,) = (place / "runs").iterdir()
    text = (folder / "manifest.json").read_text("utf-8")
    (folder / "manifest.json").write_text(text.replace("/project", str(place)), "utf-8")
    monkeypatch.chdir(place)
    return open_run(place / "runs", "old")


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
    changes = plan_resume(run.dir.parent, Request("old", "rl", None, ("train.steps=3",))).changes
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
        plan_resume(old.dir.parent, Request("old", "rl", None, overrides))
    asked = (old.dir / "kept" / "prompt-ebf9e6cc62ffefcd.jinja").read_text("utf-8")
    Path("ask.jinja").write_text(asked + "\n\n", "utf-8")
    same = plan_resume(old.dir.parent, Request("old", "rl", None, overrides)).changes
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
    with start_run(
        load_recipe("old.toml", overrides=["rollout.engine=torch"]), Path("runs"), ["vlmrl"], Labels(name="new")
    ) as new:
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
        "runs list", "runs show old", "runs show old --json", "runs verify old", "runs diagnose old", "runs du",
        "report old", "reward-check old", "reward-check old --diff length --set soft_tokens=2 --set max_tokens=4",
        "compare old old", "runs pack old", "runs prune old --keep-rollouts 1 --dry-run",
    ],
)  # fmt: skip
def test_every_command_opens_it_and_none_says_that_something_has_changed(old: Run, words: str):
    done = vlmrl(*words.split())
    assert not [told for told in WORDS_OF_CHANGE if told in done.out + done.err]


def test_it_is_whole(old: Run):
    verdict = verify_run(old.dir)
    assert not verdict.errors and not verdict.warnings
