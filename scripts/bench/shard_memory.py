"""Peak memory of a rank whose model takes several forward passes per row: sharded as one unit, and layer by layer.

    python scripts/bench/shard_memory.py [--ranks 4] [--layers 12] [--json] [--smoke]

A small Qwen3.5 with random weights is updated twice on a CPU: rows of a prompt and six responses, gradient
checkpointing, AdamW. The bytes of all live tensors of one rank are counted. The other ranks are played by collectives
that do nothing, so the numbers are wrong and the memory is right. Prints the peak of both ways in MB, the plan of
`vlmrl check` for the second, and the ratio plan / peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
MB = 1e6


def measure(dtype: str, ranks: int) -> dict[str, Any]:
    """Return the peaks and the plan of a rank, in MB."""
    import planned_updates as plans
    import pytest
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    found: dict[str, Any] = {"dtype": dtype, "ranks": ranks}
    try:
        for way in ("one unit", "by layer"):
            with pytest.MonkeyPatch.context() as patch:
                if way == "one unit":
                    patch.setattr(plans, "sharded_units", lambda model, sharing: [])
                found[way] = round(plans.counted(patch, "qwen3_5", dtype, True, ranks) / MB, 2)
    finally:
        dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        found["planned"] = round(plans.planned(Path(folder), "qwen3_5", dtype, True, ranks) / MB, 2)
    return found | {"planned / by layer": round(found["planned"] / found["by layer"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12, help="layers of the text model, a multiple of 4")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    import planned_updates as plans

    layers = 4 if args.smoke else args.layers
    kinds = plans.HYBRID["layer_types"][:4] * (layers // 4)
    plans.HYBRID.update(num_hidden_layers=layers, layer_types=kinds)
    for dtype in ("bfloat16",) if args.smoke else ("float32", "bfloat16"):
        row = measure(dtype, args.ranks)
        print(json.dumps(row) if args.json else "  ".join(f"{k}: {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
