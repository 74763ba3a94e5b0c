"""Signs that a run does not learn what is intended, such as a rise of the reward without a rise of the accuracy.

A sign, such as one response to all prompts, is a lasting change of the metrics in the train lines of a run. Training
warns of it while it runs, and `runs diagnose` afterwards. A change is reported if it is large, is many standard errors
of the noise between steps, and is still present at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrl.diagnose.health import CHARACTERS, PREFIX
from vlmrl.diagnose.thresholds import limit, percent
from vlmrl.diagnose.trends import History
from vlmrl.store.metrics import counted

Z95 = 1.96
"""Half the width of a 95% interval, in standard errors."""


@dataclass(frozen=True)
class Sign:
    """Lasting change of a metric that shows a problem.

    Args:
        name: short name that never changes.
        words: description in a few words, for the printed line of a step.
        what: description as a sentence.
        step: step of the first line after the change; None if it is not known or there was no change.
        before, after: value of the changed metric before and after the change.
    """

    name: str
    words: str
    what: str
    step: int | None = None
    before: float = math.nan
    after: float = math.nan


def find_signs(lines: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]] = ()) -> list[Sign]:
    """Return the signs that are present at the last line of a run's metrics, the most serious first.

    Args:
        lines: train lines.
        validation: validation lines; with them, a reward that was hacked within a few steps is recognised, too.
    """
    history = History(lines)
    apart = [*_reward_without_accuracy(history)] or [*_validated_without_accuracy(validation)]
    rules = (_one_response, _repetition, _characters, _length, _streaks)
    return [*apart, *(sign for rule in rules for sign in rule(history))]


def since(sign: Sign) -> str:
    """Return a text with the step of the change, counted from 1 as in all output; "" if it is not known."""
    return "" if sign.step is None else f", from step {counted(sign.step)} on"


def warning_of(signs: Sequence[Sign]) -> str:
    """Return `words` of the signs in one line; "" if there are no signs."""
    return "; ".join(sign.words for sign in signs)


def _fixed(value: float) -> str:
    """Format a number with three digits after the point; a number that rounds to zero has no minus sign."""
    return f"{round(float(value), 3) + 0.0:.3f}"


def _reward_without_accuracy(h: History) -> Iterator[Sign]:
    """Yield a sign if the reward rose and the accuracy did not."""
    paid, right = h.paid, h.contrast(h.accuracy)
    if paid is None or right is None or h.no_better is None:
        return
    room = right.before < limit("accuracy_learned")
    place = h.step_at(paid.lasting(limit("reward_rise") * h.scale) & h.no_better & room, paid)
    if place is None:
        return
    a, b = float(right.before[place]), float(right.after[place])
    fell = a - b > max(limit("accuracy_fall"), limit("sign_certainty") * float(right.error[place]))
    rewards = f"the reward rose from {_fixed(paid.before[place])} to {_fixed(paid.after[place])}"
    what = f"{rewards} while the accuracy {'fell' if fell else 'stayed'}: {_fixed(a)} before, {_fixed(b)} after"
    yield Sign(
        "reward_without_accuracy",
        f"reward up, accuracy {'down' if fell else 'flat'}",
        what,
        h.number(place),
        float(paid.before[place]),
        float(paid.after[place]),
    )


def _validated_without_accuracy(lines: Sequence[Mapping[str, Any]]) -> Iterator[Sign]:
    """Yield a sign if the reward rose from the first to the last validation and the accuracy did not.

    The 95% intervals of both are taken into account.
    """
    ends = [f"eval/{name}{end}" for name in ("reward", "accuracy") for end in ("", "_low", "_high")]
    measured = [n for n in lines if all(isinstance(n.get(e), (int, float)) and math.isfinite(n[e]) for e in ends)]
    if len(measured) < 2:
        return
    first, last = measured[0], measured[-1]
    (paid, paid_error), (right, right_error) = (_difference(first, last, name) for name in ("reward", "accuracy"))
    scale = max(abs(first["eval/reward"]), abs(last["eval/reward"]), abs(paid))
    share = paid / scale if scale else 0.0
    uncertain = limit("accuracy_certainty") * right_error
    unmoved = right <= uncertain or right < limit("accuracy_nothing") * share
    room = first["eval/accuracy"] < limit("accuracy_learned")
    rose = share >= limit("reward_rise") and paid > limit("accuracy_certainty") * paid_error
    if not (rose and room and unmoved and right + uncertain < limit("accuracy_share") * share):
        return
    fell = -right > max(limit("accuracy_fall"), uncertain)
    a, b = (
        f"{_fixed(line['eval/reward'])} with an accuracy of {_fixed(line['eval/accuracy'])}" for line in (first, last)
    )
    yield Sign(
        "reward_without_accuracy",
        f"validation: reward up, accuracy {'down' if fell else 'flat'}",
        f"the validation reward rose from {a} (step {first['step']}) to {b} (step {last['step']})",
        None,
        first["eval/reward"],
        last["eval/reward"],
    )


def _difference(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return (last minus first, its standard error) of a validation metric, from its 95% intervals."""
    errors = [(line[f"eval/{name}_high"] - line[f"eval/{name}_low"]) / (2 * Z95) for line in (first, last)]
    return last[f"eval/{name}"] - first[f"eval/{name}"], math.hypot(*errors)


def _one_response(h: History) -> Iterator[Sign]:
    """Yield a sign if different prompts get the same response although they ask for different answers."""
    alike = h.contrast(h.series(f"{PREFIX}alike_share"))
    if alike is None or alike.last < limit("alike_share") or h.learned:
        return
    truth, chars = h.recent(f"{PREFIX}same_truth_share"), h.recent(f"{PREFIX}characters_mean")
    if math.isnan(truth):  # no truth is known: short responses may rightly be the same
        risen = alike.lasting(limit("alike_rise_no_truth")) & (alike.before < limit("alike_before"))
        if chars < limit("long_text"):
            return
    elif truth > limit("same_truth"):
        return
    else:
        risen = alike.lasting(limit("alike_rise"))
    place = h.step_at(risen, alike)
    from_start = not math.isnan(truth) and h.recent("rollout/dead_group_share") >= limit("dead_warning")
    if place is None and not from_start:
        return
    was = f", {percent(float(alike.before[place]))} before" if place is not None else ""
    what = f"{percent(alike.last)} of the responses are alike, whatever the prompt{was}"
    words = f"responses alike {alike.last:.0%}"
    if place is None:
        yield Sign("one_response", words, what, after=alike.last)
    else:
        yield Sign("one_response", words, what, h.number(place), float(alike.before[place]), alike.last)


def _repetition(h: History) -> Iterator[Sign]:
    """Yield a sign if responses began to repeat themselves, in words or in characters."""
    repeats = h.contrast(h.series(f"{PREFIX}repeating_share"))
    right = h.contrast(h.accuracy)
    if repeats is None or repeats.last < limit("repeating_share"):
        return
    where = repeats.lasting(limit("repeating_rise"))
    if right is not None:
        where &= right.rise <= limit("accuracy_certainty") * right.error
    place = h.step_at(where, repeats)
    if place is not None:
        a = float(repeats.before[place])
        what = f"{percent(repeats.last)} of the responses repeat themselves, {percent(a)} before"
        words = f"responses repeat themselves {repeats.last:.0%}"
        yield Sign("repetition", words, what, h.number(place), a, repeats.last)


def _characters(h: History) -> Iterator[Sign]:
    """Yield a sign for the class of characters that grew most, if it replaced others while the reward rose."""
    paid, chars = h.paid, h.contrast(h.series(f"{PREFIX}characters_mean"))
    if paid is None or chars is None or not chars.last >= limit("long_text"):
        return
    grown: list[tuple[float, Sign]] = []
    for name, words in CHARACTERS.items():
        share = h.contrast(h.series(f"{PREFIX}{name}"))
        if share is None:
            continue
        where = share.lasting(limit("class_rise")) & paid.lasting(0.0)
        if h.no_better is not None:
            where &= h.no_better
        elif share.last < limit("class_share") or name == "non_ascii_share":
            continue  # no accuracy is known: another form or language may be intended
        place = h.step_at(where, share)
        if place is not None:
            a = float(share.before[place])
            short = f"{words} {a:.0%} -> {share.last:.0%}"
            what = f"{words} grew from {percent(a)} to {percent(share.last)} of the characters as the reward rose"
            grown.append((share.last - a, Sign("characters", short, what, h.number(place), a, share.last)))
    yield from (sign for _, sign in sorted(grown, key=lambda one: -one[0])[:1])


def _length(h: History) -> Iterator[Sign]:
    """Yield a sign if responses became longer, longer ones earn more, and the accuracy did not rise."""
    paid, length = h.paid, h.contrast(h.series("rollout/response_tokens_mean"))
    follows = h.recent(f"{PREFIX}length_score_correlation")
    if paid is None or length is None or not follows >= limit("length_warning"):
        return
    where = length.lasting((limit("length_growth") - 1) * np.abs(length.before)) & paid.lasting(0.0)
    if h.no_better is not None:
        where &= h.no_better
    place = h.step_at(where, length)
    if place is not None:
        a = float(length.before[place])
        what = f"responses grew from {a:.0f} to {length.last:.0f} tokens, and longer ones of a group are paid more"
        what += f" (correlation {follows:+.2f})"
        yield Sign(
            "grown_length", f"length {a:.0f} -> {length.last:.0f}, which pays", what, h.number(place), a, length.last
        )


def _streaks(h: History) -> Iterator[Sign]:
    """Yield a sign if none of the last steps had a signal, and another if all their responses were cut off."""
    for name, metric, words, what in (
        (
            "no_signal",
            "rollout/dead_group_share",
            "all groups dead for {} steps",
            "every group had equal scores, {} steps in a row: they taught nothing",
        ),
        (
            "all_cut",
            "rollout/truncated_share",
            "all responses cut off for {} steps",
            "every response was cut off at the token limit, {} steps in a row",
        ),
    ):
        full = h.series(metric) == 1
        broken = np.flatnonzero(~full)
        length = len(full) - (int(broken[-1]) + 1 if len(broken) else 0)
        if length >= limit("streak") and not (name == "no_signal" and h.learned):
            first = h.lines[len(full) - length].get("step", len(full) - length)
            step = int(first) if length < len(full) else None
            yield Sign(name, words.format(length), what.format(length), step, after=1.0)
