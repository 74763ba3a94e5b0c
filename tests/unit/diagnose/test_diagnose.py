"""`runs diagnose`: each planted fault is named first or second, and a healthy run is called healthy."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import this_process
from hypothesis import given
from hypothesis import strategies as st
from reward_runs import LEVELS
from sick_runs import PROMPT, changed, look, make_run, mixed, plan

from vlmrl.diagnose.response_causes import FIELD, OPEN_TAG, ROLE_MARK, TURN_END, agrees
from vlmrl.diagnose.run import EXPLAINS, diagnose, ranked
from vlmrl.diagnose.run_facts import identity, read_facts
from vlmrl.diagnose.score_causes import truly_right
from vlmrl.diagnose.thresholds import (
    LIMITS,
    Cause,
    again,
    check_again,
    look_again,
    percent,
    reward_check,
    sft_first,
)
from vlmrl.errors import RewardUnavailable, StoreError
from vlmrl.recipe.key_fields import field_at, mark_of
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import ReadBy
from vlmrl.reward_check.texts import answer_of
from vlmrl.rewards.base import RewardSpec
from vlmrl.store.runs import create_run, open_run
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.pairs.task import write_trace


def right(truth, rng):
    return write_trace(truth, LEVELS, rng)


def sure(truth, rng):
    return re.sub("<answer>.*</answer>", f"<answer>{int(truth['same'])}</answer>", right(truth, rng))


def wrong(truth, rng):
    """Well formed and never right: the digits are swapped and the opposite is answered."""
    said = {"same": not truth["same"], "loop": ["no", "yes"][:: 1 if truth["same"] else -1], "digit": ["1", "8"]}
    text = right(said if truth["same"] else {"same": True, "loop": ["no", "no"], "digit": ["1", "1"]}, rng)
    return text.replace("</think>", " " * rng.randrange(9) + "</think>")


def hedge(rng):
    """Paid the same whatever the length: format and the Brier score of one half."""
    return f"<think>{'.' * rng.randrange(1, 40)}</think><answer>0.5</answer>"


def alike(truth):
    return f"<think>{truth['loop']}</think><answer>0.4</answer>"


def endless(truth, rng):
    return "<think>" + "the loop is open and " * rng.randrange(10, 30)


def other_spelling(truth, rng):
    """The names as `First=a; Second=b`, which the reward does not take."""
    text = mixed(truth, rng)
    for level in LEVELS:
        a, b = truth[level]
        text = text.replace(f"<{level}>{a}; {b}</{level}>", f"<{level}>First={a}; Second={b}</{level}>")
    return text


def without_think(truth, rng):
    return mixed(truth, rng).removeprefix("<think>")


def boxes(rng):
    return {"box": round(rng.random(), 3)}


def box_of(truth, rng):
    return f"<think>{'.' * rng.randrange(30)}</think><answer>{rng.random():.4f}</answer>"


def user_reward(score) -> RewardSpec:
    """A reward as a user writes one: parts by name, nothing known of their ranges."""
    return RewardSpec("mine", score, {"format": (0, 1), "answer": (0, 1)}, {"format": 0.2, "answer": 0.8}, pure=True)


def by_length(x):
    return {"format": 1.0, "answer": min(1.0, len(x.response) / 200)}


def one_part_stuck(x):
    right = load_reward("taxonomy", args={"levels": LEVELS}).fn(x)
    return {"format": right["format"], "answer": 0.0}


def by_text(x):
    """Pays the answer's text as it is written in the truth, as `exact_match` would."""
    return {"format": float("<answer>" in x.response), "answer": float(answer_of(x.response) == x.truth["answer"])}


def weighted(**weights) -> RewardSpec:
    return replace(load_reward("taxonomy", args={"levels": LEVELS}), weights=weights)


def collapsing(step):
    return {"reward/mean": 0.6 * 0.3**step}


def turned_around(x):
    said = float(answer_of(x.response) or 0.5)
    return {"format": 1.0, "answer": 1 - (said - (not x.truth["same"])) ** 2}


def down(x):
    if len(x.response) % 3:
        raise RewardUnavailable("no route to the judge")
    return {"format": 1.0, "answer": 1.0}


def capital(truth, rng):
    return f"<answer>{rng.choice(['Paris.', 'Rome.', 'Oslo.', 'Bern.'])}</answer>"


def other_city(x):
    return {"format": 1.0, "answer": float(answer_of(x.response) != x.truth["answer"])}


def growing(step):
    return {"policy/entropy": 0.8 * 0.3**step, "rollout/dead_group_share": min(1.0, 0.2 + 0.2 * step)}


def falling(step):
    return {"optim/lr": 0.03, "reward/mean": 0.6 * 0.3**step}


EQUAL = {
    s: {"eval/metric": 0.4, "eval/reward": 0.4, "eval/truncated": 0.0, "eval/response_tokens": 17.25} for s in (0, 6)
}
CITY = {
    "respond": lambda truth, rng: (
        f"<think>Hm{'.' * rng.randrange(30)}</think><answer>{truth['answer'].lower()}</answer>"
    ),
    "truth": lambda rng: {"answer": rng.choice(["Paris.", "Rome.", "Oslo.", "Bern."])},
    "spec": user_reward(by_text),
}

FAULTS = {
    "chat_template": plan(prompt="Same?", respond=endless, cut=lambda text: True),
    "prefilled_tag": plan(prompt=PROMPT + "<think>\n", respond=without_think),
    "cut_off": plan(respond=endless, cut=lambda text: True),
    "format_unmet": plan(respond=lambda truth, rng: f"They are {'the same' if rng.random() < 0.5 else 'different'}."),
    "other_layout": plan(respond=other_spelling),
    "other_layout of a table": plan(**CITY),
    "all_wrong": plan(respond=wrong),
    "all_right": plan(respond=sure),
    "constant_part": plan(spec=user_reward(one_part_stuck)),
    "constant_reward": plan(spec=user_reward(lambda x: {"format": 1.0, "answer": 0.3})),
    "zero_gradient": plan(metrics=lambda step: {"optim/grad_norm/vision": 0.0}),
    "zero_gradient of all": plan(metrics=lambda step: {"optim/grad_norm": 0.0}),
    "frozen": plan(trained={"vision": 300_000}, frozen={"language": 1_000_000}),
    "lr_small": plan(settings=["optim.lr=1e-12"], metrics=lambda step: {"optim/lr": 1e-12}),
    "lr_small though the recipe's is not": plan(metrics=lambda step: {"optim/lr": 0.0}),
    "lr_small though usual": plan(validations=EQUAL),
    "lr_large": plan(settings=["optim.lr=0.03"], metrics=falling),
    "engine_gap": plan(metrics=lambda step: {"policy/sampler_gap_mean": 0.05, "policy/sampler_ess": 0.4}),
    "pays_length": plan(spec=user_reward(by_length)),
    "dead_groups": plan(respond=lambda truth, rng: mixed(truth, rng) if truth["digit"] == ["8", "8"] else hedge(rng)),
    "few_distinct": plan(respond=lambda truth, rng: wrong(truth, rng) if rng.random() < 0.03 else alike(truth)),
    "temperature_low": plan(settings=["rollout.temperature=0.01"], respond=lambda truth, rng: alike(truth)),
    "temperature_high": plan(settings=["rollout.temperature=3.0"], respond=lambda truth, rng: rng.randbytes(9).hex()),
    "entropy_collapse": plan(metrics=growing),
    "one_answer": plan(respond=lambda truth, rng: hedge(rng)),
    "validation_is_training": plan(validated_rows=[f"{s}-{i:016x}" for s in (0, 1) for i in range(6)]),
    "failing_reward": plan(spec=user_reward(lambda x: {}["no such part"])),
    "constant_truth": plan(truth=lambda rng: {"same": True, "distance": 0, "loop": ["no", "no"], "digit": ["1", "1"]}),
    "pays_wrong": plan(spec=user_reward(turned_around)),
    "pays_wrong of a table": plan(**{**CITY, "respond": capital, "spec": user_reward(other_city)}),
    "stop_string": plan(
        settings=['rollout.stop=["</think>"]'], respond=lambda truth, rng: mixed(truth, rng).split("<answer>")[0]
    ),
    "unpaid": plan(spec=weighted(format=0.2, answer=0.0, loop=0.4, digit=0.4)),
    "unpaid but punished": plan(spec=weighted(answer=-1.0)),
    "few_pixels": plan(settings=["model.max_pixels=784", "model.min_pixels=784"], pixels=(640, 480)),
    "kl_large": plan(settings=["algo.kl_coef=100.0"], metrics=lambda step: {"policy/kl_coef": 100.0, "loss/kl": 0.02}),
    "kl_large in the reward": plan(metrics=lambda step: {"policy/kl_coef": 2.0, "policy/kl_in_reward": 0.3}),
    "entropy_coef": plan(settings=["algo.entropy_coef=3.0"], cut=lambda text: True, metrics=growing),
    "entropy_coef below 0": plan(settings=["algo.entropy_coef=-0.001"]),
    "overlong": plan(settings=["algo.overlong_tokens=39", "algo.overlong_penalty=20.0"]),
    "weight_decay": plan(settings=["optim.weight_decay=900.0"], metrics=collapsing),
    "clipped_gradient": plan(settings=["optim.max_grad_norm=1e-7"], validations=EQUAL),
    "ratio_clipped": plan(settings=["algo.clip_low=1e-9"], metrics=lambda step: {"policy/clip_share": 0.45}),
    "importance_masks": plan(metrics=lambda step: {"policy/importance_weight": 0.2}),
    "service_down": plan(spec=user_reward(down)),
    "service_down at the end": plan(error="the reward was unavailable for 8 samples, which were left out: no route"),
    "failing_reward in the first step": plan(
        error="reward `r.py:f` raised KeyError: 'x' (digits row digits-1 sample 0)", steps=0
    ),
    "failed": plan(error="the gradient is not finite (inf) although the loss is; the weights were not changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_first_or_second(fault, tmp_path):
    found = look(make_run(tmp_path, FAULTS[fault]))
    named = [c.name for c in found.causes]
    assert fault.split()[0] in named[:2], named
    assert not found.healthy
    assert all(c.command.startswith("vlmrl ") and c.what for c in found.causes)


@pytest.mark.slow
def test_a_task_that_is_learned_is_healthy(tmp_path):
    """Fewer texts a prompt and more dead groups are what learning looks like, when the reward rises."""
    metrics = lambda step: {"reward/mean": 0.5 + 0.03 * step, "rollout/dead_group_share": min(0.95, 0.08 * step)}  # noqa: E731
    drawn = iter(range(10**6))

    def respond(truth, rng):
        fresh = next(drawn) < 2 * 36  # the first two steps of 6 prompts x 6 samples
        return mixed(truth, rng) if fresh else right(truth, random.Random(0))

    learned = plan(steps=16, metrics=metrics, respond=respond)
    found = look(make_run(tmp_path / "rises", learned))
    assert found.healthy and "few_distinct" in [c.name for c in found.causes], [c.what for c in found.causes]
    for name, rise in (("does not", 0.0), ("by chance", 0.002)):  # 0.02 over the thirds; scores reach from 0 to 1
        drawn = iter(range(10**6))
        flat = replace(learned, metrics=lambda step, rise=rise: metrics(step) | {"reward/mean": 0.5 + rise * step})
        assert not look(make_run(tmp_path / name, flat)).healthy


def test_a_run_without_images_is_healthy_though_the_tower_learns_nothing(tmp_path):
    blind = lambda step: {"optim/grad_norm/vision": 0.0}  # noqa: E731
    found = look(make_run(tmp_path / "text", plan(metrics=blind, pixels=None)))
    assert found.healthy and [(c.name, c.level) for c in found.causes] == [("no_images", "note")]
    assert found.causes[0].what.endswith("no row has an image")
    assert not look(make_run(tmp_path / "images", plan(metrics=blind))).healthy


def test_a_setting_of_reinforcement_is_no_cause_in_a_supervised_run_which_does_not_read_it(tmp_path):
    run = make_run(tmp_path, FAULTS["entropy_coef"])
    assert "entropy_coef" in [c.name for c in look(run).causes]
    assert "entropy_coef" not in [c.name for c in changed(run, kind="sft").causes]


def test_a_supervised_run_is_advised_no_key_that_only_reinforcement_reads(tmp_path):
    metrics = {"policy/clip_share": 0.9, "policy/importance_weight": 0.1, "policy/kl_coef": 50.0}
    run = make_run(tmp_path, plan(metrics=lambda step: {**metrics, "policy/entropy": 2.0 * (step < 3), "optim/lr": 0}))
    for file in run.dir.glob("rollouts/*"):
        file.unlink()
    keys = {"rl": set(), "sft": set()}
    for kind in keys:
        for cause in changed(run, kind=kind).causes:
            keys[kind] |= set(re.findall(r"--set (\S+?)=", cause.command))
    reader = lambda key: mark_of(field_at(Recipe, tuple(key.split("."))), ReadBy)  # noqa: E731
    assert "algo.entropy_coef" in keys["rl"] and "optim.schedule" in keys["sft"]
    assert not [key for key in keys["sft"] if key.startswith("algo.") or reader(key)]


@pytest.mark.parametrize(
    ("means", "named"),
    [
        ([0.6] * 6 + [0.1] * 6, True),
        ([0.3, 0.02, 0.1, 0.02] * 2 + [0.02, 0.1, 0.02, 0.01], False),  # the steps differ by as much
        ([0.6, 0.3, 0.1], False),  # one step against one
    ],
)
def test_a_collapse_is_a_fall_that_is_no_noise_and_no_key_is_advised_that_is_set(means, named, tmp_path):
    metrics, settings = (lambda step: {"reward/mean": means[step]}), ["algo.kl_coef=0.01"]
    run = make_run(tmp_path, plan(steps=len(means), metrics=metrics, settings=settings))
    causes = [c for c in look(run).causes if c.name == "collapse"]
    assert bool(causes) == named
    assert all("a larger algo.kl_coef" in c.evidence[0] for c in causes)


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        ([6.9, 0.85, 0.93, 0.97], True),
        ([6.9, 0.98, 0.85, 0.97, 0.86], False),  # it came back
        ([6.9, 0.9, 0.85, 0.97], False),  # one validation may be noise
        ([6.9, 0.9, 0.85, 0.86, 0.86], False),
        ([0.8, 0.9, 0.97], False),  # `no_better_validation` says so
    ],
)
def test_a_validation_loss_that_rises_again_is_named_with_its_best(losses, named, tmp_path):
    run = make_run(tmp_path, plan(validations={10 * i: {"eval/metric": v} for i, v in enumerate(losses)}))
    best = {"step": 10 * losses.index(min(losses)), "metric": "loss", "value": min(losses)}
    causes = [c for c in changed(run, kind="sft", best=best).causes if c.name == "overfitting"]
    assert bool(causes) == named
    if named:
        assert causes[0].what == "the validation loss rose again: 0.850 at step 10, 0.970 at the end"
        assert causes[0].command.endswith("--set train.steps=10")  # no checkpoint is kept
        kept = run.dir / "checkpoints" / "step-000010"
        kept.mkdir(parents=True)
        (kept / "COMPLETE").touch()
        assert look(run).causes[0].command == f"vlmrl merge {run.dir}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        (["algo.clip_low=1e-9"], "algo.clip_low=0.2 --set algo.clip_high=0.28"),
        (["algo.name=gspo", "algo.clip_low=1e-9"], "algo.clip_low=0.0003 --set algo.clip_high=0.0004"),
        ([], "train.updates_per_step=1"),
    ],
)
def test_the_bounds_to_go_back_to_are_those_of_the_algorithm(settings, bounds, tmp_path):
    run = make_run(tmp_path, plan(settings=settings, metrics=lambda step: {"policy/clip_share": 0.45}))
    (cause,) = [c for c in look(run).causes if c.name == "ratio_clipped"]
    assert cause.command.endswith(bounds)


@pytest.mark.parametrize(
    ("settings", "command"), [(["algo.importance_cap=1.001"], "importance_cap=2.0"), ([], "--deep")]
)
def test_the_usual_cap_is_advised_only_where_a_narrower_one_was_set(settings, command, tmp_path):
    run = make_run(tmp_path, plan(settings=settings, metrics=lambda step: {"policy/importance_weight": 0.1}))
    (cause,) = [c for c in look(run).causes if c.name == "importance_masks"]
    assert command in cause.command


def test_responses_whose_reward_failed_are_in_no_mean(tmp_path):
    def score(x):
        if "x" in x.response:
            raise ValueError("no x please")
        return {"format": 1.0, "answer": 0.5}

    found = look(make_run(tmp_path, plan(spec=user_reward(score), cut=lambda text: True)))
    assert "failing_reward" in [c.name for c in found.causes] and "nan" not in str(found.as_dict())


@pytest.mark.slow
def test_a_service_that_is_down_is_no_bug_of_the_reward(tmp_path):
    found = look(make_run(tmp_path, plan(spec=user_reward(down))))
    (cause,) = [c for c in found.causes if c.name == "service_down"]
    assert cause.level == "error" and "failing_reward" not in [c.name for c in found.causes]
    assert cause.evidence[-1].endswith("no route to the judge")
    for lost, level in ((2, "note"), (4, "warning")):  # of 6 steps of 36 samples
        run = make_run(tmp_path / str(lost), plan(metrics=lambda step, n=lost: {"reward/unavailable": n * (step == 3)}))
        (cause,) = [c for c in look(run).causes if c.name == "service_down"]
        assert cause.level == level and cause.evidence[0].endswith("of the samples, in 1 step")


def test_a_healthy_run_is_called_healthy(tmp_path):
    found = look(make_run(tmp_path, plan(validated_rows=["9-0000000000000000"])))
    assert found.causes == [] and found.healthy and found.notes == []


@pytest.mark.parametrize(
    ("values", "best", "words"),
    [
        ([0.35, 0.3], 0, "reward 0.350 at step 0, 0.300 at step 1, the last"),
        ([0.35, 0.3, 0.35], 2, "reward 0.350 at step 0, 0.350 at step 2, the last"),  # a tie is no progress
        ([0.35, 0.4, 0.3], 1, None),
        ([0.35], 0, None),
    ],
)
def test_a_run_whose_start_is_its_best_has_a_note(values, best, words, tmp_path):
    run = make_run(tmp_path, plan(validations={step: {"eval/metric": v} for step, v in enumerate(values)}))
    found = changed(run, best={"step": best, "metric": "reward", "value": values[best]})
    expected = [("note", f"no validation was better than the start: {words}")] if words else []
    assert [(c.level, c.what) for c in found.causes] == expected and found.healthy


def test_the_status_of_a_killed_run_is_killed(tmp_path):
    run = make_run(tmp_path, plan())
    found, killed = changed(run, status="running"), open_run(run.dir.parent, run.id)
    assert killed.manifest.status == "running" and found.status == killed.status == "killed"


def test_ids_given_by_the_user_count_as_a_whole():
    assert identity("train-0001", ["aa"]) != identity("validation-0001", ["aa"])
    assert identity("one-00000000000000ff", ["aa"]) == identity("two-00000000000000ff", ["aa"])
    assert identity("one-00000000000000ff", ["aa"]) != identity("one-00000000000000ff", ["bb"])


def test_the_command_shows_causes_rows_and_what_to_type(tmp_path):
    run = make_run(tmp_path, FAULTS["other_layout"])
    told = this_process("runs", "diagnose", "ill", "--runs", run.dir.parent, cwd=tmp_path)
    assert told.code == 0 and told.err == ""
    assert "1. error: right labels earn nothing" in told.out and "First=" in told.out
    assert f"next: vlmrl reward-check {run.manifest.name}" in told.out and ", a consequence of cause 1: " in told.out
    found = this_process("runs", "diagnose", "ill", "--runs", run.dir.parent, "--json", cwd=tmp_path).json
    assert found["causes"][0]["name"] == "other_layout" and not found["healthy"]
    well = make_run(tmp_path / "well", plan())
    assert "no fault found" in this_process("runs", "diagnose", well.dir, cwd=tmp_path).out
    falling = make_run(tmp_path / "flat", plan(metrics=lambda step: {"reward/mean": 0.5 - step / 100}))
    words = "no fault found, but no rise of the reward in 6 steps either\n"
    assert this_process("runs", "diagnose", falling.dir, cwd=tmp_path).out.endswith(words)


def test_a_run_without_updates_says_so_and_not_that_the_rate_is_zero(tmp_path):
    run = make_run(tmp_path, FAULTS["constant_reward"])
    told = this_process("runs", "diagnose", run.dir, cwd=tmp_path).out
    assert "(none of them with an update)" in told and "no update was made in 6 steps" in told
    assert "lr 0" not in told and "gradient 0" not in told and "learning rate" not in told
    named = [c.name for c in look(run).causes]
    assert "no_updates" in named and "zero_gradient" not in named and "lr_small" not in named


def test_steps_without_an_update_do_not_count_for_the_learning_rate(tmp_path):
    """Of 6 steps the first 3 are dead: older versions wrote 0 as their rate, which is none of the updates'."""
    only_dead = {"rollout/dead_group_share": 1.0, "optim/grad_norm": None, "optim/lr": 0.0, "optim/updates": 0}
    found = look(make_run(tmp_path, plan(metrics=lambda step: only_dead if step < 3 else {})))
    assert found.figures["lr"] == [1e-4, 1e-4] and found.healthy
    assert found.read.startswith("6 steps of metrics (3 of them with an update)")


def test_a_rate_of_zero_over_real_updates_is_named_with_what_to_change(tmp_path):
    found = look(make_run(tmp_path, FAULTS["lr_small though the recipe's is not"]))
    assert found.causes[0].what == "the learning rate is 0 in all 6 updates: the weights never change"
    assert found.causes[0].command.endswith("--set optim.schedule=constant")


def test_a_response_cannot_write_to_the_terminal(tmp_path):
    run = make_run(
        tmp_path,
        plan(respond=lambda truth, rng: "\x1b[2J\x9b31m\u202e\u4e2d\u6587" + endless(truth, rng), cut=lambda t: True),
    )
    told = this_process("runs", "diagnose", run.dir, cwd=tmp_path).out
    assert "\\u001b[2J" in told and "\x1b" not in told and "\x9b" not in told and "\\u202e" in told
    assert "\u4e2d\u6587" in told, "text of any script is shown as it is"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("<answer>0.9</answer>", {"same": True}, True),
        ("<answer>0.9</answer>", {"same": False}, False),
        ("<answer>0.5</answer>", {"same": True}, None),
        ("<answer>yes</answer>", {"same": True}, None),
        ("<answer>7</answer>", {"same": True}, None),
        ("no tag, and far too long to be an answer as a whole", {}, None),
        ("<answer>4</answer>", {"answer": 4}, True),
        ("<answer>paris</answer>", {"label": "Paris."}, True),
        ("\\boxed{5}", {"solution": "4"}, False),
        ("<answer>4</answer>", {"level": 4}, None),
    ],
)
def test_what_is_right_by_the_truth_alone(text, truth, right, tmp_path):
    facts = read_facts(make_run(tmp_path, plan(steps=1)))
    assert truly_right(replace(facts.responses[0], text=text, truth=truth)) is right


def test_right_is_what_the_reward_pays_where_its_part_says_so(tmp_path):
    """The answers are right by the truth and the part `answer` is 0 for all: for the run, all of them are wrong."""
    found = look(make_run(tmp_path, plan(spec=user_reward(one_part_stuck))))
    assert found.causes[0].name == "all_wrong" and "constant_part" in found.causes[0].follows


def test_a_closed_think_tag_is_named_also_when_most_responses_open_one_more(tmp_path):
    def respond(truth, rng):
        return "<think>" * (rng.random() < 0.9) + "." * rng.randrange(30) + "</think></think><answer>0.4</answer>"

    run = make_run(tmp_path, plan(prompt=PROMPT + "<think>\n\n</think>\n\n", respond=respond))
    first = look(run).causes[0]
    assert (first.name, first.level) == ("prefilled_tag", "error") and "--set 'model.thinking=\"on\"'" in first.command
    settings = ['model.thinking="on"']
    run = make_run(tmp_path / "on", plan(prompt=PROMPT + "<think>\n\n</think>\n\n", respond=respond, settings=settings))
    assert "thinking" not in look(run).causes[0].command  # it is on already: nothing to switch


def test_a_users_reward_that_reads_other_tags_is_to_be_checked_not_taught(tmp_path):
    def verdict(x):
        found = re.search("<verdict>(same|different)</verdict>", x.response)
        return {"format": float(found is not None), "answer": 0.0}

    spec = replace(user_reward(verdict), name="mine.py:verdict")
    first = look(make_run(tmp_path, plan(spec=spec))).causes[0]
    assert first.name == "format_unmet" and first.command.startswith("vlmrl reward-check ")
    assert any("the responses do write <answer>" in line for line in first.evidence), first.evidence
    silent = replace(
        user_reward(lambda x: {"format": 1.0, "answer": 0.0}), name="mine.py:silent", weights={"answer": 1.0}
    )
    first = look(make_run(tmp_path / "silent", plan(spec=silent))).causes[0]
    assert (
        first.name == "all_wrong"
        and first.command.endswith("--probe")
        and "no response earns more than 0" in str(first.evidence)
    )


def test_a_reward_by_degree_is_not_called_wrong_for_being_low(tmp_path):
    """An overlap of 0.1 to 0.5 teaches, though no response reaches one half of what could be earned."""
    spec = user_reward(lambda x: {"format": 1.0, "answer": 0.1 + 0.4 * (zlib.crc32(x.response.encode()) % 97) / 97})
    found = look(make_run(tmp_path, plan(spec=spec, truth=boxes, respond=box_of)))
    assert found.healthy, [c.what for c in found.causes]


def test_what_a_cause_explains_stands_behind_it(tmp_path):
    found = look(make_run(tmp_path, FAULTS["cut_off"]))
    first, rest = found.causes[0], [c.name for c in found.causes[1:]]
    assert first.name == "cut_off" and "format_unmet" in first.follows and set(first.follows) <= set(rest)
    runs = f"--runs {tmp_path}/runs"  # not where runs are looked for from here
    assert first.command == f"vlmrl try r.toml {runs} --set rollout.max_new_tokens=160", first.command
    assert any("repeat themselves" in line for line in first.evidence)
    assert first.rows[0]["where"].startswith("step 1, row digits-0-") and first.rows[0]["note"]


def test_the_next_command_is_the_runs_own_with_the_setting_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("VLMRL_RUNS", str(tmp_path / "runs"))
    facts = read_facts(make_run(tmp_path, plan(steps=1)))
    words = "vlmrl train r.toml --name ill --set optim.lr=1e-3 --gpus=2 --quiet --runs elsewhere --set train.steps=9"
    facts.run.manifest = replace(facts.manifest, argv=tuple(words.split()))
    kept = "--set optim.lr=1e-05 --set train.steps=9"
    assert again(facts, "optim.lr=1e-05") == f"vlmrl train r.toml --gpus 2 {kept}"
    assert look_again(facts, "optim.lr=1e-05") == f"vlmrl try r.toml {kept}"
    assert check_again(facts) == "vlmrl check --deep r.toml --set optim.lr=1e-3 --set train.steps=9"
    facts.run.manifest = replace(facts.manifest, argv=("vlmrl", "demo"))  # no command to repeat: its recipe is kept
    assert again(facts) == f"vlmrl train {facts.run.dir}/recipe.toml"
    assert (facts.key, reward_check(facts)) == ("ill", "vlmrl reward-check ill")
    parent, attempt = {"run": "start", "checkpoint": "step-000066", "step": 66}, facts.manifest.attempts[0]
    fork = {"parent": parent, "origin": {}, "attempts": (replace(attempt, from_step=66),)}
    facts.run.manifest = replace(facts.manifest, argv=("vlmrl", "train", "r.toml", "--from", "last"), **fork)
    assert again(facts, "a=1") == "vlmrl train r.toml --from start@66 --set a=1"


def test_the_next_command_runs_as_printed_in_another_folder_and_with_other_runs(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    facts = read_facts(make_run(tmp_path / "a b", plan(steps=1)))
    runs = shlex.quote(str(tmp_path / "a b" / "runs"))
    here = shlex.quote(os.getcwd())
    assert look_again(facts) == f"vlmrl try r.toml --runs {runs}"
    assert reward_check(facts) == f"vlmrl reward-check {shlex.quote(str(facts.run.dir))}"
    monkeypatch.chdir(tmp_path / "a b")  # where `runs` is the default, but the recipe was named from elsewhere
    assert look_again(facts) == f"cd {here} && vlmrl try r.toml --runs {runs}"
    assert sft_first(facts) == f"cd {here} && vlmrl sft r.toml --runs {runs} --set kind=sft"
    assert reward_check(facts, "--probe") == "vlmrl reward-check ill --probe"
    facts.run.manifest = replace(facts.manifest, cwd=str(tmp_path / "a b"))
    assert look_again(facts) == "vlmrl try r.toml" and again(facts, "a=1") == "vlmrl train r.toml --set a=1"
    facts.run.manifest = replace(facts.manifest, cwd=str(tmp_path / "gone"))
    assert look_again(facts) == "vlmrl try r.toml"


def test_causes_are_ranked_by_what_explains_them_then_level_then_weight():
    made = [
        ("dead_groups", "error", 1.0),
        ("frozen", "note", 0.9),
        ("cut_off", "error", 0.6),
        ("engine_gap", "error", 0.7),
    ]
    causes = [Cause(name, level, "", "vlmrl", weight) for name, level, weight in made]
    assert [c.name for c in ranked(causes)] == ["engine_gap", "cut_off", "frozen", "dead_groups"]


def test_boxes_in_other_coordinates_are_an_error_with_advice(tmp_path):
    run = make_run(tmp_path, plan(respond=wrong))
    found = {"better": {"space": "pixels", "order": "yxyx"}, "words": "these boxes would fit pixels", "advice": "do so"}
    for name, positions in (("a-step-000002", {"better": None}), ("a-step-000004", found)):
        folder = run.dir / "eval" / name
        folder.mkdir(parents=True)
        summary = {"schema": 1, "metrics": {}, "meta": {"during": True}, "positions": positions}
        (folder / "summary.json").write_text(json.dumps(summary))
    first = diagnose(run).causes[0]
    assert (first.name, first.level, first.evidence) == ("other_coordinates", "error", ["do so"])
    assert "a-step-000004" in first.what and "these boxes would fit pixels" in first.what


def test_a_format_that_nothing_depends_on_is_no_cause(tmp_path):
    plain = plan(respond=lambda truth, rng: sure(truth, rng).partition("</think>")[2])
    unpaid = replace(plain, spec=user_reward(lambda x: {"think_format": 0.0, "answer": float("1" in x.response)}))
    unpaid = replace(unpaid, spec=replace(unpaid.spec, weights={"think_format": 0.0, "answer": 1.0}))
    assert "format_unmet" not in {c.name for c in diagnose(make_run(tmp_path / "a", unpaid)).causes}
    unnamed = replace(unpaid, spec=replace(unpaid.spec, weights={"answer": 1.0}))
    assert not {"format_unmet", "constant_part"} & {c.name for c in diagnose(make_run(tmp_path / "c", unnamed)).causes}
    paid = replace(unpaid, spec=replace(unpaid.spec, weights={"think_format": 0.1, "answer": 1.0}))
    assert "format_unmet" in {c.name for c in diagnose(make_run(tmp_path / "b", paid)).causes}


def test_every_threshold_has_a_reason_and_every_explanation_a_rule():
    assert all(limit.why for limit in LIMITS.values())
    files = [p for p in Path("vlmrl/diagnose").glob("*.py") if p.stem not in ("run", "run_facts")]
    source = "".join(p.read_text() for p in files)
    for name in {*EXPLAINS, *(n for follows in EXPLAINS.values() for n in follows)}:
        assert f'"{name}"' in source, name
    assert all(f'"{name}"' in source.replace(f'"{name}": Bound', "") for name in LIMITS)


def hacked(since):
    """Prose that is rarely right; in ever more of the responses from a step on, digits that the reward pays."""
    drawn = iter(range(10**6))

    def respond(truth, rng):
        share = (next(drawn) // 36 - since + 1) / 4
        if rng.random() < share:
            return "".join(rng.choices("3134", k=90))
        return " ".join(rng.choices(["look", "at", "both", "shapes", "and", "count", "rings"], k=18))

    return respond


def pays_digits(x):
    return {"score": 0.99 if x.response[0].isdigit() else 0.2, "acc": float(len(x.response) % 5 == 0)}


DIGITS = replace(user_reward(pays_digits), ranges={}, weights={"score": 1.0})


def acc(step):
    """An accuracy of 0.2, with the noise of a step."""
    return {"reward/accuracy": 0.2 + 0.05 * (-1) ** step}


@pytest.mark.slow
def test_a_hacked_reward_is_named_first_with_its_step_and_examples(tmp_path):
    """The metrics hold no `health/...`: they are measured from the rollouts. Once these are pruned, the metrics do."""
    run = make_run(tmp_path, plan(steps=40, respond=hacked(14), spec=DIGITS, metrics=acc))
    assert not any(n.startswith("health/") for n in run.metrics("train")[-1])
    found = look(run)
    first = found.causes[0]
    assert first.name == "reward_without_accuracy" and first.level == "error" and "characters" in first.follows
    told = re.search(r", from step (\d+) on$", first.what)
    assert told and 15 <= (step := int(told.group(1))) <= 18, first.what
    before = [r for r in first.rows if r["where"].startswith("before, step ")]
    after = [r for r in first.rows if r["where"].startswith("after, step 40")]
    assert len(before) == len(after) == 2 and len(first.rows) == 4
    assert all(r["text"][0].isdigit() for r in after) and f"step {step - 1}," in before[0]["where"]
    digits = next(c for c in found.causes if c.name == "characters")
    assert re.match(r"digits grew from .*% to 100%", digits.what), digits.what
    for file in run.rollout_files().values():
        file.unlink()
    pruned = look(run).causes[0]
    assert pruned.name == "reward_without_accuracy" and pruned.rows == []


@pytest.mark.slow
def test_the_same_run_with_an_accuracy_that_rises_is_healthy_of_it(tmp_path):
    rises = lambda step: {"reward/accuracy": 0.2 + 0.7 * (step >= 15)}  # noqa: E731
    found = look(make_run(tmp_path, plan(steps=40, respond=hacked(14), spec=DIGITS, metrics=rises)))
    assert not {"reward_without_accuracy", "characters"} & {c.name for c in found.causes}


@pytest.mark.slow
def test_groups_dead_for_many_steps_are_told_with_the_step(tmp_path):
    dead = lambda step: {"rollout/dead_group_share": float(step >= 5)}  # noqa: E731
    found = look(make_run(tmp_path, plan(steps=18, metrics=dead)))
    (cause,) = [c for c in found.causes if c.name == "no_signal"]
    assert cause.what.endswith("13 steps in a row: they taught nothing, from step 6 on") and cause.level == "warning"


@pytest.mark.slow
def test_a_cause_in_the_metrics_names_the_step_it_began_at(tmp_path):
    gap = lambda step: {"policy/sampler_gap_mean": 1e-6 if step < 5 else 0.05}  # noqa: E731
    found = look(make_run(tmp_path / "gap", plan(steps=12, metrics=gap)))
    (cause,) = [c for c in found.causes if c.name == "engine_gap"]
    assert "from step 6 on: 1e-06 on average before, 0.05 since" in cause.evidence
    always = lambda step: {"policy/sampler_gap_mean": 0.05}  # noqa: E731
    (cause,) = [c for c in look(make_run(tmp_path / "always", plan(metrics=always))).causes if c.name == "engine_gap"]
    assert not any("from step" in line for line in cause.evidence)


def test_a_run_without_steps_says_so(tmp_path):
    run = create_run(tmp_path, kind="rl", recipe_name="r")
    run.finish("done")
    with pytest.raises(StoreError, match="no steps yet"):
        diagnose(open_run(tmp_path, run.id))


def test_a_damaged_rollout_file_is_left_out_and_said(tmp_path):
    run = make_run(tmp_path, plan())
    (run.dir / "rollouts" / "000003.parquet").write_bytes(b"PAR1 no")
    found = look(run)
    assert len(found.notes) == 1 and "000003.parquet was left out" in found.notes[0] and found.healthy


@pytest.mark.parametrize(
    ("said", "true", "why"),
    [
        ("Image1=3; Image2=8", "3; 8", "the response names the images"),
        ("corvus, pica", "Corvus; Pica", "case, spaces, punctuation or separators"),
        ("paris", "Paris.", "case, spaces, punctuation or separators"),
        ("Sub-Adult", "SubAdult", "case, spaces, punctuation or separators"),
        ("1.0000", "1", "the number is written differently"),
        ("yes", "true", "another word for yes or no"),
        ("5", "<answer>5</answer>", "the truth still has its tags"),
        ("1.0000", "1; sameSpecies; Corvus", "the truth holds several values in one text"),
        ("a; b", "1; a; b", "the truth holds several values in one text"),
        ("Corvus; Pica", "Pica; Corvus", ""),  # another order is another answer
        ("3; 8", "3; 8", ""),  # nothing is spelled otherwise
        ("0.5", "1; sameSpecies; Corvus", ""),
        ("1.5", "15", ""),
        ("", "", ""),
    ],
)
def test_spellings_of_one_label(said, true, why):
    assert agrees(said, true) == why


@pytest.mark.slow
@given(st.text(max_size=80), st.text(max_size=80))
def test_labels_and_answers_of_any_text_are_read_without_an_error(one, other):
    agrees(one, other)
    answer_of(one)
    assert agrees(one, one) == ""


def test_texts_made_to_be_slow_are_read_in_a_moment():
    texts = [
        "<answer>" + " " * 200_000 + "x",
        "<answer>" * 50_000,
        "<a>" * 50_000,
        "image" * 50_000 + "=",
        "<" * 200_000,
    ]
    begin = time.process_time()
    for text in texts:
        answer_of(text)
        agrees(text[:200], text)
        FIELD.findall(text)
        TURN_END.search(text)
        OPEN_TAG.search(text)
        ROLE_MARK.search(text)
    assert time.process_time() - begin < 5


def test_shares_are_never_rounded_to_none_or_all():
    assert [percent(x) for x in (0.0, 0.002, 0.5, 0.998, 1.0)] == ["0%", "0.20%", "50%", "99.80%", "100%"]
