"""All SVG attacks that need nothing but a text; `svg_attacks_reach.planted` makes those that aim at planted files."""

from __future__ import annotations

from svg_attack_parts import SvgAttack
from svg_attacks_load import REFERRERS, STROKES, SURFACES
from svg_attacks_long import LONG, SLOW_TEXT
from svg_attacks_reach import REACH
from svg_attacks_seen import SEEN

ATTACKS: tuple[SvgAttack, ...] = (*SURFACES, *STROKES, *REFERRERS, *LONG, *SLOW_TEXT, *REACH, *SEEN)
