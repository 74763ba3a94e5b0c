"""Steps of `vlmrl generate`: responses of a model to dataset rows, written to a table, without a grade.

Responses are kept as they come, and the table appears when all are there. Memory does not grow with the number of rows,
except for 8 bytes per response and 80 per row. Several processes (`--gpus`) have a whole model each and share the rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vlmrl import __version__
from vlmrl.data.image_folders import ImageFiles
from vlmrl.data.open_dataset import open_dataset
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import DataError, Interruption, StoreError
from vlmrl.evaluate.answer_files import Kept, Written, is_folder, write_folder, write_table
from vlmrl.evaluate.answer_files import require_free as require_free_folder
from vlmrl.evaluate.eval import EvalSettings, endpoint_answerer, load_answerer
from vlmrl.evaluate.eval_rows import TEST, EvalRows, SeenRows, entries_of, named_rows
from vlmrl.evaluate.responses import work_identity
from vlmrl.evaluate.run import CHUNK_PROMPTS, MEETING_CHUNKS, NumberedRow, counted
from vlmrl.evaluate.shared_rows import with_shared
from vlmrl.recipe.schema import Recipe
from vlmrl.services.client import EndpointClient
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.run_records import environment_record
from vlmrl.store.files import write_json
from vlmrl.store.layout import unfinished_logs, unfinished_result
from vlmrl.store.response_journal import DROPPED, ResponseJournal
from vlmrl.tasks.image_source import Question, ask_about
from vlmrl.tasks.source import Source
from vlmrl.types import Rows
from vlmrl.untrusted import parse_json


@dataclass(frozen=True)
class Answered:
    """Result of `generate`: the file or folder, the number of rows, and what was written."""

    out: Path
    rows: int
    written: Written


def rows_to_answer(
    recipe: Recipe, seen: SeenRows, split: str | None, max_rows: int | None, source: str | None
) -> list[EvalRows]:
    """Return the rows to answer of every source of a recipe; no reward is needed.

    Args:
        seen: rows that the model was trained on.
        split: name of a split, or a table file; None = `test` where it exists, else the split of the recipe.
        max_rows: maximum number of rows per source, the first ones; None = all.
    Raises: DataError when there is no such source, split or file.
    """
    chosen, entries = [], entries_of(recipe, source)
    for data in entries:
        name = split or (TEST if TEST in open_dataset(data).splits else data.split)
        one = named_rows(data, recipe, seen, name, len(entries), scored=False)
        if max_rows is not None and max_rows < len(one.source.rows):
            one.source.rows = Rows(max_rows, one.source.rows.__getitem__)
        chosen.append(one)
    return with_shared(chosen, seen.run_dir)


def images_to_answer(
    recipe: Recipe,
    paths: Sequence[str],
    question: Question,
    max_rows: int | None,
    out: Path,
    progress: Callable[[int, int], None],
) -> Source:
    """Return images as a source, with the prompt that the user or the recipe gives; no reward is needed.

    Args:
        paths: images and folders, as the user wrote them.
        max_rows: maximum number of images, the first ones; None = all.
        out: what will be written; images in it are not read.
    Raises: as `ImageFiles` and `ask_about`.
    """
    source = ask_about(ImageFiles(paths, out, progress), recipe.data, question)
    if max_rows is not None and max_rows < len(source.rows):
        source.rows = Rows(max_rows, source.rows.__getitem__)
    return source


def require_free(out: Path, force: bool, images: Sequence[str] | None = None) -> None:
    """Raise a StoreError if the file or folder to write exists, unless it may be replaced.

    Args:
        images: paths of the images that are asked about; None = dataset rows are.
    """
    if images is not None and is_folder(out):
        require_free_folder(out, force, images)
        return
    if out.is_dir():
        raise StoreError(f"{out} is a folder", where=str(out), hint="choose another --out")
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

    For images, `out` may also be a folder, which gets the files that the responses contain, too.

    Args:
        root: folder of the runs, in which responses are kept until all are there.
        client: of the endpoint that answers; None = the model is loaded here.
        progress: called with (finished responses, all responses). With several processes, the first number is an
            estimate from this process.
        world: processes that share the rows, each with a whole model; rank 0 writes the file.
    Raises: the errors of data, model and endpoint; StoreError when `out` exists and not settings.force.
    """
    require_free(out, settings.force, () if any(map(_is_images, sources)) else None)
    rows = sum(len(s.rows) for s in sources)
    total = rows * settings.samples
    count = counted(progress, total, world, "generation")
    kept: list[tuple[Source, ResponseJournal]] = []
    logs = unfinished_logs(root, out)
    with ExitStack() as stack:
        try:
            if client is None:
                log = (lambda process: logs / f"{process}.log") if world.size > 1 else None
                answerer = load_answerer(recipe, origin, settings, say, sources=sources, world=world, log=log)
            else:
                answerer = endpoint_answerer(recipe, client, sources)
            stack.callback(answerer.close)
            for source in sources:
                journal = stack.enter_context(_journal(recipe, origin, source, root, settings, world))
                kept.append((source, journal))
                respond = answerer.responder(recipe, settings, journal, source, count, drops=_is_images(source))
                for _ in respond(_missing(source, journal, world, lambda rows: count(rows * settings.samples))):
                    pass  # the journal has it
            written = _collect(recipe, origin, kept, root, out, settings, world)
        except KeyboardInterrupt:
            responses = sum(journal.count for _, journal in kept) * world.size
            about = "about " if world.size > 1 else ""
            raise Interruption("generate", f"{about}{responses:,} of {total:,} responses are kept") from None
    if world.is_main:
        shutil.rmtree(logs, ignore_errors=True)
        if world.size > 1:
            write_json(unfinished_result(root, out), written.to_json())
    return Answered(out, rows, written)


def take_result(root: Path, out: Path) -> Written:
    """Return, and remove, the numbers that the processes of a launcher have left for it; without them all are 0."""
    path = unfinished_result(root, out)
    if not path.exists():
        return Written()
    written = Written.from_json(parse_json(path.read_bytes()))
    path.unlink()
    return written


def _collect(
    recipe: Recipe,
    origin: ModelOrigin,
    kept: Sequence[tuple[Source, ResponseJournal]],
    root: Path,
    out: Path,
    settings: EvalSettings,
    world: World,
) -> Written:
    """Write the result from the responses of all processes, then remove these.

    Rank 0 does it, when the processes have closed their journals.
    """
    for _, journal in kept:
        journal.close()
    world.wait()

    def collect() -> Written:
        with ExitStack() as stack:

            def of_rank(source: Source, rank: int) -> ResponseJournal:
                share = World(rank, world.size)
                return stack.enter_context(_journal(recipe, origin, source, root, settings, share))

            return _finish(
                out, [(source, [of_rank(source, rank) for rank in range(world.size)]) for source, _ in kept], settings
            )

    return world.from_main(collect)


def _finish(out: Path, kept: Kept, settings: EvalSettings) -> Written:
    """Write the result, and remove the journals. Raises: DataError when no image could be shown to the model."""
    every = [journal for _, journals in kept for journal in journals]
    source, journals = kept[0]
    if _is_images(source):
        reasons = [journals[number % len(journals)].read(number, 0).get(DROPPED) for number in range(len(source.rows))]
        if all(reasons):
            for journal in every:
                journal.remove()
            raise DataError(f"no image could be shown to the model: {reasons[0]}", where=source.rows[0].place)
    if _is_images(source) and is_folder(out):
        written = write_folder(out, kept, settings.samples, journals[0].path.stem[-16:], settings.force)
    else:
        written = write_table(out, kept, settings.samples)
    for journal in every:
        journal.remove()
    return written


def _is_images(source: Source) -> bool:
    return isinstance(source.dataset, ImageFiles)


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


def _journal(
    recipe: Recipe, origin: ModelOrigin, source: Source, root: Path, settings: EvalSettings, world: World
) -> ResponseJournal:
    """Return the journal of one process's share of the responses.

    Responses to images belong to the image's path and content: other images may come or go between two attempts.
    """
    images = source.dataset if isinstance(source.dataset, ImageFiles) else None
    facts = {
        "model": (origin.parent or {}).get("run", origin.path),
        "endpoint": origin.endpoint,
        "checkpoint": origin.checkpoint.name if origin.checkpoint else None,
        "split": source.split,
        "source": source.name,
        "dataset": [source.dataset.path, source.dataset.fingerprint if images is None else ""],
        "prompt_sha256": source.prompt_sha256,
        "sampling": {
            "temperature": settings.temperature,
            "max_new_tokens": recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens,
        },
        "seed": settings.seed,
        "dtype": recipe.model.dtype,
        "vlmrl": __version__,
        "environment": environment_record(source),
    }
    work = {"command": "generate", **work_identity(facts, recipe, origin, settings.samples, world)}
    keys = None if images is None else [file.key for file in images.files[: len(source.rows)]]
    return ResponseJournal(root, source.name, work, rows=len(source.rows), samples=settings.samples, keys=keys)
