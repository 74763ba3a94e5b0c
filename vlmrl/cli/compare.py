"""`vlmrl compare A B`: compare two runs or evaluations."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, tell
from vlmrl.cli.show.comparison import (
    show_checkpoints,
    show_differences,
    show_epochs,
    show_paired,
    show_side_by_side,
    side_title,
)
from vlmrl.cli.show.settings import show_settings


def register(app: typer.Typer) -> None:
    app.command("compare", short_help="Compare two runs or evaluations.")(compare_)


def compare_(
    a: Annotated[
        str,
        typer.Argument(
            help="Run (id prefix, name, `last`, folder), or an evaluation's folder. Several runs that differ only in "
            "their seed, separated by commas, are one setting."
        ),
    ],
    b: Annotated[str, typer.Argument(help="The run or evaluation to compare with A. Differences are B minus A.")],
    more: Annotated[
        list[str] | None, typer.Argument(help="More of them, each compared with A.", show_default=False)
    ] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Compare two runs or evaluations: is B better than A?

    The answer is printed first. Paired differences, and recipe, code, data and metrics side by side follow.

    Example: vlmrl compare digits-sft digits-im   or   vlmrl compare sft-1,sft-2,sft-3 im-1,im-2,im-3

    The answer comes from test rows if both were evaluated on them (vlmrl eval), else from held-out rows, else from the
    rows of validation in training. Differences are taken row by row. Their interval is Wilson's score interval at the
    effective sample size of rows that share images, scaled to the range that a difference can have. If it contains 0,
    the difference is not clear.

    Besides, there are a paired bootstrap, the p-value of McNemar's exact test (of a permutation test if rows share
    images or are not only right or wrong), and the number of rows that would show a difference of 2 points.

    A setting of several runs has its mean over runs, a band of one standard deviation, and an interval for new rows and
    new seeds. With more than two settings, p-values have Holm's correction.
    """
    from vlmrl.evaluate.compare import compare, open_side
    from vlmrl.evaluate.settings import compare_settings, is_list, open_settings
    from vlmrl.store.layout import runs_root

    root = runs_root(runs)
    if is_list(refs := [a, b, *(more or [])]):
        result = compare_settings(open_settings(root, refs))
        emit(result, as_json)
        if not as_json:
            show_settings(result)
        return
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
    show_epochs(result["epochs"])
    show_differences("Recipe", result["recipe"], "the same recipe")
    show_differences("Made with", result["made_with"], "the same code, packages, data and seeds")
    show_side_by_side("Training, last step", result["train"])
    show_side_by_side("Validation", result["validation"])
    for note in result["notes"]:
        tell(f"\n{note}")
