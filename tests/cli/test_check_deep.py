"""`vlmrl check --deep`: the user's rows as trained, against the model's own forward of each response alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from parity import world as family_world
from tinyfamilies import build
from tinyworld import image
from typer.testing import CliRunner

from vlmrl.cli.app import app
from vlmrl.cli.check import show_parity
from vlmrl.evaluate import deep_check
from vlmrl.evaluate.deep_check import TOLERANCES, compare
from vlmrl.model import caches as split_attention
from vlmrl.model.load import share_prefix
from vlmrl.model.policy import Policy

RECIPE = """[model]
path = "{folder}"
dtype = "float32"
device = "cpu"
[[data]]
path = "rows.jsonl"
columns = {{prompt = "question"}}
[reward]
name = "exact_match"
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 9
[train]
steps = 1
"""


@pytest.fixture
def table(tmp_path, monkeypatch, tiny_folder):
    """Three rows with an image each, one without, and a recipe for the tiny model."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for name in "abcd":
        image(ord(name)).save(tmp_path / f"{name}.png")
        slot = "" if name == "d" else "<image>"
        pictures = [] if name == "d" else [f"{name}.png"]
        rows.append({"question": f"{slot}What is {name}?", "images": pictures, "answer": name})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.toml").write_text(RECIPE.format(folder=tiny_folder))
    return tmp_path


def deep(*words: str):
    return CliRunner().invoke(app, ["check", "r.toml", "--deep", *words])


@pytest.mark.slow
def test_rows_that_agree_are_shown_with_their_figures(table):
    result = deep("--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["ok"], result.output
    found = told["deep"]
    assert found["agrees"] and found["logp_max"] <= 1e-5 and found["gradient"] <= 1e-5 and found["sampler_gap"] <= 1e-4
    assert len(found["rows"]) == 4 and sum(row["image_tokens"] > 0 for row in found["rows"]) == 3
    assert all(len(set(row["response_tokens"])) > 1 for row in found["rows"]), "the responses are ragged"
    shown = " ".join(deep("--deep-prompts", "1").output.split())
    assert (
        "shared prefix, packed rows, attention by split" in shown and "allowed because float32 keeps 24 bits" in shown
    )


@pytest.mark.slow
def test_rows_that_disagree_are_named_and_leave_with_2(table, monkeypatch):
    right = split_attention.row_groups  # all responses as one: each sees those before it
    siblings = lambda plan: [replace(g, each=(g.responses,)) if g.each else g for g in right(plan)]  # noqa: E731
    monkeypatch.setattr(split_attention, "row_groups", siblings)
    result = deep("--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 2 and not told["ok"] and not told["deep"]["agrees"]
    wrong = [row["row"] for row in told["deep"]["rows"] if not row["agrees"]]
    assert wrong
    messages = [p["message"] for p in told["problems"] if p["level"] == "error"]
    assert all(any(m.startswith(f"{name}: log-probs") for m in messages) for name in wrong)
    assert any(m.startswith("the gradient") for m in messages)
    assert "DISAGREES" in deep().output
    # The path without a shared prompt has no siblings in its row.
    assert deep("--set", "model.shared_prefix=false").exit_code == 0


def test_gradients_that_do_not_fit_are_left_out_and_said_so(table, monkeypatch):
    monkeypatch.setattr(deep_check, "usable_memory", lambda: 1000)
    result = deep("--json")
    found = json.loads(result.stdout)["deep"]
    assert result.exit_code == 0 and found["gradient"] is None and "GiB are free" in found["gradient_note"]


def test_check_without_deep_loads_no_model(table, monkeypatch):
    monkeypatch.setattr(deep_check, "deep_check", lambda *a, **k: pytest.fail("the model was loaded"))
    result = CliRunner().invoke(app, ["check", "r.toml", "--json"])
    assert result.exit_code == 0 and "deep" not in json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "gemma4", "smolvlm"])
def test_any_family_can_be_compared_agents_included(name):
    family = build(name)
    share_prefix(family.model)
    items = family_world(family)
    found = compare(
        Policy(family.model, temperature=0.7, banned_ids=[10, 500]), items, list("abcd"), tokens_per_row=300
    )
    assert found.agrees and found.logp_max <= 1e-5 and found.gradient is not None and found.gradient <= 1e-5
    assert found.sampler_gap is None


def test_numbers_that_are_not_numbers_disagree():
    family = build("internvl")
    share_prefix(family.model)
    with torch.no_grad():
        family.model.model.language_model.norm.weight.fill_(float("nan"))
    found = compare(Policy(family.model), family_world(family), list("abcd"), tokens_per_row=300)
    assert not found.agrees and not any(row.agrees for row in found.rows)


def test_tolerances_grow_with_the_rounding():
    fine, coarse = TOLERANCES[torch.float32], TOLERANCES[torch.bfloat16]
    assert fine.logp_max < coarse.logp_max and fine.gradient < coarse.gradient and fine.why != coarse.why


def test_the_longest_episode_is_printed_with_its_lines_and_its_end_is_marked(capsys):
    allowed = {"logp_max": 1e-4, "gradient": 1e-4, "why": "so"}
    facts = {"path": "p", "dtype": "float32", "tolerance": allowed, "logp_max": 0.0, "gradient": 0.0, "rows": []}
    stream = [("prompt", "first\nsecond" + "x" * 5000), ("policy", "a"), ("environment", "b"), ("policy", "c")]
    show_parity({**facts, "sampler_gap": None, "stream": stream})
    printed = capsys.readouterr().out
    assert "\\n" not in printed and "second" in printed.split("first")[1].splitlines()[1]
    assert "... (the rest is not shown)" in printed
