"""`recipe import`: configurations of EasyR1, verl and TRL in their own key names, and files that are none."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from imported_recipes import imported, left

from vlmrl.errors import VlmrlError
from vlmrl.recipe.checks import check_unprepared
from vlmrl.recipe.imports.read import plain_value, read_foreign
from vlmrl.recipe.imports.run import import_recipe
from vlmrl.setup.catalogs import catalogs

EASYR1_YAML = """
data:
  train_files: someone/pairs-800px@train
  val_files: someone/pairs-800px@train
  prompt_key: problem
  answer_key: answer
  max_prompt_length: 2048
  max_response_length: 1024
  rollout_batch_size: 512
  min_pixels: 262144
  filter_overlong_prompts: true
algorithm:
  adv_estimator: grpo
  use_kl_loss: true
  kl_penalty: low_var_kl
  kl_coef: 1.0e-2
worker:
  actor:
    global_batch_size: 128
    micro_batch_size_per_device_for_update: 4
    model: {model_path: Qwen/Qwen2.5-VL-3B-Instruct, freeze_vision_tower: false}
    optim: {lr: 1e-6, weight_decay: 1.0e-2, strategy: adamw_bf16}
  rollout: {n: 5, temperature: 1.0, top_p: 1.0, tensor_parallel_size: 2, val_override_config: {temperature: 0.6}}
  reward: {reward_type: batch, reward_function: "reward.py:compute_score"}
trainer: {total_epochs: 15, val_before_train: false, val_freq: 5, save_freq: -1, save_limit: 3, n_gpus_per_node: 8,
          experiment_name: first}
"""
LAUNCH = """#!/bin/bash
set -x
MODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct # replace it
python3 -m verl.trainer.main \\
    config=examples/config.yaml \\
    data.train_files=someone/fungi@train \\
    worker.actor.model.model_path=${MODEL_PATH} \\
    worker.actor.global_batch_size=48 \\
    data.rollout_batch_size=48 \\
    worker.rollout.n=16 \\
    data.answer_key=answer_im \\
    trainer.max_steps=40 \\"""
VERL = """set -x
export lr=2e-6
python3 -m verl.trainer.main_ppo --config-path=config \\
  algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \\
  data.train_files=$HOME/data/geo3k/train.parquet data.val_files=$HOME/data/geo3k/test.parquet \\
  data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 data.image_key=images \\
  actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.actor.optim.lr=${lr} \\
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \\
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
  actor_rollout_ref.actor.kl_loss_type=mse actor_rollout_ref.actor.clip_ratio_high=0.28 \\
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \\
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.top_p=0.9 \\
  +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \\
  custom_reward_function.path=my_reward.py custom_reward_function.name=score \\
  trainer.test_freq=5 trainer.save_freq=20 trainer.total_training_steps=200 \\
  trainer.logger='["console","tensorboard"]' $@
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen3-VL-4B-Instruct
dataset_name: someone/openr1
learning_rate: 1.0e-5
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 1024
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: none
num_train_epochs: 2
warmup_ratio: 0.03
lr_scheduler_type: cosine
use_vllm: true
vllm_mode: colocate
use_peft: true
lora_r: 64
lora_alpha: 128
lora_target_modules: [q_proj, v_proj]
reward_funcs: [accuracy_reward, format_reward]
reward_weights: [1.0, 0.5]
mask_truncated_completions: true
bf16: true
output_dir: out
"""


def keys(found) -> set[str]:
    return {item["key"] for item in found}


def test_a_row_that_is_too_long_is_not_handled_as_there(tmp_path):
    report = imported(tmp_path, EASYR1_YAML, "config.yaml", rows=5120)[1]
    assert "no row is dropped" in left(report)["data.filter_overlong_prompts"]
    assert "data.filter_overlong_prompts" not in report["as_here"]


def test_a_tower_without_adapters_is_not_frozen_once_more(tmp_path):
    text = EASYR1_YAML.replace("freeze_vision_tower: false", "freeze_vision_tower: true, lora: {rank: RANK}")
    with_lora, report = imported(tmp_path, text.replace("RANK", "8"), "config.yaml", rows=5120)
    assert with_lora.recipe.model.freeze == [] and with_lora.recipe.lora.rank == 8
    assert "with [lora]" in left(report)["worker.actor.model.freeze_vision_tower"]
    whole = imported(tmp_path, text.replace("RANK", "0"), "config.yaml", rows=5120)[0]
    assert whole.recipe.model.freeze == ["vision", "connector"]


def test_a_default_of_an_argument_of_the_script_is_put_in(tmp_path):
    text = f"ENGINE=${{1:-vllm}}\n{VERL.replace('rollout.name=vllm', 'rollout.name=$ENGINE')}"
    loaded, report = imported(tmp_path, text, "run.sh", rows=512)
    assert loaded.recipe.rollout.engine == "vllm" and not any("ENGINE" in note for note in report["notes"])


def test_an_easyr1_configuration(tmp_path):
    loaded, report = imported(tmp_path, EASYR1_YAML, "config.yaml", rows=5120)
    r = loaded.recipe
    assert (r.model.path, r.data[0].path) == ("Qwen/Qwen2.5-VL-3B-Instruct", "hub:someone/pairs-800px")
    assert (r.rollout.prompts_per_step, r.rollout.samples_per_prompt, r.train.updates_per_step) == (512, 5, 512 // 128)
    assert (r.rollout.max_prompt_tokens, r.rollout.max_new_tokens, r.rollout.engine) == (2048, 1024, "vllm")
    assert r.rollout.tensor_parallel == 2
    assert (r.algo.name, r.algo.kl, r.algo.kl_in, r.algo.kl_coef) == ("easyr1", "low_var_kl", "loss", 0.01)
    assert (r.algo.clip_low, r.algo.clip_high, r.algo.dual_clip) == (0.2, 0.3, 3.0)
    assert (r.optim.lr, r.optim.weight_decay, r.optim.name) == (1e-6, 0.01, "adamw_bf16_kahan")
    assert r.train.steps == 15 * (5120 // 512)
    assert (r.eval.every_steps, r.checkpoint.every_steps, r.checkpoint.keep_last) == (5, 0, 3)
    assert not r.eval.at_start  # val_before_train
    assert (r.reward.name, r.reward.style) == ("reward.py:compute_score", "easyr1")
    assert r.data[0].validation is None and "data.val_files" in keys(report["left_out"])  # it was the train split
    assert {"train.updates_per_step", "rollout.max_prompt_tokens", "data.path"} <= keys(report["changed"])
    why = left(report)
    assert "greedy" in why["worker.rollout.val_override_config.temperature"]
    assert why["trainer.n_gpus_per_node"].endswith("--gpus 8") and why["trainer.experiment_name"].endswith(
        "--name first"
    )
    assert "no counterpart is known" not in why.values()


def test_an_easyr1_launch_script_with_its_configuration_beside_it(tmp_path):
    (tmp_path / "examples" / "fungi").mkdir(parents=True)
    (tmp_path / "examples" / "config.yaml").write_text(EASYR1_YAML)
    loaded, report = imported(tmp_path / "examples" / "fungi", LAUNCH, "run.sh")
    assert report["system"] == "easyr1" and any("settings of" in note for note in report["notes"])
    r = loaded.recipe
    assert (r.model.path, r.train.steps, r.rollout.samples_per_prompt) == ("Qwen/Qwen2.5-VL-7B-Instruct", 40, 16)
    assert (r.rollout.max_new_tokens, r.train.updates_per_step) == (1024, 1)  # of the file, and of the script over it
    assert r.data[0].columns["answer"] == "answer_im"


def test_an_easyr1_launch_script_alone(tmp_path):
    loaded, report = imported(tmp_path, LAUNCH, "run.sh")
    assert loaded.recipe.rollout.max_new_tokens == 2048 and loaded.recipe.algo.kl_coef == 0.01  # of EasyR1's example
    assert any("examples/config.yaml" in todo for todo in report["todo"])


def test_a_verl_launch_script(tmp_path):
    loaded, report = imported(tmp_path, VERL, "run_geo3k.sh")
    r = loaded.recipe
    assert (report["system"], r.optim.lr, r.train.steps, r.optim.warmup_steps) == ("verl", 2e-6, 200, 20)
    assert (r.rollout.prompts_per_step, r.train.updates_per_step, r.rollout.samples_per_prompt) == (512, 4, 5)
    assert (r.algo.advantage, r.algo.aggregation, r.algo.kl, r.algo.kl_in) == (
        "group_mean",
        "sequence_mean",
        "k2",
        "loss",
    )
    assert (r.algo.clip_low, r.algo.clip_high, r.algo.dual_clip, r.algo.kl_coef) == (0.2, 0.28, 3.0, 0.01)
    assert (r.rollout.top_p, r.rollout.allow_filtered_sampling) == (0.9, True)
    assert (r.reward.name, r.reward.style, r.log.sinks) == ("my_reward.py:score", "verl", ["tensorboard"])
    assert {"data.val_files", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"} <= keys(report["left_out"])
    assert {"algo.kl", "rollout.allow_filtered_sampling", "train.updates_per_step"} <= keys(report["changed"])
    assert any("$HOME" in note for note in report["notes"]) and any("$@" in note for note in report["notes"])


ARRAYS = """#!/usr/bin/env bash
set -xeuo pipefail
BACKEND=${BACKEND:-vllm}
NAME=${NAME:-geo_${BACKEND}_grpo}
rollout_tp=${ROLLOUT_TP:-}
rollout_tp=${rollout_tp:-2}
DATA=(
    data.train_batch_size=64
    # of a comment nothing is taken: data.seed=9
    data.train_files=$HOME/geo3k/train.parquet
)
ACTOR=(actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.rollout.n=5
    actor_rollout_ref.model.path="a/b")
ACTOR+=(
    actor_rollout_ref.rollout.name=${BACKEND}
    actor_rollout_ref.rollout.tensor_model_parallel_size=${rollout_tp}
)
ALL=("${DATA[@]}" "${ACTOR[@]}")
case "${DEVICE:-gpu}" in
    gpu)
        ;;
    npu)
        ACTOR+=(actor_rollout_ref.rollout.n=99
        )
        ;;
esac
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    LAUNCH=(uv run python3)
fi
LAST=(trainer.total_training_steps=7 trainer.experiment_name=$NAME)
"${LAUNCH[@]}" -m verl.trainer.main_ppo \\
    "${ALL[@]}" \\
    "${LAST[@]}" \\
    "$@"
"""


def test_a_launch_script_that_keeps_its_settings_in_arrays(tmp_path):
    loaded, report = imported(tmp_path, ARRAYS, "run.sh")
    r = loaded.recipe
    assert (r.rollout.prompts_per_step, r.optim.lr, r.model.path, r.train.steps) == (64, 2e-6, "a/b", 7)
    assert (r.rollout.samples_per_prompt, r.rollout.engine, r.rollout.tensor_parallel) == (5, "vllm", 2)
    assert r.train.seed == 0 and "--name geo_vllm_grpo" in str(report["left_out"])
    passed = [note for note in report["notes"] if "depends on a condition" in note]
    assert [note.split("=")[0] for note in passed] == ["`ACTOR+", "`LAUNCH"]


def test_a_variable_that_depends_on_a_condition_keeps_its_first_value_and_is_told(tmp_path):
    """The first branch is the usual machine; the last one must not win without a word."""
    script = """
size=${SIZE:-}
tp=1
lr=1e-6
case "$(device)" in
    gpu)
        size=${SIZE:-512}
        ;;
    npu)
        size=${SIZE:-256}
        tp=4
        unused=3
        ;;
esac
lr=2e-6
python3 -m verl.trainer.main_ppo data.train_batch_size=$size actor_rollout_ref.actor.optim.lr=$lr \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=${tp}
"""
    (tmp_path / "run.sh").write_text(script)
    foreign = read_foreign(tmp_path / "run.sh")
    assert foreign.values["data.train_batch_size"] == 512
    assert foreign.values["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 1
    assert foreign.values["actor_rollout_ref.actor.optim.lr"] == 2e-6  # outside of any condition the last one counts
    told = [note for note in foreign.notes if "depends on a condition" in note]
    assert told == [
        f"`{n}` depends on a condition: its first value `{v}` was taken" for n, v in (("size", "512"), ("tp", "1"))
    ]


def test_a_supervised_recipe_counts_rows_and_a_batch_of_none_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("max_length: 9\nper_device_train_batch_size: 0\n")
    with pytest.raises(
        VlmrlError, match=r"`per_device_train_batch_size` has a value that it cannot have, '0': it must"
    ):
        import_recipe(tmp_path / "a.yaml", system="trl", rows=100)
    (tmp_path / "a.yaml").write_text("max_length: 9\nper_device_train_batch_size: 4\n")
    told = str([import_recipe(tmp_path / "a.yaml", system="trl", rows=rows) for rows in (None, 100)])
    assert "epochs = 3.0" in told and "3 passes over 100 rows at 4 rows per step" in told
    assert "prompts_per_step" not in told


def test_a_variable_that_is_set_once_more_outside_of_the_condition_is_not_told(tmp_path):
    script = "lr=1\nif [ $1 ]; then\n  lr=2\nfi\nlr=3e-6\npython3 -m verl.trainer.main_ppo data.seed=1 a.optim.lr=$lr\n"
    (tmp_path / "run.sh").write_text(script)
    foreign = read_foreign(tmp_path / "run.sh")
    assert foreign.values["a.optim.lr"] == 3e-6 and foreign.notes == []


@pytest.mark.parametrize(
    "script",
    [
        "A=(trainer.experiment_name=run_$(date +%F)\n data.seed=4\n)\nRUN",
        "A=(x.y=1 data.seed=4);\nRUN",
        "A=(x.y=1 data.seed=4); echo hi\nRUN",
        "declare -a A=(x.y=1\n data.seed=4)\nRUN",
        "readonly A=(\ndata.seed=4\n)\nRUN",
    ],
)
def test_an_array_ends_where_the_shell_ends_it(tmp_path, script):
    (tmp_path / "run.sh").write_text(script.replace("RUN", 'python -m verl.trainer.main_ppo "${A[@]}" data.n=2\n'))
    values = read_foreign(tmp_path / "run.sh").values
    assert (values["data.seed"], values["data.n"]) == (4, 2)


def test_a_plain_value_beside_a_table_of_its_name_is_told(tmp_path):
    start = "custom_reward_function.reward_kwargs"
    for words in (f"{start}.a.b=2 {start}.a=1", f"{start}.a=1 {start}.a.b=2"):
        line = f"python -m verl.trainer.main_ppo custom_reward_function.path=r.py {words}\n"
        _, report = imported(tmp_path, line, "run.sh")
        assert any(key.startswith(f"{start}.a") for key in keys(report["left_out"]))


def test_arrays_that_grow_or_never_end_are_read_in_a_moment(tmp_path):
    doubling = "\n".join(["A=(data.seed=1)", *['A=("${A[@]}" "${A[@]}")'] * 60, 'B=("${A[@]}"', "x=1"])
    (tmp_path / "run.sh").write_text(f'python -m verl.trainer.main_ppo data.seed=4 "${{B[@]}}"\n{doubling}\n')
    begin = time.process_time()
    assert read_foreign(tmp_path / "run.sh").values == {"data.seed": 4}
    assert time.process_time() - begin < 2


def test_verl_without_any_kl_loads_no_reference(tmp_path):
    text = "actor_rollout_ref: {model: {path: a/b}, actor: {kl_loss_coef: 0.5}}\n"
    text += "algorithm: {adv_estimator: gae, lam: 0.9}\n"
    loaded, report = imported(tmp_path, text, "ppo.yaml")
    assert (loaded.recipe.algo.kl_coef, loaded.recipe.algo.advantage, loaded.recipe.algo.gae_lambda) == (
        0.0,
        "gae",
        0.9,
    )
    assert "actor_rollout_ref.actor.kl_loss_coef" in keys(report["left_out"])


def test_a_trl_configuration(tmp_path):
    loaded, report = imported(tmp_path, TRL_YAML, "grpo.yaml", rows=1000, processes=4)
    r = loaded.recipe
    # 8 completions a device x 4 processes x 4 accumulated = 128 completions = 16 prompts of 8
    assert (r.rollout.prompts_per_step, r.rollout.samples_per_prompt, r.train.updates_per_step) == (16, 8, 1)
    assert r.train.steps == 1000 * 2 // 16 and r.optim.warmup_steps == 4  # 3% of 125, rounded up
    assert (r.algo.aggregation, r.algo.advantage, r.algo.clip_high, r.algo.kl_coef) == (
        "constant",
        "group_mean",
        0.28,
        0.04,
    )
    assert (r.algo.importance, r.algo.importance_level, r.algo.importance_cap) == ("mask", "sequence", 3.0)
    assert r.lora is not None and (r.lora.rank, r.lora.alpha, r.lora.targets) == (64, 128, ["q_proj", "v_proj"])
    assert (r.optim.schedule, r.algo.truncated, r.train.seed) == ("cosine", "mask", 42)
    assert {"reward_funcs", "reward_weights", "vllm_mode", "output_dir"} <= keys(report["left_out"])
    assert "rollout.prompts_per_step" in keys(report["changed"])


def test_trls_list_of_functions_is_a_list_of_rewards(tmp_path):
    (tmp_path / "r.py").write_text("def f(completions): ...\ndef g(completions): ...\n")
    functions = "num_generations: 8\nmodel_name_or_path: m/m\nreward_funcs: [r.py:f, r.py:g]\n"
    loaded, report = imported(tmp_path, functions + "reward_weights: [1.0, 0.5]\n", "grpo.yaml")
    found = [(Path(one.name).name, one.style, one.weight) for one in loaded.recipe.rewards]
    assert found == [("r.py:f", "trl", 1.0), ("r.py:g", "trl", 0.5)] and loaded.recipe.reward.name is None
    assert "rewards" in keys(report["mapped"]) and not {"reward_funcs", "reward_weights"} & keys(report["left_out"])
    loaded, _ = imported(tmp_path, functions, "plain.yaml")
    assert [one.weight for one in loaded.recipe.rewards] == [1.0, 1.0]
    loaded, _ = imported(tmp_path, functions.replace(", r.py:g", "") + "reward_weights: [0.5]\n", "one.yaml")
    assert [one.weight for one in loaded.recipe.rewards] == [0.5]
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "own.py").write_text((tmp_path / "r.py").read_text())
    loaded, _ = imported(tmp_path, functions.replace("r.py:f, r.py:g", "r.f, rewards.own.g"), "dotted.yaml")
    first, second = (one.name for one in loaded.recipe.rewards)
    assert first.endswith("r.py:f") and second.endswith("rewards/own.py:g")
    with pytest.raises(VlmrlError, match="2 functions need as many weights"):
        imported(tmp_path, functions + "reward_weights: [1.0]\n", "wrong.yaml")


def test_trls_supervised_configuration_is_a_supervised_recipe(tmp_path):
    text = "model_name_or_path: a/b\ndataset_name: a/c\nlearning_rate: 4e-5\nper_device_train_batch_size: 4\n"
    text += "gradient_accumulation_steps: 8\nnum_train_epochs: 3\npacking: true\nmax_length: 4096\n"
    loaded, report = imported(tmp_path, text, "sft.yaml", rows=1000, processes=2)
    r = loaded.recipe
    # 4 rows a device x 8 accumulated x 2 processes = 64 rows; 3 x 1000 / 64 = 46.9
    assert (r.kind, r.train.rows_per_step, r.train.steps, r.optim.lr) == ("sft", 64, 46, 4e-5)
    made = (tmp_path / "made.toml").read_text()
    assert "[rollout]" not in made and "[algo]" not in made and "[reward]" not in made
    assert {"max_length"} == keys(report["left_out"]) and "kind" in keys(report["changed"]) and not report["todo"]
    loaded, _ = imported(tmp_path, text + "num_generations: 4\n", "grpo.yaml")
    assert loaded.recipe.kind == "rl"


def test_what_trl_says_of_the_prompt_is_taken_over(tmp_path):
    written = "{num_generations: 2, beta: 0.1, dataset_name: a/b, system_prompt: Think first., "
    _, report = imported(tmp_path, written + "dataset_prompt_column: problem}", "a.yaml")
    found = {item["key"]: item["value"] for item in report["mapped"]}
    assert (found["data.system"], found["data.columns"]) == ("Think first.", {"prompt": "problem"})


def test_trl_arguments_as_json_and_as_flags_are_the_same(tmp_path):
    arguments = {
        "learning_rate": 3e-6,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_steps": 50,
        "loss_type": "grpo",
        "model_name_or_path": "a/b",
        "reward_funcs": "r.py:score",
    }
    flags = "trl grpo " + " ".join(f"--{k} {v}" for k, v in arguments.items())
    one, _ = imported(tmp_path, json.dumps(arguments), "args.json")
    other, _ = imported(tmp_path, f"#!/bin/sh\naccelerate launch x.py\n{flags}\n", "run.sh")
    assert one.recipe == other.recipe and one.recipe.train.steps == 50
    assert one.recipe.reward.style == "trl" and one.recipe.optim.schedule == "linear"  # TRL's own default


def test_defaults_of_trl_that_are_not_ours_are_written_down(tmp_path):
    loaded, _ = imported(tmp_path, "num_generations: 2\nlearning_rate: 1e-6\n", "few.yaml")
    r = loaded.recipe
    assert (r.optim.schedule, r.algo.clip_low, r.algo.clip_high, r.rollout.max_new_tokens) == ("linear", 0.2, 0.2, 512)
    assert r.train.seed == 42


@pytest.mark.parametrize(
    ("written", "parts", "left"),
    [
        ("worker: {rollout: {n: 4, tensor_parallel_size: 4}}", 4, ""),
        ("worker: {rollout: {n: 4, tensor_parallel_size: 1}}", 1, ""),
        ("worker: {rollout: {n: 4}}", 1, ""),  # 2 there, but the machine is another one
        ("worker: {rollout: {name: hf, tensor_parallel_size: 4}}", 1, "worker.rollout.tensor_parallel_size"),
        ("actor_rollout_ref: {rollout: {name: vllm, tensor_model_parallel_size: 2}}", 2, ""),
        (
            "actor_rollout_ref: {rollout: {name: sglang, tensor_model_parallel_size: 2}}",
            1,
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
        ),
        ("{beta: 0.1, num_generations: 2, use_vllm: true, vllm_tensor_parallel_size: 2}", 2, ""),
        (
            "{beta: 0.1, num_generations: 2, use_vllm: true, vllm_mode: server, vllm_tensor_parallel_size: 2}",
            1,
            "vllm_tensor_parallel_size",
        ),
        ("{beta: 0.1, num_generations: 2, vllm_tensor_parallel_size: 2}", 1, "vllm_tensor_parallel_size"),
    ],
)
def test_engines_of_several_gpus(tmp_path, written, parts, left):
    loaded, report = imported(tmp_path, written, "a.yaml")
    assert loaded.recipe.rollout.tensor_parallel == parts
    told = {key for key in keys(report["left_out"]) if "tensor" in key}
    assert told == ({left} if left else set())
    assert not [p for p in check_unprepared(loaded, catalogs()) if "tensor_parallel" in p.message]


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (
            "worker: {reward: {reward_function: r.py:f, reward_function_kwargs: {weight: 0.2, names: [a, b]}}}",
            {"reward.args": {"weight": 0.2, "names": ["a", "b"]}},
        ),
        (
            "actor_rollout_ref: {model: {path: a}}\ncustom_reward_function: {path: r.py, reward_kwargs: {weight: 0.2}}",
            {"reward.name": "r.py:compute_score", "reward.args": {"weight": 0.2}},
        ),
        (
            "actor_rollout_ref: {model: {path: a}}\nreward: {custom_reward_function: {path: r.py, name: f,"
            " reward_kwargs: {weight: 0.2}}}",
            {"reward.name": "r.py:f", "reward.args": {"weight": 0.2}},
        ),
        (
            "worker: {actor: {model: {lora: {rank: 8, target_modules: 'q_proj, v_proj'}}}}",
            {"lora.rank": 8, "lora.alpha": 64, "lora.targets": ["q_proj", "v_proj"]},
        ),
        (
            "actor_rollout_ref: {model: {lora_rank: 8, target_modules: all-linear}}",
            {"lora.rank": 8, "lora.alpha": 16, "lora.targets": "all-linear"},
        ),
        (
            "worker: {actor: {fsdp: {fsdp_size: 4, enable_cpu_offload: true, mp_param_dtype: fp32}}}",
            {"parallel.shard_size": 4, "parallel.offload": True, "model.dtype": "float32"},
        ),
        (
            "actor_rollout_ref: {actor: {fsdp_config: {fsdp_size: 4, offload_policy: true, dtype: bfloat16}}}",
            {"parallel.shard_size": 4, "parallel.offload": True, "model.dtype": "bfloat16"},
        ),
        ("worker: {rollout: {top_k: 20}}", {"rollout.top_k": 20, "rollout.allow_filtered_sampling": True}),
        ("actor_rollout_ref: {actor: {optim: {betas: [0.9, 0.95]}}}", {"optim.beta1": 0.9, "optim.beta2": 0.95}),
    ],
)
def test_settings_that_two_systems_share(tmp_path, written, values):
    _is_taken_over(tmp_path, written, values)


ACTOR = "actor_rollout_ref.actor"
OFF = "algorithm.rollout_correction"
VERL_SETTINGS = [
    (
        f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4",
        {
            "algo.ratio": "sequence_token",
            "algo.aggregation": "sequence_mean",
            "algo.clip_low": 3e-4,
            "algo.clip_high": 4e-4,
        },
    ),
    ("algorithm.adv_estimator=optimal_token_baseline", {"algo.advantage": "optimal_token"}),
    (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", {"algo.aggregation": "sequence_sum"}),
    (f"{ACTOR}.policy_loss.loss_mode=geo_mean", {"algo.surrogate": "gmpo", "algo.aggregation": "sequence_mean"}),
    (
        f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.tau_neg=1.1",
        {
            "algo.surrogate": "sapo",
            "algo.aggregation": "sequence_mean",
            "algo.tau_positive": 1.0,
            "algo.tau_negative": 1.1,
        },
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=clip_cov {ACTOR}.policy_loss.clip_cov_ub=4",
        {"algo.cov_share": 2e-4, "algo.cov_low": 1.0, "algo.cov_high": 4.0, "algo.aggregation": "token_mean"},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.policy_loss.kl_cov_ratio=0.02",
        {"algo.surrogate": "kl_cov", "algo.cov_share": 0.02, "algo.cov_kl_coef": 0.1},
    ),
    (f"{ACTOR}.optim.clip_grad=0.5", {"optim.max_grad_norm": 0.5}),
    (f"{ACTOR}.grad_clip=0.5", {"optim.max_grad_norm": 0.5}),
    (f"{ACTOR}.optim.optimizer=AdamW8bit", {"optim.name": "adamw_8bit"}),
    ("algorithm.adv_estimator=rloo_vectorized", {"algo.advantage": "leave_one_out"}),
    (
        "algorithm.adv_estimator=grpo_vectorized algorithm.norm_adv_by_std_in_grpo=False",
        {"algo.advantage": "group_mean"},
    ),
    (
        "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1,0.5]",
        {"algo.advantage": "part_by_part", "algo.scale": "tokens", "reward.weights": {"a": 1.0, "b": 0.5}},
    ),
    ("algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b]", {"reward.weights": {"a": 1.0, "b": 1.0}}),
    (
        f"{OFF}.rollout_is=token {OFF}.rollout_is_threshold=4.0",
        {"algo.importance": "truncate", "algo.importance_level": "token", "algo.importance_cap": 4.0},
    ),
    (f"{OFF}.bypass_mode=True", {"algo.importance": "ratio", "algo.dual_clip": 3.0}),
    (f"{OFF}.rollout_is=sequence", {"algo.importance_level": "sequence", "algo.importance_cap": 2.0}),
    (
        f"{OFF}.rollout_is=token {OFF}.rollout_is_threshold='0.5_5.0'",
        {"algo.importance": "mask", "algo.importance_cap": 5.0},
    ),
    *(
        (
            f"+{table}.enable=True +{table}.len=512 +{table}.penalty_factor=0.5",
            {"algo.overlong_tokens": 512, "algo.overlong_penalty": 0.5},
        )
        for table in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
    ),
    (
        "data.prompt_key=question data.image_key=pictures",
        {"data.columns": {"prompt": "question", "images": "pictures"}},
    ),
    ("data.prompt_key=messages data.image_key=pictures", {"data.columns": {"images": "pictures"}}),
    (
        f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10 {ACTOR}.clip_ratio_high=0.2",
        {"algo.name": "cispo", "algo.surrogate": "cispo", "algo.clip_high": 0.2, "algo.aggregation": "token_mean"},
    ),
    ("data.max_response_length=$((1024 * 2))", {"rollout.max_new_tokens": 2048}),
    ("data.train_max_samples=100 data.val_max_samples=10", {"data.max_rows": 100, "eval.max_rows": 10}),
    ("+data.apply_chat_template_kwargs.enable_thinking=False", {"model.thinking": "off"}),
]


@pytest.mark.parametrize(("written", "values"), VERL_SETTINGS)
def test_settings_of_verl(tmp_path, written, values):
    words = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b {written}"
    _is_taken_over(tmp_path, words, values, "run.sh")


@pytest.mark.parametrize("loss", ["gspo", "cispo", "clip_cov", "geo_mean", "sapo", "gpg", "kl_cov"])
def test_only_verls_vanilla_loss_has_a_dual_clip(tmp_path, loss):
    path = tmp_path / "run.sh"
    path.write_text(
        f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b {ACTOR}.clip_ratio_c=10"
        f" {ACTOR}.policy_loss.loss_mode={loss}"
    )
    text, report = import_recipe(path, rows=100_000)
    assert "dual_clip" not in text
    assert f"the loss {loss} has no dual clip" in left(report)[f"{ACTOR}.clip_ratio_c"]


TRL_SETTINGS = [
    ("{dtype: bfloat16}", {"model.dtype": "bfloat16"}),
    ("{dtype: float32, bf16: false}", {"model.dtype": "float32"}),
    ("{bf16: false}", {"model.dtype": "float32"}),  # TRL's default for the weights
    (
        "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}}",
        {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.1},
    ),
    ("{warmup_steps: 0.1, max_steps: 50}", {"optim.warmup_steps": 5}),  # a share of the steps in transformers 5
    ("{warmup_steps: 7, max_steps: 50}", {"optim.warmup_steps": 7}),
    ("{warmup_ratio: 0.1, max_steps: 50}", {"optim.warmup_steps": 5}),
    ("{chat_template_kwargs: {enable_thinking: true}}", {"model.thinking": "on"}),
    (
        "{loss_type: luspo, importance_sampling_level: sequence}",
        {"algo.ratio": "sequence", "algo.aggregation": "sequence_sum"},
    ),
    (
        "{loss_type: vespo, vespo_k_neg: 4.0}",
        {"algo.surrogate": "vespo", "algo.power_positive": 2.0, "algo.decay_positive": 3.0, "algo.power_negative": 4.0},
    ),
    ("{loss_type: sapo}", {"algo.tau_positive": 1.0, "algo.tau_negative": 1.05, "algo.aggregation": "sequence_mean"}),
]


@pytest.mark.parametrize(("written", "values"), TRL_SETTINGS)
def test_settings_of_trl(tmp_path, written, values):
    _is_taken_over(tmp_path, f"{{num_generations: 4, beta: 0.1, {written[1:]}", values)


@pytest.mark.parametrize(("split", "validation"), [("dev", "dev"), ("test", None)])
def test_the_split_that_trl_validates_on_is_kept_unless_it_is_the_test(tmp_path, split, validation):
    written = f"{{num_generations: 4, beta: 0.1, dataset_test_split: {split}, eval_strategy: steps}}"
    loaded, report = imported(tmp_path, written, "a.yaml")
    assert loaded.recipe.data[0].validation == validation
    assert ("dataset_test_split" in keys(report["left_out"])) is (validation is None)


def test_the_type_of_trls_weights_is_not_that_of_its_arithmetic(tmp_path):
    loaded, report = imported(tmp_path, "{num_generations: 4, beta: 0.1, dtype: float32, bf16: true}", "a.yaml")
    assert loaded.recipe.model.dtype == "auto" and "dtype" in keys(report["left_out"])


def test_the_kl_of_trl_is_weighted_by_the_ratio(tmp_path):
    for written, told in (("", True), (", use_bias_correction_kl: false", False)):
        _, report = imported(tmp_path, f"{{num_generations: 4, beta: 0.1{written}}}", "a.yaml")
        assert ("algo.kl" in keys(report["changed"])) is told


def test_verls_one_clip_ratio_does_nothing_there(tmp_path):
    words = f"python3 -m verl.trainer.main_ppo {ACTOR}.clip_ratio=0.3 {ACTOR}.clip_ratio_high=0.28"
    loaded, report = imported(tmp_path, words, "run.sh")
    assert (loaded.recipe.algo.clip_low, loaded.recipe.algo.clip_high) == (0.2, 0.28)
    assert f"{ACTOR}.clip_ratio" in keys(report["left_out"])


@pytest.mark.parametrize(
    "setting",
    [
        f"{ACTOR}.loss_agg_mode=token-sum",
        f"{ACTOR}.optim.optimizer=SGD",
        f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean",
        f"{ACTOR}.policy_loss.loss_mode=dro",
        "algorithm.adv_estimator=tir_optimal_token_baseline",
    ],
)
def test_a_choice_of_verl_without_counterpart_is_left_out(tmp_path, setting):
    _, report = imported(tmp_path, f"python3 -m verl.trainer.main_ppo data.seed=1 {setting}", "run.sh", rows=9)
    assert keys(report["left_out"]) == {setting.split()[-1].partition("=")[0]}


def _is_taken_over(tmp_path: Path, written: str, values: dict, name: str = "a.yaml") -> None:
    _, report = imported(tmp_path, written, name, rows=100_000)
    found = {item["key"]: item["value"] for item in report["mapped"] + report["changed"]}
    assert {key: found[key] for key in values} == values and not report["left_out"], report["left_out"]


def test_without_a_rank_there_is_no_adapter(tmp_path):
    written = "worker: {actor: {model: {lora: {rank: 0, alpha: 64, exclude_modules: .*visual.*}}}}"
    loaded, report = imported(tmp_path, written, "a.yaml", rows=1000)
    assert loaded.recipe.lora is None
    assert all("rank is 0" in item["why"] for item in report["left_out"]) and len(report["left_out"]) == 2


def test_a_table_among_the_arguments_of_a_reward_is_taken_over_and_none_below_it(tmp_path):
    written = (
        "worker: {reward: {reward_function: r.py:f, reward_function_kwargs: {weight: 0.2, names: {a: b, c: {d: e}}}}}"
    )
    loaded, report = imported(tmp_path, written, "a.yaml", rows=1000)
    assert loaded.recipe.reward.args == {"weight": 0.2, "names": {"a": "b"}}
    assert keys(report["left_out"]) == {"worker.reward.reward_function_kwargs.names.c.d"}


def test_targets_of_an_adapter_given_as_a_pattern_are_left_out(tmp_path):
    written = "actor_rollout_ref: {model: {lora_rank: 8, target_modules: '.*(q|v)_proj'}}"
    loaded, report = imported(tmp_path, written, "a.yaml", rows=1000)
    assert keys(report["left_out"]) == {"actor_rollout_ref.model.target_modules"}
    assert loaded.recipe.lora is not None and loaded.recipe.lora.targets == "all-linear"


def test_validation_and_checkpoints_that_are_off_have_words_of_their_own(tmp_path):
    text = "- algorithm.adv_estimator=grpo\n- actor_rollout_ref.model.path=a/b\n"
    text += "- trainer.save_freq=-1\n- trainer.test_freq=-1\n"
    why = {c["key"]: c["why"] for c in imported(tmp_path, text, "overrides.yaml")[1]["changed"]}
    assert why["checkpoint.every_steps"] == "off there; here 0: at the end"
    assert why["eval.every_steps"] == "off there; here 0: at the start and the end"


def test_a_list_of_hydra_overrides(tmp_path):
    text = "- algorithm.adv_estimator=rloo\n- +data.train_batch_size=64\n- ~trainer.logger\n"
    text += "- actor_rollout_ref.model.path=a/b\n"
    loaded, report = imported(tmp_path, text, "overrides.yaml")
    assert (report["system"], loaded.recipe.algo.advantage) == ("verl", "leave_one_out")
    assert loaded.recipe.rollout.prompts_per_step == 64


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        (EASYR1_YAML, "a.yaml", {"rows": 1000}),
        (LAUNCH, "b.sh", {}),
        (VERL, "c.sh", {}),
        (TRL_YAML, "d.yaml", {"rows": 100}),
    ],
)
def test_what_is_imported_passes_the_rules_but_for_files_and_rewards(tmp_path, monkeypatch, text, name, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(reward_inputs): ...\n")
    (tmp_path / "my_reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None): ...\n")
    loaded, _ = imported(tmp_path, text, name, **options)
    errors = [p.message for p in check_unprepared(loaded, catalogs()) if p.level == "error"]
    assert all("no reward of its own" in e for e in errors), errors


def test_every_written_setting_is_mapped_changed_left_out_or_as_here(tmp_path):
    for text, name in ((EASYR1_YAML, "a.yaml"), (VERL, "b.sh"), (TRL_YAML, "c.yaml")):
        (tmp_path / name).write_text(text)
        foreign, report = read_foreign(tmp_path / name), import_recipe(tmp_path / name)[1]
        sources = {s for t in report["mapped"] + report["changed"] for s in t["from"].split(" and ")}
        told = [sources, keys(report["left_out"]), set(report["as_here"])]
        assert all(any(key in found for found in told) for key in foreign.values)
        assert not told[2] & (told[0] | told[1])
        assert all(item["why"] for item in report["left_out"] + report["changed"])


LLAMA_FACTORY = """model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct
stage: sft
finetuning_type: lora
lora_rank: 8
dataset: gauges
template: qwen2_vl
cutoff_len: 2048
val_size: 0.1
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
"""
SWIFT = "CUDA_VISIBLE_DEVICES=0 swift sft --model m/m --train_type lora --dataset a.jsonl --learning_rate 1e-4 \\\n"
OTHERS = "steps/first.sh and steps/second.sh"
MISTAKES = [
    (
        "a.yaml",
        LLAMA_FACTORY,
        "configuration of LLaMA-Factory, which cannot be imported(.|\n)*easyr1, verl, rllava, trl",
    ),
    ("a.sh", f"{SWIFT} --per_device_train_batch_size 1 --freeze_vit true\n", "configuration of ms-swift, which cannot"),
    (
        "a.sh",
        "swift sft --model m/m --learning_rate 1e-4 --gradient_accumulation_steps 8\n",
        "configuration of ms-swift",
    ),
    ("a.sh", f"{SWIFT} --gradient_accumulation_steps 8\n", "configuration of ms-swift"),
    ("a.sh", "swift rlhf --rlhf_type grpo --num_generations 4 --learning_rate 1e-6\n", "configuration of ms-swift"),
    ("a.yaml", "a: [1, 2", "not valid YAML"),
    ("a.yaml", "- 1\n- 2\n", "does not hold a table"),
    ("a.yaml", "", "does not hold"),
    ("a.json", "{", "not valid JSON"),
    ("a.json", '{"a": 1,\n b}', r"a.json:2"),
    ("a.yaml", "a: 1\nb: [1, 2\n", r"a.yaml:3"),
    ("a.json", "[" * 100_000, "nested too deeply"),
    ("a.json", '{"a": ' * 60 + "1" + "}" * 60, "nested too deeply in this file"),
    ("a.sh", "echo hello\n", "no settings"),
    ("a.sh", "deepspeed rllava/train/train.py --data_path rows.json\n", "TinyLLaVA's training"),
    ("a.sh", 'ROWS=x.json\nbash steps/first.sh "$ROWS" a b\nbash steps/second.sh "$ROWS"\n', OTHERS),
    ("a.yaml", "colour: red\n", "nothing in this file"),
    ("a.yaml", "worker: {rollout: {n: many}}\n", "rollout.samples_per_prompt"),
    ("a.yaml", "worker: {actor: {optim: {lr: -1}}}\n", "optim.lr"),
    ("a.yaml", "num_generations: two\nlearning_rate: 1e-6\n", "`num_generations` has a value .* 'two'"),
    ("a.yaml", "num_generations: [2]\nlearning_rate: 1e-6\n", "`num_generations` has a value that it cannot have"),
    ("a.yaml", "beta: 2020-01-01\nnum_generations: 2\n", "`beta` has a value that it cannot have, '2020-01-01'"),
    ("a.sh", "python -m verl.trainer.main worker.rollout.n=4 data.image_dir='a\n", "a line with an open quote"),
]


@pytest.mark.parametrize(("name", "text", "message"), MISTAKES)
def test_a_file_that_is_no_configuration_is_a_users_mistake(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(VlmrlError, match=message) as found:
        import_recipe(tmp_path / name)
    assert str(tmp_path / name) in str(found.value)


def test_names_that_are_written_twice_are_told(tmp_path):
    for name, text in (
        ("a.json", '{"num_generations": 4, "num_generations": 8, "beta": 0.1}'),
        ("a.yaml", "num_generations: 4\nbeta: 0.1\nnum_generations: 8\n"),
    ):
        loaded, report = imported(tmp_path, text, name)
        assert loaded.recipe.rollout.samples_per_prompt == 8
        assert report["notes"] == [f"`num_generations` is written twice in {name}: the last one was taken"]
    merged = "base: &b {n: 4, temperature: 1.0}\nworker: {rollout: {<<: *b, n: 8}, actor: {<<: *b}}\n"
    (tmp_path / "b.yaml").write_text(merged)
    found = read_foreign(tmp_path / "b.yaml")
    assert (found.values["worker.rollout.n"], found.values["worker.actor.n"], found.notes) == (8, 4, [])


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.yaml"):
        with pytest.raises(VlmrlError, match="it is a pipe or a device"):
            import_recipe(tmp_path / name)


def test_nothing_of_a_file_is_run(tmp_path):
    touched = tmp_path / "touched"
    script = f"python3 -m verl.trainer.main worker.rollout.n=$(touch {touched}) data.train_files=`touch {touched}`\n"
    (tmp_path / "a.sh").write_text(script)
    _, report = import_recipe(tmp_path / "a.sh")
    assert any("is filled in by the shell" in note for note in report["notes"])
    (tmp_path / "a.yaml").write_text(f"!!python/object/apply:os.system ['touch {touched}']\n")
    with pytest.raises(VlmrlError):
        import_recipe(tmp_path / "a.yaml")
    assert not touched.exists()


def test_numbers_that_the_shell_would_fill_in_are_left_with_the_default_and_told(tmp_path):
    words = "data.train_batch_size=${BATCH} actor_rollout_ref.actor.clip_ratio_low=$LOW data.train_files=$HOME/a.csv"
    loaded, report = imported(tmp_path, f"python3 -m verl.trainer.main_ppo {words}\n", "run.sh", rows=4096)
    assert (loaded.recipe.rollout.prompts_per_step, loaded.recipe.algo.clip_low) == (1024, 0.2)  # verl's own
    batch = {item["key"]: item for item in report["left_out"]}["data.train_batch_size"]
    assert batch["value"] == "${BATCH}" and "1024 was taken" in batch["why"]
    assert sum("is filled in elsewhere" in todo for todo in report["todo"]) == 2
    assert loaded.recipe.data[0].path == "$HOME/a.csv"  # a path may be one; the notes tell it


def test_asynchronous_verl_has_no_size_of_a_step(tmp_path):
    words = "data.train_batch_size=0 async_training.require_batches=4 actor_rollout_ref.actor.ppo_mini_batch_size=32"
    loaded, report = imported(tmp_path, f"python3 -m verl.trainer.main_ppo {words}\n", "run.sh", rows=4096)
    assert "asynchronous" in left(report)["data.train_batch_size"]
    assert loaded.recipe.rollout.prompts_per_step == 32 and any("prompts_per_step" in todo for todo in report["todo"])


def test_the_lower_bound_of_easyr1s_cispo(tmp_path):
    written = "worker: {actor: {loss_type: cispo, clip_ratio_low: 0, clip_ratio_high: 4}, rollout: {n: 4}}"
    loaded, report = imported(tmp_path, written, "a.yaml")
    # there the ratio is clamped to [1 - 0, 1 + 4]
    assert (loaded.recipe.algo.surrogate, loaded.recipe.algo.clip_high) == ("cispo", 4)
    assert 0 < (loaded.recipe.algo.clip_low or 0) < 1e-5 and "algo.clip_low" in keys(report["changed"])


@pytest.mark.parametrize(
    ("written", "args"),
    [
        ('{"weight":0.5,"names":["a","b"]}', {"weight": 0.5, "names": ["a", "b"]}),
        ("{weight:0.5, strict:true}", {"weight": 0.5, "strict": True}),
        ('{"inner":{"x":1}}', {"inner": {"x": 1}}),
    ],
)
def test_a_table_written_on_the_command_line(tmp_path, written, args):
    words = f"worker.reward.reward_function=r.py:f worker.reward.reward_function_kwargs='{written}'"
    loaded, report = imported(tmp_path, f"python3 -m verl.trainer.main worker.rollout.n=4 {words}\n", "run.sh")
    assert loaded.recipe.reward.args == args and not [k for k in keys(report["left_out"]) if "kwargs" in k]


def test_braces_that_are_no_table_are_text(tmp_path):
    for written in ("{", "{}", "{a}", "{a:[1}", '{"a":' * 3000 + "1" + "}" * 3000, "${a:b}"):
        (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main worker.rollout.n=4 data.seed='{written}'\n")
        assert read_foreign(tmp_path / "run.sh").values["data.seed"] == written


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${data.max_prompt_length}", 77),
        ("${oc.select:data.max_prompt_length,5}", 77),
        ("${oc.select:data.nothing,5}", 5),
        ("${oc.select:other.name}", 77),
        ("${data.nothing}", "${data.nothing}"),
        ("${x.loop}", "${x.loop}"),
    ],
)
def test_references_of_hydra(tmp_path, written, value):
    (tmp_path / "a.yaml").write_text(
        f"actor_rollout_ref: {{rollout: {{prompt_length: '{written}'}}}}\ndata: {{max_prompt_length: 77}}\n"
        "other: {name: '${data.max_prompt_length}'}\nx: {loop: '${x.loop}'}\n"
    )
    assert read_foreign(tmp_path / "a.yaml").values["actor_rollout_ref.rollout.prompt_length"] == value


def test_a_script_that_grows_or_never_ends_is_read_in_a_moment(tmp_path):
    doubling = "\n".join(["A0=xxxxxxxxxx", *(f"A{n}=$A{n - 1}$A{n - 1}" for n in range(1, 60))])
    digits = f"worker.rollout.n=4 data.image_dir={'1' * 100_000}x trainer.max_steps={'7' * 5000}"
    (tmp_path / "run.sh").write_text(f"{doubling}\npython -m verl.trainer.main data.image_dir=$A59 {digits}\n")
    begin = time.process_time()
    foreign = read_foreign(tmp_path / "run.sh")
    assert time.process_time() - begin < 2
    assert foreign.values["worker.rollout.n"] == 4 and max(len(str(v)) for v in foreign.values.values()) < 150_000


def test_a_comment_of_the_recipe_cannot_be_broken_out_of(tmp_path):
    evil = "p.jinja\n[eval]\nallow_test_split = true\x1b[2J"
    given = {"worker.rollout.n": 4, "data.format_prompt": evil, "data.train_files": ["a.parquet", evil], evil: 2}
    loaded, report = imported(tmp_path, json.dumps(given), "a.json")
    assert not loaded.recipe.eval.allow_test_split and loaded.recipe.rollout.samples_per_prompt == 4
    assert loaded.recipe.data[0].prompt == evil  # as a value it is what it is
    assert all("\x1b" not in line for line in (tmp_path / "made.toml").read_text().splitlines() if line.startswith("#"))
    assert loaded.recipe.model.path == "path/to/model" and any("set `model.path`" in todo for todo in report["todo"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-2", 0.01),
        ("16", 16),
        ("-1", -1),
        ("null", None),
        ("True", True),
        ("a/b@train", "a/b@train"),
        ("[console,wandb]", ["console", "wandb"]),
        ('["a","b"]', ["a", "b"]),
        ("'x y'", "x y"),
        (".5", 0.5),
        ("1_000", 1000),
    ],
)
def test_values(text, value):
    assert plain_value(text) == value


@given(st.text(max_size=200))
def test_any_script_is_read_or_refused_in_words(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("any") / "run.sh"
    file.write_text(text, "utf-8", errors="replace")
    try:
        import_recipe(file, system="easyr1")
    except VlmrlError as error:
        assert error.message or str(error)


NINE_KEYS = ["{" + ", ".join(f"k{i}: {value}" for i in range(9)) + "}" for value in (1, *(f"*a{n}" for n in range(8)))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n".join(f"a{n}: &a{n} {keys_of_n}" for n, keys_of_n in enumerate(NINE_KEYS)), "aliases written out"),
        ("worker: &w {again: *w}", "aliases written out"),
        (
            "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 9}]}}\n" for i in range(1, 9)),
            "aliases written out",
        ),
        (
            "a0: &a0 [1, 2]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 12)),
            "aliases written out",
        ),
        ("a: &a [*a]\n", "aliases written out"),
        (f"a: {'[' * 3000}{']' * 3000}\n", "nested too deeply"),
        (f"a: {'{b: ' * 3000}1{'}' * 3000}\n", "nested too deeply"),
    ],
)
def test_hostile_yaml_ends_in_words_before_its_values_are_made(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(VlmrlError, match=message):
        read_foreign(file, "trl")
