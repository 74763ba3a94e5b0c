"""The task agent_code: drawn damage and its repair, steps graded by hand, rows as published, the published rewards."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from task_tables import prepare, rows_of

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, RewardError
from vlmrl.recipe.schema import Data
from vlmrl.tasks import make_task
from vlmrl.tasks.agent_code import grader
from vlmrl.tasks.agent_code.grader import make_grader
from vlmrl.tasks.agent_code.rewards import score_episode_as_published, score_step_as_published
from vlmrl.tasks.agent_code.rows import DAMAGES, INPUT_NAME, LABELS, OUTPUT_NAME, Drawing, draw_row, read_labels
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Call, Media, RewardInput, Row, Turn

THINK = "<think>I look.</think>"
CALLED = (Turn("assistant", "", calls=(Call("python", {"code": "1"}),)), Turn("tool", "1"), Turn("assistant", "x"))


def picture() -> Image.Image:
    y, x = np.mgrid[0:24, 0:32]
    return Image.fromarray(np.stack([x * 8, y * 10, x + y], axis=-1).astype(np.uint8))


def asked(step: str, response: str, **truth: Any) -> RewardInput:
    return RewardInput(f"{THINK}{response}", {"step": step, **truth}, images=[picture()])


def parts(x: RewardInput, thought: str = "required") -> dict[str, float]:
    return dict(make_grader(thought=thought)(x).parts)


@pytest.mark.parametrize(
    ("answer", "accepted", "right", "exact"),
    [
        ("the Red Circle.", ["red circle"], 1.0, 1.0),
        ("red square", ["red circle"], 0.5, 0.0),
        ("a blue circle", ["red circle", "blue circle", "circle"], 1.0, 1.0),
        ("circle", ["red circle"], 2 / 3, 0.0),
        ("no", ["red circle"], 0.0, 0.0),
        ("...", ["???"], 0.0, 0.0),
        ("very very big", ["very very big"], 1.0, 1.0),
    ],
)
def test_an_answer_counts_by_the_words_of_the_best_accepted_one(answer, accepted, right, exact):
    x = RewardInput(f"{THINK}<answer>{answer}</answer>", {"answer": accepted})
    assert parts(x) == {"right": pytest.approx(right), "format": 1.0, "exact": exact}


@pytest.mark.parametrize(
    ("labels", "right"),
    [
        ("{'rotation90', 'dark'}", 1.0),
        ('["Dark", "rotation90"]', 1.0),
        ("rotation90", 0.5),
        ("{'rotation90', 'dark', 'blur'}", 2 / 3),
        ("{'rotation90', 'banana'}", 1 / 3),
        ("{" + ", ".join(map(repr, LABELS)) + "}", 2 / 8),
        ("{}", 0.0),
    ],
)
def test_a_damage_counts_by_its_labels(labels, right):
    x = asked("problem", f"<problem>{labels}</problem>", damage=["rotation90", "dark"])
    assert parts(x) == {"right": pytest.approx(right), "format": 1.0 if labels else 0.0, "exact": float(right == 1)}


REPAIR = f"from PIL import Image\nImage.open('{INPUT_NAME}').rotate(180).save('{OUTPUT_NAME}')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "right", "note"),
    [
        (REPAIR, 1.0, ""),
        (f"```python\n{REPAIR}\n```", 1.0, ""),
        (f"import cv2\ncv2.imwrite('{OUTPUT_NAME}', cv2.rotate(cv2.imread('{INPUT_NAME}'), cv2.ROTATE_180))", 0.99, ""),
        (REPAIR.replace(".rotate(180)", ""), 0.0, ""),
        (REPAIR.replace("180", "90, expand=True"), 0.0, "the picture is 24 x 32 pixels large, not 32 x 24"),
        (REPAIR.replace(OUTPUT_NAME, "other.jpg"), 0.0, f"no {OUTPUT_NAME} was written"),
        ("1 / 0", 0.0, "ZeroDivisionError: division by zero"),
        ("def f(:", 0.0, "SyntaxError: invalid syntax"),
        ("import os; os._exit(0)", 0.0, "the code ended its interpreter (exit code 0)"),
        (f"from PIL import Image\ndef turned():\n    return Image.open('{INPUT_NAME}').rotate(180)\n"
         f"turned().save('{OUTPUT_NAME}')", 1.0, ""),  # a helper that uses an import
    ],
)  # fmt: skip
def test_code_counts_by_the_picture_that_it_makes(code, right, note):
    x = asked("code", f"<code>{code}</code>", code=REPAIR)
    result = make_grader(thought="required")(x)
    assert result.parts["right"] == pytest.approx(right, abs=0.02) and result.note == note
    assert result.parts["exact"] == float(right == 1.0), result


@pytest.mark.slow
def test_a_sandbox_that_dies_is_no_score_and_the_next_code_has_another_one():
    x = asked("code", f"<code>{REPAIR}</code>", code=REPAIR)
    assert parts(x)["right"] == pytest.approx(1.0)
    grader._sandbox()._process.kill()
    grader._sandbox()._process.wait()
    with pytest.raises(RewardError, match="the sandbox has ended"):
        parts(asked("code", f"<code>{REPAIR}</code>", code=REPAIR + "\n"))
    assert parts(x)["right"] == pytest.approx(1.0)


@pytest.mark.slow
def test_half_of_a_repair_is_half_right_and_a_broken_truth_is_a_bug_of_the_row():
    dark = Image.new("RGB", (16, 16), (40, 40, 40))
    truth = f"from PIL import Image\nImage.open('{INPUT_NAME}').point(lambda p: p * 3).save('{OUTPUT_NAME}')"
    x = RewardInput(
        f"{THINK}<code>{truth.replace('p * 3', 'p * 2')}</code>", {"step": "code", "code": truth}, images=[dark]
    )
    assert parts(x)["right"] == pytest.approx(0.5, abs=0.02)  # 40 -> 80 of 40 -> 120
    with pytest.raises(RewardError, match="own code makes no"):
        parts(asked("code", "<code>1</code>", code="1 / 0"))
    with pytest.raises(RewardError, match="a truth `code`"):
        parts(asked("code", "<code>1</code>"))
    with pytest.raises(RewardError, match="names no label"):
        parts(asked("problem", "<problem>dark</problem>", damage=[]))
    with pytest.raises(RewardError, match="not a text or a list"):
        parts(RewardInput(f"{THINK}<answer>x</answer>", {"answer": [" "]}))
    with pytest.raises(RewardError, match="`step` is"):
        parts(asked("dance", "x"))


@pytest.mark.parametrize(
    ("response", "finish", "form"),
    [
        (f"{THINK}<answer>x</answer>", "stop", 1.0),
        (f"{THINK}\n <answer>x</answer>\n", "stop", 1.0),
        ("<answer>x</answer>", "stop", 0.0),
        (f"{THINK}<answer>x</answer>", "length", 0.0),
        (f"{THINK}so <answer>x</answer>", "stop", 0.0),
        (f"{THINK}<answer>x</answer><answer>x</answer>", "stop", 0.0),
        (f"{THINK}<answer>x</answer><code>x</code>", "stop", 0.0),
        (f"{THINK}<answer> </answer>", "stop", 0.0),
        ("<think></think><answer>x</answer>", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_the_form_of_a_response(response, finish, form):
    x = RewardInput(response, {"answer": "x"}, finish=finish)
    assert parts(x)["format"] == form
    assert parts(x, "optional")["format"] == (1.0 if response == "<answer>x</answer>" else form)


def test_only_the_last_turn_of_an_episode_is_the_answer():
    turns = (*CALLED[:2], Turn("assistant", f"{THINK}<answer>red</answer>"))
    x = RewardInput("<answer>blue</answer><answer>red</answer>", {"answer": ["red"]}, turns=turns)
    assert parts(x) == {"right": 1.0, "format": 1.0, "exact": 1.0}


@pytest.mark.parametrize("label", DAMAGES)
def test_the_repair_of_a_drawn_picture_gives_back_what_is_asked_for(label):
    drawing = Drawing(112, [label])
    drawn, whole = draw_row(drawing, 0, random.Random(3)), draw_row(Drawing(112, ["none"]), 0, random.Random(3)).image
    assert drawn.truth["damage"] == [label] and drawn.truth["answer"][0].count(" ") == 1
    names: dict[str, Any] = {}
    line = drawn.truth["code"].splitlines()[2]
    exec("from PIL import ImageFilter", names)
    names["image"] = drawn.image
    exec(line, names)
    made, truth = np.asarray(names["image"], float), np.asarray(whole, float)
    assert made.shape == truth.shape
    left = np.abs(made - truth).mean()
    damage = np.abs(np.asarray(drawn.image.resize(whole.size), float) - truth).mean()
    assert damage > 1.0 and left < {"crop": 10.0, "blur": 0.95 * damage}.get(label, 0.35 * damage)


PUBLISHED = [
    {"type": "pre_problem", "problem": "What is written?", "context": "", "gt": "stop", "image_path": "a.png",
     "solution": "<think>t</think><problem>{'rotation90'}</problem>"},
    {"type": "pre_code", "problem": "What is written?", "context": "<problem>{'rotation90'}</problem>",
     "solution": f"<think>t</think><code>```python\n{REPAIR}\n```</code>", "gt": "stop", "image_path": "a.png"},
    {"type": "pre_answer", "problem": "What is written?", "context": "so far", "solution": "<answer>stop sign</answer>",
     "gt": ["stop", "stop sign"], "image_path": "b.png"},
    {"type": "pre_dance", "problem": "What is written?", "solution": "", "gt": "stop", "image_path": "b.png"},
]  # fmt: skip


def published(folder: Path) -> Path:
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (30, 20), colour).save(folder / f"{name}.png")
    path = folder / "rft_agent_code.json"
    path.write_text(json.dumps(PUBLISHED))
    return path


def test_published_rows_become_steps_or_episodes(tmp_path):
    source = published(tmp_path)
    options = {"validation_rows": 0, "max_bad": 0.9}
    rows = rows_of(prepare("agent_code", tmp_path, source, **options, stepwise=True, out=tmp_path / "steps"))
    assert [row.truth["step"] for row in rows] == ["problem", "code", "answer"]
    assert rows[0].truth["damage"] == ["rotation90"] and rows[1].truth["code"].strip() == REPAIR
    assert rows[2].truth["answer"] == ["stop", "stop sign"] and rows[2].columns["context"] == "so far"
    (row,) = rows_of(prepare("agent_code", tmp_path, source, **options))
    assert row.truth["answer"] == ["stop", "stop sign"] and "context" not in row.columns and "step" not in row.truth


@pytest.mark.slow
def test_right_steps_of_drawn_rows_earn_all_and_tricks_little(tmp_path):
    made = prepare("agent_code", tmp_path, synthetic=40, side=56, stepwise=True)
    dataset = open_dataset(Data(path=str(made.path), task="agent_code"))
    task = make_task("agent_code", dataset.info)
    rows = [dataset.rows("train")[i] for i in range(24)]
    for row in rows:
        x = RewardInput(task.correct_response(row, random.Random(0)), row.truth, row.columns)
        x = RewardInput(x.response, row.truth, row.columns, [dataset.image(m) for m in row.media], media=row.media)
        assert parts(x) == {"right": 1.0, "format": 1.0, "exact": 1.0}
        for attack in task.attacks([x]):
            if (made := attack.write(x)) is not None:
                assert parts(made)["right"] <= 0.2, attack.name


def test_an_episode_of_a_drawn_row_repairs_the_picture_first():
    drawn = draw_row(Drawing(56, ["rotation90"]), 0, random.Random(0))
    row = Row("p", "rows", "agent_code", drawn.truth, (Media("a", 56, 56),), dict(drawn.columns))
    first, last = make_task("agent_code", {"name": "agent_code"}).correct_turns(row, random.Random(0))
    assert first[0] == "<think>The picture is turned by 90 degrees.</think>" and first[1].name == "python"
    assert "image_0.png" in first[1].arguments["code"] and "show(image)" in first[1].arguments["code"]
    assert last == (f"<think>The picture is turned by 90 degrees.</think><answer>{drawn.truth['answer'][0]}</answer>",)


@pytest.mark.parametrize(
    ("step", "truth", "response", "accuracy"),
    [
        ("code", {}, "", 0.9),  # the published reward pays an empty response
        ("code", {}, "<answer>x</answer>", 0.0),
        ("problem", {"damage": ["dark"]}, "<problem>{'dark'}</problem>", 0.0),  # its code ends with an error there
        ("problem", {"damage": ["rotation90", "dark"]}, "<problem>{'rotation90'}</problem>", 0.5),
        ("answer", {"answer": ["very very big"]}, "<answer>very very big</answer>", 2 / 3),
        ("answer", {"answer": ["red"]}, "the red", 1.0),
    ],
)
def test_the_published_reward_of_steps_has_its_flaws(step, truth, response, accuracy):
    assert score_step_as_published(asked(step, response, **truth))["accuracy"] == pytest.approx(
        accuracy if step != "answer" or "<answer>" in response else 2 * (1 / 3) / (1 / 3 + 1), abs=1e-6
    )


def test_the_published_reward_of_episodes_pays_a_call_beside_a_wrong_answer():
    spec = load_reward("rllava_agent_code_episodes")

    def total(answer: str, turns: tuple[Turn, ...]) -> float:
        last = Turn("assistant", f"{THINK}<answer>{answer}</answer>")
        x = RewardInput(last.text, {"answer": ["red"]}, turns=(*turns[:-1], last) if turns else ())
        return sum(spec.weights[name] * value for name, value in score_episode_as_published(x).items())

    assert total("blue", CALLED) == pytest.approx(1.4) and total("red", ()) == pytest.approx(1.0)
    assert total("red", CALLED) == pytest.approx(2.2) and total("blue", ()) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "labels"),
    [("{'a', \"b\"}", {"a", "b"}), (" A ,b,", {"a", "b"}), ("", set()), ("{}", set()), ("[x]", {"x"})],
)
def test_labels_are_read_from_any_text(text, labels):
    assert read_labels(text) == labels


def test_a_wrong_option_of_the_drawing_is_told(tmp_path):
    with pytest.raises(DataError, match="unknown name `dust` in --damages"):
        prepare("agent_code", tmp_path, synthetic=4, damages="dust")
