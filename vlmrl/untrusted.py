"""Input from outside: text made safe to show, damaged JSON, regular files, errors of image decoders.

All code that shows text of a model, a dataset, a reward or a file name calls `visible`. The text that it returns cannot
move the cursor, colour a terminal, hide characters, or change the order in which text is read (Trojan Source,
arXiv:2111.00169). JSON from files that a crash, a disk or a person may have damaged is parsed here alone. A path of the
user is checked before it is opened: opening a named pipe would wait forever.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of characters that are invisible or break the line: controls, formats (including bidirectional
marks and zero-width characters), half surrogate pairs, private use, line and paragraph separators."""
JOINERS = "\u200c\u200d"
"""Format characters that join or separate letters of some scripts, and emoji: kept behind a non-ASCII character."""
UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]")


class CodeRefused(Exception):
    """Refusal of an SVG text or a page: the fault of the model that wrote it, never of vlmrl.

    Args:
        kind: one word for statistics. SVG: `missing`, `cut`, `syntax`, `limit`, `forbidden`, `blank` or `drawing`; a
            page: `missing`, `blank`, `size`, `forbidden`, `twin`, `time`, `memory` or `crash`.
        reason: one sentence for people.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


def visible(text: str) -> str:
    r"""Return `text` with every hidden character as an escape such as `\u001b` or `\U000e0001`. Newlines, tabs stay.

    The escapes are plain ASCII, so applying the function twice changes nothing more. TOML's basic strings accept them.
    """
    return text if text.isascii() and text.isprintable() else _escaped(text, _code)


def encodable(text: str) -> str:
    r"""Return `text` in a form that UTF-8 can encode: half surrogate pairs become escapes such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def one_line(text: str) -> str:
    """Return `visible` of `text` on one line: runs of white space become one blank."""
    return visible(" ".join(text.split()))


def visible_json(text: str) -> str:
    """Return a JSON text in which JSON's own escapes replace hidden characters in strings. Its value stays the same.

    Newlines are kept: in a JSON text, they can only be between values.
    """
    return _escaped(text, _json_code)


def _escaped(text: str, code: Callable[[str], str]) -> str:
    def shown(match: re.Match[str]) -> str:
        character, before = match[0], text[match.start() - 1] if match.start() else " "
        if character in JOINERS and not before.isascii():
            return character
        return code(character) if unicodedata.category(character) in HIDDEN else character

    return UNUSUAL.sub(shown, text)


def _code(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _json_code(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def plural(number: int) -> str:
    """Return the plural ending for a number: nothing for 1, else `s`."""
    return "" if number == 1 else "s"


def number_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step` or `1,200 steps`."""
    return f"{number:,} {noun}{plural(number)}"


MOST_LEVELS = 200
"""Maximum depth of nested arrays and objects. vlmrl's own files are far below it. Recursive functions over a value call
themselves once per level, and Python stops a recursion at about 1000 calls."""


def parse_json(text: str | bytes, *, unique_keys: bool = False, most_levels: int = MOST_LEVELS) -> Any:
    """Return the value of a JSON text.

    Args:
        unique_keys: whether an object with a repeated key is an error; if not, the last value of the key is used.
        most_levels: maximum depth of nested arrays and objects.
    Raises: ValueError for a text that is no JSON, no UTF-8, nested too deeply, or (with `unique_keys`) has a repeated
        key.
    """
    too_deep = ValueError(f"it nests more than {most_levels} levels of JSON")
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise too_deep from None
    if _openings(text) > most_levels and _is_deep(value, most_levels):
        raise too_deep
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name in counts if counts[name] > 1)
        from vlmrl.redaction.redact import excerpt  # here, so that commands that write nothing do not load it

        raise ValueError(f"the key `{excerpt(twice, 100)}` occurs more than once")
    return value


def _openings(text: str | bytes) -> int:
    """Return the number of opening brackets in a text, including those in strings.

    A text has at most this many levels.
    """
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_deep(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    return bool(level)


MOST_BYTES = 64 << 20
"""Maximum size of a small file, such as a manifest of a few KB."""
RUN_RECORD = "manifest.json"
"""File that every run has."""
RUN_PARTS = ("rollouts", "checkpoints", "eval", "resolved.json", "metrics.jsonl")
"""Further files and folders of runs (store/layout.py): a folder with one of them beside the record is a run."""
LFS_START = b"version https://git-lfs.github.com/spec/"
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def file_problem(path: Path) -> str | None:
    """Return why a path is no regular file with content, as text; None when it is one.

    A pointer of Git LFS is a regular file, but the file that it points to was never downloaded: it is refused as well.

    Raises: OSError when the path cannot be inspected.
    """
    if problem := _kind_problem(path.stat().st_mode):
        return problem
    with path.open("rb") as file:
        if file.read(len(LFS_START)) == LFS_START:
            return "is a Git LFS pointer: run git lfs pull"
    return None


def run_around(path: Path) -> Path | None:
    """Return the run in whose folder a file lies, links followed; None if it lies in no run.

    A run may be a stranger's, so no code in it is ever run: neither the copies in `kept/` nor any other file.
    """
    runs = (one for one in path.resolve().parents if os.path.lexists(one / RUN_RECORD))
    return next((one for one in runs if any(os.path.lexists(one / part) for part in RUN_PARTS)), None)


def read_regular(path: Path | str, most_bytes: int = MOST_BYTES, *, last: int | None = None) -> bytes:
    """Return the content of a small file of an untrusted folder, without waiting for a pipe or reading without end.

    Args:
        last: return only so many bytes at the end; the file may then be of any size.
    Raises: OSError, also for a link, for a file that is no regular one, and for more than `most_bytes` bytes.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", path) from None
        raise
    try:
        status = os.fstat(handle)
        if problem := _kind_problem(status.st_mode):
            raise OSError(errno.EINVAL, f"it {problem}", path)
        if last is not None:
            return os.pread(handle, last, max(0, status.st_size - last))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes; at most {most_bytes:,} are read", path)
        blocks = [os.read(handle, 1 << 16)]
        # The end is the first short block: this takes half the time of `open(...).read()`, with 10,000 files.
        while len(blocks[-1]) == 1 << 16 and len(blocks) << 16 <= most_bytes:
            blocks.append(os.read(handle, 1 << 16))
    finally:
        os.close(handle)
    return b"".join(blocks)


def entry_problems(folder: Path, unread: Collection[str] = ()) -> Iterator[tuple[Path, str]]:
    """Yield (path, problem) of each entry of an untrusted folder, at any depth, that must not be opened.

    It is neither a file nor a folder, or it is a link out of the folder. No entry is opened, and no link is followed.

    Args:
        unread: names of folders directly in `folder` that no reader opens; their content is not looked at.
    """
    root, pending = os.path.realpath(folder), [os.fspath(folder)]
    while pending:
        path = pending.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        if not os.path.realpath(entry.path).startswith(f"{root}{os.sep}"):
                            yield Path(entry.path), "is a link that leads outside the run"
                    elif entry.is_dir():
                        pending += [] if path == os.fspath(folder) and entry.name in unread else [entry.path]
                    elif not entry.is_file():
                        yield Path(entry.path), _kind_problem(entry.stat().st_mode) or "changed while it was looked at"
        except FileNotFoundError:
            continue  # a process that writes the run has removed it
        except OSError as error:
            yield Path(path), f"cannot be read: {error.strerror}"


def _kind_problem(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    return f"is {kind}, not a regular file"


BROKEN_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow raises for a damaged or hostile file."""
