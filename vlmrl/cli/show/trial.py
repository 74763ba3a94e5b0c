"""Screen and JSON of `vlmrl try`: the first prompt, scored responses, solve rates and a summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.cli.output import console, line_of_code, say, shorten
from vlmrl.untrusted import one_line, visible

BAR_WIDTH = 30
"""Number of characters of the longest bar of a histogram."""
MAX_TRUTH = 200
"""Maximum number of characters of a truth that are shown."""


def trial_fields(run: Any, trial: Any) -> dict[str, Any]:
    from vlmrl.inference.solve_rate import spread
    from vlmrl.inference.trial import summary
    from vlmrl.report.rollout_text import sample_fields
    from vlmrl.reward_check.scores_file import finite

    first = trial.first
    groups = [
        {
            "prompt_id": group.row.prompt_id,
            "source": group.row.source,
            "truth": dict(group.row.truth),
            "solve_rate": rate,
            "spread": spread(group),
            "samples": [sample_fields(s) for s in group.samples],
            "boxes": [str(path) for path in trial.drawn.get(number, ())],
        }
        for number, (group, rate) in enumerate(zip(trial.groups, trial.solve_rates, strict=True))
    ]
    # If the processor cuts images into tiles, there are more pictures than images: then no file names are shown.
    pictures = trial.pictures if len(trial.pictures) == len(first.row.media) else [None] * len(first.row.media)
    return finite(
        {
            "run": run.id,
            "dir": str(run.dir),
            "prompt": first.text,
            "prompt_tokens": len(first.prompt_ids),
            "image_tokens": first.num_image_tokens,
            "images": [
                {"stored": [m.width, m.height], "seen": list(seen), "png": str(path) if path else None}
                for m, seen, path in zip(first.row.media, first.image_sizes, pictures, strict=True)
            ],
            "summary": summary(trial),
            "solve_rate_is": {name: rate.words if rate else None for name, rate in trial.rates.items()},
            "no_solve_rate": trial.no_rate,
            "stand_in": trial.stand_in,
            "boxes": {name: fit.fields() for name, fit in trial.fits.items()},
            "kept": {
                name: {"path": str(path) if path else None, "rows": rows} for name, (path, rows) in trial.kept.items()
            },
            "groups": groups,
        }
    )


def show_trial(trial: Any, result: dict[str, Any], show: int) -> None:
    from rich.rule import Rule
    from rich.text import Text

    out = console(stderr=False)
    out.print(Rule("the first prompt, verbatim"))
    out.print(Text(visible(result["prompt"])))
    out.print(Rule())
    out.print(Text(f"this prompt: {result['prompt_tokens']} tokens, {result['image_tokens']} of them image tokens"))
    for image in result["images"]:
        stored, seen = ("{} x {}".format(*image[key]) for key in ("stored", "seen"))
        out.print(Text(f"image {stored} pixels, seen as {seen}" + (f": {image['png']}" if image["png"] else "")))
    for group in result["groups"][:show]:
        out.print(Text(f"\n{one_line(group['prompt_id'])}  {_rate(group, result)}", style="bold"))
        if group["truth"]:
            out.print(Text(f"   truth  {_truth(group['truth'])}"))
        for sample in group["samples"]:
            out.print(Text(_sample_line(sample)))
        for path in group["boxes"]:
            out.print(Text(f"   boxes  {path}"))
    _show_summary(result)
    _show_boxes(result)
    if result["stand_in"]:
        out.print(Text(f"{'advantages':16} {result['stand_in']}"))


def _rate(group: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the solve rate of a prompt with its definition; if there is none, the spread of its rewards."""
    if group["solve_rate"] is not None:
        return f"solve rate {group['solve_rate']:.2f} ({result['solve_rate_is'][group['source']]})"
    stats = group["spread"]
    if stats is None:
        return "no response was judged"
    return f"reward {stats['mean']:.3f} on average, {stats['min']:.3f} to {stats['max']:.3f}, std {stats['std']:.3f}"


def _truth(truth: Mapping[str, Any]) -> str:
    """Return a row's truth on one line: the value of its only field, or every field with its name."""
    texts = {
        name: "; ".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in truth.items()
    }
    shown = next(iter(texts.values())) if len(texts) == 1 else ", ".join(f"{k}: {v}" for k, v in texts.items())
    return shorten(one_line(shown), MAX_TRUTH)


def _sample_line(sample: Mapping[str, Any]) -> str:
    from vlmrl.cli.show.progress import MAX_TEXT
    from vlmrl.report.rollout_text import sample_lines

    parts = " ".join(f"{name} {'-' if v is None else f'{v:.2f}'}" for name, v in sample["parts"].items())
    text = visible(sample["text"].replace("\n", "\\n"))
    score = " " * 5 + "-" if sample["error"] else f"{sample['score']:6.3f}"
    cut = " (cut)" if sample["finish"] == "length" else ""
    message = line_of_code(sample["error"] or sample["note"])
    note = f"  [{message}]" if message else ""
    more = "".join(f"\n          {line}" for line in sample_lines(sample))
    return f"  {score}  {one_line(parts)}{cut}{note}\n          {shorten(text, MAX_TEXT)}{more}"


def _show_summary(result: Mapping[str, Any]) -> None:
    from rich.text import Text

    out, summary = console(stderr=False), result["summary"]
    if "solve_rate/mean" in summary:
        words = "; ".join(dict.fromkeys(words for words in result["solve_rate_is"].values() if words))
        counts = summary["solve_rate/histogram"]
        title = f"\nsolve rate of {sum(counts)} prompts (mean {summary['solve_rate/mean']:.2f}; {words})"
        out.print(Text(title, style="bold"))
        for i, count in enumerate(counts):
            bar = "#" * round(BAR_WIDTH * count / max(counts))
            out.print(Text(f"  {i / len(counts):.1f} - {(i + 1) / len(counts):.1f}  {bar} {count}"))
    for why in result["no_solve_rate"]:
        out.print(Text(f"\nno solve rate: {why}"))
    parts = [(name.rpartition("/")[2], value) for name, value in summary.items() if name.startswith("reward/part/")]
    longest, longest_prompt = (summary[f"rollout/{what}_tokens_max"] for what in ("response", "prompt"))
    ends = f"{summary['reward/min']:.3f} to {summary['reward/max']:.3f}"
    rows = [
        ("reward", f"{summary['reward/mean']:.3f}   " + "  ".join(f"{name} {value:.3f}" for name, value in parts)),
        ("spread", f"{ends}; std within a prompt {summary['reward/std_within_groups']:.3f} on average"),
        ("dead groups", f"{summary['rollout/dead_group_share']:.0%} teach nothing: all samples have the same score"),
        ("cut responses", f"{summary['rollout/truncated_share']:.0%} reached rollout.max_new_tokens"),
        ("prompt tokens", f"{summary['rollout/prompt_tokens_mean']:.0f} on average, longest {longest_prompt:,}"),
        ("response tokens", f"{summary['rollout/response_tokens_mean']:.0f} on average, longest {longest}"),
        ("speed", f"{summary['rollout/tokens_per_second']:,.0f} tokens/s"),
    ]
    for name, value in rows:
        out.print(Text(f"{name:16} {value}"))


def _show_boxes(result: Mapping[str, Any]) -> None:
    """Print how well boxes fit the truth in each of the coordinates, and where the pictures of both are."""
    from rich.text import Text

    from vlmrl.tasks.positions import COLOUR_WORDS

    out = console(stderr=False)
    for name, fit in result["boxes"].items():
        out.print(Text(f"{'boxes':16} {one_line(name)}: {fit['words']}", style="bold yellow" if fit["better"] else ""))
        if fit["advice"]:
            out.print(Text(f"{'':16} {fit['advice']}"))
    if pictures := [path for group in result["groups"] for path in group["boxes"]]:
        out.print(Text(f"{'':16} {len(pictures)} pictures ({COLOUR_WORDS}) in {Path(pictures[0]).parent}"))


def show_kept(result: Mapping[str, Any]) -> None:
    for index, (name, kept) in enumerate(result["kept"].items()):
        if kept["path"] is None:
            say(f"{name}: no row has a solve rate in that range; nothing was written")
            continue
        say(f"{name}: {kept['rows']} rows kept in {kept['path']}")
        say(f"use them: --set data.{index}.path={kept['path']}")
