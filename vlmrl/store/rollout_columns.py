"""Columns of the rollout files: conversion of groups and samples to rows, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from vlmrl.json_text import parse_json
from vlmrl.redaction.redact import hide_known, redact_text, redact_value
from vlmrl.types import Group, Media, Row, Score, ScoredSample, Segment, Size, Status, Trajectory, Turn
from vlmrl.visible import encodable


def group_columns(group: Group) -> dict[str, Any]:
    row = group.row
    return {
        "source": row.source,
        "task": row.task,
        "prompt_id": row.prompt_id,
        "truth": _json(row.truth),
        "columns": _json(row.columns),
        "prompt_text": _text(group.prompt_text),
        "num_row_images": len(row.media),
    }


def sample_columns(row: Row, scored: ScoredSample) -> dict[str, Any]:
    t = scored.trajectory
    if (t.task, t.prompt_id) != (row.task, row.prompt_id) or t.media != row.media:
        raise ValueError(f"the trajectory of {t.task}/{t.prompt_id} is in the group of {row.task}/{row.prompt_id}")
    segments, logp, start = [], [], 0
    for s in t.segments:
        end = start + len(s.ids)
        sampled = s.sampler_logp is not None
        if s.sampler_logp is not None and len(s.sampler_logp) != len(s.ids):
            raise ValueError(f"{len(s.ids)} tokens but {len(s.sampler_logp)} log-probs in a segment of {t.prompt_id}")
        segments.append(
            {
                "role": s.role,
                "start": start,
                "end": end,
                "trained": s.trained,
                "sampled": sampled,
                "author": s.author,
                "version": s.version,
                "num_images": len(s.media),
            }
        )
        logp.extend([math.nan] * len(s.ids) if s.sampler_logp is None else s.sampler_logp)
        start = end
    return {
        "version": t.version,
        "occurrence": t.occurrence,
        "sample": t.sample,
        "seed": t.seed,
        "text": _text(scored.text),
        "prompt_ids": t.prompt_ids,
        "token_ids": t.response_ids,
        "sampler_logp": logp,
        "segments": segments,
        "finish": t.finish,
        "parts": _json(scored.score.parts),
        "score": scored.score.value,
        "note": _remark(scored.score.note),
        "error": None if scored.score.error is None else _remark(scored.score.error),
        "advantage": scored.advantage,
        "masked": scored.masked,
        "images": [
            *image_fields(t.media, t.seen_sizes),
            *(i for s in t.segments for i in image_fields(s.media, s.seen_sizes)),
        ],
        "generate_seconds": scored.generate_seconds,
        "reward_seconds": scored.reward_seconds,
        "status": scored.score.status,
        "detail": None if scored.score.detail is None else _json(redact_value(scored.score.detail)),
        "artifacts": [{"name": _remark(name), **m.fields()} for name, m in sorted(scored.score.artifacts.items())],
        "turns": _turns_text(scored.turns) if scored.turns else None,
    }


def image_fields(media: Sequence[Media], seen: Sequence[Size]) -> list[dict[str, Any]]:
    """Return images with `seen`, their sizes after resizing for the model; `seen` may be empty."""
    if seen and len(seen) != len(media):
        raise ValueError(f"{len(media)} images but {len(seen)} sizes that the model saw")
    sizes = seen or [(None, None)] * len(media)
    return [
        {**m.fields(), "seen_width": width, "seen_height": height}
        for m, (width, height) in zip(media, sizes, strict=True)
    ]


def _turns_text(turns: Sequence[Turn]) -> str:
    """Return turns as JSON text."""
    content = [
        {
            "role": turn.role,
            "text": _text(turn.text),
            "media": [m.fields() for m in turn.media],
            "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls],
        }
        for turn in turns
    ]
    return _json({"turns": content})


def read_turns(text: str | None) -> tuple[Turn, ...]:
    """Return the turns of a response, from the column `turns`; () for null.

    Raises: ValueError, KeyError or TypeError.
    """
    return () if text is None else tuple(map(Turn.of, parse_json(text)["turns"]))


def seen_of(images: Sequence[Mapping[str, Any]]) -> tuple[Size, ...]:
    """Return the sizes of images after resizing for the model, from the column `images`; () if one is not known."""
    sizes = [(image.get("seen_width"), image.get("seen_height")) for image in images]
    return () if any(None in size for size in sizes) else tuple(sizes)  # type: ignore[return-value]


def row_of(row: dict[str, Any]) -> Row:
    media = tuple(map(Media.of, row["images"][: row["num_row_images"]]))
    truth, columns = parse_json(row["truth"]), parse_json(row["columns"])
    return Row(row["prompt_id"], row["source"], row["task"], truth, media, columns)


def _segments(row: Mapping[str, Any]) -> tuple[Segment, ...]:
    ids, logp = tuple(row["token_ids"]), tuple(row["sampler_logp"])
    segments: list[Segment] = []
    first = row["num_row_images"]
    for s in row["segments"]:
        images = row["images"][first : first + s.get("num_images", 0)]
        first += len(images)
        segments.append(
            Segment(
                s["role"],
                ids[s["start"] : s["end"]],
                s["trained"],
                logp[s["start"] : s["end"]] if s["sampled"] else None,
                author=s.get("author", "policy" if s["sampled"] else "environment"),
                version=s.get("version"),
                media=tuple(map(Media.of, images)),
                seen_sizes=seen_of(images),
            )
        )
    return tuple(segments)


def sample_of(row: dict[str, Any]) -> ScoredSample:
    images = row["images"][: row["num_row_images"]]
    trajectory = Trajectory(
        task=row["task"],
        prompt_id=row["prompt_id"],
        occurrence=row["occurrence"],
        sample=row["sample"],
        version=row["version"],
        seed=row["seed"],
        prompt_ids=tuple(row["prompt_ids"]),
        segments=_segments(row),
        media=tuple(map(Media.of, images)),
        finish=row["finish"],
        seen_sizes=seen_of(images),
    )
    if row["status"] not in get_args(Status):
        raise ValueError(f"`{row['status']}` is not a status of a score")
    score = Score(
        row["score"],
        parse_json(row["parts"]),
        row["note"],
        row["error"],
        status=row["status"],
        detail=None if row["detail"] is None else parse_json(row["detail"]),
        artifacts={a["name"]: Media.of(a) for a in row["artifacts"]},
    )
    return ScoredSample(
        trajectory,
        row["text"],
        score,
        row["advantage"],
        row["masked"],
        row["generate_seconds"],
        row["reward_seconds"],
        turns=read_turns(row["turns"]),
    )


def _json(value: Any) -> str:
    """Return JSON text that Parquet can store. Characters are escaped only if a string has half a surrogate pair."""
    text = json.dumps(dict(value), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(dict(value))
    return hide_known(text)


def _text(text: str) -> str:
    """Return a text from which scores are computed. Only secrets of this process are hidden in it.

    See redaction/redact.py.
    """
    return hide_known(encodable(text))


@lru_cache(maxsize=256)
def _remark(text: str) -> str:
    """Return a note or error of a reward with all secrets hidden. No score is computed from such texts.

    The result is cached, because rewards return few different notes.
    """
    return encodable(redact_text(text))
