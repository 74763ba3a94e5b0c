"""Calls of saved episodes, run again in the processes of their environment: `vlmrl reward-check --replay`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.data.images import image_hash
from vlmrl.environments.base import CUT_MARK, EnvironmentLimits
from vlmrl.environments.processes import Answer, Beginning, EnvironmentPool, Stopped, load_environment
from vlmrl.environments.row_fields import Repeats, repeats_of
from vlmrl.errors import RewardError
from vlmrl.recipe.schema import Environment
from vlmrl.redaction.redact import excerpt, hide_known, learn, redact_value
from vlmrl.redaction.secrets import HIDDEN
from vlmrl.reward_check.rescore import image_reader
from vlmrl.reward_check.responses import CHUNK_ROWS, RolloutReader, evaluation_of, read_saved
from vlmrl.reward_check.scoring import SavedResponses
from vlmrl.rewards.identity import changed_files
from vlmrl.store.evaluated_rows import read_summary
from vlmrl.store.provenance import usable_cores
from vlmrl.tasks.user_task import is_own
from vlmrl.types import RewardInput, Turn
from vlmrl.untrusted import encodable

AT_ONCE = 64
"""Number of episodes whose processes are open at the same time."""
MOST_SHOWN_CHARS = 160
Episode = tuple[str, RewardInput, int]
"""(name of the row, its response, seed)."""


def replay(saved: SavedResponses) -> dict[str, Any]:
    """Run the stored calls of saved episodes again, and compare what the tools return with what is stored.

    Pictures are grey where those of the evaluation were (`vlmrl eval --tools blank`).

    Returns: `episodes`: number of those in which tools returned something; `equal`: those of them without a difference;
        `alone`: number of the other episodes, in which nothing is stored that a tool returned; `changed`: source ->
        parts of its environment that have changed since the run; `first`: first difference in the input (where, turn,
        tool, stored, now), or None.
    Raises: RewardError if there is no such episode, or the environment cannot be loaded.
    """
    differences: list[tuple[int, dict[str, Any]]] = []
    changed: dict[str, list[str]] = {}
    count, read = 0, image_reader(saved)
    by_kind, alone = _episodes(saved)
    for (source, is_grey), episodes in by_kind.items():
        rows, (pool, changed[source]) = list(episodes), _pool(saved, source, is_grey)
        repeats = saved.environment(source).get("repeats")
        if repeats is None:  # of an earlier run
            repeats = repeats_of((x.columns, x.truth) for _, x, _ in episodes.values())
        with closing(pool):
            for first in range(0, len(rows), AT_ONCE):
                piece = {row: episodes[row] for row in rows[first : first + AT_ONCE]}
                differences += _differences(pool, piece, read, repeats)
        count += len(rows)
    if not count:
        hint = "name a run with [environment], or the rows of its evaluation"
        is_table = not isinstance(saved.reader, RolloutReader)
        why = "a table does not say where its calls can run" if is_table else "no saved response has called a tool"
        raise RewardError(why, where=str(saved.path), hint=hint)
    first_one = min(differences, key=lambda one: one[0], default=(0, None))[1]
    equal = count - len(differences)
    return {"episodes": count, "equal": equal, "alone": alone, "changed": changed, "first": first_one}


def _episodes(saved: SavedResponses) -> tuple[dict[tuple[str, bool], dict[int, Episode]], int]:
    """Return the responses in which tools returned something, and the number of the other episodes.

    The former are (source, whether its tools showed grey pictures) -> row -> episode.
    """
    paths = saved.reader.paths if isinstance(saved.reader, RolloutReader) else ()
    batches = (batch for path in paths for batch in read_saved(Path(path), ["seed"], rows=CHUNK_ROWS, repeated=()))
    seeds = [seed for batch in batches for seed in batch.column("seed").to_pylist()]
    grey = [_shows_grey(Path(path).absolute()) for path in paths]
    episodes: dict[tuple[str, bool], dict[int, Episode]] = {}
    alone = 0
    for chunk in saved.reader.chunks() if seeds else ():
        decoded = saved.reader.decode(chunk)
        for i, x in enumerate(decoded.inputs):
            row, source = int(decoded.facts.rows_N[i]), decoded.facts.sources[i] or ""
            if any(turn.role != "assistant" for turn in x.turns):
                kind = source, grey[int(decoded.facts.files_N[i])]
                episodes.setdefault(kind, {})[row] = (saved.reader.where(decoded.facts, i), x, seeds[row])
            else:
                alone += bool(x.turns)
    return episodes, alone


def _shows_grey(path: Path) -> bool:
    """Return whether a file has the rows of an evaluation with `--tools blank`."""
    return bool(evaluation_of(path)) and (read_summary(path.parent).get("meta") or {}).get("tools") == "blank"


def _pool(saved: SavedResponses, source: str, is_grey: bool) -> tuple[EnvironmentPool, list[str]]:
    """Return the processes of a source's environment, and what has changed of it since the run."""
    record, recipe = saved.environment(source), saved.recipe
    settings = [e for d in (recipe.data if recipe else ()) if (e := d.own_environment) is not None]
    settings = [e for e in settings if e.name.endswith(f":{record.get('name')}")]
    if not settings or saved.run is None:
        raise RewardError(f"it is not recorded which environment the episodes of `{source}` had", where=str(saved.path))
    loaded = [load_environment(*_named(saved, source, e), saved.run.manifest.cwd or None) for e in settings]
    now, e = max(zip(loaded, settings, strict=True), key=lambda pair: pair[0].user.sha256 == record["sha256"])
    learn([now.user.code])  # as the run did
    fresh = redact_value(now.record)
    changed = ["code" if key == "sha256" else key for key in fresh if key != "files" and fresh[key] != record.get(key)]
    changed += changed_files(record, fresh)
    limits = EnvironmentLimits.of(e, e.workers or 2 * usable_cores())
    return EnvironmentPool(now, "hermes", replace(limits, grey_images=is_grey or limits.grey_images)), changed


def _named(saved: SavedResponses, source: str, settings: Environment) -> tuple[str, Mapping[str, Any]]:
    """Return the name of an environment with its file, and its arguments; `:NAME` is in the file of the task."""
    if not settings.name.startswith(":"):
        return settings.name, settings.args
    ref, name = saved.task_ref(source), saved.heads[source].task
    task = ref.make() if ref is not None else None
    if task is not None:
        return task.named_environment(settings.name, settings.args)
    # The code of the user's task has changed since the run: its tools are run, and the change is told.
    return (name.rpartition(":")[0] + settings.name if is_own(name) else settings.name), settings.args


def _differences(
    pool: EnvironmentPool, episodes: Mapping[int, Episode], read: Any, repeats: Repeats
) -> Iterator[tuple[int, Any]]:
    """Yield (row, first difference) of the episodes that differ. `repeats`: columns that repeat the truth."""
    left = {}
    for row, (where, x, seed) in episodes.items():
        left[row] = [i for i, turn in enumerate(x.turns) if turn.role == "tool"]
        start = Beginning(x.columns, x.truth, read(x.media, where), x.seen_sizes, seed, x.prompt, repeats)
        pool.begin(row, start)
    running: dict[int, int] = {}
    while left:
        for row, answer in pool.advance():
            where, x, _ = episodes[row]
            number = running.get(row, 0)
            is_stored = number > 0 or x.turns[0].role != "assistant"
            values = _values(x.turns[number] if is_stored else Turn("user", ""), answer)
            if values is not None:
                tools = ", ".join(call.name or "?" for call in x.turns[number - 1].calls) if number else "reset"
                yield row, {"where": where, "turn": number, "tool": tools, "stored": values[0], "now": values[1]}
            if values is not None or not left[row]:
                pool.drop(row)
                del left[row]
            else:
                running[row] = left[row].pop(0)
                seen = [size for turn in x.turns[: running[row]] for size in turn.seen_sizes]
                pool.replay(row, x.turns[running[row] - 1].calls, seen)


def _values(stored: Turn, answer: Answer | Stopped) -> tuple[str, str] | None:
    """Return an observation as it is stored and as it is now, cut; None if both are equal."""
    if isinstance(answer, Stopped):
        return excerpt(stored.text, MOST_SHOWN_CHARS), excerpt(f"failed: {answer.why}", MOST_SHOWN_CHARS)
    now = encodable("".join(part for part in answer.parts if isinstance(part, str)))
    # Neither what was cut or hidden is known, nor why a call could not be read, which is nothing of the environment.
    text, now = (re.sub("(error: the call cannot be read).*", r"\1", hide_known(t)) for t in (stored.text, now))
    pattern = ".*".join(map(re.escape, re.split(f"{re.escape(CUT_MARK)}|{HIDDEN}", text)))
    hashes = [media.sha256 for media in stored.media], [image_hash(p) for p in answer.parts if isinstance(p, bytes)]
    if re.fullmatch(pattern, now, re.DOTALL) is not None:
        if hashes[0] == hashes[1]:
            return None
        text, now = (" ".join(["pictures", *(sha256[:12] for sha256 in one)]) for one in hashes)
    equal = next((i for i, (a, b) in enumerate(zip(text, now, strict=False)) if a != b), min(len(text), len(now)))
    begin = max(0, equal - 40)
    return excerpt(text[begin:], MOST_SHOWN_CHARS), excerpt(now[begin:], MOST_SHOWN_CHARS)
