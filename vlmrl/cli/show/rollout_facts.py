"""Screen of `vlmrl runs show RUN --rollout STEP[/PROMPT[/SAMPLE]]`: saved responses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import emit, shorten, show_table
from vlmrl.errors import StoreError
from vlmrl.untrusted import one_line, visible

if TYPE_CHECKING:
    from vlmrl.store.runs import Run
    from vlmrl.types import Group

HINT = "vlmrl runs show RUN --rollout 12, or 12/PROMPT, or 12/PROMPT/SAMPLE"


def show_rollout(run: Run, place: str, as_json: bool) -> None:
    """Show the responses of a step, of one of its prompts, or one response.

    Args:
        place: `STEP[/PROMPT[/SAMPLE]]`. Steps are counted from 1. A prompt is given by its id or a prefix of it.
    Raises: StoreError if there is no such step, prompt or sample.
    """
    from vlmrl.redaction.redact import redact_said
    from vlmrl.report.rollout_text import group_fields
    from vlmrl.reward_check.scores_file import finite

    step, prompt, sample = _parse(place)
    groups = _groups(run, step)
    if prompt is not None:
        groups = _find(groups, prompt)
    fields = [group_fields(group, sample) for group in groups]
    emit(finite({"run": run.id, "step": step, "groups": fields}), as_json)
    if as_json:
        return
    if prompt is None:
        rows = [_row(group) for group in fields]
        show_table(f"step {step}", ("prompt", "samples", "mean", "best", "truth"), rows)
        return
    for group in fields:
        print("\n".join(redact_said(line) for line in _lines(group)))


def _parse(place: str) -> tuple[int, str | None, int | None]:
    """Return (step from 1, prompt, sample). Only a number at the end is a sample: a prompt id may contain slashes."""
    step, _, rest = place.partition("/")
    if not step.isascii() or not step.isdigit() or int(step) < 1:
        raise StoreError(f"`{place}` does not begin with a step, 1 or more", hint=HINT)
    if not rest:
        return int(step), None, None
    prompt, slash, sample = rest.rpartition("/")
    if slash and sample.isascii() and sample.isdigit():
        return int(step), prompt, int(sample)
    return int(step), rest, None


def _groups(run: Run, step: int) -> list[Group]:
    from vlmrl.store.metrics import counted

    known = {counted(number): number for number in run.rollout_files()}
    if step not in known:
        there = f"it has rollouts of steps {min(known)} to {max(known)}" if known else "the run has no rollouts"
        raise StoreError(f"there are no rollouts of step {step}", where=str(run.dir), hint=there)
    return run.read_rollouts(known[step])


def _find(groups: list[Group], prompt: str) -> list[Group]:
    exact = [g for g in groups if g.row.prompt_id == prompt]
    matches = exact or [g for g in groups if g.row.prompt_id.startswith(prompt)]
    if len({g.row.prompt_id for g in matches}) == 1:
        return matches
    named = ", ".join(dict.fromkeys(g.row.prompt_id for g in (matches or groups)[:5]))
    which = "several prompts" if matches else "no prompt"
    raise StoreError(f"`{prompt}` names {which} of the step", hint=f"such as {named}")


def _row(group: Mapping[str, Any]) -> tuple[str, ...]:
    scores = [s["score"] for s in group["samples"] if s["error"] is None]
    mean, best = (f"{statistics.fmean(scores):.3f}", f"{max(scores):.3f}") if scores else ("-", "-")
    truth = shorten(one_line(str(group["truth"])), 60)
    return one_line(group["prompt_id"]), str(len(group["samples"])), mean, best, truth


def _lines(group: Mapping[str, Any]) -> list[str]:
    from vlmrl.report.rollout_text import image_lines, sample_lines

    lines = [f"{group['prompt_id']}  of {group['source']}", f"truth: {group['truth']}", *image_lines(group)]
    lines += ["prompt:", *(f"  {line}" for line in group["prompt"].splitlines())]
    for s in group["samples"]:
        parts = "  ".join(f"{name} {'-' if v is None else f'{v:.3f}'}" for name, v in s["parts"].items())
        score = "no score" if s["error"] is not None else f"{s['score']:.3f}"
        cut = ", cut at the limit" if s["finish"] == "length" else ""
        use = ", not trained on" if s["masked"] else f", advantage {s['advantage']:+.3f}"
        lines += ["", f"sample {s['sample']}: {score}  {parts}  ({s['tokens']} tokens{cut}{use})"]
        lines += [f"  [{one_line(message)}]" for message in (s["error"] or s["note"],) if message]
        lines += [f"  {line}" for line in sample_lines(s)]
        if not s.get("turns"):
            lines += [f"  | {line}" for line in s["text"].splitlines() or [""]]
    return [visible(line) for line in lines]
