"""A run whose process gets an address-space limit in the middle.

    python limited_run.py RECIPE RUNS WHERE MIB [KEY=VALUE ...]

WHERE: `rehearsal`, or `update N`: the limit is set before the rehearsal, or before update N (from 0), at what the
process has by then and so many MiB more. Memory that runs out is then refused for real, by the system.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from vlmrl.cli.progress import ConsoleWatcher
from vlmrl.errors import exit_of
from vlmrl.recipe.load import load_recipe
from vlmrl.train import rl
from vlmrl.train.choices import settle_for_run
from vlmrl.train.start import Labels, run_session, start_run


def set_limit(mib: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mib * 2**20, resource.RLIM_INFINITY))


def limit_before(name: str, call: int, mib: int) -> None:
    """Set the limit before call number `call` of a function of the step loop."""
    run, calls = getattr(rl, name), []

    def limited(*args, **kwargs):
        calls.append(name)
        if len(calls) == call + 1:
            set_limit(mib)
        return run(*args, **kwargs)

    setattr(rl, name, limited)


def main(recipe: str, root: str, where: str, mib: str, *overrides: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 45, resource.RLIM_INFINITY))  # there is a limit, for now far away
    name, _, call = where.partition(" ")
    limit_before("rehearse" if name == "rehearsal" else "learn", int(call or 0), int(mib))
    loaded, _ = settle_for_run(load_recipe(Path(recipe), overrides=overrides, kind="rl"), Path(root))
    run = start_run(loaded, Path(root), ["vlmrl"], Labels())
    try:
        run_session(run, loaded.recipe, Path(root), ConsoleWatcher(), None)
    except Exception as error:
        code, message = exit_of(error)
        print(message, file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
