"""One rank that shares a queue with another: `python deal_rank.py OUT CASE`, in the environment of torchrun.

It writes the joined items to OUT/RANK at the end. The case names the rank that dies in the middle, or is "none".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vlmrl.dist.world import join_world
from vlmrl.rollout.sample import PromptQueue

COUNT, FIRST = 40, 2


def main(out: str, dies: str) -> None:
    with join_world("cpu", timeout_seconds=60) as world:
        told = Path(out) / str(world.rank)
        for draw in range(2):
            queue = PromptQueue(COUNT, world, f"{draw}", FIRST)
            for number, _ in enumerate(queue):
                if dies == str(world.rank) and number == FIRST + 3:
                    # The other rank is known to be in the middle, too.
                    world.store.wait(["begun"])
                    os._exit(1)
                if number == FIRST + 1:
                    world.store.set("begun", "")
                if dies != "none" and number == FIRST + 4:
                    while not told.with_name("dead").exists():
                        pass
            items = queue.join([f"{world.rank}:{index}" for index in queue.taken])
            assert [item.partition(":")[2] for item in items] == [str(i) for i in range(COUNT)]
        told.write_text(" ".join(items))


if __name__ == "__main__":
    main(*sys.argv[1:])
