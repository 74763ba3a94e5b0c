"""Responses and ground truths to compare rewards on: right, nearly right, mutated, and hostile.

    python tests/golden/taxonrl/generate.py fungi 1000 --seed 0        one JSON list [response, ground truth] a line

The expected numbers beside this file were computed on such inputs by the published functions (max-vkl/TaxonRL at
f4b80ac), which are not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

NAMES = (
    "Passeriformes",
    "Piciformes",
    "Boletales",
    "Corvidae",
    "Picidae",
    "Boletaceae",
    "Corvus",
    "Pica",
    "Boletus",
    "Order Passeriformes",
    "Corvus.",
    "CORVUS",
    "nan",
    "",
    "  ",
    "x",
    "\u0130x",
    "Stra\u00dfe",
    "\u01c5",
)
LABELS = {
    "chimp": ("Adult", "SubAdult", "Sub-Adult", "Sub Adult", "sub_adult", "Juvenile", "Infant", "Elderly", "", "Teen"),
    "gorilla": ("Silverback", "Adult female", "adult-female", "Blackback", "Juvenil", "Juvenile", "Infant", "", "M"),
    "sea_star": (
        "Asru",
        "Anau",
        "asru.",
        "ANAU",
        "Asterias rubens",
        "Anthenea australiae",
        "A. rubens",
        "rubens",
        "",
        "not Asterias but Anthenea",
        "x  .rubens",
        "Asterias<b>rubens",
    ),
}
TAGS = {"fungi": "", "bird": "", "chimp": "age-group", "gorilla": "type", "sea_star": "species", "answer": ""}
RANKS = {"fungi": {"order": 3, "family": 1, "genus": 2}, "bird": {"order": 4, "family": 3, "genus": 2}}
STEP = {"fungi": 4, "bird": 3}
WORDS = ("Same", "Different", "Uncertain", "same", "DIFFERENT", "\u017fame", "D\u0131fferent", "Diff", "")
DISTANCES = ("sameSpecies", "sameGenus", "sameFamily", "sameOrder", "sameClass", "SAMEORDER", "samegenera", "")
ANSWERS = (
    "1.0000",
    "0.0000",
    "0.5000",
    "0.9000",
    "0.3679",
    "0.3678",
    "0.4999",
    "1",
    "0",
    "1e0",
    "0_1",
    "7.0000",
    "-1",
    "nan",
    "inf",
    "1e400",
    "True",
    "None",
    "\u0661.\u0660\u0660\u0660\u0660",
    "\uff11.\uff10\uff10\uff10\uff10",
    "0.12345",
    "00.5000",
    "1/2",
    "",
    "x",
    "\n0.5",
    "0.5\n0",
    " 1.0000 ",
)
TRUE_ANSWERS = (
    "1",
    "0",
    "1",
    "0",
    "1",
    "0",
    "1.0",
    "0.0",
    "0.7",
    "0.5",
    "1e0",
    " 1 ",
    "",
    "nan",
    "2",
    "-1",
    "x",
    "True",
)
ODD_TRUTHS = (None, True, False, 1, 0, 0.3, 1.0, 2, -1, float("nan"), float("inf"), "", ";", "1", "0")
BLANKS = ("", "", "", " ", "\n", "\t", " \n ", "\u00a0", "\u2003", "\x1c", "\u200b", "\x85")
TALK = (
    "",
    "",
    "they look alike",
    "a < b / c",
    "\n\n",
    "# line\n",
    "x;y",
    "\u00fcn\u00ef\u2028",
    "e.g. <order>",
    "</think>",
    "<answer>0.5</answer>",
    "\\<order\\>",
    "Image1=a; Image2=b",
)
SOUP = (
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "1.0000",
    "0.5",
    "\n",
    " ",
    ";",
    "<species>",
    "</species>",
    "<order>",
    "</order>",
    "<type>",
    "</type>",
    "<age-group>",
    "</age-group>",
    "Image1=",
    "Image2=",
    "Adult",
    "Same",
    "asterias",
    "/",
    "<",
    ">",
)

Random = random.Random


def samples(domain: str, count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """(response, ground truth) of a domain, or of `answer`; the same for the same seed."""
    rng = Random(f"{domain} {seed}")
    for _ in range(count):
        truth = ground_truth(rng, domain)
        yield mutated(rng, response(rng, domain, truth)), truth


def ground_truth(rng: Random, domain: str) -> Any:
    """Mostly in the domain's layout; sometimes in another one, cut short, or no text at all."""
    if rng.random() < 0.04:
        return rng.choice(ODD_TRUTHS)
    if rng.random() < 0.05:
        domain = rng.choice(list(TAGS))
    fields = [rng.choice(TRUE_ANSWERS)]
    if domain in RANKS:
        fields += ["species"] * (8 if domain == "fungi" else 7)
        if domain == "bird":
            fields[1] = rng.choice(DISTANCES)
        apart = rng.randrange(4)  # how many ranks, from the genus up, have names of their own
        for height, rank in enumerate(("genus", "family", "order")):
            first = rng.choice(NAMES[6:9] if height == 0 else NAMES[3:6] if height == 1 else NAMES[:3])
            second = rng.choice(NAMES) if height < apart else first
            place = RANKS[domain][rank]
            for at, name in ((place, first), (place + STEP[domain], second)):
                fields[at] = name if rng.random() < 0.97 else rng.choice(("", "nan", name.upper()))
    elif domain in LABELS:
        first, second = rng.choices(LABELS[domain], k=2)
        fields += [first, second] if domain != "chimp" else [first, "M", second, "F"]
        if domain == "gorilla" and rng.random() < 0.2:
            fields = [fields[0], first, "M", second, *["F"] * rng.randrange(2)]
    if rng.random() < 0.05:
        fields = fields[: rng.randrange(len(fields) + 1)]
    return rng.choice((";", "; ", " ; ")).join(fields)


def response(rng: Random, domain: str, truth: Any) -> str:
    """A response in the domain's format, with names that are mostly right and a tag that is sometimes not."""
    fields = [field.strip() for field in str(truth).split(";")]

    def said(place: int, others: tuple[str, ...]) -> str:
        return fields[place] if place < len(fields) and rng.random() < 0.8 else rng.choice(others)

    tags = []
    for rank, place in RANKS.get(domain, {}).items():
        if rng.random() < 0.85:
            names = said(place, NAMES), said(place + STEP[domain], NAMES)
            tags.append(tag(rng, rank, *(names if rng.random() < 0.65 else (rng.choice(WORDS),))))
    if domain in LABELS:
        second = 3 if domain == "chimp" or len(fields) == 5 else 2
        name = rng.choice(("type", "age-group")) if domain == "gorilla" else TAGS[domain]
        tags.append(tag(rng, name, said(1, LABELS[domain]), said(second, LABELS[domain])))
    if rng.random() < 0.12:
        tags.append(tag(rng, rng.choice(("order", "family", "species", "type")), rng.choice(NAMES), rng.choice(NAMES)))
    if rng.random() < 0.08:
        rng.shuffle(tags)

    def blank() -> str:
        return rng.choice(BLANKS)

    thinking = f"{blank()}<think>{blank()}{rng.choice(TALK)}{blank().join(tags)}{rng.choice(TALK)}{blank()}</think>"
    return f"{thinking}{blank()}<answer>{blank()}{rng.choice(ANSWERS)}{blank()}</answer>{blank()}"


def tag(rng: Random, name: str, first: str, second: str | None = None) -> str:
    """`<name>first; second</name>` or `<name>first</name>`, sometimes misspelt, named or with other separators."""
    body = first
    if second is not None:
        separator = rng.choice(("; ", "; ", "; ", ";", ",", ";; ", " ; ", ";\n"))
        marks = ("Image1=", "Image2=") if rng.random() < 0.4 else ("", "")
        body = f"{marks[0]}{first}{separator}{marks[1]}{second}"
        body += f"; {rng.choice(NAMES)}" if rng.random() < 0.04 else ""
    other = (
        name.upper(),
        name.title(),
        name.replace("i", "\u0131"),
        name.replace("s", "\u017f"),
        f" {name}",
        name + "s",
    )
    opening = name if rng.random() < 0.96 else rng.choice(other)
    closing = opening if rng.random() < 0.95 else rng.choice(("order", "type", "age-group", "species", "\\" + name))
    space = rng.choice(BLANKS)
    return f"<{space}{opening}>{space}{body}{space}<{space}/{closing}{space}>"


def mutated(rng: Random, text: str) -> str:
    """Half of the time the text as it is, else one of the things that go wrong, or that are tried on purpose."""
    return text if rng.random() < 0.5 else rng.choice(MUTATIONS)(rng, text)


def _edited(rng: Random, text: str) -> str:
    letters = list(text)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(letters) + 1)
        letters[at : at + rng.randrange(2)] = rng.choice(("", *"<>/;\n =.019_ab\u00a0\u017f"))
    return "".join(letters)


def _slashless(rng: Random, text: str) -> str:
    return text.replace("</", rng.choice(("<", "</ ", "< /", "\\</")))


def _long(rng: Random, text: str) -> str:
    return text.replace(
        "<think>", "<think>" + rng.choice(("x ", "lorem\n", "a<b ", "<answer>")) * rng.randrange(300), 1
    )


def _noise(rng: Random, text: str) -> str:
    return "".join(rng.choices(string.printable + "\u017f\u0131\u00e9\u00df\u2028", k=rng.randrange(80)))


def _answer_alone(rng: Random, text: str) -> str:
    answer = rng.choice(ANSWERS)
    return rng.choice((answer, "<answer>" * rng.randrange(4) + answer + "</answer>" * rng.randrange(3), "", "\n"))


MUTATIONS: tuple[Callable[[Random, str], str], ...] = (
    _edited,
    _edited,
    _edited,
    _slashless,
    _long,
    _noise,
    _answer_alone,
    lambda rng, text: text[: rng.randrange(len(text) + 1)],
    lambda rng, text: text[rng.randrange(len(text) + 1) :],
    lambda rng, text: text + text,
    lambda rng, text: "<think>" + text,
    lambda rng, text: f"<answer>{rng.choice(ANSWERS)}</answer>{text}",
    lambda rng, text: text.replace("<answer>", "<answer>\n", 1) + f"<answer>{rng.choice(ANSWERS)}</answer>",
    lambda rng, text: text.replace("<", "\\<").replace(">", "\\>"),
    lambda rng, text: "".join(rng.choices(SOUP, k=rng.randrange(30))),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("domain", choices=list(TAGS))
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for sample in samples(args.domain, args.count, args.seed):
        print(json.dumps(sample))


if __name__ == "__main__":
    main()
