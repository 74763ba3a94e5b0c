"""Formats of times: as the store writes them (ISO 8601, UTC), and as texts for the user."""

from __future__ import annotations

from datetime import datetime, timezone


def now() -> str:
    """Return the current time as text: UTC, milliseconds, `2026-01-31T12:00:00.000+00:00`."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def parse(text: str | None) -> datetime | None:
    """Parse a time that `now` wrote as text. Return None if the text is not a time."""
    try:
        value = datetime.fromisoformat(text or "")
    except (TypeError, ValueError):
        return None
    return value if value.tzinfo else value.replace(tzinfo=timezone.utc)


def seconds_between(start: str | None, end: str | None = None) -> float | None:
    """Return the seconds from `start` to `end` (default: now), or None if a time is missing.

    The result is never below 0, even if the clock was set back.
    """
    begin, finish = parse(start), parse(end) if end else datetime.now(timezone.utc)
    return max(0.0, (finish - begin).total_seconds()) if begin and finish else None


def span(seconds: float | None) -> str:
    """Return a duration as text: `45 s`, `3 min 20 s`, `2 h 05 min`, `4 d 02 h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def ago(text: str | None) -> str:
    """Return the time since `text`, to the minute, as text: `45 s`, `12 min`, `3 h 05 min`; `-` if it is unknown."""
    seconds = seconds_between(text)
    duration = span(seconds)
    return duration.rpartition(" min ")[0] + " min" if duration.endswith(" s") and " min " in duration else duration
