"""What `vlmrl merge` writes is served by vLLM, by the very line that `merge` prints, and answers as our engine."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from command_line import own_process
from processes import free_endpoint
from small_runs import make_place, train
from tinyworld import image

from vlmrl.data.encode import Encoder
from vlmrl.model.load import load_model, load_processor, stop_ids_of
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Model
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.types import Media, Message, Row, SamplingParams

pytestmark = pytest.mark.slow

RECIPE = """
rollout = {prompts_per_step = 3, samples_per_prompt = 3, max_new_tokens = 8}
train.steps = 1
optim.lr = 1e-2
eval = {every_steps = 0, max_rows = 2}
"""
QUESTIONS = [("same or different?", [(56, 56), (84, 56)]), ("which digit?", [(56, 84)]), ("yes or no?", [])]
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def named(folder: Path) -> dict[str, str]:
    """The CPU build is installed as vllm-cpu, and its own command asks for the version of a package called vllm."""
    try:
        version("vllm")
        return {}
    except PackageNotFoundError:
        found = f"{version('vllm-cpu')}+cpu"
        info = folder / "named" / f"vllm-{found}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
        return {"PYTHONPATH": os.pathsep.join([str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextmanager
def served(line: str, *more: str, folder: Path) -> Iterator[str]:
    """The address of a server that the line starts in a folder; it is ended, and nothing of it is left."""
    address = free_endpoint()
    program, *words = shlex.split(line)
    place = ["--host", "127.0.0.1", "--port", address.partition(":")[2]]
    command = [sys.executable, shutil.which(program), *words, *place, *more]
    log = folder / "server.log"
    with open(log, "wb") as out:
        server = warm.Popen(command, cwd=folder, env=os.environ | named(folder), stdout=out, stderr=out)
    try:
        for _ in range(1800):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://{address}/health", timeout=10).read()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        yield f"http://{address}"
    finally:
        left: list[psutil.Process] = []
        if server.poll() is None:
            process = psutil.Process(server.pid)
            family = [process, *process.children(recursive=True)]
            server.send_signal(signal.SIGTERM)
            left = psutil.wait_procs(family, timeout=60)[1]
            for one in left:
                one.kill()
        server.wait()
    assert not left


def ask(address: str, model: str, text: str, sizes: list[tuple[int, int]], max_tokens: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for k, size in enumerate(sizes):
        png = io.BytesIO()
        image(k, *size).save(png, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=120).read())


def expected(folder: Path, max_tokens: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, greedy answer ids) of the questions, by the built-in engine."""
    settings = Model(path=str(folder), dtype="float32", device="cpu")
    model, processor = load_model(settings), load_processor(settings)
    encoder, made = Encoder(processor), []
    params = SamplingParams(0.0, max_new_tokens=max_tokens, stop_ids=stop_ids_of(model, processor.tokenizer))
    engine = TorchEngine(Policy(model), processor.tokenizer)
    for text, sizes in QUESTIONS:
        row = Row("row", "source", "task", {}, tuple(Media(f"{text}-{k}", *size) for k, size in enumerate(sizes)))
        pictures = [image(k, *size) for k, size in enumerate(sizes)]
        prompt = encoder.encode(row, [Message("user", "<image>" * len(sizes) + text)], pictures)
        [[answer]] = engine.generate([SamplingRequest(prompt, 1, 0)], params)
        made.append((prompt.prompt_ids, answer.token_ids))
    return made


def test_the_merged_model_is_served_by_the_line_that_merge_prints(tiny_folder, tmp_path, monkeypatch):
    warm.all_in_forks(monkeypatch)
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    run = train(make_place(tmp_path / "place", tiny_folder, RECIPE), tmp_path)
    merged = own_process("merge", run.id, "--step", "last", "--runs", tmp_path, "--out", "merged", cwd=tmp_path)
    assert merged.code == 0, merged.err
    [line] = [line.partition("serve it: ")[2] for line in merged.err.splitlines() if "serve it: " in line]
    want = expected(tmp_path / "merged", 12)
    options = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
    with served(line, *options, folder=tmp_path) as address:
        model = json.loads(urllib.request.urlopen(f"{address}/v1/models").read())["data"][0]["id"]
        for (text, sizes), (prompt_ids, ids) in zip(QUESTIONS, want, strict=True):
            answer = ask(address, model, text, sizes, 12)
            assert tuple(answer["prompt_token_ids"]) == prompt_ids
            assert tuple(answer["choices"][0]["token_ids"]) == ids
