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
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from traceback import walk_tb
from types import ModuleType
from typing import Any

from vlmrl.environments.adapters import as_environment, as_observation
from vlmrl.environments.base import (
    CUT_MARK,
    ERROR,
    IMAGE_MARK,
    EnvironmentLimits,
    Observation,
    Start,
    Started,
    UserEnvironment,
    ends_of,
)
from vlmrl.environments.calls import BadCall, read_calls, served_calls
from vlmrl.environments.row_fields import row_fields
from vlmrl.environments.tools import ToolError, bind, hidden_parameters, tool_schema, tools_of
from vlmrl.errors import RewardError, RewardUnavailable, listed, unknown
from vlmrl.process import adopt_orphans, children, descendants, die_with_parent, kill_all, own_shared_memory
from vlmrl.redaction.secrets import scanner_shapes
from vlmrl.rewards.worker import Guard, describe_error, import_source, own_files
from vlmrl.types import GREY, LONG_SIDES, Call
from vlmrl.workers.frames import WHOLE, Channel
from vlmrl.workers.serve import Answer, Handler, limit_memory

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that hold libraries at one thread: a fork has none of the threads of its parent."""
MOST_ERROR_CHARS = 200
MOST_IMAGES = 64
"""Largest number of images of one observation; `[environment]` allows fewer."""
MOST_PROCESSES = 2048
"""Largest number of processes below the keeper of this one: those of the open episodes, and what their tools start."""
STARTS = "__vlmrl_start__"
"""Class method of an environment: (args, *, forks) -> Started. It is called once in the process whose forks are the
episodes, and, with forks = False, in one that only describes the environment; see python_tool.py."""
CALL = "call"
"""Field of a message that a call begins, with its name and arguments."""
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
    scanner_shapes()  # here once: the first error in each fork would wait for it
    guard, episodes = Guard(), set[int]()
    user = UserEnvironment(**setup["user"])
    limits, own, facts = EnvironmentLimits(**setup["limits"]), None, {}
    try:
        with guard:
            own = Own(import_source(user), user)  # pyright: ignore[reportArgumentType]
            facts = own.facts(forks=bool(setup["socket"])) | {"files": own_files(user.file)}
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
    kept = set(children(os.getpid()))  # what an environment has started for all episodes

    def handle(body: dict[str, Any], blobs: Sequence[bytes]) -> Iterator[Answer]:
        assert own is not None
        for pid in body["reap"]:
            episodes.discard(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        # What an episode that ended by itself has started is now a child of this process.
        for orphan in set(children(os.getpid())) - episodes - kept if body["reap"] else ():
            kill_all(lambda pid=orphan: [*descendants(pid), pid])
            os.waitpid(orphan, 0)
        for item, ticket in enumerate(body["fork"]):
            if (pid := os.fork()) == 0:
                _live(own, bytes.fromhex(ticket), setup["socket"], setup["form"], limits, guard)
            episodes.add(pid)
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
    """The user's environment, looked up by its name.

    Raises: RewardError for a missing name, or tools that cannot be described.
    """

    def __init__(self, module: ModuleType, user: UserEnvironment) -> None:
        self.user = user
        target = self._named(module, user.name)
        if isinstance(target, Mapping):
            self.targets = {str(key): value for key, value in target.items()}
        else:
            self.targets = {"": list(target) if isinstance(target, (list, tuple)) else target}
        self.targets = {key: as_environment(target, user.args) for key, target in self.targets.items()}
        for target in self.targets.values():
            if not callable(target) and not isinstance(target, list):
                kind = type(target).__name__
                raise RewardError(f"an environment is a function, a list of functions or a class, not {kind}")
            if user.args and not inspect.isclass(target):
                raise RewardError("environment.args are for a class; a function has defaults")
            if inspect.isclass(target):
                _check_arguments(target, user.args)

    def _named(self, module: ModuleType, name: str) -> Any:
        try:
            return getattr(module, name)
        except AttributeError:
            own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
            public = [n for n, v in own.items() if callable(v) and not n.startswith("_")]
            classes = [n for n in public if inspect.isclass(own[n]) and tools_of(own[n])]
            hint = listed(name, classes or public, "it has")
            raise RewardError(f"{self.user.file} has no `{name}`", hint=hint) from None

    def facts(self, *, forks: bool) -> dict[str, Any]:
        """Return the facts of each environment by its name: the arguments of `Described`.

        Args:
            forks: whether episodes will follow. What an environment shares between them is then started.
        """
        facts = {}
        for key, target in self.targets.items():
            owner = target if inspect.isclass(target) or isinstance(target, list) else [target]
            tools = [tool_schema(tool, (Start,), name=name) for name, tool in tools_of(owner).items()]
            if not tools:
                hint = "name a function in the list" if isinstance(target, list) else "write a public method"
                raise RewardError(f"the environment `{key or self.user.name}` has no tool", hint=hint)
            own_reward = inspect.isclass(target) and hasattr(target, "get_reward")
            facts[key] = {"tools": tools, "own_reward": own_reward, "takes": _takes(target), "is_open": _shows(target)}
            start: Callable[..., Started] | None = getattr(target, STARTS, None)
            facts[key] |= asdict(start(self.user.args, forks=forks)) if start is not None else {}
        return {"environments": facts}

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


def _check_arguments(target: type, args: Mapping[str, Any]) -> None:
    """Raise RewardError for arguments that a class does not take, and for those that it lacks."""
    signature = inspect.signature(target)
    known = signature.parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        for name in args.keys() - known.keys():
            raise unknown("argument", name, known, error=RewardError, whose=" in environment.args")
    try:
        signature.bind(**args)
    except TypeError as error:
        raise RewardError(f"environment.args of {target.__name__}: {error}") from error


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
    sums: dict[str, float] = field(default_factory=dict)
    kept_back: Mapping[str, Sequence[str]] = field(default_factory=dict)
    loop: asyncio.AbstractEventLoop | None = None

    def answer(
        self, body: dict[str, Any], blobs: Sequence[bytes], channel: Channel
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the answer to a request as JSON values, and the PNG files of its images."""
        with self.guard:
            if "reset" in body:
                return self._reset(body["reset"], blobs)
            if "turn" in body:
                own = self.start.seen_sizes[: len(self.start.images)]
                shown = ((w, h) for w, h in body.get("seen_sizes", ()))
                self.start = replace(self.start, seen_sizes=(*own, *shown))
                return self._turn(self._calls(body), lambda number, call: channel.answer(number, {CALL: call}))
            return self._end(), []

    def _reset(self, given: dict[str, Any], blobs: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        from PIL import Image

        images = [Image.frombytes("RGB", tuple(size), blob) for blob, size in zip(blobs, given["sizes"], strict=True)]
        target = self.own.target(given["columns"])
        takes = _takes(target)
        fields, self.kept_back = row_fields(given["columns"], given["truth"], takes, given["repeats"])
        seen = tuple((w, h) for w, h in given["seen_sizes"])
        self.start = Start(fields, images, seen, given["seed"], given["prompt"])
        if not inspect.isclass(target):
            self.owner = target if isinstance(target, list) else [target]
            self.tools = tools_of(self.owner)
            return _packed([], {}, {})
        self.owner = target(**self.own.user.args)
        self.tools = tools_of(self.owner)
        if takes is None:
            return _packed([], {}, {})
        more = {
            "prompt": given["prompt"],
            "images": images,
            "image": images[0] if images else None,
            "seen_sizes": seen,
            "seed": given["seed"],
        }
        values = {k: v for k, v in {**more, **fields}.items() if k in takes or any(takes.values())}
        if missing := [name for name in _required(target) if name not in values]:
            names = dict.fromkeys([*more, *given["columns"], *given["truth"]])
            message = f"reset takes {', '.join(missing)}, which the row does not have under this name"
            raise RewardError(message, hint=f"it has: {', '.join(names)}")
        measured: dict[str, float] = {}
        try:
            return _packed(self._content(self._run(self.owner.reset, values), measured), measured, {})
        except KeyError as error:
            if why := self._why_missing(error):
                raise RewardError(f"reset reads {error}, and {why}") from None
            raise

    def _why_missing(self, error: BaseException) -> str:
        """Return why the row's field that a KeyError names is kept back, and how to get it; "" for other errors."""
        name = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
        if name not in self.kept_back:
            return ""
        fields = ", ".join(self.kept_back[name])
        why = f"as it repeats the truth ({fields})" if fields else "as it is a field of the truth"
        return f"`{name}` is kept back, {why}: a class gets it whose reset names it as a parameter"

    def _calls(self, body: Mapping[str, Any]) -> Sequence[Call | BadCall]:
        """Return the calls of a turn: of its text, as a server has read them, or as they were read before."""
        if served := body.get("served"):
            return served_calls(served, self.limits.calls)
        if "calls" not in body:
            return read_calls(body["turn"], self.form, most=self.limits.calls, in_thought=body["in_thought"])
        return [Call(**c) if c["name"] else BadCall("", "") for c in body["calls"]]

    def _turn(
        self, calls: Sequence[Call | BadCall], begins: Callable[[int, Mapping[str, Any]], object]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Run the calls of a turn, one after the other. `begins`: called with the number of a call, and the call."""
        given = [
            {"name": "", "arguments": {"text": c.text}} if isinstance(c, BadCall) else
            {"name": c.name, "arguments": dict(c.arguments)}
            for c in calls
        ]  # fmt: skip
        answer: dict[str, Any] = {"calls": given, "errors": 0, "spans": []}
        measured: dict[str, float] = {}
        parts = list[Part]()
        if not calls:
            answer["done"] = "answer"
        for number, call in enumerate(calls):
            begins(number, given[number])
            shown, is_error, is_done = self._call(call, measured)
            answer["errors"] += is_error
            parts += ["\n"] if parts and isinstance(parts[-1], str) and shown and isinstance(shown[0], str) else []
            answer["spans"].append([len(parts), len(parts) + len(shown)])
            parts += shown
            if is_done:
                answer["done"] = "done"
                break
        return _packed(parts, measured, answer)

    def _call(self, call: Call | BadCall, measured: dict[str, float]) -> tuple[list[Part], bool, bool]:
        """Return (texts and PNG files that a tool returned, whether it or the call failed, whether the episode ends).

        Of a failure, the text begins with `error:`.
        """
        if isinstance(call, BadCall):
            return _error(f"the call cannot be read: {call.why}"), True, False
        if call.name not in self.tools:
            return _error(f"there is no tool {call.name!r}; the tools are {', '.join(self.tools)}"), True, False
        tool = self.tools[call.name]
        signal.signal(signal.SIGALRM, _over_time)
        signal.setitimer(signal.ITIMER_REAL, self.limits.tool_seconds)
        try:
            values = bind(tool, call.arguments, hidden=(Start,))
            result = self._run(tool, values | dict.fromkeys(hidden_parameters(tool, (Start,)), self.start))
            content = self._content(result, measured)
            is_error = bool(content) and isinstance(content[0], str) and content[0].startswith(ERROR)
            return content, is_error, isinstance(result, Observation) and result.done
        except OverTimeError:
            return _error(f"{call.name} took more than {self.limits.tool_seconds:g} s"), True, False
        except MemoryError:
            return _error(f"{call.name} needs more memory than {self.limits.memory_mb} MiB"), True, False
        except ToolError as error:
            return _error(str(error)), True, False
        except RewardUnavailable:
            raise
        except RewardError as error:  # the policy is not to learn from it
            raise RewardError(f"in the tool `{call.name}`: {error.message}", hint=error.hint) from None
        except (Exception, SystemExit) as error:
            if isinstance(error, ImportError) and not _ran_text(error):
                raise  # a package is missing here: the policy is not to learn from it, either
            with suppress(Exception):
                why = self._why_missing(error)
                return _error(f"{type(error).__name__}: {error}{'; ' if why else ''}{why}"), True, False
            return _error(type(error).__name__), True, False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _run(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Call a function. A coroutine runs to its end, in the one loop of the episode."""
        result = function(**values)
        if not inspect.iscoroutine(result):
            return as_observation(result, self.sums)
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return as_observation(self.loop.run_until_complete(result), self.sums)

    def _content(self, result: Any, measured: dict[str, float]) -> list[Part]:
        """Return the texts and PNG files of a result; texts that follow each other are one.

        Raises: ValueError for too many images, or one of no use.
        """
        runs = groupby(_shown(result, measured), lambda part: isinstance(part, str))
        content = [part for is_text, run in runs for part in (["".join(run)] if is_text else run)]
        if sum(not isinstance(part, str) for part in content) > MOST_IMAGES:
            raise ValueError(f"more than {MOST_IMAGES} images")
        return [self._cut(part) if isinstance(part, str) else self._png(part) for part in content]

    def _cut(self, text: str) -> str:
        most = self.limits.text_chars
        return text if len(text) <= most else CUT_MARK.join(ends_of(text, most))

    def _png(self, image: Any) -> bytes:
        """Return an image as a PNG file in RGB, shrunk to the largest area. Raises: ValueError for one of no use."""
        image = image.convert("RGB")
        if not image.width * image.height:
            raise ValueError(f"an image of {image.width} x {image.height} pixels is empty")
        scale = (self.limits.image_pixels / (image.width * image.height)) ** 0.5
        if scale < 1:
            image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
        if max(image.size) > LONG_SIDES * min(image.size):  # image processors refuse it, which would end the run
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels has too long a side: over {LONG_SIDES} to 1"
            )
        if self.limits.grey_images:
            image = image.copy()
            image.paste(GREY, (0, 0, *image.size))
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    def _end(self) -> dict[str, Any]:
        """Return the environment's own reward, if it has one."""
        own = getattr(self.owner, "get_reward", None) if not isinstance(self.owner, list) else None
        if own is None:
            return {"parts": []}
        reward = self._run(own, {})
        try:
            return {"parts": [], "measured": {"reward": float(reward)}}
        except (TypeError, ValueError):
            raise RewardError(f"get_reward returned {reward!r}, which is not a number") from None


def _reset_of(target: Any) -> inspect.Signature | None:
    """Return the signature of a class's reset, without self; None = there is no reset."""
    reset = getattr(target, "reset", None) if inspect.isclass(target) else None
    if reset is None:
        return None
    signature = inspect.signature(reset)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _takes(target: Any) -> dict[str, bool] | None:
    """Return the parameters of a class's reset, and whether each is `**row`; None = there is no reset."""
    own = _reset_of(target)
    return None if own is None else {name: p.kind is p.VAR_KEYWORD for name, p in own.parameters.items()}


def _required(target: Any) -> list[str]:
    """Return the parameters of a class's reset that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = _reset_of(target)
    parameters = own.parameters.values() if own else ()
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def _shows(target: Any) -> bool:
    """Return whether a class has a reset that may show something: it is not annotated to return None."""
    own = _reset_of(target)
    return own is not None and own.return_annotation not in (None, "None")


def _over_time(number: int, frame: Any) -> None:
    raise OverTimeError


def _ran_text(error: BaseException) -> bool:
    """Return whether code that lies in no file raised an error, as where a tool executes what the policy wrote."""
    files = {frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)}
    return any(not os.path.exists(file) and not file.startswith("<frozen ") for file in files)


def _error(text: str) -> list[Part]:
    """Return an error for the policy: one line of bounded length."""
    return [ERROR + " ".join(text.split())[:MOST_ERROR_CHARS]]


def _packed(
    content: Sequence[Part], measured: Mapping[str, float], answer: Mapping[str, Any]
) -> tuple[dict[str, Any], list[bytes]]:
    """Return an answer as JSON values, with the numbers of its PNG files among the texts, and the files."""
    files = [part for part in content if isinstance(part, bytes)]
    numbers = iter(range(len(files)))
    parts = [part if isinstance(part, str) else next(numbers) for part in content]
    return {**answer, "parts": parts, "measured": dict(measured)}, files


def _shown(result: Any, measured: dict[str, float]) -> Iterator[Any]:
    """Yield the texts and PIL images of what a tool or `reset` returned, in order.

    Texts, images, content blocks (`{"type": "text"}`, `{"type": "image"}`), observations, lists of these; any other
    value as JSON. Raises: RewardError for what cannot be shown: a bug of the environment.
    """
    if result is None:
        return
    if isinstance(result, Observation):
        measured |= {str(name): float(value) for name, value in result.measured.items()}
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
        yield from _shown(_of_block(result), measured)
    elif isinstance(result, (list, tuple)) and any(not isinstance(x, (int, float, bool)) for x in result):
        after_text = False
        for one in result:  # texts that follow each other are lines
            for part in _shown(one, measured):
                yield "\n" + part if isinstance(part, str) and after_text else part
                after_text = isinstance(part, str)
    else:
        if getattr(result, "ndim", 2) < 2:  # a number or a list of numpy
            result = getattr(result, "tolist", lambda: result)()
        try:
            yield json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            hint = "return a text, a PIL image (Image.fromarray), content blocks, JSON values, or a list of these"
            kind = type(result).__name__
            raise RewardError(f"a value of type {kind} cannot be shown to the model", hint=hint) from None


def _of_block(block: Mapping[str, Any]) -> Any:
    """Return the text or the PIL image of a content block. Raises: RewardError for an image that is only named."""
    if block["type"] == "text":
        return str(block.get("text", ""))
    image = block.get("image")
    if not hasattr(image, "convert"):
        raise RewardError("an image block has a PIL image under `image`; paths and addresses are not read")
    return image
