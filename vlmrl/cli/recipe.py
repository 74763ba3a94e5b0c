"""`vlmrl recipe`: show, explain, list, schema, diff, import, check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vlmrl.cli.output import JSON_HELP, console, emit, say, show_table, tell
from vlmrl.errors import Problem

Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Override one key: --set algo.clip_high=0.3 (repeatable).")
]

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, explain, list and compare recipes.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="recipe")


@group.command()
def show(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")],
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each value came from, defaults included.")
    ] = False,
    overrides: Sets = None,
    as_json: Json = False,
) -> None:
    """Print a recipe with its parent and overrides applied.

    Example: vlmrl recipe show recipes/digits_im.toml --origin --set optim.lr=1e-4
    """
    from vlmrl.recipe.explain import toml_lines
    from vlmrl.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides=overrides or [])
    if as_json:
        emit(loaded.resolved, True)
        return
    typer.echo("\n".join(toml_lines(loaded, origin=origin)))


@group.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key (algo.clip_high), a table (algo), or just clip_high.")],
    as_json: Json = False,
) -> None:
    """Say what a key means: type, default, range, and where shipped recipes set it.

    Example: vlmrl recipe explain rollout.samples_per_prompt
    """
    from vlmrl.recipe.explain import explain as look_up

    found = look_up(key)
    emit(asdict(found), as_json)
    if as_json:
        return
    if found.keys:
        _explain_table(found)
        return
    facts = [("type", found.type), ("default", _default(found)), ("range", found.range)]
    facts += [("choices", ", ".join(map(_toml, found.choices))), ("resume", _on_resume(found))]
    facts += [("read by", {"rl": "vlmrl train", "sft": "vlmrl sft"}.get(found.run_kind, ""))]
    lines = [found.key, f"  {found.help}", ""] + [f"  {name:8} {value}" for name, value in facts if value]
    lines += ["  used in  " + f"{use.where}  {_toml(use.value)}" for use in found.uses]
    typer.echo("\n".join(lines))


@group.command()
def check(
    recipes: Annotated[list[str], typer.Argument(help="TOML files, or names of shipped recipes.")],
    overrides: Sets = None,
    as_json: Json = False,
) -> None:
    """Check recipes themselves: keys, values, names, prompt and reward files. Exit code 2 when one is wrong.

    Example: vlmrl recipe check fungi_im bird_im_concrete recipes/digits_im.toml

    Data and models that are not made yet are told, and are no mistake here; `vlmrl check RECIPE` also opens the data,
    looks at rows and prompts, and plans memory and time.
    """
    from vlmrl.errors import format_error

    results, data = [], {}
    for recipe in recipes:
        problems, data[recipe] = _looked_at(recipe, overrides or [])
        results.append((recipe, problems))
    wrong = [recipe for recipe, problems in results if any(p.level == "error" for p in problems)]
    told = [
        {"recipe": r, "ok": r not in wrong, "data": data[r], "problems": [asdict(p) for p in problems]}
        for r, problems in results
    ]
    emit({"ok": not wrong, "recipes": told}, as_json)
    if not as_json:
        for recipe, problems in results:
            tell(f"{recipe}: {'wrong' if recipe in wrong else 'sound'}")
            for entry in data[recipe]:
                tell(f"  {entry['path']}: {_task_words(entry)}")
            for p in problems:
                tell(format_error(p.message, p.where, p.hint, p.level))
    if wrong:
        raise typer.Exit(2)


def _looked_at(recipe: str, overrides: list[str]) -> tuple[list[Problem], list[dict[str, Any]]]:
    """(what is wrong with a recipe itself, what each of its data entries comes to where nothing is)."""
    from vlmrl.errors import ProblemsError, VlmrlError
    from vlmrl.preflight.catalogs import catalogs, resolve_tasks
    from vlmrl.recipe.checks import check_made
    from vlmrl.recipe.load import load_recipe

    try:
        loaded = load_recipe(recipe, overrides=overrides)
        problems = check_made(loaded, catalogs())
        sound = not any(p.level == "error" for p in problems)
        return problems, resolve_tasks(loaded.recipe) if sound else []
    except ProblemsError as error:
        return list(error.problems), []
    except VlmrlError as error:
        return [Problem(error.message, error.where, error.hint)], []


def _task_words(entry: Mapping[str, Any]) -> str:
    task = "table, or the dataset's own" if entry["task"] == "table" else entry["task"]
    variant = f", variant {entry['variant']}" if entry["variant"] else ""
    lacking = " (baseline if the data lack its truth)" if entry["by_default"] and entry["variant"] != "baseline" else ""
    profile = f" (profile {entry['profile']})" if entry["profile"] else ""
    return f"task {task}{variant}{lacking}, reward {entry['reward'] or 'of the task'}{profile}"


@group.command("list")
def list_(
    words: Annotated[list[str] | None, typer.Argument(help="Only recipes whose name has one of these in it.")] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="List the tasks instead.")] = False,
    algos: Annotated[bool, typer.Option("--algos", help="List the algorithms instead.")] = False,
    rewards: Annotated[bool, typer.Option("--rewards", help="List the built-in rewards instead.")] = False,
    as_json: Json = False,
) -> None:
    """List recipes (shipped and in this folder), or the names that a recipe may use.

    Example: vlmrl recipe list bird    or: vlmrl recipe list --algos
    """
    if tasks or algos or rewards:
        _list_names(tasks, algos, rewards, as_json)
        return
    from vlmrl.recipe.explain import first_sentence, list_recipes

    found = [r for r in list_recipes(Path.cwd()) if not words or any(word in r.name for word in words)]
    rows = [{"name": r.name, "path": str(r.path), "kind": r.kind, "about": r.error or r.comment} for r in found]
    emit({"recipes": rows}, as_json)
    if not as_json:
        show_table("", ("name", "kind", "about"), [(r["name"], r["kind"], first_sentence(r["about"])) for r in rows])
        say("\n`vlmrl recipe show NAME` prints one, `vlmrl recipe list WORD` lists those with WORD in their names")


@group.command()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of a recipe, for editors that complete and check TOML.

    Example: vlmrl recipe schema > recipe.schema.json
    """
    import json

    from vlmrl.recipe.explain import json_schema

    result = json_schema()
    emit(result, as_json)
    if not as_json:
        typer.echo(json.dumps(result, indent=2))


@group.command()
def diff(
    left: Annotated[str, typer.Argument(help="A recipe.")],
    right: Annotated[str, typer.Argument(help="Another recipe.")],
    as_json: Json = False,
) -> None:
    """Show the keys in which two recipes differ, defaults included.

    Example: vlmrl recipe diff digits_baseline digits_im
    """
    from vlmrl.recipe.explain import diff_recipes
    from vlmrl.recipe.load import load_recipe

    rows = diff_recipes(load_recipe(left), load_recipe(right))
    emit({"left": left, "right": right, "differences": rows}, as_json)
    if not as_json:
        cells = [(r["key"], _toml(r["left"]), _toml(r["right"])) for r in rows]
        _table(f"{len(rows)} differences", ("key", left, right), cells)


@group.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="YAML, JSON, a list of overrides, or a launch script.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the recipe here; default: stdout.")] = None,
    system: Annotated[
        str | None, typer.Option(help="Whose it is: easyr1, verl, rllava, trl. Default: found out.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the training data: makes steps of epochs.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes it was for: TRL's batch sizes are per device.")
    ] = None,
    check_it: Annotated[bool, typer.Option("--check", help="Check the recipe too; exit code 2 if wrong.")] = False,
    as_json: Json = False,
) -> None:
    """Turn a configuration of EasyR1, verl, RLLaVA or TRL into a recipe; say what did not map or means something else.

    Example: vlmrl recipe import run_fungi.sh --rows 10000 --out fungi.toml

    The file is read, never run. Behind each value stands the setting it came from.
    """
    from vlmrl.errors import RecipeError, format_error
    from vlmrl.recipe.imports.run import import_recipe

    if out is not None and out.exists():
        raise RecipeError(f"{out} exists already", hint="choose another --out, or remove it")
    text, report = import_recipe(file, system=system, rows=rows, processes=processes)
    if out is not None:
        try:
            out.write_text(text, "utf-8")
        except OSError as error:
            raise RecipeError(f"cannot write the recipe: {error.strerror}", where=str(out)) from None
    problems = _checked_text(text, out) if check_it else []
    checked = {"problems": [asdict(p) for p in problems]} if check_it else {}
    emit(report | {"recipe": text, "out": None if out is None else str(out)} | checked, as_json)
    if not as_json:
        if out is None:
            typer.echo(text, nl=False)
        _show_import(report, out)
        for p in problems:
            say(format_error(p.message, p.where, p.hint, p.level))
    if any(p.level == "error" for p in problems):
        raise typer.Exit(2)


def _checked_text(text: str, out: Path | None) -> list[Problem]:
    """What is wrong with an imported recipe, which is in `out` or in no file yet."""
    import tempfile
    from dataclasses import replace

    if out is not None:
        return _looked_at(str(out), [])[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(text, "utf-8")
        found = _looked_at(str(file), [])[0]
    return [replace(p, where=(p.where or "").replace(str(file), "the recipe")) for p in found]


def _show_import(report: dict[str, Any], out: Path | None) -> None:
    """On stderr: what needs an eye."""
    for note in report["notes"]:
        say(f"note: {note}")
    say(f"{len(report['mapped'])} settings mapped from {report['system']}" + (f" to {out}" if out else ""))
    if report["changed"]:
        say("\nmapped with another meaning:")
        for changed in report["changed"]:
            say(f"  {changed['key']} = {_toml(changed['value'])}: {changed['why']}")
    if report["left_out"]:
        say("\nnot mapped:")
        reasons: dict[str, list[str]] = {}
        for left in report["left_out"]:
            reasons.setdefault(left["why"], []).append(left["key"])
        for why, keys in reasons.items():
            say(f"  {', '.join(keys)}: {why}")
    if report["as_here"]:
        say(f"\nas here, so not written: {', '.join(report['as_here'])}")
    if report["todo"]:
        say("\nto do:")
        for todo in report["todo"]:
            say(f"  {todo}")
    say(f"\nnext: vlmrl check {out or 'RECIPE'}")


def _explain_table(found: Any) -> None:
    from vlmrl.recipe.explain import explain as look_up

    typer.echo(f"[{found.key}]\n  {found.help}\n")
    for name in found.keys:
        inner = look_up(f"{found.key}.{name}")
        default = "the row's" if inner.by_row else _default(inner)
        typer.echo(f"  {name:24} {default:14} {inner.help}")


def _default(key: Any) -> str:
    """Return the default of a key in words; for a key that rows of the algorithm table set, by row."""
    if not key.by_row:
        return "required" if key.required else _toml(key.default)
    rows: dict[str, list[str]] = {}
    for row, value in key.by_row.items():
        rows.setdefault(_toml(value), []).append(row)
    return "the row's: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in rows.items())


def _on_resume(key: Any) -> str:
    """Return what happens when the key changes in a run that is resumed."""
    if key.on_resume is None:
        return ""
    words = {"free": "may change", "asked": "may change with --accept-changes", "refused": "cannot change"}
    return f"{words[key.on_resume.kind]} ({key.on_resume.reason})"


def _list_names(tasks: bool, algos: bool, rewards: bool, as_json: bool) -> None:
    from vlmrl.algo.differences import EVERYWHERE, OF_ROWS
    from vlmrl.algo.family import ALGORITHMS
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
            _table(name, ("name", "about"), list(entries.items()))
    if not as_json and algos:
        tell("")
        _table("where they differ on purpose from verl's and TRL's code", ("name", ""), list(differences.items()))
    if not as_json and tasks:
        _table(
            "variants, for the key `variant` of a data entry",
            ("task", "may be"),
            [(k, ", ".join(v)) for k, v in variants.items()],
        )
        say("")
        told = [(name, ", ".join(names)) for name, names in profiles.items()]
        _table("rewards of a task, for the key `profile` of [reward]", ("task", "may be"), told)


def _toml(value: Any) -> str:
    import json

    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console(stderr=False).print(table)
