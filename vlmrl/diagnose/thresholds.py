"""What a cause is, and every threshold of `runs diagnose` in one table, each with its reason."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from vlmrl.diagnose.run_facts import Response, RunFacts
from vlmrl.store import layout
from vlmrl.store.layout import RECIPE
from vlmrl.store.metrics import counted as counted_step

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
MOST_ROWS = 3
MIN_ONSET = 3
"""Steps on each side of the step from which on something is wrong."""
MOST_TEXT_CHARS = 300
FLAGS = ("--quiet", "-q", "--json", "--accept-changes", "--dry-run")
"""Options of `train` and `sft` that take no value."""


class Bound(NamedTuple):
    """A threshold and why it is where it is."""

    value: float
    why: str


LIMITS: dict[str, Bound] = {
    "cut_error": Bound(0.5, "a cut response has no answer: with half of them cut, the score measures the limit"),
    "cut_warning": Bound(0.15, "published runs with room to think are cut in 1 to 10% of their responses"),
    "stopped": Bound(0.5, "a stop string in the way ends most responses; one that belongs there ends good ones"),
    "shared_tags": Bound(0.5, "of the responses that break the format: tags that so many write are no accident"),
    "format_error": Bound(0.02, "below 1 in 50 a group of 8 has no well-formed response 85% of the time: no contrast"),
    "format_warning": Bound(0.1, "below 1 in 10 most groups of 8 have one such response at most"),
    "poor_score": Bound(0.5, "share of the most possible score below which a suspicious prompt is held to do harm"),
    "layout_share": Bound(0.1, "of the unpaid responses: that a label is right but for its spelling is no accident"),
    "layout_least": Bound(4, "fewer such responses may be accidents"),
    "closed_labels": Bound(30, "so few different labels, over many rows, are a closed vocabulary"),
    "dead_error": Bound(0.9, "nine of ten groups teach nothing"),
    "dead_warning": Bound(0.7, "a third to a half is usual on a task of mixed difficulty"),
    "one_sided": Bound(0.8, "share of groups that are all wrong (or all right) from which the task is too hard (easy)"),
    "right_score": Bound(0.95, "share of the most possible score from which a response counts as right"),
    "unavailable_warning": Bound(0.01, "less is a service that is asked often and fails now and then"),
    "unavailable_error": Bound(0.5, "the run has learned from less than half of what it sampled"),
    "few_samples": Bound(16, "fewer responses than two groups of eight prove nothing about a part or a label"),
    "one_answer": Bound(0.95, "share of responses that give the same answer to prompts with different truths"),
    "distinct": Bound(0.2, "different texts in a group, as a share of its size: fewer than two of eight"),
    "learned_steps": Bound(12, "four in each third; over fewer a rise may be chance"),
    "learned_rise": Bound(0.05, "of what the scores reach over; less may be chance"),
    "cold": Bound(0.3, "temperature under which most samples of a group are the arg-max"),
    "hot": Bound(1.5, "temperature over which unlikely tokens, hence broken text, are common"),
    "entropy_fall": Bound(0.25, "entropy at the end as a share of that at the start: exploration is gone"),
    "entropy_low": Bound(0.05, "nats a token: nearly every token is certain"),
    "lr_small_error": Bound(1e-8, "a hundredth of the default 1e-6: AdamW moves each weight by about lr an update"),
    "lr_small_warning": Bound(1e-7, "a tenth of the default 1e-6"),
    "lr_large_error": Bound(1e-2, "AdamW then moves a usual weight (0.02) by half of itself in one update"),
    "lr_large_small_model": Bound(3e-3, "models of a few million parameters are trained at 1e-4 to 1.5e-3"),
    "lr_large_full": Bound(2e-5, "twenty times what is usual for all weights of a model of a billion parameters"),
    "lr_large_lora": Bound(1e-3, "a hundred times the default 1e-5 of an adapter"),
    "big_model": Bound(1e8, "parameters; smaller models are toys with learning rates of their own"),
    "lora_factor": Bound(10, "adapters are trained at about ten times the learning rate of all weights"),
    "collapse": Bound(0.5, "mean reward at the end as a share of that at the start"),
    "gap_float32": Bound(1e-3, "nats a token; engines and trainer agree to 1e-5 in float32"),
    "gap_bfloat16": Bound(0.05, "nats a token; about 0.01 is usual in bfloat16"),
    "gap_error": Bound(10, "times the gap that is a warning"),
    "agreement": Bound(0.35, "a reward that reads the answer puts right ones first in nearly all pairs; chance, half"),
    "length_error": Bound(0.85, "correlation of length and score within groups: length alone foretells the score"),
    "length_warning": Bound(0.6, "length explains more than a third of the score (0.6 squared)"),
    "length_least": Bound(48, "responses in live groups; chance makes a correlation of 0.6 in fewer"),
    "length_spread": Bound(0.05, "deviation of the lengths of a group over their mean; below, they are equal"),
    "kl_warning": Bound(1.0, "25 times the largest coefficient in published use (0.04)"),
    "kl_error": Bound(10.0, "hundreds of times what is usual"),
    "entropy_coef": Bound(0.1, "ten times the largest usual one (0.01)"),
    "clip_share": Bound(0.3, "1 to 5% is usual; the sequence-level losses with narrow bounds clip about 15%"),
    "importance_weight": Bound(0.5, "mean weight of a token; it is close to 1 where engine and trainer agree"),
    "weights_lost": Bound(0.2, "share of a weight that decay takes in a run; usual settings take less than 1 in 1,000"),
    "overlong_share": Bound(0.5, "the buffer before the limit is for the few: DAPO's is the last fifth"),
    "few_pixels": Bound(12_544, "112 x 112: sixteen image tokens of 28 x 28 pixels show no detail"),
    "shrunk": Bound(2, "times max_pixels from which an image loses half of what it shows"),
    "shared_rows": Bound(0.02, "share of validation rows among those trained on; a few duplicates are seen as such"),
    "sign_steps": Bound(6, "steps since a change, and in its last part: fewer have no noise to measure it by"),
    "sign_before": Bound(4, "steps before a change: rewards are hacked early; the noise is then that since the change"),
    "sign_window": Bound(24, "steps before a change that it is compared with: what was learned earlier is no change"),
    "sign_certainty": Bound(5, "standard errors: every step of a run is tried, in several series, with few steps each"),
    "sign_formed": Bound(0.05, "of the responses well-formed: with fewer, the reward of these says nothing"),
    "sign_format": Bound(0.05, "rise of the format part from which it is being learned"),
    "reward_rise": Bound(0.15, "of the largest mean reward; smaller gains are also gains of form and luck"),
    "accuracy_certainty": Bound(2, "standard errors: the 95% bound of the change of the accuracy"),
    "accuracy_share": Bound(0.25, "of the reward's relative rise: an accuracy that rises by less did not come along"),
    "accuracy_nothing": Bound(0.05, "of the reward's relative rise: a rise as small as this is none, however certain"),
    "accuracy_fall": Bound(0.02, "less is called flat"),
    "accuracy_learned": Bound(0.9, "nearly all responses are right: the reward may rise by what is left of the form"),
    "alike_share": Bound(0.9, "of a step's responses; a balanced yes-or-no task has half of them alike"),
    "same_truth": Bound(0.8, "of the prompts: with one right answer for nearly all of them, alike is right"),
    "alike_rise": Bound(0.3, "of the responses: a task learned before, such as from traces, begins alike and stays so"),
    "alike_rise_no_truth": Bound(0.5, "where nothing says what is right, the change must be plain"),
    "alike_before": Bound(0.4, "of the responses: before it they must have been of many kinds"),
    "long_text": Bound(64, "characters: a shorter response may be one number or one word because it was asked for"),
    "repeating_share": Bound(0.5, "of the responses; base models loop in a few, and do so from the start"),
    "repeating_rise": Bound(0.4, "of the responses: most of those that repeat themselves came to do so"),
    "class_rise": Bound(0.3, "of the characters: tags, code and tables move a class by less"),
    "class_share": Bound(0.9, "of the characters: no code, table or list of numbers is of one class of characters"),
    "length_growth": Bound(2.0, "times the length before: thinking longer is common, and then the accuracy rises"),
    "streak": Bound(10, "steps in a row: a step of few prompts may well be without a signal, ten are no chance"),
}  # fmt: skip


def limit(name: str) -> float:
    """The threshold of that name."""
    return LIMITS[name].value


@dataclass
class Cause:
    """Something that is wrong with a run.

    Args:
        name: short and stable, for scripts.      level: error (the run cannot learn what was meant), warning, note.
        what: one sentence with the figure that gave it away.
        command: what to type next.
        weight: orders causes of one level, in [0, 1].
        evidence: figures, one a line.      rows: responses that show it.
        follows: names of causes that this one explains.
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
    """The first few responses, as evidence: where, text, score, parts, status, truth, note."""
    return [
        {"where": r.where, "text": short(r.text), "tokens": r.tokens,
         "score": r.score if r.error is None else None, "parts": dict(r.parts),
         "status": "failed" if r.failed else r.status, "truth": dict(r.truth), "note": r.note}
        for r in responses[:MOST_ROWS]
    ]  # fmt: skip


def short(text: str, most: int = MOST_TEXT_CHARS) -> str:
    """A text in at most so many characters: its beginning and its end."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def counted(number: int, what: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def onset(facts: RunFacts, metric: str, bad: Callable[[float], bool]) -> list[str]:
    """Return from which step on a metric was bad, as a line of evidence; [] when it always was, or only of late.

    Steps are numbered from 1, as screens do.
    """
    values = [(line["step"], line[metric]) for line in facts.train if _is_number(line.get(metric))]
    good = len(values) - 1
    while good >= 0 and bad(values[good][1]):
        good -= 1
    if good + 1 < MIN_ONSET or len(values) - good - 1 < MIN_ONSET:
        return []
    before = fmean(value for _, value in values[: good + 1])
    after = fmean(value for _, value in values[good + 1 :])
    return [f"from step {counted_step(values[good + 1][0])} on: {before:.3g} on average before, {after:.3g} since"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def learned(facts: RunFacts) -> str:
    """That the reward rose from the first third of the steps to the last; "" when it did not, by too little to tell, or
    for too few steps.
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
    """The command that scores the run's rollouts again."""
    return shlex.join(["vlmrl", "reward-check", facts.key, *options])


def again(facts: RunFacts, *settings: str) -> str:
    """The command that made the run, with `--set` on top; what named or continued the run is left out."""
    recipe, gpus, settled = _words(facts)
    return _command(facts, "sft" if facts.manifest.kind == "sft" else "train", recipe, *gpus) + _set(
        *settled, *settings
    )


def look_again(facts: RunFacts, *settings: str) -> str:
    """The command that samples a few answers with the run's recipe and shows prompt, images and scores verbatim."""
    recipe, _, settled = _words(facts)
    return _command(facts, "try", recipe) + _set(*settled, *settings)


def sft_first(facts: RunFacts) -> str:
    """The command that teaches the rows' own responses first, with the run's recipe."""
    recipe, gpus, settled = _words(facts)
    return _command(facts, "sft", recipe, *gpus) + _set(*settled, "kind=sft")


def check_again(facts: RunFacts) -> str:
    """The command that compares log-probs and gradients of the run's rows with the model's own."""
    recipe, _, settled = _words(facts)
    return _command(facts, "check", "--deep", recipe) + _set(*settled)


def _command(facts: RunFacts, *words: str) -> str:
    """A command that runs as it is printed: in the folder that the run was made in, to which its paths are relative,
    and with `--runs` where the run is not in that folder's own.
    """
    cwd = Path(facts.manifest.cwd or ".")
    away = cwd.is_dir() and cwd.resolve() != Path.cwd()
    home = (cwd if away else Path()) / layout.runs_root()
    runs = [] if home.resolve() == facts.run.dir.parent.resolve() else ["--runs", str(facts.run.dir.parent.resolve())]
    return (f"cd {shlex.quote(str(cwd))} && " if away else "") + shlex.join(["vlmrl", *words, *runs])


def _words(facts: RunFacts) -> tuple[str, list[str], list[str]]:
    """(the recipe, how many GPUs it ran on, its `--set`) of the command that made the run."""
    given, recipe, gpus, settled = list(facts.manifest.argv[2:]), "", [], []
    if list(facts.manifest.argv[1:2]) != [facts.manifest.kind.replace("rl", "train")]:
        given = []
    while given:
        word, equals, value = given.pop(0).partition("=")
        if not word.startswith("-"):
            recipe = recipe or word + equals + value
        elif word not in FLAGS:
            value = value if equals else given.pop(0) if given else ""
            settled += [value] if word == "--set" else []
            gpus += [word, value] if word == "--gpus" else []
    return recipe or str((facts.run.dir / RECIPE).resolve()), gpus, settled


def _set(*settings: str) -> str:
    """As `--set` options; of several for one key the last alone."""
    last = {setting.partition("=")[0]: setting for setting in settings}
    return "".join(f" --set {shlex.quote(setting)}" for setting in last.values())
