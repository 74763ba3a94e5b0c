"""What kill_ranks.py kills: the command with its processes, a run on its way through moments, and what is compared."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kill
from kill import Broken

OTHER_SIZE = 0.15
"""Share of resumes that are done by one process instead of --gpus."""
START_SHARE = 0.2
"""Share of moments while processes start and load; the others fall into steps, saves and validations."""
VLLM = ("rollout.engine=vllm", "rollout.max_prompt_tokens=300", "rollout.kv_cache_gib=0.25")
ENGINES = {
    "torch": (),
    "vllm": VLLM,
    "split": (*VLLM, "rollout.engine_gpus=1"),
    "parts": (*VLLM, "rollout.tensor_parallel=2"),
}
"""Name -> settings: the built-in engine, vLLM in each rank, one in a process of its own for all, one in two parts."""
HOSTED = ("split", "parts")
"""Those that have processes of their own."""
CLOSE = {"rel": 2e-4, "abs": 2e-5}
"""Metrics of a run that was once in other hands, as in tests/ranks/test_shared_runs.py."""


@dataclass
class Going:
    """A command of several processes that runs: its launcher, and what its ranks say of themselves."""

    pid: int
    tmp: Path
    out: Path
    err: Path
    began: float
    code: int | None = None

    def beats(self) -> dict[int, dict[str, Any]]:
        """Rank -> what it last said. Without a launcher {}: the one process says nothing."""
        found = {}
        for path in self.tmp.glob("vlmrl-launch-*/rank-*.beat"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                found[int(path.stem.removeprefix("rank-"))] = json.loads(path.read_bytes())
        return found

    def ended(self) -> bool:
        if self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None


@dataclass
class Run:
    """A run on its way through several moments. `sizes`: how many processes each attempt had."""

    root: Path
    sizes: list[int] = field(default_factory=list)
    moments: int = 0

    @property
    def dir(self) -> Path | None:
        found = [p for p in self.root.iterdir() if p.is_dir() and not p.name.startswith(".")]
        return found[0] if found else None


@dataclass
class Table:
    """Kind of death -> what came of it -> how often."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    where: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, kind: str, outcome: str, phase: str, seconds: float) -> None:
        self.rows.setdefault(kind, Counter())[outcome] += 1
        self.where[phase] += 1
        self.seconds.append(seconds)
        print(f"  {len(self.seconds)}: {kind} in {phase}: {outcome}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def show(self) -> str:
        outcomes = sorted({o for row in self.rows.values() for o in row})
        width = max(map(len, ["kind of death", *self.rows]))
        lines = [f"{'kind of death':{width}}  " + "  ".join(outcomes)]
        for kind, row in self.rows.items():
            lines.append(f"{kind:{width}}  " + "  ".join(f"{row[o] or '':>{len(o)}}" for o in outcomes))
        return "\n".join(lines)


class Bench(kill.Bench):
    """Starts the command, does something to it, and looks at what is left."""

    def prepare(self, gpus: int, engine: str) -> None:
        """Data, model, and the run that nobody touches."""
        self.engine, self.size, self.table, self.starts = engine, gpus, Table(), 0
        if engine == "torch" or gpus > 1:
            kill.warm_up()
            import torch.distributed.launcher.api  # noqa: F401  (the launcher's: forked, not imported each time)
        (self.folder / "reward.py").write_text(kill.REWARD)
        (self.folder / "train.toml").write_text(f'kind = "rl"\n{kill.RECIPE}')
        self.run("prep", "digits", *kill.PREP)
        self.run("demo", "--model-only", "model", "--data", "data/digits")
        self.last_tick, whole = 0, Run(self.folder / "whole")
        whole.root.mkdir()
        going = self.go(whole, 1 if self.smoke else self.size)
        while not going.ended():
            if (beat := going.beats().get(0)) and beat["phase"] != "start" and "start" not in self.seconds:
                self.seconds["start"] = time.perf_counter() - going.began
            self.last_tick = beat["ticks"] if beat else self.last_tick
            time.sleep(0.01)
        self.seconds["undisturbed"] = time.perf_counter() - going.began
        if going.code or whole.dir is None or (self.size > 1 and not self.smoke and not self.last_tick):
            raise Broken(f"the undisturbed run ended with {going.code}:\n{going.err.read_text()[-2000:]}")
        self.whole_dir = whole.dir
        self.whole = kill.record(whole.dir)

    def go(self, run: Run, size: int) -> Going:
        """Start the run, or go on with it, with so many processes."""
        self.starts += 1
        run.sizes.append(size)
        tmp = self.folder / f"tmp-{self.starts}"
        tmp.mkdir()
        settings = [word for setting in ENGINES[self.engine] for word in ("--set", setting)]
        words = ["--resume", run.dir.name] if run.dir else ["train.toml", *kill.SIZES["train"], *settings]
        gpus = size + (self.engine == "split")
        words = ["train", *words, "--gpus", str(gpus), "--runs", str(run.root)]
        going = Going(0, tmp, tmp / "stdout", tmp / "stderr", time.perf_counter())
        os.environ["TMPDIR"] = tempfile.tempdir = str(tmp)
        start = kill._spawn if self.smoke or (self.engine != "torch" and size == 1) else kill._fork
        with open(going.out, "wb") as o, open(going.err, "wb") as e:
            going.pid = start(self.folder, words, o.fileno(), e.fileno())
        return going

    def wait_for_moment(self, going: Going, run: Run, needs_ranks: bool) -> bool:
        """Sleep until a random moment of the command. Returns False when it ended before."""
        share, steps = self.rng.random(), saved_step(run) / kill.STEPS
        if self.smoke:
            return wait_for_step(going)
        if self.size == 1 or self.rng.random() < START_SHARE:
            # One process says nothing of itself; while several start there is nothing to say.
            length = self.seconds["undisturbed" if self.size == 1 else "start"]
            until = going.began + share * length
            missing = needs_ranks and self.size > 1
            while (time.perf_counter() < until or (missing and not going.beats())) and not going.ended():
                time.sleep(0.002)
            return not going.ended()
        target = 2 + share * (1 - steps) * (self.last_tick - 3)
        while not going.ended():
            beat = going.beats().get(0)
            if beat and beat["ticks"] >= target:
                time.sleep(self.rng.random() * 0.1)
                return not going.ended()
            time.sleep(0.001)
        return False

    def wait_for_end(self, going: Going, pids: set[int], seconds: float) -> None:
        """Until the command and all it started have ended. Raises: Broken when something is left after so long."""
        deadline = time.perf_counter() + seconds
        left: set[int] = set()
        while time.perf_counter() < deadline:
            pids |= tree(going.pid) if not going.ended() else set()
            left = {pid for pid in pids if lives(pid)}
            if going.ended() and not left:
                return
            time.sleep(0.02)
        commands = "\n".join(f"  {pid}: {command_of(pid)}" for pid in sorted(left))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        said = going.err.read_text()[-1500:]
        raise Broken(f"{len(left)} processes were left after {seconds:g} s:\n{commands}\n{said}")

    def finish(self, run: Run) -> None:
        """Go on with a run until it is done, and compare it with the one that nobody touched."""
        size = 1 if self.smoke or (self.rng.random() < OTHER_SIZE and self.engine != "parts") else self.size
        going = self.go(run, size)
        self.wait_for_end(going, set(), 300.0)
        if going.code or run.dir is None:
            raise Broken(f"resuming ended with {going.code}:\n{going.err.read_text()[-2000:]}")
        self.compare(run)

    def compare(self, run: Run) -> None:
        """A finished run with the one that nobody touched."""
        assert run.dir is not None
        self.verify(run, {"warning"})
        if left_out(run.dir):
            how = "finished, a sample left out and counted"  # another run than the one that nobody touched
        elif self.engine != "torch":
            how = "same rows"
            same_rows(self.whole_dir, run.dir)
        elif set(run.sizes) == {self.size}:
            how, last = "equal to the bit", f"step-{kill.STEPS:06d}"
            found = kill.record(run.dir)
            # A run that was stopped saved where the other did not, and kept that checkpoint in place of another.
            both = {k for k in self.whole if k in found or k.startswith(last) or not k.startswith("step-")}
            kill.assert_same(*({k: v for k, v in r.items() if k in both} for r in (self.whole, found)))
        else:
            how = "equal within tolerance"
            assert_close(self.whole_dir, run.dir)
        self.table.ends[how] += 1
        shutil.rmtree(run.dir)

    def verify(self, run: Run, allowed: set[str]) -> list[dict[str, Any]]:
        """`vlmrl runs verify`. Raises: Broken for a problem of a level that is not allowed."""
        checked = self.run("runs", "verify", "last", "--runs", str(run.root), "--json", may_fail=True).json
        if wrong := [p for p in checked["problems"] if p["level"] not in allowed]:
            raise Broken(f"verify: {wrong}")
        return checked["problems"]


def wait_for_step(going: Going) -> bool:
    """Wait until rank 0 is in its fourth step, with a checkpoint behind it. Returns False when the command ended."""
    while not going.ended():
        if going.beats().get(0, {"step": 0})["step"] >= 3:
            return True
        time.sleep(0.01)
    return False


def tree(pid: int) -> set[int]:
    """A process and all that it and they started and that still live, zombies too."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return set(found)


def engines(pids: set[int]) -> list[int]:
    """Those of these processes that are engines, or parts of one."""
    return [
        pid for pid in sorted(pids) if any(name in command_of(pid) for name in ("vlmrl.rollout.vllm.host", "Worker_TP"))
    ]


def command_of(pid: int) -> str:
    """Its command line; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").replace("\0", " ").strip()
    except OSError:
        return ""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_done(run: Run) -> bool:
    return run.dir is not None and json.loads((run.dir / "manifest.json").read_text())["status"] == "done"


def saved_step(run: Run) -> int:
    from vlmrl.store.layout import complete_checkpoints

    saved = complete_checkpoints(run.dir) if run.dir else []
    return int(saved[-1].name[-6:]) if saved else 0


def left_out(run_dir: Path) -> bool:
    """Return whether a lost reward worker's sample counts for nothing in this run."""
    run = open_run(run_dir)
    lost = sum(line.get("reward/errors", 0) for line in run.metrics("train"))
    evaluated = (json.loads(path.read_text()) for path in run_dir.glob("eval/*/summary.json"))
    return bool(lost or sum(summary["reward_errors"] for summary in evaluated))


def open_run(run_dir: Path) -> Any:
    from vlmrl.store import runs

    return runs.open_run(run_dir.parent, run_dir.name)


def same_rows(whole: Path, run_dir: Path) -> None:
    """Two runs drew the same rows in the same steps."""
    drawn = []
    for folder in (whole, run_dir):
        run = open_run(folder)
        drawn.append({s: [(g.row.source, g.row.prompt_id) for g in run.read_rollouts(s)] for s in run.rollout_files()})
    if drawn[0] != drawn[1]:
        raise Broken("another run drew other rows")


def assert_close(whole: Path, run_dir: Path) -> None:
    """Two runs sampled the same tokens and measured the same within CLOSE."""
    same_rows(whole, run_dir)
    runs = [open_run(folder) for folder in (whole, run_dir)]
    for step in runs[0].rollout_files():
        ids = [[s.trajectory.response_ids for g in run.read_rollouts(step) for s in g.samples] for run in runs]
        if ids[0] != ids[1]:
            raise Broken(f"other tokens in step {step}")
    for kind in ("train", "validation"):
        for ours, theirs in zip(*(run.metrics(kind) for run in runs), strict=True):
            for name, wanted in theirs.items():
                if isinstance(wanted, float) and not name.startswith(kill.MEASURED):
                    gap = abs(ours[name] - wanted)
                    if gap > CLOSE["abs"] + CLOSE["rel"] * abs(wanted):
                        raise Broken(f"{name} of step {theirs['step']} differs by {gap:.2g}")
