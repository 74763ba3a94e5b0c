"""Keeping transformers' own progress bars and remarks off the screen."""

from __future__ import annotations

import os


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
