"""How long `vlmrl --help` takes, the best of five starts. Prints one JSON object; exit code 1 when over the limit.

python scripts/bench/startup.py [--limit-seconds 0.25] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

START = "import sys; from vlmrl.cli.app import main; main()"
COMMANDS = {"vlmrl --help": ["--help"], "vlmrl train --help": ["train", "--help"], "vlmrl --version": ["--version"]}


def measure(arguments: list[str], times: int) -> float:
    """Wall seconds of the whole process, the best of `times`."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", START, *arguments], check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - begin)
    return round(best, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit-seconds", type=float, default=0.25)
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    seconds = {name: measure(arguments, 1 if options.smoke else 5) for name, arguments in COMMANDS.items()}
    print(json.dumps({"seconds": seconds, "limit": options.limit_seconds}))
    return 0 if options.smoke or seconds["vlmrl --help"] < options.limit_seconds else 1


if __name__ == "__main__":
    sys.exit(main())
