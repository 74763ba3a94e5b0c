"""Kill prep, sft, train and merge at random moments, and see that what is on disk survives and that the work goes on.

python scripts/bench/kill.py [--kills 30] [--seed 0] [--cold] [--keep DIR] [--smoke]

A kill is SIGKILL to the command's whole process group. After each one everything that has its final name must be whole
(`vlmrl runs show` and `verify`, byte for byte comparisons), and the next command must finish the work. A run that was
killed and resumed, up to three times, must end as the run that nobody touched: weights, optimizer, metrics, rollouts.
Runs of several processes, and other ways to die: kill_ranks.py.

Commands are forks of one warm interpreter, so that kills fall into their work and not into imports of torch; the runs
they are compared with are interpreters of their own. With --cold every command is one: minutes more.
Prints one JSON object and, on stderr, a table; exit code 1 when anything was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _name in ("VLMRL_RUNS", "VLMRL_CRASH_AT"):
    os.environ.pop(_name, None)

SHARES = {"prep": 6, "sft": 8, "train": 10, "merge": 6}
"""Of 30 kills, how many hit which command."""
SMOKE_SHARES = {"prep": 1, "train": 1}
KILLS_A_RUN = 3
STEPS = 6
START = "import sys; from vlmrl.cli.app import main; main()"
REWARD = """
def score(x):
    return {"length": min(1.0, x.num_tokens / 12), "letters": min(1.0, x.response.count("e") / 4)}
"""
RECIPE = f"""
[model]
path = "model"
dtype = "float32"
device = "cpu"
min_pixels = 784
max_pixels = 3136
[[data]]
path = "data/digits"
task = "digits"
[reward]
name = "reward.py:score"
[rollout]
max_new_tokens = 12
[train]
steps = {STEPS}
[optim]
lr = 1e-3
schedule = "cosine"
warmup_steps = 2
[eval]
every_steps = 3
max_rows = 6
[checkpoint]
every_steps = 2
"""
SIZES = {
    "sft": ["--set", "train.rows_per_step=8"],
    "train": ["--set", "rollout.prompts_per_step=4", "--set", "rollout.samples_per_prompt=4"],
}
PREP = ["--pairs", "24", "--json"]
MEASURED = ("time/", "memory/", "rollout/tokens_per_second")


class Broken(Exception):
    """Something was lost, or a command did not go on as promised."""


@dataclass
class Ended:
    """Exit code and output of a command. `code` is None when it was killed."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@dataclass
class Bench:
    """The folder it happens in, what was seen, and how long each command takes undisturbed."""

    folder: Path
    rng: random.Random
    cold: bool
    smoke: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    found: dict[str, Counter[str]] = field(default_factory=dict)
    compared: int = 0

    def saw(self, command: str, what: str) -> None:
        """Note where a kill fell."""
        self.kills[command] += 1
        self.found.setdefault(command, Counter())[what] += 1
        print(f"  kill {self.kills.total()}: {command}: {what}", file=sys.stderr, flush=True)

    def run(
        self, *words: str, kill_after: float | None = None, cold: bool | None = None, may_fail: bool = False
    ) -> Ended:
        """Run one vlmrl command, or kill it. Raises: Broken for a traceback or (unless `may_fail`) a failure."""
        out, err = self.folder / "stdout", self.folder / "stderr"
        start = time.perf_counter()
        with open(out, "wb") as o, open(err, "wb") as e:
            pid = (_spawn if (self.cold if cold is None or self.smoke else cold) else _fork)(
                self.folder, words, o.fileno(), e.fileno()
            )
            code = _wait(pid, start, kill_after)
        ended = Ended(
            code, out.read_text("utf-8", "replace"), err.read_text("utf-8", "replace"), time.perf_counter() - start
        )
        _wait_for_workers(pid)
        if code is not None and ("Traceback" in ended.err or (code and not may_fail)):
            raise Broken(f"vlmrl {' '.join(words)} ended with {code}:\n{ended.err[-2000:]}")
        return ended

    def moments(self, command: str, count: int) -> list[float]:
        """`count` moments to kill at, as shares of the command's duration: one in each of `count` equal parts."""
        shares = [(i + self.rng.random()) / count for i in range(count)]
        self.rng.shuffle(shares)
        return shares


def _spawn(folder: Path, words: Sequence[str], out: int, err: int) -> int:
    command = [sys.executable, "-c", START, *words]
    return subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, start_new_session=True).pid


def _fork(folder: Path, words: Sequence[str], out: int, err: int) -> int:
    """The command in a fork of this process, which has imported everything and computed nothing."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(folder)
        sys.argv = ["vlmrl", *words]
        from vlmrl.cli.app import main

        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, start: float, kill_after: float | None) -> int | None:
    """Exit code of the process; None when it was killed before it ended by itself."""
    while kill_after is not None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.perf_counter() - start >= kill_after:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return None if code == -signal.SIGKILL else code
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wait_for_workers(pid: int) -> None:
    """Reward workers have sessions of their own: they must end by themselves once their owner is gone."""
    deadline = time.monotonic() + 10
    while (left := _workers(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        raise Broken(f"reward workers outlived their killed owner: {left}")


def _workers(pid: int) -> list[str]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                if any(b"vlmrl.workers.keeper" in w for w in words) and str(pid).encode() in words:
                    found.append(entry.name)
    return found


def warm_up() -> None:
    """Import what the commands import, and compute nothing: threads would not survive the fork."""
    import importlib

    import transformers

    for name in (
        "train.rl",
        "train.sft",
        "checkpoint.merge",
        "tasks.digits",
        "store.verify",
        "cli.progress",
        "model.tiny",
    ):
        importlib.import_module(f"vlmrl.{name}")
    for name in (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLProcessor",
        "AutoModelForImageTextToText",
        "AutoProcessor",
    ):
        getattr(transformers, name)
    for name in ("sklearn.datasets", "pyarrow.parquet", "rich.table"):
        importlib.import_module(name)


# What must be whole


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_clean(folder: Path, prefix: str) -> None:
    """Nothing half made is left beside the result."""
    left = [p.name for p in folder.iterdir() if p.name.startswith(".") and prefix in p.name]
    if left:
        raise Broken(f"left behind after the command that went on: {left}")


def tensors(folder: Path) -> dict[tuple[str, str], tuple[Any, bytes]]:
    """By file and name: several processes each have a part of a tensor in a file of their own."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                value = file.get_tensor(name)
                found[path.name, name] = (value.dtype.str, value.shape), value.tobytes()
    return found


def record(run_dir: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on having been killed."""
    from vlmrl.store.runs import open_run

    run = open_run(run_dir.parent, run_dir.name)
    lines = sorted([*run.metrics("train"), *run.metrics("validation")], key=lambda m: (m["step"], m["kind"]))
    history = [
        {k: v for k, v in m.items() if k not in ("attempt", "time", "files") and not k.startswith(MEASURED)}
        for m in lines
    ]
    rollouts = {
        step: [
            (g.row, g.prompt_text, [(s.trajectory, s.text, repr(s.score), s.advantage, s.masked) for s in g.samples])
            for g in run.read_rollouts(step)
        ]
        for step in run.rollout_files()
    }
    found: dict[str, Any] = {"status": run.status, "metrics": json.dumps(history), "rollouts": repr(rollouts)}
    found["best"] = repr(run.manifest.best)
    for folder in run.checkpoint_dirs():
        data = json.loads((folder / "data.json").read_text())
        data["progress"].pop("seconds")
        found[f"{folder.name} data"] = data
        found[f"{folder.name} weights"] = tensors(folder / "model")
        found[f"{folder.name} optimizer"] = tensors(folder / "optimizer")
        if not found[f"{folder.name} weights"] or not found[f"{folder.name} optimizer"]:
            raise Broken(f"{folder} has no tensors: the comparison would show nothing")
    return found


def assert_same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    differ = [k for k in {**expected, **got} if expected.get(k) != got.get(k)]
    if differ:
        raise Broken(f"a killed and resumed run differs from the uninterrupted one in: {', '.join(differ)}")


# Kills


def kill_prep(bench: Bench, count: int) -> None:
    """Half of them into an empty place, half with --force over a dataset of another seed."""
    new, old = (tree(bench.folder / "data" / name) for name in ("digits", "other"))
    for number, share in enumerate(bench.moments("prep", count)):
        place = bench.folder / f"prep-{number}"
        target, force = place / "digits", ["--force"] if number % 2 else []
        place.mkdir()
        while True:
            words = ["prep", "digits", *PREP, "--out", str(target)]
            if force and not target.exists():
                bench.run(*words, "--seed", "1")
            ended = bench.run(*words, *force, kill_after=share * bench.seconds["prep"])
            if ended.code is None:
                break
            share *= 0.8
            if not force:
                target.rename(place / f"finished-{share}")
        allowed = {"before": old if force else None, "after": new}
        now = tree(target) if target.exists() else None
        states = [name for name, state in allowed.items() if now == state]
        left = sorted(p.name for p in place.iterdir() if p.name.startswith("."))
        moved = now is None and any("replaced" in name for name in left)
        if not states and not moved:
            raise Broken(f"half a dataset after a kill: {sorted(now or {})}")
        bench.saw(
            "prep",
            "after the dataset was there"
            if states == ["after"]
            else "while files were written"
            if left
            else "before the first file",
        )
        again = bench.run(*words, *force).json
        if left and not again["found"]:
            raise Broken(f"prep did not say that it found {left}")
        if tree(target) != new:
            raise Broken("prep after a kill made another dataset")
        assert_clean(place, "digits")


def kill_training(bench: Bench, command: str, count: int, expected: dict[str, Any]) -> None:
    """Kill, look, resume, and again, until the run is done; then compare it."""
    shares, number = bench.moments(command, count), 0
    while shares:
        root = bench.folder / f"{command}-{number}"
        number, kills, run_dir, step, done = number + 1, 0, None, 0, False
        while not done:
            again = ["--resume", "last"] if run_dir else [f"{command}.toml", *SIZES[command]]
            hit = bool(shares) and kills < KILLS_A_RUN
            # A resumed run has less to do; its start takes about as long as a quarter of the whole.
            rest = bench.seconds[command] * (1 if not run_dir else 0.25 + 0.75 * (1 - step / STEPS))
            ended = bench.run(command, *again, "--runs", str(root), kill_after=shares[0] * rest if hit else None)
            if run_dir and "resuming" not in ended.err and ended.code is not None:
                raise Broken(f"--resume did not say what it found:\n{ended.err}")
            if ended.code is not None:
                if hit:  # it was faster than expected
                    shares[0] *= 0.8
                break
            shares.pop(0)
            kills += 1
            run_dir, step, done = look(bench, command, root)
        run_dir = next(p for p in root.iterdir() if not p.name.startswith("."))
        checked = bench.run("runs", "verify", run_dir.name, "--runs", str(root), "--json").json
        if checked["problems"]:
            raise Broken(f"the finished run has problems: {checked['problems']}")
        assert_same(expected, record(run_dir))
        bench.compared += kills > 0


def look(bench: Bench, command: str, root: Path) -> tuple[Path | None, int, bool]:
    """Check what a kill left: (run folder or None, step of its last complete checkpoint, whether the run was done).

    A kill between the last record and the end of the process leaves a finished run.
    """
    runs = [p for p in root.iterdir() if not p.name.startswith(".")] if root.exists() else []
    if not runs:
        bench.saw(command, "before the run folder")
        return None, 0, False
    shown = bench.run("runs", "show", "last", "--runs", str(root), "--json").json
    checked = bench.run("runs", "verify", "last", "--runs", str(root), "--json", may_fail=True).json
    if errors := [p for p in checked["problems"] if p["level"] == "error"]:
        raise Broken(f"verify after a kill: {errors}")
    if shown["status"] == "done":
        bench.saw(command, "after the last record")
        return runs[0], STEPS, True
    if shown["status"] != "killed":
        raise Broken(f"a killed run is shown as {shown['status']}")
    from vlmrl.store.files import leftovers
    from vlmrl.store.layout import complete_checkpoints, incomplete_checkpoints

    saved = [int(p.name[-6:]) for p in complete_checkpoints(runs[0])]
    half = incomplete_checkpoints(runs[0]) or leftovers(runs[0])
    bench.saw(
        command,
        "while a file or checkpoint was written"
        if half
        else f"after checkpoint {saved[-1]}"
        if saved
        else "before the first checkpoint",
    )
    return runs[0], saved[-1] if saved else 0, False


def kill_merge(bench: Bench, count: int) -> None:
    expected = tree(bench.folder / "merged" / "model")  # of the same name: the card says it
    for number, share in enumerate(bench.moments("merge", count)):
        place = bench.folder / f"merge-{number}"
        place.mkdir()
        while True:
            words = ["merge", "train", "--runs", str(bench.folder / "runs"), "--out", str(place / "model")]
            if bench.run(*words, kill_after=share * bench.seconds["merge"]).code is None:
                break
            share *= 0.8
            (place / "model").rename(place / f"finished-{share}")
        there = (place / "model").exists()
        if there and tree(place / "model") != expected:
            raise Broken(f"half a merged model: {sorted(tree(place / 'model'))}")
        left = [p.name for p in place.iterdir() if p.name.startswith(".")]
        bench.saw(
            "merge",
            "after the model was there"
            if there
            else "while files were written or compared"
            if left
            else "before the first file",
        )
        again = bench.run(*words, may_fail=there)
        if there and "exists" not in again.err:
            raise Broken("merge wrote over a finished model")
        if left and "interrupted" not in again.err:
            raise Broken(f"merge did not say that it found {left}")
        if tree(place / "model") != expected:
            raise Broken("merge after a kill made another model")
        assert_clean(place, "model")


# The whole


def prepare(bench: Bench) -> dict[str, dict[str, Any]]:
    """Data, model, the uninterrupted runs in interpreters of their own, and how long each command takes here."""
    (bench.folder / "reward.py").write_text(REWARD)
    for command, kind in (("sft", "sft"), ("train", "rl")):
        (bench.folder / f"{command}.toml").write_text(f'kind = "{kind}"\n{RECIPE}')
    bench.seconds["prep"] = bench.run("prep", "digits", *PREP, cold=True).seconds
    bench.run("prep", "digits", *PREP, "--out", "data/other", "--seed", "1")
    bench.run("demo", "--model-only", "model", "--data", "data/digits")
    expected = {}
    for command in ("train",) if bench.smoke else ("sft", "train"):
        ended = bench.run(command, f"{command}.toml", *SIZES[command], "--name", command, "--json", cold=True)
        bench.seconds[command] = ended.seconds
        expected[command] = record(bench.folder / ended.json["dir"])
        if not ended.json["last"]["optim/updates"]:
            raise Broken(f"the uninterrupted {command} made no update: the comparison would show nothing")
    if bench.smoke:  # those were no interpreters of their own either
        return expected
    timed: dict[str, list[str]] = {
        "prep": ["digits", *PREP, "--out", "timed/digits"],
        "merge": ["train", "--out", "timed/model"],
        **{c: [f"{c}.toml", *SIZES[c], "--runs", "timed/runs"] for c in SIZES},
    }
    bench.run("merge", "train", "--out", "merged/model", cold=True)
    for command, words in timed.items():
        bench.seconds[command] = bench.run(command, *words).seconds
    return expected


def spread(kills: int) -> dict[str, int]:
    """The kills of each command, in the proportions of SHARES."""
    total, counts, left = sum(SHARES.values()), {}, kills
    for name, share in SHARES.items():
        counts[name] = min(left, max(1, round(kills * share / total)))
        left -= counts[name]
    counts["train"] += left
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="every command in an interpreter of its own")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it there")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmrl-kill-")))
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder.resolve(), random.Random(options.seed), options.cold, options.smoke)
        problem = _work(bench, options.kills)
    for command, found in bench.found.items():
        print(
            f"{command:6} {bench.kills[command]:3}  " + ", ".join(f"{n} {what}" for what, n in found.most_common()),
            file=sys.stderr,
        )
    kills = bench.kills.total()
    print(
        f"kill.py: {kills} kills, {kills - (problem is not None)} recovered, resumed runs bitwise equal: "
        f"{'yes' if problem is None else 'NOT SHOWN'} ({bench.compared} runs)",
        file=sys.stderr,
    )
    if problem is not None:
        print(f"broken: {problem}", file=sys.stderr)
    print(
        json.dumps(
            {
                "kills": dict(bench.kills),
                "found": {c: dict(n) for c, n in bench.found.items()},
                "runs_compared": bench.compared,
                "broken": None if problem is None else str(problem),
                "seed": options.seed,
                "cold": options.cold,
                "uninterrupted_seconds": {c: round(s, 2) for c, s in bench.seconds.items()},
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    )
    return 0 if problem is None else 1


def _work(bench: Bench, kills: int) -> Broken | None:
    try:
        if not bench.cold:
            warm_up()
        expected = prepare(bench)
        print(
            f"undisturbed: {', '.join(f'{c} {s:.1f} s' for c, s in bench.seconds.items())}", file=sys.stderr, flush=True
        )
        counts = SMOKE_SHARES if bench.smoke else spread(kills)
        steps: dict[str, Callable[[int], None]] = {
            "prep": lambda n: kill_prep(bench, n),
            "sft": lambda n: kill_training(bench, "sft", n, expected["sft"]),
            "train": lambda n: kill_training(bench, "train", n, expected["train"]),
            "merge": lambda n: kill_merge(bench, n),
        }
        for command, count in counts.items():
            if count:
                steps[command](count)
    except Broken as error:
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
