"""The class Cause, the commands that causes recommend, and all thresholds of `runs diagnose`, each with its reason."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeGuard

from vlmrl.diagnose.run_facts import Response, RunFacts
from vlmrl.redaction.redact import excerpt, redact_said
from vlmrl.store import layout
from vlmrl.store.layout import RECIPE
from vlmrl.store.metrics import counted as counted_step

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
MOST_ROWS = 3
MIN_ONSET = 3
"""Minimum number of steps before, and from, the step at which a metric becomes bad; else that step is not reported."""
MOST_TEXT_CHARS = 300
FLAGS = ("--quiet", "-q", "--json", "--accept-changes", "--dry-run")
"""Options of `train` and `sft` that take no value."""


class Bound(NamedTuple):
    """Threshold with the reason for its value."""

    value: float
    why: str


LIMITS: dict[str, Bound] = {
    "cut_error": Bound(0.5, "a cut response has no answer: with half of them cut, the score measures the limit"),
    "cut_warning": Bound(0.15, "published runs with enough tokens to think are cut in 1 to 10% of their responses"),
    "stopped": Bound(0.5, "a misplaced stop string ends most responses; one in its place ends good ones"),
    "shared_tags": Bound(0.5, "share of the responses that break the format; tags in so many are not accidental"),
    "format_error": Bound(0.02, "below 1 in 50, 85% of the groups of 8 have no well-formed response: no contrast"),
    "format_warning": Bound(0.1, "below 1 in 10 most groups of 8 have one such response at most"),
    "poor_score": Bound(0.5, "share of the largest possible score below which a suspicious prompt counts as harmful"),
    "layout_share": Bound(0.1, "share of unpaid responses; so many right labels in other spellings are not accidental"),
    "layout_least": Bound(4, "fewer such responses may be accidents"),
    "closed_labels": Bound(30, "at most so many different labels, over many rows, are a closed vocabulary"),
    "dead_error": Bound(0.9, "nine of ten groups teach nothing"),
    "dead_warning": Bound(0.7, "a third to a half is usual on a task of mixed difficulty"),
    "one_sided": Bound(0.8, "share of groups that are all wrong (all right): above, the task is too hard (easy)"),
    "right_score": Bound(0.95, "share of the largest possible score from which a response counts as right"),
    "unavailable_warning": Bound(0.01, "below, the service is called often and fails now and then"),
    "unavailable_error": Bound(0.5, "the run learned from less than half of its samples"),
    "tool_calls": Bound(0.01, "calls per episode; with fewer, nothing is learned about the tools"),
    "tool_errors": Bound(0.1, "share of the calls; a model that knows its tools errs in a few percent"),
    "episode_limits": Bound(0.2, "share of the episodes; as for cut responses, they have no answer"),
    "tool_use": Bound(0.1, "calls per episode at the start; a fall of fewer may be chance"),
    "tool_use_fall": Bound(0.5, "calls at the end as a share of those at the start"),
    "few_samples": Bound(16, "fewer responses than two groups of eight prove nothing about a part or a label"),
    "one_answer": Bound(0.95, "share of responses that give the same answer to prompts with different truths"),
    "distinct": Bound(0.2, "different texts in a group, as a share of its size: fewer than two of eight"),
    "learned_steps": Bound(12, "four in each third; over fewer a rise may be chance"),
    "learned_rise": Bound(0.05, "share of the range of the scores; less may be chance"),
    "cold": Bound(0.3, "temperature; below, most samples of a group are the arg-max"),
    "hot": Bound(1.5, "temperature; above, unlikely tokens, hence broken text, are common"),
    "entropy_fall": Bound(0.25, "entropy at the end as a share of that at the start: exploration is gone"),
    "entropy_low": Bound(0.05, "nats per token: nearly every token is certain"),
    "lr_small_error": Bound(1e-8, "a hundredth of the default 1e-6: AdamW moves each weight by about lr per update"),
    "lr_small_warning": Bound(1e-7, "a tenth of the default 1e-6"),
    "lr_large_error": Bound(1e-2, "AdamW then moves a usual weight (0.02) by half of itself in one update"),
    "lr_large_small_model": Bound(3e-3, "models of a few million parameters are trained at 1e-4 to 1.5e-3"),
    "lr_large_full": Bound(2e-5, "twenty times what is usual for all weights of a model of a billion parameters"),
    "lr_large_lora": Bound(1e-3, "a hundred times the default 1e-5 of an adapter"),
    "big_model": Bound(1e8, "parameters; smaller models are toys with learning rates of their own"),
    "lora_factor": Bound(10, "adapters are trained at about ten times the learning rate of all weights"),
    "collapse": Bound(0.5, "mean reward at the end as a share of that at the start"),
    "collapse_certainty": Bound(3, "standard errors of the fall, by the spread of the steps"),
    "gap_float32": Bound(1e-3, "nats per token; engines and trainer agree to 1e-5 in float32"),
    "gap_bfloat16": Bound(0.05, "nats per token; about 0.01 is usual in bfloat16"),
    "gap_error": Bound(10, "times the gap that is a warning"),
    "agreement": Bound(0.35, "share of pairs; a reward that reads the answer ranks nearly all correctly, chance half"),
    "length_error": Bound(0.85, "correlation of length and score within groups: length alone predicts the score"),
    "length_warning": Bound(0.6, "length explains more than a third of the score (0.6 squared)"),
    "length_least": Bound(48, "responses in live groups; with fewer, chance can give a correlation of 0.6"),
    "length_spread": Bound(0.05, "standard deviation of a group's lengths over their mean; below, they count as equal"),
    "kl_warning": Bound(1.0, "25 times the largest coefficient in published use (0.04)"),
    "kl_error": Bound(10.0, "hundreds of times what is usual"),
    "entropy_coef": Bound(0.1, "ten times the largest usual one (0.01)"),
    "clip_share": Bound(0.3, "1 to 5% is usual; the sequence-level losses with narrow bounds clip about 15%"),
    "importance_weight": Bound(0.5, "mean weight of a token; it is close to 1 where engine and trainer agree"),
    "weights_lost": Bound(0.2, "share of a weight that decay removes in a run; less than 1 in 1,000 is usual"),
    "overlong_share": Bound(0.5, "the range before the limit is meant for few responses: DAPO's is the last fifth"),
    "few_pixels": Bound(12_544, "112 x 112: sixteen image tokens of 28 x 28 pixels show no detail"),
    "shrunk": Bound(2, "times max_pixels; from there on an image loses half of its pixels"),
    "shared_rows": Bound(0.02, "share of validation rows that are also trained on; below, they are a few duplicates"),
    "loss_rise": Bound(0.05, "share of the best validation loss, in each of the last two: less is noise between steps"),
    "sign_steps": Bound(6, "steps since a change, and in its last part: fewer do not show the noise"),
    "sign_before": Bound(4, "steps before a change: rewards are hacked early; the noise is then that since the change"),
    "sign_window": Bound(24, "steps before a change for the comparison: earlier learning is not part of it"),
    "sign_certainty": Bound(5, "standard errors: every step is tried, in several series, with few steps each"),
    "sign_formed": Bound(0.05, "share of well-formed responses: with fewer, their reward has no meaning"),
    "sign_format": Bound(0.05, "rise of the format part from which it is being learned"),
    "reward_rise": Bound(0.15, "share of the largest mean reward; smaller gains also come from the format or chance"),
    "accuracy_certainty": Bound(2, "standard errors: the 95% bound of the change of the accuracy"),
    "accuracy_share": Bound(0.25, "share of the reward's rise: an accuracy that rises by less did not follow"),
    "accuracy_nothing": Bound(0.05, "share of the reward's rise: a smaller one counts as none, however certain"),
    "accuracy_fall": Bound(0.02, "less is called flat"),
    "accuracy_learned": Bound(0.9, "nearly all responses are right: the reward may still rise by the format"),
    "alike_share": Bound(0.9, "share of a step's responses; a balanced yes-or-no task has half of them alike"),
    "same_truth": Bound(0.8, "share of the prompts: with one right answer for nearly all, equal responses are right"),
    "alike_rise": Bound(0.3, "share of the responses: after training on traces they are alike from the start"),
    "alike_rise_no_truth": Bound(0.5, "share of the responses, without a known truth: the change must be plain"),
    "alike_before": Bound(0.4, "share of the responses: before the change they must have differed"),
    "long_text": Bound(64, "characters: a shorter response may be one number or word because the prompt asks for it"),
    "repeating_share": Bound(0.5, "share of the responses; base models repeat themselves in a few, from the start on"),
    "repeating_rise": Bound(0.4, "share of the responses: most of the repeating ones did not repeat before"),
    "class_rise": Bound(0.3, "share of the characters: tags, code and tables change a class by less"),
    "class_share": Bound(0.9, "share of the characters: code, tables and lists of numbers mix classes"),
    "length_growth": Bound(2.0, "times the length before; longer reasoning is common, and raises the accuracy"),
    "streak": Bound(10, "steps in a row: one step of few prompts may lack a signal, ten are no chance"),
}


limit: Callable[[str], float] = {name: bound.value for name, bound in LIMITS.items()}.__getitem__
"""Function that returns the value of the threshold of this name."""


@dataclass
class Cause:
    """Possible reason why a run does not learn.

    Args:
        name: short name that never changes, for scripts.
        level: error (the run cannot learn what is intended), warning or note.
        what: one sentence with the number that proves it.
        command: recommended next command.
        weight: sort key of causes of the same level, in [0, 1].
        evidence: further numbers, one text line each.
        follows: names of the causes that this cause explains.
    """

    name: str
    level: Level
    what: str
    command: str
    weight: float = 0.5
    evidence: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)


def rows_of(responses: Sequence[Response]) -> list[dict[str, Any]]:
    """Return the first few responses as rows of evidence: where, text, score, parts, status, truth, note."""
    return [
        {
            "where": r.where,
            "text": short(r.text),
            "tokens": r.tokens,
            "score": r.score if r.error is None else None,
            "parts": dict(r.parts),
            "status": "failed" if r.failed else r.status,
            "truth": dict(r.truth),
            "note": r.note,
        }
        for r in responses[:MOST_ROWS]
    ]


def short(text: str, most: int = MOST_TEXT_CHARS) -> str:
    """Shorten a text to at most about `most` characters, from its beginning and its end."""
    ends = (excerpt(text, most // 2, end=end, hide=redact_said) for end in (False, True))
    return text if len(text) <= most else " ... ".join(ends)


def onset(facts: RunFacts, metric: str, bad: Callable[[float], bool]) -> list[str]:
    """Return a line of evidence with the step from which on a metric was bad; [] if it was always or only lately bad.

    Steps are counted from 1, as in all output.
    """
    values = [(line["step"], line[metric]) for line in facts.train if is_number(line.get(metric))]
    good = len(values) - 1
    while good >= 0 and bad(values[good][1]):
        good -= 1
    if good + 1 < MIN_ONSET or len(values) - good - 1 < MIN_ONSET:
        return []
    before = fmean(value for _, value in values[: good + 1])
    after = fmean(value for _, value in values[good + 1 :])
    return [f"from step {counted_step(values[good + 1][0])} on: {before:.3g} on average before, {after:.3g} since"]


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def learned(facts: RunFacts) -> str:
    """Return a sentence that the reward rose from the first to the last third of the steps; "" if it did not.

    Return "" also if the rise is too small to be certain, or if there are too few steps.
    """
    ends = facts.ends("reward/mean")
    if ends is None or len(facts.series("reward/mean")) < limit("learned_steps"):
        return ""
    low, high = facts.score_range
    rise = ends[1] - ends[0]
    rose = rise > 0 and rise >= limit("learned_rise") * (high - low)
    return f"the reward rose from {ends[0]:.3f} to {ends[1]:.3f}" if rose else ""


def percent(share: float) -> str:
    return f"{share:.0%}" if share in (0.0, 1.0) or 0.01 <= share <= 0.99 else f"{share:.2%}"


def reward_check(facts: RunFacts, *options: str) -> str:
    """Return the `vlmrl reward-check` command that scores the run's rollouts again."""
    return shlex.join(["vlmrl", "reward-check", facts.key, *options])


def again(facts: RunFacts, *settings: str) -> str:
    """Return the command that started the run, with `--set` for `settings`, without options that name or resume it."""
    recipe, options, set_before = _words(facts)
    if facts.manifest.forked_at is not None and facts.manifest.parent is not None:
        options += ["--from", f"{facts.manifest.parent['run']}@{facts.manifest.forked_at}"]
    kind = "sft" if facts.manifest.kind == "sft" else "train"
    return _command(facts, kind, recipe, *options) + _set(*set_before, *settings)


def look_again(facts: RunFacts, *settings: str) -> str:
    """Return the command that samples a few responses with the run's recipe and prints prompts, images and scores."""
    recipe, _, set_before = _words(facts)
    return _command(facts, "try", recipe) + _set(*set_before, *settings)


def sft_first(facts: RunFacts) -> str:
    """Return the `vlmrl sft` command, with the run's recipe: it first trains on the correct responses of the rows."""
    recipe, gpus, set_before = _words(facts)
    return _command(facts, "sft", recipe, *gpus) + _set(*set_before, "kind=sft")


def check_again(facts: RunFacts) -> str:
    """Return the command that compares log-probs and gradients on the run's rows with those of transformers."""
    recipe, _, set_before = _words(facts)
    return _command(facts, "check", "--deep", recipe) + _set(*set_before)


def _command(facts: RunFacts, *words: str) -> str:
    """Return a command that can be copied and run unchanged.

    It first changes to the folder from which the run was started, because paths in the recipe are relative to it.
    `--runs` is added if the run is not in that folder's default folder of runs.
    """
    cwd = Path(facts.manifest.cwd or ".")
    away = cwd.is_dir() and cwd.resolve() != Path.cwd()
    home = (cwd if away else Path()) / layout.runs_root()
    runs = [] if home.resolve() == facts.run.dir.parent.resolve() else ["--runs", str(facts.run.dir.parent.resolve())]
    return (f"cd {shlex.quote(str(cwd))} && " if away else "") + shlex.join(["vlmrl", *words, *runs])


def _words(facts: RunFacts) -> tuple[str, list[str], list[str]]:
    """Return (recipe, `--gpus` option, `--set` values) of the command that started the run."""
    words, recipe, gpus, settings = list(facts.manifest.argv[2:]), "", [], []
    if list(facts.manifest.argv[1:2]) != [facts.manifest.kind.replace("rl", "train")]:
        words = []
    while words:
        word, equals, value = words.pop(0).partition("=")
        if not word.startswith("-"):
            recipe = recipe or word + equals + value
        elif word not in FLAGS:
            value = value if equals else words.pop(0) if words else ""
            settings += [value] if word == "--set" else []
            gpus += [word, value] if word == "--gpus" else []
    return recipe or str((facts.run.dir / RECIPE).resolve()), gpus, settings


def _set(*settings: str) -> str:
    """Return the settings as `--set` options; if a key is set several times, only its last value is kept."""
    last = {setting.partition("=")[0]: setting for setting in settings}
    return "".join(f" --set {shlex.quote(setting)}" for setting in last.values())
