"""Details and artifacts of rewards: made safe to send and to keep, with the caps that are declared here.

`detail_text` and `artifact_files` run in the worker, beside the reward. `read_detail` and `read_artifacts` run in the
process that keeps the results, and trust none of them.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Mapping
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.base import part_name
from vlmrl.rewards.sandbox.frames import MOST_BLOB_BYTES, StrictEncoder
from vlmrl.types import Media
from vlmrl.untrusted import BROKEN_IMAGE, encodable, parse_json

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
