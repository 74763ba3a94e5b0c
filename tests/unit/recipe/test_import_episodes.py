"""`recipe import` of configurations with tools: what becomes `[environment]`, and what is left to do by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imported_recipes
import pytest
from imported_recipes import left

from vlmrl.errors import RecipeError
from vlmrl.recipe.imports.trl import PEFT_TARGETS
from vlmrl.recipe.schema import Recipe

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b data.max_response_length=2000 "
MULTI = "actor_rollout_ref.rollout.multi_turn"
TOOLS = """
tools:
  - class_name: "my.tools.zoom.Zoom"
    config: {type: native, rate: 2, note: null}
    tool_schema:
      type: function
      function:
        name: zoom
        description: "Show a part."
        parameters:
          type: object
          properties: {box: {type: array, items: {type: number}}, label: {type: string, enum: [a, b]}}
          required: [box]
  - class_name: "my.tools.search.Search"
"""
SCRIPT = """
import os
from trl import GRPOConfig, GRPOTrainer
from lab.tools import zoom as look
from rewards import right

MODEL = "lab/tiny-vl"
os._exit(3)  # it is parsed and never run

def flip(image: int):
    "Flip it."

args = GRPOConfig(output_dir="out", max_completion_length=1200, num_generations=4, learning_rate=2e-6,
                  max_tool_calling_iterations=2, seed=int(os.environ["SEED"]))
GRPOTrainer(model=MODEL, args=args, reward_funcs=[right], WHAT)
"""


def imported(folder: Path, text: str, name: str) -> tuple[Recipe, dict[str, Any]]:
    loaded, report = imported_recipes.imported(folder, text, name)
    return loaded.recipe, report


def todo(report: dict[str, Any], *words: str) -> bool:
    return any(all(word in one for word in words) for one in report["todo"])


def test_verls_class_of_a_tool_with_its_arguments_and_limits(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/tools.yaml").write_text(TOOLS)
    words = (
        f"{MULTI}.enable=True {MULTI}.max_assistant_turns=5 {MULTI}.tool_config_path=conf/tools.yaml "
        f"{MULTI}.format=hermes {MULTI}.max_tool_response_length=1001 {MULTI}.tool_response_truncate_side=left "
        f"{MULTI}.max_parallel_calls=3 actor_rollout_ref.rollout.agent.num_workers=8"
    )
    recipe, report = imported(tmp_path, VERL + words, "run.sh")
    environment = recipe.environment
    assert (environment.name, environment.turns, environment.calls) == ("my/tools/zoom.py:Zoom", 5, "hermes")
    # 2000 tokens of an episode are 400 for each of five turns; 1001 characters are about 250.25 tokens.
    assert (environment.tokens, recipe.rollout.max_new_tokens, environment.observation_tokens) == (2000, 400, 251)
    assert json.loads(environment.args["config"]) == {"type": "native", "rate": 2, "note": None}
    assert json.loads(environment.args["tool_schema"])["function"]["parameters"]["properties"]["label"]["enum"] == [
        "a",
        "b",
    ]
    assert todo(report, "one class", "my.tools.search.Search") and todo(report, "the file of my.tools.zoom.Zoom")
    why = left(report)
    assert "middle" in why[f"{MULTI}.tool_response_truncate_side"] and "one after" in why[f"{MULTI}.max_parallel_calls"]
    assert "environment.workers" in why["actor_rollout_ref.rollout.agent.num_workers"]


def test_verls_functions_must_be_listed_and_unlimited_turns_must_be_set(tmp_path: Path) -> None:
    words = f"actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent {MULTI}.function_tool_path=lib/f.py"
    recipe, report = imported(tmp_path, f"{VERL} {words} {MULTI}.format=gpt-oss", "run.sh")
    assert (recipe.environment.name, recipe.environment.turns, recipe.rollout.max_new_tokens) == (
        "lib/f.py:TOOLS",
        4,
        500,
    )
    assert todo(report, "`TOOLS = [...]`", "lib/f.py") and todo(report, "set environment.turns")
    assert "chat template" in left(report)[f"{MULTI}.format"]


def test_verl_with_one_turn_has_no_environment(tmp_path: Path) -> None:
    recipe, report = imported(tmp_path, f"{VERL} {MULTI}.enable=False {MULTI}.max_assistant_turns=5", "run.sh")
    assert recipe.environment.name == "" and "one turn" in left(report)[f"{MULTI}.max_assistant_turns"]


def test_a_file_of_tools_that_is_missing_or_holds_none_is_left_to_name(tmp_path: Path) -> None:
    for text in (None, "tools: 5", "- a", "tools: [{class_name: null}]"):
        if text is not None:
            (tmp_path / "t.yaml").write_text(text)
        recipe, report = imported(tmp_path, f"{VERL} {MULTI}.enable=True {MULTI}.tool_config_path=t.yaml", "run.sh")
        assert recipe.environment.name == "tools.py:TOOLS" and todo(report, "name the tools"), text


@pytest.mark.parametrize(
    ("argument", "lora", "computed"),
    [
        ('LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], task_type="CAUSAL_LM")', (4, 12, ["q_proj"]), ()),
        ("peft.LoraConfig(r=len(NAMES), use_dora=True)", (8, 8, PEFT_TARGETS), ("peft_config.r",)),
        ("ADAPTER", (16, 8, PEFT_TARGETS), ()),
        ("get_peft_config(args)", None, ("peft_config",)),
    ],
)
def test_the_literal_arguments_of_a_lora_config_are_read(
    tmp_path: Path, argument: str, lora: tuple[object, ...] | None, computed: tuple[str, ...]
) -> None:
    script = f"ADAPTER = LoraConfig(r=16)\n{SCRIPT.replace('WHAT', f'peft_config={argument}')}"
    recipe, report = imported(tmp_path, script, "train.py")
    found = recipe.lora
    assert lora == (found and (found.rank, found.alpha, found.targets))
    assert found is None or found.dora == ("dora" in argument)
    assert [todo(report, f"`{name}` is computed") for name in ("peft_config", "peft_config.r")] == [
        name in computed for name in ("peft_config", "peft_config.r")
    ]


def test_the_layers_that_peft_takes_where_none_are_named_are_written_out(tmp_path: Path) -> None:
    constants = pytest.importorskip("peft.utils.constants")
    layers = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert layers["qwen2"] == layers["qwen3"] == layers["gemma3_text"] == layers["llama4"] == PEFT_TARGETS
    report = imported(tmp_path, SCRIPT.replace("WHAT", "peft_config=LoraConfig(r=16)"), "train.py")[1]
    (written,) = [item for item in report["changed"] if item["key"] == "lora.targets"]
    assert (written["value"], written["why"]) == (PEFT_TARGETS, "PEFT's own choice; here it is all-linear")


@pytest.mark.parametrize(
    ("what", "name", "words"),
    [
        ("tools=[look]", "lab/tools.py:zoom", ()),
        ("tools=[flip]", "train.py:flip", ("must not train",)),
        ("tools=[look, flip]", "lab/tools.py:TOOLS", ("TOOLS = [zoom, flip]",)),
        ("environment_factory=World", "train.py:World", ("must not train",)),
        ("environment_factory=look, tools=[flip]", "lab/tools.py:zoom", ("methods of the environment's class",)),
        ("environment_factory={'a': look}", "train.py:ENVIRONMENTS", ("must not train",)),
        ("", "tools.py:TOOLS", ("name the tools",)),
    ],
)
def test_a_script_of_trl_is_read_and_not_run(tmp_path: Path, what: str, name: str, words: tuple[str, ...]) -> None:
    recipe, report = imported(tmp_path, SCRIPT.replace("WHAT", what), "train.py")
    assert report["system"] == "trl" and recipe.model.path == "lab/tiny-vl" and recipe.optim.lr == 2e-6
    environment = recipe.environment
    # Two rounds of tools and the answer: three turns, of 400 tokens each.
    assert environment.name.removeprefix(f"{tmp_path}/") == name
    assert (environment.turns, environment.tokens) == (3, 1200)
    assert (recipe.rollout.max_new_tokens, recipe.rollout.samples_per_prompt) == (400, 4)
    assert (recipe.reward.name, recipe.reward.style) == ("rewards.py:right", "trl")
    assert all(todo(report, word) for word in (*words, "`seed` is computed"))
    assert not any("__script__" in str(part) for part in report.values())


def test_the_flags_of_a_command_with_the_tools_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("WHAT", "tools=[look]"))
    command = "accelerate launch train.py --model_name_or_path a/b --num_generations 4 --max_completion_length 900"
    recipe, _ = imported(tmp_path, f"{command} --max_tool_calling_iterations 8\n", "run.sh")
    assert (recipe.environment.name, recipe.environment.turns, recipe.environment.tokens) == (
        "lab/tools.py:zoom",
        9,
        900,
    )
    assert (recipe.rollout.max_new_tokens, recipe.model.path) == (100, "a/b")


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\n", "(" * 3000])
def test_a_script_without_settings_is_an_error_in_words(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot be read|no settings"):
        imported(tmp_path, text, "train.py")


def test_rllavas_environment_is_named_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text('env:\n  class_name: "./tasks/eyes.py:Eyes"\n  config: {min_side: 28}\n')
    words = "rollout.max_turns=3 rollout.env_config_path=env.yaml data.max_response_length=100"
    script = f"torchrun -m rllava.train.pipeline.agentic data.train_files=a.json {words}\n"
    recipe, report = imported(tmp_path, script, "run.sh")
    environment = recipe.environment
    # 100 is the limit of a turn there: three turns, and 1024 tokens for what the tools show behind each.
    assert (environment.name, environment.turns, environment.tokens) == ("./tasks/eyes.py:Eyes", 3, 3372)
    assert (environment.args, recipe.rollout.max_new_tokens) == ({"min_side": 28}, 100)
    assert todo(report, "rewrite ./tasks/eyes.py:Eyes", "extract_action")
    assert not todo(report, "a file of one line")


AGENT = """#!/bin/bash
MODEL="Qwen/MODEL"
ROWS="../cache/rft_agent.json"
TRAIN="${ROWS}@train"
CUDA_VISIBLE_DEVICES=3 torchrun --master_port=29501 --nproc_per_node=1 -m rllava.train.pipeline.PIPELINE \\
    config=examples/config.yaml algorithm.adv_estimator=grpo algorithm.use_kl_loss=false \\
    data.train_files=${TRAIN} data.val_files=${TRAIN} data.image_key=image_path data.answer_key=solution \\
    data.train_image_dir=../cache/pictures data.dataset_class=rows.py:Rows data.format_prompt=./agent.jinja \\
    data.train_batch_size=8 data.max_prompt_length=4096 data.max_response_length=2048 data.max_pixels=401408 \\
    actor.model.model_path=${MODEL} actor.ppo_mini_batch_size=2 rollout.n=5 rollout.seed=None TURNS \\
    reward.reward_function=./reward.py:compute_score trainer.save_freq=40 trainer.total_epochs=80
"""


@pytest.mark.parametrize(
    ("name", "turns", "tool"),
    [("AgentSearchEnv", 3, "vlmrl.search.tool.Search"), ("AgentCodeEnv", 5, "vlmrl.environments.python_tool.Python")],
)
def test_scripts_of_agents_in_episodes(tmp_path: Path, name: str, turns: int, tool: str) -> None:
    (tmp_path / "env.yaml").write_text(f"env:\n  class_name: ./tasks/agent_env.py:{name}\n  config: {{top_k: 4}}\n")
    lines = AGENT.replace("PIPELINE", "agentic").replace('MODEL"', 'Qwen2.5-VL-3B-Instruct"', 1)
    lines = lines.replace("TURNS", f"rollout.max_turns={turns} rollout.env_config_path=./env.yaml")
    recipe, report = imported(tmp_path, lines, "run.sh")
    environment = recipe.environment
    assert (environment.name, environment.turns) == (f"./tasks/agent_env.py:{name}", turns)
    assert (environment.tokens, environment.args) == (turns * 3072, {"top_k": 4})
    numbers = (recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.rollout.max_new_tokens)
    assert (*numbers, recipe.train.updates_per_step, recipe.train.epochs) == (8, 5, 2048, 4, 80)
    assert (recipe.algo.kl_coef, recipe.model.max_pixels, recipe.rollout.max_prompt_tokens) == (0.0, 401408, 4096)
    assert recipe.data[0].columns == {"answer": "solution", "images": "image_path"}
    assert todo(report, "rewrite ./tasks/agent_env.py", f"or name {tool} in a file of one line")


def test_scripts_of_agents_in_single_steps_have_no_environment(tmp_path: Path) -> None:
    lines = AGENT.replace("PIPELINE", "rlvr").replace('MODEL"', 'Qwen2.5-VL-3B-Instruct"', 1).replace("TURNS", "")
    recipe, report = imported(tmp_path, lines, "run.sh")
    assert not recipe.environment.name and recipe.data[0].path == "../cache/rft_agent.json"
    assert recipe.reward.name.endswith("reward.py:compute_score") and not todo(report, "extract_action")
