"""Each built-in reward scores as its declared version does: tests/golden/rewards has the scores, exactly.

Runs know a built-in by its version alone, so a change of behaviour under the same version would mix two rewards in one
run unseen.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import record_rewards
from reward_cases import CASES
from reward_scores import as_text, golden, path_of, recorded, scored

from vlmrl.tasks.builtin_rewards import REWARDS, takes_judge

RECORD = "python tests/golden/record_rewards.py"


def complaint(name: str) -> str:
    """What is wrong with the golden of a reward; "" = nothing."""
    old, version = recorded(name), REWARDS[name].version
    if old is None:
        return f"`{name}` has no recorded scores: add its inputs to tests/golden/reward_cases.py and run `{RECORD}`"
    if old["version"] != version:
        return f"`{name}` is version {version}, its recorded scores are of {old['version']}: run `{RECORD}`"
    for run in old["runs"]:
        now = scored(name, run["args"], old["inputs"])
        for key in ("weights", "ranges", "parts"):
            if repr(now[key]) != repr(run[key]):
                return _raise_it(name, version, f"{key} for {run['args']}: {run[key]} -> {now[key]}")
        for given, before, after in zip(old["inputs"], run["scores"], now["scores"], strict=True):
            if repr(before) != repr(after):
                return _raise_it(name, version, f"{run['args']} on {json.dumps(given)}: {before} -> {after}")
    return ""


def _raise_it(name: str, version: int, what: str) -> str:
    return (
        f"`{name}` does not score as version {version} did. {what}\nIf that is meant, raise its version where it is "
        f"declared (vlmrl/rewards/__init__.py) and record the new scores with `{RECORD}`"
    )


UNRECORDED = {
    "svg_models": "its scores depend on weights that are not here; tests/unit/tasks/test_svg_models.py",
    "page": "its scores depend on the browser; tests/unit/tasks/test_page_task.py",
}


@pytest.mark.parametrize("name", [name for name in REWARDS if not takes_judge(name) and name not in UNRECORDED])
def test_a_built_in_scores_as_its_version_did(name):
    assert not complaint(name), complaint(name)


@pytest.mark.parametrize("name", CASES)
def test_every_input_and_argument_is_recorded(name):
    old = recorded(name)
    assert old is not None
    assert as_text(golden(name, *CASES[name])) == path_of(name).read_text("utf-8"), f"run `{RECORD}`"


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_scores_tell_responses_apart(name):
    """A golden in which a part is the same everywhere would not see a change of it."""
    old = recorded(name)
    assert old is not None
    seen: dict[str, set[Any]] = {}
    for run in old["runs"]:
        for row in filter(None, run["scores"]):
            for part, number in zip([*run["parts"], "value"], row, strict=True):
                seen.setdefault(part, set()).add(number)
    assert seen and all(len(numbers) > 1 for numbers in seen.values()), seen


def test_a_built_in_without_recorded_scores_is_an_error(monkeypatch):
    monkeypatch.setitem(REWARDS, "brand_new", REWARDS["length"])
    assert "has no recorded scores" in complaint("brand_new")


def test_a_change_of_behaviour_wants_another_version_and_then_new_scores(monkeypatch):
    def generous(*, soft_tokens: int, max_tokens: int) -> Any:
        spec = real.build(soft_tokens=soft_tokens, max_tokens=max_tokens)
        return replace(spec, fn=lambda x: {"length": 1.0} if x.num_tokens == 15 else spec.fn(x))

    real = REWARDS["length"]
    monkeypatch.setitem(REWARDS, "length", replace(real, build=generous))
    assert "raise its version" in complaint("length") and RECORD in complaint("length")
    assert record_rewards.changed("length"), "the recorder must not take other scores under the same version"
    monkeypatch.setitem(REWARDS, "length", replace(real, build=generous, version=2))
    assert "version 2" in complaint("length") and RECORD in complaint("length")
    assert not record_rewards.changed("length")


def test_another_default_is_a_change_of_behaviour(monkeypatch):
    real = REWARDS["number_match"]

    def build(*, key: Any = None, tag: Any = "answer", require_tag: bool = False, tolerance: float = 0.5) -> Any:
        return real.build(key=key, tag=tag, require_tag=require_tag, tolerance=tolerance)

    monkeypatch.setitem(REWARDS, "number_match", replace(real, build=build))
    assert "does not score as version 2 did" in complaint("number_match")
