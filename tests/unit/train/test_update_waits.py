"""How often an update asks the device for a number: once for all metrics, however many rows and metrics there are."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from waits import Waits

from vlmrl.algo.algorithms import resolve
from vlmrl.model.packing import PackedRow, PromptTokens, TokenStats, TrainItem
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import CrossEntropy, PolicyGradient, Tally, add_gradients, fill_logps, on_cpu
from vlmrl.types import Segment

TOKENS = 5
PROMPT = PromptTokens((1, 2, 3), (0, 0, 0), {}, 0)


class Stub(torch.nn.Module):
    """A policy of one number, which makes log-probs of a row's token ids and asks for none."""

    device = torch.device("cpu")
    sharing = "packed"

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, row: PackedRow, reference: object = None, teacher: object = None) -> TokenStats:
        logp = -self.scale * row.target_K.float() / 100
        return TokenStats(logp, logp.detach() + 1, logp * 0.1, logp.square())


def batch_of(responses: int) -> StepBatch:
    sampled = Segment("assistant", tuple(range(20, 20 + TOKENS)), True, tuple([-0.1] * TOKENS))
    items = [TrainItem(PROMPT, k, (sampled,), k) for k in range(responses)]
    batch = StepBatch(items, [(-1.0) ** k for k in range(responses)], [f"row {k}" for k in range(responses)])
    numbers = {k: torch.full((TOKENS,), -0.2) for k in range(responses)}
    batch.old_logp, batch.ref_logp, batch.old_value, batch.value_target = numbers, numbers, numbers, numbers
    return batch


OBJECTIVES = {
    "grpo": PolicyGradient(resolve("grpo")),
    "all terms": PolicyGradient(resolve("ppo", kl="k3"), kl_coef=0.1, entropy_coef=0.1, importance="mask"),
    "sequence": PolicyGradient(resolve("gspo", importance_level="sequence"), importance="truncate"),
    "gmpo": PolicyGradient(resolve("gmpo"), importance="truncate"),
    "supervised": CrossEntropy(),
}


def waits(responses: int, objective: PolicyGradient | CrossEntropy) -> Counter[str]:
    """Of one row a response."""
    policy, optimizer = Stub(), SimpleNamespace(clear=lambda: None)
    with Waits() as counted:
        metrics = add_gradients(
            policy,
            optimizer,
            batch_of(responses),
            objective,
            tokens_per_row=8,
            max_tokens=8,  # type: ignore[arg-type]
        )
    assert policy.scale.grad is not None and all(isinstance(v, float) for v in metrics.values())
    assert counted.reads == 1
    return counted.count


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_metrics_of_an_update_are_read_once(name):
    few, many = waits(2, OBJECTIVES[name]), waits(9, OBJECTIVES[name])
    assert few["tolist"] == many["tolist"] == 1
    # what is sent to the device is so much a row and no more
    assert (many["tensor"] - few["tensor"]) % 7 == 0 and many["tensor"] <= 9 * 12


def test_old_log_probs_are_taken_apart_without_asking_the_device():
    batch, found = batch_of(4), {}
    with Waits() as counted:
        fill_logps(Stub(), batch, found, 100)  # type: ignore[arg-type]
    assert counted.reads == 0
    assert sorted(found) == [0, 1, 2, 3] and all(len(x) == TOKENS for x in found.values())


def test_a_tally_adds_keeps_the_largest_and_gives_plain_numbers():
    tally = Tally()
    assert tally.read() == {}
    for value in (1.5, -4.0, 2.0):
        tally.add("sum", torch.tensor(value))
        tally.top("most", torch.tensor(value))
    tally.add("count", torch.tensor(3))
    assert tally.read() == {"sum": -0.5, "count": 3.0, "most": 2.0}


def test_tensors_come_to_the_cpu_in_one_copy():
    by = {7: torch.tensor([1.0, 2.0]), 3: torch.tensor([]), 5: torch.tensor([3.0])}
    with Waits() as counted:
        found = on_cpu(by)
    assert counted.count == {"cpu": 1} and on_cpu({}) == {}
    assert {k: v.tolist() for k, v in found.items()} == {7: [1.0, 2.0], 3: [], 5: [3.0]}
