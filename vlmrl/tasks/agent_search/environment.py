"""Environment of the task: a search of passages or of the web. Each process of an episode runs this file."""

from __future__ import annotations

from vlmrl.search.tool import Search as Search
