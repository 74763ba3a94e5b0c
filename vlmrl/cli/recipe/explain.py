"""`vlmrl recipe explain`: explain a key of recipes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.cli.show.recipe_tables import default_text, on_resume_text, show_table_of_keys, value_text


def explain(
    key: Annotated[str, typer.Argument(help="A key (algo.clip_high), a table (algo), or just clip_high.")],
    as_json: options.Json = False,
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
        show_table_of_keys(found)
        return
    facts = [("type", found.type), ("default", default_text(found)), ("range", found.range)]
    facts += [("choices", ", ".join(map(value_text, found.choices))), ("resume", on_resume_text(found))]
    facts += [("read by", {"rl": "vlmrl train", "sft": "vlmrl sft"}.get(found.run_kind, ""))]
    lines = [found.key, f"  {found.help}", ""] + [f"  {name:8} {value}" for name, value in facts if value]
    lines += ["  used in  " + f"{use.where}  {value_text(use.value)}" for use in found.uses]
    typer.echo("\n".join(lines))
