"""All checks of `vlmrl check`: recipe, data, model and machine, the plan of a run, and with `--deep` the packed rows.

The first check needs no large library, so that a wrong model path is reported at once: the imports are in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, VlmrlError, problems_in


@dataclass
class FullCheck:
    """Result of a check.

    Args:
        shown: errors that `show_first` got.
        plan: section -> name -> value (JSON): what the run would do and need.
        parity: comparison of packed rows with the model's own forward; None without `--deep`.
    """

    problems: list[Problem] = field(default_factory=list)
    shown: list[Problem] = field(default_factory=list)
    plan: Mapping[str, Any] = field(default_factory=dict)
    parity: Mapping[str, Any] | None = None


def check_everything(
    recipe: str,
    overrides: Sequence[str],
    root: Path,
    *,
    gpus: str | None,
    nnodes: int = 1,
    gpu_memory: str | None,
    deep_prompts: int | None,
    show_first: Callable[[list[Problem]], None],
) -> FullCheck:
    """Check a recipe, its data and this machine. Errors of all of these are problems in the result.

    Args:
        gpus, gpu_memory: values of these options; None = one process, this machine's GPUs.
        nnodes: number of machines; the plan is that of one of them.
        deep_prompts: number of prompts whose packed rows are compared; None = none.
        show_first: called at once with the errors of the model's files, then with those of recipe, tables and rewards,
            because the rest may take minutes.
    """
    from vlmrl.recipe.load import load_recipe
    from vlmrl.setup.checked_recipe import find_model_files, parse_target

    check = FullCheck()
    try:
        loaded, warnings = load_recipe(recipe, overrides=overrides), []
        where = loaded.where(("model", "path"))
        model_files, missing = find_model_files(loaded.recipe.model.path, root, where)
        from vlmrl.setup.check import check_location

        missing = missing or check_location(loaded, model_files)
        if missing:
            show_first(missing)
        from vlmrl.setup.rows import first_errors

        first = [p for p in first_errors(loaded) if p.where != where or not missing]
        if first:
            show_first(first)
        check.shown = [*missing, *first]
        from vlmrl.setup.auto_choice import choices_of, fill_for_run
        from vlmrl.setup.check import preflight

        target = parse_target(gpus, gpu_memory)
        if not missing:  # without its files no open value can be chosen
            loaded, warnings = fill_for_run(loaded, root, target)
        result = preflight(loaded, runs_folder=root, model_files=model_files, target=target, missing=missing)
        check.problems, check.plan = [*warnings, *result.problems], result.plan | {"chosen": choices_of(loaded)}
        if deep_prompts is not None and not any(p.level == "error" for p in check.problems):
            from vlmrl.evaluate.deep_check import deep_check

            check.parity = deep_check(loaded.recipe, root, prompts=deep_prompts).as_dict()
            check.problems = [*check.problems, *_disagreements(check.parity, where)]
    except VlmrlError as error:
        check.problems = list(dict.fromkeys([*check.shown, *problems_in(error)]))
    if nnodes > 1:
        from vlmrl.dist.world import OPEN_PORTS

        check.problems.append(OPEN_PORTS)
    return check


def _disagreements(parity: Mapping[str, Any], where: str) -> list[Problem]:
    """Return an error for each row that disagrees, and one for the gradient."""
    tolerance, reference = parity["tolerance"], "the model's own forward of each response alone"
    hint = f"{tolerance['why']}. Until the cause is known, train with --set model.shared_prefix=false, the reference"
    problems = [
        Problem(
            f"{row['row']}: log-probs as trained differ from {reference} by {row['logp_max']:.2g} nats (mean "
            f"{row['logp_mean']:.2g}); at most {tolerance['logp_max']:g} (mean {tolerance['logp_mean']:g}) is allowed",
            where,
            hint,
        )
        for row in parity["rows"]
        if not row["agrees"]
    ]
    if parity["gradient"] is not None and not parity["gradient"] <= tolerance["gradient"]:
        problems.append(
            Problem(
                f"the gradient as trained differs from that of {reference} by {parity['gradient']:.2g} of its norm; "
                f"at most {tolerance['gradient']:g} is allowed",
                where,
                hint,
            )
        )
    return problems
