"""SVG attacks on what can be seen: copies of the true picture, hidden content, and honest SVG that looks strange."""

# ruff: noqa: E501

from __future__ import annotations

from svg_attack_parts import (
    BOX,
    DRAWN,
    MARK,
    PAID,
    PAYLOAD,
    PAYLOAD_PNG,
    PAYLOAD_SVG_URL,
    SvgAttack,
    attacks,
    image,
    svg,
)

PATTERN = f'<pattern id="p" width="1" height="1">{image(PAYLOAD_PNG)}</pattern>'
COPY = attacks(
    "copy",
    "refused",
    ("png", "a picture of the truth", svg(image(PAYLOAD_PNG))),
    ("png by xlink", "a picture of the truth", svg(image(PAYLOAD_PNG, "xlink:href"))),
    ("svg in a data URL", "a picture of the truth", svg(image(PAYLOAD_SVG_URL))),
    ("in a pattern", "a picture as paint", svg(f'{PATTERN}<rect {BOX} fill="url(#p)"/>')),
    ("in a symbol", "a picture by use", svg(f'<symbol id="s">{image(PAYLOAD_PNG)}</symbol><use href="#s"/>')),
    ("in a mask", "a picture as a mask", svg(f'<mask id="m">{image(PAYLOAD_PNG)}</mask><rect {BOX} fill="{PAYLOAD}" mask="url(#m)"/>')),
    ("in a marker", "a picture as an arrow head", svg(f'<marker id="m" markerWidth="99" markerHeight="99">{image(PAYLOAD_PNG)}</marker><path d="M1 1L9 9" stroke="red" marker-end="url(#m)"/>')),
    ("feImage", "a picture as a filter", svg(f'<filter id="f"><feImage href="{PAYLOAD_PNG}"/></filter><rect {BOX} filter="url(#f)"/>')),
    ("foreignObject", "HTML with a picture", svg(f'<foreignObject width="99" height="99"><img xmlns="http://www.w3.org/1999/xhtml" src="{PAYLOAD_PNG}"/></foreignObject>')),
    ("background", "a picture by CSS", svg(f'<rect {BOX} style="fill:none;background:url({PAYLOAD_PNG})"/>')),
    ("capital scheme", "DATA: as a scheme", svg(image(PAYLOAD_PNG.replace("data:", "DATA:")))),
    ("use of a data URL", "use of a document in a data URL", svg(f'<use href="{PAYLOAD_SVG_URL}#a"/>')),
)  # fmt: skip
HIDDEN = attacks(
    "hidden",
    "refused",
    ("display", "display none", svg(f'<g display="none">{PAID}</g>')),
    ("display by style", "display none in style", svg(f'<g style="display:none">{PAID}</g>')),
    ("display by sheet", "display none in a sheet", svg(f'<style>.h{{display:none}}</style><g class="h">{PAID}</g>')),
    ("visibility", "hidden", svg(f'<g visibility="hidden">{PAID}</g>')),
    ("collapse", "collapsed", svg(f'<g visibility="collapse">{PAID}</g>')),
    ("opacity", "opacity 0", svg(f'<g opacity="0">{PAID}</g>')),
    ("fill-opacity", "fill opacity 0%", svg(f'<rect {BOX} fill="{PAYLOAD}" fill-opacity="0%"/>')),
    ("transparent", "transparent colour", svg(f'<rect {BOX} fill="{PAYLOAD}00"/>')),
    ("outside", "beyond the edge", svg(f'<g transform="translate(5000)">{PAID}</g>')),
    ("outside the viewBox", "beyond the viewBox", svg(f'<g transform="translate(-500)">{PAID}</g>', 'viewBox="0 0 100 100"')),
    ("scale 0", "scaled to nothing", svg(f'<g transform="scale(0)">{PAID}</g>')),
    ("singular", "a matrix without an inverse", svg(f'<g transform="matrix(1 1 1 1 0 0)">{PAID}</g>')),
    ("zero size", "a rectangle without width", svg(f'<rect x="20" y="20" width="0" height="60" fill="{PAYLOAD}"/>')),
    ("negative size", "a rectangle of negative width", svg(f'<rect x="20" y="20" width="-60" height="60" fill="{PAYLOAD}"/>')),
    ("clipped away", "an empty clip path", svg(f'<clipPath id="c"/><g clip-path="url(#c)">{PAID}</g>')),
    ("clipped elsewhere", "a clip path elsewhere", svg(f'<clipPath id="c"><rect width="5" height="5"/></clipPath><g clip-path="url(#c)">{PAID}</g>')),
    ("black mask", "a mask without light", svg(f'<mask id="m"><rect width="100" height="100" fill="black"/></mask><g mask="url(#m)">{PAID}</g>')),
    ("empty mask", "a mask without content", svg(f'<mask id="m"/><g mask="url(#m)">{PAID}</g>')),
    ("covered", "behind a page", svg(f'{PAID}<rect width="100" height="100" fill="white"/>')),
    ("defs", "definitions", svg(f"<defs>{PAID}</defs>")),
    ("symbol", "a symbol that nobody uses", svg(f"<symbol>{PAID}</symbol>")),
    ("metadata", "metadata", svg(f"<metadata>{PAID}</metadata>")),
    ("title", "a title", svg(f"<title>{PAID}</title>")),
    ("desc", "a description", svg(f"<desc>{PAID}</desc>")),
    ("other namespace", "an element of another namespace", svg(f'<x:g xmlns:x="urn:x">{PAID}</x:g>')),
    ("unknown element", "an element that SVG does not have", svg(f"<shape>{PAID}</shape>")),
    ("comment", "a comment", svg(f"<!-- {PAID.replace('--', '')} -->")),
    ("cdata", "character data", svg(f"<g><![CDATA[{PAID}]]></g>")),
    ("nested svg of size 0", "a viewport without height", svg(f'<svg width="50" height="0">{PAID}</svg>')),
    ("second of a switch", "an alternative that is not chosen", svg(f"<switch><g/>{PAID}</switch>")),
)  # fmt: skip


def odd(name: str, inside: str, attributes: str = "") -> tuple[str, str, str]:
    return name, "honest SVG", svg(inside, attributes)


def marked(rest: str) -> str:
    return f"<rect {BOX} {rest}/>"


ODD = attacks(
    "odd",
    "drawn",
    odd("opacity in percent", marked(f'fill="{MARK}" opacity="100%"')),
    odd("rgb with spaces", marked('fill="rgb(0 128 0)"')),
    odd("rgb in percent", marked('fill="rgb(0%, 50.2%, 0%)"')),
    odd("hsl", marked('fill="hsl(120, 100%, 25.1%)"')),
    odd("short hex with alpha", marked('fill="#008000ff"')),
    odd("colour in capitals", marked('fill="GREEN"')),
    odd("undefined marker", f'{DRAWN}<path d="M0 0L9 9" stroke="red" marker-end="url(#none)"/>'),
    odd("undefined gradient with a colour", marked(f'fill="url(#none) {MARK}"')),
    odd("undefined filter", marked(f'fill="{MARK}" filter="url(#none)"')),
    odd("undefined clip path", marked(f'fill="{MARK}" clip-path="url(#none)"')),
    odd("calc", f'<rect x="0" y="0" width="calc(1px + 2px)" height="9"/>{DRAWN}'),
    odd("strange selector", f"<style>a|b, rect:hover, [x] {{fill:red}} rect {{fill:{MARK}}}</style>" + marked("")),
    odd("important", f'<style>rect {{fill:{MARK} !important}}</style>' + marked('style="fill:red"')),
    odd("commas in the viewBox", DRAWN, 'viewBox="0,0,100,100"'),
    odd("lengths with units", f'<rect x="5mm" y="0.2in" width="45pt" height="60px" fill="{MARK}"/>'),
    odd("percent lengths", f'<rect x="20%" y="20%" width="60%" height="60%" fill="{MARK}"/>'),
    odd("gradient in a circle", '<linearGradient id="a" href="#b"/><linearGradient id="b" href="#a"/>' + marked(f'fill="url(#a) {MARK}"')),
    odd("numeric entity", f"<text>&#65;&amp;&lt;</text>{DRAWN}"),
    odd("empty groups", f"<g/><g></g><defs/>{DRAWN}"),
    odd("text of other scripts", f'<text y="9">\u0416\u4e2d\U0001f600\u0627</text>{DRAWN}'),
    odd("path without spaces", f'<path d="M20 20h60v60h-60z" fill="{MARK}"/>'),
    odd("path with exponents", f'<path d="M2e1 2e1H8.0e+1V80H.2e2Z" fill="{MARK}"/>'),
    odd("arc flags without spaces", f'<path d="M20 50a30 30 0 1160 0 30 30 0 11-60 0z" fill="{MARK}"/>'),
    odd("path with a fault at its end", f'<path d="M20 20H80V80H20Z M 1 x" fill="{MARK}"/>'),
    odd("points with an odd number", f'<polygon points="20,20 80,20 80,80 20,80 5" fill="{MARK}"/>'),
    odd("attribute of an editor", f'<g xmlns:i="urn:ink" i:label="x" i:layer="1">{DRAWN}</g>'),
    odd("xml space", f'<text xml:space="preserve"> a  b </text>{DRAWN}'),
    odd("lang and class", f'<g lang="en" class="a b" data-x="1" aria-label="y" role="img">{DRAWN}</g>'),
    odd("link", f'<a href="https://example.org">{DRAWN}</a>'),
    odd("import of a font", f"<style>@import url(https://example.org/f.css); @font-face{{font-family:x;src:url(y)}}</style>{DRAWN}"),
    odd("switch with a language", f'<switch><g systemLanguage="en">{DRAWN}</g></switch>'),
    odd("use before its target", f'<use href="#r"/><defs><rect id="r" {BOX} fill="{MARK}"/></defs>'),
    odd("transform with deg", marked(f'fill="{MARK}" style="transform: rotate(0deg) translate(0px, 0px)"')),
    odd("transform around the centre", f'<rect x="20" y="20" width="60" height="60" fill="{MARK}" transform="scale(.2)" transform-origin="center"/>'),
    odd("transform around a point", f'<g style="transform: rotate(180deg); transform-origin: 60px 50px"><rect x="60" y="40" width="30" height="20" fill="{MARK}"/></g>'),
    odd("pattern of shares", f'<pattern id="p" width="0.5" height="0.5"><rect width="30" height="30" fill="{MARK}"/></pattern><rect x="20" y="20" width="60" height="60" fill="url(#p)"/>'),
    odd("clip path of two directions", f'<clipPath id="c"><path d="M20 20V60H60V20z"/><rect x="40" y="40" width="40" height="40"/></clipPath><rect width="100" height="100" fill="{MARK}" clip-path="url(#c)"/>'),
    odd("custom property", f'<style>:root{{--mark:{MARK}}} rect{{fill:var(--mark)}}</style><rect {BOX}/>'),
    odd("colour in Lab", f'<rect {BOX} fill="lab(46.278% -47.552 48.586)"/>'),
    odd("colour in OKLCh", f'<rect {BOX} style="fill: oklch(51.975% 0.17686 142.495)"/>'),
    odd("stroke alone", f'<path d="M20 50H80" stroke="{MARK}" stroke-width="20" fill="none"/>'),
    odd("animation", f'<rect {BOX} fill="{MARK}"><animate attributeName="fill" to="red" dur="1s"/></rect>'),
    ("byte order mark", "honest SVG", "\ufeff" + svg(DRAWN)),
    ("declaration", "honest SVG", "<?xml version='1.0' encoding='UTF-8'?>\n" + svg(DRAWN)),
    ("comments around", "honest SVG", "<!-- a -->" + svg(DRAWN) + "<!-- b -->"),
    ("prefix", "honest SVG", f'<s:svg xmlns:s="http://www.w3.org/2000/svg" width="100" height="100"><s:rect {BOX} fill="{MARK}"/></s:svg>'),
    ("no namespace", "honest SVG", f'<svg width="100" height="100"><rect {BOX} fill="{MARK}"/></svg>'),
)  # fmt: skip
SEEN: tuple[SvgAttack, ...] = (*COPY, *HIDDEN, *ODD)
