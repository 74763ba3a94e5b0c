"""MkDocs calls these functions while it builds the site: they put the generated parts into the pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generated import fill


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with its generated parts."""
    return fill(markdown)
