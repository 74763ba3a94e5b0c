"""A run of two processes is the run of one: the same rollouts, metrics and weights; saved and resumed by any number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import contents_of
from test_shared_update import run_ranks

from vlmrl.checkpoint import files, io
from vlmrl.checkpoint.shards import read_tensors
from vlmrl.store.runs import Run, open_run
from vlmrl.tasks.digits.task import prepare_digits

SCRIPT = Path(__file__).parent / "run_rank.py"
MEASURED = ("time/", "memory/", "rollout/tokens_per_second")
REWARD = """
def score(x):
    return {"length": min(1.0, x.num_tokens / 12), "letters": min(1.0, x.response.count("e") / 20)}
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
name = "{folder}/reward.py:score"
[rollout]
prompts_per_step = 5
samples_per_prompt = 3
max_new_tokens = 12
temperature = 0.9
[train]
steps = 2
rows_per_step = 7
tokens_per_row = 300
[optim]
lr = 1e-3
[eval]
every_steps = 2
max_rows = 5
[checkpoint]
every_steps = 0
keep_last = 9
"""
LORA = ["lora.rank=4"]
CASES = {
    "grpo": [],
    "one prompt for two": ["rollout.prompts_per_step=1", "train.steps=4"],
    "two updates": ["train.updates_per_step=2", "algo.name=dapo", "algo.filter=none"],
    "filter": ["algo.name=dapo", "algo.min_spread=0.04", "algo.filter_tries=3"],
    "greedy": ["algo.name=remax"],
    "critic": ["algo.name=ppo", "train.updates_per_step=2"],
    "kl": ["algo.kl_coef=0.1"],
    "kl in the reward": ["algo.kl_coef=0.1", "algo.kl_in=reward"],
    "full kl": ["algo.kl_coef=0.1", "algo.kl=full"],
    "adapter": [*LORA, "algo.kl_coef=0.1"],
    "adapter, full kl": [*LORA, "algo.kl_coef=0.1", "algo.kl=full"],
    "recomputed": ["model.gradient_checkpointing=true"],
    "copies": ["parallel.shard_size=1"],
    "offload": ["parallel.offload=true"],
    "sft": [],
}
"""Name -> overrides."""
ONWARD = "adapter of a run"
"""Trained on, with the adapter that it began with as the reference."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    folder = tmp_path_factory.mktemp("shared-runs")
    (folder / "reward.py").write_text(REWARD)
    data = prepare_digits(folder / "digits", num_pairs=24).path
    text = RECIPE.format(model=tiny_folder, data=data, folder=folder)
    (folder / "rl.toml").write_text('kind = "rl"\n[algo]\nname = "grpo"\n' + text)
    (folder / "sft.toml").write_text('kind = "sft"\n' + text)
    return folder


def job(place: Path, root: str, kind: str = "rl", overrides=(), **more) -> dict:
    recipe = str(place / f"{kind}.toml")
    return {"root": str(place / root), "recipe": recipe, "kind": kind, "overrides": list(overrides), **more}


LONG = ["train.steps=5", "eval.every_steps=0", "optim.schedule=cosine"]
BESIDE = [*LONG, "checkpoint.every_steps=1", "checkpoint.asynchronous=true", "checkpoint.keep_last=2"]


@pytest.fixture(scope="module")
def runs(place: Path) -> Path:
    """All runs: `<processes>/<case>`; stopped ones; and what went on from them with another number of processes."""

    def start(size: int, name: str, jobs: list[dict]) -> None:
        (place / f"{name}.json").write_text(json.dumps(jobs))
        run_ranks(size, SCRIPT, str(place / f"{name}.json"))

    def cases(size: int) -> list[dict]:
        return [
            job(place, f"{size}/{name}", "sft" if name == "sft" else "rl", overrides)
            for name, overrides in CASES.items()
        ] + [
            job(place, f"{size}/{ONWARD}", overrides=overrides)
            for overrides in (LORA, [*LORA, "algo.kl_coef=0.1", "model.path=last"])
        ]  # fmt: skip

    narrow = [*LONG, "model.dtype=bfloat16", *LORA]
    start(2, "first", [
        *cases(2), job(place, "2/whole", overrides=LONG), job(place, "stopped", overrides=LONG, stop_at=2),
        job(place, "wandering", overrides=LONG, stop_at=2), job(place, "narrow", overrides=narrow, stop_at=2),
        job(place, "beside", overrides=BESIDE, stop_at=2),
    ])  # fmt: skip
    start(1, "second", [
        *cases(1), job(place, "1/whole", overrides=LONG), job(place, "wandering", resume=True, stop_at=4),
        job(place, "narrow", resume=True, stop_at=4),
    ])  # fmt: skip
    start(2, "third", [
        job(place, "stopped", resume=True), job(place, "wandering", resume=True), job(place, "narrow", resume=True),
        job(place, "beside", resume=True),
    ])  # fmt: skip
    return place


def history(run: Run) -> list[dict]:
    lines = sorted([*run.metrics("train"), *run.metrics("validation")], key=lambda m: (m["step"], m["kind"]))
    dropped = ("attempt", "time")
    return [{k: v for k, v in m.items() if k not in dropped and not k.startswith(MEASURED)} for m in lines]


def assert_same_history(a: Run, b: Run, **tolerance: float) -> None:
    for ours, theirs in zip(history(a), history(b), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            wanted = theirs[name]
            close = wanted if isinstance(wanted, str) else pytest.approx(wanted, nan_ok=True, **tolerance)
            assert ours[name] == close, (name, ours["step"])


def assert_same_rollouts(a: Run, b: Run) -> None:
    assert a.rollout_files().keys() == b.rollout_files().keys()
    for step in a.rollout_files():
        ours, theirs = (
            [(g.row, g.prompt_text, [(s.trajectory.response_ids, s.text, s.score.value) for s in g.samples])
             for g in run.read_rollouts(step)] for run in (a, b)
        )  # fmt: skip
        assert repr(ours) == repr(theirs), step


def weights(run: Run) -> dict[str, torch.Tensor]:
    folder = run.checkpoint_dirs()[-1]
    part = "model" if (folder / "model").is_dir() else "adapter"
    return {n: t.whole() for n, t in read_tensors(sorted((folder / part).glob("*.safetensors"))).items()}


def assert_same_weights(a: Run, b: Run, tolerance: float) -> None:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", [*CASES, ONWARD])
def test_two_processes_make_the_run_of_one(runs: Path, case: str) -> None:
    one, two = (open_run(runs / size / case, "last") for size in "12")
    assert one.status == two.status == "done"
    assert_same_rollouts(one, two)
    assert_same_history(one, two, rel=2e-4, abs=2e-5)
    assert_same_weights(one, two, 1e-4)
    assert any(m.get("optim/updates", 0) > 0 for m in one.metrics("train"))


def test_both_wrote_their_shards_and_a_log_and_one_the_rest(runs: Path) -> None:
    run = open_run(runs / "2" / "grpo", "last")
    checkpoint = run.checkpoint_dirs()[-1]
    for part in ("model", "optimizer"):
        assert {f.name[:11] for f in (checkpoint / part).glob("*.safetensors")} == {"shard-00001", "shard-00002"}
    files.check_files(checkpoint)
    assert [a.processes for a in run.manifest.attempts] == [2] and run.manifest.threads == 1
    assert run.log_path(1).is_file()
    assert "rows are run by" in run.log_path(1).read_text()


def test_stopped_and_resumed_by_as_many_is_the_run_that_was_not_stopped_to_the_bit(runs: Path) -> None:
    """The last process alone was interrupted: all stopped after the same step, and saved."""
    whole, stopped = open_run(runs / "2" / "whole", "last"), open_run(runs / "stopped", "last")
    assert [a.from_step for a in stopped.manifest.attempts] == [0, 2]
    assert_same_rollouts(whole, stopped)
    assert repr(history(whole)) == repr(history(stopped))
    assert_same_weights(whole, stopped, 0.0)


def test_checkpoints_written_beside_the_training_are_those_written_at_once_to_the_bit(runs: Path) -> None:
    """Each process writes its shards in a thread, while all go on with the next step; stopped and resumed, too."""
    whole, beside = open_run(runs / "2" / "whole", "last"), open_run(runs / "beside", "last")
    assert [a.from_step for a in beside.manifest.attempts] == [0, 2]
    assert_same_rollouts(whole, beside)
    assert repr(history(whole)) == repr(history(beside))
    first, second = (contents_of(run.checkpoint_dirs()[-1]) for run in (whole, beside))
    assert [n for n in first.keys() | second.keys() if first.get(n) != second.get(n)] == ["data.json"]  # its seconds
    assert [f.name for f in beside.checkpoint_dirs()] == ["step-000004", "step-000005"]
    assert beside.log_path().read_text().count("checkpoint saved") == 3  # of the second attempt


def test_a_run_wanders_from_two_processes_to_one_and_back(runs: Path) -> None:
    whole, wandering = open_run(runs / "1" / "whole", "last"), open_run(runs / "wandering", "last")
    assert [(a.from_step, a.processes) for a in wandering.manifest.attempts] == [(0, 2), (2, 1), (4, 2)]
    assert_same_rollouts(whole, wandering)
    assert_same_history(whole, wandering, rel=2e-4, abs=2e-5)
    assert_same_weights(whole, wandering, 1e-4)


def test_masters_of_narrow_weights_wander_too(runs: Path) -> None:
    """bfloat16: weights are saved in it, and trained in float32 by one process and by two."""
    run = open_run(runs / "narrow", "last")
    assert run.status == "done" and [a.from_step for a in run.manifest.attempts] == [0, 2, 4]
    folders = run.checkpoint_dirs()
    assert len(folders) == 3
    for folder in folders:
        found = read_tensors(sorted((folder / "adapter").glob("*.safetensors")))
        moments = io.load_optimizer_tensors(folder)
        masters = {n: t for n, t in moments.items() if n.startswith("master.")}
        assert {t.dtype for t in found.values()} == {torch.bfloat16} and len(masters) == len(found)
        assert {t.dtype for t in masters.values()} == {torch.float32}
        saved = sorted(float(t.whole().double().sum()) for t in found.values())
        assert saved == sorted(float(t.bfloat16().double().sum()) for t in masters.values())
        assert any(bool((t != t.bfloat16()).any()) for t in masters.values())
