"""Output of `vlmrl generate`, written when all of it is there: a table of JSON lines, or a folder (`--images`).

    OUT/responses.jsonl             a line per response
    OUT/left_out.jsonl              images that were not shown to the model, and why; only if there are any
    OUT/sub/a.svg, OUT/sub/a.png    file of the response to the image `sub/a.png`, and its picture, by the image's path
    OUT/sub/a-0.svg ...             with several responses per image: the number is `sample` of the line

The folder is made under a temporary name, and appears when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, count, islice
from pathlib import Path, PurePosixPath
from typing import Any

from vlmrl.data.image_folders import ImageFiles, NotShown
from vlmrl.errors import StoreError
from vlmrl.redaction.redact import hide_known
from vlmrl.store.files import TEMP_PREFIX, crash_point, remove_tree, sync_file, sync_folder, temp_path
from vlmrl.store.response_journal import DROPPED, ResponseJournal
from vlmrl.tasks.base import Draw, NoFile, ResponseFile
from vlmrl.tasks.source import Source
from vlmrl.types import Row
from vlmrl.untrusted import parse_json

RESPONSES, LEFT_OUT = "responses.jsonl", "left_out.jsonl"
PICTURE = ".png"
MOST_STEM_BYTES = 180
"""Longest name of a file without its ending, in bytes; of a longer one the end is replaced by a hash."""


def is_folder(out: Path) -> bool:
    """Return whether `--out` means a folder: it does not end like a table of JSON lines."""
    return out.suffix.lower() not in (".jsonl", ".json")


def require_free(out: Path, force: bool, images: Sequence[str] = ()) -> None:
    """Raise a StoreError unless the folder is new or empty, or may be replaced.

    A folder is only replaced if an earlier `vlmrl generate` wrote it and nothing else is in it.

    Args:
        images: paths of the images; none of them may be in the folder.
    """
    whole = out.resolve()
    for text in images:
        if Path(text).resolve().is_relative_to(whole):
            raise StoreError(f"the images at {text} are in the folder to write", where=str(out), hint="another --out")
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise StoreError(f"{out} is not a folder", where=str(out), hint="choose another --out; a table ends in .jsonl")
    if not any(out.iterdir()):
        return
    if not force:
        raise StoreError(f"{out} exists", where=str(out), hint="choose another --out, or replace it with --force")
    if foreign := _foreign(out):
        raise StoreError(
            f"{out} is not replaced: {foreign} in it is not from `vlmrl generate`", where=str(out), hint="another --out"
        )


def _foreign(out: Path) -> str | None:
    """Return a file of the folder that is not of an earlier `vlmrl generate`; None = there is none."""
    own = {RESPONSES, LEFT_OUT}
    try:
        with (out / RESPONSES).open("rb") as lines:
            for line in lines:
                own.update(str(name) for name in parse_json(line).get("files", ()))
    except (OSError, ValueError, AttributeError, TypeError):
        own.clear()
    for base, _, names in os.walk(out):
        for name in names:
            if Path(base, name).relative_to(out).as_posix() not in own:
                return str(Path(base, name))
    return None


@contextmanager
def new_folder(out: Path, work: str, force: bool) -> Iterator[Path]:
    """Yield a hidden folder beside `out`; at the end it takes the place of `out`.

    Args:
        work: name of the work. What a killed attempt at the same work has left is removed.
        force: whether the folder of an earlier command is replaced.
    Raises: StoreError when it cannot be written, or when something else is there by now.
    """
    out = Path(os.path.abspath(out))
    hidden = out.with_name(f"{TEMP_PREFIX}{_cut(out.name)}-{work}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        yield hidden
        crash_point("mid-answers")
        for base, _, names in os.walk(hidden):
            for name in names:
                sync_file(Path(base, name))
            sync_folder(Path(base))
        require_free(out, force)
        if out.is_dir() and any(out.iterdir()):
            remove_tree(out)
        os.replace(hidden, out)
        sync_folder(out.parent)
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror or error}", where=str(error.filename or out)) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


class FileWriter:
    """Writer of the files that responses contain. Use it as a context manager.

    Args:
        stems: path of each row's files below the folder, without an ending.
        samples: responses per row.

    Attributes:
        num_files: number of responses with a file.
        missing: reason -> number of responses without one.
        not_drawn: reason -> number of files without a picture.
    """

    def __init__(self, folder: Path, form: ResponseFile, stems: Sequence[str], samples: int) -> None:
        self._folder, self._form, self._stems, self._samples = folder, form, stems, samples
        self._stack = ExitStack()
        self._draw: Draw | None = None
        self.num_files = 0
        self.missing: dict[str, int] = {}
        self.not_drawn: dict[str, int] = {}

    def __enter__(self) -> FileWriter:
        if self._form.drawing is not None:
            self._draw = self._stack.enter_context(self._form.drawing())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, responses: Sequence[tuple[int, int, str]]) -> list[dict[str, Any]]:
        """Write the files of responses: (number of the row, sample, text).

        Returns: fields of each response's line: `files`, and the reasons `no_file` or `not_drawn`.
        """
        contents = [self._form.content(text) for _, _, text in responses]
        codes = [content for content in contents if isinstance(content, str)]
        pictures = iter(() if self._draw is None else self._draw(codes))
        fields: list[dict[str, Any]] = []
        for (row, k, _), content in zip(responses, contents, strict=True):
            if isinstance(content, NoFile):
                self.missing[content.reason] = self.missing.get(content.reason, 0) + 1
                fields.append({"no_file": content.reason})
                continue
            stem = self._stems[row] + (f"-{k}" if self._samples > 1 else "")
            fields.append(self._write(stem, content, next(pictures, None)))
        return fields

    def _write(self, stem: str, content: str, picture: bytes | NoFile | None) -> dict[str, Any]:
        names = [stem + self._form.suffix]
        path = self._folder / names[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "backslashreplace"))
        self.num_files += 1
        if isinstance(picture, NoFile):
            self.not_drawn[picture.reason] = self.not_drawn.get(picture.reason, 0) + 1
            return {"files": names, "not_drawn": picture.reason}
        if picture is not None:
            names.append(stem + PICTURE)
            (self._folder / names[1]).write_bytes(picture)
        return {"files": names}


def file_stems(places: Sequence[str], suffix: str) -> list[str]:
    """Return the path of each image's files without an ending: the image's own path, if it is free.

    Of images whose files would have the same name (also but for case), each keeps its own ending (`a.png`, `a.jpg` ->
    `a.png.svg`, `a.jpg.svg`). If that is taken too, a number is added. Names that are too long end in a hash.

    Args:
        places: paths of the images below the folders that the user named, relative.
    """
    short = [str(PurePosixPath(place).with_suffix("")) for place in places]
    counts: dict[str, int] = {}
    for stem in short:
        counts[_folded(stem)] = counts.get(_folded(stem), 0) + 1
    taken = _Taken(suffix)
    order = sorted(range(len(places)), key=lambda i: counts[_folded(short[i])] > 1)  # the unique ones choose first
    stems = [""] * len(places)
    for i in order:
        choices = [short[i]] if counts[_folded(short[i])] == 1 else []
        stems[i] = taken.take([*choices, places[i]])
    return stems


class _Taken:
    """Names of files in the folder, as a file system sees them that does not tell case."""

    def __init__(self, suffix: str) -> None:
        self._suffixes = (suffix, PICTURE)
        self._files = {_folded(RESPONSES), _folded(LEFT_OUT)}

    def take(self, stems: Sequence[str]) -> str:
        """Return the first of the stems that is free, else the last one with a number."""
        for stem in chain(stems, (f"{stems[-1]}~{number}" for number in count(2))):
            *folders, name = map(_cut, stem.split("/"))
            stem = "/".join([*map(self._folder, folders), name])
            files = {_folded(stem + suffix) for suffix in self._suffixes}
            if not self._files & files:
                self._files |= files
                return stem
        raise AssertionError("numbers do not end")

    def _folder(self, name: str) -> str:
        """Return the name of a folder: it never ends like a file of this folder, so that no file has its path."""
        ends = tuple(map(_folded, (*self._suffixes, RESPONSES, LEFT_OUT)))
        return f"{name}_" if _folded(name).endswith(ends) else name


def _cut(name: str) -> str:
    data = name.encode()
    if len(data) <= MOST_STEM_BYTES:
        return name
    return data[: MOST_STEM_BYTES - 17].decode("utf-8", "ignore") + "-" + hashlib.sha256(data).hexdigest()[:16]


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


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
        tokens, refusal, parts = self.kept["tokens"], self.kept.get("refusal"), self.kept.get("segments")
        if isinstance(tokens, list):  # of an episode, those that the policy wrote
            own = [part["end"] - part["start"] for part in parts or () if part["author"] == "policy"]
            tokens = sum(own) if parts else len(tokens)
        return {
            "prompt_id": self.row.prompt_id,
            "source": self.row.source,
            "sample": self.kept["sample"],
            "response": self.kept["text"],
            "finish": self.kept["finish"],
            "num_tokens": tokens,
            "seed": self.kept["seed"],
            "group": self.row.prompt_id,
            "ground_truth": dict(self.row.truth),
            **({"refusal": refusal} if refusal else {}),
            **({name: self.kept[name] for name in ("ending", "measured", "fault") if self.kept.get(name)}),
            **({"turns": parse_json(self.kept["turns"])["turns"]} if self.kept.get("turns") else {}),
        }


@dataclass
class Written:
    """Numbers of what was written.

    Args:
        responses: lines of the table.
        repeated: rows that repeat an earlier one: their responses are the same, too.
        refused: responses that an endpoint refused.
        files: responses with a file; None = the task has no files, or only the table was written.
        kind: what the files are, in words.
        no_file, not_drawn: reason -> number of responses without a file, and of files without a picture.
    """

    responses: int = 0
    repeated: int = 0
    refused: int = 0
    left_out: list[NotShown] = field(default_factory=list)
    files: int | None = None
    kind: str = ""
    no_file: dict[str, int] = field(default_factory=dict)
    not_drawn: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Written:
        return cls(**{**values, "left_out": [NotShown(**one) for one in values["left_out"]]})


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
            lines = "".join(json.dumps(asdict(one)) + "\n" for one in written.left_out)
            (folder / LEFT_OUT).write_text(lines, encoding="utf-8", newline="\n")
    return written


def _answers(kept: Kept, samples: int, written: Written) -> Iterator[Answer]:
    """Yield all responses in the order of the rows and count them; rows that were dropped are only noted."""
    seen: set[int] = set()
    for source, journals in kept:
        for number, row in enumerate(source.rows):
            written.repeated += (key := hash(row.prompt_id)) in seen
            seen.add(key)
            for k in range(samples):
                answer = Answer(number, row, journals[number % len(journals)].read(number, k))
                if answer.dropped is not None:
                    written.left_out.append(NotShown(row.prompt_id, answer.dropped))
                    break
                written.responses += 1
                written.refused += "refusal" in answer.kept
                yield answer


def _unread(kept: Kept) -> list[NotShown]:
    """Return the images that could not be read when the command began."""
    return [one for source, _ in kept if isinstance(source.dataset, ImageFiles) for one in source.dataset.left_out]


def _text(line: Mapping[str, Any]) -> str:
    return hide_known(json.dumps(line)) + "\n"
