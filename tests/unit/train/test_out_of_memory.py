"""Memory that runs out in a row: known for what it is, named, tried once more with half the budget, the same step."""

from __future__ import annotations

import copy
import mmap
import pickle
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from parity import world as family_items
from tinyfamilies import build
from tinyworld import assert_close, encoded, items_of

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.dist import world
from vlmrl.dist.fsdp import end_failed_pass, own_part, shard
from vlmrl.dist.world import ALONE, World, group_of_one
from vlmrl.errors import CheckpointError, EngineError, Load, OutOfMemoryError, RewardError, exit_of
from vlmrl.model.device_memory import asking_for, memory_use, ran_out
from vlmrl.model.families import sharded_units
from vlmrl.model.load import share_prefix
from vlmrl.model.packing import make_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Data, Model, Optim, Recipe, Rollout, Train
from vlmrl.train.journal import Progress
from vlmrl.train.learner import Learner, Optimizer, TokenBudgets, explaining, report_halved
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import PolicyGradient, fill_logps, fill_reference, update

EXABYTE = 1 << 60
CPU = torch.device("cpu")
SIZES = [[(56, 56)], [(112, 56), (56, 84)]]
NAMES = [f"digits row {'ab'[i // 8]} sample {i % 8}" for i in range(16)]
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -1.0, -0.5, -0.5] * 2
BUDGET = 200
WHOLE, HALF = 160, 75
"""Between what a group of eight responses takes and half of it; below half of it, and above one response."""


def ask_for_too_much() -> None:
    torch.empty(EXABYTE, dtype=torch.uint8)


def wrapped(kind: type[Exception]):
    def ask() -> None:
        try:
            ask_for_too_much()
        except RuntimeError as error:
            raise kind("something went wrong") from error

    return ask


@pytest.mark.parametrize(
    "ask",
    [
        ask_for_too_much,
        lambda: bytearray(EXABYTE),
        lambda: mmap.mmap(-1, 1 << 47),
        wrapped(CheckpointError),
        wrapped(EngineError),
    ],
)
def test_what_the_system_refuses_is_known_for_what_it_is(ask):
    with pytest.raises(Exception) as caught:
        ask()
    assert ran_out(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("row 7"),
        KeyError("memory"),
        RewardError("the reward said: OSError: Cannot allocate memory"),
        OSError(28, "No space left on device"),
    ],
)
def test_other_errors_are_left_alone(error):
    assert not ran_out(error)
    with pytest.raises(type(error)) as caught, explaining(recipe()), asking_for(lambda: pytest.fail("asked"), CPU):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling x", "CUDA out of memory. Tried"]
)
def test_a_gpu_that_is_full_is_known_for_what_it_is(text):
    assert ran_out(RuntimeError(text)) and ran_out(torch.OutOfMemoryError("x"))


def test_the_error_travels_between_processes_whole():
    load = Load("train.tokens_per_row", 10, 4, 2, ("a row",))
    error = OutOfMemoryError("out", where="there", hint="lower it", load=load)
    error.halved, error.fits = {"train.tokens_per_row": [10, 5]}, 3
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.load, again.halved, again.fits) == (str(error), load, error.halved, 3)
    assert exit_of(again) == (2, str(error))


def test_the_peak_is_of_this_process_and_the_limit_of_its_machine():
    before, limit = memory_use(CPU)
    held = torch.ones(1 << 27, dtype=torch.uint8)
    assert memory_use(CPU)[0] >= before and held.sum() == 1 << 27
    assert 1 << 27 < before < limit


def recipe(**train) -> Recipe:
    return Recipe(
        model=Model(path="x", dtype="float32", device="cpu"),
        data=[Data(path="x")],
        train=Train(**{"tokens_per_row": BUDGET} | train),
        rollout=Rollout(max_new_tokens=16),
    )


@dataclass
class Told:
    """A watcher and a run in one: what was said and noted."""

    said: list[str] = field(default_factory=list)
    noted: list[tuple] = field(default_factory=list)

    def message(self, text: str) -> None:
        self.said.append(text)

    def event(self, step: int, event: str, **details) -> None:
        self.noted.append((step, event, details))


def session_of(model, offload: bool = False, **train):
    told = Told()
    progress, policy, settings = Progress(step=7), Policy(model, temperature=0.7), recipe(**train)
    if offload:
        shard(policy, sharded_units(model, policy.sharing), ALONE, CPU, offload=True)
    journal = SimpleNamespace(progress=progress, watcher=told, run=told)
    budgets = TokenBudgets(settings, progress, partial(report_halved, journal, policy.device))  # type: ignore[arg-type]
    learner = Learner(settings, policy, Optimizer(model, Optim(lr=1e-2)), budgets)
    return SimpleNamespace(learner=learner, budgets=budgets, progress=progress, told=told)


@pytest.fixture
def items(tiny_encoder):
    """Two groups of eight responses: 33 + 147 and 45 + 124 tokens."""
    prompts = [
        encoded(tiny_encoder, "same or not?", sizes, n) for n, sizes in zip(("room a", "room b"), SIZES, strict=True)
    ]
    lengths = [20, 17, 22, 9, 25, 14, 21, 19], [11, 22, 17, 15, 20, 8, 13, 18]
    return items_of(list(zip(prompts, lengths, strict=True)))


def one_update(session, items):
    batch = StepBatch(items, ADVANTAGES, NAMES)
    learner = session.learner
    work = partial(update, learner.policy, learner.optimizer, batch, PolicyGradient(ALGORITHMS["grpo"]))
    return learner.in_rows(partial(work, lr=1e-2, max_tokens=16))


def fail_above(policy, tokens: int, *, where: str = "forward", from_row: int = 0):
    """Make the policy ask for too much in rows of more tokens than that: after their forward pass, or in their backward
    pass, after the head or after all layers but the first.
    """
    run, rows = policy._states, []
    first = policy.model.get_submodule("model.language_model.layers.0")

    def fails() -> bool:
        return rows[-1] > tokens and len(rows) > from_row

    def after_first(module, inputs, output) -> None:
        if fails() and where == "backward to the first layer":
            output.register_hook(lambda gradient: ask_for_too_much())

    def states(row):
        rows.append(row.input_ids_N.numel())
        hidden = run(row)
        if fails() and where == "backward":
            hidden.register_hook(lambda gradient: ask_for_too_much())
        elif fails() and where == "forward":
            ask_for_too_much()
        return hidden

    first.register_forward_hook(after_first)
    policy._states = states
    return rows


@pytest.fixture
def group():
    with group_of_one("cpu"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward", "backward to the first layer"])
def test_a_step_that_failed_once_is_the_step_that_never_failed(group, tiny_model, items, where, offload):
    """Also of a sharded policy, whose units are gathered when the pass fails."""
    calm, shaken = session_of(copy.deepcopy(tiny_model)), session_of(tiny_model, offload)
    for session in (calm, shaken):
        one_update(session, items)
    # The first row has left gradients when the second one fails.
    rows = fail_above(shaken.learner.policy, WHOLE, where=where, from_row=1)
    expected, found = one_update(calm, items), one_update(shaken, items)
    assert rows[:2] == [180, 169] and max(rows[2:]) <= 84, rows
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    ours, theirs = (
        dict(s.learner.policy.model.named_parameters()) | s.learner.optimizer.state_tensors() for s in (shaken, calm)
    )
    assert ours.keys() == theirs.keys()
    for kind in ("model.", "exp_avg.", "exp_avg_sq."):
        names = sorted(n for n in theirs if n.startswith(kind))
        assert_close(*(torch.cat([own_part(t[n]).flatten() for n in names]) for t in (ours, theirs)), kind)
    assert shaken.learner.optimizer.updates == calm.learner.optimizer.updates == 2


@pytest.mark.slow
@pytest.mark.parametrize("at", ["second run", "first run", "backward of the first run"])
def test_a_pass_of_several_runs_that_failed_leaves_nothing(group, at):
    """A layer runs for the prompt and again for the responses. It fails in between, gathered or not."""
    policy = Policy(build("qwen3_5").model)
    share_prefix(policy.model)
    row = make_row([item for item in family_items(build("qwen3_5")) if item.group == 1])
    shard(policy, sharded_units(policy.model, policy.sharing), ALONE, CPU, repeated=True, offload=True)
    layer, runs = policy.model.get_submodule("model.language_model.layers.1"), []

    def fail(module, inputs, output) -> None:
        runs.append(at)
        if at == "backward of the first run" and len(runs) == 1:
            output.register_hook(lambda gradient: ask_for_too_much())
        elif at == ["first run", "second run"][len(runs) - 1]:
            ask_for_too_much()

    def gradients():
        policy.zero_grad(set_to_none=True)
        policy(row).logp.sum().backward()
        return {n: own_part(p.grad).clone() for n, p in policy.named_parameters() if p.grad is not None}

    expected = gradients()
    handle = layer.register_forward_hook(fail)
    with pytest.raises(RuntimeError):
        gradients()
    handle.remove()
    end_failed_pass(policy)
    found = gradients()
    assert runs and found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.slow
def test_the_half_is_the_budget_from_then_on_said_and_noted(tiny_model, items):
    session = session_of(tiny_model)
    world.phase("update", 7)
    rows = fail_above(session.learner.policy, WHOLE)
    assert session.budgets.metrics() == {"train/tokens_per_row": BUDGET}
    assert session.budgets.may_halve("train.tokens_per_row")
    one_update(session, items)
    now = rows[0] // 2  # the row had fewer tokens than the budget
    assert session.progress.halved == {"train.tokens_per_row": [BUDGET, now]}
    assert session.budgets.metrics() == {"train/tokens_per_row": now}
    [(step, event, noted)] = session.told.noted
    assert step == 7 and "out of memory" in event and (noted["was"], noted["now"]) == (BUDGET, now)
    assert (
        noted["rows"][0] == "digits row a (8 responses; images 56 x 56)" and noted["limit_bytes"] > noted["peak_bytes"]
    )
    [said] = session.told.said
    assert "phase `update` of step 7" in said and f"train.tokens_per_row = {now}" in said
    before = len(rows)
    one_update(session, items)
    assert max(rows[before:]) <= WHOLE and len(session.told.noted) == 1


@pytest.mark.slow
def test_a_second_failure_ends_with_rows_images_peak_and_the_key_to_change(tiny_model, items):
    session = session_of(tiny_model)
    world.phase("update", 7)
    fail_above(session.learner.policy, WHOLE)
    one_update(session, items)
    rows = fail_above(session.learner.policy, HALF)
    with pytest.raises(OutOfMemoryError) as caught, explaining(session.learner.recipe):
        one_update(session, items)
    error = caught.value
    size = rows[-1]
    assert HALF < size <= 90 and error.halved == {}
    assert error.message.startswith(f"out of memory in phase `update` of step 7 on rank 0 with {size} tokens (")
    assert "of images) in 3 responses at once; peak " in error.message and " GiB of " in error.message
    assert "digits row" in error.where and "images " in error.where
    assert error.hint == f"set train.tokens_per_row = {size // 2} (half of what did not fit)"


def test_a_single_response_is_not_tried_again_and_the_key_is_another_one(tiny_model, items):
    session = session_of(tiny_model, tokens_per_row=1)
    fail_above(session.learner.policy, 0)
    with pytest.raises(OutOfMemoryError) as caught, explaining(session.learner.recipe):
        one_update(session, items)
    assert session.progress.halved == {} and not session.told.noted
    assert caught.value.where == "digits row a (1 response; images 56 x 56)"
    assert caught.value.hint.startswith(
        "set model.gradient_checkpointing = true; a smaller train.tokens_per_row would not"
    )


def test_one_of_several_processes_says_with_what_all_may_begin_again(tiny_model, items):
    session = session_of(tiny_model)
    session.learner.world = World(1, 2)
    rows = fail_above(session.learner.policy, WHOLE)
    with pytest.raises(OutOfMemoryError) as caught, explaining(session.learner.recipe):
        one_update(session, items)
    assert caught.value.halved == {"train.tokens_per_row": [BUDGET, rows[0] // 2]} and session.progress.halved == {}
    session.progress.halved = caught.value.halved
    with pytest.raises(OutOfMemoryError) as caught, explaining(session.learner.recipe):
        fail_above(session.learner.policy, 0)
        one_update(session, items)
    assert caught.value.halved == {}, "only once"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fill",
    [
        lambda policy, batch, tokens_per_row: fill_logps(policy, batch, batch.old_logp, tokens_per_row),
        lambda policy, batch, tokens_per_row: fill_reference(policy, batch, tokens_per_row),
    ],
)
def test_the_passes_before_an_update_go_back_too(tiny_model, items, fill):
    session = session_of(tiny_model)
    batch, calm = (StepBatch(items, ADVANTAGES, NAMES) for _ in range(2))
    fill(session.learner.policy, calm, BUDGET)
    rows = fail_above(session.learner.policy, WHOLE)
    session.learner.in_rows(partial(fill, session.learner.policy, batch))
    assert rows[0] > WHOLE and max(rows[1:]) <= WHOLE
    kept = [(x.old_logp, {} if x.reference is None else x.reference.hidden) for x in (batch, calm)]
    for found, expected in zip(*kept, strict=True):
        assert found.keys() == expected.keys()
        for i in expected:
            assert_close(found[i], expected[i])


def test_a_budget_that_was_changed_since_counts_anew(tiny_model):
    session = session_of(tiny_model)
    session.progress.halved = {"train.tokens_per_row": [BUDGET, 50]}
    budgets = session.budgets
    assert budgets.of("train.tokens_per_row") == 50 and not budgets.may_halve("train.tokens_per_row")
    budgets.recipe = recipe(tokens_per_row=BUDGET // 3)
    assert budgets.of("train.tokens_per_row") == BUDGET // 3 and budgets.may_halve("train.tokens_per_row")
