"""Causes in the recipe, in the updates, and in lasting changes during a run.

Terms outweigh the reward, updates are clipped, parts have no weight; the learning rate, gradients of the parts,
differences of engine and trainer, validation; a rise of the reward without a rise of the accuracy.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from vlmrl.algo.algo_keys import CELLS
from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.diagnose.run_facts import (
    ANSWER_PARTS,
    GRADIENT,
    Response,
    RunFacts,
    identity,
    read_responses,
    spread_steps,
    unbeaten_start,
)
from vlmrl.diagnose.signs import MAX_RESPONSES, PREFIX, Sampled, Sign, find_signs, measure_health, since
from vlmrl.diagnose.thresholds import (
    Cause,
    Level,
    again,
    check_again,
    is_number,
    learned,
    limit,
    look_again,
    onset,
    percent,
    reward_check,
    rows_of,
)
from vlmrl.errors import VlmrlError
from vlmrl.store.runs import checkpoint_option
from vlmrl.untrusted import number_of

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
    coef = facts.recipe.algo.entropy_coef if facts.recipe else 0.0
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
        bounds = [f"algo.{key} = {value:g}" for key, value in _bounds(algo)]
        row = ALGORITHMS.get(algo.name) if algo and bounds else None  # a sequence's ratio has far narrower bounds
        usual = [f"algo.{key}={value:g}" for key, value in _bounds(row)]
        command = again(facts, *(usual or ["train.updates_per_step=1"]))
        yield Cause("ratio_clipped", "warning", what, command, 0.8, bounds)
    if weights and fmean(weights) <= limit("importance_weight"):
        what = f"the importance weights leave {percent(fmean(weights))} of the gradient (mean weight of a token)"
        cap = facts.recipe.algo.importance_cap if facts.recipe else None
        bounds = [f"algo.importance_cap = {cap:g}; {USUAL_CAP:g} is usual"] if cap is not None else []
        narrow = cap is not None and cap < USUAL_CAP
        command = again(facts, f"algo.importance_cap={USUAL_CAP}") if narrow else check_again(facts)
        yield Cause("importance_masks", "error", what, command, 0.9, bounds)


def _bounds(algo: Any) -> list[tuple[str, float]]:
    return [(key, bound) for key in ("clip_low", "clip_high") if (bound := getattr(algo, key, None)) is not None]


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
    command = again(facts, f"algo.overlong_tokens={max(1, most // 5)}", "algo.overlong_penalty=1.0")
    yield Cause("overlong", level, what, command, 0.9, [penalty_words], rows_of(reached))


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
        level: Level = "error" if weight < 0 else "warning"
        what = f"reward.weights: `{part}` = {weight:g}: a right answer {how}"
        command, evidence = look_again(facts, f"reward.weights.{part}=1.0"), [f"other weights: {others}"] * bool(others)
        rows = rows_of([r for r in facts.responses if r.source == source])
        yield Cause("unpaid", level, what, command, 0.9, evidence, rows)


SEEING = ("vision", "connector")
"""Parts of a model that are used only for images."""
MIN_UPDATES = 3
"""Minimum number of updates after which greedy answers are expected to change."""


def stopped(facts: RunFacts) -> Iterator[Cause]:
    """Report a run that failed."""
    error = facts.manifest.error
    if facts.manifest.status != "failed" or not error:
        return
    what = f"the run failed after {number_of(len(facts.train), 'step')}: {error}"
    if error.startswith("reward `"):
        yield Cause("failing_reward", "error", what, look_again(facts), 0.95)
    else:
        yield Cause("failed", "error", what, f"vlmrl runs show {shlex.quote(facts.key)}", 0.85)


def learning_rate(facts: RunFacts) -> Iterator[Cause]:
    """Report a learning rate of 0, or one far from the usual values for a model of this size."""
    recipe, rates = facts.recipe, facts.series("optim/lr")
    if recipe is None or not rates:
        return
    peak, real, lora = recipe.optim.lr, max(rates), recipe.lora is not None
    if real == 0:
        what = f"the learning rate is 0 in all {len(rates)} updates: the weights never change"
        setting = f"the recipe says optim.lr = {peak:g}, schedule = {recipe.optim.schedule}"
        command = again(facts, "optim.schedule=constant")
        yield Cause("lr_small", "error", what, command, 1.0, [setting])
        return
    factor = limit("lora_factor") if lora else 1.0
    unmoved = _unmoved(facts)
    evidence = [unmoved] if unmoved else []
    if real < 0.1 * peak:
        warmup = recipe.optim.warmup_steps
        what = f"the learning rate reached only {real:.2g}: warmup_steps = {warmup}, but {len(facts.train)} steps"
        yield Cause("lr_small", "warning", what, again(facts, "optim.warmup_steps=0"), 0.6, evidence)
    if peak <= limit("lr_small_warning") * factor:
        far = peak <= limit("lr_small_error") * factor
        what = f"optim.lr = {peak:g} is far too small"
        moved = f"AdamW moves a weight by about that per update: by {peak * len(rates):.1g} in {len(rates)} updates"
        command = again(facts, f"optim.lr={1e-6 * factor:g}")
        yield Cause("lr_small", "error" if far else "warning", what, command, 1.0 if far else 0.7, [moved, *evidence])
    elif unmoved and any(facts.series(GRADIENT)):
        what = f"the updates change nothing (optim.lr = {peak:g})"
        yield Cause("lr_small", "warning", what, again(facts, f"optim.lr={10 * peak:g}"), 0.6, evidence)
    yield from _too_large(facts, peak, lora)


def _too_large(facts: RunFacts, peak: float, lora: bool) -> Iterator[Cause]:
    size = sum(facts.parts[0].values())
    small = not lora and size < limit("big_model")  # also if the size is not known
    most = limit("lr_large_small_model") if small else limit("lr_large_lora" if lora else "lr_large_full")
    broken = _collapse(facts)
    failed = facts.manifest.status == "failed" and "not finite" in (facts.manifest.error or "")
    norms = facts.series(GRADIENT)
    if peak > most and facts.manifest.kind == "rl":
        level = "error" if broken or failed or peak >= limit("lr_large_error") else "warning"
        size_words = f" for {size / 1e6:,.3g} M trained parameters" if size else ""
        what = f"optim.lr = {peak:g} is far too large{size_words}: up to {most:g} is usual"
        evidence = [broken] * bool(broken) + [f"gradient norm {max(norms, default=0.0):.3g} at most"] * bool(norms)
        weight = 0.95 if level == "error" else 0.6
        yield Cause("lr_large", level, what, again(facts, f"optim.lr={most / 10:g}"), weight, evidence)
    elif broken:
        algo = facts.recipe.algo if facts.recipe else None
        kl = "a larger algo.kl_coef" if algo and algo.kl_coef else "a KL term (algo.kl_coef = 0.01)"
        hint = f"a smaller learning rate, {kl} or fewer updates per step prevent this"
        command, rows = again(facts, f"optim.lr={peak / 3:g}"), rows_of(facts.responses[-3:])
        yield Cause("collapse", "warning", f"the policy collapsed: {broken}", command, 0.7, [hint], rows)


def gradients(facts: RunFacts) -> Iterator[Cause]:
    """Report gradients of 0 (in the whole model or in one trained part), and frozen parts."""
    norms, check = facts.series(GRADIENT), check_again(facts)
    if norms and not any(norms):
        what = f"the gradient is 0 in all {len(norms)} updates: the weights never change"
        yield Cause("zero_gradient", "error", what, check, 0.9)
        return
    for name in dict.fromkeys(k for line in facts.train for k in line if k.startswith(f"{GRADIENT}/")):
        values = facts.series(name)
        if values and not any(values):
            part = name.removeprefix(f"{GRADIENT}/")
            what = f"no gradient reaches the part `{part}`: 0 in {len(values)} updates ({fmean(norms):.3g} in all)"
            blind = part in SEEING and bool(facts.responses) and not any(r.images for r in facts.responses)
            if blind:
                what += ": no row has an image"
            yield Cause("no_images" if blind else "zero_gradient", "note" if blind else "error", what, check, 0.85)
    trained, frozen = facts.parts
    if frozen and facts.recipe is not None and facts.recipe.lora is None:
        share = sum(trained.values()) / max(1, sum(trained.values()) + sum(frozen.values()))
        writer = any(part.startswith(("language", "embeddings")) for part in frozen)
        what = f"frozen: {', '.join(frozen)}; {percent(share)} of the parameters are trained ({', '.join(trained)})"
        evidence = ["the parts that write the answers are not trained"] if writer else []
        command = again(facts, "model.freeze=[]")
        yield Cause("frozen", "warning" if writer else "note", what, command, 0.8 if writer else 0.5, evidence)


def no_updates(facts: RunFacts) -> Iterator[Cause]:
    """Report a run in which no step made an update."""
    if facts.train and not facts.updates:
        what = f"no update was made in {number_of(len(facts.train), 'step')}: there was nothing to learn from"
        yield Cause("no_updates", "error", what, reward_check(facts), 0.4)


def engine_gap(facts: RunFacts) -> Iterator[Cause]:
    """Report a difference between the log-probs of the engine and of the trainer."""
    gaps = facts.series("policy/sampler_gap_mean")
    if not gaps or facts.recipe is None:
        return
    dtype, rollout, gap = facts.recipe.model.dtype, facts.recipe.rollout, median(gaps)
    allowed = limit("gap_float32" if dtype == "float32" else "gap_bfloat16")
    if gap <= allowed:
        return
    most, effective = facts.series("policy/sampler_gap_max"), facts.series("policy/sampler_ess")
    evidence = [f"largest {max(most, default=gap):.3g} nats; up to {allowed:g} on average is usual in {dtype}"]
    evidence += [f"effective sample size {percent(median(effective))} of the tokens"] if effective else []
    evidence += onset(facts, "policy/sampler_gap_mean", lambda nats: nats > allowed)
    command = check_again(facts)
    if rollout.top_p < 1 or rollout.top_k > 0:
        evidence.append(f"rollout.top_p = {rollout.top_p:g}, top_k = {rollout.top_k}: samples do not follow the policy")
        command = again(facts, "rollout.top_p=1.0", "rollout.top_k=0")
    elif any(facts.series("rollout/version_lag")):
        evidence.append("rollout.overlap: the engine is one step behind")
        command = again(facts, "rollout.overlap=false")
    elif rollout.engine == "vllm":
        command = again(facts, "rollout.engine=torch")
    what = f"engine and trainer disagree by {gap:.3g} nats per token (median over {len(gaps)} steps)"
    level = "error" if gap > limit("gap_error") * allowed else "warning"
    yield Cause("engine_gap", level, what, command, min(1.0, 0.5 + gap / allowed / 100), evidence)


def entropy(facts: RunFacts) -> Iterator[Cause]:
    """Report that the entropy fell to almost 0: the policy became certain of every token."""
    ends, dead = facts.ends("policy/entropy"), facts.ends("rollout/dead_group_share")
    if ends is None or ends[1] >= limit("entropy_low") or ends[1] >= limit("entropy_fall") * ends[0]:
        return
    harm = dead is not None and dead[1] >= limit("dead_warning") and dead[1] > dead[0]
    what = f"entropy fell from {ends[0]:.3g} to {ends[1]:.3g} nats per token: the samples of a prompt become equal"
    evidence = [f"dead groups {percent(dead[0])} at the start, {percent(dead[1])} at the end"] if dead else []
    evidence += onset(facts, "policy/entropy", lambda nats: nats < limit("entropy_low"))
    command = again(facts, "algo.clip_high=0.28", "algo.entropy_coef=0.001")
    yield Cause("entropy_collapse", "warning" if harm else "note", what, command, 0.75, evidence)


def validation(facts: RunFacts) -> Iterator[Cause]:
    """Report validation rows that are also trained on. The best checkpoint is then one that memorized them."""
    shared = facts.validated & {identity(r.prompt_id, r.images) for r in facts.responses}
    sources, datasets = facts.recipe.data if facts.recipe else [], facts.manifest.datasets
    prints = [str(d["fingerprint"]) for d in datasets if d.get("fingerprint")]
    apart = any("(validation)" in str(d.get("name")) for d in datasets)
    certain = True
    if any(d.validation == d.split for d in sources):
        how = "of the split that is trained on"
    elif apart and len(prints) > len(set(prints)):
        how = "in a file with the same content as the training rows"
    elif shared:
        certain = len(shared) >= limit("shared_rows") * len(facts.validated)
        how = f"partly rows that are trained on: {len(shared)} of {len(facts.validated)} were among those sampled"
    else:
        return
    rows = rows_of([r for r in facts.responses if identity(r.prompt_id, r.images) in shared])
    what = f"validation rows are {how}: validation measures memory"
    command = again(facts, f"data.0.validation={'0.1' if sources and Path(sources[0].path).suffix else 'validation'}")
    evidence = ["`vlmrl prep` makes splits that share no image; name the held-out one in [[data]] validation"]
    level: Level = "error" if certain else "warning"
    yield Cause("validation_is_training", level, what, command, 0.8, evidence, rows)


def no_better_validation(facts: RunFacts) -> Iterator[Cause]:
    """Note that no validation was better than that of the start weights."""
    start, best, last = unbeaten_start(facts.run), facts.manifest.best, facts.validation[-1:]
    if start is None or best is None or not last:
        return
    what = f"no validation was better than the start: {best.metric} {best.value:.3f} at step 0"
    later = last[0].get("eval/metric")
    if isinstance(later, (int, float)):
        what += f", {later:.3f} at step {last[0]['step']}, the last"
    yield Cause("no_better_validation", "note", what, shlex.join(["vlmrl", "report", facts.key]), 0.9)


def risen_loss(facts: RunFacts) -> Iterator[Cause]:
    """Report a validation loss that rose again after its best: the run memorizes the rows that it trains on."""
    best, lost = facts.manifest.best, checkpoint_option(facts.run)
    if best is None or best.metric != "loss" or best.step == 0:
        return
    later = [n for line in facts.validation if line["step"] > best.step and is_number(n := line.get("eval/metric"))]
    if len(later) < 2 or min(later[-2:]) < (1 + limit("loss_rise")) * best.value:
        return
    what = f"the validation loss rose again: {best.value:.3f} at step {best.step}, {later[-1]:.3f} at the end"
    command = again(facts, f"train.steps={best.step}") if lost else shlex.join(["vlmrl", "merge", facts.key])
    evidence = [] if lost else [f"the checkpoint of step {best.step} is kept: merge takes it"]
    evidence.append("more rows, fewer steps or a smaller optim.lr prevent this")
    yield Cause("overfitting", "warning", what, command, 0.8, evidence)


def _unmoved(facts: RunFacts) -> str:
    """Return a sentence that all greedy validations are equal although updates were made between them, else "".

    Return "" also if all responses earn nothing or are cut off, because their numbers are equal in any case.
    """
    lines = [{k: v for k, v in line.items() if k.startswith("eval/")} for line in facts.validation]
    steps = [line["step"] for line in facts.validation]
    updates = sum(min(steps) <= line["step"] < max(steps) for line in facts.updates) if steps else 0
    if updates < MIN_UPDATES:
        return ""
    first = {k: v for k, v in lines[0].items() if k != "eval/is_best"}
    telling = float(first.get("eval/reward") or 0) > 0 and float(first.get("eval/truncated") or 0) < 1
    same = all({k: v for k, v in line.items() if k != "eval/is_best"} == first for line in lines)
    return (
        f"{len(lines)} greedy validations over {number_of(updates, 'step')} with an update agree in every number"
        if telling and same
        else ""
    )


def _collapse(facts: RunFacts) -> str:
    """Return a sentence that the mean reward fell to less than half, by more than steps differ; "" if it did not."""
    ends, means = facts.ends("reward/mean"), facts.series("reward/mean")
    if ends is None or len(means) < limit("learned_steps") or ends[0] <= 0 or ends[1] > limit("collapse") * ends[0]:
        return ""
    third = len(means) // 3
    error = sqrt((variance(means[:third]) + variance(means[-third:])) / third)
    if ends[0] - ends[1] < limit("collapse_certainty") * error:
        return ""
    return f"mean reward {ends[0]:.3f} in the first third of the steps, {ends[1]:.3f} in the last"


MOST_STEPS = 40
"""Maximum number of steps whose rollouts are measured if the metrics of a run have no `health/...`."""
EXAMPLES = 2
"""Number of example responses from before a change; the same number is taken from after it."""
LEVELS: dict[str, tuple[Level, float]] = {
    "reward_without_accuracy": ("error", 1.0),
    "one_response": ("error", 0.9),
    "repetition": ("error", 0.85),
    "characters": ("error", 0.8),
    "grown_length": ("warning", 0.8),
    "no_signal": ("warning", 0.7),
    "all_cut": ("error", 0.5),
}


def lasting_changes(facts: RunFacts) -> Iterator[Cause]:
    """Report the signs that training warns of (diagnose/signs.py), with responses from before and after each change."""
    for sign in find_signs(_lines(facts), facts.validation):
        level, weight = LEVELS[sign.name]
        rise = learned(facts) if sign.name == "no_signal" else ""
        evidence = [f"{rise}: there may be nothing left to learn"] if rise else []
        level, what = "note" if rise else level, sign.what + since(sign)
        yield Cause(sign.name, level, what, _command(facts, sign), weight, evidence, _examples(facts, sign))


def _command(facts: RunFacts, sign: Sign) -> str:
    if sign.name == "no_signal":
        return again(facts, "algo.filter=spread")
    if sign.name == "all_cut":
        most = facts.recipe.rollout.max_new_tokens if facts.recipe else 256
        return look_again(facts, f"rollout.max_new_tokens={4 * most}")
    return reward_check(facts, "--probe")


def _lines(facts: RunFacts) -> Sequence[Mapping[str, Any]]:
    """Return the train lines with their `health/...` metrics.

    If the run did not log these metrics, they are measured from the rollouts of some steps, and the lines of these
    steps are returned.
    """
    if facts.manifest.kind != "rl" or any(n.startswith(PREFIX) for line in facts.train[-1:] for n in line):
        return facts.train
    files = facts.run.rollout_files()
    lines = {line["step"]: line for line in facts.train if line["step"] in files}
    if len(lines) < 2 * limit("sign_steps"):
        return facts.train
    measured = []
    for step in spread_steps(sorted(lines), MOST_STEPS):
        try:
            responses = read_responses(files[step], step, most=MAX_RESPONSES)
        except VlmrlError as error:
            facts.notes.append(f"{files[step].name} was left out: {error.message}")
            continue
        measured.append({**lines[step], **measure_health([_sampled(r) for r in responses])})
    return measured


def _sampled(r: Response) -> Sampled:
    formed = all(value != 0 for name, value in r.parts.items() if "format" in name.lower())
    truth = json.dumps(dict(r.truth), sort_keys=True) if r.truth else ""
    return Sampled(r.group, r.prompt_id, truth, r.text, r.tokens, r.cut, None if r.error else r.score, formed)


def _examples(facts: RunFacts, sign: Sign) -> list[dict[str, Any]]:
    """Return the responses with the highest scores, of different prompts: before the change, and at the last step."""
    files = facts.run.rollout_files()
    before = [step for step in files if sign.step is not None and step < sign.step]
    steps = {"before": before[-1:], "after": [] if not files else [max(files)]}
    rows: list[dict[str, Any]] = []
    for when, chosen in steps.items():
        for step in chosen:
            try:
                responses = read_responses(files[step], step)
            except VlmrlError:
                continue  # `read_facts` adds the note about an unreadable file
            ranked = sorted((r for r in responses if r.error is None), key=lambda r: -r.score)
            prompts = {r.prompt_id: r for r in reversed(ranked)}
            best = sorted(prompts.values(), key=lambda r: -r.score)[:EXAMPLES]
            shown = rows_of(best)
            rows += [{**row, "where": f"{when}, {row['where']}"} for row in shown] if before else shown
    return rows
