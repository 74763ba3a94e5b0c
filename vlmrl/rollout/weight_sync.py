"""Tensors that a weight sync sends, and a check that the engine has received all of them.

Engines hold some weights fused: a transformer's `q_proj`, `k_proj` and `v_proj` are one `qkv_proj`. A loader that skips
a tensor leaves old or random numbers in its place without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmrl.errors import EngineError
from vlmrl.model.families import family_of
from vlmrl.model.lora import adapter_tensors, has_adapter, write_adapter
from vlmrl.model.stored_weights import as_published, published_names
from vlmrl.untrusted import number_of

BASE_LAYER = ".base_layer."
"""Fragment that PEFT and vLLM put into the name of a weight that an adapter sits on."""
BUCKET_BYTES = 1 << 28
"""Maximum bytes of a bucket in which a sharded policy's weights are gathered. A larger tensor is a bucket by itself."""


def base_tensors(
    model: nn.Module, names: Mapping[str, str], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (published name, tensor) of the model's own weights without the adapter, in the model's order.

    A head tied to the embeddings is also sent under its own name: an engine may hold it repacked, as a copy. Sharded
    weights are gathered whole: every rank must iterate over all of them.

    Args:
        names: result of `engine_names`.
        dtype: to cast sharded weights to; None = their own. Others already have the dtype that their model computes in.
    """
    for name, tensor in whole_tensors(_own(model), BUCKET_BYTES, dtype):
        if name in names:
            yield names[name], tensor
        else:
            yield from as_published(model, {name: tensor}).items()


def engine_names(model: nn.Module) -> dict[str, str]:
    """Return own name -> published name, which engines use, for `base_tensors`. Takes a fraction of a second."""
    return published_names(model, {name: tensor.shape for name, tensor in _own(model)})


def _own(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n.replace(BASE_LAYER, "."), t) for n, t in model.state_dict().items() if ".lora_" not in n)


def whole_tensors(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same names and tensors; gather those that are sharded over the ranks.

    One collective per bucket. At most one bucket and the tensor that was yielded last are in memory, besides what the
    caller keeps.

    Args:
        bucket_bytes: maximum size of a bucket, unless a single tensor is larger.
        dtype: to cast sharded tensors to.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        tensor = tensor.detach()
        if isinstance(tensor, DTensor) and dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        added = tensor.numel() * tensor.element_size() if isinstance(tensor, DTensor) else 0
        if bucket and (size + added > bucket_bytes or tensor.dtype != bucket[-1][1].dtype):
            yield from _taken(bucket)
            size = 0
        bucket.append((name, tensor))
        size += added
    yield from _taken(bucket)


def _taken(bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Empty the bucket: yield its tensors, gathered."""
    shards = [t for _, t in bucket if isinstance(t, DTensor)]
    parts = iter(_gather(shards))
    while bucket:
        name, tensor = bucket.pop(0)
        if isinstance(tensor, DTensor):
            rows = next(parts)  # [processes, numbers of each one's rows]  # [ranks, numbers of each rank's rows]
            yield name, rows.reshape(-1, *tensor.shape[1:])[: len(tensor)]  # without the padding of the last rank
        else:
            yield name, tensor


def _gather(shards: Sequence[DTensor]) -> Sequence[Tensor]:
    """Return the rows of all ranks for each tensor: [ranks, numbers], padded to equal size. One collective."""
    if not shards:
        return []
    mesh = shards[0].device_mesh
    [axis] = [i for i, p in enumerate(shards[0].placements) if p.is_shard(0)]
    count = mesh.size(axis)
    own = []
    for shard in shards:
        rows = shard.to_local().to(mesh.device_type)  # offloaded parameters are in main memory
        full = -(-len(shard) // count) * shard.shape[1:].numel()
        own.append(nn.functional.pad(rows.flatten(), (0, full - rows.numel())))
    if count == 1:
        return [rows.unsqueeze(0) for rows in own]
    flat = torch.cat(own)
    of_all_ranks = flat.new_empty(count * len(flat))
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    gather(of_all_ranks, flat, mesh.get_group(axis))
    return of_all_ranks.view(count, -1).split([len(x) for x in own], dim=1)


class WeightSource(Protocol):
    """Source of an engine's weights.

    Attributes:
        model_type: the model's, as transformers calls it.
        two_way_images: whether the tokens of an image see each other in both directions.
    """

    model_type: str
    adapted: bool
    two_way_images: bool

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (published name, tensor) of all weights except an adapter's, one at a time."""
        ...

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter into a new folder, as PEFT does."""
        ...


class PolicyWeights:
    """Weights of a policy in this process. All ranks of a sharded policy must iterate over them together.

    Args:
        dtype: of the engine; sharded weights are cast to it.
        folder: of the base model, recorded with an adapter.
    """

    def __init__(self, model: Any, dtype: torch.dtype, folder: str) -> None:
        self.model, self.dtype, self.folder = model, dtype, folder
        self.model_type, self.adapted = str(model.config.model_type), has_adapter(model)
        self.two_way_images = family_of(model).bidirectional != "never"
        self.names = engine_names(model)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return base_tensors(self.model, self.names, self.dtype)

    def write_adapter(self, folder: Path) -> None:
        tensors = whole_tensors(adapter_tensors(self.model).items(), BUCKET_BYTES)
        write_adapter(folder, self.model, self.folder, tensors=tensors)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Delivery:
    """One transfer of all weights to an engine's worker in this process, with a check that all arrived.

    Args:
        watch: called with the name and the tensor of each weight; the engine loads the tensor that it returns.

    Attributes:
        lost: names of the weights that did not arrive; None before the worker requested them.
        sent_bytes: bytes of the weights that the worker has taken.
    """

    def __init__(self, weights: WeightSource, watch: Callable[[str, Tensor], Tensor] | None = None) -> None:
        self.weights, self.watch = weights, watch
        self.sent_bytes = 0
        self.sent: list[str] = []
        self.lost: list[str] | None = None

    def load_into(self, model: Any, load: Callable[[Iterator[tuple[str, Tensor]]], Any]) -> set[str]:
        """Pass all weights to the engine's model through its own loader `load`, and record those that got lost.

        Names are mapped by the engine's own renaming and by its own table of fused weights.
        """
        tensors = self._tensors()
        loaded = set(load(tensors))
        for _ in tensors:  # tensors that the loader skipped: the other ranks still wait to gather them
            pass
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        rename = (lambda name: name) if mapper is None else lambda name: next(iter(mapper.apply_list([name])), None)
        names: dict[
            int, list[str]
        ] = {}  # all names of one tensor: a tied head is loaded with the embeddings while they share it
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name.replace(BASE_LAYER, "."))
        # `loaded` may also name buffers.
        arrived = loaded | {n for same in names.values() if loaded & set(same) for n in same}
        # Some models declare the mapping themselves, some only on their submodules.
        fused = {k: v for m in model.modules() for k, v in (getattr(m, "packed_modules_mapping", None) or {}).items()}
        every = {n for same in names.values() for n in same}
        homes = {_home(new, every, fused) for n in self.sent if (new := rename(n)) is not None}
        # Of several names of one tensor, keep those that a sent tensor maps to: the others are aliases in the engine.
        parameters = {n for same in names.values() for n in ([x for x in same if x in homes] or same[:1])}
        self.lost = dropped_tensors(self.sent, arrived, parameters, rename=rename, fused=fused)
        return loaded

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.tensors():
            self.sent.append(name)
            self.sent_bytes += tensor.nbytes
            yield name, tensor if self.watch is None else self.watch(name, tensor)


def check_arrival(what: str, lost: Sequence[str] | None) -> None:
    """Raise an EngineError when weights got lost on their way into an engine.

    Args:
        lost: names of lost weights; None = the engine never requested the weights.
    """
    if lost is None or lost:
        problem = (
            "the engine never asked for the weights"
            if lost is None
            else (f"{number_of(len(lost), 'tensor')} did not arrive in the engine: {', '.join(lost[:5])}")
        )
        raise EngineError(
            f"{what}: {problem}",
            hint='this version of vLLM stores the model differently: use another one, or rollout.engine = "torch"',
        )


def dropped_tensors(
    sent: Sequence[str],
    loaded: Collection[str],
    parameters: Collection[str],
    *,
    rename: Callable[[str], str | None],
    fused: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the names of weights that did not arrive in a sync, sorted; empty if the engine has all. A pure function.

    Args:
        sent: the trainer's names.
        loaded: the engine's names of what its loader reports as loaded.
        parameters: the engine's names of all its weights.
        rename: a trainer's name -> the engine's, before fusing; None = the engine has no such weight.
        fused: last module of a fused weight -> its parts: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    Returns: the trainer's name of a tensor that was sent and not loaded; the engine's (unfused) name of one that was
        not sent.
    Example: `k_proj` is missing from `sent`: its `qkv_proj` counts as loaded, and "layers.0.k_proj.weight" is returned.
    """
    renamed = {name: rename(name) for name in sent}
    arrived = {name for name in renamed.values() if name is not None}
    lost = [name for name, new in renamed.items() if new is None or _home(new, parameters, fused) not in loaded]
    for parameter in parameters:
        if parameter not in loaded:
            lost += [] if any(_home(n, parameters, fused) == parameter for n in arrived) else [parameter]
        elif parameter not in arrived:
            lost += [part for part in _parts(parameter, fused) if part not in arrived]
    return sorted(set(lost))


def _home(name: str, parameters: Collection[str], fused: Mapping[str, Sequence[str]]) -> str:
    """Return the engine's weight that a renamed tensor is, or is a part of."""
    if name in parameters:
        return name
    head, _, leaf = name.rpartition(".")
    prefix, _, module = head.rpartition(".")
    for whole, parts in fused.items():
        if module in parts and (candidate := f"{prefix}.{whole}.{leaf}") in parameters:
            return candidate
    return name


def _parts(parameter: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the tensors that a fused weight consists of; its own name if it is not fused."""
    head, _, leaf = parameter.rpartition(".")
    prefix, _, module = head.rpartition(".")
    return [f"{prefix}.{part}.{leaf}" for part in fused.get(module, (module,))]
