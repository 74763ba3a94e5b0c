"""Choice of a value for every key that a recipe leaves open, before the run begins (recipe/auto_values.py).

`rollout.engine = "auto"` is vLLM on a GPU where it can run, else the built-in engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.dist import world
from vlmrl.errors import Problem, VlmrlError
from vlmrl.key_facts import MOST
from vlmrl.model.memory import KEY as RECOMPUTATION
from vlmrl.recipe.auto_values import OPEN, Choice, Chooser, choose, fill_open_keys, open_keys, with_values
from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.engine import VLLM_INSTALL, unsupported_by_vllm, vllm_refusal
from vlmrl.recipe.schema import Model, Recipe, Train
from vlmrl.recipe.toml_lines import AUTO_ORIGIN
from vlmrl.redaction.redact import first_line
from vlmrl.rollout.vllm.settings import VllmFacts
from vlmrl.setup.memory_fit import HERE, Target, choose_recomputation, find_cluster
from vlmrl.setup.memory_sizes import Gpu, PromptLengths, known_gpu
from vlmrl.setup.prompt_lengths import estimate_prompts
from vlmrl.setup.rows import open_sources

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts


def choosers(settings: Model, files: Callable[[], str], where: str, target: Target = HERE) -> Mapping[str, Chooser]:
    """Return, for each key of `OPEN` that needs no memory plan, the function that chooses its value.

    Args:
        files: returns the folder or hub name with the model's configuration; it is called only if needed.
        where: place of the chosen keys in the recipe, for messages.
    """
    from vlmrl.model.model_facts import device_facts, model_facts
    from vlmrl.rollout.vllm.settings import probe_vllm

    def engine(recipe: Recipe) -> Choice:
        device, _ = device_facts(recipe.model.device) if recipe.model.device != "cpu" else ({"kind": "cpu"}, [])
        gpu = target.gpu
        if gpu is None and device["kind"] == "cuda":
            gpu = known_gpu(device["name"]) or Gpu(device["name"], int(device["memory_bytes"]))
        return choose_engine(recipe, EngineWorld(gpu, probe_vllm, model, where, target.is_elsewhere))

    def model() -> ModelFacts:
        return model_facts(settings, path=files())

    def uses_gpu(recipe: Recipe) -> bool:
        name = recipe.model.device
        return target.gpu is not None or (name != "cpu" and device_facts(name)[0]["kind"] == "cuda")

    def dtype(recipe: Recipe) -> Choice:
        if recipe.optim.name == "adamw_bf16_kahan":
            return Choice("model.dtype", "bfloat16", f"optim.name = {recipe.optim.name} holds bfloat16 weights")
        if uses_gpu(recipe):
            return Choice("model.dtype", "bfloat16", "a GPU is used")
        return Choice("model.dtype", "float32", "no GPU is used")

    def compilation(recipe: Recipe) -> Choice:
        return choose_compilation(recipe, model) if uses_gpu(recipe) else Choice(COMPILE, False, "no GPU is used")

    return {
        "eval.metric": choose_metric,
        "eval.goal": lambda recipe: Choice("eval.goal", "min", f"{recipe.eval.metric} is better when lower"),
        "train.steps": count_steps,
        "optim.warmup_steps": count_warmup,
        "model.dtype": dtype,
        COMPILE: compilation,
        "rollout.engine": engine,
    }


def choose_compilation(recipe: Recipe, model: Callable[[], ModelFacts]) -> Choice:
    """Choose `model.compile` for a GPU: whether flash attention runs the packed rows of this model.

    Args:
        model: reads the model's configuration; may raise a VlmrlError.
    """
    if recipe.model.quantize is not None:
        return Choice(COMPILE, False, "4-bit weights are not compiled")
    try:
        facts = model()
    except VlmrlError as error:  # the check of the model reports the same problem as an error
        return Choice(COMPILE, False, f"the model cannot be read: {first_line(error)}")
    if facts.sharing != "packed":
        return Choice(COMPILE, False, "responses do not share packed rows")
    if not facts.by_flash(recipe.model.dtype):
        why = "float32 rows, and bidirectional images, run by FlexAttention, which is compiled by itself"
        return Choice(COMPILE, False, why)
    return Choice(COMPILE, True, "packed rows on a GPU")


def choose_metric(recipe: Recipe) -> Choice:
    """Choose what selects the best checkpoint of a supervised run: the loss if a source has no reward."""
    from vlmrl.rewards.base import NO_REWARD
    from vlmrl.tasks.source import open_source

    try:
        for data in recipe.data:
            source = open_source(data, recipe.reward, scored=False)
            if source.reward is NO_REWARD:
                return Choice("eval.metric", "loss", f"source `{source.name}` has no reward")
    except VlmrlError as error:  # the check of the data reports the same problem as an error
        return Choice("eval.metric", "loss", f"the rewards cannot be read: {first_line(error)}")
    return Choice("eval.metric", "reward", "every source has a reward")


def count_steps(recipe: Recipe) -> Choice:
    """Compute `train.steps` from `train.epochs`: the steps in which epochs times the number of rows are drawn."""
    from vlmrl.data.dataset import require_split
    from vlmrl.data.open_dataset import open_dataset

    is_rl, rows = recipe.kind == "rl", 0
    per_step = recipe.rollout.prompts_per_step if is_rl else recipe.train.rows_per_step
    try:
        for data in recipe.data:
            dataset = open_dataset(data)
            require_split(dataset, data.split)
            rows += min(dataset.splits[data.split], data.max_rows or MOST)
    except VlmrlError as error:  # the check of the data reports the same problem as an error
        return Choice("train.steps", Train().steps, f"the rows cannot be counted: {first_line(error)}")
    epochs = Fraction(str(recipe.train.epochs))
    steps = min(max(1, math.ceil(epochs * rows / per_step)), MOST)
    passes = "1 epoch" if epochs == 1 else f"{float(epochs):g} epochs"
    return Choice("train.steps", steps, f"{passes} of {rows:,} rows, {per_step:,} per step")


def count_warmup(recipe: Recipe) -> Choice:
    """Compute `optim.warmup_steps` from `optim.warmup_ratio`, rounded up."""
    ratio, steps = recipe.optim.warmup_ratio or 0.0, recipe.train.steps
    return Choice("optim.warmup_steps", math.ceil(Fraction(str(ratio)) * steps), f"{ratio:g} of {steps:,} steps")


def recomputation(
    loaded: LoadedRecipe, files: Callable[[], str], target: Target, prompts: PromptLengths | None
) -> Chooser:
    """Return the chooser of `model.gradient_checkpointing`. Without a GPU it reads neither the model nor the data.

    Args:
        files: as for `choosers`.
        prompts: estimated lengths of the prompts; None = they are estimated if needed.
    """

    def choose_layers(recipe: Recipe) -> Choice:
        from vlmrl.model.model_facts import model_facts

        cluster = find_cluster(loaded, target)
        if cluster.gpu is None:
            return Choice(RECOMPUTATION, False, "no GPU is used")
        so_far = replace(loaded, recipe=recipe)
        try:
            facts = model_facts(recipe.model, path=files())
            lengths = prompts or estimate_prompts(so_far, [e.train for e in open_sources(so_far).entries])
        except VlmrlError as error:  # the checks of model and data report the same problem as an error
            return Choice(RECOMPUTATION, True, f"memory cannot be planned: {first_line(error)}")
        return choose_recomputation(so_far, facts, cluster, lengths)

    return choose_layers


def _without_effect(key: str, value: Any) -> Chooser:
    """Return a chooser for a value that has no effect, because nothing is trained."""
    return lambda recipe: Choice(key, value, "nothing is trained")


def fill_for_run(
    loaded: LoadedRecipe, root: Path, target: Target = HERE, prompts: PromptLengths | None = None
) -> tuple[LoadedRecipe, list[Problem]]:
    """Choose the values that the recipe leaves open. In a rank, use the choices of its launcher.

    Args:
        root: folder of the runs, one of which `model.path` may name.
        prompts: estimated lengths of the prompts; None = they are estimated if a choice needs them.
    Returns: the recipe without open values, and warnings about the choices.
    """
    keys = open_keys(loaded.recipe)
    if not keys:
        return loaded, []
    launcher_choices = {c["key"]: Choice(**c) for c in world.choices()}
    if all(key in launcher_choices for key in keys):
        return fill_open_keys(loaded, list(launcher_choices.values())), []

    def files() -> str:
        from vlmrl.setup.model_origin import find_model

        return find_model(model.path, root).files

    model, where = loaded.recipe.model, loaded.where(("rollout", "engine"), ("model", "path"))

    def teacher(recipe: Recipe) -> Choice:
        from vlmrl.setup.model_origin import find_model

        path = recipe.teacher.path if recipe.teacher is not None else ""
        origin = find_model(path, root) if recipe.teacher_model is not None else None
        if origin is None or origin.checkpoint is None or origin.parent is None:
            return Choice("teacher.checkpoint", path, "it is no run")
        return Choice("teacher.checkpoint", str(origin.checkpoint), f"{origin.parent['why']} of {path}")

    layers = {RECOMPUTATION: recomputation(loaded, files, target, prompts), "teacher.checkpoint": teacher}
    choices = choose(loaded.recipe, {**layers, **choosers(model, files, where, target)})
    return fill_open_keys(loaded, choices), [c.problem for c in choices if c.problem is not None]


def fill_for_answers(recipe: Recipe, files: str) -> tuple[Recipe, list[Problem]]:
    """Choose the open values of a recipe that only answers prompts, on this machine (`vlmrl eval`).

    Args:
        files: folder or hub name with the model's configuration.
    """
    values = {
        "eval.metric": "reward",
        "eval.goal": "max",
        "train.steps": 1,
        "optim.warmup_steps": 1,
        COMPILE: False,
        RECOMPUTATION: False,
        "teacher.checkpoint": "",
    }
    untrained = {key: _without_effect(key, value) for key, value in values.items()}
    choices = choose(recipe, {**choosers(recipe.model, lambda: files, "rollout.engine"), **untrained})
    return with_values(recipe, choices), [c.problem for c in choices if c.problem is not None]


def choices_of(loaded: LoadedRecipe) -> list[dict[str, Any]]:
    """Return the choices for this recipe, as JSON values: a launcher passes them to its ranks."""
    choices: list[dict[str, Any]] = []
    for key in OPEN:
        origin = loaded.origins.get(key, "")
        if origin.startswith(AUTO_ORIGIN):
            table, _, name = key.partition(".")
            value = loaded.resolved["recipe"][table][name]
            choices.append({"key": key, "value": value, "reason": origin.removeprefix(AUTO_ORIGIN)})
    return choices


def choice_text(choice: Mapping[str, Any]) -> str:
    """Return a choice of `choices_of` as text. Example: `model.dtype = "bfloat16": a GPU is used`."""
    return f"{choice['key']} = {toml_value(choice['value'])}: {choice['reason']}"


def choice_texts(choices: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the choices of `choices_of` that have an effect, as texts for the user."""
    return [choice_text(choice) for choice in choices if choice["reason"] != UNUSED]


KEY, COMPILE = "rollout.engine", "model.compile"
UNUSED = "nothing is sampled"
"""Reason of a choice that has no effect. It is not shown."""


@dataclass(frozen=True)
class EngineWorld:
    """Facts besides the recipe on which the choice depends. The callables are called only if the choice needs them.

    Args:
        gpu: the GPU that trains; None = no GPU.
        vllm: returns what the installed vLLM supports.
        model: reads the model's configuration; may raise a VlmrlError.
        where: place of `rollout.engine` in the recipe, for messages.
        is_elsewhere: whether the plan is for another machine, of which only the GPU is known.
    """

    gpu: Gpu | None
    vllm: Callable[[], VllmFacts]
    model: Callable[[], ModelFacts]
    where: str
    is_elsewhere: bool = False


def choose_engine(recipe: Recipe, world: EngineWorld) -> Choice:
    """Choose `rollout.engine`.

    If the built-in engine is chosen on a GPU, the choice has a warning with the reason and the estimated slowdown.
    """
    if recipe.kind != "rl":
        samples = recipe.eval.enabled and not recipe.eval.by_loss
        return Choice(KEY, "torch", "`vlmrl sft` samples with the built-in engine" if samples else UNUSED)
    if world.gpu is None:
        return Choice(KEY, "torch", "no GPU is used")
    refused = unsupported_by_vllm(recipe)
    if refused:
        return _built_in(recipe, world, refused[0].message, refused[0].hint)
    if world.is_elsewhere:
        return Choice(KEY, "vllm", f"as if vLLM were installed beside {world.gpu.name}")
    vllm = world.vllm()
    if not vllm.is_installed:
        return _built_in(recipe, world, "vLLM is not installed", f"install it: {VLLM_INSTALL}")
    if vllm.error:
        why = f"vLLM {vllm.version} is installed and cannot be imported: {vllm.error}"
        return _built_in(recipe, world, why, f"reinstall it: {VLLM_INSTALL}")
    try:
        model = world.model()
    except VlmrlError as error:  # the check of the model reports this as an error
        return Choice(KEY, "vllm", f"vLLM {vllm.version} is installed; the model was not read: {first_line(error)}")
    why = vllm_refusal(model.model_type, "cuda", recipe.model.dtype, model.two_way_images)
    if why is None and model.architecture not in vllm.architectures:
        why = f"vLLM {vllm.version} does not know {model.architecture}"
    if why is not None:
        return _built_in(recipe, world, why, f"a newer vLLM may know it: {VLLM_INSTALL}")
    return Choice(KEY, "vllm", f"vLLM {vllm.version} is installed and knows {model.architecture}")


def _built_in(recipe: Recipe, world: EngineWorld, why: str, hint: str | None) -> Choice:
    """Return the choice of the built-in engine on a GPU, with a warning, or with an error if the recipe needs vLLM."""
    rollout = recipe.rollout
    needs = {"engine_gpus": rollout.engine_gpus, "overlap": rollout.overlap}
    needs |= {"tensor_parallel": rollout.tensor_parallel > 1}
    if key := next((key for key, on in needs.items() if on), None):
        message = f"`rollout.{key}` needs vLLM: {why}"
        return Choice(KEY, "torch", why, Problem(message, world.where, hint))
    message = f"the built-in engine generates: {why}"
    try:
        times = times_slower(recipe, world.model(), world.gpu) if world.gpu else 0.0
        message += f". Rollouts take about {times:.0f} times as long as with vLLM (estimated)"
    except VlmrlError:  # another check reports a model that cannot be read
        pass
    silence = 'to choose it without this warning: rollout.engine = "torch"'
    return Choice(
        KEY, "torch", why, Problem(message, world.where, f"{hint}; {silence}" if hint else silence, "warning")
    )


LAYER_SECONDS = 0.8e-3
"""Seconds per layer and decoding step for Python and kernel launches, with transformers' models on today's CPUs."""
VLLM_STEP_SECONDS = 2.0e-3
"""Seconds that vLLM needs between two decoding steps, for scheduling and sampling."""
VLLM_SEQUENCES = 256
"""Number of responses that vLLM decodes together."""


def times_slower(recipe: Recipe, facts: ModelFacts, gpu: Gpu) -> float:
    """Estimate the time of a step's rollouts on one GPU with the built-in engine, divided by the time with vLLM."""
    r = recipe.rollout
    size = 4 if recipe.model.dtype == "float32" else 2
    read = facts.active * size / gpu.bandwidth
    responses = r.prompts_per_step * r.samples_per_prompt
    # A prompt is stored once for all of its samples.
    each = r.max_new_tokens + r.max_prompt_tokens / r.samples_per_prompt
    batches = max(1, -(-int(responses * each) // r.batch_tokens))
    built_in = batches * (read + LAYER_SECONDS * facts.layers)
    vllm = max(1, -(-responses // VLLM_SEQUENCES)) * (read + VLLM_STEP_SECONDS)
    return max(1.0, built_in / vllm)
