"""Published rules of VFig: equal to its code to the digit, zeros and flaws included, with limits that it lacks.

tests/golden/vfig_rules.json holds what `rule-based-eval` of RAIVNLab/VFig computed for figures that were written or
generated for this test. A case without `response` compares a figure with itself; in a case that `stops`, the published
code stopped with an error, and its batch counts zeros. `shapes` and `arrows` are the metrics in the order below.
"""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.tasks.vfig.published.document import Unscorable, colour_score, dash_style, parse, published_cleanliness
from vlmrl.tasks.vfig.published.outlines import path_end, path_length, path_points
from vlmrl.tasks.vfig.published.response import marker_key, tip
from vlmrl.tasks.vfig.published.score import (
    ARROW_METRICS,
    SHAPE_METRICS,
    RulesScore,
    aspect_ratio_score,
    label_score,
    position_score,
    published_rules,
)

TOTALS = ("extra_penalty", "composite")
CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "vfig_rules.json").read_text(encoding="utf-8")
)
BY_NAME = {case["name"]: case for case in CASES}


def scored(case: dict[str, Any]) -> RulesScore:
    return published_rules(case["truth"], case.get("response", case["truth"]), case.get("metadata"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_scores_are_those_of_the_published_code_to_the_digit(case: dict[str, Any]) -> None:
    result = scored(case)
    shapes = dict(zip((*SHAPE_METRICS, *TOTALS), case["shapes"], strict=True))
    arrows = dict(zip((*ARROW_METRICS, *TOTALS), case["arrows"], strict=True))
    assert result.shapes == pytest.approx(shapes, abs=1e-9)
    assert result.arrows == pytest.approx(arrows, abs=1e-9)
    assert result.overall == pytest.approx((shapes["composite"] + arrows["composite"]) / 2, abs=1e-9)
    assert bool(result.note) == case.get("stops", False), result.note


def test_golden_cases_are_not_trivial() -> None:
    overall = [scored(case).overall for case in CASES]
    assert len(CASES) > 80
    assert len({round(score, 6) for score in overall}) > 50
    assert sum(case.get("stops", False) for case in CASES) > 8
    assert any("metadata" in case for case in CASES)


# Score of a figure against itself, which the published rules often deny.
SELF_SCORES = [
    ("self: equal heads", 1.0),
    ("self: unequal heads", 0.971),  # After a match, the next head but one is compared.
    ("self: markers", 0.971),  # A marker is compared with a head of 10 pixels on 2.
    ("self: patterns", 0.961),  # Colours of a response's patterns are not read.
    ("self: unknown colour names", 0.889),
    ("self: fill by a class", 0.889),
    ("self: one label of three", 0.667),
    ("self: marker-start", 0.857),
    ("self: dangling arrow", 0.657),
    ("self: plain lines", 0.579),
    ("self: arrows with style", 0.5),
    ("self: texts by tspans", 0.5),
    ("self: sizes with units", 0.5),
    ("self: one label for all", 0.324),
    ("self: no shape_0", 0.0),
    ("self: view box with commas", 0.0),
]


@pytest.mark.parametrize(("name", "score"), SELF_SCORES)
def test_a_figure_does_not_always_equal_itself(name: str, score: float) -> None:
    case = BY_NAME[name]
    assert "response" not in case
    assert scored(case).overall == pytest.approx(score, abs=5e-4)


# Scores of responses that a reader would call wrong.
EXPLOITS = [
    ("exploit: display none", 1.0),
    ("exploit: off the canvas", 0.971),
    ("exploit: thirty arrows", 1.0),
    ("exploit: junk without labels", 1.0),
    ("exploit: moved along", 1.0),
    ("exploit: reversed arrows", 0.971),
    ("exploit: empty", 0.0),
    ("exploit: empty without arrows", 0.5),
    ("exploit: a tenth", 0.0),
]


@pytest.mark.parametrize(("name", "score"), EXPLOITS)
def test_exploits_of_the_published_rules_still_work(name: str, score: float) -> None:
    assert scored(BY_NAME[name]).overall == pytest.approx(score, abs=5e-4)


def test_a_repeated_label_is_no_extra_shape() -> None:
    assert scored(BY_NAME["exploit: repeated label"]).shapes["extra_penalty"] == 0


def test_metrics_by_hand() -> None:
    assert colour_score("#f00", "rgb(255, 0, 0)") == 1
    assert colour_score("white", "black") == pytest.approx(0)
    assert colour_score("url(#a)", "url(#b)") == 0.5
    assert colour_score("lightcoral", "lightcoral") == 0
    assert label_score("Conv", "conv  1") == pytest.approx(4 / 6)
    assert label_score("a b", "b c d") == pytest.approx(1 / 3)
    assert position_score((0, 0), (9, 0), (5, 5), (5, 99)) == pytest.approx(0.25 + 0.5 * (1 - 2**-0.5))
    assert aspect_ratio_score((0, 0, 10, 10), (0, 0, 21, 10)) == pytest.approx(0.5)
    assert [dash_style(dashes) for dashes in ("", "5 3", "3 5", "5 1 1 1")] == ["solid", "dashed", "dotted", "dash-dot"]


def test_paths_by_hand() -> None:
    data = "M 10 10 q 1 2 30 40 h 5 Z 7"
    assert path_points(data) == [(10, 10), (40, 50), (45, 50)]
    assert path_end(data) == (10, 10)
    assert path_length(data) == pytest.approx(50 + 5 + (35**2 + 40**2) ** 0.5)
    assert path_end("") == (0, 0)
    assert tip([0, 0, 0, 4, 9, 2]) == (9, 2)
    assert marker_key("x url(#) url(#a b)") == "a b"


def test_cleanliness_counts_pieces_of_text() -> None:
    assert published_cleanliness("<svg/>") is None
    assert published_cleanliness("<text>a</text>") == 0
    assert published_cleanliness("<TEXT>a</TEXT>") is None
    assert published_cleanliness("<rect/><CIRCLE/><path/><polygon/>") == pytest.approx(0.5)
    assert published_cleanliness("<linearGradient/>") == pytest.approx(1)
    assert published_cleanliness("<polyline/>") == 1 / (1 + 1e-9)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"entities": 5},
        {"entities": {"shape_0": {}}},
        {"entities": {"shape_0": {"type": "circle", "label": "a", "bounds": [0, 0, 9]}}},
        {"entities": {"shape_0": {"type": "circle", "label": 5, "bounds": [0, 0, 9, 9]}}},
        {"entities": {"arrow": {"type": "arrow", "from": "shape_0", "to": "shape_0"}}},
        {"entities": {"arrow_0": {"type": "arrow", "from": "shape_0", "to": "shape_0"}}},
    ],
)
def test_broken_metadata_score_zero_with_a_reason(metadata: dict[str, Any]) -> None:
    figure = BY_NAME["self: markers"]["truth"]
    result = published_rules(figure, figure, metadata)
    assert result.overall == 0 and result.note


NAMES = st.sampled_from(
    ["shape_0", "shape_1", "arrow_0", "arrow_1", "from", "to", "type", "label", "bounds", "entities"]
)
VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | st.sampled_from(["arrow", "circle", "shape_0", "", "Input"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
)


@given(entities=st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=5), max_size=4))
@settings(max_examples=60, deadline=None)
def test_no_metadata_raise(entities: dict[str, Any]) -> None:
    figure = BY_NAME["self: markers"]["truth"]
    assert 0 <= published_rules(figure, figure, {"entities": entities}).overall <= 1


SMALL = sorted((case.get("response", case["truth"]) for case in CASES), key=len)[:60]
PIECES = [
    "",
    "nan",
    "1e999",
    "-",
    "1.2.3",
    "url(#p)",
    "none",
    "<g>",
    "</g>",
    '"',
    "&lt;",
    "translate(",
    "#shape_0",
    "Z",
]


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_no_figure_raises_and_all_scores_are_shares(data: st.DataObject) -> None:
    response = data.draw(st.sampled_from(SMALL))
    for _ in range(data.draw(st.integers(0, 4))):
        spans = [match.span(1) for match in re.finditer(r'="([^"]*)"', response)] or [(0, len(response))]
        begin, end = data.draw(st.sampled_from(spans))
        response = response[:begin] + data.draw(st.sampled_from(PIECES) | st.text(max_size=8)) + response[end:]
    truth = data.draw(st.sampled_from(SMALL))
    for pair in ((truth, response), (response, truth)):
        result = published_rules(*pair)
        assert set(result.shapes) == {*SHAPE_METRICS, *TOTALS} and set(result.arrows) == {*ARROW_METRICS, *TOTALS}
        assert all(0 <= score <= 1 for score in (result.overall, *result.shapes.values(), *result.arrows.values()))
    clean = published_cleanliness(response)
    assert clean is None or 0 <= clean <= 1


def svg(content: str) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 600">{content}</svg>'


USES = "".join(f'<g id="u{i}">' + f'<use href="#u{i - 1}"/>' * 10 + "</g>" for i in range(1, 9))
CHAIN = "".join(f'<use id="u{i}" href="#u{i - 1}"/>' for i in range(1, 900))
LINE = '<line x2="99" y2="99" stroke="red"/>'
LIMITS = {
    "visits": f'<defs>{USES}<rect id="u0" width="9" height="9"/></defs><use href="#u8"/>',
    "uses in a circle": '<defs><g id="a"><use href="#a"/></g></defs><use href="#a"/>',
    "a chain of uses": f'<defs>{CHAIN}<rect id="u0" width="90" height="90"/></defs><use href="#u899"/>',
    "depth": "<g>" * 200 + "</g>" * 200,
    "elements": "<g/>" * 21_000,
    "characters": " " * 4_000_001,
    "a long attribute": f'<g class="{"a " * 9000}"/>',
    "a long label": f'<g><text>{"ab " * 900_000}</text><rect width="50" height="50" fill="red"/></g>'
    + "<text>b a b b</text>" * 10_000,
    "an entity": "&a;",
}


@pytest.mark.parametrize("name", LIMITS)
def test_responses_over_a_limit_score_zero_with_a_reason(name: str) -> None:
    truth = BY_NAME["exploit: thirty arrows"]["truth"]
    begin = time.perf_counter()
    result = published_rules(truth, svg(LIMITS[name]))
    assert result.overall == 0 and result.note
    assert time.perf_counter() - begin < 20


TYPES = [
    "",
    "\ufeff",
    " ",
    *(
        f'<?xml version="1.0" encoding="{name}"?>'
        for name in ("utf-8", "UTF-16", "iso-8859-1", "us-ascii", "big5", "none")
    ),
    "<!DOCTYPE svg>",
    '<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">',
    '<!DOCTYPE svg [<!ENTITY a "b">]>',
    '<!DOCTYPE svg [<!ENTITY a "<g>b</g>"><!ENTITY a "c">]>',
    '<!DOCTYPE svg [<!ENTITY a "&b;&b;"><!ENTITY b "&#65;">]>',
    '<!DOCTYPE svg [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
    '<!DOCTYPE svg [<!ENTITY % p "x"> %p; <!ENTITY a "b">]>',
    '<!DOCTYPE svg [<!ENTITY % p SYSTEM "x"> %p; <!ENTITY a "b">]>',
    '<!DOCTYPE svg [<!ATTLIST svg c CDATA "d">]>',
    '<?xml version="1.0" standalone="yes"?><!DOCTYPE svg SYSTEM "x" [<!ENTITY a "b">]>',
]


@pytest.mark.parametrize("content", ["", "\u00e9", "&a;", "&amp;", "&nbsp;"])
@pytest.mark.parametrize("before", TYPES)
def test_documents_are_read_as_files_are_by_the_parser_of_the_published_code(before: str, content: str) -> None:
    for text in (f"{before}<svg>{content}</svg>", f'{before}<svg a="{content}"/>'):
        try:
            wanted = ElementTree.tostring(ElementTree.parse(io.BytesIO(text.encode())).getroot())
        except (ElementTree.ParseError, ValueError, LookupError):
            with pytest.raises(Unscorable):
                parse(text)
        else:
            assert ElementTree.tostring(parse(text)) == wanted


def test_figures_with_entities_and_another_encoding_score_as_published() -> None:
    figure = BY_NAME["self: equal heads"]["truth"]
    entity = '<!DOCTYPE svg [<!ENTITY a "Input">]>' + figure.replace(">Input<", ">&a;<")
    assert "&a;" in entity and published_rules(entity, figure).overall == 1
    assert published_rules('<?xml version="1.0" encoding="UTF-16"?>' + figure, figure).overall == 0


BOMBS = {
    "grows": "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10)) + '<!ENTITY a0 "ha">',
    "is long": f'<!ENTITY a9 "{"x" * 100_000}">',
    "is deep": "".join(f'<!ENTITY a{i} "&a{i - 1};">' for i in range(9, 9_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_entities_cannot_make_a_document_long(name: str) -> None:
    result = published_rules(f"<!DOCTYPE svg [{BOMBS[name]}]><svg a='{'&a9;' * 50}'/>", "<svg/>")
    assert result.overall == 0 and "entities" in result.note


SLOW = {
    "rules without an end": "<style>" + ".a{" * 300_000 + "}</style>",
    "brackets": "<style>" + "{" * 300_000 + "}</style>",
    "digits": f'<path d="M{"1" * 300_000}" stroke="red"/>',
    "signs": f'<path d="{"-" * 300_000}" stroke="red" fill="red"/>',
    "moves": f'<defs><pattern><path d="{"M0 0&#10;" * 50_000}L1 1"/></pattern></defs>',
    "an outline in nested groups": "<g>" * 140 + f'<path fill="red" d="M0 0{" 1 2" * 50_000}"/>' + "</g>" * 140,
    "classes of groups": "".join(f'<g class="{"a " * 4900}">' for _ in range(50)) + LINE * 900 + "</g>" * 50,
    "arrows around one head": f"<g><polygon points='{'1,1 ' * 50_000}'/>{LINE * 900}</g>",
    "moves of groups": "".join(f'<g transform="{"translate(1 " * 800}">' for _ in range(50)) + LINE * 900 + "</g>" * 50,
}


@pytest.mark.parametrize("name", SLOW)
def test_hostile_responses_take_little_time(name: str) -> None:
    begin = time.perf_counter()
    published_rules(BY_NAME["self: markers"]["truth"], svg(SLOW[name]))
    assert time.perf_counter() - begin < 5
