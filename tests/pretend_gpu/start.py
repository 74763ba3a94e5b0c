"""Environment of a pretended GPU, and commands under it: `scripts/pretend-gpu` runs this file.

    scripts/pretend-gpu vlmrl train recipe.toml     run a command, and what it starts, on a pretended GPU
    scripts/pretend-gpu --all                       run what the tests leave out: see rest.py and vllm_wheel.py
    PRETEND_REPORT=seen-%p.json scripts/pretend-gpu ...   write what a GPU would have waited for, by function

Further variables: PRETEND_GPUS (1), PRETEND_GIB (79.1), PRETEND_COMPILE (see kernels.py).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUPPORTED = ("2.14.", "2.15.")
NVIDIA_SMI = """#!/bin/sh
i=0
while [ $i -lt ${PRETEND_GPUS:-1} ]; do
  echo "$i, GPU-70726574-656e-6465-642d-4750552d000$i, 4"
  i=$((i + 1))
done
"""


def headers() -> list[Path]:
    """Return the folders of CUDA's headers, which torch's CUDA build brings."""
    packages = Path(sysconfig.get_paths()["purelib"])
    return [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]


def why_not() -> str:
    """Return the reason why a GPU cannot be pretended here; "" if it can."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "a pretended GPU needs Linux on x86-64"
    if shutil.which("cc") is None:
        return "a pretended GPU needs a C compiler: apt-get install gcc libc6-dev"
    if not version("torch").startswith(SUPPORTED) or not all(folder.is_dir() for folder in headers()):
        return f"the pretended GPU supports CUDA builds of torch {SUPPORTED}, not {version('torch')}"
    return ""


def build() -> Path:
    """Compile the driver, once per version of its source. Return its folder."""
    source = HERE / "fake_cuda.c"
    key = hashlib.sha256(source.read_bytes() + str(headers()).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vlmrl-pretend-gpu" / key
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        flags = ["-O1", "-fPIC", "-shared", "-w", "-Wl,-soname,libcuda.so.1", *(f"-I{h}" for h in headers())]
        subprocess.run(["cc", *flags, "-o", made / "libcuda.so.1", source, "-lpthread", "-ldl"], check=True)
        (made / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
        (made / "nvidia-smi").write_text(NVIDIA_SMI)
        (made / "nvidia-smi").chmod(0o755)
        if not folder.exists():
            made.rename(folder)
    return folder


def environment(gpus: int | None = None) -> dict[str, str]:
    """Return the environment of a command on so many pretended GPUs; None = PRETEND_GPUS, else 1."""
    folder = build()
    number = int(os.environ.get("PRETEND_GPUS", "1")) if gpus is None else gpus
    before = {"PYTHONPATH": HERE / "hook", "LD_LIBRARY_PATH": folder, "PATH": folder}
    return os.environ | {
        **{name: os.pathsep.join(filter(None, [str(p), os.environ.get(name, "")])) for name, p in before.items()},
        "LD_PRELOAD": str(folder / "libcuda.so.1"),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PRETEND_GPUS": str(number),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number))),
    }


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"error: {reason}")
    words = [sys.executable, str(HERE / "rest.py"), *sys.argv[2:]] if sys.argv[1:2] == ["--all"] else sys.argv[1:]
    if not words:
        sys.exit(f"error: no command\n\n{__doc__}")
    os.execvpe(words[0], words, environment())
