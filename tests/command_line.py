"""The `vlmrl` command as tests run it: in a process of its own, as for a person, or in this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START = "import sys; from vlmrl.cli.app import main; main()"


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """What --json printed; fails when there is anything else on stdout."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def own_process(*words: Any, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """Run a command in a process of its own, in the folder `cwd`."""
    command = [sys.executable, "-c", START, *map(str, words)]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=600)
    return Done(done.returncode, done.stdout, done.stderr)


def this_process(*words: Any, cwd: Path) -> Done:
    """Run a command in this process: the same entry point, exit codes and output, without loading torch again."""
    from vlmrl.cli.app import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["vlmrl", *map(str, words)])
        patch.chdir(cwd)
        try:
            main()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return Done(code, out.getvalue(), err.getvalue())
