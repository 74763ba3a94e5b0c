"""LoRA: attach an adapter to a transformers model in place, switch it off, save it as PEFT does, add it to the weights.

The model keeps its class, so other code can treat it like a model without an adapter. Only this module imports peft,
and only if an adapter is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmrl.errors import CheckpointError, did_you_mean
from vlmrl.model.families import part_of
from vlmrl.model.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:  # type checkers only: loading a model must need no packages but torch and transformers
    from vlmrl.recipe.schema import Lora

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's files, before the name in the model."""


def target_names(linear: Sequence[str], lora: Lora, freeze: Sequence[str] = ()) -> list[str]:
    """Return the full names of the linear layers that get an adapter, in the model's order. A pure function.

    Args:
        linear: full names of the model's linear layers.
        freeze: parts in `model.freeze`; their layers get no adapter.
    Raises: CheckpointError when no layer is left, or when a name or pattern of the recipe matches no layer.
    """
    parts = {"language", "vision", "connector"} if lora.vision else {"language"}
    offered = [n for n in linear if part_of(f"{n}.weight") in parts - set(freeze)]
    hint = f"linear layers here: {', '.join(sorted({n.rpartition('.')[2] for n in offered})) or 'none'}"
    if not lora.vision:
        hint += "; lora.vision = true adds the vision tower and the connector"
    chosen = offered
    if lora.targets != ALL_LINEAR:
        for target in lora.targets:
            if not any(_ends_with(n, target) for n in offered):
                ends = {".".join(n.split(".")[-1 - target.count(".") :]) for n in offered}
                raise CheckpointError(
                    f"`lora.targets` names `{target}`, but no layer that can get an adapter has this name",
                    hint=did_you_mean(target, ends, hint),
                )
        chosen = [n for n in offered if any(_ends_with(n, t) for t in lora.targets)]
    for pattern in lora.exclude:
        if not any(fnmatchcase(n, pattern) for n in chosen):
            near = sorted(chosen, key=lambda n: -_letters_shared(n, pattern))[:2]
            full_hint = f"patterns are compared with full names; the nearest: {', '.join(near)}" if near else hint
            raise CheckpointError(f"`lora.exclude` has `{pattern}`, which matches no layer", hint=full_hint)
    chosen = [n for n in chosen if not any(fnmatchcase(n, p) for p in lora.exclude)]
    if not chosen:
        raise CheckpointError("[lora] leaves no layer with an adapter: nothing would be trained", hint=hint)
    return chosen


def linear_names(model: nn.Module) -> list[str]:
    """Return the full names of the linear layers, including quantized ones (bitsandbytes uses subclasses of Linear)."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def attach_adapter(model: Any, lora: Lora, freeze: Sequence[str] = (), dtype: torch.dtype | None = None) -> Any:
    """Attach a new adapter to the model, in place. Its second factor is 0, so the model's function is unchanged.

    peft makes the adapter's parameters the only trainable ones. Random numbers come from torch's global generator.

    Args:
        dtype: dtype of the adapter; None = that of the adapted layer (for 4-bit layers, pass a dtype).
    Raises: CheckpointError in the cases of `target_names`, or when peft is missing.
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=target_names(linear_names(model), lora, freeze),
        bias="none",
    )
    with _weights_in_memory(model):
        peft.inject_adapter_in_model(config, model)
    for layer in _layers(model):
        for name, module in layer.lora_dropout.items():
            if isinstance(module, nn.Dropout):
                layer.lora_dropout[name] = _GradientDropout(module.p)
    if dtype is not None:
        for parameter in adapter_parameters(model).values():
            parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def _weights_in_memory(model: nn.Module) -> Iterator[None]:
    """Context manager: weights on the meta device are replaced by zeros in main memory, without memory of their own.

    peft moves an adapter to the device of its layer's weight. On the meta device it would lose its values.
    """
    replaced = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, name, parameter in replaced:
        zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = nn.Parameter(zeros, parameter.requires_grad)
    try:
        yield
    finally:
        for module, name, parameter in replaced:
            zeros = module._parameters[name]
            parameter.requires_grad = zeros is not None and zeros.requires_grad
            module._parameters[name] = parameter


class _GradientDropout(nn.Module):
    """Dropout that acts if and only if gradients are computed, including recomputation in a backward pass.

    It cannot depend on the model's mode, because a checkpointed layer is recomputed in eval mode.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, training=torch.is_grad_enabled())


def has_adapter(model: nn.Module) -> bool:
    """Return whether the model has an adapter that `attach_adapter` attached."""
    return bool(getattr(model, "peft_config", None))


def adapter_rank(model: nn.Module) -> int:
    """Return the rank of the adapter's factors; 0 without an adapter."""
    return int(_config(model).r) if has_adapter(model) else 0


def adapted_parts(model: nn.Module) -> set[str]:
    """Return the parts of the model whose layers have an adapter: language, vision, connector."""
    return {part for name, _ in _named_layers(model) if (part := part_of(f"{name}.weight")) is not None}


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Context manager: the adapter has no effect inside, so the model computes the same as its base model."""
    # peft's `enable_adapters` is not used: it would also freeze the parameters, and in a sharded model the gathered
    # parameters would stay frozen.
    layers = list(_layers(model))
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def has_adapted_head(model: Any) -> bool:
    """Return whether the output embedding has an adapter (in some families it belongs to the part "language")."""
    return next(_layers(model.get_output_embeddings()), None) is not None


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's weights: PEFT's name -> tensor."""
    tensors = _peft().get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name: t.detach() for name, t in tensors.items()}


def load_adapter_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy adapter weights into the attached adapter, in place.

    Raises: CheckpointError when names or shapes differ from the adapter's.
    """
    with torch.no_grad():
        for name, value in by_parameter(model, tensors).items():
            adapter_parameters(model)[name].copy_(value)


def write_adapter(
    folder: Path,
    model: nn.Module,
    base: str,
    revision: str | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` as PEFT does; nothing is pickled.

    Args:
        base: path or hub name of the base model; it is written to the configuration unchanged.
        tensors: (PEFT's name, weight) of the adapter; None = those of `model`, which must not be sharded.
    """
    from safetensors.torch import save_file

    config = _config(model).to_dict()
    config |= {
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "auto_mapping": None,
        "task_type": None,
    }
    plain_config = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in sorted(config.items())}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(plain_config, indent=2) + "\n", "utf-8")
    named_tensors = adapter_tensors(model).items() if tensors is None else tensors
    save_file({k: v.cpu().contiguous() for k, v in named_tensors}, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a PEFT folder.

    Raises: CheckpointError when the folder has no tensors, or when they are damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the adapter cannot be read: {error}", where=str(folder)) from error


def load_peft_folder(model: Any, folder: Path) -> Any:
    """Return the base model with the adapter of a PEFT folder, loaded in the standard way: through PeftModel."""
    return _peft().PeftModel.from_pretrained(model, str(folder), is_trainable=False).get_base_model()


@torch.no_grad()
def fold_adapter(model: Any) -> Any:
    """Add the adapter to the weights of its layers and remove it, in place. Sums are in float32 and rounded once.

    Raises: CheckpointError when a resulting weight is not finite.
    """
    for name, layer in list(_named_layers(model)):
        dtype = layer.get_base_layer().weight.dtype
        layer.float()
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise CheckpointError(f"the adapter cannot be folded into {name}: {error}") from error
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.get_base_layer().to(dtype))
    del model.peft_config
    return model.requires_grad_(True)


@dataclass(frozen=True)
class Trained:
    """Number of trained and of frozen parameters of each part of a model."""

    trained: Mapping[str, int]
    frozen: Mapping[str, int]

    def __str__(self) -> str:
        """Return a line of text. Example: training language 252.0 M; frozen: vision 76.8 M, embeddings 311.2 M."""
        texts = [f"training {_counts(self.trained)}"]
        return "; ".join(texts + [f"frozen: {_counts(self.frozen)}"] * bool(self.frozen))


def trained_parts(model: nn.Module) -> Trained:
    """Return the number of trained and of frozen parameters of each part of the model.

    Adapter parameters are counted separately, under the name of their part followed by " adapter".
    """
    counts: tuple[dict[str, int], dict[str, int]] = ({}, {})
    adapters = adapter_parameters(model) if has_adapter(model) else {}
    for name, parameter in model.named_parameters():
        part = (part_of(name) or "other") + (" adapter" if name in adapters else "")
        where = counts[0 if parameter.requires_grad else 1]
        packed = 1 if parameter.is_floating_point() else 2  # 4-bit weights: two per byte
        where[part] = where.get(part, 0) + packed * parameter.numel()
    return Trained(*counts)


def _counts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {count / 1e6:,.3g} M" for part, count in parts.items()) or "nothing"


def _letters_shared(name: str, pattern: str) -> int:
    """Return how many letters of the pattern are in the name, in the same order (total length of matching pieces)."""
    return sum(run.size for run in SequenceMatcher(None, pattern.replace("*", ""), name, False).get_matching_blocks())


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise CheckpointError(f"LoRA needs peft, which cannot be imported: {error}", hint="pip install peft") from error
    return peft


def _config(model: Any) -> Any:
    return model.peft_config["default"]


def _named_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((n, m) for n, m in model.named_modules() if isinstance(m, BaseTunerLayer))


def _layers(model: nn.Module) -> Iterator[Any]:
    return (layer for _, layer in _named_layers(model))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters: name in the model -> parameter."""
    return {n: p for n, p in model.named_parameters() if ".lora_" in n}


def by_parameter(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors from PEFT's names to the model's; convert them to the device and dtype of the parameters.

    Raises: CheckpointError when names or shapes differ from the adapter's.
    """
    parameters = adapter_parameters(model)
    saved_as = {PEFT_PREFIX + name.replace(".default.", ".").removesuffix(".weight"): name for name in parameters}
    by_name = {name.removesuffix(".weight"): t for name, t in tensors.items()}
    wrong = sorted(saved_as.keys() ^ by_name.keys())
    wrong += [n for n in saved_as.keys() & by_name.keys() if by_name[n].shape != parameters[saved_as[n]].shape]
    if wrong:
        raise CheckpointError(
            f"the adapter does not fit: {len(wrong)} of {len(parameters)} tensors are missing, unknown"
            " or of another shape",
            hint=f"first of them: {wrong[0]}; [lora] and the base model must be the same as before",
        )
    return {
        saved_as[n]: t.to(parameters[saved_as[n]].device, parameters[saved_as[n]].dtype) for n, t in by_name.items()
    }
