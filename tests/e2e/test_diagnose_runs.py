"""`runs diagnose` on runs that really trained, each with a fault of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmrl.check.diagnose import diagnose
from vlmrl.recipe.load import load_recipe
from vlmrl.store.runs import Run, open_run
from vlmrl.tasks.digits.task import prepare_digits
from vlmrl.train.start import Labels, run_session, start_run

REWARD = """
def letters(x):
    return {"answer": min(1.0, x.response.count("e") / 5), "other": min(1.0, len(set(x.response)) / 20)}

def same(x):
    return {"answer": 0.6}

def longer(x):
    return {"answer": x.num_tokens / 24}
"""
RECIPE = """
[model]
path = "{model}"
dtype = "float32"
device = "cpu"
min_pixels = 784
max_pixels = 3136
[[data]]
path = "{data}"
task = "digits"
[reward]
name = "{reward}:letters"
[rollout]
prompts_per_step = 4
samples_per_prompt = 6
max_new_tokens = 24
stop = ["e", "a", "o", "1", "n"]
[train]
steps = 4
tokens_per_row = 800
rehearsal = false
[optim]
lr = 1e-3
[eval]
every_steps = 0
max_rows = 2
[checkpoint]
every_steps = 0
"""
"""Stop strings end most responses of the random model early, at lengths of their own."""
FAULTS = {
    "frozen": ['model.freeze=["language", "embeddings"]'],
    "engine_gap": ["rollout.top_p=0.9", "rollout.allow_filtered_sampling=true"],
    "lr_small": ["optim.lr=1e-12"],
    "lr_large": ["optim.lr=0.1"],
    "constant_reward": ["reward.name={reward}:same"],
    "pays_length": ["reward.name={reward}:longer", "rollout.prompts_per_step=8"],
    "cut_off": ["rollout.stop=[]"],
}


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    folder = tmp_path_factory.mktemp("place")
    digits = prepare_digits(folder / "digits", num_pairs=48).path
    (folder / "reward.py").write_text(REWARD)
    (folder / "rl.toml").write_text(RECIPE.format(model=tiny_folder, data=digits, reward=folder / "reward.py"))
    return folder


def train(place: Path, root: Path, overrides: list[str]) -> Run:
    given = [o.format(reward=place / "reward.py") if "{reward}" in o else o for o in overrides]
    loaded = load_recipe(place / "rl.toml", overrides=given, kind="rl")
    run = start_run(loaded, root, ["vlmrl", "train", "rl.toml"], Labels(None, (), ""))
    assert run_session(run, loaded.recipe, root, Silent(), None) == "done"
    return open_run(root, run.id)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_a_real_run_is_named_first_or_second(fault, place, tmp_path):
    found = diagnose(train(place, tmp_path, FAULTS[fault]))
    assert fault in [c.name for c in found.causes][:2], [(c.name, c.level, c.what) for c in found.causes]


def test_a_real_run_notes_its_parts_and_the_gradient_of_each(place, tmp_path):
    run = train(place, tmp_path, ['model.freeze=["connector"]'])
    (noted,) = [e for e in run.metrics("event") if e["event"] == "parts"]
    assert set(noted["trained"]) == {"vision", "language", "embeddings"} and set(noted["frozen"]) == {"connector"}
    line = run.metrics("train")[-1]
    parts = {k.rpartition("/")[2]: v for k, v in line.items() if k.startswith("optim/grad_norm/")}
    assert set(parts) == set(noted["trained"]) and all(v > 0 for v in parts.values())
    assert sum(v**2 for v in parts.values()) == pytest.approx(line["optim/grad_norm"] ** 2, rel=1e-4)
    causes = diagnose(run).causes
    assert [c.level for c in causes if c.name == "frozen"] == ["note"]
