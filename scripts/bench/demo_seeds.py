"""The demo's gain over several seeds, pooled: run `scripts/demo --seed N` for each seed first, then

    python scripts/bench/demo_seeds.py --seeds 1 2 3 [--out demo]

prints one line a seed and the pooled paired differences; rows that share a scan are dependent, over the seeds too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vlmrl.evaluate.metrics import clusters_of, joined_ranges, range_of_metric
from vlmrl.evaluate.records import read_evaluation
from vlmrl.evaluate.stats import difference_interval, pooled_difference_interval
from vlmrl.store.layout import eval_dir
from vlmrl.store.listing import run_ids
from vlmrl.store.manifest import read_manifest

COLUMNS = {"reward": "score", "accuracy": "accuracy"}


def newest(runs: Path, seed: int, kind: str) -> Path:
    """The newest run of that kind that the demo made with this seed."""
    for name in run_ids(runs):
        manifest = read_manifest(runs / name)
        if manifest.kind == kind and f"seed{seed}" in manifest.tags:
            return runs / name
    raise SystemExit(f"error: no {kind} run of seed {seed} in {runs}\n\nhint: scripts/demo --seed {seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the demo's folder; {seed} is replaced")
    parser.add_argument("--evaluation", default="test")
    options = parser.parse_args()
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
