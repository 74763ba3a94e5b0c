"""Count the files and package borders that a dataset row crosses on its way to a gradient.

    python scripts/way_of_a_row.py [--json] [--pairs] [--folder DIR]

The run has three steps on the table that `vlmrl init` writes: one process, the built-in engine, the tiny model, an own
reward in a worker, no validation and no checkpoint due, no lines for the console. A profile hook sees every call in the
main process and in its threads during the second step. It is set before anything of vlmrl is imported. A file counts if
one of its functions is called then. The reward worker is counted apart, from its first call of the reward on.

Two files are a border if they are in different packages and a function of one calls a function of the other, directly
or through a library. A package is a folder right below `vlmrl/`; the files beside these folders, such as types.py, are
one more. Other things could be called borders, too (136 pairs of functions, 124 of a file and a function of another
package, 33 of packages where these are 60). Pairs of functions grow with each helper and each list comprehension that
code is divided into, and pairs of packages hide how many files know each other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "vlmrl"
COMMANDS = (("init", "count"), ("demo", "--model-only", "tiny", "--data", "count/recipe.toml"))
SETTINGS = (
    *("model.path=tiny", "train.steps=3", "rollout.max_new_tokens=24", "train.tokens_per_row=300"),
    *("eval.every_steps=0", "eval.at_start=false", "checkpoint.every_steps=0"),
)
LOOP = (str(ROOT / "train" / "loop.py"), "stop_reason")
"""The function that the training calls once before each step and once after the last."""
REWARD_FILE = "reward.py"
REWARD = """
def score(x):
    return {"format": len(set(x.response)) / 256, "answer": 0.0}
"""
"""A reward that tells the responses of a model with random weights apart, so that the step has a gradient."""
OUT_ENV = "WAY_OF_A_ROW"
"""Names the file to which a reward worker appends its calls."""
Pair = tuple[str, str]
"""A caller and the function that it called, as "train/loop.py:stop_reason"; "" = no function of vlmrl called it."""


class Trace:
    """The calls between functions of vlmrl, as a profile hook sees them while `on` is true."""

    def __init__(self, mark: Callable[[CodeType], bool | None], see: Callable[[Pair], None]) -> None:
        """Trace nothing yet.

        Args:
            mark: gets each code object that is called. It returns whether to trace from now on; None changes nothing.
            see: gets each call that is traced.
        """
        self.on, self._mark, self._see = False, mark, see
        self._names: dict[CodeType, str] = {}

    def start(self) -> None:
        """Set the hook for this thread and for all threads that start later."""
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """See one event of the interpreter."""
        if event != "call":
            return
        change = self._mark(frame.f_code)
        self.on = self.on if change is None else change
        if self.on and (name := self._name(frame)):
            caller = frame.f_back
            while caller is not None and not self._name(caller):
                caller = caller.f_back
            self._see(("" if caller is None else self._name(caller), name))

    def _name(self, frame: FrameType) -> str:
        """Return a function's file below `vlmrl/` and its name; "" for other code and for the top level of a module."""
        code = frame.f_code
        if code not in self._names:
            path = Path(code.co_filename)
            inside = path.is_relative_to(ROOT) and code.co_name != "<module>"
            self._names[code] = f"{path.relative_to(ROOT).as_posix()}:{code.co_name}" if inside else ""
        return self._names[code]


def second_step() -> Callable[[CodeType], bool | None]:
    """Return the mark of the second step: from the second call of the loop's function to the third."""
    calls = 0

    def mark(code: CodeType) -> bool | None:
        nonlocal calls
        if (code.co_filename, code.co_name) != LOOP:
            return None
        calls += 1
        return calls == 2

    return mark


def counted(pairs: Iterable[Pair]) -> dict[str, Any]:
    """Return the numbers of files and borders, the files, and the pairs of functions that cross a border."""
    pairs = set(pairs)
    files = sorted({file_of(function) for _, function in pairs})
    calls = sorted(pair for pair in pairs if pair[0] and package(pair[0]) != package(pair[1]))
    borders = {(file_of(caller), file_of(function)) for caller, function in calls}
    return {"files": len(files), "borders": len(borders), "list": files, "pairs": calls}


def file_of(function: str) -> str:
    """Return the file of a function."""
    return function.partition(":")[0]


def package(function: str) -> str:
    """Return the package of a function: the folder right below `vlmrl/`, or "" for the files beside these folders."""
    return function.partition("/")[0] if "/" in function else ""


def trace_worker() -> None:
    """Trace this process if it is a worker of the traced run: the start of Python calls this."""
    seen = set[Pair]()

    def see(pair: Pair) -> None:
        if pair not in seen:
            seen.add(pair)
            with Path(os.environ[OUT_ENV]).open("a", encoding="utf-8") as out:
                out.write(json.dumps(pair) + "\n")

    Trace(lambda code: True if Path(code.co_filename).name == REWARD_FILE else None, see).start()


def traced_run(folder: Path) -> dict[str, Any]:
    """Train in this process and in the folder; return the counts of the main process and of the reward worker."""
    hook, worker_calls = folder / "hook", folder / "worker.jsonl"
    hook.mkdir()
    start = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import way_of_a_row as w; w.trace_worker()"
    (hook / "sitecustomize.py").write_text(start, encoding="utf-8")
    os.chdir(folder)
    pairs = set[Pair]()
    Trace(second_step(), pairs.add).start()
    from vlmrl.cli.app import main

    for arguments in COMMANDS:
        _run(main, arguments)
    Path("count", REWARD_FILE).write_text(REWARD, encoding="utf-8")
    os.environ |= {OUT_ENV: str(worker_calls), "PYTHONPATH": str(hook)}
    _run(main, ("train", "count/recipe.toml", "--quiet", *(f"--set={setting}" for setting in SETTINGS)))
    sys.setprofile(None)
    lines = worker_calls.read_text(encoding="utf-8").splitlines()
    return counted(pairs) | {"worker": counted((str(a), str(b)) for a, b in map(json.loads, lines))}


def _run(main: Callable[[], None], arguments: Iterable[str]) -> None:
    """Run a command of vlmrl in this process; raise an error with its output if it fails."""
    sys.argv = ["vlmrl", *arguments]
    with tempfile.TemporaryFile("w+") as out:
        try:
            with redirect_stdout(out), redirect_stderr(out):
                main()
        except SystemExit as end:
            if end.code:
                out.seek(0)
                raise RuntimeError(f"vlmrl {' '.join(arguments)} failed:\n{out.read()}") from None


def main() -> None:
    """Trace a run in a process of its own, since the hook must be there first, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pairs", action="store_true", help="also print the functions that call across borders")
    parser.add_argument("--folder", type=Path, help="an empty folder for the run, which stays; default: it is deleted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = traced_run(options.folder or Path(folder))
    if options.json:
        print(json.dumps(result))
        return
    for name, part in (("main process", result), ("reward worker", result["worker"])):
        print(f"{name}: {part['files']} files, {part['borders']} borders, {len(part['pairs'])} pairs of functions")
        print("".join(f"  {file}\n" for file in part["list"]), end="")
        if options.pairs:
            print("".join(f"    {caller} -> {file}\n" for caller, file in part["pairs"]), end="")


if __name__ == "__main__":
    main()
