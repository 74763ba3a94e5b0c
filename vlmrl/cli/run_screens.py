"""Screens of `vlmrl runs`: facts of a run, saved responses, lists, the table of steps, the diagnosis."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import emit, say, shorten, show_table, table_lines, tell
from vlmrl.cli.progress import by_setting
from vlmrl.errors import StoreError
from vlmrl.types import INAPPLICABLE, NO_SCORE
from vlmrl.untrusted import number_of, one_line, plural, visible, visible_json

if TYPE_CHECKING:
    from vlmrl.diagnose.run import Diagnosis
    from vlmrl.diagnose.thresholds import Cause
    from vlmrl.store.listing import ListedRun
    from vlmrl.store.runs import Run
    from vlmrl.store.summary import Followed
    from vlmrl.types import Group


LEAD = ("reward/mean", "policy/entropy", "rollout/dead_group_share", "rollout/truncated_share")
"""Metrics of a step that are shown if they exist, in addition to every `loss/...`."""
MOST_NUMBERS = 6
"""Maximum number of metrics on a line for a step without metrics of LEAD, and for a validation."""


def print_facts(about: dict[str, Any]) -> None:
    """Print one fact per line, the important ones first; facts without a value are left out."""
    name = f"  ({about['name']})" if about["name"] else ""
    tell(f"{about['id']}{name}")
    for label, text in facts(about):
        if text:
            tell(f"  {label:12} {text}")


def facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of every line; an empty text is not printed."""
    from vlmrl.store.layout import ago, span

    git = about["git"]
    attempts = [f"{a['number']} from step {a['from_step']} ({a['status']})" for a in about["attempts"]]
    tags = " ".join(f"#{tag}" for tag in about["tags"])
    datasets = [
        f"{d.get('path') or d.get('name')}" + (f" [{mark[:12]}]" if (mark := str(d.get("fingerprint") or "")) else "")
        for d in about["datasets"]
    ]
    # The whole text is in --json and in the manifest.
    error = shorten(" ".join((about["error"] or "").split()), 200, mark="...")
    during = about["evaluations_during_training"]
    texts = {e["name"]: e["text"] for e in about["evaluated"]}
    evaluations = [texts.get(name, name) for name in about["evaluations"] if name not in during]
    evaluations += [f"{len(during)} during training"] * bool(during)
    return [
        ("status", about["status"] + (f": {error}" if about["error"] else "")),
        ("warning", "; ".join(about["problems"])),
        ("label", "; ".join(about["labels"])),
        ("what", f"{about['kind']}, recipe {about['recipe']}{', ' + tags if tags else ''}"),
        ("note", about["note"]),
        (
            "started",
            f"{(about['start'] or '?')[:16].replace('T', ' ')} UTC, {ago(about['start'])} ago,"
            f" ran {span(about['seconds'])} on {about['host']}{_processes(about['attempts'])}",
        ),
        ("attempts", ", ".join(attempts) if len(attempts) > 1 else ""),
        *(("changed", f"at step {a['from_step']}: {a['changes_text']}") for a in about["attempts"] if a["changes"]),
        ("command", about["command"]),
        ("data", "; ".join(datasets)),
        ("parent", about["parent_text"]),
        ("code", f"{git['commit'][:12]}{', with changes: code.diff' if git.get('dirty') else ''}" if git else ""),
        ("last step", numbers(about["last_train"], train=True)),
        ("validation", _validation(about["first_validation"], about["last_validation"])),
        ("best", _best(about["best"], about["checkpoints"])),
        ("checkpoints", ", ".join(about["checkpoints"]) or "none"),
        ("rollouts", _rollouts(about["rollout_steps"])),
        ("evaluations", "; ".join(evaluations)),
        ("judge", _judge(about["judge"])),
        ("report", about["report"] or f"none yet: {about['report_command']}"),
        ("continue", about["resume"] or ""),
        ("folder", about["path"]),
    ]


def numbers(line: dict[str, Any] | None, lead: tuple[str, ...] = LEAD, *, train: bool = False) -> str:
    """Return the step of a metrics line, counted as in all screens, and the line's main numbers; "" for None.

    Args:
        lead: metrics that are shown if they exist.
        train: whether the line belongs to a training step; False = to a validation.
    Example: `42: reward/mean 0.81, policy/entropy 0.4`.
    """
    from vlmrl.store.metrics import counted

    if line is None:
        return ""
    values = {
        k: v for k, v in line.items() if k not in ("step", "attempt", "kind", "time") and isinstance(v, (int, float))
    }
    chosen = [k for k in values if k in lead or k.startswith("loss/")] or list(values)[:MOST_NUMBERS]
    step = counted(line["step"]) if train else line["step"]
    return f"{step}: " + ", ".join(f"{k} {values[k]:.4g}" for k in chosen)


def _rollouts(steps: list[int]) -> str:
    """Return the number of steps with rollouts: `24 steps, 1 to 24`; "" for none."""
    from vlmrl.store.metrics import counted

    if not steps:
        return ""
    first, last = min(steps), max(steps)
    return f"{len(steps)} step{plural(len(steps))}, {counted(first)} to {counted(last)}"


def _judge(accounts: dict[str, dict[str, Any]]) -> str:
    """Return what each account asked the judge; "" for none. A cost of 0 is left out: there are no prices then.

    Example: `training 512 calls, cost 0.0312; eval test 9 calls`.
    """
    texts = []
    for account, spent in accounts.items():
        cost = f", cost {spent['cost']:.4f}" if spent["cost"] else ""
        waiting = f" and {spent['reserved']:,} in flight" if spent["reserved"] else ""
        name = "training" if account == "run" else account
        texts.append(f"{name} {number_of(spent['calls'], 'call')}{waiting}{cost}")
    return "; ".join(texts)


def _validation(first: dict[str, Any] | None, last: dict[str, Any] | None) -> str:
    if first is None or last is None:
        return ""
    if first["step"] == last["step"]:
        return f"step {numbers(last)}"
    values = [
        f"{k} {first[k]:.4g} -> {v:.4g}"
        for k, v in last.items()
        if k not in ("step", "attempt") and isinstance(v, (int, float)) and isinstance(first.get(k), (int, float))
    ]
    return f"step {first['step']} -> {last['step']}: " + ", ".join(values[:MOST_NUMBERS])


def _best(best: dict[str, Any] | None, checkpoints: list[str]) -> str:
    if best is None:
        return ""
    kept = f"step-{best['step']:06d}" in checkpoints
    return f"step {best['step']}: {best['metric']} {best['value']:.4g}{'' if kept else ' (no checkpoint of that step)'}"


def _processes(attempts: list[dict[str, Any]]) -> str:
    """Return the number of processes, as `, 2 processes`; "" for one. If attempts differ, list the number of each."""
    counts = [a["processes"] for a in attempts]
    shown = [counts[0]] if len(set(counts)) == 1 else counts
    return f", {', '.join(map(str, shown))} processes" if max(counts, default=1) > 1 else ""


HINT = "vlmrl runs show RUN --rollout 12, or 12/PROMPT, or 12/PROMPT/SAMPLE"


def show_rollout(run: Run, place: str, as_json: bool) -> None:
    """Show the responses of a step, of one of its prompts, or one response.

    Args:
        place: `STEP[/PROMPT[/SAMPLE]]`. Steps are counted from 1. A prompt is given by its id or a prefix of it.
    Raises: StoreError if there is no such step, prompt or sample.
    """
    from vlmrl.redaction.redact import redact_said
    from vlmrl.report.rollout_text import group_fields
    from vlmrl.reward_check.run import finite
    from vlmrl.store.listing import command_line

    step, prompt, sample = _parse(place)
    groups = _groups(run, step)
    if prompt is not None:
        groups = _find(groups, prompt)
    fields = [group_fields(group, sample) for group in groups]
    if emit(finite({"run": run.id, "step": step, "groups": fields}), as_json):
        return
    if prompt is None:
        has_tools = any("turns" in s for group in fields for s in group["samples"])
        rows = [_row(group, has_tools) for group in fields]
        heads = ("prompt", "samples", "mean", "best", *(("calls", "errors", "ended by") if has_tools else ()), "truth")
        show_table(f"step {step}", heads, rows)
        one = ("--rollout", f"{step}/{fields[0]['prompt_id']}")
        say(f"one with its responses: {command_line(('runs', 'show'), run.dir, run.manifest.name, *one)}")
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


def _row(group: Mapping[str, Any], has_tools: bool) -> tuple[str, ...]:
    """Return a prompt's line of the table of a step; with calls, failed calls and endings of its episodes."""
    scores = [s["score"] for s in group["samples"] if s["error"] is None]
    mean, best = (f"{statistics.fmean(scores):.3f}", f"{max(scores):.3f}") if scores else ("-", "-")
    truth = shorten(one_line(_as_json(group["truth"])), 60)
    turns = [turn for s in group["samples"] for turn in s.get("turns", ())]
    calls, errors = sum(len(turn["calls"]) for turn in turns), sum(turn.get("errors", 0) for turn in turns)
    endings = Counter(s["ending"] for s in group["samples"] if "ending" in s).most_common()
    ends = ", ".join(f"{ending} {count}" for ending, count in endings)
    episodes = (str(calls), str(errors), ends) if has_tools else ()
    return one_line(group["prompt_id"]), str(len(group["samples"])), mean, best, *episodes, truth


def _as_json(truth: Mapping[str, Any]) -> str:
    return json.dumps(dict(truth), ensure_ascii=False, default=str)


def _lines(group: Mapping[str, Any]) -> list[str]:
    from vlmrl.report.rollout_text import ending_words, image_lines, sample_lines

    lines = [f"{group['prompt_id']}  of {group['source']}", f"truth: {_as_json(group['truth'])}", *image_lines(group)]
    lines += ["prompt:", *(f"  {line}" for line in group["prompt"].splitlines())]
    for s in group["samples"]:
        parts = "  ".join(f"{name} {'-' if v is None else f'{v:.3f}'}" for name, v in s["parts"].items())
        score = "no score" if s["error"] is not None else f"{s['score']:.3f}"
        ending = f", {words}" if (words := ending_words(s)) else ""
        use = ", not trained on" if s["masked"] else f", advantage {s['advantage']:+.3f}"
        lines += ["", f"sample {s['sample']}: {score}  {parts}  ({s['tokens']} tokens{ending}{use})"]
        lines += [f"  [{one_line(message)}]" for message in (s["error"] or s["note"],) if message]
        lines += [f"  {line}" for line in sample_lines(s)]
        if not s.get("turns"):
            lines += [f"  | {line}" for line in s["text"].splitlines() or [""]]
    return [visible(line) for line in lines]


def show_pruned(run_dir: Path, names: list[str], freed: int, really: bool) -> None:
    from vlmrl.store.layout import complete_checkpoints

    kept = ", ".join(p.name for p in complete_checkpoints(run_dir) if p.name not in names) or "none"
    checkpoints = [name for name in names if "/" not in name]
    counts = {"rollout file": "rollouts/", "image shard": "media/"}
    numbers = {what: sum(n.startswith(prefix) for n in names) for what, prefix in counts.items()}
    parts = checkpoints + [f"{n} {what}{plural(n)}" for what, n in numbers.items() if n]
    verb = "deleted" if really else "would delete"
    tell(
        f"{verb} {', '.join(parts)} ({size_text(freed)}); kept: {kept}" if parts else f"nothing to delete; kept: {kept}"
    )
    if parts and not really:
        say("add --yes to delete them")


def run_line(run: ListedRun) -> dict[str, Any]:
    from vlmrl.store.layout import ago
    from vlmrl.store.metrics import counted, read_tail
    from vlmrl.store.summary import evaluated

    raw = run.raw
    tail = read_tail(run.dir) if raw else None
    best = raw.get("best")
    return {
        "id": run.id,
        "name": raw.get("name"),
        "kind": raw.get("kind", ""),
        "status": run.status,
        "step": counted(tail["step"]) if tail else None,
        "best": best if isinstance(best, dict) else None,
        "start": raw.get("start"),
        "end": raw.get("end"),
        "evaluated": evaluated(run.dir) if raw.get("kind") == "eval" else [],
        "age": ago(raw.get("start")),
        "tags": list(raw.get("tags", ())),
        "labels": list(raw.get("labels", ())),
        "note": raw.get("note", ""),
        "parent": raw.get("parent"),
        "problem": run.problem,
        "error": raw.get("error"),
        "path": str(run.dir),
    }


def about_cell(line: dict[str, Any]) -> str:
    """Return problem, error, tags, labels, note, parent and evaluations of a run in one cell."""
    parts = [line["problem"], line["error"], *(f"#{t}" for t in line["tags"]), *line["labels"], line["note"]]
    parent = line["parent"] or {}
    parts += [f"fork of {parent['run']}@{parent['step']}"] if "step" in parent else []
    parts += ["; ".join(one["text"] for one in line["evaluated"])]
    return " ".join(part for part in parts if part)


def size_text(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


MOST_PHASES = 3
"""Maximum number of phases of a step that are shown with their times, the slowest first."""
SPARE_OF_STEPS = ("phases", "memory", "gap", "tok/s", "entropy", "length", "kl")
"""Columns of the table of steps that a narrow terminal does not show, the first ones first."""
SHORTEST_TABLE = 5
"""Minimum number of rows of the table, even if the terminal is lower."""
LINES_AROUND_TABLE = 8
"""Number of terminal lines that are reserved for output other than the table."""


def step_table(followed: Followed, width: int, height: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    from vlmrl.store.metrics import counted

    train = followed.lines()
    shown = train[-max(SHORTEST_TABLE, height - LINES_AROUND_TABLE) :]
    rows = [{"step": str(counted(line["step"])), **columns(line)} for line in shown]
    names = [n for n in (rows[-1] if rows else {}) if any(row.get(n) for row in rows)]
    cells = [names, *([one_line(row.get(name, "")) for name in names] for row in rows)]
    (head, *lines), _ = table_lines(cells, width, SPARE_OF_STEPS) if rows else (["no step yet"], ())
    texts = (_headline(followed), _validation_text(followed))
    return Group(*map(Text, texts), Text(head, "bold" if rows else ""), *map(Text, lines))


def _headline(followed: Followed) -> str:
    from vlmrl.store.layout import span
    from vlmrl.store.metrics import counted

    run, train = followed.run, followed.lines()
    name = f" ({run.manifest.name})" if run.manifest.name else ""
    left = followed.seconds_left
    step = step_of(counted(train[-1]["step"]) if train else 0, followed.steps)
    parts = [f"{run.id}{name}", run.status, f"step {step}"]
    if left is not None and run.status == "running":
        parts.append(f"{span(left)} left")
    if run.attempt > 1:
        parts.append(f"attempt {run.attempt}")
    if waiting := waiting_text(followed):
        parts.append(waiting)
    return "  ".join(parts)


def waiting_text(followed: Followed) -> str:
    """Return what the run waits for, and how long; "" if it does not wait."""
    from vlmrl.store.layout import ago

    wait = followed.waits_for if followed.run.status == "running" else None
    return "" if wait is None else f"{wait['event']} for {ago(wait['time'])}: {wait['reason']}"


def _validation_text(followed: Followed) -> str:
    lines, best = followed.lines("validation"), followed.run.manifest.best
    if not lines:
        return "no validation yet"
    line = f"validation at step {lines[-1]['step']}: {_number(lines[-1].get('eval/metric'), '.4f')}"
    line += f"; best {best.metric} {best.value:.4f} at step {best.step}" if best else ""
    return "\n".join([line, *(f"  {cell}: {'  '.join(numbers)}" for cell, numbers in by_setting(lines[-1]).items())])


def columns(line: Mapping[str, Any]) -> dict[str, str]:
    """Return column -> text for a step of reinforcement or supervised learning; "" if the step lacks the metric."""
    from vlmrl.store.summary import phase_seconds

    memory = line.get("memory/peak_bytes")
    phases = list(phase_seconds([dict(line)]).items())[:MOST_PHASES]
    lengths = [_number(line.get(f"rollout/response_tokens_{which}"), ".0f") for which in ("mean", "max")]
    return {
        "reward": _number(line.get("reward/mean"), ".3f"),
        "accuracy": _number(line.get("reward/accuracy"), ".3f"),
        "loss": _number(line.get("loss/cross_entropy"), ".4f"),
        "length": "/".join(filter(None, lengths)),
        "cut": _number(line.get("rollout/truncated_share"), ".0%"),
        "tool errors": _number(line.get("episode/tool_errors"), ".0%"),
        "dead": _number(line.get("rollout/dead_group_share"), ".0%"),
        "gap": _number(line.get("policy/sampler_gap_max"), ".1e"),
        "entropy": _number(line.get("policy/entropy"), ".2f"),
        "kl": _number(line.get("loss/kl", line.get("policy/kl_in_reward")), ".3f"),
        "tok/s": _number(line.get("rollout/tokens_per_second"), ",.0f"),
        "memory": "" if memory is None else f"{memory / 2**30:.1f} GiB",
        "seconds": _number(line.get("time/step_seconds"), ".1f"),
        "phases": " ".join(f"{name} {seconds:.1f}" for name, seconds in phases),
        "!": str(line.get("health/warning") or ""),
    }


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else ""


def step_of(step: int, steps: int | None) -> str:
    return f"{step}/{steps}" if steps is not None else str(step)


MOST_TEXT = 160
"""Maximum number of characters of a quoted response."""


def show_diagnosis(diagnosis: Diagnosis) -> None:
    tell(f"{diagnosis.run}: {diagnosis.status}; read: {diagnosis.read}")
    changes = [f"{name} {a:.3g} -> {b:.3g}" for name, (a, b) in diagnosis.figures.items()]
    if changes:
        tell(f"first third of the steps -> last third: {', '.join(changes)}")
    for note in diagnosis.notes:
        say(f"warning: {note}")
    for number, cause in enumerate(diagnosis.causes, 1):
        first = next((n for n, one in enumerate(diagnosis.causes[: number - 1], 1) if cause.name in one.follows), None)
        if first is not None:
            tell(f"\n{number}. {cause.level}, a consequence of cause {first}: {cause.what}")
        else:
            _show_cause(number, cause)
    if diagnosis.healthy:
        first, last = diagnosis.figures.get("reward", (0.0, 1.0))
        flat = f", but no rise of the reward in {number_of(diagnosis.steps, 'step')} either" if last <= first else ""
        tell(f"\nno fault found{flat}" + ("; notes are not faults" if diagnosis.causes else ""))


def _show_cause(number: int, cause: Cause) -> None:
    tell(f"\n{number}. {cause.level}: {cause.what}")
    for line in cause.evidence:
        tell(f"   {line}")
    for row in cause.rows:
        note = f" ({_quoted(row['note'])[1:-1]})" if row["note"] else ""
        score = NO_SCORE.get(row["status"], INAPPLICABLE) if row["score"] is None else f"{row['score']:.3f}"
        tell(f"   {row['where']}: {score}{note}\n     {_quoted(row['text'])}")
    tell(f"   next: {cause.command}")


def _quoted(text: str) -> str:
    """Return a response on one line, in quotes. The middle of a long response is left out."""
    quoted = visible_json(json.dumps(text, ensure_ascii=False))
    return quoted if len(quoted) <= MOST_TEXT else f"{quoted[: MOST_TEXT // 2]} ... {quoted[-MOST_TEXT // 2 :]}"
