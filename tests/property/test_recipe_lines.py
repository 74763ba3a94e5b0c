"""Properties of the line finder: whatever the order and form of keys, each is found on the line it was written on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.recipe.files import parse_toml
from vlmrl.recipe.toml_lines import dotted, key_lines, parse_dotted

BARE = st.text("abcdefgh_-0123", min_size=1, max_size=6)
NAMES = st.one_of(BARE, st.text("ab. \"'#=[]\\é", min_size=1, max_size=5))
SCALARS = st.sampled_from(
    ["1", "-2.5e-3", "true", '"a # b"', "'c = [d]'", '"\\"x\\" ]"', "1979-05-27 07:32:00", '"""one"""', "'''a'b'''"]
)
LONG = st.sampled_from(
    ['"""\nx = 1\n[y]\n"""', "'''\n# no\n\"\"\"\n'''", '"""a\\\n   b""""', "[\n 1, # one\n 2,\n]", "[[1], [2,\n3]]"]
)
GAPS = st.sampled_from(["", "\n", "# a comment = 1\n", "  \n\n"])


def spell(name: str) -> str:
    """A key as TOML text: bare where it may be, else quoted."""
    bare = name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name)
    return name if bare else json.dumps(name)


@st.composite
def documents(draw):
    """(text, place -> line) of a random document of tables, lists of tables, dotted keys and inline tables."""
    lines: dict[tuple, int] = {}
    text = ""

    def here() -> int:
        return text.count("\n") + 1

    def pair(table: tuple, name: str) -> None:
        nonlocal text
        text += draw(GAPS)
        form = draw(st.sampled_from(["plain", "long", "dotted", "inline", "list"]))
        lines[(*table, name)] = here()
        if form == "plain":
            text += f"{spell(name)} = {draw(SCALARS)}  # end\n"
        elif form == "long":
            text += f"{spell(name)} = {draw(LONG)}\n"
        elif form == "dotted":
            inner = draw(NAMES)
            lines[(*table, name, inner)] = here()
            text += f"{spell(name)} . {spell(inner)} = {draw(SCALARS)}\n"
        elif form == "inline":
            inner = draw(NAMES)
            lines[(*table, name, inner)] = here()
            text += f"{spell(name)} = {{ {spell(inner)} = {draw(SCALARS)} }}\n"
        else:
            lines[(*table, name, 0)] = here()
            lines[(*table, name, 1)] = here() + 1
            text += f"{spell(name)} = [{draw(SCALARS)},\n  {draw(SCALARS)}]\n"

    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=5))
    for name in draw(st.lists(NAMES.filter(lambda n: n not in names), unique=True, max_size=2)):
        pair((), name)
    for name in names:
        count = draw(st.sampled_from([0, 1, 2]))  # 0: a table; else a list of so many tables
        for number in range(max(1, count)):
            text += draw(GAPS)
            place = (name, number) if count else (name,)
            lines[place] = here()
            if number == 0:
                lines[(name,)] = here()
            text += f"[[ {spell(name)} ]]\n" if count else f"[{spell(name)}] # table\n"
            for key in draw(st.lists(NAMES, unique=True, max_size=3)):
                pair(place, key)
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    return text, lines


@pytest.mark.slow
@given(documents())
def test_every_key_is_found_on_the_line_it_was_written_on(document):
    text, lines = document
    parse_toml(text)  # the document is valid
    found = key_lines(text)
    assert {place: found.get(place) for place in lines} == lines


@pytest.mark.slow
@given(documents())
def test_every_value_that_tomllib_reads_has_a_line(document):
    found = key_lines(document[0])

    def walk(value, place):
        if place:
            assert place in found, (place, document[0])
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, (*place, name))
        elif isinstance(value, list) and all(isinstance(v, dict) for v in value):
            for number, inner in enumerate(value):
                walk(inner, (*place, number))

    walk(parse_toml(document[0]), ())


@pytest.mark.slow
@given(st.lists(NAMES.filter(lambda n: '"' not in n and "\\" not in n), min_size=1, max_size=4))
def test_a_dotted_name_reads_back_as_its_parts(parts):
    assert parse_dotted(dotted(tuple(parts))) == tuple(parts)


@given(st.text(max_size=12))
def test_any_text_is_a_dotted_key_or_is_refused(text):
    parts = parse_dotted(text)
    assert parts is None or (len(parts) >= 1 and all(isinstance(p, str) for p in parts))
