"""The metrics that `eval.metric` may name, and the price of hanging that a recipe may give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vlmrl.errors import RewardError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.setup.rows import metric_names
from vlmrl.tasks.source import Source, open_source


def table(folder: Path, **reward: object) -> Source:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "how many?", "answer": str(n)}) + "\n" for n in range(3)))
    return open_source(Data(path=str(path)), Reward.model_validate(reward))


def test_metrics_of_rows_of_the_whole_split_and_of_the_reward(tmp_path):
    source = table(tmp_path, name="exact_match")
    assert metric_names(source) == ["reward", "accuracy", "part/answer", "part/format", "response_tokens", "truncated"]
    task = replace(
        source.task,
        outcome=lambda x, score: {"accuracy": None, "steps": 1.0},
        set_metrics=lambda responses: {"ap": None, "recall": float(len(responses))},
    )
    assert metric_names(replace(source, task=task)) == [
        "reward",
        "accuracy",
        "steps",
        "ap",
        "recall",
        "part/answer",
        "part/format",
        "response_tokens",
        "truncated",
    ]


def test_a_recipe_gives_the_price_of_hanging_to_the_reward_that_it_names(tmp_path):
    (tmp_path / "r.py").write_text(
        "RANGES = {'reward': (0, 1)}\nON_TIMEOUT = {'reward': 0.5}\ndef score(x): return 1.0\n"
    )
    name = f"{tmp_path}/r.py:score"
    assert table(tmp_path, name=name).reward.on_timeout == {"reward": 0.5}
    assert table(tmp_path, name=name, on_timeout={"reward": 0.0}).reward.on_timeout == {"reward": 0.0}
    with pytest.raises(RewardError, match=r"outside its declared range") as error:
        table(tmp_path, name=name, on_timeout={"reward": -1.0})
    assert error.value.where == "[reward] on_timeout"
