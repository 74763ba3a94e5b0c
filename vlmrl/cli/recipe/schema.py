"""`vlmrl recipe schema`: print the JSON Schema of a recipe."""

from __future__ import annotations

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit


def schema(as_json: options.Json = False) -> None:
    """Print the JSON Schema of a recipe.

    Editors use it to complete and check TOML.

    Example: vlmrl recipe schema > recipe.schema.json
    """
    import json

    from vlmrl.recipe.explain import json_schema

    result = json_schema()
    emit(result, as_json)
    if not as_json:
        typer.echo(json.dumps(result, indent=2))
