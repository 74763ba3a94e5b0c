"""Calls of transformers without its progress bars and info lines, and with its errors as CheckpointError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmrl.errors import CheckpointError, VlmrlError
from vlmrl.redaction.redact import first_line


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
