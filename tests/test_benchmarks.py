"""Every benchmark runs, at a toy size: one that a page cites cannot die unnoticed. No figure is looked at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts" / "bench"
SHOWN = {
    "ap_intervals": "(5 cases, 2 draws each)",
    "demo_seeds": "pooled accuracy: +",
    "grading": "as_by_hand 417",
    "intervals": "(57 cases, 3 draws each)",
    "episodes": "growth_mib",
    "eval_kills": "holds: true",
    "eval_memory": "holds: true",
    "head": "bytes a logit",
    "judge_drill": "holds: true",
    "long_figures": "holds: true",
    "kill": "kill.py: 2 kills, 2 recovered, resumed runs bitwise equal: yes (1 runs)",
    "kill_ranks": '"finished": {"equal within tolerance": 1}',
    "merge": '"whole"',
    "pages": "holds: True",
    "path": "holds",
    "prefix_sweep": "log-prob",
    "prep": '"pairs": 4, "images": 8',
    "reward_check": "32 responses",
    "renders": "cairosvg_ms",
    "rewards": "rewards/s",
    "runs_list": '"runs": 10',
    "sandbox": "holds: True",
    "search": "holds: True",
    "save": '"case": "beside"',
    "shard_memory": "planned / by layer",
    "sharded_loading": "holds: true",
    "startup": "vlmrl --help",
    "stop_strings": "growth_plain",
    "svg_attacks": "largest_mb",
    "update_roofline": "vision forward",
    "vllm_families": "gemma3",
    "vs_trl": "parity       log-prob ",
}
"""Script -> a text that it prints when it has come to its end."""
WORDS = {"prefix_sweep": ["--out", "sweep"], "vs_trl": ["--out", "trl"], "update_roofline": ["--only", "card"]}
"""More words of a script. The other part of update_roofline is one of the GPU day."""
OTHERS = {"gpu": "test_gpu_bench.py", "gpu_day": "test_gpu_day.py"}
"""Scripts whose smoke runs have a test of their own in tests/unit/model."""
PARTS = {
    "flops",
    "gpu_kernels",
    "gpu_profile",
    "gpu_runs",
    "gpu_shards",
    "gpu_transfer",
    "gpu_world",
    "kill_world",
    "large_model",
    "path_images",
    "path_service",
    "speed_world",
}
"""Modules of the scripts, which nobody starts."""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run a script at its toy size: `smoke(name)` is (exit code, all that it printed)."""
    for_all = tmp_path_factory.mktemp("benchmarks")
    command = [sys.executable, str(ROOT / "tests" / "warm_scripts.py"), str(SCRIPTS)]
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=for_all,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert server.stdin is not None and server.stdout is not None

    def run(name: str, *words: str) -> tuple[int, str]:
        folder = for_all / name
        folder.mkdir()
        out = for_all / f"{name}.out"
        job = {
            "script": str(SCRIPTS / f"{name}.py"),
            "words": ["--smoke", *words],
            "folder": str(folder),
            "out": str(out),
        }
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline()), out.read_text()

    yield run
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_benchmark_runs_at_a_toy_size(smoke, name) -> None:
    code, shown = smoke(name, *WORDS.get(name, ()))
    assert code == 0 and "Traceback" not in shown and SHOWN[name] in shown, shown[-4000:]


def test_each_script_is_run_by_a_test() -> None:
    there = {path.stem for path in SCRIPTS.glob("*.py")}
    assert there == {*SHOWN, *OTHERS, *PARTS}
    for name in OTHERS.values():
        assert "smoke" in (ROOT / "tests" / "unit" / "model" / name).read_text()
    started = {path.stem for path in SCRIPTS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert started == {*SHOWN, *OTHERS}, "a part that is started, or a script that cannot be"


def test_each_script_that_a_text_names_is_there_and_is_run() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
    texts = [
        *pages,
        *ROOT.glob("vlmrl/**/*.py"),
        *ROOT.glob("recipes/**/*.toml"),
        *ROOT.glob("scripts/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
    ]
    named = {
        (path.name, name) for path in texts for name in re.findall(r"scripts/bench/(\w+)\.py", path.read_text("utf-8"))
    }
    assert len({name for place, name in named if place == "measurements.md"}) > 5
    assert {(place, name) for place, name in named if name not in {*SHOWN, *OTHERS}} == set()
    for path in pages:
        for name in re.findall(r"\bscripts/([\w-]+(?:/[\w.-]+)?)(?=[\s`)])", path.read_text("utf-8")):
            assert (ROOT / "scripts" / name).exists(), f"{path.name} names scripts/{name}"
