"""Process of a logger: calls the logger for each request.

Requests: {"op": "log", "line"}, {"op": "samples", "line", "samples"} with image files as blobs, and {"op": "close",
"status"}. The answer to each is {"op", "failed"}, where `failed` is the reason of a failure or null. The logger is
opened at the start; the facts about that are {"failed", "opened"}, with the values that the logger returned.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmrl.data.images import decode_image
from vlmrl.errors import DataError, VlmrlError, reason_of
from vlmrl.loggers import BUILTIN, file_and_class
from vlmrl.loggers.base import Line, SampledRollout, Sink, SinkRun
from vlmrl.process import leave
from vlmrl.workers.frames import WHOLE, Channel
from vlmrl.workers.serve import Answer, Handler

MAX_SIDE = 512
"""Maximum width and height of an image for a logger, in pixels."""


def begin(setup: dict[str, Any], channel: Channel) -> tuple[dict[str, Any], Handler]:
    """Open the logger. Return facts about that, and the handler of requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)  # training has priority
    sinks: list[Sink] = []
    facts: dict[str, Any] = {"failed": None}
    try:
        sinks.append(load_sink(setup["sink"]))
        run = {**setup["run"], "standing": [Line(**line) for line in setup["run"]["standing"]]}
        facts["opened"] = dict(sinks[0].open(SinkRun(**run)) or {})
    except BaseException as error:  # a user's code may raise even SystemExit; the run counts and reports errors
        facts["failed"] = reason_of(error)
        sinks.clear()

    def answer(body: dict[str, Any], blobs: Sequence[bytes]) -> Iterator[Answer]:
        failed = None
        try:
            for sink in sinks:
                _call(sink, body, blobs)
        except BaseException as error:
            failed = reason_of(error)
        yield WHOLE, {"op": body["op"], "failed": failed}, ()
        if body["op"] == "close":
            leave(0)

    return facts, answer


def _call(sink: Sink, request: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
    if request["op"] == "log":
        sink.log(Line(**request["line"]))
    elif request["op"] == "samples":
        sink.samples(Line(**request["line"]), _samples(request["samples"], blobs))
    else:
        sink.close(request["status"])


def load_sink(name: str) -> Sink:
    """Create the logger that a recipe names.

    Raises: VlmrlError if its library, its file or its class does not exist.
    """
    user_class = file_and_class(name)
    if user_class is not None:
        return _class_in(*user_class)()
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise VlmrlError(f"{error}", hint=f"pip install '.[{name}]' in the checkout of vlmrl") from error
    from vlmrl.loggers import builtin

    return getattr(builtin, BUILTIN[name])()


def _class_in(file: str, class_name: str) -> Any:
    """Import a user's file as a module, and return the class. The file's folder is added to the end of sys.path."""
    spec = importlib.util.spec_from_file_location("vlmrl_user_sink", file)
    if spec is None or spec.loader is None:
        raise VlmrlError("this is not a Python file", where=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(os.path.dirname(os.path.abspath(file)))
    spec.loader.exec_module(module)
    cls = getattr(module, class_name, None)
    if cls is None:
        raise VlmrlError(f"there is no `{class_name}`", where=file)
    return cls


def _samples(items: Sequence[Mapping[str, Any]], blobs: Sequence[bytes]) -> list[SampledRollout]:
    """Return the samples of a request. An item has the indices of the blobs that are its images; each is read once."""
    images = [small_image(content) for content in blobs]
    return [
        SampledRollout(**{**item, "images": [image for i in item["images"] if (image := images[i]) is not None]})
        for item in items
    ]


def small_image(content: bytes) -> bytes | None:
    """Reduce an image file to at most `MAX_SIDE` pixels per side. Return None if it cannot be read.

    A JPEG file stays JPEG; any other becomes PNG.
    """
    try:
        image = decode_image(content)
    except DataError:
        return None
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    if content.startswith(b"\xff\xd8"):
        image.save(buffer, format="JPEG", quality=90)
    else:
        image.save(buffer, format="PNG")
    return buffer.getvalue()
