"""Boxes on the pages: of truth and answers in rollout examples, over training, and on the page of a reward."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_builders import HOSTILE, IMAGES, MEDIA, evaluation_row, group, make_run

from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.report.page import render_report
from vlmrl.report.page_parts import Picture, overlays_of
from vlmrl.report.reward_page import render_reward_page
from vlmrl.reward_check.run import RewardQuestion, check_rewards
from vlmrl.reward_check.scoring import open_saved
from vlmrl.rewards import reward_record
from vlmrl.store import layout
from vlmrl.store.media import write_shard
from vlmrl.store.runs import Run, create_run
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Row, Score

TRUTH = {"box": [20.0, 15.0, 40.0, 30.0], "space": "pixels", "width": 40, "height": 30}
"""Lower right quarter of an image of 40 x 30 pixels."""
RECT = re.compile(r'<rect class="(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)">')


def detail(box: Any) -> dict[str, Any]:
    return {"box_iou": {"box": box, "iou": 0.0}}


def validate(run: Run, step: int, box: Any, rows: int = 6) -> None:
    """Write a validation of training in which all rows have one answer."""
    records = [
        evaluation_row(
            f"p{i}",
            0.5,
            truth=TRUTH,
            detail=detail(box),
            text=HOSTILE,
            images=[{"sha256": MEDIA[0].sha256, "width": 40, "height": 30, "kind": "image"}],
        )
        for i in range(rows)
    ]
    meta = {"split": "validation", "source": "digits", "greedy": True, "during": True, "step": step}
    folder = layout.eval_dir(run.dir, f"validation-digits-{layout.step_name(step)}")
    write_evaluation(folder, Evaluation(records, summarise(records)), meta)


def rects(page: str) -> list[tuple[str, float, float, float, float]]:
    return [(m[1], *(float(n) for n in m.groups()[1:])) for m in RECT.finditer(page)]  # type: ignore[misc]


def test_the_same_rows_stand_side_by_side_over_training(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2)
    boxes = {0: None, 10: [0, 0, 20, 15], 20: [20, 0, 40, 30], 30: [20, 15, 40, 30]}
    for step, box in boxes.items():
        validate(run, step, box)
    page = render_report([run])
    part = page[page.index('id="boxes"') : page.index('id="rollouts"')]
    # The second answer touches the truth in a corner, the third is twice as large: IoU 0, 300 / 600, 1.
    captions = re.findall(r"step \d+: [^<]*", part)
    assert captions == 4 * ["step 0: no box", "step 10: IoU 0.00", "step 20: IoU 0.50", "step 30: IoU 1.00"]
    truth = ("truth", 20.0, 15.0, 20.0, 15.0)
    row = [truth, truth, ("answer", 0, 0, 20, 15), truth, ("answer", 20, 0, 20, 30), truth, ("answer", 20, 15, 20, 15)]
    assert rects(part) == 4 * row
    assert page.count("data:image/png") == len(set(re.findall(r"data:image/png[^\"]*", page))), (
        "each image is there once"
    )
    assert '<a href="#boxes">' in page and "<script" not in page


def test_of_many_steps_some_are_shown_with_the_first_and_the_last(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    for step in range(11):
        validate(run, step, [0, 0, 20, 15], rows=1)
    page = render_report([run])
    assert re.findall(r"(step \d+): IoU", page) == [f"step {step}" for step in (0, 2, 4, 6, 8, 10)]


def boxed(prompt_id: str, step: int, box: Any) -> Any:
    plain = group(prompt_id, [0.2, 0.8], step=step, media=MEDIA[:1])
    row = Row(prompt_id, "digits", "digits", TRUTH, MEDIA[:1])
    samples = [replace(s, score=Score(s.score.value, {}, detail=detail(box))) for s in plain.samples]
    return replace(plain, row=row, samples=tuple(samples))


def test_rollouts_show_boxes_and_without_validation_the_rows_that_came_again(tmp_path: Path) -> None:
    run = create_run(tmp_path, kind="rl", recipe_name="r")
    with run:
        for step in range(3):
            groups = [boxed("again", step, [0, 0, 20 + step * 10, 15]), boxed(f"once-{step}", step, None)]
            run.write_rollouts(step, groups)
    page = render_report([run])
    part = page[page.index('id="boxes"') : page.index('id="rollouts"')]
    assert part.count("<h4>") == 1 and "digits again" in part
    # Answers are 20, 30 and 40 wide; only the part that is as low as the truth would count, and there is none.
    assert re.findall(r"step \d: IoU [\d.]+", part) == [f"step {number}: IoU 0.00" for number in (1, 2, 3)]
    rollouts = page[page.index('id="rollouts"') :]
    assert ("answer", 0.0, 0.0, 40.0, 15.0) in rects(rollouts) and rects(rollouts).count(rects(part)[0]) == 12


def test_a_run_whose_rows_have_no_boxes_has_no_such_part(tmp_path: Path) -> None:
    page = render_report([make_run(tmp_path, steps=3)])
    assert 'id="boxes"' not in page and "<rect class" not in page.replace('<rect class="bar', "")


@pytest.mark.parametrize(
    "box",
    [
        None,
        "a text",
        [1, 2, 3],
        [1, 2, 3, "4"],
        [float("nan"), 0, 1, 1],
        [float("inf"), 0, 1, 1],
        [True, 0, 1, 1],
        [5, 5, 5, 9],
        [9, 9, 1, 1],
        {"x1": 0},
        [HOSTILE, 0, 1, 1],
        [100, 100, 200, 200],
    ],
)
def test_what_is_no_box_in_a_saved_detail_is_not_drawn(box: Any) -> None:
    picture = Picture("k", 40, 30)
    (view,) = overlays_of(TRUTH, detail(box), 1, lambda i: picture)
    assert [b.role for b in view.boxes] == ["truth"]
    assert overlays_of({**TRUTH, "box": box}, detail(box), 1, lambda i: picture) == []
    assert (
        overlays_of(TRUTH, {"box_iou": box}, 1, lambda i: picture)
        and overlays_of(TRUTH, None, 0, lambda i: picture) == []
    )


def test_the_page_of_a_reward_draws_what_it_read(tmp_path: Path) -> None:
    spec = load_reward("box_iou", args={"space": "pixels"})
    run = create_run(tmp_path, kind="rl", recipe_name="r", rewards=[{"source": "digits", **reward_record(spec, {})}])
    response = "<think>x</think><answer>[10, 15, 30, 30]</answer>"
    made = boxed("p", 0, None)
    samples = [replace(s, text=response if k else "none") for k, s in enumerate(made.samples)]
    with run:
        run.write_rollouts(0, [replace(made, samples=tuple(samples))])
        write_shard(run.dir / layout.MEDIA / "media-00000.arrow", [(MEDIA[0].sha256, IMAGES[0])])
    saved = open_saved(run.id, tmp_path)
    page = render_reward_page(saved, check_rewards(saved, RewardQuestion()))
    assert ("answer", 10.0, 15.0, 20.0, 15.0) in rects(page) and ("truth", 20.0, 15.0, 20.0, 15.0) in rects(page)
    assert page.count("data:image/png") == 1
