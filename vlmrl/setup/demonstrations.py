"""Demonstrations of a recipe's sources: where they come from, and how many prompts have one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from vlmrl.algo.algorithms import ALGORITHMS, algorithm_of
from vlmrl.errors import DataError, Problem, StoreError, VlmrlError
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Data
from vlmrl.store.runs import open_run
from vlmrl.store.table_reader import file_batches, open_parquet
from vlmrl.tasks.source import Source
from vlmrl.types import Row
from vlmrl.untrusted import parse_json

RESPONSE_COLUMN = "response"
"""Column with the response that a row teaches."""
COUNTED = 10_000
"""Number of rows of a source that are looked at to count demonstrations."""


@dataclass(frozen=True)
class Book:
    """Demonstrations of a source.

    Args:
        share: share of its prompts that have one; which ones is drawn anew each time a prompt is.
        texts: prompt id -> response; None = those of the rows themselves, or of their task.
    """

    share: float = 1.0
    texts: Mapping[str, str] | None = None


def has_own(source: Source, row: Row) -> bool:
    """Return whether a row has a response of its own, or its task makes one.

    Raises: DataError for a response that is no text.
    """
    response = row.columns.get(RESPONSE_COLUMN)
    if response is not None and not isinstance(response, str):
        message = f"its `{RESPONSE_COLUMN}` is no text but of the type {type(response).__name__}"
        raise DataError(message, where=row.place, hint="a response to learn is a text")
    if response or source.task.trace is None:
        return bool(response)
    try:
        source.task.correct_turns(row, random.Random(0), ())
    except DataError:  # the task reads a column that is empty here
        return False
    return True


def count_demonstrations(source: Source, book: Book) -> tuple[int, int]:
    """Return (prompts with a demonstration, prompts looked at) of a source, `COUNTED` at most."""
    looked = min(len(source.rows), COUNTED)
    rows = (source.rows[i] for i in range(looked))
    return sum(has_own(source, r) if book.texts is None else r.prompt_id in book.texts for r in rows), looked


def told_count(source: Source, book: Book) -> str:
    """Describe how many prompts of a source have a demonstration. Raises: DataError if none has one."""
    count, looked = count_demonstrations(source, book)
    if not count:
        hint = f"give rows the column `{RESPONSE_COLUMN}`, or name a file or a run in `demonstrations`"
        raise DataError(f"none of {looked:,} prompts of {source.name} has a demonstration", hint=hint)
    more = f" of the first {looked:,}" if looked < len(source.rows) else f" of {looked:,}"
    share = f"; {book.share:.0%} of them take part each time, by chance" if book.share < 1 else ""
    return f"{count:,}{more} prompts have one{share}"


def check_demonstrations(
    loaded: LoadedRecipe, sources: Mapping[int, Source], runs: Path
) -> tuple[list[Problem], dict[str, str]]:
    """Check that each source has demonstrations, if the algorithm learns from them.

    Args:
        sources: index of the `[[data]]` entry -> its source.
        runs: the folder of the runs.
    Returns: (problems, name of a source -> the number of its demonstrations, in words).
    """
    problems: list[Problem] = []
    numbers: dict[str, str] = {}
    algo = loaded.recipe.algo
    is_rl = loaded.recipe.kind == "rl"  # else the rules of the recipe say that the key does nothing
    takes = is_rl and algo.name in ALGORITHMS and algorithm_of(algo).demonstrations != "none"
    for i, source in sources.items():
        data, where = loaded.recipe.data[i], loaded.where(("data", i, "demonstrations"), ("data", i, "path"))
        if not takes:
            if loaded.is_set(("data", i, "demonstrations")) and data.demonstrations != "none" and is_rl:
                message = f"`data.demonstrations` does nothing: {algo.name} learns from none"
                problems.append(Problem(message, where, "set algo.name = luffy, or remove it", "warning"))
            continue
        try:
            if (book := read_book(source, data, runs)) is not None:
                numbers[source.name] = told_count(source, book)
        except VlmrlError as error:
            problems.append(Problem(error.message, error.where or where, error.hint))
    return problems, numbers


def read_book(source: Source, data: Data, runs: Path) -> Book | None:
    """Return the demonstrations that a source's `demonstrations` names; None = none.

    Args:
        runs: the folder in which a run is looked for.
    Raises: StoreError or DataError for a run or file that cannot be read, or has no response to the source's prompts.
    """
    name, share = data.demonstrations, data.demonstration_share
    if name == "none":
        return None
    if name == "rows":
        return Book(share)
    path = Path(name)
    try:
        files = [path] if path.is_file() else [*open_run(runs, name).rollout_files().values()]
    except StoreError as error:
        hint = "it is rows, none, a file of responses, or a run"
        raise DataError(f"`demonstrations` of {source.name}: {error.message}", where=error.where, hint=hint) from error
    best: dict[str, tuple[float, str]] = {}
    for prompt_id, text, score in chain.from_iterable(map(_responses, files)):
        if prompt_id not in best or score > best[prompt_id][0]:
            best[prompt_id] = (score, text)
    if not best:
        hint = "a response that a limit has cut is no demonstration: raise rollout.max_new_tokens where it is made"
        raise DataError("it holds no response that ended by itself", where=name, hint=hint)
    if not any(row.prompt_id in best for row in source.rows):
        message = f"none of its {len(best):,} responses is to a prompt of {source.name}"
        raise DataError(message, where=name, hint="a response belongs to the dataset row with the same `prompt_id`")
    return Book(share, {prompt_id: text for prompt_id, (_, text) in best.items()})


def _responses(path: Path) -> Iterator[tuple[str, str, float]]:
    """Yield (prompt id, response, score) of a file; the score is 0 if it has none, and -infinity if it failed."""
    if path.suffix == ".parquet":
        with open_parquet(path, "the responses are damaged") as file:
            names = {"prompt_id", "text", "score", "status", "finish"}
            if lacking := names - {*file.schema_arrow.names}:
                raise DataError(f"it has no column {', '.join(sorted(lacking))}", where=str(path))
            for batch in file_batches(file, 1024, sorted(names)):
                for row in (row for row in batch.to_pylist() if row["finish"] == "stop"):  # a cut one has no end
                    yield row["prompt_id"], row["text"], row["score"] if row["status"] == "ok" else -math.inf
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line)
                prompt_id, text, score = row["prompt_id"], row["response"], float(row.get("score") or 0.0)
                is_cut = row.get("finish") == "length"
            except (ValueError, KeyError, TypeError, AttributeError):
                prompt_id, text, score, is_cut = None, None, 0.0, False
            if not (isinstance(prompt_id, str) and isinstance(text, str) and text):
                hint = "a line is JSON with the texts `prompt_id` and `response`, as `vlmrl generate --out` writes it"
                message = "this is no response: a line of JSON with two texts, and a number `score` if it has one"
                raise DataError(message, where=f"{path}:{number}", hint=hint)
            if not is_cut:
                yield prompt_id, text, score
