"""How long `vlmrl runs list` takes with 10,000 runs. Prints one JSON object; exit code 1 when over the limit.

python scripts/bench/runs_list.py [--runs 10000] [--limit-seconds 0.5] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from vlmrl.store import layout
from vlmrl.store.runs import create_run

COMMANDS = {
    "list": ["list"],
    "list, all as JSON": ["list", "--limit", "0", "--json"],
    "list, one tag": ["list", "--tag", "rare", "--json"],
    "show, by name": ["show", "needle", "--json"],
}


def make_runs(root: Path, number: int) -> None:
    """`number` run folders, each with a real manifest, one second apart. One of the oldest has a tag and a name."""
    model = create_run(root, kind="rl", recipe_name="digits_im", argv=["vlmrl", "train"], seeds={"run": 0})
    model.finish()
    text = (model.dir / layout.MANIFEST).read_text()
    begin = datetime(2024, 1, 1, tzinfo=timezone.utc)
    for i in range(number - 1):
        run_id = f"{begin + timedelta(seconds=i):%Y%m%d-%H%M%S}-digits_im-{i % 65536:04x}"
        folder = root / run_id
        folder.mkdir()
        own = text.replace(model.id, run_id)
        if i == 7:
            own = own.replace('"tags": []', '"tags": ["rare"]').replace('"name": null', '"name": "needle"')
        (folder / layout.MANIFEST).write_text(own)


def measure(root: Path, arguments: list[str], times: int) -> float:
    """Wall seconds of the whole process, the best of `times`."""
    start = "import sys; from vlmrl.cli.app import main; main()"
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", start, "runs", *arguments],
            env={**os.environ, layout.RUNS_VARIABLE: str(root)},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        best = min(best, time.perf_counter() - begin)
    return round(best, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--limit-seconds", type=float, default=0.5)
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    runs, times = (10, 1) if options.smoke else (options.runs, 5)
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), runs)
        seconds = {name: measure(Path(folder), arguments, times) for name, arguments in COMMANDS.items()}
    print(json.dumps({"runs": runs, "seconds": seconds}))
    return 0 if options.smoke or seconds["list"] < options.limit_seconds else 1


if __name__ == "__main__":
    sys.exit(main())
