"""`recipe import` of RLLaVA's configurations, and of loggers whoever's they are."""

from __future__ import annotations

import pytest
from imported_recipes import imported, left

from vlmrl.errors import VlmrlError
from vlmrl.recipe.checks import check_unprepared
from vlmrl.setup.catalogs import catalogs

SHAPES = """#!/bin/bash
set -x
BASE=me/tiny-vl-1b   # or a folder
ROWS="lab/shapes-20k"
NAME=shapes_first
CUDA_VISIBLE_DEVICES=2 torchrun --master_port=29555 --nproc_per_node=3 -m rllava.train.pipeline.rlvr \\
    config=examples/config.yaml \\
    data.train_files=${ROWS}@train \\
    data.val_files=${ROWS}@dev \\
    data.answer_key=label \\
    data.format_prompt=./prompts/shapes.jinja \\
    data.train_batch_size=24 \\
    data.max_prompt_length=700 \\
    data.max_response_length=256 \\
    actor.model.model_path=${BASE} \\
    actor.ppo_mini_batch_size=8 \\
    actor.clip_ratio_high=0.25 \\
    actor.kl_loss_coef=0.02 \\
    actor.optim.warmup_style=cosine actor.optim.lr_warmup_steps=7 \\
    reward.reward_type=sequential \\
    reward.reward_function=./rewards/shapes.py:grade \\
    reward.reward_function_kwargs.weight=0.3 \\
    rollout.val_override_config.temperature=0.6 \\
    trainer.experiment_name=${NAME} \\
    trainer.logger='["console","wandb","swanlab"]' trainer.project_name=forms \\
    trainer.total_epochs=2 trainer.n_gpus_per_node=8
"""
BASE_YAML = """
data: {train_files: x/y@train, prompt_key: question, train_batch_size: 40, filter_overlong_prompts: true}
algorithm: {adv_estimator: rloo, online_filtering: true, filter_low: 0.1, use_kl_loss: false}
actor:
  ppo_mini_batch_size: 10
  max_grad_norm: 0.5
  model: {model_path: some/model, trust_remote_code: true, use_peft: true, lora_r: 12, lora_alpha: 24,
          lora_dropout: 0.1}
  optim: {lr: 2.0e-6, strategy: adamw_bf16, betas: [0.9, 0.95]}
  fsdp: {offload_params: true, offload_optimizer: true, fsdp_size: 2}
rollout: {name: sglang, n: 6, top_p: 0.8, seed: 5}
critic: null
reward: {reward_function: grade.py}
trainer: {max_steps: 90, val_freq: 15, save_freq: -1, save_limit: 4, max_try_make_batch: 3, logger: [console]}
"""
MINIMAL = "data: {train_files: a/b@train}\nactor: {model: {model_path: m/m}}\nreward: {reward_function: r.py:f}\n"


def test_a_launch_script_alone(tmp_path):
    """The example that it starts from is not there: its known settings stand for it."""
    loaded, report = imported(tmp_path, SHAPES, "run.sh", rows=1200)
    r = loaded.recipe
    assert (report["system"], r.kind, r.model.path) == ("rllava", "rl", "me/tiny-vl-1b")
    assert (r.data[0].path, r.data[0].split, r.data[0].validation) == ("hub:lab/shapes-20k", "train", "dev")
    assert r.data[0].columns == {"answer": "label"}, "the example's prompt column is one that is recognised"
    assert r.data[0].prompt == "./prompts/shapes.jinja"
    assert (r.rollout.prompts_per_step, r.train.updates_per_step, r.rollout.samples_per_prompt) == (24, 3, 5)
    assert (r.rollout.max_prompt_tokens, r.rollout.max_new_tokens, r.rollout.engine) == (700, 256, "vllm")
    assert (r.algo.name, r.algo.clip_low, r.algo.clip_high, r.algo.dual_clip) == ("grpo", 0.2, 0.25, 3.0)
    assert (r.algo.kl, r.algo.kl_in, r.algo.kl_coef) == ("low_var_kl", "loss", 0.02), (
        "its KL is on where nothing is said"
    )
    assert (r.optim.schedule, r.optim.warmup_steps) == ("cosine", 7)
    assert (r.reward.name, r.reward.style, r.reward.args) == ("./rewards/shapes.py:grade", "easyr1", {"weight": 0.3})
    assert r.train.steps == 2 * (1200 // 24)
    assert (r.eval.every_steps, r.checkpoint.every_steps, r.checkpoint.keep_last) == (5, 20, 2), "the example's"
    assert (r.log.sinks, r.log.project) == (["wandb"], "forms")
    assert any("swanlab" in todo for todo in report["todo"])
    assert any("compare with config.yaml" in todo for todo in report["todo"])
    why = left(report)
    assert "not read there" in why["trainer.n_gpus_per_node"]
    assert why["nproc_per_node"].endswith("--gpus 3") and why["trainer.experiment_name"].endswith("--name shapes_first")
    assert "greedy" in why["rollout.val_override_config.temperature"]


def test_a_launch_script_with_its_configuration_beside_it(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "config.yaml").write_text(BASE_YAML)
    (tmp_path / "examples" / "tasks").mkdir()
    made, report = imported(tmp_path / "examples" / "tasks", SHAPES, "run.sh")
    r = made.recipe
    assert any("settings of" in note for note in report["notes"])
    assert (r.rollout.prompts_per_step, r.train.updates_per_step) == (24, 3), "the script is over the file"
    assert (r.rollout.samples_per_prompt, r.optim.max_grad_norm, r.train.steps) == (6, 0.5, 90), "the file's own"


def test_a_configuration(tmp_path):
    loaded, report = imported(tmp_path, BASE_YAML)
    r = loaded.recipe
    assert (r.rollout.prompts_per_step, r.train.updates_per_step, r.rollout.samples_per_prompt) == (40, 4, 6)
    assert (r.algo.advantage, r.algo.kl_coef, r.algo.filter, r.algo.filter_tries) == ("leave_one_out", 0.0, "spread", 3)
    assert r.lora is not None and (r.lora.rank, r.lora.alpha, r.lora.targets) == (12, 24, "all-linear")
    assert (r.optim.name, r.optim.lr, r.optim.beta1, r.optim.beta2) == ("adamw_bf16_kahan", 2e-6, 0.9, 0.95)
    assert (r.parallel.offload, r.parallel.shard_size) == (True, 2)
    assert (r.rollout.top_p, r.rollout.allow_filtered_sampling) == (0.8, True)
    assert (r.reward.name, r.train.steps, r.checkpoint.keep_last) == ("grade.py:main", 90, 4)
    assert (r.eval.every_steps, r.checkpoint.every_steps) == (15, 0)
    assert r.model.trust_remote_code is False, "code of a repository is run for nobody by habit"
    why = left(report)
    assert "sglang" in why["rollout.name"] and "dropout" in why["actor.model.lora_dropout"]
    assert not any(reason == "no counterpart is known" for reason in why.values())


ADVANTAGES = [
    ("algorithm.adv_estimator=grpo", {}),
    ("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false", {"advantage": "group_mean"}),
    ("algorithm.adv_estimator=grpo_passk", {"advantage": "best_of_group", "scale": "group"}),
    ("algorithm.adv_estimator=remax", {"advantage": "greedy"}),
    ("algorithm.adv_estimator=opo", {"advantage": "length_weighted"}),
    (
        "algorithm.adv_estimator=gpg actor.policy_loss.loss_mode=gpg",
        {"advantage": "group_mean", "scale": "alive", "surrogate": "reinforce"},
    ),
    (
        "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.99",
        {"advantage": "none", "scale": "tokens", "gamma": 0.99},
    ),
    ("algorithm.adv_estimator=reinforce_plus_plus_baseline", {"advantage": "group_mean", "scale": "tokens"}),
    ("algorithm.adv_estimator=gae algorithm.lam=0.9", {"advantage": "gae", "scale": "tokens", "gae_lambda": 0.9}),
    (
        "actor.policy_loss.loss_mode=gspo actor.clip_ratio_low=0.0003",
        {"ratio": "sequence_token", "aggregation": "sequence_mean", "clip_low": 0.0003},
    ),
    ("actor.policy_loss.loss_mode=geo_mean", {"surrogate": "gmpo", "aggregation": "sequence_mean"}),
    (
        "actor.policy_loss.loss_mode=kl_cov actor.policy_loss.kl_cov_ratio=0.002 actor.policy_loss.ppo_kl_coef=1.0",
        {"surrogate": "kl_cov", "cov_share": 0.002, "cov_kl_coef": 1.0},
    ),
    (
        "actor.policy_loss.loss_mode=clip_cov actor.clip_ratio_low=1.0 actor.clip_ratio_high=1.0",
        {"name": "clip_cov", "surrogate": "clip_cov", "cov_share": 2e-4, "clip_low": None, "clip_high": 1.0},
    ),
    ("actor.clip_ratio_low=1.5", {"clip_low": 1 - 1e-6}),
    ("actor.loss_agg_mode=seq-mean-token-sum-norm", {"aggregation": "constant"}),
    ("actor.loss_agg_mode=seq-mean-token-mean", {"aggregation": "sequence_mean"}),
    (
        "algorithm.use_kl_loss=false algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.004",
        {"kl_in": "reward", "kl": "k1", "kl_coef": 0.004},
    ),
    (
        "algorithm.use_kl_loss=false algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive "
        "algorithm.kl_ctrl.target_kl=0.05",
        {"kl_target": 0.05, "kl_horizon": 10_000.0},
    ),
    ("actor.kl_loss_type=k3+", {"kl": "low_var_kl"}),
    ("actor.entropy_coeff=0.002", {"entropy_coef": 0.002}),
]


@pytest.mark.parametrize(("words", "cells"), ADVANTAGES)
def test_algorithms(tmp_path, words, cells):
    script = f"torchrun -m rllava.train.pipeline.rlvr data.train_files=a/b actor.model.model_path=m/m {words}\n"
    loaded, report = imported(tmp_path, script, "run.sh")
    found = {name: getattr(loaded.recipe.algo, name) for name in cells}
    assert found == cells
    assert not any(reason == "no counterpart is known" for reason in left(report).values())


@pytest.mark.parametrize(
    ("loss", "samples", "cells"),
    [
        ("luffy", 7, {}),
        ("srft", 7, {}),
        ("uft", 8, {"hint_most": 0.9, "hint_steps": 50, "demonstration_coef": 2.0}),
        ("hpt", 8, {"most_solved": 1}),
    ],
)
def test_losses_that_learn_from_demonstrations_are_rows_of_the_same_name(tmp_path, loss, samples, cells):
    script = (
        f"torchrun -m rllava.train.pipeline.sft_rl data.train_files=a/b actor.policy_loss.loss_mode={loss} rollout.n=8"
        " algorithm.prefix_strategy=random algorithm.n_prefix=1 actor.off_policy_reshape=p_div_p_0.1"
        " algorithm.switch_gate=1 algorithm.hint_steps=50 algorithm.max_prefix_ratio=0.9 actor.sft_loss_coef=2"
        " actor.loss_remove_clip=True data.dataset_kwargs.target_key=steps\n"
    )
    loaded, report = imported(tmp_path, script, "run.sh")
    why, recipe = left(report), loaded.recipe
    assert (recipe.algo.name, recipe.rollout.samples_per_prompt) == (loss, samples)
    assert {name: getattr(recipe.algo, name) for name in cells} == cells and recipe.algo.clip_low is None
    assert recipe.data[0].columns["response"] == "steps"
    for key in ("algorithm.prefix_strategy", "algorithm.n_prefix", "actor.off_policy_reshape"):
        assert "demonstrations" in why[key]


def test_several_turns_are_named(tmp_path):
    script = (
        "torchrun -m rllava.train.pipeline.agentic data.train_files=a.json@train,b.parquet data.val_files=b.parquet"
        " rollout.max_turns=4 rollout.env_config_path=./env.yaml data.answer_key=reward_model"
        " data.train_image_dir=pics\n"
    )
    loaded, report = imported(tmp_path, script, "run.sh")
    environment = loaded.recipe.environment
    assert (environment.name, environment.turns, environment.tokens) == ("tools.py:TOOLS", 4, 4 * (512 + 1024))
    assert any("rewrite the environment" in todo for todo in report["todo"]), "its file was not found"
    assert any("b.parquet" in todo for todo in report["todo"]), "one more [[data]] entry"
    data = loaded.recipe.data[0]
    assert (data.path, data.split, data.images_root) == ("a.json", "train", "pics")
    assert data.validation is None and "memory" in left(report)["data.val_files"], "its rows are trained on too"
    assert "answer" not in data.columns and "recognised" in left(report)["data.answer_key"]


def test_the_supervised_pipeline(tmp_path):
    script = (
        "torchrun -m rllava.train.pipeline.sft data.train_files=a/b data.train_batch_size=32 data.prompt_key=question"
        " data.answer_key=solution actor.model.model_path=m/m actor.optim.lr=1e-5 trainer.max_steps=60\n"
    )
    loaded, _ = imported(tmp_path, script, "run.sh")
    r = loaded.recipe
    assert (r.kind, r.train.rows_per_step, r.train.steps, r.optim.lr) == ("sft", 32, 60, 1e-5)
    assert r.data[0].columns["response"] == "solution" and r.reward.name is None
    made = (tmp_path / "made.toml").read_text()
    assert "[algo]" not in made and "samples_per_prompt" not in made


def test_a_configuration_beside_the_script_is_found_although_the_shell_names_it(tmp_path):
    (tmp_path / "mixed.yaml").write_text(
        "data: {train_files: '${oc.env:OWN_ROWS,lab/rows@train}'}\nalgorithm: {strategy: mix_chord, mu_peak: 0.4}\n"
        "actor: {ulysses_size: 2, model: {model_path: m/m}}\nmix_sampler: {sft_dataset: {path: lab/traces}}\n"
    )
    script = (
        'HERE=$(cd "$(dirname "$0")" && pwd)\nCONFIG="$HERE/mixed.yaml"\n'
        'torchrun -m rllava.train.pipeline.rlvr --config "$CONFIG" \\\n  actor.model.model_path=${OWN_MODEL:-m/other}\n'
    )
    loaded, report = imported(tmp_path, script, "run.sh")
    assert (loaded.recipe.data[0].path, loaded.recipe.model.path) == ("hub:lab/rows", "m/other")
    assert any("supervised rows" in todo for todo in report["todo"])
    assert left(report)["algorithm.mu_peak"] == "not read there either"


SETTINGS = """
data: val_image_dir video_key video_fps val_batch_size override_chat_template shuffle seed num_workers
 filter_overlong_prompts_workers dataset_class dataset_kwargs.val.image_key min_pixels max_pixels
algorithm: gamma lam kl_penalty kl_ctrl.type kl_ctrl.horizon kl_ctrl.target_kl filter_key filter_low filter_high
 unify_strategy switch_gate success_reward_threshold prefix_strategy min_prefix_ratio max_prefix_ratio n_prefix
 prefix_share_across_samples hint_steps hint_min_ratio hint_max_ratio expert_data_ratio
actor: strategy ppo_micro_batch_size log_prob_micro_batch_size skip_grad_norm clip_ratio clip_upper_bound
 tis_imp_ratio_cap ppo_epochs use_torch_compile off_policy_reshape off_policy_reshape_weight off_policy_cliprange
 off_policy_normalize off_policy_max_clip on_policy_reshape on_policy_reshape_pow_exp all_max_clip srft_type
 sft_loss_coef hpt_hint_loss_coef checkpoint.save_contents checkpoint.async_save deepspeed.zero_stage
 policy_loss.kl_cov_ratio fsdp.enable_cpu_offload fsdp.offload_optimizer fsdp.use_orig_params fsdp.mixed_precision
 model.tokenizer_path model.torch_dtype model.tie_word_embeddings model.attn_implementation model.override_config.x
 model.enable_activation_offload model.freeze_vision_tower model.padding_free model.dynamic_batching
 model.ulysses_size model.lora_task_type model.lora_r model.lora_target_modules model.lora_use_rslora
 model.lora_weight_path model.lora_bias model.lora_modules_to_save model.use_rslora optim.lr_scheduler_type
 optim.num_cycles optim.lr_warmup_ratio
critic: strategy ppo_epochs cliprange_value model.lora_r optim.lr
rollout: seed limit_images ignore_eos disable_tqdm micro_batch_size val_override_config.n partial_rollout async_mode
 bucket_size load_format max_turns discount tool_config_path env_config_path vllm.dtype vllm.max_model_len
 sglang.mem_fraction_static
reward: skip_special_tokens num_cpus model.model_path
trainer: nnodes n_gpus_per_node max_try_make_batch critic_warmup val_before_train val_only val_generations_to_log
 save_model_only outputs_dir save_checkpoint_path load_checkpoint_path find_last_checkpoint async_training
"""


def test_every_setting_that_rllava_knows_is_mapped_or_left_with_a_reason(tmp_path):
    words = []
    for line in SETTINGS.replace("\n ", " ").strip().splitlines():
        table, _, names = line.partition(":")
        words += [f"{table}.{name}=1" for name in names.split()]
    assert len(words) > 110
    script = (
        f"torchrun -m rllava.train.pipeline.rlvr data.train_files=a/b actor.model.model_path=m/m {' '.join(words)}\n"
    )
    _, report = imported(tmp_path, script, "run.sh")
    unknown = [key for key, why in left(report).items() if why == "no counterpart is known"]
    assert unknown == []
    named = {item["key"] for item in report["left_out"]} | set(report["as_here"])
    named |= {source for item in [*report["mapped"], *report["changed"]] for source in item["from"].split(" and ")}
    assert {word.partition("=")[0] for word in words} <= named


def test_an_unknown_setting_is_named_as_unknown(tmp_path):
    _, report = imported(tmp_path, MINIMAL + "surprise: {a: 1}\n")
    assert left(report) == {"surprise.a": "no counterpart is known"}


@pytest.mark.parametrize(
    ("script", "rollout"),
    [
        ("torchrun -m rllava.train.pipeline.rlvr actor.model.model_path=m/m", "rollout"),
        ("python3 -m verl.trainer.main worker.actor.model.model_path=m/m", "worker.rollout"),
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m/m", "actor_rollout_ref.rollout"),
    ],
)
def test_an_unknown_setting_of_a_known_table_is_named_as_unknown(tmp_path, script, rollout):
    words = f"{rollout}.foo=3 {rollout}.gpu_memory_utilization=0.4"
    _, report = imported(tmp_path, f"{script} data.train_files=a/b {words}\n", "run.sh")
    assert left(report)[f"{rollout}.foo"] == "no counterpart is known"
    assert left(report)[f"{rollout}.gpu_memory_utilization"].startswith("the engine decides this itself")


@pytest.mark.parametrize(("text", "name"), [(SHAPES, "run.sh"), (BASE_YAML, "c.yaml"), (MINIMAL, "c.yaml")])
def test_what_is_imported_passes_the_rules(tmp_path, monkeypatch, text, name):
    monkeypatch.chdir(tmp_path)
    for file in ("rewards/shapes.py", "grade.py", "r.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("def grade(x, weight=1): ...\ndef main(x): ...\ndef f(x): ...\n")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "shapes.jinja").write_text("{{ problem }}")
    loaded, _ = imported(tmp_path, text, name)
    wrong = [p.message for p in check_unprepared(loaded, catalogs()) if p.level == "error"]
    alone = ["`rollout.samples_per_prompt` is 1"] if text == MINIMAL else []  # its default, which no script leaves
    assert [m[: len(a)] for m, a in zip(wrong, alone, strict=True)] == alone


def test_nothing_of_a_file_is_run(tmp_path):
    bait = tmp_path / "ran"
    script = SHAPES.replace("lab/shapes-20k", f"$(touch {bait})") + f"touch {bait}\n`touch {bait}`\n"
    imported(tmp_path, script, "run.sh")
    with pytest.raises(VlmrlError):
        imported(tmp_path, f"actor: !!python/object/apply:os.system ['touch {bait}']\n")
    assert not bait.exists()


# Loggers, of every system


@pytest.mark.parametrize(
    ("text", "name", "sinks", "project", "entity"),
    [
        (
            "worker: {rollout: {n: 4}}\ntrainer: {logger: [console, wandb], project_name: p, entity_name: e}",
            "e.yaml",
            ["wandb"],
            "p",
            "e",
        ),
        (
            "actor_rollout_ref: {rollout: {n: 4}}\ntrainer: {logger: [console, tensorboard], project_name: p}",
            "v.yaml",
            ["tensorboard"],
            None,
            None,
        ),
        (MINIMAL + "trainer: {logger: trackio, project_name: p}", "r.yaml", ["trackio"], "p", None),
        (
            "num_generations: 8\nbeta: 0.0\nreport_to: wandb\nwandb_project: p\nwandb_entity: e\n",
            "t.yaml",
            ["wandb"],
            "p",
            "e",
        ),
        ("num_generations: 8\nbeta: 0.0\nreport_to: [none]\nproject: p\n", "t.yaml", [], None, None),
    ],
)
def test_loggers_are_taken_over(tmp_path, text, name, sinks, project, entity):
    loaded, report = imported(tmp_path, text, name)
    log = loaded.recipe.log
    assert (log.sinks, log.project, log.entity) == (sinks, project, entity)
    assert not any("logg" in why for why in left(report).values() if sinks)


def test_a_lower_clip_of_one_of_verl(tmp_path):
    text = "actor_rollout_ref: {actor: {policy_loss: {loss_mode: clip_cov}, clip_ratio_low: 1, clip_ratio_high: 1}}\n"
    loaded, _ = imported(tmp_path, text)
    assert (loaded.recipe.algo.name, loaded.recipe.algo.clip_low, loaded.recipe.algo.clip_high) == (
        "clip_cov",
        None,
        1.0,
    )
