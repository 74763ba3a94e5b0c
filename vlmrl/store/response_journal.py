"""Responses of unfinished work on disk, each written as soon as it exists, so that no kill loses one.

    <runs root>/unfinished/<source>-<16 hex>.jsonl

The first line names the work (model, rows, sampling), each further line is one response. The name is a hash of the
first line: the same work finds its file again. The file is removed when the work is finished. Memory holds 8 bytes per
response, its place in the file.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from vlmrl.errors import StoreError
from vlmrl.store.layout import unfinished_path
from vlmrl.store.lock import is_current, try_flock
from vlmrl.untrusted import parse_json

SCHEMA = 1
GRADED = ".graded"
"""Ending of the name of a side folder."""
MISSING = -1
DROPPED = "dropped"
"""Field of a response that was never asked for, because its row cannot be shown to the model: why not."""


class ResponseJournal:
    """Responses by (number of the row, sample), in one file that is only appended to. Use it as a context manager.

    Args:
        name: word at the beginning of the file's name, such as the name of the source.
        identity: all that the responses depend on, as JSON values; not the number of rows or samples.
        keys: a hash of each row, without two equal ones. A response belongs to the row with its key, wherever that row
            is now; so rows may be added, removed and changed between two attempts. None = it belongs to its number.
    Raises: StoreError when another process has the file open, or it cannot be written.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        identity: Mapping[str, Any],
        *,
        rows: int,
        samples: int,
        keys: Sequence[str] | None = None,
    ) -> None:
        header = {"schema": SCHEMA, "identity": dict(identity)}
        self._header = json.dumps(header, sort_keys=True).encode() + b"\n"
        self.path = unfinished_path(root, name, hashlib.sha256(self._header).hexdigest()[:16])
        self._rows, self._samples, self._keys = rows, samples, keys
        self._row_of = None if keys is None else {key: row for row, key in enumerate(keys)}
        self._places = array("q", [MISSING]) * (rows * samples)
        self.count = 0
        self._file = self._open()
        self._reader = self.path.open("rb")
        try:
            self._read_all()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ResponseJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        self._file.close()

    def side_folder(self, identity: Mapping[str, Any]) -> Path:
        """Return the folder for what is made of the responses, such as grades.

        Args:
            identity: what it depends on besides the responses, as JSON values.
        """
        text = json.dumps(identity, sort_keys=True, default=str)
        return self.path.with_name(f"{self.path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}{GRADED}")

    def remove(self) -> None:
        """Delete the file and its side folders: the work is finished and its results are elsewhere."""
        for folder in self.path.parent.glob(f"{glob.escape(self.path.stem)}-*{GRADED}"):
            shutil.rmtree(folder, ignore_errors=True)
        self.path.unlink(missing_ok=True)

    def missing(self, row: int) -> list[int]:
        """Return the samples of a row that have no response yet."""
        first = row * self._samples
        return [k for k in range(self._samples) if self._places[first + k] == MISSING]

    def add(self, row: int, sample: int, response: Mapping[str, Any]) -> None:
        """Write a response. When this returns, no kill of this process loses it.

        Raises: StoreError when it cannot be written, as on a full disk.
        """
        key = {} if self._keys is None else {"key": self._keys[row]}
        line = json.dumps({"row": row, **key, "sample": sample, **response}).encode("ascii") + b"\n"
        place = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(place)
            raise StoreError(f"cannot write a response: {error.strerror}", where=str(self.path)) from error
        self._places[row * self._samples + sample] = place
        self.count += 1

    def read(self, row: int, sample: int) -> dict[str, Any]:
        """Return a response as it was added, with `row` and `sample`."""
        self._reader.seek(self._places[row * self._samples + sample])
        return parse_json(self._reader.readline())

    def _open(self) -> BinaryIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                # Unbuffered: each response is in the system's hands when `write` returns.
                file = os.fdopen(handle, "r+b", buffering=0)
                if not try_flock(handle):
                    file.close()
                    message, hint = "another process works on the same responses", "wait for it, or stop it"
                    raise StoreError(message, where=str(self.path), hint=hint)
                if is_current(handle, self.path):
                    return file  # pyright: ignore[reportReturnType]
                file.close()  # another process finished this work and removed the file between our two steps
        except OSError as error:
            raise StoreError(f"cannot write responses: {error.strerror}", where=str(self.path)) from error

    def _read_all(self) -> None:
        """Find the places of all responses. A line that a kill or a power failure left incomplete is given up."""
        place, end = 0, 0
        for line in self._reader:
            is_whole = line.endswith(b"\n")
            if is_whole and place:
                self._take(line, place)
            elif is_whole and line != self._header:
                raise StoreError("this file holds the responses of other work", where=str(self.path), hint="remove it")
            place += len(line)
            end = place if is_whole else end
        self._file.truncate(end)
        if end == 0:
            self._file.write(self._header)

    def _take(self, line: bytes, place: int) -> None:
        try:
            value = parse_json(line)
            row, sample = value["row"], value["sample"]
            if self._row_of is not None:
                row = self._row_of.get(value["key"], MISSING)
            fits = 0 <= row < self._rows and 0 <= sample < self._samples
        except (ValueError, KeyError, TypeError):
            return  # its response is generated again
        if fits:
            index = row * self._samples + sample
            self.count += self._places[index] == MISSING
            self._places[index] = place
