"""The drawings of the documentation as inline SVG in the colours of the page: levels, the life and the way of a row."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS_TEST = ROOT / "tests" / "test_layers.py"
WAY_PAGE = ROOT / "docs" / "design" / "index.md"
WAY_HEADING = "### The files on the way\n"
"""Heading of the table that lists the files of `draw_way`."""
HOLDS = {
    "sandbox": "code of a model, confined",
    "search": "passages, search engines",
    "workers": "limited processes: frames",
    "setup": "checks before a run, memory plan, start",
    "evaluate": "eval, try; metrics, intervals, comparison",
    "loggers": "loggers",
    "services": "model servers; a model as a judge",
    "recipe": "recipes: schema, loading, checks",
    "svg": "SVG code: reading, drawing, limits",
    "rewards": "built-in rewards, sandbox",
    "algo": "algorithms: table, losses, advantages",
    "store": "run folders",
    "data": "datasets, images, packing",
    "model": "models, shared prefix, LoRA",
    "dist": "processes, FSDP2",
    "tasks": "tasks: prompt, truth, reward",
    "rollout": "engines, weight sync",
    "checkpoint": "checkpoints, merge",
    "environments": "tools, calls of tools",
    "browser": "pages, drawn and acted in",
    "reward_check": "saved responses, probe",
    "diagnose": "why a run does not learn",
    "train": "training loop",
    "report": "HTML pages",
    "launch": "several processes, Slurm",
    "demo": "the demo",
    "cli": "commands",
}
"""Package -> what it holds, in a few words."""
LIFE = (
    ("dataset row", "Row: truth, images, columns", "task"),
    ("prompt", "token ids and pixels", "engine"),
    ("rollouts", "n responses with log-probs", "reward"),
    ("scores", "parts and one number per response", "algorithm"),
    ("advantages", "one per response or token; rollouts are saved", "packing"),
    ("packed row", "a prompt and its responses, shared prefix", "trainer"),
    ("update", "one gradient, one optimizer step", "sync"),
    ("engine, run folder", "new weights, metrics, checkpoints", ""),
)
"""Stages of a row in order: (name, contents, what turns it into the next stage)."""
WIDTH = 760
BOX = 'fill="currentColor" fill-opacity="0.06" stroke="currentColor" stroke-opacity="0.45" rx="6"'
ARROW = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L10 5L0 10z" fill="currentColor"/></marker></defs>'
)


def read_levels() -> dict[int, list[str]]:
    """Return level -> its packages, lowest first, from the table of the test that checks imports.

    Modules that stand beside the packages (`errors`, `types`, ...) are left out, but for the lowest level, which is
    made of them.
    """
    tree = ast.parse(LAYERS_TEST.read_text("utf-8"))
    tables = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    levels: dict[int, list[str]] = {}
    for name, level in ast.literal_eval(tables["LEVELS"]).items():
        if not name.startswith("__"):
            levels.setdefault(level, []).append(name)
    return dict(sorted(levels.items()))


def draw_levels() -> str:
    """Return the levels of packages as a drawing, the highest at the top."""
    levels = read_levels()
    high, gap, shapes = 62, 14, []
    for place, (level, names) in enumerate(sorted(levels.items(), reverse=True)):
        top = place * (high + gap)
        if level == 0:
            shapes.append(_box(0, top, WIDTH, high, "base modules", ", ".join(sorted(names))))
            continue
        wide = (WIDTH - gap * (len(names) - 1)) / len(names)
        for i, name in enumerate(names):
            shapes.append(_box(i * (wide + gap), top, wide, high, name, HOLDS[name]))
    return _svg(shapes, len(levels) * (high + gap), "The levels of vlmrl: packages import downward only")


def draw_life() -> str:
    """Return the life of a row as a drawing: lines of boxes with arrows."""
    return _chain(LIFE, 74, "The life of a row, from the dataset to the run folder")


def read_way() -> list[tuple[str, list[str], str]]:
    """Return (part, its files below `vlmrl/` without `.py`, what it hands on) from the table of the page."""
    section = WAY_PAGE.read_text("utf-8").split(WAY_HEADING, 1)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    return [(part, files.replace("`", "").split(), hands_on.replace("`", "")) for part, files, hands_on in cells[1:]]


def draw_way() -> str:
    """Return the files on the way of a row as a drawing, part by part."""
    stages = [(part, "  ".join(files), hands_on) for part, files, hands_on in read_way()]
    return _chain(stages, 140, "The files on the way of a row, from the table to the gradient")


def _chain(stages: Sequence[tuple[str, str, str]], high: float, title: str) -> str:
    """Return lines of four boxes; an arrow leads from each to the next one, unless nothing is handed on."""
    gap, across = 34, 4
    wide = (WIDTH - gap * (across - 1)) / across
    shapes = [ARROW]
    for i, (name, holds, by) in enumerate(stages):
        line, place = divmod(i, across)
        left, top = place * (wide + gap), line * (high + 56)
        shapes.append(_box(left, top, wide, high, name, holds))
        if not by:
            continue
        if place < across - 1:
            shapes.append(_arrow(left + wide + 3, top + high / 2, left + wide + gap - 3, top + high / 2))
            shapes.append(_text(left + wide + gap / 2, top + high + 16, by, "small"))
        else:
            below = top + high + 28
            points = f"M{left + wide / 2:.0f} {top + high + 3}V{below}H{wide / 2:.0f}V{top + high + 53}"
            shapes.append(f'<path d="{points}" fill="none" stroke="currentColor" marker-end="url(#tip)"/>')
            shapes.append(_text(WIDTH / 2, below + 16, by, "small"))
    lines = -(-len(stages) // across)
    return _svg(shapes, lines * (high + 56) - 32, title)


def _svg(shapes: Sequence[str], high: float, title: str) -> str:
    opening = f'<svg viewBox="-1 -1 {WIDTH + 2} {high:.0f}" role="img" aria-label="{escape(title)}" class="drawing">'
    return f'<div class="drawing">{opening}<title>{escape(title)}</title>{"".join(shapes)}</svg></div>'


def _box(left: float, top: float, wide: float, high: float, name: str, holds: str) -> str:
    lines = textwrap.wrap(holds, int(wide / 5.9), break_long_words=False, break_on_hyphens=False)
    first = top + high / 2 - 6 * len(lines) + 2
    words = "".join(_text(left + wide / 2, first + 15 * (i + 1), line, "small") for i, line in enumerate(lines))
    box = f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high}" {BOX}/>'
    return box + _text(left + wide / 2, first, name, "name") + words


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" class="{kind}">{escape(words)}</text>'


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="currentColor" marker-end="url(#tip)"/>'
