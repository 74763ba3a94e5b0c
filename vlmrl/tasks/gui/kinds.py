"""Kinds of small web pages: what is asked, the page, the state of the page that is the goal, and the steps to it.

A page keeps its state in the attributes `data-...` of its body, which its scripts (page.html) set when something is
clicked or typed. The goal holds while this state is exactly the one of `Page.goal`. So one more click may undo it, and
nothing that a model writes in its answer can set it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.tasks.drawing import page_template

LAYOUT = 448
"""Width and height in which a page is laid out, in CSS pixels; it is then scaled to the size of the row."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _words(
    "Apple Bread Candle Drum Engine Feather Glove Hammer Island Jacket Kettle Lamp Mirror Needle Orange Pencil Quilt "
    "Ribbon Saddle Table Umbrella Violin Window Yarn Basket Carpet Dollar Eagle Flute Garden Helmet Iron Jewel Kite "
    "Ladder Magnet Napkin Onion Paper Rocket Shovel Ticket Velvet Walnut"
)
VERBS = _words("Save Send Print Share Reset Archive Renew Export Pause Start Copy Delete Update Open Confirm Hide")
NAMES = _words("Ada Ben Cleo Dora Emil Finn Greta Hugo Ines Jona Kira Leo Mira Nils Olga Paul Rosa Tim Uma Vera")
CITIES = _words("Rome Paris Oslo Lima Cairo Delhi Tokyo Quito Dublin Athens Berlin Prague Havana Lisbon")
MONTHS = _words("January February March April May June July August September October November December")
COLOURS = _words("red green blue yellow purple black orange pink grey")
PRESS = ("Press", "Click", "Push")
Step = tuple[str, str]
"""Step of a demonstration: ("click", CSS selector), ("type", text) or ("press", key)."""
Draw = random.Random


class Page(NamedTuple):
    """Page of one row: what is asked, the template's variables, the state to be reached, the steps, the first state."""

    request: str
    facts: Mapping[str, Any]
    goal: Mapping[str, str]
    steps: Sequence[Step]
    start: Mapping[str, str] = {}

    def html(self, kind: str, rng: Draw, side: int) -> str:
        """Return the whole page, in a random style. `side`: width and height of what is seen of it, in pixels."""
        hue, is_dark = rng.randrange(360), rng.random() < 0.25
        place = rng.choice(("office", "shop", "club", "house", "desk"))
        look = {
            "zoom": round(side / LAYOUT, 6), "top": rng.randint(6, 110), "side": rng.randint(8, 40),
            "size": rng.randint(14, 16), "font": rng.choice(("sans-serif", "serif", "monospace", "Verdana")),
            "radius": rng.choice((0, 4, 9)), "pad": rng.randint(4, 8), "gap": rng.randint(8, 22),
            "accent": f"hsl({hue} 70% {58 if is_dark else 40}%)", "paper": f"hsl({hue} 25% {18 if is_dark else 94}%)",
            "panel": f"hsl({hue} 30% {28 if is_dark else 99}%)", "edge": f"hsl({hue} 20% 58%)",
            "ink": "#eee" if is_dark else "#222", "title": f"{rng.choice(WORDS)} {place} {rng.randint(2, 99)}",
        }  # fmt: skip
        template = page_template(Path(__file__).parent / "page.html")
        return template.render(look, **self.facts, kind=kind, start=self.start, months=list(MONTHS))


def _at(name: str, within: str = "") -> Step:
    return ("click", f'{within}[data-n="{name}"]')


def _button(rng: Draw) -> Page:
    names = rng.sample(VERBS, rng.randint(8, 12))
    name = rng.choice(names)
    return Page(f"{rng.choice(PRESS)} the button {name}.", {"names": names}, {"pressed": name}, [_at(name)])


def _spot(rng: Draw) -> Page:
    name, width, height = rng.choice(COLOURS), rng.randint(70, 110), rng.randint(60, 100)
    place = {"left": rng.randint(0, LAYOUT - width), "top": rng.randint(0, LAYOUT - height)}
    request, facts = f"{rng.choice(PRESS)} the {name} button.", {"boxes": [(name, width, height)], "place": place}
    return Page(request, facts, {"pressed": name}, [_at(name)])


def _colour(rng: Draw) -> Page:
    names = rng.sample(COLOURS, rng.randint(7, 9))
    boxes = [(name, rng.randint(45, 95), rng.randint(36, 80)) for name in names]
    name = rng.choice(names)
    return Page(f"{rng.choice(PRESS)} the {name} button.", {"boxes": boxes}, {"pressed": name}, [_at(name)])


def _boxes(rng: Draw) -> Page:
    names = rng.sample(WORDS, rng.randint(5, 8))
    chosen = sorted(rng.sample(names, rng.randint(2, 3)), key=names.index)
    request = f"Tick {', '.join(chosen[:-1])} and {chosen[-1]}, nothing else, and press Save."
    return Page(request, {"names": names}, {"saved": " ".join(chosen)}, [*map(_at, chosen), _at("Save")])


def _radio(rng: Draw) -> Page:
    groups = {"size": ("small", "medium", "large", "huge"), "day": ("Monday", "Tuesday", "Friday", "Sunday")}
    groups = {key: rng.sample(names, 4) for key, names in groups.items()}
    goal = {key: rng.choice(names) for key, names in groups.items()}
    request = f"Choose the size {goal['size']} and the day {goal['day']}."
    return Page(request, {"groups": groups}, goal, list(map(_at, goal.values())))


def _select(rng: Draw) -> Page:
    cities, titles = rng.sample(CITIES, 14), rng.sample(("from", "to"), 2)
    lists, title = {titles[0]: cities[:7], titles[1]: cities[7:]}, rng.choice(titles)
    city = rng.choice(lists[title])
    return Page(f'Select {city} in the list "{title}".', {"lists": lists}, {title: city}, [_at(title), _at(city)])


def _field(rng: Draw) -> Page:
    names = rng.sample(("name", "city", "street", "code", "colour"), rng.randint(3, 4))
    name, word = rng.choice(names), f"{rng.choice(CITIES)} {rng.randint(10, 99)}"
    request = f'{rng.choice(("Write", "Type", "Enter"))} "{word}" in the field "{name}".'
    return Page(request, {"names": names}, {name: word}, [_at(name), ("type", word)])


def _login(rng: Draw) -> Page:
    user, word = rng.choice(NAMES).lower(), f"{rng.choice(WORDS).lower()}{rng.randint(10, 99)}"
    facts = {"names": rng.sample(("user", "password"), 2), "ends": rng.sample(("Sign in", "Register"), 2)}
    goal = {"user": user, "password": word, "pressed": f"Sign in {user} {word}"}
    steps = [_at("user"), ("type", user), _at("password"), ("type", word), _at("Sign in")]
    return Page(f"Sign in as {user} with the password {word}.", facts, goal, steps)


def _scroll(rng: Draw) -> Page:
    names = rng.sample(WORDS, 24)
    name = names[rng.randint(12, 23)]
    return Page(f"Scroll to {name}, and press its button Order.", {"names": names}, {"pressed": name}, [_at(name)])


def _tabs(rng: Draw) -> Page:
    tabs, names = rng.sample(("News", "Prices", "People", "Files", "Help"), 4), rng.sample(VERBS, 6)
    tab, name = rng.choice(tabs[1:]), rng.choice(names)
    request, goal = f"On the tab {tab}, press the button {name}.", {"pressed": f"{tab} {name}"}
    return Page(
        request, {"panels_of": {one: rng.sample(names, 6) for one in tabs}}, goal, [_at(tab), _at(f"{tab} {name}")]
    )


def _dialog(rng: Draw) -> Page:
    names, answers = rng.sample(VERBS, 8), rng.sample(("Accept", "Decline", "Later", "Never", "Always"), 3)
    name, answer = rng.choice(names), rng.choice(answers)
    question = rng.choice(("May we send you letters?", "Do you like this page?", "Shall we keep your data?"))
    facts, goal = {"names": names, "answers": answers, "question": question}, {"answer": answer, "pressed": name}
    return Page(f"Answer {answer}, then press the button {name}.", facts, goal, [_at(answer), _at(name)])


def _stepper(rng: Draw) -> Page:
    start = {name: str(rng.randint(3, 9)) for name in rng.sample(("adults", "children", "rooms", "nights", "bags"), 3)}
    name, change = rng.choice(list(start)), rng.choice((-3, -2, 2, 3, 4))
    goal = {**start, name: str(int(start[name]) + change)}
    steps = [_at(f"{name} {'more' if change > 0 else 'less'}")] * abs(change)
    return Page(f"Set {name} to {goal[name]}.", {}, goal, steps, start)


def _sort(rng: Draw) -> Page:
    heads, names = rng.sample(("Price", "Stock", "Weight"), 3), rng.sample(WORDS, 6)
    rows, head = [(name, *rng.sample(range(10, 99), 3)) for name in names], rng.choice(heads)
    request = f"Sort by {head}, the largest first. A second press on the same head reverses the order."
    return Page(request, {"heads": ["Name", *heads], "rows": rows}, {"sort": f"{head} down"}, [_at(head)] * 2)


def _paged(rng: Draw) -> Page:
    names, number = rng.sample(WORDS, 20), rng.randrange(5, 20)
    name, steps = names[number], [*[_at("Next")] * (number // 5), _at(names[number])]
    pages = {f"Page {page + 1} of 4": names[page * 5 : page * 5 + 5] for page in range(4)}
    return Page(f"Find {name} on one of the pages, and press it.", {"pages": pages}, {"pressed": name}, steps)


def _nested(rng: Draw, levels: Sequence[Sequence[str]], request: str) -> Page:
    chosen = [rng.choice(names) for names in levels]
    steps = [_at("/".join(chosen[:end])) for end in range(1, len(chosen) + 1)]
    return Page(request.format(", ".join(chosen)), {"levels": levels}, {"chosen": "/".join(chosen)}, steps)


def _menu(rng: Draw) -> Page:
    words = ("File", "Edit", "View", "Tools"), ("Copy", "Find", "Mark", "Move", "Sort"), ("all", "one", "text", "lines")
    levels = [rng.sample(names, count) for names, count in zip(words, (3, 4, 3), strict=True)]
    return _nested(rng, levels, "In the menu, choose {}.")


def _tree(rng: Draw) -> Page:
    levels = [rng.sample(WORDS, 3), rng.sample(CITIES, 2), [f"{name.lower()}.txt" for name in rng.sample(NAMES, 3)]]
    return _nested(rng, levels, "In the folders, choose {}.")


def _keys(rng: Draw) -> Page:
    sign, one, two = rng.choice("+-x"), str(rng.randint(11, 99)), str(rng.randint(2, 9))
    typed = f"{one}{sign}{two}="
    return Page(f"Type {one} {sign} {two} with the keys, then press =.", {}, {"typed": typed}, list(map(_at, typed)))


def _calendar(rng: Draw) -> Page:
    year, month, day, away = rng.randint(2024, 2031), rng.randint(3, 10), rng.randint(1, 28), rng.choice((-2, -1, 1, 2))
    steps = [*[_at("after" if away > 0 else "before")] * abs(away), _at(str(day), "#days ")]
    request, goal = f"Choose {day} {MONTHS[month + away - 1]} {year}.", {"day": f"{year}-{month + away}-{day}"}
    return Page(request, {"year": year, "month": month}, goal, steps)


def _search(rng: Draw) -> Page:
    words, sorts = rng.sample(WORDS, 5), rng.sample(("old", "new", "big", "small", "red", "blue"), 4)
    word = rng.choice(words).lower()
    result = f"{rng.choice(sorts)} {word}"
    steps = [_at("text"), ("type", word), rng.choice((_at("Search"), ("press", "Enter"))), _at(result)]
    facts = {"hits": [f"{sort} {one.lower()}" for one in words for sort in sorts]}
    return Page(f"Search for {word}, and open the result {result}.", facts, {"opened": result}, steps)


def _cart(rng: Draw) -> Page:
    start = dict.fromkeys((name.lower() for name in rng.sample(WORDS, 4)), "0")
    chosen = {name: rng.randint(1, 2) for name in rng.sample(list(start), 2)}
    steps = [_at(f"{name} more") for name, count in chosen.items() for _ in range(count)]
    goal = {**start, **{name: str(count) for name, count in chosen.items()}}
    goal["ordered"] = " ".join(goal.values())
    parts = " and ".join(f"{count} {name}" for name, count in chosen.items())
    return Page(f"Put {parts} in the cart, and order.", {}, goal, [*steps, _at("Order")], start)


KINDS: Mapping[str, Callable[[Draw], Page]] = {
    "button": _button, "spot": _spot, "colour": _colour, "boxes": _boxes, "radio": _radio, "select": _select,
    "field": _field, "login": _login, "scroll": _scroll, "tabs": _tabs, "dialog": _dialog, "stepper": _stepper,
    "sort": _sort, "paged": _paged, "menu": _menu,
    "tree": _tree, "keys": _keys, "calendar": _calendar, "search": _search, "cart": _cart,
}  # fmt: skip
"""Name of a kind -> function that draws a page of it."""
UNSEEN = ("tree", "keys", "calendar", "search", "cart")
"""Kinds that only the test split has, unless an option says otherwise."""
