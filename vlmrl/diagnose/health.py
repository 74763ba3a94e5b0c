"""Metrics of a step about the texts of its responses, such as repetition: `health/...` in metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmrl.reward_check.texts import measure_texts

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
        group: number of the response's group.
        truth: truth of its prompt, as text; "" = no truth.
        tokens: length of the response in tokens.
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
    metrics = {
        "alike_in_group_share": m.alike_in_group_share,
        "same_prefix_share": m.same_prefix_share,
        "repeating_share": m.repeating_share,
        "top_character_share": m.top_character_share,
        "characters_mean": m.characters_mean,
    }
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
