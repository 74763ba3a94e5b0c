"""A run that was stopped and resumed is, to the bit, the run that was not: weights, moments, metrics, rollouts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vlmrl.checkpoint import files, io
from vlmrl.errors import CheckpointError, RewardError
from vlmrl.recipe.load import load_recipe
from vlmrl.store.runs import Run, open_run
from vlmrl.tasks.digits.task import prepare_digits
from vlmrl.train.resume import Request, plan_resume
from vlmrl.train.start import Labels, reopen_run, run_session, start_run

MEASURED = ("time/", "memory/", "rollout/tokens_per_second")
"""What two runs of the same recipe need not share: measurements of the machine."""

REWARD = """
def score(x):
    return {"length": min(1.0, x.num_tokens / 12), "letters": min(1.0, x.response.count("e") / 20)}
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return prepare_digits(tmp_path_factory.mktemp("data") / "digits", num_pairs=24).path


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder, digits) -> Path:
    """A folder with a recipe for each kind, the reward beside them, and runs/."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "reward.py").write_text(REWARD)
    shared = f"""
[model]
path = "{tiny_folder}"
dtype = "float32"
device = "cpu"
min_pixels = 784
max_pixels = 3136
[[data]]
path = "{digits}"
task = "digits"
[reward]
name = "{folder}/reward.py:score"
[rollout]
prompts_per_step = 5
samples_per_prompt = 3
max_new_tokens = 12
temperature = 0.9
[train]
steps = 6
rows_per_step = 7
tokens_per_row = 400
[optim]
lr = 1e-3
schedule = "cosine"
warmup_steps = 2
[eval]
every_steps = 2
max_rows = 6
[checkpoint]
every_steps = 3
keep_last = 9
"""
    (folder / "rl.toml").write_text('kind = "rl"\n[algo]\nname = "grpo"\n' + shared)
    (folder / "sft.toml").write_text('kind = "sft"\n' + shared)
    return folder


class Ears:
    """A watcher that presses Ctrl-C when a step is done, as often as asked."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.heard = stop_at, []

    def message(self, text: str) -> None:
        self.heard.append(text)

    def generated(self, done: int, total: int) -> None:
        pass

    def step(self, step: int, total: int, metrics) -> None:
        if step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    def validation(self, step: int, summary, best: bool) -> None:
        pass

    def sample(self, step: int, group) -> None:
        pass


def begin(place: Path, kind: str, root: Path, *overrides: str, stop_at: int | None = None, ears: Ears | None = None):
    loaded = load_recipe(place / f"{kind}.toml", overrides=overrides, kind=kind)
    run = start_run(loaded, root, ["vlmrl"], Labels(None, (), ""))
    status = run_session(run, loaded.recipe, root, ears or Ears(stop_at), None)
    return open_run(root, run.id), status


def go_on(run: Run, kind: str, root: Path, stop_at: int | None = None):
    reopened, recipe, checkpoint = reopen_run(root, plan_resume(root, Request(run.id, kind)), ["vlmrl"])
    status = run_session(reopened, recipe, root, Ears(stop_at), checkpoint)
    return open_run(root, run.id), status


def history(run: Run) -> list[dict]:
    """Everything a run measured of its model and data, step by step."""
    lines = sorted([*run.metrics("train"), *run.metrics("validation")], key=lambda m: (m["step"], m["kind"]))
    dropped = ("attempt", "time")
    return [{k: v for k, v in m.items() if k not in dropped and not k.startswith(MEASURED)} for m in lines]


def plain(group):
    """A group without its timings, NaN made comparable."""
    samples = [(s.trajectory, s.text, repr(s.score), s.advantage, s.masked) for s in group.samples]
    return repr((group.row, group.prompt_text, samples))


def assert_same_run(a: Run, b: Run) -> None:
    first, second = a.checkpoint_dirs()[-1], b.checkpoint_dirs()[-1]
    assert first.name == second.name
    for part in ("model", "optimizer"):
        x, y = (io.load_file(next((f / part).glob("*.safetensors"))) for f in (first, second))
        assert x.keys() == y.keys()
        assert [k for k in x if not torch.equal(x[k], y[k])] == [], part
    x, y = io.load_data(first), io.load_data(second)
    x["progress"].pop("seconds"), y["progress"].pop("seconds")
    assert x == y
    assert io.load_proof(first).keys() == io.load_proof(second).keys()
    assert json.dumps(history(a)) == json.dumps(history(b))
    assert a.rollout_files().keys() == b.rollout_files().keys()
    for step in a.rollout_files():
        assert [plain(g) for g in a.read_rollouts(step)] == [plain(g) for g in b.read_rollouts(step)]


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """kind -> the run that nobody stopped."""
    made: dict[str, Run] = {}

    def of(kind: str) -> Run:
        if kind not in made:
            made[kind], status = begin(place, kind, tmp_path_factory.mktemp(kind))
            assert status == "done"
        return made[kind]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("stops", [(1,), (2, 5)])
def test_stopped_and_resumed_equals_uninterrupted(place, whole, tmp_path, kind, stops):
    expected = whole(kind)
    run, status = begin(place, kind, tmp_path, stop_at=stops[0])
    for stop in (*stops[1:], None):
        assert status == run.status == "interrupted"
        run, status = go_on(run, kind, tmp_path, stop)
    assert status == run.status == "done"
    assert run.attempt == len(stops) + 1
    assert_same_run(run, expected)


@pytest.mark.slow
def test_the_run_of_the_test_above_learns_and_differs_by_its_seed(place, whole, tmp_path):
    """Otherwise equal runs would show nothing."""
    expected = whole("rl")
    history_ = history(expected)
    assert any(m.get("optim/updates", 0) > 3 for m in history_)
    assert expected.metrics("train")[-1]["policy/sampler_gap_max"] < 1e-4
    weights = [io.load_file(next((c / "model").glob("*.safetensors"))) for c in expected.checkpoint_dirs()]
    assert any(not torch.equal(weights[0][k], weights[-1][k]) for k in weights[0])
    other, _ = begin(place, "rl", tmp_path, "train.seed=1", "train.steps=1")
    assert plain(other.read_rollouts(0)[0]) != plain(expected.read_rollouts(0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_resumed_from_an_older_checkpoint_equals_uninterrupted(place, whole, tmp_path, kind):
    """A kill after step 5 whose last checkpoint is of step 3: steps 3 and 4 are done again, and count once."""
    import shutil

    run, _ = begin(place, kind, tmp_path, stop_at=5)
    shutil.rmtree(run.checkpoint_dirs()[-1])
    assert run.checkpoint_dirs()[-1].name < "step-000005"
    run, status = go_on(run, kind, tmp_path)
    assert status == "done"
    assert_same_run(run, whole(kind))


@pytest.mark.slow
def test_old_rollouts_go_as_the_run_goes_and_it_resumes_all_the_same(place, whole, tmp_path):
    from vlmrl.store.verify import verify_run

    run, status = begin(place, "rl", tmp_path, "log.keep_rollouts=1", "log.keep_rollouts_every=3", stop_at=3)
    assert status == "interrupted"
    run, status = go_on(run, "rl", tmp_path)
    assert status == "done"
    steps = [line["step"] for line in run.metrics("train")]
    assert list(run.rollout_files()) == [s for s in steps if s % 3 == 0 or s == steps[-1]] != steps
    assert json.dumps(history(run)) == json.dumps(history(whole("rl")))
    assert not [p for p in verify_run(run.dir).errors if "rollouts" in p.message]


@pytest.mark.slow
def test_several_updates_a_step_with_a_reference_resume_too(place, tmp_path):
    overrides = ("train.updates_per_step=2", "algo.kl_coef=0.1", "algo.entropy_coef=0.01", "train.steps=3")
    expected, _ = begin(place, "rl", tmp_path / "a", *overrides)
    assert expected.metrics("train")[-1]["optim/updates"] == 6
    assert expected.metrics("train")[-1]["loss/kl"] > 0
    run, _ = begin(place, "rl", tmp_path / "b", *overrides, stop_at=1)
    run, _ = go_on(run, "rl", tmp_path / "b")
    assert_same_run(run, expected)


@pytest.mark.slow
def test_a_run_may_start_from_the_last_one_by_that_name_and_resume(place, tmp_path):
    """`last` means the run before, also once the new run is itself the last."""
    root = tmp_path / "runs"
    parent, _ = begin(place, "sft", root, "train.steps=2")
    child, status = begin(place, "rl", root, 'model.path="last"', "train.steps=2", "algo.kl_coef=0.1", stop_at=1)
    assert status == "interrupted"
    assert child.manifest.parent["run"] == parent.id
    child, status = go_on(child, "rl", root)
    assert status == "done"
    straight, _ = begin(place, "rl", root, f'model.path="{parent.id}"', "train.steps=2", "algo.kl_coef=0.1")
    assert straight.manifest.parent == child.manifest.parent
    x, y = (io.load_file(next((r.checkpoint_dirs()[-1] / "model").glob("*"))) for r in (child, straight))
    assert all(torch.equal(x[k], y[k]) for k in x)


BROKEN = """
import pathlib
def score(x):
    if pathlib.Path({flag!r}).exists():
        raise ZeroDivisionError("the divisor is gone")
    return x.num_tokens / 12
"""


@pytest.mark.slow
def test_a_reward_that_raises_at_once_stops_with_the_row(place, tmp_path):
    (tmp_path / "flag").write_text("")
    (tmp_path / "broken.py").write_text(BROKEN.format(flag=str(tmp_path / "flag")))
    with pytest.raises(RewardError, match="divisor is gone") as caught:
        begin(place, "rl", tmp_path, f'reward.name="{tmp_path}/broken.py:score"')
    assert "row" in str(caught.value)
    assert open_run(tmp_path, "last").status == "failed"


@pytest.mark.slow
def test_a_reward_that_breaks_later_is_masked_counted_and_stops_the_run_after_saving(place, tmp_path):
    flag = tmp_path / "flag"
    (tmp_path / "broken.py").write_text(BROKEN.format(flag=str(flag)))

    class BreakLater(Ears):
        def step(self, step: int, total: int, metrics) -> None:
            if step == 3:
                flag.write_text("")

    with pytest.raises(RewardError, match="of 75 samples"):
        begin(
            place, "rl", tmp_path, f'reward.name="{tmp_path}/broken.py:score"', "eval.every_steps=0", ears=BreakLater()
        )
    run = open_run(tmp_path, "last")
    assert run.status == "failed"
    assert run.checkpoint_dirs()[-1].name == "step-000005"
    failed = [s for g in run.read_rollouts(4) for s in g.samples]
    assert all(s.masked and "divisor" in (s.score.error or "") and s.advantage == 0 for s in failed)
    assert run.metrics("train")[-1]["reward/errors"] == 15
    flag.unlink()  # mended: the run goes on, its old failures do not stop it again
    run, status = go_on(run, "rl", tmp_path)
    assert status == "done" and run.metrics("train")[-1]["reward/errors"] == 0


def command(root: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    code = "import sys; from vlmrl.cli.app import main; sys.argv[0] = 'vlmrl'; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--runs", str(root)], env=os.environ | environment, cwd=root,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "beside"),
    [
        ("mid-rollout:4", False), ("mid-save:2", False), ("before-complete:2", False), ("mid-prune", False),
        ("mid-manifest:3", False), ("before-complete:1", False), ("mid-save:2", True), ("before-complete:2", True),
    ],
)  # fmt: skip
def test_killed_at_a_named_point_and_resumed_equals_uninterrupted(place, whole, tmp_path, point, beside):
    """`beside`: checkpoints are written by a thread while training goes on."""
    keep = "checkpoint.keep_last=1"  # so that there is something to prune
    how = ("--set", keep, "--set", f"checkpoint.asynchronous={str(beside).lower()}")
    died = command(tmp_path, "train", str(place / "rl.toml"), *how, VLMRL_CRASH_AT=point)
    _, error = died.communicate(timeout=300)
    assert died.returncode == 137, error
    run = open_run(tmp_path, "last")
    for folder in run.checkpoint_dirs():
        files.check_files(folder)
    resumed = command(tmp_path, "train", "--resume", "last", "--json")
    out, error = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, error
    assert json.loads(out)["status"] == "done"
    run = open_run(tmp_path, "last")
    assert run.attempt == 2
    assert_same_run(run, whole("rl"))
    assert not [p for p in run.dir.rglob("*") if p.name.startswith((".tmp-", ".trash-"))]


def test_a_write_that_fails_beside_the_training_ends_the_run_with_its_error(place, tmp_path, monkeypatch):
    real, began = io.write_staged, []

    def full(staged, world):
        began.append(staged.saved.step)
        if len(began) == 2:
            raise CheckpointError("the disk is full")
        return real(staged, world)

    monkeypatch.setattr(io, "write_staged", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        begin(place, "rl", tmp_path, "checkpoint.asynchronous=true", "checkpoint.every_steps=2", "eval.every_steps=0")
    run = open_run(tmp_path, "last")
    assert run.status == "failed" and "the disk is full" in (run.manifest.error or "")
    assert began == [2, 4] and [f.name for f in run.checkpoint_dirs()] == ["step-000002"]
    files.check_files(run.checkpoint_dirs()[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_exits_with_130_and_says_how_to_go_on(place, whole, tmp_path, number):
    train = command(tmp_path, "train", str(place / "rl.toml"))
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and train.poll() is None:
        lines = list(tmp_path.glob("*/metrics.jsonl"))
        if lines and '"train"' in lines[0].read_text():
            break
        time.sleep(0.05)
    train.send_signal(number)
    _, error = train.communicate(timeout=300)
    assert train.returncode == 130, error
    run = open_run(tmp_path, "last")
    assert run.status == "interrupted"
    assert f"--resume {run.id}" in error and "Traceback" not in error
    assert 1 <= int(run.checkpoint_dirs()[-1].name[-6:]) < 6
    resumed = command(tmp_path, "train", "--resume", run.id)
    _, error = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, error
    assert_same_run(open_run(tmp_path, "last"), whole("rl"))


@pytest.mark.slow
def test_a_reward_bug_ends_the_command_with_2_the_row_and_no_traceback_of_ours(place, tmp_path):
    (tmp_path / "flag").write_text("")
    (tmp_path / "broken.py").write_text(BROKEN.format(flag=str(tmp_path / "flag")))
    train = command(tmp_path, "train", str(place / "rl.toml"), "--set", f'reward.name="{tmp_path}/broken.py:score"')
    out, error = train.communicate(timeout=300)
    assert train.returncode == 2, error
    assert "the divisor is gone" in error and "row" in error and "vlmrl/train" not in error
    assert out == ""
