"""Errors for users, the text of a cell of theirs, and the command that installs an optional package.

Each error states the problem, its place, and the next step. Only `cli/app.py` prints them.
"""

from __future__ import annotations

import bdb
import errno
import math
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, Literal, TypeVar

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of the system for a full disk, an exhausted quota or a file that is too large."""


_SPACE = ("cannot write to the disk", "free disk space: `vlmrl runs du` shows what uses it")
_PLACE = ("the path cannot be used", "choose another path, or ask the administrator of this one")
REFUSED = {
    **dict.fromkeys(FULL, _SPACE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), _PLACE),
    errno.ENAMETOOLONG: ("a name is too long", "a file name may have 255 bytes, a path 4,096: use a shorter one"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), ("too many files are open", "raise the limit: ulimit -n 65536")),
    **dict.fromkeys((errno.EIO, errno.ESTALE), ("the disk fails", "see `dmesg`, and copy the data")),
}
"""Error number of the system -> (message, hint). These errors come from the user's files and disks, not from vlmrl."""
TRY_AGAIN = 75
"""Exit code of a command that a service of a reward has stopped: it can be continued later (EX_TEMPFAIL of sysexits.h).
"""
MOST_SHOWN = 160
"""Maximum number of characters that `shortened` keeps."""


class VlmrlError(Exception):
    """Mistake of the user, or failure of the environment, explained in words. Exit code 2, no traceback.

    Args:
        message: the problem, with the wrong value. One sentence, lower case, no full stop.
        where: `file:line`, a path, or a place such as `row 17`; None = no place is known.
        hint: the next command or edit; None = there is no useful hint.
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
    """Recipe that cannot be read, or whose values are invalid or contradict each other."""


class DataError(VlmrlError):
    """Dataset, row or image that cannot be used."""


class RewardError(VlmrlError):
    """Bug in a reward: it raised, hung, or returned something that is not a score. Never a score of 0."""


class RewardUnavailable(RewardError):
    """Error: a service that a reward needs is down. The reward reports this with `raise RewardUnavailable("why")`.

    This is no bug of the reward. The sample is left out of the training; it is never scored 0.
    """

    is_final = False
    """True where asking again is no use: the sample is left out at once."""
    ends_run = False
    """True where a run must end, because no later sample would be scored either."""

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
    """Run of several processes that cannot be started, or in which a process ended unexpectedly."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens that must be in memory at the same time: a packed row, or a batch of the built-in engine.

    Args:
        budget: the recipe key that limits the number of tokens.
        tokens: number of tokens, image tokens included.
        responses: number of responses. A smaller budget splits the load between responses; a single response cannot be
            split.
        rows: its dataset rows, each as text with the number of responses and the size of its images.
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
        """Return a budget that splits the load: half of the budget, or half of the load's tokens if they are fewer."""
        return max(1, min(budget, self.tokens) // 2)


class OutOfMemoryError(VlmrlError):
    """Error: the memory of the GPU or of the machine is full.

    Args:
        load: the load that did not fit; None = unknown.

    Attributes:
        halved: changes with which the run may be started again: recipe key -> [its value in the recipe, new value].
        fits: a value of the load's budget that was tried and fits; None = no such value was tried.
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
    """Finding of a check. A finding of `level` "error" stops the command; a "warning" is only printed."""

    message: str
    where: str | None = None
    hint: str | None = None
    level: Literal["error", "warning"] = "error"


class Interruption(KeyboardInterrupt):
    """Interruption of a command by Ctrl-C or SIGTERM, with information for the user. Exit code 130.

    Args:
        what: name of the interrupted work, such as "eval".
        kept: the results that are saved.
        again: the command that continues the work.
    """

    def __init__(self, what: str, kept: str, again: str | None = None) -> None:
        super().__init__(what, kept, again)
        self.what, self.kept, self.again = what, kept, again

    def __str__(self) -> str:
        return f"{self.what} was interrupted: {self.kept}" + (f"; continue with: {self.again}" if self.again else "")


class ProblemsError(VlmrlError):
    """Error with several problems: one message lists them all."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n\n".join(format_error(p.message, p.where, p.hint) for p in self.problems))

    def __reduce__(self):
        return (type(self), (self.problems,))

    def __str__(self) -> str:
        return self.message


def problems_in(error: VlmrlError, where: str | None = None) -> list[Problem]:
    """Convert an error to problems. `where` is used as their place if the error names no place."""
    if isinstance(error, ProblemsError):
        return list(error.problems)
    return [Problem(error.message, error.where or where, error.hint)]


def cell_text(value: Any, what: str, where: str | None = None) -> str:
    """Return the text of a cell: also of a number; "" for none and NaN.

    Args:
        what: the cell, for messages.
    Raises: DataError for a list, an object, true or false, and bytes.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        kinds = {bool: "true or false", list: "a list", tuple: "a list", dict: "an object"}
        raise DataError(f"{what} is {kinds.get(type(value), type(value).__name__)}, not a text", where=where)
    return str(value)


def format_error(message: str, where: str | None = None, hint: str | None = None, level: str = "error") -> str:
    """Return an error as text with the lines `error: what`, `  --> where`, an empty line, and `hint: next step`."""
    lines = [f"{level}: {message}"]
    if where:
        lines.append(f"  --> {where}")
    if hint:
        lines += ["", f"hint: {hint}"]
    return "\n".join(lines)


def shortened(text: str, limit: int = MOST_SHOWN) -> str:
    """Return the text, or its beginning and end if it has more than `limit` characters."""
    from vlmrl.redaction.redact import excerpt  # at the first use: most commands need no message that is cut

    half = limit // 2
    return text if len(text) <= limit else " ... ".join(excerpt(text, half, end=end) for end in (False, True))


def gib(size: int) -> str:
    """Return a number of bytes as text, in MiB or GiB."""
    return f"{size / (1 << 30):,.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.0f} MiB"


def reason_of(error: BaseException) -> str:
    """Return an error as a reason why a run or command ended: its message and place in one sentence, without the hint.

    If the error is a bug, the text also names its class.
    """
    if not isinstance(error, VlmrlError):
        return f"{type(error).__name__}: {error}"
    return f"{error.message} ({error.where})" if error.where else error.message


def exit_of(error: BaseException) -> tuple[int, str]:
    """Return (exit code, printed text) of an error that ends a command.

    Returns: exit code 2 = user's mistake, 75 = a service is down, 130 = Ctrl-C, 1 = vlmrl's bug.
    """
    if isinstance(error, RewardUnavailable):
        return TRY_AGAIN, str(error)
    if isinstance(error, VlmrlError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, str(error) if isinstance(error, Interruption) else "interrupted"
    if isinstance(error, bdb.BdbQuit):
        return 130, "the debugger was quit"
    if isinstance(error, OSError) and error.errno in REFUSED:
        message, hint = REFUSED[error.errno]
        return 2, format_error(f"{message}: {error.strerror}", shortened(str(error.filename or "")) or None, hint)
    if isinstance(error, UnicodeEncodeError) and "\udc80" <= error.object[error.start] <= "\udcff":
        # Python reads a byte of a file name that is not UTF-8 as such a character.
        path = error.object.encode("utf-8", "backslashreplace").decode()
        return 2, format_error(
            "a name that is not UTF-8 cannot be used here", shortened(path), "rename the file or folder"
        )
    hint = "this is a bug in vlmrl, not your mistake; please report it with the lines above"
    report = format_error(f"internal error: {type(error).__name__}: {error}", None, hint)
    return 1, "".join(traceback.format_exception(error)) + "\n" + report


def way_out(error: BaseException) -> str:
    """Return the hint for a failed write; for an error without a number of the system, that for a full disk."""
    number = re.search(r"os error (\d+)", str(error))  # Rust's libraries name it in their text
    code = getattr(error, "errno", None) or (int(number[1]) if number else None)
    return (REFUSED.get(code, _PLACE) if code else _SPACE)[1]


Error = TypeVar("Error", bound=VlmrlError)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, without regard to case; None = none is similar enough.

    Args:
        cutoff: minimum similarity, from 0 = not similar to 1 = equal (`difflib.SequenceMatcher.ratio`).
    """
    import difflib  # not at the top of the file, because commands start faster without it

    spellings = {each.lower(): each for each in sorted(known)}
    matches = difflib.get_close_matches(str(name).lower(), list(spellings), n=1, cutoff=cutoff)
    return spellings[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], listing: str, cutoff: float = 0.6) -> str:
    """Return a hint: `listing`, a text with the known names, preceded by the most similar name if there is one."""
    near = nearest(name, known, cutoff)
    return f"did you mean `{near}`?  {listing}" if near else listing


def listed(name: str, known: Iterable[str], what: str = "known") -> str:
    """Return a hint with the most similar known name and a list of all: `did you mean ...?  known: a, b`."""
    names = list(known)
    return did_you_mean(name, names, f"{what}: {', '.join(names) or 'none'}")


def unknown(
    what: str, name: str, known: Iterable[str], *, error: type[Error] = RecipeError, whose: str = "", more: str = ""
) -> Error:
    """Return the error for a name that does not exist, with the most similar name that exists.

    Args:
        what: kind of thing that has the name, such as "task".
        known: the names that exist.
        whose: text after the name in the message, such as " of task `digits`".
        more: text after the list of names in the hint.
    """
    return error(f"unknown {what} `{name}`{whose}", hint=listed(name, known) + more)


NEEDS_TORCH = {"flash-attn", "causal-conv1d"}
"""Extras with packages that must be compiled against the installed torch. pip hides torch from builds by default."""


def install_line(*extras: str) -> str:
    """Return the command that installs extras. It must run in a checkout, because vlmrl is not on a package index.

    Example: pip install '.[vllm]' (in vlmrl's checkout)
    """
    built = " --no-build-isolation" if NEEDS_TORCH & set(extras) else ""
    return f"pip install '.[{','.join(extras)}]'{built} (in vlmrl's checkout)"
