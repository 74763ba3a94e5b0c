"""Supervised runs without a reward: validation by the loss of the rows' own responses, on a share that is held out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from command_line import this_process
from small_runs import recipe_text
from tinyworld import image

from vlmrl.model.load import banned_ids_of
from vlmrl.store.runs import Run, open_run

ROWS = 12
RECIPE = """

train = {steps = 3, rows_per_step = 12, tokens_per_row = 300}
optim.lr = 1e-2
eval = {every_steps = 1}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two tables with the same rows, in which responses have very different lengths; every second row has an image."""
    (tmp_path / "pictures").mkdir()
    rows = []
    for i in range(ROWS):
        image(i, 40, 56).save(tmp_path / "pictures" / f"{i}.png")
        rows.append({"question": f"which number is {i}?", "response": "it is " * (i % 4) + str(i)})
        rows[-1] |= {"image": f"pictures/{i}.png"} if i % 2 else {"image": None}
    for name in ("train", "again"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def train(place: Path, model: Path, data: str, *words: str) -> tuple[Run, str]:
    (place / "recipe.toml").write_text(recipe_text(model, RECIPE, "sft") + f'[[data]]\npath = "train.jsonl"\n{data}')
    done = this_process("sft", "recipe.toml", *words, cwd=place)
    assert done.code == 0, done.err
    return open_run(place / "runs", "last"), done.err


@pytest.mark.slow
def test_the_loss_of_a_validation_is_the_loss_that_training_would_have(place, tiny_folder):
    """Each step takes all rows, and the validation has the same rows: both measure the same weights."""
    run, told = train(place, tiny_folder, 'validation = "again.jsonl"\n', "--name", "loss")
    trained = [line["loss/cross_entropy"] for line in run.metrics("train")]
    lines = run.metrics("validation")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["eval/loss"] for line in lines[:3]] == pytest.approx(trained, rel=1e-5)
    for line in lines:
        assert line["eval/perplexity"] == pytest.approx(math.exp(line["eval/loss"]))
        assert line["eval/metric"] == line["eval/loss"]
        assert f"validation at step {line['step']}: loss {line['eval/loss']:.3f}  perplexity " in told
    assert lines[3]["eval/loss"] < lines[0]["eval/loss"]
    best = run.manifest.best
    assert best is not None and best.metric == "loss" and best.value == min(line["eval/loss"] for line in lines)
    assert "vlmrl eval" not in told and "next: vlmrl merge loss   vlmrl report loss" in told
    assert this_process("runs", "verify", "loss", cwd=place).code == 0
    assert this_process("report", "loss", cwd=place).code == 0
    assert "perplexity" in (run.dir / "report.html").read_text()


@pytest.mark.slow
def test_the_loss_weighs_tokens_as_transformers_own_forward_pass_does(place, tiny_folder):
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    rows = [{"question": f"say {i}", "response": "so " * (3 * i) + "."} for i in range(3)]
    (place / "again.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, _ = train(place, tiny_folder, 'validation = "again.jsonl"\n')
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = AutoModelForImageTextToText.from_pretrained(tiny_folder).eval()
    nats, tokens = 0.0, 0
    for row in rows:
        chat = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        target = [*tokenizer(row["response"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
        logits[:, list(banned_ids_of(model, tokenizer))] = -math.inf
        nats -= float(logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None]).double().sum())
        tokens += len(target)
    assert run.metrics("validation")[0]["eval/loss"] == pytest.approx(nats / tokens, rel=1e-5)


@pytest.mark.slow
def test_a_share_is_held_out_and_a_resume_uses_the_same(place, tiny_folder):
    run, _ = train(place, tiny_folder, "validation = 0.25\n", "--name", "share")
    assert run.manifest.datasets[0]["rows"] == 9
    again = this_process("sft", "--resume", "share", "--set", "train.steps=4", cwd=place)
    assert again.code == 0, again.err
    other = this_process(
        "sft", "--resume", "share", "--set", "train.steps=5", "--set", "data.0.validation=0.5", cwd=place
    )
    assert other.code == 2 and "rows of train: 9 rows" in other.err
    (place / "r.py").write_text("def score(x):\n    return float(len(x.response))\n")
    reward = ("--set", "reward.name=r.py:score")
    held_out = this_process("eval", "share", *reward, cwd=place)
    assert held_out.code == 0 and "3 rows, split validation" in held_out.err and "training rows" not in held_out.err
    # With another seed, held-out rows are rows that the run was trained on.
    seed = ("--set", "data.0.validation_seed=1", "--name", "seed")
    mixed = this_process("eval", "share", *reward, *seed, cwd=place)
    assert mixed.code == 0 and "(training rows)" in mixed.err
    checked = this_process("check", "recipe.toml", cwd=place)
    assert "train 9 rows, validation 3" in checked.out and "are training" not in checked.out + checked.err


@pytest.mark.slow
def test_rows_to_validate_on_need_a_response_and_reinforcement_learning_has_no_loss(place, tiny_folder):
    (place / "again.jsonl").write_text(json.dumps({"question": "say 1", "response": ""}) + "\n")
    (place / "recipe.toml").write_text(
        recipe_text(tiny_folder, RECIPE, "sft") + '[[data]]\npath = "train.jsonl"\nvalidation = "again.jsonl"\n'
    )
    done = this_process("sft", "recipe.toml", cwd=place)
    assert done.code == 2 and "have no response to learn from" in done.err and not (place / "runs").exists()
    done = this_process("check", "recipe.toml", "--set", "kind=rl", "--set", "eval.metric=loss", cwd=place)
    assert done.code == 2 and "`eval.metric` is loss, which only `vlmrl sft` measures" in done.out + done.err


@pytest.mark.slow
def test_ranks_measure_the_loss_that_one_process_measures(place, tiny_folder):
    run, _ = train(place, tiny_folder, 'validation = "again.jsonl"\n')
    done = this_process("sft", "recipe.toml", "--gpus", "2", "--name", "two", cwd=place)
    assert done.code == 0, done.err
    two = open_run(place / "runs", "two")
    losses = [[line["eval/loss"] for line in one.metrics("validation")] for one in (run, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
