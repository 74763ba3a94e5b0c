"""What a value head and the full KL add to a step, against plain forwards of each response and dense sums."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_update_property import MAX_TOKENS, TEMPERATURE, WHOLE, GradientTaker, batch_of, reference_logps
from tinyworld import assert_close, assert_same_gradients, encoded, gradients, items_of, response, saved_bytes
from torch import Tensor

from vlmrl.algo.algorithms import ALGORITHMS, resolve
from vlmrl.model import policy as logprobs
from vlmrl.model.lora import adapter_tensors, attach_adapter
from vlmrl.model.memory import HeadChunks
from vlmrl.model.packing import TrainItem, make_row, pack
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Optim
from vlmrl.train.learner import Optimizer, ReferencePolicy
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import PolicyGradient, fill_reference, fill_stats, update
from vlmrl.types import Segment

PPO = ALGORITHMS["ppo"]
FULL = resolve("grpo", kl="full")


@pytest.fixture(scope="module")
def items(tiny_encoder) -> list[TrainItem]:
    """Two prompts, one with images; ragged responses, one of them an agent's with a tool's answer inside."""
    prompts = [encoded(tiny_encoder, "same?", name="a"), encoded(tiny_encoder, "yes", [(56, 84), (56, 56)], name="b")]
    made = items_of([(prompts[0], [5, 1]), (prompts[1], [3, 6, 2])])
    tool, late = Segment("tool", response(77, 4).ids, False), Segment("assistant", response(78, 3).ids, True)
    made[3] = replace(made[3], segments=(made[3].segments[0], tool, late))
    return made


def hidden_of(model, item: TrainItem) -> Tensor:
    """The hidden states that predict an item's trained tokens, by one plain forward of its own."""
    ids = [*item.prompt.ids, *(t for s in item.segments for t in s.ids)]
    kinds = [*item.prompt.kinds, *[0] * item.num_tokens]
    trained = [False] * len(item.prompt.ids) + [s.trained for s in item.segments for _ in s.ids]
    states = model.model(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        mm_token_type_ids=torch.tensor([kinds], dtype=torch.int),
        **item.prompt.images,
    ).last_hidden_state[0]
    return states[[i - 1 for i, is_trained in enumerate(trained) if is_trained]]


def random_like(found: dict[int, Tensor], seed: int, scale: float = 0.5) -> dict[int, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {i: v.detach() + scale * torch.randn(len(v), generator=g) for i, v in sorted(found.items())}


class CriticTaker(GradientTaker):
    """As GradientTaker, of the value head too."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model)
        assert policy.value_head is not None
        self.value_head = policy.value_head

    def clip(self) -> float:
        self.taken = gradients(self.model) | head_gradients(self.value_head)
        return 1.0

    def clear(self) -> None:
        super().clear()
        self.value_head.zero_grad(set_to_none=True)


def head_gradients(head: torch.nn.Module) -> dict[str, Tensor]:
    return {f"value_head.{n}": g for n, g in gradients(head).items()}


def taken(taker, policy: Policy, batch: StepBatch, objective: PolicyGradient, tokens_per_row: int = WHOLE):
    metrics = update(policy, taker, batch, objective, lr=1.0, tokens_per_row=tokens_per_row, max_tokens=MAX_TOKENS)
    return taker.taken, metrics


@pytest.fixture
def critic(frozen_tiny_model, tiny_banned):
    """A policy whose value head has learned something."""
    made = Policy(frozen_tiny_model, temperature=TEMPERATURE, banned_ids=tiny_banned, critic=True)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        made.value_head.weight.copy_(0.2 * torch.randn(made.value_head.weight.shape, generator=generator))
        made.value_head.bias.fill_(0.3)
    yield made
    made.model.zero_grad(set_to_none=True)


def stats_of(policy, items: Sequence[TrainItem], *names: str, tokens_per_row: int = WHOLE, batch=None):
    into: dict[str, dict[int, Tensor]] = {name: {} for name in names}
    fill_stats(policy, batch or batch_of(items, [0.0] * len(items)), into, tokens_per_row)
    return [into[name] for name in names]


def test_the_first_values_are_zero_and_a_policy_without_a_critic_has_none(frozen_tiny_model, items):
    row = make_row(items[:2])
    policy = Policy(frozen_tiny_model, critic=True)
    value = policy(row).value
    assert value.dtype == torch.float32 and value.tolist() == [0.0] * 6
    plain = Policy(frozen_tiny_model)
    assert plain(row).value is None and plain(row).kl is None and plain.value_head is None
    assert torch.equal(plain(row).logp, policy(row).logp)


@pytest.mark.parametrize("tokens_per_row", [1, 80, WHOLE])
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_values_are_those_of_a_plain_forward_in_the_same_pass(
    critic, eager_model, items, tiny_banned, tokens_per_row, shared_prefix
):
    critic.sharing = "packed" if shared_prefix else "padded"
    logps, values = stats_of(critic, items, "logp", "value", tokens_per_row=tokens_per_row)
    with torch.no_grad():
        expected = reference_logps(eager_model, items, TEMPERATURE, tiny_banned)
        for item in items:
            i, hidden = item.trajectory, hidden_of(eager_model, item)
            assert_close(values[i], hidden @ critic.value_head.weight[0] + 0.3)
            assert_close(logps[i], expected[i])


def test_in_bfloat16_the_values_are_float32(tiny_model, items):
    policy = Policy(tiny_model.to(torch.bfloat16), critic=True)
    assert policy(make_row(items)).value.dtype == policy.value_head.weight.dtype == torch.float32


def critic_batch(items, values: dict[int, Tensor], logps: dict[int, Tensor]) -> StepBatch:
    """A step in the midst of its updates: some values and ratios are clipped, some are not."""
    batch = batch_of(items, [0.0] * len(items))
    batch.old_logp, batch.old_value = random_like(logps, 1, 0.3), random_like(values, 2, 0.3)
    batch.value_target, batch.token_advantages = random_like(values, 3, 0.7), random_like(values, 5, 1.0)
    return batch


def test_the_step_gradient_of_ppo_equals_the_hand_made_loop(critic, eager_model, items, tiny_banned):
    logps = reference_logps(eager_model, items, TEMPERATURE, tiny_banned)
    head = copy.deepcopy(critic.value_head)
    values = {i.trajectory: head(hidden_of(eager_model, i))[:, 0] for i in items}
    batch = critic_batch(items, values, logps)
    tokens = sum(len(v) for v in values.values())
    policy_loss, value_loss, limits = torch.zeros(()), torch.zeros(()), [0, 0]
    for i in values:
        for k in range(len(values[i])):
            ratio, a = torch.exp(logps[i][k] - batch.old_logp[i][k]), batch.token_advantages[i][k]
            kept = min(max(ratio.item(), 0.8), 1.2)
            over = ratio.item() * a > kept * a
            policy_loss = policy_loss - (kept if over else ratio) * a / tokens
            said, old, target = values[i][k], batch.old_value[i][k].item(), batch.value_target[i][k]
            limited = old + min(max(said.item() - old, -0.2), 0.2)
            plain, other = (said - target) ** 2, (limited - target) ** 2
            value_loss = value_loss + 0.5 * (plain if plain.item() >= other.item() else other) / tokens
            limits[0] += bool(over)
            limits[1] += plain.item() < other.item()
    assert min(limits) > 0 and max(limits) < tokens - 1
    eager_model.zero_grad(set_to_none=True)
    (policy_loss + 0.1 * value_loss).backward()
    expected = gradients(eager_model) | head_gradients(head)
    found, metrics = taken(CriticTaker(critic), critic, batch, PolicyGradient(PPO), 90)
    assert_same_gradients(found, expected)
    assert_close(found["value_head.weight"], expected["value_head.weight"])
    assert metrics["loss/value"] == pytest.approx(value_loss.item(), rel=1e-5)
    assert metrics["loss/policy"] == pytest.approx(policy_loss.item(), rel=1e-4, abs=1e-6)


@settings(max_examples=4)
@given(data=st.data())
def test_no_packing_changes_the_gradient_of_ppo(critic, items, data):
    logps, values = stats_of(critic, items, "logp", "value")
    order, budget = data.draw(st.permutations(items)), data.draw(st.integers(1, 200))
    found = []
    for chosen, tokens_per_row in ((items, WHOLE), (order, budget)):
        batch = critic_batch(items, values, logps)
        batch.items = list(chosen)
        found.append(taken(CriticTaker(critic), critic, batch, PolicyGradient(PPO), tokens_per_row))
    assert_same_gradients(found[1][0], found[0][0])
    assert found[1][1]["loss/value"] == pytest.approx(found[0][1]["loss/value"], rel=1e-5)


def test_the_value_head_is_trained_clipped_and_kept_with_the_rest_whatever_is_frozen(tiny_model, items):
    for name, p in tiny_model.named_parameters():
        p.requires_grad_(name.endswith("norm.weight"))
    policy = Policy(tiny_model, critic=True)
    optimizer = Optimizer(policy.model, Optim(lr=0.01, max_grad_norm=1e-3), policy.value_head)
    batch = batch_of(items, [0.0] * len(items))
    lengths = {i.trajectory: batch.num_trained(i) for i in items}
    batch.old_value = {i: torch.zeros(n) for i, n in lengths.items()}
    batch.value_target = {i: torch.ones(n) for i, n in lengths.items()}
    before = {n: p.clone() for n, p in tiny_model.named_parameters()}
    norm = update(policy, optimizer, batch, PolicyGradient(PPO), lr=0.01, tokens_per_row=WHOLE, max_tokens=MAX_TOKENS)[
        "optim/grad_norm"
    ]
    # No advantage, and a head of zeros passes nothing on to the model: all of the gradient is the head's.
    assert norm > 0.05
    assert float(policy.value_head.bias.detach()) == pytest.approx(0.01, rel=1e-4)
    assert all(torch.equal(p, before[n]) for n, p in tiny_model.named_parameters())
    kept = optimizer.state_tensors()
    # 0.1 x the clipped gradient of the bias: 0.1 x -(0.1 x 1) x 1e-3 / norm
    assert kept["exp_avg.value_head.bias"].item() == pytest.approx(-0.01 * 1e-3 / norm, rel=1e-4)
    again = Optimizer(policy.model, Optim(), policy.value_head)
    again.load_state_tensors(kept, 1)
    assert torch.equal(again.state_tensors()["exp_avg_sq.value_head.weight"], kept["exp_avg_sq.value_head.weight"])


def moved(model, scale: float = 0.02, seed: int = 9):
    """The model with every weight (or, with an adapter, every adapter weight) moved a little, in place."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            p.add_(scale * torch.randn(p.shape, generator=g))
    return model


def dense_kl(hidden: Tensor, ref_hidden: Tensor, head, ref_head, banned: Sequence[int]) -> Tensor:
    """The sum over the vocabulary of the ids that are not banned, all logits at once."""
    ours, theirs = head(hidden) / TEMPERATURE, ref_head(ref_hidden) / TEMPERATURE
    kept = [i for i in range(ours.shape[-1]) if i not in banned]
    p, q = ours[:, kept].log_softmax(-1), theirs[:, kept].log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("chunk", [2**25, 3 * 300])
@pytest.mark.parametrize("tokens_per_row", [80, WHOLE])
def test_the_full_kl_and_its_gradient_equal_the_dense_computation(
    frozen_tiny_model, eager_model, items, tiny_banned, tokens_per_row, chunk, monkeypatch
):
    options = {"temperature": TEMPERATURE, "banned_ids": tiny_banned}
    policy = Policy(frozen_tiny_model, **options)
    reference = Policy(moved(copy.deepcopy(frozen_tiny_model)).requires_grad_(False), **options)
    eager_reference = copy.deepcopy(eager_model)
    eager_reference.load_state_dict(reference.model.state_dict())
    expected, loss = {}, torch.zeros(())
    batch = batch_of(items, [0.0] * len(items))
    tokens = sum(batch.num_trained(i) for i in items)
    for item in items:
        with torch.no_grad():
            theirs = hidden_of(eager_reference, item)
        kl = dense_kl(hidden_of(eager_model, item), theirs, eager_model.lm_head, eager_reference.lm_head, tiny_banned)
        expected[item.trajectory], loss = kl.detach(), loss + 0.3 * kl.sum() / tokens
    eager_model.zero_grad(set_to_none=True)
    loss.backward()
    monkeypatch.setattr(logprobs, "chunks_for", lambda device: HeadChunks(2 * chunk, chunk))
    fill_reference(reference, batch, WHOLE)
    for item in items:
        kept = batch.reference.hidden[item.trajectory]
        assert kept.shape == (batch.num_trained(item), 64) and kept.device.type == "cpu" and not kept.requires_grad
        assert kept.dtype == torch.float32
    (found,) = stats_of(policy, items, "kl", tokens_per_row=tokens_per_row, batch=batch)
    for i, kl in expected.items():
        assert kl.min() > 1e-3
        assert_close(found[i], kl)
    gradient, metrics = taken(
        GradientTaker(policy.model), policy, batch, PolicyGradient(FULL, kl_coef=0.3), tokens_per_row
    )
    assert_same_gradients(gradient, gradients(eager_model))
    assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["loss/kl"] == pytest.approx(loss.item() / 0.3, rel=1e-5)
    assert all(p.grad is None for p in reference.model.parameters())


@pytest.mark.parametrize("began_with", ["the base", "an adapter", "the base, and an adapter on the head"])
def test_the_full_kl_to_the_own_model_with_other_adapter_weights(tiny_model, items, tiny_banned, began_with):
    options = {"temperature": TEMPERATURE, "banned_ids": tiny_banned}
    base = copy.deepcopy(tiny_model)
    if "head" in began_with:
        import peft

        untie(tiny_model), untie(base)
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]), tiny_model)
    else:
        attach_adapter(tiny_model, Lora(rank=2))
    policy = Policy(tiny_model, **options)
    if began_with == "an adapter":
        moved(tiny_model, 0.1, seed=3)
        first = {n: t.clone() for n, t in adapter_tensors(tiny_model).items()}
        reference, plain = ReferencePolicy(policy, first), Policy(copy.deepcopy(tiny_model), **options)
    else:
        reference, plain = ReferencePolicy(policy), Policy(base, **options)
    moved(tiny_model, 0.1)
    batches = [batch_of(items, [0.0] * len(items)) for _ in range(2)]
    made = []
    for batch, model in zip(batches, (reference, plain), strict=True):
        fill_reference(model, batch, WHOLE)
        (kl,) = stats_of(policy, items, "kl", batch=batch)
        gradient, _ = taken(GradientTaker(policy.model), policy, batch, PolicyGradient(FULL, kl_coef=0.3), 80)
        made.append((torch.cat([kl[i] for i in sorted(kl)]), gradient))
    assert made[0][0].min() > 1e-4
    assert_close(made[0][0], made[1][0])
    assert_same_gradients(made[0][1], made[1][1])
    assert any(bool(g.any()) for n, g in made[0][1].items() if ".lora_" in n)


def test_the_full_kl_keeps_no_logits_for_its_backward(frozen_tiny_model, items, monkeypatch):
    policy, batch = Policy(frozen_tiny_model), batch_of(items, [0.0] * len(items))
    fill_reference(policy, batch, WHOLE)
    row, reference = make_row(items), batch.outputs_of(batch.reference, items, policy.device)
    tokens, text = len(row.target_K), frozen_tiny_model.config.get_text_config()
    kept, policy.cheap = [], []  # `saved_bytes` counts what an outer hook sees
    for positions in (3, tokens):
        sizes = HeadChunks(2 * positions * text.vocab_size, text.vocab_size)
        monkeypatch.setattr(logprobs, "chunks_for", lambda device, sizes=sizes: sizes)
        kept.append(saved_bytes(lambda row: policy(row, reference), row) - saved_bytes(policy, row))  # type: ignore[arg-type]
    # in chunks: the two hidden states (and a bit); in one piece: logits of both, and more
    assert kept[0] < 4 * tokens * (2 * text.hidden_size + 8)
    assert kept[1] > 4 * tokens * 2 * text.vocab_size


def untie(model) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False


def test_the_full_kl_is_that_of_the_first_update_zero_and_its_terms_add_up(critic, items):
    """Policy and reference the same: 0 (but for rounding); in one objective with a critic both terms are there."""
    logps, values = stats_of(critic, items, "logp", "value")
    batch = critic_batch(items, values, logps)
    fill_reference(critic, batch, WHOLE)
    kl = stats_of(critic, items, "kl", batch=batch)[0]
    assert max(float(v.abs().max()) for v in kl.values()) < 1e-5
    objective = PolicyGradient(resolve("ppo", kl="full", kl_in="loss"), kl_coef=0.5)
    _, metrics = taken(CriticTaker(critic), critic, batch, objective)
    assert metrics["loss/total"] == pytest.approx(
        metrics["loss/policy"] + 0.1 * metrics["loss/value"] + 0.5 * metrics["loss/kl"], rel=1e-5
    )
    assert math.isfinite(metrics["loss/kl"]) and len(pack(items, WHOLE)) == 1
