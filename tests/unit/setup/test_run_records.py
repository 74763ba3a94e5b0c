"""What is behind a recipe, compared with a run's manifest."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrl.evaluate.compare import compare as compare_sides
from vlmrl.evaluate.compare import open_side, same_rewards
from vlmrl.evaluate.paired import scored_alike
from vlmrl.key_facts import OnResume
from vlmrl.recipe.changes import Change
from vlmrl.redaction.redact import HIDDEN
from vlmrl.rewards import load_reward, reward_record
from vlmrl.setup.run_records import REWARD, Records, content_changes
from vlmrl.store.kept_recipe import keep_texts
from vlmrl.store.runs import create_run

A, B, C = "a" * 64, "b" * 64, "c" * 64


def records(*names: str, rows: str = A, reward: str = A, prompt: str = A, validation: str = "") -> Records:
    """Records of sources with these names, and of a validation file of the last one."""
    apart = [{"name": f"{names[-1]} (validation)", "rows": 2, "fingerprint": validation}] if validation else []
    return {
        "datasets": [{"name": n, "path": f"{n}.jsonl", "rows": 9, "fingerprint": rows} for n in names] + apart,
        "rewards": [{"source": n, "name": "r.py:fn", "sha256": reward} for n in names],
        "prompts": [{"source": n, "sha256": prompt} for n in names],
    }


def compare(folder, old: Records, new: Records, texts=None) -> dict[str, Any]:
    run: Any = SimpleNamespace(dir=folder, manifest=SimpleNamespace(**{k: tuple(v) for k, v in old.items()}))  # type: ignore
    return {c.what: c for c in content_changes(run, new, texts or {})}


def test_the_same_is_no_change(tmp_path):
    assert compare(tmp_path, records("x", "y", validation=A), records("x", "y", validation=A)) == {}


def test_each_kind_of_content_is_noticed_and_asked_about(tmp_path):
    found = compare(tmp_path, records("x"), records("x", rows=B, reward=B, prompt=B))
    assert set(found) == {"rows of x", "reward r.py:fn", "prompt of x"}
    assert all(c.kind == "asked" and c.rule.restarts == ("best",) for c in found.values())
    assert found["reward r.py:fn"].diff == "", "nothing is known of the old text"


def test_a_table_under_another_name_is_still_the_source_it_was(tmp_path):
    """Without it a table that moved and changed would go unnoticed: where it is may change freely."""
    assert compare(tmp_path, records("x"), records("moved")) == {}
    assert set(compare(tmp_path, records("x"), records("moved", rows=B))) == {"rows of moved"}


def test_validation_rows_in_a_file_of_their_own_are_compared_too(tmp_path):
    assert set(compare(tmp_path, records("x", validation=A), records("x", validation=B))) == {"rows of x (validation)"}
    moved = compare(tmp_path, records("x"), records("moved", rows=B, validation=B))
    assert set(moved) == {"rows of moved"}, "that there is a validation file now is a change of the recipe"


def test_with_another_number_of_sources_those_of_the_same_name_are_compared(tmp_path):
    assert compare(tmp_path, records("x", "y"), records("y")) == {}
    assert set(compare(tmp_path, records("x", "y"), records("y", rows=B))) == {"rows of y"}


def test_a_reward_of_several_sources_is_told_once_with_the_diff_of_what_was_kept(tmp_path):
    keep_texts(tmp_path, {("reward", A): "one\ntwo\n", ("prompt", A): "hello"})
    texts = {("reward", B): "one\n2\n", ("prompt", C): "hello there"}
    found = compare(tmp_path, records("x", "y"), records("x", "y", reward=B, prompt=C), texts)
    assert set(found) == {"reward r.py:fn", "prompt of x", "prompt of y"}
    assert found["reward r.py:fn"].diff.splitlines()[-2:] == ["-two", "+2"]
    assert "-hello\n+hello there" in found["prompt of x"].diff


def test_secrets_are_hidden_on_both_sides_of_a_diff(tmp_path):
    keep_texts(tmp_path, {("reward", A): 'api_key = "first1234567"\nx = 1\n'})
    texts = {("reward", B): 'api_key = "second1234567"\nx = 2\n'}
    diff = compare(tmp_path, records("x"), records("x", reward=B), texts)["reward r.py:fn"].diff
    assert "1234567" not in diff and "-x = 1" in diff and "+x = 2" in diff


AT_75082C1 = "33af6ce6b71c533cc1ffc60aaac03d3868f9f443e005848dda2761ec0512ffcb"
"""What runs of that commit recorded for `taxonomy`."""
NOW = {"version": 1, "args": {"levels": ["a"]}}


def built_in(**facts: Any) -> Records:
    return records("x") | {"rewards": [{"source": "x", "name": "taxonomy", "weights": {}, **facts}]}  # type: ignore


@pytest.mark.parametrize("facts", [NOW, {"sha256": AT_75082C1, "args": {"levels": ["a"]}}])
def test_a_built_in_is_the_same_whatever_its_source(tmp_path, facts):
    assert compare(tmp_path, built_in(**facts), built_in(**NOW)) == {}


@pytest.mark.parametrize(
    ("facts", "old", "new"),
    [
        ({"version": 2, "args": {"levels": ["a"]}}, "version 2", "version 1"),
        ({"sha256": B, "args": {"levels": ["a"]}}, "source bbbbbbbbbbbb", "version 1"),
        ({"version": 1, "args": {"levels": ["a"], "partial": False}}, "partial = false", "partial not given"),
        ({"version": 1, "args": {"levels": ["b"]}}, 'levels = ["b"]', 'levels = ["a"]'),
        (
            {"version": 1, "name": "length", "args": {}},
            "length version 1",
            'taxonomy version 1, levels = ["a"]',
        ),
    ],
)
def test_another_built_in_is_said_by_version_and_arguments(tmp_path, facts, old, new):
    change = compare(tmp_path, built_in(**facts), built_in(**NOW))["reward taxonomy"]
    assert (change.old, change.new, change.kind) == (old, new, "asked")


def test_arguments_that_the_recipe_changes_are_not_said_twice(tmp_path):
    old, new = built_in(**NOW), built_in(version=1, args={"levels": ["a"], "partial": False})
    run: Any = SimpleNamespace(dir=tmp_path, manifest=SimpleNamespace(**{k: tuple(v) for k, v in old.items()}))  # type: ignore
    said = Change("reward.args.partial", None, False, OnResume("asked", "the reward"))
    assert content_changes(run, new, {}, [said]) == []
    moved = Change("data.0.path", "a", "b", OnResume("free", "where a file is"))
    assert [c.what for c in content_changes(run, new, {}, [moved])] == ["reward taxonomy"]
    newer = built_in(version=2, args={"levels": ["a"], "partial": False})
    assert [c.what for c in content_changes(run, newer, {}, [said])] == ["reward taxonomy"], "it is other code, too"


def test_an_argument_that_was_hidden_is_no_change_and_is_not_shown(tmp_path):
    def with_args(**args: Any) -> Records:
        return records("x") | {"rewards": [{"source": "x", "name": "r.py:fn", "sha256": A, "args": args}]}  # type: ignore

    hidden = with_args(api_key=HIDDEN, url=f"https://x/?token={HIDDEN}&v=1")
    assert compare(tmp_path, hidden, with_args(api_key="first1234567", url="https://x/?token=abc1234567&v=1")) == {}
    found = compare(tmp_path, with_args(api_key=HIDDEN, n=1), with_args(api_key="first1234567", n=2))
    assert (found["reward r.py:fn"].old, found["reward r.py:fn"].new) == ("n = 1", "n = 2")


def test_modules_beside_a_reward_belong_to_it(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "r.py").write_text("from own.words import SCORE\n\ndef fn(x):\n    return SCORE\n")

    def with_score(score: float) -> Records:
        (tmp_path / "own" / "words.py").write_text(f"SCORE = {score}\n")
        spec = load_reward(f"{tmp_path}/r.py:fn")
        assert list(spec.files) == ["own/words.py"]
        return records("x") | {"rewards": [{"source": "x", **reward_record(spec, {})}]}  # type: ignore

    before, again, after = with_score(0.5), with_score(0.5), with_score(0.25)
    assert compare(tmp_path, before, again) == {}
    [change] = compare(tmp_path, before, after).values()
    assert change.what == f"reward {tmp_path}/r.py:fn (own/words.py)" and change.rule is REWARD
    assert [change.old, change.new] == [r["rewards"][0]["files"]["own/words.py"][:12] for r in (before, after)]
    earlier = {key: value for key, value in before["rewards"][0].items() if key != "files"}
    assert compare(tmp_path, before | {"rewards": [earlier]}, after) == {}, "earlier runs did not record them"  # type: ignore


def test_modules_of_a_reward_are_among_what_two_runs_were_made_with(tmp_path):
    for sha256 in (A, B):
        reward = {"source": "x", "name": "r.py:fn", "sha256": A, "files": {"own/words.py": sha256, "same.py": A}}
        with create_run(tmp_path, kind="rl", recipe_name="r", argv=[], seeds={}, name=sha256[:1], rewards=[reward]):
            pass
    made_with = compare_sides(*(open_side(tmp_path, name) for name in "ab"))["made_with"]
    assert {"key": "reward's module own/words.py", "a": "a" * 12, "b": "b" * 12} in made_with
    assert not any("same.py" in row["key"] for row in made_with)
    a, b = (open_side(tmp_path, name).run for name in "ab")
    assert a is not None and b is not None and same_rewards(a, a) and not same_rewards(a, b)
    one, other = ({"reward": dict(run.manifest.rewards[0])} for run in (a, b))
    assert scored_alike(one, one) and scored_alike(one, other) is False
    del one["reward"]["files"]
    assert scored_alike(one, other) and scored_alike(other, one), "earlier evaluations do not name them"


def test_a_users_reward_that_moved_is_the_same(tmp_path):
    moved = records("x") | {"rewards": [{"source": "x", "name": "elsewhere/r.py:fn", "sha256": A}]}  # type: ignore
    assert compare(tmp_path, records("x"), moved) == {}  # type: ignore


def test_a_prompt_that_earlier_runs_knew_by_its_source_is_the_same(tmp_path):
    now = records("x", prompt=B)
    now["prompts"][0]["earlier"] = [A]
    assert compare(tmp_path, records("x"), now) == {}
    now["prompts"][0]["earlier"] = [C]
    assert set(compare(tmp_path, records("x"), now)) == {"prompt of x"}


def test_a_run_from_before_pictures_were_no_part_of_a_reward_has_the_same_reward(tmp_path):
    def scored_by(single: dict[str, Any], *, is_member: bool) -> Records:
        list_of_one = {"source": "x", "name": "svg", "rewards": [{**single, "label": "svg"}]}
        return {**records("x"), "rewards": [list_of_one if is_member else single]}  # type: ignore

    one = {"source": "x", "name": "svg", "version": 2}
    old = {**one, "args": {"key": "svg", "pictures": True}}
    new, other = ({**one, "args": {"key": key}, "free_args": {"pictures": True}} for key in ("svg", "other"))
    for wrap in (partial(scored_by, is_member=False), partial(scored_by, is_member=True)):
        assert compare(tmp_path, wrap(old), wrap(new)) == {}
        assert set(compare(tmp_path, wrap(old), wrap(other)))
