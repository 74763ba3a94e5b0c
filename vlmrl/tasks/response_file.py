"""The class ResponseFile: how a task turns responses into files, such as code that other programs open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class NoFile:
    """Result for a response that gives no file. `reason`: one sentence for people."""

    reason: str


Draw = Callable[[Sequence[str]], Sequence[bytes | NoFile]]
"""Contents of files -> a picture of each as PNG bytes, or the reason why there is none."""


@dataclass(frozen=True)
class ResponseFile:
    """Kind of file that a response contains, for `vlmrl generate --images`.

    Args:
        kind: word for messages, such as "SVG code".
        suffix: ending of the files, such as ".svg".
        content: text of a response -> content of its file, or the reason why there is none. Responses are hostile.
        drawing: opens what draws the files; it is closed at the end. None = there are no pictures.
    """

    kind: str
    suffix: str
    content: Callable[[str], str | NoFile]
    drawing: Callable[[], AbstractContextManager[Draw]] | None = None
