"""Screen of `vlmrl reward-check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import draw_quote, draw_table, line_of_code, number, share, shorten
from vlmrl.cli.show.probe_report import show_probes
from vlmrl.untrusted import one_line, plural

if TYPE_CHECKING:
    from rich.console import Console

TEXT_CHARS = 240
"""Maximum number of characters that are shown of a response."""


def show(report: Mapping[str, Any], out: Console, most: int) -> None:
    """Print the whole report, with at most `most` rows of each kind."""
    out.print(_headline(report))
    for source, r in report["rewards"].items():
        weights = ", ".join(f"{k} {v:g}" for k, v in r["weights"].items()) or "its own"
        accuracy = f", accuracy is its part {r['accuracy']}" if r["accuracy"] else ""
        out.print(f"  {source}: reward {one_line(r['identity'])}, weights {weights}{accuracy}")
        if r["changed"]:
            out.print(f"  warning: {r['changed']}", style="yellow")
    for note in report["notes"]:
        out.print(f"  note: {one_line(note)}", style="yellow")
    if report["errors"]["number"]:
        out.print(f"  the reward failed on {report['errors']['number']:,} rows", style="bold red")
        _show_rows("failed", report["errors"]["first"][:most], out)
    if down := report["errors"]["unavailable"]:
        out.print(f"  the reward was unavailable for {down:,} rows", style="yellow")
    if report["stored"] is not None:
        _show_stored(report["stored"], report["samples"], out, most)
    _show_parts(report["parts"], out)
    _show_reasons(report["reasons"], out)
    if report["disagreements"] is not None:
        _show_disagreements(report["disagreements"], out, most)
    if report["extremes"] is not None and report["diff"] is None:
        _show_rows("earned most", report["extremes"]["paid_most"][:most], out)
        _show_rows("earned least", report["extremes"]["paid_least"][:most], out)
    _show_signs(report, out)
    if report["diff"] is not None:
        _show_diff(report["diff"], out, most)
    for source, probes in (report["probes"] or {}).items():
        show_probes(source, probes, out)
    for place in report["written"].values():
        out.print(f"written: {place}")
    out.print(f"{report['samples']:,} responses in {report['seconds']:.1f} s", style="dim")


def _headline(report: Mapping[str, Any]) -> str:
    first, last = (step + report["first_step"] for step in report["steps"])
    groups = f" in {report['groups']:,} groups" if report["groups"] is not None else ""
    place = f", steps {first} to {last}" if last > first or report["run"] else ""
    if report["evaluations"]:
        place = f", of the evaluation{plural(len(report['evaluations']))} {', '.join(report['evaluations'])}"
    return f"{report['run'] or report['path']}: {report['samples']:,} responses{groups}{place}"


def _show_signs(report: Mapping[str, Any], out: Console) -> None:
    """Print the correlations with the score, and the share of groups without a signal, one per line."""
    correlations, dead = report["correlations"], report["dead_groups"]
    out.print("\ncorrelations with the score", style="bold")
    if dead is not None:
        out.print(f"  {_dead(dead)}")
    length = correlations["length"]
    out.print(
        f"  length: rank correlation {number(length['spearman'], 2)}, Pearson's {number(length['pearson'], 2)}"
        + (
            f"; cut off {share(correlations['cut']['share'])}, earn {number(correlations['cut']['score_cut'])} "
            f"(the others {number(correlations['cut']['score_whole'])})"
            if correlations["cut"]["share"]
            else ""
        )
    )
    ngrams = correlations["ngrams"]
    if ngrams["found"]:
        words = "; ".join(
            f"{one_line(n['ngram'])!r} {share(n['first'])} -> {share(n['last'])}, earns {n['pays']:+.3f}"
            for n in ngrams["found"][:5]
        )
        out.print(f"  words and characters that became frequent and earn more: {words}")
    elif ngrams["thirds"]:
        out.print(f"  words and characters that became frequent and earn more: none in {ngrams['texts']:,} texts")


def _dead(dead: Mapping[str, Any]) -> str:
    steps = dead["by_step"]
    line = f"groups without a signal: {dead['dead']:,} of {dead['number']:,} ({share(dead['dead_share'])})"
    if len(steps) > 1:
        line += f"; first step {share(steps[0][2])}, last {share(steps[-1][2])}"
    return line


def _show_stored(stored: Mapping[str, Any], samples: int, out: Console, most: int) -> None:
    if stored["equal"]:
        out.print(
            f"  scored again: all {samples:,} scores and parts are equal to the stored ones, to the digit",
            style="green",
        )
        return
    out.print(
        f"  scored again: {stored['different']:,} of {samples:,} differ from the stored ones, "
        f"by up to {stored['largest_difference']:.6g}; failed then {stored['failed_then']}, now {stored['failed_now']}",
        style="bold red",
    )
    _show_rows("not as stored", stored["worst"][:most], out, compare=True)


def _show_parts(parts: Mapping[str, Mapping[str, Any]], out: Console) -> None:
    heads = ("part", "mean", "min", "max", "at min", "at max", "none", "correlation with value")
    rows = [
        (
            name,
            number(p["mean"]),
            number(p["min"]),
            number(p["max"]),
            share(p["share_at_min"]),
            share(p["share_at_max"]),
            str(p.get("none") or ""),
            number(p["correlation"], 2),
        )
        for name, p in parts.items()
    ]
    draw_table("what the reward pays", heads, rows, out)


def _show_reasons(reasons: Sequence[Mapping[str, Any]], out: Console) -> None:
    if reasons:
        rows = [(f"{r['count']:,}", share(r["share"]), line_of_code(r["example"])) for r in reasons]
        draw_table("notes and failures", ("rows", "share", "reason (an example)"), rows, out, right=2)


def _show_disagreements(disagreements: Mapping[str, Any], out: Console, most: int) -> None:
    if not disagreements["binary"]:
        out.print(f"\nmean accuracy {number(disagreements['accuracy'])}: answers are not only right or wrong")
        return
    agreement = f"a right answer outscores a wrong one of its group in {share(disagreements['agreement'])} of pairs"
    if disagreements["agreement"] is None:
        agreement = "no group has both a right and a wrong answer"
    wrong, right = disagreements["wrong"], disagreements["right"]
    right_share = right["number"] / (right["number"] + wrong["number"])
    accuracy = share(disagreements["accuracy"])
    if abs(disagreements["accuracy"] - right_share) > 1e-9:  # wrong answers are -1
        accuracy = f"{number(disagreements['accuracy'])}, the mean; {share(right_share)} right"
    out.print(f"\naccuracy {accuracy}; {agreement}")
    out.print(f"right answers earn {number(right['mean'])} on average, wrong ones {number(wrong['mean'])}")
    if wrong["paid"]:
        of = f"wrong, yet earned most ({wrong['paid']:,} of {wrong['number']:,} earn more than the lowest score)"
        _show_rows(of, disagreements["wrong_but_paid"][:most], out)
    elif wrong["number"]:
        out.print(f"no wrong answer earned more than the lowest score: all {wrong['number']:,} earn it", style="green")
    if right["unpaid"]:
        of = f"right, yet earned least ({right['unpaid']:,} of {right['number']:,} earn less than the highest score)"
        _show_rows(of, disagreements["right_but_unpaid"][:most], out)
    elif right["number"]:
        out.print(f"every right answer earned the highest score: all {right['number']:,} of them", style="green")


def _show_diff(diff: Mapping[str, Any], out: Console, most: int) -> None:
    names, value = diff["names"], diff["value"]
    out.print(f"\n{names['first']}  ->  {names['second']}", style="bold")
    heads = ("", "first", "second", "rows that change")
    rows = [("value", number(value["first"]), number(value["second"]), share(value["changed_share"]))]
    rows += [(n, number(p["first"]), number(p["second"]), share(p["changed_share"])) for n, p in diff["parts"].items()]
    draw_table("means", heads, rows, out)
    facts = [
        (
            "rows",
            f"{value['changed']:,} of {diff['compared']:,} change; rank correlation "
            f"{number(value['rank_correlation'], 3)}",
        ),
        *_what_training_sees(diff),
    ]
    if any(diff["failed"].values()):
        facts.append(("failed", f"{diff['failed']['first']} -> {diff['failed']['second']} rows"))
    draw_table("what training would have seen", ("", ""), facts, out, right=0)
    _show_rows("changed most", diff["changed"][:most], out, diff=True)


def _what_training_sees(diff: Mapping[str, Any]) -> list[tuple[str, str]]:
    groups, advantages = diff["groups"], diff["advantages"]
    if groups is None:
        return [("groups", "nothing says which rows belong to one prompt (--columns group=...)")]
    alive = groups["alive_in_both"]
    facts = [
        (
            "groups without a signal",
            f"{groups['dead_first']} -> {groups['dead_second']} of {groups['number']} "
            f"({groups['died']} lose it, {groups['revived']} gain one)",
        ),
        ("order within groups", f"rank correlation {number(groups['same_order'], 3)} over {alive} groups"),
        ("best sample changes", f"in {groups['best_changes']} of the {alive} groups with a signal in both"),
        (
            "advantages",
            f"correlation {number(advantages['correlation'], 3)}, sign changes for "
            f"{share(advantages['flipped_share'])} of responses, mean change {number(advantages['moved'], 3)} "
            f"({advantages['estimator']})",
        ),
    ]
    return [*facts, ("", advantages["stand_in"])] if advantages["stand_in"] else facts


def _show_rows(
    title: str, rows: Sequence[Mapping[str, Any]], out: Console, *, compare: bool = False, diff: bool = False
) -> None:
    if not rows:
        return
    out.print(f"\n{title}", style="bold")
    for row in rows:
        value = number(row["new"]["value"])
        if compare:
            value = f"stored {number(row['stored']['value'], 6)}, now {number(row['new']['value'], 6)}"
        if diff:
            before, after = row["advantage"]
            value = f"{number(row['old']['value'])} -> {value}, advantage {before:+.3f} -> {after:+.3f}"
        parts = ", ".join(f"{one_line(k)} {number(v)}" for k, v in row["new"]["parts"].items())
        note = f"; {line_of_code(row['new']['note'])}" if row["new"]["note"] else ""
        reason = line_of_code(row["new"]["error"]) if row["new"]["error"] else parts + note
        out.print(f"  {one_line(row['where'])}: {value}  ({reason})")
        draw_quote(shorten(one_line(row["text"]), TEXT_CHARS), out, 6)
