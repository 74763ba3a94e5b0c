"""Plans of memory for real models on 8 GPUs of 80 GiB, beside arithmetic by hand from their published shapes.

The recipe is that of fungi_im: 48 prompts of 16 responses of at most 2,048 tokens, rows of 16,384 tokens, all weights
trained in bfloat16 over float32, gradient checkpointing, vLLM on every GPU. The prompt: two images of 800 x 800 pixels
and 300 tokens of text. What is written here is worked out on paper, from the shapes alone; GB are 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vlmrl.model.model_facts import ModelFacts, model_facts
from vlmrl.recipe.auto_values import with_values
from vlmrl.recipe.load import LoadedRecipe, load_recipe
from vlmrl.setup.memory_fit import FittedPlan, Target, choose_recomputation, plan_memory, possible_changes
from vlmrl.setup.memory_plan import Cluster, MemoryPlan, make_plan
from vlmrl.setup.memory_sizes import Gpu, PromptLengths, parse_gpu

MODELS = Path(__file__).parent / "models"
GPU = parse_gpu("80")
GB = 1e9
TOLERANCE = 0.15
RUNTIME = 1.2 * 1.074  # GB: CUDA's context and libraries
RECOMPUTED = "model.gradient_checkpointing=true"
ASLEEP = 1.074  # GB: CUDA graphs of a sleeping vLLM


def recipe(model: str, *overrides: str) -> LoadedRecipe:
    words = [f"model.path={MODELS / model}", "rollout.engine=vllm", RECOMPUTED, *overrides]
    return load_recipe("fungi_im", overrides=words)


def facts_of(model: str) -> ModelFacts:
    return model_facts(recipe(model).recipe.model, path=str(MODELS / model))


def planned(model: str, image_tokens: int, *overrides: str, gpus: int = 8, gpu: Gpu = GPU) -> FittedPlan:
    prompts = PromptLengths(image_tokens + 300, image_tokens, 2048)
    return plan_memory(recipe(model, *overrides), facts_of(model), Target(gpus, gpu), prompts)


def gb(plan: FittedPlan, phase: str) -> float:
    return gb_of(plan.plan, phase)


def gb_of(plan: MemoryPlan, phase: str) -> float:
    [found] = [p for p in plan.phases if p.name == phase and p.on == "trainer"]
    return found.total / GB


def close(found: float, by_hand: float) -> None:
    assert found == pytest.approx(by_hand, rel=TOLERANCE), (found, by_hand)


def test_qwen2_5_vl_7b():
    """8.292e9 parameters: 28 layers of 233.1e6, embeddings and head of 152,064 x 3,584 = 545e6 each, vision 676e6."""
    assert facts_of("Qwen2.5-VL-7B").total == pytest.approx(8.292e9, rel=1e-3)
    plan = planned("Qwen2.5-VL-7B", 2 * 29 * 29)
    # float32 weights, gradients and two moments: 16 bytes x 8.292e9 / 8 GPUs                              = 16.6
    # gathered in bfloat16: embeddings, head, merger 1.13e9 x 2, and two layers 2 x 233.1e6 x 2            =  3.2
    # gradients on their way: the head's 545e6 x 2; a layer's in bfloat16 and float32 233.1e6 x 6          =  2.5
    # checkpoints: 16,384 tokens x 28 layers x 3,584 x 2 bytes                                             =  3.3
    # one layer again: per token norms, q, k, v, o 12 x 3,584, MLP 6 x 18,944, 2 bytes: 314 kB x 16,384    =  5.2
    # one prompt's images: 6,728 patches x 32 layers x 1,280 x 2 bytes                                     =  0.6
    close(gb(plan, "update"), 16.6 + 3.2 + 2.5 + 3.3 + 5.2 + 0.6 + RUNTIME + ASLEEP)
    # weights and moments 12 bytes x 8.292e9 / 8 = 12.4; vLLM's weights 2 x 8.292e9 = 16.6
    # 6 prompts x (1,982 + 16 x 2,048) tokens x 28 layers x 2 x 512 x 2 bytes (57 kB)                     = 12.0
    # a step of 8,192 tokens: (2 x 18,944 + 8 x 3,584) x 2 bytes = 1.1; logits 96 x 152,064 x 12 = 0.2; graphs 1.07
    close(gb(plan, "rollout"), 12.4 + 16.6 + 12.0 + 1.1 + 0.2 + 1.07 + RUNTIME)
    assert plan.plan.fits and not plan.fits  # nothing has to be changed


def test_qwen3_5_9b():
    """9.41e9 parameters: 32 layers of at most 218.4e6, 24 of which have a state; embeddings and head of 1,017e6 each.

    Sharded layer by layer, vision blocks too (27 of 15.2e6); the root is the rest, 2.08e9.
    """
    assert facts_of("Qwen3.5-9B").total == pytest.approx(9.41e9, rel=1e-3)
    plan = planned("Qwen3.5-9B", 2 * 25 * 25)
    # float32 weights, gradients, moments: 16 x 9.41e9 / 8                                                = 18.8
    # gathered in bfloat16: the root 2.08e9 x 2, and two layers 2 x 218.4e6 x 2                           =  5.0
    # gradients on their way: embeddings and head 2 x 1,017e6 x 2, a layer's in bfloat16 and float32 218.4e6 x 6 = 5.4
    # checkpoints: 16,384 tokens x (32 + 3) x 4,096 x 2; one prompt's images 5,000 patches x 85 kB        =  5.1
    # one layer again, PyTorch kernels, for the pass of the responses: 14,834 tokens x (14 x 4,096 + 45 x 4,096 of
    # values + 4 x 2,048 of keys + 6 x 12,288) x 2                                                        =  9.6
    close(gb(plan, "update"), 18.8 + 5.0 + 5.4 + 5.1 + 9.6 + RUNTIME + ASLEEP)
    update = plan.plan.phases[1].parts
    assert update["gathered"] / GB == pytest.approx(2 * (2.0788 + 2 * 0.2184), abs=0.01)
    assert update["gradients on their way"] / GB == pytest.approx(2 * 2 * 1.0171 + 6 * 0.2184, abs=0.01)
    # 12 x 9.41e9 / 8 = 14.1; vLLM's weights 18.8; keys and values 6 x 34,318 tokens x 8 layers x 2 x 1,024 x 2 = 6.7
    # states: 96 sequences x 2 x 24 layers x (32 heads x 128 x 128 x 4 + 3 x 8,192 x 2 bytes)               =  9.9
    # a step: 8,192 x (2 x 12,288 + 8 x 4,096) x 2 = 0.9; logits 96 x 248,320 x 12 = 0.3; graphs 1.07
    close(gb(plan, "rollout"), 14.1 + 18.8 + 6.7 + 9.9 + 0.9 + 0.3 + 1.07 + RUNTIME)
    assert plan.plan.fits and not plan.plan.is_tight and not plan.plan.notes


def test_qwen3_vl_30b_a3b():
    """31.07e9 parameters: 48 layers of 623e6, of which 128 experts of 3 x 768 x 2,048 = 604e6; 8 experts a token."""
    facts = facts_of("Qwen3-VL-30B-A3B")
    assert facts.total == pytest.approx(31.07e9, rel=1e-3)
    # Of 29.0e9 in experts a token uses 8 / 128.
    assert facts.active == pytest.approx(31.07e9 - 29.0e9 * 120 / 128, rel=0.01)
    plan = planned("Qwen3-VL-30B-A3B", 2 * 25 * 25)
    # 16 x 31.07e9 / 8                                                                                    = 62.1
    # gathered: embeddings, head, mergers 0.75e9 x 2, two layers 2 x 623e6 x 2                             =  4.0
    # on their way: the head's 311e6 x 2, a layer's 623e6 x 6                                              =  4.4
    # checkpoints: 16,384 x 48 x 2,048 x 2                                                                 =  3.2
    # one layer again: attention 14 x 4,096 (norms of the heads too), 8 experts x (5 x 2,048 + 6 x 768), 2 bytes = 5.8
    close(gb(plan, "update"), 62.1 + 4.0 + 4.4 + 3.2 + 5.8 + RUNTIME + ASLEEP)
    # 12 x 31.07e9 / 8 = 46.6 and vLLM's weights 62.1: more than the 85.9 that the GPU has, without a cache
    close(gb(plan, "sync"), 46.6 + 62.1 + 2.3 + 1.6 + RUNTIME)
    assert not plan.plan.fits
    first = plan.fits[0]
    assert "rollout.tensor_parallel" in first.words and first.plan.fits


PROMPTS_4B = PromptLengths(700, 490, 1024)


def recipe_4b(name: str, *overrides: str) -> tuple[LoadedRecipe, ModelFacts]:
    model = str(MODELS / "Qwen3-VL-4B")
    words = [f"model.path={model}", "rollout.engine=vllm", RECOMPUTED, *overrides]
    loaded = load_recipe(name, overrides=words)
    return loaded, model_facts(loaded.recipe.model, path=model)


def planned_4b(name: str, gpus: int, gpu: str, *overrides: str) -> FittedPlan:
    return plan_memory(*recipe_4b(name, *overrides), Target(gpus, parse_gpu(gpu)), PROMPTS_4B)


def possible_keys(cluster: Cluster, *overrides: str) -> set[str]:
    """Keys of the changes of `math_4b_24gb` that are tried where it does not fit."""
    loaded, facts = recipe_4b("math_4b_24gb", *overrides)
    return {change.key for change in possible_changes(loaded.recipe, facts, cluster, PROMPTS_4B)}


def test_qwen3_vl_4b_in_24_gb():
    """4.438e9 parameters: 36 layers of 100.9e6, tied embeddings of 151,936 x 2,560 = 389e6, vision 415e6.

    docs/experiments/rllava.md shows the first and the last of these plans, and those of the test below.
    """
    pair = planned_4b("math_4b_24gb", 2, "24")
    assert pair.plan.fits and not pair.plan.is_tight
    # vLLM's weights 2 x 4.438e9 = 8.9; its cache; a step's work 1.8; context 1.3. No state is on the GPU.
    assert pair.plan.peak.total / 2**30 == pytest.approx(14.7, abs=0.1)
    assert "moments" not in pair.plan.phases[1].parts
    assert pair.plan.host[1].parts["states between uses"] == pytest.approx(16 * 4.438e9, rel=1e-3)
    plain = planned_4b("math_4b_24gb", 1, "24", "parallel.offload=false")
    assert not plain.plan.fits and plain.plan.peak.total / 2**30 == pytest.approx(81.9, abs=0.1)
    assert plain.fits[0].words == "--set parallel.offload=true"
    assert plain.fits[0].plan.peak.total == planned_4b("math_4b_24gb", 1, "24").plan.peak.total
    adapter = planned_4b("math_4b_24gb_lora", 1, "24")
    assert adapter.plan.fits and adapter.plan.peak.total / 2**30 < 24
    assert planned_4b("math_4b_24gb", 1, "80", *EIGHT_BITS).plan.peak.total / 2**30 == pytest.approx(57.4, abs=0.1)


EIGHT_BITS = ("parallel.offload=false", "optim.name=adamw_8bit")


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "overrides", "value", "gib"),
    [
        ("math_4b_24gb", 1, "24", (), 0.25, 20.4),
        ("math_4b_24gb", 2, "24", (), 0.25, 20.4),
        ("math_4b_24gb_lora", 1, "24", (), 0.75, 23.0),
        ("math_4b_24gb", 1, "80", EIGHT_BITS, "vision", 73.3),
    ],
)
def test_the_recipes_leave_recomputation_to_the_plan(name, gpus, gpu, overrides, value, gib):
    """The table of docs/experiments/rllava.md."""
    loaded, facts = recipe_4b(name, *overrides, "model.gradient_checkpointing=auto")
    cluster = Cluster(gpus, parse_gpu(gpu), parse_gpu(gpu).memory_bytes)
    choice = choose_recomputation(loaded, facts, cluster, PROMPTS_4B)
    plan = make_plan(replace(loaded, recipe=with_values(loaded.recipe, [choice])), facts, cluster, PROMPTS_4B)
    assert choice.value == value and plan.fits and plan.peak.total / 2**30 == pytest.approx(gib, abs=0.1)
    page = (MODELS.parents[2] / "docs" / "experiments" / "rllava.md").read_text()
    assert f"| {gpus} of {gpu} GB | {gib} GiB |" in page
    words = [f"model.path={MODELS / 'Qwen3-VL-4B'}", "rollout.engine=vllm"]
    assert load_recipe(name, overrides=words).recipe.model.gradient_checkpointing == "auto"


def test_qwen3_vl_4b_in_one_gpu_of_24_gb():
    """One process, states in main memory. Root: 4,438e6 - 36 layers x 100.9e6 - 24 of vision x 12.6e6 = 502e6."""
    plan = planned_4b("math_4b_24gb", 1, "24").plan
    assert plan.fits and not plan.is_tight
    assert plan.peak.total / 2**30 == pytest.approx(18.4, abs=0.1)
    # Update, at the head. The root stays gathered: 502e6 x 2                                             =  1.00
    # inputs of 36 layers and three more, 4,096 tokens x 39 x 2,560 x 2; images: 1,960 patches x 70.3 kB  =  0.96
    # a chunk of 2^28 logits x 12 bytes                                                                   =  3.22
    # the head's gradient 389e6 x 2, and that of a second chunk of the head                               =  1.56
    update = plan.phases[1].parts
    assert not update.keys() & {"weights", "masters", "moments", "gradients"}
    assert update["gathered"] / GB == pytest.approx(1.00, abs=0.01)
    close(gb_of(plan, "update"), 1.00 + 0.96 + 3.22 + 1.56 + RUNTIME + ASLEEP)
    # vLLM: weights 8.88; cache 16 prompts x (700 + 5 x 512) tokens x 36 layers x 2 x 1,024 x 2 bytes = 7.69; a step
    # 8,192 x (2 x 9,728 + 8 x 2,560) x 2 = 0.65; logits 80 x 151,936 x 12 = 0.15; graphs 1.07
    close(gb_of(plan, "rollout"), 8.88 + 7.69 + 0.65 + 0.15 + 1.07 + RUNTIME)
    # No cache yet, but a bucket of weights on their way: the embeddings 389e6 x 2, twice.
    close(gb_of(plan, "sync"), 8.88 + 0.65 + 0.15 + 1.07 + 2 * 0.78 + RUNTIME)
    # The process reads weights in blocks, into float32 shards in main memory: 4 x 4.438e9 = 17.75, and 2 x 2^25 bytes.
    # Then float32 weights, gradients and two moments: 16 x 4.438e9; for checkpoints a copy of all but the gradients.
    load, training = plan.host
    assert load.parts == {"rows that are read, in every process": 2**26, "weights": pytest.approx(17.75e9, rel=1e-3)}
    assert training.total == pytest.approx((16 + 12) * 4.438e9, rel=1e-3)
    # The built-in engine runs the policy itself, gathered whole: 8.88; its cache: 65,536 tokens x 147 kB = 9.66;
    # logits of 64 responses x 151,936 x 12 = 0.12; 11 prompts of 700 tokens x (3 x 9,728 + 6 x 2,560) x 2 = 0.69
    built_in = planned_4b("math_4b_24gb", 1, "24", "rollout.engine=torch").plan
    close(gb_of(built_in, "rollout"), 8.88 + 9.66 + 0.12 + 0.69 + RUNTIME)


@pytest.mark.parametrize("gpu", ["48", "80"])
def test_vfig_4b_fits_eight_gpus(gpu: str):
    """Prompts of 9,000 tokens, answers of 8,500; a frozen model, and an adapter of rank 64 on 36 layers.

    The adapter has 64 x (2 x (2,560 + 4,096) + 2 x (2,560 + 1,024) + 3 x (2,560 + 9,728)) = 3.67e6 float32 numbers per
    layer, together 132e6.
    """
    plan = plan_memory(*recipe_4b("vfig_4b"), Target(8, parse_gpu(gpu)), PromptLengths(9000, 8700, 8500))
    assert plan.plan.fits and not plan.plan.is_tight and not plan.fits
    update = plan.plan.phases[1].parts
    # weights (2 x 4.438e9 + 4 x 132e6) / 8                                                               =  1.18
    assert update["weights"] / GB == pytest.approx(1.176, abs=0.002)
    # two moments and the gradients of the adapter: 12 x 132e6 / 8                                        =  0.20
    assert (update["moments"] + update["gradients"]) / GB == pytest.approx(0.198, abs=0.002)
    # At the head: gathered root 502e6 x 2 and the newest layer 101e6 x 2                                 =  1.21
    # inputs of 36 layers and three more: 17,500 tokens x 39 x 2,560 x 2; pixels 34,800 x 1,200 x 4       =  3.66
    # a chunk of 2^28 logits x 13 bytes                                                                   =  3.49
    close(gb(plan, "update"), 1.18 + 0.20 + 1.21 + 3.66 + 3.49 + RUNTIME + ASLEEP)


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        ([], True),
        (["parallel.shard_size=1"], True),
        (["parallel.shard_size=2"], False),
        (["optim.name=adamw_8bit"], False),
        (["lora.rank=32", "model.quantize=4bit"], False),
    ],
)
def test_offloading_is_proposed_where_a_run_would_accept_it(words, proposed):
    one = Cluster(1, parse_gpu("24"), 24 << 30)
    assert ("parallel.offload" in possible_keys(one, "parallel.offload=false", *words)) is proposed
    assert "parallel.offload" not in possible_keys(one, *words)  # it is set
    on_cpu = Cluster(1, None, 24 << 30)  # nothing to gain: the computation is in main memory
    assert "parallel.offload" not in possible_keys(on_cpu, "parallel.offload=false", *words)


@pytest.mark.slow
def test_what_is_said_to_make_it_fit_does():
    for model, tokens in (("Qwen3-VL-30B-A3B", 1250), ("Qwen2.5-VL-7B", 1682)):
        for gpus in (1, 2, 8):
            plan = planned(model, tokens, gpus=gpus)
            for fit in plan.fits:
                words = fit.words.replace("--set ", "").split()
                at = words.index("--gpus") if "--gpus" in words else None
                more = int(words[at + 1]) if at is not None else gpus
                sets = [w for w in words if "=" in w]
                again = planned(model, tokens, *sets, gpus=more)
                assert again.plan.fits and again.plan.peak.total == fit.plan.peak.total, (model, gpus, fit.words)
            assert bool(plan.fits) != plan.plan.fits or (not plan.plan.fits and not plan.fits)


def test_gpus_of_their_own_are_planned_apart():
    plan = planned("Qwen2.5-VL-7B", 1682, "rollout.engine_gpus=2").plan
    assert (plan.trainers, plan.engines) == (6, 2)
    [trainer, engine] = [p for p in plan.phases if p.name == "rollout"]
    assert "engine weights" not in trainer.parts and engine.on == "engine"
    # 24 prompts for each of two engines, 16 responses: more than 256 at once are not run
    assert engine.parts["engine weights"] == 2 * facts_of("Qwen2.5-VL-7B").total
    assert trainer.parts["weights"] == pytest.approx(4 * 8.292e9 / 6, rel=1e-3)
    assert "engine asleep" not in plan.phases[1].parts


@pytest.mark.parametrize(
    ("overrides", "part", "expected"),
    [
        (["parallel.shard_size=4"], "moments", 8 * 8.292e9 / 4),  # two copies of the model
        (["parallel.offload=true"], "moments", None),  # in main memory
        (["algo.kl_coef=0.01"], "reference", 2 * 8.292e9 / 8),  # a second model, sharded
        (["lora.rank=32"], "gradients", 0.3e9 / 8),  # an adapter of some 80e6 numbers
    ],
)
def test_keys_that_change_what_is_held(overrides, part, expected):
    update = planned("Qwen2.5-VL-7B", 1682, *overrides).plan.phases[1].parts
    if expected is None:
        assert part not in update
    else:
        assert update[part] == pytest.approx(expected, rel=0.2)


def test_main_memory_of_the_machine_is_counted():
    plan = planned("Qwen2.5-VL-7B", 1682).plan
    # Every process reads its own rows in blocks of 2^25 bytes, each in the model's dtype, too: 8 x 2 x 2^25 bytes.
    [load, training] = plan.host
    assert load.parts == {"rows that are read, in every process": 8 * 2 * 2**25}
    # Its GPU has 4 x 8.292e9 / 8 bytes of shards, and no whole unit.
    assert plan.phases[0].total / GB == pytest.approx(4.146 + RUNTIME, abs=0.01)
    # DoRA needs whole weights, in every process: 8 x 2 x 8.292e9 bytes. Nothing is trained in them: no float32 unit.
    [load, _] = planned("Qwen2.5-VL-7B", 1682, "lora.rank=32", "lora.dora=true").plan.host
    assert load.parts["the whole model, in every process"] == pytest.approx(8 * 2 * 8.292e9, rel=1e-3)
    # One process without offloading loads the model before it moves it to its GPU: 2 x 8.292e9 bytes.
    [load, _] = planned("Qwen2.5-VL-7B", 1682, gpus=1).plan.host
    assert load.parts["the whole model, in every process"] == pytest.approx(2 * 8.292e9, rel=1e-3)
    assert training.parts["copies for checkpoints"] == pytest.approx(12 * 8.292e9, rel=1e-3)
    offloaded = planned("Qwen2.5-VL-7B", 1682, "parallel.offload=true").plan
    assert offloaded.host[1].parts["states between uses"] == pytest.approx(16 * 8.292e9, rel=1e-3)
    # An engine that keeps its base weights asleep pins them: 8 x 2 x 8.292e9 bytes, and half as much for rounding.
    [_, training] = planned("Qwen2.5-VL-7B", 1682, "lora.rank=32", "rollout.engine=vllm").plan.host
    assert training.parts["engines' weights asleep"] == pytest.approx(1.5 * 8 * 2 * 8.292e9, rel=1e-3)
    small = replace(plan, cluster=replace(plan.cluster, host_bytes=90 * 10**9))
    assert plan.fits and not small.fits and small.fits_gpus


def test_less_checkpointing_takes_more():
    sizes = {}
    for value in ("true", '"vision"', "false"):
        plan = planned("Qwen2.5-VL-7B", 1682, f"model.gradient_checkpointing={value}").plan
        sizes[value] = plan.phases[1].parts["activations"]
    # Kept of a token and layer: 8 x 3,584 + 2 x 18,944 + 2 x 512 numbers of 2 bytes, 16,384 x 28 of them: 62 GB
    assert sizes['"vision"'] - sizes["true"] == pytest.approx(62e9 - 3.3e9 - 2e9, rel=0.1)
    assert sizes["false"] > sizes['"vision"']
