"""Small real runs: their digits, reward and recipe; how they are begun, stopped, gone on with and compared.

A test states in TOML what its runs are about; what all small runs have in common stands here.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from checkpoint_files import contents_of

from vlmrl.checkpoint import io
from vlmrl.model.safetensors_blocks import read_tensors
from vlmrl.recipe.load import LoadedRecipe, load_recipe
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.setup.run_records import Labels, start_run
from vlmrl.store.checkpoints import ADAPTER, DATA, MODEL
from vlmrl.store.runs import Run, open_run
from vlmrl.tasks.digits import prepare_digits
from vlmrl.train.resume import COMMANDS, ResumeRequest, plan_resume, reopen_run
from vlmrl.train.start import run_session
from vlmrl.types import Group

MEASURED = ("time/", "memory/", "rollout/tokens_per_second", "reward/outage_seconds")
"""What two runs of the same recipe need not share: measurements of the machine."""
SIX_STEPS = """
rollout = {prompts_per_step = 5, samples_per_prompt = 3, max_new_tokens = 12, temperature = 0.9}
train = {steps = 6, rows_per_step = 7, tokens_per_row = 400}
optim = {lr = 1e-3, schedule = "cosine", warmup_steps = 2}
eval = {every_steps = 2, max_rows = 6}
checkpoint = {every_steps = 3, keep_last = 9}
"""
TWO_STEPS = """
rollout = {prompts_per_step = 5, samples_per_prompt = 3, max_new_tokens = 12, temperature = 0.9}
train = {steps = 2, rows_per_step = 7, tokens_per_row = 300}
optim.lr = 1e-3
eval = {every_steps = 2, max_rows = 5}
checkpoint = {every_steps = 0, keep_last = 9}
"""


def paying(tokens: int, letters: int) -> str:
    """A reward file. `score` differs between random responses: it grows up to so many tokens and so many letters e.
    `same` does not: there is nothing to learn from it.
    """
    return f"""
def score(x):
    return {{"length": min(1.0, x.num_tokens / {tokens}), "letters": min(1.0, x.response.count("e") / {letters})}}

def same(x):
    return 0.6
"""


REWARD = paying(tokens=12, letters=20)


def recipe_text(model: Path, settings: str, kind: str = "rl") -> str:
    """A recipe for a tiny model, without data. It ends where tables begin.

    Args:
        settings: TOML without `[table]` lines: `optim.lr = 1e-3`, `eval = {max_rows = 4}`.
    """
    return f"""
kind = "{kind}"
model.path = "{model}"
model.dtype = "float32"
model.device = "cpu"
model.min_pixels = 784
model.max_pixels = 3136
{settings.strip()}
"""


@cache
def _digits(pairs: int) -> TemporaryDirectory:
    place = TemporaryDirectory()
    prepare_digits(Path(place.name, "digits"), num_pairs=pairs)
    return place


def copy_digits(to: Path, pairs: int = 24) -> Path:
    """The folder, with a dataset of digits that a process makes once."""
    return shutil.copytree(f"{_digits(pairs).name}/digits", to)


def make_place(
    folder: Path, model: Path, settings: str, *, kinds: Sequence[str] = ("rl",), reward: str = REWARD, pairs: int = 24
) -> Path:
    """The folder, with `digits`, `reward.py` and a recipe of each kind (`rl.toml`, `sft.toml`) over them.

    Args:
        settings: as in `recipe_text`.    reward: what is in reward.py; its `score` is the reward.
    """
    data = copy_digits(folder / "digits", pairs)
    (folder / "reward.py").write_text(reward)
    rest = f'reward.name = "{folder}/reward.py:score"\n[[data]]\npath = "{data}"\ntask = "digits"\n'
    for kind in kinds:
        (folder / f"{kind}.toml").write_text(recipe_text(model, settings, kind) + rest)
    return folder


class Ears:
    """A watcher that keeps the messages, and presses Ctrl-C when so many steps are done."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.heard: list[str] = []

    def message(self, text: str) -> None:
        self.heard.append(text)

    def generated(self, done: int, total: int) -> None:
        pass

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        if step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    def validation(self, step: int, summary: Mapping[str, Any], best: bool, metric: str) -> None:
        pass

    def sample(self, step: int, group: Group) -> None:
        pass


def start(loaded: LoadedRecipe, root: Path, ears: Ears | None = None, name: str | None = None) -> tuple[Run, str]:
    """(the run of a recipe, how it ended)."""
    kind = loaded.recipe.kind
    loaded, _ = fill_for_run(loaded, root)
    run = start_run(loaded, root, ["vlmrl", COMMANDS[kind], loaded.path.name], Labels(name))
    status = run_session(run, loaded.recipe, root, ears or Ears(), None)
    return open_run(root, run.id), status


def begin(
    place: Path, root: Path, *overrides: str, kind: str = "rl", stop_at: int | None = None, ears: Ears | None = None
) -> tuple[Run, str]:
    """(a run of `place`'s recipe of that kind in the runs folder `root`, how it ended)."""
    return start(load_recipe(place / f"{kind}.toml", overrides=overrides, kind=kind), root, ears or Ears(stop_at))


def go_on(
    run: Run,
    *overrides: str,
    recipe: Path | None = None,
    accept: bool = False,
    stop_at: int | None = None,
    ears: Ears | None = None,
) -> tuple[Run, str]:
    """(the run after one more attempt, how that ended)."""
    root = run.dir.parent
    plan = plan_resume(root, ResumeRequest(run.id, run.manifest.kind, recipe, overrides, accept))
    reopened, settings, checkpoint = reopen_run(root, plan, ["vlmrl"])
    status = run_session(reopened, settings, root, ears or Ears(stop_at), checkpoint)
    return open_run(root, run.id), status


def train(place: Path, root: Path, *overrides: str, kind: str = "rl") -> Run:
    """A run that nobody stops."""
    run, status = begin(place, root, *overrides, kind=kind)
    assert status == run.status == "done"
    return run


def train_in_parts(place: Path, root: Path, *overrides: str, kind: str = "rl", stops: Sequence[int] = (1,)) -> Run:
    """A run that Ctrl-C ends after each of these steps, and that is gone on with each time, to its end."""
    run, status = begin(place, root, *overrides, kind=kind, stop_at=stops[0])
    for stop in (*stops[1:], None):
        assert status == run.status == "interrupted"
        run, status = go_on(run, stop_at=stop)
    assert status == run.status == "done" and run.attempt == len(stops) + 1
    return run


def once_a_kind(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """kind -> the run of `place`'s recipe as it stands, made when it is first asked for."""
    return cache(lambda kind: train(place, tmp_path_factory.mktemp(kind), kind=kind))


def finite(metrics: Mapping[str, Any]) -> bool:
    return all(math.isfinite(v) for v in metrics.values() if isinstance(v, float))


def events(run: Run, name: str) -> list[dict[str, Any]]:
    """The events of a run whose name has this in it."""
    return [line for line in run.metrics("event") if name in line["event"]]


def weights(run: Run, checkpoint: int = -1) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint (from 0; the last): of its model, or of its adapter where it has one."""
    folder = run.checkpoint_dirs()[checkpoint]
    part = folder / (MODEL if (folder / MODEL).is_dir() else ADAPTER)
    return {name: tensor.whole() for name, tensor in read_tensors(sorted(part.glob("*.safetensors"))).items()}


def same_tensors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether they are the same, to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def history(run: Run) -> list[dict[str, Any]]:
    """Everything a run measured of its model and data, step by step."""
    lines = sorted([*run.metrics("train"), *run.metrics("validation")], key=lambda m: (m["step"], m["kind"]))
    dropped = ("attempt", "time", "files")  # hashes of files that hold seconds
    return [{k: v for k, v in m.items() if k not in dropped and not k.startswith(MEASURED)} for m in lines]


def rollouts(run: Run, steps: Sequence[int] | None = None) -> dict[int, list[str]]:
    """Step -> its groups with all there is in them, NaN made comparable, in steps of a run (all of them)."""

    def plain(group: Group) -> str:
        samples = [(s.trajectory, s.text, repr(s.score), s.advantage, s.masked, s.dependency) for s in group.samples]
        return repr((group.row, group.prompt_text, samples))

    return {s: [plain(g) for g in run.read_rollouts(s)] for s in (run.rollout_files() if steps is None else steps)}


def answers(run: Run) -> dict[int, list[str]]:
    """Step -> what was sampled there and what it scored; without what rounding reaches, such as log-probs."""

    def plain(group: Group) -> str:
        samples = [(s.trajectory.response_ids, s.text, s.score.value) for s in group.samples]
        return repr((group.row, group.prompt_text, samples))

    return {step: [plain(g) for g in run.read_rollouts(step)] for step in run.rollout_files()}


def assert_same_run(a: Run, b: Run) -> None:
    """All that two runs leave is the same to the bit: the last checkpoint, metrics, rollouts."""
    first, second = a.checkpoint_dirs()[-1], b.checkpoint_dirs()[-1]
    assert first.name == second.name
    x, y = contents_of(first), contents_of(second)
    assert {n for n in x.keys() | y.keys() if x.get(n) != y.get(n)} <= {DATA}  # where the seconds are
    x, y = io.load_data(first), io.load_data(second)
    x["progress"].pop("seconds"), y["progress"].pop("seconds")
    assert x == y
    assert json.dumps(history(a)) == json.dumps(history(b))
    assert rollouts(a) == rollouts(b)


def assert_close_runs(a: Run, b: Run, *, rel: float, absolute: float) -> None:
    """Both are done, with the same answers; their numbers and last weights are the same but for rounding."""
    assert a.status == b.status == "done" and answers(a) == answers(b)
    assert_close_history(a, b, rel=rel, absolute=absolute)
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4, msg=name)


def assert_close_history(a: Run, b: Run, *, rel: float, absolute: float, without: tuple[str, ...] = ()) -> None:
    """The same numbers in every step but for rounding, of all that does not begin with one of these names."""
    for x, y in zip(history(a), history(b), strict=True):
        x, y = ({k: v for k, v in line.items() if not k.startswith(without)} for line in (x, y))
        assert x.keys() == y.keys()
        for name, wanted in y.items():
            close = pytest.approx(wanted, rel=rel, abs=absolute, nan_ok=True) if isinstance(wanted, float) else wanted
            assert x[name] == close, (name, x["step"])
