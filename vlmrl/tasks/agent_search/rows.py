"""Rows of the task agent_search: from published tables, and drawn, about a world of names that nobody knows.

A drawn picture shows the emblem of a town. Passages name the town of each emblem, its river, its mayor and more. So a
simple question needs the passage of the town, and a hard one a second passage, about the river or the mayor.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

from vlmrl.data.table_values import IMAGES, show
from vlmrl.errors import DataError, cell_text
from vlmrl.rewards.boxes.planes import Box
from vlmrl.tasks.agent_code.rows import read_answers
from vlmrl.tasks.base import NewRow
from vlmrl.tasks.drawing import GAP, LOOKS, PAPERS, Drawn, Look, Scene, Shape, draw_rows, paint
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.types import Size, hash64

SEARCH, ANSWER = "search", "answer"
STEPS = (SEARCH, ANSWER)
SIMPLE, HARD = "simple", "hard"
PASSAGES_FILE = "passages.jsonl"
MOST_CHARS = 20_000
MOST_TOWNS, BADGES, MOST_NAMES, NUM_WARES = 72, 12, 1000, 3
"""Largest number of towns, and number of clubs whose badges look like emblems; no two have the same words."""
CHAIN = re.compile(r"<(?:think|search|information|answer)>")  # begin of the steps in a published problem
HOPS = re.compile(r"([2-4])hop")
ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kl", "st", "tr", "sk")
MIDDLES = ("a", "e", "i", "o", "u", "ai", "ou")
TRADES = ("baker", "carpenter", "chemist", "dentist", "farmer", "lawyer", "pilot", "sailor", "surgeon", "weaver")

GOODS = ("bells", "boats", "cheese", "clocks", "glass", "horses", "lace", "roses", "salt", "wine")
SIGN = "sign"
ABOUT: Sequence[str] = ("town", "river", "mayor", "founded", "trade", "born", "lake", "length", SIGN)
"""Names of the questions about a town, as `--about` takes them."""


@dataclass(frozen=True)
class Drawing:
    """Settings of drawn rows: the options of the command. The same seed gives the same world."""

    side: int
    towns: int
    about: Sequence[str]
    seed: int = 0
    stepwise: bool = False


@dataclass(frozen=True)
class Town:
    """Town of a drawn world.

    Its emblem is the inner look and the outer one. The passages of the town, its mayor, its river and its market have
    a title, a text and a query. A fact is a question, its accepted answers and the number of the passage, by a name of
    ABOUT. The market sells wares under signs.
    """

    name: str
    emblem: tuple[Look, Look]
    passages: tuple[tuple[str, str], ...]
    queries: tuple[str, ...]
    facts: Mapping[str, tuple[str, tuple[str, ...], int]]
    wares: tuple[tuple[Look, str], ...]


def emblem_words(emblem: Sequence[Look]) -> str:
    inner, outer = emblem
    return f"{inner.colour} {inner.kind} in a {outer.colour} {outer.kind}"


def _name(rng: random.Random) -> str:
    return ("".join(rng.choice(ONSETS) + rng.choice(MIDDLES) for _ in range(3)) + rng.choice("lmnrs")).capitalize()


def _town(emblem: tuple[Look, Look], names: Iterator[str], rng: random.Random) -> Town:
    name, river, lake, first, last = (next(names) for _ in range(5))
    mayor, year, born = f"{first} {last}", rng.randrange(1100, 1800), rng.randrange(1940, 1990)
    trade, length, town = rng.choice(TRADES), rng.randrange(21, 480), "the town with this emblem"
    wares = tuple(zip(rng.sample(LOOKS, NUM_WARES), rng.sample(GOODS, NUM_WARES), strict=True))
    sold = ", ".join(f"{good} under a {look.colour} {look.kind}" for look, good in wares)
    passages = (
        (name, f"{name} is a town on the river {river}, and was founded in {year}. Its mayor is {mayor}. "
               f"Its emblem is a {emblem_words(emblem)}."),
        (mayor, f"{mayor}, the mayor of {name}, was born in {born} and is a {trade}."),
        (river, f"The river {river} flows through {name}. It is {length} km long and ends in the lake {lake}."),
        (f"Market of {name}", f"The market of {name} sells {sold}."),
    )  # fmt: skip
    facts = dict(zip(ABOUT[:-1], (
        ("Which town has this emblem?", (name,), 0),
        (f"Which river flows through {town}?", (river, f"river {river}"), 0),
        (f"Who is the mayor of {town}?", (mayor,), 0),
        (f"In which year was {town} founded?", (str(year),), 0),
        (f"What is the trade of the mayor of {town}?", (trade,), 1),
        (f"In which year was the mayor of {town} born?", (str(born),), 1),
        (f"In which lake does the river of {town} end?", (lake, f"lake {lake}"), 2),
        (f"How long is the river of {town}?", (f"{length} km", str(length)), 2),
    ), strict=True))  # fmt: skip
    queries = f"town with the emblem: {emblem_words(emblem)}", f"mayor {mayor}", f"river {river}", f"market of {name}"
    return Town(name, emblem, passages, queries, facts, wares)


@lru_cache(maxsize=4)
def make_world(num_towns: int, seed: int) -> tuple[tuple[Town, ...], tuple[tuple[str, str], ...]]:
    """Return the towns of a world, and further passages (title, text), with badges that look like emblems."""
    rng, emblems = random.Random(hash64("agent_search", "world", str(seed))), dict[str, tuple[Look, Look]]()
    for inner, outer in rng.sample([*product(LOOKS, LOOKS)], len(LOOKS) ** 2):
        if inner.colour != outer.colour:
            emblems.setdefault(" ".join(sorted(emblem_words((inner, outer)).split())), (inner, outer))
    chosen, names = (
        rng.sample([*emblems.values()], num_towns + BADGES),
        iter({_name(rng): 0 for _ in range(MOST_NAMES)}),
    )
    towns = tuple(_town(emblem, names, rng) for emblem in chosen[:num_towns])
    clubs = [(f"{next(names)} chess club", emblem_words(badge), *rng.sample(towns, 2)) for badge in chosen[num_towns:]]
    return towns, tuple(
        (club, f"The {club} plays in {home.name}, often against {other.name}. Its badge is a {badge}.")
        for club, badge, home, other in clubs
    )


def passages_of(drawing: Drawing) -> str:
    """Return the passages of a world as JSON lines: id, title, text."""
    towns, others = make_world(drawing.towns, drawing.seed)
    every = [*(one for town in towns for one in town.passages), *others]
    random.Random(hash64("agent_search", "passages", str(drawing.seed))).shuffle(every)
    rows = [{"id": str(number), "title": title, "text": text} for number, (title, text) in enumerate(every)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def draw_splits(drawing: Drawing, counts: Mapping[str, int]) -> dict[str, list[NewRow]]:
    """Return split -> this many drawn rows. No town is asked about in two splits, so no question about an emblem is."""
    towns, start, rows = make_world(drawing.towns, drawing.seed)[0], 0, dict[str, list[NewRow]]()
    for split, num_rows in counts.items():
        share = max(2, len(towns) * num_rows // sum(counts.values()))
        draw = partial(draw_row, drawing, towns[start : start + share])
        start += share
        rows |= draw_rows("agent_search", {split: num_rows}, drawing.seed, draw, hint="a larger --side")
    return rows


def draw_row(drawing: Drawing, towns: Sequence[Town], _: int, rng: random.Random) -> Drawn:
    """Return a row about one of these towns. Its truth has the answer, and the queries that lead to it."""
    town = rng.choice(towns)
    if (about := rng.choice(drawing.about)) == SIGN:  # the question names the town, and the picture shows the sign
        look, good = rng.choice(town.wares)
        looks, needs = (look,), [len(town.passages) - 1]
        question, answers = f"What does the market of {town.name} sell under this sign?", (good,)
    else:
        question, answers, place = town.facts[about]
        looks, needs = town.emblem, sorted({0, place})
    lookups = [(town.queries[number], town.passages[number][1]) for number in needs]
    queries = [query for query, _ in lookups]
    truth: dict[str, Any] = {"answer": list(answers), "queries": queries, "level": HARD if len(needs) > 1 else SIMPLE}
    columns = {"question": question, "mark": IMAGE}
    if drawing.stepwise:
        done = rng.randrange(len(lookups) + 1)
        truth |= {"step": STEPS[done == len(lookups)], "query": [*queries, ""][done]}
        columns["context"] = "\n".join(
            f"<search>{query}</search>\n<information>{passage}</information>" for query, passage in lookups[:done]
        )
    return Drawn(_picture(drawing.side, looks, rng), truth, columns)


def _picture(side: int, looks: Sequence[Look], rng: random.Random) -> Any:
    """Return the picture of an emblem (inner look, outer look) or a sign (one look), in a random place and size."""
    *inside, outer = looks
    width = round(side * rng.uniform(0.5, 0.9)) | 1
    x, y = (GAP + rng.randrange(max(1, side - width - 2 * GAP)) for _ in range(2))
    small, lower = round(width * 0.36) | 1, 0.52 if outer.kind == "triangle" else 0.32
    left, top = x + (width - small) // 2, y + round(width * lower)
    within = (Shape(look, Box(left, top, left + small, top + small)) for look in inside)
    return paint(Scene(side, rng.choice(PAPERS), (Shape(outer, Box(x, y, x + width, y + width)), *within)))


def written(step: str, truth: Mapping[str, Any]) -> str:
    """Return a right step of a row, in its tags."""
    text = truth.get("query") if step == SEARCH else (truth.get("answer") or [""])[0]
    return f"<{step}>{text}</{step}>"


def read_row(stepwise: bool, cells: Mapping[str, Any], size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (truth, columns) of a published row.

    Args:
        stepwise: whether rows ask for one step; else the rows that ask for the answer are questions of whole episodes.
    Raises: DataError for a row that cannot be used.
    """
    if cells.get("answerable") is False:
        raise DataError("the row says that its paragraphs do not answer the question")
    problem = cell_text(cells.get("question"), "the question").replace(IMAGE, " ")
    solution = cell_text(cells.get("solution"), "the solution")
    _, is_tagged, text = problem.partition("<query>")
    text, _, chain = text.partition("</query>")
    if not is_tagged:
        start = match.start() if (match := CHAIN.search(problem)) else len(problem)
        text, chain = problem[:start], problem[start:]
    question = " ".join(text.split())
    if not 0 < len(question) <= MOST_CHARS or max(len(problem), len(solution)) > MOST_CHARS:
        raise DataError(f"the question is {show(problem, 60)}, not a text of up to {MOST_CHARS:,} characters")
    pieces = {step: re.findall(f"<{step}>(.*?)</{step}>", solution, re.DOTALL) for step in STEPS}
    accepted = read_answers(cells.get("answer")) + read_answers(cells.get("aliases"))
    step = SEARCH if pieces[SEARCH] and not pieces[ANSWER] else ANSWER
    if step == SEARCH and not stepwise and not accepted:
        raise DataError("the solution <search> is a step of a chain", hint="--stepwise keeps such rows")
    truth: dict[str, Any] = {"step": step} if stepwise else {}
    if stepwise and step == SEARCH:
        truth["query"] = " ".join(pieces[SEARCH][-1].split())
    else:
        truth["answer"] = [*dict.fromkeys(accepted or [text.strip() for text in pieces[ANSWER][-1:]])]
    texts = truth.get("answer", [truth.get("query")])
    if not texts or not all(0 < len(text) <= MOST_CHARS for text in texts):
        raise DataError(f"the answer is {show(cells.get('answer') or solution, 60)}, not a text or a list of texts")
    columns: dict[str, Any] = {"question": question, "mark": IMAGE if size[0] else ""}
    if stepwise:
        given = cells.get("context")
        columns["context"] = (given.replace(IMAGE, " ") if isinstance(given, str) and given else chain).strip()
    hops = HOPS.match(str(cells.get("id") or ""))
    if level := cells.get("level") or (hops and f"{hops[1]}hop"):
        truth["level"] = str(level)
    return truth, columns


def row_form(stepwise: bool) -> RowForm:
    """Return the form of published rows: MAT's, and those of 2WikiMultihopQA, HotpotQA, MuSiQue and Bamboogle."""
    return RowForm(
        {
            "images": IMAGES,
            "id": ("id", "_id"),
            "question": ("problem", "question", "Question", "query"),
            "context": ("context",),
            "solution": ("solution",),
            "answer": ("answers", "golden_answers", "gt", "answer", "Answer", "label"),
            "aliases": ("answer_aliases",),
            "answerable": ("answerable",),
            "level": ("level", "difficulty", "type"),
        },
        (("question",), ("answer", "solution")),
        partial(read_row, stepwise),
        "rows have a question (problem, question), an answer (answers, gt, answer; more in answer_aliases) or a "
        "solution with <search> or <answer>, and an image or none; `context` or the problem has the steps before",
        any_image=True,
    )
