"""The reward `vfig_rules`: the published rules beside a truth, its metadata, and responses without code."""

from __future__ import annotations

import json
import random

import pytest

from vlmrl.errors import RewardError
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure
from vlmrl.tasks.vfig.published.score import published_rules
from vlmrl.tasks.vfig.rewards import vfig_rules
from vlmrl.types import RewardInput, RewardResult

FIGURE = draw_figure(random.Random(4), DrawnSettings())
TRUTH = {"svg": FIGURE.svg, "metadata": json.dumps(FIGURE.metadata)}


def result(response: str, **args: str) -> RewardResult:
    outcome = vfig_rules(key="svg", **args).fn(RewardInput(response, TRUTH))
    assert isinstance(outcome, RewardResult)
    return outcome


def test_it_is_the_published_score():
    wanted = published_rules(FIGURE.svg, FIGURE.svg)
    outcome = result(f"```svg\n{FIGURE.svg}\n```")
    assert outcome.parts["overall"] == wanted.overall and outcome.detail["shapes"] == dict(wanted.shapes)
    assert 0 < wanted.overall <= 1


def test_the_description_of_a_drawn_figure_may_be_given():
    wanted = published_rules(FIGURE.svg, FIGURE.svg, FIGURE.metadata)
    assert result(FIGURE.svg, metadata="metadata").parts["overall"] == wanted.overall


def test_no_code_is_zero():
    outcome = result("I cannot")
    assert set(outcome.parts.values()) == {0.0} and outcome.note.startswith("no code")


def test_a_truth_that_is_no_text_is_the_rows_fault():
    with pytest.raises(RewardError, match="not a text"):
        vfig_rules(key="svg").fn(RewardInput(FIGURE.svg, {"svg": 3}))
