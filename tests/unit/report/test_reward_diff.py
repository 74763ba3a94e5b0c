from __future__ import annotations

import hashlib
import io
import re

import pytest
from PIL import Image
from reward_runs import scored_groups

from vlmrl.check.reward_check import RewardQuestion, check_rewards
from vlmrl.check.saved import open_saved
from vlmrl.report.reward_diff import render_reward_diff, write_reward_diff
from vlmrl.rewards import load_reward, reward_record
from vlmrl.rewards.scorer import Scorer
from vlmrl.store.media import write_shard
from vlmrl.store.runs import create_run
from vlmrl.types import Media, Row

NASTY = "<script>alert(1)</script>\u202e{{ 7*7 }}</pre><img src=x onerror=alert(2)>"


@pytest.fixture
def saved(tmp_path):
    """A run with images whose responses, truths and ids try to break the page."""
    file = tmp_path / "r.py"
    file.write_text("def score(x): return {'short': float(len(x.response) < 9), '<b>': 1.0}\n")
    (tmp_path / "other.py").write_text("def score(x): return float(len(x.response) >= 9)\n")
    spec = load_reward(f"{file}:score")
    run = create_run(
        tmp_path / "runs", kind="rl", recipe_name="r", rewards=[{"source": "s", **reward_record(spec, {})}]
    )
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
    return open_saved("last", tmp_path / "runs")


def checked(saved, tmp_path):
    return check_rewards(saved, RewardQuestion(diff=f"{tmp_path}/other.py:score", most_changed=10))


def test_the_page_shows_the_most_changed_with_their_images_and_nothing_runs(saved, tmp_path):
    page = render_reward_diff(saved, checked(saved, tmp_path))
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


def test_images_are_shrunk_and_bounded(saved, tmp_path, monkeypatch):
    import base64

    page = render_reward_diff(saved, checked(saved, tmp_path))
    uri = re.search(r'href="data:image/png;base64,([^"]+)"', page)
    assert uri is not None
    with Image.open(io.BytesIO(base64.b64decode(uri[1]))) as image:
        assert max(image.size) == 448
    from vlmrl.report import reward_diff
    from vlmrl.report.examples import Album

    monkeypatch.setattr(reward_diff, "Album", lambda: Album(budget=10))
    small = render_reward_diff(saved, checked(saved, tmp_path))
    assert "images are left out" in small and "data:image" not in small


def test_equal_rewards_make_a_page_that_says_so(saved, tmp_path):
    report = check_rewards(saved, RewardQuestion(diff=f"{tmp_path}/r.py:score"))
    write_reward_diff(tmp_path / "new" / "page.html", saved, report)
    text = (tmp_path / "new" / "page.html").read_text()
    assert "Both rewards say the same of every response." in text and "<article" not in text
