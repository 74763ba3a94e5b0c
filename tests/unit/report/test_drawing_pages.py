"""Drawings on the pages: code as folded text, pictures beside the truth, the same row over training."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_builders import IMAGES, MEDIA, evaluation_row, group, make_run, png

from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.report.page import render_report
from vlmrl.report.reward_page import render_reward_page
from vlmrl.reward_check.run import RewardQuestion, check_rewards
from vlmrl.reward_check.scoring import open_saved
from vlmrl.rewards import reward_record
from vlmrl.store import layout
from vlmrl.store.media import write_shard
from vlmrl.store.runs import Run, create_run
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Media

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30" viewBox="0 0 40 30">'
TRUTH = {"svg": f'{HEAD}<rect width="20" height="30" fill="red"/></svg>' + "<!-- truth -->" * 20, "metadata": "m" * 900}
HOSTILE = f'{HEAD}<script>alert(1)</script><rect onload="alert(2)" width="9" height="9"/>{"<!-- code -->" * 800}</svg>'
"""Response of more than 10,000 characters."""


def validate(run: Run, step: int, score: float, drawn: bool, rows: int = 5) -> None:
    """Write a validation of training with the reward's picture of every answer, or without."""
    picture = png(step, (50, 30))
    media = {
        "name": "vfig.render" if step == 40 else "render",
        "sha256": hashlib.sha256(picture).hexdigest(),
        "width": 50,
        "height": 30,
        "kind": "image",
    }
    records = [
        evaluation_row(
            f"p{i}",
            score,
            truth=TRUTH,
            detail=None,
            text=HOSTILE,
            artifacts=[media] if drawn else [],
            images=[{"sha256": MEDIA[0].sha256, "width": 40, "height": 30, "kind": "image"}],
        )
        for i in range(rows)
    ]
    meta = {"split": "validation", "source": "digits", "greedy": True, "during": True, "step": step}
    folder = layout.eval_dir(run.dir, f"validation-digits-{layout.step_name(step)}")
    files = {media["sha256"]: picture} if drawn else {}
    write_evaluation(folder, Evaluation(records, summarise(records), files), meta)


def test_the_same_rows_stand_side_by_side_over_training(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2)
    for step, score, drawn in ((0, 0.0, False), (20, 0.25, True), (40, 0.5, True)):
        validate(run, step, score, drawn)
    page = render_report([run])
    part = page[page.index('id="boxes"') : page.index('id="rollouts"')]
    captions = re.findall(r'<div class="note">((?:truth|step \d+: )[^<]*)', part)
    assert captions == 4 * ["truth", "step 0: 0.00", "step 20: 0.25", "step 40: 0.50"]
    assert part.count("no picture") == 4 and "Drawings over training" in part
    # Each picture is on the page once: those of the rows refer to it.
    assert len(re.findall(r"<use href", part)) == 4 * 3


@pytest.mark.parametrize("drawn", [True, False])
def test_answers_with_pictures_have_the_width_to_stand_beside_each_other(tmp_path: Path, drawn: bool) -> None:
    with create_run(tmp_path, kind="eval", recipe_name="r") as run:
        validate(run, 20, 0.5, drawn)
    page = render_report([run])
    assert "Answers in evaluation" in page
    assert ('<div class="pairgrid">' in page) is not drawn
    assert ('<div class="strip labelled beside">' in page) is drawn


def test_without_pictures_there_is_no_strip(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2)
    for step in (0, 20):
        validate(run, step, 0.5, False)
    assert 'id="boxes"' not in render_report([run])


def drawn_group(response: str, artifacts: dict[str, Media]) -> Any:
    made = group("row", [0.25], media=MEDIA[:1])
    (sample,) = made.samples
    score = replace(sample.score, artifacts=artifacts)
    return replace(made, row=replace(made.row, truth=TRUTH), samples=(replace(sample, text=response, score=score),))


def test_code_is_whole_folded_and_only_text(tmp_path: Path) -> None:
    names = {"render": MEDIA[1], "overlay": MEDIA[2]}
    with create_run(tmp_path, kind="rl", recipe_name="r") as run:
        run.write_rollouts(0, [drawn_group(HOSTILE, names)])
        write_shard(
            run.dir / layout.MEDIA / "media-00000.arrow",
            [(m.sha256, i) for m, i in zip(MEDIA, IMAGES, strict=True)],
        )
    page = render_report([run])
    code = re.search(r"<details><summary>SVG code, ([\d,]+) characters</summary><pre>(.*?)</pre></details>", page, re.S)
    assert code is not None and code[1] == f"{len(HOSTILE):,}" and len(HOSTILE) > 10_000
    assert code[2].endswith("&lt;/svg&gt;") and code[2].count("&lt;!-- code --&gt;") == 800
    assert "<script" not in page and "<rect onload" not in page and "<svg xmlns" not in page
    labels = re.findall(r'<div class="note"><bdi>(\w+)</bdi></div>', page)
    assert labels == ["truth", "render", "overlay"] and page.count('<div class="strip labelled beside">') == 1
    assert page.count("In an overlay, red is missing, blue is too much") == 1
    # The truth's fields are longer than a line: they are folded, and whole.
    truth = re.findall(r"<dd><details><summary>([\d,]+) characters</summary><pre>(.*?)</pre>", page, re.S)
    assert [number for number, _ in truth] == [str(len(TRUTH["svg"])), "900"]
    assert truth[0][1].count("&lt;!-- truth --&gt;") == 20


@pytest.mark.slow
def test_the_page_of_a_reward_draws_what_it_did_not_keep(tmp_path: Path) -> None:
    spec = load_reward("svg", args={"key": "svg"})
    with create_run(
        tmp_path, kind="rl", recipe_name="r", rewards=[{"source": "digits", **reward_record(spec, {})}]
    ) as run:
        run.write_rollouts(
            0, [drawn_group(f'{HEAD}<rect width="9" height="9"/></svg>', {}), drawn_group("no code", {})]
        )
    saved = open_saved(run.id, tmp_path)
    page = render_reward_page(saved, check_rewards(saved, RewardQuestion()))
    labels = " ".join(re.findall(r'<div class="note"><bdi>(\w+)</bdi></div>', page))
    # A response without code has the truth alone.
    assert page.count("In an overlay, red is missing, blue is too much") == 1
    assert "truth render overlay" in labels and "truth" in labels.replace("truth render overlay", "").split()
    assert set(labels.replace("truth render overlay", "").split()) == {"truth"}
    assert "<rect width" not in page
