"""Writing of what `vlmrl generate` generated, when all of it is there: a table of JSON lines, or a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vlmrl.data.image_folders import ImageFiles, LeftOut
from vlmrl.errors import StoreError
from vlmrl.inference.answer_files import LEFT_OUT, RESPONSES, FileWriter, file_stems, new_folder, write_lines
from vlmrl.redaction.redact import hide_known
from vlmrl.store.files import sync_folder, temp_path
from vlmrl.store.response_journal import DROPPED, ResponseJournal
from vlmrl.tasks.source import Source
from vlmrl.types import Row

BATCH = 64
"""Number of responses whose files are made together."""
Kept = Sequence[tuple[Source, Sequence[ResponseJournal]]]
"""Sources with the journals of all ranks, in order."""


@dataclass(frozen=True)
class Answer:
    """Response to a row. `number`: of the row; `kept`: the response as the journal has it."""

    number: int
    row: Row
    kept: Mapping[str, Any]

    @property
    def dropped(self) -> str | None:
        """Reason why the row was not shown to the model; None = it was."""
        return self.kept.get(DROPPED)

    def line(self) -> dict[str, Any]:
        """Return the line of the table; `vlmrl reward-check` reads such tables."""
        tokens, refusal = self.kept["tokens"], self.kept.get("refusal")
        return {
            "prompt_id": self.row.prompt_id,
            "source": self.row.source,
            "sample": self.kept["sample"],
            "response": self.kept["text"],
            "finish": self.kept["finish"],
            "num_tokens": len(tokens) if isinstance(tokens, list) else tokens,
            "seed": self.kept["seed"],
            "group": self.row.prompt_id,
            "ground_truth": dict(self.row.truth),
            **({"refusal": refusal} if refusal else {}),
        }


@dataclass
class Written:
    """Numbers of what was written.

    Args:
        responses: lines of the table.
        refused: responses that an endpoint refused.
        left_out: images that were not shown to the model.
        files: responses with a file; None = the task has no files, or only the table was written.
        kind: what the files are, in words.
        no_file, not_drawn: reason -> number of responses without a file, and of files without a picture.
    """

    responses: int = 0
    refused: int = 0
    left_out: list[LeftOut] = field(default_factory=list)
    files: int | None = None
    kind: str = ""
    no_file: dict[str, int] = field(default_factory=dict)
    not_drawn: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Written:
        return cls(**{**values, "left_out": [LeftOut(**one) for one in values["left_out"]]})


def write_table(out: Path, kept: Kept, samples: int) -> Written:
    """Write all responses, in the order of the rows. The file appears when it is whole.

    Raises: StoreError when it cannot be written.
    """
    temp, written = temp_path(out), Written(left_out=_unread(kept))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(temp, "w", encoding="utf-8", newline="\n") as file:
            for answer in _answers(kept, samples, written):
                file.write(_text(answer.line()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, out)
        sync_folder(out.parent)
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror}", where=str(out)) from error
    finally:
        temp.unlink(missing_ok=True)
    return written


def write_folder(out: Path, kept: Kept, samples: int, work: str, force: bool) -> Written:
    """Write a folder with the table and, if the task says that responses contain files, with these files.

    Args:
        kept: of one source of images.
        work, force: see `new_folder`.
    Raises: StoreError when it cannot be written.
    """
    ((source, _),) = kept
    images, written = source.dataset, Written(left_out=_unread(kept))
    assert isinstance(images, ImageFiles)
    answers, form = _answers(kept, samples, written), source.task.file
    with new_folder(out, work, force) as folder, open(folder / RESPONSES, "w", encoding="utf-8", newline="\n") as table:
        if form is None:
            table.writelines(_text(answer.line()) for answer in answers)
        else:
            stems = file_stems([file.place for file in images.files], form.suffix)
            with FileWriter(folder, form, stems, samples) as files:
                while batch := list(islice(answers, BATCH)):
                    more = files.add([(one.number, one.kept["sample"], one.kept["text"]) for one in batch])
                    lines = (one.line() | extra for one, extra in zip(batch, more, strict=True))
                    table.writelines(map(_text, lines))
            written.files, written.kind = files.num_files, form.kind
            written.no_file, written.not_drawn = files.missing, files.not_drawn
        if written.left_out:
            write_lines(folder / LEFT_OUT, [asdict(one) for one in written.left_out])
    return written


def _answers(kept: Kept, samples: int, written: Written) -> Iterator[Answer]:
    """Yield all responses in the order of the rows and count them; rows that were dropped are only noted."""
    for source, journals in kept:
        for number, row in enumerate(source.rows):
            for k in range(samples):
                answer = Answer(number, row, journals[number % len(journals)].read(number, k))
                if answer.dropped is not None:
                    written.left_out.append(LeftOut(row.prompt_id, answer.dropped))
                    break
                written.responses += 1
                written.refused += "refusal" in answer.kept
                yield answer


def _unread(kept: Kept) -> list[LeftOut]:
    """Return the images that could not be read when the command began."""
    return [one for source, _ in kept if isinstance(source.dataset, ImageFiles) for one in source.dataset.left_out]


def _text(line: Mapping[str, Any]) -> str:
    return hide_known(json.dumps(line)) + "\n"
