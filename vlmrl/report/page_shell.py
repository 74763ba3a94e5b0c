"""Common parts of all pages: head, style, macros (shell.html, style.css, macros.html) and formats of values.

A page has no script and loads nothing: a content security policy forbids it. Everything that comes from a model, a
dataset or a recipe is escaped (Jinja's autoescape; charts escape on their own).
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from vlmrl import __version__
from vlmrl.errors import StoreError
from vlmrl.redaction.redact import hide_known
from vlmrl.report.texts import whole_text
from vlmrl.store.files import write_atomic
from vlmrl.store.layout import now
from vlmrl.untrusted import visible


def render(template: str, **values: Any) -> str:
    """Return a page as text, from a template in this folder. A missing value is an error."""
    from jinja2 import FunctionLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_final,
    )
    environment.filters |= {"number": number, "signed": signed, "visible": _visible, "json": _json, "whole": whole_text}
    return environment.get_template(template).render(**values, version=__version__, time=now()[:16].replace("T", " "))


def write_page(out: Path, text: str) -> None:
    """Write a page, atomically, without secrets of this process. The folder of `out` is created.

    Raises: StoreError when it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder: {error.strerror}", where=str(out.parent)) from error
    write_atomic(out, hide_known(text).encode("utf-8", "backslashreplace"))


def _source(name: str) -> str:
    return files("vlmrl.report").joinpath(name).read_text(encoding="utf-8")


def number(value: Any) -> str:
    """Format a number for readers: 0.634, 18.6, 1,234, 3e-05; a dash for None and NaN."""
    if value is None or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "\u2013"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size and size < 0.001:
        return f"{value:.1e}"
    return f"{value + 0.0:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:,.0f}"


def signed(value: float) -> str:
    """Format a number with its sign: `+0.021`, or `-0.004` with a typographic minus sign."""
    return f"{round(value, 3) + 0.0:+.3f}".replace("-", "\u2212")


def _final(value: Any) -> Any:
    """Convert a value for output by a template: control characters become visible; escaped markup is not changed."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _visible(value: Any) -> str:
    return visible(str(value))


def _json(value: Any) -> str:
    """Format a value as short JSON, but texts without quotes, and lists of texts with commas between them."""
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return visible(", ".join(value))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return visible(text)
