"""`vlmrl reward-check`: score saved rollouts again, compare two rewards, attack a reward. On the CPU, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit, say, tell
from vlmrl.errors import RewardError

if TYPE_CHECKING:
    from vlmrl.reward_check.run import Checked
    from vlmrl.reward_check.saved_responses import SavedResponses

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
    out: Annotated[Path | None, typer.Option(help="Write the scores to a .parquet, .jsonl or .csv file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page of the responses with their images.")] = None,
    fail_on: Annotated[
        str | None, typer.Option(help="Exit with code 3 if a condition holds: probe,dead_groups>0.5,errors>0.")
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

    Example: vlmrl reward-check last --diff my_reward.py:score

    Example: vlmrl reward-check answers.jsonl --task fungi --out scores.parquet
    """
    from vlmrl.process import give_terminal
    from vlmrl.reward_check.rescore import PROFILE, parse_weights
    from vlmrl.reward_check.run import RewardQuestion, check_rewards
    from vlmrl.reward_check.thresholds import needs_probe, parse_limits
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
    written = {"out": out, "html": html}
    _check_places(written)
    checked = check_rewards(saved, question)
    failed = [limit.told(checked.report) for limit in limits if limit.holds(checked.report)]
    checked.report["fail_on"] = {"asked": fail_on, "failed": failed} if fail_on else None
    _write(written, saved, checked)
    _tell(checked.report, rows, as_json)
    if failed:
        raise typer.Exit(FAILED)
    if any(probed["not_probed"] for probed in (checked.report["probes"] or {}).values()):
        raise typer.Exit(NOT_PROBED)


def _open(
    place: str, runs: Path | None, of_run: Mapping[str, str | None], of_table: Mapping[str, str | None], lenient: bool
) -> SavedResponses:
    """Open a table of responses, or saved rollouts. Refuse options that belong to the other kind of input."""
    from vlmrl.reward_check.open_table import is_table, open_table
    from vlmrl.reward_check.saved_responses import open_saved
    from vlmrl.store.layout import runs_root

    path = Path(place)
    if is_table(path):
        _refuse(of_run, "for saved rollouts", place)
        columns = _columns(of_table["--columns"])
        return open_table(
            path, columns=columns, task=of_table["--task"], variant=of_table["--variant"], lenient=lenient
        )
    _refuse(
        of_table, "for a table of responses (.jsonl, .json, .csv or .parquet), not for a run or its rollouts", place
    )
    return open_saved(place, runs_root(runs), steps=_steps(of_run["--steps"]), source=of_run["--source"])


def _check_places(written: Mapping[str, Path | None]) -> None:
    from vlmrl.reward_check.scores_file import check_out

    if written["out"] is not None:
        check_out(written["out"])


def _write(written: Mapping[str, Path | None], saved: SavedResponses, checked: Checked) -> None:
    from vlmrl.reward_check.scores_file import write_scores

    if written["out"] is not None:
        write_scores(written["out"], checked.facts, checked.scores)
    if written["html"] is not None:
        from vlmrl.report.reward_page import write_reward_page

        write_reward_page(written["html"], saved, checked)
    checked.report["written"] = {name: str(path) for name, path in written.items() if path is not None}


def _tell(report: Mapping[str, Any], rows: int, as_json: bool) -> None:
    from vlmrl.cli.show.reward_report import show
    from vlmrl.reward_check.scores_file import finite

    emit(finite(report), as_json)
    if not as_json:
        show(report, console(stderr=False), rows)
    for condition in (report["fail_on"] or {}).get("failed", ()):
        (say if as_json else tell)(f"failed: {condition}")
    _stop_when_not_deterministic(report)


def _refuse(options: Mapping[str, Any], only: str, where: str | None = None) -> None:
    """Raise a RewardError if one of these options was given. `only`: their condition, such as "for saved rollouts"."""
    for name, given in options.items():
        if given is not None:
            raise RewardError(f"{name} {given} is allowed only {only}", where=where)


def _stop_when_not_deterministic(report: Mapping[str, Any]) -> None:
    stored = report["stored"]
    if stored and not stored["equal"] and not any(r["changed"] for r in report["rewards"].values()):
        raise RewardError(
            f"{stored['different']} of {report['samples']} scores of the same reward differ from the stored ones",
            where=report["path"],
            hint="the reward is not deterministic, or it reads something that has changed (a file, the network, time)",
        )


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


def _columns(text: str | None) -> dict[str, str]:
    """Parse `role=column,role=column`."""
    columns: dict[str, str] = {}
    for item in (text or "").split(",") if text else ():
        role, sign, column = item.partition("=")
        if not sign or not role.strip() or not column.strip():
            raise RewardError(f"--columns {text!r} is not of the form role=column,role=column")
        columns[role.strip()] = column.strip()
    return columns
