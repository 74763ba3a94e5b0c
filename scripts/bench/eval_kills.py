"""Kill `vlmrl eval` again and again while it gets responses, and see that it goes on: the same result, nothing twice.

    python scripts/bench/eval_kills.py [--kills 10] [--rows 60] [--seed 0] [--json] [--smoke]

Once with an endpoint on loopback that answers slowly, once with a tiny model in the built-in engine, and once with that
model on two sets under two settings, with a slow reward in a worker, so that grading is killed midway too. Each
evaluation is killed with SIGKILL after a random number of new responses or graded pieces, and the same command is
started again, until it has been killed often enough; the last one may end. Its rows and metrics must equal those of an
evaluation that nobody touched. No response that was on disk may be asked for again; the endpoint's requests in flight
at a kill are counted apart.

Commands are forks of one warm interpreter, so that kills fall into their work. The built-in engine keeps 4 prompts at a
time here instead of 128, and 8 are graded together instead of 512, so that ten kills fit into a small evaluation.
Prints a table, or with --json one object; `holds` says whether all of that is true, and the exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests")]

import kill  # noqa: E402
from endpoint_server import Endpoint, Reply, echo, prompt_of, serve_endpoint  # noqa: E402

CONCURRENCY = 4
SAMPLES = 2
ANSWER_SECONDS = 0.02
PIECE = 4
RECIPE = """
[model]
path = "model"
dtype = "float32"
device = "cpu"
max_pixels = 3136
[[data]]
path = "rows.jsonl"
[reward]
name = "length"
args = { soft_tokens = 4, max_tokens = 12 }
[rollout]
engine = "torch"
max_new_tokens = 8
"""


SETTINGS = """
[eval]
sets = ["more.jsonl", "rest.jsonl"]
[eval.settings.warm]
temperature = 1.0
samples = 2
[eval.settings.greedy]
"""
SLOW_REWARD = """
import time

def score(x):
    time.sleep(0.005)
    return {"length": min(1.0, x.num_tokens / 8), "letters": float("e" in x.response)}
"""


def make_place(folder: Path, rows: int) -> None:
    from PIL import Image

    for i in range(rows):
        Image.new("RGB", (28, 28), (i % 256, 90, 200)).save(folder / f"{i}.png")
    lines = [json.dumps({"prompt": f"<image>say {i}", "images": [f"{i}.png"], "answer": "1"}) for i in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "mine.toml").write_text(RECIPE)
    (folder / "slow.py").write_text(SLOW_REWARD)
    slow_recipe = RECIPE.replace('"length"', '"slow.py:score"').replace(
        "args = { soft_tokens = 4, max_tokens = 12 }", ""
    )
    (folder / "several.toml").write_text(slow_recipe + SETTINGS)
    half = len(lines) // 2
    (folder / "more.jsonl").write_text("\n".join(lines[:half]) + "\n")
    (folder / "rest.jsonl").write_text("\n".join(lines[half:]) + "\n")


def in_fork(work: Callable[[], Any]) -> None:
    """Do it in a fork: the threads of torch would not survive the forks of this process."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the tiny model cannot be made")


def build_model(folder: Path) -> None:
    from vlmrl.model.tiny import build_tiny

    texts = [f"say {i}" for i in range(100)]
    in_fork(lambda: build_tiny(folder, texts, vocabulary=300, hidden=64, layers=2, init_std=0.02))


Response = tuple[str, int, int]
"""File, row, sample."""


def progress_in(folder: Path) -> int:
    """Number of responses and of graded pieces on disk."""
    return len(lines_in(folder)) + len(list(folder.glob("unfinished/*.graded/*.parquet")))


def lines_in(folder: Path) -> list[Response]:
    """The responses on disk."""
    responses: list[Response] = []
    for path in sorted(folder.glob("unfinished/*.jsonl")):
        with contextlib.suppress(FileNotFoundError):
            for line in path.read_bytes().splitlines(keepends=True)[1:]:
                if line.endswith(b"\n"):
                    value = json.loads(line)
                    responses.append((path.name, value["row"], value["sample"]))
    return responses


def evaluate(folder: Path, words: list[str], runs: str, kill_at: int | None) -> bool:
    """Run the command; kill it when `kill_at` responses and graded pieces are on disk. Returns whether it ended."""
    with open(folder / "output", "wb") as out:
        pid = kill._fork(folder, ["eval", *words, "--runs", runs, "--json"], out.fileno(), out.fileno())
    while kill_at is not None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return _ended(folder, status)
        if progress_in(folder / runs) >= kill_at:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.001)
    return _ended(folder, os.waitpid(pid, 0)[1])


def _ended(folder: Path, status: int) -> bool:
    if status:
        raise SystemExit(f"vlmrl eval failed:\n{(folder / 'output').read_text()[-3000:]}")
    return True


def result_of(folder: Path, runs: str) -> list[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """(name, rows, metrics) of the finished evaluations; the same ones may have been written to several runs."""
    import pyarrow.parquet as pq

    results = {}
    for summary in folder.glob(f"{runs}/*/eval/*/summary.json"):
        rows = pq.read_table(summary.with_name("rows.parquet")).to_pylist()
        found = (summary.parent.name, rows, json.loads(summary.read_text())["metrics"])
        if results.setdefault(found[0], found) != found:
            raise SystemExit(f"two evaluations {found[0]} differ")
    return [results[name] for name in sorted(results)]


def trial(
    folder: Path, words: list[str], kills: int, total: int, rng: random.Random, endpoint: Endpoint | None
) -> dict:
    """Evaluate once untouched and once with kills. Returns what was seen."""
    start = time.perf_counter()
    evaluate(folder, words, "whole", None)
    whole = time.perf_counter() - start
    if endpoint is not None:
        endpoint.requests.clear()
    done, again, fallen = False, 0, 0
    for number in range(kills):
        before = lines_in(folder / "killed")
        asked = len(endpoint.requests) if endpoint else 0
        # Each later kill needs a piece of the built-in engine that is still to be generated.
        room = total - len(before) - (kills - number) * PIECE * SAMPLES
        steps = rng.randint(1, max(1, 2 * room // (kills - number + 1)))
        done = evaluate(folder, words, "killed", progress_in(folder / "killed") + steps)
        again += asked_again(endpoint, asked, before)
        fallen += not done
        if done:
            break
        again += written_again(before, lines_in(folder / "killed"))
    if not done:
        before, asked = lines_in(folder / "killed"), len(endpoint.requests) if endpoint else 0
        evaluate(folder, words, "killed", None)
        again += asked_again(endpoint, asked, before)
    in_flight = len(endpoint.requests) - total if endpoint else None
    same = result_of(folder, "whole") == result_of(folder, "killed")
    return {
        "kills": fallen,
        "responses": total,
        "same_result": same,
        "asked_again": again,
        "in_flight_at_kills": in_flight,
        "leftovers": len(list(folder.glob("*/unfinished/*"))),
        "seconds_untouched": round(whole, 2),
    }


def asked_again(endpoint: Endpoint | None, first: int, before: list[Response]) -> int:
    """Number of requests from number `first` on for responses that were on disk `before`."""
    if endpoint is None:
        return 0
    seeds: dict[int, list[int]] = {}
    for body in endpoint.bodies:
        seeds.setdefault(int(prompt_of(body).split()[-1]), []).append(body["seed"])
    lowest = {row: min(values) for row, values in seeds.items()}
    asked = [int(prompt_of(body).split()[-1]) for body in endpoint.bodies[first:]]
    samples = [(row, b["seed"] - lowest[row]) for row, b in zip(asked, endpoint.bodies[first:], strict=True)]
    there = {(row, k) for _, row, k in before}
    return len([one for one in samples if one in there])


def written_again(before: list[Response], after: list[Response]) -> int:
    """Number of responses of whole pieces on disk `before` that were generated again and written a second time."""
    again = 0
    for file in {name for name, _, _ in after}:
        there = {(row, k) for name, row, k in before if name == file}
        samples = max((k for _, k in there), default=0) + 1
        pieces = {row // PIECE for row, _ in there}
        whole = {
            p for p in pieces if all((r, k) in there for r in range(p * PIECE, (p + 1) * PIECE) for k in range(samples))
        }
        earlier = sum(name == file for name, _, _ in before)
        later = [row for name, row, _ in after if name == file][earlier:]
        again += sum(row // PIECE in whole for row in later)
    return again


def slow(number: int, body: dict[str, Any]) -> Reply:
    time.sleep(ANSWER_SECONDS)
    return echo(number, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    parser.add_argument("--smoke", action="store_true", help="a toy size in seconds, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.kills, options.rows = 2, 12
    kill.warm_up()
    from vlmrl.evaluate import (
        eval,  # noqa: F401
        responses,
        run,
    )
    from vlmrl.evaluate import run as grading

    responses.PIECE_PROMPTS = PIECE
    run.CHUNK_PROMPTS = grading.CHUNK_PROMPTS = 2 * PIECE
    rng = random.Random(options.seed)
    total = options.rows * SAMPLES
    sampling = ["--recipe", "mine.toml", "--sample", "1.0", "--n", str(SAMPLES)]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("endpoint", "engine", "settings"):
            folder = Path(temporary, name)
            folder.mkdir()
            make_place(folder, options.rows)
            if name == "endpoint":
                with serve_endpoint(slow) as endpoint:
                    words = ["--endpoint", endpoint.address, "--model", "slow", "--concurrency", str(CONCURRENCY)]
                    results[name] = trial(folder, [*words, *sampling], options.kills, total, rng, endpoint)
            else:
                build_model(folder / "model")
                words = ["model", *sampling] if name == "engine" else ["model", "--recipe", "several.toml"]
                # Two settings: SAMPLES responses to every row, and a greedy one.
                needed = total if name == "engine" else total + options.rows
                results[name] = trial(folder, words, options.kills, needed, rng, None)
    good = {
        name: r["same_result"]
        and r["kills"] == options.kills
        and not r["asked_again"]
        and not r["leftovers"]
        and (r["in_flight_at_kills"] is None or r["in_flight_at_kills"] <= options.kills * CONCURRENCY)
        for name, r in results.items()
    }
    results["holds"] = all(good.values())
    if options.json:
        print(json.dumps(results))
    else:
        for name, r in results.items():
            print(f"{name}: {json.dumps(r)}")
    sys.exit(0 if results["holds"] else 1)


if __name__ == "__main__":
    main()
