"""Style sheets and `style` attributes as attributes, beside cssselect2 as the reference for selectors."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import cssselect2
import pytest
import tinycss2
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.svg.css import apply_styles, read_declarations
from vlmrl.svg.parse import parse_svg
from vlmrl.untrusted import CodeRefused


def styled(text: str) -> dict[str, dict[str, str]]:
    """The attributes of each element with an id, after the styles."""
    root = parse_svg(text)
    apply_styles(root)
    return {node.attributes["id"]: node.attributes for node in root.walk() if "id" in node.attributes}


@pytest.mark.parametrize(
    ("sheet", "fill"),
    [
        ("rect{fill:red}", "red"),
        (".a{fill:red} rect{fill:blue}", "red"),
        ("#r{fill:red} .a.b{fill:blue}", "red"),
        ("rect{fill:red} rect{fill:blue}", "blue"),
        ("rect{fill:red !important} #r{fill:blue}", "red"),
        ("g rect{fill:red}", "red"),
        ("svg > rect{fill:red}", "green"),
        ("g > rect, circle{fill:red}", "red"),
        ("rect:hover, rect{fill:red}", "red"),
        ("rect:hover{fill:red}", "green"),
        ("rect::before, rect{fill:red}", "green"),
        ("rect:odd, rect{fill:red}", "green"),
        ("rect:not(g rect), rect{fill:red}", "green"),
        ("a|rect{fill:red}", "green"),
        ("rect + rect{fill:red}", "green"),
        ("rect:not(.c){fill:red}", "red"),
        ("rect:not(.c, .a){fill:red}", "green"),
        ("rect:not(#q){fill:red} rect.a.b{fill:blue}", "red"),
        ("[class]{fill:red}", "red"),
        ('rect[class~="b"]{fill:red}', "red"),
        (":root rect:only-child{fill:red}", "red"),
        (":root{--c:red} rect{fill:var(--c)}", "red"),
        ("rect{--c:blue} :root{--c:red} rect{fill:var(--c)}", "blue"),
        ("rect{fill:var(--none, rgb(1,2,3))}", "rgb(1,2,3)"),
        (":root{--a:var(--b);--b:red} rect{fill:var(--a)}", "red"),
        ("> rect{fill:red}", "green"),
        ("@import url(http://localhost/a.css); rect{fill:red}", "red"),
        ("@media print {rect{fill:red}}", "green"),
        ("rect{fill:red", "red"),
        ("rect{fill:}", "green"),
        ("}}rect{fill:red}", "green"),
        ("rect/**/.a{fill:red}", "red"),
    ],
)
def test_which_rule_sets_the_fill(sheet: str, fill: str) -> None:
    text = f'<svg><style>{sheet.replace(">", "&gt;")}</style><g><rect id="r" class="a b" fill="green"/></g></svg>'
    assert styled(text)["r"]["fill"] == fill


def test_custom_properties_that_refer_to_each_other_or_grow_are_left_out() -> None:
    sheet = ":root{--a:var(--b);--b:var(--a)" + "".join(f";--x{k}:{f'var(--x{k + 1}) ' * 9}" for k in range(9)) + "}"
    groups = "".join(
        f'<g id="{name}" fill="var(--{value})"/>' for name, value in zip("ghi", ("a", "x0", "none"), strict=True)
    )
    text = f"<svg><style>{sheet}</style>{groups}</svg>"
    attributes = styled(text)
    assert "fill" not in attributes["g"] and "fill" not in attributes["h"] and not attributes["i"].get("fill")


def test_selectors_that_need_too_much_work_are_refused() -> None:
    sheet = ".none " + "g " * 6 + "rect{fill:red}"
    with pytest.raises(CodeRefused, match="steps of work"):
        styled(f"<svg><style>{sheet}</style>{'<g>' * 60}<rect/>{'</g>' * 60}</svg>")


def test_a_style_attribute_beats_rules_unless_they_are_important() -> None:
    sheet = "<style>rect{fill:red;stroke:red !important}</style>"
    attributes = styled(f'<svg>{sheet}<rect id="r" style="fill:blue;stroke:blue;x:3;behavior:url(a)"/></svg>')["r"]
    assert attributes == {"id": "r", "fill": "blue", "stroke": "red"}


def test_shorthands_and_values() -> None:
    text = "marker: url(#m); FILL : rgb(1 2 3 / 50%) ; stroke-width:2px!important; font-family:'A b', serif"
    assert [tuple(d) for d in read_declarations(text)] == [
        ("marker-start", "url(#m)", False),
        ("marker-mid", "url(#m)", False),
        ("marker-end", "url(#m)", False),
        ("fill", "rgb(1 2 3 / 50%)", False),
        ("stroke-width", "2px", True),
        ("font-family", '"A b", serif', False),
    ]


def test_too_many_rules_are_refused() -> None:
    with pytest.raises(CodeRefused, match="steps of work"):
        styled(f"<svg><style>{'a{fill:red}' * 500}</style>{'<g/>' * 10_000}</svg>")


EXTRA = st.sampled_from(
    ["", ":not(.a)", ":not(g, .b)", ":nth-child(odd)", ":nth-child(2n+1)", ":nth-child(-n+2)", ":nth-last-child(2)",
     ":first-child", ":last-child", ":only-child", ":root", "[class]", "[class=a]", "[class~=b]", "[class^=a]",
     "[class$=b]", "[class*=b]", "[class|=a]", '[class=""]']
)  # fmt: skip
compounds = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "*", "g", "rect", "svg"]), st.sampled_from(["", ".a", ".b", ".a.b", "#x", "#y.a"]), EXTRA
    ),
).filter(bool)
selectors = st.lists(compounds, min_size=1, max_size=4).flatmap(
    lambda parts: st.lists(
        st.sampled_from([" ", ">", "  > ", "+", " ~ "]), min_size=len(parts) - 1, max_size=len(parts) - 1
    ).map(lambda joins: parts[0] + "".join(j + p for j, p in zip(joins, parts[1:], strict=True)))
)
trees = st.recursive(
    st.tuples(st.sampled_from(["g", "rect"]), st.sampled_from(["", "a", "b", "a b"]), st.just(())),
    lambda inner: st.tuples(
        st.sampled_from(["g", "rect"]), st.sampled_from(["", "a", "b", "a b"]), st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def code(tree) -> str:
    tag, classes, children = tree
    return f'<{tag} class="{classes}">{"".join(map(code, children))}</{tag}>'


@given(selectors, trees)
def test_selectors_select_what_cssselect2_selects(selector: str, tree) -> None:
    body = code(tree)
    sheet = f"{selector}{{fill:red}}".replace(">", "&gt;")
    root = parse_svg(f"<svg><style>{sheet}</style>{body}</svg>")
    apply_styles(root)
    ours = ["fill" in node.attributes for node in root.walk()]
    compiled = cssselect2.compile_selector_list(tinycss2.parse_component_value_list(selector))
    whole = cssselect2.ElementWrapper.from_xml_root(ET.fromstring(f"<svg><style/>{body}</svg>"))
    theirs = [any(one.test(element) for one in compiled) for element in whole.iter_subtree()]
    assert ours == theirs
