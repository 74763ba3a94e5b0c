"""Extensions that vLLM's workers import, in this process or in others; they load weights from the trainer."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader  # pyright: ignore[reportMissingImports]

from vlmrl.rollout.vllm.weight_transport import take_weights

LOAD_FORMAT = "vlmrl"
"""Name of the loader for vLLM."""


@register_model_loader(LOAD_FORMAT)
class FromTrainer(BaseModelLoader):
    """Model loader that takes the weights from the trainer.

    It reads no files: a run's checkpoint has none that vLLM could read.
    """

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: Any, model_config: Any) -> None:
        take_weights(model, model.load_weights)


class Reloading:
    """Mixin that vLLM adds to its class of workers."""

    model_runner: Any
    reload_weights: Any

    def take_new_weights(self) -> None:
        """Run vLLM's own reload, which calls the model's `load_weights`. Tensors can get lost there."""
        model = self.model_runner.get_model()
        load = model.load_weights
        model.load_weights = lambda weights: take_weights(model, load)
        try:
            self.reload_weights(weights_iterator=iter(()))
        finally:
            del model.load_weights
