"""Causes found in the recipe: terms that outweigh the reward, clipped updates, parts without weight."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from statistics import fmean, median

from vlmrl.algo.algo_keys import CELLS
from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.diagnose.run_facts import ANSWER_PARTS, GRADIENT, RunFacts
from vlmrl.diagnose.thresholds import Cause, Level, again, check_again, limit, look_again, percent, rows_of

EPSILON = 1e-8
"""AdamW's epsilon, added to the square root of the second moment. Gradients far below it hardly change a weight."""
USUAL_CAP: float = CELLS["importance_cap"].default
PARAMETERS = 1e6
"""Number of trained parameters that is assumed if the run does not log it.

It is small, so that the rule rather misses a problem than reports one that does not exist.
"""


def kl_term(facts: RunFacts) -> Iterator[Cause]:
    """Report a KL term that is so strong that the policy stays at the start weights."""
    coefs = facts.series("policy/kl_coef")
    if facts.recipe is None or not coefs or max(coefs) < limit("kl_warning"):
        return
    coef, kl = max(coefs), facts.series("loss/kl") or facts.series("policy/kl_in_reward")
    level: Level = "error" if coef >= limit("kl_error") else "warning"
    evidence = (
        [f"the KL is {fmean(kl):.2g} nats per token; times the coefficient: {coef * fmean(kl):.2g}"] if kl else []
    )
    what = f"algo.kl_coef = {coef:g}: the KL to the start weights outweighs the reward (0.001 to 0.04 is usual)"
    yield Cause("kl_large", level, what, again(facts, "algo.kl_coef=0.01"), 0.95, evidence)


def entropy_term(facts: RunFacts) -> Iterator[Cause]:
    """Report an entropy bonus (or, if negative, a penalty) that outweighs the reward."""
    coef = facts.recipe.algo.entropy_coef if facts.recipe and facts.manifest.kind == "rl" else 0.0
    if abs(coef) < limit("entropy_coef") and coef >= 0:
        return
    does = "certain of every token" if coef < 0 else "random"
    level: Level = "error" if abs(coef) >= limit("entropy_coef") else "warning"
    evidence = []
    if ends := facts.ends("policy/entropy"):
        evidence = [f"entropy {ends[0]:.3g} nats per token in the first third of the steps, {ends[1]:.3g} in the last"]
    what = f"algo.entropy_coef = {coef:g} makes the policy {does}, whatever the reward (0 to 0.01 is usual)"
    yield Cause("entropy_coef", level, what, again(facts, "algo.entropy_coef=0.0"), 1.0, evidence)


def clipped_gradient(facts: RunFacts) -> Iterator[Cause]:
    """Report gradients that are clipped so far that AdamW's epsilon outweighs them."""
    norms, recipe = [n for n in facts.series(GRADIENT) if n], facts.recipe
    if recipe is None or not norms:
        return
    most, size = recipe.optim.max_grad_norm, sum(facts.parts[0].values()) or PARAMETERS
    if median(norms) <= most or most / sqrt(size) >= EPSILON:
        return
    what = f"optim.max_grad_norm = {most:g} clips every update to nothing: the gradient norm is {median(norms):.3g}"
    share_words = f"a parameter's share is then {most / sqrt(size):.1g}, below AdamW's epsilon of {EPSILON:g}"
    yield Cause("clipped_gradient", "error", what, again(facts, "optim.max_grad_norm=1.0"), 1.0, [share_words])


def clipped_ratio(facts: RunFacts) -> Iterator[Cause]:
    """Report that most tokens have no gradient: their probability ratio is clipped, or their importance weight is 0."""
    shares, weights = facts.series("policy/clip_share"), facts.series("policy/importance_weight")
    if shares and fmean(shares) >= limit("clip_share"):
        what = f"the ratio of {percent(fmean(shares))} of the tokens is clipped: they teach nothing (1 to 5% is usual)"
        algo = facts.recipe.algo if facts.recipe else None
        bounds = [
            f"{key} = {value:g}" for key in ("clip_low", "clip_high") if (value := getattr(algo, key, None)) is not None
        ]
        row = ALGORITHMS.get(algo.name) if algo and bounds else None  # a sequence's ratio has far narrower bounds
        usual = [
            f"algo.{key}={value:g}"
            for key in ("clip_low", "clip_high")
            if (value := getattr(row, key, None)) is not None
        ]
        command = again(facts, *(usual or ["train.updates_per_step=1"]))
        yield Cause("ratio_clipped", "warning", what, command, 0.8, [f"algo.{line}" for line in bounds])
    if weights and fmean(weights) <= limit("importance_weight"):
        what = f"the importance weights leave {percent(fmean(weights))} of the gradient (mean weight of a token)"
        cap = facts.recipe.algo.importance_cap if facts.recipe else None
        bounds = [f"algo.importance_cap = {cap:g}; {USUAL_CAP:g} is usual"] if cap is not None else []
        narrow = cap is not None and cap < USUAL_CAP
        command = again(facts, f"algo.importance_cap={USUAL_CAP}") if narrow else check_again(facts)
        yield Cause("importance_masks", "error", what, command, 0.9, bounds)


def weight_decay(facts: RunFacts) -> Iterator[Cause]:
    """Report weight decay that shrinks the weights faster than the gradients change them."""
    if facts.recipe is None or facts.recipe.optim.weight_decay == 0:
        return
    decay, left = facts.recipe.optim.weight_decay, 1.0
    for rate in facts.series("optim/lr"):
        left *= max(0.0, 1 - rate * decay)
    if 1 - left < limit("weights_lost"):
        return
    what = f"optim.weight_decay = {decay:g} takes {percent(1 - left)} off every weight matrix over the run"
    loss_words = f"up to {max(facts.series('optim/lr')) * decay:.2g} of a weight in one update (lr x weight_decay)"
    yield Cause("weight_decay", "error", what, again(facts, "optim.weight_decay=0.01"), 1.0, [loss_words])


def overlong(facts: RunFacts) -> Iterator[Cause]:
    """Report a length penalty that applies to responses of usual length, or that outweighs the rest of the reward."""
    if facts.recipe is None or not (tokens := facts.recipe.algo.overlong_tokens):
        return
    algo, most = facts.recipe.algo, facts.recipe.rollout.max_new_tokens
    penalty = CELLS["overlong_penalty"].default if algo.overlong_penalty is None else algo.overlong_penalty
    reached = [r for r in facts.responses if r.tokens > most - tokens]
    low, high = facts.score_range
    share = len(reached) / max(1, len(facts.responses))
    if share < limit("overlong_share") or penalty * tokens == 0:
        return
    lost = fmean(penalty * min(1.0, (r.tokens - (most - tokens)) / tokens) for r in reached)
    what = f"algo.overlong_tokens = {tokens} of {most} punishes {percent(share)} of the responses for their length"
    penalty_words = f"they lose {lost:.3g} on average; scores reach from {low:.3g} to {high:.3g}"
    level: Level = "error" if lost > high - low else "warning"
    yield Cause(
        "overlong",
        level,
        what,
        again(facts, f"algo.overlong_tokens={max(1, most // 5)}", "algo.overlong_penalty=1.0"),
        0.9,
        [penalty_words],
        rows_of(reached),
    )


def few_pixels(facts: RunFacts) -> Iterator[Cause]:
    """Report that images are reduced so far that little detail is left."""
    if facts.recipe is None or facts.recipe.model.max_pixels >= limit("few_pixels"):
        return
    most = facts.recipe.model.max_pixels
    stored = [pixels for r in facts.responses for pixels in r.pixels]
    large = [pixels for pixels in stored if pixels >= limit("shrunk") * most]
    if len(large) < 0.5 * max(1, len(stored)):
        return
    what = f"model.max_pixels = {most} shrinks images to {percent(most / median(large))} of their pixels"
    size_words = f"the median image has {median(large):.0f} pixels; `vlmrl try` writes them as the model sees them"
    command = look_again(facts, f"model.max_pixels={max(int(median(large)), 3136)}")
    yield Cause("few_pixels", "warning", what, command, 0.7, [size_words])


def unpaid(facts: RunFacts) -> Iterator[Cause]:
    """Report a weight of zero or below for the part that says whether a response is right."""
    for source in dict.fromkeys(r.source for r in facts.responses):
        weights = facts.weights(source)
        parts = [p for p in ANSWER_PARTS if p in weights]
        if not parts or any(weights[p] > 0 for p in parts):
            continue
        part, weight = parts[0], weights[parts[0]]
        how = "costs: wrong answers are paid more" if weight < 0 else "earns nothing"
        others = ", ".join(f"{p} = {w:g}" for p, w in weights.items() if w and p != part)
        yield Cause(
            "unpaid",
            "error" if weight < 0 else "warning",
            f"reward.weights: `{part}` = {weight:g}: a right answer {how}",
            look_again(facts, f"reward.weights.{part}=1.0"),
            0.9,
            [f"other weights: {others}"] if others else [],
            rows_of([r for r in facts.responses if r.source == source]),
        )
