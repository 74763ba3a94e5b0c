"""A rank that trains nothing: gloo all-reduces in a loop, with the hooks of a real one, and faults on demand.

    python stub_rank.py RUN_FOLDER STEPS [FAULT:RANK:STEP]

Faults: user (a VlmrlError), bug (a ValueError), hang (sleeps), peerless (sleeps, and so do the others: nobody notices a
death), deaf (ignores SIGTERM and SIGINT), child (leaves a process behind and goes on), memory (runs out of it, unless
started again with half), memories (runs out of it then too), stop (a breakpoint that every rank comes to).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from vlmrl.dist import world
from vlmrl.dist.world import MEETING_VARIABLE
from vlmrl.errors import DataError, OutOfMemoryError

SECONDS_A_STEP = 0.05


def main() -> None:
    run_dir, steps = Path(sys.argv[1]), int(sys.argv[2])
    fault, at_rank, at_step = (sys.argv[3] if len(sys.argv) > 3 else "none:0:0").split(":")
    rank = int(os.environ["RANK"])
    world.phase("load")
    print(f"early word of rank {rank}", file=world.stdout(), flush=True)
    print(f"HF_TOKEN=hf_{'Ab3d' * 8} of rank {rank}", file=sys.stderr)
    print(f"a library's progress on rank {rank}", file=sys.stderr)
    import torch
    import torch.distributed as dist

    world_size, timeout = int(os.environ["WORLD_SIZE"]), timedelta(seconds=120)
    meeting = os.environ.get(MEETING_VARIABLE)  # on one machine
    store = None if meeting is None else dist.FileStore(meeting, world_size)
    own = {} if store is None else {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timeout, **own)
    world.join_run(run_dir, 1)
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        world.stderr().write("\rcounting 1")
    world.stderr().write(f"\r          \rrank {rank} is up\n" if rank == 0 else f"rank {rank} is up\n")
    (run_dir / f"halved-{rank}").write_text(json.dumps(world.halved()))
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: asked.append(n))
    if fault == "peerless":
        world.phase("rollout", 0)
        (run_dir / f"step-{rank}").write_text("1")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    for step in range(steps):
        world.phase("rollout", step)
        time.sleep(SECONDS_A_STEP)
        if fault == "stop" and step == int(at_step):
            breakpoint()
        if rank == int(at_rank) and step == int(at_step):
            if fault == "user":
                raise DataError("row 17 has no image", where="digits row 17")
            if fault == "bug":
                raise ValueError("a bug of ours")
            if fault == "memories" or (fault == "memory" and not world.halved()):
                error = OutOfMemoryError("out of memory with a row")
                error.halved = {} if world.halved() else {"train.tokens_per_row": [400, 200]}
                raise error
            if fault == "hang":
                time.sleep(600)
            if fault == "child":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                (run_dir / f"child-{rank}").write_text(str(child.pid))
        world.phase("update", step)
        votes = torch.tensor([len(asked)])
        dist.all_reduce(votes)
        (run_dir / f"step-{rank}").write_text(str(step))
        if votes.item():
            (run_dir / f"saved-{rank}").write_text(f"step {step}, signals {asked}")
            dist.barrier()
            dist.destroy_process_group()
            sys.exit(130)
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.distributed  # noqa: F401  (before the first beat: on a busy machine it takes longer than a hang may)

    world.run(main)
