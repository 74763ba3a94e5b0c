"""By what a reward is known: version and arguments of a built-in, source, function and arguments of a user's own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vlmrl.rewards import reward_record
from vlmrl.rewards.identity import OLD_PRINTS, identity_of, shown_weights
from vlmrl.tasks.builtin_rewards import REWARDS, load_recorded, load_reward

AT_75082C1 = "33af6ce6b71c533cc1ffc60aaac03d3868f9f443e005848dda2761ec0512ffcb"
"""What runs of that commit recorded for `taxonomy`."""
LEVELS = {"levels": ["order", "genus"]}


def user(source="def score(x): return 1.0\n", file="mine.py", function="score", **args):
    return {"name": f"{file}:{function}", "sha256": source, "args": args}


@pytest.fixture
def first_version(monkeypatch):
    monkeypatch.setitem(REWARDS, "taxonomy", replace(REWARDS["taxonomy"], version=1))


def test_a_built_in_of_its_first_version_is_that_of_a_run_from_before_versions(first_version):
    now = reward_record(load_reward("taxonomy", args=LEVELS), {})
    assert now["version"] == 1 and "sha256" not in now, "the source of a built-in tells nothing"
    old = {"name": "taxonomy", "style": "auto", "args": LEVELS, "weights": {}, "sha256": AT_75082C1}
    assert identity_of(json.loads(json.dumps(now))) == identity_of(old)
    assert identity_of(old).words == 'taxonomy version 1, levels = ["order", "genus"]'


def test_a_hash_that_no_release_wrote_is_another_reward(first_version):
    old = {"name": "taxonomy", "args": LEVELS, "sha256": "4" * 64}
    now = reward_record(load_reward("taxonomy", args=LEVELS), {})
    assert identity_of(old) != identity_of(now)
    assert identity_of(old).beside(identity_of(now)) == "source 444444444444"
    assert identity_of(now).beside(identity_of(old)) == "version 1"


def test_versions_and_arguments_make_another_reward_and_are_said():
    one = {"name": "taxonrl", "version": 1, "args": {"function": "lfw:compute_score"}}
    two = one | {"version": 2}
    wide = one | {"args": {"function": "lfw:compute_score", "format_weight": 0.5}}
    assert identity_of(one) != identity_of(two) and identity_of(one) != identity_of(wide)
    assert identity_of(two).beside(identity_of(one)) == "version 2"
    assert identity_of(one).beside(identity_of(wide)) == "format_weight not given"
    assert identity_of(wide).beside(identity_of(one)) == "format_weight = 0.5"
    assert identity_of(two).beside(identity_of(one | {"name": "length"})).startswith("taxonrl version 2, function =")
    assert identity_of(one).beside(identity_of(one)) == ""
    assert identity_of(one).without_args() == identity_of(wide).without_args()


def test_a_users_reward_is_its_source_its_function_and_its_arguments_wherever_it_lies():
    assert identity_of(user()) == identity_of(user(file="moved/elsewhere.py"))
    for other in (user("other"), user(function="score2"), user(tolerance=1)):
        assert identity_of(user()) != identity_of(other)
    assert identity_of(user(sha256="x")).version is None
    assert identity_of(user() | {"sha256": AT_75082C1}).sha256 == AT_75082C1, "a user's file is no built-in"


@pytest.mark.parametrize("record", [{}, {"name": 3}, {"name": "r", "version": True}, {"args": [1], "version": "1"}])
def test_records_that_lack_something_are_read_all_the_same(record):
    assert identity_of(record) == identity_of(dict(record)) and identity_of(record).version is None
    assert "version unknown" in identity_of(record).words


def test_weights_are_said():
    assert shown_weights({"answer": 0.5, "format": 1.0}) == "weights answer 0.5, format 1.0"
    assert shown_weights({}) == shown_weights(None) == "its own weights"


def test_the_table_of_old_hashes_speaks_of_versions_that_there_were():
    newest = max(builtin.version for builtin in REWARDS.values())
    assert all(len(sha256) == 16 and 1 <= version <= newest for sha256, version in OLD_PRINTS.items())


@pytest.mark.parametrize(
    ("name", "args", "shown"),
    [
        ("svg", {"key": "svg"}, {"pictures": True}),
        ("box_iou", {"space": "pixels"}, {"overlay": True}),
        ("box_list", {"space": "pixels"}, {"overlay": True}),
    ],
)
def test_pictures_beside_a_score_make_no_other_reward(name, args, shown):
    plain, drawn = (reward_record(load_reward(name, args=each), {}) for each in (args, args | shown))
    assert identity_of(plain) == identity_of(drawn) and plain["args"] == drawn["args"] == args
    assert drawn["free_args"] == shown and "free_args" not in plain
    assert reward_record(load_recorded(json.loads(json.dumps(drawn))), {}) == drawn  # a score again has its pictures
