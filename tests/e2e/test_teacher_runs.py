"""Runs that learn from a teacher: its numbers beside transformers' own, what it reads, equal models, resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_runs import TWO_STEPS, assert_same_run, begin, go_on, make_place, train, train_in_parts, weights
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration

from vlmrl.algo.advantages import visual_weights
from vlmrl.data.blinded_images import ImageChange, draw_picture
from vlmrl.errors import CheckpointError, DataError
from vlmrl.model.tiny import build_tiny
from vlmrl.recipe.checks import Catalogs, check_recipe
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.check import check_model, quick_look
from vlmrl.setup.sources import open_training
from vlmrl.store.runs import Run
from vlmrl.tasks.prompt import hidden
from vlmrl.train.teacher import Teacher

PROMPTS = "rollout.max_prompt_tokens=512"
TEMPERATURE = 0.9
"""Temperature of the runs."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, TWO_STEPS)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory, tiny_folder) -> Path:
    """A teacher with the tiny model's tokenizer, of another width, with more padding rows and larger patches."""
    folder = tmp_path_factory.mktemp("other") / "model"
    config = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_folder).config
    config.text_config.update({"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1})
    config.text_config.vocab_size += 9
    config.vision_config.update({"patch_size": 8, "out_hidden_size": 96})
    torch.manual_seed(5)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(6.0)
    model.save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(tiny_folder)
    processor.image_processor.patch_size = 8
    processor.save_pretrained(folder)
    return folder


def taught(folder: object, *more: str, name: str = "opd") -> tuple[str, ...]:
    return (f'algo.name="{name}"', f'teacher.path="{folder}"', PROMPTS, *more)


def plain_numbers(
    folder: Path, run: Run, place: Path, size: int, change: ImageChange | None = None
) -> Iterator[torch.Tensor]:
    """Log-probs [tokens, size] over the ids that may be sampled, of each response of step 0: by transformers alone."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    processor = AutoProcessor.from_pretrained(folder)
    (source,) = open_training(load_recipe(place / "rl.toml").recipe)
    for group in run.read_rollouts(0):
        images = [source.dataset.image(media) for media in group.row.media]
        images = [draw_picture(change, image, image.size, "") if change else image for image in images]
        text = [group.prompt_text]
        inputs = dict(processor(text=text, images=images, return_tensors="pt", min_pixels=784, max_pixels=3136))
        prompt = inputs["input_ids"].shape[1]
        for sample in group.samples:
            ids = torch.tensor([sample.trajectory.response_ids])
            whole = torch.cat([inputs["input_ids"], ids], 1)
            more = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
            if "mm_token_type_ids" in inputs:
                more["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(ids)], 1)
            with torch.no_grad():
                logits = model(**inputs | more).logits[0, prompt - 1 : -1, :size]
            yield logits.double() / TEMPERATURE


def allowed(tiny_banned, size: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.float64)
    mask[[i for i in tiny_banned if i < size]] = -torch.inf
    return mask


def vocabulary(folder: Path) -> int:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).config.text_config.vocab_size


@pytest.mark.parametrize(("kind", "more"), [("reverse", ()), ("jsd", ("algo.jsd_weight=0.3", "algo.teacher_top_k=5"))])
def test_the_loss_is_the_divergence_from_another_kind_of_model(
    place, tmp_path, other_folder, tiny_folder, tiny_banned, kind, more
):
    options = (f'algo.divergence="{kind}"', *more, "train.steps=1")
    run = train(place, tmp_path, *taught(other_folder, *options))
    size = vocabulary(tiny_folder)
    mask, values = allowed(tiny_banned, size), []
    pairs = zip(
        plain_numbers(tiny_folder, run, place, size), plain_numbers(other_folder, run, place, size), strict=True
    )
    for ours, theirs in pairs:
        p, q = ((x + mask).softmax(-1) for x in (ours, theirs))
        if kind == "reverse":
            values.append((p * (p / q).log()).nan_to_num(0.0).sum(-1))
            continue
        ids = q.topk(5).indices
        p, q = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
        m = 0.3 * q + 0.7 * p
        values.append(0.3 * (q * (q / m).log()).sum(-1) + 0.7 * (p * (p / m).log()).sum(-1))
    (line,) = run.metrics("train")
    assert line["loss/teacher"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)
    assert line["loss/teacher"] > 0.1
    assert line["loss/total"] == pytest.approx(line["loss/teacher"], rel=1e-5) and line["loss/policy"] == 0
    assert line["optim/grad_norm"] > 0


def test_as_a_reward_each_token_has_its_log_ratio(place, tmp_path, other_folder, tiny_folder, tiny_banned):
    run = train(place, tmp_path, *taught(other_folder, "train.steps=1", "algo.teacher_coef=0.5", name="opd_reward"))
    size = vocabulary(tiny_folder)
    mask = allowed(tiny_banned, size)
    pairs = zip(
        plain_numbers(tiny_folder, run, place, size), plain_numbers(other_folder, run, place, size), strict=True
    )
    samples = [s for g in run.read_rollouts(0) for s in g.samples]
    means = []
    for sample, numbers in zip(samples, pairs, strict=True):
        ids = torch.tensor(sample.trajectory.response_ids)[:, None]
        ours, theirs = ((x + mask).log_softmax(-1).gather(-1, ids)[:, 0] for x in numbers)
        means.append(theirs - ours)
    (line,) = run.metrics("train")
    assert line["policy/teacher_ratio"] == pytest.approx(torch.cat(means).mean().item(), rel=1e-4)
    # On policy the ratio is 1: the loss is minus the mean advantage.
    assert line["loss/policy"] == pytest.approx(-0.5 * torch.cat(means).mean().item(), rel=1e-4)


@pytest.mark.parametrize("more", [(), ('algo.divergence="jsd"', "algo.teacher_top_k=3"), ("train.updates_per_step=2",)])
def test_a_teacher_that_is_the_policy_teaches_nothing(place, tmp_path, tiny_folder, more):
    run = train(place, tmp_path, *taught(tiny_folder, "train.steps=1", "optim.weight_decay=0", *more))
    (line,) = run.metrics("train")
    assert line["loss/teacher"] == 0.0 and line["optim/grad_norm"] == 0.0
    start = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_folder).state_dict()
    after = weights(run)
    assert all(torch.equal(after[name], start[name]) for name in after.keys() & start.keys()) and len(after) > 20


def test_tokens_are_weighed_by_what_the_details_of_the_images_gain_the_teacher(
    place, tmp_path, other_folder, tiny_folder, tiny_banned
):
    run = train(place, tmp_path, *taught(other_folder, "train.steps=1", "algo.image_scale=0.05", name="va_opd"))
    size = vocabulary(tiny_folder)
    mask, low = allowed(tiny_banned, size), ImageChange("low", share=0.05)
    numbers = [plain_numbers(*x) for x in ((tiny_folder, run, place, size), (other_folder, run, place, size))]
    numbers.append(plain_numbers(other_folder, run, place, size, low))
    values, total = [], 0.0
    for group in run.read_rollouts(0):
        gains, losses = [], []
        for sample in group.samples:
            ids = torch.tensor(sample.trajectory.response_ids)[:, None]
            ours, theirs, coarse = ((next(x) + mask).log_softmax(-1) for x in numbers)
            gains.append((theirs - coarse).gather(-1, ids)[:, 0].numpy())
            losses.append((ours.exp() * (ours - theirs)).nan_to_num(0.0).sum(-1))
        weights = visual_weights(gains, share=0.2, weight=0.5, temperature=1.0)
        values += [(loss * torch.from_numpy(w)).mean().item() for loss, w in zip(losses, weights, strict=True)]
        total += sum(gain.clip(0).sum() for gain in gains)
    (line,) = run.metrics("train")
    assert line["loss/total"] == pytest.approx(sum(values) / len(values), rel=1e-4)
    tokens = sum(len(s.trajectory.response_ids) for g in run.read_rollouts(0) for s in g.samples)
    assert line["teacher/visual_gain"] == pytest.approx(total / tokens, rel=1e-3) and total > 0


def test_beside_a_reward_both_are_learned(place, tmp_path, other_folder):
    alone, both = (
        train(place, tmp_path / name, 'algo.name="grpo"', PROMPTS, "train.steps=1", *more)
        for name, more in (
            ("a", ()),
            ("b", ('algo.teacher="loss"', "algo.teacher_coef=0.25", f'teacher.path="{other_folder}"')),
        )
    )
    (a,), (b,) = alone.metrics("train"), both.metrics("train")
    assert "loss/teacher" not in a and b["loss/teacher"] > 0
    assert b["loss/total"] == pytest.approx(b["loss/policy"] + 0.25 * b["loss/teacher"], rel=1e-5)


@pytest.mark.parametrize("lora", [(), ("lora.rank=4",)])
def test_what_is_revealed_reaches_the_teacher_alone(place, tmp_path, tiny_folder, tiny_banned, monkeypatch, lora):
    seen: list[str] = []
    prompt_of = Teacher.prompt_of

    def spied(self, group, *more):
        prompt = prompt_of(self, group, *more)
        seen.append(self.encoder.tokenizer.decode(prompt.ids))
        return prompt

    monkeypatch.setattr(Teacher, "prompt_of", spied)
    reveal = 'teacher.reveal="Secret: {{ truth.same }} {{ truth.keys() | list | length }}."'
    options = taught("start", reveal, "train.steps=1", *lora, name="opsd")
    run = train(place, tmp_path, *options)
    assert not any("Secret" in group.prompt_text for group in run.read_rollouts(0))
    answers = {str(group.row.truth["same"]) for group in run.read_rollouts(0)}
    assert len(answers) == 2 and all(any(f"Secret: {a} " in text for text in seen) for a in answers)
    (line,) = run.metrics("train")
    assert line["loss/teacher"] > 0 and line["optim/grad_norm"] > 0
    seen.clear()
    control = train(
        place, tmp_path / "b", *taught("start", reveal, "teacher.control=true", "train.steps=1", *lora, name="opsd")
    )
    assert seen and all("Secret: (not shown) " in text for text in seen)
    assert control.metrics("train")[0]["loss/teacher"] > 0


def test_the_control_hides_every_value():
    assert hidden({"a": [1, {"b": "x"}], "c": None}) == {"a": ["(not shown)", {"b": "(not shown)"}], "c": "(not shown)"}


@pytest.mark.parametrize("name", ["opd", "opd_reward", "va_opd", "opsd"])
def test_resumed_runs_are_the_same(place, tmp_path, other_folder, name):
    own = ("start", 'teacher.reveal="{{ truth.same }}"') if name == "opsd" else (other_folder,)
    more = taught(*own, "train.steps=3", "checkpoint.every_steps=1", name=name)
    assert_same_run(train_in_parts(place, tmp_path / "a", *more, stops=(1,)), train(place, tmp_path / "b", *more))


def test_a_run_that_teaches_is_the_checkpoint_of_the_begin(place, tmp_path, tiny_folder):
    teacher = train(place, tmp_path, "train.steps=1", PROMPTS)
    more = taught(teacher.id, "train.steps=3", "checkpoint.every_steps=1")
    whole = train(place, tmp_path, *more)
    run, status = begin(place, tmp_path, *more, stop_at=1)
    assert status == "interrupted"
    # Meanwhile the teacher learns more: it has another best and last checkpoint.
    later, _ = go_on(teacher, "train.steps=2", accept=True)
    assert len(later.checkpoint_dirs()) == 2
    run, _ = go_on(run)
    assert_same_run(run, whole)
    assert "step-000001" in (run.dir / "resolved.json").read_text()


def test_what_does_not_go_with_a_teacher_is_refused_in_words(place, tmp_path, tiny_folder):
    def problems(*overrides: str) -> str:
        loaded = load_recipe(place / "rl.toml", overrides=overrides, kind="rl")
        return "\n".join(f"{p.level} {p.message}" for p in check_recipe(loaded, Catalogs()))

    path = f'teacher.path="{tiny_folder}"'
    assert "error opd learns from a teacher, and the recipe has none" in problems('algo.name="opd"')
    assert "warning [teacher] does nothing: grpo learns from no teacher" in problems('algo.name="grpo"', path)
    assert "it has nothing to teach" in problems('algo.name="opsd"', 'teacher.path="start"')
    assert "shows no image" in problems('algo.name="opsd"', 'teacher.path="start"', 'teacher.reveal="<image> x"')
    assert "`teacher.control` does nothing" in problems('algo.name="opd"', path, "teacher.control=true")
    assert "a critic" in problems('algo.name="ppo"', 'algo.teacher="reward"', path)
    assert "which joins tokens" in problems('algo.name="gmpo"', 'algo.teacher="reward"', path)
    assert "a ratio of whole responses" in problems('algo.name="gspo"', 'algo.teacher="reward"', path)
    own = ('teacher.path="start"', 'teacher.reveal="x"', "teacher.temperature=0.5")
    assert "teacher.temperature of its own" in problems('algo.name="opd_reward"', *own)
    assert "`algo.jsd_weight` does nothing" in problems('algo.name="opd"', path, "algo.jsd_weight=0.3")
    assert "nowhere/model" in problems('algo.name="opd"', 'teacher.path="./nowhere/model"')
    assert "error" not in problems('algo.name="opd"', path)


def test_another_tokenizer_is_refused_by_the_check_and_by_the_run(place, tmp_path, tiny_folder):
    other = build_tiny(tmp_path / "other", ["altogether other words"] * 20, vocabulary=290, hidden=64, layers=1)
    more = taught(other, "train.steps=1")
    loaded = load_recipe(place / "rl.toml", overrides=more, kind="rl")
    (problem,) = [p for p in check_model(loaded) if p.level == "error"]
    assert "has another tokenizer" in problem.message and "tokens differ, such as" in problem.message
    with pytest.raises(CheckpointError, match="has another tokenizer"):
        begin(place, tmp_path, *more)


def test_a_text_that_cannot_be_revealed_names_the_key_and_the_row(place, tmp_path):
    with pytest.raises(DataError, match=r"truth\.nothing|no attribute|undefined") as caught:
        begin(place, tmp_path, *taught("start", 'teacher.reveal="{{ truth.nothing }}"', "train.steps=1", name="opsd"))
    assert "teacher.reveal" in str(caught.value.where)


def test_the_check_renders_the_revealed_text_and_the_checkpoint_is_no_key_to_set(place, tmp_path, tiny_folder):
    def problems(*overrides: str) -> list[str]:
        loaded = load_recipe(place / "rl.toml", overrides=overrides, kind="rl")
        found, _ = quick_look(loaded)
        return [p.message for p in found if p.level == "error"]

    own = ('algo.name="opsd"', 'teacher.path="start"')
    assert not problems(*own, 'teacher.reveal="{{ truth.same }}"')
    assert any("no attribute 'nothing'" in p for p in problems(*own, 'teacher.reveal="{{ truth.nothing }}"'))
    assert any("not valid Jinja" in p for p in problems(*own, 'teacher.reveal="{{ truth.same"'))
    (message,) = problems('algo.name="opd"', f'teacher.path="{tiny_folder}"', 'teacher.checkpoint="last"')
    assert message == "`teacher.checkpoint` is chosen when a run begins"
