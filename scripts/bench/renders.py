"""Pictures a minute of the renderer of SVG code, beside cairosvg.

    python scripts/bench/renders.py [--workers 2] [--figures 2000] [--json] [--smoke]

`simple`: drawn figures of one to three shapes at 64 x 64 pixels; `labelled`: diagrams with texts, patterns and arrows.
Each set is drawn by a pool of processes, as rewards and `vlmrl prep` do it, and a part of it by cairosvg to PNG in one
process. `ratio`: the time of cairosvg for a figure, divided by ours in one process.

`holds`: at least 10,000 simple figures a minute; else the exit code is 1. With `--smoke` the speed is not judged.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

import cairosvg

from vlmrl.svg.draw import Drawing, DrawJob, draw_svg
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure

LEAST = 10_000
DISTINCT = 60


def measure(simple: bool, number: int, workers: int) -> dict[str, Any]:
    """Return the speeds for one sort of figures."""
    settings = DrawnSettings(simple=simple)
    distinct = [DrawJob(draw_figure(random.Random(seed), settings).svg) for seed in range(min(DISTINCT, number))]
    jobs = [distinct[i % len(distinct)] for i in range(number)]
    with SvgRenderer(workers) as renderer:
        renderer.draw(distinct * workers)
        begin = time.perf_counter()
        drawn = renderer.draw(jobs)
        seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    for job in distinct:
        draw_svg(job)
    ours = (time.perf_counter() - begin) / len(distinct)
    begin = time.perf_counter()
    for job in distinct:
        cairosvg.svg2png(bytestring=job.svg.encode(), background_color="white")
    theirs = (time.perf_counter() - begin) / len(distinct)
    return {
        "figures": number,
        "drawn": sum(isinstance(one, Drawing) for one in drawn),
        "a_minute": round(number / seconds * 60),
        "ms": round(ours * 1000, 2),
        "cairosvg_ms": round(theirs * 1000, 2),
        "ratio": round(theirs / ours, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--figures", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    parser.add_argument("--smoke", action="store_true", help="a toy size in seconds, to see that it runs")
    options = parser.parse_args()
    number = 20 if options.smoke else options.figures
    facts: dict[str, Any] = {"workers": options.workers}
    facts["simple"] = measure(True, number, options.workers)
    facts["labelled"] = measure(False, max(10, number // 10), options.workers)
    whole = all(facts[name]["drawn"] == facts[name]["figures"] for name in ("simple", "labelled"))
    facts["holds"] = whole and (options.smoke or facts["simple"]["a_minute"] >= LEAST)
    print(json.dumps(facts) if options.json else json.dumps(facts, indent=1))
    sys.exit(0 if facts["holds"] else 1)


if __name__ == "__main__":
    main()
