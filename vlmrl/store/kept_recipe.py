"""What a run keeps of its recipe, and of the texts behind it, attempt by attempt: nothing old is overwritten.

A resume that changes something writes `resolved-a2.json` (and `recipe-a2.toml`, where a file was given) before the
manifest names the attempt with its changes; a reader goes by the manifest, so one that was killed in between changed
nothing. Reward files and prompt templates are kept by the hash that the manifest records, secrets hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.json_text import parse_json
from vlmrl.store import layout
from vlmrl.store.checkpoints import sha256_of
from vlmrl.store.files import write_atomic, write_json
from vlmrl.store.manifest import read_raw
from vlmrl.store.metrics import encode
from vlmrl.store.secrets.redact import hidden_keys, redact_text, redact_value

Texts = Mapping[tuple[str, str], str]
"""(reward or prompt, sha256 as in the manifest) -> text."""
Files = dict[str, str]
"""File relative to the run -> sha256 as it was written: `Manifest.files`."""


@dataclass(frozen=True)
class Renewal:
    """What a resume changes.

    Args:
        changes: one JSON object each, for the attempt in the manifest (recipe/changes.py).
        accepted: whether the user said --accept-changes.
        resolved: the recipe as it is now.    recipe_text: its file, where one was given.
        records: the manifest's datasets, rewards and prompts as they are now.
        texts: of the rewards and prompts as they are now.    seeds: as in the manifest.
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
    """What a new run goes on from.

    Args:
        checkpoint: a complete one, of another run; the new run gets it as its own.
        origin: `Manifest.first_weights` of that run, or {}.    changes: as in `Attempt`.
    """

    checkpoint: Path
    origin: Mapping[str, Any]
    changes: Sequence[Mapping[str, Any]] = ()


def resolved_files(run_dir: Path) -> list[Path]:
    """The resolved recipes of a run, oldest first: resolved.json, and that of each attempt which changed something."""
    return [layout.resolved_path(run_dir, number) for number in _changed_attempts(run_dir)]


def newest_resolved(run_dir: Path) -> Path:
    """The resolved recipe that holds now. Every reader of a run's recipe asks here."""
    return resolved_files(run_dir)[-1]


def read_resolved(run_dir: Path) -> dict[str, Any]:
    """The resolved recipe that holds now: {"schema", "recipe", "origins"}.

    Raises: StoreError when it is missing or damaged.
    """
    path = newest_resolved(run_dir)
    try:
        value = parse_json(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it does not hold a JSON object")
        return value
    except (OSError, ValueError) as error:
        raise StoreError(f"the run's recipe cannot be read: {error}", where=str(path)) from error


def planned_steps(run_dir: Path) -> int | None:
    """Return how many steps the run was to have: the most that any of its recipes says. None where none says it."""
    found = []
    for path in resolved_files(run_dir):
        try:
            found.append(parse_json(path.read_bytes())["recipe"]["train"]["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max((steps for steps in found if type(steps) is int and steps > 0), default=None)


def refuse_hidden(recipe: Mapping[str, Any], where: str) -> None:
    """Raise a StoreError when a value of a recipe was hidden in the run's record and nothing gives it now."""
    keys = hidden_keys(recipe)
    if keys:
        raise StoreError(
            f"{', '.join(f'`{key}`' for key in keys)} held a secret, which is not in the run's record", where=where,
            hint=f"give it again (it is not recorded): --set {keys[0]}=...; or let the reward read it from an "
                 "environment variable",
        )  # fmt: skip


def newest_recipe(run_dir: Path) -> Path:
    """The newest recipe file that was given, as it was given."""
    files = [layout.recipe_path(run_dir, number) for number in _changed_attempts(run_dir)]
    return next((path for path in reversed(files) if path.is_file()), files[0])


def write_recipe(run_dir: Path, resolved: Mapping[str, Any] | None, text: str | None, attempt: int = 1) -> Files:
    """Keep the recipe of an attempt, as resolved and as given; None = there is none."""
    written = []
    if text is not None:
        written.append(layout.recipe_path(run_dir, attempt))
        write_text(written[-1], text)
    if resolved is not None:
        written.append(layout.resolved_path(run_dir, attempt))
        write_json(written[-1], redact_value(encode(resolved)))
    return _hashes(run_dir, written)


def write_renewal(run_dir: Path, attempt: int, renewal: Renewal) -> Files:
    """Write everything of a renewal but what goes into the manifest."""
    recipe = write_recipe(run_dir, renewal.resolved, renewal.recipe_text, attempt)
    return recipe | keep_texts(run_dir, renewal.texts)


def keep_texts(run_dir: Path, texts: Texts) -> Files:
    """Keep reward files and prompt templates, each content once."""
    paths = {layout.kept_path(run_dir, kind, sha256): text for (kind, sha256), text in texts.items()}
    for path, text in paths.items():
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_text(path, text)
    return _hashes(run_dir, paths)


def keep_diff(run_dir: Path, diff: str) -> Files:
    """Keep the changes of the code since its commit."""
    write_text(run_dir / layout.CODE_DIFF, diff)
    return _hashes(run_dir, [run_dir / layout.CODE_DIFF])


def write_text(path: Path, text: str) -> None:
    """Write a text of a person's, secrets hidden."""
    write_atomic(path, redact_text(text).encode("utf-8", "backslashreplace"))


def _hashes(run_dir: Path, paths: Iterable[Path]) -> Files:
    return {path.relative_to(run_dir).as_posix(): sha256_of(path) for path in paths}


def kept_text(run_dir: Path, kind: str, sha256: str) -> str | None:
    """The text that had this hash; None when the run does not keep it."""
    try:
        return layout.kept_path(run_dir, kind, sha256).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _changed_attempts(run_dir: Path) -> Iterator[int]:
    """1, then the numbers of the attempts that changed something."""
    yield 1
    try:
        attempts = read_raw(run_dir).get("attempts")
    except StoreError:  # a damaged manifest hides no recipe
        attempts = None
    for attempt in attempts if isinstance(attempts, list) else ():
        number = attempt.get("number") if isinstance(attempt, dict) and attempt.get("changes") else None
        if isinstance(number, int) and number > 1:
            yield number
