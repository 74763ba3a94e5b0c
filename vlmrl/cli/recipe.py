"""`vlmrl recipe`: commands for recipes and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import draw_plain_table, emit, say, show_table, tell
from vlmrl.errors import Problem


def schema(as_json: options.Json = False) -> None:
    """Print the JSON Schema of a recipe.

    Editors use it to complete and check TOML.

    Example: vlmrl recipe schema > recipe.schema.json
    """
    import json

    from vlmrl.recipe.explain import json_schema

    result = json_schema()
    if not emit(result, as_json):
        typer.echo(json.dumps(result, indent=2))


def show(
    recipe: options.RecipeName,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show where each value comes from, defaults included.")
    ] = False,
    overrides: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Print a recipe with its parents and overrides applied; of a base recipe, which lacks a table, its own text.

    Example: vlmrl recipe show recipes/digits_im.toml --origin --set optim.lr=1e-4
    """
    from vlmrl.recipe.explain import toml_lines
    from vlmrl.recipe.files import text_of_base
    from vlmrl.recipe.load import load_recipe
    from vlmrl.untrusted import visible

    text = None if origin or overrides or as_json else text_of_base(recipe)
    if text is not None:
        typer.echo("\n".join(map(visible, text.splitlines())))
        return
    loaded = load_recipe(recipe, overrides=overrides or [])
    if as_json:
        emit(loaded.resolved, True)
        return
    typer.echo("\n".join(toml_lines(loaded, origin=origin)))


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
        say(f"\nmapped with another meaning (there: in {report['system']}; here: in vlmrl):")
        for changed in report["changed"]:
            say(f"  {changed['key']} = {value_text(changed['value'])}: {changed['why']}")
    if report["left_out"]:
        say(f"\nnot mapped (there: in {report['system']}; here: in vlmrl):")
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
    from vlmrl.setup.catalogs import catalogs

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
    if emit(chosen | more, as_json):
        return
    for name, entries in chosen.items():
        draw_plain_table(entries.items(), ("name", "about"), name)
    if algos:
        tell("")
        title = "where they deliberately differ from the code of verl and TRL"
        draw_plain_table(differences.items(), ("name", ""), title)
    for title, table in (("`variant` in [[data]]", variants), ("`profile` in [reward]", profiles)) if tasks else ():
        draw_plain_table([(name, ", ".join(names)) for name, names in table.items()], ("task", "values"), title)
        if table is variants:
            say("")


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


def check(
    recipes: Annotated[list[str], typer.Argument(help="TOML files, or names of shipped recipes.")],
    overrides: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Check recipes without opening their data and models.

    It checks keys, values, names, prompt and reward files. The exit code is 2 if a recipe has an error.

    Example: vlmrl recipe check fungi_im bird_im_concrete recipes/digits_im.toml

    Data and models that do not exist yet are reported, but they are not errors here. `vlmrl check RECIPE` also opens
    the data, reads rows and prompts, and plans memory and time.
    """
    from vlmrl.errors import format_error
    from vlmrl.setup.catalogs import check_alone

    results, data = [], {}
    for recipe in recipes:
        problems, data[recipe] = check_alone(recipe, overrides or [])
        results.append((recipe, problems))
    wrong = [recipe for recipe, problems in results if any(p.level == "error" for p in problems)]
    fields = [
        {"recipe": r, "ok": r not in wrong, "data": data[r], "problems": [asdict(p) for p in problems]}
        for r, problems in results
    ]
    if not emit({"ok": not wrong, "recipes": fields}, as_json):
        for recipe, problems in results:
            tell(f"{recipe}: {'has errors' if recipe in wrong else 'no errors'}")
            for entry in data[recipe]:
                tell(f"  {entry['path']}: {describe_task(entry)}")
            for p in problems:
                tell(format_error(p.message, p.where, p.hint, p.level))
    if wrong:
        raise typer.Exit(2)


def diff(
    left: Annotated[str, typer.Argument(help="First recipe: a TOML file, or the name of a shipped recipe.")],
    right: Annotated[str, typer.Argument(help="Second recipe.")],
    as_json: options.Json = False,
) -> None:
    """Show the keys in which two recipes differ, defaults included.

    Example: vlmrl recipe diff digits_baseline digits_im
    """
    from vlmrl.recipe.explain import diff_recipes
    from vlmrl.recipe.load import load_recipe

    rows = diff_recipes(load_recipe(left), load_recipe(right))
    if not emit({"left": left, "right": right, "differences": rows}, as_json):
        cells = [(r["key"], value_text(r["left"]), value_text(r["right"])) for r in rows]
        draw_plain_table(cells, ("key", left, right), f"{len(rows)} differences")


def explain(
    key: Annotated[str, typer.Argument(help="Key (algo.clip_high, or just clip_high), or table (algo).")],
    as_json: options.Json = False,
) -> None:
    """Explain a recipe key: type, default, range, and its uses.

    The uses are the places where shipped recipes set it.

    Example: vlmrl recipe explain rollout.samples_per_prompt
    """
    from vlmrl.recipe.explain import explain as look_up

    explanation = look_up(key)
    if emit(asdict(explanation), as_json):
        return
    if explanation.keys:
        show_table_of_keys(explanation)
        return
    facts = [("type", explanation.type), ("default", default_text(explanation)), ("range", explanation.range)]
    facts += [("choices", ", ".join(map(value_text, explanation.choices))), ("resume", on_resume_text(explanation))]
    facts += [("read by", {"rl": "vlmrl train", "sft": "vlmrl sft"}.get(explanation.run_kind, ""))]
    lines = [explanation.key, f"  {explanation.help}", ""] + [f"  {name:8} {value}" for name, value in facts if value]
    lines += ["  used in  " + f"{use.where}  {value_text(use.value)}" for use in explanation.uses]
    typer.echo("\n".join(lines))


def import_(
    file: Annotated[Path, typer.Argument(help="YAML, JSON, a list of overrides, a launch script, or TRL's Python.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write the recipe to; default: stdout.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System of the configuration: easyr1, verl, rllava, trl; default: detected.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of rows of the training data, to convert epochs into steps.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes it was for: TRL's batch sizes are per device.")
    ] = None,
    check_it: Annotated[
        bool, typer.Option("--check", help="Also check the recipe; exit code 2 if it has an error.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Turn another system's configuration into a recipe.

    The systems are EasyR1, verl, RLLaVA and TRL. Settings that were not mapped, or mean something else here, are named.

    Example: vlmrl recipe import run_fungi.sh --rows 10000 --out fungi.toml

    The file is read, never run. A comment behind each value names the setting that it came from.
    """
    import tempfile

    from vlmrl.errors import RecipeError, format_error
    from vlmrl.recipe.imports.run import import_recipe
    from vlmrl.setup.catalogs import check_alone

    if out is not None and out.exists():
        raise RecipeError(f"{out} exists already", hint="choose another --out, or remove it")
    text, report = import_recipe(file, system=system, rows=rows, processes=processes)
    if out is not None:
        try:
            out.write_text(text, "utf-8")
        except OSError as error:
            raise RecipeError(f"cannot write the recipe: {error.strerror}", where=str(out)) from None
    problems: list[Problem] = []
    if check_it and out is not None:
        problems = check_alone(str(out), [])[0]
    elif check_it:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recipe.toml"
            path.write_text(text, "utf-8")
            problems = check_alone(str(path), [])[0]
        problems = [replace(p, where=(p.where or "").replace(str(path), "the recipe")) for p in problems]
    checked = {"problems": [asdict(p) for p in problems]} if check_it else {}
    if not emit(report | {"recipe": text, "out": None if out is None else str(out)} | checked, as_json):
        if out is None:
            typer.echo(text, nl=False)
        show_import(report, out)
        for p in problems:
            say(format_error(p.message, p.where, p.hint, p.level))
    if any(p.level == "error" for p in problems):
        raise typer.Exit(2)


def list_(
    words: Annotated[
        list[str] | None, typer.Argument(help="Only recipes whose name contains one of these words.")
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="List the tasks instead.")] = False,
    algos: Annotated[bool, typer.Option("--algos", help="List the algorithms instead.")] = False,
    rewards: Annotated[bool, typer.Option("--rewards", help="List the built-in rewards instead.")] = False,
    as_json: options.Json = False,
) -> None:
    """List recipes, or the names that a recipe may use.

    The recipes are the shipped ones and those in this folder.

    Example: vlmrl recipe list bird

    Example: vlmrl recipe list --algos
    """
    if tasks or algos or rewards:
        show_names(tasks, algos, rewards, as_json)
        return
    from vlmrl.recipe.explain import first_sentence, list_recipes

    recipes = [r for r in list_recipes(Path.cwd()) if not words or any(word in r.name for word in words)]
    rows = [{"name": r.name, "path": str(r.path), "kind": r.kind, "about": r.error or r.comment} for r in recipes]
    if not emit({"recipes": rows}, as_json):
        show_table("", ("name", "kind", "about"), [(r["name"], r["kind"], first_sentence(r["about"])) for r in rows])
        say("\n`vlmrl recipe show NAME` prints a recipe, `vlmrl recipe list WORD` lists those with WORD in their name")


group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, explain, check, list and import recipes.")


def register(app: typer.Typer) -> None:
    for command in (show, explain, check, list_, schema, diff, import_):
        group.command(command.__name__.rstrip("_"))(command)
    app.add_typer(group, name="recipe")
