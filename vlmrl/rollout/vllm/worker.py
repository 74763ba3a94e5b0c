"""What vLLM's workers import, be they in this process or in others: they take their weights from the trainer."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader  # pyright: ignore[reportMissingImports]

from vlmrl.rollout.vllm.weight_transport import take_weights

LOAD_FORMAT = "vlmrl"
"""Name of the loader for vLLM."""


@register_model_loader(LOAD_FORMAT)
class FromTrainer(BaseModelLoader):
    """Loads a new model: not from files, since a run's checkpoint has none that vLLM could read."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: Any, model_config: Any) -> None:
        take_weights(model, model.load_weights)


class Reloading:
    """What vLLM's class of workers is given besides."""

    model_runner: Any
    reload_weights: Any

    def take_new_weights(self) -> None:
        """vLLM's own reload, which asks the model's `load_weights`; that is where things get lost."""
        model = self.model_runner.get_model()
        load = model.load_weights
        model.load_weights = lambda weights: take_weights(model, load)
        try:
            self.reload_weights(weights_iterator=iter(()))
        finally:
            del model.load_weights
