"""Errors that a user may meet. Each says what is wrong, where, and what to do next; only `cli/app.py` prints them."""

from __future__ import annotations

import bdb
import errno
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of the system for a full disk, quota or file."""


_SPACE = ("cannot write to the disk", "free disk space: `vlmrl runs du` shows what uses it")
_PLACE = ("the path cannot be used", "choose another path, or ask the administrator of this one")
REFUSED = {
    **dict.fromkeys(FULL, _SPACE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), _PLACE),
    errno.ENAMETOOLONG: ("a name is too long", "a file name may have 255 bytes, a path 4,096: use a shorter one"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), ("too many files are open", "raise the limit: ulimit -n 65536")),
    **dict.fromkeys((errno.EIO, errno.ESTALE), ("the disk fails", "see `dmesg`, and copy the data")),
}
"""Error numbers of the system for the user's files and disks -> (message, hint). They are no bug of vlmrl."""
MOST_SHOWN = 160
"""Maximum number of characters that `shortened` keeps."""


class VlmrlError(Exception):
    """Mistake of the user, or failure of the environment, explained in words. Exit code 2, no traceback.

    Args:
        message: what is wrong, with the value. One sentence, lower case, no full stop.
        where: `file:line`, a path, or a place such as `row 17`; None when there is none.
        hint: the next command or edit; None when there is no useful one.
    """

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.where, self.hint = message, where, hint

    def __reduce__(self):
        return (_rebuild, (type(self), self.message, self.where, self.hint))

    def __str__(self) -> str:
        return format_error(self.message, self.where, self.hint)


def _rebuild(kind: type[VlmrlError], message: str, where: str | None, hint: str | None) -> VlmrlError:
    return kind(message, where=where, hint=hint)


class RecipeError(VlmrlError):
    """Recipe that cannot be read or does not make sense."""


class DataError(VlmrlError):
    """Dataset, row or image that cannot be used."""


class RewardError(VlmrlError):
    """Bug in a reward: it raised, hung, or returned something that is not a score. Never a score of 0."""


class RewardUnavailable(RewardError):
    """Service that a reward needs and that is down. The reward reports it with `raise RewardUnavailable("why")`.

    It is no bug of the reward: the sample is left out, and never scored 0.
    """

    def __init__(
        self, message: object = "a service that it needs is down", *, where: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(str(message), where=where, hint=hint)


class StoreError(VlmrlError):
    """Run folder that is missing, locked, damaged or ambiguous."""


class CheckpointError(VlmrlError):
    """Checkpoint or model folder that is missing, incomplete or of another shape."""


class EngineError(VlmrlError):
    """Rollout engine that cannot do what was requested."""


class TrainError(VlmrlError):
    """Training that had to stop: non-finite numbers, too many failed rewards."""


class LaunchError(VlmrlError):
    """Run of several processes that cannot be started, or that lost one of them."""


@dataclass(frozen=True, slots=True)
class Load:
    """Content that had to fit in memory at once: a packed row, or a batch of the built-in engine.

    Args:
        budget: the recipe key that bounds it.
        tokens, image_tokens: in it; image tokens count in both.
        responses: in it. A smaller budget splits them; a single response cannot be split.
        rows: the dataset rows in it, each with its number of responses and the size of its images, as text.
    """

    budget: str
    tokens: int
    image_tokens: int
    responses: int
    rows: tuple[str, ...]

    def __str__(self) -> str:
        images = f" ({self.image_tokens:,} of images)" if self.image_tokens else ""
        return f"{self.tokens:,} tokens{images} in {self.responses} response{'' if self.responses == 1 else 's'}"

    def half(self, budget: int) -> int:
        """Return a budget that splits it: half of the budget, or of its tokens if they are fewer."""
        return max(1, min(budget, self.tokens) // 2)


class OutOfMemoryError(VlmrlError):
    """Lack of memory on the GPU or the machine.

    Args:
        load: what did not fit; None = unknown.

    Attributes:
        halved: what the run may be started again with: recipe key -> [its value in the recipe, the value to use
            instead].
        fits: a value of the load's budget that was tried and fits; None = none was.
    """

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | None = None, load: Load | None = None
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.load = load
        self.halved: dict[str, list[int]] = {}
        self.fits: int | None = None

    def __reduce__(self):
        again = partial(type(self), where=self.where, hint=self.hint, load=self.load)
        return again, (self.message,), {"halved": self.halved, "fits": self.fits}


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of a check. `level` "error" stops the command; "warning" is only shown."""

    message: str
    where: str | None = None
    hint: str | None = None
    level: Literal["error", "warning"] = "error"


class Interruption(KeyboardInterrupt):
    """End by Ctrl-C or SIGTERM, with what a user wants to know then. Exit code 130.

    Args:
        what: what was interrupted, such as "eval".
        kept: what exists now.
        again: the command to continue with.
    """

    def __init__(self, what: str, kept: str, again: str | None = None) -> None:
        super().__init__(what, kept, again)
        self.what, self.kept, self.again = what, kept, again

    def __str__(self) -> str:
        return f"{self.what} was interrupted: {self.kept}" + (f"; continue with: {self.again}" if self.again else "")


class ProblemsError(VlmrlError):
    """Several problems at once: everything that is wrong, in one message."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n\n".join(format_error(p.message, p.where, p.hint) for p in self.problems))

    def __reduce__(self):
        return (type(self), (self.problems,))

    def __str__(self) -> str:
        return self.message


def format_error(message: str, where: str | None = None, hint: str | None = None, level: str = "error") -> str:
    """Return an error as text: `error: what` / `  --> where` / blank / `hint: next step`."""
    lines = [f"{level}: {message}"]
    if where:
        lines.append(f"  --> {where}")
    if hint:
        lines += ["", f"hint: {hint}"]
    return "\n".join(lines)


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of an error's text, at most `limit` characters; its class name if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


def shortened(text: str, limit: int = MOST_SHOWN) -> str:
    """Return the text, or its beginning and end if it has more than `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def gib(size: int) -> str:
    """Return a number of bytes as text, in MiB or GiB."""
    return f"{size / (1 << 30):,.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.0f} MiB"


def reason_of(error: BaseException) -> str:
    """Return why something ended, in one sentence: an error's message and place without its hint.

    For a bug it also names the class of the error.
    """
    if not isinstance(error, VlmrlError):
        return f"{type(error).__name__}: {error}"
    return f"{error.message} ({error.where})" if error.where else error.message


def exit_of(error: BaseException) -> tuple[int, str]:
    """Return (exit code, printed text) of an error that ends a command: 2 user's mistake, 130 Ctrl-C, 1 vlmrl's bug."""
    if isinstance(error, VlmrlError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, str(error) if isinstance(error, Interruption) else "interrupted"
    if isinstance(error, bdb.BdbQuit):
        return 130, "the debugger was quit"
    if isinstance(error, OSError) and error.errno in REFUSED:
        message, hint = REFUSED[error.errno]
        return 2, format_error(f"{message}: {error.strerror}", shortened(str(error.filename or "")) or None, hint)
    hint = "this is a bug in vlmrl, not your mistake; please report it with the lines above"
    report = format_error(f"internal error: {type(error).__name__}: {error}", None, hint)
    return 1, "".join(traceback.format_exception(error)) + "\n" + report


Error = TypeVar("Error", bound=VlmrlError)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like `name`, whatever the case of its letters; None when none is alike.

    Args:
        cutoff: smallest similarity, 0 = none, 1 = equal (`difflib.SequenceMatcher.ratio`).
    """
    import difflib  # not at the top: commands start faster without it

    spellings = {each.lower(): each for each in sorted(known)}
    matches = difflib.get_close_matches(str(name).lower(), list(spellings), n=1, cutoff=cutoff)
    return spellings[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], listing: str, cutoff: float = 0.6) -> str:
    """Return a hint: the nearest of the known names, where one is alike, before a text that lists them."""
    near = nearest(name, known, cutoff)
    return f"did you mean `{near}`?  {listing}" if near else listing


def listed(name: str, known: Iterable[str], what: str = "known") -> str:
    """Return a hint that names the nearest known name, and all of them: `did you mean ...?  known: a, b`."""
    names = list(known)
    return did_you_mean(name, names, f"{what}: {', '.join(names) or 'none'}")


def unknown(
    what: str, name: str, known: Iterable[str], *, error: type[Error] = RecipeError, whose: str = "", more: str = ""
) -> Error:
    """Return the error for a name that does not exist, with the nearest one that does.

    Args:
        what: kind of thing that has the name, such as "task".
        known: the names that exist.
        error: class of the error.
        whose: follows the name in the message, such as " of task `digits`".
        more: follows the list of names in the hint.
    """
    return error(f"unknown {what} `{name}`{whose}", hint=listed(name, known) + more)
