"""`vlmrl check` on small tables: what is wrong with rows, images, prompts, rewards, tokens and the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmrl.errors import Problem
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.check import Preflight, check_model, preflight, quick_look
from vlmrl.setup.memory_fit import Target

RENAMED = """
RANGES = {"right": (0.0, 1.0), "form": (0.0, 1.0)}
def score(x):
    if not x.response:
        return {"right": 0.0, "form": 0.0}
    return {"correct": float(x.truth["answer"] in x.response), "form": 1.0}
"""
HANGING = """
import time
ON_TIMEOUT = {"right": 0.0}
def score(x):
    while x.response == "it is c":
        time.sleep(60)
    return {"right": float(x.truth["answer"] in x.response)}
"""
REWARDS = """
import time
def exact(x):
    return {"right": float(x.truth["answer"] in x.response), "tag": None}
def raises(x):
    return 1 / 0
def nan(x):
    return float("nan")
def text(x):
    return "good"
def nothing(x):
    return {"right": None}
def hangs(x):
    time.sleep(60)
def generous(x):
    return 1.0
"""


def picture(folder: Path, name: str, width: int = 56, height: int = 56) -> str:
    pixels = np.random.default_rng(sum(map(ord, name))).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return name


def rows_of(folder: Path, names: str, **more) -> list[dict]:
    return [
        {
            "prompt": f"<image>What is {n}?",
            "image": picture(folder, f"{n}.png"),
            "answer": n,
            "response": f"it is {n}",
            **more,
        }
        for n in names
    ]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def world(tmp_path, monkeypatch, tiny_folder):
    """A folder with a table of six rows, a validation table of two, rewards and a recipe; returns a checker."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", rows_of(tmp_path, "abcdef"))
    write(tmp_path / "other.jsonl", rows_of(tmp_path, "xy"))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "recipe.toml").write_text(
        f"""[model]
path = "{tiny_folder}"
dtype = "float32"
device = "cpu"

[[data]]
path = "rows.jsonl"
validation = "other.jsonl"

[reward]
name = "rewards.py:exact"
weights = {{right = 1.0}}
timeout_seconds = 20
[rollout]
max_new_tokens = 16
[checkpoint]
keep_last = 1
"""
    )

    def check(*overrides: str) -> Preflight:
        return preflight(load_recipe("recipe.toml", overrides=overrides), runs_folder=tmp_path / "runs")

    return check


def the(problems: list[Problem], words: str) -> Problem:
    found = [p for p in problems if words in p.message]
    assert len(found) == 1, problems
    return found[0]


def phase(plan, name: str) -> dict:
    [found] = [p for p in plan["memory"]["phases"] if p["phase"] == name]
    return found


def errors(found: Preflight) -> list[str]:
    return [p.message for p in found.errors]


def test_a_sound_recipe_has_a_plan_and_no_error(world, tiny_encoder):
    found = world()
    assert errors(found) == []
    assert found.plan["data"]["rows"] | {"prompt": ""} == {
        "truth": "`answer` is text, such as a",
        "path": "rows.jsonl",
        "task": "table",
        "variant": None,
        "split": "train",
        "rows": 6,
        "rows_read": 6,
        "images": 6,
        "other_splits": {"validation": {"rows": 2, "images": 2}},
        "prompt": "",
    }
    tokens = found.plan["prompts"]["rows"]
    # 56 x 56 pixels are 4 x 4 patches of 14, merged two by two: 4 image tokens
    assert (tokens["sampled_rows"], tokens["image_tokens_mean"], tokens["image_sizes"]) == (6, 4.0, ["56 x 56"])
    assert sum(count for *_, count in tokens["histogram"]) == 6
    assert found.plan["reward"]["rows"] | {"name": ""} == {
        "name": "",
        "profile": None,
        "weights": {"right": 1.0},
        "parts": ["right", "tag"],
        "largest": None,
        "correct_response": 1.0,
        "empty_response": 0.0,
        "accuracy": None,
    }
    assert found.plan["run"]["responses"] == 100 * 32 * 8
    assert found.plan["run"]["epochs"]["rows"] == 100 * 32 / 6
    assert json.loads(json.dumps(found.plan)) is not None


def test_answers_that_mathematics_cannot_read_are_named(world, tmp_path):
    rows = rows_of(tmp_path, "abcdef")
    texts = ["6√{2}", "f(x", "1, 2, \\ldots", "7米", "\\text{SAS}", "3"]
    write(tmp_path / "rows.jsonl", [{**row, "answer": text} for row, text in zip(rows, texts, strict=True)])
    found = world("reward.name=math", "reward.weights={accuracy=1.0}")
    problem = the(found.problems, "2 of 6 sampled rows of `rows` have an answer that the reward cannot read")
    assert problem.level == "warning" and "`f(x`, the parser does not know" in str(problem.hint)
    assert "rows.jsonl:2 (" in str(problem.hint)
    write(tmp_path / "rows.jsonl", [{**row, "answer": "3"} for row in rows])
    found = world("reward.name=math", "reward.weights={accuracy=1.0}")
    assert not [p for p in found.problems if "cannot read" in p.message]


@pytest.mark.slow
def test_memory_is_counted_from_the_parameters(world):
    plan = world().plan
    count = plan["model"]["parameters"]
    update = phase(plan, "update")["parts"]
    assert update["weights"] == update["gradients"] == 4 * count and update["moments"] == 8 * count
    frozen = world('model.freeze=["language", "embeddings"]').plan
    assert (
        frozen["model"]["trained"]
        == count - frozen["model"]["parts"]["language"] - frozen["model"]["parts"]["embeddings"]
    )
    assert phase(frozen, "update")["parts"]["moments"] == 8 * frozen["model"]["trained"]


def test_an_image_that_is_missing_and_one_that_is_none_are_found_with_their_rows(world, tmp_path):
    (tmp_path / "b.png").unlink()
    (tmp_path / "d.png").write_bytes(b"not an image")
    problem = the(world().problems, "2 of 6 rows of `rows` (train) are not valid")
    assert problem.where == "recipe.toml:7"
    assert "rows.jsonl:2, column `image`: " in str(problem.hint)
    assert "rows.jsonl:4, column `image`: not an image" in str(problem.hint)


def test_training_rows_in_the_validation_table_are_reported(world, tmp_path):
    write(tmp_path / "other.jsonl", [*rows_of(tmp_path, "a"), *rows_of(tmp_path, "x")])
    assert the(world().problems, "1 of 2 validation rows of `rows` are training rows too").level == "warning"


def test_ids_that_end_alike_are_not_the_same_row(tmp_path):
    from vlmrl.setup.rows import row_content
    from vlmrl.types import Media, Row

    def row(name: str, sha256: str, shape: str = "disc") -> Row:
        return Row(name, "data", "t", {"cell": "A1"}, (Media(sha256, 8, 8),), {"shape": shape})

    one = row_content(row("train-000-1", "aa"))
    assert one == row_content(row("validation-7", "aa"))
    assert one not in (row_content(row("train-000-1", "bb")), row_content(row("train-000-1", "aa", "ring")))


def test_training_images_in_other_validation_rows_are_reported(world, tmp_path):
    rows = rows_of(tmp_path, "ax")
    write(tmp_path / "other.jsonl", [{**row, "prompt": "<image>Another question"} for row in rows])
    assert the(world().problems, "1 of 2 validation images of `rows` are training images too").level == "warning"


def test_rows_that_stand_twice_are_reported(world, tmp_path):
    write(tmp_path / "rows.jsonl", rows_of(tmp_path, "aab"))
    assert the(world().problems, "1 rows of `rows` (train) repeat").level == "warning"


def test_a_prompt_over_the_limit_is_an_error_with_the_length_needed(world):
    found = world("rollout.max_prompt_tokens=20")
    longest = found.plan["prompts"]["rows"]["tokens_max"]
    problem = the(found.problems, "6 of 6 sampled prompts of `rows` are longer than rollout.max_prompt_tokens (20)")
    assert f"rollout.max_prompt_tokens = {longest} or more" in str(problem.hint)
    assert problem.where == "--set rollout.max_prompt_tokens=20"


def test_resized_images_are_counted(world, tmp_path):
    rows = rows_of(tmp_path, "abc")
    picture(tmp_path, "a.png", 560, 560)
    picture(tmp_path, "b.png", 14, 14)
    write(tmp_path / "rows.jsonl", rows)
    tokens = world("model.min_pixels=3136", "model.max_pixels=12544").plan["prompts"]["rows"]
    assert (tokens["images"], tokens["images_shrunk"], tokens["images_enlarged"]) == (3, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "division by zero"),
        ("nan", "not a finite number"),
        ("text", "not a finite number"),
        ("nothing", "no part of the reward applies"),
        ("hangs", "1"),
    ],
)
def test_a_broken_reward_is_an_error_with_its_words(world, function, words):
    found = world(f"reward.name=rewards.py:{function}", "reward.timeout_seconds=1", "reward.weights={}")
    assert any(words in message for message in errors(found)), found.problems


@pytest.mark.slow
@pytest.mark.parametrize(("outage", "level"), [("wait", "warning"), ("mask", "error"), ("stop", "error")])
def test_a_service_that_is_down_is_an_error_unless_training_waits_for_it(world, tmp_path, outage, level):
    (tmp_path / "judge.py").write_text(
        "from vlmrl import RewardUnavailable\ndef score(x):\n    raise RewardUnavailable('no answer from judge:8000')\n"
    )
    problems = world("reward.name=judge.py:score", f"reward.outage={outage}", "reward.weights={}").problems
    assert the(problems, "no answer from judge:8000").level == level


@pytest.mark.slow
def test_a_weighted_part_that_a_correct_response_lacks_is_a_warning(world, tmp_path):
    (tmp_path / "renamed.py").write_text(RENAMED)
    recipe = ("reward.name=renamed.py:score", "reward.weights={right = 0.8, form = 0.2}")
    problem = the(world(*recipe).problems, "returns no part `right` for a correct response")
    assert problem.level == "warning" and "without a weight: correct" in str(problem.hint)
    assert not [p for p in world().problems if "returns no part" in p.message]


@pytest.mark.slow
def test_a_reward_that_hangs_on_correct_responses_is_an_error_whatever_on_timeout_says(world, tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    problems = world("reward.name=hanging.py:score", "reward.timeout_seconds=1").problems
    assert the(problems, "does not return within 1 s for 1 of 6 correct responses").level == "error"


def test_a_reward_that_asks_for_nothing_is_a_warning(world):
    problem = the(
        world("reward.name=rewards.py:generous", "reward.weights={}").problems,
        "the right answer earns no more than an empty one",
    )
    assert problem.level == "warning"


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        ("float(int(hour[1]) == x.truth['answer'])", None, ""),
        ("float(hour[1] == x.truth['answer'])", "warning", "unless the truth is text"),
        ("1 / 0", "error", "division by zero"),
        ("0.0", "warning", "was not tested"),
    ],
)
def test_a_right_answer_is_tried_in_the_sentence_that_the_prompt_shows(world, tmp_path, line, level, words):
    hours = [{**row, "prompt": "<image>Write: The hour is [HOUR]"} for row in rows_of(tmp_path, "abcdef")]
    write(
        tmp_path / "rows.jsonl", [{k: v for k, v in {**row, "answer": 7}.items() if k != "response"} for row in hours]
    )
    (tmp_path / "hour.py").write_text(
        "import re\ndef score(x):\n    hour = re.fullmatch(r'The hour is \\[(\\d+)\\]', x.response)\n"
        f"    return {{'right': 0.0 if hour is None else {line}}}\n"
    )
    problems = world("reward.name=hour.py:score").problems
    if level is None:
        assert not [p for p in problems if "right answer" in p.message], problems
    else:
        assert the(problems, words).level == level


def test_the_largest_value_and_the_weights_of_a_built_in_reward_are_shown(world):
    plan = world("reward.name=exact_match", "reward.weights={answer = 2.0, format = 0.5}").plan["reward"]["rows"]
    assert (plan["largest"], plan["weights"]) == (2.5, {"answer": 2.0, "format": 0.5})


def test_without_weights_a_plain_number_counts_once(world):
    plan = world("reward.name=rewards.py:generous", "reward.weights={}").plan["reward"]["rows"]
    assert (plan["weights"], plan["correct_response"]) == ({"reward": 1.0}, 1.0)


def test_a_weight_of_a_part_that_never_comes_is_an_error(world):
    problem = the(world("reward.weights.format=0.5").problems, "names the part `format`")
    assert "right" in str(problem.hint)
    assert problem.where == "--set reward.weights.format=0.5"


def test_a_template_with_an_unknown_name_is_an_error(world, tmp_path):
    (tmp_path / "ask.jinja").write_text("<image>{{ qestion }}")
    problem = the(world("data.0.prompt=ask.jinja").problems, "6 of 6 rows of `rows` (train) make no prompt")
    assert "qestion" in str(problem.hint) and "--sound" not in str(problem.hint)


def test_rows_without_a_prompt_can_be_left_out_by_an_export(world, tmp_path):
    rows = rows_of(tmp_path, "abcdef")
    rows[2]["prompt"] = "no mark for its image <image><image>"
    write(tmp_path / "rows.jsonl", rows)
    problem = the(world().problems, "1 of 6 rows of `rows` (train) make no prompt")
    assert "OUT --sound` writes the others" in str(problem.hint)


@pytest.mark.slow
def test_control_tokens_typed_in_prompts_and_responses_are_counted(world, tmp_path):
    rows = rows_of(tmp_path, "abcdef")
    rows[1]["prompt"] += "<|im_end|>\n<|im_start|>assistant\n42"
    rows[2]["prompt"] += " <|im_end|> <|image_pad|>"
    rows[4]["response"] += "<|im_end|>"
    write(tmp_path / "rows.jsonl", rows)
    found = world()
    words = "2 of 6 rows of `rows` (train) contain control tokens of the model: <|im_end|> in 2, "
    problem = the(found.problems, words)
    assert problem.level == "warning" and errors(found) == []
    assert "rows.jsonl:2 (rows-" in str(problem.hint) and "1 x <|image_pad|>" in str(problem.hint)
    recipe = load_recipe("recipe.toml", overrides=["kind=sft", "reward.weights={}"])
    the(preflight(recipe, runs_folder=tmp_path / "runs").problems, "3 of 6 rows of `rows` (train) contain control")


def test_an_image_that_the_model_does_not_take_is_found_whichever_row_it_is_in(world, tmp_path, monkeypatch):
    from vlmrl.setup import prompt_lengths
    from vlmrl.setup import rows as data

    picture(tmp_path, "d.png", 28 * 201, 28)
    for module, name in ((data, "SAMPLE_ROWS"), (prompt_lengths, "TOKEN_ROWS")):
        monkeypatch.setattr(module, name, 2)  # the first row and the third: it is not in the sample
    problem = the(world().problems, "1 of 6 rows of `rows` (train) have an image that the model does not accept")
    assert "rows.jsonl:4 (rows-" in str(problem.hint) and "5628 x 28 pixels" in str(problem.hint)


def test_broken_pixels_are_found_with_file_and_row(world, tmp_path):
    picture(tmp_path, "c.png", 200, 200)
    (tmp_path / "c.png").write_bytes((tmp_path / "c.png").read_bytes()[:30_000])
    problem = the(errors_of(world()), "1 of 6 sampled rows of `rows` have an image that cannot be read")
    assert f"rows.jsonl:3, column `image`, {tmp_path / 'c.png'}: broken image" in str(problem.hint)


def errors_of(found: Preflight) -> list[Problem]:
    """The errors, of which nothing but the first cause may be one."""
    assert len(found.errors) == 1, found.errors
    return found.errors


def test_what_follows_from_a_table_that_cannot_be_read_is_not_reported(world, tmp_path):
    """Prompts are unknown then: `rollout.max_prompt_tokens` says nothing of their length."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{oops\n')
    problem = the(errors_of(world("rollout.max_prompt_tokens=4096")), "not JSON")
    assert problem.where == "rows.jsonl:2"


@pytest.mark.slow
def test_a_template_without_end_is_one_error_and_ends_the_look_at_the_rows(world, tmp_path, monkeypatch):
    from vlmrl.recipe.template_worker import TemplateWorker
    from vlmrl.tasks import prompt

    monkeypatch.setattr(prompt, "WORKER", worker := TemplateWorker(cpu_seconds=1))
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    (tmp_path / "ask.jinja").write_text(f"<image>{loops}")
    try:
        problem = the(errors_of(world("data.0.prompt=ask.jinja")), "the prompt template takes more than 1 seconds")
    finally:
        worker.close()
    assert "ask.jinja, rows.jsonl:1 (rows-" in str(problem.where)


@pytest.mark.slow
def test_a_chat_template_that_cannot_be_used_is_an_error_of_the_model(world, tmp_path, tiny_folder):
    from shutil import copytree

    copytree(tiny_folder, tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{% for m in %}")
    problem = the(errors_of(world("model.path=other")), "chat template is not valid Jinja")
    assert problem.hint
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")
    problem = the(errors_of(world("model.path=other")), "refuses the prompt: no system turn")
    assert problem.where == "--set model.path=other"


def test_supervised_learning_needs_responses(world, tmp_path):
    rows = [{k: v for k, v in row.items() if k != "response"} for row in rows_of(tmp_path, "abc")]
    write(tmp_path / "rows.jsonl", rows)
    assert any("has no responses to learn from" in message for message in errors(world("kind=sft")))


@pytest.mark.slow
def test_a_metric_that_validation_does_not_have_is_an_error(world):
    assert "part/right" in str(the(world("eval.metric=accuracy").problems, "has no metric `accuracy`").hint)
    four = ("eval.settings.four.temperature=1.0", "eval.settings.four.samples=4")
    problem = the(world("eval.metric=pass@4", *four).problems, "has no metric `pass@4`")
    assert 'accuracy = "PART"' in str(problem.hint)
    assert not errors(world("eval.metric=pass@4", "reward.accuracy=right", *four))
    assert errors(world("eval.metric=part/right")) == []


def test_no_validation_is_a_warning(world, tmp_path):
    text = (tmp_path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text.replace('validation = "other.jsonl"\n', ""))
    problem = the(world().problems, "no source has validation rows")
    assert problem.level == "warning" and "--set data.0.validation=0.1" in (problem.hint or "")
    assert not [p for p in world("data.0.validation=0.1").problems if "no source has validation" in p.message]


def test_a_missing_model_is_one_error_and_the_data_is_checked_all_the_same(world, tmp_path):
    (tmp_path / "b.png").unlink()
    found = world("model.path=./nowhere")
    assert len([m for m in errors(found) if "nowhere" in m]) == 1
    assert any("not valid" in m for m in errors(found))


def test_a_hub_name_that_cannot_be_reached_is_said_at_once(world):
    assert any("not a local folder, it is not in the hub cache" in m for m in errors(world("model.path=some/model")))


@pytest.mark.slow
def test_vllm_is_counted_with_weights_and_a_cache_of_its_own(world):
    built_in, vllm = (world(f"rollout.engine={e}", "rollout.kv_cache_gib=0.5").plan for e in ("torch", "vllm"))
    parts = phase(built_in, "rollout")["parts"]
    assert parts["kv cache"] > 0 and "engine weights" not in parts
    parts = phase(vllm, "rollout")["parts"]
    assert parts["engine weights"] == parts["weights"] and parts["kv cache"] == 2**29
    # On a CPU the engine cannot sleep: what it holds is there in an update too.
    assert phase(vllm, "update")["parts"].items() >= {"engine weights": parts["weights"], "kv cache": 2**29}.items()


def test_more_memory_than_there_is_is_an_error(world):
    problem = the(world("train.tokens_per_row=2000000000", "rollout.prompts_per_step=1000000").problems, "of memory")
    assert problem.level == "error"


@pytest.mark.slow
def test_several_processes_are_planned_and_what_they_cannot_do_is_said(world):
    recipe = load_recipe("recipe.toml")
    alone, two = (preflight(recipe, runs_folder=Path("runs"), target=Target(n)).plan["memory"] for n in (1, 2))
    parts = [phase({"memory": m}, "update")["parts"] for m in (alone, two)]
    assert parts[1]["moments"] * 2 == parts[0]["moments"] and parts[1]["gathered"] > 0
    assert abs(two["bytes_each"] * 2 / alone["bytes_each"] - 1) < 0.2  # they share main memory, which moves
    wrong = load_recipe("recipe.toml", overrides=["parallel.shard_size=3", "optim.name=adamw_bf16_kahan"])
    found = preflight(wrong, runs_folder=Path("runs"), target=Target(4)).problems
    assert the(found, "does not divide 4 processes").where == "--set parallel.shard_size=3"
    assert the(found, '"adamw_bf16_kahan" is for one process').level == "error"
    assert not [p for p in check_model(wrong, None, Path("runs")) if "divide" in p.message]  # one process


def test_a_full_disk_is_an_error(world, monkeypatch, tmp_path):
    from vlmrl.setup import machine

    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    problem = the(world().problems, "the run may write")
    assert problem.level == "error" and "checkpoints of" in problem.message and "rollouts of at most" in problem.message
    for recipe in (load_recipe("recipe.toml"), load_recipe("recipe.toml", overrides=["kind=sft"])):
        quick = the(check_model(recipe, None, tmp_path / "runs"), "the run may write")
        assert quick.level == "error" and "a merged model of" in quick.message
    assert not [p for p in check_model(load_recipe("recipe.toml")) if "may write" in p.message]  # nothing is to be run


@pytest.mark.slow
def test_the_disk_that_a_run_needs_is_counted(world):
    """Rollouts: 100 steps x 32 prompts x 8 samples x 16 tokens x 12 bytes. Checkpoints: keep_last 1, the best, and one
    being written, each of weights and two moments in float32."""
    plan = world("checkpoint.every_steps=10").plan
    count = plan["model"]["parameters"]
    disk = plan["disk"]
    assert (disk["checkpoints_at_once"], disk["checkpoint_bytes"], disk["merged_bytes"]) == (3, 12 * count, 4 * count)
    assert disk["rollouts_bytes_at_most"] == 100 * 32 * 8 * 16 * 12
    fewer = world("log.keep_rollouts=10").plan["disk"]
    assert fewer["rollouts_bytes_at_most"] == 10 * 32 * 8 * 16 * 12
    # Of steps 0 to 89 every 20th is kept too: 0, 20, 40, 60, 80.
    some = world("log.keep_rollouts=10", "log.keep_rollouts_every=20").plan["disk"]
    assert some["rollouts_bytes_at_most"] == 15 * 32 * 8 * 16 * 12
    assert world("log.keep_rollouts=500").plan["disk"]["rollouts_bytes_at_most"] == disk["rollouts_bytes_at_most"]


@pytest.mark.slow
def test_rollouts_that_fill_the_disk_are_a_warning_that_names_their_key(world, monkeypatch):
    from vlmrl.setup import machine

    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    problem = the(world("train.steps=100000").problems, "the run may write")
    assert problem.level == "warning" and "log.keep_rollouts" in str(problem.hint)
    assert not [p for p in world("train.steps=100000", "log.keep_rollouts=20").problems if "may write" in p.message]


def test_a_response_longer_than_the_model_reads_is_an_error(world):
    assert any(
        "model accepts 4096" in m for m in errors(world("rollout.max_new_tokens=5000", "train.tokens_per_row=9000"))
    )


def test_damaged_weights_are_an_error(world, tmp_path, tiny_folder):
    import shutil

    shutil.copytree(tiny_folder, tmp_path / "model")
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    assert any("model.safetensors is damaged" in m for m in errors(world("model.path=model")))


def test_truths_that_are_empty_or_of_two_types_are_warnings_in_every_part_of_check(world, tmp_path):
    rows = [{**row, "time": f"{n}:15"} for n, row in enumerate(rows_of(tmp_path, "abcdef"))]
    rows[3]["time"] = 315
    write(tmp_path / "rows.jsonl", [{name: row[name] for name in ("prompt", "image", "time")} for row in rows])
    text = (tmp_path / "recipe.toml").read_text()
    recipe = text.replace('validation = "other.jsonl"', "columns = @").replace(
        "[reward]", "[eval]\nenabled = false\n[reward]"
    )
    for columns, words in (
        ('{prompt = "prompt", images = "image", answer = "time"}', "but a number in rows.jsonl:4"),
        ('{prompt = "prompt", images = "image"}', "is empty in all 6 rows"),
    ):
        (tmp_path / "recipe.toml").write_text(recipe.replace("@", columns))
        assert the(quick_look(load_recipe("recipe.toml"))[0], words).level == "warning"
        assert the(world().problems, words).level == "warning"


@pytest.mark.slow
def test_the_quick_part_finds_rows_and_prompts_without_torch(world, tmp_path):
    (tmp_path / "b.png").unlink()
    loaded = load_recipe("recipe.toml")
    assert any("not valid" in p.message for p in quick_look(loaded)[0])
    code = (
        "import sys; from vlmrl.recipe.load import load_recipe; from vlmrl.setup.check import quick_look\n"
        "quick_look(load_recipe('recipe.toml'))[0]; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_that_is_not_there_is_found_without_torch(world, tmp_path):
    """Importing torch and transformers takes longer than all else that a wrong path needs."""
    (tmp_path / "empty").mkdir()
    code = (
        "import sys; from pathlib import Path; from vlmrl.recipe.load import load_recipe\n"
        "from vlmrl.setup.checked_recipe import find_model_files\n"
        "from vlmrl.setup.check import check_location\n"
        "from vlmrl.setup.check import preflight\n"
        "for path in sys.argv[1:]:\n"
        "    loaded = load_recipe('recipe.toml', overrides=[f'model.path={path}'])\n"
        "    found = find_model_files(loaded.recipe.model.path, Path('runs'), loaded.where(('model', 'path')))\n"
        "    missing = found[1] or check_location(loaded, found[0])\n"
        "    problems = preflight(loaded, runs_folder=Path('runs'), model_files=found[0], missing=missing).errors\n"
        "    assert [p.where for p in problems] == ['--set model.path=' + path], problems\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    paths = ["./gone", "models/sub/gone", "rows.jsonl", "empty"]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_folder_that_is_not_whole_is_found_by_both_parts(world, tmp_path, tiny_folder):
    from shutil import copytree

    copytree(tiny_folder, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "pytorch_model.bin")
    problem = the(errors_of(world("model.path=other")), "are in pytorch_model.bin, a format that vlmrl does not read")
    assert problem == the(check_model(load_recipe("recipe.toml", overrides=["model.path=other"])), "pytorch_model.bin")


@pytest.mark.parametrize("key", ["rollout.max_new_tokens", "environment.tokens"])
def test_a_response_beyond_the_model_is_refused_by_check_and_by_train(world, tmp_path, key):
    (tmp_path / "tools.py").write_text("def look():\n    'Look.'\n    return 'x'\n")
    words = [f"{key}=60000"] + ["environment.name=tools.py:look"] * (key == "environment.tokens")
    named = the(world(*words).problems, "tokens; this model accepts")
    assert named.hint.startswith(f"lower {key}, or") and key in named.where
    loaded = load_recipe("recipe.toml", overrides=words)
    _, prompts = quick_look(loaded)
    again = the(check_model(loaded, None, tmp_path / "runs", prompts=prompts), "tokens; this model accepts")
    assert (again.where, again.hint, again.level) == (named.where, named.hint, "error")


def test_with_a_broken_recipe_the_quick_part_opens_nothing(world, monkeypatch):
    from vlmrl.setup import rows as data

    monkeypatch.setattr(data, "open_sources", lambda loaded: pytest.fail("the data was opened"))
    assert quick_look(load_recipe("recipe.toml", overrides=["rollout.samples_per_prompt=1"]))[0]


@pytest.fixture(scope="module")
def fixed_size_folder(tmp_path_factory):
    """A model whose processor makes every image 32 x 32."""
    from tinyfamilies import build
    from tinyprocessors import PROCESSORS

    folder = tmp_path_factory.mktemp("gemma3")
    build("gemma3").model.save_pretrained(folder)
    PROCESSORS["gemma3"]().save_pretrained(folder)
    return folder


def test_pixel_bounds_that_this_model_has_no_use_for_are_said_with_their_lines(world, fixed_size_folder, tmp_path):
    text = (tmp_path / "recipe.toml").read_text()
    path = f'path = "{fixed_size_folder}"\n'
    (tmp_path / "recipe.toml").write_text("[model]\n" + path + "max_pixels = 50176\n" + text.split("\n", 2)[2])
    loaded = load_recipe("recipe.toml", overrides=["model.min_pixels=784"])
    for problems in (check_model(loaded), preflight(loaded, runs_folder=tmp_path / "runs").problems):
        low, high = (the(problems, f"`model.{key}` does nothing") for key in ("min_pixels", "max_pixels"))
        assert low.where == "--set model.min_pixels=784" and high.where == "recipe.toml:3"
        assert low.level == high.level == "warning" and "size: height 32, width 32" in str(high.hint)
    assert check_model(load_recipe("recipe.toml", overrides=['model.path="nowhere"']))[0].level == "error"


def test_pixel_bounds_that_work_and_bounds_nobody_wrote_are_not_mentioned(world, fixed_size_folder):
    for word in ("model.max_pixels=50176", f'model.path="{fixed_size_folder}"'):
        assert not [p for p in check_model(load_recipe("recipe.toml", overrides=[word])) if "pixels" in p.message]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        (['lora.targets=["q_prj"]'], "`lora.targets` names `q_prj`", "did you mean `q_proj`?"),
        (['lora.targets=["self_atn.q_proj"]'], "names `self_atn.q_proj`", "did you mean `self_attn.q_proj`?"),
        (['lora.targets=["out_proj"]'], "names `out_proj`", "lora.vision = true adds the vision tower"),
        (['lora.exclude=["*.layers.9.q_proj"]'], "matches no layer", "model.language_model.layers.0.self_attn.q_proj"),
        (['model.freeze=["language"]', "lora.vision=true", 'lora.targets=["v_prj"]'], "names `v_prj`", "`v_proj`"),
    ],
)
def test_names_of_layers_are_checked_before_weights_are_read(world, fixed_size_folder, words, told, hint):
    loaded = load_recipe("recipe.toml", overrides=[f'model.path="{fixed_size_folder}"', "lora.rank=4", *words])
    for problems in (check_model(loaded), preflight(loaded, runs_folder=fixed_size_folder / "runs").problems):
        problem = the(problems, told)
        assert (problem.level, problem.where) == ("error", f"--set {words[-1]}") and hint in str(problem.hint)


@pytest.mark.slow
def test_a_wrong_model_path_is_on_the_screen_before_anything_large_is_imported(world):
    """`vlmrl check` says it first, and then goes on to the data."""
    code = (
        "import sys; from vlmrl.cli import check\n"
        "show = check.show_each\n"
        "def first(problems):\n"
        "    heavy = {'torch', 'numpy', 'pyarrow', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "    print('shown', [p.where for p in problems], list(heavy), flush=True); show(problems)\n"
        "check.show_each = first\n"
        "sys.argv = ['vlmrl', 'check', 'recipe.toml', '--set', 'model.path=./gone']\n"
        "from vlmrl.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    shown = [line for line in done.stdout.splitlines() if line.startswith("shown")]
    assert done.returncode == 2 and shown[0] == "shown ['--set model.path=./gone'] []", done.stderr + done.stdout
    assert done.stdout.count("--> --set model.path=./gone") == 1 and "passes over the data" in done.stdout


def test_a_right_answer_that_is_longer_than_a_response_may_be_is_told(world, tiny_encoder):
    paying = ("reward.name=exact_match", "reward.weights={answer = 2.0, format = 0.5}", "data.0.columns={}")
    write(Path("rows.jsonl"), [{k: v for k, v in row.items() if k != "response"} for row in rows_of(Path(), "abcdef")])
    problem = the(world(*paying, "rollout.max_new_tokens=2").problems, "it would be cut")
    needed = int((problem.hint or "").split("max_new_tokens = ")[1].split()[0])
    assert problem.level == "warning" and "<answer>a</answer>" in problem.message
    assert needed == len(tiny_encoder.encode_text(problem.message.split("'")[1])) + 1
    room = world(*paying, f"rollout.max_new_tokens={needed}").problems
    assert not any("it would be cut" in p.message for p in room)
