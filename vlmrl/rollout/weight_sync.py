"""What a weight sync sends, and proof that the engine took all of it.

Engines hold some weights fused: a transformer's `q_proj`, `k_proj` and `v_proj` are one `qkv_proj`. A loader that
skips a tensor leaves old or random numbers in its place and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

BASE_LAYER = ".base_layer."
"""What PEFT, and vLLM too, put into the name of a weight that an adapter sits on."""


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of the model's own weights, the adapter left out, one at a time in the model's order.

    A head tied to the embeddings comes under its own name too: an engine may hold it repacked, as a copy.
    """
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            yield name.replace(BASE_LAYER, "."), tensor.detach()


def dropped_tensors(
    sent: Sequence[str], loaded: Collection[str], parameters: Collection[str], *,
    rename: Callable[[str], str | None], fused: Mapping[str, Sequence[str]],
) -> list[str]:  # fmt: skip
    """What of a weight sync did not arrive, by name, sorted; empty when the engine has everything. A pure function.

    Args:
        sent: the trainer's names.      loaded: the engine's names of what its loader says it loaded.
        parameters: the engine's names of all its weights.
        rename: a trainer's name -> the engine's, before fusing; None = the engine has no such weight.
        fused: last module of a fused weight -> those it is made of: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    Returns: the trainer's name of a tensor that was sent and not loaded; the engine's (unfused) name of one that was
        not sent.
    Example: `k_proj` is missing from `sent`: its `qkv_proj` counts as loaded, and "layers.0.k_proj.weight" is named.
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
    """The engine's weight that a renamed tensor is, or is a part of."""
    if name in parameters:
        return name
    head, _, leaf = name.rpartition(".")
    prefix, _, module = head.rpartition(".")
    for whole, parts in fused.items():
        if module in parts and (candidate := f"{prefix}.{whole}.{leaf}") in parameters:
            return candidate
    return name


def _parts(parameter: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the tensors that a fused weight is made of; its own where it is not fused."""
    head, _, leaf = parameter.rpartition(".")
    prefix, _, module = head.rpartition(".")
    return [f"{prefix}.{part}.{leaf}" for part in fused.get(module, (module,))]
