"""Runs scripts in forks of one interpreter, which has imported what takes long: torch, transformers, TRL.

Reads a JSON object a line: `script`, `words`, `folder` (where it runs), `out` (the file for all that it prints).
Answers each with a line: its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import warm


def warm_up(scripts: Path) -> None:
    """Import modules and compute nothing: threads would not survive the fork."""
    sys.path.insert(0, str(scripts))
    import kill
    import torch.distributed.launcher.api  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    kill.warm_up()


def run(script: str, words: list[str], folder: str, out: str) -> int:
    """Run a script in a fork of this process, with its own folder first on the path. Returns the exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        with open(out, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        os.environ["TMPDIR"] = folder
        os.environ[warm.NEST] = "all"  # what a script starts begins as a fork, too
        warm.nest(all_processes=True)
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        print("" if isinstance(leave.code, (int, type(None))) else leave.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import prints is no answer
    warm.BASE[:] = sys.path[1:]
    warm_up(Path(sys.argv[1]))
    for line in sys.stdin:
        print(run(**json.loads(line)), file=answers)
