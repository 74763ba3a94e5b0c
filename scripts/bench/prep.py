"""How fast and in how much memory `vlmrl prep` takes a table of pairs of 800-pixel photographs.

python scripts/bench/prep.py --pairs 10000 --workers 2 [--smoke]

Makes a Parquet table in the published form (row groups of 100) whose images are 2,000 photographs, each again and again
with different last bytes: every one is a content of its own that has to be decoded, hashed and stored, and has near
copies. Prints rows a second, and the most memory that all processes together held (proportional set size, read from
/proc ten times a second: Linux). Takes about 190 kB of disk space an image while it runs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

SIZES = ((800, 600), (600, 800), (800, 800), (800, 533))
PHOTOGRAPHS = 2_000
SMOKE_PHOTOGRAPHS = 4
GROUP = 100


def photographs(amount: int) -> list[bytes]:
    """Return JPEGs of all sizes, with as many bytes as photographs have (80 to 120 kB)."""
    import numpy as np
    from PIL import Image

    files = []
    for number in range(amount):
        width, height = SIZES[number % len(SIZES)]
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (height // 40, width // 40, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = (smooth + rng.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noisy).save(buffer, "JPEG", quality=85)
        files.append(buffer.getvalue())
    return files


def write_table(path: Path, num_pairs: int, num_images: int | None, num_photographs: int = PHOTOGRAPHS) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bases, rng, numbers = photographs(num_photographs), random.Random(0), count()
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("problem", pa.string()), ("images", pa.list_(image)), ("answer", pa.string())])

    def photo() -> dict[str, Any]:
        number = rng.randrange(num_images) if num_images else next(numbers)
        return {"bytes": bases[number % len(bases)] + number.to_bytes(8, "big"), "path": None}

    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_pairs, GROUP):
            rows = [
                {"problem": "<image><image> The same whale?", "images": [photo(), photo()], "answer": str(i % 2)}
                for i in range(start, min(start + GROUP, num_pairs))
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree(int(child))


def memory_kib(pid: int) -> tuple[int, int]:
    """(proportional set size of all processes, of the first) in KiB."""
    sizes = []
    for one in tree(pid):
        text = Path(f"/proc/{one}/smaps_rollup").read_text()
        sizes.append(int(text.partition("\nPss:")[2].split()[0]))
    return sum(sizes), sizes[0]


def measure(command: list[str]) -> dict[str, Any]:
    """Run it; seconds on the clock and of all cores' work, and the most memory in MiB."""
    start, most, first = time.perf_counter(), 0, 0
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while (ended := os.wait4(run.pid, os.WNOHANG))[0] == 0:
        try:
            whole, own = memory_kib(run.pid)
        except (OSError, ValueError, IndexError):  # a process ended while it was looked at
            continue
        most, first = max(most, whole), max(first, own)
        time.sleep(0.1)
    _, status, used = ended
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": most // 1024,
        "parent_mib": first // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--images", type=int, help="pairs are drawn from so many; default: all images differ")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="where to work; default: the system's temporary folder")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    args = parser.parse_args()
    if args.smoke:
        args.pairs, args.workers = 4, 1
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        table, out = Path(name) / "train.parquet", Path(name) / "out"
        write_table(table, args.pairs, args.images, SMOKE_PHOTOGRAPHS if args.smoke else PHOTOGRAPHS)
        command = [sys.executable, "-m", "vlmrl", "prep", "whale", str(table), "--out", str(out)]
        command += ["--workers", str(args.workers), "--validation-pairs", "0"]
        found = measure(command)
        info = json.loads((out / "dataset.json").read_text())
    stored = sum(fields["bytes"] for file, fields in info["files"].items() if file.endswith(".arrow"))
    rows = info["counts"]["rows"]
    facts = {"pairs": rows, "images": info["counts"]["images_stored"], "gib_stored": round(stored / (1 << 30), 2)}
    rates = {f"rows_per_{key[:-1]}": round(rows / found[key], 1) for key in ("seconds", "cpu_seconds")}
    print(json.dumps({**facts, "workers": args.workers, **found, **rates}))


if __name__ == "__main__":
    main()
