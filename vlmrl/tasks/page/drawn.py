"""Drawn pages: layouts (drawn.jinja) with random words, colours and sizes, as HTML with one style block and no scripts.

Lengths are in pixels or shares, and the fonts are the generic families. So the code says all that a browser needs.
"""

from __future__ import annotations

import colorsys
import random
from pathlib import Path

from vlmrl.tasks.drawing import page_template

LAYOUTS = ("boxes", "form", "table", "pricing", "article", "sidebar", "list", "dashboard", "gallery", "chat", "landing")
SIMPLE = "simple"
"""Name of the layout of simple pages."""
WORDS = {
    "things": "anchor basket bridge cabin candle canyon castle cedar coffee copper cotton desert engine falcon forest "
    "garden ginger hammer harbor island jacket kettle ladder lantern lemon marble market meadow mirror mountain ocean "
    "orchid paper pepper pillow planet pocket prairie rabbit ribbon river rocket saddle salmon shadow silver spider "
    "spring stone summer thunder ticket timber tunnel valley velvet violin wagon walnut window winter",
    "looks": "bold bright calm clear cosy crisp early fresh gentle golden grand handy honest modern quiet rapid simple",
    "deeds": "brings carries covers follows gathers guards joins keeps meets offers paints shapes shows turns warms",
    "labels": "About Blog Careers Contact Docs Events Features Help Home News Orders Pricing Shop Support Team Tours",
    "actions": "Begin Book Browse Buy Download Explore Join Order Register Reserve Search Send Subscribe Try Upgrade",
    "people": "Ada Ben Clara David Elena Felix Grace Hugo Iris Jonas Kira Leo Maya Nora Oscar Paula",
    "fields": "City Company Country Email Name Password Phone Street Subject Website",
    "colours": "red blue green gold pink navy teal gray tan plum lime aqua orange purple white black",
    "short": "sun sea sky cat dog fox red map key box cup hat ice jam leaf moon nest oak pen rain",
}


class Words(random.Random):
    """Random numbers, and random words for pages. A kind of words is a key of WORDS."""

    def some(self, kind: str, least: int, most: int) -> list[str]:
        return self.sample(WORDS[kind].split(), self.randint(least, most))

    def one(self, kind: str) -> str:
        return self.choice(WORDS[kind].split())

    def thing(self) -> str:
        return self.one("things")

    def title(self) -> str:
        return f"{self.one('looks')} {self.thing()} {self.thing()}".title()

    def sentence(self) -> str:
        end = f" and {self.one('deeds')} a {self.thing()}" if self.random() < 0.5 else ""
        return f"The {self.one('looks')} {self.thing()} {self.one('deeds')} the {self.thing()}{end}."

    def text(self, least: int, most: int) -> str:
        return " ".join(self.sentence() for _ in self.times(least, most))

    def price(self) -> str:
        return f"${self.randint(3, 199)}.{self.choice(['00', '49', '50', '90', '99'])}"

    def times(self, least: int, most: int) -> range:
        return range(self.randint(least, most))


def draw_page(layout: str, seed: int) -> str:
    """Return the code of a page of a layout: a name of LAYOUTS, or SIMPLE, which is one or two flat blocks."""
    w = Words(seed)
    if layout != SIMPLE:
        return page_template(Path(__file__).parent / "drawn.jinja").render(w=w, layout=layout, **_look(w))
    page, *colours = w.some("colours", 2, 3)
    blocks = ""
    for colour in colours:
        word = w.one("short") if w.random() < 0.9 else ""
        blocks += f'<p style="background:{colour};height:{w.randrange(16, 40, 8)}px">{word}</p>'
    return f'<body style="background:{page}">{blocks}</body>'


def _look(w: Words) -> dict[str, str | int]:
    """Return the names in the rules of layouts with their values: colours, the font, and lengths."""
    hue, is_dark = w.random(), w.random() < 0.25
    other = (hue + w.choice((0.0, 0.08, 0.33, 0.5))) % 1.0

    def colour(hue: float, light: float, strength: float) -> str:
        rgb = colorsys.hls_to_rgb(hue, 1.0 - light if is_dark else light, strength)
        return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)

    return {
        "page": colour(hue, w.choice((1.0, 0.97, 0.94)), 0.3),
        "ink": colour(hue, w.choice((0.0, 0.12, 0.2)), 0.3),
        "panel": colour(hue, w.choice((0.98, 0.9, 0.85)), 0.5),
        "accent": colour(other, w.uniform(0.3, 0.42), w.uniform(0.4, 0.9)),
        "on_accent": colour(other, 1.0, 0.0),
        "line": colour(hue, w.choice((0.75, 0.65)), 0.2),
        "muted": colour(hue, 0.45, 0.1),
        "font": w.choice(("sans-serif", "serif", "monospace")),
        "align": w.choice(("left", "center")),
        "size": w.randint(13, 19),
        "gap": w.randrange(10, 26, 2),
        "radius": w.choice((0, 0, 4, 8, 16)),
        "share": w.randrange(50, 95, 5),
        "part": w.randrange(15, 40, 5),
    }
