"""Write detection.json: scores of a second implementation of RLLaVA's detection reward, written from its description.

The original program (TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/ovd.py`) did not write it. Run once on the
same inputs, it gave the same. This implementation and `vlmrl/tasks/perception/rewards.py` share no code. Each case:
[response, true boxes in 0 to 1000, overall, iou, confidence, format]; "crash" in place of the numbers where the
original raises.

    python tests/golden/rllava/record_detection.py
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("detection.json")
NUM_DRAWN, NUM_ODD = 350, 350
TRUTHS = ([[100, 100, 300, 300]], [[100, 100, 300, 300], [500, 500, 700, 900]], [[0, 0, 1000, 1000]])


def parsed(response: str) -> list[Any] | None:
    found = re.search("<answer>(.*?)</answer>", response)
    if not found:
        return None
    body = found.group(1)
    if not ("Position" in body and "Confidence" in body):
        return None
    body = body.replace("[[", "[").replace("]]", "]")
    if body[-1:] != "]":
        body = "},".join(body.split("},")[:-1] or [body]) + "}]"
    try:
        return json.loads(body.replace("'", '"'))
    except json.JSONDecodeError:
        return None


def covered(a: list[float], b: list[float]) -> float:
    ax1, ay1, ax2, ay2 = a
    bx1, by1, bx2, by2 = b
    left, top, right, bottom = max(ax1, bx1), max(ay1, by1), min(ax2, bx2), min(ay2, by2)
    if right <= left or bottom <= top:
        return 0
    both = (right - left) * (bottom - top)
    return both / ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - both)


def named(entry: Any, names: str, usable: Callable[[Any], Any]) -> Any:
    """Return the value under the first of these names that is usable; None if there is none."""
    for name in names.split():
        if name in entry and entry[name] is not None:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return usable(entry[name])
    return None


def place(entry: Any) -> Any:
    value = named(entry, "Position position bbox Bbox", lambda v: v) if isinstance(entry, dict) else None
    return [0, 0, 0, 0] if value is None else value


def sureness(entry: Any) -> float:
    return named(entry, "Confidence confidence score Score prob Prob probability Probability", float) or 0.0


def four(position: Any) -> list[Any]:
    if len(position) == 2:
        position[0]
    return list(position) if len(position) == 4 else [0, 0, 0, 0]


def scored(response: str, truths: list[list[int]]) -> list[float]:
    """Return [overall, iou, confidence, format]. Raises what the original raises: TypeError, KeyError, ValueError."""
    iou = confidence = 0.0
    boxes = parsed(response)
    if boxes and type(boxes[0]) is dict:
        unique: list[Any] = []
        for box in boxes:
            hash(tuple(place(box)))
            if tuple(place(box)) not in [tuple(place(other)) for other in unique]:
                unique.append(box)
        unique.sort(key=lambda box: -sureness(box))
        free, total, sure = set(range(len(truths))), 0.0, 0.0
        for box in unique:
            overlaps = {}
            for k in sorted(free):
                texts = any(isinstance(value, str) for value in four(place(box)))
                overlaps[k] = 0 if texts else covered(four(place(box)), truths[k])
            best = max(overlaps, key=lambda k: overlaps[k]) if overlaps else None
            if best is not None and overlaps[best] > 0.5:
                free.discard(best)
                total, sure = total + overlaps[best], sure + sureness(box)
            else:
                sure += 1 - sureness(box)
        iou = min(1.0, total / max(len(truths), len(unique)))
        confidence = min(1.0, max(0.0, sure / len(unique)))
    form = 1.0 if re.match(r"<think>.*?</think>\s*<answer>.*?</answer>", response, re.DOTALL) else 0.0
    return [0.33 * iou + 0.33 * confidence + 0.34 * form, iou, confidence, form]


BODIES = (
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.9}]",
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.9}, {'Position': [500, 500, 700, 900], 'Confidence': 0.5}]",
    '[{"Position": [100, 100, 300, 300], "Confidence": 1}]',
    "[[{'Position': [100, 100, 300, 300], 'Confidence': 0.9}]]",
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.9}, {'Position': [500, 500, 7",
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.9}",
    "{'Position': [100, 100, 300, 300], 'Confidence': 0.9}",
    "[{'Position': [900, 900, 910, 910], 'Confidence': 0}]",
    "[{'Position': [900, 900, 910, 910], 'Confidence': -50}]",
    "[{'Position': [900, 900, 910, 910], 'Confidence': 7}]",
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.9}, {'Position': [100, 100, 300, 300], 'Confidence': 0.1}]",
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.2}, {'Position': [110, 110, 300, 300], 'Confidence': 0.8}]",
    "[{'Position': [300, 300, 100, 100], 'Confidence': 0.9}]",
    "[{'Position': [100, 100, 200, 300], 'Confidence': 0.9}]",
    "[{'Position': [100, 100, 201, 300], 'Confidence': true}]",
    "[{'Position': [100, 100,\n300, 300], 'Confidence': 0.9}]",
    "[{'Position': 5, 'Confidence': 0.9}]",
    "[{'Position': [1, null, 3, 4], 'Confidence': 0.9}]",
    "[{'Position': [1, 2, 3], 'Confidence': 0.9}]",
    "[{'Position': [1, 2, 3, 4]}, 'Confidence']",
    "['Position', 'Confidence']",
    "[{'Position': [1, 2, 3, 4], 'Confidence': 'high'}]",
    "[{'Position': [100, 100, 300, 300]}]",
    "No Objects",
    "[]",
    "",
    "[{'Position': [100, 100, 300, 300], 'Confidence': '0.9'}]",
    "[{'Position': [100, 100, 300, 300], 'Confidence': null, 'score': 0.9}]",
    "[{'Position': null, 'bbox': [100, 100, 300, 300], 'Confidence': 'high', 'Prob': 0.9}]",
    "[{'Confidence': 0.25, 'position': [100, 100, 300, 300]}, {'Position': [1, 2, 3, 4]}]",
    "[{'Position': ['100', 100, 300, 300], 'Confidence': 0.25}]",
    "[{'Position': 'abcd', 'Confidence': 0.25}, {'Position': 'ab', 'Confidence': 0.5}]",
    "[{'Position': {'a': 1, 'b': 2}, 'Confidence': 0.25}]",
    "[{'Position': {'a': 1, 'b': 2, 'c': 3}, 'Confidence': 0.25}]",
    "[{'Position': [ [100, 100], [300, 300] ], 'Confidence': 0.25}]",
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.25}, [1, 2], 'box']",
    "[{'Position': [100, 100, 300, 300], 'Confidence': 0.25}, 7]",
    "[{}, 'Position', 'no Confidence']",
    "[{'Position': [true, 100, 1e200, 300], 'Confidence': Infinity}]",
)
NAMES = ("Position", "Position", "position", "bbox", "Bbox", "box")
SURE_NAMES = ("Confidence", "Confidence", "confidence", "score", "Score", "prob", "Prob", "probability", "Probability")
ODD_NUMBERS = (None, True, "100", "a", 1.5, 1e200, 10**30, 10**400, -7)
ODD_POSITIONS: tuple[Any, ...] = (
    None,
    5,
    "abcd",
    "ab",
    [],
    [1, 2],
    [1, 2, 3],
    {"a": 1},
    {"a": 1, "b": 2},
    [[1, 2], [3, 4]],
)
ODD_CONFIDENCES: tuple[Any, ...] = (None, "0.9", "high", True, -50, 7, 10**400, [], {}, " 0.5 ", "inf", [0.5])
ODD_ENTRIES: tuple[Any, ...] = ("Position", "Confidence", 5, None, [], ["Confidence"], {}, "probable")
FRAMES = (
    "<think>a</think><answer>{}</answer>",
    "<think>a</think>\n <answer>{}</answer> and more",
    "<answer>{}</answer>",
    "x<think></think><answer>{}</answer>",
    "<think><answer>no</answer></think><answer>{}</answer>",
    "<think>a</think><answer>\n{}\n</answer>",
    "<think>a</think><answer>{}",
)


def drawn(rng: random.Random, truths: list[list[int]]) -> str:
    entries = []
    for _ in range(rng.randint(1, 6)):
        reach = rng.choice((0, 10, 40, 200))
        box = [number + rng.randint(-reach, reach) for number in rng.choice(truths)]
        entries.append({"Position": box, "Confidence": round(rng.random(), rng.choice((1, 2)))})
    text = str(entries) if rng.random() < 0.7 else json.dumps(entries)
    return rng.choice(FRAMES[:5]).format(text[: rng.choice((None, None, None, -1, -9))])


def odd_entry(rng: random.Random, truths: list[list[int]]) -> Any:
    """Return an entry with other names, with values that are missing, or that is no mapping at all."""
    if rng.random() < 0.1:
        return rng.choice(ODD_ENTRIES)
    box: Any = [number + rng.randint(-20, 20) for number in rng.choice(truths)]
    if rng.random() < 0.3:
        box[rng.randrange(4)] = rng.choice(ODD_NUMBERS)
    elif rng.random() < 0.3:
        box = rng.choice(ODD_POSITIONS)
    sure = round(rng.random(), 2) if rng.random() < 0.6 else rng.choice(ODD_CONFIDENCES)
    fields = {rng.choice(NAMES): box, rng.choice(SURE_NAMES): sure, rng.choice(SURE_NAMES): round(rng.random(), 2)}
    return dict(rng.sample(list(fields.items()), rng.randint(1, len(fields))))


def odd(rng: random.Random, truths: list[list[int]]) -> str:
    entries = [odd_entry(rng, truths) for _ in range(rng.randint(1, 4))]
    entries += rng.choices(({"Position": [1, 2, 3, 4], "Confidence": 0.5}, "Position, Confidence"), k=1)
    return FRAMES[0].format(json.dumps(entries))


def main() -> None:
    rng = random.Random(19)
    inputs = [(frame.format(body), truths) for frame in FRAMES for body in BODIES for truths in TRUTHS[:2]]
    for _ in range(NUM_DRAWN):
        truths = rng.choice(TRUTHS)
        inputs.append((drawn(rng, truths), truths))
    for _ in range(NUM_ODD):
        truths = rng.choice(TRUTHS)
        inputs.append((odd(rng, truths), truths))
    cases = []
    for response, truths in inputs:
        try:
            cases.append([response, truths, *scored(response, truths)])
        except (TypeError, KeyError, ValueError, OverflowError):
            cases.append([response, truths, "crash"])
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
