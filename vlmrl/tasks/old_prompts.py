"""Fingerprints of shipped prompts from before a prompt was known by its rendered text.

Runs made by the commits from 75082c1 on recorded a hash of the template's source, the task's name and its settings.
The prompts are the same texts still. Closed: what is recorded now is the fingerprint of `prompt_print`.
"""

from __future__ import annotations

OLD_PROMPTS: dict[str, tuple[str, ...]] = {}
"""Fingerprint of a prompt -> those that earlier runs recorded for it, without a system message."""
