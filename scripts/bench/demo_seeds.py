"""The demo's gain over several seeds, pooled: run `scripts/demo --seed N` for each seed first, then

    python scripts/bench/demo_seeds.py --seeds 1 2 3 [--out demo] [--smoke]

prints one line a seed and the pooled paired differences; rows that share a scan are dependent, over the seeds too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from vlmrl.evaluate.estimates import difference_interval, pooled_difference_interval
from vlmrl.evaluate.metrics import clusters_of, range_of_metric
from vlmrl.evaluate.paired import joined_ranges
from vlmrl.evaluate.records import Evaluation, read_evaluation, write_evaluation
from vlmrl.store.layout import eval_dir
from vlmrl.store.listing import run_ids
from vlmrl.store.manifest import read_manifest
from vlmrl.store.runs import create_run

COLUMNS = {"reward": "score", "accuracy": "accuracy"}


def newest(runs: Path, seed: int, kind: str) -> Path:
    """The newest run of that kind that the demo made with this seed."""
    for name in run_ids(runs):
        manifest = read_manifest(runs / name)
        if manifest.kind == kind and f"seed{seed}" in manifest.tags:
            return runs / name
    raise SystemExit(f"error: no {kind} run of seed {seed} in {runs}\n\nhint: scripts/demo --seed {seed}")


def make_runs(runs: Path, seed: int, rows: int = 6) -> None:
    """Two runs of one seed with an evaluation each, all made up."""
    for kind in ("sft", "rl"):
        with create_run(runs, kind=kind, recipe_name="demo", tags=[f"seed{seed}"]) as run:
            told = [_row(number, good=kind == "rl" or number % 2 == 0) for number in range(rows)]
            write_evaluation(eval_dir(run.dir, "test"), Evaluation(told, {"metrics": {}}), {})


def _row(number: int, good: bool) -> dict[str, Any]:
    image = {"sha256": f"{number // 2:064x}", "width": 8, "height": 8, "kind": "table"}
    text = dict.fromkeys(("text", "finish", "note", "error", "source", "task"), "")
    return text | {
        "prompt_id": str(number),
        "sample": 0,
        "seed": 0,
        "truth": {},
        "num_tokens": 1,
        "score": float(good),
        "parts": {},
        "images": [image],
        "outcome": {"accuracy": float(good)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the demo's folder; {seed} is replaced")
    parser.add_argument("--evaluation", default="test")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.out, options.seeds = Path(folder) / "{seed}", [1, 2]
            for seed in options.seeds:
                make_runs(Path(folder) / str(seed) / "runs", seed)
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Print each seed's gain, and the pooled one."""
    pooled: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in COLUMNS}
    ranges: dict[str, Any] = {}
    clusters = []
    for seed in options.seeds:
        runs = Path(str(options.out).format(seed=seed)) / "runs"
        names = {"sft": options.evaluation, "rl": "test"}
        found = {k: read_evaluation(eval_dir(newest(runs, seed, k), n)) for k, n in names.items()}
        clusters.append(clusters_of(found["sft"].rows))
        joined = joined_ranges(found["sft"].summary, found["rl"].summary)
        told = []
        for name, column in COLUMNS.items():
            sft, rl = ([float(row[column]) for row in found[kind].rows] for kind in ("sft", "rl"))
            ranges[name] = range_of_metric(name, joined)
            gain = difference_interval(rl, sft, clusters[-1], ranges[name])
            pooled[name].append((rl, sft))
            means = f"{sum(sft) / len(sft):.3f} -> {sum(rl) / len(rl):.3f}"
            told.append(f"{name} {means} ({gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}])")
        print(f"seed {seed}: " + "   ".join(told))
    for name, differences in pooled.items():
        gain = pooled_difference_interval(differences, clusters, ranges[name])
        print(f"pooled {name}: {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]")


if __name__ == "__main__":
    main()
