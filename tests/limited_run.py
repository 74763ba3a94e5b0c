"""A run whose process gets an address-space limit in the middle.

    python limited_run.py RECIPE RUNS WHERE MIB [KEY=VALUE ...]

WHERE: `rehearsal`, or `update N`: the limit holds during the rehearsal, or during update N (from 0). It is what the
process has before it and so many MiB more. Memory that runs out is then refused for real, by the system.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from vlmrl.cli.progress import ConsoleWatcher
from vlmrl.errors import exit_of
from vlmrl.process import leave
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.setup.run_records import Labels, start_run
from vlmrl.train import rl
from vlmrl.train.start import run_session

FAR_AWAY = 2**45


def set_limit(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))


def used_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_during(name: str, call: int, mib: int) -> None:
    """Set the limit during call number `call` of a function of the step loop, and no longer: saving needs some too."""
    run, calls = getattr(rl, name), []

    def limited(*args, **kwargs):
        calls.append(name)
        if len(calls) != call + 1:
            return run(*args, **kwargs)
        set_limit(used_bytes() + mib * 2**20)
        try:
            return run(*args, **kwargs)
        finally:
            set_limit(FAR_AWAY)

    setattr(rl, name, limited)


def main(recipe: str, root: str, where: str, mib: str, *overrides: str) -> None:
    set_limit(FAR_AWAY)
    name, _, call = where.partition(" ")
    limit_during("rehearse" if name == "rehearsal" else "learn", int(call or 0), int(mib))
    loaded, _ = fill_for_run(load_recipe(Path(recipe), overrides=overrides, kind="rl"), Path(root))
    run = start_run(loaded, Path(root), ["vlmrl"], Labels())
    try:
        run_session(run, loaded.recipe, Path(root), ConsoleWatcher(), None)
    except Exception as error:
        code, message = exit_of(error)
        print(message, file=sys.stderr)
        leave(code)  # as a rank does: a library that lacked memory may crash when the interpreter is taken apart


if __name__ == "__main__":
    main(*sys.argv[1:])
