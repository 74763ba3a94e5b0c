"""Process that renders templates which could run forever or fill the memory; the operating system enforces limits.

The process is started for the first such template and ends when the process that started it ends. A message in either
direction consists of its length in 8 bytes, and then JSON of that length. A request to compile is {"number", "source"};
a request to render also has "names". The answer has the number of its request.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MAX_CHARACTERS = 1 << 22
"""Maximum length of the text that a template makes from a row, in characters: about a million tokens."""
CPU_SECONDS = 5
"""Maximum CPU time of a template for one row, in seconds. An ordinary template takes a thousandth of a second."""
AVERAGE_CPU_SECONDS = 0.05
"""Maximum average CPU time of a template per row, in seconds. For all rows together, CPU_SECONDS are allowed in
addition."""
MEMORY_MB = 1024
"""Maximum address space of the process, in MiB."""
ANSWER_SECONDS = 120.0
"""Maximum wall time until an answer, in seconds, including the start of the process. Only reached on an overloaded
machine."""
_LENGTH = struct.Struct(">Q")
"""Format of the number of bytes in a message: 8 bytes, big-endian."""
_BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; from vlmrl.recipe.template_worker import serve; "
    "serve(*map(int, sys.argv[1:5]))"
)
"""Python program of the process. Its arguments are those of `serve`, followed by the import path."""


class TemplateLimitError(Exception):
    """Error of a template that exceeds a limit; the message contains the limit."""


class TemplateInvalidError(Exception):
    """Error of a template that cannot be compiled. `line`: line in the template; None = unknown."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message, self.line = message, line


class TemplateFailedError(Exception):
    """Error for an exception in a template. `kind`: its class. `missing`: whether an unknown name caused it."""

    def __init__(self, kind: str, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.kind, self.message, self.missing = kind, message, missing

    def __str__(self) -> str:
        return self.message if self.missing or self.kind in _OF_JINJA else f"{self.kind}: {self.message}"


_OF_JINJA = (
    "TemplateError",
    "TemplateRuntimeError",
    "UndefinedError",
    "SecurityError",
    "FilterArgumentError",
    "TemplateNotFound",
    "TemplateAssertionError",
)


def compile_source(environment: Environment, source: str) -> Template:
    """Compile a template. Raises: TemplateInvalidError (such as unknown filters, too deeply nested blocks)."""
    from jinja2 import TemplateSyntaxError

    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TemplateInvalidError(str(error.message), error.lineno) from error
    except (SyntaxError, RecursionError, MemoryError) as error:  # from the Python code that Jinja generates
        raise TemplateInvalidError(f"too deep or too long ({type(error).__name__})") from error


def render_bounded(template: Template, names: Mapping[str, Any]) -> str:
    """Render a compiled template. Raises: only TemplateLimitError or TemplateFailedError."""
    from jinja2 import UndefinedError

    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(names):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise TemplateLimitError(f"makes more than {MAX_CHARACTERS:,} characters from a row")
            pieces.append(piece)
    except TemplateLimitError:
        raise
    except MemoryError as error:
        raise TemplateLimitError("needs more memory for a row than a prompt may use") from error
    except RecursionError as error:
        raise TemplateLimitError("calls itself without end") from error
    except Exception as error:  # an expression of the template can raise anything
        raise TemplateFailedError(type(error).__name__, str(error), isinstance(error, UndefinedError)) from error
    return "".join(pieces)


class TemplateWorker:
    """Connection to the template process. Threads may share it; it handles one request at a time.

    Args:
        cpu_seconds: maximum CPU time for one row, in seconds.
        memory_mb: maximum address space of the whole process, in MiB.
        chat: whether the templates are chat templates of models, which need another sandbox.
    """

    def __init__(self, cpu_seconds: int = CPU_SECONDS, memory_mb: int = MEMORY_MB, *, chat: bool = False) -> None:
        self._limits = cpu_seconds, memory_mb
        self._chat = chat
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._number = 0

    def compile(self, source: str) -> None:
        """Check that the template compiles within the limits. Raises: TemplateInvalidError or TemplateLimitError."""
        self._ask({"source": source})

    def render(self, source: str, names: Mapping[str, Any]) -> str:
        """Render a template. Raises: TemplateLimitError, TemplateInvalidError or TemplateFailedError."""
        return self._ask({"source": source, "names": dict(names)})["text"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe and pipe.close()  # type: ignore[func-returns-value]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._number += 1
            answer = self._answer(request | {"number": self._number})
        if "limit" in answer:
            raise TemplateLimitError(answer["limit"])
        if "invalid" in answer:
            raise TemplateInvalidError(answer["invalid"], answer["line"])
        if "kind" in answer:
            raise TemplateFailedError(answer["kind"], answer["message"], answer["missing"])
        return answer

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            process = self._start()  # a forked process starts its own too: it must not read its parent's answers
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            _send(process.stdin.fileno(), request)
            answer = _receive(process.stdout.fileno(), deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, (EOFError, BrokenPipeError)):
                code = process.returncode
                if code == -signal.SIGXCPU:
                    raise TemplateLimitError(f"takes more than {self._limits[0]} seconds for a row") from None
                raise TemplateLimitError(f"ended its process (exit code {code})") from None
            if isinstance(error, TimeoutError):
                raise TemplateLimitError(f"gave no answer within {ANSWER_SECONDS:g} seconds") from None
            raise
        if answer.get("number") != request["number"]:
            self.close()
            raise TemplateLimitError("answered for another row")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._owner = os.getpid()
        argv = [sys.executable, "-c", _BOOT, *map(str, (self._owner, *self._limits, int(self._chat))), *sys.path]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        atexit.register(self.close)
        return self._process


def serve(parent: int, cpu_seconds: int, memory_mb: int, chat: int) -> None:
    """Answer requests until the pipe is closed or the parent process ends. This is the main function of the process."""
    import resource

    from vlmrl.process import die_with_parent
    from vlmrl.recipe.template import make_chat_environment, make_environment

    die_with_parent(parent)
    # Answers are written to a copy of the pipe. Output that a template prints is discarded, so it cannot mix with them.
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for limit, maximum in ((resource.RLIMIT_AS, memory_mb << 20), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # if the system has a lower hard limit, that limit is kept
            resource.setrlimit(limit, (maximum, maximum))
    environment = make_chat_environment() if chat else make_environment()
    templates: dict[str, Template] = {}
    cpu_times: dict[str, tuple[int, float]] = {}  # source -> (rows, CPU seconds)
    while True:
        try:
            request = _receive(0, None)
        except EOFError:
            return
        _allow_cpu_seconds(cpu_seconds)
        source, answer = request["source"], {"number": request["number"]}
        try:
            if source not in templates:
                templates.clear()  # only the latest template is kept in memory
                templates[source] = compile_source(environment, source)
            if "names" in request:
                rows, seconds_before = cpu_times.get(source, (0, 0.0))
                start = time.process_time()
                answer["text"] = render_bounded(templates[source], request["names"])
                rows, seconds = rows + 1, seconds_before + time.process_time() - start
                cpu_times[source] = rows, seconds
                if seconds > cpu_seconds + AVERAGE_CPU_SECONDS * rows:
                    raise TemplateLimitError(f"took {seconds:.1f} seconds for {rows:,} rows")
        except TemplateInvalidError as error:
            answer |= {"invalid": error.message, "line": error.line}
        except TemplateLimitError as error:
            answer["limit"] = str(error)
        except TemplateFailedError as error:
            answer |= {"kind": error.kind, "message": error.message[:2000], "missing": error.missing}
        _send(out, answer)


def _allow_cpu_seconds(seconds: int) -> None:
    """Let the kernel end this process after this many more seconds of CPU time."""
    import resource

    soft = int(time.process_time()) + 1 + seconds  # RLIMIT_CPU counts whole seconds from the start of the process
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _send(pipe: int, message: Mapping[str, Any]) -> None:
    body = json.dumps(message, default=str).encode()
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _receive(pipe: int, deadline: float | None) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, deadline))
    return json.loads(_read(pipe, length, deadline))


def _read(pipe: int, size: int, deadline: float | None) -> bytes:
    """Read `size` bytes. Raises: EOFError when the pipe is closed, TimeoutError at the deadline (monotonic seconds)."""
    parts: list[bytes] = []
    while size:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        data = os.read(pipe, min(size, 1 << 20))
        if not data:
            raise EOFError
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
