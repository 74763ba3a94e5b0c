"""`vlmrl compare A B`: two runs or evaluations side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vlmrl.cli.output import JSON_HELP, emit, show_table, tell

QUIET_GROUPS = ("time/", "memory/")
"""Metrics that are left out of the table (they are in --json)."""


def register(app: typer.Typer) -> None:
    app.command("compare", short_help="Compare two runs or evaluations.")(compare_)


def compare_(
    a: Annotated[str, typer.Argument(help="A run (id prefix, name, `last`, folder), or an evaluation's folder.")],
    b: Annotated[str, typer.Argument(help="The other one. Differences are B minus A.")],
    runs: Annotated[
        Path | None, typer.Option("--runs", help="Where runs are. Default: $VLMRL_RUNS, else ./runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Is B better than A? The answer first; then recipe, code, data and metrics side by side, and paired differences.

    Example: vlmrl compare digits-sft digits-im

    Test rows decide where both were evaluated on them (vlmrl eval), else rows held out, else those that training
    validated on. A difference is taken row by row; its interval is Wilson's score interval at the effective sample
    size of rows that share images, scaled to the range that a difference can have. An interval that holds 0 is not
    clear.
    """
    from vlmrl.evaluate.compare import compare, open_side
    from vlmrl.store.layout import runs_root

    root = runs_root(runs)
    left, right = open_side(root, a), open_side(root, b)
    result = compare(left, right)
    emit(result, as_json)
    if as_json:
        return
    tell(result["conclusion"]["text"], bold=True)
    tell("")
    for letter, side in (("A", result["a"]), ("B", result["b"])):
        tell(f"{letter}  {_title(side)}")
    for evaluation in result["evaluations"]:
        _paired(evaluation)
    if result["evaluations"]:
        tell(f"intervals: {result['intervals']}")
    for of_sets in dict.fromkeys(evaluation["intervals_of_sets"] for evaluation in result["evaluations"]):
        if of_sets:
            tell(f"intervals {of_sets}")
    _differences("Recipe", result["recipe"], "the same recipe")
    _differences("Made with", result["made_with"], "the same code, packages, data and seeds")
    _side_by_side("Training, last step", result["train"])
    _side_by_side("Validation", result["validation"])
    for note in result["notes"]:
        tell(f"\n{note}")


def _title(side: dict[str, Any]) -> str:
    if side["run"] is None:
        return side["ref"]
    name = f" ({side['name']})" if side["name"] else ""
    labels = f"  [{'; '.join(side['labels'])}]" if side["labels"] else ""
    return f"{side['run']}{name}  {side['kind']}, {side['status']}{labels}"


def _differences(title: str, rows: list[dict[str, Any]], none: str) -> None:
    if not rows:
        tell(f"\n{title}: {none}")
        return
    tell("")
    show_table(title, ("", "A", "B"), [(r["key"], _value(r["a"]), _value(r["b"])) for r in rows], titled=True)


def _side_by_side(title: str, rows: list[dict[str, Any]]) -> None:
    shown = [r for r in rows if not r["key"].startswith(QUIET_GROUPS) and not r["key"].endswith(("_low", "_high"))]
    if len(shown) < 2:
        return
    tell("")
    if "a_best" in shown[0]:
        columns = ("", "A last", "B last", "A best", "B best")
        cells = [(r["key"], *(_value(r[k]) for k in ("a", "b", "a_best", "b_best"))) for r in shown]
    else:
        columns = ("", "A", "B")
        cells = [(r["key"], _value(r["a"]), _value(r["b"])) for r in shown]
    show_table(title, columns, cells, titled=True)


def _paired(evaluation: dict[str, Any]) -> None:
    n, a, b = evaluation["rows_paired"], evaluation["rows_a"], evaluation["rows_b"]
    tell("")
    if not evaluation["metrics"]:
        tell(f"Evaluation {evaluation['name']}: no rows in common ({a} and {b} rows)")
        return
    of = "" if n == a == b else f" of {a} and {b}"
    cells = [
        (
            m["metric"],
            _value(m["a"]),
            _value(m["b"]),
            f"{m['difference']:+.4f}",
            _interval(m),
            m["verdict"],
            str(m["n"]),
        )
        for m in evaluation["metrics"]
    ]
    title = f"Evaluation {evaluation['name']}, paired on {n}{of} rows"
    show_table(title, ("", "A", "B", "B - A", "95% interval", "verdict", "rows"), cells, titled=True)
    if evaluation["label"]:
        tell(f"these are {evaluation['label']}")
    if evaluation["rows_with_other_truth"]:
        tell(f"{evaluation['rows_with_other_truth']} rows left out: the same prompt has another truth")


def _interval(metric: dict[str, Any]) -> str:
    if metric["low"] is None or metric["high"] is None:
        return "-"
    return f"[{metric['low']:+.4f}, {metric['high']:+.4f}]"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
