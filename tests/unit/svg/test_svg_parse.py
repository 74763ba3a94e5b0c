"""SVG code in a response: which element is the answer, and what the reader refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.svg.parse import SVG, SvgLimits, find_svg, parse_svg
from vlmrl.untrusted import CodeRefused

PLAIN = f'<svg xmlns="{SVG}"><rect/></svg>'
NESTED = "<svg><svg x='>'><g/></svg><rect/></svg>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (PLAIN, PLAIN),
        (f"Here it is:\n```svg\n{PLAIN}\n```\nDone.", PLAIN),
        (f"I write an <svg> element, that is {PLAIN}", PLAIN),
        (f"<think>{PLAIN}</think>\n{NESTED} end", NESTED),
        (f"<svg/> then {PLAIN}", PLAIN),
        ("<svg><!-- </svg> --><g/></svg>", "<svg><!-- </svg> --><g/></svg>"),
        ("<svg><style><![CDATA[ </svg> ]]></style></svg>", "<svg><style><![CDATA[ </svg> ]]></style></svg>"),
        ("<SVG></SVG>", "<SVG></SVG>"),
        ("<s:svg a='</svg>'></s:svg>", "<s:svg a='</svg>'></s:svg>"),
        ("<!-- a comment in prose that never ends <svg></svg>", "<svg></svg>"),
    ],
)
def test_the_last_complete_element_is_the_answer(response: str, expected: str) -> None:
    assert find_svg(response) == expected


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        ("", "missing"),
        ("no picture", "missing"),
        ("<svgfoo></svgfoo>", "missing"),
        ("</svg>", "missing"),
        ("<svg><rect", "cut"),
        ("<svg a='", "cut"),
        (f"{PLAIN} better: <svg><rect/>", "cut"),
    ],
)
def test_no_complete_element_is_refused(response: str, kind: str) -> None:
    with pytest.raises(CodeRefused) as refusal:
        find_svg(response)
    assert refusal.value.kind == kind


class CountedText(str):
    """Text that counts the characters in which something was searched for."""

    searched = 0

    def find(self, *args) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.searched += len(self) - args[1]
        return super().find(*args)


@pytest.mark.parametrize("text", ["<svg><!--", "<svg><![CDATA[", "<svg><!--<!--"])
def test_comments_without_end_are_not_searched_again_and_again(text: str) -> None:
    response = CountedText(text * 500 + "</svg>")
    assert find_svg(response).endswith("</svg>")
    assert response.searched <= len(response)


@given(st.text(alphabet="<>/svg \"'!-[]CDATA=a", max_size=60))
def test_any_text_is_answered_or_refused(text: str) -> None:
    try:
        element = find_svg(text)
    except CodeRefused:
        return
    assert element in text and element.lower().startswith("<") and element.endswith(">")


def test_names_texts_and_numbers_of_elements() -> None:
    root = parse_svg(
        f'\ufeff<?xml version="1.0" encoding="utf-16"?>\n<s:svg xmlns:s="{SVG}" xmlns:x="http://www.w3.org/1999/xlink" '
        'xmlns:o="other"><s:text x:href="#a" o:odd="1">one<s:tspan>two</s:tspan>three &lt;</s:text><o:text/></s:svg>'
    )
    text, other = root.children
    assert (root.tag, text.tag, other.tag) == ("svg", "text", "")
    assert text.attributes == {"href": "#a"} and text.texts == ["one", "three <"]
    assert [node.number for node in root.walk()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("<svg><rect></svg>", "syntax", "mismatched tag"),
        ("<svg>&nbsp;</svg>", "syntax", "undefined entity"),
        ("<svg a='1' a='2'/>", "syntax", "duplicate attribute"),
        ("<svg>\ud800</svg>", "syntax", "surrogate"),
        ("<svg>\x00</svg>", "syntax", "not XML"),
        ("<rect/>", "syntax", "outermost"),
        ("", "syntax", "no element"),
        ("<!DOCTYPE svg [<!ENTITY a 'b'>]><svg>&a;</svg>", "forbidden", "document type"),
        ("<!DOCTYPE svg SYSTEM 'file:///etc/passwd'><svg/>", "forbidden", "document type"),
        ("<?xml-stylesheet href='a.css'?><svg/>", "forbidden", "instruction"),
        ("<svg xml:base='http://localhost/'/>", "forbidden", "xml:base"),
        ("<svg>" + "<g>" * 200 + "</g>" * 200 + "</svg>", "limit", "nested"),
        ("<svg>" + "<g/>" * 30_000 + "</svg>", "limit", "elements"),
        ("<svg a='" + "1" * 300_000 + "'/>", "limit", "attribute"),
        ("<svg>" + " " * 2_000_000 + "</svg>", "limit", "characters"),
    ],
)
def test_what_the_reader_refuses(text: str, kind: str, words: str) -> None:
    with pytest.raises(CodeRefused) as refusal:
        parse_svg(text)
    assert refusal.value.kind == kind and words in refusal.value.reason


def test_limits_are_inclusive() -> None:
    limits = SvgLimits(elements=3, depth=2)
    assert len(list(parse_svg("<svg><a/><b/></svg>", limits).walk())) == 3
    for text in ("<svg><a/><b/><c/></svg>", "<svg><a><b/></a></svg>"):
        with pytest.raises(CodeRefused):
            parse_svg(text, limits)
