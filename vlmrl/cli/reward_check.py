"""`vlmrl reward-check`: score saved rollouts again, compare two rewards, attack a reward. On the CPU, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, draw_quote, draw_table, emit, line_of_code, number, say, share, shorten, tell
from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.untrusted import number_of, one_line, plural

if TYPE_CHECKING:
    from rich.console import Console

    from vlmrl.reward_check.scoring import SavedResponses


FAILED = 3
"""Exit code when a condition of --fail-on holds."""
NOT_PROBED = 5
"""Exit code when --probe does not know how a right answer is written, and no condition of --fail-on holds."""
ROWS_OF_PAGE = 24
"""Minimum number of responses of each kind on the HTML page of --html."""
INPUT_HELP = (
    "A run (name, prefix, `last`), a folder of a run or of rollouts, a Parquet file of rollouts, the rows of an "
    "evaluation (RUN/eval/NAME/rows.parquet), any JSONL, CSV or Parquet file with a response and a ground truth per "
    "row, or a folder of N.jsonl, one per step."
)
REWARD_HELP = "Score with this reward: a built-in, file.py:function, or profile:NAME of the task."


def register(app: typer.Typer) -> None:
    app.command("reward-check", short_help="Score saved responses again; compare and attack rewards.")(reward_check)


def reward_check(
    rollouts: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    reward: Annotated[str | None, typer.Option(help=REWARD_HELP)] = None,
    profile: Annotated[str | None, typer.Option(help="Score with this reward profile of the task.")] = None,
    diff: Annotated[
        str | None, typer.Option(help="Show what this other reward would have changed; given like --reward.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Weights of the reward's parts: answer=1,format=0.2.")] = None,
    args: Annotated[
        list[str] | None, typer.Option("--set", help="Argument of the reward: --set partial=false. May be repeated.")
    ] = None,
    style: Annotated[
        str, typer.Option(help="Calling convention of a function: auto, vlmrl, trl, verl, easyr1.")
    ] = "auto",
    task: Annotated[
        str | None, typer.Option(help="Task that the responses of a table answer: a name or file.py:function.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the task: how much it asks for.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of a table: response=output,ground_truth=gts.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Attack the reward with known tricks.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Run the calls of saved episodes again, in place of the reward.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the scores to a .parquet, .jsonl or .csv file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page of the responses with their images.")] = None,
    fail_on: Annotated[
        str | None, typer.Option(help="Exit with code 3 if a condition holds: 'probe,dead_groups>0.5,errors>0'.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps, from 1: 10 or 10:20, both included.")] = None,
    source: Annotated[str | None, typer.Option(help="Only rollouts of this [[data]] entry.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows of each kind to show.")] = 3,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Count unreadable rows and failures instead of stopping.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes for built-in rewards; 0 = one per core.")] = 0,
    runs: options.Runs = None,
    debug: options.Debug = False,
    as_json: options.Json = False,
) -> None:
    """Score saved responses again, to see what the reward pays for, compare it with another reward, or attack it.

    Without options a run's own reward is used. It must give the scores of training again, to the digit. --weights,
    --set and --style apply to --diff if it is given, else to --reward, else they change the run's own reward.

    --fail-on takes conditions joined by commas, each a name or a name with a bound (docs/reward-check.md lists them).
    If one holds, the exit code is 3. If the probe cannot find out how a right answer is written, it says "not probed",
    and the exit code is 5.

    --replay runs the tools of saved episodes again, with the stored calls, and compares what they return with what is
    stored. If an episode differs, the exit code is 3.

    Example: vlmrl reward-check last --diff my_reward.py:score

    Example: vlmrl reward-check answers.jsonl --task fungi --out scores.parquet
    """
    from vlmrl.process import give_terminal

    _require_input(Path(rollouts), runs)
    # Imported here: a wrong name is reported before the tasks are loaded.
    from vlmrl.reward_check.rescore import PROFILE, parse_weights
    from vlmrl.reward_check.run import (
        RewardQuestion,
        check_out,
        check_rewards,
        finite,
        needs_probe,
        parse_limits,
        write_scores,
    )
    from vlmrl.reward_check.scoring import TRY_LATER
    from vlmrl.store.provenance import usable_cores

    if debug:
        give_terminal()
    _refuse({"--profile": profile} if reward is not None else {}, "without --reward")
    limits = parse_limits(fail_on, diff=diff is not None) if fail_on is not None else []
    question = RewardQuestion(
        f"{PROFILE}{profile}" if profile is not None else reward,
        diff,
        dict(_argument(a) for a in args or []),
        parse_weights(weights) if weights else None,
        style,
        probe or needs_probe(limits),
        max(rows, ROWS_OF_PAGE) if html is not None else rows,
        jobs or usable_cores(),
        keep_going or any(limit.needs_errors for limit in limits),
    )
    table = {"--columns": columns, "--task": task, "--variant": variant}
    saved = _open(rollouts, runs, {"--steps": steps, "--source": source}, table, question.is_lenient)
    if replay:
        scoring = {"--reward": reward, "--diff": diff, "--fail-on": fail_on, "--out": out, "--html": html}
        _refuse({**scoring, "--probe": probe or None}, "without --replay")
        _replay(saved, as_json)
        return
    if out is not None:
        check_out(out)
    checked = check_rewards(saved, question)
    report = checked.report
    failed = [limit.told(report) for limit in limits if limit.holds(report)]
    report["fail_on"] = {"asked": fail_on, "failed": failed} if fail_on else None
    if out is not None:
        write_scores(out, checked.facts, checked.scores)
    if html is not None:
        from vlmrl.report.reward_page import write_reward_page

        write_reward_page(html, saved, checked)
    report["written"] = {name: str(path) for name, path in (("out", out), ("html", html)) if path is not None}
    if not emit(finite(report), as_json):
        show(report, console(stderr=False), rows)
    for condition in failed:
        (say if as_json else tell)(f"failed: {condition}")
    stored = report["stored"]
    if stored and not stored["equal"] and not any(r["changed"] for r in report["rewards"].values()):
        raise RewardError(
            f"{stored['different']} of {report['samples']} scores of the same reward differ from the stored ones",
            where=report["path"],
            hint="the reward is not deterministic, or it reads something that has changed (a file, the network, time)",
        )
    if failed:
        raise typer.Exit(FAILED)
    for errors in (report["errors"], (report["diff"] or report)["errors"]):
        if down := errors["unavailable"]:
            message = f"{down:,} of {report['samples']:,} rows have no score: {one_line(errors['unavailable_why'])}"
            raise RewardUnavailable(message, where=report["path"], hint=TRY_LATER)
    if any(probed["not_probed"] for probed in (report["probes"] or {}).values()):
        raise typer.Exit(NOT_PROBED)


def _require_input(path: Path, runs: Path | None) -> None:
    from vlmrl.data.table_files import SUFFIXES, require_file
    from vlmrl.store.layout import runs_root
    from vlmrl.store.runs import open_run

    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        require_file(path, hint="name a table of responses, or a run")
    elif not (path.exists() or path.suffix):
        open_run(runs_root(runs), str(path))


def _replay(saved: SavedResponses, as_json: bool) -> None:
    from vlmrl.reward_check.replay import replay

    report = replay(saved)
    for source, parts in report["changed"].items():
        if parts:
            (say if as_json else tell)(f"the environment of {source} has changed since the run: {', '.join(parts)}")
    first, equal = report["first"], report["equal"]
    if not emit(report, as_json):
        out = console(stderr=False)
        alone = f"; {n:,} more called no tool, or ended with the call" if (n := report["alone"]) else ""
        words = f"{equal:,} of {report['episodes']:,} episodes equal what is stored{alone}"
        out.print(words, style="red" if first else "green")
        if first:
            out.print(
                f"first difference: {one_line(first['where'])}, turn {first['turn']}, tool {one_line(first['tool'])}"
            )
            for name in ("stored", "now"):
                draw_quote(f"{name}: {one_line(first[name])}", out, 2)
    if first:
        raise typer.Exit(FAILED)


def _open(
    place: str, runs: Path | None, of_run: Mapping[str, str | None], of_table: Mapping[str, str | None], lenient: bool
) -> SavedResponses:
    """Open a table of responses, or saved rollouts. Refuse options that belong to the other kind of input."""
    from vlmrl.reward_check.response_tables import is_table, open_table
    from vlmrl.reward_check.scoring import open_saved
    from vlmrl.store.layout import runs_root

    path = Path(place)
    if is_table(path):
        _refuse(of_run, "for saved rollouts", place)
        columns = options.parse_columns(of_table["--columns"])
        return open_table(
            path, columns=columns, task=of_table["--task"], variant=of_table["--variant"], lenient=lenient
        )
    _refuse(
        of_table, "for a table of responses (.jsonl, .json, .csv or .parquet), not for a run or its rollouts", place
    )
    return open_saved(place, runs_root(runs), steps=_steps(of_run["--steps"]), source=of_run["--source"])


def _refuse(options: Mapping[str, Any], only: str, where: str | None = None) -> None:
    """Raise a RewardError if one of these options was given. `only`: their condition, such as "for saved rollouts"."""
    for name, given in options.items():
        if given is not None:
            raise RewardError(f"{name} {given} is allowed only {only}", where=where)


def _argument(text: str) -> tuple[str, Any]:
    """Parse `name=value`. The value is read as TOML; if it is not valid TOML, it is plain text."""
    from vlmrl.recipe.files import tomllib

    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise RewardError(f"--set {text!r} is not of the form name=value")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value


def _steps(text: str | None) -> tuple[int, int] | None:
    """Parse steps, `10` or `10:20`, counted from 1. Return the first and the last policy version, counted from 0."""
    from vlmrl.store.metrics import counted

    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text.strip())
    if match is None:
        raise RewardError(f"--steps {text!r} is not a step, or first:last")
    first, last = int(match.group(1)), int(match.group(2) or match.group(1))
    if first < 1:
        raise RewardError(f"--steps {text!r}: steps are counted from 1")
    return first - counted(0), last - counted(0)


EXAMPLE_CHARS = 160
"""Maximum number of characters that are shown of an example."""


def show_probes(source: str, probes: Mapping[str, Any], out: Console) -> None:
    """Print the findings, then facts about the reward's behaviour.

    The findings are ranked: first tricks that earn a score without merit, last right answers that lose score.
    """
    from vlmrl.reward_check.probe import troubles
    from vlmrl.reward_check.tricks import ADVICE, TO_PROBE, WARNINGS, WORDS

    honest, tricks = probes["honest"], probes["probes"]
    count, truths = number_of(len(tricks), "trick"), number_of(probes["rows"], "truth")
    out.print(f"\n{count} against {source}, on {truths}", style="bold")
    if probes["not_probed"]:
        out.print(f"  not probed: {one_line(probes['not_probed'])}", style="bold red")
        out.print(f"    to do: {TO_PROBE}")
    out.print(
        f"  honest answers: with the truth {number(honest['informed'])}, without knowledge "
        f"{number(honest['uninformed'])} ({one_line(honest['answer'])}), wrong {number(honest['wrong'])}"
    )
    place = 0
    for verdict, words in WORDS.items():
        colour = "yellow" if verdict in WARNINGS else "red"
        findings_here = [p for p in tricks if p["verdict"] == verdict]
        if findings_here:
            out.print(f"  {verdict}: {words}", style=f"bold {colour}")
            out.print(f"    to do: {ADVICE[verdict]}")
        for p in findings_here:
            place += 1
            line = one_line(f"{p['name']} ({p['idea']}): {_earned(p)}")
            out.print(f"    {place}. {line}", style=colour)
            draw_quote(shorten(one_line(p["example"]), EXAMPLE_CHARS), out, 8)
            if p["of_example"]:
                out.print(f"        {one_line(p['of_example'])}", style="dim")
    quiet = [f"{p['name']} {number(p['mean'])}" for p in tricks if not p["verdict"] and p["mean"] is not None]
    out.print(f"  tricks without a finding: {one_line(', '.join(quiet)) or 'none'}", style="dim")
    if probes["skipped"]:
        why = "the reward hangs, and each would take the whole time limit"
        out.print(f"  {number_of(probes['skipped'], 'trick')} not tried: {why}", style="bold red")
    for trouble, to_do in troubles(probes["behaviour"]):
        out.print(f"  {one_line(trouble)}", style="bold red")
        out.print(f"    to do: {to_do}")
    ms = probes["behaviour"]["milliseconds"]
    out.print(
        f"  one response takes {ms['p50']:.3g} ms (p95 {ms['p95']:.3g}, p99 {ms['p99']:.3g}, at most {ms['max']:.3g}), "
        f"over {probes['behaviour']['calls']:,} calls"
    )
    if probes["flagged"]:
        findings = "1 finding" if probes["flagged"] == 1 else f"{probes['flagged']} findings"
        out.print(f"{findings}: a model will find these tricks", style="bold red")
    elif not probes["not_probed"]:
        out.print("no trick pays, and the reward is deterministic", style="green")


def _earned(p: Mapping[str, Any]) -> str:
    if p["kind"] == "belief":
        return p["verdict"]
    if p["errors"] and p["kind"] != "truth":
        return f"fails on {p['errors']} rows: {line_of_code(p['error'])}"
    of = f", on {share(p['paid'])} of rows" if p["paid"] is not None and p["paid"] < 1 else ""
    return f"earns {number(p['mean'])}{of}"


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
    if report["reasons"]:
        rows = [(f"{r['count']:,}", share(r["share"]), line_of_code(r["example"])) for r in report["reasons"]]
        draw_table("notes and failures", ("rows", "share", "reason (an example)"), rows, out, right=2)
    if report["disagreements"] is not None:
        _show_disagreements(report["disagreements"], out, most)
    if report["extremes"] is not None and report["diff"] is None:
        _show_rows("earned most", report["extremes"]["paid_most"][:most], out)
        _show_rows("earned least", report["extremes"]["paid_least"][:most], out)
    _show_signs(report, out)
    if report["diff"] is not None:
        _show_diff(report["diff"], out, most, is_second=report["diff"]["errors"] != report["errors"])
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
        steps = dead["by_step"]
        over = f"; first step {share(steps[0][2])}, last {share(steps[-1][2])}" if len(steps) > 1 else ""
        counts = f"{dead['dead']:,} of {dead['number']:,} ({share(dead['dead_share'])})"
        out.print(f"  groups without a signal: {counts}{over}")
    length, cut = correlations["length"], correlations["cut"]
    line = f"  length: rank correlation {number(length['spearman'], 2)}, Pearson's {number(length['pearson'], 2)}"
    if cut["share"]:
        line += f"; cut off {share(cut['share'])}, earn {number(cut['score_cut'])} "
        line += f"(the others {number(cut['score_whole'])})"
    out.print(line)
    ngrams = correlations["ngrams"]
    if ngrams["found"]:
        words = "; ".join(
            f"{one_line(n['ngram'])!r} {share(n['first'])} -> {share(n['last'])}, earns {n['pays']:+.3f}"
            for n in ngrams["found"][:5]
        )
        out.print(f"  words and characters that became frequent and earn more: {words}")
    elif ngrams["thirds"]:
        out.print(f"  words and characters that became frequent and earn more: none in {ngrams['texts']:,} texts")


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
    rows = []
    for name, p in parts.items():
        ends = [*(number(p[key]) for key in ("mean", "min", "max")), share(p["share_at_min"]), share(p["share_at_max"])]
        rows.append((name, *ends, str(p.get("none") or ""), number(p["correlation"], 2)))
    draw_table("what the reward pays", heads, rows, out)


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


def _show_diff(diff: Mapping[str, Any], out: Console, most: int, *, is_second: bool) -> None:
    names, value = diff["names"], diff["value"]
    out.print(f"\n{names['first']}  ->  {names['second']}", style="bold")
    heads = ("", "first", "second", "rows that change")
    rows = [("value", number(value["first"]), number(value["second"]), share(value["changed_share"]))]
    rows += [(n, number(p["first"]), number(p["second"]), share(p["changed_share"])) for n, p in diff["parts"].items()]
    draw_table("means", heads, rows, out)
    correlation = f"rank correlation {number(value['rank_correlation'], 3)}"
    changed = f"{value['changed']:,} of {diff['compared']:,} change; {correlation}"
    facts = [("rows", changed), *_what_training_sees(diff)]
    if any(diff["failed"].values()):
        facts.append(("failed", f"{diff['failed']['first']} -> {diff['failed']['second']} rows"))
    draw_table("what training would have seen", ("", ""), facts, out, right=0)
    _show_rows("changed most", diff["changed"][:most], out, diff=True)
    if is_second:
        _show_rows("the second reward failed", diff["errors"]["first"][:most], out)


def _what_training_sees(diff: Mapping[str, Any]) -> list[tuple[str, str]]:
    groups, advantages = diff["groups"], diff["advantages"]
    if groups is None:
        return [("groups", "it is not known which rows belong to one prompt (--columns group=...)")]
    alive, dead = groups["alive_in_both"], f"{groups['dead_first']} -> {groups['dead_second']} of {groups['number']}"
    changes = f"sign changes for {share(advantages['flipped_share'])} of responses"
    change = f"mean change {number(advantages['moved'], 3)} ({advantages['estimator']})"
    facts = [
        ("groups without a signal", f"{dead} ({groups['died']} lose it, {groups['revived']} gain one)"),
        ("order within groups", f"rank correlation {number(groups['same_order'], 3)} over {alive} groups"),
        ("best sample changes", f"in {groups['best_changes']} of the {alive} groups with a signal in both"),
        ("advantages", f"correlation {number(advantages['correlation'], 3)}, {changes}, {change}"),
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
