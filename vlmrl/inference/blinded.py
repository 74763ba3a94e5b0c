"""Evaluations with changed images (`vlmrl eval --images`): their plan, and responses to prompts with changed images.

Only the model sees the changed images. The reward, the task's metrics and the intervals get the row as it is: they
compare a response with the truth about the true images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.data.blinded_images import Blinding, ImageChange, ImagePlace, leaves_as_it_is, swap_images
from vlmrl.data.dataset import canonical_json
from vlmrl.errors import DataError, StoreError
from vlmrl.evaluate.grading import NumberedRow, Respond, Responses
from vlmrl.inference.eval_identity import IDENTITY, agrees_on
from vlmrl.recipe.schema import Recipe
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import images_of, read_summary
from vlmrl.tasks.source import Source
from vlmrl.types import Row

GENERATION_KEY = "generation_sha256"
"""Key of `meta`: hash of the settings of model and engine that responses depend on and that have no key of their own.
"""
Meta = Mapping[str, Any]


def generation_hash(recipe: Recipe) -> str:
    """Return a hash of the settings that responses depend on, besides those that `meta` has."""
    r = recipe.rollout
    facts = [recipe.model.model_dump(mode="json"), r.engine, r.top_p, r.top_k, list(r.stop)]
    return hashlib.sha256(canonical_json(facts)).hexdigest()[:16]


def changed_meta(meta: Meta, change: ImageChange, normal: str) -> dict[str, Any]:
    """Return the record of an evaluation with changed images, from that of the normal one.

    Args:
        normal: the normal evaluation: its name in the same run, else its folder.
    """
    return {**meta, "images": str(change), "normal": normal}


def changed_name(name: str, change: ImageChange) -> str:
    """Return the name of an evaluation with changed images. Example: test-digits -> test-digits-blank."""
    return layout.eval_name(name, str(change))


def find_normal(run_dir: Path | None, name: str, meta: Meta, named: Path | None = None) -> Path | None:
    """Return the finished normal evaluation to compare with; None if there is none, so that it must be made.

    Args:
        run_dir: run in which an evaluation of the same thing is looked for, the one called `name` first.
        named: the evaluation that the user names.
    Raises: StoreError when the named one is missing, or is of something else.
    """
    if named is not None:
        _require_same(named, meta)
        return named
    folders = [] if run_dir is None else layout.eval_dirs(run_dir)
    for folder in sorted(folders, key=lambda folder: folder.name != name):
        try:
            before = read_summary(folder).get("meta") or {}
        except StoreError:
            continue
        if not before.get("during") and _difference_of(before, meta) is None:
            return folder
    return None


def _difference_of(before: Meta, meta: Meta) -> str | None:
    """Return the first key on which two evaluations differ; None if there is none.

    Args:
        before: of a finished evaluation; that of an endpoint has no dtype.
    """
    keys = (*IDENTITY, GENERATION_KEY, *(["dtype"] if before.get("dtype") else []))
    return next((key for key in keys if not agrees_on(key, before, meta)), None)


def _require_same(folder: Path, meta: Meta) -> None:
    before = read_summary(folder).get("meta") or {}
    if (change := images_of(before)) is not None:
        raise StoreError(f"--normal {folder} was itself made with changed images ({change})", where=str(folder))
    if key := _difference_of(before, meta):
        words = "setting of [model], or of rollout.engine, top_p, top_k or stop" if key == GENERATION_KEY else key
        raise StoreError(
            f"--normal {folder} was made with another {words}",
            where=str(folder),
            hint="leave out --normal: the normal evaluation is then made, too",
        )


class ShownRows:
    """Rows of a source as the model sees them.

    Args:
        original: the source as it is.
        change: of the images; None = the model sees the images as they are.
        seed: seed of random pixels, and of the choice of other rows.
        count: number of rows that are evaluated, from the first: images are shuffled among them.

    Attributes:
        source: the source for the model.
    """

    def __init__(self, original: Source, change: ImageChange | None, seed: int, count: int) -> None:
        self.original = self.source = original
        self._blinding = None
        if change is not None:
            rows: Sequence[Row] = original.rows
            swaps: Sequence[Sequence[ImagePlace]] = ()
            if change.kind == "shuffled":
                swaps = swap_images([rows[i].media for i in range(count)], seed)
            self._blinding = Blinding(original.dataset, rows, change, seed, swaps)
            self.source = replace(original, dataset=self._blinding.dataset)

    def answered(self, respond: Respond) -> Respond:
        """Return a function that takes and returns true rows, with the responses of `respond` to what the model sees.

        Args:
            respond: made for `self.source`.
        """
        blinding = self._blinding
        if blinding is None:
            return respond

        def responses(chunks: Iterator[Sequence[NumberedRow]]) -> Responses:
            true_rows: dict[int, Row] = {}

            def shown() -> Iterator[Sequence[NumberedRow]]:
                for chunk in chunks:
                    true_rows.update(chunk)
                    yield [(number, blinding.row(number, row)) for number, row in chunk]

            for response in respond(shown()):
                if response is None:
                    yield None
                    continue
                number, rollout = response
                prompt = replace(rollout.prompt, source=self.original, row=true_rows.pop(number))
                yield number, replace(rollout, prompt=prompt)

        return responses


def require_images(source: Source, change: ImageChange, count: int) -> None:
    """Raise a DataError if the images of the first `count` rows cannot be changed, or would all stay as they are."""
    if change.kind == "shuffled":
        swap_images([source.rows[i].media for i in range(count)], 0)
    num_images = 0
    for i in range(count):
        for media in source.rows[i].media:
            if not leaves_as_it_is(change, media):
                return
            num_images += 1
    if not num_images:
        raise DataError(f"no row of `{source.name}` has an image: there is nothing for --images to change")
    raise DataError(
        f"no image of `{source.name}` is larger than {change.side} pixels, so --images {change} changes none",
        hint=f"give fewer pixels: --images low:{max(1, change.side // 4)}",
    )
