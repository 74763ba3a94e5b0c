"""Closing table of `vlmrl demo`: both models on the test split."""

from __future__ import annotations

from vlmrl.cli.output import console


def show_demo(result: dict) -> None:
    from rich.table import Table

    table = Table(title=f"Test split, 95% intervals over {result['unit']}", title_justify="left")
    table.add_column("metric")
    for name in ("SFT", "GRPO"):
        table.add_column(name, justify="right")
    for name, pair in result["metrics"].items():
        cells = [f"{m['value']:.3f} [{m['low']:.3f}, {m['high']:.3f}]" for m in (pair["sft"], pair["grpo"])]
        table.add_row(name, *cells)
    out = console(stderr=False)
    out.print(table)
    for name, d in result["difference"].items():
        low, high = d["ci95"]
        verdict = "excludes 0" if low > 0 or high < 0 else "includes 0"
        out.print(f"{name}: GRPO - SFT = {d['mean']:+.3f}, 95% interval [{low:+.3f}, {high:+.3f}] {verdict}")
    out.print(f"\n{result['seconds']:.0f} s in all. Open the report: {result['report']}")
