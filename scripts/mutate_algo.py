#!/usr/bin/env python3
"""Does a wrong sign, mask or denominator turn a test red? Changes the algorithm one place at a time and runs its tests.

Each mutant is a copy of the package with one text replaced, in a temporary folder; the working tree is not touched. A
mutant that all tests let pass is a hole in the tests: it is listed, and the exit code is 1.

Run: .venv/bin/python scripts/mutate_algo.py [--only TEXT] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ["tests/golden"]
STEP = ["tests/property/test_update_property.py"]
PACK = ["tests/property/test_pack_property.py", *STEP]
UPDATE = [*STEP, "tests/unit/train"]
ADVANTAGES, LOSSES, KL, AGGREGATE = (f"vlmrl/algo/{n}.py" for n in ("advantages", "losses", "losses", "losses"))
RETURNS, SHAPING, INPUTS = (f"vlmrl/algo/{n}.py" for n in ("advantages", "credit", "credit"))
STEP_FILE, BATCH, OPTIM = "vlmrl/train/update.py", "vlmrl/model/packing.py", "vlmrl/train/learner.py"
STEP_BATCH, REFERENCE, TALLY = (f"vlmrl/train/{n}.py" for n in ("step_batch", "learner", "update"))
CREDIT, FAILURES = "vlmrl/train/collect.py", "vlmrl/train/rl.py"
OBJECTIVE = "vlmrl/train/update.py"
DIVERGENCE = "vlmrl/algo/divergence.py"
LOGPROBS, POLICY, ATTENTION = "vlmrl/model/policy.py", "vlmrl/model/policy.py", "vlmrl/model/attention.py"
SAMPLE, LOOP, COLLECT = "vlmrl/algo/credit.py", "vlmrl/train/rl.py", "vlmrl/train/collect.py"
LORA = "vlmrl/model/lora.py"
STATE, CHECKPOINT = "vlmrl/train/session.py", "vlmrl/checkpoint/io.py"
RUNS = ["tests/e2e/test_every_algorithm.py"]
LOGS = ["tests/unit/model/test_logprobs.py"]
SEVERAL = ["tests/golden/test_several_rewards_golden.py"]
CRITIC, CRITIC_STEP = ["tests/golden/test_critic_golden.py"], ["tests/property/test_critic_property.py"]
STEP_OF_RL = ["tests/unit/train/test_step_of_rl.py"]
CRITIC_RUNS = ["tests/e2e/test_critic_runs.py"]
LOOKS, LOOKING_RUNS = ["tests/unit/algo/test_perception.py"], ["tests/e2e/test_perception_runs.py"]
MASKS = ["tests/unit/data/test_blinded.py", "tests/unit/train/test_changed_prompts.py"]
TEACHER, TEACHING = "vlmrl/train/teacher.py", ["tests/e2e/test_teacher_runs.py"]
SHOWN, SHOWN_RUNS = ["tests/unit/algo/test_demonstrations.py"], ["tests/e2e/test_demonstration_runs.py"]


Mutant = tuple[str, str, str, list[str]]

MUTANTS: list[Mutant] = [
    # file, text (once in the file), its replacement, the tests that must see it
    (
        ADVANTAGES,
        "return _column(kept.totals_G - kept.totals_G.mean())",
        "return _column(kept.totals_G.mean() - kept.totals_G)",
        GOLDEN,
    ),
    (
        ADVANTAGES,
        "return _column(kept.totals_G - kept.totals_G.mean())",
        "return _column(kept.totals_G - np.median(kept.totals_G))",
        GOLDEN,
    ),
    (ADVANTAGES, "a / (k.totals_G.std(ddof=1) + STD_EPSILON)", "a / (k.totals_G.std(ddof=0) + STD_EPSILON)", GOLDEN),
    (ADVANTAGES, "a / (k.totals_G.std(ddof=1) + STD_EPSILON)", "a / k.totals_G.std(ddof=1)", GOLDEN),
    (ADVANTAGES, "* n / (n - 1)", "", GOLDEN),
    (ADVANTAGES, "len(scores) < 2 or min(scores) == max(scores)", "len(scores) < 2", GOLDEN),
    (
        ADVANTAGES,
        "index = [i for i, use in enumerate(group.included) if use]\n    if len",
        "index = [i for i, use in enumerate(group.included)]\n    if len",
        GOLDEN,
    ),
    (ADVANTAGES, "if not all(np.isfinite(scores)):", "if False:", GOLDEN),
    (ADVANTAGES, "(kept.lengths_G * kept.totals_G).sum() / kept.lengths_G.sum()", "kept.totals_G.mean()", GOLDEN),
    (
        ADVANTAGES,
        "(kept.lengths_G * kept.totals_G).sum() / kept.lengths_G.sum()",
        "(kept.lengths_G * kept.totals_G).sum() / len(kept.index)",
        GOLDEN,
    ),
    (ADVANTAGES, "= np.cumsum(energy)", "= energy", GOLDEN),
    (ADVANTAGES, "energy_GT * (own_T - returns_GT)", "energy_GT * (returns_GT - own_T)", GOLDEN),
    (ADVANTAGES, "energy_GT * (own_T - returns_GT)", "energy_GT.max() * (own_T - returns_GT)", GOLDEN),
    (ADVANTAGES, "total_T = energy_GT.sum(0)", "total_T = energy_GT.mean(0)", GOLDEN),
    (ADVANTAGES, "total_T = energy_GT.sum(0)", "total_T = energy_GT.sum(0) * 0 + energy_GT.sum()", GOLDEN),
    (ADVANTAGES, "where=total_T > 0)", "where=total_T > -1)", GOLDEN),
    (ADVANTAGES, "if not len(kept.group.energies):", "if False:", GOLDEN),
    (LOGPROBS, "logp.gather(-1, at).expm1()", "logp.gather(-1, at).exp()", LOGS),
    (LOGPROBS, ".expm1()).square_().sum(-1)", ".expm1()).abs_().sum(-1)", LOGS),
    (CREDIT, "by_sample(collected.groups, before.energy)", "by_sample(collected.groups, before.logp)", RUNS),
    (CREDIT, "energies=energies,\n", "energies=None,\n", RUNS),
    (
        ADVANTAGES,
        "kept.totals_G[order[-1]] - kept.totals_G[order[-2]]",
        "kept.totals_G[order[-2]] - kept.totals_G[order[-1]]",
        GOLDEN,
    ),
    (
        ADVANTAGES,
        "kept.totals_G[order[-1]] - kept.totals_G[order[-2]]",
        "kept.totals_G[order[-1]] - kept.totals_G.mean()",
        GOLDEN,
    ),
    (ADVANTAGES, "r - kept.group.greedy for r", "r + kept.group.greedy for r", GOLDEN),
    (
        ADVANTAGES,
        "(values - values.mean()) / (values.std(ddof=1)",
        "(values.mean() - values) / (values.std(ddof=1)",
        GOLDEN,
    ),
    (ADVANTAGES, "(values - values.mean()) / (values.std(ddof=1)", "(values - values.mean()) / (values.std()", GOLDEN),
    (
        ADVANTAGES,
        "return _column((normal_GP * weights_P).sum(1) * rescale_G)",
        "return _column((normal_GP * weights_P).sum(1))",
        GOLDEN,
    ),
    (
        ADVANTAGES,
        "return _column((normal_GP * weights_P).sum(1) * rescale_G)",
        "return _column(normal_GP.sum(1) * rescale_G)",
        GOLDEN,
    ),
    (ADVANTAGES, "[zero[i] if group_is_dead else by_index", "[by_index", GOLDEN),
    (ADVANTAGES, "a * samples / max(1, alive)", "a * alive / samples", GOLDEN),
    (ADVANTAGES, "a * samples / max(1, alive)", "a", GOLDEN),
    (ADVANTAGES, "deviation = totals.std(ddof=1)", "deviation = totals.std(ddof=0)", GOLDEN),
    (
        ADVANTAGES,
        "(a - means.mean()) / (deviation + STD_EPSILON)",
        "(a + means.mean()) / (deviation + STD_EPSILON)",
        GOLDEN,
    ),
    (ADVANTAGES, "deviation = means.std(ddof=1)", "deviation = means.std(ddof=0)", GOLDEN),
    (ADVANTAGES, 'keep_mean=scale == "tokens_keep_mean"', "keep_mean=False", GOLDEN),
    (ADVANTAGES, "rewards -= self.penalties[index]", "rewards += self.penalties[index]", GOLDEN),
    (ADVANTAGES, "rewards -= self.penalties[index]", "rewards -= self.penalties[0]", GOLDEN),
    (ADVANTAGES, "rewards[-1:] += float", "rewards[:1] += float", GOLDEN),
    (ADVANTAGES, "totals[position] = rewards.sum()", "totals[position] = scores[position]", GOLDEN),
    (ADVANTAGES, "return ESTIMATORS[estimator].needs_group", "return True", GOLDEN),
    (ADVANTAGES, "return all(is_dead(column) for column in columns)", "return is_dead(kept.totals_G.tolist())", GOLDEN),
    (RETURNS, "+ gamma * after", "- gamma * after", GOLDEN),
    (
        RETURNS,
        "delta = rewards_T + gamma * following - values_T",
        "delta = rewards_T + gamma * following + values_T",
        GOLDEN,
    ),
    (RETURNS, "delta = rewards_T + gamma * following - values_T", "delta = rewards_T + following - values_T", GOLDEN),
    (RETURNS, "rewards_to_go(delta, gamma * lam)", "rewards_to_go(delta, lam)", GOLDEN),
    (RETURNS, "advantages + values_T", "advantages", GOLDEN),
    (RETURNS, "np.full(len(v), n / len(v))", "np.full(len(v), 1.0)", GOLDEN),
    (RETURNS, "/ (total - 1)", "/ total", GOLDEN),
    (RETURNS, "(v - mean) / scale", "(mean - v) / scale", GOLDEN),
    (RETURNS, "(mean if keep_mean else 0.0)", "0.0", GOLDEN),
    (RETURNS, "if total < 2 or flat.min() == flat.max():", "if total < 2:", GOLDEN),
    (SHAPING, "-penalty * min", "penalty * min", GOLDEN),
    (SHAPING, "over = num_tokens - (max_tokens - buffer)", "over = num_tokens - max_tokens", GOLDEN),
    (SHAPING, "if was_cut and truncated_score", "if truncated_score", GOLDEN),
    (SHAPING, "return max(finite) - min(finite)", "return sum(finite) / len(finite)", GOLDEN),
    (SHAPING, "kl / target - 1.0", "1.0 - kl / target", GOLDEN),
    (SHAPING, "error * samples / horizon", "error / horizon", GOLDEN),
    (INPUTS, 'score.error is None and not (finish == "length" and', 'not (finish == "length" and', GOLDEN),
    (INPUTS, 'else ("drop",)', 'else ("mask",)', GOLDEN),
    (INPUTS, "> algorithm.min_spread", ">= algorithm.min_spread", GOLDEN),
    (
        INPUTS,
        "zip(group.scores, group.included, strict=True) if use]",
        "zip(group.scores, group.included, strict=True)]",
        GOLDEN,
    ),
    (INPUTS, "[g for g, ok in zip(groups, passed, strict=True) if ok]", "list(groups)", GOLDEN),
    (INPUTS, "scale=algorithm.scale", "scale=None", GOLDEN),
    (INPUTS, "            gamma=algorithm.gamma,", "            gamma=1.0,", GOLDEN),
    (LOSSES, "return (logp_K - old_logp_K).clamp", "return (old_logp_K - logp_K).clamp", GOLDEN),
    (
        LOSSES,
        "_response_mean(logp_K - old_logp_K, sequence_K)",
        "_response_mean(old_logp_K - logp_K, sequence_K)",
        GOLDEN,
    ),
    (LOSSES, " / _response_sum(torch.ones_like(values_K), response_K)", "", GOLDEN),
    (LOSSES, "mean_K.detach() + (logp_K - logp_K.detach())", "mean_K.detach() - (logp_K - logp_K.detach())", GOLDEN),
    (LOSSES, "torch.where(advantage_K < 0, torch.minimum", "torch.where(advantage_K > 0, torch.minimum", GOLDEN),
    (LOSSES, "torch.minimum(loss_K, -advantage_K * limit)", "torch.minimum(loss_K, advantage_K * limit)", GOLDEN),
    (
        LOSSES,
        "torch.nan_to_num(old_logp_K - sampler_logp_K, nan=0.0)",
        "torch.nan_to_num(sampler_logp_K - old_logp_K, nan=0.0)",
        GOLDEN,
    ),
    (LOSSES, "torch.nan_to_num(old_logp_K - sampler_logp_K, nan=0.0)", "old_logp_K - sampler_logp_K", GOLDEN),
    (
        LOSSES,
        "change_K = _response_sum(change_K, response_K)",
        "change_K = change_K.sum().expand(len(change_K))",
        GOLDEN,
    ),
    (LOSSES, "return weight_K.clamp(max=cap)", "return weight_K.clamp(min=cap)", GOLDEN),
    (LOSSES, "(weight_K >= 1.0 / cap)", "(weight_K >= 0.0)", GOLDEN),
    (LOSSES, "return -x.advantage * x.logp, ", "return x.advantage * x.logp, ", GOLDEN),
    (LOSSES, "-limited * x.advantage * x.logp", "limited * x.advantage * x.logp", GOLDEN),
    (LOSSES, "-limited * x.advantage * x.logp", "-ratio * x.advantage * x.logp", GOLDEN),
    (LOSSES, "(limited != ratio).to(", "(limited > 1e9).to(", GOLDEN),
    (LOSSES, 'if algorithm.surrogate != "gmpo":', "if True:", GOLDEN),
    (LOSSES, "(weight_K + WEIGHT_FLOOR).log(), response_K).exp()", "weight_K, response_K)", GOLDEN),
    (LOSSES, "ratio = log_ratio(x.logp.detach(), x.old_logp", "ratio = log_ratio(x.logp, x.old_logp", GOLDEN),
    (LOSSES, "change = log_ratio(x.logp.detach(), x.old_logp", "change = log_ratio(x.logp, x.old_logp", GOLDEN),
    (LOSSES, "-weight * x.advantage * x.logp", "weight * x.advantage * x.logp", GOLDEN),
    (LOSSES, "log_w = _response_sum(change", "log_w = _response_mean(change", GOLDEN),
    (LOSSES, "log_w = _response_sum(change, x.response)", "log_w = change", GOLDEN),
    (LOSSES, "power * log_w + decay * (1.0 - log_w.exp())", "power * log_w - decay * (1.0 - log_w.exp())", GOLDEN),
    (LOSSES, "power * log_w + decay * (1.0 - log_w.exp())", "log_w + decay * (1.0 - log_w.exp())", GOLDEN),
    (LOSSES, "power * log_w + decay * (1.0 - log_w.exp())", "power * log_w - decay * log_w.exp()", GOLDEN),
    (LOSSES, "is_good = x.advantage >= 0", "is_good = x.advantage < 0", GOLDEN),
    (
        LOSSES,
        "torch.where(x.advantage >= 0, torch.minimum(change, limited)",
        "torch.where(x.advantage < 0, torch.minimum(change, limited)",
        GOLDEN,
    ),
    (LOSSES, "low = -a.clip_low if", "low = a.clip_low if", GOLDEN),
    (LOSSES, "return -x.advantage * mean.exp()", "return x.advantage * mean.exp()", GOLDEN),
    (LOSSES, "masked_fill(x.advantage > 0, a.tau_positive)", "masked_fill(x.advantage < 0, a.tau_positive)", GOLDEN),
    (LOSSES, "(ratio - 1.0)) * 4.0 / tau", "(ratio - 1.0)) * 4.0", GOLDEN),
    (LOSSES, "loss.masked_fill(x.selected, 0.0)", "loss.masked_fill(~x.selected, 0.0)", GOLDEN),
    (LOSSES, "loss + a.cov_kl_coef * change.abs()", "loss - a.cov_kl_coef * change.abs()", GOLDEN),
    (LOSSES, "change.abs() * x.selected", "change.abs()", GOLDEN),
    (
        LOSSES,
        "covariance = (logp - logp.mean()) * (advantage - advantage.mean())",
        "covariance = logp * advantage",
        GOLDEN,
    ),
    (
        LOSSES,
        "covariance = (logp - logp.mean()) * (advantage - advantage.mean())",
        "covariance = (logp.mean() - logp) * (advantage - advantage.mean())",
        GOLDEN,
    ),
    (LOSSES, "max(1, int(algorithm.cov_share * len(logp)))", "1", GOLDEN),
    (LOSSES, "max(1, int(algorithm.cov_share * len(logp)))", "int(algorithm.cov_share * len(logp))", GOLDEN),
    (LOSSES, "eligible = ~clipped &", "eligible =", GOLDEN),
    (LOSSES, "(covariance < algorithm.cov_high)", "(covariance < 1e9)", GOLDEN),
    (LOSSES, ".manual_seed(seed)", ".manual_seed(0)", GOLDEN),
    (LOSSES, "return -advantage_K * ratio_K", "return advantage_K * ratio_K", GOLDEN),
    (LOSSES, "return -torch.minimum(", "return torch.minimum(", GOLDEN),
    (LOSSES, "return -torch.minimum(", "return -torch.maximum(", GOLDEN),
    (LOSSES, "low = 1.0 - clip_low", "low = 1.0 + clip_low", GOLDEN),
    (LOSSES, "high = 1.0 + clip_high", "high = 1.0 + clip_low", GOLDEN),
    (LOSSES, "(advantage_K > 0) & (ratio_K > 1.0", "(advantage_K < 0) & (ratio_K > 1.0", GOLDEN),
    (LOSSES, "return -logp_K", "return logp_K", GOLDEN),
    (LOSSES, "LOG_RATIO_LIMIT = 20.0", "LOG_RATIO_LIMIT = 200.0", GOLDEN),
    (KL, "return (ref_logp_K - logp_K).clamp", "return (logp_K - ref_logp_K).clamp", GOLDEN),
    (KL, "d.exp() - d - 1.0", "d.exp() - d", GOLDEN),
    (KL, "d.exp() - d - 1.0", "d.exp() + d - 1.0", GOLDEN),
    (KL, "return -_difference(logp_K, ref_logp_K)", "return _difference(logp_K, ref_logp_K)", GOLDEN),
    (KL, "return 0.5 * _difference", "return _difference", GOLDEN),
    (KL, ".clamp(max=MAX_VALUE)", "", GOLDEN),
    (KL, "_difference(logp_K, ref_logp_K).abs()", "_difference(logp_K, ref_logp_K)", GOLDEN),
    (AGGREGATE, "trained = [n for n in tokens_S if n > 0]", "trained = list(tokens_S)", GOLDEN),
    (AGGREGATE, "sum(trained) + sum(dead), len(trained) + len(dead)", "sum(trained), len(trained)", GOLDEN),
    (AGGREGATE, "total.num_tokens - total.num_dead_tokens", "total.num_tokens", GOLDEN),
    (AGGREGATE, "return loss_K.sum() / max(1, total.num_tokens)", "return loss_K.mean()", GOLDEN),
    (AGGREGATE, "(loss_K / sequence_tokens_K.to(loss_K.dtype)).sum()", "loss_K.sum()", GOLDEN),
    (AGGREGATE, "return loss_K.sum() / max(1, total.num_sequences)\n", "return loss_K.sum()\n", GOLDEN),
    (
        AGGREGATE,
        "return loss_K.sum() / max(1, total.num_sequences)\n",
        "return loss_K.sum() / max(1, total.num_tokens)\n",
        GOLDEN,
    ),
    (AGGREGATE, "/ max(1, total.num_sequences * total.max_tokens)", "/ max(1, total.max_tokens)", GOLDEN),
    (OPTIM, "settings.lr * (step + 1) / settings.warmup_steps", "settings.lr * step / settings.warmup_steps", GOLDEN),
    (OPTIM, "total_steps - 1 - settings.warmup_steps", "total_steps - settings.warmup_steps", GOLDEN),
    (OPTIM, "0.5 * (1.0 + math.cos", "0.5 * (1.0 - math.cos", GOLDEN),
    (OPTIM, "if m.ndim >= 2]", "if m.ndim >= 0]", UPDATE),
    (OPTIM, "parameter.grad.float()", "parameter.grad", UPDATE),
    (OPTIM, "else master.grad.add_(gradient)", "else gradient", UPDATE),
    (OPTIM, "                p.copy_(self.masters[name])", "                pass", UPDATE),
    (OBJECTIVE, "old = logp.detach() if", "old = logp if", GOLDEN),
    (OBJECTIVE, "if before is None else before", "", GOLDEN),
    (OBJECTIVE, "torch.where(torch.isnan(sampler_logp), old, sampler_logp)", "old", GOLDEN),
    (OBJECTIVE, "loss = loss - self.entropy_coef", "loss = loss + self.entropy_coef", GOLDEN),
    (OBJECTIVE, "loss = loss + self.kl_coef * kl", "loss = loss - self.kl_coef * kl", GOLDEN),
    (
        STEP_FILE,
        "counts = [batch.counts_of(i) for i in batch.items]",
        "counts = [(i.num_tokens, 0) for i in batch.items]",
        STEP,
    ),
    (
        STEP_FILE,
        "of_policy = Denominator.of(objective.aggregation, own, max_tokens, dead)",
        "of_policy = Denominator.of(objective.aggregation, own, max_tokens)",
        STEP,
    ),
    (OBJECTIVE, "            loss = loss * weight", "            pass", GOLDEN),
    (
        OBJECTIVE,
        "importance_weight(\n                old,",
        "importance_weight(\n                data.sampler_logp,",
        GOLDEN,
    ),
    (STEP_BATCH, "if advantages is None else advantages.float()", "", STEP),
    (OBJECTIVE, "trajectories = sorted(all_tokens)", "trajectories = list(all_tokens)", STEP),
    (STEP_FILE, "selected = objective.select(policy, batch, tokens_per_row)", "selected = {}", STEP),
    (STEP_BATCH, "sum(len(s.ids) for s in item.segments if s.trained)", "sum(len(s.ids) for s in item.segments)", STEP),
    (STEP_FILE, "advantage=advantage,", "advantage=advantage.abs(),", STEP),
    (STEP_FILE, "advantage=advantage,", "advantage=advantage.flip(0),", STEP),
    (
        STEP_FILE,
        "response_tokens=response_tokens,",
        "response_tokens=torch.full_like(response_tokens, len(response)),",
        STEP,
    ),
    (
        STEP_FILE,
        'tally.add("loss/demonstrations", term)\n            loss.backward()',
        'tally.add("loss/demonstrations", term)\n            policy.model.zero_grad(); loss.backward()',
        STEP,
    ),
    (STEP_FILE, "if numbers.pop(NOT_FINITE, 0.0) else []", "if numbers.pop(NOT_FINITE, 0.0) > 1e9 else []", UPDATE),
    (STEP_FILE, '    if not norm < float("inf"):', '    if norm == float("inf"):', UPDATE),
    (STEP_FILE, "        optimizer.clear()\n        raise", "        raise", UPDATE),
    (STEP_FILE, "join(batch.old_logp)", "join(batch.ref_logp)", STEP),
    (TALLY, "torch.maximum(self._most[name], value)", "value", UPDATE),
    (TALLY, "else self._sums[name] + value", "else self._sums[name]", UPDATE),
    (BATCH, "prompt_last if at == start else at - 1", "at - 1", PACK),
    (BATCH, "prompt_last if at == start else at - 1", "prompt_last if at == start else at", PACK),
    (BATCH, "prompt_last = len(ids) - 1", "prompt_last = len(ids) - 2", PACK),
    (BATCH, "size + item.num_tokens > tokens_per_row", "item.num_tokens > tokens_per_row", PACK),
    (BATCH, "        room[index] -= size", "        room[index] -= 0", PACK),
    (BATCH, "enumerate(segment.ids, len(ids))", "enumerate(segment.ids[::-1], len(ids))", PACK),
    (ATTENTION, "is_causal=mask is None", "is_causal=False", PACK),
    (ATTENTION, "torch.cat([key[:, :, prompt], keys], 2)", "torch.cat([key[:, :, prompt] * 0, keys], 2)", PACK),
    (POLICY, "int(positions.max()) + 1", "int(positions.max()) + 2", STEP),
    (POLICY, "first = results[prompt][1]", "first = row.layout[prompt].end", STEP),
    (POLICY, "hidden_ND[row.predict_at_K]", "hidden_ND[row.predict_at_K - 1]", STEP),
    (LOGPROBS, "return x if banned is None else", "return x if True else", STEP),
    (LOGPROBS, "entropy[rows] = log_total - ", "entropy[rows] = log_total + ", STEP),
    (LOGPROBS, "if ctx.entropy_gradient:", "if False:", STEP),
    (LOGPROBS, "x.add_(entropy[rows, None])", "x", STEP),
    (LOGPROBS, ".mul_(-pull[rows, None])", ".mul_(pull[rows, None])", STEP),
    (LOGPROBS, "pull = logp_grad / ctx.temperature", "pull = logp_grad", STEP),
    (LOGPROBS, "        x.div_(temperature)", "        pass", STEP),
    (LOGPROBS, "pull.masked_fill(ctx.banned[target], 0.0)", "pull", LOGS),
    (
        SAMPLE,
        'masked = [not use or (c and truncated != "keep")',
        'masked = [not use or (c and truncated == "keep")',
        UPDATE,
    ),
    ("vlmrl/types.py", "return all(s.advantage == 0.0", "return any(s.advantage == 0.0", UPDATE),
    (COLLECT, "while passed < count and", "while", RUNS),
    (COLLECT, "feed.draw(count - passed)", "feed.draw(count)", RUNS),
    (CREDIT, "factor * values[first + k]", "values[first + k]", STEP_OF_RL),
    (COLLECT, "temperature=0.0", "temperature=1.0", RUNS),
    (
        LOOP,
        'if algorithm.kl_in == "loss" else (0.0, kl_coef)',
        'if algorithm.kl_in == "loss" else (kl_coef, kl_coef)',
        RUNS,
    ),
    (STEP_BATCH, "if count_dead and not use", "if not use", STEP_OF_RL),
    (ADVANTAGES, "kept = [np.maximum(gain, 0.0) for gain in gains]", "kept = list(gains)", GOLDEN),
    (ADVANTAGES, "ceil(share * number - 1e-9)", "int(share * number)", [*GOLDEN, *LOOKS]),
    (ADVANTAGES, "np.argsort(-gain, kind", "np.argsort(gain, kind", GOLDEN),
    (ADVANTAGES, "len(kept) * shares / shares.sum()", "shares / shares.sum()", GOLDEN),
    (ADVANTAGES, "own[visual] = (weight if others", "own[visual] = (1.0 - weight if others", GOLDEN),
    (STEP_FILE, "1.0 if data.teacher_weight is None else data.teacher_weight", "1.0", TEACHING),
    (TEACHER, "batch.behind(lambda index: self.prompt_of(group_of(index), change), self.filler)", "batch", TEACHING),
    (TEACHER, 'ImageChange("low", share=row.image_scale)', "None", TEACHING),
    ("vlmrl/tasks/prompt.py", "(hidden(x) if hides else x for x in", "(x for x in", TEACHING),
    (STATE, "(*learner.policy.banned_ids, *range(mine, theirs))", "learner.policy.banned_ids", TEACHING),
    (SAMPLE, "tuple((own + gain).tolist())", "tuple((own - gain).tolist())", TEACHING),
    (DIVERGENCE, "-(p * d).sum(-1)", "-(ref.exp() * d).sum(-1)", GOLDEN),
    (DIVERGENCE, "return value, -d - value[:, None]", "return value, -d", GOLDEN),
    (DIVERGENCE, "d = (ref - logp).nan_to_num", "d = (logp - ref).nan_to_num", GOLDEN),
    (DIVERGENCE, ".nan_to_num(0.0, 0.0, 0.0)", "", GOLDEN),
    (DIVERGENCE, "(ref.exp() * d).sum(-1), d", "(p * d).sum(-1), d", GOLDEN),
    (DIVERGENCE, "p - (logp + pull).exp() if", "(logp + pull).exp() - p if", GOLDEN),
    (DIVERGENCE, "(w - 1) * m", "w * m", GOLDEN),
    (DIVERGENCE, "w * (q * (d - m)).sum(-1)", "(1 - w) * (q * (d - m)).sum(-1)", GOLDEN),
    (DIVERGENCE, "torch.where(d <= 0, ", "torch.where(d <= 200, ", GOLDEN),
    (DIVERGENCE, "logp.scatter(-1, ids, -math.inf).logsumexp", "logp.logsumexp", GOLDEN),
    (DIVERGENCE, "ids = ref.topk", "ids = logp.topk", GOLDEN),
    (LOGPROBS, "grad[rows] = pull.div_(temperature)", "grad[rows] = pull", GOLDEN),
    (LOGPROBS, "settings.temperature or temperature", "temperature", GOLDEN),
    (
        LOGPROBS,
        "x[..., :vocabulary] for x in (logits, theirs)",
        "x[..., -vocabulary:] for x in (logits, theirs)",
        GOLDEN,
    ),
    (
        STEP_BATCH,
        "if _is_trained(s) and (use or k >= len(group.samples))",
        "if use or k >= len(group.samples)",
        STEP_OF_RL,
    ),
    (STEP_BATCH, "use, everything = keep_dead or not group.is_dead,", "use, everything = True,", STEP_OF_RL),
    (STEP_BATCH, "order[k::number]", "order[:number]", STEP_OF_RL),
    (FAILURES, "if share > MAX_ERROR_SHARE:", "if share > 1:", UPDATE),
    (
        ADVANTAGES,
        "if ESTIMATORS[estimator].critic:\n        return False",
        "if ESTIMATORS[estimator].critic:\n        return is_dead(kept.totals_G.tolist())",
        CRITIC,
    ),
    (ADVANTAGES, "if entry.critic and scale not in CRITIC_SCALES:", "if False:", CRITIC),
    (ADVANTAGES, "if index and not len(group.values):", "if False:", CRITIC),
    (ADVANTAGES, "group.values[i], gamma=gamma, lam=lam)", "group.values[0], gamma=gamma, lam=lam)", CRITIC),
    (ADVANTAGES, "group.values[i], gamma=gamma, lam=lam)", "group.values[i], gamma=gamma, lam=gamma)", CRITIC),
    (ADVANTAGES, "group.values[i], gamma=gamma, lam=lam)", "group.values[i], gamma=lam, lam=lam)", CRITIC),
    (ADVANTAGES, "targets[i] = target", "targets[i] = target - group.values[i]", CRITIC),
    (ADVANTAGES, "[advantages for advantages, _ in _gen", "[advantages for _, advantages in _gen", CRITIC),
    (RETURNS, "np.append(values_T, 0.0)[1:]", "np.append(values_T, values_T[-1])[1:]", CRITIC),
    (RETURNS, "1.0 - np.var(targets_N - values_N)", "1.0 - np.var(targets_N + values_N)", CRITIC),
    (
        RETURNS,
        "np.var(targets_N - values_N) / np.var(targets_N)",
        "np.mean((targets_N - values_N) ** 2) / np.var(targets_N)",
        CRITIC,
    ),
    (
        RETURNS,
        "np.var(targets_N - values_N) / np.var(targets_N)",
        "np.var(targets_N - values_N) / np.var(values_N)",
        CRITIC,
    ),
    (INPUTS, "            lam=algorithm.gae_lambda,", "            lam=1.0,", CRITIC),
    (INPUTS, 'excluded = ("drop", "mask") if', 'excluded = ("drop",) if', CRITIC),
    (INPUTS, "greedy, penalties, values, shares", "greedy, penalties, (), shares", CRITIC),
    (INPUTS, "0.0 if is_closed else score.parts", "1.0 if is_closed else score.parts", SEVERAL),
    (INPUTS, "scale = reward.weight * fsum(weights.values()) / present", "scale = reward.weight", SEVERAL),
    (INPUTS, "own = [n for n in names if n != self.gate and ", "own = [n for n in names if ", SEVERAL),
    (ADVANTAGES, "(normal_GP * shares_GP).sum(1)", "normal_GP.sum(1)", SEVERAL),
    (LOSSES, "limited_K = old_value_K + (value_K", "limited_K = (value_K", CRITIC),
    (LOSSES, "limited_K = old_value_K + (value_K", "limited_K = old_value_K - (value_K", CRITIC),
    (LOSSES, ".clamp(-clip_range, clip_range)", ".clamp(0, clip_range)", CRITIC),
    (LOSSES, "return 0.5 * torch.maximum((value_K", "return 0.5 * torch.minimum((value_K", CRITIC),
    (LOSSES, "return 0.5 * torch.maximum((value_K", "return torch.maximum((value_K", CRITIC),
    (
        OBJECTIVE,
        "loss = loss + self.algorithm.value_coef * value",
        "loss = loss - self.algorithm.value_coef * value",
        CRITIC,
    ),
    (OBJECTIVE, "loss = loss + self.algorithm.value_coef * value", "loss = loss + value", CRITIC),
    (
        OBJECTIVE,
        "loss = loss + self.algorithm.value_coef * value",
        "loss = loss + self.algorithm.value_coef * value.mean()",
        CRITIC,
    ),
    (
        OBJECTIVE,
        "stats.value, data.old_value, data.value_target,",
        "stats.value, data.value_target, data.old_value,",
        CRITIC,
    ),
    (STEP_FILE, "old_value=join(batch.old_value)", "old_value=join(batch.value_target)", CRITIC_STEP),
    (STEP_FILE, "value_target=join(batch.value_target)", "value_target=join(batch.old_value)", CRITIC_STEP),
    (
        STEP_FILE,
        "for x in (batch.reference, batch.teacher))\n            stats",
        "for x in (None, batch.teacher))\n            stats",
        CRITIC_STEP,
    ),
    (OBJECTIVE, "            return stats.kl", "            return -stats.kl", CRITIC_STEP),
    (STEP_BATCH, "torch.cat(hidden).to(device)", "torch.cat(hidden[::-1]).to(policy.device)", CRITIC_STEP),
    (
        STEP_BATCH,
        "{i.trajectory: x for i, x in zip(items, pieces, strict=True)",
        "{i.trajectory: pieces[0] for i, x in zip(items, pieces, strict=True)",
        CRITIC_STEP,
    ),
    (POLICY, "self.value_head(hidden_KD.float())", "self.value_head(hidden_KD.detach().float())", CRITIC_STEP),
    (POLICY, "self.value_head(hidden_KD.float())", "self.value_head(hidden_KD.float().roll(1, 0))", CRITIC_STEP),
    (POLICY, "        nn.init.zeros_(parameter)", "        pass", CRITIC_STEP),
    (
        POLICY,
        "divergence(hidden_KD, x.hidden_KD, self.head, x.head, ",
        "divergence(x.hidden_KD, hidden_KD, x.head, self.head, ",
        CRITIC_STEP,
    ),
    (POLICY, "self.head, x.head, x.divergence", "self.head, self.head, x.divergence", CRITIC_STEP),
    (REFERENCE, "if not has_adapted_head(self.policy.model):", "if True:", CRITIC_STEP),
    (
        REFERENCE,
        "        with self._first_weights():\n            return self.policy.states(row)",
        "        return self.policy.states(row)",
        CRITIC_STEP,
    ),
    (OPTIM, 'self.parameters |= {f"value_head.{n}": p', 'p = {f"value_head.{n}": p', CRITIC_STEP),
    (SAMPLE, "lam=algorithm.gae_lambda)", "lam=1.0)", STEP_OF_RL),
    (
        SAMPLE,
        's.trajectory.finish == "length" and algorithm.truncated != "keep")',
        's.trajectory.finish == "length" and algorithm.truncated == "keep")',
        STEP_OF_RL,
    ),
    (SAMPLE, "return s.score.error is not None or", "return", STEP_OF_RL),
    (SAMPLE, "tuple(s if s.masked else replace(s, value_targets", "tuple(replace(s, value_targets", STEP_OF_RL),
    (CREDIT, "learner.recipe.train.updates_per_step if critic else 1", "1", CRITIC_RUNS),
    (CREDIT, "np.cumsum([0] + [", "np.cumsum([1] + [", STEP_OF_RL),
    (CREDIT, "values=values,\n", "values=None,\n", CRITIC_RUNS),
    (
        CREDIT,
        "explained_variance(estimates, _concatenated(targets))",
        "explained_variance(_concatenated(targets), estimates)",
        STEP_OF_RL,
    ),
    (OBJECTIVE, "acts_on_all = self.algorithm.needs_critic or bool", "acts_on_all = bool", CRITIC_RUNS),
    (LOOP, "batch.old_logp |= before.logp", "batch.old_logp |= before.value", CRITIC_RUNS),
    (LOOP, "batch.old_value = before.value", "batch.old_value = before.logp", CRITIC_RUNS),
    (STEP_BATCH, "if sample.value_targets is not None:", "if False:", CRITIC_RUNS),
    (STEP_BATCH, "torch.tensor(sample.value_targets,", "torch.tensor(sample.token_advantages,", STEP_OF_RL),
    (STATE, "policy.value_head.load_state_dict(io.load_value_head(resume))", "io.load_value_head(resume)", CRITIC_RUNS),
    (
        STATE,
        "Optimizer(policy.model, recipe.optim, policy.value_head, ",
        "Optimizer(policy.model, recipe.optim, None, ",
        CRITIC_RUNS,
    ),
    (CHECKPOINT, "    if saved.value_head:\n", "    if False:\n", CRITIC_RUNS),
    # Demonstrations: sign, mask, mu, gate, denominators, and whose tokens they are.
    (LOSSES, "return -advantage_K * p_K / (p_K + shaping)", "return advantage_K * p_K / (p_K + shaping)", SHOWN),
    (LOSSES, "p_K = logp_K.exp()\n    return -", "p_K = logp_K.detach().exp()\n    return -", SHOWN),
    (LOSSES, "return p_K * (1.0 - p_K)", "return p_K", SHOWN),
    (LOSSES, "math.exp(-mean_entropy) * loss_K", "math.exp(mean_entropy) * loss_K", SHOWN),
    (
        LOSSES,
        "torch.where(tokens.demonstrated, others, loss)",
        "torch.where(~tokens.demonstrated, others, loss)",
        SHOWN,
    ),
    (OBJECTIVE, "(1.0 - self.mu) * loss", "self.mu * loss", SHOWN),
    (OBJECTIVE, "coef = self.algorithm.demonstration_coef if", "coef = 1.0 if", SHOWN),
    (OBJECTIVE, "self.algorithm.entropy_gain * math.exp", "math.exp", SHOWN),
    (OBJECTIVE, "torch.where(data.demonstrated, data.advantage, advantage)", "advantage", SHOWN),
    (STEP_FILE, "total = both if objective.one_mean else of_policy", "total = both", SHOWN),
    (
        STEP_FILE,
        'Denominator.of("token_mean", shown, max_tokens)',
        'Denominator.of("token_mean", own, max_tokens)',
        SHOWN,
    ),
    (STEP_FILE, "aggregate(beside_K * data.demonstrated,", "aggregate(beside_K,", SHOWN),
    (STEP_FILE, "values * ~data.demonstrated", "values", SHOWN),
    (STEP_BATCH, "(use or k >= len(group.samples))", "use", SHOWN),
    (SAMPLE, "s.masked or whole.is_dead", "s.masked", SHOWN),
    (SAMPLE, "1.0 if x else -1.0", "1.0 if x else 0.0", SHOWN),
    (SAMPLE, "_without_samples(g) if g.demonstrations else g", "g", SHOWN),
    ("vlmrl/train/demonstrations.py", "> algorithm.most_solved", "< algorithm.most_solved", SHOWN_RUNS),
    ("vlmrl/setup/demonstrations.py", "score > best[prompt_id][0]", "score < best[prompt_id][0]", SHOWN_RUNS),
    (
        "vlmrl/rollout/sample.py",
        "SamplingRequest(p.begun, num_samples,",
        "SamplingRequest(p.encoded, num_samples,",
        SHOWN_RUNS,
    ),
    (LOSSES, "-a.perception_coef * kl_K if", "a.perception_coef * kl_K if", LOOKS),
    (LOSSES, "-a.perception_coef * (kl_K", "a.perception_coef * (kl_K", LOOKS),
    (LOSSES, "low_var_kl(logp_K, masked_logp_K.detach())", "low_var_kl(logp_K, masked_logp_K)", LOOKS),
    (LOSSES, "low_var_kl(logp_K.detach(), masked_logp_K)", "low_var_kl(logp_K, masked_logp_K)", LOOKS),
    (LOSSES, "low_var_kl(logp_K.detach(), masked_logp_K)", "low_var_kl(masked_logp_K, logp_K.detach())", LOOKS),
    (LOSSES, "(kl_K - kl_K.detach())", "kl_K", LOOKS),
    (LOSSES, "penalty_K - masked_logp_K.detach()", "penalty_K - masked_logp_K", LOOKS),
    (LOSSES, "loss_K + a.perception_entropy * penalty_K", "loss_K - a.perception_entropy * penalty_K", LOOKS),
    (LOSSES, "count = share_of(share, len(dependency_T))", "count = int(share * len(dependency_T))", LOOKS),
    (ADVANTAGES, "ceil(share * number - 1e-9)", "ceil(share * number)", LOOKS),
    (LOSSES, "argsort(dependency_T, descending=True", "argsort(dependency_T, descending=False", LOOKS),
    (LOSSES, "[(mean - low) / (high - low)", "[(high - mean) / (high - low)", LOOKS),
    (LOSSES, "(1.0 - floor) * len(normal) / math.fsum(normal)", "1.0 - floor", LOOKS),
    (OBJECTIVE, "loss = loss * data.weight", "loss = loss * (data.weight > 0)", LOOKS),
    (OBJECTIVE, "(acts_on_all or self.algorithm.perceives_all)", "acts_on_all", LOOKS),
    (STEP_FILE, "masked_logp=logps)", "masked_logp=batch.masked_logp)", LOOKS),
    (STEP_FILE, "masked_logp=join(batch.masked_logp)", "masked_logp=join(batch.old_logp)", LOOKS),
    (
        "vlmrl/train/perception.py",
        "batch.world.gather({i: fmean(x.tolist()) for i, x in own.items()})",
        "[{i: fmean(x.tolist()) for i, x in own.items()}]",
        LOOKS,
    ),
    ("vlmrl/train/perception.py", "first += len(group.everything)", "first += len(group.samples)", LOOKS),
    ("vlmrl/train/perception.py", "part.behind(prompts), masked)", "part, masked)", LOOKING_RUNS),
    (LOOP, "if updates and minibatch.masked_prompt is not None:", "if False:", LOOKING_RUNS),
    (COLLECT, '"changed images", occurrence)', '"changed images")', MASKS),
    ("vlmrl/data/blinded_images.py", "255 * (n < change.share", "255 * (n > change.share", MASKS),
]


def make_copy(folder: Path, file: str, old: str, new: str) -> None:
    """The package and its tests with one change. Raises: SystemExit when the text is not there exactly once."""
    source = (ROOT / file).read_text("utf-8")
    if source.count(old) != 1:
        sys.exit(f"error: the mutant is out of date: {file} holds {old!r} {source.count(old)} times")
    for part in ("vlmrl", "tests", "recipes"):
        shutil.copytree(ROOT / part, folder / part)  # byte code too: it goes by the time a source was written
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / file).write_text(source.replace(old, new), "utf-8")


def passes(folder: Path, tests: list[str]) -> bool:
    """Return whether all tests pass in the copy. A fork runs them, so that torch is loaded once."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        import pytest

        fast = [] if any(test.startswith("tests/e2e") for test in tests) else ["-m", "not slow"]  # all of e2e is slow
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *fast, *tests])))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):  # 1 = a test failed; anything else says nothing about the tests
        sys.exit(f"error: pytest ended with {code} in {folder}")
    return code == 0


def main(mutants: list[Mutant], about: str) -> None:
    """Run the command line over these mutants."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose file, text or replacement contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import hypothesis  # noqa: F401
    import PIL.Image  # noqa: F401
    import psutil  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pydantic  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "vlmrl" for name in sys.modules), "vlmrl must be loaded in the forks alone"
    with tempfile.TemporaryDirectory() as place:
        file, old, *_ = mutants[0]
        make_copy(Path(place), file, old, old)
        if not options.only and not passes(Path(place), sorted({t for m in mutants for t in m[3]})):
            sys.exit("error: the tests do not pass without a mutation")
    survived, results, start = [], [], time.perf_counter()
    for file, old, new, tests in mutants:
        if options.only not in f"{file} {old} {new}":
            continue
        with tempfile.TemporaryDirectory() as place:
            make_copy(Path(place), file, old, new)
            alive = passes(Path(place), tests)
        results.append({"file": file, "text": old, "mutant": new, "caught": not alive})
        survived += [results[-1]] if alive else []
        print(f"{'SURVIVED' if alive else 'caught  '}  {file}: {old!r} -> {new!r}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(results) - len(survived)} of {len(results)} mutants caught in {seconds:.0f} s", file=sys.stderr)
    if options.json:
        print(json.dumps({"mutants": results, "survived": survived, "seconds": round(seconds, 1)}))
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main(MUTANTS, __doc__)
