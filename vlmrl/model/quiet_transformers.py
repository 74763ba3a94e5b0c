"""Calling transformers for a stranger's folder: its own bars and remarks off the screen, its failures in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmrl.errors import CheckpointError, VlmrlError, first_line


class quiet_transformers:
    """Keeps transformers' progress bars and info lines away; warnings and errors still come."""

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
    """What is read inside belongs to the model `source`, a folder or hub name.

    Raises: CheckpointError for whatever transformers and its readers raise of files that are not what they should be:
        they have no error in common. Errors in words of our own, and memory that runs out, go through.
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
        raise CheckpointError(message, hint=hint) from error
