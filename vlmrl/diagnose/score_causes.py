"""Causes in the scores: constant truths or parts, groups without contrast, wrong or long answers that earn more.

A reward that gave no score is one, too. Labels in another layout are in response_causes.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev

from vlmrl.diagnose.response_causes import TRUE_ANSWERS, agrees
from vlmrl.diagnose.run_facts import ANSWER_PARTS, Response, RunFacts
from vlmrl.diagnose.signs import length_score_correlation
from vlmrl.diagnose.thresholds import (
    Cause,
    Level,
    again,
    learned,
    limit,
    look_again,
    onset,
    percent,
    reward_check,
    rows_of,
    short,
)
from vlmrl.reward_check.texts import answer_of
from vlmrl.rewards.base import RIGHT, is_binary
from vlmrl.tasks import kind_of
from vlmrl.types import NO_SCORE
from vlmrl.untrusted import number_of


def constant_truth(facts: RunFacts) -> Iterator[Cause]:
    """Report that all rows have the same truth, or that no row has a truth."""
    truths = {r.prompt_id: json.dumps(dict(r.truth), sort_keys=True) for r in facts.responses}
    if len(truths) < limit("few_samples") or len(set(truths.values())) > 1:
        return
    only = short(next(iter(truths.values())), 120)
    what = f"all {len(truths)} sampled rows have the same truth: {only}"
    yield Cause("constant_truth", "error", what, look_again(facts), 0.9, [], rows_of(facts.responses))


def constant_part(facts: RunFacts) -> Iterator[Cause]:
    """Report parts of the reward that have one value for all responses, or that never apply.

    Parts with the same value are reported as one cause.
    """
    if len(facts.responses) < limit("few_samples"):
        return
    weights, most = facts.weights(facts.responses[0].source), facts.most_possible(facts.responses[0].source) or 1.0
    low, high = facts.score_range
    if low == high and 0 < high != facts.most_possible(facts.responses[0].source):
        texts = len({r.text for r in facts.responses})
        what = f"every response earns {high:g}: {texts} different texts, one score"
        yield Cause("constant_reward", "error", what, reward_check(facts, "--probe"), 1.0, [], rows_of(facts.responses))
    names_of_value: dict[float | None, list[str]] = {}
    for name in facts.part_names:
        values = facts.part(name)
        is_constant = not values or (len(values) >= limit("few_samples") and min(values) == max(values))
        if is_constant and facts.paid(facts.responses[0].source, name):
            names_of_value.setdefault(values[0] if values else None, []).append(name)
    blind = _unlike(facts)
    for value, names in names_of_value.items():
        share = sum(weights.get(name, 0.0) for name in names) / most
        parts = f"the part{'s' * (len(names) > 1)} {', '.join(f'`{n}`' for n in names)}"
        what, level = f"{parts}: applies to no response: its truth is missing in every row", "warning"
        if value is not None:
            what = f"{parts}: {value:g} for all {len(facts.responses):,} responses"
        if value == 1 and not blind:
            what, level = f"{what} (learned, or too easy to tell them apart)", "note"
        elif blind and value is not None:
            what += f", although {blind[0]}" if value > 0 else f", also for the {blind[1]}"
        evidence, weight = [f"{percent(share)} of the weights of the reward"] * bool(share), 0.5 + 0.4 * min(1.0, share)
        command, rows = reward_check(facts, "--probe"), rows_of(facts.responses)
        yield Cause("constant_part", level, what, command, weight, evidence, rows)


def _unlike(facts: RunFacts) -> tuple[str, str] | None:
    """Return which responses should not earn the same, the bad and the others in words; None if none stand out."""
    cut = fmean(r.cut for r in facts.responses)
    if 0.05 < cut < 0.95:
        return f"{percent(cut)} of them are cut off", f"{percent(1 - cut)} that are not cut off"
    empty = sum(not r.text.strip() for r in facts.responses)
    return (f"{empty} {'is' if empty == 1 else 'are'} empty", "others, which are not empty") if empty else None


def no_contrast(facts: RunFacts) -> Iterator[Cause]:
    """Report groups in which no sample is right, all samples are right, or all have the same score."""
    groups = facts.groups
    if not groups:
        return
    wrong = [g for g in groups if not any(_right(r, facts) for r in g)]
    perfect = [g for g in groups if all(_perfect(r, facts) for r in g)]
    dead = len(facts.dead) / len(groups)
    series = facts.series("rollout/dead_group_share")
    over_all = f"dead groups: {percent(fmean(series))} over all steps" if series else f"dead groups: {percent(dead)}"
    if len(wrong) >= limit("one_sided") * len(groups):
        evidence = [
            over_all,
            "nothing shows the model a better answer: start from `vlmrl sft`, or from easier rows "
            "(`vlmrl try RECIPE --filter 0.1:0.9 --out FILE` keeps those of medium difficulty)",
        ]
        doubt = facts.own_reward and facts.score_range == (0.0, 0.0)
        evidence += ["no response earns more than 0: does the reward read what the responses write?"] if doubt else []
        what = f"{percent(len(wrong) / len(groups))} of the groups have no right response at all"
        command, rows = reward_check(facts, "--probe") if doubt else look_again(facts), rows_of([g[0] for g in wrong])
        yield Cause("all_wrong", "error", what, command, len(wrong) / len(groups), evidence, rows)
    elif len(perfect) >= limit("one_sided") * len(groups):
        first = [g for g in groups if g[0].step == groups[0][0].step]
        at_start = fmean(all(_perfect(r, facts) for r in g) for g in first) >= limit("one_sided")
        share, rows = len(perfect) / len(groups), rows_of([g[0] for g in perfect])
        level, why, command = "note", "the task is learned", f"vlmrl eval {shlex.quote(facts.key)}"
        if at_start:
            command = f"{look_again(facts)} --filter 0.1:0.9 --out harder"
            level, why = "error", "the rows are too easy"
        what = f"{percent(share)} of the groups have right responses only: {why}"
        yield Cause("all_right", level, what, command, share, [over_all], rows)
    elif dead >= limit("dead_warning"):
        ends, rise = facts.ends("rollout/dead_group_share"), learned(facts)
        fresh = ends is not None and ends[0] < limit("dead_warning") and bool(rise)
        level = "note" if fresh else "error" if dead >= limit("dead_error") else "warning"
        what = f"{percent(dead)} of the groups have equal scores and teach nothing"
        what += f" any more: {rise}" if fresh else ""
        evidence = [
            over_all,
            *onset(facts, "rollout/dead_group_share", lambda share: share >= limit("dead_warning")),
            f"all wrong {percent(len(wrong) / len(groups))}, right {percent(len(perfect) / len(groups))}; "
            "more samples per prompt or a higher temperature split such groups, too",
        ]
        command, rows = again(facts, "algo.filter=spread"), rows_of([g[0] for g in facts.dead])
        yield Cause("dead_groups", level, what, command, dead, evidence, rows)


def pays_wrong(facts: RunFacts) -> Iterator[Cause]:
    """Report that wrong answers earn more than right ones to the same prompt, as with a wrong or inverted truth."""
    formed = [[r for r in group if r.parts.get("format", 1.0) != 0] for group in facts.groups]
    judged = [[(r, truly_right(r)) for r in group] for group in formed]
    pairs = [(good, bad) for group in judged for good, yes in group if yes for bad, no in group if no is False]
    if len(pairs) < limit("few_samples"):
        return
    won = fmean(0.5 * ((good.score > bad.score) - (good.score < bad.score)) + 0.5 for good, bad in pairs)
    if won > limit("agreement"):
        return
    good, bad = min(pairs, key=lambda pair: pair[0].score - pair[1].score)
    what = f"wrong answers are paid more: right ones win {percent(won)} of {len(pairs):,} pairs (one right, one wrong)"
    evidence = ["right and wrong are judged by the truth of the row, not by the reward"]
    yield Cause("pays_wrong", "error", what, reward_check(facts), 1.0, evidence, rows_of([good, bad]))


def truly_right(r: Response) -> bool | None:
    """Return whether a response's answer equals the truth of its row; None if this cannot be decided.

    The score is not used.
    """
    if (answer := answer_of(r.text)) is None:
        return None
    if (is_right := kind_of(r.truth).is_right) is not None:
        return is_right(r.truth, answer)
    true = next((r.truth[name] for name in TRUE_ANSWERS if isinstance(r.truth.get(name), (str, int))), None)
    return None if true is None else answer.strip() == str(true).strip() or bool(agrees(answer, str(true)))


def pays_length(facts: RunFacts) -> Iterator[Cause]:
    """Report that length and score correlate within groups: longer (or shorter) responses earn more."""
    live = [g for g in facts.groups if max(r.score for r in g) > min(r.score for r in g)]
    whole = [[r for r in g if not r.cut and r.parts.get("format", 1.0) != 0] for g in live]
    usable = [g for g in whole if len(g) > 1 and _spread(g) >= limit("length_spread")]
    count = sum(map(len, usable))
    if count < limit("length_least"):
        return
    rho = length_score_correlation([(i, r.tokens, r.score) for i, g in enumerate(usable) for r in g])
    if rho is None or abs(rho) < limit("length_warning"):
        return
    ends = facts.ends("rollout/response_tokens_mean")
    grown = (
        [f"mean length {ends[0]:.0f} tokens in the first third of the steps, {ends[1]:.0f} in the last"] if ends else []
    )
    group = max(usable, key=lambda g: max(r.tokens for r in g) - min(r.tokens for r in g))
    parts = {n: _part_correlation(usable, n) for n in facts.part_names if facts.paid(group[0].source, n)}
    best = max(parts, key=lambda n: abs(parts[n]), default=None)
    evidence = [f"the part `{best}` correlates most with length: {parts[best]:+.2f}"] if best and len(parts) > 1 else []
    level: Level = "error" if abs(rho) >= limit("length_error") else "warning"
    what = f"{'longer' if rho > 0 else 'shorter'} responses score higher in a group: correlation {rho:+.2f} of {count}"
    rows = rows_of([end(group, key=lambda r: r.tokens) for end in (min, max)])
    yield Cause("pays_length", level, what, reward_check(facts, "--probe"), abs(rho), evidence + grown, rows)


def _right(r: Response, facts: RunFacts) -> bool:
    """Return whether a response is right.

    If no part measures this as yes or no, the answer is compared with the truth. If that is not possible, a response
    counts as right if its score is above the lowest score of the run.
    """
    part = next((p for p in (_named(facts), *ANSWER_PARTS) if p and r.parts.get(p) is not None), None)
    if part is not None and is_binary(facts.part(part)):
        return r.parts[part] == RIGHT
    is_right = kind_of(r.truth).is_right
    if is_right is not None and (answer := answer_of(r.text)) is not None:
        return r.score > 0 and is_right(r.truth, answer) is True
    low, high = facts.score_range
    return r.score > low if high > low else r.score > 0


def _named(facts: RunFacts) -> str | None:
    """Return the part that `reward.accuracy` names."""
    return facts.recipe.reward.accuracy if facts.recipe is not None else None


def _perfect(r: Response, facts: RunFacts) -> bool:
    if (part := _named(facts)) and r.parts.get(part) is not None and is_binary(facts.part(part)):
        return r.parts[part] == RIGHT
    most = facts.most_possible(r.source)
    if most:
        return r.score >= limit("right_score") * most
    low, high = facts.score_range  # the largest possible score is not known
    return low < high == r.score


def _spread(group: Sequence[Response]) -> float:
    lengths = [r.tokens for r in group]
    return pstdev(lengths) / max(1.0, fmean(lengths))


def _part_correlation(groups: Sequence[Sequence[Response]], name: str) -> float:
    values = [(i, r.tokens, v) for i, g in enumerate(groups) for r in g if (v := r.parts.get(name)) is not None]
    return length_score_correlation(values) or 0.0


def failing_reward(facts: RunFacts) -> Iterator[Cause]:
    """Report a reward that raised an error, timed out, or returned a value that is not a score."""
    failed = [r for r in facts.responses if r.failed]
    number = max(len(failed), round(sum(facts.series("reward/errors"))))
    if not number:
        return
    last = [line for r in failed[:1] for line in (r.error or "").strip().splitlines()[-1:]]
    what = f"the reward failed for {number_of(number, 'sample')}, left out"
    yield Cause("failing_reward", "error", what, reward_check(facts), 0.9, last, rows_of(failed))


def service_down(facts: RunFacts) -> Iterator[Cause]:
    """Report a service that the reward calls, if it did not answer and samples were left out for this reason."""
    lost = [r for r in facts.responses if r.status == "unavailable"]
    num_unavailable, sampled = sum(facts.series("reward/unavailable")), sum(facts.series("rollout/samples"))
    number = max(len(lost), round(num_unavailable))
    ended = facts.manifest.error or ""
    if ended.startswith((NO_SCORE["unavailable"], "the environment was unavailable")):
        yield Cause("service_down", "error", f"the run stopped: {ended}", reward_check(facts), 0.95, [], rows_of(lost))
        return
    if not number:
        return
    share = number / max(number, sampled, len(facts.responses))
    level: Level = "note" if share < limit("unavailable_warning") else "warning"
    if share >= limit("unavailable_error"):
        level = "error"
    steps = [line["step"] for line in facts.train if line.get("reward/unavailable")]
    evidence = [f"{percent(share)} of the samples, in {number_of(len(steps), 'step')}"] if steps else []
    evidence += [line for r in lost[:1] for line in (r.error or "").strip().splitlines()[-1:]]
    what = f"the reward was unavailable for {number_of(number, 'sample')}, left out"
    yield Cause("service_down", level, what, reward_check(facts), 0.7, evidence, rows_of(lost))
