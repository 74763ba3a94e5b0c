"""Drawn pages: layouts with random words, colours and sizes, as HTML with one style block and no scripts.

Widths are in pixels or shares, and the fonts are the generic families. So the code says all that a browser needs.
"""

from __future__ import annotations

import colorsys
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

THINGS = (
    "anchor basket bridge cabin candle canyon castle cedar coffee copper cotton desert engine falcon forest garden "
    "ginger hammer harbor island jacket kettle ladder lantern lemon marble market meadow mirror mountain ocean orchid "
    "paper pepper pillow planet pocket prairie rabbit ribbon river rocket saddle salmon shadow silver spider spring "
    "stone summer thunder ticket timber tunnel valley velvet violin wagon walnut window winter"
).split()
LOOKS = "bold bright calm clear cosy crisp early fresh gentle golden grand handy honest modern quiet rapid simple".split()
DEEDS = "brings carries covers follows gathers guards joins keeps meets offers paints shapes shows turns warms".split()
LABELS = "About Blog Careers Contact Docs Events Features Help Home News Orders Pricing Shop Support Team Tours".split()
ACTIONS = ("Sign up", "Read more", "Buy now", "Get started", "Learn more", "Subscribe", "Try it", "Join us", "Book now")
PEOPLE = "Ada Ben Clara David Elena Felix Grace Hugo Iris Jonas Kira Leo Maya Nora Oscar Paula".split()
FIELDS = "City Company Country Email Name Password Phone Street Subject Website".split()
FONTS = ("sans-serif", "serif", "monospace")
SIMPLE_COLOURS = "red blue green gold pink navy teal gray tan plum lime aqua orange purple white black".split()
SIMPLE_WORDS = "sun sea sky cat dog fox red map key box cup hat ice jam leaf moon nest oak pen rain".split()


@dataclass(frozen=True)
class Look:
    """Look of a page: colours as CSS writes them, the font family, and lengths in pixels."""

    page: str
    ink: str
    panel: str
    accent: str
    on_accent: str
    line: str
    muted: str
    font: str
    size: int
    radius: int
    gap: int

    @property
    def css(self) -> str:
        """Rules that all layouts share."""
        return (
            f"* {{ box-sizing: border-box; margin: 0; }}\n"
            f"body {{ background: {self.page}; color: {self.ink}; font: {self.size}px/1.4 {self.font}; }}\n"
            f"h1 {{ font-size: {2 * self.size}px; }}\nh2 {{ font-size: {round(1.4 * self.size)}px; }}\n"
            f".box {{ background: {self.panel}; border: 1px solid {self.line}; border-radius: {self.radius}px; "
            f"padding: {self.gap}px; }}\n"
            f".row {{ display: flex; gap: {self.gap}px; padding: {self.gap}px; }}\n.row > * {{ flex: 1; }}\n"
            f".button {{ display: inline-block; background: {self.accent}; color: {self.on_accent}; "
            f"border-radius: {self.radius}px; padding: {self.gap // 2}px {self.gap}px; }}\n"
            f".muted {{ color: {self.muted}; }}\n"
        )


class Words:
    """Random words for pages."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def one(self, words: tuple[str, ...] | list[str]) -> str:
        return self.rng.choice(words)

    def some(self, words: tuple[str, ...] | list[str], least: int, most: int) -> list[str]:
        return self.rng.sample(words, self.rng.randint(least, most))

    def title(self) -> str:
        return f"{self.one(LOOKS)} {self.one(THINGS)} {self.one(THINGS)}".title()

    def sentence(self) -> str:
        end = f" and {self.one(DEEDS)} a {self.one(THINGS)}" if self.rng.random() < 0.5 else ""
        return f"The {self.one(LOOKS)} {self.one(THINGS)} {self.one(DEEDS)} the {self.one(THINGS)}{end}.".capitalize()

    def text(self, least: int, most: int) -> str:
        return " ".join(self.sentence() for _ in range(self.rng.randint(least, most)))

    def price(self) -> str:
        return f"${self.rng.randint(3, 199)}.{self.one(['00', '49', '50', '90', '99'])}"

    def items(self, least: int, most: int, item: Callable[[], str]) -> str:
        """Return pieces of code, one a line."""
        return "\n".join(item() for _ in range(self.rng.randint(least, most)))


Layout = Callable[[Words, Look], tuple[str, str]]
"""(words, look) -> rules of the layout, and the content of the body."""


def _bar(w: Words, look: Look) -> tuple[str, str]:
    """Return the rules and the code of a bar with the name of the site and links."""
    css = (
        f".bar {{ display: flex; gap: {look.gap}px; background: {look.accent}; color: {look.on_accent}; "
        f"padding: {look.gap}px; }}\n.bar b {{ flex: 1; }}\n"
    )
    links = "".join(f"<span>{name}</span>" for name in w.some(LABELS, 2, 4))
    return css, f'<div class="bar"><b>{w.one(THINGS).title()}</b>{links}</div>\n'


def _cards(w: Words, look: Look) -> tuple[str, str]:
    css, bar = _bar(w, look)
    cards = w.items(2, 4, lambda: f'<div class="box"><h2>{w.title()}</h2><p>{w.text(1, 2)}</p></div>')
    hero = f'<div class="hero"><h1>{w.title()}</h1><p class="muted">{w.sentence()}</p></div>\n'
    css += f".hero {{ padding: {2 * look.gap}px {look.gap}px; text-align: {w.one(['left', 'center'])}; }}\n"
    return css, f'{bar}{hero}<div class="row">\n{cards}\n</div>'


def _form(w: Words, look: Look) -> tuple[str, str]:
    css = (
        f".form {{ width: {w.rng.randrange(45, 80, 5)}%; margin: {look.gap}px {w.one(['auto', f'{look.gap}px'])}; }}\n"
        f".field {{ background: {look.page}; border: 1px solid {look.line}; border-radius: {look.radius}px; "
        f"padding: {look.gap // 2}px; margin: 4px 0 {look.gap}px; }}\n"
    )
    fields = "\n".join(
        f'<p>{name}</p><div class="field muted">{w.one(THINGS)}</div>' for name in w.some(FIELDS, 2, 5)
    )
    button = f'<span class="button">{w.one(ACTIONS)}</span>'
    return css, f'<div class="box form"><h2>{w.title()}</h2>\n{fields}\n{button}</div>'


def _table(w: Words, look: Look) -> tuple[str, str]:
    css = (
        f"table {{ width: 100%; border-collapse: collapse; }}\nth {{ background: {look.accent}; "
        f"color: {look.on_accent}; }}\nth, td {{ text-align: left; padding: {look.gap // 2}px; "
        f"border: 1px solid {look.line}; }}\ntr:nth-child(odd) td {{ background: {look.panel}; }}\n"
        f".page {{ padding: {look.gap}px; }}\nh1 {{ margin-bottom: {look.gap}px; }}\n"
    )
    extra = w.rng.random() < 0.5
    head = "".join(f"<th>{name}</th>" for name in ("Item", "Owner", "Price", *(["Stock"] if extra else [])))
    rows = w.items(3, 8, lambda: "".join([
        f"<tr><td>{w.one(THINGS).title()}</td><td>{w.one(PEOPLE)}</td><td>{w.price()}</td>",
        f"<td>{w.rng.randint(0, 99)}</td></tr>" if extra else "</tr>",
    ]))  # fmt: skip
    return css, f'<div class="page"><h1>{w.title()}</h1>\n<table>\n<tr>{head}</tr>\n{rows}\n</table></div>'


def _pricing(w: Words, look: Look) -> tuple[str, str]:
    css = f".plan {{ text-align: center; }}\n.price {{ font-size: {round(1.8 * look.size)}px; color: {look.accent}; }}\n"

    def plan() -> str:
        lines = "".join(f"<p>{w.rng.randint(2, 50)} {thing}s</p>" for thing in w.some(THINGS, 2, 4))
        return (
            f'<div class="box plan"><h2>{w.one(LOOKS).title()}</h2><p class="price">{w.price()}</p>{lines}'
            f'<span class="button">{w.one(ACTIONS)}</span></div>'
        )

    return css, f'<div class="row"><h1>{w.title()}</h1></div>\n<div class="row">\n{w.items(2, 3, plan)}\n</div>'


def _article(w: Words, look: Look) -> tuple[str, str]:
    css = (
        f".text {{ width: {w.rng.randrange(60, 95, 5)}%; margin: {look.gap}px auto; }}\n"
        f".text > * {{ margin-bottom: {look.gap}px; }}\n"
        f".quote {{ border-left: 6px solid {look.accent}; padding-left: {look.gap}px; font-style: italic; }}\n"
    )
    line = f'<p class="muted">By {w.one(PEOPLE)}, {w.rng.randint(1, 28)} {w.one(["May", "June", "July"])}</p>'
    paragraphs = w.items(2, 3, lambda: f"<p>{w.text(2, 5)}</p>")
    quote = f'<p class="quote">{w.sentence()}</p>'
    return css, f'<div class="text"><h1>{w.title()}</h1>\n{line}\n{paragraphs}\n{quote}\n<p>{w.text(2, 4)}</p></div>'


def _sidebar(w: Words, look: Look) -> tuple[str, str]:
    css, bar = _bar(w, look)
    css += (
        f".page {{ display: flex; }}\n.side {{ width: {w.rng.randrange(20, 35, 5)}%; background: {look.panel}; "
        f"padding: {look.gap}px; }}\n.side p {{ padding: 4px 0; }}\n.main {{ flex: 1; padding: {look.gap}px; }}\n"
        f".main h2 {{ margin-top: {look.gap}px; }}\n"
    )
    links = "".join(f"<p>{name}</p>" for name in w.some(LABELS, 3, 7))
    parts = w.items(1, 3, lambda: f"<h2>{w.title()}</h2><p>{w.text(1, 3)}</p>")
    main = f'<div class="main"><h1>{w.title()}</h1>\n{parts}</div>'
    return css, f'{bar}<div class="page"><div class="side">{links}</div>\n{main}</div>'


def _list(w: Words, look: Look) -> tuple[str, str]:
    side = 2 * look.size
    css = (
        f".page {{ padding: {look.gap}px; }}\n.item {{ display: flex; gap: {look.gap}px; align-items: center; "
        f"padding: {look.gap // 2}px 0; border-bottom: 1px solid {look.line}; }}\n.item p {{ flex: 1; }}\n"
        f".dot {{ width: {side}px; height: {side}px; border-radius: {w.one(['50%', '4px'])}; background: {look.accent}; }}\n"
    )
    items = w.items(3, 7, lambda: (
        f'<div class="item"><div class="dot"></div><p><b>{w.one(PEOPLE)}</b> {w.one(DEEDS)} a {w.one(THINGS)}</p>'
        f'<span class="muted">{w.rng.randint(1, 59)} min</span></div>'
    ))  # fmt: skip
    return css, f'<div class="page"><h1>{w.title()}</h1>\n{items}</div>'


def _dashboard(w: Words, look: Look) -> tuple[str, str]:
    css = (
        f".number {{ font-size: {2 * look.size}px; color: {look.accent}; }}\n"
        f".chart {{ display: flex; gap: {look.gap // 2}px; align-items: flex-end; margin: 0 {look.gap}px; }}\n"
        f".chart div {{ flex: 1; background: {look.accent}; }}\n"
    )
    tiles = w.items(2, 4, lambda: (
        f'<div class="box"><p class="muted">{w.one(LABELS)}</p><p class="number">{w.rng.randint(10, 9999):,}</p></div>'
    ))  # fmt: skip
    bars = "".join(f'<div style="height: {w.rng.randrange(20, 160, 10)}px"></div>' for _ in range(w.rng.randint(4, 9)))
    head = f'<div class="row"><h1>{w.title()}</h1></div>\n'
    return css, f'{head}<div class="row">\n{tiles}\n</div>\n<div class="box chart">{bars}</div>'


def _gallery(w: Words, look: Look) -> tuple[str, str]:
    css, bar = _bar(w, look)
    css += (
        f".grid {{ display: grid; grid-template-columns: repeat({w.rng.randint(2, 4)}, 1fr); gap: {look.gap}px; "
        f"padding: {look.gap}px; }}\n.tile {{ height: {w.rng.randrange(60, 140, 10)}px; border-radius: {look.radius}px; }}\n"
    )
    shades = (look.accent, look.panel, look.line, look.muted)
    tiles = w.items(3, 8, lambda: (
        f'<div><div class="tile" style="background: {w.one(shades)}"></div><p>{w.one(THINGS).title()} {w.price()}</p></div>'
    ))  # fmt: skip
    return css, f'{bar}<div class="grid">\n{tiles}\n</div>'


def _chat(w: Words, look: Look) -> tuple[str, str]:
    css = (
        f".chat {{ padding: {look.gap}px; }}\n.said {{ width: {w.rng.randrange(50, 75, 5)}%; margin-top: {look.gap}px; }}\n"
        f".own {{ margin-left: auto; background: {look.accent}; color: {look.on_accent}; }}\n"
    )
    said = w.items(3, 6, lambda: f'<div class="box said{w.one(["", " own"])}">{w.text(1, 2)}</div>')
    head = f'<h2>{w.one(PEOPLE)} <span class="muted">online</span></h2>'
    return css, f'<div class="chat">{head}\n{said}</div>'


def _landing(w: Words, look: Look) -> tuple[str, str]:
    css = (
        f".hero {{ background: {look.panel}; text-align: center; padding: {w.rng.randrange(40, 120, 10)}px {look.gap}px; }}\n"
        f".hero > * {{ margin-bottom: {look.gap}px; }}\n.foot {{ padding: {look.gap}px; text-align: center; }}\n"
    )
    buttons = " ".join(f'<span class="button">{name}</span>' for name in w.some(ACTIONS, 1, 2))
    hero = f'<div class="hero"><h1>{w.title()}</h1>\n<p>{w.text(1, 2)}</p>\n{buttons}</div>'
    foot = f'<p class="foot muted">{" | ".join(w.some(LABELS, 2, 4))}</p>'
    return css, f"{hero}\n{foot}"


LAYOUTS: Mapping[str, Layout] = {
    "cards": _cards,
    "form": _form,
    "table": _table,
    "pricing": _pricing,
    "article": _article,
    "sidebar": _sidebar,
    "list": _list,
    "dashboard": _dashboard,
    "gallery": _gallery,
    "chat": _chat,
    "landing": _landing,
}
SIMPLE = "simple"
"""Name of the layout of simple pages."""


def draw_page(layout: str, rng: random.Random) -> str:
    """Return the code of a page of a layout: a name of LAYOUTS, or SIMPLE."""
    if layout == SIMPLE:
        return _simple(rng)
    look = _draw_look(rng)
    css, body = LAYOUTS[layout](Words(rng), look)
    return f"<!DOCTYPE html>\n<html>\n<head>\n<style>\n{look.css}{css}</style>\n</head>\n<body>\n{body}\n</body>\n</html>"


def _simple(rng: random.Random) -> str:
    """Return a page of one or two flat blocks, of which some have a word."""
    page, *colours = rng.sample(SIMPLE_COLOURS, 3)
    blocks = "".join(
        f'<p style="background:{colour};height:{rng.randrange(16, 48, 8)}px">{rng.choice([*SIMPLE_WORDS, "", ""])}</p>'
        for colour in colours[: rng.randint(1, 2)]
    )
    return f'<body style="background:{page}">{blocks}</body>'


def _draw_look(rng: random.Random) -> Look:
    hue, is_dark = rng.random(), rng.random() < 0.25
    other = (hue + rng.choice((0.0, 0.08, 0.33, 0.5))) % 1.0

    def colour(hue: float, light: float, strength: float) -> str:
        rgb = colorsys.hls_to_rgb(hue, 1.0 - light if is_dark else light, strength)
        return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)

    return Look(
        page=colour(hue, rng.choice((1.0, 0.97, 0.94)), 0.3),
        ink=colour(hue, rng.choice((0.0, 0.12, 0.2)), 0.3),
        panel=colour(hue, rng.choice((0.98, 0.9, 0.85)), 0.5),
        accent=colour(other, rng.uniform(0.3, 0.42), rng.uniform(0.4, 0.9)),
        on_accent=colour(other, 1.0, 0.0),
        line=colour(hue, rng.choice((0.75, 0.65)), 0.2),
        muted=colour(hue, 0.45, 0.1),
        font=rng.choice(FONTS),
        size=rng.randint(13, 19),
        radius=rng.choice((0, 0, 4, 8, 16)),
        gap=rng.randrange(10, 26, 2),
    )
