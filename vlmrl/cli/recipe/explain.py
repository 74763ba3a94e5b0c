"""`vlmrl recipe explain`: explain a key of recipes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.cli.show.recipe_tables import default_text, on_resume_text, show_table_of_keys, value_text


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
    emit(asdict(explanation), as_json)
    if as_json:
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
