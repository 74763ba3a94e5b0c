"""`runs diagnose` on runs that really trained, each with a fault of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import events, make_place, train

from vlmrl.diagnose.run import diagnose
from vlmrl.errors import RewardError
from vlmrl.store.runs import open_run

REWARD = """
def score(x):
    return {"answer": min(1.0, x.response.count("e") / 5), "other": min(1.0, len(set(x.response)) / 20)}

def same(x):
    return {"answer": 0.6}

def longer(x):
    return {"answer": x.num_tokens / 24}
"""
RECIPE = """
rollout = {prompts_per_step = 4, samples_per_prompt = 6, max_new_tokens = 24, stop = ["e", "a", "o", "1", "n"]}
train = {steps = 4, tokens_per_row = 800, rehearsal = false}
optim.lr = 1e-3
eval = {every_steps = 0, max_rows = 2}
checkpoint.every_steps = 0
"""
"""Stop strings end most responses of the random model early, at lengths of their own."""
FAULTS = {
    "frozen": ['model.freeze=["language", "embeddings"]'],
    "engine_gap": ["rollout.top_p=0.9", "rollout.allow_filtered_sampling=true"],
    "lr_small": ["optim.lr=1e-12"],
    "lr_large": ["optim.lr=0.1"],
    "constant_reward": ["reward.name={place}/reward.py:same"],
    "pays_length": ["reward.name={place}/reward.py:longer", "rollout.prompts_per_step=8"],
    "cut_off": ["rollout.stop=[]"],
    "clipped_gradient": ["optim.max_grad_norm=1e-9"],
    "kl_large": ["algo.kl_coef=100.0"],
    "entropy_coef": ["algo.entropy_coef=5.0"],
    "weight_decay": ["optim.weight_decay=300.0"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, RECIPE, reward=REWARD, pairs=48)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_a_real_run_is_named_first_or_second(fault, place, tmp_path):
    overrides = [setting.replace("{place}", str(place)) for setting in FAULTS[fault]]
    found = diagnose(train(place, tmp_path, *overrides))
    assert fault in [c.name for c in found.causes][:2], [(c.name, c.level, c.what) for c in found.causes]


def test_a_run_that_a_reward_ended_says_where_and_what_to_try(place, tmp_path):
    (tmp_path / "bad.py").write_text("def score(x):\n    return float('not a number')\n")
    with pytest.raises(RewardError):
        train(place, tmp_path, f"reward.name={tmp_path}/bad.py:score")
    (run,) = (open_run(path.parent, path.name) for path in tmp_path.glob("unfinished/2*"))  # it never did a step
    (cause,) = diagnose(run).causes
    assert cause.name == "failing_reward" and "row digits-" in cause.what and "vlmrl try" in cause.command


def test_a_real_run_notes_its_parts_and_the_gradient_of_each(place, tmp_path):
    run = train(place, tmp_path, 'model.freeze=["connector"]')
    (noted,) = events(run, "parts")
    assert set(noted["trained"]) == {"vision", "language", "embeddings"} and set(noted["frozen"]) == {"connector"}
    line = run.metrics("train")[-1]
    parts = {k.rpartition("/")[2]: v for k, v in line.items() if k.startswith("optim/grad_norm/")}
    assert set(parts) == set(noted["trained"]) and all(v > 0 for v in parts.values())
    assert sum(v**2 for v in parts.values()) == pytest.approx(line["optim/grad_norm"] ** 2, rel=1e-4)
    causes = diagnose(run).causes
    assert [c.level for c in causes if c.name == "frozen"] == ["note"]
