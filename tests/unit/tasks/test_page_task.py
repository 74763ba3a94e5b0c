"""The task page with the real browser: drawn pages, the parts of the reward, hidden text, damage, tables, tricks."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import Asked, judgement_text, serve_judge
from PIL import Image
from task_tables import prepare, rows_of, sizes_of

from vlmrl.browser.client import SeenText
from vlmrl.data.images import encode_png
from vlmrl.environments.base import EnvironmentLimits, Start
from vlmrl.environments.calls import write_call
from vlmrl.environments.processes import Answer, Beginning, EnvironmentPool, load_environment
from vlmrl.errors import DataError, RewardError
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks import make_task
from vlmrl.tasks.base import NoFile
from vlmrl.tasks.judged.rewards import judge
from vlmrl.tasks.page import grader
from vlmrl.tasks.page.drawn import LAYOUTS, SIMPLE, draw_page
from vlmrl.tasks.page.entries import ELSEWHERE
from vlmrl.tasks.page.grader import draw_pairs, layout_score, make_grader, open_browser, text_score
from vlmrl.tasks.page.rewards import MOST_CHARS, find_html, page_of, write_answer
from vlmrl.tasks.page.task import attacks, html_file, truth_problems
from vlmrl.types import Call, RewardInput, RewardResult, Row
from vlmrl.untrusted import CodeRefused

SIZE = (400, 300)
BLANK = '<body style="background:#fff"></body>'
PAGE = """<!DOCTYPE html>
<html><head><style>
body { margin: 0; background: #fff; color: #222; font: 16px sans-serif; }
.top { background: #204080; color: #fff; padding: 12px; }
.box { background: #eecc88; margin: 16px; padding: 12px; width: 200px; }
</style></head><body>
<div class="top">Harbor tours</div>
<div class="box">The calm river meets the sea.</div>
<p>Open from May to June</p>
</body></html>"""


def row(html: str, size: tuple[int, int] = SIZE, **truth: Any) -> dict[str, Any]:
    return {"html": html, "width": size[0], "height": size[1], **truth}


@pytest.fixture(scope="module")
def grade() -> Callable[..., RewardResult]:
    made = make_grader(pictures=False)
    return lambda response, html=PAGE, size=SIZE: made(RewardInput(response, row(html, size)))


def value(result: RewardResult) -> float:
    weights = {"picture": 0.5, "text": 0.25, "layout": 0.25}
    parts = {name: result.parts[name] for name in weights}
    counted = {name: weights[name] for name, part in parts.items() if part is not None}
    return sum(weight * (parts[name] or 0.0) for name, weight in counted.items()) / sum(counted.values())


FENCED = "```html\n<p>a</p>\n```"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (PAGE, PAGE),
        (f"Here it is:\n{PAGE}\nI hope that it helps.", PAGE),
        (FENCED, "<p>a</p>"),
        (f"Sure.\n{FENCED}\nThe <body> is short.", "<p>a</p>"),
        ("```\n<p>a</p>\n```", "<p>a</p>"),
        ("```html\n<p>a</p>", "<p>a</p>"),  # cut at the limit of tokens
        ("```css\np { }\n```\n<body>b</body>", "<body>b</body>"),
        (f"```html\n<p>draft</p>\n```\nBetter:\n{FENCED}", "<p>a</p>"),
        ("<body>a</body> or rather <body>b</body>", "<body>b</body>"),
        (f"{PAGE}\n{BLANK}", BLANK),
        (f"{PAGE}\nThe <body> is short.", PAGE),
        ("<html><body>cut", "<html><body>cut"),
        (f"<think>{PAGE}</think><body>b</body>", "<body>b</body>"),
        (f"{PAGE}</think><body>b</body>", "<body>b</body>"),
        ("<body>a</body>\n</html>", "<body>a</body>\n</html>"),
    ],
)
def test_the_page_of_a_response(response: str, code: str) -> None:
    assert find_html(response) == code


@pytest.mark.parametrize(
    "response",
    ["", "no code", "<think>", f"<think>{PAGE}", f"<think>{PAGE}</think>", "<p>a</p>", "```html\nwords\n```",
     f"<body>{'x' * MOST_CHARS}</body>"],
)  # fmt: skip
def test_a_response_without_a_page(response: str) -> None:
    with pytest.raises(CodeRefused):
        find_html(response)


PIECES = ("<body>", "</body>", "</html>", "<html>", "```html\n", "\n```\n", "a", "<think>", "</think>")


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_what_is_written_as_an_answer_is_read_again(text: str) -> None:
    try:
        answer = write_answer(text.strip())
    except CodeRefused:
        return
    assert find_html(answer) == text.strip()


def line(text: str, left: float = 0.0, top: float = 0.0, size: float = 16.0, colour: Any = (0, 0, 0)) -> SeenText:
    return SeenText(text, left, top, left + 8.0 * len(text), top + 16.0, size, colour)


@pytest.mark.parametrize(
    ("truth", "response", "score"),
    [
        (["a b"], ["a", "B"], 1.0),
        (["a b"], ["a c"], (1 / 2 + 1 / 3 + 1 / 3) / 3),  # words a; pairs (start, a); triples " a "
        (["a b"], ["b a"], (1 + 0 + 2 / 3) / 3),
        (["a b"], ["a b", "a b"], (4 / 6 + 2 * 3 / 8 + 2 * 3 / 10) / 3),
        (["a"], [], 0.0),
        ([], ["a"], 0.0),
        ([], [], 1.0),
    ],
)
def test_the_words_of_two_pages(truth: list[str], response: list[str], score: float) -> None:
    assert text_score([line(t) for t in truth], [line(t) for t in response]) == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ([line("word")], 1.0),
        ([line("word", left=12.5)], 0.5 * 0.5 + 0.5),  # half of the reach: 0.25 x 100 pixels
        ([line("word", top=500)], 0.5),
        ([line("word", size=32)], 1 - 0.25 / 2),
        ([line("word", colour=(0, 64, 0))], 1 - 0.25 / 2),
        ([line("word"), line("more")], 2 * 4 / 12),
        ([line("ward")], 2 * 3 / 10),  # ^w, rd, d$ of five pairs each
        ([line("word", top=500), line("word")], 2 * 4 / 12),
        ([], 0.0),
    ],
)
def test_the_places_of_lines(response: list[SeenText], score: float) -> None:
    assert layout_score([line("word")], response, 100.0) == pytest.approx(score)
    assert layout_score(response, [line("word")], 100.0) == pytest.approx(score)


LINES = st.lists(
    st.builds(line, st.text(min_size=1, max_size=9), *[st.floats(0, 99)] * 2, st.floats(1, 40)), min_size=1, max_size=6
)


@given(LINES, LINES)
def test_scores_of_texts_are_shares_and_equal_ones_are_one(truth: list[SeenText], response: list[SeenText]) -> None:
    for score in (lambda a, b: layout_score(a, b, 100.0), text_score):
        assert score(truth, truth) == 1.0 and 0.0 <= score(truth, response) <= 1.0
        assert score(truth, response) == pytest.approx(score(response, truth))
    assert layout_score(truth, [*truth, line("needless")], 100.0) < 1.0


@pytest.mark.parametrize("layout", [*LAYOUTS, SIMPLE])
def test_a_drawn_page_earns_one_for_itself_and_a_blank_one_nothing(grade: Any, layout: str) -> None:
    html, size = draw_page(layout, 11), (112, 112) if layout == SIMPLE else SIZE
    assert html == draw_page(layout, 11) != draw_page(layout, 12) and "<script" not in html
    assert 60 <= len(html) <= 160 if layout == SIMPLE else 600 <= len(html) <= 4000
    right = grade(write_answer(html), html, size)
    assert set(right.parts.values()) <= {1.0, None} and value(right) == 1.0 and right.parts["accuracy"] == 1.0
    for blank in (BLANK, '<body style="background:#3a7"></body>'):
        empty = grade(blank, html, size)
        assert value(empty) == 0.0 and empty.parts["render"] == 1.0 and empty.note == "the page is empty"


LESS = PAGE.replace("<p>Open from May to June</p>", "")
HIDDEN = {
    "display": '<p style="display:none">{}</p>',
    "visibility": '<p style="visibility:hidden">{}</p>',
    "opacity": '<p style="opacity:0">{}</p>',
    "transparent": '<p style="color:transparent">{}</p>',
    "ground": '<p style="color:#fff">{}</p>',
    "nearly the ground": '<p style="color:#fbfbfb">{}</p>',
    "left": '<p style="position:absolute;left:-9999px">{}</p>',
    "below": '<p style="position:fixed;top:9999px">{}</p>',
    "size": '<p style="font-size:0">{}</p>',
    "clip": '<p style="position:absolute;clip-path:inset(100%)">{}</p>',
    "overflow": '<p style="height:0;overflow:hidden">{}</p>',
    "indent": '<p style="position:absolute;text-indent:-9999px;overflow:hidden">{}</p>',
    "covered": '<p style="position:absolute;left:9px;top:200px;z-index:-1">{}</p>'
    '<div style="position:absolute;left:0;top:190px;width:400px;height:60px;background:#fff"></div>',
    "alt": '<img style="position:absolute" width="0" height="0" alt="{}">',
    "title": '<span title="{}"></span>',
    "comment": "<!-- {} -->",
    "script": '<script>document.write("<p>{}</p>")</script>',
    "noscript in head": '<template><p>{}</p></template>',
    "scale": '<p style="position:absolute;transform:scale(0)">{}</p>',
}  # fmt: skip


@pytest.mark.parametrize("way", HIDDEN)
def test_hidden_text_gains_nothing(grade: Any, way: str) -> None:
    without = grade(LESS)
    hidden = grade(LESS.replace("</body>", HIDDEN[way].format("Open from May to June") + "</body>"))
    assert value(without) < 0.95 and value(grade(PAGE)) == 1.0
    assert all(hidden.parts[part] <= without.parts[part] for part in ("text", "layout"))
    assert value(hidden) <= value(without) + (0.005 if way == "nearly the ground" else 1e-9)  # its dots are seen


def test_tiny_text_counts_as_dots_and_not_as_words(grade: Any) -> None:
    tiny = grade(LESS.replace("</body>", '<p style="font-size:2px;margin:0">Open from May to June</p></body>'))
    assert tiny.parts["text"] == grade(LESS).parts["text"] and value(tiny) < 0.95


def test_needless_text_and_blocks_cost(grade: Any) -> None:
    text = grade(PAGE.replace("</body>", "<p>and more</p></body>"))
    block = grade(PAGE.replace("</body>", '<div style="background:red;width:90px;height:60px"></div></body>'))
    below = grade(PAGE.replace("</body>", '<div style="height:900px"></div></body>'))
    assert all(value(result) < 0.99 for result in (text, block, below))
    assert (
        text.parts["text"] < 1 and block.parts["text"] == 1 and below.parts["picture"] == pytest.approx(1 / 3, abs=0.1)
    )


def test_more_damage_earns_less(grade: Any) -> None:
    steps = [
        PAGE,
        PAGE.replace("#204080", "#304880"),
        PAGE.replace("#204080", "#308820"),
        PAGE.replace("#204080", "#308820").replace("margin: 16px", "margin: 40px"),
        PAGE.replace("#204080", "#308820").replace("margin: 16px", "margin: 40px").replace("calm river", "x"),
        LESS.replace("#204080", "#308820").replace("margin: 16px", "margin: 40px").replace("calm river", "x"),
        "<body>Harbor tours</body>",
        BLANK,
    ]
    values = [value(grade(html)) for html in steps]
    assert values[0] == 1.0 and values == sorted(values, reverse=True) and len(set(values)) == len(values), values


def test_a_picture_of_the_truth_has_no_words(grade: Any) -> None:
    picture = '<div style="position:absolute;left:0;top:0;width:400px;height:300px;background:url({})"></div>'
    with open_browser() as browser:
        seen = browser.look(PAGE, *SIZE)
    address = "data:image/png;base64," + base64.b64encode(encode_png(Image.fromarray(seen.pixels))).decode()
    result = grade(f"<body>{picture.format(address)}</body>")
    assert result.parts["picture"] == 1.0 and result.parts["text"] == result.parts["layout"] == 0.0
    assert result.parts["accuracy"] == 0.0


def test_two_browsers_draw_the_same() -> None:
    html = draw_page("boxes", 3)
    with open_browser() as one, open_browser() as other:
        first, second = one.look(html, *SIZE), other.look(html, *SIZE)
    assert np.array_equal(first.pixels, second.pixels) and first.texts == second.texts


def test_a_page_that_is_refused_earns_nothing_and_says_why(grade: Any) -> None:
    result = grade("I cannot see a page.")
    assert result.note == "not shown: there is no HTML code" and set(result.parts.values()) == {0.0}
    long = grade(f"<body>{'x' * MOST_CHARS}</body>")
    assert grade("<html><script>document.write('x')</script></html>").note == "the page is empty; scripts do not run"
    assert grade(PAGE.replace("<p>", '<p style="opacity:0">')).note == "33% of its letters cannot be seen"
    assert "the limit is 200,000" in long.note and long.detail["refused"] == "size"


def test_a_truth_without_text_has_the_picture_alone(grade: Any) -> None:
    html = '<body style="background:tan"><p style="background:red;height:30px"></p></body>'
    assert grade(html, html).parts == {"picture": 1.0, "text": None, "layout": None, "render": 1.0, "accuracy": 1.0}
    assert grade("none", html).parts["text"] is None and 0 < value(grade(html.replace("30", "60"), html)) < 1


def test_broken_truths_are_named() -> None:
    assert truth_problems(row(PAGE)) == [] and page_of(row(PAGE)) == (PAGE, SIZE)
    for truth in ({"html": PAGE}, row(" "), row(PAGE, (0, 9)), row(PAGE, (9000, 9)), row("x" * MOST_CHARS + "x")):
        assert len(truth_problems(truth)) == 1, truth
    with pytest.raises(RewardError, match="not the code of a page"):
        make_grader(pictures=False)(RewardInput("x", {"html": None}))


def test_the_tricks_earn_what_their_kind_may(grade: Any) -> None:
    tricks = attacks([])
    for trick in tricks:
        x = trick.write(RewardInput("", row(PAGE), prompt="Write the page."))
        assert x is not None, trick.name
        earned = value(grade(x.response))
        low, high = {"void": (0, 0), "guess": (0, 0.2), "broken": (0, 0.5), "miss": (0, 0.9), "fair": (1, 1)}[
            trick.kind
        ]
        assert low <= earned <= high, (trick.name, earned)
    assert len({trick.name for trick in tricks}) == len(tricks)


def test_drawn_rows_are_new_pages_in_all_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.tasks.prep_options.drawn_counts", lambda num: {"train": num - 16, "test": 3})
    made = prepare("page", tmp_path, synthetic=20, simple=True, seed=5)
    rows = [r for split in ("train", "test") for r in rows_of(made, split)]
    assert sizes_of(made.info) == {"train": 4, "test": 3} and len({r.media[0].sha256 for r in rows}) == 7
    assert {(r.truth["width"], r.truth["height"], r.truth["layout"]) for r in rows} == {(112, 112, "simple")}
    assert made.info["source"]["browser"].startswith("chromium ")
    drawn = prepare("page", tmp_path, synthetic=20, seed=5, out=tmp_path / "more")
    layouts = [r.truth["layout"] for r in rows_of(drawn, "train")]
    assert layouts == list(LAYOUTS[:4]) and {r.media[0].width for r in rows_of(drawn, "train")} == {800}


def table(path: Path, pages: list[Any]) -> Path:
    """Write a table in the form of Design2Code and WebSight: `image` and `text`."""
    cell = {"bytes": b"not looked at", "path": "a.png"}
    pq.write_table(pa.Table.from_pylist([{"image": cell, "text": page} for page in pages]), path)
    return path


def test_tables_as_design2code_and_websight_publish_them(tmp_path: Path) -> None:
    page = PAGE.replace
    pages = [
        PAGE,
        page("Harbor", "River"),
        page("Harbor", "Valley").replace("</body>", '<img src="https://picsum.photos/60/40"></body>'),
        page("<head>", '<head><script src="https://cdn.tailwindcss.com/2.2"></script>'),
        page("<head>", '<head><link rel="stylesheet" href="https://a.example/a.css">'),
        page("<head>", '<head><link rel="stylesheet" href="https://fonts.googleapis.com/css?family=X">').replace(
            "Harbor", "Font").replace("width: 200px", "height: 500px"),
        page("Harbor", "Tall").replace("width: 200px", "height: 2000px"),
        page("Harbor", "Long" * 9000),
        "<html><body></body></html>",
        '<html><body style="background:red"><div style="background:blue">&nbsp;</div></body></html>',
        f"<!-- a remark -->\n{page('Harbor', 'Remark')}",
        page("Harbor", "Held out"),
    ]  # fmt: skip
    test = table(tmp_path / "bench.parquet", [page("Harbor", "Held out"), f"{page('Harbor', 'Other')}\n"])
    source = table(tmp_path / "rows.parquet", pages)
    options = {"test": str(test), "validation_rows": 0, "width": 400, "height": 200, "max_height": 1000}
    made = prepare("page", tmp_path, source, **options)
    assert sizes_of(made.info) == {"train": 5, "test": 2}
    lines = (made.path / "dropped.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["reason"][:25] for line in lines) == sorted(
        ["its style comes from a sc", "it needs a script or a st", "the page is over 1,000 pi",
         "the code has over 20,000 ",
         "the page is blank", "the page has no text that", "the same page as train ro"]
    )  # fmt: skip
    assert any("in the split test" in line for line in lines)
    rows = {
        name: r
        for r in rows_of(made, "train")
        for name in ("River", "Valley", "Font", "Remark")
        if name in r.truth["html"]
    }
    tall = rows["Font"]
    assert 500 < tall.truth["height"] == tall.media[0].height < 700, "a picture shows the whole page"
    assert len(rows) == 4 and rows["River"].truth["height"] == 200 and rows["River"].columns["size"] == "400 x 200"
    assert write_answer(rows["Remark"].truth["html"]).startswith("```html\n<!-- a remark")
    again = prepare("page", tmp_path, source, **{**options, "out": tmp_path / "few", "max_rows": 2})
    assert sizes_of(again.info) == {"train": 2, "test": 2}
    wrong = table(tmp_path / "wrong.parquet", [PAGE, "no HTML"])  # of train, which is drawn last
    with pytest.raises(DataError, match="1 of 4 rows are wrong"):
        prepare("page", tmp_path, wrong, **{**options, "out": tmp_path / "wrong"})


@pytest.mark.parametrize(
    ("code", "is_out"),
    [
        ('<link href="https://fonts.googleapis.com/css2?family=Roboto" rel="stylesheet">', False),
        ('<link href="https://use.typekit.net/a.css" rel=stylesheet>', False),
        ('<link href="https://a.example/a.css" rel="stylesheet">', True),
        ('<style>@import url("https://a.example/a.css");</style>', True),
        ("<style>@import url('https://fonts.googleapis.com/css?family=X');</style>", False),
        ("<script>document.write('<p>more')</script>", True),
        ("<script>console.log(1)</script>", False),
    ],
)
def test_what_a_page_needs_from_elsewhere(code: str, is_out: bool) -> None:
    assert bool(ELSEWHERE.search(code)) == is_out


def test_a_table_of_pages_that_need_scripts_says_so(tmp_path: Path) -> None:
    source = table(
        tmp_path / "v2.parquet", [PAGE.replace("<head>", '<head><script src="https://cdn.tailwindcss.com"></script>')]
    )
    with pytest.raises(DataError, match=r"its style comes from a script \(Tailwind\)"):
        prepare("page", tmp_path, source, validation_rows=0)
    with pytest.raises(DataError, match="--simple is for drawn pages"):
        prepare("page", tmp_path, source, simple=True)
    with pytest.raises(DataError, match="--height 900 is over --max-height 800"):
        prepare("page", tmp_path, source, height=900, max_height=800)


@pytest.mark.parametrize("variant", ["direct", "think", "repair"])
def test_demonstrations_end_with_the_page(variant: str) -> None:
    task = make_task("page", {"name": "x"}, variant)
    turns = task.correct_turns(Row("a", "", "page", row(PAGE)), random.Random(0))
    assert find_html(str(turns[-1]) if isinstance(turns[-1], str) else turns[-1][-1]) == PAGE
    assert len(turns) == (2 if variant == "repair" else 1)
    if variant == "repair":
        call = turns[0] if isinstance(turns[0], Call) else turns[0][0]
        assert isinstance(call, Call) and call.name == "render" and call.arguments["html"] != PAGE


def test_the_tool_shows_a_draft_at_the_size_of_the_picture() -> None:
    assert grader.Render.__vlmrl_start__({}, forks=True).note
    start = Start(images=[Image.new("RGB", SIZE)])
    shown = grader.Render().render(start, PAGE)
    assert shown.size == SIZE and len(set(np.asarray(shown).reshape(-1, 3)[:, 0])) > 9


def test_the_tool_in_the_process_of_an_episode() -> None:
    place = f"{Path(grader.__file__)}:Render"
    pool = EnvironmentPool(load_environment(place, {}), "hermes", EnvironmentLimits())
    try:
        pool.begin(0, Beginning({}, row(PAGE), [Image.new("RGB", SIZE)], [SIZE], seed=1, prompt="p"))
        ((_, begun),) = pool.advance()
        assert isinstance(begun, Answer)
        answers = []
        for html in (PAGE, PAGE):
            pool.turn(0, write_call(Call("render", {"html": html}), "hermes"))
            ((_, answer),) = pool.advance()
            assert isinstance(answer, Answer) and len(answer.parts) == 1 and not answer.errors
            answers.append(answer)
        with open_browser() as browser:
            pixels = browser.look(PAGE, *SIZE).pixels
        for answer in answers:
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(answer.parts[0]))), pixels)
    finally:
        pool.close()


def test_files_of_pages_run_and_load_nothing_and_pairs_are_drawn() -> None:
    text = html_file(PAGE)
    assert isinstance(text, str) and text.startswith('<!DOCTYPE html><meta http-equiv="Content-Security-Policy"')
    assert isinstance(html_file('<body><meta http-equiv="refresh" content="0;url=http://a.example">'), NoFile)
    assert isinstance(html_file("none"), NoFile)
    both, lone = draw_pairs([(row(PAGE), PAGE.replace("Harbor", "River")), (row(PAGE), "none")])
    assert list(both) == ["truth", "render", "overlay"] and list(lone) == ["truth"]


def test_a_judge_sees_the_page_that_a_response_has() -> None:
    seen: list[Asked] = []

    def script(number: int, one: Asked) -> str:
        seen.append(one)
        return judgement_text(0.5)

    image = Image.new("RGB", (160, 120), "white")
    inputs = [RewardInput(text, row(PAGE), images=(image,)) for text in (PAGE, "no page")]
    with serve_judge(script) as endpoint:
        table = {"provider": "vllm", "model": "judge-1", "endpoint": endpoint.address, "cache": False}
        with Scorer(judge(judge=table, render="html")) as scorer:
            fine, none = scorer.score(inputs)
    assert fine.value == pytest.approx(0.5) and fine.parts["render"] == 1.0 and len(seen) == 1
    assert none.value == 0 and none.note == "not drawn: there is no HTML code"
    shown = Image.open(io.BytesIO(seen[0].pictures[1]))
    assert shown.size == (160, 120) and shown.convert("RGB").getpixel((80, 5)) == (32, 64, 128)
