"""The checks of the data doctor as a table, for `vlmrl data doctor` and `vlmrl prep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.cli.output import console, tell
from vlmrl.untrusted import visible


def show_doctor(report: Mapping[str, Any]) -> None:
    """Print the data doctor's checks as a table: check, verdict, finding."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="data doctor")
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for check in report["checks"]:
        table.add_row(*(Text(visible(check[column])) for column in ("check", "verdict", "finding")))
    console(stderr=False).print(table)
    if note := report.get("note"):
        tell(note)
