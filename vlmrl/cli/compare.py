"""`vlmrl compare A B`: compare two runs or evaluations, or settings of several runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, show_table, tell
from vlmrl.untrusted import number_of

QUIET_GROUPS = ("time/", "memory/")
"""Groups of metrics that are not in the tables, as those of reflection are not; --json has them."""


def side_title(side: dict[str, Any]) -> str:
    if side["run"] is None:
        return side["ref"]
    name = f" ({side['name']})" if side["name"] else ""
    labels = f"  [{'; '.join(side['labels'])}]" if side["labels"] else ""
    return f"{side['run']}{name}  {side['kind']}, {side['status']}{labels}"


def show_differences(title: str, rows: list[dict[str, Any]], none: str) -> None:
    if not rows:
        tell(f"\n{title}: {none}")
        return
    tell("")
    show_table(title, ("", "A", "B"), [(r["key"], _value(r["a"]), _value(r["b"])) for r in rows], titled=True)


def show_side_by_side(title: str, rows: list[dict[str, Any]]) -> None:
    from vlmrl.tasks.reflection import PREFIX

    quiet = [f"/{group}" for group in (*QUIET_GROUPS, PREFIX)]
    shown = [
        r for r in rows if not r["key"].endswith(("_low", "_high")) and not any(g in f"/{r['key']}" for g in quiet)
    ]
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


def show_paired(evaluation: dict[str, Any]) -> None:
    from vlmrl.evaluate.significance import LEADING, words_of_power, words_of_test

    n, a, b = evaluation["rows_paired"], evaluation["rows_a"], evaluation["rows_b"]
    tell("")
    if not evaluation["metrics"]:
        tell(f"Evaluation {evaluation['name']}: no rows in common ({a} and {b} responses)")
        return
    of = "" if n == a == b else f" of {a} and {b}"
    cells = []
    shown = [m for m in evaluation["metrics"] if m["metric"] in LEADING or m["a"] or m["b"] or m["difference"]]
    for m in shown:
        p = f"{m['test']['p_holm']:.3g}" if m["test"] else ""
        means = (m["metric"], _value(m["a"]), _value(m["b"]), f"{m['difference']:+.4f}")
        cells.append((*means, _interval(m), p, m["verdict"], str(m["n"])))
    title = f"Evaluation {evaluation['name']}, paired on {n}{of} responses"
    corrected = any(m["test"] and m["test"]["comparisons"] > 1 for m in evaluation["metrics"])
    p_name = "p (Holm)" if corrected else "p"
    heads = ("", "A", "B", "B - A", "95% interval", p_name, "verdict", "n")
    show_table(title, heads, cells, titled=True, spare=("n", p_name))
    if zeros := len(evaluation["metrics"]) - len(shown):
        tell(f"left out: {number_of(zeros, 'metric')}, 0 on both sides")
    for m in evaluation["metrics"]:
        if m["test"] and m["metric"] in LEADING:
            tell(words_of_test(m["metric"], m["test"]))
    if evaluation["power"]:
        tell(words_of_power(evaluation["power"]))
    for way in evaluation["evaluated_with"]:
        tell(f"{way['key']}: A {_value(way['a'])}, B {_value(way['b'])}")
    if evaluation["label"]:
        tell(f"these are {evaluation['label']}")
    for text in (evaluation["blind_probe"] or {}).get("conclusion", ()):
        tell(text)
    if evaluation["rows_with_other_truth"]:
        tell(f"{evaluation['rows_with_other_truth']} rows left out: the same prompt has another truth")


def show_checkpoints(entries: list[dict[str, Any]]) -> None:
    """Print the results over the checkpoints of each run; a maximum that was chosen on its own rows has a label.

    Those of validation rows are left out: the table of validations has them.
    """
    from vlmrl.evaluate.over_training import words_of_steps

    shown = [entry for entry in entries if entry["role"] != "validation"]
    if shown:
        tell("\nOver checkpoints (selected by validation alone)")
    for entry in shown:
        tell(f"{entry['side']}  {entry['evaluation']}: {words_of_steps(entry)}")


def show_epochs(entries: list[dict[str, Any]]) -> None:
    """Print the results over epochs of each side, and below them which rows the maxima were chosen on."""
    from vlmrl.evaluate.over_training import notes_of_maxima, words_of_start

    if not entries:
        return
    several = any(len(setting["runs"]) > 1 for entry in entries for setting in entry["settings"])
    columns = ("", "metric", "before training", "mean", "selected", "maximum*", "paper: base, mean, max")
    rows = []
    for entry in entries:
        for s in entry["settings"]:
            bands = [_band(s[name]) for name in ("base", "mean", "selected", "max")]
            bands[2] = f"{bands[2]} {words_of_start(s)}".strip()
            paper = ", ".join(_value(s["paper"].get(name)) for name in ("base", "mean", "max")) if s["paper"] else ""
            rows.append((f"{s['label']} {s['kind']}", entry["metric"], *bands, paper))
    published = [i for i in range(len(columns)) if i < len(columns) - 1 or any(row[i] for row in rows)]
    tell("")
    show_table(
        "Over epochs" + (", mean over runs +- one standard deviation" if several else ""),
        [columns[i] for i in published],
        [tuple(row[i] for i in published) for row in rows],
        titled=True,
        spare=("before training", "maximum*"),
    )
    for note in notes_of_maxima(entries):
        tell(f"* {note}")


def _band(band: dict[str, Any] | None) -> str:
    if band is None:
        return "-"
    return f"{band['mean']:.3f}" + ("" if band["sd"] is None else f" +- {band['sd']:.3f}")


def _interval(metric: dict[str, Any]) -> str:
    if metric["low"] is None or metric["high"] is None:
        return "-"
    return f"[{metric['low']:+.4f}, {metric['high']:+.4f}]"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_settings(result: dict[str, Any]) -> None:
    """Print the result of `evaluate.settings.compare_settings`: the conclusion first."""
    tell(result["conclusion"]["text"], bold=True)
    tell("")
    for setting in result["settings"]:
        for run in setting["runs"]:
            tell(f"{setting['letter']}  {side_title(run)}")
    for evaluation in result["evaluations"]:
        tell("")
        means = []
        for letter, metrics in evaluation["settings"].items():
            for metric, m in metrics.items():
                sd, each = "-" if m["sd"] is None else f"{m['sd']:.4f}", " ".join(f"{mean:.3f}" for mean in m["runs"])
                means.append((letter, metric, f"{m['mean']:.4f}", sd, each))
        title = f"Evaluation {evaluation['name']}, {evaluation['rows']} responses to rows that all answered"
        show_table(title, ("", "metric", "mean", "sd between runs", "runs"), means, titled=True)
        tell("")
        rows = []
        for d in evaluation["differences"]:
            p_values = (f"{d['test'][p]:.3g}" for p in ("p", "p_holm"))
            rows.append((d["pair"], d["metric"], f"{d['difference']:+.4f}", _interval(d), *p_values, d["verdict"]))
        heads = ("", "metric", "difference", "95% interval", "p", "p (Holm)", "verdict")
        show_table("Differences", heads, rows, titled=True, spare=("p",))
        if evaluation["label"]:
            tell(f"these are {evaluation['label']}")
    tell(f"intervals: {result['intervals']}")
    tell(f"tests: {result['tests']}")
    show_checkpoints(result["checkpoints"])
    show_epochs(result["epochs"])
    for note in result["notes"]:
        tell(f"\n{note}")


def register(app: typer.Typer) -> None:
    app.command("compare", short_help="Compare two runs or evaluations.")(compare_)


def compare_(
    a: Annotated[
        str,
        typer.Argument(
            help="Run (id prefix, name, `last`, folder), or an evaluation (RUN/NAME, folder). Several runs that differ "
            "only in their seed, separated by commas, are one setting."
        ),
    ],
    b: Annotated[str, typer.Argument(help="The run or evaluation to compare with A. Differences are B minus A.")],
    more: Annotated[list[str] | None, typer.Argument(help="More of them, each compared with A.")] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Compare two runs or evaluations: is B better than A?

    The answer is printed first. Paired differences, and recipe, code, data and metrics side by side follow.

    Example: vlmrl compare digits-sft digits-im   or   vlmrl compare sft-1,sft-2,sft-3 im-1,im-2,im-3

    The answer comes from test rows if both were evaluated on them (vlmrl eval), else from held-out rows, else from the
    rows of validation in training. Differences are taken row by row. Their interval is Wilson's score interval (next to
    the ends, Poisson's limit where it is wider) at the effective sample size of rows that share images, scaled to the
    range that a difference can have. If it contains 0, the difference is not clear.

    Besides, there are a paired bootstrap, the p-value of McNemar's exact test (of a permutation test if rows share
    images or are not only right or wrong), and the number of rows that would show a difference of 2 points.

    A setting of several runs has its mean over runs, a band of one standard deviation, and an interval for new rows and
    new seeds. With more than two settings, p-values have Holm's correction.
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.runs import names_in, open_evaluation

    root, refs = runs_root(runs), [a, b, *(more or [])]
    for name in (name for ref in refs for name in names_in(ref)):
        open_evaluation(root, name, trained=True)
    # Imported here: a wrong name is reported before large libraries are loaded.
    from vlmrl.evaluate.compare import compare, open_side
    from vlmrl.evaluate.settings import compare_settings, is_list, open_settings

    if is_list(refs):
        result = compare_settings(open_settings(root, refs))
        if not emit(result, as_json):
            show_settings(result)
        return
    left, right = open_side(root, a), open_side(root, b)
    result = compare(left, right)
    if emit(result, as_json):
        return
    tell(result["conclusion"]["text"], bold=True)
    tell("")
    for letter, side in (("A", result["a"]), ("B", result["b"])):
        tell(f"{letter}  {side_title(side)}")
    for evaluation in result["evaluations"]:
        show_paired(evaluation)
    if result["evaluations"]:
        tell(f"intervals: {result['intervals']}")
        tell(f"tests: {result['tests']}")
    for of_sets in dict.fromkeys(evaluation["intervals_of_sets"] for evaluation in result["evaluations"]):
        if of_sets:
            tell(f"intervals {of_sets}")
    show_checkpoints(result["checkpoints"])
    show_epochs(result["epochs"])
    show_differences("Recipe", result["recipe"], "the same recipe")
    show_differences("Made with", result["made_with"], "the same code, packages, data and seeds")
    show_side_by_side("Training, last step", result["train"])
    show_side_by_side("Validation", result["validation"])
    for note in result["notes"]:
        tell(f"\n{note}")
