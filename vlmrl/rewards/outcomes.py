"""Outcome of a reward for one input: a result with details and artifacts, or the reason why there is none.

`detail_text` and `artifact_files` run in the worker, beside the reward. `read_detail` and `read_artifacts` run in the
process that keeps the results, and trust none of them. The limits are declared here, also that of the images that one
call returns, because a step or an evaluation holds them all in memory.
"""

from __future__ import annotations

import hashlib
import io
import math
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from vlmrl.errors import RewardError, RewardUnavailable, VlmrlError
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.base import part_name, split_result
from vlmrl.types import Media, RewardInput
from vlmrl.untrusted import BROKEN_IMAGE, encodable, parse_json
from vlmrl.workers.frames import CONTRACT, MOST_BLOB_BYTES, UNAVAILABLE, StrictEncoder

MOST_DETAIL_BYTES = 1 << 16
"""Maximum length of the detail of one response, as JSON."""
MOST_ARTIFACTS = 8
"""Maximum number of images that a reward returns for one response."""
MOST_ARTIFACT_PIXELS = 1 << 22
"""Maximum size of one image, in pixels: 2048 x 2048."""
MOST_ARTIFACT_BYTES = MOST_BLOB_BYTES
"""Maximum size of all images of a response together, as PNG files."""
MOST_NAME_CHARS = 200
"""Maximum length of the name of a part or an artifact."""
MOST_NOTE_CHARS, MOST_MESSAGE_CHARS, MOST_LINE_CHARS = 2000, 1000, 400
"""Maximum numbers of characters that are kept of a note, of an error, and of a line of code."""
PNG_MODES = ("1", "L", "LA", "RGB", "RGBA")
MOST_DETAIL_LEVELS = 100
"""Maximum depth of lists and mappings. Files nest a detail a few levels deeper, and must be readable."""
_encode = StrictEncoder().encode


def detail_text(detail: Any) -> str | None:
    """Return a detail as JSON text (ASCII); None for None. Arrays and numbers of NumPy become lists and numbers.

    Raises: RewardError for values that JSON cannot hold, and for a detail beyond MOST_DETAIL_BYTES.
    """
    if detail is None:
        return None
    if (least := _least_bytes(detail)) > MOST_DETAIL_BYTES:
        raise _too_long(least, "contains itself, or is at least")
    try:
        text = _encode(detail)
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"the detail of the reward is not a JSON value: {excerpt(str(error), 200)}",
            hint="a detail holds texts, finite numbers, true, false, None, lists, and mappings with texts as keys",
        ) from error
    if len(text) > MOST_DETAIL_BYTES:
        raise _too_long(len(text))
    return text


def read_detail(text: str | None) -> Any:
    """Return the detail of a JSON text, with half surrogate pairs as escapes. Raises: RewardError as `detail_text`."""
    if text is None:
        return None
    if len(text) > MOST_DETAIL_BYTES:
        raise _too_long(len(text))
    try:
        return _written(parse_json(text, unique_keys=True, most_levels=MOST_DETAIL_LEVELS))
    except ValueError as error:
        raise RewardError(f"the detail of the reward is not a JSON value: {excerpt(str(error), 200)}") from error


def _least_bytes(value: Any) -> int:
    """Return a lower bound of the length of a value's JSON text, counted until it is beyond the cap.

    Writing out a value that is too large could take the reward's time and memory, and would look like a hang.
    """
    size, pending = 0, [value]
    while pending and size <= MOST_DETAIL_BYTES:
        current = pending.pop()
        if isinstance(current, str):
            size += str.__len__(current) + 2
        elif isinstance(current, dict):
            size += 2 * dict.__len__(current)  # each entry has a colon, and a comma or bracket
            pending += (x for pair in dict.items(current) for x in pair) if size <= MOST_DETAIL_BYTES else ()
        elif isinstance(current, (list, tuple)):
            size += len(current) + 1
            pending += current if size <= MOST_DETAIL_BYTES else ()
    return size


def _too_long(size: int, words: str = "is") -> RewardError:
    return RewardError(
        f"the detail of the reward {words} {size:,} bytes of JSON; the cap is {MOST_DETAIL_BYTES:,}",
        hint="keep only what people or metrics use: an answer, boxes, numbers",
    )


def _written(value: Any) -> Any:
    """Return the value with texts that every file can hold."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_written(one) for one in value]
    return {encodable(k): _written(v) for k, v in value.items()} if isinstance(value, dict) else value


def artifact_files(artifacts: Any) -> dict[str, bytes]:
    """Return artifacts (name -> PIL image) as PNG files: the same bytes for the same pixels, without metadata.

    Raises: RewardError for an invalid name, a value that is no PIL image, and beyond any of the caps above.
    """
    if not isinstance(artifacts, Mapping):
        raise RewardError(f"the artifacts of the reward are a {type(artifacts).__name__}, not names with images")
    files: dict[str, bytes] = {}
    for number, (key, image) in enumerate(artifacts.items(), 1):
        _check_count(max(number, len(artifacts)))
        name = _artifact_name(key)
        files[name] = _png(name, image)
    _check_bytes(files)
    return files


def _check_count(number: int) -> None:
    if number > MOST_ARTIFACTS:
        raise RewardError(f"the reward returned {number:,} artifacts; the cap is {MOST_ARTIFACTS}")


def _artifact_name(key: Any) -> str:
    name = part_name(key, "artifact")
    if len(name) > MOST_NAME_CHARS:
        raise RewardError(
            f"the name of an artifact has {len(name):,} characters; the cap is {MOST_NAME_CHARS}: {excerpt(name, 80)}"
        )
    return name


def _png(name: str, image: Any) -> bytes:
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise RewardError(
            f"the artifact `{name}` is a {type(image).__name__}, not a PIL image",
            hint="PIL.Image.fromarray converts an array",
        )
    _check_pixels(name, *image.size)
    image = _shaded(name, image) if image.mode[0] in "IF" else image
    mode = image.mode if image.mode in PNG_MODES else "RGBA" if image.mode in ("PA", "La", "RGBa") else "RGB"
    if "transparency" in image.info:
        mode = "RGBA"
    plain = image.copy() if image.mode == mode else image.convert(mode)
    plain.info = {}
    sink = io.BytesIO()
    plain.save(sink, "PNG", compress_level=6)
    return sink.getvalue()


def _shaded(name: str, image: Any) -> Any:
    """Return an image of 16-bit, 32-bit or real numbers in 256 shades: its least number black, its largest white.

    Pillow would cut every number at 255: a depth map would be white, and a map of probabilities black.
    """
    import numpy as np
    from PIL import Image

    values_HW = np.asarray(image, dtype=np.float64)
    low, high = float(values_HW.min()), float(values_HW.max())
    if not -math.inf < low <= high < math.inf:
        raise RewardError(
            f"the artifact `{name}` holds numbers that are not finite", hint="use numpy.nan_to_num, for example"
        )
    shades_HW = (values_HW - low) * (255 / (high - low)) if high > low else np.zeros_like(values_HW)
    return Image.fromarray(shades_HW.round().astype(np.uint8))


def read_artifacts(files: Mapping[str, bytes]) -> tuple[dict[str, Media], dict[str, bytes]]:
    """Return (name -> reference, sha256 -> PNG file) of artifacts. Each is decoded to prove that it is sound.

    Raises: RewardError for a file that is no PNG image, or beyond the caps above.
    """
    from PIL import Image

    _check_count(len(files))
    _check_bytes(files)
    media: dict[str, Media] = {}
    files_by_hash: dict[str, bytes] = {}
    for name, data in files.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of sizes and of damaged metadata; the size is checked here
                image = Image.open(io.BytesIO(data), formats=("PNG",))
                _check_pixels(name, *image.size)
                image.load()
        except (*BROKEN_IMAGE, Image.DecompressionBombError) as error:
            raise RewardError(f"the artifact `{name}` is not a readable PNG image ({type(error).__name__})") from error
        sha256 = hashlib.sha256(data).hexdigest()
        media[_artifact_name(name)] = Media(sha256, *image.size)
        files_by_hash[sha256] = data
    return media, files_by_hash


def _check_pixels(name: str, width: int, height: int) -> None:
    if not 0 < width * height <= MOST_ARTIFACT_PIXELS:
        raise RewardError(
            f"the artifact `{name}` is {width:,} x {height:,} pixels; the cap is {MOST_ARTIFACT_PIXELS:,} pixels",
            hint="make it smaller: image.thumbnail((1024, 1024))",
        )


def _check_bytes(files: Mapping[str, bytes]) -> None:
    total = sum(map(len, files.values()))
    if total > MOST_ARTIFACT_BYTES:
        largest = max(files, key=lambda name: len(files[name]))
        raise RewardError(
            f"the artifacts of one response are {total:,} bytes of PNG; the cap is {MOST_ARTIFACT_BYTES:,}",
            hint=f"make them smaller, `{largest}` first: image.thumbnail((512, 512))",
        )


Index = TypeVar("Index", int, tuple[int, int])
MOST_CALL_BYTES = 64 << 20
"""Maximum size of all images of one call of a scorer. A training step makes one call per source and process."""
LEFT_OUT = f"its images were left out: those of the responses before it fill {MOST_CALL_BYTES >> 20} MiB"


class FileLimit(Generic[Index]):
    """Images of the first responses of a call, up to a limit of bytes.

    The choice does not depend on the order in which workers answer. Images are kept before the first response at which
    the sum of the sizes exceeds the limit.

    Attributes:
        end: that response; images of it and of later ones are dropped. None = all are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.end: Index | None = None
        self._sizes: dict[Index, int] = {}
        self._total = 0

    def add(self, index: Index, size: int) -> list[Index]:
        """Record the bytes of a response's images. Return the responses whose images are to be dropped."""
        if not size:
            return []
        if not self.keeps(index):
            return [index]
        self._total += size - self._sizes.get(index, 0)
        self._sizes[index] = size
        dropped: list[Index] = []
        while self._total > self.most:
            self.end = max(self._sizes)
            self._total -= self._sizes.pop(self.end)
            dropped.append(self.end)
        return dropped

    def keeps(self, index: Index) -> bool:
        """Return whether the images of a response are kept, as far as is known now."""
        return self.end is None or index < self.end


Place = tuple[int, int]
"""Input of a call: (key of its group, index within the group). Places sort in the order of the call's rows."""


@dataclass(frozen=True)
class Result:
    """Result of the function for one input.

    Args:
        parts: from a worker they are numbers or None; `check_parts` comes later.
        seconds: time that the function took.
        detail: as a JSON value.
        artifacts: references by name.
        files: image files by sha256.
    """

    parts: dict[str, float | None]
    note: str
    seconds: float
    detail: Any = None
    artifacts: Mapping[str, Media] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its images."""
        return sum(map(len, self.files.values()))

    def without_images(self) -> Result:
        """Return the result without its images, and with a note that says so."""
        note = "; ".join(filter(None, (self.note, LEFT_OUT)))
        return replace(self, note=note, artifacts={}, files={}) if self.files else self


@dataclass(frozen=True)
class Failure:
    """Reason why there is no result.

    Args:
        kind: the exception's class; CONTRACT if the result is not a score; UNAVAILABLE if a service is down; "" if the
            worker was lost.
        lines: the user's own lines of the traceback.
        output: text that the function printed during that call.
        is_final: asking a service again would not help.
        ends_run: no later input would get an answer either.
        seconds: time that the function took, if it is known.
    """

    kind: str
    message: str
    lines: tuple[str, ...] = ()
    hint: str | None = None
    output: str = ""
    is_final: bool = False
    ends_run: bool = False
    seconds: float = 0.0
    size = 0

    def without_images(self) -> Failure:
        """Return itself: it has no images."""
        return self

    def __str__(self) -> str:
        line = f" ({self.lines[-1].partition(' in ')[0]})" if self.lines else ""
        return self.text + line

    @property
    def raised(self) -> str:
        if self.kind in ("", CONTRACT, UNAVAILABLE):
            return ""
        return f"{self.kind}: {self.message}".removesuffix(": ")

    @property
    def text(self) -> str:
        """The failure without its place: the exception, or the message."""
        return self.raised or self.message

    @property
    def is_lost(self) -> bool:
        """Return whether the response hung or ended its worker."""
        return self.kind == ""

    @property
    def broke_worker(self) -> bool:
        """Return whether the response hung or ended its worker, or filled its memory (see `RewardSpec.on_timeout`)."""
        return self.kind in ("", MemoryError.__name__)

    @property
    def is_outage(self) -> bool:
        """Return whether a service that the reward needs is down."""
        return self.kind == UNAVAILABLE

    @property
    def is_contract(self) -> bool:
        """Return whether nothing was raised, but the result is not a score."""
        return self.kind == CONTRACT


Outcome = Result | Failure


def result_of(returned: Any, seconds: float) -> Result:
    """Return the result of a reward in this process; its parts are not checked yet.

    Raises: RewardError as `split_result` and `artifact_files`.
    """
    parts, note, detail, images = split_result(returned)
    artifacts, files = read_artifacts(artifact_files(images)) if images else ({}, {})
    return Result(parts, note, seconds, detail, artifacts, files)


def failure_of(error: Exception) -> Failure:
    """Return the failure for an error that a reward raised in this process."""
    if isinstance(error, RewardUnavailable):
        return Failure(UNAVAILABLE, error.message, hint=error.hint, is_final=error.is_final, ends_run=error.ends_run)
    if isinstance(error, VlmrlError):
        return Failure(
            CONTRACT if isinstance(error, RewardError) else type(error).__name__, error.message, hint=error.hint
        )
    last = traceback.extract_tb(error.__traceback__)[-1:]
    lines = tuple(f"{Path(at.filename).name}:{at.lineno} in {at.name}: {at.line}" for at in last)
    return Failure(type(error).__name__, str(error), lines)


def advised(failure: Failure, x: RewardInput) -> Failure:
    """Return a failure; that of a key which the row lacks says what the row has, and how a column becomes its truth.

    A line that reads `measured` has what was measured instead.
    """
    key = failure.message.strip("'\"")
    if failure.kind != KeyError.__name__ or key in x.truth:
        return failure
    if failure.lines and ".measured" in failure.lines[-1]:
        hint = (
            f"measured for this response: {', '.join(x.measured) or 'nothing'}. A number that only some responses "
            f"have, such as those with tools, is read as x.measured.get({key!r})"
        )
        return replace(failure, hint=failure.hint or hint)
    has, names = ", ".join(x.truth) or "nothing", ", ".join(x.columns) or "none"
    hint = f"the truth of this row has {has}, and no `{key}`; columns: {names}. "
    if "answer" in x.truth and key not in x.columns:
        hint += f'If [[data]] names the column `{key}` as the answer, it is x.truth["answer"] here'
    elif "answer" in x.truth:
        hint += f'The answer is x.truth["answer"], and this column x.columns[{key!r}]'
    else:
        hint += (
            'Name the one with the answer in [[data]]: columns = { answer = "..." }; of a conversation, the last turn '
            "is the answer if it is that of gpt or assistant"
        )
    return replace(failure, hint=failure.hint or hint)


def as_error(failure: Failure, name: str, where: str | None = None) -> RewardError:
    """Return a failure as the error for the user: the exception, the user's lines, the output.

    If a service is down, it is the reward's own message.
    """
    if failure.kind == UNAVAILABLE:
        hint = failure.hint or "start the service that it needs, then begin again; this is not a bug of the reward"
        return RewardUnavailable(f"reward `{name}` is unavailable: {failure.message}", where=where, hint=hint)
    verb_phrase = f"raised {failure.raised}" if failure.raised else f"failed: {failure.message}"
    lines = "".join(f"\n    {line}" for line in failure.lines)
    printed = "".join(f"\n    {line}" for line in failure.output.strip().splitlines()[-5:])
    printed = f"\n  it had printed:{printed}" if printed else ""
    return RewardError(f"reward `{name}` {verb_phrase}{lines}{printed}", where=where, hint=failure.hint)
