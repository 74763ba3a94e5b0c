"""An environment for tests of endpoints: tools that give a text, pictures, errors, or nothing in time."""

from __future__ import annotations

DESK = '''
import time
from PIL import Image
from vlmrl.environments.base import EnvironmentUnavailable, Observation

class Desk:
    def reset(self, images, **row):
        self.images, self.uses = images, 0

    def add(self, a: int, b: int):
        """Add numbers.

        Args:
            a: one.
            b: other.
        """
        self.uses += 1
        return f"sum {a + b}"

    def look(self, side: int = 56):
        """Show a picture."""
        self.uses += 1
        return ["before", Image.new("RGB", (side, 28), (side, 90, 200)), "behind"]

    def tell(self, length: int):
        """Say many words."""
        return "word " * length

    def sleep(self, seconds: float):
        """Rest."""
        time.sleep(seconds)
        return "awake"

    def hang(self):
        """Do not listen."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                time.sleep(60)
            except BaseException:
                pass

    def leave(self):
        """End it."""
        return Observation("bye", done=True, measured={"left": 1.0})

    def call_out(self):
        """Ask a service."""
        raise EnvironmentUnavailable("the service is down")

    def get_reward(self):
        return self.uses / 4

class Shows(Desk):
    def reset(self, images, seed, **row):
        super().reset(images)
        return ["seed ", Image.new("RGB", (28, 28), (9, 9, 9)), str(seed)]
'''
"""Text of a file with `Desk`, and with `Shows`, whose reset shows a picture."""
