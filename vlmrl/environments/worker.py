"""Processes of environments: one that has imported the user's file, and a fork of it for each episode.

The first one gets {"fork": tickets} and {"reap": pids}. An episode's process connects to the socket of the pool, says
its ticket, and answers {"reset"}, {"turn"} and {"end"}. So every episode begins with the same clean state, and can be
killed alone. The trainer never imports this module.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, get_type_hints

from vlmrl.environments.base import (
    ERROR,
    IMAGE_MARK,
    EnvironmentLimits,
    Observation,
    Start,
    UserEnvironment,
    row_fields,
)
from vlmrl.environments.calls import BadCall, read_calls
from vlmrl.environments.tools import ToolError, bind, tool_schema, tools_of
from vlmrl.errors import RewardError
from vlmrl.process import adopt_orphans, die_with_parent, own_shared_memory
from vlmrl.rewards.worker import Guard, describe_error, import_source
from vlmrl.types import Call
from vlmrl.workers.frames import WHOLE, Channel
from vlmrl.workers.serve import Answer, Handler, limit_memory

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that hold libraries at one thread: a fork has none of the threads of its parent."""
MOST_ERROR_CHARS = 200
MOST_TEXT_CHARS = 1 << 20
MOST_IMAGES = 64
"""Largest numbers of characters and images of one observation; the limits of `[environment]` are lower."""
FAULT = "fault"
"""Field of an answer whose environment raised outside a tool."""
Part = str | bytes
"""Part of an observation: a text, or a PNG file."""


class OverTimeError(BaseException):
    """A tool took too long. It is no Exception, so that the tool's own `except Exception` does not stop it."""


def begin(setup: dict[str, Any], channel: Channel) -> tuple[dict[str, Any], Handler]:
    """Import the user's file. Return facts about its tools, or {"fatal": error}, and the handler of forks."""
    for name in ONE_THREAD:
        os.environ[name] = "1"
    own_shared_memory()
    adopt_orphans()
    guard = Guard()
    user = UserEnvironment(**{**setup["user"], "names": tuple(setup["user"]["names"])})
    limits, own, facts = EnvironmentLimits(**setup["limits"]), None, {}
    try:
        with guard:
            own = Own(import_source(user), user)  # pyright: ignore[reportArgumentType]
            facts = own.facts()
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(1)
        if threading.active_count() > 1:
            names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
            raise RewardError(
                f"{user.file} leaves threads running when it is imported ({names})",
                hint="each episode is a fork, which has no threads of its parent: start them in reset or in a tool",
            )
    except BaseException as error:
        facts = {"fatal": describe_error(error, user.file)}
    guard.flush()

    def handle(body: dict[str, Any], blobs: Sequence[bytes]) -> Iterator[Answer]:
        assert own is not None
        for pid in body["reap"]:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for item, ticket in enumerate(body["fork"]):
            if (pid := os.fork()) == 0:
                _live(own, bytes.fromhex(ticket), setup["socket"], setup["form"], limits, guard)
            yield item, {"pid": pid}, ()

    return facts, handle


def _live(own: Own, ticket: bytes, address: str, form: str, limits: EnvironmentLimits, guard: Guard) -> None:
    """Be the process of one episode until the pool closes its socket. Never returns."""
    try:
        parent = os.getppid()
        os.setsid()
        die_with_parent(parent)
        adopt_orphans()
        for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
            if int(name) > 2:
                with suppress(OSError):
                    os.close(int(name))
        limit_memory(limits.memory_mb << 20)
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        link.sendall(ticket)
        channel = Channel(link.fileno(), link.fileno())
        episode = Episode(own, form, limits, guard)
        for body, blobs in channel.requests():
            start = time.perf_counter()
            try:
                answer, files = episode.answer(body, blobs, channel)
            except BaseException as error:
                channel.stay_alone()
                answer, files = {FAULT: describe_error(error, own.user.file)}, []
            guard.flush()
            channel.answer(WHOLE, {**answer, "seconds": time.perf_counter() - start}, files)
    finally:
        os._exit(0)


class Own:
    """The user's environment, looked up by its names.

    Args:
        module: the user's file.
        user: names and arguments.
    Raises: RewardError for a missing name, or tools that cannot be described.
    """

    def __init__(self, module: ModuleType, user: UserEnvironment) -> None:
        self.user, self.targets = user, dict[str, Any]()
        named = [self._named(module, name) for name in user.names]
        if len(named) == 1 and isinstance(named[0], Mapping):
            self.targets = {str(key): value for key, value in named[0].items()}
        elif len(named) == 1 and isinstance(named[0], (list, tuple)):
            self.targets = {"": list(named[0])}
        else:
            self.targets = {"": named[0] if len(named) == 1 else named}
        for target in self.targets.values():
            if not callable(target) and not isinstance(target, list):
                raise RewardError(
                    f"{user.file}: an environment is a function, a list of functions or a class, "
                    f"not a {type(target).__name__}"
                )

    def _named(self, module: ModuleType, name: str) -> Any:
        try:
            return getattr(module, name)
        except AttributeError:
            known = [
                n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
            ]
            raise RewardError(
                f"{self.user.file} has no `{name}`", hint=f"it has: {', '.join(known) or 'no function'}"
            ) from None

    def facts(self) -> dict[str, Any]:
        """Return the schemas of the tools by environment, and what its reset takes of a row."""
        schemas = {}
        for key, target in self.targets.items():
            owner = target if inspect.isclass(target) else target if isinstance(target, list) else [target]
            schemas[key] = [tool_schema(tool, (Start,), name=name) for name, tool in tools_of(owner).items()]
        own_reward = any(inspect.isclass(t) and hasattr(t, "get_reward") for t in self.targets.values())
        return {"tools": schemas, "takes": _takes(next(iter(self.targets.values()))), "own_reward": own_reward}

    def target(self, columns: Mapping[str, Any]) -> Any:
        """Return the environment of a row. Raises: RewardError where its column `environment` names none."""
        if list(self.targets) == [""]:
            return self.targets[""]
        name = str(columns.get("environment"))
        if name not in self.targets:
            raise RewardError(
                f"the row's column `environment` is {name!r}", hint=f"known: {', '.join(map(str, self.targets))}"
            )
        return self.targets[name]


@dataclass
class Episode:
    """One episode of an environment."""

    own: Own
    form: str
    limits: EnvironmentLimits
    guard: Guard
    owner: Any = None
    tools: dict[str, Callable[..., Any]] = field(default_factory=dict)
    start: Start = field(default_factory=Start)

    def answer(
        self, body: dict[str, Any], blobs: Sequence[bytes], channel: Channel
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the answer to a request as JSON values, and the PNG files of its images."""
        with self.guard:
            if "reset" in body:
                return self._reset(body["reset"], blobs)
            if "turn" in body:
                return self._turn(body["turn"], body["in_thought"], lambda number: channel.answer(number, {}))
            return self._end(), []

    def _reset(self, given: dict[str, Any], blobs: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        from PIL import Image

        images = [Image.frombytes("RGB", tuple(size), blob) for blob, size in zip(blobs, given["sizes"], strict=True)]
        target = self.own.target(given["columns"])
        takes = _takes(target)
        fields, _ = row_fields(given["columns"], given["truth"], takes)
        seen = tuple((w, h) for w, h in given["seen_sizes"])
        self.start = Start(fields, images, seen, given["seed"], given["prompt"])
        if not inspect.isclass(target):
            self.owner = target if isinstance(target, list) else [target]
            self.tools = tools_of(self.owner)
            return {"parts": []}, []
        self.owner = target(**self.own.user.args)
        self.tools = tools_of(self.owner)
        if takes is None:
            return {"parts": []}, []
        more = {
            "prompt": given["prompt"],
            "images": images,
            "image": images[0] if images else None,
            "seen_sizes": seen,
            "seed": given["seed"],
        }
        values = {k: v for k, v in {**more, **fields}.items() if k in takes or any(takes.values())}
        return self._seen([_run(self.owner.reset, values)], {})

    def _turn(self, text: str, in_thought: bool, begins: Callable[[int], object]) -> tuple[dict[str, Any], list[bytes]]:
        """Run the calls of a turn, one after the other. `begins`: called with the number of a call when it begins."""
        calls = read_calls(text, self.form, most=self.limits.calls, in_thought=in_thought)
        given = [
            {"name": "", "arguments": {"text": c.text}} if isinstance(c, BadCall) else
            {"name": c.name, "arguments": dict(c.arguments)}
            for c in calls
        ]  # fmt: skip
        answer: dict[str, Any] = {"calls": given, "errors": 0, "measured": {}}
        if not calls:
            return {**answer, "parts": [], "done": "answer"}, []
        parts: list[Any] = []
        for number, call in enumerate(calls):
            begins(number)
            result = self._call(call)
            if isinstance(result, str) and result.startswith(ERROR):
                answer["errors"] += 1
            parts.append(result)
            if isinstance(result, Observation) and result.done:
                answer["done"] = "done"
                break
        return self._seen(parts, answer)

    def _call(self, call: Call | BadCall) -> Any:
        """Return what a tool returned; a text that begins with `error:` for a call or a tool that failed."""
        if isinstance(call, BadCall):
            return _error(f"the call cannot be read: {call.why}")
        if call.name not in self.tools:
            return _error(f"there is no tool {call.name!r}; the tools are {', '.join(self.tools)}")
        tool = self.tools[call.name]
        try:
            values = bind(tool, call.arguments, hidden=(Start,))
        except ToolError as error:
            return _error(str(error))
        values |= dict.fromkeys(_starts(tool), self.start) | self._bound(tool)
        signal.signal(signal.SIGALRM, _over_time)
        signal.setitimer(signal.ITIMER_REAL, self.limits.tool_seconds)
        try:
            return _run(tool, values)
        except OverTimeError:
            return _error(f"{call.name} took more than {self.limits.tool_seconds:g} s")
        except MemoryError:
            return _error(f"{call.name} needs more memory than {self.limits.memory_mb} MiB")
        except Exception as error:
            with suppress(Exception):
                return _error(f"{type(error).__name__}: {error}")
            return _error(type(error).__name__)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _bound(self, tool: Callable[..., Any]) -> dict[str, Any]:
        """Return the recipe's arguments that a plain function takes."""
        if not isinstance(self.owner, list):
            return {}
        return {k: v for k, v in self.own.user.args.items() if k in inspect.signature(tool).parameters}

    def _seen(self, results: Sequence[Any], answer: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Return what calls returned as JSON values and PNG files."""
        measured, notes = dict(answer.get("measured", {})), list[str]()
        content = list(_joined(results, measured, notes))
        files = [self._png(part) for part in content if not isinstance(part, str)]
        if len(files) > MOST_IMAGES:
            raise RewardError(f"an observation has {len(files)} images; the most is {MOST_IMAGES}")
        numbers = iter(range(len(files)))
        parts = [part[:MOST_TEXT_CHARS] if isinstance(part, str) else next(numbers) for part in content]
        return {**answer, "parts": parts, "measured": measured, "note": "; ".join(notes)[:1000]}, files

    def _png(self, image: Any) -> bytes:
        """Return an image as a PNG file in RGB, shrunk to the largest area."""
        image = image.convert("RGB")
        scale = (self.limits.image_pixels / (image.width * image.height)) ** 0.5
        if scale < 1:
            image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    def _end(self) -> dict[str, Any]:
        """Return the environment's own reward, if it has one."""
        own = getattr(self.owner, "get_reward", None) if not isinstance(self.owner, list) else None
        return {"parts": []} if own is None else {"parts": [], "measured": {"reward": float(_run(own, {}))}}


def _takes(target: Any) -> dict[str, bool] | None:
    """Return the parameters of a class's reset, and whether each is `**row`; None = there is no reset."""
    if not inspect.isclass(target) or (reset := getattr(target, "reset", None)) is None:
        return None
    parameters = list(inspect.signature(reset).parameters.items())[1:]  # without self
    return {name: p.kind is p.VAR_KEYWORD for name, p in parameters}


def _over_time(number: int, frame: Any) -> None:
    raise OverTimeError


def _error(text: str) -> str:
    """Return an error for the policy: one line of bounded length."""
    return ERROR + " ".join(text.split())[:MOST_ERROR_CHARS]


def _starts(tool: Callable[..., Any]) -> list[str]:
    """Return the parameters of a tool that get the `Start` of the episode."""
    return [name for name, kind in get_type_hints(inspect.unwrap(tool)).items() if kind is Start and name != "return"]


def _run(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function; a coroutine is run to its end."""
    result = function(**values)
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def _joined(results: Sequence[Any], measured: dict[str, float], notes: list[str]) -> Iterator[Any]:
    """Yield the texts and images of several results; texts that follow each other are lines."""
    after_text = False
    for result in results:
        for part in _content(result, measured, notes):
            yield "\n" + part if isinstance(part, str) and after_text else part
            after_text = isinstance(part, str)


def _content(result: Any, measured: dict[str, float], notes: list[str]) -> Iterator[Any]:
    """Yield the texts and PIL images of what a tool or `reset` returned, in order.

    Texts, images, content blocks (`{"type": "text"}`, `{"type": "image"}`), observations, lists of these; any other
    value as JSON, or as its text.
    """
    if result is None:
        return
    if isinstance(result, Observation):
        measured |= {str(name): float(value) for name, value in result.measured.items()}
        if result.note:
            notes.append(result.note)
        pieces = result.text.split(IMAGE_MARK)
        if len(pieces) - 1 == len(result.images) and result.images:
            for piece, image in zip(pieces, [*result.images, None], strict=True):
                yield from (one for one in (piece, image) if (one is not None and not isinstance(one, str)) or one)
            return
        yield from result.images
        if result.text:
            yield result.text
    elif isinstance(result, str):
        if result:
            yield result
    elif hasattr(result, "convert") and hasattr(result, "size"):
        yield result
    elif isinstance(result, Mapping) and result.get("type") in ("text", "image", "image_url"):
        yield from _content(_of_block(result), measured, notes)
    elif isinstance(result, (list, tuple)) and any(not isinstance(x, (int, float, bool)) for x in result):
        yield from _joined(result, measured, notes)
    else:
        try:
            yield json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            yield str(result)


def _of_block(block: Mapping[str, Any]) -> Any:
    """Return the text or the PIL image of a content block. Raises: TypeError for an image that is only named."""
    if block["type"] == "text":
        return str(block.get("text", ""))
    image = block.get("image")
    if not hasattr(image, "convert"):
        raise TypeError("an image block has a PIL image under `image`; paths and addresses are not read")
    return image
