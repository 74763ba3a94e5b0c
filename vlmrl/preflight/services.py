"""Check of the services that rewards ask: one request to each, before anything else is spent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import Problem, VlmrlError
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.rewards.open_services import opened
from vlmrl.rewards.worker_code import ServicePlace

if TYPE_CHECKING:
    from vlmrl.tasks.source import Source


def place_of_check(runs_folder: Path) -> ServicePlace:
    """Return the place of a check's services. Each check has a budget of its own."""
    return ServicePlace(str(runs_folder), f"check {time.time_ns()}")


def check_services(
    loaded: LoadedRecipe, sources: Sequence[Source], place: ServicePlace
) -> tuple[list[Problem], dict[str, Mapping[str, Any]]]:
    """Send one request to each service of the sources' rewards.

    Returns: (problems, reward -> facts about the answer, see `Service.try_out`).
    """
    problems: list[Problem] = []
    facts: dict[str, Mapping[str, Any]] = {}
    seen: list[Any] = []
    for single in (single for source in sources for single in source.reward.singles):
        if single.service is None or dict(single.service.args) in seen:
            continue
        seen.append(dict(single.service.args))
        try:
            with opened(single.service, place) as service:
                facts[_label(single.name, facts)] = dict(service.try_out())
        except VlmrlError as error:
            at = f" ({error.where})" if error.where else ""
            where = loaded.where(("judge", "endpoint"), ("judge", "model"), ("reward", "name"))
            problems.append(Problem(f"reward `{single.name}`: {error.message}{at}", where, error.hint))
    return problems, facts


def _label(name: str, taken: Mapping[str, Any]) -> str:
    number = 1 + sum(label.partition(" ")[0] == name for label in taken)
    return name if number == 1 else f"{name} {number}"
