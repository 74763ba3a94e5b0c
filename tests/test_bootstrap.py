"""scripts/bootstrap.sh: modules are compiled at installation where Python is told not to keep what it compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bootstrap.sh"


@pytest.mark.parametrize("never_kept", [True, False])
def test_modules_are_compiled_once_where_python_would_do_it_at_each_start(tmp_path: Path, never_kept: bool) -> None:
    for name in ("scripts", "bin", "env/bin", "vlmrl"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    for name in ("pyproject.toml", "some.lock", "vlmrl/a.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    uv = tmp_path / "bin/uv"
    uv.write_text('#!/bin/sh\necho "$@" >> calls\n')
    uv.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"} if never_kept else {}
    line = "set -eu; . scripts/bootstrap.sh; install_lock env some.lock"
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, check=True, capture_output=True)
    packages, own = (tmp_path / "calls").read_text().splitlines()
    assert packages.endswith(f"--no-deps{' --compile-bytecode' * never_kept} -r some.lock") and "--editable" in own
    assert len(list((tmp_path / "vlmrl").glob("__pycache__/*.pyc"))) == int(never_kept)
