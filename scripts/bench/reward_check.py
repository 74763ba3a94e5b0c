"""How long `vlmrl reward-check` takes over many saved responses: fungi, the default reward, all statistics, --out.

    python scripts/bench/reward_check.py --rows 1000000 [--jobs 2] [--keep FOLDER] [--smoke]

Writes a Parquet file of made-up responses of about 1,000 characters (groups of 16, each with a truth of its own), runs
the command on it as a user would, and prints seconds, rows a second and the largest resident set of all processes
together. `--floor` times the same file with a reward that does nothing: what reward-check itself costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RANKS = {
    "order": ["Agaricales", "Boletales", "Russulales", "Polyporales", "Hymenochaetales", "Cantharellales"],
    "family": ["Boletaceae", "Russulaceae", "Amanitaceae", "Polyporaceae", "Mycenaceae", "Agaricaceae"],
    "genus": ["Boletus", "Russula", "Amanita", "Trametes", "Mycena", "Agaricus", "Lactarius", "Suillus"],
}
SEEN = (
    "cap convex with a velvety margin",
    "gills crowded and pale",
    "pores small and yellow",
    "spore print white",
    "stem with a fine network",
    "a ring hangs below the cap",
    "the flesh turns blue where it is cut",
    "growing on a fallen beech",
    "the surface is zoned in brown and grey",
    "milk drips from the broken gills",
    "a volva at the base of the stem",
)
GROUP = 16
PIECE = 50_000


def truth(rng: random.Random) -> dict[str, list[str]]:
    """Names of both images, equal down to a random rank."""
    stops = rng.randrange(4)
    names = {}
    for depth, (rank, known) in enumerate(RANKS.items()):
        first = rng.choice(known)
        names[rank] = [first, first if depth < stops else rng.choice([n for n in known if n != first])]
        if names[rank][0] != names[rank][1]:
            stops = -1
    return names


def response(names: dict[str, list[str]], rng: random.Random) -> str:
    """About 1,000 characters in the task's form: most right, some wrong, some broken."""
    said = []
    for rank, (first, second) in names.items():
        said += rng.choices(SEEN, k=5)
        wrong = rng.random() < 0.3
        second = rng.choice(RANKS[rank]) if wrong else second
        said.append(f"\n<{rank}>{first}; {second}</{rank}>\n")
        if first != second:
            break
    while sum(map(len, said)) < 880:
        said.append(rng.choice(SEEN))
    end = "</think>" if rng.random() > 0.05 else ""
    return f"<think>{'. '.join(said)}{end}\n<answer>{rng.random():.4f}</answer>"


def write_rows(path: Path, rows: int, seed: int = 0) -> float:
    """The file. Returns: mean characters of a response."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    schema = pa.schema(
        [("response", pa.string()), ("ground_truth", pa.string()), ("group", pa.string()), ("step", pa.int32())]
    )
    chars = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, rows, PIECE):
            columns: dict[str, list] = {name: [] for name in schema.names}
            for row in range(start, min(rows, start + PIECE)):
                if row % GROUP == 0:
                    names = truth(rng)
                    same = int(all(a == b for a, b in names.values()))
                    cells = [
                        v
                        for i in (0, 1)
                        for v in (names["family"][i], names["genus"][i], names["order"][i], f"s{i * (1 - same)}")
                    ]
                    line = ";".join([str(same), *cells])
                columns["response"].append(response(names, rng))
                columns["ground_truth"].append(line)
                columns["group"].append(f"g{row // GROUP}")
                columns["step"].append(row * 100 // rows)
            chars += sum(map(len, columns["response"]))
            writer.write_table(pa.table(columns, schema=schema), row_group_size=PIECE)
    return chars / rows


def resident_mib(root: int) -> float:
    """Resident set of a process and its descendants, shared pages counted once each (PSS), in MiB."""
    total, found = 0, {root}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for _ in range(4):
        found |= {pid for pid, parent in parents.items() if parent in found}
    for pid in found:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return total / 1024


def run(words: list[str]) -> dict:
    """One command: its report, seconds and peak memory."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([sys.executable, "-m", "vlmrl", *words], stdout=subprocess.PIPE, text=True)
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], resident_mib(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    text, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"vlmrl {' '.join(words)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(text), "cpu": cpu, "wall": time.perf_counter() - start, "peak_mib": peak[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="use and keep the file in this folder")
    parser.add_argument("--floor", action="store_true", help="also with a reward that does nothing")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    asked = parser.parse_args()
    if asked.smoke:
        asked.rows, asked.jobs = 32, 1
    with tempfile.TemporaryDirectory() as made:
        folder = asked.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"fungi-{asked.rows}.parquet"
        if not path.exists():
            print(f"{asked.rows:,} responses of {write_rows(path, asked.rows):.0f} characters on average", flush=True)
        common = [
            "reward-check",
            str(path),
            "--json",
            "--jobs",
            str(asked.jobs),
            "--out",
            str(folder / "scores.parquet"),
        ]
        kinds = {"default": ["--task", "fungi"]}
        if asked.floor:
            kinds["nothing"] = ["--reward", "length", "--set", "soft_tokens=1", "--set", "max_tokens=2"]
        for kind, words in kinds.items():
            best = min((run([*common, *words]) for _ in range(asked.repeats)), key=lambda r: r["wall"])
            rate = f"{asked.rows / best['wall']:,.0f} rows a second, {best['peak_mib']:,.0f} MiB at most"
            print(
                f"{kind}: {best['wall']:.1f} s ({best['cpu']:.1f} s of CPU), {rate}, {asked.jobs} processes", flush=True
            )


if __name__ == "__main__":
    main()
