"""`recipe import`: configurations of EasyR1, verl and TRL in their own key names, and files that are none."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.check.catalogs import catalogs
from vlmrl.errors import VlmrlError
from vlmrl.recipe.checks import check_made
from vlmrl.recipe.import_read import plain_value, read_foreign
from vlmrl.recipe.import_recipe import import_recipe
from vlmrl.recipe.load import load_recipe

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
trainer: {total_epochs: 15, val_freq: 5, save_freq: -1, save_limit: 3, n_gpus_per_node: 8, experiment_name: first}
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


def recipe_of(tmp_path: Path, text: str, name: str, **options):
    file = tmp_path / name
    file.write_text(text)
    made, report = import_recipe(file, **options)
    (tmp_path / "made.toml").write_text(made)
    return load_recipe(tmp_path / "made.toml"), report


def keys(found) -> set[str]:
    return {item["key"] for item in found}


def test_an_easyr1_configuration(tmp_path):
    loaded, report = recipe_of(tmp_path, EASYR1_YAML, "config.yaml", rows=5120)
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
    assert (r.reward.name, r.reward.style) == ("reward.py:compute_score", "easyr1")
    assert r.data[0].validation is None and "data.val_files" in keys(report["left_out"])  # it was the train split
    assert {"train.updates_per_step", "rollout.max_prompt_tokens", "data.path"} <= keys(report["changed"])
    left = {item["key"]: item["why"] for item in report["left_out"]}
    assert "greedy" in left["worker.rollout.val_override_config.temperature"]
    assert left["trainer.n_gpus_per_node"].endswith("--gpus 8") and left["trainer.experiment_name"].endswith(
        "--name first"
    )
    assert not any(why == "no counterpart is known" for why in left.values())


def test_an_easyr1_launch_script_with_its_configuration_beside_it(tmp_path):
    (tmp_path / "examples" / "fungi").mkdir(parents=True)
    (tmp_path / "examples" / "config.yaml").write_text(EASYR1_YAML)
    file = tmp_path / "examples" / "fungi" / "run.sh"
    file.write_text(LAUNCH)
    made, report = import_recipe(file)
    assert report["system"] == "easyr1" and any("settings of" in note for note in report["notes"])
    (tmp_path / "r.toml").write_text(made)
    r = load_recipe(tmp_path / "r.toml").recipe
    assert (r.model.path, r.train.steps, r.rollout.samples_per_prompt) == ("Qwen/Qwen2.5-VL-7B-Instruct", 40, 16)
    assert (r.rollout.max_new_tokens, r.train.updates_per_step) == (1024, 1)  # of the file, and of the script over it
    assert r.data[0].columns["answer"] == "answer_im"


def test_an_easyr1_launch_script_alone(tmp_path):
    loaded, report = recipe_of(tmp_path, LAUNCH, "run.sh")
    assert loaded.recipe.rollout.max_new_tokens == 2048 and loaded.recipe.algo.kl_coef == 0.01  # of EasyR1's example
    assert any("examples/config.yaml" in todo for todo in report["todo"])


def test_a_verl_launch_script(tmp_path):
    loaded, report = recipe_of(tmp_path, VERL, "run_geo3k.sh")
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


def test_verl_without_any_kl_loads_no_reference(tmp_path):
    text = "actor_rollout_ref: {model: {path: a/b}, actor: {kl_loss_coef: 0.5}}\n"
    text += "algorithm: {adv_estimator: gae, lam: 0.9}\n"
    loaded, report = recipe_of(tmp_path, text, "ppo.yaml")
    assert (loaded.recipe.algo.kl_coef, loaded.recipe.algo.advantage, loaded.recipe.algo.gae_lambda) == (
        0.0,
        "gae",
        0.9,
    )
    assert "actor_rollout_ref.actor.kl_loss_coef" in keys(report["left_out"])


def test_a_trl_configuration(tmp_path):
    loaded, report = recipe_of(tmp_path, TRL_YAML, "grpo.yaml", rows=1000, processes=4)
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


def test_trl_arguments_as_json_and_as_flags_are_the_same(tmp_path):
    arguments = {"learning_rate": 3e-6, "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 50,
                 "loss_type": "grpo", "model_name_or_path": "a/b", "reward_funcs": "r.py:score"}  # fmt: skip
    flags = "trl grpo " + " ".join(f"--{k} {v}" for k, v in arguments.items())
    one, _ = recipe_of(tmp_path, json.dumps(arguments), "args.json")
    other, _ = recipe_of(tmp_path, f"#!/bin/sh\naccelerate launch x.py\n{flags}\n", "run.sh")
    assert one.recipe == other.recipe and one.recipe.train.steps == 50
    assert one.recipe.reward.style == "trl" and one.recipe.optim.schedule == "linear"  # TRL's own default


def test_defaults_of_trl_that_are_not_ours_are_written_down(tmp_path):
    loaded, _ = recipe_of(tmp_path, "num_generations: 2\nlearning_rate: 1e-6\n", "few.yaml")
    r = loaded.recipe
    assert (r.optim.schedule, r.algo.clip_low, r.algo.clip_high, r.rollout.max_new_tokens) == ("linear", 0.2, 0.2, 512)
    assert r.train.seed == 42


@pytest.mark.parametrize(("written", "parts", "left"), [
    ("worker: {rollout: {n: 4, tensor_parallel_size: 4}}", 4, ""),
    ("worker: {rollout: {n: 4, tensor_parallel_size: 1}}", 1, ""),
    ("worker: {rollout: {n: 4}}", 1, ""),  # 2 there, but the machine is another one
    ("worker: {rollout: {name: hf, tensor_parallel_size: 4}}", 1, "worker.rollout.tensor_parallel_size"),
    ("actor_rollout_ref: {rollout: {name: vllm, tensor_model_parallel_size: 2}}", 2, ""),
    ("actor_rollout_ref: {rollout: {name: sglang, tensor_model_parallel_size: 2}}", 1,
     "actor_rollout_ref.rollout.tensor_model_parallel_size"),
    ("{beta: 0.1, num_generations: 2, use_vllm: true, vllm_tensor_parallel_size: 2}", 2, ""),
    ("{beta: 0.1, num_generations: 2, use_vllm: true, vllm_mode: server, vllm_tensor_parallel_size: 2}", 1,
     "vllm_tensor_parallel_size"),
    ("{beta: 0.1, num_generations: 2, vllm_tensor_parallel_size: 2}", 1, "vllm_tensor_parallel_size"),
])  # fmt: skip
def test_engines_of_several_cards(tmp_path, written, parts, left):
    loaded, report = recipe_of(tmp_path, written, "a.yaml")
    assert loaded.recipe.rollout.tensor_parallel == parts
    told = {key for key in keys(report["left_out"]) if "tensor" in key}
    assert told == ({left} if left else set())
    assert not [p for p in check_made(loaded, catalogs()) if "tensor_parallel" in p.message]


@pytest.mark.parametrize(("written", "values"), [
    ("worker: {reward: {reward_function: r.py:f, reward_function_kwargs: {weight: 0.2, names: [a, b]}}}",
     {"reward.args": {"weight": 0.2, "names": ["a", "b"]}}),
    ("actor_rollout_ref: {model: {path: a}}\ncustom_reward_function: {path: r.py, reward_kwargs: {weight: 0.2}}",
     {"reward.name": "r.py:compute_score", "reward.args": {"weight": 0.2}}),
    ("actor_rollout_ref: {model: {path: a}}\nreward: {custom_reward_function: {path: r.py, name: f,"
     " reward_kwargs: {weight: 0.2}}}", {"reward.name": "r.py:f", "reward.args": {"weight": 0.2}}),
    ("worker: {actor: {model: {lora: {rank: 8, target_modules: 'q_proj, v_proj'}}}}",
     {"lora.rank": 8, "lora.alpha": 64, "lora.targets": ["q_proj", "v_proj"]}),
    ("actor_rollout_ref: {model: {lora_rank: 8, target_modules: all-linear}}",
     {"lora.rank": 8, "lora.alpha": 16, "lora.targets": "all-linear"}),
    ("worker: {actor: {fsdp: {fsdp_size: 4, enable_cpu_offload: true, mp_param_dtype: fp32}}}",
     {"parallel.shard_size": 4, "parallel.offload": True, "model.dtype": "float32"}),
    ("actor_rollout_ref: {actor: {fsdp_config: {fsdp_size: 4, offload_policy: true, dtype: bfloat16}}}",
     {"parallel.shard_size": 4, "parallel.offload": True, "model.dtype": "bfloat16"}),
    ("worker: {rollout: {top_k: 20}}", {"rollout.top_k": 20, "rollout.allow_filtered_sampling": True}),
    ("actor_rollout_ref: {actor: {optim: {betas: [0.9, 0.95]}}}", {"optim.beta1": 0.9, "optim.beta2": 0.95}),
])  # fmt: skip
def test_settings_that_two_systems_share(tmp_path, written, values):
    (tmp_path / "a.yaml").write_text(written)
    text, report = import_recipe(tmp_path / "a.yaml", rows=1000)
    found = {item["key"]: item["value"] for item in report["mapped"] + report["changed"]}
    assert {key: found[key] for key in values} == values and not report["left_out"], report["left_out"]
    (tmp_path / "made.toml").write_text(text)
    load_recipe(tmp_path / "made.toml")


def test_a_table_among_the_arguments_of_a_reward_is_left_out(tmp_path):
    written = "worker: {reward: {reward_function: r.py:f, reward_function_kwargs: {weight: 0.2, names: {a: b}}}}"
    loaded, report = recipe_of(tmp_path, written, "a.yaml", rows=1000)
    assert loaded.recipe.reward.args == {"weight": 0.2}
    assert keys(report["left_out"]) == {"worker.reward.reward_function_kwargs.names.a"}


def test_targets_of_an_adapter_given_as_a_pattern_are_left_out(tmp_path):
    written = "actor_rollout_ref: {model: {lora_rank: 8, target_modules: '.*(q|v)_proj'}}"
    loaded, report = recipe_of(tmp_path, written, "a.yaml", rows=1000)
    assert keys(report["left_out"]) == {"actor_rollout_ref.model.target_modules"}
    assert loaded.recipe.lora is not None and loaded.recipe.lora.targets == "all-linear"


def test_a_list_of_hydra_overrides(tmp_path):
    text = "- algorithm.adv_estimator=rloo\n- +data.train_batch_size=64\n- ~trainer.logger\n"
    text += "- actor_rollout_ref.model.path=a/b\n"
    loaded, report = recipe_of(tmp_path, text, "overrides.yaml")
    assert (report["system"], loaded.recipe.algo.advantage) == ("verl", "leave_one_out")
    assert loaded.recipe.rollout.prompts_per_step == 64


@pytest.mark.parametrize(("text", "name", "options"), [
    (EASYR1_YAML, "a.yaml", {"rows": 1000}), (LAUNCH, "b.sh", {}), (VERL, "c.sh", {}),
    (TRL_YAML, "d.yaml", {"rows": 100}),
])  # fmt: skip
def test_what_is_imported_passes_the_rules_but_for_files_and_rewards(tmp_path, monkeypatch, text, name, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(reward_inputs): ...\n")
    (tmp_path / "my_reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None): ...\n")
    loaded, _ = recipe_of(tmp_path, text, name, **options)
    errors = [p.message for p in check_made(loaded, catalogs()) if p.level == "error"]
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


MISTAKES = [
    ("a.yaml", "a: [1, 2", "not valid YAML"),
    ("a.yaml", "- 1\n- 2\n", "does not hold a table"),
    ("a.yaml", "", "does not hold"),
    ("a.json", "{", "not valid JSON"),
    ("a.sh", "echo hello\n", "no settings"),
    ("a.yaml", "colour: red\n", "nothing in this file"),
    ("a.yaml", "worker: {rollout: {n: many}}\n", "rollout.samples_per_prompt"),
    ("a.yaml", "worker: {actor: {optim: {lr: -1}}}\n", "optim.lr"),
    ("a.yaml", "num_generations: two\nlearning_rate: 1e-6\n", "a value that it cannot have"),
]


@pytest.mark.parametrize(("name", "text", "message"), MISTAKES)
def test_a_file_that_is_no_configuration_is_a_users_mistake(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(VlmrlError, match=message) as found:
        import_recipe(tmp_path / name)
    assert str(tmp_path / name) in str(found.value)


def test_a_yaml_file_that_grows_when_it_is_read_is_refused(tmp_path):
    lines = ["a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(9)) + "}"]
    lines += [f"a{n}: &a{n} {{" + ", ".join(f"k{i}: *a{n - 1}" for i in range(9)) + "}" for n in range(1, 9)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(VlmrlError, match="more than 5000 keys"):
        import_recipe(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("worker: &w {again: *w}")
    with pytest.raises(VlmrlError, match="nested too deeply"):
        import_recipe(tmp_path / "a.yaml")


def test_nothing_of_a_file_is_run(tmp_path):
    touched = tmp_path / "touched"
    script = f"python3 -m verl.trainer.main worker.rollout.n=$(touch {touched}) data.train_files=`touch {touched}`\n"
    for name, text in (("a.sh", script), ("a.yaml", f"!!python/object/apply:os.system ['touch {touched}']\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(VlmrlError):
            import_recipe(tmp_path / name)
    assert not touched.exists()


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
    loaded, report = recipe_of(tmp_path, json.dumps(given), "a.json")
    assert not loaded.recipe.eval.allow_test_split and loaded.recipe.rollout.samples_per_prompt == 4
    assert loaded.recipe.data[0].prompt == evil  # as a value it is what it is
    assert all("\x1b" not in line for line in (tmp_path / "made.toml").read_text().splitlines() if line.startswith("#"))
    assert loaded.recipe.model.path == "path/to/model" and any("set `model.path`" in todo for todo in report["todo"])


@pytest.mark.parametrize(("text", "value"), [
    ("1e-6", 1e-6), ("1.0e-2", 0.01), ("16", 16), ("-1", -1), ("null", None), ("True", True),
    ("a/b@train", "a/b@train"),
    ("[console,wandb]", ["console", "wandb"]), ('["a","b"]', ["a", "b"]), ("'x y'", "x y"), (".5", 0.5),
    ("1_000", 1000),
])  # fmt: skip
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
