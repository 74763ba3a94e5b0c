"""Reflection of two processes is that of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_ranks


@pytest.mark.slow
def test_two_ranks_count_what_one_counts() -> None:
    run_ranks(2, Path(__file__).parent / "reflection_rank.py")
