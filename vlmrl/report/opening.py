"""Opening of a run on the page: whether it learned, what `runs diagnose` found, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.diagnose.run import diagnose
from vlmrl.diagnose.run_facts import with_update
from vlmrl.errors import VlmrlError
from vlmrl.evaluate.verdict import Verdict, overall, signed
from vlmrl.report.curves import LEADING, Changes, RunCurves, validated_ends
from vlmrl.services.calls import spent_in
from vlmrl.store.layout import VERDICTS, span
from vlmrl.store.runs import Run

MAX_CAUSES = 3
BEGINNINGS = {
    "better": "It learned",
    "worse": "It became worse",
    "mixed": "It learned only in part",
    "no difference shown": "No change is shown",
    "not clear": "It is not clear whether it learned",
}
"""Answer of the paired comparison -> beginning of the sentence about it."""
COLOURS = {"better": "up", "worse": "down"}


@dataclass(frozen=True)
class Opening:
    """First sentences about a run.

    Args:
        learned: whether it learned, with the paired change of the validation and its interval.
        colour: `up` if it clearly learned, `down` if it became worse or made no update, else "".
        no_update: whether no step of a finished run updated the model.
        causes: what `runs diagnose` found, the most likely first; notes and consequences are left out.
        cost: time, GPUs, responses, sampled tokens, calls of a judge.
    """

    learned: str
    colour: str
    no_update: bool
    causes: Sequence[str]
    cost: str


def open_run_page(run: Run, about: Mapping[str, Any], lines: RunCurves, changes: Changes) -> Opening | None:
    """Return the opening, or None for a run that trains nothing.

    Args:
        about: facts of `describe`.
        changes: compares two validations.
    """
    if run.manifest.kind not in ("rl", "sft"):
        return None
    no_update = bool(lines.train) and not with_update(lines.train)
    if not lines.train:
        learned, colour = "No step has run: nothing was learned.", ""
    elif no_update:
        learned = f"Nothing was learned: none of the {len(lines.train):,} steps updated the model."
        colour = "down"
    else:
        learned, colour = _paired(lines, changes)
    return Opening(learned, colour, no_update and about["status"] == "done", _causes(run), _cost(run, about, lines))


def _paired(lines: RunCurves, changes: Changes) -> tuple[str, str]:
    """Return (sentence, colour) of the paired difference between the first and the last validation."""
    ends = [pair for metric in LEADING if (pair := validated_ends(lines, metric)) is not None]
    if not ends:
        return _by_loss(lines), ""
    first, last = ends[0]
    if first["step"] == last["step"]:
        return "It is not known whether it learned: there is only one validation.", ""
    compared = {name: change for name, change in changes(first["step"], last["step"]).items() if name in LEADING}
    if not compared:
        return "It is not known whether it learned: the validations have no rows that can be paired.", ""
    verdicts: set[Verdict] = {verdict for _, verdict in compared.values()}
    answer = overall(verdicts)
    numbers = ", ".join(f"{name} {signed({**d, 'difference': d['value']})}" for name, (d, _) in compared.items())
    rows = next(iter(compared.values()))[0]["n"]
    text = (
        f"{BEGINNINGS[answer]}: validation {numbers}, paired on {rows:,} rows, step {first['step']} to {last['step']}."
    )
    return text, COLOURS.get(answer, "")


def _by_loss(lines: RunCurves) -> str:
    """Return how the validation loss changed. It has no paired interval: validation keeps only its mean."""
    ends = validated_ends(lines, "loss")
    if ends is None:
        return "It is not known whether it learned: there is no validation."
    (start, first), (end, last) = ((line["step"], float(line["eval/loss"])) for line in ends)
    if start == end:
        return f"It is not known whether it learned: there is only one validation, with loss {first:.3g}."
    change = "stayed at" if first == last else f"{'fell' if last < first else 'rose'} from {first:.3g} to"
    where = f"step {start} to {end}; there are no losses of single rows, so no paired interval"
    return f"The validation loss {change} {last:.3g}, {where}."


def _causes(run: Run) -> list[str]:
    """Return the sentences of the causes that are no notes and follow from no other."""
    try:
        causes = diagnose(run).causes
    except VlmrlError as error:
        return [f"not diagnosed: {error.message}"]
    explained = {name for cause in causes for name in cause.follows}
    return [f"{c.level}: {c.what}" for c in causes if c.level != "note" and c.name not in explained][:MAX_CAUSES]


def _cost(run: Run, about: Mapping[str, Any], lines: RunCurves) -> str:
    """Return the time, GPU hours, responses, sampled tokens and judge calls, separated by commas."""
    gpus = len(run.manifest.hardware.get("gpus") or ())
    samples = [(int(n["rollout/samples"]), n) for n in lines.train if n.get("rollout/samples")]
    tokens = sum(count * float(n.get("rollout/response_tokens_mean") or 0.0) for count, n in samples)
    parts = [span(about["seconds"])]
    if gpus:
        parts.append(f"{about['seconds'] / 3600 * gpus:,.1f} GPU hours ({gpus} GPU{'s' if gpus > 1 else ''})")
    if samples:
        parts.append(f"{sum(count for count, _ in samples):,} responses of {tokens:,.0f} tokens")
    try:
        spent = list(spent_in(run.dir / VERDICTS).values())
    except VlmrlError as error:
        return ", ".join([*parts, error.message])
    if spent:
        calls, money = sum(s.calls for s in spent), sum(s.cost for s in spent)
        parts.append(f"{calls:,} calls of the judge" + (f" at {money:.4f}" if money else ""))
    return ", ".join(parts)
