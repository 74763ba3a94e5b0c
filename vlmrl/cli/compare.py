"""`vlmrl compare A B`: two runs or evaluations side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, tell
from vlmrl.cli.show.comparison import show_checkpoints, show_differences, show_paired, show_side_by_side, side_title


def register(app: typer.Typer) -> None:
    app.command("compare", short_help="Compare two runs or evaluations.")(compare_)


def compare_(
    a: Annotated[str, typer.Argument(help="A run (id prefix, name, `last`, folder), or an evaluation's folder.")],
    b: Annotated[str, typer.Argument(help="The other one. Differences are B minus A.")],
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Is B better than A? The answer first; then recipe, code, data and metrics side by side, and paired differences.

    Example: vlmrl compare digits-sft digits-im

    Test rows decide where both were evaluated on them (vlmrl eval), else rows held out, else those that training
    validated on. A difference is taken row by row; its interval is Wilson's score interval at the effective sample
    size of rows that share images, scaled to the range that a difference can have. An interval that holds 0 is not
    clear.
    """
    from vlmrl.evaluate.compare import compare, open_side
    from vlmrl.store.layout import runs_root

    root = runs_root(runs)
    left, right = open_side(root, a), open_side(root, b)
    result = compare(left, right)
    emit(result, as_json)
    if as_json:
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
    show_differences("Recipe", result["recipe"], "the same recipe")
    show_differences("Made with", result["made_with"], "the same code, packages, data and seeds")
    show_side_by_side("Training, last step", result["train"])
    show_side_by_side("Validation", result["validation"])
    for note in result["notes"]:
        tell(f"\n{note}")
