"""Named points at which a test may kill the process, to prove that what is on disk survives it."""

from __future__ import annotations

import os

VARIABLE = "VLMRL_CRASH_AT"
EXIT_CODE = 137
_hits: dict[str, int] = {}


def crash_point(name: str) -> None:
    """End this process at once, as a kill would, when `VLMRL_CRASH_AT` names this point; otherwise do nothing.

    The variable holds a point's name, or `name:3` for the third time it is passed. Buffers are not flushed and no
    `finally` runs. Points: mid-manifest, mid-rollout, mid-save, before-complete, mid-prune.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    point, _, count = wanted.partition(":")
    if point != name:
        return
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] >= int(count or 1):
        os._exit(EXIT_CODE)
