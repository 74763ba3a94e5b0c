"""`vlmrl reward-check`: score saved rollouts again, compare two rewards, attack a reward. On the CPU, without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli.output import JSON_HELP, console, emit
from vlmrl.errors import RewardError

if TYPE_CHECKING:
    from rich.console import Console

TEXT_CHARS = 240
ROLLOUTS_HELP = "A run (name, prefix, `last`), a run or rollouts folder, or one Parquet file of rollouts."


def register(app: typer.Typer) -> None:
    app.command("reward-check", short_help="Score saved rollouts again.")(reward_check)


def reward_check(
    rollouts: Annotated[str, typer.Argument(help=ROLLOUTS_HELP)],
    reward: Annotated[
        str | None, typer.Option(help="Score with this reward: built-in name or file.py:function.")
    ] = None,
    diff: Annotated[str | None, typer.Option(help="What this other reward would have changed.")] = None,
    weights: Annotated[str | None, typer.Option(help="Weights of its parts: answer=1,format=0.2.")] = None,
    args: Annotated[list[str] | None, typer.Option("--set", help="One of its arguments: --set partial=false.")] = None,
    style: Annotated[
        str, typer.Option(help="Calling convention of a function: auto, vlmrl, trl, verl, easyr1.")
    ] = "auto",
    probe: Annotated[bool, typer.Option("--probe", help="Attack the reward with known tricks.")] = False,
    steps: Annotated[str | None, typer.Option(help="Only these steps: 10 or 10:20, both included.")] = None,
    source: Annotated[str | None, typer.Option(help="Only rollouts of this [[data]] entry.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many rows of each kind to show.")] = 3,
    runs: Annotated[Path | None, typer.Option(help="Folder of the runs; default: $VLMRL_RUNS, else ./runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Score saved rollouts again and see what the reward pays for; compare it with another reward; attack it.

    Without options the run's own reward is used, and must say what it said in training, to the digit.
    --weights, --set and --style belong to --diff when given, else to --reward, else they change the run's own reward.

    Example: vlmrl reward-check last --diff my_reward.py:score
    """
    from vlmrl.check.rescore import parse_weights
    from vlmrl.check.reward_check import RewardQuestion, check_rewards
    from vlmrl.check.saved import open_saved
    from vlmrl.store.layout import runs_root

    question = RewardQuestion(
        reward, diff, dict(_argument(a) for a in args or []), parse_weights(weights) if weights else None, style,
        probe, rows,
    )  # fmt: skip
    saved = open_saved(rollouts, runs_root(runs), steps=_steps(steps), source=source)
    report = check_rewards(saved, question)
    emit(_finite(report), as_json)
    if not as_json:
        _show(report, console())
    stored = report["stored"]
    if stored and not stored["equal"] and not any(r["changed"] for r in report["rewards"].values()):
        raise RewardError(
            f"{stored['different']} of {report['samples']} scores are not what was stored, and the reward is the same",
            where=report["path"],
            hint="the reward is not deterministic, or it reads something that has changed (a file, the network, time)",
        )


def _argument(text: str) -> tuple[str, Any]:
    """`name=value`; the value as in TOML, or as plain text."""
    from vlmrl.recipe.files import tomllib

    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise RewardError(f"--set {text!r} is not of the form name=value")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text.strip())
    if match is None:
        raise RewardError(f"--steps {text!r} is not a step or first:last")
    return int(match.group(1)), int(match.group(2) or match.group(1))


def _finite(value: Any) -> Any:
    """The report as strict JSON: NaN and infinities as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _show(report: Mapping[str, Any], out: Console) -> None:
    first, last = report["steps"]
    where = report["run"] or report["path"]
    out.print(
        f"{where}: {report['samples']} responses in {report['groups']} groups, steps {first} to {last}", markup=False
    )
    for source, r in report["rewards"].items():
        weights = ", ".join(f"{k} {v:g}" for k, v in r["weights"].items()) or "its own"
        out.print(f"  {source}: reward {r['name']}, weights {weights}", markup=False)
        if r["changed"]:
            out.print(f"  warning: {r['changed']}", style="yellow", markup=False)
    for note in report["notes"]:
        out.print(f"  note: {note}", style="yellow", markup=False)
    if report["stored"] is not None:
        _show_stored(report["stored"], report["samples"], out)
    _show_parts(report["parts"], out)
    _show_reasons(report["reasons"], out)
    if report["disagreements"] is not None:
        _show_disagreements(report["disagreements"], out)
    if report["diff"] is not None:
        _show_diff(report["diff"], out)
    for source, probes in (report["probes"] or {}).items():
        _show_probes(source, probes, out)
    out.print(f"{report['seconds']:.1f} s", style="dim")


def _show_stored(stored: Mapping[str, Any], samples: int, out: Console) -> None:
    if stored["equal"]:
        out.print(
            f"  scored again: all {samples} scores and parts are equal to the stored ones, to the digit", style="green"
        )
        return
    out.print(
        f"  scored again: {stored['different']} of {samples} differ from what was stored, "
        f"by up to {stored['largest_difference']:.6g}; failed then {stored['failed_then']}, now {stored['failed_now']}",
        style="bold red",
    )
    _show_rows("largest differences", stored["worst"], out, compare=True)


def _show_parts(parts: Mapping[str, Mapping[str, Any]], out: Console) -> None:
    heads = ("part", "mean", "min", "max", "at min", "at max", "none", "corr. with value")
    rows = [
        (name, _number(p["mean"]), _number(p["min"]), _number(p["max"]), _share(p["share_at_min"]),
         _share(p["share_at_max"]), str(p.get("none") or ""), _number(p["correlation"], 2))
        for name, p in parts.items()
    ]  # fmt: skip
    _table("what the reward pays", heads, rows, out)


def _show_reasons(reasons: Sequence[Mapping[str, Any]], out: Console) -> None:
    if reasons:
        rows = [(str(r["count"]), _share(r["share"]), _clean(r["example"])) for r in reasons]
        _table("notes and failures", ("rows", "share", "reason (an example)"), rows, out, right=2)


def _show_disagreements(found: Mapping[str, Any], out: Console) -> None:
    agreement = f"a right answer outscores a wrong one of its group in {_share(found['agreement'])} of pairs"
    if found["agreement"] is None:
        agreement = "no group has both a right and a wrong answer"
    out.print(f"\naccuracy {_share(found['accuracy'])}; {agreement}", markup=False)
    _show_rows("wrong, yet paid most", found["wrong_but_paid"], out)
    _show_rows("right, yet paid least", found["right_but_unpaid"], out)


def _show_diff(diff: Mapping[str, Any], out: Console) -> None:
    names, value, groups, advantages = diff["names"], diff["value"], diff["groups"], diff["advantages"]
    out.print(f"\n{names['first']}  ->  {names['second']}", style="bold", markup=False)
    heads = ("", "first", "second", "rows that change")
    rows = [("value", _number(value["first"]), _number(value["second"]), _share(value["changed_share"]))]
    rows += [
        (n, _number(p["first"]), _number(p["second"]), _share(p["changed_share"])) for n, p in diff["parts"].items()
    ]
    _table("means", heads, rows, out)
    alive = groups["alive_in_both"]
    facts = [
        ("groups without a signal", f"{groups['dead_first']} -> {groups['dead_second']} of {groups['number']} "
         f"({groups['died']} lost, {groups['revived']} gained)"),
        ("order within groups", f"rank correlation {_number(groups['same_order'], 3)} over {alive} groups"),
        ("best sample changes", f"in {groups['best_changes']} of the {alive} groups alive in both"),
        ("advantages", f"correlation {_number(advantages['correlation'], 3)}, sign turns for "
         f"{_share(advantages['flipped_share'])} of responses, mean change {_number(advantages['moved'], 3)} "
         f"({advantages['estimator']})"),
    ]  # fmt: skip
    if advantages["stand_in"]:
        facts.append(("", advantages["stand_in"]))
    if any(diff["failed"].values()):
        facts.append(("failed", f"{diff['failed']['first']} -> {diff['failed']['second']} rows"))
    _table("what training would have seen", ("", ""), facts, out, right=0)
    _show_rows("changed most", diff["changed"], out, diff=True)


def _show_probes(source: str, probes: Mapping[str, Any], out: Console) -> None:
    base, tried = probes["baseline"], probes["probes"]
    out.print(
        f"\n{len(tried)} tricks against {source}, on {probes['rows']} truths; "
        f"an honest answer without a clue earns {base['value']:.4g} ({_clean(base['answer'])})",
        style="bold",
        markup=False,
    )
    quiet = ", ".join(f"{p['name']} {_number(p['mean'])}" for p in tried if not p["flagged"])
    out.print(f"  no more than that: {quiet or 'none'}", markup=False)
    loud = [p for p in tried if p["flagged"]]
    for p in loud:
        earned = f"fails on {p['errors']} rows: {_clean(p['error'])}" if p["errors"] else f"earns {_number(p['mean'])}"
        out.print(f"  {p['name']} ({p['idea']}): {earned}", style="red", markup=False)
        out.print(f"      {_clean(p['example'])[:TEXT_CHARS]}", style="dim", markup=False)
    if loud:
        out.print(f"{len(loud)} trick(s) pay or break the reward: a model will find them", style="bold red")
    else:
        out.print("no trick earns more than the honest answer", style="green")


def _show_rows(
    title: str, rows: Sequence[Mapping[str, Any]], out: Console, *, compare: bool = False, diff: bool = False
) -> None:
    if not rows:
        return
    out.print(f"\n{title}", style="bold")
    for row in rows:
        value, stored = _number(row["new"]["value"]), _number(row["stored"]["value"], 6)
        if compare:
            value = f"stored {stored}, now {_number(row['new']['value'], 6)}"
        if diff:
            before, after = row["advantage"]
            value = f"{_number(row['first'])} -> {value}, advantage {before:+.3f} -> {after:+.3f}"
        parts = ", ".join(f"{k} {_number(v)}" for k, v in row["new"]["parts"].items())
        out.print(f"  {row['where']}: {value}  ({row['new']['error'] or parts})", markup=False)
        out.print(f"      {_clean(row['text'])[:TEXT_CHARS]}", style="dim", markup=False)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], out: Console, right: int = 99) -> None:
    """`right`: how many columns after the first are numbers; with fewer than all, the first ones are."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE_HEAD, title=Text(f"\n{title}"), title_style="bold", title_justify="left", show_header=any(heads)
    )
    for index, head in enumerate(heads):
        number = (right == 99 and index > 0) or (right < 99 and index < right)
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _clean(text: str) -> str:
    """A model's text on one line, without what could steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
