"""Memory plans of a model on several GPUs as a Markdown table, such as the one in docs/scaling.md.

    python scripts/memory_table.py [FOLDER]

FOLDER has the model's config.json (default: that of Qwen3-VL-30B-A3B in tests/golden/models). The recipe is fungi_im
with vLLM on every GPU: 48 prompts of 1,550 tokens, 16 responses of at most 2,048 tokens each, rows of 16,384 tokens.
Each cell is the plan with the smallest `rollout.tensor_parallel` that fits and is not tight, and with the least
recomputation for it (`model.gradient_checkpointing = "auto"`). No weights are read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vlmrl.model.model_facts import ModelFacts, model_facts
from vlmrl.recipe.auto_values import with_values
from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.rules.engine import check_world
from vlmrl.setup.memory_fit import KEY, choose_recomputation
from vlmrl.setup.memory_plan import Cluster, MemoryPlan, make_plan
from vlmrl.setup.memory_sizes import PromptLengths, parse_gpu

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "tests" / "golden" / "models" / "Qwen3-VL-30B-A3B"
PROMPTS = PromptLengths(1550, 1250, 2048)
GPUS = ("H100", "H200", "B200")
COUNTS = (1, 2, 4, 8, 16)
PARTS = (1, 2, 4, 8)
WAYS = {
    "all weights": (),
    "all weights, `parallel.offload`": ("parallel.offload=true",),
    "adapter, `lora.rank = 32`": ("lora.rank=32",),
    "adapter, `parallel.offload`": ("lora.rank=32", "parallel.offload=true"),
}


def find_plan(
    model: Path, facts: ModelFacts, gpu_name: str, count: int, words: tuple[str, ...]
) -> tuple[MemoryPlan, str] | None:
    """Return (first plan that fits and is not tight, its keys as text); None if none does."""
    gpu = parse_gpu(gpu_name)
    cluster = Cluster(count, gpu, gpu.memory_bytes)
    common = [f"model.path={model}", "model.dtype=bfloat16", "rollout.engine=vllm", f"{KEY}=auto"]
    for parts in PARTS:
        loaded = load_recipe("fungi_im", overrides=[*common, *words, f"rollout.tensor_parallel={parts}"])
        if count % parts or check_world(loaded.recipe, count):
            continue
        choice = choose_recomputation(loaded, facts, cluster, PROMPTS)
        plan = make_plan(replace(loaded, recipe=with_values(loaded.recipe, [choice])), facts, cluster, PROMPTS)
        if plan.fits and not plan.is_tight:
            return plan, f"{parts}, {toml_value(choice.value)}"
    return None


def table_lines(model: Path = MODEL) -> Iterator[str]:
    """Yield the table: GPU, what is trained, then per `--gpus` the GPU's peak and (tensor_parallel, recomputation).

    Its last lines have the main memory of all machines together, the most over the GPUs.
    """
    facts = model_facts(load_recipe("fungi_im", overrides=[f"model.path={model}"]).recipe.model, path=str(model))
    yield f"| GPU | trained | {' | '.join(f'`--gpus {count}`' for count in COUNTS)} |"
    yield "|" + "---|" * (2 + len(COUNTS))
    host: dict[str, list[int]] = {way: [0] * len(COUNTS) for way in WAYS}
    for gpu in GPUS:
        for way, words in WAYS.items():
            cells = []
            for index, count in enumerate(COUNTS):
                found = find_plan(model, facts, gpu, count, words)
                cells.append("no" if found is None else f"{found[0].peak.total / 2**30:.0f} GiB ({found[1]})")
                if found is not None:
                    host[way][index] = max(host[way][index], found[0].host_peak.total)
            yield f"| {gpu} | {way} | {' | '.join(cells)} |"
    for way, sizes in host.items():
        cells = [f"{size / 2**30:,.0f} GiB" if size else "no" for size in sizes]
        yield f"| main memory | {way} | {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in table_lines(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL):
        print(line)
