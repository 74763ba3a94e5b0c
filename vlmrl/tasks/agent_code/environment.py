"""Environment of the task: code of the model, run in a sandbox. Each process of an episode runs this file."""

from __future__ import annotations

from vlmrl.environments.python_tool import Python as Python
