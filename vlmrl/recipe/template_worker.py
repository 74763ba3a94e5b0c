"""Process that renders templates which could run forever or fill the memory; the operating system enforces limits.

The process is started for the first such template and ends when the process that started it ends. A request to compile
is {"source"}; a request to render also has "names".
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vlmrl.redaction.redact import CUT_MARGIN, excerpt
from vlmrl.workers.frames import WHOLE, Channel, Frame, pack
from vlmrl.workers.pool import Limits, Lost, Pool, Worker
from vlmrl.workers.serve import Answer, Handler, limit_cpu, limit_memory

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
MOST_MESSAGE_CHARS = 2000
"""Maximum number of characters of an exception's text in a message for people."""
SENT_CHARS = MOST_MESSAGE_CHARS + CUT_MARGIN + 1
"""Maximum number of characters that the process sends of it: all that is looked at to hide secrets and then to cut."""


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
        message = excerpt(self.message, MOST_MESSAGE_CHARS)
        return message if self.missing or self.kind in _OF_JINJA else f"{self.kind}: {message}"


_OF_JINJA = (
    "TemplateError", "TemplateRuntimeError", "UndefinedError", "SecurityError", "FilterArgumentError",
    "TemplateNotFound", "TemplateAssertionError",
)  # fmt: skip


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


class TemplateWorker(Pool[int, dict[str, Any]]):
    """Connection to the template process. Threads may share it; it handles one request at a time.

    Args:
        cpu_seconds: maximum CPU time for one row, in seconds.
        memory_mb: maximum address space of the whole process, in MiB.
        chat: whether the templates are chat templates of models, which need another sandbox.
    """

    def __init__(self, cpu_seconds: int = CPU_SECONDS, memory_mb: int = MEMORY_MB, *, chat: bool = False) -> None:
        setup = {"cpu_seconds": cpu_seconds, "memory_mb": memory_mb, "chat": chat}
        super().__init__(__name__, setup, size=1, limits=Limits(ANSWER_SECONDS, ANSWER_SECONDS))
        self._cpu_seconds, self._lock, self._owner = cpu_seconds, threading.Lock(), 0

    def compile(self, source: str) -> None:
        """Check that the template compiles within the limits. Raises: TemplateInvalidError or TemplateLimitError."""
        self._ask({"source": source})

    def render(self, source: str, names: Mapping[str, Any]) -> str:
        """Render a template. Raises: TemplateLimitError, TemplateInvalidError or TemplateFailedError."""
        return self._ask({"source": source, "names": dict(names)})["text"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._owner != os.getpid():  # a forked process starts its own: it must not read its parent's answers
                self._workers, self._owner = [], os.getpid()
            self._request = request
            answer = self.run([[0]])[0]
        if "limit" in answer:
            raise TemplateLimitError(answer["limit"])
        if "invalid" in answer:
            raise TemplateInvalidError(answer["invalid"], answer["line"])
        if "kind" in answer:
            raise TemplateFailedError(answer["kind"], answer["message"], answer["missing"])
        return answer

    def _message(self, worker: Worker, keys: Sequence[int]) -> bytes:
        return pack(self._request)

    def _outcome(self, worker: Worker, keys: Sequence[int], frame: Frame) -> list[tuple[int, dict[str, Any]]]:
        return [(0, frame.body)]

    def _lost(self, worker: Worker, lost: Lost) -> NoReturn:
        if lost.why == "time":
            raise TemplateLimitError(f"gave no answer within {ANSWER_SECONDS:g} seconds")
        if lost.why == "garbled":
            raise TemplateLimitError("answered for another row")
        if lost.code == -signal.SIGXCPU:
            raise TemplateLimitError(f"takes more than {self._cpu_seconds} seconds for a row")
        raise TemplateLimitError("ended its process" + ("" if lost.code is None else f" (exit code {lost.code})"))


def begin(setup: dict[str, Any], channel: Channel) -> tuple[dict[str, Any], Handler]:
    """Begin as the template process. Return the handler of requests."""
    from vlmrl.recipe.template import make_chat_environment, make_environment

    limit_memory(setup["memory_mb"] << 20)
    environment = make_chat_environment() if setup["chat"] else make_environment()
    templates: dict[str, Template] = {}
    cpu_times: dict[str, tuple[int, float]] = {}  # source -> (rows, CPU seconds)

    def rendered(source: str, names: Mapping[str, Any] | None) -> dict[str, Any]:
        if source not in templates:
            templates.clear()  # only the latest template is kept in memory
            templates[source] = compile_source(environment, source)
        if names is None:
            return {}
        rows, seconds_before = cpu_times.get(source, (0, 0.0))
        start = time.process_time()
        text = render_bounded(templates[source], names)
        rows, seconds = rows + 1, seconds_before + time.process_time() - start
        cpu_times[source] = rows, seconds
        if seconds > setup["cpu_seconds"] + AVERAGE_CPU_SECONDS * rows:
            raise TemplateLimitError(f"took {seconds:.1f} seconds for {rows:,} rows")
        return {"text": text}

    def answer(body: dict[str, Any], blobs: Sequence[bytes]) -> Iterator[Answer]:
        limit_cpu(setup["cpu_seconds"])
        try:
            said = rendered(body["source"], body.get("names"))
        except TemplateInvalidError as error:
            said = {"invalid": error.message, "line": error.line}
        except TemplateLimitError as error:
            said = {"limit": str(error)}
        except TemplateFailedError as error:
            said = {"kind": error.kind, "message": error.message[:SENT_CHARS], "missing": error.missing}
        yield WHOLE, said, ()

    return {}, answer
