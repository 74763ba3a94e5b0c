"""Causes found in the updates: learning rate, gradients of the parts, differences of engine and trainer, validation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

from vlmrl.diagnose.run_facts import GRADIENT, RunFacts, identity, unbeaten_start
from vlmrl.diagnose.thresholds import (
    Cause,
    again,
    check_again,
    counted,
    limit,
    look_again,
    onset,
    percent,
    reward_check,
    rows_of,
)

SEEING = ("vision", "connector")
"""Parts of a model that are used only for images."""
MIN_UPDATES = 3
"""Minimum number of updates after which greedy answers are expected to change."""


def stopped(facts: RunFacts) -> Iterator[Cause]:
    """Report a run that failed."""
    error = facts.manifest.error
    if facts.manifest.status != "failed" or not error:
        return
    what = f"the run failed at step {len(facts.train)}: {error}"
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
        hint = "a smaller learning rate, a KL term (algo.kl_coef = 0.01) or fewer updates per step prevent this"
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
    if facts.train and facts.manifest.kind == "rl" and not facts.updates:
        what = f"no update was made in {counted(len(facts.train), 'step')}: there was nothing to learn from"
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
    yield Cause(
        "validation_is_training",
        "error" if certain else "warning",
        f"validation rows are {how}: validation measures memory",
        again(facts, f"data.0.validation={'0.1' if sources and Path(sources[0].path).suffix else 'validation'}"),
        0.8,
        ["`vlmrl prep` makes splits that share no image; name the held-out one in [[data]] validation"],
        rows,
    )


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


def _unmoved(facts: RunFacts) -> str:
    """Return a sentence that all greedy validations gave equal numbers although updates were made; "" if they did not.

    Return "" also if all responses earn nothing or are cut off, because their numbers are equal in any case.
    """
    lines = [{k: v for k, v in line.items() if k.startswith("eval/")} for line in facts.validation]
    updates = max(facts.series("optim/updates"), default=0)
    if len(lines) < 2 or updates < MIN_UPDATES:
        return ""
    first = {k: v for k, v in lines[0].items() if k != "eval/is_best"}
    telling = float(first.get("eval/reward") or 0) > 0 and float(first.get("eval/truncated") or 0) < 1
    same = all({k: v for k, v in line.items() if k != "eval/is_best"} == first for line in lines)
    return (
        f"{len(lines)} greedy validations over {updates:.0f} updates agree in every number" if telling and same else ""
    )


def _collapse(facts: RunFacts) -> str:
    ends = facts.ends("reward/mean")
    if ends is None or ends[0] <= 0 or ends[1] > limit("collapse") * ends[0]:
        return ""
    return f"mean reward {ends[0]:.3f} in the first third of the steps, {ends[1]:.3f} in the last"
