"""The table of SVG attacks, and those of them that are quick, in this process."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from svg_attack_parts import KINDS, SvgAttack
from svg_attack_table import ATTACKS

from vlmrl.svg.draw import DrawJob, draw_svg
from vlmrl.untrusted import CodeRefused

QUICK = [attack for attack in ATTACKS if attack.kind in ("copy", "hidden", "odd")]


def test_the_table_is_whole():
    assert len(ATTACKS) >= 100 and len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    counts = Counter(attack.kind for attack in ATTACKS)
    assert set(counts) <= set(KINDS) and all(counts[kind] >= 8 for kind in ("memory", "time", "copy", "hidden", "odd"))


@pytest.mark.parametrize("attack", QUICK, ids=[attack.name for attack in QUICK])
def test_what_is_seen(attack: SvgAttack):
    begin = time.monotonic()
    try:
        pixels = draw_svg(DrawJob(attack.svg, (100, 100))).pixels.astype(int)
    except CodeRefused:
        assert attack.expect != "drawn"
        return
    assert time.monotonic() - begin < 30
    if attack.expect == "drawn":
        assert np.abs(pixels[50, 50] - (0, 128, 0)).max() <= 3
    else:
        assert not (np.abs(pixels - (255, 0, 255)).max(axis=2) < 60).any()
