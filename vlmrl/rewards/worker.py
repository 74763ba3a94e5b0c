"""The worker process of a user's reward: reads frames, calls the function, writes frames. A trainer never imports this.

Requests: {"op": "load", ...} once, then {"op": "score", "items": [...]} with image pixels as blobs. Answers: {"loaded"}
or {"fatal": error}; then, in the order of the items, {"parts", "note", "seconds"} or {"error"} each, or one {"failed":
error} for a whole batch. What the function prints goes to a pipe of its own and is shown with an error.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmrl.errors import VlmrlError
from vlmrl.process import die_with_parent
from vlmrl.rewards.adapters import BoundReward, bind_user_reward
from vlmrl.rewards.base import UserReward, check_parts, split_note
from vlmrl.rewards.frames import CONTRACT, FrameBuffer, pack_frame
from vlmrl.types import RewardInput

MODULE = "vlmrl_user_reward"


def main(request_fd: int, response_fd: int, parent_pid: int) -> None:
    """Serve until the request pipe closes or the parent dies."""
    die_with_parent(parent_pid)
    for fd in (request_fd, response_fd):
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    buffer, reward, file = FrameBuffer(), None, ""
    while data := os.read(request_fd, 1 << 20):
        buffer.feed(data)
        while (frame := buffer.pop()) is not None:
            header, blobs = frame
            if header["op"] == "load":
                file = header["user"]["file"]
                reward, answer = _load(UserReward(**header["user"]), header["memory_mb"])
                _send(response_fd, answer)
            elif reward is not None:
                for answer in _score(reward, read_inputs(header["items"], blobs), file):
                    _send(response_fd, answer)


def limit_memory(memory_mb: int) -> None:
    """Cap the address space; an allocation beyond it raises MemoryError. No core files."""
    import resource

    with contextlib.suppress(ValueError, OSError):  # a lower hard limit of the system stays as it is
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def import_source(user: UserReward) -> ModuleType:
    """The user's file as a module, from the text that was hashed. Its folder is importable, after everything else."""
    module = ModuleType(MODULE)
    module.__file__ = user.file
    sys.modules[MODULE] = module
    sys.path.append(str(Path(user.file).parent))
    linecache.cache[user.file] = (len(user.source), None, user.source.splitlines(keepends=True), user.file)
    exec(compile(user.source, user.file, "exec", dont_inherit=True), module.__dict__)
    return module


def read_inputs(items: Sequence[dict[str, Any]], blobs: Sequence[bytes]) -> list[RewardInput]:
    """Requests as RewardInputs; each image is (width, height) in its item and its RGB bytes as the next blob."""
    left = iter(blobs)
    inputs = []
    for item in items:
        sizes = item.pop("images")
        images: list[Any] = []
        if sizes:
            from PIL import Image

            images = [Image.frombytes("RGB", tuple(size), next(left)) for size in sizes]
        inputs.append(RewardInput(**item, images=images))
    return inputs


def _load(user: UserReward, memory_mb: int) -> tuple[BoundReward | None, dict[str, Any]]:
    try:
        limit_memory(memory_mb)
        reward = bind_user_reward(import_source(user), user)
    except BaseException as error:
        return None, {"fatal": describe_error(error, user.file)}
    found = {
        "style": reward.style,
        "batched": reward.batched,
        "needs_images": reward.needs_images,
        "weights": dict(reward.weights),
        "ranges": {k: list(v) for k, v in reward.ranges.items()},
    }
    return reward, {"loaded": found}


def _score(reward: BoundReward, inputs: list[RewardInput], file: str):
    """Answers of one request: in a batch one call for all, else one call an item."""
    groups = [range(len(inputs))] if reward.batched else [range(i, i + 1) for i in range(len(inputs))]
    for group in groups:
        start = time.perf_counter()
        try:
            results = reward.call([inputs[i] for i in group])
        except BaseException as error:
            described = describe_error(error, file)
            yield {"failed": described} if reward.batched else {"error": described}
            continue
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        seconds = (time.perf_counter() - start) / len(group)
        for _, result in zip(group, results, strict=True):
            try:
                parts, note = split_note(result)
                parts = check_parts(parts, {})
                yield {"parts": parts, "note": note, "seconds": seconds}
            except Exception as error:
                yield {"error": describe_error(error, file)}


def describe_error(error: BaseException, file: str) -> dict[str, Any]:
    """An exception as JSON: kind, message, and the user's own lines of the traceback."""
    if isinstance(error, VlmrlError):
        return {"kind": CONTRACT, "message": error.message, "hint": error.hint, "lines": []}
    lines = []
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [f"{Path(file).name}:{error.lineno}: {(error.text or '').strip()}"]
    with contextlib.suppress(MemoryError):
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                lines.append(f"{Path(file).name}:{frame.lineno} in {frame.name}: {frame.line}")
    hint = "a larger [reward] memory_mb, or a smaller appetite" if isinstance(error, MemoryError) else None
    return {"kind": type(error).__name__, "message": _text(error), "hint": hint, "lines": lines[-8:]}


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception as nested:
        return f"(its text cannot be made: {type(nested).__name__})"


def _send(fd: int, answer: dict[str, Any]) -> None:
    data = memoryview(pack_frame(answer))
    while data:
        data = data[os.write(fd, data) :]
