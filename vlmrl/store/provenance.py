"""What a run was made with: code, packages, hardware. Never a secret."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

HIDDEN = "<redacted>"
MAX_DIFF_BYTES = 1_000_000
PACKAGES = (
    "torch", "torchvision", "transformers", "tokenizers", "peft", "accelerate", "vllm", "flash-attn", "triton",
    "datasets", "pyarrow", "numpy", "scipy", "scikit-learn", "safetensors", "pillow", "pydantic", "jinja2",
    "huggingface-hub",
)  # fmt: skip
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HF_HUB_OFFLINE",
    "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "SLURM_JOB_ID", "TOKENIZERS_PARALLELISM",
)  # fmt: skip
"""Environment variables that change a result; no other is recorded."""

_SURE = r"(?:api[_-]?key|access[_-]?key|private[_-]?key|secret|passwd|password|credentials?)"
_MAYBE = r"(?:key|token|auth)"
_SURE_NAME = re.compile(rf"(?:^|[._-]){_SURE}$", re.IGNORECASE)
_MAYBE_NAME = re.compile(rf"(?:^|[._-]){_MAYBE}$", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    rf"""(?<![\w.-])(?P<name>[\w.-]{{0,80}}?(?:{_SURE}|{_MAYBE}))(?P<mid>["']?\s*[=:]\s*)(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s"',;#]+)""",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|(?<![\w-])sk-[A-Za-z0-9_-]{16,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|AIza[\w-]{30,}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}|(?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)|(?<=[Bb]earer )[\w.~+/-]{16,}=*"
)


def is_secret(name: str, value: str) -> bool:
    """Whether a value under a name should be hidden.

    `api_key`, `password` and the like always; `token`, `key`, `auth` when the value looks like one: so `stop_token =
    "<|im_end|>"`, which a resume needs, stays, as do plain numbers.
    """
    if not value or re.fullmatch(r"[\d._]+|true|false|null|none", value, re.IGNORECASE):
        return False
    if _SURE_NAME.search(name):
        return True
    return bool(_MAYBE_NAME.search(name) and re.fullmatch(r"(?=.*\d)[\w.+/=-]{12,}", value))


def redact_text(text: str) -> str:
    """The text with every token-shaped string, and the value of every `name = value` that is a secret, hidden."""

    def hide(match: re.Match[str]) -> str:
        value = match["value"]
        bare = value.strip("\"'")
        if not is_secret(match["name"], bare):
            return match[0]
        quote = value[0] if value[0] in "\"'" else ""
        return f"{match['name']}{match['mid']}{quote}{HIDDEN}{quote}"

    return _ASSIGNMENT.sub(hide, _SECRET_VALUE.sub(HIDDEN, text))


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token X`, `--hf-token=X`, `--set a.api_key=X`, and any token-shaped string."""
    result: list[str] = []
    hide_next = False
    for word in map(str, argv):
        name, equals, value = word.partition("=")
        flag = name.startswith("-") and bool(_SURE_NAME.search(name) or _MAYBE_NAME.search(name))
        if hide_next and not word.startswith("-"):
            result.append(HIDDEN)
        elif equals and value and (flag or is_secret(name, value)):
            result.append(f"{name}={HIDDEN}")
        else:
            result.append(_SECRET_VALUE.sub(HIDDEN, word))
        hide_next = flag and not equals
    return result


def redact_value(value: Any, name: str = "") -> Any:
    """A JSON value with the strings under secret names, and token-shaped strings anywhere, hidden."""
    if isinstance(value, Mapping):
        return {str(k): redact_value(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(v, name) for v in value]
    if isinstance(value, str):
        return HIDDEN if is_secret(name, value) else _SECRET_VALUE.sub(HIDDEN, value)
    return value


def git_state(folder: Path | None = None) -> tuple[dict[str, Any] | None, str]:
    """({commit, dirty}, diff of tracked files) of the repository that holds `folder`; (None, "") outside of one.

    The diff has its secrets hidden and is cut at 1 MB, said in its last line.
    """
    commit = _git(["rev-parse", "HEAD"], folder)
    if commit is None:
        return None, ""
    changed = _git(["status", "--porcelain", "--untracked-files=no"], folder) or b""
    dirty = bool(changed.strip())
    diff = _git(["diff", "HEAD", "--no-color", "--no-ext-diff"], folder) or b"" if dirty else b""
    text = diff[:MAX_DIFF_BYTES].decode("utf-8", "replace")
    if len(diff) > MAX_DIFF_BYTES:
        text += f"\n[cut: the diff has {len(diff)} bytes, {MAX_DIFF_BYTES} are kept]\n"
    return {"commit": commit.decode().strip(), "dirty": dirty}, redact_text(text)


def _git(args: list[str], folder: Path | None) -> bytes | None:
    command = ["git", *(("-C", str(folder)) if folder else ()), *args]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def packages() -> dict[str, str]:
    """Installed versions of the packages that can change a result. Reads metadata only, imports nothing."""
    from importlib import metadata

    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


@lru_cache(maxsize=1)
def source_sha256() -> str:
    """One hash over the package's own Python and template files: which vlmrl this was, inside or outside of git."""
    root = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".jinja", ".html") and path.is_file():
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def usable_cores() -> int:
    """Threads this process may use: OMP_NUM_THREADS, at most one a core it may run on; where that is not set, its share
    of these cores among the processes that torchrun started on this machine.
    """
    cores = _cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked):
        return min(cores, int(asked))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _cores() -> int:
    """CPU cores this process may run on: its affinity, where the system knows one, else all."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """CPU cores this process may run on, memory, GPUs. Does not import torch; asks it when it is already there."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = None
    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_cores": _cores(),
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
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [{"name": p.name, "memory_bytes": p.total_memory} for p in found]
    gpus: list[dict[str, Any]] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        gpus += [{"name": line.partition(":")[2].strip()} for line in lines if line.startswith("Model")]
    return gpus
