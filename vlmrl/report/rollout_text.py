"""Formats of a response: as JSON fields for programs, and as text lines about its authors, score and notes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.types import Group, Media, ScoredSample, Size, is_cut
from vlmrl.untrusted import one_line, plural, visible

MAX_DETAIL = 300
"""Maximum number of characters of a reward's detail on one line."""


def sample_fields(scored: ScoredSample) -> dict[str, Any]:
    """Return a response as JSON values: text, score, parts, note, error, status, and optional fields if present."""
    trajectory, score = scored.trajectory, scored.score
    fields: dict[str, Any] = {
        "sample": trajectory.sample,
        "text": scored.text,
        "score": score.value,
        "parts": dict(score.parts),
        "note": score.note,
        "error": score.error,
        "status": score.status,
        "finish": trajectory.finish,
        **({"ending": scored.ending} if scored.ending else {}),
        "tokens": trajectory.num_sampled_tokens,
        "advantage": scored.advantage,
        "masked": scored.masked,
        "version": trajectory.version,
    }
    if len(trajectory.segments) > 1 or any(s.author != "policy" for s in trajectory.segments):
        fields["segments"] = [
            {
                "role": s.role,
                "author": s.author,
                "tokens": len(s.ids),
                "trained": s.trained,
                "version": trajectory.version if s.version is None else s.version,
                "images": [_image(m, seen) for m, seen in zip(s.media, _sizes(s.media, s.seen_sizes), strict=True)],
            }
            for s in trajectory.segments
        ]
    if scored.turns:
        fields["turns"] = [
            {
                "role": turn.role,
                "text": turn.text,
                "images": [_image(m, None) for m in turn.media],
                "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls],
                **({"errors": turn.errors} if turn.errors else {}),
                **({"unfit": turn.unfit} if turn.unfit else {}),
            }
            for turn in scored.turns
        ]
    if score.detail is not None:
        fields["detail"] = dict(score.detail)
    if score.artifacts:
        fields["artifacts"] = {name: _image(media, None) for name, media in score.artifacts.items()}
    return fields


def ending_words(fields: Mapping[str, Any]) -> str:
    """Return by what a response ended, from its `finish` and the `ending` of an episode; "" if by itself."""
    if is_cut(fields["finish"], ending := fields.get("ending")):
        return "ended by the token limit" if ending == "token limit" else "cut at the limit"
    return {None: "", "answer": "", "done": "ended by the environment", "environment": "its environment failed"}.get(
        ending, f"ended by the {ending}"
    )


def sample_lines(fields: Mapping[str, Any]) -> list[str]:
    """Return text lines for the `sample_fields` except text, score and parts; often there are none."""
    lines = []
    if fields["status"] == "unavailable":
        lines.append("not scored: a service that the reward needs was unavailable")
    if segments := fields.get("segments"):
        lines.append("written by " + ", ".join(map(_segment_words, segments)))
    for turn in fields.get("turns", ()):
        calls = "".join(
            f"  calls {call['name']}({_short(call['arguments'])})" if call["name"] else "  a call that cannot be read"
            for call in turn["calls"]
        )
        calls += f"  (what they return, {turn['unfit']:,} tokens, did not fit)" if "unfit" in turn else ""
        images = f"  with {_count(len(turn['images']), 'image')}" if turn["images"] else ""
        lines.append(f"{turn['role']}: {one_line(turn['text'])}{images}{calls}")
    for reward, detail in (fields.get("detail") or {}).items():
        lines.append(f"{reward} found {_short(detail)}")
    for name, image in fields.get("artifacts", {}).items():
        lines.append(f"image `{name}` of the reward: {_image_words(image)}")
    return [visible(line) for line in lines]


def group_fields(group: Group, sample: int | None = None) -> dict[str, Any]:
    """Return a prompt with its responses, or with one of them, as JSON values.

    Raises: StoreError when the group has no sample of that number.
    """
    first = group.samples[0].trajectory
    samples = [s for s in group.samples if sample in (None, s.trajectory.sample)]
    if not samples:
        numbers = [s.trajectory.sample for s in group.samples]
        raise StoreError(
            f"prompt {group.row.prompt_id} has no sample {sample}",
            hint=f"its samples: {min(numbers)} to {max(numbers)}",
        )
    seen = _sizes(first.media, first.seen_sizes)
    return {
        "prompt_id": group.row.prompt_id,
        "source": group.row.source,
        "task": group.row.task,
        "truth": dict(group.row.truth),
        "prompt": group.prompt_text,
        "images": [_image(m, size) for m, size in zip(first.media, seen, strict=True)],
        "samples": [sample_fields(s) for s in samples],
    }


def image_lines(group: Mapping[str, Any]) -> list[str]:
    """Return one line per image of a prompt: its stored size, and its size after resizing for the model."""
    return [f"image {number}: {_image_words(image)}" for number, image in enumerate(group["images"], start=1)]


def _sizes(media: Sequence[Media], seen: Sequence[Size]) -> Sequence[Size | None]:
    return seen or [None] * len(media)


def _image(media: Media, seen: Size | None) -> dict[str, Any]:
    fields = {"sha256": media.sha256, "width": media.width, "height": media.height}
    return fields if seen is None else {**fields, "seen": list(seen)}


def _image_words(image: Mapping[str, Any]) -> str:
    seen = image.get("seen")
    seen_text = f", seen as {seen[0]} x {seen[1]}" if seen else ""
    return f"{image['width']} x {image['height']} pixels{seen_text} ({image['sha256'][:8]})"


def _segment_words(segment: Mapping[str, Any]) -> str:
    words = {"policy": "the policy", "demonstration": "a demonstration", "environment": "the environment"}
    images = "; " + "; ".join(map(_image_words, segment["images"])) if segment["images"] else ""
    use = "" if segment["trained"] or segment["author"] == "environment" else ", not trained on"
    return f"{words[segment['author']]} ({_count(segment['tokens'], 'token')}{use}{images})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{plural(number)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_DETAIL else f"{text[: MAX_DETAIL - 3]}..."
