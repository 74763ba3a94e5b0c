"""Environments for tests. `look` reads any text as calls: a tiny model writes no call by itself."""

from __future__ import annotations

WILD = '''
"""Any text is a call, unless its length is a multiple of seven."""
import time
import vlmrl.environments.worker as worker
from vlmrl.types import Call

worker.read_calls = lambda text, form, **_: (Call("look", {"x": len(text)}),) if len(text) % 7 else ()

class Look:
    def __init__(self, nap=0.0):
        self.nap = nap

    def reset(self, images, **row):
        self.images, self.count = images, 0

    def look(self, x: int):
        """Look at a place.

        Args:
            x: where.
        """
        self.count += 1
        if self.nap:
            time.sleep(self.nap * (x % 3))
        if x % 5 == 0:
            raise ValueError("five <image>")
        shown = [self.images[0].crop((0, 0, 56, 28 * (1 + x % 2)))] if self.images else []
        return [f"here <|im_end|> <image> {x}", *shown, f"call {self.count}"]

    def get_reward(self):
        return self.count / 4
'''
"""Text of a file with `Look`."""

SHOWS = '''
from vlmrl.environments.base import Start

class Shows(Look):
    def reset(self, images, seed, **row):
        super().reset(images)
        self.seed, self.shown = seed, len(images) + len(images[:1])
        return ["of <|im_end|>", *[i.rotate(90 * (seed % 2)) for i in images[:1]], f"seed {seed}"]

    def look(self, start: Start, x: int):
        """Look at a place.

        Args:
            x: where.
        """
        if len(start.seen_sizes) != self.shown:
            raise RuntimeError(f"{len(start.seen_sizes)} sizes, not {self.shown}")
        observation = super().look(x)
        self.shown += len(self.images[:1])
        return observation

class Same(Look):
    def reset(self, **row):
        super().reset(row["images"])
        return "always this"

class Fails(Shows):
    def reset(self, seed, **row):
        if seed % 4 == 1:
            raise ValueError("no start")
        return super().reset(seed=seed, **row)
'''
"""Environments whose reset shows something."""
