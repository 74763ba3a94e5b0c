"""Recipes of a run and the texts that they use, kept for each attempt. Nothing old is overwritten.

A resume with changes first writes `resolved-a2.json` (and `recipe-a2.toml`, if a file was given). Then it records the
attempt and its changes in the manifest. Readers use only what the manifest names, so a resume that was killed in
between has no effect. Reward files and prompt templates are kept under their hash, with secrets hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.redaction.redact import hidden_keys, redact_text, redact_value
from vlmrl.store import layout
from vlmrl.store.checkpoints import hashes_of
from vlmrl.store.files import write_atomic, write_json
from vlmrl.store.manifest import read_raw, read_record
from vlmrl.store.metrics import encode
from vlmrl.untrusted import read_regular

Texts = Mapping[tuple[str, str], str]
"""(reward or prompt, sha256 as in the manifest) -> text."""
Files = dict[str, str]
"""Path of a file relative to the run -> sha256 of its content when it was written: see `Manifest.files`."""


@dataclass(frozen=True)
class Renewal:
    """Changes that a resume makes.

    Args:
        changes: one JSON object per change; they become `Attempt.changes` (recipe/changes.py).
        accepted: whether the user gave --accept-changes.
        resolved: the new recipe.
        recipe_text: text of its file; None if no file was given.
        records: new values of the manifest's fields datasets, rewards and prompts.
    """

    changes: Sequence[Mapping[str, Any]]
    accepted: bool
    resolved: Mapping[str, Any]
    recipe_text: str | None = None
    records: Mapping[str, Any] = field(default_factory=dict)
    texts: Texts = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)

    @property
    def restarts_best(self) -> bool:
        return any("best" in change.get("restarts", ()) for change in self.changes)


@dataclass(frozen=True)
class Fork:
    """Checkpoint that a new run continues from.

    Args:
        checkpoint: a complete checkpoint of another run. The new run gets a copy of it.
        origin: `Manifest.first_weights` of that run; {} if it has none.
        changes: differences to that run's recipe, as in `Attempt`.
    """

    checkpoint: Path
    origin: Mapping[str, Any]
    changes: Sequence[Mapping[str, Any]] = ()


def resolved_files(run_dir: Path) -> list[Path]:
    """Return the files of a run's resolved recipes, oldest first: resolved.json, then one per attempt with changes."""
    return [layout.resolved_path(run_dir, number) for number in _changed_attempts(run_dir)]


def newest_resolved(run_dir: Path) -> Path:
    """Return the file of the current resolved recipe. All code that reads a run's recipe uses this function."""
    return resolved_files(run_dir)[-1]


def read_resolved(run_dir: Path) -> dict[str, Any]:
    """Return the current resolved recipe: {"schema", "recipe", "origins"}.

    Raises: StoreError when it is missing or damaged.
    """
    return read_resolved_file(newest_resolved(run_dir))


def read_resolved_file(path: Path) -> dict[str, Any]:
    """Return the resolved recipe of a file of `resolved_files`. Raises: StoreError when it is missing or damaged."""
    return read_record(path, _model(), "the run's recipe")


@cache
def _model() -> Any:
    """Return the model of resolved.json: the tables that readers use without a check of all keys."""
    from pydantic import TypeAdapter, create_model  # at the first use: importing it is slow

    names = ("train", "eval", "model", "rollout", "algo", "optim", "reward")
    tables: Any = dict.fromkeys(names, (dict[str, Any], {}))
    recipe: Any = create_model("Recipe", data=(list[dict[str, Any]], []), **tables)
    return TypeAdapter(create_model("Resolved", recipe=(recipe, ...), origins=(dict[str, Any], {})))


def kept_recipes(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the resolved recipe of every attempt that changed it, oldest first. Damaged ones are left out."""
    for path in resolved_files(run_dir):
        with contextlib.suppress(StoreError):
            yield read_resolved_file(path)["recipe"]


def recipe_text(run_dir: Path) -> str:
    """Return the newest recipe as the user gave it; "" if there is none, or it cannot be read."""
    try:
        return read_regular(newest_recipe(run_dir)).decode("utf-8", "replace")
    except OSError:
        return ""


def planned_steps(run_dir: Path) -> int | None:
    """Return the planned number of steps: the largest in any recipe of the run, or None if no recipe has one."""
    steps_per_recipe = [recipe.get("train", {}).get("steps") for recipe in kept_recipes(run_dir)]
    return max((steps for steps in steps_per_recipe if type(steps) is int and steps > 0), default=None)


def refuse_hidden(recipe: Mapping[str, Any], where: str) -> None:
    """Refuse a recipe with a value that was hidden as a secret when it was recorded, unless the user gives it again.

    Raises: StoreError.
    """
    keys = hidden_keys(recipe)
    if keys:
        raise StoreError(
            f"{', '.join(f'`{key}`' for key in keys)} held a secret, which the run's record does not have",
            where=where,
            hint=f"give it again (it is not recorded): --set {keys[0]}=...; or let the reward read it from an "
            "environment variable",
        )


def newest_recipe(run_dir: Path) -> Path:
    """Return the path of the newest recipe file: the text that the user gave."""
    files = [layout.recipe_path(run_dir, number) for number in _changed_attempts(run_dir)]
    return next((path for path in reversed(files) if path.is_file()), files[0])


def write_recipe(run_dir: Path, resolved: Mapping[str, Any] | None, text: str | None, attempt: int = 1) -> Files:
    """Write the recipe of an attempt: the resolved one and the text of the user's file. None = not written."""
    written = []
    if text is not None:
        written.append(layout.recipe_path(run_dir, attempt))
        write_text(written[-1], text)
    if resolved is not None:
        written.append(layout.resolved_path(run_dir, attempt))
        write_json(written[-1], redact_value(encode(resolved)))
    return hashes_of(run_dir, written)


def keep_texts(run_dir: Path, texts: Texts) -> Files:
    """Write reward files and prompt templates. Equal texts are written once."""
    paths = {layout.kept_path(run_dir, kind, sha256): text for (kind, sha256), text in texts.items()}
    for path, text in paths.items():
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_text(path, text)
    return hashes_of(run_dir, paths)


def write_text(path: Path, text: str) -> None:
    """Write a text that a user wrote, with secrets hidden."""
    write_atomic(path, redact_text(text).encode("utf-8", "backslashreplace"))


def kept_text(run_dir: Path, kind: str, sha256: str) -> str | None:
    """Return the kept text with this hash, or None if the run did not keep it."""
    try:
        return read_regular(layout.kept_path(run_dir, kind, sha256)).decode()
    except (OSError, UnicodeDecodeError):
        return None


def _changed_attempts(run_dir: Path) -> Iterator[int]:
    """Yield 1, then the numbers of the attempts that changed something."""
    yield 1
    try:
        attempts = read_raw(run_dir).get("attempts")
    except StoreError:  # without the manifest, only the first recipe is known
        attempts = None
    for attempt in attempts if isinstance(attempts, list) else ():
        number = attempt.get("number") if isinstance(attempt, dict) and attempt.get("changes") else None
        if isinstance(number, int) and number > 1:
            yield number
