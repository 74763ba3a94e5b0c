"""A hub of one's own for tests: as much of the Hugging Face hub's HTTP interface as an upload needs, on localhost."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "x" * 34


@dataclass
class Hub:
    """Repositories by name: whether each is private, and its files after the last commit."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(*get(hub, self.path, self._known()))

        def do_POST(self) -> None:
            self._answer(*post(hub, self.path, self._body(), self._known()))

        def do_PUT(self) -> None:
            body = self._body()
            hub.objects[self.path.rpartition("/")[2]] = body
            self._answer(200, {})

        def _known(self) -> bool:
            hub.requests.append(f"{self.command} {self.path}")
            return self.headers.get("authorization") == f"Bearer {TOKEN}"

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        def _answer(self, status: int, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def get(hub: Hub, path: str, known: bool) -> tuple[int, Any]:
    if not known:
        return 401, {"error": "Invalid username or password."}
    if path.startswith("/api/whoami-v2"):
        return 200, {"type": "user", "name": "me", "orgs": []}
    name = "/".join(path.split("?")[0].removeprefix("/api/models/").split("/")[:2])
    if name not in hub.private:
        return 404, {"error": "Repository not found"}
    siblings = [{"rfilename": f} for f in hub.files.get(name, {})]
    return 200, {"id": name, "private": hub.private[name], "sha": "0" * 40, "siblings": siblings, "tags": []}


def post(hub: Hub, path: str, body: bytes, known: bool) -> tuple[int, Any]:
    if not known:
        return 401, {"error": "Invalid username or password."}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in hub.private:
            return 409, {"error": "You already created this model repo", "url": f"{hub.address}/{name}"}
        hub.private[name] = bool(asked.get("private", asked.get("visibility") == "private"))
        return 200, {"url": f"{hub.address}/{name}", "name": name}
    if "/preupload/" in path:
        asked = json.loads(body)["files"]
        modes = [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in asked]
        return 200, {"files": modes}
    if path.endswith("/info/lfs/objects/batch"):
        return 200, {"transfer": "basic", "objects": [upload(hub, o) for o in json.loads(body)["objects"]]}
    if "/commit/" in path:
        name = path.removeprefix("/api/models/").split("/commit/")[0]
        commit(hub, name, body)
        return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{hub.address}/{name}/commit/{'1' * 40}"}
    return 404, {"error": f"no {path}"}


def mode(name: str) -> str:
    return "lfs" if name.endswith(".safetensors") else "regular"


def upload(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "actions": {"upload": {"href": f"{hub.address}/objects/{asked['oid']}", "header": {}}}}


def commit(hub: Hub, name: str, body: bytes) -> None:
    files = hub.files.setdefault(name, {})
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            content = hub.objects[value["oid"]]
            assert hashlib.sha256(content).hexdigest() == value["oid"]
            files[value["path"]] = content
