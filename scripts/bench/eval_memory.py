"""Memory of an evaluation, and how it grows with the number of rows: graded records go to the disk piece by piece.

    python scripts/bench/eval_memory.py [--rows 20000] [--samples 1] [--json] [--smoke]

Evaluates rows of one kind with a stand-in engine that answers at once: once with so many rows, once with twice as many,
each in a process of its own. Rows are made when they are read, as those of datasets are. Prompts are encoded without a
model, so that memory is that of the evaluation: responses, grades, records on the disk, and metrics. Prints the peak
memory of both, their ratio, and the bytes that each further row adds.

`holds`: a further row adds at most 700 bytes at the peak (columns, hashes and the arrays of the intervals), whatever
the length of its response. The exit code is 1 if it does not hold. With few rows (--smoke) nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES_PER_ROW = 700
FEW_ROWS = 10_000
WORDS = "a response of some length, with its steps and an answer. " * 40


def measure(rows: int, samples: int) -> dict[str, Any]:
    """Evaluate so many rows in this process. Returns its peak memory in bytes, before and after, and the seconds."""
    import resource

    from vlmrl.data.dataset import Rows
    from vlmrl.data.encode import EncodedPrompt
    from vlmrl.evaluate.records import GradedPieces, write_evaluation
    from vlmrl.evaluate.run import evaluate_responses
    from vlmrl.rewards.base import RewardSpec
    from vlmrl.rewards.scoring import Scorer
    from vlmrl.rollout.engine import Generator, SamplingRequest
    from vlmrl.rollout.sample import Prompt, answer_pieces
    from vlmrl.tasks.base import Task
    from vlmrl.types import Media, RewardInput, Row, Sample, SamplingParams

    class AtOnce(Generator):
        """Engine that answers all requests that wait."""

        version, copies_weights, works_alone = 0, False, False

        def __init__(self) -> None:
            self.open: list[tuple[int, SamplingRequest]] = []

        @contextmanager
        def round(self, progress: Any = None) -> Iterator[None]:
            yield

        def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
            self.open.append((len(self.open), request))
            return self.open[-1][0]

        def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
            complete, self.open = self.open, []
            return [(number, [answer(r, k) for k in range(r.num_samples)]) for number, r in complete]

    def answer(request: SamplingRequest, k: int) -> Sample:
        return Sample(tuple(range(200)), f"{WORDS}{request.seed % 2}", (), "stop", 0, request.seed + k)

    def make_row(number: int) -> Row:
        return Row(f"row-{number:012d}", "rows", "table", {"answer": number % 2}, (Media(f"{number:064x}", 8, 8),))

    class Source:
        name, split, task_name, dataset = "rows", "test", "table", None
        task = Task("table", "", "")
        rows: Any = None
        environment = None

        def reward_input(self, row: Row, text: str, finish: Any, num_tokens: int, prompt: str) -> RewardInput:
            return RewardInput(text, row.truth, row.columns, (), finish, num_tokens, prompt)

    def encoded(row: Row) -> Prompt:
        return Prompt(source, row, 0, EncodedPrompt(row, "prompt", (1,), (0,), {}, 1, 0, ()))  # type: ignore[arg-type]

    source = Source()
    source.rows = Rows(rows, make_row)
    grade = lambda x: {"accuracy": float(x.response.endswith(str(x.truth["answer"])))}  # noqa: E731
    spec = RewardSpec("grade", grade, {"accuracy": (0.0, 1.0)}, {"accuracy": 1.0}, pure=True)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:

        def respond(chunks: Any) -> Any:
            pieces = ([(number, encoded(row)) for number, row in chunk] for chunk in chunks)
            return answer_pieces(AtOnce(), pieces, SamplingParams(), num_samples=samples, run_seed=0)

        with Scorer(spec) as scorer:
            pieces = GradedPieces(Path(temporary, "pieces"))
            evaluation = evaluate_responses(respond, source, scorer, params=SamplingParams(), pieces=pieces)  # type: ignore[arg-type]
        write_evaluation(Path(temporary, "eval"), evaluation, {})
        size = Path(temporary, "eval", "rows.parquet").stat().st_size
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = round(time.perf_counter() - start, 1)
    return {"rows": rows, "peak": 1024 * after, "before": 1024 * before, "file": size, "seconds": seconds}


def in_own_process(rows: int, samples: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--rows", str(rows), "--samples", str(samples), "--measure"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    parser.add_argument("--smoke", action="store_true", help="a toy size in seconds, to see that it runs")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.rows, options.samples)))
        return
    rows = 600 if options.smoke else options.rows
    once, twice = (in_own_process(count, options.samples) for count in (rows, 2 * rows))
    per_row = (twice["peak"] - once["peak"]) / rows
    facts = {
        "rows": [rows, 2 * rows],
        "peak_mib": [round(one["peak"] / 2**20, 1) for one in (once, twice)],
        "ratio": round(twice["peak"] / once["peak"], 3),
        "bytes_per_row": round(per_row, 1),
        "seconds": [once["seconds"], twice["seconds"]],
        "holds": rows < FEW_ROWS or per_row <= MOST_BYTES_PER_ROW,
    }
    print(json.dumps(facts) if options.json else "\n".join(f"{name}: {json.dumps(v)}" for name, v in facts.items()))
    sys.exit(0 if facts["holds"] else 1)


if __name__ == "__main__":
    main()
