"""Screen of `vlmrl runs show`: the facts of a run, one per line."""

from __future__ import annotations

from typing import Any

from vlmrl.cli.output import shorten, tell

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
    tags = " ".join(f"#{tag}" for tag in about["tags"])
    return [
        ("status", about["status"] + (f": {_short(about['error'])}" if about["error"] else "")),
        ("warning", "; ".join(about["problems"])),
        ("label", "; ".join(about["labels"])),
        ("what", f"{about['kind']}, recipe {about['recipe']}{', ' + tags if tags else ''}"),
        ("note", about["note"]),
        (
            "started",
            f"{(about['start'] or '?')[:16].replace('T', ' ')} UTC, {ago(about['start'])} ago,"
            f" ran {span(about['seconds'])} on {about['host']}{_processes(about['attempts'])}",
        ),
        ("attempts", _attempts(about["attempts"])),
        *(("changed", f"at step {a['from_step']}: {a['changes_text']}") for a in about["attempts"] if a["changes"]),
        ("command", about["command"]),
        ("data", "; ".join(_dataset(d) for d in about["datasets"])),
        ("parent", about["parent_text"]),
        ("code", f"{git['commit'][:12]}{', with changes: code.diff' if git.get('dirty') else ''}" if git else ""),
        ("last step", numbers(about["last_train"], train=True)),
        ("validation", _validation(about["first_validation"], about["last_validation"])),
        ("best", _best(about["best"], about["checkpoints"])),
        ("checkpoints", ", ".join(about["checkpoints"]) or "none"),
        ("rollouts", _rollouts(about["rollout_steps"])),
        ("evaluations", _evaluations(about["evaluations"], about["evaluations_during_training"])),
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
    return f"{len(steps)} step{'s' if len(steps) > 1 else ''}, {counted(first)} to {counted(last)}"


def _judge(accounts: dict[str, dict[str, Any]]) -> str:
    """Return what each account asked the judge; "" for none. A cost of 0 is left out: there are no prices then.

    Example: `training 512 calls, cost 0.0312; eval test 9 calls`.
    """
    texts = []
    for account, spent in accounts.items():
        cost = f", cost {spent['cost']:.4f}" if spent["cost"] else ""
        waiting = f" and {spent['reserved']:,} in flight" if spent["reserved"] else ""
        name = "training" if account == "run" else account
        texts.append(f"{name} {spent['calls']:,} call{'s' if spent['calls'] != 1 else ''}{waiting}{cost}")
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


def _attempts(attempts: list[dict[str, Any]]) -> str:
    if len(attempts) < 2:
        return ""
    return ", ".join(f"{a['number']} from step {a['from_step']} ({a['status']})" for a in attempts)


def _dataset(entry: dict[str, Any]) -> str:
    mark = str(entry.get("fingerprint") or "")[:12]
    return f"{entry.get('path') or entry.get('name')}" + (f" [{mark}]" if mark else "")


def _evaluations(names: list[str], during: list[str]) -> str:
    """Return the names of evaluations by `vlmrl eval`, and the number of those during training."""
    own = [name for name in names if name not in during]
    return ", ".join([*own, *([f"{len(during)} during training"] if during else [])])


def _short(text: str) -> str:
    """Return the text on one line, cut at 200 characters; the whole text is in --json and in the manifest."""
    return shorten(" ".join(text.split()), 200, mark="...")
