"""Screens of `vlmrl recipe`: keys, names, differences and imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import typer

from vlmrl.cli.output import console, emit, say, tell


def describe_task(entry: Mapping[str, Any]) -> str:
    task = "table, or the dataset's own" if entry["task"] == "table" else entry["task"]
    variant = f", variant {entry['variant']}" if entry["variant"] else ""
    lacking = " (baseline if the data lack its truth)" if entry["by_default"] and entry["variant"] != "baseline" else ""
    profile = f" (profile {entry['profile']})" if entry["profile"] else ""
    return f"task {task}{variant}{lacking}, reward {entry['reward'] or 'of the task'}{profile}"


def show_import(report: dict[str, Any], out: Path | None) -> None:
    """Print on stderr the settings of an imported configuration that the user should look at."""
    for note in report["notes"]:
        say(f"note: {note}")
    say(f"{len(report['mapped'])} settings mapped from {report['system']}" + (f" to {out}" if out else ""))
    if report["changed"]:
        say("\nmapped with another meaning:")
        for changed in report["changed"]:
            say(f"  {changed['key']} = {value_text(changed['value'])}: {changed['why']}")
    if report["left_out"]:
        say("\nnot mapped:")
        reasons: dict[str, list[str]] = {}
        for left in report["left_out"]:
            reasons.setdefault(left["why"], []).append(left["key"])
        for why, keys in reasons.items():
            say(f"  {', '.join(keys)}: {why}")
    if report["as_here"]:
        say(f"\nnot written, because vlmrl does the same without them: {', '.join(report['as_here'])}")
    if report["todo"]:
        say("\nto do:")
        for todo in report["todo"]:
            say(f"  {todo}")
    say(f"\nnext: vlmrl check {quote(str(out)) if out else 'RECIPE'}")


def show_table_of_keys(explanation: Any) -> None:
    from vlmrl.recipe.explain import explain as look_up

    typer.echo(f"[{explanation.key}]\n  {explanation.help}\n")
    for name in explanation.keys:
        inner = look_up(f"{explanation.key}.{name}")
        default = "by algorithm" if inner.by_row else default_text(inner)
        typer.echo(f"  {name:24} {default:14} {inner.help}")


def show_names(tasks: bool, algos: bool, rewards: bool, as_json: bool) -> None:
    from vlmrl.algo.algorithms import ALGORITHMS, EVERYWHERE, OF_ROWS
    from vlmrl.preflight.catalogs import catalogs

    known = catalogs()
    rows = {name: row.summary for name, row in ALGORITHMS.items()}
    lists = (("tasks", tasks, known.tasks), ("algos", algos, rows), ("rewards", rewards, known.rewards))
    chosen = {name: dict(entries) for name, is_chosen, entries in lists if is_chosen}
    differences = {"all": " ".join(EVERYWHERE), **OF_ROWS}
    variants = {name: list(names) for name, names in known.variants.items() if names}
    profiles = {name: list(names) for name, names in known.profiles.items() if tuple(names) != ("default",)}
    more = ({"variants": variants, "profiles": profiles} if tasks else {}) | (
        {"differences": differences} if algos else {}
    )
    emit(chosen | more, as_json)
    if not as_json:
        for name, entries in chosen.items():
            draw_plain_table(name, ("name", "about"), list(entries.items()))
    if not as_json and algos:
        tell("")
        draw_plain_table(
            "where they deliberately differ from the code of verl and TRL", ("name", ""), list(differences.items())
        )
    if not as_json and tasks:
        draw_plain_table(
            "`variant` in [[data]]",
            ("task", "values"),
            [(k, ", ".join(v)) for k, v in variants.items()],
        )
        say("")
        rows = [(name, ", ".join(names)) for name, names in profiles.items()]
        draw_plain_table("`profile` in [reward]", ("task", "values"), rows)


def default_text(key: Any) -> str:
    """Return the default of a key as text; if rows of the algorithm table set it, the default of each row."""
    if not key.by_row:
        return "required" if key.required else value_text(key.default)
    rows: dict[str, list[str]] = {}
    for row, value in key.by_row.items():
        rows.setdefault(value_text(value), []).append(row)
    return "by algorithm: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in rows.items())


def on_resume_text(key: Any) -> str:
    """Return the rule for changing a key on resume; "" if it has none."""
    if key.on_resume is None:
        return ""
    words = {"free": "may change", "asked": "may change with --accept-changes", "refused": "cannot change"}
    return f"{words[key.on_resume.kind]} ({key.on_resume.reason})"


def value_text(value: Any) -> str:
    """Return a recipe's value as it is written in TOML; `not set` for None."""
    from vlmrl.recipe.explain import toml_value

    return "not set" if value is None else toml_value(value)


def draw_plain_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console(stderr=False).print(table)
