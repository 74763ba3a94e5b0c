"""Pages of a model: what is seen of them, what is not, and what they cannot do."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from page_attacks import PLAIN, attack, ears, needs_browser, pages

from vlmrl.browser.client import Browser, BrowserServer
from vlmrl.untrusted import CodeRefused

pytestmark = needs_browser
HEAD = "<!doctype html><body style='margin:8px;font:16px/20px Arial;background:#fff;color:#000'>"
WORDS = "Seventeen quiet zebras"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with BrowserServer(alone=True) as server, Browser(server.address, seconds=10.0) as browser:
        browser.look(PLAIN, 320, 240)
        yield browser


def words(browser: Browser, html: str) -> str:
    return " | ".join(text.text for text in browser.look(HEAD + html, 320, 240).texts)


def test_lines_of_text_are_read_with_their_place_size_and_colour(browser: Browser) -> None:
    seen = browser.look(HEAD + "<p style='margin:0;color:#c00;font-size:20px'>Red one<br>and two", 320, 240)
    assert [text.text for text in seen.texts] == ["Red one", "and two"]
    first, second = seen.texts
    assert (first.left, first.size, first.colour) == (8, 20.0, (204, 0, 0))
    assert 6 <= first.top < first.bottom <= second.top + 4
    assert 60 < first.right - first.left < 80
    assert seen.pixels.shape == (240, 320, 3)
    assert seen.page_height == 240


def test_a_page_is_as_high_as_its_content(browser: Browser) -> None:
    assert browser.look(HEAD + "<div style='height:700px'></div>", 320, 240).page_height == 716


@pytest.mark.parametrize(
    "html",
    [
        f"<button>{WORDS}</button>",
        f"<input value='{WORDS}' size=30>",
        f"<input placeholder='{WORDS}' size=30>",
        f"<textarea cols=30>{WORDS}</textarea>",
        f"<a href='#'>{WORDS}</a>",
        f"<p style='background:#036;color:#fff'>{WORDS}",
        f"<p style='opacity:.6'>{WORDS}",
        f"<p style='color:#999'>{WORDS}",
        f"<p style='font-size:9px'>{WORDS}",
        f"<div style='overflow:hidden;width:300px'>{WORDS}</div>",
        f"<div style='position:absolute;left:40px;top:90px;transform:translate(9px,9px)'>{WORDS}</div>",
        f"<p style='background:linear-gradient(#eee,#ddd)'>{WORDS}",
        f"<style>p::before{{content:'{WORDS}'}}</style><p>",
    ],
)
def test_text_that_can_be_seen_is_read(browser: Browser, html: str) -> None:
    assert words(browser, html) == WORDS


HIDDEN = {
    "alt": f"<img src=x alt='{WORDS}' title='{WORDS}'>",
    "title": f"<title>{WORDS}</title>",
    "comment": f"<!-- {WORDS} -->",
    "data": f"<p data-text='{WORDS}'>",
    "no display": f"<p style='display:none'>{WORDS}",
    "invisible": f"<p style='visibility:hidden'>{WORDS}",
    "opacity": f"<p style='opacity:0'>{WORDS}",
    "opacity around": f"<div style='opacity:.1'><p style='opacity:.5'>{WORDS}</div>",
    "transparent": f"<p style='color:transparent'>{WORDS}",
    "transparent letters": f"<p style='-webkit-text-fill-color:transparent'>{WORDS}",
    "colour of the ground": f"<p style='color:#fff'>{WORDS}",
    "nearly the colour of the ground": f"<p style='color:#f4f4f4'>{WORDS}",
    "off the page": f"<p style='position:absolute;left:-999px'>{WORDS}",
    "below the page": f"<p style='margin-top:900px'>{WORDS}",
    "indented": f"<p style='text-indent:-999px;overflow:hidden'>{WORDS}",
    "no size": f"<div style='width:0;height:0;overflow:hidden'>{WORDS}</div>",
    "tiny": f"<p style='font-size:2px'>{WORDS}",
    "scaled": f"<p style='transform:scale(.05)'>{WORDS}",
    "clipped": f"<p style='clip-path:inset(50%)'>{WORDS}",
    "masked": f"<p style='mask-image:linear-gradient(transparent,transparent)'>{WORDS}",
    "filtered": f"<p style='filter:opacity(0)'>{WORDS}",
    "covered": f"<p>{WORDS}</p><div style='position:absolute;inset:0;background:#fff'></div>",
    "covered by letters": f"<p style='margin:0'>{WORDS}</p><div style='position:absolute;left:0;top:0;width:320px;"
    "height:40px;background:#fff'><p style='margin:8px'>" + "." * 60 + "</div>",
    "on letters": "<p style='margin:0'>" + "." * 36 + f"</p><p style='position:absolute;top:0;margin:8px 0;"
    f"color:transparent'>{WORDS}",
    "on letters in the colour of the ground": "<p style='margin:0'>" + "." * 36 + "</p><p style='position:absolute;"
    f"top:0;margin:8px 0;color:#fff'>{WORDS}",
    "on a line": "<hr style='border:2px solid #000;margin:8px 0'><p style='position:absolute;top:0;margin:0;"
    f"color:#fff'>{WORDS}",
    "borders of its colour": f"<p style='border:9px solid;-webkit-text-fill-color:transparent'>{WORDS}",
    "letters on each other": f"<p style='letter-spacing:-9px'>{WORDS}",
    "closed": f"<details><summary></summary>{WORDS}</details>",
    "not chosen": f"<select><option>x<option>{WORDS}</select>",
    "list of a field": f"<input list=l><datalist id=l><option value='{WORDS}'></datalist>",
    "hidden field": f"<input type=hidden value='{WORDS}'>",
    "password": f"<input type=password value='{WORDS}' size=30>",
    "frame": f"<iframe srcdoc='{WORDS}'></iframe>",
    "script": f"<script>document.body.innerHTML='{WORDS}'</script>",
    "without scripts": f"<template>{WORDS}</template>",
    "background of letters": f"<p style='background:#000;-webkit-background-clip:text;color:transparent'>{WORDS}",
}


@pytest.mark.parametrize("way", HIDDEN)
def test_hidden_text_is_not_read(browser: Browser, way: str) -> None:
    read = words(browser, HIDDEN[way]).casefold()
    assert not any(word in read for word in WORDS.casefold().split()), read


def test_of_a_cut_line_the_visible_characters_are_read(browser: Browser) -> None:
    read = words(browser, f"<div style='width:80px;overflow:hidden;white-space:nowrap'>{WORDS}</div>")
    assert read == WORDS[: len(read)]
    assert 7 <= len(read) <= 13


def test_text_in_the_window_is_read_however_much_lies_below(browser: Browser) -> None:
    assert words(browser, f"<p>{WORDS}</p><div style='margin-top:900px'>" + "<p>x</p>" * 6000).startswith(WORDS)


def test_pictures_of_other_addresses_are_grey(browser: Browser) -> None:
    seen = browser.look(HEAD + "<img src='https://example.com/a.png' style='position:fixed;left:0;top:0'>", 320, 240)
    assert (seen.pixels[:200, :300] == 204).all()
    assert (seen.pixels[200:] == 255).all()


def test_a_page_looks_the_same_whatever_came_before(browser: Browser) -> None:
    moving = "<style>@keyframes a{to{background:#000}}p{animation:a 1ms infinite;transition:all 9s}</style><p>moves"
    first = browser.look(HEAD + moving, 320, 240)
    for html in ("<title>x</title><style>*{color:red!important}</style>", "<a href=''>x</a>", "<base href=x><p>y"):
        browser.look(HEAD + html, 500, 100)
    again = browser.look(HEAD + moving, 320, 240)
    assert (first.pixels == again.pixels).all()
    assert first.texts == again.texts
    with BrowserServer(alone=True) as server, Browser(server.address) as other:
        third = other.look(HEAD + moving, 320, 240)
    assert (first.pixels == third.pixels).all()
    assert first.texts == third.texts


def test_attacks_reach_nothing_and_end_in_time() -> None:
    with BrowserServer(alone=True) as server, Browser(server.address, seconds=2.0) as browser, ears() as listening:
        texts = pages(listening.url, listening.udp)
        chosen = dict.fromkeys([*list(texts)[::5], "endless script", "refresh", "selectors", "frame", "webrtc"])
        outcomes = {name: attack(browser, texts[name]) for name in chosen}
        assert listening.heard() == []
    assert [name for name, outcome in outcomes.items() if not outcome.unharmed] == []
    assert [(name, outcome.seconds) for name, outcome in outcomes.items() if outcome.seconds > 3.0] == []
    assert outcomes["selectors"].refused == "time"


def test_a_page_that_is_too_long_or_needs_too_much_memory_is_refused() -> None:
    with BrowserServer(memory_mb=150, alone=True) as server, Browser(server.address, seconds=20.0) as browser:
        with pytest.raises(CodeRefused, match="500,009 characters") as too_long:
            browser.look("<!doctype" + "x" * 500_000, 320, 240)
        many = "<div style='filter:blur(3px);width:3000px;height:3000px;background:#f00'>x</div>" * 400
        with pytest.raises(CodeRefused, match="needed more than 150 MiB") as too_large:
            for _ in range(50):
                browser.look(HEAD + many, 3000, 3000)
                time.sleep(0.1)
    assert (too_long.value.kind, too_large.value.kind) == ("size", "memory")


def test_a_page_after_a_long_pause_has_its_whole_time() -> None:
    with BrowserServer(alone=True) as server, Browser(server.address, seconds=2.0) as browser:
        first = browser.look("<body>one", 100, 100)
        time.sleep(2.5)
        assert browser.look("<body>one", 100, 100).texts == first.texts
