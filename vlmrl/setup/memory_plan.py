"""Memory plan of a run: memory of each GPU in each phase, main memory, and whether both are sufficient.

A GPU trains and generates in turn. So the largest phase decides, not the sum of the phases. The numbers are estimates
that should be within 15% of the real use; tests/unit/preflight/test_memory_plan.py compares updates with counted
tensors. Memory that torch loses by fragmentation is not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vlmrl.model.memory import (
    GRAPH_BYTES,
    MIN_CACHE_BYTES,
    PACKED_BYTES,
    RESERVE_SHARE,
    CacheShape,
    Demand,
    engine_work,
    size_cache,
    text_cache_shape,
)
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.engine import is_sharded, why_whole
from vlmrl.setup.memory_sizes import Gpu, PromptLengths, Sizes

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts

GIB = 1 << 30
RUNTIME_BYTES = int(1.2 * GIB)
"""Bytes per process for CUDA's context, the libraries' work space and NCCL's buffers. Typical, not measured here."""
BUCKET_BYTES = 1 << 28
"""Bytes that a weight sync gathers at once (rollout/weight_sync.py). The tensors to gather take the same size again."""
READ_BYTES = 1 << 26
"""Bytes per process for weights that are being read: a block of a file, and the same in the model's dtype. Its size is
BLOCK_BYTES of model/safetensors_blocks.py."""
PINNED_ROUNDING = 1.5
"""Usual ratio of the memory of pinned blocks to their bytes: torch rounds each size up to a power of two."""
MOVING, CACHE = "gradients on their way", "kv cache"
UPDATE = "update"
"""Name of the phase of an update, the only one whose memory depends on the kept activations."""
TIGHT = 0.92
"""Share of the memory above which a phase is called tight, because fragmentation may take the rest."""


@dataclass(frozen=True)
class Cluster:
    """Machines that a plan is made for.

    Args:
        processes: number of GPUs of `--gpus`, including those that only generate; on a CPU, processes that share its
            memory.
        gpu: model of each GPU; None = no GPU, and `memory_bytes` is main memory.
        memory_bytes: memory of each GPU; on a CPU, of the whole machine.
        host_bytes: main memory of a machine with GPUs; None = not known, because the plan is for another machine.
        kernels: kernels of linear attention there, "torch" or "fla".
    """

    processes: int
    gpu: Gpu | None
    memory_bytes: int
    host_bytes: int | None = None
    kernels: str = "torch"

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cpu" if self.gpu is None else "cuda"

    @property
    def each_bytes(self) -> int:
        """Memory of one GPU, or of one of the processes that share main memory."""
        return self.memory_bytes if self.gpu else self.memory_bytes // self.processes

    @property
    def name(self) -> str:
        return self.gpu.name if self.gpu else "this machine"


@dataclass(frozen=True)
class Phase:
    """Memory that one GPU needs in one phase of a run.

    Args:
        on: kind of the GPU: "trainer" or "engine".
        parts: purpose -> bytes.
    """

    name: str
    on: Literal["trainer", "engine"]
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def main(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name], default="")

    def as_dict(self) -> dict[str, Any]:
        parts = {name: size for name, size in self.parts.items() if size}
        return {"phase": self.name, "on": self.on, "bytes": self.total, "parts": parts, "main": self.main}


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run.

    Args:
        trainers, engines: numbers of GPUs (or processes) that train, and that only generate.
        phases: phases of a GPU, in the order of a run; phases of the same name belong to different kinds of GPUs.
        host: main memory of the whole machine, by phase.
        cache: bytes of vLLM's cache on a GPU, 0 without vLLM.
        cache_needed: bytes of cache that all responses of a step need if they run at once.
        elastic: bytes by which the cache may shrink.
    """

    cluster: Cluster
    trainers: int
    engines: int
    phases: tuple[Phase, ...]
    host: tuple[Phase, ...]
    cache: int = 0
    cache_needed: int = 0
    elastic: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def host_peak(self) -> Phase:
        return max(self.host, key=lambda phase: phase.total)

    @property
    def fits_gpus(self) -> bool:
        return self.peak.total <= self.cluster.each_bytes

    @property
    def fits(self) -> bool:
        limit = self.cluster.host_bytes
        return self.fits_gpus and (limit is None or self.host_peak.total <= limit)

    @property
    def is_tight(self) -> bool:
        """Return whether the run fits only just. That the cache takes all free memory does not make it tight."""
        largest = max(p.total - (self.elastic if CACHE in p.parts else 0) for p in self.phases)
        return self.fits and largest > TIGHT * self.cluster.each_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "device": self.cluster.name,
            "processes": self.cluster.processes,
            "trainers": self.trainers,
            "engines": self.engines,
            "bytes_each": self.cluster.each_bytes,
            "peak": self.peak.total,
            "peak_phase": self.peak.name,
            "fits": self.fits,
            "tight": self.is_tight,
            "phases": [phase.as_dict() for phase in self.phases],
            "host": [phase.as_dict() for phase in self.host],
            "host_bytes": self.cluster.host_bytes,
            "kv_cache": self.cache,
            "kv_cache_needed": self.cache_needed,
            "notes": list(self.notes),
        }


def make_plan(loaded: LoadedRecipe, facts: ModelFacts, cluster: Cluster, prompts: PromptLengths) -> MemoryPlan:
    """Plan a run.

    Args:
        loaded: recipe without open ("auto") values. If the GPUs cannot be divided as it says, the plan ignores this.
    """
    return _Planner(loaded, facts, cluster, prompts).plan()


class _Planner:
    """Planner that adds up the sizes of all tensors of a run, phase by phase."""

    def __init__(self, loaded: LoadedRecipe, facts: ModelFacts, cluster: Cluster, prompts: PromptLengths) -> None:
        recipe = loaded.recipe
        self.loaded, self.recipe, self.facts, self.cluster, self.prompts = loaded, recipe, facts, cluster, prompts
        self.is_rl = recipe.kind == "rl"
        self.vllm = self.is_rl and recipe.rollout.engine == "vllm"
        self.apart = min(recipe.rollout.engine_gpus, cluster.processes - 1) if self.vllm else 0
        self.trainers = cluster.processes - self.apart
        self.parts = max(1, min(recipe.rollout.tensor_parallel, self.apart or self.trainers)) if self.vllm else 1
        shards = min(recipe.parallel.shard_size or self.trainers, self.trainers)
        self.sharded = is_sharded(recipe, self.trainers)
        self.loads_whole = why_whole(recipe) is not None
        self.on_gpu = cluster.device == "cuda"
        self.offload = recipe.parallel.offload and self.on_gpu  # a CPU computes in main memory anyway
        self.sizes = Sizes(loaded, facts, prompts, shards, self.sharded, self.offload, cluster.kernels)
        self.runtime = {"runtime": RUNTIME_BYTES} if self.on_gpu else {}

    def plan(self) -> MemoryPlan:
        self.cache = self.needed = self.elastic = 0
        if self.vllm:
            self._size_cache()
        phases = [Phase("load", "trainer", self._load()), self._update()]
        if self.is_rl:
            phases.append(Phase("rollout", "trainer", self._rollout()))
            if self.vllm:
                phases.append(Phase("sync", "trainer", self._sync()))
            if self.apart:
                phases.append(Phase("rollout", "engine", self._engine() | self.runtime))
        phases.append(Phase("save", "trainer", self._states(False) | self._asleep() | self.runtime))
        return MemoryPlan(
            self.cluster,
            self.trainers,
            self.apart,
            tuple(phases),
            self._host(tuple(phases)),
            self.cache,
            self.needed,
            self.elastic,
            tuple(self._notes()),
        )

    # -- phases of a GPU that trains

    def _states(self, gradients: bool) -> dict[str, int]:
        """Return the sizes of weights, masters, moments and reference on the computing device; {} with offload."""
        s = self.sizes
        if self.offload:
            return {}
        states = {"weights": s.weights, "masters": s.masters, "moments": s.moments, "reference": s.reference}
        states |= {"teacher": s.teacher}
        return states | ({"gradients": s.gradients} if gradients else {})

    def _asleep(self) -> dict[str, int]:
        """Return the memory of an engine on a trainer's GPU during updates; on a CPU, an engine cannot sleep."""
        if not self.vllm or self.apart:
            return {}
        return {"engine asleep": GRAPH_BYTES} if self.on_gpu else self._engine()

    def _load(self) -> dict[str, int]:
        s = self.sizes
        if not self.sharded:
            return {"weights": s.weights} | self.runtime
        shards = {"weights": 0 if self.offload else s.weights} | self.runtime
        if not self.loads_whole:  # each process reads its own rows
            return shards if self.on_gpu else shards | {"rows that are read": READ_BYTES}
        if not self.on_gpu:
            return shards | {"the whole model": self.facts.total * s.size}
        # A whole FSDP unit is moved to the device (trained numbers in float32) before it is split into shards.
        return shards | {"a whole unit": max(s.layer, s.root) * (4 if s.trained_share else s.size)}

    def _update(self) -> Phase:
        """Return the memory at the peak of an update: in the head, in a layer, or at the end of the backward pass."""
        s = self.sizes
        base = self._states(True) | self._asleep() | self.runtime
        kept, root = s.kept(), s.root * s.size if self.sharded else 0
        logits = s.logits(self.cluster.device, self.cluster.each_bytes)
        # The last gathered unit exists twice until the next one is gathered. A single process gathers into one place.
        newest = (s.layer * s.size if s.layer else root) if s.shards > 1 else 0
        moments = [
            {"gathered": root + newest, "activations": kept, "logits": logits},  # forward, head
            {"gathered": root, "activations": kept, "logits": logits, MOVING: 2 * s.head_gradient},  # backward, head
            {
                "gathered": s.gathered(),
                "activations": kept + s.layer_work(),
                MOVING: s.pass_gradients + s.layer_gradients(),
            },  # backward, the last layer
            {"gathered": root, "activations": s.vision_kept() + s.vision_work(), MOVING: s.head_gradient},
            {MOVING: s.root_gradients()},  # end of the backward pass
        ]
        if s.layer == 0 and self.sharded:  # backward, the first layer: no gradient was scattered yet
            whole = int(s.root * s.trained_share * s.size)
            moments.append({"gathered": root, "activations": s.one_layer(), MOVING: whole})
        return Phase(UPDATE, "trainer", base | max(moments, key=lambda moment: sum(moment.values())))

    def _rollout(self) -> dict[str, int]:
        s, states = self.sizes, self._states(False) | self.runtime
        if self.apart:
            return states
        if self.vllm:
            return states | self._engine()
        gathered = self.facts.total * s.size if self.sharded else 0
        copied = 0 if self.on_gpu or s.size != 4 else min(PACKED_BYTES, self.facts.total * s.size)
        parts = {"gathered": gathered, "weights in another order": copied}
        return states | parts | {CACHE: self._built_in_cache(), "activations": s.prefill()}

    def _sync(self) -> dict[str, int]:
        """Return the memory during a weight sync.

        The engine's weights are in memory. Its cache is allocated only after the sync (on a CPU, it always exists).
        """
        s, states = self.sizes, self._states(False) | self.runtime
        buckets = 2 * max(BUCKET_BYTES, self.facts.largest * s.size) if self.sharded else 0
        if self.apart:
            return states | {"buckets": buckets}
        awake = self._engine()
        if self.on_gpu:
            awake.pop(CACHE)
        return states | awake | {"buckets": buckets}

    # -- engines

    def _engine(self) -> dict[str, int]:
        s = self.sizes
        adapter = s.trained * s.size if self.recipe.lora else 0
        weights = (self.facts.total * s.size) // self.parts + adapter
        parts = {"engine weights": weights, CACHE: self.cache}
        if not self.on_gpu:
            return parts
        d = self._demand()
        work = engine_work(self.facts.text, s.size, d.longest, d.sequences, self.parts)
        # A tensor-parallel engine has its own processes in addition to those of the trainers.
        return parts | {"engine work": work + (RUNTIME_BYTES if self.parts > 1 and not self.apart else 0)}

    def _demand(self) -> Demand:
        r = self.recipe.rollout
        engines = max(1, (self.apart or self.trainers) // self.parts)
        longest = r.max_prompt_tokens + max(self.recipe.longest_response, self.recipe.eval.longest(r.max_new_tokens))
        prompts = min(self.prompts.tokens, r.max_prompt_tokens)
        return Demand(
            -(-r.prompts_per_step // engines), r.samples_per_prompt, prompts, self.recipe.longest_response, longest
        )

    def _size_cache(self) -> None:
        """Set the bytes of an engine's cache on one GPU, and the bytes that all responses of a step would need."""
        shape, demand = text_cache_shape(self.facts.text, self.recipe.model.dtype), self._demand()
        taken = sum(self._engine().values()) + (0 if self.apart else sum(self._states(False).values()))
        reserve = int(RESERVE_SHARE * self.cluster.each_bytes) + sum(self.runtime.values())
        free = self.cluster.each_bytes - taken - reserve
        size = size_cache(shape, demand, free, self.cluster.device, self.parts)
        configured = self.recipe.rollout.kv_cache_gib
        self.cache, self.needed = size.chosen if configured is None else int(configured * GIB), size.needed
        self.elastic = 0 if configured is not None else self.cache - max(size.least, min(self.cache, size.needed // 4))

    def _built_in_cache(self) -> int:
        """Return the size of the built-in engine's cache.

        It holds at most `rollout.batch_tokens` tokens. A prompt is stored once for all of its samples.
        """
        shape: CacheShape = text_cache_shape(self.facts.text, self.recipe.model.dtype)
        r = self.recipe.rollout
        mine = -(-r.prompts_per_step // self.trainers)
        all_of_it = mine * shape.group_bytes(self.prompts.tokens, self.prompts.response, r.samples_per_prompt)
        tokens = max(r.batch_tokens, self.prompts.longest)
        rows = max(1, min(mine * r.samples_per_prompt, tokens // max(1, self.prompts.response)))
        budget = (shape.token_bytes + shape.window_bytes) * tokens + rows * shape.state_bytes
        return min(all_of_it, budget)

    # -- main memory, of the whole machine

    def _host(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        s = self.sizes
        if not self.on_gpu:
            count = {"trainer": self.trainers, "engine": self.apart}
            return tuple(Phase(p.name, p.on, {k: v * count[p.on] for k, v in p.parts.items()}) for p in phases)
        model = self.facts.total * s.size
        loading = {"rows that are read, in every process": self.trainers * READ_BYTES}
        if self.offload:
            loading["weights"] = self.trainers * s.weights
        if not self.sharded or self.loads_whole:
            unit = max(s.layer, s.root) * (4 - s.size) if self.sharded and s.trained_share else 0
            loading = {"the whole model, in every process": model, "a unit in float32": unit}
            loading = {what: self.trainers * size for what, size in loading.items()}
        host_phases = (Phase("load", "trainer", loading),)
        running: dict[str, int] = {}
        if self.offload:
            each = s.weights + s.masters + s.moments + s.gradients + s.reference + s.teacher
            running["states between uses"] = self.trainers * each
        if self.recipe.checkpoint.asynchronous is not False:
            copies = s.weights + s.moments + s.masters
            running["copies for checkpoints"] = self.trainers * copies
        if self.vllm and self.recipe.lora and not self.apart:
            running["engines' weights asleep"] = int(self.trainers * PINNED_ROUNDING * model / self.parts)
        return (*host_phases, Phase("training", "trainer", running)) if running else host_phases

    def _notes(self) -> list[str]:
        notes: list[str] = []
        s = self.sizes
        if self.sharded and s.layer == 0:
            notes.append(
                f"`{self.facts.model_type}` is gathered as one unit: at the end of a backward pass every "
                "process has all gradients of the model"
            )
        if self.vllm and self.recipe.rollout.kv_cache_gib is None and self.cache < self.needed:
            share = self.cache / self.needed
            notes.append(f"the engine's cache holds {share:.0%} of a step's responses at once; the others wait")
        if self.vllm and self.cache <= MIN_CACHE_BYTES and self.cache < self.needed:
            notes.append("rollouts are slow with so small a cache")
        return notes
