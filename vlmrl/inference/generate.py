"""Steps of `vlmrl generate`: responses of a model to dataset rows, written to a table, without a grade.

Responses are kept as they come, and the table appears when all are there. Memory does not grow with the number of rows,
except for 8 bytes per response. Several processes (`--gpus`) have a whole model each and share the rows.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl import __version__
from vlmrl.data.dataset import Rows
from vlmrl.dist import rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.endpoint.client import EndpointClient
from vlmrl.errors import DataError, Interruption, StoreError
from vlmrl.evaluate.grading import CHUNK_PROMPTS, MEETING_CHUNKS, NumberedRow, Respond
from vlmrl.inference.endpoint_eval import endpoint_params
from vlmrl.inference.endpoint_responses import EndpointResponder
from vlmrl.inference.engine_responses import EngineResponder, engine_identity, journal_identity
from vlmrl.inference.evaluation import Answerer, EvalSettings, load_answerer
from vlmrl.recipe.schema import Recipe
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.files import sync_folder, temp_path
from vlmrl.store.layout import unfinished_logs
from vlmrl.store.response_journal import ResponseJournal
from vlmrl.store.secrets.redact import hide_known
from vlmrl.tasks.source import Source, open_source
from vlmrl.types import Row

TEST = "test"


@dataclass(frozen=True)
class Answered:
    """Result of `generate`: the file, and the number of rows, responses, and responses that an endpoint refused."""

    out: Path
    rows: int
    responses: int
    refused: int = 0


def rows_to_answer(recipe: Recipe, split: str | None, max_rows: int | None, source: str | None) -> list[Source]:
    """Return the sources of a recipe with the rows to answer; no reward is needed.

    Args:
        split: name of a split; None = `test` where it exists, else the split of the recipe.
        max_rows: maximum number of rows per source, the first ones; None = all.
        source: only the source of this name; None = all.
    Raises: DataError when there is no such source or split.
    """
    sources = [open_source(data, recipe.reward, scored=False) for data in recipe.data]
    chosen = [s for s in sources if source is None or s.name == source]
    if not chosen:
        raise DataError(f"there is no source `{source}`", hint=f"sources: {', '.join(s.name for s in sources)}")
    for place, one in enumerate(chosen):
        name = split or (TEST if TEST in one.dataset.splits else one.split)
        one = one if name == one.split else one.with_split(name)
        if max_rows is not None and max_rows < len(one.rows):
            one.rows = Rows(max_rows, one.rows.__getitem__)
        chosen[place] = one
    return chosen


def require_free(out: Path, force: bool) -> None:
    """Raise a StoreError if the file exists, unless it may be replaced."""
    if out.exists() and not force:
        raise StoreError(f"{out} exists", where=str(out), hint="choose another --out, or replace it with --force")


def generate(
    recipe: Recipe,
    origin: ModelOrigin,
    sources: Sequence[Source],
    root: Path,
    out: Path,
    settings: EvalSettings,
    client: EndpointClient | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    world: World = ALONE,
) -> Answered:
    """Write the responses to the rows of all sources to `out`, one JSON object per line.

    Args:
        root: folder of the runs, in which responses are kept until all are there.
        client: of the endpoint that answers; None = the model is loaded here.
        say: called with messages for the user.
        progress: called with (finished responses, all responses). With several processes, the first number is an
            estimate from this process.
        world: processes that share the rows, each with a whole model; rank 0 writes the file.
    Raises: the errors of data, model and endpoint; StoreError when `out` exists and not settings.force.
    """
    require_free(out, settings.force)
    rows = sum(len(s.rows) for s in sources)
    total, done = rows * settings.samples, 0

    def count(newly: int) -> None:
        nonlocal done
        done += newly * world.size
        rank_process.phase("generation")  # shows that this process is alive
        progress(min(done, total), total)

    kept: list[tuple[Source, ResponseJournal]] = []
    logs = unfinished_logs(root, out)
    with ExitStack() as stack:
        try:
            answerer = None
            if client is None:
                log = (lambda process: logs / f"{process}.log") if world.size > 1 else None
                answerer = load_answerer(recipe, origin, settings, say, world=world, log=log)
                stack.callback(answerer.engine.close)
            for source in sources:
                journal = stack.enter_context(_journal(recipe, origin, source, root, settings, world))
                kept.append((source, journal))
                respond = _responder(recipe, answerer, client, journal, source, settings, count)
                for _ in respond(_missing(source, journal, world, lambda rows: count(rows * settings.samples))):
                    pass  # the journal has it
            refused = _collect(recipe, origin, kept, root, out, settings, world)
        except KeyboardInterrupt:
            responses = sum(journal.count for _, journal in kept) * world.size
            about = "about " if world.size > 1 else ""
            raise Interruption("generate", f"{about}{responses:,} of {total:,} responses are kept") from None
    if world.is_main:
        shutil.rmtree(logs, ignore_errors=True)
    return Answered(out, rows, total, refused)


def _collect(
    recipe: Recipe,
    origin: ModelOrigin,
    kept: Sequence[tuple[Source, ResponseJournal]],
    root: Path,
    out: Path,
    settings: EvalSettings,
    world: World,
) -> int:
    """Write the file from the responses of all processes, then remove these. Return the number of refused responses.

    Rank 0 does it, when the other processes have closed their journals.
    """
    if world.size == 1:
        refused = _write(out, [(source, [journal]) for source, journal in kept], settings.samples)
        for _, journal in kept:
            journal.remove()
        return refused
    for _, journal in kept:
        journal.close()
    world.wait()
    return world.from_main(lambda: _collect_all(recipe, origin, kept, root, out, settings, world.size))


def _collect_all(
    recipe: Recipe,
    origin: ModelOrigin,
    kept: Sequence[tuple[Source, ResponseJournal]],
    root: Path,
    out: Path,
    settings: EvalSettings,
    size: int,
) -> int:
    with ExitStack() as stack:
        journals = [
            (
                source,
                [
                    stack.enter_context(_journal(recipe, origin, source, root, settings, World(rank, size)))
                    for rank in range(size)
                ],
            )
            for source, _ in kept
        ]
        refused = _write(out, journals, settings.samples)
        for _, of_ranks in journals:
            for journal in of_ranks:
                journal.remove()
    return refused


def _missing(
    source: Source, journal: ResponseJournal, world: World, skip: Callable[[int], None]
) -> Iterator[Sequence[NumberedRow]]:
    """Yield this process's rows chunk by chunk, without chunks whose responses are all there.

    Args:
        skip: called with the number of rows of such a chunk.
    """
    for chunk, start in enumerate(range(0, len(source.rows), CHUNK_PROMPTS)):
        numbers = range(start, min(start + CHUNK_PROMPTS, len(source.rows)))
        own = [number for number in numbers if number % world.size == world.rank]
        if any(map(journal.missing, own)):
            yield [(number, source.rows[number]) for number in own]
        else:
            skip(len(own))
        if chunk % MEETING_CHUNKS == MEETING_CHUNKS - 1:
            world.wait()  # so that no process waits for another one's whole share at the end


def _responder(
    recipe: Recipe,
    answerer: Answerer | None,
    client: EndpointClient | None,
    journal: ResponseJournal,
    source: Source,
    settings: EvalSettings,
    count: Callable[[int], None],
) -> Respond:
    """Return a function that puts the responses to rows into the journal."""
    if client is not None:
        params = endpoint_params(recipe, settings.temperature)
        return EndpointResponder(
            client, journal, source, params, seed=settings.seed, samples=settings.samples, progress=count
        )
    assert answerer is not None
    return EngineResponder(
        answerer.engine,
        answerer.encoder,
        journal,
        source,
        answerer.params,
        settings.seed,
        settings.samples,
        count,
    )


def _journal(
    recipe: Recipe, origin: ModelOrigin, source: Source, root: Path, settings: EvalSettings, world: World
) -> ResponseJournal:
    """Return the journal of one process's share of the responses."""
    facts = {
        "model": (origin.parent or {}).get("run", origin.path),
        "endpoint": origin.endpoint,
        "checkpoint": origin.checkpoint.name if origin.checkpoint else None,
        "split": source.split,
        "source": source.name,
        "dataset": [source.dataset.path, source.dataset.fingerprint],
        "prompt_sha256": source.prompt_sha256,
        "sampling": {
            "temperature": settings.temperature,
            "max_new_tokens": recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens,
        },
        "seed": settings.seed,
        "dtype": recipe.model.dtype,
        "vlmrl": __version__,
    }
    identity = journal_identity(facts)
    if not origin.endpoint:
        identity = engine_identity(facts, recipe, origin, settings.samples, world)
    work = {"command": "generate", **identity}
    return ResponseJournal(root, source.name, work, rows=len(source.rows), samples=settings.samples)


def _write(out: Path, kept: Sequence[tuple[Source, Sequence[ResponseJournal]]], samples: int) -> int:
    """Write all responses, in order of the rows, and return the number of refused ones. The file appears when whole.

    Args:
        kept: the journals of a source are those of all ranks, in order.
    """
    temp, refused = temp_path(out), 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(temp, "w", encoding="utf-8", newline="\n") as file:
            for source, journals in kept:
                for number, row in enumerate(source.rows):
                    for k in range(samples):
                        line = _line(row, journals[number % len(journals)].read(number, k))
                        refused += "refusal" in line
                        file.write(hide_known(json.dumps(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, out)
        sync_folder(out.parent)
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror}", where=str(out)) from error
    finally:
        temp.unlink(missing_ok=True)
    return refused


def _line(row: Row, response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the table; `vlmrl reward-check` reads such tables."""
    tokens, refusal = response["tokens"], response.get("refusal")
    return {
        "prompt_id": row.prompt_id,
        "source": row.source,
        "sample": response["sample"],
        "response": response["text"],
        "finish": response["finish"],
        "num_tokens": len(tokens) if isinstance(tokens, list) else tokens,
        "seed": response["seed"],
        "group": row.prompt_id,
        "ground_truth": dict(row.truth),
        **({"refusal": refusal} if refusal else {}),
    }
