"""Kill runs of several processes at random moments, in every way we know, and see that no run is lost.

python scripts/bench/kill_ranks.py [--moments 60] [--gpus 2] [--seed 0] [--kinds KIND,KIND] [--engine torch] [--smoke]

The command is `vlmrl train RECIPE --gpus 2` on a tiny model, as CPU processes over gloo. At each moment one thing
happens to it (KINDS). Then: no process of it is left after 30 seconds, by process id; `vlmrl runs verify` reads the
store; `--resume` goes on, now and then with one process, from the last complete checkpoint. A run that is finished,
after up to three such moments, must be the run that nobody touched: to the bit where it always had the same number of
processes, within the tolerance of the test suite where it once had another. Weights and rollouts too.

`--engine vllm` puts vLLM into each rank; `split` gives it a process of its own, `parts` one that has two more: of these
the processes are killed too. With vLLM a run's rows are compared, not its bits. The launcher is a fork of this process,
which has imported what it needs; the ranks, and with `--smoke` the launcher, are interpreters of their own.
Prints one JSON object and, on stderr, a table of what was done and what came of it; exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kill
from kill import Broken
from kill_world import ENGINES, HOSTED, Bench, Going, Run, engines, is_done, saved_step, tree

PROMISED_SECONDS = 30.0
"""After this no process of a run is left."""
STOP_SECONDS = 120.0
"""A run that is asked to stop finishes its step and saves: that is work, not promised in seconds."""
MOMENTS_A_RUN = 3
DISK_BYTES = 300 * 2**20
DAMAGES = ("shard cut short", "shard deleted", "shard swapped")
KINDS = (
    "kill one rank",
    "kill all ranks",
    "kill launcher",
    "kill engine",
    "kill reward worker",
    "SIGTERM",
    "Ctrl-C",
    "Ctrl-C twice",
    "disk full",
    *DAMAGES,
)


# What happens


def strike(bench: Bench, going: Going, kind: str) -> tuple[set[int], float]:
    """Do it. Returns (the processes there were, seconds in which all must have ended)."""
    pids, beats = tree(going.pid), going.beats()
    ranks = [b["pid"] for b in beats.values()] or [going.pid]
    send: Callable[[int], None] = lambda pid: _signal(pid, signal.SIGKILL)  # noqa: E731
    if kind == "kill one rank":
        send(bench.rng.choice(ranks))
    elif kind == "kill all ranks":
        [send(pid) for pid in bench.rng.sample(ranks, len(ranks))]
    elif kind == "kill launcher":
        send(going.pid)
    elif kind == "kill engine":
        while not (found := engines(pids)) and not going.ended():  # a rank that starts has none yet
            time.sleep(0.01)
            pids = tree(going.pid)
        if found:
            send(bench.rng.choice(found))
    elif kind == "kill reward worker":
        workers = [int(w) for pid in ranks for w in kill._workers(pid)]
        if workers:
            send(bench.rng.choice(workers))
        return pids, 300.0  # the run may go on without it
    elif kind == "SIGTERM":
        _signal(going.pid, signal.SIGTERM)
        return pids, STOP_SECONDS
    elif kind in ("Ctrl-C", "Ctrl-C twice"):
        _signal(going.pid, signal.SIGINT)
        if kind == "Ctrl-C":
            return pids, STOP_SECONDS
        time.sleep(0.3)
        _signal(going.pid, signal.SIGINT)
    return pids, PROMISED_SECONDS


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def happen(bench: Bench, run: Run, kind: str) -> None:
    """One moment of one kind in a run, all that must hold after it, and a line of the table."""
    began = time.perf_counter()
    if kind in DAMAGES:
        outcome, phase = damage(bench, run, kind), "after the end"
    elif kind == "disk full":
        with small_disk(bench.folder / "disk"):
            outcome, phase = fill_disk(bench)
    else:
        going = bench.go(run, bench.size)
        resumed = run.dir is not None
        needs_ranks = kind in ("kill one rank", "kill all ranks", "kill engine", "kill reward worker")
        if not bench.wait_for_moment(going, run, needs_ranks):
            bench.table.add(kind, "came too late", "after the end", time.perf_counter() - began)
            bench.wait_for_end(going, set(), PROMISED_SECONDS)
            return
        beat = going.beats().get(0)
        phase = phase_of(beat, bench)
        pids, seconds = strike(bench, going, kind)
        try:
            bench.wait_for_end(going, pids, seconds)
        except Broken as error:
            raise Broken(f"{kind} in {phase}: {error}") from error
        outcome = after(bench, run, going, kind, beat is not None and (resumed or bool(beat["run"])))
    run.moments += 1
    bench.table.add(kind, outcome, phase, time.perf_counter() - began)


def phase_of(beat: dict[str, Any] | None, bench: Bench) -> str:
    return beat["phase"] if beat else "before the ranks" if bench.size > 1 else "unknown"


def after(bench: Bench, run: Run, going: Going, kind: str, known: bool) -> str:
    """Check what must hold after a command was struck. Return what came of it, in words.

    Args: known: the launcher knew which run it was.
    """
    err, code = going.err.read_text("utf-8", "replace"), going.code
    if "Traceback" in err:
        raise Broken(f"{kind}: a traceback was shown:\n{err[-2000:]}")
    allowed = {
        "kill one rank": {2, -9}, "kill all ranks": {2, -9}, "kill launcher": {-9}, "SIGTERM": {130}, "Ctrl-C": {130},
        "Ctrl-C twice": {130}, "kill reward worker": {0, 2}, "kill engine": {0, 2},
    }[kind]  # fmt: skip
    # A signal that comes when the last step is done, or before the launcher minds it, ends as it would have.
    if code not in allowed and not (code == 0 and is_done(run)) and run.dir is not None:
        raise Broken(f"{kind}: exit code {code}:\n{err[-2000:]}")
    if run.dir is None:
        return "no run folder yet"
    bench.verify(run, {"warning"})
    if is_done(run):
        return "it was done"
    if kind == "kill reward worker" and code == 2 and "its worker process was ended by SIGKILL" not in err:
        raise Broken(f"the lost reward worker was not named:\n{err[-2000:]}")
    if kind == "kill engine" and code == 2 and "engine" not in err:
        raise Broken(f"the killed engine was not named:\n{err[-2000:]}")
    if bench.size > 1 and kind in ("kill one rank", "kill all ranks") and "was killed by SIGKILL" not in err:
        raise Broken(f"the killed rank was not named:\n{err[-2000:]}")
    if known and kind != "kill launcher" and code and f"--resume {run.dir.name}" not in err:
        raise Broken(f"{kind}: no resume line:\n{err[-2000:]}")
    return "goes on from a checkpoint" if saved_step(run) else "goes on from the start"


def damage(bench: Bench, run: Run, kind: str) -> str:
    """Damage a shard of the newest checkpoint: `verify` names it, resuming refuses and names it, and touches nothing.
    Without that checkpoint the run goes on from the one before.
    """
    from vlmrl.store.layout import complete_checkpoints

    assert run.dir is not None
    saved = complete_checkpoints(run.dir)
    newest = saved[-1]
    shard = bench.rng.choice(
        sorted(p for part in ("model", "optimizer") for p in (newest / part).glob("*.safetensors"))
    )
    if kind == "shard cut short":
        os.truncate(shard, bench.rng.randrange(shard.stat().st_size))
    elif kind == "shard deleted":
        shard.unlink()
    else:
        shutil.copy(saved[-2] / shard.relative_to(newest), shard)
    name = shard.relative_to(newest).as_posix()
    if not any(name in p["message"] + (p["where"] or "") for p in bench.verify(run, {"warning", "error"})):
        raise Broken(f"verify did not name {name}")
    going = bench.go(run, bench.size)
    bench.wait_for_end(going, set(), 120.0)
    run.sizes.pop()
    err = going.err.read_text("utf-8", "replace")
    if going.code != 2 or name not in err or "Traceback" in err:
        raise Broken(f"{kind}: resuming ended with {going.code}:\n{err[-2000:]}")
    if complete_checkpoints(run.dir) != saved:
        raise Broken(f"{kind}: resuming changed the checkpoints")
    shutil.rmtree(newest)
    return "refused and named"


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A disk of DISK_BYTES at `place`."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder / "try"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def fill_disk(bench: Bench) -> tuple[str, str]:
    """A run on a disk of its own, which is filled up to a random rest at a random moment; then space is made again."""
    disk = bench.folder / "disk"
    run = Run(disk)
    going = bench.go(run, bench.size)
    while not going.ended() and not (run.dir and saved_step(run)):
        time.sleep(0.01)
    time.sleep(bench.rng.random())
    beat = going.beats().get(0) or {}
    free = shutil.disk_usage(disk).free
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, max(4096, free - bench.rng.randrange(3 * 2**20)))
    bench.wait_for_end(going, tree(going.pid), STOP_SECONDS)
    err = going.err.read_text("utf-8", "replace")
    if going.code not in (0, 2) or "Traceback" in err:
        raise Broken(f"disk full: exit code {going.code}:\n{err[-2500:]}")
    if going.code and not any(w in err for w in ("No space left", "disk is full", "could not be saved")):
        raise Broken(f"disk full: not told in words:\n{err[-2000:]}")
    (disk / "filler").unlink()
    bench.verify(run, {"warning"})
    if not is_done(run):
        bench.finish(run)
    return ("told, and goes on from a checkpoint" if going.code else "it was done"), beat.get("phase", "unknown")


# The whole


def plan(bench: Bench, kinds: list[str], moments: int) -> list[str]:
    """Each kind as often, in random order, but that a shard is damaged only where there is a checkpoint."""
    chosen = [kinds[i % len(kinds)] for i in range(moments)]
    bench.rng.shuffle(chosen)
    return chosen


def work(bench: Bench, kinds: list[str], moments: int, until: float) -> Broken | None:
    """All moments, dealt over runs; none begins after `until` (of time.perf_counter). Returns what was broken first."""
    queue, number = plan(bench, kinds, moments), 0
    try:
        while queue:
            run = Run(bench.folder / f"run-{number}")
            run.root.mkdir()
            number += 1
            while queue and run.moments < MOMENTS_A_RUN and not is_done(run):
                if time.perf_counter() > until:
                    queue.clear()
                    break
                # A damaged shard needs a checkpoint, swapping two: the kind waits until the run has them.
                usable = [k for k in queue if _possible(k, run)]
                kind = usable[0] if usable else "kill one rank"
                if usable:
                    queue.remove(kind)
                happen(bench, run, kind)
            bench.compare(run) if is_done(run) else bench.finish(run)
    except Broken as error:
        return error
    return None


def _possible(kind: str, run: Run) -> bool:
    from vlmrl.store.layout import complete_checkpoints

    saved = len(complete_checkpoints(run.dir)) if run.dir else 0
    return kind not in DAMAGES or saved >= (2 if kind == "shard swapped" else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--moments", type=int, default=60)
    parser.add_argument("--gpus", type=int, default=2, help="processes of each run")
    parser.add_argument("--engine", choices=list(ENGINES), default="torch", help="see above")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no moment after so long")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it there")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    if options.smoke:
        options.moments, options.gpus, options.kinds, options.engine = 1, 2, "kill one rank", "torch"
    kinds, start = options.kinds.split(","), time.perf_counter()
    if unknown := [k for k in kinds if k not in KINDS]:
        parser.error(f"no such kind: {', '.join(unknown)}; there are: {', '.join(KINDS)}")
    if options.engine not in HOSTED and "kill engine" in kinds:
        kinds.remove("kill engine")
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmrl-kill-")))
        folder.mkdir(parents=True, exist_ok=True)
        if "disk full" in kinds and not can_mount(folder):
            print("disk full is left out: no file system can be mounted here", file=sys.stderr)
            kinds.remove("disk full")
        bench = Bench(folder.resolve(), random.Random(options.seed), cold=False, smoke=options.smoke)
        bench.prepare(options.gpus, options.engine)
        print(f"undisturbed: {bench.seconds['undisturbed']:.1f} s", file=sys.stderr, flush=True)
        problem = work(bench, kinds, options.moments, start + 60 * options.minutes)
    table = bench.table
    each = sum(table.seconds) / max(1, len(table.seconds))
    print(table.show(), file=sys.stderr)
    print(f"{len(table.seconds)} moments, {each:.1f} s each; finished runs: {dict(table.ends)}", file=sys.stderr)
    if problem is not None:
        print(f"broken: {problem}", file=sys.stderr)
    print(
        json.dumps(
            {
                "moments": len(table.seconds),
                "kinds": {k: dict(row) for k, row in table.rows.items()},
                "phases": dict(table.where),
                "finished": dict(table.ends),
                "gpus": bench.size,
                "engine": options.engine,
                "seed": options.seed,
                "broken": None if problem is None else str(problem),
                "seconds_a_moment": round(each, 1),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    )
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
