"""Tables of `vlmrl compare` for settings of several runs: mean and band of each, differences to the first."""

from __future__ import annotations

from typing import Any

from vlmrl.cli.output import show_table, tell
from vlmrl.cli.show.comparison import show_checkpoints, show_epochs, side_title


def show_settings(result: dict[str, Any]) -> None:
    """Print the result of `evaluate.settings.compare_settings`: the conclusion first."""
    tell(result["conclusion"]["text"], bold=True)
    tell("")
    for setting in result["settings"]:
        for run in setting["runs"]:
            tell(f"{setting['letter']}  {side_title(run)}")
    for evaluation in result["evaluations"]:
        _show_evaluation(evaluation)
    tell(f"intervals: {result['intervals']}")
    tell(f"tests: {result['tests']}")
    show_checkpoints(result["checkpoints"])
    show_epochs(result["epochs"])
    for note in result["notes"]:
        tell(f"\n{note}")


def _show_evaluation(evaluation: dict[str, Any]) -> None:
    tell("")
    means = [
        (letter, metric, f"{m['mean']:.4f}", "-" if m["sd"] is None else f"{m['sd']:.4f}", _runs(m["runs"]))
        for letter, metrics in evaluation["settings"].items()
        for metric, m in metrics.items()
    ]
    title = f"Evaluation {evaluation['name']}, {evaluation['rows']} rows that all answered"
    show_table(title, ("", "metric", "mean", "sd between runs", "runs"), means, titled=True)
    tell("")
    rows = [
        (
            d["pair"],
            d["metric"],
            f"{d['difference']:+.4f}",
            "-" if d["low"] is None else f"[{d['low']:+.4f}, {d['high']:+.4f}]",
            f"{d['test']['p']:.3g}",
            f"{d['test']['p_holm']:.3g}",
            d["verdict"],
        )
        for d in evaluation["differences"]
    ]
    show_table(
        "Differences", ("", "metric", "difference", "95% interval", "p", "p (Holm)", "verdict"), rows, titled=True
    )
    if evaluation["label"]:
        tell(f"these are {evaluation['label']}")


def _runs(means: list[float]) -> str:
    return " ".join(f"{mean:.3f}" for mean in means)
