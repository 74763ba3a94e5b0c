"""Signs that a run does not learn what is intended, and the metrics of texts (`health/...`) among which they are found.

A sign, such as one response to all prompts, or a rise of the reward without a rise of the accuracy, is a lasting change
of the metrics in the train lines of a run. Training warns of it while it runs, and `runs diagnose` afterwards. A change
is reported if it is large, is many standard errors of the noise between steps, and is still present at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vlmrl.diagnose.thresholds import limit, percent
from vlmrl.reward_check.scores import Floats, Ints
from vlmrl.reward_check.texts import measure_texts
from vlmrl.rewards.base import NAMES as ACCURACY_NAMES
from vlmrl.store.metrics import counted

MOST_GAPS = 0.2
"""Maximum share of lines that may lack a metric. Such a line gets the value of the line before it."""

WATCHED = (
    "step",
    "reward/mean",
    "reward/accuracy",
    "rollout/dead_group_share",
    "rollout/truncated_share",
    "rollout/response_tokens_mean",
)


def is_watched(metric: str) -> bool:
    """Return whether the signs are derived from the metric."""
    return metric in WATCHED or metric.startswith(("health/", "reward/part/"))


@dataclass(frozen=True)
class Contrast:
    """Means of a series before and after each of T steps at which a change may have begun. [T] each, except `last`.

    Args:
        before: mean over a window of lines before the step.
        after: mean from the step to the end.
        error: standard error of the difference of both means.
        last: mean of the last few lines of the series.
    """

    before: Floats
    after: Floats
    error: Floats
    last: float

    @property
    def rise(self) -> Floats:
        return self.after - self.before

    def lasting(self, least: float | Floats) -> Any:
        """Return [T]: whether the series rose significantly, by at least `least`, and its last values are still higher.

        The last values must also exceed the mean before the step by at least `least`.
        """
        certain = self.rise > limit("sign_certainty") * self.error
        return certain & (self.rise >= least) & (self.last - self.before >= least)

    @property
    def certainty(self) -> Floats:
        """Rise divided by its standard error, [T]. If the standard error is 0, 1e-9 is used."""
        return self.rise / np.maximum(self.error, 1e-9)


class History:
    """Train lines of a run as series of numbers, one per metric; NaN where a line lacks the metric."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = lines

    def series(self, name: str) -> Floats:
        values = (line.get(name) for line in self.lines)
        return np.asarray(
            [float(v) if isinstance(v, (int, float)) and math.isfinite(v) else math.nan for v in values], dtype=float
        )

    @cached_property
    def reward(self) -> Floats:
        return self.series("reward/mean")

    @cached_property
    def accuracy(self) -> Floats:
        """Mean accuracy per step. Older runs lack this metric; there it is the part of the reward with such a name."""
        named = self.series("reward/accuracy")
        parts = (self.series(f"reward/part/{name}") for name in ACCURACY_NAMES)
        return named if np.isfinite(named).any() else next((p for p in parts if np.isfinite(p).any()), named)

    @cached_property
    def format(self) -> Floats:
        """Mean of the format part per step, in [0, 1]; NaN if the reward has no such part."""
        names = {n for line in self.lines[-1:] for n in line if n.startswith("reward/part/") and "format" in n.lower()}
        series = self.series(min(names)) if names else np.full(len(self.lines), math.nan)
        inside = np.nanmin(series, initial=0.0) >= 0 and np.nanmax(series, initial=1.0) <= 1
        return series if inside else np.full(len(self.lines), math.nan)

    @cached_property
    def scale(self) -> float:
        """Scale by which rises of the reward are divided: the larger of its largest absolute mean and its range."""
        values = self.reward[np.isfinite(self.reward)]
        return float(max(np.abs(values).max(), np.ptp(values))) if len(values) else 0.0

    @cached_property
    def steps(self) -> Ints:
        """Indices of the lines at which a change may have begun, [T]: there are enough lines before and after them."""
        least = int(limit("sign_before"))
        return np.arange(least, max(least, len(self.lines) - int(limit("sign_steps")) + 1))

    def contrast(self, values: Floats) -> Contrast | None:
        """Return the contrast of a series at each of `steps`; None if it has many gaps or too few lines.

        Args:
            values: [N], one value per line; NaN where a line lacks the metric.
        """
        if not len(self.steps) or np.isnan(values).mean() > MOST_GAPS or np.isnan(values[0]):
            return None
        values = values[np.maximum.accumulate(np.where(np.isnan(values), 0, np.arange(len(values))))]
        number, t = len(values), self.steps
        centre = float(values.mean())
        sums = np.concatenate([[0.0], np.cumsum(values - centre)])
        squares = np.concatenate([[0.0], np.cumsum((values - centre) ** 2)])
        start = np.maximum(0, t - int(limit("sign_window")))

        def mean_and_variance(low: Ints, high: Any) -> tuple[Floats, Floats]:
            size = high - low
            mean = (sums[high] - sums[low]) / size
            variance = np.maximum(squares[high] - squares[low] - size * mean**2, 0.0) / (size - 1)
            return mean + centre, variance

        before, noise_before = mean_and_variance(start, t)
        after, noise_after = mean_and_variance(t, np.full(len(t), number))
        few = t - start < limit("sign_steps")  # with few steps before, their noise may be small by chance
        noise_before = np.where(few, np.maximum(noise_before, noise_after), noise_before)
        error = np.sqrt(noise_before / (t - start) + noise_after / (number - t))
        return Contrast(before, after, error, float(values[-int(limit("sign_steps")) :].mean()))

    @cached_property
    def paid(self) -> Contrast | None:
        """Contrast of the reward; None if it cannot be computed.

        At steps around which the format is being learned, the reward is divided by the share of well-formed responses,
        because a rise that comes from the format alone is intended.
        """
        plain = self.contrast(self.reward)
        form = self.contrast(self.format)
        if plain is None or form is None:
            return plain
        formed = self.contrast(self.reward / np.maximum(self.format, limit("sign_formed")))
        assert formed is not None
        learning = (form.rise > limit("sign_format")) | (form.before < limit("sign_formed"))
        before, after, error = (
            np.where(learning, getattr(formed, name), getattr(plain, name)) for name in ("before", "after", "error")
        )
        return Contrast(before, after, error, plain.last)

    @cached_property
    def no_better(self) -> Any:
        """Return whether the accuracy did not rise, or rose far less than the reward, [T]; None if not known."""
        paid, right = self.paid, self.contrast(self.accuracy)
        if paid is None or right is None:
            return None
        share = paid.rise / max(self.scale, 1e-9)
        uncertain = limit("accuracy_certainty") * right.error
        unmoved = (right.rise <= uncertain) | (right.rise < limit("accuracy_nothing") * share)
        return unmoved & (right.rise + uncertain < limit("accuracy_share") * share)

    @cached_property
    def learned(self) -> bool:
        """Return whether nearly all recent responses are right."""
        recent = self.accuracy[-int(limit("sign_steps")) :]
        return bool(len(recent)) and bool(np.mean(recent) >= limit("accuracy_learned"))

    def recent(self, name: str) -> float:
        """Return the mean of a metric over the last few lines; NaN if one of them lacks the metric."""
        values = self.series(name)[-int(limit("sign_steps")) :]
        return float(np.mean(values)) if len(values) == int(limit("sign_steps")) else math.nan

    def step_at(self, where: Any, contrast: Contrast) -> int | None:
        """Return the index in `steps` of the most certain change where `where` [T] is True; None if it never is."""
        if where is None or not np.any(where):
            return None
        return int(np.argmax(np.where(where, contrast.certainty, -np.inf)))

    def number(self, place: int) -> int:
        """Return the training step of the line `steps[place]`."""
        return int(self.lines[int(self.steps[place])].get("step", self.steps[place]))


PREFIX = "health/"
MAX_RESPONSES = 512
"""Maximum number of responses per step whose texts are compared pairwise: whole groups, spread over the step."""
LEAST_PROMPTS = 4
"""Minimum number of distinct prompts in a step for the metrics that compare responses to different prompts."""
TITLES = {
    "health/alike_share": "Responses that are alike (share)",
    "health/alike_in_group_share": "The same within a group (share)",
    "health/same_truth_share": "Prompts with the most common truth (share)",
    "health/same_prefix_share": "Responses that begin alike (share)",
    "health/repeating_share": "Responses that repeat themselves (share)",
    "health/digit_share": "Digits (share of the characters)",
    "health/uppercase_share": "Uppercase letters (share of the characters)",
    "health/punctuation_share": "Punctuation (share of the characters)",
    "health/whitespace_share": "White space (share of the characters)",
    "health/non_ascii_share": "Non-ASCII (share of the characters)",
    "health/top_character_share": "The most common character of a response (share)",
    "health/characters_mean": "Response length (characters, mean)",
    "health/length_score_correlation": "Length and score within groups (correlation)",
}
"""Metric -> its title in a chart."""
CHARACTERS = {
    "digit_share": "digits",
    "uppercase_share": "uppercase",
    "punctuation_share": "punctuation",
    "whitespace_share": "white space",
    "non_ascii_share": "non-ASCII",
    "top_character_share": "one character",
}
"""Metric of a class of characters -> the class in words."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One response of a step, from training or from a rollout file.

    Args:
        truth: truth of its prompt, as text; "" = no truth.
        cut: whether the token limit ended the response.
        score: its score; None if the reward failed.
        formed: whether the response meets the format, as far as this is known.
    """

    group: int
    prompt_id: str
    truth: str
    text: str
    tokens: int
    cut: bool
    score: float | None
    formed: bool


def measure_health(samples: Sequence[Sampled]) -> dict[str, float]:
    """Return the metrics of one step, named as in TITLES, without those that have no meaning for its responses.

    For example, a step with fewer than LEAST_PROMPTS prompts has no `alike_share`.
    """
    samples = _bounded(samples)
    if not samples:
        return {}
    m = measure_texts([s.text for s in samples], [s.group for s in samples])
    names = ("alike_in_group_share", "same_prefix_share", "repeating_share", "top_character_share", "characters_mean")
    metrics = {name: getattr(m, name) for name in names}
    metrics |= {f"{name}_share": share for name, share in m.class_shares.items() if f"{name}_share" in CHARACTERS}
    truths = {s.prompt_id: s.truth for s in samples}
    if len(truths) >= LEAST_PROMPTS:
        metrics["alike_share"] = m.alike_share
        if any(truths.values()):
            metrics["same_truth_share"] = Counter(truths.values()).most_common(1)[0][1] / len(truths)
    whole = [s for s in samples if s.score is not None and s.formed and not s.cut]
    correlation = length_score_correlation([(s.group, s.tokens, s.score or 0.0) for s in whole])
    if correlation is not None:
        metrics["length_score_correlation"] = correlation
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def length_score_correlation(responses: Sequence[tuple[int, float, float]]) -> float | None:
    """Return the correlation of length and score within groups; None if one of them does not vary within any group.

    Args:
        responses: (group, length, score) of each response.
    """
    if len(responses) < 2:
        return None
    group_N = np.unique([g for g, _, _ in responses], return_inverse=True)[1]
    size_G = np.bincount(group_N)
    rest = []
    for values in ([n for _, n, _ in responses], [s for _, _, s in responses]):
        value_N = np.asarray(values, dtype=np.float64)
        rest.append(value_N - (np.bincount(group_N, weights=value_N) / size_G)[group_N])
    scale = float(np.sqrt((rest[0] ** 2).sum() * (rest[1] ** 2).sum()))
    return float((rest[0] * rest[1]).sum()) / scale if scale > 1e-9 else None


def _bounded(samples: Sequence[Sampled]) -> Sequence[Sampled]:
    """Return at most about MAX_RESPONSES responses: whole groups, evenly spread."""
    if len(samples) <= MAX_RESPONSES:
        return samples
    groups = list(dict.fromkeys(s.group for s in samples))
    number = max(1, MAX_RESPONSES * len(groups) // len(samples))
    chosen = {groups[i * len(groups) // number] for i in range(number)}
    return [s for s in samples if s.group in chosen]


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
    words, ends = f"reward up, accuracy {'down' if fell else 'flat'}", (paid.before[place], paid.after[place])
    yield Sign("reward_without_accuracy", words, what, h.number(place), *map(float, ends))


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
    rewards = (first["eval/reward"], last["eval/reward"])
    a, b = (
        f"{_fixed(n['eval/reward'])} with an accuracy of {_fixed(n['eval/accuracy'])} (step {n['step']})"
        for n in (first, last)
    )
    words, what = (
        f"validation: reward up, accuracy {'down' if fell else 'flat'}",
        f"the validation reward rose from {a}",
    )
    yield Sign("reward_without_accuracy", words, f"{what} to {b}", None, *rewards)


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
