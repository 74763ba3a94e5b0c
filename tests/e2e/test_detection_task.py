"""The task detection through the commands: drawn data, check, training, resume, evaluation, probe, report."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import this_process
from endpoint_server import Reply, completion, prompt_of, serve_endpoint
from PIL import Image
from shape_regions import regions
from task_runs import assert_answers_score_the_same, assert_no_hole, measured, prepared, probed, trained

from vlmrl.store.media import RunImages

RECIPE = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 8}
train.steps = 1
optim.lr = 1e-3
eval = {every_steps = 1, metric = "map", max_rows = 12}
checkpoint.every_steps = 1
reward.args.overlay = true
[[data]]
path = "data"
task = "detection"
variant = "seen_direct"
"""


@pytest.mark.slow
def test_drawn_detection_goes_through_every_command(tmp_path: Path, tiny_folder: Path) -> None:
    prepared(tmp_path, "detection", "--synthetic", 20, "--side", 84, "--others", 1, "--asks", "kind")
    run = trained(tmp_path, tiny_folder, RECIPE)
    more = this_process("train", "--resume", "own", "--set", "train.steps=2", "--json", cwd=tmp_path)
    assert more.code == 0, more.err
    for step in range(2):
        scores = [s.score for g in run.read_rollouts(step) for s in g.samples]
        assert scores and all(score.status == "ok" for score in scores)
        assert all(RunImages(run.dir).find(score.artifacts["boxes"]) for score in scores)
    metrics = measured(tmp_path, "--max-rows", 12)
    assert metrics["parse_failure"]["value"] == 1.0  # random weights write no answer
    assert {"map", "ap50", "ap75", "map/circle"} <= set(metrics)
    assert (metrics["map"]["value"], metrics["map"]["low"], metrics["map"]["high"]) == (0.0, None, None)
    assert metrics["map"]["n"] == 12
    assert metrics["map/circle"]["n"] == metrics["accuracy/category-circle"]["n"] < 12
    assert metrics["map"]["clusters"] == 12 and metrics["absent_accuracy"]["n"] < 12
    assert_no_hole(probed(tmp_path), "a box without confidence")


def look(number: int, body: dict[str, Any]) -> Reply:
    """Answer as a model that sees: find the shapes in the pixels. Each fourth answer has a false box, one less sure."""
    (url,) = (part["image_url"]["url"] for part in body["messages"][-1]["content"] if part["type"] == "image_url")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))
    match = re.search("Find every (.+) in the image", prompt_of(body))
    assert match is not None
    boxes = [
        [round(1000 * edge / image.width) for edge in box]
        for colour, kind, box in regions(image)
        if match[1] in (kind, f"{colour} {kind}", f"{colour} shape")
    ]
    entries = [{"bbox_2d": box, "label": match[1], "confidence": 0.9} for box in boxes]
    if number % 4 == 0:
        entries.append({"bbox_2d": [0, 0, 20, 20], "label": match[1], "confidence": 0.2})
    text = f"```json\n{json.dumps(entries, indent=1)}\n```" if entries else "No Objects"
    return completion(f"<think>Let me see.</think>\n<answer>\n{text}\n</answer>")


def look_otherwise(number: int, body: dict[str, Any]) -> Reply:
    """Answer as a model that sees, and states boxes in pixels with y first, whatever the prompt asks for."""
    (url,) = (part["image_url"]["url"] for part in body["messages"][-1]["content"] if part["type"] == "image_url")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))
    boxes = [[box[1], box[0], box[3], box[2]] for _, kind, box in regions(image) if kind in prompt_of(body)]
    entries = [{"bbox_2d": box, "confidence": 0.9} for box in boxes]
    return completion(f"<think>a</think><answer>{json.dumps(entries) if entries else 'No Objects'}</answer>")


def test_boxes_in_another_space_and_order_are_named_wherever_the_evaluation_is_shown(tmp_path: Path) -> None:
    prepared(tmp_path, "detection", "--synthetic", 20, "--side", 168, "--asks", "kind")
    (tmp_path / "mine.toml").write_text('[model]\npath = "no/model"\n[[data]]\npath = "data"\ntask = "detection"\n')
    with serve_endpoint(look_otherwise) as endpoint:
        words = ["eval", "--endpoint", endpoint.address, "--model", "org/served", "--recipe", "mine.toml"]
        done = this_process(*words, cwd=tmp_path)
        again = this_process(*words, "--max-rows", 12, "--json", cwd=tmp_path)
    assert done.code == 0
    (positions,) = (evaluation["positions"] for evaluation in again.json["evaluations"])
    assert positions["better"] == {"space": "pixels", "order": "yxyx"} and positions["overlaps"]["thousand"] < 0.2
    said = (
        "these boxes would fit the space `pixels` (pixels of the image as it is stored), in the order yxyx at IoU 1.00"
    )
    assert said in " ".join(done.err.split())
    assert this_process("report", "last", cwd=tmp_path).code == 0
    (page,) = tmp_path.glob("runs/*/report.html")
    assert "in the order yxyx at IoU 1.00" in page.read_text("utf-8")


def test_an_endpoint_that_sees_has_the_average_precision_of_its_boxes(tmp_path: Path) -> None:
    prepared(tmp_path, "detection", "--synthetic", 20, "--side", 168)
    (tmp_path / "mine.toml").write_text('[model]\npath = "no/model"\n[[data]]\npath = "data"\ntask = "detection"\n')
    with serve_endpoint(look) as endpoint:
        words = ["eval", "--endpoint", endpoint.address, "--model", "org/served", "--recipe", "mine.toml", "--json"]
        done = this_process(*words, cwd=tmp_path)
    (evaluation,) = done.json["evaluations"]
    metrics = {name: metric["value"] for name, metric in evaluation["metrics"].items()}
    assert evaluation["metrics"]["map"]["n"] == 40
    # every object has a right box, and every false box is less sure than all right ones of its category
    assert (metrics["map"], metrics["ap50"], metrics["ap75"]) == pytest.approx((1.0, 1.0, 1.0))
    # 30 answers are right; the false boxes of the other 10 have confidence 0.2
    assert metrics["accuracy"] == 0.75 and metrics["parse_failure"] == 0.0
    assert metrics["part/format"] == 1.0 and metrics["box_brier"] < 0.04
    assert_answers_score_the_same(tmp_path, "last")
    assert this_process("reward-check", "last", cwd=tmp_path).out.count("of the evaluation test") == 1
