"""How much faster a training pass is with the prompt computed once, over prompt length, group and response length:

    python scripts/bench/prefix_sweep.py [--json] [--svg FILE] [--out /tmp/prefix_sweep] [--smoke]

Forward and backward of one group of the 43 M-parameter model (fp32, CPU), two images in every prompt. The baseline
packs the responses too, without padding, each behind a prompt of its own. Beside the measured ratio: that of the
counted FLOPs (vision tower and head included) and the token ratio G(P + R) / (P + GR).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

POINTS = [  # words of text, samples, response tokens
    (108, 4, 96), (108, 8, 96), (108, 16, 96), (20, 16, 96), (600, 8, 96), (108, 16, 24),
]  # fmt: skip
SMOKE_POINTS = [(4, 2, 4)]


def measure(folder: Path, words: int, samples: int, response: int) -> dict[str, Any]:
    """One point of the sweep."""
    from PIL import Image
    from speed_world import compare_paths, make_rows

    from vlmrl.data.encode import Encoder
    from vlmrl.model.load import load_model, load_processor
    from vlmrl.model.packing import PromptTokens, TrainItem
    from vlmrl.recipe.schema import Model
    from vlmrl.types import Media, Message, Row, Segment

    settings = Model(path=str(folder / "model"), dtype="float32", device="cpu")
    model, processor = load_model(settings), load_processor(settings)
    line = json.loads(make_rows(folder / f"rows-{words}", 1, words=words).read_text())
    images = [Image.open(folder / f"rows-{words}" / name).convert("RGB") for name in line["images"]]
    row = Row(
        "0", "sweep", "table", {}, tuple(Media(name, *im.size) for name, im in zip(line["images"], images, strict=True))
    )
    e = Encoder(processor).encode(row, [Message("user", line["problem"])], images)
    prompt, rng = PromptTokens(e.prompt_ids, e.kinds, e.images, e.num_images), random.Random(0)
    top = min(8000, len(processor.tokenizer))
    items = [
        TrainItem(prompt, 0, (Segment("assistant", tuple(rng.randrange(300, top) for _ in range(response)), True),), k)
        for k in range(samples)
    ]
    found = compare_paths(model, processor, items)
    P, G, R = len(e.prompt_ids), samples, response
    return {"prompt": P, "samples": G, "response": R, "token_ratio": G * (P + R) / (P + G * R), **found}


def draw(points: list[dict[str, Any]]) -> str:
    """Measured ratio over the ratio of counted FLOPs, and the line where both are equal, as SVG."""
    size, pad = 420, 50
    top = max(max(p["flops_ratio"], p["ratio"]) for p in points) * 1.1

    def at(x: float, y: float) -> tuple[float, float]:
        return round(pad + x / top * (size - 2 * pad), 1), round(size - pad - y / top * (size - 2 * pad), 1)

    (x0, y0), (x1, y1) = at(0, 0), at(top, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#555"/>',
        f'<path d="M{x0} {y0}L{x1} {y1}" stroke="#999" stroke-dasharray="4 4"/>',
        f'<text x="{size / 2}" y="{size - 12}" text-anchor="middle">promised by counted FLOPs, times faster</text>',
        f'<text x="16" y="{size / 2}" text-anchor="middle" transform="rotate(-90 16 {size / 2})">measured</text>',
    ]
    for tick in range(0, int(top) + 1, max(1, int(top) // 5)):
        (x, _), (_, y) = at(tick, 0), at(0, tick)
        parts.append(f'<text x="{x}" y="{y0 + 16}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{tick}</text>')
    for p in points:
        x, y = at(p["flops_ratio"], p["ratio"])
        name = f"P={p['prompt']} G={p['samples']} R={p['response']}"
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="#2563eb"><title>{name}: {p["ratio"]:.1f}x</title></circle>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--svg", type=Path, help="where to draw the plot")
    parser.add_argument("--out", type=Path, default=Path("/tmp/prefix_sweep"))
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    from speed_world import SMOKE_MODEL, make_model

    if not (options.out / "model" / "config.json").is_file():
        make_model(options.out / "model", **(SMOKE_MODEL if options.smoke else {}))
    points = []
    for point in SMOKE_POINTS if options.smoke else POINTS:
        points.append(p := measure(options.out, *point))
        told = f"measured {p['ratio']:5.1f}   FLOPs {p['flops_ratio']:5.1f}   tokens {p['token_ratio']:5.1f}   "
        print(
            f"P {p['prompt']:5}  G {p['samples']:3}  R {p['response']:4}   {told}reached {p['reached']:.0%}   "
            f"log-prob {p['logp_max_abs']:.0e}  gradient {p['grad_rel']:.0e}",
            file=sys.stderr,
        )
    if options.svg:
        options.svg.write_text(draw(points))
    if options.json:
        print(json.dumps({"points": points}))


if __name__ == "__main__":
    main()
