"""An OpenAI-compatible endpoint of one's own for tests: on loopback, answers by a script, and can be slow or broken."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Reply:
    """What the server sends. `declared`: the length it announces, when it then sends less."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    declared: int | None = None


@dataclass
class Endpoint:
    """A served endpoint.

    Args:
        requests: (headers, body as JSON) of every request, in order of arrival.
        most_at_once: largest number of requests that were in the server together.
    """

    address: str = ""
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]


Behaviour = Callable[[int, dict[str, Any]], Reply]
"""(number of the request from 0, its body) -> the reply."""


def completion(*texts: str, finish: str = "stop", tokens: int | None = 7) -> Reply:
    """A whole answer of chat completions."""
    choices = [
        {"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": finish}
        for i, t in enumerate(texts)
    ]
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return Reply(body=json.dumps({"choices": choices, **usage}).encode())


def turn(text: str | None = None, *calls: tuple[str, str], finish: str = "tool_calls", tokens: int | None = 7) -> Reply:
    """A turn of an episode. `calls`: (name, arguments as JSON text) of each call; its id is ID-NAME-NUMBER."""
    listed = [
        {"id": f"id-{name}-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, **({"tool_calls": listed} if listed else {})}
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    choice = {"index": 0, "message": message, "finish_reason": finish if listed else "stop"}
    return Reply(body=json.dumps({"choices": [choice], **usage}).encode())


def plays(*replies: Reply) -> Behaviour:
    """A server that gives the replies as the turns of every episode, whatever is in between."""
    return lambda number, body: replies[sum(m["role"] == "assistant" for m in body["messages"])]


def failure(status: int, message: str = "no", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, json.dumps({"error": {"message": message}}).encode(), named)


def prompt_of(body: Mapping[str, Any]) -> str:
    """The text of the last turn of a request."""
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def echo(number: int, body: dict[str, Any]) -> Reply:
    """An answer that depends on the prompt and the seed alone, as of a model at a temperature."""
    words = re.sub(r"\W+", " ", prompt_of(body)).strip()
    return completion(*(f"{words} {body.get('seed', 0) % 7}" for _ in range(body.get("n", 1))))


class Server(ThreadingHTTPServer):
    """Server that many clients may connect to at the same moment."""

    daemon_threads = True
    request_queue_size = 256


@contextmanager
def serve_endpoint(
    behaviour: Behaviour = echo, *, path: str = "/chat/completions$", port: int = 0
) -> Iterator[Endpoint]:
    """Serve on loopback. `path`: regular expression; a request to a path without it gets 404. `port`: 0 = any."""
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._reply(dict(parse_qsl(urlsplit(self.path).query)))

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            with endpoint.lock:
                number = len(endpoint.requests)
                endpoint.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                endpoint.now += 1
                endpoint.most_at_once = max(endpoint.most_at_once, endpoint.now)
            try:
                reply = behaviour(number, body) if re.search(path, self.path) else Reply(404)
            finally:
                with endpoint.lock:
                    endpoint.now -= 1
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body) if reply.declared is None else reply.declared))
            self.end_headers()
            self.wfile.write(reply.body)
            self.close_connection = reply.declared is not None

        def handle(self) -> None:
            # A client that was killed or gave up breaks the connection, or leaves half a request (ValueError).
            with suppress(BrokenPipeError, ConnectionResetError, ValueError):
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = Server(("127.0.0.1", port), Handler)
    endpoint.address = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
