"""SVG attacks that want time by being long, deep, or slow to parse."""

# ruff: noqa: E501
from __future__ import annotations

from svg_attack_parts import BOX, attacks, svg
from svg_attacks_load import FILLED, LINE, star

DOT = '<rect width="1" height="1"/>'
POINTS = " ".join(f"{index % 97} {index % 89}" for index in range(10**5))
TEN_MASKS = '<mask id="m"><rect width="100" height="100" fill="#fff"/></mask>'

LONG = attacks(
    "time",
    "either",
    ("10^5 elements", "many small rectangles", svg(DOT * 10**5)),
    ("10^5 circles with gradients", "a bounding box and a gradient for each", svg(
        '<linearGradient id="a"><stop/></linearGradient>' + '<circle r="9" fill="url(#a)"/>' * 10**5)),
    ("10^4 masks", "a surface for each of 10^4 elements", svg(TEN_MASKS + f'<rect {BOX} mask="url(#m)"/>' * 10_000)),
    ("10^4 patterns", "a surface for each of 10^4 elements", svg(
        '<pattern id="a" width=".1" height=".1"><circle r="9"/></pattern>' + FILLED * 10_000)),
    ("10^4 groups with opacity", "a canvas for each, side by side", svg(
        f'<g opacity=".5">{DOT}</g>' * 10_000, size='width="1000" height="1000"')),
    ("10^4 deep", "groups in groups", svg("<g>" * 10_000 + DOT + "</g>" * 10_000)),
    ("10^6 deep", "groups in groups", "<svg>" + "<g>" * 10**6 + "</g>" * 10**6 + "</svg>"),
    ("10^4 deep and never closed", "a parser's own stack", svg("<g>" * 10_000)),
    ("10^4 nested svg", "viewports in viewports", svg("<svg>" * 10_000 + "</svg>" * 10_000)),
    ("900 nested svg", "definitions read again at every level", svg(
        '<svg width="9" height="9">' * 400 + DOT * 9_000 + "</svg>" * 400)),
    ("10^4 nested tspans", "text in text", svg('<text y="9">' + "<tspan>a" * 10_000 + "</tspan>" * 10_000 + "</text>")),
    ("10^5 tspans", "text beside text", svg('<text y="9">' + "<tspan>a</tspan>b" * 10**5 + "</text>")),
    ("10^4 nested links", "links in links", svg("<a>" * 10_000 + DOT + "</a>" * 10_000)),
    ("10^4 nested switches", "a choice in a choice", svg("<switch>" * 10_000 + "</switch>" * 10_000)),
    ("10^5 arcs", "one path of 10^5 arcs", svg('<path d="M0 0' + "a5 5 0 1 1 1 .5" * 10**5 + '" stroke="red"/>')),
    ("10^5 arcs, no letters", "the rest of the data is copied for each", svg(
        '<path d="M0 0a' + "5 5 0 1 1 1 .5 " * 10**5 + '" stroke="red"/>')),
    ("10^5 lines, no letters", "the rest of the data is copied for each", svg(f'<path d="M{POINTS}" stroke="red"/>')),
    ("10^6 moves", "a path that draws nothing", svg('<path d="' + "M0 0" * 10**6 + '"/>')),
    ("10^6 closes", "a path that closes what is closed", svg('<path d="M0 0L9 9' + "z" * 10**6 + '"/>')),
    ("10^5 points", "a polyline", svg(f'<polyline points="{POINTS}" stroke="red"/>')),
    ("huge arcs", "10^4 arcs of radius 10^7 with a fine tolerance", svg(
        '<path d="M0 0' + "A1e7 1e7 0 1 1 50 50A1e7 1e7 0 1 1 0 0" * 5_000 + '" stroke="red"/>')),
    ("star filled", "2 * 10^8 crossings", svg(f'<polygon points="{star(20_001)}" fill-rule="evenodd"/>')),
    ("star stroked", "2 * 10^8 crossings, dashed", svg(
        f'<polygon points="{star(20_001)}" fill="none" stroke="red" stroke-width=".1" stroke-dasharray="1 1"/>')),
    ("star as clip", "polygons that are cut with each other", svg(
        f'<clipPath id="c"><polygon points="{star(3_001)}"/></clipPath><g clip-path="url(#c)"><polygon '
        f'points="{star(3_001, 1_400)}" clip-path="url(#c)"/></g>')),
    ("star of text", "text along 10^5 segments, each letter from its start", svg(
        f'<path id="p" d="M{POINTS}"/><text><textPath href="#p">{"a" * 8_000}</textPath></text>')),
    ("markers", "10^5 markers of 100 elements", svg(
        f'<marker id="m" viewBox="0 0 9 9">{DOT * 100}</marker><polyline points="{POINTS}" marker-mid="url(#m)"/>')),
    ("10^5 stops", "one gradient", svg('<linearGradient id="a">' + '<stop offset=".5"/>' * 10**5 + f"</linearGradient>{FILLED}")),
    ("10^4 gradients", "each used once", svg(
        "".join(f'<linearGradient id="g{i}"><stop/></linearGradient><rect {BOX} fill="url(#g{i})"/>' for i in range(10**4)))),
    ("10^5 filter parts", "floods on floods", svg(
        '<filter id="f">' + '<feFlood width="99" height="99" flood-color="red"/>' * 10**5 + "</filter>"
        f'<rect {BOX} filter="url(#f)"/>')),
    ("turbulence", "noise of 10^6 octaves", svg(
        f'<filter id="f"><feTurbulence baseFrequency="9" numOctaves="1000000"/></filter><rect {BOX} filter="url(#f)"/>')),
    ("convolution", "a matrix of 1000 by 1000", svg(
        '<filter id="f"><feConvolveMatrix order="1000" kernelMatrix="' + "1 " * 10**6 + f'"/></filter><rect {BOX} '
        'filter="url(#f)"/>')),
    ("10^5 animations", "animations that never end", svg(
        f"<rect {BOX}>" + '<animate attributeName="x" dur="1ms" repeatCount="indefinite"/>' * 10**5 + "</rect>")),
    ("animation by itself", "an animation that begins at its own end", svg(
        f'<rect {BOX}><animate id="a" begin="a.end" attributeName="x" from="0" to="9" dur="0s"/></rect>')),
    ("10^5 transforms", "one attribute", svg(f'<rect {BOX} transform="{"rotate(1)" * 10**5}"/>')),
    ("10^5 classes", "one attribute", svg(f'<style>.a{{fill:red}}</style><rect {BOX} class="{"a " * 10**5}"/>')),
)  # fmt: skip

SLOW_TEXT = attacks(
    "time",
    "either",
    ("box of a closed path", "numbers behind z: a search for the box that never moves on", svg(
        '<linearGradient id="a"><stop/></linearGradient><path d="M0 0L9 9Z 5 5" fill="url(#a)"/>')),
    ("url( 10^5 times", "a pattern of text that is tried from every start", svg(f'<rect {BOX} fill="{"url(" * 10**5}"/>')),
    ("rgb( 10^5 times", "the same in a colour", svg(f'<rect {BOX} fill="{"rgba(" * 10**5}"/>')),
    ("clip rect( 10^5 times", "the same in a clip", svg(f'<rect {BOX} clip="{"rect( " * 10**5}"/>')),
    ("transform of 10^6 letters", "the same in a transform", svg(f'<rect {BOX} transform="{"a" * 10**6}"/>')),
    ("transform ( 10^5 times", "the same in a transform", svg(f'<rect {BOX} transform="{"a(" * 10**5}"/>')),
    ("spaces", "10^6 spaces in path data", svg(f'<path d="M0 0L{" " * 10**6}"/>')),
    ("zeros", "a number of 10^6 digits", svg(f'<rect x="{"1" * 10**6}" width="9" height="9"/>')),
    ("digits", "190,000 digits before a unit that is none", svg(f'<rect width="{"1" * 190_000}q" height="9"/>{DOT}')),
    ("references", "20,000 references, each the fallback of the one before", svg(f'<rect {BOX} fill="{"url(#a) " * 20_000}"/>')),
    ("dots", "10^6 dots in path data", svg(f'<path d="M{".1" * 10**6}"/>')),
    ("minus signs", "10^6 minus signs", svg(f'<path d="M{"-" * 10**6}"/>')),
    ("CSS brackets", "10^5 brackets that nobody closes", svg(f"<style>{'[' * 10**5}</style>{DOT}")),
    ("CSS braces", "10^5 braces", svg(f"<style>a{'{' * 10**5}</style>{DOT}")),
    ("CSS :not", "10^4 selectors in selectors", svg(f"<style>{':not(' * 10**4}a{')' * 10**4}{{fill:red}}</style>{DOT}")),
    ("CSS :has", "a selector that looks at everything below, six times", svg(
        "<style>" + "*:has(* " * 6 + "b" + ")" * 6 + "{fill:red}</style>" + "<g>" * 60 + DOT * 9 + "</g>" * 60)),
    ("CSS ancestors", "twelve ancestors among eighty: 10^14 ways to fail", svg(
        f"<style>b {'* ' * 12}rect{{fill:red}}</style>" + "<g>" * 80 + DOT + "</g>" * 80)),
    ("CSS siblings", "ten siblings among 2,000", svg(f"<style>b ~ {'* ~ ' * 10}rect{{fill:red}}</style>" + DOT * 2_000)),
    ("CSS rules by elements", "5,000 rules for 20,000 elements", svg(
        "<style>" + "[x]{fill:red}" * 5_000 + "</style>" + DOT * 20_000)),
    ("CSS selectors", "10^5 selectors in one rule", svg("<style>" + "a," * 10**5 + "b{fill:red}</style>" + DOT)),
    ("CSS declarations", "10^5 declarations", svg("<style>rect{" + "fill:red;" * 10**5 + "}</style>" + DOT * 100)),
    ("CSS comments", "10^6 characters of comment", svg(f"<style>/*{'*' * 10**6}</style>{DOT}")),
    ("CSS escapes", "10^6 backslashes", svg("<style>" + "\\" * 10**6 + "</style>" + DOT)),
    ("style attribute", "10^5 brackets in a style attribute", svg(f'<rect {BOX} style="fill:{"(" * 10**5}"/>')),
    ("text positions", "10^5 positions for 10^5 letters", svg(
        f'<text x="{"1 " * 10**5}" y="{"1 " * 10**5}" rotate="{"1 " * 10**5}">{"a" * 10**5}</text>')),
    ("entities by number", "10^6 character references", svg(f'<text y="9">{"&#65;" * 10**6}</text>')),
    ("comments", "10^5 comments", svg("<!-- a -->" * 10**5 + DOT)),
    ("instructions", "10^5 processing instructions", svg("<?a b?>" * 10**5 + DOT)),
    ("namespaces", "10^4 namespaces, one in another", svg(
        "".join(f'<a:g xmlns:a="n{i}">' for i in range(10**4)) + "</a:g>" * 10**4)),
    ("marker on a dashed star", "several of them at once", svg(
        f'<marker id="m" viewBox="0 0 1 1">{DOT}</marker>'
        + LINE.format('stroke-dasharray="1e-6" marker-end="url(#m)"') * 50)),
)  # fmt: skip
