"""MkDocs calls these functions while it builds the site: they put the generated parts and drawings into the pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generated import drawn, written


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with its generated parts, made anew, and its drawings."""
    return drawn(written(markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Return the HTML of a page with comments in console blocks as comments: Pygments takes `#` for a prompt."""
    return re.sub(r'<span class="gp"># ?</span>(.*)', _comment, html)


def _comment(match: re.Match[str]) -> str:
    words = re.sub(r"<[^>]+>", "", match[1])
    return f'<span class="c1"># {words}</span>'
