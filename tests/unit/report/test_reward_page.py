from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from reward_runs import make_pair_run, scored_groups

from vlmrl.report.reward_page import render_reward_page, write_reward_page
from vlmrl.reward_check.response_tables import open_table
from vlmrl.reward_check.run import RewardQuestion, check_rewards, parse_limits
from vlmrl.reward_check.scoring import open_saved
from vlmrl.rewards import reward_record
from vlmrl.rewards.scoring import Scorer
from vlmrl.store.media import write_shard
from vlmrl.store.runs import create_run
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Media, Row, Turn

NASTY = "<script>alert(1)</script>\u202e{{ 7*7 }}</pre><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def saved(place):
    """A run with images whose responses, truths and ids try to break the page."""
    file = place / "r.py"
    file.write_text("def score(x): return {'short': float(len(x.response) < 9), '<b>': 1.0}\n")
    (place / "other.py").write_text("def score(x): return 2.0 * (len(x.response) >= 9)\n")
    spec = load_reward(f"{file}:score")
    run = create_run(place / "runs", kind="rl", recipe_name="r", rewards=[{"source": "s", **reward_record(spec, {})}])
    rows, files = [], []
    for red in (10, 200):
        sink = io.BytesIO()
        Image.new("RGB", (900, 600), (red, 20, 30)).save(sink, "PNG")
        media = Media(hashlib.sha256(sink.getvalue()).hexdigest(), 900, 600)
        files.append((media.sha256, sink.getvalue()))
        rows.append((Row(f"<i>{red}", "s", "table", {"answer": "<u>'\"&"}, (media,)), ["short", NASTY, "other"]))
    with Scorer(spec) as scorer:
        run.write_rollouts(0, scored_groups(rows, scorer))
    write_shard(run.dir / "media" / "images-00000.arrow", files)
    run.finish("done")
    return open_saved("last", place / "runs")


@pytest.fixture(scope="module")
def checked(saved, place):
    return check_rewards(saved, RewardQuestion(diff=f"{place}/other.py:score", most=10))


def test_the_page_shows_the_most_changed_with_their_images_and_nothing_runs(saved, checked):
    page = render_reward_page(saved, checked)
    assert page.count('<article class="group">') == 6
    assert "<script" not in page and "onerror=alert" not in re.sub(r"&lt;.*?&gt;", "", page)
    assert (
        "\u202e" not in page and "\\u202e" in page and "{{ 7*7 }}" in page and "49" not in page.split("<pre>")[1][:200]
    )
    assert "&lt;i&gt;10" in page and "<i>10" not in page and "&lt;u&gt;&#39;" in page
    outside = re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)[^"]*"', page)
    assert outside == [] and "default-src 'none'" in page and "url(" not in page
    pictures = set(re.findall(r'href="(data:image/png;base64,[^"]+)"', page))
    assert len(pictures) == 2, "each image once, however many responses show it"
    assert "0.000" in page and "advantage" in page


def test_the_images_of_tools_are_shown_behind_those_of_the_row(saved, checked):
    first, other = dict.fromkeys(sample.media for sample in checked.samples.values())
    turns = (Turn("assistant", "look"), Turn("tool", "", other), Turn("assistant", "short"))
    samples = {
        row: replace(sample, input=replace(sample.input, turns=turns)) if sample.media == first else sample
        for row, sample in checked.samples.items()
    }
    pages = (render_reward_page(saved, each) for each in (checked, replace(checked, samples=samples)))
    before, after = (page.count("<use ") for page in pages)
    assert after == before + 3


def test_the_prompt_is_shown_beside_the_truth(saved, checked):
    asked = {
        row: replace(sample, input=replace(sample.input, prompt="Where is the <b>disc</b>?"))
        for row, sample in checked.samples.items()
    }
    unknown = {row: replace(sample, input=replace(sample.input, prompt="")) for row, sample in checked.samples.items()}
    page = render_reward_page(saved, replace(checked, samples=asked))
    assert page.count("<summary>prompt</summary><pre>Where is the ") == 6 and "<b>disc" not in page
    assert "<summary>prompt</summary>" not in render_reward_page(saved, replace(checked, samples=unknown))


@pytest.mark.slow
def test_images_are_shrunk_and_bounded(saved, checked, monkeypatch):
    page = render_reward_page(saved, checked)
    uri = re.search(r'href="data:image/png;base64,([^"]+)"', page)
    assert uri is not None
    with Image.open(io.BytesIO(base64.b64decode(uri[1]))) as image:
        assert max(image.size) == 448
    from vlmrl.report import reward_page
    from vlmrl.report.rollout_examples import Album

    monkeypatch.setattr(reward_page, "Album", lambda: Album(budget=10))
    small = render_reward_page(saved, checked)
    assert "images are left out" in small and "data:image" not in small


def test_equal_rewards_make_a_page_that_says_so(saved, place, tmp_path):
    report = check_rewards(saved, RewardQuestion(diff=f"{place}/r.py:score"))
    write_reward_page(tmp_path / "new" / "page.html", saved, report)
    text = (tmp_path / "new" / "page.html").read_text()
    assert "Both rewards give every response the same score." in text and "<article" not in text


def test_responses_on_which_only_the_second_reward_fails_are_said_and_shown(saved, tmp_path):
    body = "def score(x): return {'short': float('nan' if len(x.response) > 9 else len(x.response) < 9), '<b>': 1}"
    (tmp_path / "nan.py").write_text(f"{body}\n")
    report = check_rewards(saved, RewardQuestion(diff=f"{tmp_path}/nan.py:score", keep_going=True))
    page = render_reward_page(saved, report)
    assert "<h2>The second reward failed</h2>" in page and "On 2 responses." in page and "The first reward" not in page
    assert page.count('<article class="group">') == 2 and page.count('1.000 → <span class="down">failed</span>') == 2
    assert "Both rewards give every response that both can score the same score." in page
    assert [limit.holds(report.report) for limit in parse_limits("errors>1,errors>2", diff=True)] == [True, False]


def png(red: int, size: tuple[int, int] = (40, 30)) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", size, (red, 20, 30)).save(sink, "PNG")
    return sink.getvalue()


def reds(page: str) -> list[int]:
    """The red of each image of a page, once per content."""
    uris = dict.fromkeys(re.findall(r'(?:src|href)="data:image/png;base64,([^"]+)"', page))
    return sorted(Image.open(io.BytesIO(base64.b64decode(uri))).getpixel((0, 0))[0] for uri in uris)  # type: ignore[index]


@pytest.fixture
def folder(tmp_path):
    """A table's folder with two images, one image outside, and a link to it."""
    (tmp_path / "secret.png").write_bytes(png(99))
    made = tmp_path / "table"
    (made / "pics").mkdir(parents=True)
    for red in (10, 200):
        (made / "pics" / f"{red}.png").write_bytes(png(red))
    (made / "pics" / "link.png").symlink_to(tmp_path / "secret.png")
    (made / "r.py").write_text("def score(x): return float(len(x.response))\n")
    return made


def page_of(path: Path, **columns: str) -> str:
    table = open_table(path, columns=columns)
    return render_reward_page(table, check_rewards(table, RewardQuestion(f"{path.parent}/r.py:score", most=9)))


def jsonl(path: Path, cells: list) -> Path:
    rows = [{"response": f"answer {i}", "ground_truth": "x", "images": cell} for i, cell in enumerate(cells)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_images_of_a_table_are_shown_whatever_form_they_have(folder):
    uri = "data:image/png;base64," + base64.b64encode(png(77)).decode()
    cells = ["pics/10.png", ["pics/10.png", "pics/200.png"], [{"bytes": None, "path": "pics/200.png"}], uri, None]
    page = page_of(jsonl(folder / "t.jsonl", cells))
    assert reds(page) == [10, 77, 200] and page.count('<article class="group">') == 5
    first = page.partition("<pre>answer 0")[0].rpartition("<article")[2]
    assert "<svg" in first, "the image stands beside its own response"
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["response", "ground_truth", "photo"], ["a", "b", "pics/10.png"], ["c", "d", ""]])
    assert reds(page_of(folder / "t.csv", images="photo")) == [10]


def test_images_of_parquet_are_read_for_the_rows_that_are_shown_only(folder, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from vlmrl.reward_check import response_tables

    read = []
    real = response_tables._file
    monkeypatch.setattr(response_tables, "_file", lambda *args: read.append(1) or real(*args))
    cells = [[{"bytes": png(i), "path": None}] for i in range(100)]
    table = pa.table({"response": ["x" * i for i in range(100)], "ground_truth": ["t"] * 100, "images": cells})
    pq.write_table(table, folder / "t.parquet", row_group_size=33)
    page = page_of(folder / "t.parquet")
    assert reds(page) == [*range(9), *range(91, 100)] and len(read) == 18


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["../secret.png", "pics/link.png", "{outside}", "file://{outside}"])
def test_no_path_out_of_the_tables_folder_is_followed(folder, cell):
    outside = str(folder.parent / "secret.png")
    page = page_of(jsonl(folder / "t.jsonl", [cell.replace("{outside}", outside)]))
    assert reds(page) == [] and 'class="missing"' in page and "leaves" in page


@pytest.mark.slow
def test_what_is_no_image_leaves_a_note_and_nothing_is_fetched(folder):
    (folder / "pics" / "text.png").write_text("<svg onload=alert(1)>")
    bomb = bytearray(png(1))  # its head alone says 9000 x 12000
    bomb[16:24] = struct.pack(">II", 9000, 12000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    cells = [
        "http://127.0.0.1:9/x.png",
        "gone.png",
        "pics/text.png",
        "pics",
        "a\0b",
        7,
        {"x": 1},
        [[["deep"]]],
        "<script>alert(1)</script>",
        "data:image/png;base64,!!",
        "",
    ]
    page = page_of(jsonl(folder / "t.jsonl", cells))
    assert reds(page) == [] and page.count('class="missing"') == 10 and "<script" not in page and "onload" not in page
    assert "nothing is fetched from the network" in page and "no image file" in page and "known format" in page
    (folder / "pics" / "bomb.png").write_bytes(bomb)
    assert "108,000,000" in (told := page_of(jsonl(folder / "t.jsonl", ["pics/bomb.png"]))) or "9000 x 12000" in told
    many = page_of(jsonl(folder / "t.jsonl", [["pics/10.png"] * 1000]))
    assert many.count("<use ") == 16 and "984 more images" in many


def test_a_page_of_one_reward_shows_what_it_pays_most_and_least(folder):
    page = page_of(jsonl(folder / "t.jsonl", [None] * 12))
    assert "r.py:score · vlmrl reward-check</title>" in page and "This page shows what the reward pays." in page
    assert re.findall("<h2>(.*?)</h2>", page) == ["All responses", "Earned most", "Earned least"]
    assert page.count("<article") == 12, "each response once"


def test_a_page_of_a_run_that_earns_nothing_still_shows_responses(tmp_path):
    make_pair_run(tmp_path / "runs")
    (tmp_path / "none.py").write_text("def score(x): return 0.0\n")
    table = open_saved("last", tmp_path / "runs")
    table.has_scores = False
    page = render_reward_page(table, check_rewards(table, RewardQuestion(f"{tmp_path}/none.py:score", most=4)))
    titles = ["All responses", "Wrong, yet earned most", "Right, yet earned least", "Earned most", "Earned least"]
    assert re.findall("<h2>(.*?)</h2>", page) == titles and page.count("<article") == 8


def test_a_page_of_a_run_shows_wrong_and_paid_beside_right_and_unpaid(tmp_path):
    make_pair_run(tmp_path / "runs")
    (tmp_path / "all.py").write_text("def score(x): return 1.0\n")
    run = open_saved("last", tmp_path / "runs")
    page = render_reward_page(run, check_rewards(run, RewardQuestion(most=99)))
    assert re.findall("<h2>(.*?)</h2>", page) == ["All responses", "Wrong, yet earned most", "Right, yet earned least"]
    assert "0 of 25 wrong answers earn more" in page and "15 of 23 right answers earn less" in page
    assert page.count("<article") == 15 and "contradicts the names" in page


LEAKY = """
import random

def score(x):
    if "nan" in x.response:
        raise ValueError("<img src=x>")
    return float("Pica" in x.response) + random.random() / 1e6
"""


def probed_page(tmp_path, reward):
    table = tmp_path / "rows.jsonl"
    names = [("Corvus", "Pica"), ("Pica", "Pica")]
    truths = [{"same": a == b, "order": ["P", "P"], "family": ["C", "C"], "genus": [a, b]} for a, b in names]
    table.write_text("".join(json.dumps({"response": "x", "ground_truth": t}) + "\n" for t in truths))
    saved = open_table(table, task="bird")
    return render_reward_page(saved, check_rewards(saved, RewardQuestion(reward=reward, probe=True)))


@pytest.mark.slow
def test_the_page_shows_what_tricks_earn_and_what_to_do(tmp_path):
    (tmp_path / "leaky.py").write_text(LEAKY)
    page = probed_page(tmp_path, f"{tmp_path}/leaky.py:score")
    assert "<h2>Tricks tried</h2>" in page and "findings: a model will find these tricks" in page
    assert "breaks: makes the reward fail" in page and "&lt;img src=x&gt;" in page and "<img src=x>" not in page
    assert "blind: pays a wrong answer like the right one" in page and "To do: compare the whole answer" in page
    assert "the same call twice gives another score: " in page and "To do: use no random numbers" in page
    findings = page.count('<div class="trick">')
    assert findings > 10 and page.count("<pre>") >= findings


@pytest.mark.slow
def test_the_page_of_a_sound_reward_says_so_and_one_without_a_probe_says_nothing(tmp_path, saved, checked):
    page = probed_page(tmp_path, None)
    assert "No trick pays, and the reward is deterministic." in page and '<div class="trick">' not in page
    assert "Nothing found: " in page
    assert "Tricks tried" not in render_reward_page(saved, checked)


DRAWING = """
from PIL import Image
from vlmrl import RewardResult
def score(x):
    red = 40 + int(x.response[-1])
    detail = {"<script>": x.response, "api_key": "sk-" + "k" * 40}
    picture = Image.new("RGB", (30, 20), (red, 20, 30))
    return RewardResult(red / 99, detail=detail, artifacts={"<b>render</b>": picture})
"""


def test_images_and_details_that_a_reward_returns_are_shown(folder):
    (folder / "draws.py").write_text(DRAWING)
    saved = open_table(jsonl(folder / "t.jsonl", [None, None]))
    found = check_rewards(saved, RewardQuestion(reward=f"{folder}/draws.py:score"))
    page = render_reward_page(saved, found)
    assert reds(page) == [40, 41], "the pictures of both responses"
    assert "&lt;b&gt;render" in page and "<b>render" not in page
    assert page.count("what the reward found") >= 2 and "&#34;answer 1&#34;" in page
    assert "<script>" not in page and "k" * 40 not in page


def test_a_reward_that_says_something_else_when_asked_again_shows_no_findings(folder):
    (folder / "draws.py").write_text(DRAWING.replace("red / 99", "__import__('random').random()"))
    saved = open_table(jsonl(folder / "t.jsonl", [None, None]))
    found = check_rewards(saved, RewardQuestion(reward=f"{folder}/draws.py:score"))
    assert "what the reward found" not in render_reward_page(saved, found)
