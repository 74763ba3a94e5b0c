"""How big a model is and what machine it would run on, without loading a weight."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmrl.errors import CheckpointError
from vlmrl.model.families import part_of
from vlmrl.model.files import stored_numbers
from vlmrl.model.hub import require_source
from vlmrl.model.quiet import loading

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Model


@dataclass(frozen=True)
class ModelFacts:
    """A model's size, from its configuration.

    Args:
        parameters: by part ("vision", "connector", "language", "embeddings", "other").
        text, vision: their config values.
        linear: (rows, columns) of every linear layer, by full name.
    """

    model_type: str
    parameters: Mapping[str, int]
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    linear: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def language_linear(self) -> int:
        """Numbers in the language model's linear layers: those that `model.quantize` holds in 4 bits."""
        return sum(r * c for n, (r, c) in self.linear.items() if part_of(f"{n}.weight") == "language")

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def trained(self, frozen: list[Any]) -> int:
        return sum(count for part, count in self.parameters.items() if part not in frozen)


def model_facts(settings: Model, *, path: str | None = None) -> ModelFacts:
    """Read a model's configuration and count its parameters without loading a weight.

    Args: path: overrides `settings.path` (a resolved folder).
    Raises: CheckpointError when there is no such model.
    """
    from transformers import AutoConfig

    source = path or settings.path
    require_source(source, settings.revision)
    with loading(source):
        revision = None if Path(source).exists() else settings.revision
        kwargs = {"trust_remote_code": settings.trust_remote_code, "revision": revision}
        config = AutoConfig.from_pretrained(source, **kwargs)
        model = _meta_model(config, settings)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    _check_weights(Path(source), shapes)
    linear = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return ModelFacts(config.model_type, _by_part(shapes), _text_config(config), _vision_config(config), linear)


def device_facts(wanted: str) -> tuple[dict[str, Any], list[str]]:
    """The training device: kind, name, memory in bytes; and what is wrong with it."""
    if wanted != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts = {"kind": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
        return facts | {"gpus": torch.cuda.device_count()}, []
    facts = {
        "kind": "cpu",
        "name": f"this machine ({os.cpu_count()} cores)",
        "memory_bytes": usable_memory(),
        "gpus": 0,
    }
    return facts, ["model.device is cuda, but torch sees no CUDA device"] if wanted == "cuda" else []


def usable_memory() -> int:
    """Main memory this process may have: what the system calls available, or less under a container's limit."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit.isdigit():
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    if found:
        return max(0, min(found))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text_config(config: Any) -> dict[str, Any]:
    return dict(config.get_text_config().to_dict())


def _vision_config(config: Any) -> dict[str, Any]:
    found = getattr(config, "vision_config", None)
    return dict(found.to_dict()) if found is not None and hasattr(found, "to_dict") else {}


def _by_part(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        part = part_of(name) or "other"
        counts[part] = counts.get(part, 0) + math.prod(shape)
    return counts


def _check_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the safetensors of a local folder hold as many numbers as its configuration asks for.

    A folder without any holds a configuration only (a checkpoint keeps its weights elsewhere). Names are not compared:
    they differ between versions of transformers; tied weights may be stored once or twice.
    """
    stored = stored_numbers(folder)
    wanted = sum(math.prod(shape) for shape in shapes.values())
    if stored and not 0.7 * wanted <= stored <= 1.5 * wanted:
        message = f"the weights hold {stored:,} numbers, the configuration asks for {wanted:,}"
        raise CheckpointError(message, where=str(folder), hint="are all shards there, and of one model?")


def _meta_model(config: Any, settings: Model) -> Any:
    """A model made without memory from its configuration."""
    from transformers import AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config, trust_remote_code=settings.trust_remote_code)
    except ValueError as error:
        raise CheckpointError(f"`{settings.path}` is not a vision-language model: {str(error)[:160]}") from error
