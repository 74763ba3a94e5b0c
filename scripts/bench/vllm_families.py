"""Which families the installed vLLM can generate for, on a CPU: prints the table, one engine start a line.

    python scripts/bench/vllm_families.py [FAMILY ...] [--lora] [--dtype bfloat16] [--smoke]

Each line is a process of its own: a tiny random model of the family's own class, three full weight syncs (or of the
adapter alone), text and image prompts. `engine`, `trainer`: largest errors of their log-probs after a sync, nats,
against the trainer in float64; `ids`: greedy ids equal to the built-in engine's. Known refusals
(vlmrl/recipe/rules/engine.py) are tried all the same. `--smoke` is one family that is refused before an engine starts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
SECONDS = 300


def line(family: str, lora: bool, dtype: str) -> str:
    """Measure a family in this process."""
    sys.path.insert(0, str(HERE.parents[2] / "tests"))
    from vllm_family import MOST_ROUNDING, measure

    from vlmrl.rollout.vllm import engine as vllm_engine

    vllm_engine.vllm_refusal = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        found = measure(family, Path(folder), lora=lora, dtype=dtype)
    good = found.ratio < MOST_ROUNDING and all(found.same)
    engine, trainer = (max(column) for column in zip(*found.errors, strict=True))
    errors = f"engine {engine:.1e}  trainer {trainer:.1e}"
    return f"{'yes' if good else 'NO':4}{errors}  stale {min(found.stale):.1e}  ids {all(found.same)}"


def refuse_one() -> None:
    """Show the refusal of a family that vLLM cannot generate for on a CPU."""
    sys.path.insert(0, str(HERE.parents[2] / "tests"))
    from vllm_family import measure

    from vlmrl.errors import EngineError

    with tempfile.TemporaryDirectory() as folder:
        try:
            measure("gemma3", Path(folder))
        except EngineError as error:
            print(f"{'gemma3':16} NO  {error}")
        else:
            raise SystemExit("gemma3 is no longer refused: try another family here")


def main() -> None:
    """Parse the arguments; start a process a family, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    asked = parser.parse_args()
    if asked.smoke:
        refuse_one()
        return
    if asked.here:
        print(line(asked.family[0], asked.lora, asked.dtype))
        return
    sys.path.insert(0, str(HERE.parents[2] / "tests"))
    from tinyfamilies import BUILDERS

    more = ["--dtype", asked.dtype, *(["--lora"] if asked.lora else [])]
    for family in asked.family or BUILDERS:
        start = time.perf_counter()
        command = [sys.executable, str(HERE), family, "--here", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode == 0:
            told = done.stdout.strip().splitlines()[-1]
        else:
            told = "NO  " + [text for text in done.stderr.splitlines() if "Error: " in text][-1][:300]
        print(f"{family:16} {told}  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
