"""Provenance of a run: code, packages, hardware."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlmrl.redaction.redact import excerpt, redact_text

MAX_DIFF_BYTES = 1_000_000
PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "tokenizers",
    "peft",
    "accelerate",
    "vllm",
    "flash-attn",
    "triton",
    "datasets",
    "pyarrow",
    "numpy",
    "scipy",
    "scikit-learn",
    "safetensors",
    "pillow",
    "pydantic",
    "jinja2",
    "huggingface-hub",
)
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "HF_HUB_OFFLINE",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "TOKENIZERS_PARALLELISM",
)
"""Environment variables that can change a result. Only these are recorded."""


def git_state(folder: Path | None = None) -> tuple[dict[str, Any] | None, str]:
    """Return ({commit, dirty}, diff of tracked files) of the repository of `folder`; (None, "") if there is none.

    Secrets in the diff are hidden. It is cut at 1 MB, and a last line then states this.
    """
    commit = _git(["rev-parse", "HEAD"], folder)
    if commit is None:
        return None, ""
    changed = _git(["status", "--porcelain", "--untracked-files=no"], folder) or b""
    dirty = bool(changed.strip())
    diff = _git(["diff", "HEAD", "--no-color", "--no-ext-diff"], folder) or b"" if dirty else b""
    text = excerpt(diff.decode("utf-8", "replace"), MAX_DIFF_BYTES)
    if len(diff) > MAX_DIFF_BYTES:
        text += f"\n[cut: the diff has {len(diff)} bytes; the first {MAX_DIFF_BYTES} are kept]\n"
    return {"commit": commit.decode().strip(), "dirty": dirty}, redact_text(text)


def _git(args: list[str], folder: Path | None) -> bytes | None:
    command = ["git", *(("-C", str(folder)) if folder else ()), *args]
    try:
        process = subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


@lru_cache(maxsize=1)
def packages() -> dict[str, str]:
    """Return the installed versions of packages that can change a result. Only metadata is read."""
    from importlib import metadata

    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


@lru_cache(maxsize=1)
def source_sha256() -> str:
    """Return a hash of all Python and template files of vlmrl, which identifies the code even without git."""
    root = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".jinja", ".html") and path.is_file():
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def usable_threads() -> int:
    """Return the number of threads that this process may use.

    It is OMP_NUM_THREADS, but at most one thread per core that the process may run on. If the variable is not set, it
    is the share of these cores among the processes that torchrun started on this machine.
    """
    cores = usable_cores()
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if num_threads.isdigit() and int(num_threads):
        return min(cores, int(num_threads))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def usable_cores() -> int:
    """Return the number of CPU cores that this process may run on: its affinity if the system has one, else all."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """Return the CPU cores that this process may use, memory and GPUs. torch is used only if it is already imported."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = None
    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_cores": usable_cores(),
        "memory_bytes": memory,
        "gpus": _gpus(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _gpus() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [{"name": p.name, "memory_bytes": p.total_memory} for p in properties]
    gpus: list[dict[str, Any]] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        gpus += [{"name": line.partition(":")[2].strip()} for line in lines if line.startswith("Model")]
    return gpus
