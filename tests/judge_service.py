"""A service on loopback that a reward calls, in a process of its own: it can be killed and started again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

REWARD = """
import urllib.request
from vlmrl import RewardUnavailable

def score(x):
    try:
        call = urllib.request.Request("http://127.0.0.1:{port}/", x.response.encode("utf-8", "replace"))
        with urllib.request.urlopen(call, timeout=5) as reply:
            return float(reply.read())
    except OSError as error:
        raise RewardUnavailable(f"the judge does not answer: {{error}}")
"""
"""Reward that asks the service; `{port}` is its port. The least score is 0.25."""
SERVER = """
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.02)
        score = str(0.25 + len(set(text)) / 64).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(score)))
        self.end_headers()
        self.wfile.write(score)
    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
"""


class Judge:
    """The service at a free port; `start` and `kill` it as often as you like. As a context manager it runs inside."""

    def __init__(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Judge:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and return when it listens."""
        self._process = subprocess.Popen([sys.executable, "-c", SERVER, str(self.port)])
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError("the service does not start")

    def kill(self) -> None:
        """Kill it: connections to its port are refused then."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def write_reward(self, path: Path) -> None:
        """Write a reward file whose `score` asks this service."""
        path.write_text(REWARD.format(port=self.port))
