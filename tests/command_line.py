"""The `vlmrl` command as tests run it: in a process of its own, as for a person, or in this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm

from vlmrl.errors import VlmrlError

COMMAND = (sys.executable, "-m", "vlmrl")


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


def settings(*pairs: str) -> list[str]:
    """Words of a command: each `key=value` with its `--set`."""
    return [word for pair in pairs for word in ("--set", pair)]


HEAVY = {"train", "sft", "eval", "generate", "merge", "demo"}
"""Commands that load torch and transformers: each begins as a fork of a process that has (warm.py)."""


def nested(words: Iterable[Any]) -> dict[str, str]:
    """The variable that lets the ranks of such a command begin as forks, too."""
    return {warm.NEST: "1"} if {"--gpus", "--nnodes"} & {*map(str, words)} else {}


def own_process(*words: Any, cwd: Path, env: Mapping[str, str] | None = None, new: bool = False) -> Done:
    """Run a command in a process of its own, in the folder `cwd`; `new`: its interpreter has loaded nothing before."""
    command, new = [*COMMAND, *map(str, words)], new or words[0] not in HEAVY
    environment = {**({} if new else nested(words)), **os.environ, **(env or {})}
    run = subprocess.run if new else warm.run
    done = run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=600)
    return Done(done.returncode, done.stdout, done.stderr)


def started(*words: Any, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    """A command in a process of its own that goes on beside the test; `more` as for Popen, output is piped."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*COMMAND, *map(str, words)]
    if words[0] not in HEAVY or more.get("preexec_fn"):
        return subprocess.Popen(command, cwd=cwd, text=True, **pipes | more)
    more["env"] = {**nested(words), **more.get("env", os.environ)}
    return warm.Popen(command, cwd=cwd, text=True, **pipes | more)


def this_process(*words: Any, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """Run a command in this process: the same entry point, exit codes and output, without loading torch again."""
    from vlmrl.cli.app import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    if words[0] == "merge":
        warm.prove_in_forks()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["vlmrl", *map(str, words)])
        patch.chdir(cwd)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


def answered(*words: Any) -> dict[str, Any]:
    """What a command of this process answers to `--json`: one line, and no error."""
    done = this_process(*words, "--json", cwd=Path.cwd())
    assert done.code == 0 and done.out.count("\n") == 1, done
    return json.loads(done.out)


def refused(*words: Any) -> VlmrlError:
    """The error that ends a command of this process, before it is printed."""
    from typer.testing import CliRunner

    from vlmrl.cli.app import app

    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, VlmrlError), result.output
    return result.exception
