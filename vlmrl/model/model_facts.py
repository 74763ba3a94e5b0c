"""Size of a model, and the device and memory for it, without loading weights; quiet calls of transformers.

Its progress bars and info lines are left out, and its errors become CheckpointError.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmrl.errors import CheckpointError, VlmrlError
from vlmrl.model.families import family_of, has_axes, has_two_way_images, part_of, sharded_units
from vlmrl.model.gpus import missing_gpus
from vlmrl.model.model_files import require_source, stored_numbers
from vlmrl.model.safetensors_blocks import compare_stored
from vlmrl.redaction.redact import first_line

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Model


class quiet_transformers:
    """Context manager that hides transformers' progress bars, info lines and warnings; errors are still shown."""

    def __enter__(self) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers.utils import logging

        self._level = logging.get_verbosity()
        self._bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self._level)
        if self._bars:
            logging.enable_progress_bar()


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Context manager for reading the model `source`, a folder or hub name.

    Raises: CheckpointError instead of any error of transformers and its file readers, because their errors about wrong
        files have no common class. Errors of vlmrl and out-of-memory errors are raised unchanged.
    """
    import torch

    try:
        with quiet_transformers():
            yield
    except (VlmrlError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        hint = (
            "the folder must hold config.json, *.safetensors and the processor files, as `save_pretrained` writes them"
            if Path(source).exists()
            else "name a local folder, a run, or a hub model that is in the cache or can be downloaded"
        )
        message = f"no model can be loaded from `{source}`: {first_line(error)}"
        if "trust_remote_code=True" in str(error):
            message = f"the model `{source}` needs Python code of its own folder, which is not run unless you say so"
            hint = (
                "read that code, then add --set model.trust_remote_code=true (for `vlmrl merge`: --trust-remote-code)"
            )
        raise CheckpointError(message, hint=hint) from error


EXPERTS = ".experts."
"""Text in the names of all expert weights of a mixture-of-experts model."""


@dataclass(frozen=True)
class ModelFacts:
    """Size of a model, from its configuration.

    Args:
        parameters: part ("vision", "connector", "language", "embeddings", "other") -> number of its parameters.
        text, vision: configuration of the text model and of the vision tower.
        linear: full name -> (rows, columns) of every linear layer.
        architecture: name of the model's class.
        sharing: how responses share a prompt, as in `families.Family`.
        units: part -> number of parameters of each layer that a sharded policy gathers separately (model/families.py);
            all other parameters are gathered together.
        head: number of parameters of the output embedding.
        largest: number of elements of the largest single tensor.
        experts: number of parameters of all experts.
    """

    model_type: str
    parameters: Mapping[str, int]
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    linear: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    architecture: str = ""
    sharing: str = "packed"
    units: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    head: int = 0
    largest: int = 0
    experts: int = 0

    @property
    def language_linear(self) -> int:
        """Number of parameters of the language model's linear layers, which `model.quantize` holds in 4 bits."""
        return sum(r * c for n, (r, c) in self.linear.items() if part_of(f"{n}.weight") == "language")

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    @property
    def layers(self) -> int:
        """Number of layers of the text model."""
        return int(self.text.get("num_hidden_layers") or 0)

    @property
    def two_way_images(self) -> bool:
        """Return whether the tokens of an image see each other in both directions."""
        return has_two_way_images(self.model_type, self.text.get("use_bidirectional_attention"))

    def by_flash(self, dtype: str) -> bool:
        """Return whether flash attention runs packed rows on a GPU, not FlexAttention; see `choose_backend`."""
        return dtype != "float32" and not self.two_way_images

    @property
    def has_axes(self) -> bool:
        """Return whether position ids have three axes. Vision towers of such families run images as one sequence."""
        return has_axes(self.model_type)

    @property
    def experts_used(self) -> float:
        """Share of the experts that one token uses; 1 if the model has no experts."""
        count = int(self.text.get("num_experts") or self.text.get("num_local_experts") or 0)
        return int(self.text.get("num_experts_per_tok") or count) / count if count and self.experts else 1.0

    @property
    def active(self) -> int:
        """Number of parameters that one token uses: all, except those of experts that it does not use."""
        return self.total - round(self.experts * (1 - self.experts_used))

    def trained(self, frozen: list[Any]) -> int:
        return sum(count for part, count in self.parameters.items() if part not in frozen)


def model_facts(settings: Model, *, path: str | None = None) -> ModelFacts:
    """Read a model's configuration and count its parameters without loading a weight.

    Args:
        path: overrides `settings.path` (a resolved folder).
    Raises: CheckpointError when the model does not exist.
    """
    from transformers import AutoConfig

    source = path or settings.path
    require_source(source, settings.revision)
    with loading(source):
        revision = None if Path(source).exists() else settings.revision
        kwargs = {"trust_remote_code": settings.trust_remote_code, "revision": revision}
        config = AutoConfig.from_pretrained(source, **kwargs)
        model = _meta_model(config, settings)
        compare_stored(Path(source), model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    _check_weights(Path(source), shapes)
    linear = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    head = model.get_output_embeddings()
    sharing = family_of(model).sharing if settings.shared_prefix else "padded"
    return ModelFacts(
        config.model_type,
        _by_part(shapes),
        dict(config.get_text_config().to_dict()),
        _vision_config(config),
        linear,
        architecture=type(model).__name__,
        sharing=sharing,
        units=_unit_sizes(model, sharing),
        head=0 if head is None else head.weight.numel(),
        largest=max(map(math.prod, shapes.values())),
        experts=sum(math.prod(shape) for name, shape in shapes.items() if EXPERTS in name),
    )


def device_facts(device: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return facts about the training device (kind, name, memory in bytes, GPUs), and a list of (problem, remedy)."""
    if device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts = {"kind": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
        return facts | {"gpus": torch.cuda.device_count()}, []
    facts = {
        "kind": "cpu",
        "name": f"this machine ({os.cpu_count()} cores)",
        "memory_bytes": usable_memory(),
        "gpus": 0,
    }
    if device != "cpu" and (missing := missing_gpus()):
        return facts, [missing]
    problem = ("model.device is cuda, but torch sees no CUDA device", 'set model.device = "auto"')
    return facts, [problem] if device == "cuda" else []


def usable_memory() -> int:
    """Return the main memory that this process can still get, in bytes.

    It is the memory that the system reports as available, or the rest up to a container's limit if that is less.
    """
    amounts = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                amounts.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit.isdigit():
            amounts.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    if amounts:
        return max(0, min(amounts))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _vision_config(config: Any) -> dict[str, Any]:
    vision = getattr(config, "vision_config", None)
    return dict(vision.to_dict()) if vision is not None and hasattr(vision, "to_dict") else {}


def _unit_sizes(model: Any, sharing: str) -> dict[str, tuple[int, ...]]:
    """Return part -> number of parameters of each of its units. A unit inside another one is not counted separately."""
    names = {id(module): name for name, module in model.named_modules()}
    sizes_by_part: dict[str, list[int]] = {}
    counted: set[int] = set()
    for unit in sharded_units(model, sharing):
        own = [p for p in unit.parameters() if id(p) not in counted]
        counted.update(map(id, own))
        part = part_of(f"{names[id(unit)]}.") or "other"
        sizes_by_part.setdefault(part, []).append(sum(p.numel() for p in own))
    return {part: tuple(sizes) for part, sizes in sizes_by_part.items()}


def _by_part(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        part = part_of(name) or "other"
        counts[part] = counts.get(part, 0) + math.prod(shape)
    return counts


def _check_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a folder's safetensors hold about as many numbers as its configuration requires.

    A folder without safetensors passes: it holds a configuration only (a checkpoint keeps its weights elsewhere).
    `compare_stored` checks the names; this check finds errors that names do not reveal, such as a second model in the
    folder. Tied weights may be stored twice.

    Raises: CheckpointError when there are fewer than 0.7 or more than 1.5 times the required numbers.
    """
    stored = stored_numbers(folder)
    needed = sum(math.prod(shape) for shape in shapes.values())
    if stored and not 0.7 * needed <= stored <= 1.5 * needed:
        message = f"the weights hold {stored:,} numbers, the configuration needs {needed:,}"
        raise CheckpointError(
            message, where=str(folder), hint="check that all shards are there and belong to one model"
        )


def _meta_model(config: Any, settings: Model) -> Any:
    """Return a model built from its configuration on the meta device, which allocates no memory for weights."""
    from transformers import AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config, trust_remote_code=settings.trust_remote_code)
    except ValueError as error:
        raise CheckpointError(f"`{settings.path}` is not a vision-language model: {first_line(error, 160)}") from error
