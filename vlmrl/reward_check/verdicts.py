"""Verdicts on answers and tricks that were tried on a reward, from their scores beside those of honest answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlmrl.reward_check.scores import Floats
from vlmrl.reward_check.text_play import Reading
from vlmrl.reward_check.trick_results import HUNG, SLOW_SECONDS, Attempts, Honest, ProbeResult, Tried
from vlmrl.tasks.attack import CHARS_OF_A_TOKEN, IGNORED, LONG, Attack, Play
from vlmrl.types import RewardInput


def right_against_wrong(honest: Honest, rows: Sequence[RewardInput], play: Play, read: Reading) -> ProbeResult:
    """Compare the right answer with wrong and uninformed ones: the verdict is "blind" if it does not earn more.

    If all rows have the same truth, the uninformed answer may earn as much.
    """
    informed, wrong, blind = (t.mean or 0.0 for t in (honest.informed, honest.wrong, honest.uninformed))
    vary = len({repr(play.right_answer(x)) for x in rows}) > 1  # repr, because values of some types cannot be hashed
    against = f"a wrong one earns {wrong:.3g}, `{honest.uninformed.attack.name}` {blind:.3g}"
    is_more = read.is_read and informed > max(wrong, blind if vary else wrong) + honest.tolerance
    return replace(
        result_of(honest.informed, "" if is_more else "blind", honest.informed.values_R, rows, honest.tolerance),
        name="the right answer",
        idea=f"which must earn most; {against}",
        paid=None,
    )


def judge_all(
    attempts: Attempts, tried: Sequence[Tried], honest: Honest, low_R: Floats, play: Play, *, is_text: bool
) -> list[ProbeResult]:
    """Return the results of the tricks. If the reward ignores names altogether, only that near miss is returned.

    Args:
        low_R: lowest score on each row.
        is_text: the answers are texts: what a wrong one earns is what the author pays for form or length, and two
            answers may earn what one of the two earns.
    """
    wrong, right = honest.wrong.mean or 0.0, honest.informed.mean or 0.0
    meant_R, hedged = (np.fmax(low_R, honest.wrong.values_R), (wrong + right) / 2) if is_text else (low_R, wrong)
    verdicts = [_verdict(attempts, t, honest, low_R, meant_R, hedged, play) for t in tried]
    results = [
        result_of(t, verdict, low_R, attempts.rows, honest.tolerance)
        for t, verdict in zip(tried, verdicts, strict=True)
    ]
    if any(r.name == IGNORED and r.verdict for r in results):
        results = [r for r in results if r.kind != "miss" or r.name == IGNORED]
    return results


def _verdict(
    attempts: Attempts, tried: Tried, honest: Honest, low_R: Floats, meant_R: Floats, hedged: float, play: Play
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
        return "leak" if np.any((gained_R > meant_R + slack) & ~_by_chance(tried, attempts.rows, play)) else ""
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


def _by_chance(tried: Tried, rows: Sequence[RewardInput], play: Play) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each row whether its right answer stands in the trick: then a text without an answer may be right."""

    def stands(x: RewardInput) -> bool:
        right, said = play.right_answer(x), tried.attack.write(x)
        return (
            isinstance(right, str)
            and said is not None
            and bool(re.search(rf"(?<!\w){re.escape(right)}(?!\w)", said.response, re.IGNORECASE))
        )

    return np.asarray([stands(x) for x in rows], dtype=bool)


def result_of(tried: Tried, verdict: str, low_R: Floats, rows: Sequence[RewardInput], slack: float) -> ProbeResult:
    example = _example(tried.attack, rows)
    values = tried.values_R[: tried.attack.most]
    there = ~np.isnan(values)
    best = float(values[there].max()) if there.any() else None
    paid = float(np.mean(values[there] > low_R[: len(values)][there] + slack)) if there.any() else None
    shown = example if len(example) <= 300 else f"{example[:200]} ... ({len(example):,} characters)"
    a = tried.attack
    errors = int((~there).sum()) if tried.error else 0
    return ProbeResult(a.name, a.idea, a.kind, tried.mean, best, paid, errors, tried.error, verdict, shown)


def _example(attack: Attack, rows: Sequence[RewardInput]) -> str:
    return next((x.response for row in rows if (x := attack.write(row)) is not None), "")
