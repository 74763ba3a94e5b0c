"""`vlmrl fetch` against a hub on this machine: the real client, a server that knows one model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from command_line import Done, own_process

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny"


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path) -> Iterator[tuple[dict[str, str], set[str]]]:
    """(environment of a client, names of files the hub lacks): the tiny model as `someone/tiny`."""
    missing: set[str] = set()

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(send=False)

        def do_GET(self) -> None:
            self.answer(send=True)

        def answer(self, send: bool) -> None:
            path = self.path.partition("?")[0]
            files = sorted(p for p in tiny_folder.iterdir() if p.is_file() and p.name not in missing)
            if path.startswith(f"/api/models/{NAME}"):
                if "/tree/" in path:
                    told = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": etag(p)} for p in files]
                else:
                    told = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": p.name} for p in files]}
                return self.say(200, json.dumps(told).encode(), send, {"Content-Type": "application/json"})
            wanted = [p for p in files if path.startswith(f"/{NAME}/resolve/") and path.endswith(f"/{p.name}")]
            if not wanted:
                return self.say(404, b"", send, {"X-Error-Code": "EntryNotFound"})
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(wanted[0])}"'}
            return self.say(200, wanted[0].read_bytes(), send, headers)

        def say(self, code: int, body: bytes, send: bool, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if send:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield (
        {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        },
        missing,
    )
    server.shutdown()
    server.server_close()


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n' * 4)
    path = tmp_path / "far.toml"
    path.write_text(f'[model]\npath = "{NAME}"\ndevice = "cpu"\n[[data]]\npath = "rows.jsonl"\n')
    return path


def fetch(recipe: Path, env: dict[str, str]) -> Done:
    return own_process("fetch", recipe.name, "--json", cwd=recipe.parent, env=env)


@pytest.mark.slow
def test_what_is_missing_is_fetched_once_and_then_no_network_is_needed(hub, recipe: Path) -> None:
    env, _ = hub
    words = ["train", recipe.name, "--gpus", "2", "--dry-run", "--set", "reward.name=exact_match"]
    before = own_process(*words, cwd=recipe.parent, env=env)
    assert "torchrun" in before.out and "HF_HUB_OFFLINE" not in before.out, before.err
    first = fetch(recipe, env)
    assert first.json["needs"] == [
        {"kind": "model", "name": NAME, "state": "fetched"},
        {"kind": "data", "name": "rows.jsonl", "state": "local"},
    ], first.err
    nowhere = {**env, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    assert fetch(recipe, nowhere).json["needs"][0]["state"] == "in the cache"
    after = own_process(*words, cwd=recipe.parent, env=nowhere)
    assert "HF_HUB_OFFLINE=1" in after.out, after.err


@pytest.mark.slow
def test_a_model_without_its_weights_is_no_whole_model(hub, recipe: Path) -> None:
    env, missing = hub
    missing.add("model.safetensors")
    done = fetch(recipe, env)
    assert done.code == 2 and "is incomplete" in done.err and "Traceback" not in done.err


@pytest.mark.slow
def test_a_model_that_the_hub_lacks_is_named(hub, recipe: Path) -> None:
    env, _ = hub
    recipe.write_text(recipe.read_text().replace(NAME, "someone/other"))
    done = fetch(recipe, env)
    assert done.code == 2 and "someone/other" in done.err and "Traceback" not in done.err
