"""Attack on a reward: known tricks, tried with the truths of saved responses and compared with honest answers.

Honest answers are well formed and give three baselines. *Informed* answers are right, *wrong* answers are wrong.
*Uninformed* answers ignore the row: one constant answer is given for all rows; of several constants, the one with the
highest mean score is the baseline. A trick that earns more than the uninformed answer is a hole: a model will learn the
trick instead of the task. A trick is a leak if it earns something although its response contains no answer, breaks the
form or withdraws its answer. Tests of behaviour do not judge values: same scores when repeated, rows independent, time
and memory.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.errors import RewardError
from vlmrl.recipe.schema import Environment
from vlmrl.redaction.redact import excerpt, redact_said
from vlmrl.reward_check.rescore import image_reader
from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Floats
from vlmrl.reward_check.scoring import ChosenReward, SavedResponses
from vlmrl.reward_check.tricks import (
    EPSILON,
    FAILURES,
    HUNG,
    MOST_HUNG,
    SLOW_SECONDS,
    WARNINGS,
    Attempts,
    Honest,
    ProbeResult,
    Reading,
    Tried,
    episode_attacks,
    ranked,
    reading,
    text_probe,
    tracer,
    tried_forms,
)
from vlmrl.rewards.base import RewardSpec, value_bounds
from vlmrl.rewards.scoring import Scorer
from vlmrl.rewards.service_pool import summary_of
from vlmrl.rewards.several import weights_of_parts, without_on_timeout
from vlmrl.tasks import kind_of
from vlmrl.tasks.attack import CHARS_OF_A_TOKEN, IGNORED, LONG, Attack, Belief, Make, Probe, ProbeRows, says
from vlmrl.tasks.truth_kinds import TEXTS
from vlmrl.types import RewardInput, Score

STEADY = {
    "deterministic": (
        "the same call twice",
        "use no random numbers, no clock and no network, and keep nothing between calls",
    ),
    "order_free": ("the rows in reverse", "keep nothing from one row for the next"),
    "alone": ("a row in a call of its own", "score each row by itself: the algorithm compares the samples of a group"),
}
"""Kind of repeated call -> (description of the call, advice if its scores differ from those of the first call)."""
TO_KEEP_MEMORY = "keep nothing of a response in a global, a default argument or a cache without a limit"
ROUNDS = 6
ROUND_SECONDS = 2.0
"""Time limit of a round, in seconds. After a round that takes longer, no further round is run."""
ALONE = 12
GROWTH_MIB = 32.0
"""Growth of memory over all rounds that is still considered normal, in MiB."""


def behaviour(scorer: Scorer, inputs: Sequence[RewardInput]) -> dict[str, Any]:
    """Score the same inputs several times, in reverse order, and some of them in a call of their own.

    Returns: `deterministic` (equal scores in a second call), `order_free` (equal scores in reverse order) and `alone`
        (equal scores in a call of their own): each is True, or the first row whose score differs, as {"row", "first",
        "then"}; `memory_mib`: growth of memory over the rounds, None if memory cannot be read; `leaks`: whether the
        growth is more than GROWTH_MIB and continues in the second half of the rounds; `rounds`: number of rounds.
    """
    first = scorer.score(inputs)
    again = scorer.score(inputs)
    turned = scorer.score(inputs[::-1])[::-1]
    some = range(0, len(inputs), max(1, len(inputs) // ALONE))
    alone = [scorer.score([inputs[i]])[0] for i in some]
    sizes: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        scorer.score(inputs)
        size = resident_mib(scorer)
        if size is not None:
            sizes.append(size)
        if time.perf_counter() - start > ROUND_SECONDS:
            break
    growth = sizes[-1] - sizes[0] if len(sizes) > 1 else None
    return {
        "deterministic": _same(first, again, range(len(inputs))),
        "order_free": _same(first, turned, range(len(inputs))),
        "alone": _same([first[i] for i in some], alone, some),
        "memory_mib": growth,
        "leaks": growth is not None and growth > GROWTH_MIB and sizes[-1] > sizes[len(sizes) // 2],
        "rounds": len(sizes),
    }


def troubles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the problems of a reward's behaviour as (problem, advice).

    Args:
        report: result of `behaviour`.
    """
    problems = []
    for key, (words, to_do) in STEADY.items():
        if report[key] is not True:
            pair = (report[key]["first"], report[key]["then"])
            before, after = (x if isinstance(x, str) else f"{x:.10g}" for x in pair)
            problems.append((f"{words} gives another score: {before} -> {after}", to_do))
    if report["leaks"]:
        grown = f"memory grows by {report['memory_mib']:.0f} MiB over {report['rounds']} rounds"
        problems.append((grown, TO_KEEP_MEMORY))
    return problems


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles of the time of one row, in milliseconds."""
    array = np.asarray([s for s in seconds if s > 0] or [0.0]) * 1000
    return {name: float(np.percentile(array, q)) for name, q in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100))}


def resident_mib(scorer: Scorer) -> float | None:
    """Return the resident memory in MiB of the processes that run the reward; None if it cannot be read."""
    total = 0
    for pid in scorer.pids():
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return None
    return total * 4096 / (1 << 20)


def _same(first: Sequence[Score], then: Sequence[Score], rows: Sequence[int] | range) -> bool | dict[str, Any]:
    for row, a, b in zip(rows, first, then, strict=True):
        failed = a.error is not None or b.error is not None
        equal = (
            (a.error is None) == (b.error is None) if failed else (a.value, dict(a.parts)) == (b.value, dict(b.parts))
        )
        if not equal:
            return {"row": row, "first": _value(a), "then": _value(b)}
    return True


def _value(score: Score) -> float | str:
    return score.error or "failed" if math.isnan(score.value) else score.value


MAX_ROWS = 48
ASKED_FOR = {"relaxed": "never closed"}
"""Argument of a built-in reward -> name of the trick that the argument allows, which is therefore not tried."""
BELIEFS = (0.1, 0.2, 0.3, 0.4)
REPEATS = 8
"""Number of calls with the same answers that measure the noise of a reward. If the first two calls agree, no more."""
REPEATED_ROWS = 12


def probe_source(saved: SavedResponses, facts: ResponseColumns, source: str, choice: ChosenReward) -> dict[str, Any]:
    """Run `probe_reward` with the truths of up to 48 different prompts of a source, spread over the saved responses."""
    code = facts.sources.words.index(source)
    places = np.flatnonzero(facts.sources.codes_N == code)
    _, first = np.unique(facts.prompts.codes_N[places], return_index=True)
    places = places[np.sort(first)] if len(first) > 1 else places
    places = places[np.linspace(0, len(places) - 1, min(MAX_ROWS, len(places))).astype(int)]
    samples = list(saved.pick(facts.rows_N[places].tolist()).values())
    image_of = image_reader(saved)
    inputs = [
        replace(s.input, images=image_of(s.media, s.where)) if choice.spec.needs_images else s.input for s in samples
    ]
    ref = saved.task_ref(source)
    task = ref.make() if ref is not None else None
    kind = (task.kind if task is not None else None) or next((kind_of(x.truth) for x in inputs), TEXTS)
    more = task.attacks(inputs) if task is not None else ()
    echo = task.template if task is not None else ""
    tools = next(iter(saved.environment(source).get("tools", {}).values()), ())
    turns = saved.recipe.environment.turns if saved.recipe is not None else Environment().turns
    return probe_reward(
        choice.spec,
        choice.weights,
        inputs,
        probe=kind.probe,
        trace=tracer(task, source),
        more=more,
        echo=echo,
        limits=saved.limits(),
        episode=(tools, turns) if tools else None,
    )


def probe_reward(
    spec: RewardSpec,
    weights: Mapping[str, float],
    inputs: Sequence[RewardInput],
    *,
    probe: Callable[[ProbeRows], Probe] | None = None,
    trace: Make | None = None,
    more: Sequence[Attack] = (),
    echo: str = "",
    limits: Mapping[str, Any] | None = None,
    episode: tuple[Sequence[Mapping[str, Any]], int] | None = None,
) -> dict[str, Any]:
    """Try the tricks on up to 48 rows.

    Args:
        inputs: one input per row, with its truth, columns and images; the responses are replaced.
        probe: makes the honest answers and tricks of the task, see `RowKind.probe`; None = rows have text answers.
        trace: row -> correct response in the task's own form; ignored if `probe` is given.
        more: additional tricks that the task defines.
        echo: prompt template, used when a row has no stored prompt.
        limits: limits of the scorer: timeout_seconds, memory_mb, workers.
        episode: schemas of the tools, and largest number of turns of an episode; None = responses are one turn.
    Returns: `honest`: mean scores of the informed, wrong and uninformed answers, the name of the best uninformed answer
        (`answer`), and the mean score of each constant that was tried (`all`); `rows`: number of rows; `is_read`:
        whether right answers earn more than wrong ones; `not_probed`: why it is not known how a right answer is written
        (then only failures, and tricks that earn more than any answer, are findings), or ""; `probes`: one ProbeResult
        per trick, as a mapping, with `flagged`; see `ranked`; `skipped`: number of tricks that were not
        tried, because the reward hung on MOST_HUNG others; `flagged`, `warnings`: numbers of both; `behaviour`: see
        `behaviour`, with `milliseconds` per row; `unsteady`: 1 if repeated calls give other scores or rows depend on
        each other, else 0; `services`: the counts of services that the reward asked, in one line, or "".
    Raises: RewardError if the reward fails on all honest answers.
    """
    rows = list(inputs[:MAX_ROWS])
    # on_timeout would give a hanging response a score. Without it, a hang is an error, and the verdict can be "hangs".
    with Scorer(without_on_timeout(spec), weights, **(limits or {})) as scorer:
        attempts = Attempts(scorer, rows)
        paid = weights_of_parts(spec, weights or spec.weights)
        unpaid = [part for part in spec.ranges if not paid.get(part)]
        bounds = value_bounds(spec, weights or spec.weights or dict.fromkeys(spec.ranges, 1.0))
        forms = tried_forms(attempts, echo, bounds[1]) if probe is None else []
        written = probe(ProbeRows(rows, echo, unpaid)) if probe is not None else text_probe(attempts, forms, trace)
        honest = _honest(attempts, written)
        is_certain = probe is not None or (trace is not None and written.right_answer is trace)
        read = Reading(True) if is_certain else reading(attempts, forms, honest, bounds)
        allowed = [
            trick for name, trick in ASKED_FOR.items() for one in spec.singles if one.is_builtin and one.args.get(name)
        ]
        calling = episode_attacks(*episode, written) if episode is not None else []
        attacks = [a for a in (*written.attacks, *more, *calling) if a.name not in allowed]
        tried, skipped = _all_tried(attempts, attacks)
        values = np.array([honest.informed.values_R, honest.wrong.values_R, *(t.values_R for t in tried)])
        low_R = np.where(np.isnan(values), math.inf, values).min(axis=0)
        results = [
            _right_against_wrong(honest, rows, written, read),
            *_judge_all(attempts, tried, honest, low_R, written, is_text=probe is None),
        ]
        tolerance = honest.tolerance
        results += [_result(t, "breaks", low_R, rows, tolerance) for t in (honest.informed, honest.wrong) if t.error]
        results += _broken_truths(attempts, honest, written)
        if written.belief is not None:
            results += _beliefs(attempts, written.belief, honest.tolerance)
        if read.why_not:
            bar = read.record + honest.tolerance
            results = [r for r in results if r.verdict in FAILURES or (r.verdict == "hole" and (r.mean or 0.0) > bar)]
        sample = [honest.informed.attack.write(x) for x in rows[:24]]
        sample += [t.attack.write(rows[0]) for t in tried if not t.error][:24]
        facts = behaviour(scorer, [x for x in sample if x is not None and len(x.response) < 50_000])
        services = summary_of(scorer.services)
    facts["milliseconds"] = milliseconds(attempts.seconds)
    facts["calls"] = len(attempts.seconds)
    steady = [facts[key] is True for key in ("deterministic", "order_free", "alone")]
    flagged = sum(r.flagged for r in results) + int(not all(steady)) + int(facts["leaks"])
    warned = sum(r.verdict in WARNINGS for r in results)
    return {
        "rows": len(rows),
        "honest": {
            "informed": honest.informed.mean,
            "wrong": honest.wrong.mean,
            "uninformed": honest.uninformed.mean,
            "answer": honest.uninformed.attack.name,
            "all": dict(honest.all),
        },
        "is_read": read.is_read,
        "not_probed": read.why_not,
        "skipped": skipped,
        "flagged": flagged,
        "warnings": warned,
        "probes": [{**vars(r), "flagged": r.flagged} for r in ranked(results)],
        "behaviour": facts,
        "unsteady": int(not all(steady)),
        "services": services,
    }


def _all_tried(attempts: Attempts, attacks: Sequence[Attack]) -> tuple[list[Tried], int]:
    """Return (results of the tricks, number of tricks that were not tried)."""
    tried: list[Tried] = []
    for attack in attacks:
        if sum(HUNG in t.error for t in tried) == MOST_HUNG:
            break
        tried.append(attempts.on(attack))
    return tried, len(attacks) - len(tried)


def _honest(attempts: Attempts, probe: Probe) -> Honest:
    """Return the scores of honest answers. Raises: RewardError if the reward fails on every constant answer."""
    tried = [attempts.on(guess) for guess in probe.guesses]
    earned = {t.attack.name: mean for t in tried if (mean := t.mean) is not None}
    if not earned:
        attempts.on(probe.guesses[0], strict=True)
        raise RewardError("the reward fails on every honest answer")
    best = max(earned, key=lambda name: earned[name])
    uninformed = next(t for t in tried if t.attack.name == best)
    informed, wrong = attempts.on(probe.informed), attempts.on(probe.wrong)
    return Honest(informed, wrong, uninformed, earned, _tolerance(attempts, (informed, wrong)))


def _tolerance(attempts: Attempts, honest: Sequence[Tried]) -> float:
    """Return twice the largest difference of one row's scores between repeated calls, at least EPSILON.

    If a reward draws random numbers or calls a service, smaller differences are noise.
    """
    rows = attempts.rows[:REPEATED_ROWS]
    spread = 0.0
    for first in honest:
        if HUNG in first.error:
            continue
        calls = [first.values_R[: len(rows)], attempts.on(first.attack, rows=rows).values_R[: len(rows)]]
        if not np.array_equal(*calls, equal_nan=True):
            calls += [attempts.on(first.attack, rows=rows).values_R[: len(rows)] for _ in range(REPEATS - 2)]
        width_R = np.max(calls, axis=0) - np.min(calls, axis=0)
        spread = max(spread, float(width_R[np.isfinite(width_R)].max(initial=0.0)))
    return max(EPSILON, 2 * spread)


def _right_against_wrong(honest: Honest, rows: Sequence[RewardInput], probe: Probe, read: Reading) -> ProbeResult:
    """Compare the right answer with wrong and uninformed ones: the verdict is "blind" if it does not earn more.

    If all rows have the same truth, the uninformed answer may earn as much.
    """
    informed, wrong, blind = (t.mean or 0.0 for t in (honest.informed, honest.wrong, honest.uninformed))
    vary = len({repr(probe.right_answer(x)) for x in rows}) > 1  # repr, because values of some types cannot be hashed
    against = f"a wrong one earns {wrong:.3g}, `{honest.uninformed.attack.name}` {blind:.3g}"
    is_more = read.is_read and informed > max(wrong, blind if vary else wrong) + honest.tolerance
    return replace(
        _result(honest.informed, "" if is_more else "blind", honest.informed.values_R, rows, honest.tolerance),
        name="the right answer",
        idea=f"which must earn most; {against}",
        paid=None,
    )


def _judge_all(
    attempts: Attempts, tried: Sequence[Tried], honest: Honest, low_R: Floats, probe: Probe, *, is_text: bool
) -> list[ProbeResult]:
    """Return the results of the tricks. If the reward ignores names altogether, only that near miss is returned.

    Args:
        low_R: lowest score on each row.
        is_text: the answers are texts: what a wrong one earns is what the author pays for form or length, and two
            answers may earn what one of the two earns.
    """
    wrong, right = honest.wrong.mean or 0.0, honest.informed.mean or 0.0
    meant_R, hedged = (np.fmax(low_R, honest.wrong.values_R), (wrong + right) / 2) if is_text else (low_R, wrong)
    verdicts = [_verdict(attempts, t, honest, low_R, meant_R, hedged, probe) for t in tried]
    results = [
        _result(t, verdict, low_R, attempts.rows, honest.tolerance) for t, verdict in zip(tried, verdicts, strict=True)
    ]
    if any(r.name == IGNORED and r.verdict for r in results):
        results = [r for r in results if r.kind != "miss" or r.name == IGNORED]
    return results


def _verdict(
    attempts: Attempts, tried: Tried, honest: Honest, low_R: Floats, meant_R: Floats, hedged: float, probe: Probe
) -> str:
    """Return the verdict on a trick. What a difference in length explains is no hole and no leak.

    Args:
        meant_R: score of each row up to which a text without an answer is no leak.
        hedged: score up to which two answers are no leak.
    """
    values_R, slack, kind = tried.values_R, honest.tolerance, tried.attack.kind
    earned, wrong, known_R = tried.mean, honest.wrong.mean or 0.0, honest.informed.values_R
    if tried.error:
        return "hangs" if HUNG in tried.error else "breaks"
    if tried.slowest > SLOW_SECONDS:
        return "slow"
    if kind == "fair":
        return "unfair" if np.any(values_R < known_R - slack) else ""
    if kind in ("miss", "loose"):
        is_paid = np.any((values_R >= known_R - slack) & (known_R > low_R + slack))
        return ("blind" if kind == "miss" else "lenient") if is_paid else ""
    if earned is None:
        return ""
    if tried.attack.turned is not None:  # two answers, one of them right: they may earn what one of the two earns
        wrong = hedged
        if earned <= hedged + slack:
            return ""
    bar = np.mean(honest.uninformed.values_R[~np.isnan(values_R)]) + slack
    if earned > bar and earned > bar + np.mean(_by_length(attempts, tried, honest.uninformed)):
        return "hole"
    if kind == "void" and np.any(values_R > meant_R + slack):
        gained_R = values_R - _by_length(attempts, tried, honest.wrong)
        return "leak" if np.any((gained_R > meant_R + slack) & ~_by_chance(tried, attempts.rows, probe)) else ""
    if kind == "broken" and earned > wrong + slack:
        return "leak" if earned > wrong + slack + np.mean(_by_length(attempts, tried, honest.wrong)) else ""
    return ""


def _by_length(attempts: Attempts, tried: Tried, other: Tried) -> Floats:
    """Return by how much a row's scores of two responses may differ because of their lengths, a token more or less.

    It is measured on filler without an answer. A text as long as LONG is no ordinary answer: nothing explains its pay.
    """

    def filler(is_longer: bool) -> Attack:
        def make(x: RewardInput) -> str | None:
            written = [t.attack.write(x) for t in (tried, other)]
            sizes = [len(one.response) for one in written if one is not None]
            if len(sizes) < len(written) or sizes[0] > LONG // 2:
                return None
            size = max(sizes) + CHARS_OF_A_TOKEN if is_longer else max(1, min(sizes) - CHARS_OF_A_TOKEN)
            return ("so " * size)[:size]

        return Attack("filler", "", "void", make)

    return np.nan_to_num(np.abs(np.subtract(*(attempts.on(filler(longer)).values_R for longer in (False, True)))))


def _by_chance(tried: Tried, rows: Sequence[RewardInput], probe: Probe) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each row whether its right answer stands in the trick: then a text without an answer may be right."""

    def stands(right: Any, said: RewardInput | None) -> bool:
        pattern = rf"(?<!\w){re.escape(right)}(?!\w)" if isinstance(right, str) else None
        return bool(pattern and said and re.search(pattern, said.response, re.IGNORECASE))

    return np.asarray([stands(probe.right_answer(x), tried.attack.write(x)) for x in rows], dtype=bool)


def _result(tried: Tried, verdict: str, low_R: Floats, rows: Sequence[RewardInput], slack: float) -> ProbeResult:
    """Return the result of a trick. Its example is the row on which it earns most, loses most or first fails."""
    values = tried.values_R[: tried.attack.most]
    there = ~np.isnan(values)
    telling = np.where(there, -values if verdict == "unfair" else values, math.inf if tried.error else -math.inf)
    written = [(i, x) for i in np.argsort(-telling, kind="stable") if (x := tried.attack.write(rows[i])) is not None]
    example, of_example = "", ""
    if written:
        i, x = written[0]
        truth = json.dumps(dict(rows[i].truth), ensure_ascii=False, default=str)
        example, of_example = x.response, f"truth {excerpt(truth, 120, hide=redact_said)}"
        of_example += f"; it earns {values[i]:.4g}" if there[i] else ""
    best = float(values[there].max()) if there.any() else None
    paid = float(np.mean(values[there] > low_R[: len(values)][there] + slack)) if there.any() else None
    shown = excerpt(example, 300, mark=f" ... ({len(example):,} characters)", hide=redact_said)
    a = tried.attack
    errors = int((~there).sum()) if tried.error else 0
    return ProbeResult(a.name, a.idea, a.kind, tried.mean, best, paid, errors, tried.error, verdict, shown, of_example)


ANY_TRUTHS: Mapping[str, Callable[[RewardInput], Mapping[str, Any]]] = {
    "no truth at all": lambda x: {},
    "a truth of None": lambda x: {**dict.fromkeys(x.truth), "ground_truth": None},
}
"""Broken truths that a reward of any task should refuse: name -> function that makes the truth from a row's input."""


def _broken_truths(attempts: Attempts, honest: Honest, probe: Probe) -> list[ProbeResult]:
    """Score honest answers with broken truths. A reward should fail on each: a silent 0 would waste hours of training.

    If the scores stay the same, the reward does not read the truth; this is no finding.
    """
    results = []
    for name, broken in {**ANY_TRUTHS, **probe.broken_truths}.items():
        said = [honest.informed.attack.make(x) or "" for x in attempts.rows]
        rows = [replace(x, truth=broken(x), response=text) for x, text in zip(attempts.rows, said, strict=True)]
        attack = Attack(name, "an honest answer to a row with such a truth", "broken", lambda x: x.response)
        tried = attempts.on(attack, rows=rows)
        scored = ~np.isnan(tried.values_R)
        silent = scored & (np.abs(tried.values_R - honest.informed.values_R) > honest.tolerance)
        verdict = "silent" if silent.any() else ""
        best = float(tried.values_R[scored].max()) if scored.any() else None
        results.append(
            ProbeResult(
                name, attack.idea, "truth", tried.mean, best, None, int((~scored).sum()), tried.error, verdict, said[0]
            )
        )
    return results


def _beliefs(attempts: Attempts, question: Belief, slack: float) -> list[ProbeResult]:
    """Check that stating one's true belief has the highest expected score; a belief is a probability of yes in BELIEFS.

    If not, the reward is no proper scoring rule and teaches extreme answers.
    """
    yes = np.asarray([question.holds(x) for x in attempts.rows])
    if yes.all() or not yes.any():
        return []
    grid = (0.0, *BELIEFS, 0.5)
    paid = {p: attempts.on(Attack("belief", "", "guess", says(question.write(p)))).values_R for p in grid}
    if any(np.isnan(v).any() for v in paid.values()):
        return []
    worst: tuple[float, float, float] = (0.0, 0.0, 0.0)
    for belief in BELIEFS:
        expected = {p: belief * float(v[yes].mean()) + (1 - belief) * float(v[~yes].mean()) for p, v in paid.items()}
        best = max(expected, key=lambda p: expected[p])
        worst = max(worst, (expected[best] - expected[belief], belief, best))
    loss, belief, best = worst
    gain = f"with a belief of {belief:g}, the answer {best:g} earns {loss:.3f} more" if loss > slack else ""
    verdict = "improper" if loss > slack else ""
    idea = gain or "stating one's belief pays best"
    return [ProbeResult("half sure", idea, "belief", None, None, None, 0, "", verdict, question.write(best))]
