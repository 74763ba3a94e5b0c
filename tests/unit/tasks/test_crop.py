"""The task crop: the geometry of its tools by hand, its rewards, drawn rows, rows of published tables."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from task_tables import prepare, rows_of, sizes_of
from tinyworld import mixed_prompts

from vlmrl.data.open_dataset import open_dataset
from vlmrl.data.turns import TurnEncoder
from vlmrl.environments.base import EnvironmentLimits, Start
from vlmrl.environments.calls import write_call
from vlmrl.environments.processes import EnvironmentPool, load_environment
from vlmrl.environments.tools import ToolError, tool_schema, tools_of
from vlmrl.errors import DataError, RecipeError, RewardError
from vlmrl.recipe.schema import Data, Environment, Reward
from vlmrl.reward_check.probe import probe_reward
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.episodes import EpisodeEngine, EpisodeKind, EpisodeLimits
from vlmrl.tasks import make_task
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.crop.environment import DeepEyes, Zoom
from vlmrl.tasks.crop.rewards import score_crop
from vlmrl.tasks.crop.rows import WAYS, Drawing, draw_row
from vlmrl.tasks.crop.task import VARIANTS, crop_task
from vlmrl.tasks.source import open_source
from vlmrl.types import Call, RewardInput, SamplingParams, Turn

WIDTH, HEIGHT, SEEN = 200, 100, (50, 25)


def numbered() -> Image.Image:
    """A picture whose pixel (x, y) has the colour (x, y, 7): a crop shows where it comes from."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return Image.fromarray(np.stack([x, y, np.full_like(x, 7)], axis=-1).astype(np.uint8))


def opened(kind: type = Zoom, **args: Any) -> Any:
    tool = kind(**{"least_side": 1, **args})
    tool.reset([numbered()])
    return tool


def corners(part: Image.Image) -> tuple[int, int, int, int]:
    """Left, top, right and bottom edge of a crop in the pixels of the picture."""
    array = np.asarray(part)
    assert (array[..., 2] == 7).all()
    return int(array[0, 0, 0]), int(array[0, 0, 1]), int(array[-1, -1, 0]) + 1, int(array[-1, -1, 1]) + 1


SPACES = [
    # The picture has 200 x 100 pixels, the model sees 50 x 25: one seen pixel is 4 stored ones.
    ("pixels", [20, 10, 120, 60], (20, 10, 120, 60)),
    ("seen", [5, 2.5, 30, 15], (20, 10, 120, 60)),
    ("thousand", [100, 100, 600, 600], (20, 10, 120, 60)),  # 100/1000 x 200 = 20, 100/1000 x 100 = 10
    ("unit", [0.1, 0.1, 0.6, 0.6], (20, 10, 120, 60)),
    ("thousand", [0, 0, 1000, 1000], (0, 0, 200, 100)),
    ("thousand", [-50, -1e300, 5000, 1e300], (0, 0, 200, 100)),  # clamped
    ("pixels", [190, 90, 230, 130], (190, 90, 200, 100)),
    ("pixels", [10.4, 10.6, 20.4, 20.6], (10, 11, 20, 21)),  # the nearest pixel
    ("thousand", [333, 333, 667, 667], (67, 33, 133, 67)),  # 66.6, 33.3, 133.4, 66.7
]


@pytest.mark.parametrize(("space", "box", "expected"), SPACES)
def test_a_box_is_cut_in_the_declared_space(space: str, box: list[float], expected: tuple[int, ...]) -> None:
    part, words = opened(space=space).zoom(Start(seen_sizes=(SEEN,)), box)
    assert corners(part) == expected and words == "image 1"


# Image 1 is (20, 10, 120, 60) of the picture: 100 x 50 pixels, seen as 20 x 10. Its right half of the lower half is
# (70, 35, 120, 60) in the picture: 50/100 and 25/50 of its sides.
@pytest.mark.parametrize(
    ("space", "first", "second"),
    [
        ("pixels", [20, 10, 120, 60], [50, 25, 100, 50]),
        ("seen", [5, 2.5, 30, 15], [10, 5, 20, 10]),
        ("thousand", [100, 100, 600, 600], [500, 500, 1000, 1000]),
        ("unit", [0.1, 0.1, 0.6, 0.6], [0.5, 0.5, 1, 1]),
    ],
)
def test_a_part_of_a_part_comes_from_the_stored_picture(space: str, first: list[float], second: list[float]) -> None:
    tool = opened(space=space)
    tool.zoom(Start(seen_sizes=(SEEN,)), first)
    start = Start(seen_sizes=(SEEN, (20, 10)))
    part, words = tool.zoom(start, second, image=1)
    assert corners(part) == (70, 35, 120, 60) and words == "image 2"
    again, words = tool.zoom(start, first, image=0)
    assert corners(again) == (20, 10, 120, 60) and words == "image 3"


@pytest.mark.parametrize(
    ("args", "box", "image", "words"),
    [
        ({}, [10, 10, 10, 50], 0, "holds no pixel of image 0"),
        ({}, [60, 10, 20, 50], 0, "holds no pixel"),
        ({}, [300, 10, 400, 50], 0, "holds no pixel"),
        ({"least_side": 28}, [0, 0, 50, 27], 0, "the part is 50 x 27 pixels; each side needs 28"),
        ({"most_aspect": 4.0}, [0, 0, 100, 20], 0, "100 x 20 pixels; one side is over 4 x the other"),
        ({}, [0, 0, 50], 0, "3 numbers, not 4"),
        ({}, [0, 0, 50, 50], 1, "there is no image 1; the last one is 0"),
        ({}, [0, 0, 50, 50], -1, "there is no image -1"),
    ],
)
def test_a_useless_box_is_refused_in_words(args: dict[str, Any], box: list[float], image: int, words: str) -> None:
    tool = opened(space="pixels", **args)
    with pytest.raises(ToolError, match=words):
        tool.zoom(Start(), box, image)
    assert len(tool._shown) == 1, "a refused part has no number"


def test_a_part_that_the_model_has_not_seen_has_no_seen_pixels() -> None:
    tool = opened(space="seen")
    tool.zoom(Start(seen_sizes=(SEEN,)), [0, 0, 50, 25])
    with pytest.raises(ToolError, match="image 1 has not been shown yet"):
        tool.zoom(Start(seen_sizes=(SEEN,)), [0, 0, 5, 5], 1)


def test_the_engine_says_at_which_size_a_part_was_seen(tiny_encoder: Any) -> None:
    """The whole picture, and then the left half of what was shown, in pixels of what was shown as the model saw it."""
    prompt = next(p for p in mixed_prompts(tiny_encoder) if p.num_images == 1)
    prompt = replace(prompt, row=replace(prompt.row, source="s"))
    environment = load_environment(f"{crop_task({}).environments}:Zoom", {"space": "seen", "least_side": 1})
    pool = EnvironmentPool(environment, "hermes", EnvironmentLimits())
    turns, limits = TurnEncoder(tiny_encoder), EpisodeLimits(4, 4000, 8, 64, 60)
    kinds, tokenizer = {"s": EpisodeKind(pool, limits, lambda row: turns)}, tiny_encoder.tokenizer
    inner: Any = SimpleNamespace(version=0, admits=False)
    engine = EpisodeEngine(inner, kinds, tokenizer)
    (width, height), stored = prompt.seen_sizes[0], prompt.pictures[0].size
    calls = [Call("zoom", {"box": [0, 0, width, height]}), Call("zoom", {"box": [0, 0, width / 2, height], "image": 1})]
    texts = [*(write_call(call, "hermes") for call in calls), "so"]
    ids = [(*tiny_encoder.encode_text(text), tokenizer.eos_token_id) for text in texts]
    try:
        request = SamplingRequest(prompt, 1, 7, script=ids)
        (sample,) = engine.follow([request], SamplingParams(1.0, 500, stop_ids=(tokenizer.eos_token_id,)))
    finally:
        pool.close()
    assert [turn.text for turn in sample.turns if turn.role == "tool"] == ["image 1", "image 2"]
    shown = [(media.width, media.height) for part in sample.segments for media in part.media]
    assert shown == [stored, (round(stored[0] / 2), stored[1])]


def test_the_tool_of_deepeyes_has_its_published_arguments() -> None:
    assert list(tools_of(DeepEyes)) == ["image_zoom_in_tool"] and list(tools_of(Zoom)) == ["zoom"]
    schema = tool_schema(tools_of(DeepEyes)["image_zoom_in_tool"], (Start,))["function"]["parameters"]
    assert list(schema["properties"]) == ["bbox_2d", "label"] and schema["required"] == ["bbox_2d"]
    part = opened(DeepEyes, space="pixels").image_zoom_in_tool(Start(), [20, 10, 120, 60], "a glove")
    assert corners(part) == (20, 10, 120, 60)


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(RewardError, match="coordinate space"):
        Zoom(space="stored pixels")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("crop", tmp_path_factory.mktemp("drawn"), synthetic=20, side=224, seen=56, places=2).path


def source(path: Path, task: str = "crop", variant: str | None = None, **environment: Any) -> Any:
    data = Data(path=str(path), task=task, variant=variant)
    data._environment = Environment(**environment)
    return open_source(data, Reward())


def test_a_tasks_own_environment_gets_its_space_and_no_truth(drawn: Path) -> None:
    own = source(drawn, variant="seen_direct", name=":Zoom", args={"least_side": 5})
    assert own.environment.user.args == {"space": "seen", "least_side": 5}
    facts = own.environment.facts(own.rows[0], own.repeats)
    assert facts == {"tools": ["zoom"], "given": [], "kept_back": list(dict.fromkeys(sorted(own.rows[0].truth)))}
    assert source(drawn, name=":Zoom", args={"space": "unit"}).environment.user.args == {"space": "unit"}


def test_a_users_task_names_an_environment_in_its_file(drawn: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from vlmrl import Task\nfrom vlmrl.environments.base import Start\n\n"
        'def task(info):\n    return Task("own", "", "<image>?", profiles={"default": (":score", {})})\n\n'
        'def look(start: Start):\n    """Show it."""\n    return start.images[0]\n\n'
        "def score(x):\n    return 1.0\n"
    )
    own = source(drawn, f"{tmp_path}/own.py:task", name=":look")
    assert [tool["function"]["name"] for tool in own.environment.of(own.rows[0]).tools] == ["look"]
    with pytest.raises(RewardError, match="has no `other`"):
        source(drawn, f"{tmp_path}/own.py:task", name=":other")


def test_a_task_without_environments_says_so(drawn: Path) -> None:
    with pytest.raises(RecipeError, match="task `counting` has no environments of its own"):
        source(drawn, "counting", name=":Zoom")


ONE_CALL = (Turn("assistant", "c", calls=(Call("zoom"),)), Turn("tool", "image 1"))
FAILED = (Turn("assistant", "c", calls=(Call("zoom"), Call("zoom"))), Turn("tool", "error: no", errors=1))
GOOD = "<think>so</think><answer>{}</answer>"


def scored(name: str, last: str, *before: Turn, truth: str = "rising", **args: Any) -> dict[str, float | None]:
    turns = (*before, Turn("assistant", last)) if before else ()
    text = "\n".join(turn.text for turn in turns if turn.role == "assistant") or last
    parts = load_reward(name, args=args)(RewardInput(text, {"answer": truth}, turns=turns))
    return dict(parts)


@pytest.mark.parametrize(
    ("last", "truth", "accuracy", "form"),
    [
        (GOOD.format("rising"), "rising", 1, 1),
        (GOOD.format(" Rising. "), "rising", 1, 1),
        (GOOD.format("falling"), "rising", 0, 1),
        (GOOD.format("rising falling"), "rising", 0, 1),
        (GOOD.format("B"), "B", 1, 1),
        (GOOD.format("(B)"), "B", 1, 1),
        (GOOD.format("B."), "(B)", 1, 1),
        (GOOD.format("b"), "B", 1, 1),
        (GOOD.format("B or C"), "B", 0, 1),
        ("<answer>rising</answer>", "rising", 1, 0),
        ("rising", "rising", 0, 0),
        (GOOD.format("rising") + "<answer>falling</answer>", "rising", 0, 0),
        ("<think><answer>rising</answer></think>", "rising", 0, 0),
    ],
)
def test_the_answer_of_the_last_turn_counts(last: str, truth: str, accuracy: int, form: int) -> None:
    assert scored("crop", last, truth=truth) == {"accuracy": accuracy, "format": form}
    assert scored("crop", last, *ONE_CALL, truth=truth) == {"accuracy": accuracy, "format": form}
    right = Turn("assistant", GOOD.format(truth))
    assert scored("crop", "no", right, ONE_CALL[1], truth=truth) == {"accuracy": 0, "format": 0}


def test_a_row_without_an_answer_is_no_wrong_response() -> None:
    with pytest.raises(RewardError, match="not a text"):
        score_crop(RewardInput(GOOD.format("x"), {"answer": None}))


def test_a_used_tool_has_answered_without_an_error() -> None:
    assert scored("tool_use", "a") == {"tool_use": 0.0}
    assert scored("tool_use", "a", *ONE_CALL) == {"tool_use": 1.0}
    assert scored("tool_use", "a", *FAILED) == {"tool_use": 1.0}  # one of its two calls
    assert scored("tool_use", "a", FAILED[0], Turn("tool", "", errors=2)) == {"tool_use": 0.0}
    assert scored("tool_use", "a", ONE_CALL[0]) == {"tool_use": 0.0}, "the episode ended before an answer"


def test_the_published_reward_pays_every_call() -> None:
    """0.8 x accuracy + 0.2 x format + 1.2 x calls: a wrong answer behind four calls has 4.8, a right one alone 0.8."""
    spec = load_reward("rllava_crop")
    values = {}
    for name, parts in {
        "four": scored("rllava_crop", GOOD.format("no"), *ONE_CALL * 4),
        "right": scored("rllava_crop", GOOD.format("Rising")),
        "one tag": scored("rllava_crop", "<think>rising"),
        "long": scored("rllava_crop", f"<answer>{'a' * 1000}</answer>", truth="a" * 1000),
    }.items():
        values[name] = sum(spec.weights[part] * (value or 0) for part, value in parts.items())
    assert values == pytest.approx({"four": 4.8, "right": 0.8, "one tag": -0.2, "long": 0.0})


def inputs() -> list[RewardInput]:
    ways = list(WAYS)
    return [RewardInput("", {"answer": ways[i % 4], "category": "place"}, prompt_id=str(i)) for i in range(16)]


@pytest.mark.parametrize("variant", ["thousand", "thousand_direct", "alone_direct"])
def test_no_trick_earns_anything(variant: str) -> None:
    task = make_task("crop", {}, variant)
    spec = load_reward("crop", args=task.profiles["default"][1])
    found = probe_reward(spec, spec.weights, inputs(), more=task.attacks(inputs()))
    assert found["flagged"] == 0, [one for one in found["probes"] if one["flagged"]]
    assert {"answer in a call", "wrong after four calls"} <= {one["name"] for one in found["probes"]}


def test_the_probe_finds_the_paid_calls_of_the_published_reward() -> None:
    task, spec = make_task("crop", {}), load_reward("rllava_crop")
    found = probe_reward(spec, spec.weights, inputs(), more=task.attacks(inputs()))
    flagged = {one["name"] for one in found["probes"] if one["flagged"]}
    assert {"calls alone", "wrong after four calls"} <= flagged


def test_lines_vanish_at_the_seen_width_and_are_there_in_the_box() -> None:
    for number in range(8):
        drawn = draw_row(Drawing(224, 56, 2), number, random.Random(number))
        small = np.asarray(drawn.image.resize((56, 56), Image.Resampling.BOX)).astype(int)
        assert np.ptp(small) <= 1
        x1, y1, x2, y2 = map(int, drawn.truth["box"])
        area = np.asarray(drawn.image).astype(int)[y1:y2, x1:x2, 0]
        # Along a line the colour stays the same: the pixel one step further in the direction of the answer.
        changes = {
            "across": area[:, 1:] - area[:, :-1],
            "down": area[1:] - area[:-1],
            "rising": area[1:, :-1] - area[:-1, 1:],
            "falling": area[1:, 1:] - area[:-1, :-1],
        }
        share = {way: float((change != 0).mean()) for way, change in changes.items()}
        assert min(share, key=share.__getitem__) == drawn.truth["answer"]


def test_drawn_rows_are_the_same_again_and_demonstrations_look_where_they_should(tmp_path: Path) -> None:
    options = {"synthetic": 40, "side": 224, "seen": 56, "places": 2}
    first = prepare("crop", tmp_path, out=tmp_path / "a", **options)
    again = prepare("crop", tmp_path, out=tmp_path / "b", **options)
    assert first.info["fingerprint"] == again.info["fingerprint"]
    (row, *_) = rows_of(first)
    # The look is the middle half of the place: 56 pixels of 224 are 250 of 1000.
    x1, y1, x2, y2 = row.truth["box"]
    assert row.truth["look"] == [x1 + 28, y1 + 28, x2 - 28, y2 - 28]
    (call, answer) = crop_task({}, "thousand_direct").trace(row, random.Random(0), ((56, 56),))  # type: ignore[misc]
    assert call == Call("zoom", {"box": [round(n * 1000 / 224) for n in row.truth["look"]]})
    assert answer == f"<answer>{row.truth['answer']}</answer>"
    (call, _) = crop_task({}, "seen_direct").trace(row, random.Random(0), ((56, 56),))  # type: ignore[misc]
    assert call == Call("zoom", {"box": [round(n / 4) for n in row.truth["look"]]})
    assert crop_task({}, "alone_direct").trace(row, random.Random(0), ()) == answer  # type: ignore[misc]
    astray = rows_of(prepare("crop", tmp_path, out=tmp_path / "c", right_looks=0.0, **{**options, "synthetic": 200}))
    right = np.mean([row.truth["look"][0] // 112 == row.truth["box"][0] // 112
                     and row.truth["look"][1] // 112 == row.truth["box"][1] // 112 for row in astray])  # fmt: skip
    assert 0.15 < right < 0.35, "one of four places at random"
    task = crop_task({}, "thousand_direct")
    said = [task.trace(row, random.Random(0), ())[1] for row in astray]  # type: ignore[misc]
    assert said == [f"<answer>{row.truth['look_answer']}</answer>" for row in astray]
    assert any(row.truth["look_answer"] != row.truth["answer"] for row in astray)


def test_a_picture_that_would_show_its_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="less than four times --seen 100"):
        prepare("crop", tmp_path, synthetic=20, side=224, seen=100)


def png(colour: str) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (640, 480), colour).save(sink, "PNG")
    return sink.getvalue()


def deepeyes_rows() -> list[dict[str, Any]]:
    """Rows as ChenShawn/DeepEyes-Datasets-47k publishes them."""
    colours = ("red", "green", "blue", "white", "black", "grey")
    return [
        {
            "data_source": "vstar" if i % 2 else "chart",
            "prompt": [
                {"role": "system", "content": "# Tools\n<tools>image_zoom_in_tool</tools>"},
                {"role": "user", "content": f"<image>\nWhat colour is cup {i}?\nThink first, call the tool."},
            ],
            "images": [{"bytes": png(colour), "path": None}],
            "ability": "vl_chart",
            "env_name": "visual_toolbox_v2",
            "reward_model": {"ground_truth": f"The cup is {colour}.", "style": "model"},
            "extra_info": {"answer": "no", "index": str(i), "question": f"What colour is cup {i}?", "split": "train"},
        }
        for i, colour in enumerate(colours)
    ]


def test_published_rows_of_deepeyes(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(deepeyes_rows()), tmp_path / "rows.parquet")
    made = prepare("crop", tmp_path, tmp_path / "rows.parquet", validation_rows=0)
    rows = rows_of(made)
    assert [row.columns["question"] for row in rows] == [f"What colour is cup {i}?" for i in range(6)]
    assert rows[0].truth == {"answer": "The cup is red.", "category": "chart", "width": 640, "height": 480}
    data = open_dataset(Data(path=str(made.path)))
    assert data.image(rows[1].media[0]).getpixel((0, 0)) == (0, 128, 0)
    response = crop_task({}, VARIANTS[0]).correct_response(rows[0], random.Random(0))
    assert response == "<think>I look.</think><answer>The cup is red.</answer>"


def test_rows_of_v_star_have_options_and_categories(tmp_path: Path) -> None:
    lines = []
    for i, category in enumerate(("direct_attributes", "relative_position") * 2):
        (tmp_path / f"{i}.png").write_bytes(png(("red", "green", "blue", "white")[i]))
        text = f"What is glove {i} made of?\n(A) rubber\n(B) cotton\nAnswer with the option's letter directly."
        lines.append({"image": f"{i}.png", "text": text, "category": category, "label": "AB"[i % 2], "question_id": i})
    table = tmp_path / "test_questions.jsonl"
    table.write_text("\n".join(map(json.dumps, lines)))
    pq.write_table(pa.Table.from_pylist(deepeyes_rows()), tmp_path / "rows.parquet")
    made = prepare("crop", tmp_path, tmp_path / "rows.parquet", validation_rows=0, test=str(table))
    assert sizes_of(made.info) == {"train": 6, "test": 4}
    rows = rows_of(made, "test")
    assert rows[1].truth["answer"] == "B" and rows[1].truth["category"] == "relative_position"
    assert "(A) rubber (B) cotton" in rows[0].columns["question"]
    task = crop_task({})
    assert task.by == ("category",)
    assert score_crop(RewardInput(GOOD.format("(B)"), rows[1].truth))["accuracy"] == 1.0


def test_a_row_without_a_question_or_with_a_value_that_json_lacks_is_wrong(tmp_path: Path) -> None:
    broken = [{**row, "extra_info": {**row["extra_info"], "question": ""}} for row in deepeyes_rows()]
    pq.write_table(pa.Table.from_pylist(broken), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="the question is"):
        prepare("crop", tmp_path, tmp_path / "rows.parquet", validation_rows=0)
    unkept = [{**row, "data_source": math.nan} for row in deepeyes_rows()]
    pq.write_table(pa.Table.from_pylist(unkept), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="train row 0: the row cannot be stored as JSON"):
        prepare("crop", tmp_path, tmp_path / "rows.parquet", validation_rows=0)
