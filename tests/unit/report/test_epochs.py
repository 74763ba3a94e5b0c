"""Results over epochs on the report page: columns, bands and published numbers."""

from __future__ import annotations

import re

from epoch_runs import epoch_run

from vlmrl.report.evaluations import view_epochs
from vlmrl.report.page import render_report

TEST = "test/pass8/pass@8"
TRAIN = {
    "reward/accuracy": [0.1, 0.2, 0.3, 0.5],
    "rollout/response_tokens_mean": [400.0, 410.0, 420.0, 430.0],
    "reflection/reflection_ratio": [0.25, None, 0.5, 0.5],
    "reflection/maye/word/wait": [3.0, 0.0, 1.0, 2.0],
    "reflection/count/responses": [8.0, 8.0, 8.0, 8.0],
}


def runs_of(root):
    seeds = [
        epoch_run(root, f"rl-{i}", {TEST: [0.2 + i / 10, 0.3, 0.4 + i / 5]}, seed=i, best=2, train=TRAIN)
        for i in (0, 1)
    ]
    return [epoch_run(root, "sft", {TEST: [0.2, 0.1, 0.1]}, kind="sft"), *seeds]


def test_seeds_are_one_column_and_their_curve_has_a_band(tmp_path):
    view = view_epochs(runs_of(tmp_path))
    assert view is not None
    assert [group.label for group in view.groups] == ["SFT: sft", "RL: rl-0, rl-1"] and view.bands
    (row,) = view.rows
    sft, rl = row["cells"]
    # rl: means (0.3 + 0.4) / 2 = 0.35 and (0.3 + 0.6) / 2 = 0.45
    assert (sft["mean"]["mean"], round(rl["mean"]["mean"], 9)) == (0.1, 0.4)
    assert sft["paper"]["base"] == 0.29 and rl["paper"]["mean"] == 0.352
    assert view.charts[0].svg.count('band"') == 1, "one run has no band, two have one"
    assert "before training" in view.charts[0].svg
    titles = [chart.title for chart in view.training]
    assert "Accuracy in training, mean over the epoch" in titles
    assert "Reflection ratio, mean over runs" in titles


def test_a_band_of_shares_does_not_leave_their_range(tmp_path):
    values = ([0.2, 1.0, 0.0], [0.2, 0.9, 0.1])
    view = view_epochs([epoch_run(tmp_path, f"rl-{i}", {TEST: v}, seed=i) for i, v in enumerate(values)])
    assert view is not None
    ticks = re.findall(r'text-anchor="end">([^<]+)<', view.charts[0].svg)
    assert ticks == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert "[0.8793, 1]" in view.charts[0].svg and "[0, 0.1207]" in view.charts[0].svg


def test_the_page_shows_both_columns_the_paper_and_the_label_of_the_maximum(tmp_path):
    page = render_report(runs_of(tmp_path))
    text = re.sub(r"<[^>]+>", " ", page)
    assert (
        "RL: rl-0, rl-1: best of 2 epochs and the start, chosen on these test rows themselves: too good for new rows"
        in text
    )
    assert re.search(r"0\.400\s+(&plusmn;|±)\s+0\.071", text)
    assert re.search(r"paper\s+0\.352", text) and "Paper: arXiv:2504.02587, Table 3" in re.sub(r"\s+", " ", text)
    assert "Reflection" in text and "&#34;wait&#34; (maye)" in page
    # Counts are no charts, and reflection is not among the other metrics.
    assert "reflection/count/responses" not in text


def test_a_page_without_epochs_has_no_such_part(tmp_path):
    run = epoch_run(tmp_path, "a", {TEST: [0.1, 0.2]})
    path = run.dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"eval/epoch"', '"eval/other"'))
    assert view_epochs([run]) is None and 'id="epochs"' not in render_report([run])
